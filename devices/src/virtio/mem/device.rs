// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The memory device.

use std::io;
use std::sync::Arc;

use memory::GuestRam;
use thiserror::Error;
use virtio_queue::QueueState;

use super::worker::MemWorker;
use super::{F_UNPLUGGED_INACCESSIBLE, Shared, state};
use crate::virtio::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use crate::virtio::one_queue::only_queue;
use crate::virtio::worker::{PendingPause, Workers};
use crate::virtio::{RING_FEATURES, read_config_bytes};

/// Virtio device ID of memory devices.
const DEVICE_ID: u16 = 24;
const QUEUE_SIZE: u16 = 128;

/// What a memory device is made from.
#[derive(Clone, Debug)]
pub struct MemConfig {
    /// Name of the device, for its thread.
    pub id: String,
    /// The zone that it gives the guest block by block.
    pub zone: String,
    /// Bytes of it that the guest is to have at first.
    pub requested_bytes: u64,
}

/// Why a memory device could not be made or changed.
#[derive(Debug, Error)]
pub enum MemError {
    /// Its zone.
    #[error("there is no memory zone '{zone}' that comes in blocks")]
    NoZone {
        /// The name.
        zone: String,
    },
    /// The host.
    #[error("the host gives no descriptor for a memory device")]
    Resource(#[source] io::Error),
    /// An amount that it cannot have.
    #[error(
        "{wanted_bytes} bytes cannot be added by '{id}': it has room for {room_bytes}, in blocks of \
         {block_bytes}"
    )]
    Size {
        /// The device.
        id: String,
        /// What was asked for.
        wanted_bytes: u64,
        /// The most there can be.
        room_bytes: u64,
        /// What it must be a multiple of.
        block_bytes: u64,
    },
}

/// A handle of the device, for the VMM while the transport owns it.
#[derive(Clone)]
pub struct MemHandle {
    id: String,
    shared: Arc<Shared>,
}

impl MemHandle {
    /// Sets how much the guest is to have; its driver takes or gives blocks until it is there.
    ///
    /// # Errors
    /// It is more than there is room for, or not whole blocks.
    pub fn resize(&self, wanted_bytes: u64) -> Result<(), MemError> {
        let (room_bytes, block_bytes) = (self.room_bytes(), self.block_bytes());
        if wanted_bytes > room_bytes || !wanted_bytes.is_multiple_of(block_bytes) {
            let id = self.id.clone();
            return Err(MemError::Size { id, wanted_bytes, room_bytes, block_bytes });
        }
        self.shared.request(wanted_bytes);
        Ok(())
    }

    /// What could not be had or given before may be now: gives the host what is left of blocks that were
    /// unplugged, and tells the driver, which would wait for up to some minutes.
    pub fn retry(&self) {
        self.shared.ask_for_retry();
        if self.plugged_bytes() != self.requested_bytes() {
            self.shared.tell_driver();
        }
    }

    /// Has `listener` called, on the device's thread, whenever the guest has got more memory. Only the
    /// first one is; it must not wait.
    pub fn on_growth(&self, listener: Arc<dyn Fn() + Send + Sync>) {
        let _ = self.shared.growth.set(listener);
    }

    /// Bytes that the guest is to have.
    pub fn requested_bytes(&self) -> u64 {
        self.shared.requested_bytes()
    }

    /// Bytes that it has.
    pub fn plugged_bytes(&self) -> u64 {
        self.shared.region().usable_bytes()
    }

    /// Bytes that it can have at most.
    pub fn room_bytes(&self) -> u64 {
        self.shared.region().len_bytes()
    }

    /// What sizes are multiples of.
    pub fn block_bytes(&self) -> u64 {
        self.shared.block_bytes
    }
}

/// A memory device.
pub struct Mem {
    id: String,
    shared: Arc<Shared>,
    workers: Workers,
}

impl Mem {
    /// A device for a zone of this memory; the guest has nothing of it yet.
    ///
    /// # Errors
    /// There is no such zone, or the guest cannot have so much of it.
    pub fn new(config: &MemConfig, ram: &Arc<GuestRam>) -> Result<Self, MemError> {
        let no_zone = || MemError::NoZone { zone: config.zone.clone() };
        let region = ram.regions().iter().find(|region| region.zone_id() == config.zone);
        let region = region.ok_or_else(no_zone)?;
        let shared = Shared::new(Arc::clone(ram), Arc::clone(region));
        let shared = shared.map_err(MemError::Resource)?.ok_or_else(no_zone)?;
        let device =
            Self { id: config.id.clone(), shared: Arc::new(shared), workers: Workers::default() };
        device.handle().resize(config.requested_bytes)?;
        Ok(device)
    }

    /// The handle by which a running VM reaches it.
    pub fn handle(&self) -> MemHandle {
        MemHandle { id: self.id.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl VirtioDevice for Mem {
    fn device_id(&self) -> u16 {
        DEVICE_ID
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn features(&self) -> u64 {
        RING_FEATURES | F_UNPLUGGED_INACCESSIBLE
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.shared.config().bytes(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let interrupt = Arc::clone(&activation.interrupt);
        let queue = only_queue(activation)?;
        self.workers.spawn(&self.id, &[], MemWorker::new(queue, Arc::clone(&self.shared)))?;
        self.shared.set_driver(Some(interrupt));
        Ok(())
    }

    fn reset(&mut self) {
        // What is plugged stays so: a driver that comes next keeps it, or unplugs it.
        self.shared.set_driver(None);
        self.workers.stop();
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
        let usable = self.shared.region().usable_runs();
        state::save(self.shared.block_bytes, self.shared.requested_bytes(), &usable)
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let region = self.shared.region();
        let (requested, usable) = state::check(state, self.shared.block_bytes, region.len_bytes())?;
        region
            .set_usable(&usable)
            .map_err(|error| StateError::Invalid { kind: "virtio-mem", why: error.to_string() })?;
        self.shared.request(requested);
        Ok(())
    }
}
