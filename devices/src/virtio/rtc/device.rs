// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The real-time clock device.

use super::state;
use super::worker::RtcWorker;
use crate::virtio::RING_FEATURES;
use crate::virtio::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use crate::virtio::one_queue::only_queue;
use crate::virtio::worker::{Pausing, Workers};

/// Virtio device ID of clocks.
const DEVICE_ID: u16 = 17;
const QUEUE_SIZE: u16 = 64;

/// Configuration of a real-time clock.
#[derive(Clone, Debug)]
pub struct RtcConfig {
    /// Id of the device, for its thread name.
    pub id: String,
}

/// A real-time clock.
pub struct Rtc {
    config: RtcConfig,
    workers: Workers,
}

impl Rtc {
    /// A clock that shows the host's time.
    pub fn new(config: RtcConfig) -> Self {
        Self { config, workers: Workers::default() }
    }
}

impl VirtioDevice for Rtc {
    fn device_id(&self) -> u16 {
        DEVICE_ID
    }

    fn queue_sizes_max(&self) -> &[u16] {
        // Without alarms there is no other queue.
        &[QUEUE_SIZE]
    }

    fn features(&self) -> u64 {
        RING_FEATURES
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let worker = RtcWorker::new(only_queue(activation)?);
        self.workers.spawn(&self.config.id, &[], worker)
    }

    fn reset(&mut self) {
        self.workers.stop();
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        state::save()
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        state::check(state)
    }
}
