// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! State shared by the device, its thread and its handles.
//!
//! Owns the locks: each is held only to read or set a value, and never while another is held.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use memory::GuestRam;
use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::config::ConfigSpace;
use super::counters::OperationCounters;
use super::hinting::Hinting;
use super::statistics::Statistics;
use super::target::StagedTarget;
use super::{F_FREE_PAGE_HINT, PAGE_BYTES};
use crate::LogLimit;
use crate::virtio::VirtioInterrupt;

/// The current driver.
#[derive(Clone)]
pub(super) struct Driver {
    pub(super) interrupt: Arc<dyn VirtioInterrupt>,
    pub(super) features: u64,
}

/// State that changes together.
#[derive(Default)]
struct GuardedConfig {
    space: ConfigSpace,
    /// Present while the guest is still to get memory.
    staged: Option<StagedTarget>,
}

/// See the module.
pub(crate) struct Shared {
    pub(super) ram: Arc<GuestRam>,
    pub(super) counters: OperationCounters,
    pub(super) hinting: Hinting,
    /// Rate limit for messages about the driver's misbehaviour.
    pub(super) log: Arc<LogLimit>,
    config: Mutex<GuardedConfig>,
    statistics: Mutex<Statistics>,
    pub(super) driver: Mutex<Option<Driver>>,
    /// Signalled when memory may be discarded that could not be before, or was populated since.
    retry: EventFd,
    /// Whether memory in the balloon may have been populated since the last retry.
    populated: AtomicBool,
}

impl Shared {
    pub(crate) fn new(ram: Arc<GuestRam>) -> io::Result<Self> {
        Ok(Self {
            ram,
            counters: OperationCounters::default(),
            hinting: Hinting::default(),
            log: Arc::default(),
            config: Mutex::default(),
            statistics: Mutex::default(),
            driver: Mutex::default(),
            retry: EventFd::new(EFD_NONBLOCK)?,
            populated: AtomicBool::new(false),
        })
    }

    pub(super) fn config(&self) -> ConfigSpace {
        self.config.lock().space
    }

    pub(super) fn change_config<T>(&self, change: impl FnOnce(&mut ConfigSpace) -> T) -> T {
        change(&mut self.config.lock().space)
    }

    /// Sets a target that grows with the guest's memory.
    pub(super) fn stage(&self, staged: StagedTarget) {
        let target_pages = staged.pages_at(self.ram.total_bytes());
        let mut held = self.config.lock();
        held.space.target_pages = target_pages;
        held.staged = Some(staged).filter(|staged| !staged.is_over(target_pages));
    }

    /// Restores a saved target.
    pub(super) fn restore(&self, space: ConfigSpace) {
        let mut held = self.config.lock();
        held.space = space;
        held.staged = held.staged.filter(|staged| !staged.is_over(space.target_pages));
    }

    /// Sets the target, whatever memory is still to be plugged. True if the driver must be notified.
    pub(super) fn set_target(&self, target_pages: u32) -> bool {
        let mut held = self.config.lock();
        held.staged = None;
        let changed = std::mem::replace(&mut held.space.target_pages, target_pages) != target_pages;
        changed || held.space.actual_pages != target_pages
    }

    /// Raises a staged target after memory was plugged. True if the driver must be notified.
    pub(super) fn memory_has_grown(&self) -> bool {
        let usable_bytes = self.ram.total_bytes();
        let mut held = self.config.lock();
        let Some(staged) = held.staged else { return false };
        let target_pages = staged.pages_at(usable_bytes);
        // Two threads may report growth in the wrong order.
        let grows = target_pages > held.space.target_pages;
        if grows {
            held.space.target_pages = target_pages;
        }
        held.staged = Some(staged).filter(|staged| !staged.is_over(held.space.target_pages));
        grows
    }

    pub(super) fn target_bytes(&self) -> u64 {
        u64::from(self.config().target_pages) * PAGE_BYTES
    }

    /// The size that the driver reports in bytes, at most that of guest memory.
    pub(super) fn actual_bytes(&self) -> u64 {
        (u64::from(self.config().actual_pages) * PAGE_BYTES).min(self.ram.total_bytes())
    }

    pub(super) fn statistics(&self) -> Statistics {
        self.statistics.lock().clone()
    }

    pub(super) fn take_statistics(&self, buffer: &[u8]) {
        self.statistics.lock().take(buffer);
    }

    pub(super) fn driver(&self) -> Option<Driver> {
        self.driver.lock().clone()
    }

    pub(super) fn set_driver(&self, driver: Option<Driver>) {
        *self.driver.lock() = driver;
    }

    /// Tells the driver of a change of the configuration. A reset waits meanwhile, so that no later driver is
    /// interrupted.
    pub(super) fn interrupt_driver(&self) {
        if let Some(driver) = &*self.driver.lock() {
            driver.interrupt.config_changed();
        }
    }

    /// The interrupt for a hinting command, if the driver supports hints.
    pub(super) fn hints_interrupt(&self) -> Option<Arc<dyn VirtioInterrupt>> {
        let driver = self.driver()?;
        (driver.features & F_FREE_PAGE_HINT != 0).then_some(driver.interrupt)
    }

    /// Requests hints without a migration, for callers without a driver.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn want_hints(&self) {
        self.hinting.ask(super::hinting::maps(&self.ram).unwrap_or_default());
    }

    pub(super) fn retry(&self) -> &EventFd {
        &self.retry
    }

    /// Notes that memory in the balloon may have been populated; before the event is signalled.
    pub(super) fn note_populated(&self) {
        self.populated.store(true, Ordering::Release);
    }

    /// Whether that was noted since the last call; after the event was read.
    pub(super) fn take_populated(&self) -> bool {
        self.populated.swap(false, Ordering::AcqRel)
    }
}
