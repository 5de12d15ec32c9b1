// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A block device, seen from its driver and from its image.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod busy_driver;
mod formats;
mod limits;
mod long_transfer;
mod no_space;
mod resizing;
pub(super) mod specification;
mod stable_storage;

use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use proptest::prelude::*;
use tempfile::NamedTempFile;
use virtio_bindings::virtio_blk as abi;

pub(super) use self::no_space::Refusal;
use super::image::Disk;
use super::ring::Ring;
use super::{Block, BlockConfig, DiskError, LockGranularity};
use crate::virtio::fuzz;
use crate::virtio::test_driver::{BORDER, DATA, Driver, readable, writable};
use crate::virtio::{Counters, StateError, VirtioDevice};

const SECTORS: u64 = 2048;
const HEADER: u64 = DATA;
const STATUS: u64 = DATA + 0x1000;
const BUFFER: u64 = DATA + 0x2000;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

/// An image whose sectors are filled with their number.
fn image() -> NamedTempFile {
    let mut image = NamedTempFile::new().unwrap();
    for sector in 0..SECTORS {
        image.write_all(&pattern(sector)).unwrap();
    }
    image
}

fn pattern(sector: u64) -> [u8; 512] {
    let mut bytes = [u8::try_from(sector % 251).unwrap(); 512];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes
}

fn config(image: &NamedTempFile) -> BlockConfig {
    BlockConfig { id: "disk0".to_owned(), path: image.path().to_owned(), ..BlockConfig::default() }
}

struct Fixture {
    driver: Driver,
    device: Block,
    image: NamedTempFile,
}

impl Fixture {
    fn new(change: impl FnOnce(&mut BlockConfig)) -> Self {
        let image = image();
        let mut config = config(&image);
        change(&mut config);
        Self::with(Block::new(config).unwrap(), image)
    }

    fn with(mut device: Block, image: NamedTempFile) -> Self {
        let count = u16::try_from(device.queue_sizes_max().len()).unwrap();
        let driver = Driver::new(count, 64);
        let features = device.features();
        driver.activate(&mut device, features);
        Self { driver, device, image }
    }

    fn header(&self, kind: u32, sector: u64) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.driver.write(HEADER, &header);
        self.driver.write(STATUS, &[0xee]);
    }

    /// One request on queue 0; gives its status and the used length.
    fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> (u8, u32) {
        self.header(kind, sector);
        let mut buffers = vec![readable(HEADER, 16)];
        buffers.extend(data);
        buffers.push(writable(STATUS, 1));
        self.driver.queues[0].add(&buffers);
        self.driver.queues[0].kick();
        let (_, written) = self.driver.wait_used(0);
        (self.driver.read(STATUS, 1)[0], written)
    }

    fn ranges(&mut self, kind: u32, ranges: &[(u64, u32, u32)]) -> u8 {
        let mut bytes = Vec::new();
        for (sector, sectors, flags) in ranges {
            bytes.extend(sector.to_le_bytes());
            bytes.extend(sectors.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
        }
        self.driver.write(BUFFER, &bytes);
        let len_bytes = u32::try_from(bytes.len()).unwrap();
        self.request(kind, 0, &[readable(BUFFER, len_bytes)]).0
    }

    fn on_disk(&self, sector: u64, sectors: usize) -> Vec<u8> {
        let mut bytes = vec![0; sectors * 512];
        self.image.as_file().read_exact_at(&mut bytes, sector * 512).unwrap();
        bytes
    }
}

fn with_both_engines(test: impl Fn(bool)) {
    test(true);
    if Ring::is_available() {
        test(false);
    } else {
        test_skip::skip!("io_uring cannot be used here");
    }
}

#[test]
fn reads_and_writes_reach_the_sectors_that_they_name() {
    with_both_engines(|synchronous| {
        let mut fixture = Fixture::new(|config| config.disable_io_uring = synchronous);
        let read = [writable(BUFFER, 512), writable(BUFFER + 0x1000, 1024)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 7, &read), (OK, 1537));
        assert_eq!(fixture.driver.read(BUFFER, 512), pattern(7));
        assert_eq!(fixture.driver.read(BUFFER + 0x1000, 512), pattern(8));
        assert_eq!(fixture.driver.read(BUFFER + 0x1200, 512), pattern(9));

        fixture.driver.write(BUFFER, &[0x5a; 1024]);
        let write = [readable(BUFFER, 100), readable(BUFFER + 100, 924)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, SECTORS - 2, &write), (OK, 1));
        assert_eq!(fixture.on_disk(SECTORS - 2, 2), [0x5a; 1024]);
        assert_eq!(fixture.on_disk(SECTORS - 3, 1), pattern(SECTORS - 3));

        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
        let counters = fixture.device.counters().counters();
        assert_eq!(counters["read_bytes"], 1536);
        assert_eq!(counters["read_ops"], 1);
        assert_eq!(counters["write_bytes"], 1024);
        assert_eq!(counters["write_ops"], 1);
    });
}

#[test]
fn a_buffer_may_lie_across_two_memory_regions() {
    with_both_engines(|synchronous| {
        let mut fixture = Fixture::new(|config| config.disable_io_uring = synchronous);
        let read = [writable(BORDER - 100, 512)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 3, &read), (OK, 513));
        assert_eq!(fixture.driver.read(BORDER - 100, 512), pattern(3));
    });
}

#[test]
fn what_the_host_writes_to_guest_memory_is_marked_dirty() {
    with_both_engines(|synchronous| {
        let mut fixture = Fixture::new(|config| config.disable_io_uring = synchronous);
        let untouched = BUFFER + 0x1000;
        let target = BORDER - 512;
        fixture.driver.write(STATUS, &[0]);
        fixture.driver.track_writes();

        let read = [writable(target, 1024)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 0, &read).0, OK);
        assert!(fixture.driver.was_written(target));
        assert!(fixture.driver.was_written(target + 512), "the part in the second region");
        assert!(!fixture.driver.was_written(untouched));

        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 0, &[readable(untouched, 512)]).0, OK);
        assert!(!fixture.driver.was_written(untouched), "only read");
        assert!(fixture.driver.was_written(STATUS));
        assert!(fixture.driver.was_written(fixture.driver.queues[0].used_ring()));
    });
}

#[test]
fn a_bounced_read_is_marked_dirty() {
    let image = image();
    let disk = Disk::open(image.path(), false, false).unwrap().with_alignment(4096, 4096);
    let device = Block::with_disk(config(&image), Arc::new(disk));
    let mut fixture = Fixture::with(device, image);
    fixture.driver.track_writes();
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 1, &[writable(BUFFER + 8, 512)]).0, OK);
    assert!(fixture.driver.was_written(BUFFER));
    assert_eq!(fixture.driver.read(BUFFER + 8, 512), pattern(1));
}

#[test]
fn writes_smaller_than_the_hosts_blocks_keep_what_is_around_them() {
    let image = image();
    let disk = Disk::open(image.path(), false, false).unwrap().with_alignment(512, 4096);
    let device = Block::with_disk(config(&image), Arc::new(disk));
    let mut fixture = Fixture::with(device, image);
    fixture.driver.write(BUFFER, &[0x33; 1024]);
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 7, &[readable(BUFFER, 1024)]).0, OK);
    assert_eq!(fixture.on_disk(7, 2), [0x33; 1024]);
    assert_eq!(fixture.on_disk(6, 1), pattern(6));
    assert_eq!(fixture.on_disk(9, 1), pattern(9));
    assert_eq!(fixture.image.as_file().metadata().unwrap().len(), SECTORS * 512);
}

#[test]
fn direct_io_takes_buffers_at_any_address() {
    with_both_engines(|synchronous| {
        let image = image();
        image.as_file().sync_all().unwrap();
        let change = BlockConfig { direct: true, disable_io_uring: synchronous, ..config(&image) };
        let device = match Block::new(change) {
            Ok(device) => device,
            Err(error) => {
                test_skip::skip!("no direct I/O in the directory for temporary files: {error}");
                return;
            }
        };
        let mut fixture = Fixture::with(device, image);
        for target in [BUFFER, BUFFER + 1, BUFFER + 512] {
            let read = [writable(target, 4096)];
            assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 8, &read).0, OK);
            assert_eq!(fixture.driver.read(target, 512), pattern(8));
        }
        fixture.driver.write(BUFFER + 3, &[0x77; 4096]);
        let write = [readable(BUFFER + 3, 4096)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 16, &write).0, OK);
        assert_eq!(fixture.on_disk(16, 8), [0x77; 4096]);
    });
}

#[test]
fn requests_beyond_the_disk_fail_and_change_nothing() {
    with_both_engines(|synchronous| {
        let mut fixture = Fixture::new(|config| config.disable_io_uring = synchronous);
        let buffer = [readable(BUFFER, 1024)];
        for sector in [SECTORS - 1, SECTORS, u64::MAX, u64::MAX / 512] {
            let status = fixture.request(abi::VIRTIO_BLK_T_OUT, sector, &buffer).0;
            assert_eq!(status, IO_ERROR, "sector {sector}");
        }
        assert_eq!(fixture.on_disk(SECTORS - 1, 1), pattern(SECTORS - 1));
        assert_eq!(fixture.image.as_file().metadata().unwrap().len(), SECTORS * 512);
        let odd = [writable(BUFFER, 511)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 0, &odd), (IO_ERROR, 0));
        let outside = [writable(1 << 40, 512)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 0, &outside), (IO_ERROR, 0));
        assert_eq!(fixture.device.counters().counters()["errors"], 6);
    });
}

#[test]
fn a_read_only_disk_takes_no_change() {
    let mut fixture = Fixture::new(|config| config.readonly = true);
    assert_ne!(fixture.device.features() & 1 << abi::VIRTIO_BLK_F_RO, 0);
    let write = [readable(BUFFER, 512)];
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 0, &write).0, IO_ERROR);
    assert_eq!(fixture.ranges(abi::VIRTIO_BLK_T_DISCARD, &[(0, 8, 0)]), IO_ERROR);
    assert_eq!(fixture.ranges(abi::VIRTIO_BLK_T_WRITE_ZEROES, &[(0, 8, 0)]), IO_ERROR);
    assert_eq!(fixture.on_disk(0, 1), pattern(0));
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 5, &[writable(BUFFER, 512)]).0, OK);
}

#[test]
fn discard_and_write_zeroes_clear_their_ranges_only() {
    let mut fixture = Fixture::new(|_| ());
    let zeroes = abi::VIRTIO_BLK_T_WRITE_ZEROES;
    assert_eq!(fixture.ranges(zeroes, &[(1, 2, 0)]), OK);
    assert_eq!(fixture.ranges(zeroes, &[(100, 1, 1)]), OK);
    assert_eq!(fixture.on_disk(1, 2), [0; 1024]);
    assert_eq!(fixture.on_disk(100, 1), [0; 512]);
    assert_eq!(fixture.on_disk(0, 1), pattern(0));
    assert_eq!(fixture.on_disk(3, 1), pattern(3));
    assert_eq!(fixture.on_disk(101, 1), pattern(101));

    let status = fixture.ranges(abi::VIRTIO_BLK_T_DISCARD, &[(512, 512, 0)]);
    assert_eq!(status, OK);
    assert_eq!(fixture.on_disk(512, 512), vec![0; 512 * 512]);
    assert_eq!(fixture.on_disk(1024, 1), pattern(1024));
    let mut file = fixture.image.reopen().unwrap();
    let data = file.seek(SeekFrom::Start(512 * 512)).unwrap();
    // SAFETY: only numbers are passed; the descriptor is open.
    let hole = unsafe {
        use std::os::fd::AsRawFd;
        libc::lseek(file.as_raw_fd(), libc::off_t::try_from(data).unwrap(), libc::SEEK_HOLE)
    };
    assert_eq!(u64::try_from(hole).unwrap(), data, "the space was freed");
}

#[test]
fn bad_ranges_are_refused() {
    let mut fixture = Fixture::new(|_| ());
    let (discard, zeroes) = (abi::VIRTIO_BLK_T_DISCARD, abi::VIRTIO_BLK_T_WRITE_ZEROES);
    assert_eq!(fixture.ranges(discard, &[(0, 1, 1)]), UNSUPPORTED, "unmap is for zeroes only");
    assert_eq!(fixture.ranges(zeroes, &[(0, 1, 2)]), UNSUPPORTED, "reserved flag");
    assert_eq!(fixture.ranges(zeroes, &[(SECTORS, 1, 0)]), IO_ERROR);
    assert_eq!(fixture.ranges(zeroes, &[(u64::MAX, 1, 0)]), IO_ERROR);
    assert_eq!(fixture.ranges(zeroes, &[(0, u32::MAX, 0)]), IO_ERROR);
    assert_eq!(fixture.ranges(zeroes, &[(0, 1, 0); 2]), IO_ERROR, "too many");
    assert_eq!(fixture.ranges(discard, &[(0, 1, 0); 33]), IO_ERROR, "too many");
    assert_eq!(fixture.ranges(zeroes, &[]), IO_ERROR, "none");
    assert_eq!(fixture.on_disk(0, 1), pattern(0));
}

#[test]
fn the_serial_string_is_the_configured_one_or_the_id() {
    let mut fixture = Fixture::new(|config| config.serial = Some("S".repeat(30)));
    let room = [writable(BUFFER, 20)];
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_GET_ID, 0, &room), (OK, 21));
    assert_eq!(fixture.driver.read(BUFFER, 20), [b'S'; 20]);
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_GET_ID, 0, &[writable(BUFFER, 19)]).0, IO_ERROR);

    let mut fixture = Fixture::new(|_| ());
    fixture.request(abi::VIRTIO_BLK_T_GET_ID, 0, &room);
    assert_eq!(fixture.driver.read(BUFFER, 6), b"disk0\0");
}

#[test]
fn unknown_requests_are_answered_as_unsupported() {
    let mut fixture = Fixture::new(|_| ());
    for kind in [2, 14, 99, u32::MAX] {
        assert_eq!(fixture.request(kind, 0, &[]), (UNSUPPORTED, 1));
    }
}

#[test]
fn indirect_chains_are_served() {
    let mut fixture = Fixture::new(|_| ());
    fixture.header(abi::VIRTIO_BLK_T_IN, 11);
    let buffers = [readable(HEADER, 16), writable(BUFFER, 512), writable(STATUS, 1)];
    fixture.driver.queues[0].add_indirect(DATA + 0x8000, &buffers);
    fixture.driver.queues[0].kick();
    fixture.driver.wait_used(0);
    assert_eq!(fixture.driver.read(STATUS, 1), [OK]);
    assert_eq!(fixture.driver.read(BUFFER, 512), pattern(11));
}

#[test]
fn each_queue_is_served_by_itself() {
    let mut fixture = Fixture::new(|config| config.num_queues = 3);
    assert_ne!(fixture.device.features() & 1 << abi::VIRTIO_BLK_F_MQ, 0);
    for queue in [2, 0, 1] {
        let sector = u64::try_from(queue).unwrap() + 20;
        fixture.header(abi::VIRTIO_BLK_T_IN, sector);
        let buffers = [readable(HEADER, 16), writable(BUFFER, 512), writable(STATUS, 1)];
        fixture.driver.queues[queue].add(&buffers);
        fixture.driver.queues[queue].kick();
        fixture.driver.wait_used(queue);
        assert_eq!(fixture.driver.read(BUFFER, 512), pattern(sector));
    }
}

#[test]
fn a_chain_without_room_for_an_answer_needs_a_reset() {
    let mut fixture = Fixture::new(|_| ());
    fixture.header(abi::VIRTIO_BLK_T_FLUSH, 0);
    fixture.driver.queues[0].add(&[readable(HEADER, 16)]);
    fixture.driver.queues[0].kick();
    fixture.driver.interrupt.wait_broken();
}

#[test]
fn a_chain_that_loops_needs_a_reset() {
    let mut fixture = Fixture::new(|_| ());
    let next = virtio_bindings::virtio_ring::VRING_DESC_F_NEXT;
    fixture.driver.queues[0].put_descriptor(0, readable(HEADER, 16), next, 1);
    fixture.driver.queues[0].put_descriptor(1, readable(HEADER, 16), next, 0);
    fixture.driver.queues[0].publish(0);
    fixture.driver.queues[0].kick();
    fixture.driver.interrupt.wait_broken();
    assert_eq!(fixture.driver.queues[0].take_used(), None);
}

#[test]
fn every_request_is_done_once_across_a_handover_to_another_device() {
    with_both_engines(|synchronous| {
        const COUNT: usize = 20;
        let mut fixture = Fixture::new(|config| config.disable_io_uring = synchronous);
        let features = fixture.device.features();
        let mut added = 0;
        let mut done = Vec::new();
        for round in 0..10 {
            for _ in 0..COUNT {
                fixture.header(abi::VIRTIO_BLK_T_IN, 1);
                let buffers = [readable(HEADER, 16), writable(BUFFER, 512), writable(STATUS, 1)];
                fixture.driver.queues[0].add(&buffers);
                added += 1;
            }
            fixture.driver.queues[0].kick();
            let states = fixture.device.pause();
            let (_, state) = states[0];
            assert_eq!(state.next_avail, state.next_used, "nothing is in flight, round {round}");
            assert_eq!(state.next_used, fixture.driver.queues[0].used_index());
            let saved = fixture.device.save();
            fixture.device.reset();

            let mut config = config(&fixture.image);
            config.disable_io_uring = synchronous;
            let mut next = Block::new(config).unwrap();
            next.pause();
            next.restore(&saved).unwrap();
            fixture.driver.activate_restored(&mut next, features, &states);
            next.resume();
            fixture.device = next;
            while done.len() < added {
                done.push(fixture.driver.wait_used(0).0);
            }
        }
        assert_eq!(fixture.driver.queues[0].take_used(), None);
        assert_eq!(fixture.device.counters().counters().len(), 13);
    });
}

#[test]
fn a_paused_device_leaves_the_queue_alone() {
    let mut fixture = Fixture::new(|_| ());
    fixture.device.pause();
    fixture.header(abi::VIRTIO_BLK_T_FLUSH, 0);
    fixture.driver.queues[0].add(&[readable(HEADER, 16), writable(STATUS, 1)]);
    fixture.driver.queues[0].kick();
    assert_eq!(fixture.device.pause()[0].1.next_avail, 0);
    assert_eq!(fixture.driver.queues[0].used_index(), 0);
    fixture.device.resume();
    fixture.driver.wait_used(0);
}

#[test]
fn configuration_describes_the_disk() {
    let mut fixture = Fixture::new(|config| {
        config.num_queues = 4;
        config.queue_size = 64;
    });
    let mut bytes = [0; 60];
    fixture.device.read_config(0, &mut bytes);
    let number = |offset: usize| u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap());
    assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), SECTORS);
    assert_eq!(number(12), 62, "segments leave room for header and status");
    assert_eq!(number(20), 512);
    assert_eq!(bytes[34..36], [4, 0]);
    assert_eq!(number(40), 32);

    let writeback = |device: &Block| {
        let mut byte = [0xff];
        device.read_config(32, &mut byte);
        byte[0]
    };
    assert_eq!(writeback(&fixture.device), 1);
    fixture.device.write_config(32, &[0]);
    assert_eq!(writeback(&fixture.device), 0);
    let saved = fixture.device.save();
    fixture.device.write_config(32, &[7]);
    fixture.device.write_config(0, &[7]);
    assert_eq!(writeback(&fixture.device), 0);
    fixture.device.reset();
    assert_eq!(writeback(&fixture.device), 1);
    fixture.device.restore(&saved).unwrap();
    assert_eq!(writeback(&fixture.device), 0);
}

#[test]
fn a_state_for_another_disk_is_refused() {
    let (small, large) = (NamedTempFile::new().unwrap(), image());
    small.as_file().set_len(4096).unwrap();
    let small = Block::new(config(&small)).unwrap();
    let mut large_device = Block::new(config(&large)).unwrap();
    let error = large_device.restore(&small.save()).unwrap_err();
    assert!(matches!(error, StateError::Invalid { .. }), "{error}");
    let read_only = Block::new(BlockConfig { readonly: true, ..config(&large) }).unwrap();
    assert!(large_device.restore(&read_only.save()).is_err());
}

#[test]
fn two_writers_never_share_a_disk() {
    for granularity in [LockGranularity::ByteRange, LockGranularity::Full] {
        let image = image();
        let open = |readonly| {
            let lock_granularity = granularity;
            Block::new(BlockConfig { readonly, lock_granularity, ..config(&image) }).unwrap()
        };
        let (first, second) = (open(false), open(false));
        first.lock().lock().unwrap();
        first.lock().lock().unwrap();
        let error = second.lock().lock().unwrap_err();
        assert!(matches!(error, DiskError::InUse { .. }));
        assert!(error.to_string().contains("in use by another VM (lock held)"), "{error}");
        assert!(open(true).lock().lock().is_err(), "a reader alongside a writer");

        first.lock().unlock().unwrap();
        second.lock().lock().unwrap();
        assert!(first.lock().lock().is_err());
        drop(second);
        let (third, fourth) = (open(true), open(true));
        third.lock().lock().unwrap();
        fourth.lock().lock().unwrap();
        assert!(first.lock().lock().is_err(), "a writer alongside readers");
    }
}

#[test]
fn unusable_images_are_refused_by_name() {
    let missing = BlockConfig { path: "/nonexistent/disk.raw".into(), ..BlockConfig::default() };
    let error = Block::new(missing).err().unwrap();
    assert!(error.to_string().contains("/nonexistent/disk.raw"), "{error}");
    let device = BlockConfig { path: "/dev/null".into(), ..BlockConfig::default() };
    assert!(matches!(Block::new(device), Err(DiskError::Kind { .. })));
    let image = image();
    let odd = BlockConfig { queue_size: 100, ..config(&image) };
    assert!(matches!(Block::new(odd), Err(DiskError::Queues { .. })));
    let none = BlockConfig { num_queues: 0, ..config(&image) };
    assert!(matches!(Block::new(none), Err(DiskError::Queues { .. })));
}

#[test]
fn a_partial_block_at_the_end_is_not_visible() {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(512 * 3 + 100).unwrap();
    let mut capacity = [0; 8];
    Block::new(config(&image)).unwrap().read_config(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), 3);
}

/// Guest memory with a chain in it that is nearly right.
fn guest_memory() -> impl Strategy<Value = Vec<u8>> {
    let descriptor = (0_u64..0x1_1000, 0_u32..0x3000, 0_u16..8, 0_u16..18);
    let descriptors = proptest::collection::vec(descriptor, 16);
    let heads = proptest::collection::vec(0_u16..18, 16);
    let header = (0_u32..16, 0_u64..200);
    (descriptors, heads, 0_u16..20, header, any::<u8>()).prop_map(
        |(descriptors, heads, available, (kind, sector), choice)| {
            let mut memory = vec![0; usize::try_from(fuzz::MEMORY_BYTES).unwrap()];
            for at in (0x3000..0x8000).step_by(16) {
                memory[at..at + 4].copy_from_slice(&kind.to_le_bytes());
                memory[at + 8..at + 16].copy_from_slice(&sector.to_le_bytes());
            }
            for queue in 0..5 {
                let base = queue * usize::try_from(fuzz::QUEUE_STRIDE).unwrap();
                for (index, (gpa, len_bytes, flags, next)) in descriptors.iter().enumerate() {
                    let at = base + index * 16;
                    memory[at..at + 8].copy_from_slice(&gpa.to_le_bytes());
                    memory[at + 8..at + 12].copy_from_slice(&len_bytes.to_le_bytes());
                    memory[at + 12..at + 14].copy_from_slice(&flags.to_le_bytes());
                    memory[at + 14..at + 16].copy_from_slice(&next.to_le_bytes());
                }
                let ring = base + usize::try_from(fuzz::AVAILABLE_OFFSET).unwrap();
                memory[ring + 2..ring + 4].copy_from_slice(&available.to_le_bytes());
                for (index, head) in heads.iter().enumerate() {
                    let at = ring + 4 + index * 2;
                    memory[at..at + 2].copy_from_slice(&head.to_le_bytes());
                }
            }
            let last = memory.len() - 1;
            memory[last] = choice;
            memory
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Each entry asserts that its device could be set up and ran, and returns.
    #[test]
    fn no_ring_content_upsets_any_device(memory in guest_memory()) {
        fuzz::fuzz_balloon(&memory);
        fuzz::fuzz_block(&memory);
        fuzz::fuzz_console(&memory);
        fuzz::fuzz_rng(&memory);
        fuzz::fuzz_net(&memory);
        fuzz::fuzz_net_control(&memory);
    }

    #[test]
    fn rubbish_upsets_no_device(
        memory in proptest::collection::vec(any::<u8>(), 0..0x2000),
    ) {
        fuzz::fuzz_balloon(&memory);
        fuzz::fuzz_block(&memory);
        fuzz::fuzz_console(&memory);
        fuzz::fuzz_rng(&memory);
        fuzz::fuzz_net(&memory);
        fuzz::fuzz_net_control(&memory);
        fuzz::fuzz_state(&memory);
    }
}
