// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The interface of a PCI function to the bus.
//!
//! The bus knows configuration space, BARs and saved state of a function through this trait alone,
//! so that emulated and passed-through functions can be on one bus.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::bar::{BarDecode, BarDescription};

/// A function's saved state: plain, versioned and untrusted until the function has checked it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciDeviceState {
    /// What kind of function wrote it, for example `virtio-pci`.
    pub kind: String,
    /// Version of `data`; a reader refuses versions that it does not know.
    pub version: u32,
    /// The function's own part.
    pub data: serde_json::Value,
}

impl PciDeviceState {
    /// Wraps a function's own state.
    pub fn encode<T: Serialize>(
        device: &dyn PciDevice,
        version: u32,
        state: &T,
    ) -> Result<Self, PciStateError> {
        let data = serde_json::to_value(state)
            .map_err(|source| PciStateError::Malformed { id: device.id().to_owned(), source })?;
        Ok(Self { kind: device.kind().to_owned(), version, data })
    }

    /// Unwraps a function's own state, if it is of this function's kind and version.
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

/// Why a function's state could not be saved or was refused.
#[derive(Debug, Error)]
pub enum PciStateError {
    /// Another kind of function wrote it.
    #[error("the state given for PCI device {id} is that of a {found}, not of a {expected}")]
    Kind {
        /// Id of the device.
        id: String,
        /// The kind that this function is.
        expected: &'static str,
        /// The kind that the state names.
        found: String,
    },
    /// A newer program wrote it.
    #[error("state version {found} of PCI device {id} is not known here (newest known: {newest})")]
    Version {
        /// Id of the device.
        id: String,
        /// Version found.
        found: u32,
        /// Newest version that can be read.
        newest: u32,
    },
    /// The data do not have the form of this function's state.
    #[error("the state of PCI device {id} cannot be read")]
    Malformed {
        /// Id of the device.
        id: String,
        /// What the parser says.
        #[source]
        source: serde_json::Error,
    },
    /// The function refused it.
    #[error("the state of PCI device {id} cannot be saved or restored")]
    Device {
        /// Id of the device.
        id: String,
        /// The function's reason.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// One PCI function.
///
/// All methods take `&self`: several vCPUs may be in them at once, and each function has its own
/// locks. Any offset and any length are allowed in accesses; what makes no sense reads as ones
/// (configuration space) or zeroes (BARs) and is ignored when written.
pub trait PciDevice: Send + Sync {
    /// Id given in the VM's configuration.
    fn id(&self) -> &str;
    /// Kind of function, as it stands in saved state.
    fn kind(&self) -> &'static str;

    /// Fills `data` from configuration space at `offset`.
    fn read_config(&self, offset: u16, data: &mut [u8]);
    /// Takes a write to configuration space at `offset`. May wait (a passed-through device waits
    /// here for its DMA mappings); the bus holds no lock meanwhile.
    fn write_config(&self, offset: u16, data: &[u8]);

    /// The BARs that the function has. What changes is the width of a memory BAR at most, with
    /// [`PciDevice::widen_bar`] and [`PciDevice::restore`].
    fn bars(&self) -> Vec<BarDescription>;
    /// Makes a 32-bit BAR a 64-bit one, if the function can have that, and says whether it did. Before
    /// the guest knows the function only.
    fn widen_bar(&self, _index: u8) -> bool {
        false
    }
    /// What the BAR registers and the decode bits say now.
    fn bar_decode(&self) -> BarDecode;
    /// Programs a BAR register, as firmware would.
    fn place_bar(&self, index: u8, gpa: u64);
    /// The guest reaches the BAR at `gpa` from now on, or not at all any more.
    ///
    /// Comes with `None` before a mapping is taken away or moved, and with `Some` after one was
    /// made, so that I/O events only ever exist inside a mapped BAR.
    fn bar_moved(&self, index: u8, gpa: Option<u64>);
    /// Fills `data` from a BAR.
    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]);
    /// Takes a write to a BAR.
    fn write_bar(&self, index: u8, offset: u64, data: &[u8]);

    /// Stops all work on guest memory. Idempotent.
    fn pause(&self) {}
    /// Goes on after [`PciDevice::pause`] or [`PciDevice::restore`]. Idempotent.
    fn resume(&self) {}
    /// The function's state; only while paused.
    fn save(&self) -> Result<PciDeviceState, PciStateError>;
    /// Takes a saved state. The function stays paused until [`PciDevice::resume`]; the segment has
    /// to be told by [`crate::PciSegment::refresh_mappings`] when all its devices were restored.
    fn restore(&self, state: &PciDeviceState) -> Result<(), PciStateError>;
}
