// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Long transfers: done in pieces, returned in between, and begun anew.

use super::super::limits::BlockLimits;
use super::super::long_transfer::{PIECE_BYTES, UNDER_WAY_BYTES};
use super::super::no_space::OnFull;
use super::super::perform::{CacheMode, Engine};
use super::super::pool::QueueThreads;
use super::super::request::{Operation, Range};
use super::super::worker::{BlockWorker, Shared};
use super::*;
use crate::virtio::queue::WorkQueue;
use crate::virtio::worker::{Watch, Work};

const DISK_BYTES: u64 = 256 << 20;
/// Of one buffer of the driver; all of them are the same memory.
const BUFFER_BYTES: u32 = 512 << 10;
/// Buffers of a request that takes three pieces.
const BUFFERS: usize = 80;
const KICK_TOKEN: u64 = 0;
/// Of a driver that was told that there is no limit.
const WIDE: BlockLimits = BlockLimits {
    discard_ranges_max: 1,
    discard_sectors_max: u32::MAX,
    zero_ranges_max: 1,
    zero_sectors_max: u32::MAX,
};

/// The thread of a queue, whose steps the test takes.
struct Steps {
    driver: Driver,
    worker: BlockWorker,
    watch: Watch,
    image: NamedTempFile,
}

impl Steps {
    fn new(with_ring: bool) -> Self {
        let image = NamedTempFile::new().unwrap();
        image.as_file().set_len(DISK_BYTES).unwrap();
        let driver = Driver::new(1, 256);
        let worker = Self::worker(&driver, &image, with_ring, None);
        Self { driver, worker, watch: Watch::new().unwrap(), image }
    }

    /// A queue as its driver has just enabled it, or as it was saved.
    fn worker(
        driver: &Driver,
        image: &NamedTempFile,
        with_ring: bool,
        saved: Option<virtio_queue::QueueState>,
    ) -> BlockWorker {
        let disk = Arc::new(Disk::open(image.path(), false, false).unwrap());
        let mut activation = driver.fresh(0);
        let mut active = activation.queues.remove(0);
        if let Some(state) = saved {
            active.queue = state.try_into().unwrap();
        }
        let queue = WorkQueue::new(active, &activation.memory, &activation.interrupt, 0);
        let cache = CacheMode { flush_negotiated: true, writeback: Arc::new(true.into()) };
        let engine =
            Engine { disk, serial: [0; 20], cache, sparse: true, on_full: OnFull::default() };
        let shared = Shared {
            engine,
            limits: WIDE,
            threads: QueueThreads::default(),
            counters: Arc::default(),
            full: Arc::default(),
            log: Arc::default(),
        };
        BlockWorker::new(queue, shared, with_ring)
    }

    /// Makes a request with so many buffers available.
    fn ask(&mut self, kind: u32, sector: u64, buffers: usize) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.driver.write(HEADER, &header);
        self.driver.write(STATUS, &[0xee]);
        let is_read = kind == abi::VIRTIO_BLK_T_IN;
        let buffer = (BUFFER, BUFFER_BYTES, is_read);
        let mut all = vec![readable(HEADER, 16)];
        all.extend(std::iter::repeat_n(buffer, buffers));
        all.push(writable(STATUS, 1));
        self.driver.queues[0].add(&all);
    }

    /// Makes a request for a range of sectors available.
    fn ask_for_range(&mut self, kind: u32, sector: u64, sectors: u64) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        self.driver.write(HEADER, &header);
        self.driver.write(STATUS, &[0xee]);
        let sectors = u32::try_from(sectors).unwrap();
        let range = [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat();
        self.driver.write(BUFFER, &range);
        let all = [readable(HEADER, 16), readable(BUFFER, 16), writable(STATUS, 1)];
        self.driver.queues[0].add(&all);
    }

    fn has_zeroes_at(&self, offset: u64) -> bool {
        let mut there = [1; 512];
        self.image.as_file().read_exact_at(&mut there, offset).unwrap();
        there == [0; 512]
    }

    fn step(&mut self) {
        self.worker.ready(KICK_TOKEN, &mut self.watch).unwrap();
    }

    fn next_avail(&self) -> u16 {
        self.worker.queue_states()[0].1.next_avail
    }

    fn answer(&mut self) -> Option<(u8, u32)> {
        let (_, written) = self.driver.queues[0].take_used()?;
        Some((self.driver.read(STATUS, 1)[0], written))
    }
}

#[test]
fn a_long_transfer_is_done_in_pieces() {
    let bytes = BUFFERS as u64 * u64::from(BUFFER_BYTES);
    assert_eq!(bytes.div_ceil(PIECE_BYTES), 3);
    for with_ring in [false, Ring::is_available()] {
        let mut steps = Steps::new(with_ring);
        // What is read last stays in the buffer.
        let last = [0x77; 4096];
        steps.image.as_file().write_all_at(&last, bytes - u64::from(BUFFER_BYTES)).unwrap();
        steps.ask(abi::VIRTIO_BLK_T_IN, 0, BUFFERS);
        for _ in 0..3 {
            assert_eq!(steps.answer(), None);
            steps.step();
        }
        steps.step();
        assert_eq!(steps.answer(), Some((OK, u32::try_from(bytes).unwrap() + 1)));
        assert_eq!(steps.driver.read(BUFFER, 4096), last);

        steps.driver.write(BUFFER, &[0x5a; 4096]);
        steps.ask(abi::VIRTIO_BLK_T_OUT, 8, BUFFERS);
        while steps.driver.queues[0].used_index() < 2 {
            steps.step();
        }
        assert_eq!(steps.answer(), Some((OK, 1)));
        let mut there = [0; 4096];
        let at = 8 * 512 + bytes - u64::from(BUFFER_BYTES);
        steps.image.as_file().read_exact_at(&mut there, at).unwrap();
        assert_eq!(there, [0x5a; 4096]);
    }
}

#[test]
fn a_long_transfer_is_requeued_and_restarted() {
    for with_ring in [false, Ring::is_available()] {
        let mut steps = Steps::new(with_ring);
        steps.ask(abi::VIRTIO_BLK_T_IN, 0, BUFFERS);
        steps.worker.start(&mut steps.watch).unwrap();
        steps.step();
        assert_eq!((steps.next_avail(), steps.answer()), (1, None), "it is under way");
        // A pause, which is over at once.
        assert!(steps.worker.try_drain(&mut steps.watch).unwrap());
        assert_eq!((steps.next_avail(), steps.answer()), (0, None), "it is the driver's again");
        // In the same process, and in another one that knows no more than the state of the queue.
        let state = steps.worker.queue_states()[0].1;
        steps.worker.start(&mut steps.watch).unwrap();
        assert_eq!(steps.next_avail(), 1);
        steps.worker = Steps::worker(&steps.driver, &steps.image, with_ring, Some(state));
        steps.image.as_file().write_all_at(&[0x33; 4096], 79 * u64::from(BUFFER_BYTES)).unwrap();
        while steps.driver.queues[0].used_index() == 0 {
            steps.step();
        }
        assert_eq!(steps.answer().unwrap().0, OK);
        assert_eq!(steps.driver.read(BUFFER, 4096), [0x33; 4096]);
        // The end of the device waits for nothing either.
        steps.ask(abi::VIRTIO_BLK_T_OUT, 0, BUFFERS);
        steps.step();
        steps.worker.drain().unwrap();
        assert_eq!((steps.next_avail(), steps.answer()), (1, None));
    }
}

#[test]
fn what_is_under_way_is_bounded() {
    // Each as long as may be without being long.
    let buffers = usize::try_from(PIECE_BYTES / u64::from(BUFFER_BYTES)).unwrap();
    let at_once = u16::try_from(UNDER_WAY_BYTES / PIECE_BYTES).unwrap();
    for with_ring in [false, Ring::is_available()] {
        let mut steps = Steps::new(with_ring);
        for _ in 0..at_once + 2 {
            steps.ask(abi::VIRTIO_BLK_T_IN, 0, buffers);
        }
        steps.worker.start(&mut steps.watch).unwrap();
        assert_eq!(steps.next_avail(), at_once);
        // The rest is taken when those are done, and then the queue is idle.
        while steps.driver.queues[0].used_index() < at_once + 2 {
            steps.worker.drain().unwrap();
            steps.step();
        }
        assert_eq!(steps.next_avail(), at_once + 2);
    }
}

#[test]
fn a_long_transfer_waits_for_those_before_it() {
    if !Ring::is_available() {
        return test_skip::skip!("io_uring cannot be used here");
    }
    let mut steps = Steps::new(true);
    steps.ask(abi::VIRTIO_BLK_T_IN, 0, 1);
    steps.ask(abi::VIRTIO_BLK_T_IN, 0, BUFFERS);
    steps.ask(abi::VIRTIO_BLK_T_IN, 0, 1);
    steps.worker.start(&mut steps.watch).unwrap();
    assert_eq!(steps.next_avail(), 1);
    while steps.driver.queues[0].used_index() < 3 {
        steps.worker.drain().unwrap();
        // Up to the end of the long one, which a drain would return.
        for _ in 0..5 {
            steps.step();
        }
    }
    let mut heads = Vec::new();
    while let Some((head, _)) = steps.driver.queues[0].take_used() {
        heads.push(head);
    }
    assert!(heads.is_sorted(), "{heads:?}");
}

#[test]
fn a_long_range_is_done_in_pieces_that_a_pause_may_part() {
    for with_ring in [false, Ring::is_available()] {
        let mut steps = Steps::new(with_ring);
        let last = DISK_BYTES - 1024;
        for offset in [0, 512, 64 << 20, last, last + 512] {
            steps.image.as_file().write_all_at(&[0x44; 512], offset).unwrap();
        }
        let (zeroes, sectors) = (abi::VIRTIO_BLK_T_WRITE_ZEROES, DISK_BYTES / 512 - 2);
        steps.ask_for_range(zeroes, 1, sectors);
        steps.step();
        steps.step();
        assert!(steps.has_zeroes_at(512) && !steps.has_zeroes_at(last), "a part of it");
        assert!(steps.worker.try_drain(&mut steps.watch).unwrap());
        assert_eq!((steps.next_avail(), steps.answer()), (0, None), "it is the driver's again");
        steps.worker.start(&mut steps.watch).unwrap();
        let mut taken = 0;
        while steps.driver.queues[0].used_index() == 0 {
            steps.step();
            taken += 1;
        }
        // 256 MiB less two sectors in pieces of 64 MiB, one of which the start may have done.
        assert!((3..=5).contains(&taken), "{taken}");
        assert_eq!(steps.answer(), Some((OK, 1)));
        assert!(steps.has_zeroes_at(64 << 20) && steps.has_zeroes_at(last));
        assert!(!steps.has_zeroes_at(0) && !steps.has_zeroes_at(last + 512), "around it");
    }
}

#[test]
fn pieces_of_a_range_end_where_those_of_others_do() {
    const PIECE_BYTES: u64 = 64 << 20;
    let range = |offset, len_bytes| Range { offset, len_bytes, unmap: true };
    let all = vec![range(512, 2 * PIECE_BYTES), range(0, 512)];
    let mut pieces = Vec::new();
    for piece in Operation::WriteZeroes(all).pieces() {
        let Operation::WriteZeroes(ranges) = piece else { panic!("not as a whole") };
        pieces.extend(ranges);
    }
    let expected = [
        range(512, PIECE_BYTES - 512),
        range(PIECE_BYTES, PIECE_BYTES),
        range(2 * PIECE_BYTES, 512),
        range(0, 512),
    ];
    assert_eq!(pieces, expected);
    let short = Operation::Discard(vec![range(512, PIECE_BYTES), range(0, 512)]);
    assert!(
        matches!(&short.pieces().collect::<Vec<_>>()[..], [Operation::Discard(two)] if two.len() == 2)
    );
}

#[test]
fn a_long_range_beyond_the_disk_is_refused() {
    let mut steps = Steps::new(false);
    steps.ask_for_range(abi::VIRTIO_BLK_T_DISCARD, 1, DISK_BYTES / 512);
    steps.step();
    assert_eq!(steps.answer(), Some((IO_ERROR, 1)));
    steps.ask_for_range(abi::VIRTIO_BLK_T_DISCARD, 1, DISK_BYTES / 512 - 1);
    while steps.driver.queues[0].used_index() < 2 {
        steps.step();
    }
    assert_eq!(steps.answer(), Some((OK, 1)));
}
