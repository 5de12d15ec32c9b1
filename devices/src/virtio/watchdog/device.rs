// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The watchdog device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::handle::WatchdogHandle;
use super::state;
use super::worker::WatchdogWorker;
use crate::virtio::RING_FEATURES;
use crate::virtio::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use crate::virtio::one_queue::only_queue;
use crate::virtio::worker::{Pausing, Workers};

/// Virtio device ID of watchdogs.
const DEVICE_ID: u16 = 35;
const QUEUE_SIZE: u16 = 8;
/// The driver of cloud-hypervisor's guests adds a buffer at least every 15 s, and may be 5 s late.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Called once when a guest counts as stuck; must not block.
pub type Expired = Arc<dyn Fn() + Send + Sync>;

/// Configuration of a watchdog.
pub struct WatchdogConfig {
    /// Id of the device, for its thread name.
    pub id: String,
    /// Time without a buffer after which the guest counts as stuck.
    pub timeout: Duration,
    /// Called when that happens.
    pub expired: Expired,
}

impl WatchdogConfig {
    /// A watchdog with the timeout of cloud-hypervisor's.
    pub fn new(id: String, expired: Expired) -> Self {
        Self { id, timeout: TIMEOUT, expired }
    }
}

/// A watchdog device.
pub struct Watchdog {
    config: WatchdogConfig,
    /// Whether the driver has added a buffer. Also set by the thread.
    is_armed: Arc<AtomicBool>,
    handle: WatchdogHandle,
    workers: Workers,
}

impl Watchdog {
    /// A watchdog that is not armed.
    pub fn new(config: WatchdogConfig) -> Self {
        let handle = WatchdogHandle::new();
        Self { config, is_armed: Arc::default(), handle, workers: Workers::default() }
    }

    /// The handle to stop and start its clock.
    pub fn handle(&self) -> WatchdogHandle {
        self.handle.clone()
    }
}

impl VirtioDevice for Watchdog {
    fn device_id(&self) -> u16 {
        DEVICE_ID
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn features(&self) -> u64 {
        RING_FEATURES
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let queue = only_queue(activation)?;
        let (is_armed, expired) = (Arc::clone(&self.is_armed), Arc::clone(&self.config.expired));
        let (timeout, handle) = (self.config.timeout, self.handle());
        let worker = WatchdogWorker::new(queue, timeout, is_armed, handle, expired);
        let resource = |source| ActivateError::Resource { what: "make a timer", source };
        self.workers.spawn(&self.config.id, &[], worker.map_err(resource)?)
    }

    fn reset(&mut self) {
        self.workers.stop();
        self.is_armed.store(false, Ordering::Release);
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        state::save(self.is_armed.load(Ordering::Acquire))
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        self.is_armed.store(state::check(state)?, Ordering::Release);
        Ok(())
    }
}
