// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The persistent memory device.

use super::file::PmemFile;
use super::state::{self, PmemState};
use super::worker::PmemWorker;
use crate::virtio::block::DiskLock;
use crate::virtio::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use crate::virtio::one_queue::only_queue;
use crate::virtio::worker::{Pausing, Workers};
use crate::virtio::{RING_FEATURES, read_config_bytes};

/// Virtio device ID of persistent memory devices.
const DEVICE_ID: u16 = 27;
const QUEUE_SIZE: u16 = 256;
/// Length of the configuration: address and length of the memory, 64 bits each (virtio 1.3, 5.19.4).
const CONFIG_BYTES: usize = 16;

/// A persistent memory device.
pub struct Pmem {
    id: String,
    file: DiskLock,
    place: PmemState,
    workers: Workers,
}

impl Pmem {
    /// A device that tells the guest that `file` is at `gpa`, where the caller maps it.
    pub fn new(id: String, file: &PmemFile, gpa: u64) -> Self {
        let place = PmemState { gpa, len_bytes: file.len_bytes() };
        Self { id, file: file.lock(), place, workers: Workers::default() }
    }

    fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let fields = [self.place.gpa, self.place.len_bytes];
        for (to, field) in bytes.chunks_exact_mut(8).zip(fields) {
            to.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }
}

impl VirtioDevice for Pmem {
    fn device_id(&self) -> u16 {
        DEVICE_ID
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn features(&self) -> u64 {
        RING_FEATURES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let queue = only_queue(activation)?;
        let worker = PmemWorker::new(queue, self.file.clone(), self.workers.log_limit());
        self.workers.spawn(&self.id, &[], worker)
    }

    fn reset(&mut self) {
        self.workers.stop();
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        state::save(self.place)
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        state::check(state, self.place)
    }
}
