// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Populating guest memory while passed-through devices are opened.
//!
//! Opening a device resets it, which takes seconds for some, and memory can be mapped for DMA only when one is open.
//! What is populated by then is only to be mapped, and memory itself knows it ([`RamRegion::page_kind`]), so that the forecast
//! of the rest does.
//!
//! Owns the thread that does so until mapping begins, which populates what is left. Only the thread that maps waits for
//! its end, and not for long: neither the guest's start nor a stop does. Must never populate memory that is populated by
//! other means (prefault, a pool), nor memory whose contents arrive from elsewhere, and gives way to everything else
//! that needs threads. A failure is not reported: the pipeline that maps the memory comes to the same page, and reports
//! it.
//!
//! ```text
//!   begin ──> check the host's memory ──> populate ──> told to stop ──> ended, or at its last step, when mapping begins
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use memory::{GuestRam, Prefault, PrefaultError, PrefaultOptions, RamRegion, check_available};
use parking_lot::{Condvar, Mutex};
use stoppable_thread::StoppableThread;
use vfio::{GuestRamPopulator, Populating, Populator};

use super::{Passthrough, pin_threads};
use crate::config::{self, MemoryConfig};
use crate::machine::ram::prefault_modes;

/// How long mapping waits for the end of the threads that populate early, which takes processors and, for a moment, a
/// thread each from its own. One that populates a page of 1 GiB may not end by then.
const END_WAIT_MAX: Duration = Duration::from_millis(100);

/// Memory that is being populated before it can be mapped. Dropping it ends that, and waits for its threads.
pub(super) struct EarlyPopulating {
    /// Until it is joined.
    thread: Option<StoppableThread>,
    work: Arc<Work>,
}

struct Work {
    /// What is populated.
    regions: Vec<Arc<RamRegion>>,
    /// All memory that is to be populated until it is mapped: that which a background prefault populates as well.
    missing: Vec<Arc<RamRegion>>,
    is_stopped: AtomicBool,
    /// The host was found to have memory for all that is missing, and nothing has failed since.
    is_checked: AtomicBool,
    /// Whether it has ended. Locked briefly.
    ended: Mutex<bool>,
    has_ended: Condvar,
}

impl Work {
    fn new(regions: Vec<Arc<RamRegion>>, missing: Vec<Arc<RamRegion>>) -> Self {
        Self {
            regions,
            missing,
            is_stopped: AtomicBool::new(false),
            is_checked: AtomicBool::new(false),
            ended: Mutex::new(false),
            has_ended: Condvar::new(),
        }
    }

    fn run(self: &Arc<Self>, options: &PrefaultOptions) -> Result<(), PrefaultError> {
        let result = self.populate(options);
        *self.ended.lock() = true;
        self.has_ended.notify_all();
        result
    }

    fn populate(self: &Arc<Self>, options: &PrefaultOptions) -> Result<(), PrefaultError> {
        check_available(&self.missing)?;
        self.is_checked.store(true, Ordering::Relaxed);
        let stopping = Arc::clone(self);
        let options = PrefaultOptions {
            is_checked: true,
            is_stopped: Some(Arc::new(move || stopping.is_stopped.load(Ordering::Relaxed))),
            ..options.clone()
        };
        if self.is_stopped.load(Ordering::Relaxed) {
            return Ok(());
        }
        let result = Prefault::start(&self.regions, &options).and_then(Prefault::wait);
        let has_failed = !matches!(result, Ok(()) | Err(PrefaultError::Cancelled { .. }));
        self.is_checked.store(!has_failed, Ordering::Relaxed);
        result
    }
}

impl EarlyPopulating {
    /// Starts, if nothing else populates the memory. `yields`: a guest runs meanwhile.
    fn start(config: &MemoryConfig, ram: &GuestRam, yields: bool) -> Option<Self> {
        let modes = prefault_modes(config);
        // Memory devices have ids that are not configured, and no prefault.
        let mode_of = |region: &RamRegion| {
            let mode = modes.iter().find(|(zone, _)| zone == region.zone_id());
            mode.map_or(config::Prefault::Off, |(_, mode)| *mode)
        };
        let mut missing = ram.regions().to_vec();
        missing
            .retain(|region| !region.is_prezeroed() && mode_of(region) != config::Prefault::Boot);
        let regions = of_early(&missing, |region| mode_of(region) == config::Prefault::Off);
        if regions.is_empty() {
            return None;
        }
        let options = PrefaultOptions {
            threads: pin_threads(config),
            yields_to_guest: yields,
            // Opening a device maps its BARs, and vCPUs fault.
            spares_mmap_lock: true,
            // The last threads that a limit allows are for those who have no choice.
            all_threads: true,
            ..PrefaultOptions::default()
        };
        let work = Arc::new(Work::new(regions, missing));
        let (stopping, running) = (Arc::clone(&work), Arc::clone(&work));
        let stop = move || stopping.is_stopped.store(true, Ordering::Relaxed);
        let tell = |error: &dyn std::error::Error| {
            let why = error_text::chain(error);
            log::debug!("memory is populated no further before devices are open: {why}");
        };
        let run = move || match running.run(&options) {
            Ok(()) | Err(PrefaultError::Cancelled { .. }) => {}
            Err(error) => tell(&error),
        };
        let thread = StoppableThread::spawn("pin", stop, run).inspect_err(|error| tell(error));
        Some(Self { thread: Some(thread.ok()?), work })
    }

    /// Ends soon, without a wait.
    fn stop(&self) {
        if let Some(thread) = &self.thread {
            thread.stop();
        }
    }

    /// Has it end, and waits until it has, for [`END_WAIT_MAX`] at most.
    fn end_soon(&self) {
        self.stop();
        let mut ended = self.work.ended.lock();
        self.work.has_ended.wait_while_for(&mut ended, |ended| !*ended, END_WAIT_MAX);
    }

    /// Whether the host was found to have memory for all that is missing.
    fn is_checked(&self) -> bool {
        self.work.is_checked.load(Ordering::Relaxed)
    }
}

/// Those of `missing` that are populated early.
fn of_early(
    missing: &[Arc<RamRegion>],
    is_wanted: impl Fn(&RamRegion) -> bool,
) -> Vec<Arc<RamRegion>> {
    // Where hugetlb cannot spare the lock of the address space, which is held for a page of 1 GiB at a time, BARs would be
    // mapped no sooner than all threads have populated theirs, and a vCPU that looks for its device would wait for that.
    let delays_none = |region: &RamRegion| !region.is_hugetlb() || region.can_spare_mmap_lock();
    let is_early = |region: &&Arc<RamRegion>| {
        region.usable_bytes() > 0 && is_wanted(region) && delays_none(region)
    };
    missing.iter().filter(is_early).map(Arc::clone).collect()
}

/// Populates all memory after what was begun early.
pub(super) struct RamPopulator {
    inner: GuestRamPopulator,
    /// Locked by the thread that maps memory, or by the one that starts it.
    early: Mutex<Option<EarlyPopulating>>,
}

impl RamPopulator {
    pub(super) fn new(inner: GuestRamPopulator, early: Option<EarlyPopulating>) -> Self {
        Self { inner, early: Mutex::new(early) }
    }
}

impl Populator for RamPopulator {
    fn total_bytes(&self) -> (u64, u64) {
        self.inner.total_bytes()
    }

    fn regions(&self) -> &[Arc<RamRegion>] {
        self.inner.regions()
    }

    fn prepare(&self) {
        self.early.lock().iter().for_each(EarlyPopulating::end_soon);
    }

    fn populate(&self, how: Populating<'_>) -> Result<(), PrefaultError> {
        // To check again would take long, as memory that is there has to be found, and would count twice what the guest
        // touches meanwhile.
        let is_checked = self.early.lock().as_ref().is_some_and(EarlyPopulating::is_checked);
        let result = self.inner.populate(Populating { is_checked, ..how });
        self.make_room();
        result
    }

    fn make_room(&self) {
        // Not dropped with the lock held: that waits for its threads.
        let early = self.early.lock().take();
        drop(early);
    }
}

impl Passthrough {
    /// Populates memory from now on, on threads of its own, until it is mapped for the devices that are being opened.
    /// `yields`: a guest runs meanwhile. Does nothing after a reboot, which has left the memory populated.
    pub fn populate_early(&mut self, config: &MemoryConfig, ram: &GuestRam, yields: bool) {
        if self.early.is_none() && ram.starts_zero() {
            self.early = EarlyPopulating::start(config, ram, yields);
        }
    }

    /// Has it end, and waits for that.
    pub(super) fn end_early_populating(&mut self) {
        self.early = None;
    }

    /// Starts a thread, which the host has refused with `error`, once more if there were threads here to end.
    ///
    /// # Errors
    /// The host refuses it again, or there was none.
    pub(super) fn with_room<T, E>(
        &mut self,
        error: E,
        start: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        match self.early.take() {
            Some(early) => {
                drop(early);
                start()
            }
            None => Err(error),
        }
    }

    /// Has that end soon, as memory is mapped from now on or no device needs it.
    pub(super) fn stop_early_populating(&self) {
        self.early.iter().for_each(EarlyPopulating::stop);
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::atomic::AtomicU64;
    use std::time::Instant;

    use memory::{HookError, RamConfig, RamLayout, ZoneSpec};
    use serde_json::json;
    use vfio::PopulateBegun;
    use vfio::fakes::FakeTarget;

    use super::super::DiscardingDevices;
    use super::super::migration::tests::two_devices;
    use super::*;
    use crate::machine::pausing::CancelToken;
    use crate::machine::ram::later_id;

    const ZONE_BYTES: u64 = 128 << 20;
    /// More than any host has.
    const HUGE_BYTES: u64 = 1 << 44;

    fn of_zones(zones: Vec<ZoneSpec>) -> GuestRam {
        GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap()
    }

    fn zone(id: &str, len_bytes: u64) -> ZoneSpec {
        ZoneSpec { shared: true, ..ZoneSpec::new(id, len_bytes) }
    }

    fn config(prefault: &serde_json::Value) -> MemoryConfig {
        let zones = json!([
            {"id": "a", "size": ZONE_BYTES, "shared": true},
            {"id": "b", "size": ZONE_BYTES, "shared": true, "prefault": prefault},
        ]);
        serde_json::from_value(json!({"size": 0, "zones": zones})).unwrap()
    }

    fn memory(prefault: &serde_json::Value) -> (MemoryConfig, GuestRam) {
        (config(prefault), of_zones(vec![zone("a", ZONE_BYTES), zone("b", ZONE_BYTES)]))
    }

    fn huge() -> (MemoryConfig, GuestRam) {
        (config(&json!(false)), of_zones(vec![zone("a", HUGE_BYTES)]))
    }

    fn populated_bytes(ram: &GuestRam, zone: &str) -> u64 {
        let regions = ram.regions().iter().filter(|region| region.zone_id() == zone);
        let runs =
            regions.flat_map(|region| region.populated_runs(&(0..region.len_bytes())).unwrap());
        runs.map(|run| run.end - run.start).sum()
    }

    fn wait_for_end(early: Option<&EarlyPopulating>) {
        let begun = Instant::now();
        let thread = early.and_then(|early| early.thread.as_ref());
        while thread.is_some_and(|thread| !thread.is_finished()) {
            assert!(begun.elapsed() < Duration::from_mins(1));
            std::thread::yield_now();
        }
    }

    /// Populates early, to the end; returns how much of each zone is there then, by the kernel, and as the plan of those who
    /// populate the rest takes it.
    fn populate(config: &MemoryConfig, ram: &GuestRam, zones: &[&str]) -> Vec<(u64, bool)> {
        let (mut passthrough, _hosts) = two_devices();
        passthrough.populate_early(config, ram, true);
        wait_for_end(passthrough.early.as_ref());
        let is_there = |zone: &str| {
            let mut regions = ram.regions().iter().filter(|region| region.zone_id() == zone);
            regions.all(|region| region.page_kind(&(0..region.usable_bytes())).is_there)
        };
        zones.iter().map(|zone| (populated_bytes(ram, zone), is_there(zone))).collect()
    }

    #[test]
    fn memory_is_there_when_devices_are_open() {
        let (config, ram) = memory(&json!(false));
        assert_eq!(populate(&config, &ram, &["a", "b"]), [(ZONE_BYTES, true); 2]);
    }

    #[test]
    fn what_prefault_populates_is_left_to_it() {
        for mode in [json!(true), json!("background")] {
            let (config, ram) = memory(&mode);
            let there = populate(&config, &ram, &["a", "b"]);
            assert_eq!(there, [(ZONE_BYTES, true), (0, false)], "{mode}");
        }
    }

    #[test]
    fn memory_devices_are_populated_whatever_the_prefault_of_their_zone() {
        let later = later_id("b");
        let devices = ZoneSpec { block_bytes: Some(ZONE_BYTES), ..zone(&later, 2 * ZONE_BYTES) };
        let ram = of_zones(vec![zone("a", ZONE_BYTES), zone("b", ZONE_BYTES), devices]);
        let gpa = ram.regions().last().unwrap().gpa();
        ram.plug(&(gpa..gpa + ZONE_BYTES)).unwrap();
        let there = populate(&config(&json!(true)), &ram, &["a", "b", &later]);
        assert_eq!(there, [(ZONE_BYTES, true), (0, false), (ZONE_BYTES, true)]);
    }

    #[test]
    fn memory_of_a_guest_that_reboots_is_left_alone() {
        let (config, ram) = memory(&json!(false));
        ram.restart(&|| false);
        let (mut passthrough, _hosts) = two_devices();
        passthrough.populate_early(&config, &ram, true);
        assert!(passthrough.early.is_none());
    }

    fn work(ram: &GuestRam) -> Arc<Work> {
        Arc::new(Work::new(ram.regions().to_vec(), ram.regions().to_vec()))
    }

    #[test]
    fn it_ends_soon_when_it_is_told_to() {
        let (_, ram) = memory(&json!(false));
        let work = work(&ram);
        let stopping = Arc::clone(&work);
        let options = PrefaultOptions {
            threads: NonZeroUsize::new(1),
            on_chunk: Some(Arc::new(move |_, _| {
                stopping.is_stopped.store(true, Ordering::Relaxed);
                Ok(())
            })),
            ..PrefaultOptions::default()
        };
        let chunk_bytes = options.chunk_bytes;
        let ended = work.run(&options).unwrap_err();
        let PrefaultError::Cancelled { done_bytes, .. } = ended else { panic!("{ended}") };
        assert_eq!(done_bytes, chunk_bytes);
    }

    #[test]
    fn after_a_failure_the_thread_that_maps_checks_again() {
        let (_, ram) = memory(&json!(false));
        let work = work(&ram);
        let count = AtomicU64::new(0);
        let on_chunk = move |_: &_, _| {
            let is_refused = count.fetch_add(1, Ordering::Relaxed) == 2;
            if is_refused { Err(HookError::from("a test")) } else { Ok(()) }
        };
        let options = PrefaultOptions {
            threads: NonZeroUsize::new(1),
            on_chunk: Some(Arc::new(on_chunk)),
            ..PrefaultOptions::default()
        };
        let failed = work.run(&options).unwrap_err();
        assert!(matches!(failed, PrefaultError::Hook { .. }), "{failed}");
        assert!(!EarlyPopulating { thread: None, work }.is_checked());
    }

    #[test]
    fn told_to_stop_before_it_has_begun_it_starts_no_thread() {
        let (_, ram) = memory(&json!(false));
        let work = work(&ram);
        work.is_stopped.store(true, Ordering::Relaxed);
        work.run(&PrefaultOptions::default()).unwrap();
        assert!(work.is_checked.load(Ordering::Relaxed));
        assert_eq!((populated_bytes(&ram, "a"), populated_bytes(&ram, "b")), (0, 0));
    }

    /// How populating `ram` ends that is told to stop before the first page, after what was done early.
    fn stopped_at_once(ram: GuestRam, early: Option<EarlyPopulating>) -> PrefaultError {
        let populator = RamPopulator::new(GuestRamPopulator::new(Arc::new(ram), None), early);
        let begun = |_: PopulateBegun| {};
        let how = Populating {
            chunk_bytes: 64 << 20,
            on_chunk: Arc::new(|_, _| Err(HookError::from("it was not stopped"))),
            is_stopped: Arc::new(|| true),
            yields_to_guest: true,
            spares_mmap_lock: true,
            is_checked: false,
            begun: &begun,
            meanwhile: &|| {},
        };
        populator.prepare();
        let early = populator.early.lock().as_ref().map(|early| Arc::clone(&early.work));
        assert!(early.is_none_or(|work| *work.ended.lock()), "it still runs");
        let error = populator.populate(how).unwrap_err();
        assert!(populator.early.lock().is_none(), "it has its threads still");
        error
    }

    #[test]
    fn memory_is_mapped_although_a_thread_does_not_end() {
        let (_, ram) = memory(&json!(false));
        let early = EarlyPopulating { thread: None, work: work(&ram) };
        let begun = Instant::now();
        early.end_soon();
        assert!(begun.elapsed() >= END_WAIT_MAX);
    }

    #[test]
    fn what_was_checked_early_is_not_checked_again() {
        let refused = stopped_at_once(huge().1, None);
        assert!(matches!(refused, PrefaultError::InsufficientMemory(_)), "{refused}");

        let (config, ram) = memory(&json!(false));
        let early = EarlyPopulating::start(&config, &ram, true);
        wait_for_end(early.as_ref());
        let ended = stopped_at_once(huge().1, early);
        assert!(matches!(ended, PrefaultError::Cancelled { .. }), "{ended}");

        let (config, ram) = huge();
        assert_eq!(populate(&config, &ram, &["a"]), [(0, false)], "nothing is populated");
        let early = EarlyPopulating::start(&config, &ram, true);
        let refused = stopped_at_once(ram, early);
        assert!(matches!(refused, PrefaultError::InsufficientMemory(_)), "{refused}");
    }

    #[test]
    fn memory_that_was_populated_early_is_mapped() {
        let (config, ram) = memory(&json!(false));
        let (ram, target) = (Arc::new(ram), Arc::new(FakeTarget::default()));
        let (mut passthrough, _hosts) = two_devices();
        passthrough.populate_early(&config, &ram, false);
        passthrough.space = Some(target.clone());
        passthrough.strict = true;
        let never = CancelToken::default();
        passthrough.map_memory(&ram, DiscardingDevices::default(), &never).unwrap();
        assert!(passthrough.early.is_none());
        assert_eq!(passthrough.progress().unwrap().pinned_bytes, 2 * ZONE_BYTES);
    }

    #[test]
    fn it_has_ended_when_memory_may_be_discarded_as_no_device_has_come() {
        let (config, ram) = memory(&json!(false));
        let (mut passthrough, _hosts) = two_devices();
        passthrough.devices.clear();
        passthrough.populate_early(&config, &ram, true);
        passthrough.forget_memory_without_devices();
        assert!(passthrough.early.is_none());
    }
}
