// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The hardware's state in parts, beside the rest of a function's state.
//!
//! Owns when its reading and its taking begin and end. Never holds more of it than the part at hand.

use std::sync::Arc;

use super::VfioPciDevice;
use crate::migration::{
    Hardware, INTEGRATED_ENDPOINT_VERSION, MigrationError, ROM_VERSION, VfioState,
};
use pci::{PciDeviceState, PciStateError};

/// Reads the state of the hardware of a stopped function, which stays stopped when this is dropped.
pub struct StateReader {
    device: Arc<VfioPciDevice>,
    read_bytes: u64,
}

/// Writes a state into the hardware of a stopped function. Its end is the restore of the state that belongs to it.
pub struct StateWriter {
    device: Arc<VfioPciDevice>,
}

impl VfioPciDevice {
    /// Begins to read the state of the hardware. The function must be stopped.
    ///
    /// # Errors
    /// The kernel refuses or the function has failed, and is lost to the guest.
    pub fn read_state(self: &Arc<Self>) -> Result<StateReader, PciStateError> {
        let begun = self.check_movable().and_then(|()| self.migration.begin_save());
        self.noted(begun)?;
        Ok(StateReader { device: Arc::clone(self), read_bytes: 0 })
    }

    /// Begins to take a state of this hardware, once all guest memory is mapped. The function must be stopped.
    ///
    /// # Errors
    /// It is that of other hardware, or as [`Self::read_state`].
    pub fn write_state(self: &Arc<Self>, of: &Hardware) -> Result<StateWriter, PciStateError> {
        let begin = || {
            self.check_movable()?;
            of.check(&self.hardware())?;
            self.gate.wait()?;
            // From here on a reset would lose what it takes.
            self.host.set_in_use(true);
            self.migration.begin_load()
        };
        self.noted(begin())?;
        Ok(StateWriter { device: Arc::clone(self) })
    }

    /// Saves the rest of the state, whose hardware's part of this length was read already.
    ///
    /// # Errors
    /// The function is not stopped, or is lost to the guest.
    pub fn save_beside(&self, len_bytes: u64) -> Result<PciDeviceState, PciStateError> {
        let state = self.saved_beside(len_bytes).map_err(|error| self.state_error(error))?;
        self.encoded(&state)
    }

    pub(super) fn encoded(&self, state: &VfioState) -> Result<PciDeviceState, PciStateError> {
        let version = if self.has_rom() {
            ROM_VERSION
        } else if self.is_integrated_endpoint() {
            INTEGRATED_ENDPOINT_VERSION
        } else {
            1
        };
        PciDeviceState::encode(self, version, state)
    }

    fn noted<T>(&self, step: Result<T, MigrationError>) -> Result<T, PciStateError> {
        step.inspect_err(|error| self.mark_lost_if_failed(error))
            .map_err(|error| self.state_error(error))
    }
}

impl StateReader {
    /// Reads the next bytes; none at the end.
    ///
    /// # Errors
    /// The state cannot be read further.
    pub fn read(&mut self, part: &mut [u8]) -> Result<usize, PciStateError> {
        let read = self.device.migration.read_part(part, self.read_bytes);
        let len = self.device.noted(read)?;
        self.read_bytes = self.read_bytes.saturating_add(len as u64);
        Ok(len)
    }

    /// The function.
    pub fn device(&self) -> &Arc<VfioPciDevice> {
        &self.device
    }
}

impl Drop for StateReader {
    fn drop(&mut self) {
        // One that is refused stays where it is, from where it can still continue.
        if let Err(error) = self.device.noted(self.device.migration.end_save()) {
            log::warn!("{}", error_text::chain(&error));
        }
    }
}

impl StateWriter {
    /// Writes the next bytes.
    ///
    /// # Errors
    /// The function refuses them.
    pub fn write(&self, part: &[u8]) -> Result<(), PciStateError> {
        self.device.noted(self.device.migration.write_part(part))
    }
}
