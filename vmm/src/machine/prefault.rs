// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Prefault of guest memory: before the guest runs, or while it does.
//!
//! Owns which zones are populated when, the events about it, and how far it is.
//! Must never populate memory whose contents are still to arrive, and leaves with the host what the
//! running guest has given back.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use devices::virtio::balloon::BalloonHandle;
use memory::available::InsufficientMemory;
use memory::{
    GuestRam, PrefaultError, PrefaultEvent, PrefaultObserver, PrefaultOptions, PrefaultProgress,
};
use parking_lot::Mutex;

use super::CancelToken;
use crate::config::{MemoryConfig, Prefault};
use crate::events;

/// Interval of the progress events in percent.
const STEP_PERCENT: u64 = 10;

/// How a prefault ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrefaultEnd {
    /// All of the memory is populated.
    Completed,
    /// The VM ends or is being migrated.
    Cancelled,
    /// The host is out of memory, or another error.
    Failed(String),
}

/// Progress of a prefault.
#[derive(Clone, Debug)]
pub struct PrefaultStatus {
    /// Progress in bytes.
    pub progress: PrefaultProgress,
    /// The result; `None` while in progress.
    pub end: Option<PrefaultEnd>,
}

/// How far memory is populated before the guest starts, for threads that do other things meanwhile.
#[derive(Clone)]
pub struct BootPrefault(Arc<BootPrefaultState>);

/// How a boot is watched, and cancelled.
pub struct BootWatch<'a> {
    /// Populated memory.
    pub prefault: &'a BootPrefault,
    /// Ends the boot.
    pub cancel: &'a CancelToken,
}

struct BootPrefaultState {
    /// With the moment of the beginning. Locked briefly, for each chunk.
    progress: Mutex<Option<(Instant, PrefaultProgress)>>,
    on_begun: Box<dyn Fn() + Send + Sync>,
}

impl BootPrefault {
    /// Nothing is populated yet; `on_begun` is called when that begins.
    pub fn new(on_begun: impl Fn() + Send + Sync + 'static) -> Self {
        let on_begun = Box::new(on_begun);
        Self(Arc::new(BootPrefaultState { progress: Mutex::new(None), on_begun }))
    }

    /// Progress; `None` if memory is not, or not yet, populated before the guest starts.
    pub fn progress(&self) -> Option<PrefaultProgress> {
        self.0.progress.lock().map(|(_, progress)| progress)
    }

    /// When that began.
    pub fn begun_at(&self) -> Option<Instant> {
        self.0.progress.lock().map(|(begun_at, _)| begun_at)
    }

    /// Receives the progress of an engine.
    pub fn observer(&self) -> PrefaultObserver {
        let boot = self.clone();
        Arc::new(move |event: PrefaultEvent<'_>| {
            if let PrefaultEvent::Progress(progress) = event {
                boot.note(progress);
            }
        })
    }

    fn begin(&self, none_yet: PrefaultProgress) {
        self.set(|_| Some(none_yet));
    }

    /// Several threads do this, and the last to come may have the older value.
    fn note(&self, progress: PrefaultProgress) {
        self.set(|latest| {
            let is_later = latest.is_none_or(|latest| latest.done_bytes < progress.done_bytes);
            is_later.then_some(progress)
        });
    }

    fn set(&self, next: impl FnOnce(Option<PrefaultProgress>) -> Option<PrefaultProgress>) {
        let mut state = self.0.progress.lock();
        let (begun_at, latest) = state.unzip();
        let next = next(latest).or(latest);
        *state = next.map(|next| (begun_at.unwrap_or_else(Instant::now), next));
        drop(state);
        if begun_at.is_none() {
            (self.0.on_begun)();
        }
    }
}

impl Default for BootPrefault {
    fn default() -> Self {
        Self::new(|| {})
    }
}

/// Background prefault, in progress or finished.
pub struct Background {
    engine: memory::Prefault,
    /// Only locked briefly, by the prefaulting thread and by readers.
    end: Arc<Mutex<Option<PrefaultEnd>>>,
}

fn percent(progress: PrefaultProgress) -> u64 {
    let PrefaultProgress { done_bytes, total_bytes } = progress;
    done_bytes.saturating_mul(100).checked_div(total_bytes).unwrap_or(100)
}

fn emit(event: &'static str, mode: &str, progress: PrefaultProgress) {
    let (percent, done) = (percent(progress).to_string(), progress.done_bytes.to_string());
    let total = progress.total_bytes.to_string();
    let properties: &[(&'static str, &str)] =
        &[("mode", mode), ("percent", &percent), ("done_bytes", &done), ("total_bytes", &total)];
    events::emit("vm", event, properties);
}

/// The configured number of threads that populate memory.
pub fn prefault_threads(config: &MemoryConfig) -> Option<NonZeroUsize> {
    threads(config.prefault_threads)
}

/// The configured number of threads that populate and pin memory for passed-through devices.
pub fn pin_threads(config: &MemoryConfig) -> Option<NonZeroUsize> {
    threads(config.pin_threads.or(config.prefault_threads))
}

fn threads(count: Option<u32>) -> Option<NonZeroUsize> {
    count.and_then(|count| usize::try_from(count).ok()).and_then(NonZeroUsize::new)
}

/// Starts to prefault the zones configured for `when`; `None` if there are none. `balloon`: discards its
/// memory again at the end, of which some may have been populated.
fn start(
    ram: &GuestRam,
    config: &MemoryConfig,
    zones: &[(String, Prefault)],
    when: Prefault,
    balloon: Option<BalloonHandle>,
    boot: Option<&BootPrefault>,
) -> Result<Option<Background>, PrefaultError> {
    let asks = |id: &str| zones.iter().any(|(zone, mode)| zone == id && *mode == when);
    let regions: Vec<_> = ram
        .regions()
        .iter()
        .filter(|region| asks(region.zone_id()) && !region.is_prezeroed())
        .cloned()
        .collect();
    if regions.is_empty() {
        return Ok(None);
    }
    let mode = if when == Prefault::Background { "background" } else { "boot" };
    let total_bytes = regions.iter().map(|region| region.len_bytes()).sum();
    let none_yet = PrefaultProgress { done_bytes: 0, total_bytes };
    emit("prefault-started", mode, none_yet);
    if let Some(boot) = boot {
        boot.begin(none_yet);
    }
    let boot = boot.cloned();
    let end = Arc::new(Mutex::new(None));
    let told_percent = AtomicU64::new(0);
    let ended = Arc::clone(&end);
    let note = move |end| {
        *ended.lock() = Some(end);
    };
    let watcher = move |notice: PrefaultEvent<'_>| {
        match notice {
            PrefaultEvent::Progress(progress) => {
                if let Some(boot) = &boot {
                    boot.note(progress);
                }
                let step = percent(progress) / STEP_PERCENT * STEP_PERCENT;
                // The end has its own event.
                if step < 100 && told_percent.fetch_max(step, Ordering::Relaxed) < step {
                    emit("prefault-progress", mode, progress);
                }
                return;
            }
            PrefaultEvent::Completed(progress) => {
                note(PrefaultEnd::Completed);
                emit("prefault-completed", mode, progress);
            }
            PrefaultEvent::Cancelled(progress) => {
                note(PrefaultEnd::Cancelled);
                emit("prefault-cancelled", mode, progress);
            }
            PrefaultEvent::Failed(error) => {
                let why = error_text::chain(error);
                log::warn!("guest memory is not populated any further: {why}");
                events::emit("vm", "prefault-failed", &[("mode", mode), ("error", &why)]);
                note(PrefaultEnd::Failed(why));
            }
        }
        // What came into it while its memory was being populated.
        if let Some(balloon) = &balloon {
            balloon.memory_was_populated();
        }
    };
    let options = PrefaultOptions {
        threads: prefault_threads(config),
        observer: Some(Arc::new(watcher)),
        spares_discarded: when == Prefault::Background,
        // The guest runs meanwhile, and there may be a thread on each of its CPUs.
        yields_to_guest: when == Prefault::Background,
        // Threads are started meanwhile, and vCPUs fault.
        spares_mmap_lock: when == Prefault::Background,
        ..PrefaultOptions::default()
    };
    Ok(Some(Background { engine: memory::Prefault::start(&regions, &options)?, end }))
}

/// Whether the host has enough memory for the zones to be prefaulted, at boot or in the background; for
/// memory whose contents arrive, which fills it all the same.
///
/// # Errors
/// The limit that is too low.
pub fn check_room(ram: &GuestRam, zones: &[(String, Prefault)]) -> Result<(), InsufficientMemory> {
    let asks = |id: &str| zones.iter().any(|(zone, mode)| zone == id && *mode != Prefault::Off);
    let asking =
        ram.regions().iter().filter(|region| asks(region.zone_id()) && !region.is_prezeroed());
    memory::check_available(&asking.cloned().collect::<Vec<_>>())
}

/// Prefaults the zones that are to be populated before the guest starts, and waits for it until cancelled.
///
/// # Errors
/// Names the zone and the limit.
pub fn complete(
    ram: &GuestRam,
    config: &MemoryConfig,
    zones: &[(String, Prefault)],
    boot: &BootPrefault,
    cancel: &CancelToken,
) -> Result<(), PrefaultError> {
    let running = start(ram, config, zones, Prefault::Boot, None, Some(boot))?;
    let Some(running) = running else { return Ok(()) };
    running.engine.wait_unless(&|| cancel.is_cancelled())
}

impl Background {
    /// Starts the background prefault. A failure to start is only logged, as the guest does not depend on
    /// it.
    pub fn start(
        ram: &GuestRam,
        config: &MemoryConfig,
        zones: &[(String, Prefault)],
        balloon: Option<BalloonHandle>,
    ) -> Option<Self> {
        start(ram, config, zones, Prefault::Background, balloon, None).unwrap_or_else(|error| {
            log::warn!(
                "guest memory is not populated in the background: {}",
                error_text::chain(&error)
            );
            None
        })
    }

    /// Tells the prefault to stop soon; what is populated stays.
    pub fn cancel(&self) {
        self.engine.cancel();
    }

    /// How far it is.
    pub fn status(&self) -> PrefaultStatus {
        let end = self.end.lock().clone();
        PrefaultStatus { progress: self.engine.progress(), end }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    fn progress(done_bytes: u64) -> PrefaultProgress {
        PrefaultProgress { done_bytes, total_bytes: 10 }
    }

    #[test]
    fn memory_for_devices_is_pinned_by_as_many_threads_as_is_said_or_as_populate_it() {
        let counts = |prefault_threads, pin_threads| {
            let config = MemoryConfig { prefault_threads, pin_threads, ..MemoryConfig::default() };
            (prefault_threads_of(&config), pin_threads_of(&config))
        };
        assert_eq!(counts(None, None), (None, None));
        assert_eq!(counts(Some(4), None), (Some(4), Some(4)));
        assert_eq!(counts(Some(4), Some(2)), (Some(4), Some(2)));
        assert_eq!(counts(None, Some(2)), (None, Some(2)));
    }

    fn prefault_threads_of(config: &MemoryConfig) -> Option<usize> {
        prefault_threads(config).map(NonZeroUsize::get)
    }

    fn pin_threads_of(config: &MemoryConfig) -> Option<usize> {
        pin_threads(config).map(NonZeroUsize::get)
    }

    #[test]
    fn progress_of_several_threads_never_goes_back_and_begins_once() {
        let begun = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&begun);
        let boot = BootPrefault::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!((boot.progress(), boot.begun_at()), (None, None));
        let observer = boot.observer();
        for done_bytes in [2, 6, 4] {
            observer(PrefaultEvent::Progress(progress(done_bytes)));
        }
        assert_eq!(boot.progress(), Some(progress(6)));
        let begun_at = boot.begun_at();
        // Another engine starts over.
        boot.begin(progress(0));
        assert_eq!((boot.progress(), boot.begun_at()), (Some(progress(0)), begun_at));
        assert!(begun_at.is_some());
        assert_eq!(begun.load(Ordering::Relaxed), 1);
    }
}
