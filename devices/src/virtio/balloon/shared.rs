// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! State shared by the device, its thread and its handles.
//!
//! Owns the locks: each is held only to read or set a value, and never while another is held.

use std::io;
use std::sync::Arc;

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

/// A driver that is there.
#[derive(Clone)]
pub(super) struct Driver {
    pub(super) interrupt: Arc<dyn VirtioInterrupt>,
    pub(super) features: u64,
}

/// What is changed together.
#[derive(Default)]
struct GuardedConfig {
    space: ConfigSpace,
    /// While the guest is still to get some of its memory.
    staged: Option<StagedTarget>,
}

/// See the module.
pub(crate) struct Shared {
    pub(super) ram: Arc<GuestRam>,
    pub(super) counters: OperationCounters,
    pub(super) hinting: Hinting,
    /// For what goes wrong because of what the driver does.
    pub(super) log: Arc<LogLimit>,
    config: Mutex<GuardedConfig>,
    statistics: Mutex<Statistics>,
    driver: Mutex<Option<Driver>>,
    /// Signalled when memory may be discarded that could not be discarded before.
    retry: EventFd,
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
        })
    }

    pub(super) fn config(&self) -> ConfigSpace {
        self.config.lock().space
    }

    pub(super) fn change_config<T>(&self, change: impl FnOnce(&mut ConfigSpace) -> T) -> T {
        change(&mut self.config.lock().space)
    }

    /// The balloon is to have what there is of `staged` now, and the rest as memory comes.
    pub(super) fn stage(&self, staged: StagedTarget) {
        let target_pages = staged.pages_at(self.ram.total_bytes());
        let mut held = self.config.lock();
        held.space.target_pages = target_pages;
        held.staged = Some(staged).filter(|staged| !staged.is_over(target_pages));
    }

    /// Goes on from a saved target.
    pub(super) fn restore(&self, space: ConfigSpace) {
        let mut held = self.config.lock();
        held.space = space;
        held.staged = held.staged.filter(|staged| !staged.is_over(space.target_pages));
    }

    /// Sets what the balloon is to have from now on, whatever is still to come. True if the driver has
    /// to be told.
    pub(super) fn set_target(&self, target_pages: u32) -> bool {
        let mut held = self.config.lock();
        held.staged = None;
        let changed = std::mem::replace(&mut held.space.target_pages, target_pages) != target_pages;
        changed || held.space.actual_pages != target_pages
    }

    /// The guest has more memory than before: the balloon may be larger, as far as it is to be. True
    /// if the driver has to be told.
    pub(super) fn memory_has_grown(&self) -> bool {
        let usable_bytes = self.ram.total_bytes();
        let mut held = self.config.lock();
        let Some(staged) = held.staged else { return false };
        let target_pages = staged.pages_at(usable_bytes);
        // Two threads may tell of growth the wrong way round.
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

    /// What the driver says the balloon has, and not more than there is.
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

    /// The way to tell a driver of a command for hints, if it knows such.
    pub(super) fn hints_interrupt(&self) -> Option<Arc<dyn VirtioInterrupt>> {
        let driver = self.driver()?;
        (driver.features & F_FREE_PAGE_HINT != 0).then_some(driver.interrupt)
    }

    /// As if a migration had asked, for callers without a driver.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn want_hints(&self) {
        self.hinting.ask(super::hinting::maps(&self.ram).unwrap_or_default());
    }

    pub(super) fn retry(&self) -> &EventFd {
        &self.retry
    }
}
