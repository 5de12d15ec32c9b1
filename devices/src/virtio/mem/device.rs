// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The memory device.

use std::io;
use std::sync::Arc;

use memory::GuestRam;
use thiserror::Error;

use super::worker::MemWorker;
use super::{F_ACPI_PXM, F_UNPLUGGED_INACCESSIBLE, Shared, state};
use crate::virtio::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use crate::virtio::one_queue::only_queue;
use crate::virtio::worker::{Pausing, Workers};
use crate::virtio::{RING_FEATURES, read_config_bytes};

/// Virtio device ID of virtio-mem devices.
const DEVICE_ID: u16 = 24;
const QUEUE_SIZE: u16 = 128;

/// Configuration of a virtio-mem device.
#[derive(Clone, Debug)]
pub struct MemConfig {
    /// Id of the device, for its thread name.
    pub id: String,
    /// The zone whose blocks it plugs.
    pub zone: String,
    /// Initially requested size in bytes.
    pub requested_bytes: u64,
    /// NUMA node of the guest that the memory belongs to, if the guest has nodes.
    pub node: Option<u16>,
}

/// Why a virtio-mem device cannot be created or resized.
#[derive(Debug, Error)]
pub enum MemError {
    /// There is no such zone.
    #[error("there is no memory zone '{zone}' that comes in blocks")]
    NoZone {
        /// Id of the zone.
        zone: String,
    },
    /// A host resource is not available.
    #[error("the host gives no descriptor for a memory device")]
    Resource(#[source] io::Error),
    /// The size is too large or not a multiple of the block size.
    #[error(
        "{wanted_bytes} bytes cannot be added by '{id}': it has room for {room_bytes}, in blocks of \
         {block_bytes}"
    )]
    Size {
        /// Id of the device.
        id: String,
        /// Requested size in bytes.
        wanted_bytes: u64,
        /// Maximum size in bytes.
        room_bytes: u64,
        /// Block size in bytes.
        block_bytes: u64,
    },
}

/// A handle to the device for the VMM, while the transport owns it.
#[derive(Clone)]
pub struct MemHandle {
    id: String,
    shared: Arc<Shared>,
}

impl MemHandle {
    /// Sets the requested size; the driver plugs or unplugs blocks to reach it.
    ///
    /// # Errors
    /// It exceeds the maximum, or is not a multiple of the block size.
    pub fn resize(&self, wanted_bytes: u64) -> Result<(), MemError> {
        let (room_bytes, block_bytes) = (self.room_bytes(), self.block_bytes());
        if wanted_bytes > room_bytes || !wanted_bytes.is_multiple_of(block_bytes) {
            let id = self.id.clone();
            return Err(MemError::Size { id, wanted_bytes, room_bytes, block_bytes });
        }
        self.shared.request(wanted_bytes);
        Ok(())
    }

    /// Retries what was not possible before: discards unplugged blocks, and notifies the driver, which
    /// would otherwise wait for up to some minutes.
    pub fn retry(&self) {
        self.shared.ask_for_retry();
        if self.plugged_bytes() != self.requested_bytes() {
            self.shared.notify_driver();
        }
    }

    /// Sets a callback for when the guest has plugged more memory, called on the device's thread; it must
    /// not block. Only the first callback set counts.
    pub fn on_growth(&self, listener: Arc<dyn Fn() + Send + Sync>) {
        let _ = self.shared.growth.set(listener);
    }

    /// The requested size in bytes.
    pub fn requested_bytes(&self) -> u64 {
        self.shared.requested_bytes()
    }

    /// The plugged size in bytes.
    pub fn plugged_bytes(&self) -> u64 {
        self.shared.region().usable_bytes()
    }

    /// The maximum size in bytes.
    pub fn room_bytes(&self) -> u64 {
        self.shared.region().len_bytes()
    }

    /// The block size in bytes.
    pub fn block_bytes(&self) -> u64 {
        self.shared.block_bytes
    }
}

/// A virtio-mem device.
pub struct Mem {
    id: String,
    shared: Arc<Shared>,
    workers: Workers,
}

impl Mem {
    /// A device for a zone of this memory, with nothing plugged.
    ///
    /// # Errors
    /// There is no such zone, or the requested size is invalid.
    pub fn new(config: &MemConfig, ram: &Arc<GuestRam>) -> Result<Self, MemError> {
        let no_zone = || MemError::NoZone { zone: config.zone.clone() };
        let region = ram.regions().iter().find(|region| region.zone_id() == config.zone);
        let region = region.ok_or_else(no_zone)?;
        let shared = Shared::new(Arc::clone(ram), Arc::clone(region), config.node);
        let shared = shared.map_err(MemError::Resource)?.ok_or_else(no_zone)?;
        let device =
            Self { id: config.id.clone(), shared: Arc::new(shared), workers: Workers::default() };
        device.handle().resize(config.requested_bytes)?;
        Ok(device)
    }

    /// A handle to the device.
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
        let node = if self.shared.node.is_some() { F_ACPI_PXM } else { 0 };
        RING_FEATURES | F_UNPLUGGED_INACCESSIBLE | node
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
        // Plugged blocks stay: the next driver keeps or unplugs them.
        self.shared.set_driver(None);
        self.workers.stop();
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
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
