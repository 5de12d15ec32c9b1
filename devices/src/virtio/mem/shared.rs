// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the device, its thread and its handles share.
//!
//! Owns how much the guest is to have. Takes no lock but to look at the driver.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use log::{debug, warn};
use memory::plugging::PlugError;
use memory::{GuestRam, RamRegion};

use super::config::ConfigSpace;
use super::requests::{Answer, Blocks, Have, Request};
use crate::virtio::VirtioInterrupt;

/// See the module.
pub(crate) struct Shared {
    ram: Arc<GuestRam>,
    region: Arc<RamRegion>,
    pub(super) block_bytes: u64,
    requested_bytes: AtomicU64,
    /// A driver that is there. Held to look and to set.
    driver: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
    /// Called when the guest has got more of the region.
    pub(super) growth: OnceLock<Arc<dyn Fn() + Send + Sync>>,
}

impl Shared {
    /// `None` if the region does not come in blocks.
    pub(crate) fn new(ram: Arc<GuestRam>, region: Arc<RamRegion>) -> Option<Self> {
        let block_bytes = region.block_bytes()?;
        let (requested_bytes, driver) = (AtomicU64::new(0), Mutex::new(None));
        Some(Self { ram, region, block_bytes, requested_bytes, driver, growth: OnceLock::new() })
    }

    pub(super) fn region(&self) -> &RamRegion {
        &self.region
    }

    pub(super) fn config(&self) -> ConfigSpace {
        ConfigSpace {
            block_bytes: self.block_bytes,
            gpa: self.region.gpa(),
            region_bytes: self.region.len_bytes(),
            plugged_bytes: self.region.usable_bytes(),
            requested_bytes: self.requested_bytes(),
        }
    }

    pub(super) fn requested_bytes(&self) -> u64 {
        self.requested_bytes.load(Ordering::Acquire)
    }

    /// Sets what the guest is to have, and tells its driver if that is another amount.
    pub(crate) fn request(&self, bytes: u64) {
        if self.requested_bytes.swap(bytes, Ordering::AcqRel) != bytes {
            self.tell_driver();
        }
    }

    /// Makes the driver compare what it has with what it is to have.
    pub(super) fn tell_driver(&self) {
        if let Some(driver) = &*self.driver.lock().unwrap_or_else(PoisonError::into_inner) {
            driver.config_changed();
        }
    }

    pub(super) fn set_driver(&self, driver: Option<Arc<dyn VirtioInterrupt>>) {
        *self.driver.lock().unwrap_or_else(PoisonError::into_inner) = driver;
    }

    /// Carries out a request of the driver.
    pub(super) fn serve(&self, request: Request) -> Answer {
        debug!("{request:?}");
        match request {
            Request::Plug(blocks) => self.plug(blocks),
            Request::Unplug(blocks) => match self.range(blocks) {
                Some(range) => answer(&self.ram.unplug(&range)),
                None => Answer::Error,
            },
            Request::UnplugAll => self.unplug_all(),
            Request::State(blocks) => match self.range(blocks) {
                Some(range) => Answer::State(self.have(&range)),
                None => Answer::Error,
            },
            Request::Unknown(_) => Answer::Error,
        }
    }

    fn plug(&self, blocks: Blocks) -> Answer {
        let Some(range) = self.range(blocks) else { return Answer::Error };
        if self.have(&range) != Have::None {
            return Answer::Error;
        }
        let wanted = self.region.usable_bytes().saturating_add(range.end - range.start);
        if wanted > self.requested_bytes() {
            return Answer::Nack;
        }
        let done = self.ram.plug(&range);
        if done.is_ok()
            && let Some(listener) = self.growth.get()
        {
            listener();
        }
        answer(&done)
    }

    fn unplug_all(&self) -> Answer {
        let gpa = self.region.gpa();
        for run in self.region.usable_runs() {
            let answer = answer(&self.ram.unplug(&(gpa + run.start..gpa + run.end)));
            if answer != Answer::Ack {
                return answer;
            }
        }
        Answer::Ack
    }

    /// The guest addresses of blocks within the region.
    fn range(&self, blocks: Blocks) -> Option<Range<u64>> {
        let start = blocks.gpa.checked_sub(self.region.gpa())?;
        let len_bytes = u64::from(blocks.count).checked_mul(self.block_bytes)?;
        let end = start.checked_add(len_bytes)?;
        let fits = start.is_multiple_of(self.block_bytes) && end <= self.region.len_bytes();
        (fits && blocks.count > 0).then(|| blocks.gpa..blocks.gpa + len_bytes)
    }

    fn have(&self, range: &Range<u64>) -> Have {
        let gpa = self.region.gpa();
        match self.region.is_usable(&(range.start - gpa..range.end - gpa)) {
            (_, true) => Have::All,
            (false, _) => Have::None,
            (true, false) => Have::Some,
        }
    }
}

fn answer(done: &Result<(), PlugError>) -> Answer {
    let Err(error) = done else { return Answer::Ack };
    match error {
        PlugError::NotBlocks { .. } => Answer::Error,
        PlugError::Busy { .. } => {
            debug!("{error}");
            Answer::Busy
        }
        PlugError::NoPages(_) | PlugError::NotMapped { .. } => {
            // Drivers try again after a while, and somebody may have raised the limit by then.
            warn!("a guest gets less memory than it is to have: {}", error_text::chain(error));
            Answer::Busy
        }
    }
}
