// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A host that has no room: what the driver is told, and what is kept for it.

use std::fs::File;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use super::super::no_space::{FullDisk, OnFull};
use super::*;

/// A wait that takes this long has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a host refuses that has no room: to change an image.
#[derive(Default)]
pub(in super::super) struct Refusal {
    /// Number of the error; 0 if there is room.
    number: AtomicI32,
    /// Number of changes that still succeed.
    left: AtomicI32,
    full: OnceLock<File>,
}

impl Refusal {
    /// From now on changes fail with this error, or with none (0).
    pub(in super::super) fn set(&self, number: i32) {
        self.full.get_or_init(|| File::options().write(true).open("/dev/full").unwrap());
        self.left.store(0, Ordering::Release);
        self.number.store(number, Ordering::Release);
    }

    /// The same, after this many changes that succeed.
    pub(in super::super) fn set_after(&self, changes: i32, number: i32) {
        self.set(number);
        self.left.store(changes, Ordering::Release);
    }

    /// The answer to a change.
    pub(in super::super) fn check(&self) -> io::Result<()> {
        match self.number.load(Ordering::Acquire) {
            0 => Ok(()),
            _ if self.left.fetch_sub(1, Ordering::AcqRel) > 0 => Ok(()),
            number => Err(io::Error::from_raw_os_error(number)),
        }
    }

    /// Where writes of the kernel go that are to fail; all of them with ENOSPC.
    pub(in super::super) fn file(&self) -> Option<&File> {
        self.check().err().and_then(|_| self.full.get())
    }
}

/// A device on a disk that may be full, with what it tells its owner.
struct NoSpace {
    fixture: Fixture,
    disk: FullDisk,
    told: Receiver<()>,
}

impl NoSpace {
    fn new(change: impl FnOnce(&mut BlockConfig)) -> Self {
        Self::with_features(change, u64::MAX)
    }

    fn with_features(change: impl FnOnce(&mut BlockConfig), features: u64) -> Self {
        let image = image();
        let mut config = BlockConfig { on_full: OnFull::Pause, ..config(&image) };
        change(&mut config);
        let mut device = Block::new(config).unwrap();
        let disk = device.full_disk().unwrap();
        let (tell, told) = channel();
        disk.on_full(move || tell.send(()).unwrap());
        let driver = Driver::new(u16::try_from(device.queue_sizes_max().len()).unwrap(), 64);
        let features = device.features() & features;
        driver.activate(&mut device, features);
        Self { fixture: Fixture { driver, device, image }, disk, told }
    }

    /// The host refuses to change the image with this error, or does not any more (0).
    fn refuse(&self, number: i32) {
        self.fixture.device.lock().disk.refusal.set(number);
    }

    /// Makes request `slot` of a queue available, and waits for nothing.
    fn submit(&mut self, queue: usize, slot: u64, kind: u32, sector: u64, data: &[u8]) {
        let at = DATA + 0x1_0000 + slot * 0x1000;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        let driver = &mut self.fixture.driver;
        driver.write(at, &header);
        driver.write(at + 0x10, &[0xee]);
        driver.write(at + 0x200, data);
        let mut buffers = vec![readable(at, 16)];
        if !data.is_empty() {
            buffers.push(readable(at + 0x200, u32::try_from(data.len()).unwrap()));
        }
        buffers.push(writable(at + 0x10, 1));
        driver.queues[queue].add(&buffers);
        driver.queues[queue].kick();
    }

    fn write(&mut self, queue: usize, slot: u64, sector: u64) {
        self.submit(queue, slot, abi::VIRTIO_BLK_T_OUT, sector, &content(slot));
    }

    fn status(&self, slot: u64) -> u8 {
        self.fixture.driver.read(DATA + 0x1_0000 + slot * 0x1000 + 0x10, 1)[0]
    }

    #[track_caller]
    fn wait_told(&self) {
        self.told.recv_timeout(PATIENCE).expect("the owner is told");
    }

    /// Waits until so many requests are kept.
    #[track_caller]
    fn wait_kept(&self, count: usize) {
        let until = Instant::now() + PATIENCE;
        while self.disk.kept() != count {
            assert!(Instant::now() < until, "{} are kept, not {count}", self.disk.kept());
            std::thread::yield_now();
        }
    }

    /// Holds the device still; gives how many requests of a queue it has answered.
    fn pause(&mut self, queue: usize) -> u16 {
        self.fixture.device.pause();
        self.fixture.driver.queues[queue].used_index()
    }
}

/// What the write of a slot writes.
fn content(slot: u64) -> [u8; 512] {
    [0x40 + u8::try_from(slot).unwrap(); 512]
}

#[test]
fn without_the_option_the_driver_gets_an_error() {
    with_both_engines(|synchronous| {
        let mut fixture = Fixture::new(|config| config.disable_io_uring = synchronous);
        assert!(fixture.device.full_disk().is_none());
        let data = [readable(BUFFER, 512)];
        for number in [libc::ENOSPC, libc::EDQUOT] {
            fixture.device.lock().disk.refusal.set(number);
            assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 3, &data), (IO_ERROR, 1));
            assert_eq!(fixture.ranges(abi::VIRTIO_BLK_T_DISCARD, &[(8, 8, 0)]), IO_ERROR);
            assert_eq!(fixture.ranges(abi::VIRTIO_BLK_T_WRITE_ZEROES, &[(8, 8, 0)]), IO_ERROR);
        }
        assert_eq!(fixture.on_disk(3, 1), pattern(3));
    });
}

#[test]
fn a_write_is_kept_until_there_is_room_and_answered_once() {
    with_both_engines(|synchronous| {
        let mut full = NoSpace::new(|config| config.disable_io_uring = synchronous);
        full.refuse(libc::ENOSPC);
        full.write(0, 0, 5);
        full.wait_told();
        // Behind it nothing is begun: not even what needs no room.
        full.submit(0, 1, abi::VIRTIO_BLK_T_FLUSH, 0, &[]);
        for _ in 0..2 {
            assert_eq!(full.pause(0), 0, "nothing is answered");
            assert_eq!((full.status(0), full.status(1), full.disk.kept()), (0xee, 0xee, 1));
            assert_eq!(full.disk.try_again().unwrap_err().raw_os_error(), Some(libc::ENOSPC));
            // It is begun again whenever the device continues, and its owner hears of it again.
            full.fixture.device.resume();
            full.wait_told();
        }
        assert_eq!(full.pause(0), 0);
        full.refuse(0);
        full.disk.try_again().unwrap();
        assert_eq!(full.fixture.on_disk(5, 1), content(0));
        assert_eq!((full.status(0), full.disk.kept()), (0xee, 1), "the device answers, no other");
        full.fixture.device.resume();
        for slot in [0, 1] {
            full.fixture.driver.wait_used(0);
            assert_eq!(full.status(slot), OK);
        }
        assert_eq!((full.pause(0), full.disk.kept()), (2, 0));
        full.disk.try_again().unwrap();
        assert!(full.told.try_recv().is_err());
        assert_eq!(full.fixture.on_disk(6, 1), pattern(6));
    });
}

#[test]
fn all_that_is_under_way_is_kept_and_each_is_answered_once() {
    with_both_engines(|synchronous| {
        let mut full = NoSpace::new(|config| {
            config.disable_io_uring = synchronous;
            config.num_queues = 2;
        });
        full.fixture.device.pause();
        full.refuse(libc::ENOSPC);
        for slot in 0..8 {
            full.write(usize::from(slot >= 4), slot, 16 + slot);
        }
        full.fixture.device.resume();
        // One of each queue at a time where calls wait; all of them at once where they do not.
        full.wait_kept(if synchronous { 2 } else { 8 });
        assert_eq!((full.pause(0), full.pause(1)), (0, 0));
        full.refuse(0);
        full.disk.try_again().unwrap();
        full.fixture.device.resume();
        for queue in [0, 0, 0, 0, 1, 1, 1, 1] {
            full.fixture.driver.wait_used(queue);
        }
        assert_eq!((full.pause(0), full.pause(1), full.disk.kept()), (4, 4, 0));
        for slot in 0..8 {
            assert_eq!(full.status(slot), OK);
            assert_eq!(full.fixture.on_disk(16 + slot, 1), content(slot));
        }
    });
}

#[test]
fn what_frees_or_clears_space_is_kept_too() {
    for number in [libc::ENOSPC, libc::EDQUOT] {
        for kind in [abi::VIRTIO_BLK_T_DISCARD, abi::VIRTIO_BLK_T_WRITE_ZEROES] {
            let mut full = NoSpace::new(|_| ());
            full.refuse(number);
            let mut range = [0; 16];
            range[0] = 64;
            range[8] = 8;
            full.submit(0, 0, kind, 0, &range);
            full.wait_told();
            assert_eq!(full.pause(0), 0);
            assert_eq!(full.disk.try_again().unwrap_err().raw_os_error(), Some(number));
            full.refuse(0);
            full.fixture.device.resume();
            full.fixture.driver.wait_used(0);
            assert_eq!(full.status(0), OK);
            assert_eq!(full.fixture.on_disk(64, 8), [0; 8 * 512]);
        }
    }
}

#[test]
fn a_pause_that_is_taken_back_begins_it_again() {
    let mut full = NoSpace::new(|_| ());
    full.refuse(libc::ENOSPC);
    full.write(0, 0, 5);
    full.wait_told();
    let still = full.fixture.device.begin_pause();
    assert!(still.wait_until(Instant::now() + PATIENCE), "what is kept holds no pause up");
    still.withdraw();
    full.wait_told();
    let still = full.fixture.device.begin_pause();
    assert!(still.wait_until(Instant::now() + PATIENCE));
    full.refuse(0);
    still.withdraw();
    full.fixture.driver.wait_used(0);
    assert_eq!((full.status(0), full.disk.kept()), (OK, 0));
}

#[test]
fn a_reset_drops_what_is_kept() {
    with_both_engines(|synchronous| {
        let mut full = NoSpace::new(|config| config.disable_io_uring = synchronous);
        full.refuse(libc::ENOSPC);
        full.write(0, 0, 5);
        full.wait_told();
        full.fixture.device.reset();
        full.refuse(0);
        assert_eq!(full.disk.kept(), 0);
        full.disk.try_again().unwrap();
        assert_eq!((full.status(0), full.fixture.on_disk(5, 1)), (0xee, pattern(5).to_vec()));

        // The next driver finds a device that works, and is kept waiting as the one before.
        full.fixture.driver = Driver::new(1, 64);
        full.fixture.driver.activate_all(&mut full.fixture.device);
        full.write(0, 0, 7);
        full.fixture.driver.wait_used(0);
        assert_eq!(full.fixture.on_disk(7, 1), content(0));
        full.refuse(libc::ENOSPC);
        full.write(0, 1, 8);
        full.wait_told();
        assert_eq!(full.disk.kept(), 1);
    });
}

#[test]
fn a_flush_is_never_kept() {
    // What the page cache could not write back for lack of room is lost, and the driver has to know.
    with_both_engines(|synchronous| {
        let no_room = || Err(io::Error::from_raw_os_error(libc::ENOSPC));
        let mut full = NoSpace::new(|config| config.disable_io_uring = synchronous);
        full.fixture.device.lock().disk.note_flush(no_room()).unwrap_err();
        assert_eq!(full.fixture.request(abi::VIRTIO_BLK_T_FLUSH, 0, &[]).0, IO_ERROR);
        assert_eq!(full.disk.kept(), 0);

        // A write that is to be stable at once is kept for its own lack of room, not for that of others.
        let flushes = 1 << abi::VIRTIO_BLK_F_FLUSH | 1 << abi::VIRTIO_BLK_F_CONFIG_WCE;
        let engine = |config: &mut BlockConfig| config.disable_io_uring = synchronous;
        let mut through = NoSpace::with_features(engine, !flushes);
        through.refuse(libc::ENOSPC);
        through.write(0, 0, 5);
        through.wait_told();
        through.fixture.device.pause();
        through.refuse(0);
        let disk = Arc::clone(&through.fixture.device.lock().disk);
        disk.check_stable().unwrap();
        through.fixture.device.resume();
        through.fixture.driver.wait_used(0);
        assert_eq!((through.status(0), through.disk.kept()), (OK, 0));
        disk.note_flush(no_room()).unwrap_err();
        through.write(0, 1, 6);
        through.fixture.driver.wait_used(0);
        assert_eq!((through.status(1), through.disk.kept()), (IO_ERROR, 0));
    });
}

#[test]
fn a_driver_that_breaks_the_rules_is_waited_for_no_longer() {
    if !Ring::is_available() {
        test_skip::skip!("io_uring cannot be used here");
        return;
    }
    let mut full = NoSpace::new(|_| ());
    full.fixture.device.pause();
    full.refuse(libc::ENOSPC);
    full.write(0, 0, 5);
    // Behind it a chain that never ends.
    let queue = &mut full.fixture.driver.queues[0];
    queue.put_descriptor(
        40,
        readable(DATA, 1),
        virtio_bindings::virtio_ring::VRING_DESC_F_NEXT,
        40,
    );
    queue.publish(40);
    full.fixture.device.resume();
    full.fixture.driver.interrupt.wait_broken();
    // What comes back for it now is not kept.
    full.fixture.device.pause();
    assert_eq!(full.disk.kept(), 0);
}
