// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The order of calls by which a vDPA device starts, stops, and is suspended in between.
//!
//! Owns what is mapped for the device. Guest memory is mapped at its guest physical addresses from the start of the
//! device to its reset, in chunks, so that a driver that resets the device meanwhile does not wait for all of it. Memory that is mapped may be pinned: nothing of it may be discarded, plugged or
//! unplugged, for which a ban ([`memory::DiscardBan`]) has to be in force. It must never read or write a ring.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use memory::{GuestRam, RamRegion};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
    VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
};
use virtio_queue::{Queue, QueueT as _};
use vmm_sys_util::eventfd::EventFd;

use super::backend::{Backend, RingPlace};
use super::error::VdpaError;
use super::offer::Offer;
use crate::virtio::Kicks;
use crate::{LogLimit, log_limited};

/// Bytes mapped in one call: pinning them takes a fraction of a second, for which a reset may have to wait.
const CHUNK_BYTES: u64 = 256 << 20;

/// Steps of a driver (virtio 1.3, 3.1.1), as values of the status.
const ACKNOWLEDGE: u8 = status_bit(VIRTIO_CONFIG_S_ACKNOWLEDGE);
const DRIVER: u8 = ACKNOWLEDGE | status_bit(VIRTIO_CONFIG_S_DRIVER);
const FEATURES_OK: u8 = DRIVER | status_bit(VIRTIO_CONFIG_S_FEATURES_OK);
const DRIVER_OK: u8 = FEATURES_OK | status_bit(VIRTIO_CONFIG_S_DRIVER_OK);
const NEEDS_RESET: u8 = status_bit(VIRTIO_CONFIG_S_NEEDS_RESET);

#[expect(clippy::cast_possible_truncation, reason = "all bits of the status are in a byte")]
const fn status_bit(bit: u32) -> u8 {
    bit as u8
}

/// The result of a call, with its name.
pub(super) fn called<T>(call: &'static str, result: io::Result<T>) -> Result<T, VdpaError> {
    result.map_err(|source| VdpaError::Call { call, source })
}

/// A queue that the device serves.
pub(super) struct Ring {
    /// Its index in the device.
    pub(super) index: u16,
    /// As the driver has set it up.
    pub(super) queue: Queue,
    /// Notifications that the kernel does not take.
    pub(super) trapped: EventFd,
    /// Where the eventfd of the others comes from.
    pub(super) kicks: Arc<dyn Kicks>,
    /// Signalled by the device.
    pub(super) call: EventFd,
}

/// What the device does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It is reset, and reaches no memory.
    Stopped,
    /// It serves its queues.
    Runs,
    /// It keeps its state and serves nothing.
    Suspended,
}

/// A device from its start to its reset.
pub(super) struct Session {
    backend: Arc<dyn Backend>,
    ram: Arc<GuestRam>,
    offer: Arc<Offer>,
    /// Set when the device is to be reset: nothing more is mapped then.
    stops: Arc<AtomicBool>,
    /// That of the device: its driver resets it as often as it likes.
    log: Arc<LogLimit>,
    /// Guest physical ranges, as they were mapped.
    mapped: Vec<Range<u64>>,
    phase: Phase,
}

impl Session {
    /// A session with a device that is reset.
    pub(super) fn new(
        backend: Arc<dyn Backend>,
        ram: Arc<GuestRam>,
        offer: Arc<Offer>,
        stops: Arc<AtomicBool>,
        log: Arc<LogLimit>,
    ) -> Self {
        Self { backend, ram, offer, stops, log, mapped: Vec::new(), phase: Phase::Stopped }
    }

    /// What the device does.
    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    /// Starts the device with the features that the driver has accepted, and its queues.
    ///
    /// # Errors
    /// A call fails, or the device does not accept what it has offered; it is reset then.
    pub(super) fn start(
        &mut self,
        features: u64,
        rings: &[Ring],
        config_call: &EventFd,
    ) -> Result<(), VdpaError> {
        let started = self.try_start(features, rings, config_call);
        if started.is_err() {
            self.reset();
        }
        started
    }

    fn try_start(
        &mut self,
        features: u64,
        rings: &[Ring],
        config_call: &EventFd,
    ) -> Result<(), VdpaError> {
        let backend = Arc::clone(&self.backend);
        let set_status = |status| called("VHOST_VDPA_SET_STATUS", backend.set_status(status));
        let status = || called("VHOST_VDPA_GET_STATUS", backend.status());
        set_status(0)?;
        set_status(ACKNOWLEDGE)?;
        set_status(DRIVER)?;
        let features = features & self.offer.features | self.offer.features_always;
        called("VHOST_SET_FEATURES", backend.set_features(features))?;
        set_status(FEATURES_OK)?;
        if status()? & FEATURES_OK != FEATURES_OK {
            return Err(VdpaError::FeaturesRefused(features));
        }
        self.map_memory()?;
        for ring in rings {
            self.set_up(ring)?;
        }
        called("VHOST_VDPA_SET_CONFIG_CALL", backend.set_config_call(config_call))?;
        for ring in rings {
            called("VHOST_VDPA_SET_VRING_ENABLE", backend.enable_vring(ring.index))?;
        }
        set_status(DRIVER_OK)?;
        match status()? {
            status if status & (DRIVER_OK | NEEDS_RESET) != DRIVER_OK => {
                return Err(VdpaError::NotStarted(status));
            }
            _ => self.phase = Phase::Runs,
        }
        // Last: each is signalled already, and a device that does not run yet may forget it.
        self.send_kicks(rings)
    }

    fn set_up(&self, ring: &Ring) -> Result<(), VdpaError> {
        let (backend, index, queue) = (&self.backend, ring.index, &ring.queue);
        let place = RingPlace {
            size: queue.size(),
            desc_table: queue.desc_table(),
            avail_ring: queue.avail_ring(),
            used_ring: queue.used_ring(),
        };
        called("VHOST_SET_VRING_NUM", backend.set_vring_num(index, place.size))?;
        called("VHOST_SET_VRING_ADDR", backend.set_vring_addr(index, &place))?;
        called("VHOST_SET_VRING_BASE", backend.set_vring_base(index, queue.next_avail()))?;
        called("VHOST_SET_VRING_CALL", backend.set_vring_call(index, &ring.call))
    }

    fn send_kicks(&self, rings: &[Ring]) -> Result<(), VdpaError> {
        rings.iter().try_for_each(|ring| self.send_kick(ring))
    }

    /// Gives a queue another eventfd, which is signalled already.
    pub(super) fn send_kick(&self, ring: &Ring) -> Result<(), VdpaError> {
        let kick = ring.kicks.renew(ring.index);
        let kick = kick.map_err(|source| VdpaError::Resource {
            what: "make the eventfd of a queue",
            source,
        })?;
        called("VHOST_SET_VRING_KICK", self.backend.set_vring_kick(ring.index, &kick))
    }

    /// Whether the device says that it needs a reset.
    pub(super) fn needs_reset(&self) -> Result<bool, VdpaError> {
        let status = called("VHOST_VDPA_GET_STATUS", self.backend.status())?;
        Ok(status & NEEDS_RESET != 0)
    }

    /// Has a device that runs keep its state and serve nothing, if it can, and notes the next available entries.
    /// Another goes on.
    ///
    /// # Errors
    /// A call fails; the device is reset then.
    pub(super) fn suspend(&mut self, rings: &mut [Ring]) -> Result<(), VdpaError> {
        if self.phase != Phase::Runs || !self.offer.can_suspend {
            return Ok(());
        }
        let suspended = self.try_suspend(rings);
        if suspended.is_err() {
            self.reset();
        }
        suspended
    }

    fn try_suspend(&mut self, rings: &mut [Ring]) -> Result<(), VdpaError> {
        called("VHOST_VDPA_SUSPEND", self.backend.suspend())?;
        self.phase = Phase::Suspended;
        for ring in rings {
            let base = called("VHOST_GET_VRING_BASE", self.backend.vring_base(ring.index))?;
            // The upper half is for packed rings, which are not offered.
            ring.queue.set_next_avail(u16::try_from(base & 0xffff).unwrap_or(0));
        }
        Ok(())
    }

    /// Lets a device that was suspended go on.
    ///
    /// # Errors
    /// A call fails; the device is reset then.
    pub(super) fn resume(&mut self, rings: &[Ring]) -> Result<(), VdpaError> {
        if self.phase != Phase::Suspended {
            return Ok(());
        }
        let resumed = called("VHOST_VDPA_RESUME", self.backend.resume()).and_then(|()| {
            self.phase = Phase::Runs;
            // A notification that came while it was suspended may be forgotten.
            self.send_kicks(rings)
        });
        if resumed.is_err() {
            self.reset();
        }
        resumed
    }

    /// Resets the device, and unmaps guest memory. What fails is logged: the kernel resets and unmaps what is left
    /// when the device is closed.
    pub(super) fn reset(&mut self) {
        self.phase = Phase::Stopped;
        if let Err(error) = called("VHOST_VDPA_SET_STATUS", self.backend.set_status(0)) {
            let why = error_text::chain(&error);
            log_limited!(self.log, Warn, "cannot reset a vDPA device: {why}");
        }
        let mapped = std::mem::take(&mut self.mapped);
        if mapped.is_empty() {
            return;
        }
        let unmapped = self.in_batch(|backend| {
            let results = mapped
                .iter()
                .map(|range| backend.unmap(range.start, range.end.saturating_sub(range.start)));
            // All of them, also after one that fails.
            let failed = results.fold(Ok(()), std::result::Result::and);
            called("VHOST_IOTLB_INVALIDATE", failed)
        });
        if let Err(error) = unmapped {
            let why = error_text::chain(&error);
            log_limited!(self.log, Warn, "cannot unmap memory of a vDPA device: {why}");
        }
    }

    /// Makes several changes of mappings, as one where the device can.
    fn in_batch(
        &self,
        change: impl FnOnce(&dyn Backend) -> Result<(), VdpaError>,
    ) -> Result<(), VdpaError> {
        if !self.offer.has_batches {
            return change(&*self.backend);
        }
        called("VHOST_IOTLB_BATCH_BEGIN", self.backend.begin_batch())?;
        let changed = change(&*self.backend);
        // Also after an error: a batch that is open would take in what follows.
        let ended = called("VHOST_IOTLB_BATCH_END", self.backend.end_batch());
        changed.and(ended)
    }

    fn map_memory(&mut self) -> Result<(), VdpaError> {
        let ram = Arc::clone(&self.ram);
        let stops = Arc::clone(&self.stops);
        let mut mapped = Vec::new();
        let result = self.in_batch(|backend| {
            for region in ram.regions() {
                for chunk in chunks(region) {
                    if stops.load(Ordering::Acquire) {
                        return Err(VdpaError::Cancelled);
                    }
                    mapped.push(map(backend, region, &chunk)?);
                }
            }
            Ok(())
        });
        self.mapped = mapped;
        result
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.phase != Phase::Stopped {
            self.reset();
        }
    }
}

/// The memory of a region that the guest has, in pieces to be mapped, as bytes of the region.
fn chunks(region: &RamRegion) -> impl Iterator<Item = Range<u64>> + use<> {
    region.usable_runs().into_iter().flat_map(|run| {
        let starts = (0..)
            .map(move |number: u64| run.start.saturating_add(number.saturating_mul(CHUNK_BYTES)));
        starts
            .take_while(move |start| *start < run.end)
            .map(move |start| start..run.end.min(start.saturating_add(CHUNK_BYTES)))
    })
}

/// Maps a part of a region; returns its guest physical addresses.
fn map(
    backend: &dyn Backend,
    region: &RamRegion,
    chunk: &Range<u64>,
) -> Result<Range<u64>, VdpaError> {
    let len_bytes = chunk.end.saturating_sub(chunk.start);
    let gpa = region.gpa().saturating_add(chunk.start);
    let start = usize::try_from(chunk.start).unwrap_or(usize::MAX);
    let address = region.as_ptr().wrapping_add(start);
    backend.map(gpa, len_bytes, address).map_err(|source| VdpaError::Map {
        gpa,
        len_bytes,
        source,
    })?;
    Ok(gpa..gpa.saturating_add(len_bytes))
}

/// Checks that a device can be given all memory that the guest has.
///
/// # Errors
/// The memory that it cannot reach.
pub(super) fn check_reach(backend: &dyn Backend, ram: &GuestRam) -> Result<(), VdpaError> {
    let range = called("VHOST_VDPA_GET_IOVA_RANGE", backend.iova_range())?;
    for region in ram.regions() {
        for run in region.usable_runs().into_iter().filter(|run| !run.is_empty()) {
            let start = region.gpa().saturating_add(run.start);
            let end = region.gpa().saturating_add(run.end.saturating_sub(1));
            if start < *range.start() || end > *range.end() {
                let (first, last) = (*range.start(), *range.end());
                return Err(VdpaError::Iova { start, end, first, last });
            }
        }
    }
    Ok(())
}
