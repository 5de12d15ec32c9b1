// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest memory that is mapped for the DMA of passed-through devices.
//!
//! Owns when that begins, and who waits for its end. Must never begin before a device is open: until then the kernel has
//! nothing to map for.

use std::sync::Arc;

use memory::GuestRam;
use vfio::{DmaMap, GuestRamPopulator, PinProgress, PinState, Pinning};

use super::outcome::{DiscardingDevices, EnableDiscards, lose_all, read, tell};
use super::populating::RamPopulator;
use super::{Passthrough, PassthroughError};
use crate::machine::events::GuestEvent;
use crate::machine::pausing::{CancelToken, POLL_INTERVAL};

impl Passthrough {
    /// Starts to map memory if there are devices and it is not being mapped yet, and waits for it if a
    /// device requires that: then it is called last before the vCPUs start. What populates memory early ends.
    ///
    /// With a balloon, memory is mapped in small pieces that are unmapped and mapped again as the balloon
    /// changes.
    ///
    /// # Errors
    /// A limit is too low, memory cannot be mapped, or the wait was cancelled.
    pub fn map_memory(
        &mut self,
        ram: &Arc<GuestRam>,
        discarding: DiscardingDevices,
        cancel: &CancelToken,
    ) -> Result<(), PassthroughError> {
        let Some(space) = self.space.clone().filter(|_| !self.devices.is_empty()) else {
            return Ok(());
        };
        let kept = self.take_kept();
        self.release_hold();
        let pinning = match &mut self.pinning {
            Some(pinning) => pinning,
            none => {
                let total_bytes = ram.total_bytes();
                let populator = GuestRamPopulator::new(Arc::clone(ram), self.threads);
                let populator = Arc::new(RamPopulator::new(populator, self.early.take()));
                let (target, gate) = (Arc::clone(&space), Arc::clone(&self.gate));
                // Weak: the list has the mapping, and the mapping has this. Both would stay for good, with the
                // guest's memory.
                let list = Arc::downgrade(&self.device_list);
                let sink = Arc::clone(&self.sink);
                let on_lost = Box::new(move |reason: &Arc<str>| {
                    if let Some(list) = list.upgrade() {
                        lose_all(reason, &list);
                    }
                    sink(GuestEvent::WithheldDevice);
                });
                let prepinned = self.prepinned.take();
                let is_complete = kept
                    .as_ref()
                    .map_or(prepinned.is_some(), |kept| kept.mapped_bytes() == total_bytes);
                let dma_map = match (kept, prepinned) {
                    (Some(kept), _) => DmaMap::kept(target, kept, on_lost),
                    (None, Some(slot)) => slot.dma_map(target, on_lost),
                    (None, None) => {
                        let discards = discarding.balloon.is_some();
                        DmaMap::plan(target, populator.as_ref(), discards, on_lost)
                    }
                };
                let list = Arc::clone(&self.device_list);
                let enable = EnableDiscards::new(discarding, self.ban.as_ref(), &dma_map);
                let sink = Arc::clone(&self.sink);
                let on_end = Box::new(move |state: &PinState| {
                    tell(state, total_bytes, &list);
                    sink(GuestEvent::WithheldDevice);
                    if let (PinState::Pinned { .. }, Some(enable)) = (state, enable) {
                        enable.apply();
                    }
                });
                // No guest runs yet that would be kept from its processors.
                let yields = !self.strict && !self.arrives;
                let pinning = if is_complete {
                    Pinning::complete(dma_map, gate, on_end)
                } else {
                    Pinning::start(dma_map, populator, gate, yields, on_end)?
                };
                read(&self.device_list).memory = Some(pinning.abandonment());
                none.insert(pinning)
            }
        };
        if self.strict && !self.arrives {
            while !pinning.has_ended_within(POLL_INTERVAL) {
                if cancel.is_cancelled() {
                    return Err(PassthroughError::Cancelled);
                }
            }
            pinning.wait()?;
            // Another caller may have waited before.
            if let PinState::Failed(reason) = pinning.progress().state {
                return Err(PassthroughError::MemoryFailed(reason));
            }
        }
        Ok(())
    }

    /// Leaves it to [`Self::await_memory`] to wait for memory, also for devices that are to have it mapped before
    /// the guest runs.
    pub fn map_beside(&mut self) {
        self.arrives = true;
    }

    /// Waits until all memory is mapped, however long that takes, or until `is_cancelled`.
    ///
    /// # Errors
    /// Memory cannot be mapped, or the wait was cancelled.
    pub fn await_memory(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), PassthroughError> {
        let Some(pinning) = &self.pinning else { return Ok(()) };
        while !pinning.ends_within(POLL_INTERVAL) {
            if is_cancelled() {
                return Err(PassthroughError::Cancelled);
            }
        }
        // Decided at the end in any case.
        Ok(self.gate.wait()?)
    }

    /// Releases every vCPU that waits for memory to be mapped.
    pub fn cancel(&self) {
        self.stop_early_populating();
        if let Some(pinning) = &self.pinning {
            pinning.cancel();
        }
    }

    /// Progress of mapping memory; `None` without devices.
    pub fn progress(&self) -> Option<PinProgress> {
        self.pinning.as_ref().map(Pinning::progress)
    }
}
