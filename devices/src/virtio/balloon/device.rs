// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The balloon device.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use log::warn;
use memory::GuestRam;
use thiserror::Error;

use super::counters::BalloonCounters;
use super::hinting::{FreePageHints, HintingEnd};
use super::queues::Queues;
use super::shared::{Driver, Shared};
use super::statistics::Statistics;
use super::target::StagedTarget;
use super::worker::BalloonWorker;
use super::{
    F_DEFLATE_ON_OOM, F_DEVICE_INIT_ON_INFLATE, F_DEVICE_INIT_REPORTED, F_FREE_PAGE_HINT,
    F_MUST_TELL_HOST, F_PAGE_POISON, F_PAGE_REPORTING, F_STATS_VQ, PAGE_BYTES, state,
};
use crate::virtio::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use crate::virtio::queue::WorkQueue;
use crate::virtio::worker::{Pausing, Workers};
use crate::virtio::{RING_FEATURES, read_config_bytes};

/// Virtio device ID of traditional balloons.
const DEVICE_ID: u16 = 5;
/// As in cloud-hypervisor. Linux has at most one request per queue, except for hints.
const QUEUE_SIZE: u16 = 128;

/// Configuration of a balloon.
#[derive(Clone, Debug, Default)]
pub struct BalloonConfig {
    /// Id of the device, for its thread name.
    pub id: String,
    /// Target size in bytes, once `coming_bytes` more memory is plugged; until then the missing part counts
    /// as if it were in the balloon.
    pub size_bytes: u64,
    /// Bytes that the virtio-mem devices are still to plug.
    pub coming_bytes: u64,
    /// Whether the guest may deflate the balloon when it runs out of memory.
    pub deflate_on_oom: bool,
    /// Whether free page reporting is offered.
    pub free_page_reporting: bool,
    /// Whether free page hints are offered, for migrations.
    pub free_page_hinting: bool,
    /// Interval of memory statistics.
    pub statistics_every: Option<Duration>,
    /// Whether the guest is told which pages are returned as zeros, by feature bits that are not standard
    /// yet.
    pub prezero_hints: bool,
}

/// Why a balloon cannot be created or resized.
#[derive(Debug, Error)]
pub enum BalloonError {
    /// A host resource is not available.
    #[error("the host refuses an event descriptor")]
    Resource(#[source] io::Error),
    /// The size exceeds guest memory.
    #[error(
        "a balloon of {size_bytes} bytes does not fit into the {ram_bytes} bytes of the guest: \
         make it smaller"
    )]
    TooLarge {
        /// Requested size in bytes.
        size_bytes: u64,
        /// Guest memory in bytes.
        ram_bytes: u64,
    },
}

/// A handle to the balloon for the VMM, while the transport owns the device.
#[derive(Clone)]
pub struct BalloonHandle {
    pub(super) shared: Arc<Shared>,
}

impl BalloonHandle {
    /// Whether the balloon could have this size.
    ///
    /// # Errors
    /// It exceeds guest memory.
    pub fn check(&self, size_bytes: u64) -> Result<(), BalloonError> {
        pages_of(size_bytes, self.shared.ram.total_bytes()).map(drop)
    }

    /// Sets the target size; the guest inflates or deflates when it can. A guest that has deflated because
    /// it ran out of memory does not inflate again by itself, so it is notified whenever its size differs
    /// from the target, even if the target is unchanged.
    ///
    /// # Errors
    /// It exceeds guest memory.
    pub fn resize(&self, size_bytes: u64) -> Result<(), BalloonError> {
        let target_pages = pages_of(size_bytes, self.shared.ram.total_bytes())?;
        self.tell(self.shared.set_target(target_pages));
        Ok(())
    }

    /// Raises the target of a balloon that has been waiting for memory, when the guest has got more. May be
    /// called on any thread.
    pub fn memory_has_grown(&self) {
        self.tell(self.shared.memory_has_grown());
    }

    fn tell(&self, news: bool) {
        if news {
            self.shared.interrupt_driver();
        }
    }

    /// The target size in bytes.
    pub fn target_bytes(&self) -> u64 {
        self.shared.target_bytes()
    }

    /// The size that the guest reports, in bytes.
    pub fn actual_bytes(&self) -> u64 {
        self.shared.actual_bytes()
    }

    /// The guest's latest memory statistics.
    pub fn statistics(&self) -> Statistics {
        self.shared.statistics()
    }

    /// Retries discards of balloon memory that were not possible before.
    pub fn retry(&self) {
        // A saturated counter wakes the thread as well.
        let _ = self.shared.retry().write(1);
    }

    /// Discards all balloon memory again: it may have been populated since, for passed-through devices or by a
    /// prefault.
    pub fn memory_was_populated(&self) {
        self.shared.note_populated();
        self.retry();
    }

    /// Requests free page hints from the guest. Writes must have been logged since before this call: a page
    /// written since is not free, whatever the hints say.
    ///
    /// `None` if the guest gives no hints now.
    pub fn ask_for_hints(&self) -> Option<FreePageHints> {
        FreePageHints::ask(&self.shared)
    }
}

fn pages_of(size_bytes: u64, ram_bytes: u64) -> Result<u32, BalloonError> {
    let too_large = || BalloonError::TooLarge { size_bytes, ram_bytes };
    if size_bytes > ram_bytes {
        return Err(too_large());
    }
    u32::try_from(size_bytes / PAGE_BYTES).map_err(|_| too_large())
}

/// Maximum memory of the guest in bytes, once all of it is plugged. A guest may have less than its
/// balloon's target: one that is unplugging memory, or has just booted.
fn most_bytes(ram: &GuestRam) -> u64 {
    ram.regions().iter().map(|region| region.len_bytes()).fold(0, u64::saturating_add)
}

/// A balloon.
pub struct Balloon {
    config: BalloonConfig,
    features: u64,
    pub(super) shared: Arc<Shared>,
    workers: Workers,
}

impl Balloon {
    /// An empty balloon for this memory.
    ///
    /// # Errors
    /// The target exceeds the maximum memory of the guest, or a host resource is not available.
    pub fn new(config: BalloonConfig, ram: Arc<GuestRam>) -> Result<Self, BalloonError> {
        let wanted_pages = pages_of(config.size_bytes, most_bytes(&ram))?;
        let full_bytes = ram.total_bytes().saturating_add(config.coming_bytes);
        let features = offered(&config, &ram);
        let shared = Arc::new(Shared::new(ram).map_err(BalloonError::Resource)?);
        shared.stage(StagedTarget::new(wanted_pages, full_bytes));
        Ok(Self { config, features, shared, workers: Workers::default() })
    }

    /// A handle to the balloon.
    pub fn handle(&self) -> BalloonHandle {
        BalloonHandle { shared: Arc::clone(&self.shared) }
    }

    /// The counters of the balloon.
    pub fn counters(&self) -> Arc<BalloonCounters> {
        Arc::new(BalloonCounters(Arc::downgrade(&self.shared)))
    }
}

/// The features offered with this configuration.
fn offered(config: &BalloonConfig, ram: &GuestRam) -> u64 {
    let mut reporting = config.free_page_reporting;
    if reporting && let Some(reason) = ram.discards_banned() {
        // The guest reuses reported pages without notice, and a device may be the first to access them:
        // they could not be pinned again in time.
        warn!(
            "free_page_reporting=on is not offered to the guest: {reason}; a balloon size \
             (vm.resize, desired_balloon) or virtio-mem return memory alongside passed-through devices"
        );
        reporting = false;
    }
    let bit = |on: bool, bit: u64| if on { bit } else { 0 };
    RING_FEATURES
        | F_MUST_TELL_HOST
        | bit(config.statistics_every.is_some(), F_STATS_VQ)
        | bit(config.deflate_on_oom, F_DEFLATE_ON_OOM)
        | bit(config.free_page_hinting, F_FREE_PAGE_HINT)
        // Also for hints alone: pages that are zero for the device need not match the guest's fill value.
        | bit(config.free_page_hinting || reporting || config.prezero_hints, F_PAGE_POISON)
        | bit(reporting, F_PAGE_REPORTING)
        | bit(reporting && config.prezero_hints, F_DEVICE_INIT_REPORTED)
        | bit(config.prezero_hints, F_DEVICE_INIT_ON_INFLATE)
}

impl VirtioDevice for Balloon {
    fn device_id(&self) -> u16 {
        DEVICE_ID
    }

    fn queue_sizes_max(&self) -> &[u16] {
        // All possible queues: drivers number the optional ones in two ways.
        &[QUEUE_SIZE; 5]
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let bytes = self.shared.config().bytes(self.shared.hinting.command());
        read_config_bytes(&bytes, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.shared.change_config(|config| config.write(offset, data));
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { memory, interrupt, queues, features } = activation;
        let queues = Queues::sort(queues, features)?
            .map(|queue| WorkQueue::new(queue, &memory, &interrupt, features));
        let every = self.config.statistics_every;
        let worker = BalloonWorker::new(queues, &self.shared, features, every)
            .map_err(|source| ActivateError::Resource { what: "prepare the balloon", source })?;
        self.workers.spawn(&self.config.id, &[], worker)?;
        self.shared.set_driver(Some(Driver { interrupt, features }));
        Ok(())
    }

    fn reset(&mut self) {
        self.shared.set_driver(None);
        self.workers.stop();
        self.shared.hinting.end(HintingEnd::Reset);
        // The driver has forgotten the pages in the balloon, and uses them again without notice.
        self.shared.ram.repin(&(0..u64::MAX));
        self.shared.change_config(|config| {
            config.actual_pages = 0;
            config.poison = 0;
        });
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        state::save(self.shared.config(), self.shared.hinting.last_command())
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let (config, hint_command) =
            state::check(state, most_bytes(&self.shared.ram) / PAGE_BYTES)?;
        self.shared.restore(config);
        self.shared.hinting.restore(hint_command);
        Ok(())
    }
}
