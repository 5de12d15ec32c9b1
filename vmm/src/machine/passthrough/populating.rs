// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Populating guest memory while passed-through devices are opened.
//!
//! Opening a device resets it, which takes seconds for some, and memory can be mapped for DMA only when all are open.
//! What is populated by then is only to be mapped.
//!
//! Owns the thread that does so until mapping begins, which populates what is left. Only the thread that maps waits for
//! its end: neither the guest's start nor a stop does. Must never populate memory that is populated by other means
//! (prefault, a pool), nor memory whose contents arrive from elsewhere. A failure is not reported: the pipeline that
//! maps the memory comes to the same page, and reports it.
//!
//! ```text
//!   begin ──> check the host's memory ──> populate ──> told to stop ──> joined by the thread that maps
//! ```

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use memory::{
    GuestRam, Prefault, PrefaultError, PrefaultEvent, PrefaultOptions, RamRegion, check_available,
};
use parking_lot::Mutex;
use stoppable_thread::StoppableThread;
use vfio::pin_time::PopulatedBefore;
use vfio::{GuestRamPopulator, Populating, Populator};

use super::{Passthrough, prefault_threads};
use crate::config::{self, MemoryConfig};
use crate::machine::ram::prefault_modes;

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
    /// When threads began to populate, and how much they do at a time.
    begun: OnceLock<(Instant, u64)>,
    ended: OnceLock<Instant>,
    done_bytes: AtomicU64,
}

impl Work {
    fn run(self: &Arc<Self>, options: &PrefaultOptions) -> Result<(), PrefaultError> {
        check_available(&self.missing)?;
        self.is_checked.store(true, Ordering::Relaxed);
        let at_once_bytes = options.at_once_bytes(&self.regions);
        let (stopping, noting) = (Arc::clone(self), Arc::clone(self));
        let options = PrefaultOptions {
            is_checked: true,
            is_stopped: Some(Arc::new(move || stopping.is_stopped.load(Ordering::Relaxed))),
            observer: Some(Arc::new(move |event: PrefaultEvent<'_>| {
                if let PrefaultEvent::Progress(progress) = event {
                    noting.done_bytes.fetch_max(progress.done_bytes, Ordering::Relaxed);
                }
            })),
            ..options.clone()
        };
        if self.is_stopped.load(Ordering::Relaxed) {
            return Ok(());
        }
        // Before threads start: what they do while others are started counts.
        let _ = self.begun.set((Instant::now(), at_once_bytes));
        let result = Prefault::start(&self.regions, &options).and_then(Prefault::wait);
        let _ = self.ended.set(Instant::now());
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
        let mut regions = missing.clone();
        regions
            .retain(|region| region.usable_bytes() > 0 && mode_of(region) == config::Prefault::Off);
        if regions.is_empty() {
            return None;
        }
        let options = PrefaultOptions {
            threads: prefault_threads(config),
            yields_to_guest: yields,
            // Opening a device maps its BARs, and vCPUs fault.
            spares_mmap_lock: true,
            ..PrefaultOptions::default()
        };
        let work = Arc::new(Work {
            regions,
            missing,
            is_stopped: AtomicBool::new(false),
            is_checked: AtomicBool::new(false),
            begun: OnceLock::new(),
            ended: OnceLock::new(),
            done_bytes: AtomicU64::new(0),
        });
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

    /// Ends, and returns whether the host was found to have memory for all that was to be populated.
    fn join(&mut self) -> bool {
        drop(self.thread.take());
        self.work.is_checked.load(Ordering::Relaxed)
    }

    /// What has been populated so far; `None` if nothing was, or could be. `elsewhere_bytes`: by a background prefault.
    fn populated(&self, elsewhere_bytes: u64) -> Option<PopulatedBefore> {
        let (begun, at_once_bytes) = *self.work.begun.get()?;
        if !self.work.is_checked.load(Ordering::Relaxed) {
            return None;
        }
        let ended = self.work.ended.get().copied().unwrap_or_else(Instant::now);
        let took = ended.saturating_duration_since(begun);
        let bytes = self.work.done_bytes.load(Ordering::Relaxed);
        let missing_bytes: u64 = self.work.missing.iter().map(|region| region.usable_bytes()).sum();
        let left_bytes = missing_bytes.saturating_sub(bytes).saturating_sub(elsewhere_bytes);
        Some(PopulatedBefore { bytes, at_once_bytes, left_bytes, took })
    }
}

/// Populates all memory once what was begun early has ended, so that its threads make room for these.
pub(super) struct RamPopulator {
    inner: GuestRamPopulator,
    /// Locked by the thread that maps memory, or by the one that starts it, while the early threads end.
    early: Mutex<Option<EarlyPopulating>>,
}

impl RamPopulator {
    pub(super) fn new(inner: GuestRamPopulator, early: Option<EarlyPopulating>) -> Self {
        Self { inner, early: Mutex::new(early) }
    }

    fn join(&self) -> bool {
        self.early.lock().as_mut().is_some_and(EarlyPopulating::join)
    }
}

impl Populator for RamPopulator {
    fn total_bytes(&self) -> (u64, u64) {
        self.inner.total_bytes()
    }

    fn regions(&self) -> &[Arc<RamRegion>] {
        self.inner.regions()
    }

    fn populate(&self, how: Populating<'_>) -> Result<(), PrefaultError> {
        // To check again would take long, as memory that is there has to be found, and would count twice what the guest
        // touches meanwhile.
        let is_checked = self.join();
        self.inner.populate(Populating { is_checked, ..how })
    }

    fn make_room(&self) {
        self.join();
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

    /// Has that end soon, as memory is mapped from now on or no device needs it.
    pub(super) fn stop_early_populating(&self) {
        self.early.iter().for_each(EarlyPopulating::stop);
    }

    /// What that has populated; `elsewhere_bytes` are populated by a background prefault.
    pub(super) fn populated_early(&self, elsewhere_bytes: u64) -> Option<PopulatedBefore> {
        self.early.as_ref().and_then(|early| early.populated(elsewhere_bytes))
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::num::NonZeroUsize;
    use std::time::Duration;

    use memory::{HookError, RamConfig, RamLayout, ZoneSpec};
    use pci::{Bdf, DeviceNumber};
    use serde_json::json;
    use vfio::PopulateHelper;
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

    /// What populating early has done, once it has ended.
    fn populate(
        config: &MemoryConfig,
        ram: &GuestRam,
        elsewhere_bytes: u64,
    ) -> Option<PopulatedBefore> {
        let (mut passthrough, _hosts) = two_devices();
        passthrough.populate_early(config, ram, true);
        wait_for_end(passthrough.early.as_ref());
        passthrough.populated_early(elsewhere_bytes)
    }

    #[test]
    fn memory_is_there_when_devices_are_open() {
        let (config, ram) = memory(&json!(false));
        let before = populate(&config, &ram, 0).unwrap();
        assert_eq!((before.bytes, before.left_bytes), (2 * ZONE_BYTES, 0));
        assert!(before.at_once_bytes > 0);
        assert_eq!(["a", "b"].map(|zone| populated_bytes(&ram, zone)), [ZONE_BYTES; 2]);
    }

    #[test]
    fn what_prefault_populates_is_left_to_it() {
        for (mode, elsewhere_bytes, left_bytes) in [
            (json!(true), 0, 0),
            (json!("background"), 0, ZONE_BYTES),
            (json!("background"), ZONE_BYTES / 4, ZONE_BYTES / 4 * 3),
        ] {
            let (config, ram) = memory(&mode);
            let before = populate(&config, &ram, elsewhere_bytes).unwrap();
            assert_eq!((before.bytes, before.left_bytes), (ZONE_BYTES, left_bytes), "{mode}");
            assert_eq!(["a", "b"].map(|zone| populated_bytes(&ram, zone)), [ZONE_BYTES, 0]);
        }
    }

    #[test]
    fn memory_devices_are_populated_whatever_the_prefault_of_their_zone() {
        let later = later_id("b");
        let devices = ZoneSpec { block_bytes: Some(ZONE_BYTES), ..zone(&later, 2 * ZONE_BYTES) };
        let ram = of_zones(vec![zone("a", ZONE_BYTES), zone("b", ZONE_BYTES), devices]);
        let gpa = ram.regions().last().unwrap().gpa();
        ram.plug(&(gpa..gpa + ZONE_BYTES)).unwrap();
        let before = populate(&config(&json!(true)), &ram, 0).unwrap();
        assert_eq!((before.bytes, before.left_bytes), (2 * ZONE_BYTES, 0));
        let populated = ["a", "b", &later].map(|zone| populated_bytes(&ram, zone));
        assert_eq!(populated, [ZONE_BYTES, 0, ZONE_BYTES]);
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
        let mut early = EarlyPopulating::start(&config(&json!(false)), ram, false).unwrap();
        early.join();
        let Work { regions, missing, .. } = &*early.work;
        Arc::new(Work {
            regions: regions.clone(),
            missing: missing.clone(),
            is_stopped: AtomicBool::new(false),
            is_checked: AtomicBool::new(false),
            begun: OnceLock::new(),
            ended: OnceLock::new(),
            done_bytes: AtomicU64::new(0),
        })
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
        assert!(matches!(ended, PrefaultError::Cancelled { .. }), "{ended}");
        assert_eq!(work.done_bytes.load(Ordering::Relaxed), chunk_bytes);
        assert_eq!(work.begun.get().unwrap().1, chunk_bytes);
    }

    #[test]
    fn the_time_that_it_takes_ends_when_all_is_done() {
        let (config, ram) = memory(&json!("background"));
        let early = EarlyPopulating::start(&config, &ram, false);
        wait_for_end(early.as_ref());
        let took = || early.as_ref().unwrap().populated(0).unwrap().took;
        let first = took();
        assert!(first > Duration::ZERO);
        assert_eq!(took(), first);
    }

    #[test]
    fn once_it_has_failed_nothing_can_be_said() {
        let (_, ram) = memory(&json!(false));
        let work = work(&ram);
        let options = PrefaultOptions {
            on_chunk: Some(Arc::new(|_, _| Err(HookError::from("a test")))),
            ..PrefaultOptions::default()
        };
        let failed = work.run(&options).unwrap_err();
        assert!(matches!(failed, PrefaultError::Hook { .. }), "{failed}");
        assert_eq!(EarlyPopulating { thread: None, work: Arc::clone(&work) }.populated(0), None);
        assert!(!work.is_checked.load(Ordering::Relaxed), "the thread that maps checks again");
    }

    #[test]
    fn told_to_stop_before_it_has_begun_it_starts_no_thread() {
        let (_, ram) = memory(&json!(false));
        let work = work(&ram);
        work.is_stopped.store(true, Ordering::Relaxed);
        work.run(&PrefaultOptions::default()).unwrap();
        assert!(work.is_checked.load(Ordering::Relaxed) && work.begun.get().is_none());
    }

    /// How populating `ram` ends that is told to stop before the first page, after what was done early.
    fn stopped_at_once(ram: GuestRam, early: Option<EarlyPopulating>) -> PrefaultError {
        let populator = RamPopulator::new(GuestRamPopulator::new(Arc::new(ram), None), early);
        let begun = |_: PopulateHelper| {
            let early = populator.early.lock();
            assert!(early.as_ref().is_none_or(|early| early.thread.is_none()), "it still runs");
        };
        let how = Populating {
            chunk_bytes: 64 << 20,
            on_chunk: Arc::new(|_, _| Err(HookError::from("it was not stopped"))),
            is_stopped: Arc::new(|| true),
            yields_to_guest: true,
            spares_mmap_lock: true,
            is_checked: false,
            begun: &begun,
        };
        populator.populate(how).unwrap_err()
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
        assert_eq!(populate(&config, &ram, 0), None, "nothing is populated");
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
        let place = Bdf::on_root_bus(0, DeviceNumber::new(7).unwrap());
        passthrough.unopened.push((place, "slow".to_owned()));
        assert_eq!(passthrough.take_unopened().len(), 1);
        assert!(passthrough.early.is_none());
    }
}
