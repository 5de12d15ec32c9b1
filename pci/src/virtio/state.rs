// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved form of a virtio PCI device: plain, versioned, untrusted.
//!
//! The only way from here to a live device is [`super::VirtioPciDevice::restore`], which checks
//! everything before it changes anything. Addresses are checked against guest memory, whose
//! content is never looked at: after a postcopy handover it may not be there yet.

use devices::virtio::{DeviceSnapshot, StateError};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use virtio_queue::QueueState;

use super::common::FeaturesBeyond;
use super::interrupt::{ISR_CONFIG, ISR_QUEUE, PciInterrupt};
use super::layout::BarWidth;
use super::queue::{QueueError, QueueRegisters};
use super::status::{DeviceStatus, Phase};
use super::transport::{Run, Transport, build_queues};
use crate::config_space::{ConfigError, ConfigSpaceState, ConfigStateError};
use crate::msix::{MsixError, MsixState};

/// Kind of the function in saved state.
pub const VIRTIO_PCI_KIND: &str = "virtio-pci";
/// Version of [`VirtioPciState`] for a device with a 32-bit BAR; others have version 1. A program without
/// such BARs cannot give the device the layout that the guest knows.
pub const NARROW_BAR_VERSION: u32 = 2;
/// Newest version of [`VirtioPciState`] that is read. The lowest version that can represent a state is
/// written.
pub(super) const VERSION: u32 = NARROW_BAR_VERSION;

/// Saved state of a device with its transport.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VirtioPciState {
    /// Version of this structure.
    pub version: u32,
    /// Virtio device ID.
    pub device_id: u16,
    /// Configuration space, with the MSI-X control register and the BAR addresses.
    pub config: ConfigSpaceState,
    /// MSI-X table.
    pub msix: MsixState,
    /// Common registers of the device.
    pub common: CommonState,
    /// Registers of each queue.
    pub queues: Vec<QueueRegisterState>,
    /// State of the device itself.
    pub device: DeviceSnapshot,
}

/// Common registers of a device (virtio 1.3, 4.1.4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommonState {
    /// Selected word of the offered features.
    pub device_feature_select: u32,
    /// Selected word of the accepted features.
    pub driver_feature_select: u32,
    /// Features that the driver accepted.
    pub driver_features: u64,
    /// Whether the driver accepted a feature above bit 63.
    pub driver_features_beyond: bool,
    /// Selected queue.
    pub queue_select: u16,
    /// Status register.
    pub status: u8,
    /// Whether the device is activated (DRIVER_OK, without failure).
    pub active: bool,
    /// Configuration generation.
    pub config_generation: u8,
    /// ISR register.
    pub isr: u8,
    /// Vector of configuration changes.
    pub config_vector: u16,
}

/// Registers and progress of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueueRegisterState {
    /// Size that the driver chose.
    pub size: u16,
    /// Whether the driver has enabled it.
    pub enabled: bool,
    /// Descriptor area.
    pub desc_gpa: u64,
    /// Driver area.
    pub driver_gpa: u64,
    /// Device area.
    pub device_gpa: u64,
    /// Vector of used buffers.
    pub vector: u16,
    /// Progress; only for enabled queues of an activated device.
    pub progress: Option<QueueProgressState>,
}

/// Progress of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueueProgressState {
    /// Next available ring index to process.
    pub next_avail: u16,
    /// Next used ring index to write.
    pub next_used: u16,
}

/// Why a state cannot be saved or restored.
#[derive(Debug, Error)]
pub enum VirtioStateError {
    /// The device is not paused.
    #[error("virtio device {id} is not paused")]
    NotPaused {
        /// Id of the device.
        id: String,
    },
    /// The device is not new.
    #[error("virtio device {id} has a driver already; a state is restored into a new device only")]
    InUse {
        /// Id of the device.
        id: String,
    },
    /// The version is unknown.
    #[error("virtio state version {found} is not known here (newest known: {VERSION})")]
    Version {
        /// Version found.
        found: u32,
    },
    /// The state has a part that its version does not include.
    #[error("virtio state version {found} has a 32-bit BAR, which came with {NARROW_BAR_VERSION}")]
    NotInVersion {
        /// Version found.
        found: u32,
    },
    /// The state is of another type of device.
    #[error("the state is that of a virtio device of type {found}, not {expected}")]
    DeviceId {
        /// Type of this device.
        expected: u16,
        /// Type in the state.
        found: u16,
    },
    /// The number of queues differs.
    #[error("the state has {found} queues, the device has {expected}; give it the same options")]
    QueueCount {
        /// Queues of this device.
        expected: usize,
        /// Queues in the state.
        found: usize,
    },
    /// The status is invalid.
    #[error("status {status:#x} (active: {active}) is impossible")]
    Status {
        /// Status register.
        status: u8,
        /// Whether the device is activated.
        active: bool,
    },
    /// This device lacks features that the driver uses.
    #[error("the driver uses features {found:#x}, this device offers {offered:#x}")]
    Features {
        /// Features in the state.
        found: u64,
        /// Features of this device.
        offered: u64,
    },
    /// A vector does not exist.
    #[error("interrupt vector {vector} does not exist")]
    Vector {
        /// The vector.
        vector: u16,
    },
    /// The ISR register has unknown bits.
    #[error("ISR status {isr:#x} is impossible")]
    Isr {
        /// The ISR register.
        isr: u8,
    },
    /// Progress is given for a queue that is not in use, or missing for one that is.
    #[error("queue {index} is in use or not, and its saved position says the opposite")]
    Progress {
        /// Index of the queue.
        index: u16,
    },
    /// A queue is invalid.
    #[error("queue {index} cannot be used")]
    Queue {
        /// Index of the queue.
        index: u16,
        /// The cause.
        #[source]
        source: QueueError,
    },
    /// The BAR cannot have the saved width.
    #[error("the BAR cannot have the width that it was saved with")]
    BarWidth(#[from] ConfigError),
    /// The configuration space does not fit.
    #[error("the configuration space does not fit")]
    Config(#[from] ConfigStateError),
    /// The MSI-X table does not fit.
    #[error("the MSI-X table cannot be restored")]
    Msix(#[from] MsixError),
    /// The device refused its state.
    #[error("the device refused its own part")]
    Device(#[from] StateError),
    /// The host is out of file descriptors.
    #[error("no eventfd for the queues")]
    Eventfd(#[from] std::io::Error),
}

impl Transport {
    pub(super) fn save_common(&self) -> CommonState {
        CommonState {
            device_feature_select: self.device_feature_select,
            driver_feature_select: self.driver_feature_select,
            driver_features: self.driver_features,
            driver_features_beyond: self.driver_features_beyond.is_any(),
            queue_select: self.queue_select,
            status: self.status.bits(self.interrupt.is_reset_needed()),
            active: !matches!(self.run, Run::Stopped),
            config_generation: self.interrupt.config_generation(),
            isr: self.interrupt.isr(),
            config_vector: self.interrupt.config_vector(),
        }
    }

    pub(super) fn save_queues(&self) -> Result<Vec<QueueRegisterState>, VirtioStateError> {
        let queues = (0..).zip(&self.queues);
        queues.map(|(index, queue)| self.save_queue(index, queue)).collect()
    }

    fn save_queue(
        &self,
        index: u16,
        queue: &QueueRegisters,
    ) -> Result<QueueRegisterState, VirtioStateError> {
        let reported = match &self.run {
            Run::Running => return Err(VirtioStateError::NotPaused { id: self.id.clone() }),
            Run::Stopped => None,
            Run::Prepared(activation) => activation
                .queues
                .iter()
                .find(|active| active.index == index)
                .map(|active| active.queue.state()),
            Run::Paused(states) => {
                let of = |states: &[(u16, QueueState)]| {
                    states.iter().find(|(at, _)| *at == index).map(|(_, state)| *state)
                };
                of(states).or_else(|| of(&self.begun))
            }
        };
        let in_use = queue.enabled && !matches!(self.run, Run::Stopped);
        let progress = reported.filter(|_| in_use).map(|state| QueueProgressState {
            next_avail: state.next_avail,
            next_used: state.next_used,
        });
        Ok(QueueRegisterState {
            size: queue.size,
            enabled: queue.enabled,
            desc_gpa: queue.desc_gpa,
            driver_gpa: queue.driver_gpa,
            device_gpa: queue.device_gpa,
            vector: self.interrupt.queue_vector(index),
            progress,
        })
    }

    /// Restores the registers, after validating all of them, and prepares the activation.
    pub(super) fn restore(&mut self, state: &VirtioPciState) -> Result<(), VirtioStateError> {
        let common = &state.common;
        let (status, needs_reset) = self.check_registers(state)?;
        let registers: Vec<QueueRegisters> = self
            .queues
            .iter()
            .zip(&state.queues)
            .map(|(own, saved)| QueueRegisters {
                size_max: own.size_max,
                size: saved.size,
                enabled: saved.enabled,
                desc_gpa: saved.desc_gpa,
                driver_gpa: saved.driver_gpa,
                device_gpa: saved.device_gpa,
            })
            .collect();
        // A device that needs a reset does nothing until then.
        let works = common.active && !needs_reset;
        let queues = if works {
            let progress = |index: u16| {
                state
                    .queues
                    .get(usize::from(index))
                    .and_then(|queue| queue.progress)
                    .unwrap_or_default()
            };
            build_queues(&registers, common.driver_features, self.ring_memory(), progress)
                .map_err(|(index, source)| VirtioStateError::Queue { index, source })?
        } else {
            Vec::new()
        };
        // Changes by the driver since it accepted them are in the state of the device itself.
        if status.phase >= Phase::FeaturesOk {
            self.device.acknowledge_features(Self::device_features(common.driver_features));
        }
        if let Err(error) = self.device.restore(&state.device) {
            self.device.reset();
            return Err(error.into());
        }

        self.status = status;
        self.device_feature_select = common.device_feature_select;
        self.driver_feature_select = common.driver_feature_select;
        self.driver_features = common.driver_features;
        self.driver_features_beyond = FeaturesBeyond::restored(common.driver_features_beyond);
        self.queue_select = common.queue_select;
        self.queues = registers;
        restore_interrupt(&self.interrupt, state, needs_reset);
        self.shown_config.forget();
        if works {
            let activation = self.activation(queues)?;
            self.notify.arm(activation.queues.iter().map(|queue| queue.index).collect());
            self.run = Run::Prepared(activation);
        }
        Ok(())
    }

    /// Validates what does not need guest memory.
    fn check_registers(
        &self,
        state: &VirtioPciState,
    ) -> Result<(DeviceStatus, bool), VirtioStateError> {
        if self.status != DeviceStatus::RESET || !matches!(self.run, Run::Stopped) {
            return Err(VirtioStateError::InUse { id: self.id.clone() });
        }
        if !(1..=VERSION).contains(&state.version) {
            return Err(VirtioStateError::Version { found: state.version });
        }
        if state.version < needed_version(&state.config) {
            return Err(VirtioStateError::NotInVersion { found: state.version });
        }
        let (found, expected) = (state.device_id, self.device.device_id());
        if found != expected {
            return Err(VirtioStateError::DeviceId { expected, found });
        }
        let (found, expected) = (state.queues.len(), self.queues.len());
        if found != expected {
            return Err(VirtioStateError::QueueCount { expected, found });
        }
        let common = &state.common;
        let impossible = VirtioStateError::Status { status: common.status, active: common.active };
        let Some((status, needs_reset)) = DeviceStatus::from_bits(common.status) else {
            return Err(impossible);
        };
        let ready = status.phase == Phase::DriverOk;
        if common.active && !ready || ready && !common.active && !needs_reset {
            return Err(impossible);
        }
        let (features, beyond) = (common.driver_features, common.driver_features_beyond);
        if status.phase >= Phase::FeaturesOk && !self.are_features_acceptable(features, beyond) {
            let offered = self.offered_features();
            return Err(VirtioStateError::Features { found: features, offered });
        }
        if common.isr & !(ISR_QUEUE | ISR_CONFIG) != 0 {
            return Err(VirtioStateError::Isr { isr: common.isr });
        }
        let vectors = state.queues.iter().map(|queue| queue.vector);
        for vector in vectors.chain([common.config_vector]) {
            if !self.interrupt.is_vector_valid(vector) {
                return Err(VirtioStateError::Vector { vector });
            }
        }
        for (index, queue) in (0..).zip(&state.queues) {
            if queue.progress.is_some() != (common.active && queue.enabled) {
                return Err(VirtioStateError::Progress { index });
            }
        }
        Ok((status, needs_reset))
    }
}

/// The lowest version that can represent this configuration space.
pub(super) fn needed_version(config: &ConfigSpaceState) -> u32 {
    match BarWidth::of(config) {
        BarWidth::Bits32 => NARROW_BAR_VERSION,
        BarWidth::Bits64 => 1,
    }
}

fn restore_interrupt(interrupt: &PciInterrupt, state: &VirtioPciState, needs_reset: bool) {
    interrupt.set_reset_needed(needs_reset);
    interrupt.set_config_generation(state.common.config_generation);
    interrupt.set_isr(state.common.isr);
    interrupt.set_config_vector(state.common.config_vector);
    for (index, queue) in (0..).zip(&state.queues) {
        interrupt.set_queue_vector(index, queue.vector);
    }
}
