// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the device, its thread and its handles share.
//!
//! Owns the locks: each is held only to look and to set, and none while another is.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memory::GuestRam;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::config::ConfigSpace;
use super::counters::Done;
use super::hinting::Hinting;
use super::statistics::Statistics;
use super::{F_FREE_PAGE_HINT, PAGE_BYTES};
use crate::virtio::VirtioInterrupt;

/// A driver that is there.
#[derive(Clone)]
pub(super) struct Driver {
    pub(super) interrupt: Arc<dyn VirtioInterrupt>,
    pub(super) features: u64,
}

/// See the module.
pub(crate) struct Shared {
    pub(super) ram: Arc<GuestRam>,
    pub(super) done: Done,
    pub(super) hinting: Hinting,
    config: Mutex<ConfigSpace>,
    statistics: Mutex<Statistics>,
    driver: Mutex<Option<Driver>>,
    /// Signalled when memory may be given back that could not be before.
    retry: EventFd,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(ram: Arc<GuestRam>) -> io::Result<Self> {
        Ok(Self {
            ram,
            done: Done::default(),
            hinting: Hinting::default(),
            config: Mutex::default(),
            statistics: Mutex::default(),
            driver: Mutex::default(),
            retry: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    pub(super) fn config(&self) -> ConfigSpace {
        *lock(&self.config)
    }

    pub(super) fn change_config<T>(&self, change: impl FnOnce(&mut ConfigSpace) -> T) -> T {
        change(&mut lock(&self.config))
    }

    pub(super) fn target_bytes(&self) -> u64 {
        u64::from(self.config().target_pages) * PAGE_BYTES
    }

    /// What the driver says the balloon has, and not more than there is.
    pub(super) fn actual_bytes(&self) -> u64 {
        (u64::from(self.config().actual_pages) * PAGE_BYTES).min(self.ram.total_bytes())
    }

    pub(super) fn statistics(&self) -> Statistics {
        lock(&self.statistics).clone()
    }

    pub(super) fn take_statistics(&self, buffer: &[u8]) {
        lock(&self.statistics).take(buffer);
    }

    pub(super) fn driver(&self) -> Option<Driver> {
        lock(&self.driver).clone()
    }

    pub(super) fn set_driver(&self, driver: Option<Driver>) {
        *lock(&self.driver) = driver;
    }

    /// The way to tell a driver of a command for hints, if it knows such.
    pub(super) fn hints_interrupt(&self) -> Option<Arc<dyn VirtioInterrupt>> {
        let driver = self.driver()?;
        (driver.features & F_FREE_PAGE_HINT != 0).then_some(driver.interrupt)
    }

    /// As if a migration had asked, for whoever has no driver.
    pub(crate) fn want_hints(&self) {
        self.hinting.ask(super::hinting::maps(&self.ram).unwrap_or_default());
    }

    pub(super) fn retry(&self) -> &EventFd {
        &self.retry
    }
}
