// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The hardware's state in parts, beside the rest of a function's state.
//!
//! Owns when its reading and its taking begin and end. Never holds more of it than the part at hand. Each call may take as long
//! as the hardware does, or without end: then the function is left to the thread of that call ([`VfioPciDevice::leave`]), which
//! resets it if the call ever returns.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::VfioPciDevice;
use crate::migration::{
    Call, Hardware, INTEGRATED_ENDPOINT_VERSION, MigrationError, ROM_VERSION, VfioState,
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
        self.noted(check())?;
        Ok(StateWriter { device: Arc::clone(self) })
    }

    /// Leaves the function to the thread whose call into the kernel does not return: it is lost to the guest, and neither its
    /// guest nor the end of its machine waits for it. What it can reach of memory it reaches until it has been reset, which
    /// that thread does when the call returns. Returns the call. Does not wait for it.
    pub fn leave(&self) -> String {
        let (is_held, call) = (self.migration.leave(), self.migration.call());
        self.lose();
        if !is_held {
            // It has returned in this moment, and its thread may have ended.
            self.reset_late();
        }
        call.map_or_else(|| "the end of its state".to_owned(), |call| call.to_string())
    }

    /// The current call into the kernel that waits for the hardware.
    pub fn call(&self) -> Option<Call> {
        self.migration.call()
    }

    /// Whether it was left to a call that did not return.
    pub fn is_left(&self) -> bool {
        self.migration.is_left()
    }

    /// Resets the function after its call has returned, once.
    fn reset_late(&self) {
        if !self.late_reset.swap(true, Ordering::AcqRel) {
            self.lose();
            self.end_dma();
        }
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

    /// The result of a step on the thread that has made it.
    fn noted<T>(&self, step: Result<T, MigrationError>) -> Result<T, PciStateError> {
        if self.is_left() {
            self.reset_late();
            return Err(self.state_error(MigrationError::Left));
        }
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
        let migration = &self.device.migration;
        if !self.has_begun {
            self.device.noted(migration.begin_save())?;
            self.has_begun = true;
        }
        let read = migration.read_part(part, self.read_bytes);
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
        if !self.has_begun {
            return;
        }
        // One that is refused stays where it is, from where it can still continue.
        if let Err(error) = self.device.noted(self.device.migration.end_save()) {
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
        self.device.noted(self.device.migration.begin_load())
    }

    /// Writes the next bytes.
    ///
    /// # Errors
    /// The function refuses them.
    pub fn write(&self, part: &[u8]) -> Result<(), PciStateError> {
        self.device.noted(self.device.migration.write_part(part))
    }

    /// The function.
    pub fn device(&self) -> &Arc<VfioPciDevice> {
        &self.device
    }
}
