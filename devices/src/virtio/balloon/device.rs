// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The balloon device.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use log::warn;
use memory::GuestRam;
use thiserror::Error;
use virtio_queue::QueueState;

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
use crate::virtio::worker::{PendingPause, Workers};
use crate::virtio::{RING_FEATURES, read_config_bytes};

/// Virtio device ID of traditional balloons.
const DEVICE_ID: u16 = 5;
/// What upstream's balloon has. Linux never has more than one request in a queue, but for hints.
const QUEUE_SIZE: u16 = 128;

/// What a balloon is made from.
#[derive(Clone, Debug, Default)]
pub struct BalloonConfig {
    /// Name of the device, for its thread.
    pub id: String,
    /// Bytes that the balloon is to have when the guest has `coming_bytes` more than now; until then
    /// what is missing of those counts as if it were in the balloon.
    pub size_bytes: u64,
    /// Bytes that the guest is to get by memory devices and has not.
    pub coming_bytes: u64,
    /// The guest may take pages out when it runs out of memory.
    pub deflate_on_oom: bool,
    /// The guest may report free pages.
    pub free_page_reporting: bool,
    /// The guest may be asked for free pages during a migration.
    pub free_page_hinting: bool,
    /// How often the guest is asked for statistics.
    pub statistics_every: Option<Duration>,
    /// The guest is told which pages come back as zeros, by feature bits that are not standard yet.
    pub prezero_hints: bool,
}

/// Why a balloon could not be made or changed.
#[derive(Debug, Error)]
pub enum BalloonError {
    /// The host refused a resource.
    #[error("the host refuses an event descriptor")]
    Resource(#[source] io::Error),
    /// Larger than the guest.
    #[error(
        "a balloon of {size_bytes} bytes does not fit into the {ram_bytes} bytes of the guest: \
         make it smaller"
    )]
    TooLarge {
        /// What was asked for.
        size_bytes: u64,
        /// What there is.
        ram_bytes: u64,
    },
}

/// A handle of the balloon, for the VMM while the transport owns the device.
#[derive(Clone)]
pub struct BalloonHandle {
    shared: Arc<Shared>,
}

impl BalloonHandle {
    /// Whether it could be so large.
    ///
    /// # Errors
    /// It is larger than the guest's memory.
    pub fn check(&self, size_bytes: u64) -> Result<(), BalloonError> {
        pages_of(size_bytes, self.shared.ram.total_bytes()).map(drop)
    }

    /// Sets how large the balloon is to be; the guest brings it there when it can. A guest that took
    /// pages out because it had no others does not put them in again by itself: it is told whenever it
    /// has not what it is to have, also if that is what it was to have before.
    ///
    /// # Errors
    /// It is larger than the guest's memory.
    pub fn resize(&self, size_bytes: u64) -> Result<(), BalloonError> {
        let target_pages = pages_of(size_bytes, self.shared.ram.total_bytes())?;
        self.tell(self.shared.set_target(target_pages));
        Ok(())
    }

    /// To be called when the guest has got more memory, so that a balloon that has been waiting for it
    /// can become as large as it is to be. May be called on any thread.
    pub fn memory_has_grown(&self) {
        self.tell(self.shared.memory_has_grown());
    }

    fn tell(&self, news: bool) {
        if let Some(driver) = self.shared.driver().filter(|_| news) {
            driver.interrupt.config_changed();
        }
    }

    /// Bytes that the balloon is to have.
    pub fn target_bytes(&self) -> u64 {
        self.shared.target_bytes()
    }

    /// Bytes that the guest says it has.
    pub fn actual_bytes(&self) -> u64 {
        self.shared.actual_bytes()
    }

    /// What the guest last said of its memory.
    pub fn statistics(&self) -> Statistics {
        self.shared.statistics()
    }

    /// Memory that is in the balloon and could not be discarded before may be discarded now.
    pub fn retry(&self) {
        // A full counter also means that the thread will look.
        let _ = self.shared.retry().write(1);
    }

    /// Asks the guest for its free pages. Writes must have been logged since before this call, and
    /// a page that was written since is not free whatever the hints say.
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

/// Memory that the guest has once all that may ever come has come. A guest may have less than its
/// balloon is to have: one that is returning memory, or has just booted.
fn most_bytes(ram: &GuestRam) -> u64 {
    ram.regions().iter().map(|region| region.len_bytes()).fold(0, u64::saturating_add)
}

/// A balloon.
pub struct Balloon {
    config: BalloonConfig,
    features: u64,
    shared: Arc<Shared>,
    workers: Workers,
}

impl Balloon {
    /// A balloon over this memory, empty.
    ///
    /// # Errors
    /// It is to be larger than the memory that the guest can ever have, or the host refuses a resource.
    pub fn new(config: BalloonConfig, ram: Arc<GuestRam>) -> Result<Self, BalloonError> {
        let wanted_pages = pages_of(config.size_bytes, most_bytes(&ram))?;
        let full_bytes = ram.total_bytes().saturating_add(config.coming_bytes);
        let features = offered(&config, &ram);
        let shared = Arc::new(Shared::new(ram).map_err(BalloonError::Resource)?);
        shared.stage(StagedTarget::new(wanted_pages, full_bytes));
        Ok(Self { config, features, shared, workers: Workers::default() })
    }

    /// The handle by which a running VM reaches it.
    pub fn handle(&self) -> BalloonHandle {
        BalloonHandle { shared: Arc::clone(&self.shared) }
    }

    /// Its counters.
    pub fn counters(&self) -> Arc<BalloonCounters> {
        Arc::new(BalloonCounters(Arc::downgrade(&self.shared)))
    }
}

/// The features of a balloon that is made so.
fn offered(config: &BalloonConfig, ram: &GuestRam) -> u64 {
    let mut reporting = config.free_page_reporting;
    if reporting && let Some(reason) = ram.discards_banned() {
        // The guest uses reported pages again without a word, and a device may be the first to
        // touch them: nothing could be done in between.
        warn!(
            "free_page_reporting=on is not offered to the guest: {reason}; a balloon size \
             (vm.resize, desired_balloon) or virtio-mem return memory alongside such a device"
        );
        reporting = false;
    }
    let bit = |on: bool, bit: u64| if on { bit } else { 0 };
    RING_FEATURES
        | F_MUST_TELL_HOST
        | bit(config.statistics_every.is_some(), F_STATS_VQ)
        | bit(config.deflate_on_oom, F_DEFLATE_ON_OOM)
        | bit(config.free_page_hinting, F_FREE_PAGE_HINT)
        // Also for hints alone: what is zero for the device need not be what the guest wants.
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
        // All that there can be: drivers count the optional ones in two ways.
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
        // The driver has forgotten what it had in the balloon, and asks for nothing before it uses it.
        self.shared.ram.repin(&(0..u64::MAX));
        self.shared.change_config(|config| {
            config.actual_pages = 0;
            config.poison = 0;
        });
    }

    fn pause(&mut self) -> Vec<(u16, QueueState)> {
        self.workers.pause()
    }

    fn begin_pause(&mut self) -> PendingPause {
        self.workers.begin_pause()
    }

    fn resume(&mut self) {
        self.workers.resume();
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
