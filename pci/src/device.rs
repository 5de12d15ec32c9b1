// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The interface of a PCI function to the bus.
//!
//! The bus knows configuration space, BARs and saved state of a function through this trait alone,
//! so that emulated and passed-through functions can be on one bus.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::bar::{BarDecode, BarDescription};

/// Saved state of a function; plain data, versioned, untrusted until validated by the function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciDeviceState {
    /// Kind of the function, such as `virtio-pci`.
    pub kind: String,
    /// Version of `data`; unknown versions are refused.
    pub version: u32,
    /// State of the function itself.
    pub data: serde_json::Value,
}

impl PciDeviceState {
    /// Serialises a function's own state.
    pub fn encode<T: Serialize>(
        device: &dyn PciDevice,
        version: u32,
        state: &T,
    ) -> Result<Self, PciStateError> {
        let data = serde_json::to_value(state)
            .map_err(|source| PciStateError::Malformed { id: device.id().to_owned(), source })?;
        Ok(Self { kind: device.kind().to_owned(), version, data })
    }

    /// Deserialises a function's own state, if kind and version match.
    pub fn decode<T: DeserializeOwned>(
        &self,
        device: &dyn PciDevice,
        version_newest: u32,
    ) -> Result<T, PciStateError> {
        let id = device.id().to_owned();
        if self.kind != device.kind() {
            let found = self.kind.clone();
            return Err(PciStateError::Kind { id, expected: device.kind(), found });
        }
        if self.version == 0 || self.version > version_newest {
            let found = self.version;
            return Err(PciStateError::Version { id, found, newest: version_newest });
        }
        T::deserialize(&self.data).map_err(|source| PciStateError::Malformed { id, source })
    }
}

/// Why a function's state cannot be saved or restored.
#[derive(Debug, Error)]
pub enum PciStateError {
    /// The state is of another kind of function.
    #[error("the state given for PCI device {id} is that of a {found}, not of a {expected}")]
    Kind {
        /// Id of the device.
        id: String,
        /// Kind of this function.
        expected: &'static str,
        /// Kind in the state.
        found: String,
    },
    /// The version is unknown.
    #[error("state version {found} of PCI device {id} is not known here (newest known: {newest})")]
    Version {
        /// Id of the device.
        id: String,
        /// The version.
        found: u32,
        /// Newest known version.
        newest: u32,
    },
    /// The state is malformed.
    #[error("the state of PCI device {id} cannot be read")]
    Malformed {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// The function refused its state.
    #[error("the state of PCI device {id} cannot be saved or restored")]
    Device {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// A PCI function.
///
/// All methods take `&self`: several vCPUs may call them concurrently, and each function has its own locks.
/// Accesses may have any offset and length; invalid reads return all ones (configuration space) or zeros
/// (BARs), and invalid writes are ignored.
pub trait PciDevice: Send + Sync {
    /// Id of the device in the VM's configuration.
    fn id(&self) -> &str;
    /// Kind of the function in saved state.
    fn kind(&self) -> &'static str;

    /// Reads configuration space at `offset`.
    fn read_config(&self, offset: u16, data: &mut [u8]);
    /// Writes configuration space at `offset`. May block (a passed-through device waits here for memory to
    /// be mapped); the bus holds no lock meanwhile.
    fn write_config(&self, offset: u16, data: &[u8]);

    /// The BARs of the function. Only the width of a memory BAR can change, by [`PciDevice::widen_bar`] and
    /// [`PciDevice::restore`].
    fn bars(&self) -> Vec<BarDescription>;
    /// Makes a 32-bit BAR a 64-bit one, if supported; returns whether it did. Only before the guest knows
    /// the function.
    fn widen_bar(&self, _index: u8) -> bool {
        false
    }
    /// The current BAR registers and decode bits.
    fn bar_decode(&self) -> BarDecode;
    /// Sets a BAR register, as firmware would.
    fn place_bar(&self, index: u8, gpa: u64);
    /// Reports that the guest can access the BAR at `gpa`, or no longer.
    ///
    /// Called with `None` before a mapping is removed or moved, and with `Some` after one was made, so that
    /// ioeventfds only exist inside a mapped BAR.
    fn bar_moved(&self, index: u8, gpa: Option<u64>);
    /// Reads a BAR.
    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]);
    /// Writes a BAR.
    fn write_bar(&self, index: u8, offset: u64, data: &[u8]);

    /// Pauses the function, so that it does not access guest memory. Idempotent.
    fn pause(&self) {}
    /// Resumes the function after [`PciDevice::pause`] or [`PciDevice::restore`]. Idempotent.
    fn resume(&self) {}
    /// Saves the state; only while paused.
    fn save(&self) -> Result<PciDeviceState, PciStateError>;
    /// Restores a state. The function stays paused until [`PciDevice::resume`]; once all devices are
    /// restored, [`crate::PciSegment::refresh_mappings`] must be called.
    fn restore(&self, state: &PciDeviceState) -> Result<(), PciStateError>;
}
