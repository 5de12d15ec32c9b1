// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The contract between a virtio device and its transport.

use std::sync::Arc;

use memory::GuestMemoryHandle;
use thiserror::Error;
use virtio_queue::{Queue, QueueState};
use vmm_sys_util::eventfd::EventFd;

use super::worker::PendingPause;
pub use crate::state::{DeviceSnapshot, StateError};

/// How a device tells the driver something (virtio 1.3, 2.3).
pub trait VirtioInterrupt: Send + Sync {
    /// Used buffers were added to the queue with this index and the driver wants to know.
    fn queue_used(&self, queue_index: u16);
    /// The device configuration changed.
    fn config_changed(&self);
    /// The device is broken and needs a reset: sets DEVICE_NEEDS_RESET and notifies the driver.
    fn needs_reset(&self);
}

/// One queue that the driver enabled.
pub struct ActiveQueue {
    /// Index of the queue in the device.
    pub index: u16,
    /// The queue, already validated by the transport against guest memory.
    pub queue: Queue,
    /// Signalled when the driver notifies the queue.
    pub kick: EventFd,
}

/// All that a device gets when the driver sets DRIVER_OK.
pub struct Activation {
    /// Guest memory.
    pub memory: GuestMemoryHandle,
    /// The way back to the driver.
    pub interrupt: Arc<dyn VirtioInterrupt>,
    /// Enabled queues in rising order of their index; others were left disabled by the driver.
    pub queues: Vec<ActiveQueue>,
    /// The features that both sides agreed on.
    pub features: u64,
}

/// Why a device could not start.
#[derive(Debug, Error)]
pub enum ActivateError {
    /// The driver did not enable a queue that the device cannot work without.
    #[error("queue {index} is required and was not enabled by the driver")]
    MissingQueue {
        /// Index of the queue.
        index: u16,
    },
    /// The host refused a resource.
    #[error("cannot {what}")]
    Resource {
        /// What was tried, as an infinitive clause.
        what: &'static str,
        /// The host's answer.
        #[source]
        source: std::io::Error,
    },
}

/// A virtio device, driven by a transport.
///
/// Life: offered features are read, some acknowledged, then `activate` hands over the queues and
/// starts the device's own threads. `pause` makes those threads stop touching guest memory and
/// returns when they have; `resume` lets them continue. `reset` ends them and returns everything.
/// The transport calls these one at a time.
pub trait VirtioDevice: Send {
    /// Virtio device ID (virtio 1.3, 5).
    fn device_id(&self) -> u16;
    /// Largest size of each queue; its length is the number of queues.
    fn queue_sizes_max(&self) -> &[u16];
    /// Feature bits that the device offers, transport-independent ones (ring features, VERSION_1) included.
    fn features(&self) -> u64;
    /// The driver accepted these features, a subset of the offered ones; called before `activate`.
    fn acknowledge_features(&mut self, _features: u64) {}
    /// Fills `data` from the device configuration at `offset`; bytes beyond its end read as zero. A device may
    /// have none.
    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }
    /// Takes a write to the device configuration at `offset`; bytes that cannot be written are ignored.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    /// Starts the device.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;
    /// Stops the device and forgets all driver state. Does nothing on a device that is not active.
    fn reset(&mut self);
    /// Stops all work on guest memory, requests in flight included, and returns the state of the
    /// active queues, with their indexes. Empty for a device that is not active. Idempotent.
    ///
    /// A device that is paused while it is not active starts paused when it is activated, and
    /// does not touch guest memory before `resume`: that is how a VM is restored.
    fn pause(&mut self) -> Vec<(u16, QueueState)>;
    /// Begins what `pause` does, and waits for nothing: no new request is taken from now on. `pause`
    /// waits for the rest. The caller may withdraw it ([`PendingPause::withdraw`]), however far
    /// it is; a driver that resets and activates the device anew has it work again, too.
    fn begin_pause(&mut self) -> PendingPause;
    /// Goes on after `pause`. Idempotent.
    fn resume(&mut self);
    /// The device's own state (not the queues'); called while paused or not active.
    fn save(&self) -> DeviceSnapshot;
    /// Takes a saved state; called before `activate`, and after `acknowledge_features` if the driver had
    /// accepted features: what it has changed since is in the state.
    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError>;
}
