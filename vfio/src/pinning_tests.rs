// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest memory that is mapped for DMA, and vCPUs that wait for it at the gate.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use memory::{
    GuestRam, LaneProgress, PageKind, PrefaultError, RamConfig, RamLayout, RamRegion, ZoneSpec,
};
use parking_lot::Mutex;

use super::fakes::FakeTarget;
use super::limits::LockedMemory;
use super::pinning::or_with_room;
use super::*;

const MIB: u64 = 1 << 20;
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

fn ram(len_bytes: u64) -> Arc<GuestRam> {
    let layout = RamLayout {
        hole_start: 64 * MIB,
        hole_end: 4096 * MIB,
        end: 1 << 40,
        ..RamLayout::default()
    };
    let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", len_bytes) }];
    Arc::new(GuestRam::new(&RamConfig { zones }, layout).unwrap())
}

fn dma_map(target: Arc<FakeTarget>, populator: &GuestRamPopulator) -> Arc<DmaMap> {
    DmaMap::plan(target, populator, false, Box::new(|reason| panic!("{reason}")))
}

fn start(
    target: FakeTarget,
    ram: &Arc<GuestRam>,
    gate: &Arc<DmaGate>,
) -> Result<Pinning, PinError> {
    let populator = Arc::new(GuestRamPopulator::new(Arc::clone(ram), None));
    let dma_map = dma_map(Arc::new(target), &populator);
    Pinning::start(dma_map, populator, Arc::clone(gate), true, Box::new(|_| {}))
}

/// Ranges that follow each other as one.
fn joined(ranges: &Mutex<Vec<Range<u64>>>) -> Vec<Range<u64>> {
    let mut ranges = ranges.lock().clone();
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

#[test]
fn all_memory_is_mapped_once_and_the_gate_opens_after_it() {
    let (ram, gate) = (ram(192 * MIB), Arc::new(DmaGate::default()));
    let target = Arc::new(FakeTarget {
        before: Some({
            let gate = Arc::clone(&gate);
            Box::new(move |_| {
                assert!(!gate.is_open(), "the gate is open before the last piece");
                Ok(())
            })
        }),
        ..FakeTarget::default()
    });
    let populator = Arc::new(GuestRamPopulator::new(Arc::clone(&ram), None));
    let (told, end) = mpsc::channel();
    let on_end = Box::new(move |state: &PinState| told.send(state.clone()).unwrap());
    let dma_map = dma_map(target.clone(), &populator);
    let mut pinning = Pinning::start(dma_map, populator, Arc::clone(&gate), false, on_end).unwrap();
    gate.wait().unwrap();
    assert!(matches!(end.recv_timeout(PATIENCE), Ok(PinState::Pinned { .. })));
    pinning.wait().unwrap();
    let of_region = |region: &Arc<RamRegion>| region.gpa()..region.gpa() + region.len_bytes();
    let expected: Vec<_> = ram.regions().iter().map(of_region).collect();
    assert_eq!(joined(&target.mapped), expected);
    assert_eq!(joined(&target.prepared), expected);
    let progress = pinning.progress();
    assert_eq!((progress.pinned_bytes, progress.total_bytes), (192 * MIB, 192 * MIB));
}

/// Says when all is populated, and may do nothing before another thread helps.
struct Watched {
    inner: GuestRamPopulator,
    needs_help: bool,
    /// Whether it was to spare the lock, once it was asked.
    spares_mmap_lock: Mutex<Option<bool>>,
    is_populated: AtomicBool,
}

impl Watched {
    fn new(ram: &Arc<GuestRam>, needs_help: bool) -> Arc<Self> {
        let inner = GuestRamPopulator::new(Arc::clone(ram), None);
        let (spares_mmap_lock, is_populated) = (Mutex::default(), AtomicBool::new(false));
        Arc::new(Self { inner, needs_help, spares_mmap_lock, is_populated })
    }
}

impl Populator for Watched {
    fn total_bytes(&self) -> (u64, u64) {
        self.inner.total_bytes()
    }

    fn regions(&self) -> &[Arc<RamRegion>] {
        self.inner.regions()
    }

    fn populate(&self, how: Populating<'_>) -> Result<(), PrefaultError> {
        assert_eq!(how.yields_to_guest, self.needs_help, "whether the guest goes first");
        *self.spares_mmap_lock.lock() = Some(how.spares_mmap_lock);
        if self.needs_help {
            let (help, helped) = mpsc::channel();
            let help: PopulateHelper = Arc::new(move || help.send(()).unwrap());
            (how.begun)(PopulateBegun { help, lanes: Box::new(Vec::new) });
            helped.recv_timeout(PATIENCE).unwrap();
        }
        self.inner.populate(Populating { begun: &|_| {}, ..how })?;
        self.is_populated.store(true, Ordering::SeqCst);
        Ok(())
    }
}

#[test]
fn who_waits_at_the_gate_helps() {
    let (ram, gate) = (ram(4 * MIB), Arc::new(DmaGate::default()));
    let populator = Watched::new(&ram, true);
    let dma_map = dma_map(Arc::default(), &populator.inner);
    let on_end = Box::new(|_: &PinState| {});
    let _pinning = Pinning::start(dma_map, populator, Arc::clone(&gate), true, on_end).unwrap();
    gate.wait().unwrap();
    assert!(gate.is_open());
}

#[test]
fn what_is_mapped_last_waits_for_all_memory() {
    let (ram, gate) = (ram(192 * MIB), Arc::new(DmaGate::default()));
    let populator = Watched::new(&ram, false);
    let watched = Arc::clone(&populator);
    let before = Box::new(move |_| {
        let is_populated = watched.is_populated.load(Ordering::SeqCst);
        assert!(is_populated, "a piece is mapped while memory is populated");
        Ok(())
    });
    let target =
        Arc::new(FakeTarget { maps_last: true, before: Some(before), ..FakeTarget::default() });
    let dma_map = dma_map(target.clone(), &populator.inner);
    let on_end = Box::new(|_: &PinState| {});
    let mut pinning = Pinning::start(dma_map, populator, Arc::clone(&gate), false, on_end).unwrap();
    pinning.wait().unwrap();
    assert!(gate.is_open());
    let of_region = |region: &Arc<RamRegion>| region.gpa()..region.gpa() + region.len_bytes();
    assert_eq!(joined(&target.mapped), ram.regions().iter().map(of_region).collect::<Vec<_>>());
}

#[test]
fn populating_spares_the_lock_that_mapping_takes() {
    for takes_mmap_lock in [false, true] {
        let populator = Watched::new(&ram(64 * MIB), false);
        let target = Arc::new(FakeTarget { takes_mmap_lock, ..FakeTarget::default() });
        let dma_map = dma_map(target, &populator.inner);
        let (gate, on_end) = (Arc::new(DmaGate::default()), Box::new(|_: &PinState| {}));
        let watched = Arc::clone(&populator);
        Pinning::start(dma_map, populator, gate, false, on_end).unwrap().wait().unwrap();
        assert_eq!(*watched.spares_mmap_lock.lock(), Some(takes_mmap_lock));
    }
}

#[test]
fn a_failure_in_the_middle_fails_every_waiter() {
    let (ram, gate) = (ram(192 * MIB), Arc::new(DmaGate::default()));
    let count = Mutex::new(0);
    let target = FakeTarget {
        before: Some(Box::new(move |_| {
            let mut count = count.lock();
            *count += 1;
            if *count == 2 { Err(io::Error::from_raw_os_error(libc::ENOMEM)) } else { Ok(()) }
        })),
        ..FakeTarget::default()
    };
    let mut pinning = start(target, &ram, &gate).unwrap();
    let reason = gate.wait().unwrap_err().reason;
    assert!(reason.contains("ulimit -l") && reason.contains("mem0"), "{reason}");
    assert!(pinning.wait().is_err());
    let progress = pinning.progress();
    assert!(progress.pinned_bytes < progress.total_bytes);
    assert_eq!(progress.state, PinState::Failed(reason));
}

#[test]
fn memory_that_no_function_needs_is_unmapped_and_not_waited_for() {
    let (ram, gate) = (ram(192 * MIB), Arc::new(DmaGate::default()));
    let (arrived, at_map) = mpsc::channel();
    let (arrived, hold) = (Mutex::new(arrived), Arc::new(DmaGate::default()));
    let target = Arc::new(FakeTarget {
        before: Some({
            let hold = Arc::clone(&hold);
            Box::new(move |_| {
                let _ = arrived.lock().send(());
                hold.wait().map_err(io::Error::other)
            })
        }),
        ..FakeTarget::default()
    });
    let populator = Arc::new(GuestRamPopulator::new(Arc::clone(&ram), None));
    let dma_map = dma_map(target.clone(), &populator);
    let on_end = Box::new(|_: &PinState| panic!("the end of it is known already"));
    let mut pinning = Pinning::start(dma_map, populator, Arc::clone(&gate), true, on_end).unwrap();
    at_map.recv_timeout(PATIENCE).unwrap();
    let guest = {
        let gate = Arc::clone(&gate);
        std::thread::spawn(move || gate.wait())
    };
    let reason: Arc<str> = "the device has failed".into();
    let abandonment = pinning.abandonment();
    abandonment.begin(&reason);
    assert_eq!(guest.join().unwrap().unwrap_err().reason, reason, "while a piece is being mapped");
    // Not before the kernel is done with that piece.
    let unmaps = std::thread::spawn(move || abandonment.unmap());
    hold.open();
    unmaps.join().unwrap();
    assert!(pinning.wait().is_err());
    assert_eq!(joined(&target.mapped), []);
    let progress = pinning.progress();
    assert_eq!((progress.pinned_bytes, progress.state), (0, PinState::Failed(reason)));
}

#[test]
fn a_machine_that_ends_does_not_wait() {
    let (ram, gate) = (ram(192 * MIB), Arc::new(DmaGate::default()));
    let (arrived, at_map) = mpsc::channel();
    let (arrived, hold) = (Mutex::new(arrived), Arc::new(DmaGate::default()));
    let target = FakeTarget {
        before: Some({
            let hold = Arc::clone(&hold);
            Box::new(move |_| {
                let _ = arrived.lock().send(());
                hold.wait().map_err(io::Error::other)
            })
        }),
        ..FakeTarget::default()
    };
    let pinning = start(target, &ram, &gate).unwrap();
    at_map.recv_timeout(PATIENCE).unwrap();
    let guest = {
        let gate = Arc::clone(&gate);
        std::thread::spawn(move || gate.wait())
    };
    pinning.cancel();
    assert!(guest.join().unwrap().is_err());
    hold.open();
    drop(pinning);
}

#[test]
fn limits_are_checked_before_anything_happens() {
    let gate = Arc::new(DmaGate::default());
    let ram = ram(192 * MIB);
    let with = |limits: DmaLimits| {
        start(FakeTarget { limits, ..FakeTarget::default() }, &ram, &gate).err()
    };
    let few = DmaLimits { entries: Some(1), ..DmaLimits::default() };
    assert!(matches!(with(few), Some(PinError::Entries { limit: 1, .. })));
    let locked = LockedMemory { limit_bytes: Some(191 * MIB), used_bytes: 0 };
    let locked = DmaLimits { locked, ..DmaLimits::default() };
    assert!(matches!(with(locked), Some(PinError::LockedMemory { .. })));
    assert!(!gate.is_open());
    // Room enough for larger pieces only.
    let four = DmaLimits { entries: Some(6), ..DmaLimits::default() };
    assert!(with(four).is_none());
}

#[test]
fn what_stays_mapped_over_a_reboot_is_not_counted_twice() {
    let ram = ram(192 * MIB);
    let populator = GuestRamPopulator::new(Arc::clone(&ram), None);
    // It is counted already, and there is room for the rest only.
    let locked = LockedMemory { limit_bytes: Some(200 * MIB), used_bytes: 128 * MIB };
    let limits = DmaLimits { locked, ..DmaLimits::default() };
    let target = Arc::new(FakeTarget { limits, ..FakeTarget::default() });
    let dma_map = dma_map(target, &populator);
    Pinning::check(&dma_map, &populator, 128 * MIB).unwrap();
    let error = Pinning::check(&dma_map, &populator, 64 * MIB).unwrap_err();
    assert!(matches!(error, PinError::LockedMemory { .. }), "{error}");
}

/// Hands out the first so many chunks at once, and the others when `rest` opens. Populates nothing.
struct Stopping {
    inner: GuestRamPopulator,
    at_once: usize,
    rest: Arc<DmaGate>,
}

impl Populator for Stopping {
    fn total_bytes(&self) -> (u64, u64) {
        self.inner.total_bytes()
    }

    fn regions(&self) -> &[Arc<RamRegion>] {
        self.inner.regions()
    }

    fn populate(&self, how: Populating<'_>) -> Result<(), PrefaultError> {
        let mut left = self.at_once;
        let (total_bytes, _) = self.total_bytes();
        let done = Arc::new(AtomicU64::new(0));
        let of_lanes = Arc::clone(&done);
        let lanes = move || {
            let done_bytes = of_lanes.load(Ordering::Relaxed);
            let kind =
                PageKind { page_bytes: 4096, is_hugetlb: false, is_shared: true, is_there: false };
            let (node, done_chunks, busy) = (None, done_bytes / how.chunk_bytes, Duration::ZERO);
            let threads = 1;
            vec![LaneProgress { node, kind, total_bytes, done_bytes, done_chunks, busy, threads }]
        };
        let help: PopulateHelper = Arc::new(|| {});
        (how.begun)(PopulateBegun { help, lanes: Box::new(lanes) });
        for region in self.regions() {
            for start in (0..region.len_bytes()).step_by(usize::try_from(how.chunk_bytes).unwrap())
            {
                if left == 0 {
                    (how.meanwhile)();
                    self.rest.wait().unwrap();
                }
                left = left.saturating_sub(1);
                let end = region.len_bytes().min(start + how.chunk_bytes);
                (how.on_chunk)(region, start..end).unwrap();
                done.fetch_add(end - start, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

/// `target` is given what opens after the forecast.
fn is_too_long(
    len_bytes: u64,
    at_once: usize,
    bars: Duration,
    target: impl FnOnce(Arc<DmaGate>) -> FakeTarget,
) -> bool {
    let (ram, rest) = (ram(len_bytes), Arc::new(DmaGate::default()));
    let inner = GuestRamPopulator::new(ram, None);
    let target = target(Arc::clone(&rest));
    let dma_map = dma_map(Arc::new(target), &inner);
    let populator = Arc::new(Stopping { inner, at_once, rest: Arc::clone(&rest) });
    let gate = Arc::new(DmaGate::default());
    let mut pinning = Pinning::start(dma_map, populator, gate, true, Box::new(|_| {})).unwrap();
    let is_too_long = pinning.is_too_long(bars, || false);
    rest.open();
    pinning.wait().unwrap();
    assert!(!pinning.is_too_long(Duration::MAX, || false), "it is mapped");
    is_too_long
}

#[test]
fn a_guest_waits_only_for_what_is_soon_mapped() {
    let (quick, none) = (|_| FakeTarget::default(), Duration::ZERO);
    assert!(!is_too_long(64 * MIB, 0, none, quick), "small");
    assert!(!is_too_long(1024 * MIB, 100, none, quick), "all of it at once");
    assert!(!is_too_long(1024 * MIB, 4, none, quick), "a quarter in no time");
    assert!(is_too_long(1024 * MIB, 4, Duration::from_secs(5), quick), "and BARs after it");
    assert!(is_too_long(1024 * MIB, 0, none, quick), "nothing in the time of the measurement");
    assert!(
        is_too_long(65536 * MIB, 1, none, quick),
        "a thousandth in the time of the measurement"
    );
    let last = |_| FakeTarget { maps_last: true, ..FakeTarget::default() };
    assert!(!is_too_long(1024 * MIB, 100, none, last), "all of it populated, and a sample mapped");
    let stuck = |rest: Arc<DmaGate>| FakeTarget {
        maps_last: true,
        before: Some(Box::new(move |_| rest.wait().map_err(io::Error::other))),
        ..FakeTarget::default()
    };
    assert!(is_too_long(1024 * MIB, 100, none, stuck), "populated, but nothing can be mapped");
}

/// Opens when dropped: a test that fails would wait for its mapping otherwise.
struct OpenAtEnd(Arc<DmaGate>);

impl Drop for OpenAtEnd {
    fn drop(&mut self) {
        self.0.open();
    }
}

#[test]
fn who_watches_is_told_once_when_it_takes_longer_than_was_forecast() {
    let kernel = Arc::new(DmaGate::default());
    let (hold, (arrived, at_map)) = (Arc::clone(&kernel), mpsc::channel());
    let arrived = Mutex::new(arrived);
    let before = Box::new(move |_| {
        let _ = arrived.lock().send(());
        hold.wait().map_err(io::Error::other)
    });
    let target = FakeTarget { before: Some(before), ..FakeTarget::default() };
    let mut pinning = start(target, &ram(256 * MIB), &Arc::new(DmaGate::default())).unwrap();
    let kernel = OpenAtEnd(kernel);
    at_map.recv_timeout(PATIENCE).unwrap();
    let (tell, told) = mpsc::channel();
    pinning.watch(Duration::ZERO, Box::new(move |left| tell.send(left).unwrap()));
    // Nothing is mapped as long as this waits.
    assert!(told.recv_timeout(PATIENCE).unwrap() > pin_time::GATE_WAIT_MAX);
    assert_eq!(told.recv_timeout(PATIENCE), Err(mpsc::RecvTimeoutError::Disconnected), "once");
    kernel.0.open();
    pinning.wait().unwrap();
}

#[test]
fn a_forecast_counts_what_the_engine_says_of_each_zone() {
    let small = ZoneSpec { shared: true, thp: false, ..ZoneSpec::new("s", 64 * MIB) };
    let large = ZoneSpec { shared: true, thp: true, ..ZoneSpec::new("l", 128 * MIB) };
    let zones = vec![small, large];
    let ram = Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap());
    let mut pinning = start(FakeTarget::default(), &ram, &Arc::new(DmaGate::default())).unwrap();
    pinning.wait().unwrap();
    let work = pinning.work();
    let lanes: Vec<_> =
        work.lanes.iter().map(|it| (it.kind.page_bytes, it.done_bytes / MIB)).collect();
    assert_eq!(lanes, [(4096, 64), (2 << 20, 128)]);
    assert!(work.is_over && work.last.is_empty());
    let target = FakeTarget { maps_last: true, ..FakeTarget::default() };
    let mut pinning = start(target, &ram, &Arc::new(DmaGate::default())).unwrap();
    pinning.wait().unwrap();
    let work = pinning.work();
    assert_eq!(work.last.iter().map(|last| last.left_bytes).collect::<Vec<_>>(), [0, 0]);
    assert!(work.lanes.iter().all(|lane| lane.kind.is_there), "it is only mapped again");
}

/// Has as many threads as the host gives, until it makes room.
struct Crowded(GuestRamPopulator, AtomicBool);

impl Populator for Crowded {
    fn total_bytes(&self) -> (u64, u64) {
        self.0.total_bytes()
    }

    fn regions(&self) -> &[Arc<RamRegion>] {
        self.0.regions()
    }

    fn populate(&self, _: Populating<'_>) -> Result<(), PrefaultError> {
        Ok(())
    }

    fn make_room(&self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

#[test]
fn the_thread_that_maps_memory_takes_the_place_of_one_that_populates_it() {
    let crowded = Crowded(GuestRamPopulator::new(ram(4 * MIB), None), AtomicBool::new(false));
    let has_room = || crowded.1.load(Ordering::SeqCst);
    or_with_room(|| Ok(()), &crowded).unwrap();
    assert!(!has_room(), "it was not needed");
    let only_then = || has_room().then_some(()).ok_or_else(|| io::Error::other("no thread"));
    or_with_room(only_then, &crowded).unwrap();
    or_with_room(|| Err::<(), _>(io::Error::other("no thread")), &crowded).unwrap_err();
}

/// Populates nothing until it is told to stop.
struct Endless(GuestRamPopulator, Mutex<mpsc::Sender<()>>);

impl Populator for Endless {
    fn total_bytes(&self) -> (u64, u64) {
        self.0.total_bytes()
    }

    fn regions(&self) -> &[Arc<RamRegion>] {
        self.0.regions()
    }

    fn populate(&self, how: Populating<'_>) -> Result<(), PrefaultError> {
        let _ = self.1.lock().send(());
        while !(how.is_stopped)() {
            std::thread::yield_now();
        }
        Err(PrefaultError::Cancelled { done_bytes: 0, total_bytes: 0 })
    }
}

/// Memory that is populated without end, and was when this returns.
fn endless() -> (Pinning, Arc<FakeTarget>, Arc<DmaGate>) {
    let (gate, target) = (Arc::new(DmaGate::default()), Arc::new(FakeTarget::default()));
    let inner = GuestRamPopulator::new(ram(64 * MIB), None);
    let dma_map = dma_map(Arc::clone(&target), &inner);
    let (begun, has_begun) = mpsc::channel();
    let populator = Arc::new(Endless(inner, Mutex::new(begun)));
    let on_end = Box::new(|state: &PinState| panic!("{state:?}"));
    let pinning = Pinning::start(dma_map, populator, Arc::clone(&gate), true, on_end).unwrap();
    has_begun.recv_timeout(PATIENCE).unwrap();
    (pinning, target, gate)
}

#[test]
fn what_ends_does_not_wait_for_memory_to_be_populated() {
    let (pinning, ..) = endless();
    let (dropped, is_dropped) = mpsc::channel();
    std::thread::spawn(move || {
        drop(pinning);
        let _ = dropped.send(());
    });
    is_dropped.recv_timeout(PATIENCE).unwrap();
}

#[test]
fn what_is_abandoned_unmaps_all_by_itself_and_says_so() {
    let (ram, kernel) = (ram(192 * MIB), Arc::new(DmaGate::default()));
    let (hold, (arrived, at_map)) = (Arc::clone(&kernel), mpsc::channel());
    let arrived = Mutex::new(arrived);
    let target = Arc::new(FakeTarget {
        before: Some(Box::new(move |_| {
            let _ = arrived.lock().send(());
            hold.wait().map_err(io::Error::other)
        })),
        ..FakeTarget::default()
    });
    let populator = Arc::new(GuestRamPopulator::new(ram, None));
    let (dma_map, gate) = (dma_map(target.clone(), &populator), Arc::new(DmaGate::default()));
    let on_end = Box::new(|state: &PinState| panic!("{state:?}"));
    let pinning = Pinning::start(dma_map, populator, Arc::clone(&gate), true, on_end).unwrap();
    at_map.recv_timeout(PATIENCE).unwrap();
    let (over, is_over) = mpsc::channel();
    assert!(pinning.abandon(Box::new(move || over.send(()).unwrap())));
    assert!(pinning.is_being_abandoned() && gate.wait().is_err());
    assert!(is_over.try_recv().is_err(), "the kernel is not done");
    assert!(!pinning.abandon(Box::new(|| panic!("it was abandoned before"))));
    kernel.open();
    is_over.recv_timeout(PATIENCE).unwrap();
    assert!(target.mapped.lock().is_empty() && !pinning.is_being_abandoned());
    assert!(matches!(pinning.progress().state, PinState::Failed(_)));
}

#[test]
fn what_is_mapped_is_not_abandoned() {
    let (ram, gate) = (ram(64 * MIB), Arc::new(DmaGate::default()));
    let mut pinning = start(FakeTarget::default(), &ram, &gate).unwrap();
    pinning.wait().unwrap();
    assert!(!pinning.abandon(Box::new(|| panic!("it was abandoned"))));
    assert!(gate.is_open() && matches!(pinning.progress().state, PinState::Pinned { .. }));
}
