// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The hardware's state in parts, beside the rest of a function's state.
//!
//! Owns when its reading and its taking begin and end. Never holds more of it than the part at hand. Each call may take as long
//! as the hardware does, or without end: then the function is left to the thread of that call ([`VfioPciDevice::leave`]), which
//! resets it if the call ever returns.

use std::sync::Arc;

use super::VfioPciDevice;
use crate::migration::{
    Hardware, INTEGRATED_ENDPOINT_VERSION, MigrationError, ROM_VERSION, VfioState,
};
use pci::{PciDeviceState, PciStateError};

/// Reads the state of the hardware of a stopped function, which stays stopped when this is dropped.
pub struct StateReader {
    device: Arc<VfioPciDevice>,
    has_begun: bool,
    read_bytes: u64,
}

/// Writes a state into the hardware of a stopped function. Its end is the restore of the state that belongs to it.
pub struct StateWriter {
    device: Arc<VfioPciDevice>,
}

impl VfioPciDevice {
    /// Reads the state of the hardware, which begins with the first part. The function must be stopped.
    ///
    /// # Errors
    /// The function cannot be migrated.
    pub fn read_state(self: &Arc<Self>) -> Result<StateReader, PciStateError> {
        self.check_movable().map_err(|error| self.state_error(error))?;
        Ok(StateReader { device: Arc::clone(self), has_begun: false, read_bytes: 0 })
    }

    /// Takes a state of this hardware, once all guest memory is mapped. The function must be stopped, and takes none before
    /// [`StateWriter::begin`].
    ///
    /// # Errors
    /// It is that of other hardware, or memory cannot be mapped.
    pub fn write_state(self: &Arc<Self>, of: &Hardware) -> Result<StateWriter, PciStateError> {
        let check = || {
            self.check_movable()?;
            of.check(&self.hardware())?;
            self.gate.wait()?;
            // From here on a reset would lose what it takes.
            self.host.set_in_use(true);
            Ok(())
        };
        check().map_err(|error| self.state_error(error))?;
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

    /// Makes a step, on any thread; none of a function that is lost.
    fn noted<T>(
        &self,
        step: impl FnOnce() -> Result<T, MigrationError>,
    ) -> Result<T, PciStateError> {
        let made = self.stepping(|| {
            if self.is_left() {
                return Err(MigrationError::Left);
            }
            self.check_movable()?;
            step().inspect_err(|error| self.mark_lost_if_failed(error))
        });
        made.map_err(|error| self.state_error(error))
    }
}

impl StateReader {
    /// Reads the next bytes; none at the end.
    ///
    /// # Errors
    /// The state cannot be read further.
    pub fn read(&mut self, part: &mut [u8]) -> Result<usize, PciStateError> {
        let migration = &self.device.migration;
        if !self.has_begun {
            self.device.noted(|| migration.begin_save())?;
            self.has_begun = true;
        }
        let len = self.device.noted(|| migration.read_part(part, self.read_bytes))?;
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
        if !self.has_begun || self.device.is_lost() {
            return;
        }
        // One that is refused stays where it is, from where it can still continue.
        if let Err(error) = self.device.noted(|| self.device.migration.end_save()) {
            log::warn!("{}", error_text::chain(&error));
        }
    }
}

impl StateWriter {
    /// Begins to take the state.
    ///
    /// # Errors
    /// The function refuses.
    pub fn begin(&self) -> Result<(), PciStateError> {
        self.device.noted(|| self.device.migration.begin_load())
    }

    /// Writes the next bytes.
    ///
    /// # Errors
    /// The function refuses them.
    pub fn write(&self, part: &[u8]) -> Result<(), PciStateError> {
        self.device.noted(|| self.device.migration.write_part(part))
    }

    /// The function.
    pub fn device(&self) -> &Arc<VfioPciDevice> {
        &self.device
    }
}
