// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The contract between a virtio device and its transport.

use std::sync::Arc;

use memory::GuestMemoryHandle;
use thiserror::Error;
use virtio_queue::{Queue, QueueState};
use vmm_sys_util::eventfd::EventFd;

use super::iommu::QueueDma;
use super::worker::{Pausing, PendingPause};
pub use crate::state::{DeviceSnapshot, StateError};

/// Interrupts from a device to its driver (virtio 1.3, 2.3).
pub trait VirtioInterrupt: Send + Sync {
    /// Used buffers were added to this queue, and the driver wants a notification.
    fn queue_used(&self, queue_index: u16);
    /// The device configuration changed.
    fn config_changed(&self);
    /// The device is broken and needs a reset: sets DEVICE_NEEDS_RESET and notifies the driver.
    fn needs_reset(&self);
}

/// The eventfds by which the driver notifies the queues of a device that another process serves.
///
/// That process has the open file description, and may make it block (`O_NONBLOCK` belongs to the description): so
/// such an eventfd is neither read nor written in the VMM, and one that may have been used is replaced.
pub trait Kicks: Send + Sync {
    /// A new eventfd for the queue, which is signalled already, in place of the one before.
    ///
    /// # Errors
    /// The host gives no eventfd, or does not let the driver signal it.
    fn renew(&self, queue_index: u16) -> std::io::Result<EventFd>;
}

/// A queue enabled by the driver.
pub struct ActiveQueue {
    /// Index of the queue in the device.
    pub index: u16,
    /// The queue, validated by the transport against guest memory.
    pub queue: Queue,
    /// Signalled when the driver notifies the queue; if [`VirtioDevice::shares_kicks`], only by notifications that
    /// the kernel does not take.
    pub kick: EventFd,
    /// Where a device that shares them gets its eventfds.
    pub kicks: Arc<dyn Kicks>,
    /// The view of guest memory that the queue of a device behind the IOMMU has.
    pub dma: Option<QueueDma>,
}

/// What a device gets when the driver sets DRIVER_OK.
pub struct Activation {
    /// Guest memory.
    pub memory: GuestMemoryHandle,
    /// Interrupts to the driver.
    pub interrupt: Arc<dyn VirtioInterrupt>,
    /// The enabled queues by ascending index.
    pub queues: Vec<ActiveQueue>,
    /// The negotiated features.
    pub features: u64,
}

/// Why a device cannot be activated.
#[derive(Debug, Error)]
pub enum ActivateError {
    /// The driver has not enabled a required queue.
    #[error("queue {index} is required and was not enabled by the driver")]
    MissingQueue {
        /// Index of the queue.
        index: u16,
    },
    /// A host resource is not available.
    #[error("cannot {what}")]
    Resource {
        /// What was attempted, as an infinitive clause.
        what: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// A virtio device, driven by a transport.
///
/// Life cycle: offered features are read and some acknowledged; then `activate` hands over the queues and
/// starts the device's threads. `pause` returns once the threads no longer access guest memory; `resume`
/// lets them continue. `reset` ends them. The transport makes one call at a time.
pub trait VirtioDevice: Send {
    /// Virtio device ID (virtio 1.3, 5).
    fn device_id(&self) -> u16;
    /// Maximum size of each queue; the length is the number of queues.
    fn queue_sizes_max(&self) -> &[u16];
    /// Offered feature bits, including ring features and VERSION_1.
    fn features(&self) -> u64;
    /// Whether the driver's notifications reach another process. The eventfds for those that the kernel takes come from
    /// [`ActiveQueue::kicks`] then.
    fn shares_kicks(&self) -> bool {
        false
    }
    /// Sets the accepted features, a subset of the offered ones; called before `activate`.
    fn acknowledge_features(&mut self, _features: u64) {}
    /// Reads the device configuration at `offset`; bytes beyond its end read as zero. A device may have
    /// none.
    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }
    /// Writes the device configuration at `offset`; read-only bytes are ignored.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    /// Starts the device.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;
    /// Stops the device and drops all driver state. No effect on a device that is not active.
    fn reset(&mut self);
    /// What pauses and resumes the device.
    fn pausing(&mut self) -> &mut dyn Pausing;
    /// As [`Pausing::pause`].
    fn pause(&mut self) -> Vec<(u16, QueueState)> {
        self.pausing().pause()
    }
    /// As [`Pausing::begin_pause`].
    fn begin_pause(&mut self) -> PendingPause {
        self.pausing().begin_pause()
    }
    /// As [`Pausing::resume`].
    fn resume(&mut self) {
        self.pausing().resume();
    }
    /// Saves the device's own state, without the queues; called while paused or not active.
    fn save(&self) -> DeviceSnapshot;
    /// Restores a state; called before `activate`, and after `acknowledge_features` if the driver had
    /// accepted features: later changes by the driver are in the state.
    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError>;
}
