// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A balloon, seen from its driver and from its host.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod broken;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use memory::{Backing, GuestRam, Pins, RamConfig, RamLayout, RamRegion, ZoneSpec};
use parking_lot::Mutex;
use proptest::prelude::*;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};

use super::*;
use crate::virtio::device::StateError;
use crate::virtio::test_driver::{BORDER, Buffer, DATA, Driver, readable, writable};
use crate::virtio::{Counters, RING_FEATURES, VirtioDevice};

const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const STATISTICS: usize = 2;
const HINTING: usize = 3;
const REPORTING: usize = 4;
const PAGE: u32 = 4096;
/// Where what a guest gives up is: behind the rings, in the second region.
const UNUSED_GPA: u64 = BORDER;

struct Guest {
    ram: Arc<GuestRam>,
    device: Balloon,
    driver: Driver,
}

impl Guest {
    /// Two regions of 2 MiB full of data, behind them 4 MiB that were never touched.
    fn new(change: impl FnOnce(&mut BalloonConfig)) -> Self {
        Self::on(&Backing::Memfd, change)
    }

    fn on(backing: &Backing, change: impl FnOnce(&mut BalloonConfig)) -> Self {
        let zone = |id: &str, size_bytes| ZoneSpec {
            backing: backing.clone(),
            // Or khugepaged may fill what was discarded.
            thp: false,
            ..ZoneSpec::new(id, size_bytes)
        };
        let zones = vec![zone("low", BORDER), zone("high", BORDER), zone("rest", 2 * BORDER)];
        let ram = Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap());
        let mut config = BalloonConfig {
            free_page_reporting: true,
            free_page_hinting: true,
            statistics_every: Some(Duration::from_hours(1)),
            ..BalloonConfig::default()
        };
        change(&mut config);
        let device = Balloon::new(config, Arc::clone(&ram)).unwrap();
        let driver = Driver::over(ram.guest_memory(), 5, 16);
        driver.write(DATA, &vec![7; usize::try_from(2 * BORDER - DATA).unwrap()]);
        Self { ram, device, driver }
    }

    fn start(mut self) -> Self {
        self.driver.activate_all(&mut self.device);
        self
    }

    fn with_features(mut self, features: u64) -> Self {
        self.driver.activate(&mut self.device, features);
        self
    }

    fn request(&mut self, queue: usize, buffers: &[Buffer]) -> u32 {
        self.driver.queues[queue].add(buffers);
        self.driver.queues[queue].kick();
        self.driver.wait_used(queue).1
    }

    /// Sends page numbers, which are written to the front of the data.
    fn send_pages(&mut self, queue: usize, pfns: &[u32]) {
        let bytes: Vec<u8> = pfns.iter().flat_map(|pfn| pfn.to_le_bytes()).collect();
        self.driver.write(DATA, &bytes);
        self.request(queue, &[readable(DATA, u32::try_from(bytes.len()).unwrap())]);
    }

    fn byte(&self, gpa: u64) -> u8 {
        self.driver.read(gpa, 1)[0]
    }

    /// Bytes of the region that the host has pages for.
    fn on_host(&self, region: usize) -> u64 {
        let region = &self.ram.regions()[region];
        let runs = region.populated_runs(&(0..region.len_bytes())).unwrap();
        runs.into_iter().map(|run| run.end - run.start).sum()
    }

    fn counter(&self, name: &str) -> u64 {
        self.device.counters().counters()[name]
    }

    fn config_field(&self, at: u64) -> u32 {
        let mut field = [0; 4];
        self.device.read_config(at, &mut field);
        u32::from_le_bytes(field)
    }
}

fn pfn(gpa: u64) -> u32 {
    u32::try_from(gpa / PAGE_BYTES).unwrap()
}

#[test]
fn inflated_pages_go_back_to_the_host_in_runs_and_come_back_as_zeros() {
    for backing in [Backing::Memfd, Backing::Anonymous] {
        let mut guest = Guest::on(&backing, |_| {}).start();
        assert_eq!(guest.on_host(1), BORDER);
        // In any order, one twice.
        let first = pfn(UNUSED_GPA);
        let pfns: Vec<u32> = (0..100).rev().chain([50]).map(|page| first + page).collect();
        guest.send_pages(INFLATE, &pfns);
        assert_eq!(guest.on_host(1), BORDER - 100 * PAGE_BYTES);
        assert_eq!((guest.byte(UNUSED_GPA), guest.byte(UNUSED_GPA + 100 * PAGE_BYTES)), (0, 7));
        assert_eq!(guest.counter("give_back_calls"), 1, "one run");
        assert_eq!(guest.counter("inflated_given_back_bytes"), 100 * PAGE_BYTES);
        guest.send_pages(DEFLATE, &pfns[..10]);
        assert_eq!(guest.counter("deflated_pages"), 10);
        assert!(!guest.driver.interrupt.is_broken());
    }
}

#[test]
fn the_driver_learns_of_a_new_size_and_the_host_of_what_became_of_it() {
    let mut guest = Guest::new(|config| config.size_bytes = 8 * PAGE_BYTES).start();
    let handle = guest.device.handle();
    assert_eq!((guest.config_field(0), handle.target_bytes()), (8, 8 * PAGE_BYTES));
    handle.resize(16 * PAGE_BYTES + 1).unwrap();
    handle.resize(16 * PAGE_BYTES).unwrap();
    assert_eq!(guest.config_field(0), 16);
    guest.device.write_config(4, &16_u32.to_le_bytes());
    let told = guest.driver.interrupt.config_changes();
    handle.resize(16 * PAGE_BYTES).unwrap();
    assert_eq!(guest.driver.interrupt.config_changes(), told, "it has the size");
    guest.device.write_config(4, &12_u32.to_le_bytes());
    assert_eq!(handle.actual_bytes(), 12 * PAGE_BYTES);
    handle.resize(16 * PAGE_BYTES).unwrap();
    assert_eq!(guest.driver.interrupt.config_changes(), told + 1, "it lacks some of it");
    guest.device.write_config(4, &u32::MAX.to_le_bytes());
    assert_eq!(handle.actual_bytes(), guest.ram.total_bytes(), "no guest has less than nothing");
    assert!(matches!(handle.resize(1 << 40), Err(BalloonError::TooLarge { .. })));
    guest.device.reset();
    assert_eq!((handle.actual_bytes(), handle.target_bytes()), (0, 16 * PAGE_BYTES));
}

#[test]
fn numbers_that_are_no_ram_are_ignored() {
    let mut guest = Guest::new(|_| {}).start();
    let pfns = [u32::MAX, pfn(UNUSED_GPA), 1 << 20, pfn(4 * BORDER)];
    guest.send_pages(INFLATE, &pfns);
    assert_eq!((guest.byte(UNUSED_GPA), guest.counter("rejected_pages")), (0, 3));
    guest.send_pages(DEFLATE, &pfns);
    assert!(!guest.driver.interrupt.is_broken());
}

#[test]
fn too_many_pages_at_once_need_a_reset() {
    let mut guest = Guest::new(|_| {}).start();
    guest.driver.queues[INFLATE].add(&[readable(DATA, 1 << 20), readable(DATA, 4)]);
    guest.driver.queues[INFLATE].kick();
    guest.driver.interrupt.wait_broken();
    assert_eq!(guest.counter("give_back_calls"), 0);
}

#[test]
fn reported_pages_go_back_and_the_used_length_is_true() {
    let mut guest = Guest::new(|_| {}).start();
    // Out of order, neighbours, and one that is no RAM at the end.
    let second = UNUSED_GPA + 16 * PAGE_BYTES;
    let buffers = [
        writable(second, 16 * PAGE),
        writable(UNUSED_GPA, 16 * PAGE),
        writable(1 << 40, 16 * PAGE),
        writable(UNUSED_GPA + 64 * PAGE_BYTES, PAGE),
    ];
    assert_eq!(guest.request(REPORTING, &buffers), 32 * PAGE, "up to what is no RAM");
    assert_eq!(guest.on_host(1), BORDER - 33 * PAGE_BYTES);
    assert_eq!((guest.byte(UNUSED_GPA), guest.byte(second + 16 * PAGE_BYTES)), (0, 7));
    assert_eq!(guest.counter("give_back_calls"), 2);
    // Half pages are kept.
    assert_eq!(guest.request(REPORTING, &[writable(DATA + 1, 2 * PAGE)]), 0);
    assert_eq!((guest.byte(DATA + 1), guest.byte(DATA + PAGE_BYTES)), (7, 0));
}

#[test]
fn reports_that_wrap_overlap_or_are_empty_are_harmless() {
    let mut guest = Guest::new(|_| {}).start();
    let last = u64::MAX - PAGE_BYTES + 1;
    // The end of the address space and over it; over the end of RAM; nowhere.
    for (gpa, len_bytes) in [
        (last, PAGE),
        (last, 2 * PAGE),
        (u64::MAX, 1),
        (u64::MAX, u32::MAX),
        (4 * BORDER, PAGE),
        (4 * BORDER - 1, 1),
        (UNUSED_GPA + 1, PAGE - 1),
    ] {
        assert_eq!(guest.request(REPORTING, &[writable(gpa, len_bytes)]), 0, "{gpa:#x}");
    }
    assert_eq!((guest.counter("give_back_calls"), guest.on_host(1)), (0, BORDER));
    // One within another, one over the end of the other, one twice: once is what counts, and every
    // element is answered for.
    let overlapping = [
        writable(UNUSED_GPA, 8 * PAGE),
        writable(UNUSED_GPA + 2 * PAGE_BYTES, PAGE),
        writable(UNUSED_GPA + 7 * PAGE_BYTES, 2 * PAGE),
        writable(UNUSED_GPA, 8 * PAGE),
    ];
    assert_eq!(guest.request(REPORTING, &overlapping), 19 * PAGE);
    assert_eq!(guest.on_host(1), BORDER - 9 * PAGE_BYTES);
    assert_eq!(guest.counter("give_back_calls"), 1);
    // To the last byte of RAM and beyond it: what is RAM goes, and the answer is for none of it.
    let end = 4 * BORDER - PAGE_BYTES;
    guest.driver.write(end, &[7; 4096]);
    assert_eq!(guest.request(REPORTING, &[writable(end, u32::MAX)]), 0);
    assert_eq!(guest.byte(end), 0);
    assert!(!guest.driver.interrupt.is_broken());
}

/// Copies whatever counts as written, over and over, as a precopy does.
fn copies(ram: &GuestRam, copy: &mut [u8]) {
    let words = ram.take_device_dirty(UNUSED_GPA, BORDER).unwrap();
    for (page, to) in copy.chunks_exact_mut(4096).enumerate() {
        if words[page / 64] >> (page % 64) & 1 == 1 {
            let gpa = GuestAddress(UNUSED_GPA + u64::try_from(page).unwrap() * PAGE_BYTES);
            ram.guest_memory().memory().read_slice(to, gpa).unwrap();
        }
    }
}

#[test]
fn reports_and_inflates_that_race_a_migration_leave_nothing_old_behind() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let mut guest = Guest::new(|_| {}).start();
    let ram = Arc::clone(&guest.ram);
    ram.track_device_writes(true);
    let over = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&over);
    let migration = std::thread::spawn(move || {
        let mut copy = vec![7; usize::try_from(BORDER).unwrap()];
        while !ended.load(Ordering::Acquire) {
            copies(&ram, &mut copy);
        }
        // The guest is stopped.
        copies(&ram, &mut copy);
        copy
    });
    for round in 0..300_u32 {
        let page = u64::from(round.wrapping_mul(2_654_435_761) % 500);
        let gpa = UNUSED_GPA + page * PAGE_BYTES;
        let fill = u8::try_from(round % 255).unwrap() + 1;
        guest.driver.write(gpa, &vec![fill; 8 * 4096]);
        if round % 2 == 0 {
            guest.request(REPORTING, &[writable(gpa, 4 * PAGE), writable(gpa, PAGE)]);
        } else {
            guest.send_pages(INFLATE, &[pfn(gpa), pfn(gpa) + 2, pfn(gpa) + 1]);
        }
    }
    over.store(true, Ordering::Release);
    let copy = migration.join().unwrap();
    let now = guest.driver.read(UNUSED_GPA, copy.len());
    let wrong: Vec<_> =
        (0..512).filter(|page| copy[page * 4096..][..4096] != now[page * 4096..][..4096]).collect();
    assert_eq!(wrong, [0_usize; 0]);
}

#[test]
fn a_guest_that_fills_free_pages_keeps_them() {
    let mut guest = Guest::new(|_| {});
    guest.device.write_config(12, &0xaaaa_aaaa_u32.to_le_bytes());
    let mut guest = guest.start();
    assert_eq!(guest.request(REPORTING, &[writable(UNUSED_GPA, PAGE)]), 0);
    assert_eq!(guest.byte(UNUSED_GPA), 7);
    assert!(guest.device.handle().ask_for_hints().is_none());
    // The balloon proper is another matter: the driver fills such pages again.
    guest.send_pages(INFLATE, &[pfn(UNUSED_GPA)]);
    assert_eq!(guest.byte(UNUSED_GPA), 0);
}

#[test]
fn discarded_pages_count_as_written_for_a_migration() {
    let mut guest = Guest::new(|_| {}).start();
    guest.ram.track_device_writes(true);
    guest.send_pages(INFLATE, &[pfn(UNUSED_GPA)]);
    guest.request(REPORTING, &[writable(UNUSED_GPA + 2 * PAGE_BYTES, PAGE)]);
    let words = guest.ram.take_device_dirty(UNUSED_GPA, 64 * PAGE_BYTES).unwrap();
    assert_eq!(words, [0b101]);
}

#[test]
fn missing_pages_are_discarded_when_they_arrive() {
    let mut guest = Guest::new(|_| {}).start();
    let arriving = guest.ram.regions()[1].resident();
    arriving.set_absent(0..4);
    assert_eq!(guest.request(REPORTING, &[writable(UNUSED_GPA, 4 * PAGE)]), 0);
    guest.send_pages(INFLATE, &[pfn(UNUSED_GPA), pfn(UNUSED_GPA) + 1, pfn(UNUSED_GPA) + 8]);
    guest.send_pages(DEFLATE, &[pfn(UNUSED_GPA) + 1]);
    assert_eq!((guest.byte(UNUSED_GPA), guest.byte(UNUSED_GPA + 8 * PAGE_BYTES)), (7, 0));
    guest.ram.regions()[1].resident().set_resident(0..4);
    guest.device.handle().retry();
    // Another request is behind the wake-up at the latest when the thread has started again.
    guest.device.pause();
    guest.device.resume();
    guest.send_pages(DEFLATE, &[pfn(UNUSED_GPA) + 8]);
    let bytes = [0, 1].map(|page| guest.byte(UNUSED_GPA + page * PAGE_BYTES));
    assert_eq!(bytes, [0, 7], "what has left the balloon meanwhile is the guest's");
}

#[test]
fn with_a_dma_device_reporting_is_not_offered_and_nothing_is_discarded() {
    let mut guest = Guest::new(|_| {}).start();
    let ban = guest.ram.ban_discards("a device writes guest memory");
    assert_eq!(guest.request(REPORTING, &[writable(UNUSED_GPA, PAGE)]), 0);
    guest.send_pages(INFLATE, &[pfn(UNUSED_GPA)]);
    assert_eq!(guest.byte(UNUSED_GPA), 7);
    let config = BalloonConfig { free_page_reporting: true, ..BalloonConfig::default() };
    let other = Balloon::new(config.clone(), Arc::clone(&guest.ram)).unwrap();
    assert_eq!(other.features() & (F_PAGE_REPORTING | F_PAGE_POISON), 0);
    drop(ban);
    let other = Balloon::new(config, Arc::clone(&guest.ram)).unwrap();
    assert_ne!(other.features() & F_PAGE_REPORTING, 0);
}

/// Unpins units of eight pages, and remembers what of the second region it unpinned.
#[derive(Default)]
struct FakePins(Mutex<BTreeSet<u64>>);

const UNIT: u64 = 8 * PAGE_BYTES;

impl Pins for FakePins {
    fn grain_bytes(&self, _region: &RamRegion) -> u64 {
        UNIT
    }

    fn unpin(&self, _region: &RamRegion, range: &Range<u64>) -> Vec<Range<u64>> {
        assert_eq!((range.start % UNIT, range.end % UNIT), (0, 0));
        self.0.lock().extend(range.start / UNIT..range.end / UNIT);
        vec![range.clone()]
    }

    fn repin(&self, _region: &RamRegion, range: &Range<u64>) {
        let units = range.start / UNIT..range.end.div_ceil(UNIT);
        self.0.lock().retain(|unit| !units.contains(unit));
    }

    fn pin(
        &self,
        _region: &RamRegion,
        _range: &Range<u64>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        unreachable!("nothing is plugged in here")
    }
}

impl FakePins {
    fn gone(&self) -> Vec<u64> {
        self.0.lock().iter().copied().collect()
    }
}

#[test]
fn what_is_pinned_goes_in_whole_units_and_is_back_before_the_guest_is_told() {
    let mut guest = Guest::new(|_| {}).start();
    let first = pfn(UNUSED_GPA);
    guest.send_pages(INFLATE, &(first..first + 8).collect::<Vec<_>>());
    // A device comes, for which everything is populated and pinned.
    let (ban, pins) = (guest.ram.ban_discards("a device writes guest memory"), FakePins::default());
    let pins = Arc::new(pins);
    guest.driver.write(UNUSED_GPA, &[7; 4096]);
    guest.send_pages(INFLATE, &[first + 8]);
    ban.except_unpinned(pins.clone());
    guest.device.handle().memory_was_populated();
    // Another request is behind the wake-up at the latest when the thread has started again.
    guest.device.pause();
    guest.device.resume();
    guest.send_pages(INFLATE, &(first + 9..first + 15).collect::<Vec<_>>());
    assert_eq!((pins.gone(), guest.byte(UNUSED_GPA)), (vec![0], 0), "what was in it went again");
    assert_eq!(guest.byte(UNUSED_GPA + UNIT), 7, "not whole");
    guest.send_pages(INFLATE, &[first + 15]);
    assert_eq!((pins.gone(), guest.byte(UNUSED_GPA + UNIT)), (vec![0, 1], 0));
    assert_eq!(guest.request(REPORTING, &[writable(UNUSED_GPA + 2 * UNIT, 8 * PAGE)]), 0);
    guest.send_pages(DEFLATE, &[first + 3]);
    assert_eq!(pins.gone(), [1]);
    guest.device.reset();
    assert_eq!(pins.gone(), [0; 0], "the driver asks for nothing any more");
}

#[test]
fn what_was_populated_for_a_second_device_goes_again() {
    let mut guest = Guest::new(|_| {}).start();
    let first = pfn(UNUSED_GPA);
    guest.send_pages(INFLATE, &(first..first + 8).collect::<Vec<_>>());
    for round in 0..3 {
        // A device comes, for which everything is populated and pinned, and goes.
        let ban = guest.ram.ban_discards("a device writes guest memory");
        let pins = Arc::new(FakePins::default());
        guest.driver.write(UNUSED_GPA, &[7; 4096]);
        ban.except_unpinned(pins.clone());
        guest.device.handle().memory_was_populated();
        // A request is behind the wake-up at the latest when the thread has started again.
        guest.device.pause();
        guest.device.resume();
        guest.send_pages(DEFLATE, &[]);
        assert_eq!((pins.gone(), guest.byte(UNUSED_GPA)), (vec![0], 0), "device {round}");
        drop(ban);
    }
    // Without that, nothing is discarded again.
    guest.driver.write(UNUSED_GPA, &[7; 4096]);
    guest.device.handle().retry();
    guest.device.pause();
    guest.device.resume();
    guest.send_pages(DEFLATE, &[]);
    assert_eq!(guest.byte(UNUSED_GPA), 7);
}

#[test]
fn what_is_pinned_stays_with_a_guest_that_does_not_ask() {
    let mut guest = Guest::new(|_| {}).with_features(RING_FEATURES);
    let (ban, pins) = (guest.ram.ban_discards("a device writes guest memory"), FakePins::default());
    let pins = Arc::new(pins);
    ban.except_unpinned(pins.clone());
    let first = pfn(UNUSED_GPA);
    guest.send_pages(INFLATE, &(first..first + 8).collect::<Vec<_>>());
    assert_eq!((pins.gone(), guest.byte(UNUSED_GPA)), (Vec::new(), 7));
    drop(ban);
    guest.send_pages(INFLATE, &[first]);
    assert_eq!(guest.byte(UNUSED_GPA), 0);
}

#[test]
fn statistics_are_taken_and_the_buffer_survives_a_pause() {
    let mut guest = Guest::new(|_| {}).start();
    let entry = |tag: u16, value: u64| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat();
    guest.driver.write(DATA, &[entry(4, 1234), entry(5, 5678)].concat());
    guest.driver.queues[STATISTICS].add(&[readable(DATA, 20)]);
    guest.driver.queues[STATISTICS].kick();
    let states = guest.device.pause();
    assert_eq!(states[STATISTICS].1.next_avail, 0, "the next owner takes the buffer again");
    let features = guest.device.features();
    let saved = guest.device.save();
    guest.device.reset();
    let mut other = Guest {
        device: Balloon::new(
            BalloonConfig {
                statistics_every: Some(Duration::from_millis(1)),
                free_page_reporting: true,
                free_page_hinting: true,
                ..BalloonConfig::default()
            },
            Arc::clone(&guest.ram),
        )
        .unwrap(),
        ..guest
    };
    other.device.restore(&saved).unwrap();
    other.driver.activate_restored(&mut other.device, features, &states);
    // The timer asks with the buffer that the other had kept.
    assert_eq!(other.driver.wait_used(STATISTICS), (0, 0));
    let named = other.device.handle().statistics().named();
    assert!(named.contains(&("guest_free_bytes", 1234)), "{named:?}");
    assert_eq!(other.counter("guest_total_bytes"), 5678);
    assert!(!other.driver.interrupt.is_broken());
}

#[test]
fn hints_count_under_the_command_that_they_answer() {
    let mut guest = Guest::new(|_| {}).start();
    let handle = guest.device.handle();
    let command = |guest: &mut Guest, number: u32| {
        guest.driver.write(DATA, &number.to_le_bytes());
        guest.request(HINTING, &[readable(DATA, 4)]);
    };
    let hint = |guest: &mut Guest, page: u64| {
        guest.request(HINTING, &[writable(UNUSED_GPA + page * PAGE_BYTES, PAGE)]);
    };
    hint(&mut guest, 0);
    let hints = handle.ask_for_hints().unwrap();
    assert!(handle.ask_for_hints().is_none(), "one at a time");
    let asked = guest.config_field(8);
    assert!(asked >= 2);
    hint(&mut guest, 1);
    command(&mut guest, asked + 1);
    hint(&mut guest, 2);
    command(&mut guest, asked);
    hint(&mut guest, 3);
    guest.request(HINTING, &[writable(UNUSED_GPA + 8 * PAGE_BYTES - 1, 2 * PAGE)]);
    assert!(!hints.wait(Duration::ZERO));
    command(&mut guest, 0);
    assert!(hints.wait(Duration::from_secs(20)));
    hint(&mut guest, 4);
    assert_eq!(hints.maps()[1].runs_in(0..512).collect::<Vec<_>>(), [3..4, 8..9]);
    assert_eq!(guest.byte(UNUSED_GPA + 3 * PAGE_BYTES), 7, "a hint changes nothing");
    drop(hints);
    assert_eq!(guest.config_field(8), 1, "done");
    let again = handle.ask_for_hints().unwrap();
    assert_ne!(guest.config_field(8), asked);
    guest.device.reset();
    assert!(!again.wait(Duration::from_secs(20)), "no sender is left");
    assert!(handle.ask_for_hints().is_none());
}

#[test]
fn without_hints_reports_come_over_the_fourth_queue_or_the_fifth() {
    for (queues, queue) in [(4, 3), (5, REPORTING)] {
        let mut guest = Guest::new(|_| {});
        guest.driver = Driver::over(guest.ram.guest_memory(), queues, 16);
        let features = guest.device.features() & !F_FREE_PAGE_HINT;
        let mut guest = guest.with_features(features);
        assert_eq!(guest.request(queue, &[writable(UNUSED_GPA, PAGE)]), PAGE, "{queues} queues");
    }
}

#[test]
fn a_guest_that_knows_it_is_told_which_inflated_pages_are_zero() {
    let guest = Guest::new(|_| {});
    assert_eq!(guest.device.features() & (F_DEVICE_INIT_REPORTED | F_DEVICE_INIT_ON_INFLATE), 0);
    let mut guest = Guest::new(|config| config.prezero_hints = true).start();
    let pfns = [pfn(UNUSED_GPA), u32::MAX, pfn(UNUSED_GPA) + 1];
    let bytes: Vec<u8> = pfns.iter().flat_map(|pfn| pfn.to_le_bytes()).collect();
    guest.driver.write(DATA, &bytes);
    let written = guest.request(INFLATE, &[readable(DATA, 12), writable(DATA + 64, 1)]);
    assert_eq!((written, guest.byte(DATA + 64)), (1, 0b101));
    // Asked in the way of today, it answers so.
    assert_eq!(guest.request(INFLATE, &[readable(DATA, 12)]), 0);
}

#[test]
fn a_guest_that_fills_free_pages_is_told_of_none_that_is_zero() {
    let only_hints = |config: &mut BalloonConfig| {
        (config.free_page_reporting, config.free_page_hinting) = (false, false);
        config.prezero_hints = true;
    };
    let mut guest = Guest::new(only_hints);
    let expected = F_DEVICE_INIT_ON_INFLATE | F_PAGE_POISON;
    assert_eq!(guest.device.features() & (expected | F_DEVICE_INIT_REPORTED), expected);
    guest.device.write_config(12, &0xaaaa_aaaa_u32.to_le_bytes());
    let mut guest = guest.start();
    guest.driver.write(DATA, &pfn(UNUSED_GPA).to_le_bytes());
    let written = guest.request(INFLATE, &[readable(DATA, 4), writable(DATA + 64, 1)]);
    assert_eq!((written, guest.byte(DATA + 64)), (0, 7), "the bitmap is not written");
}

#[test]
fn a_state_with_a_balloon_larger_than_the_guest_is_refused() {
    let mut guest = Guest::new(|_| {});
    let mut saved = guest.device.save();
    saved.data["target_pages"] = (8 * 512 + 1).into();
    assert!(matches!(guest.device.restore(&saved), Err(StateError::Invalid { .. })));
    saved.data["target_pages"] = 2048.into();
    guest.device.restore(&saved).unwrap();
    assert_eq!(guest.config_field(0), 2048);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn reports_zero_what_they_name_and_nothing_else(
        segments in prop::collection::vec((0u64..700, 0u32..70, 0u64..2), 1..12),
    ) {
        let mut guest = Guest::new(|_| {}).start();
        let at = |page: u64, odd: u64| DATA + PAGE_BYTES * 8 + page * PAGE_BYTES + odd * 9;
        let buffers: Vec<Buffer> = segments
            .iter()
            .map(|(page, pages, odd)| writable(at(*page, *odd), pages * PAGE))
            .filter(|(_, len_bytes, _)| *len_bytes > 0)
            .collect();
        prop_assume!(!buffers.is_empty());
        guest.request(REPORTING, &buffers);
        let merged_covers = |page: u64| {
            let mut end = page;
            while end < page + PAGE_BYTES {
                let next = buffers
                    .iter()
                    .filter(|(gpa, len_bytes, _)| *gpa <= end && end < gpa + u64::from(*len_bytes))
                    .map(|(gpa, len_bytes, _)| gpa + u64::from(*len_bytes))
                    .max();
                match next { Some(next) => end = next, None => return false }
            }
            true
        };
        for page in (DATA / PAGE_BYTES..2 * BORDER / PAGE_BYTES).map(|page| page * PAGE_BYTES) {
            prop_assert_eq!(guest.byte(page) == 0, merged_covers(page), "page {:#x}", page);
        }
    }
}
