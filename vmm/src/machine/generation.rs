// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The generation ID in guest memory.
//!
//! Owns its contents: one for each boot, another for each restore of a snapshot, the same through every
//! migration. The device knows where it is and whether the guest has one.

use arch::layout;
use devices::legacy::GENERATION_ID_LEN_BYTES;
use memory::GuestRam;
use thiserror::Error;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _, GuestMemoryError};

use super::Machine;

/// Why the generation ID cannot be renewed.
#[derive(Debug, Error)]
pub enum GenerationError {
    /// The host provides no random numbers.
    #[error("cannot make a generation ID: the host gives no random numbers")]
    Random,
    /// The ID cannot be written to guest memory.
    #[error("cannot write the generation ID to guest memory at {:#x}", layout::GENERATION_ID_GPA)]
    Write(#[source] GuestMemoryError),
}

/// Writes a new random generation ID.
///
/// # Errors
/// No random numbers, or no memory at the address.
pub fn write_new(ram: &GuestRam) -> Result<(), GenerationError> {
    let id: [u8; GENERATION_ID_LEN_BYTES] =
        crate::config::random_bytes().ok_or(GenerationError::Random)?;
    let memory = ram.guest_memory();
    let memory = memory.memory();
    let at = GuestAddress(layout::GENERATION_ID_GPA);
    memory.write_slice(&id, at).map_err(GenerationError::Write)
}

impl Machine {
    /// Gives a restored machine a new generation ID, if the guest has one, so that the guest can tell
    /// itself apart from other copies; it is notified when it runs. Memory and machine state must be
    /// restored.
    ///
    /// # Errors
    /// As [`write_new`].
    pub fn renew_generation(&self) -> Result<(), GenerationError> {
        if self.parts.legacy.generation().gpa().is_some() {
            write_new(&self.parts.ram)?;
            self.parts.legacy.notify_generation_changed();
        } else {
            log::info!("the guest has no generation ID, so it cannot detect that it is a copy");
        }
        Ok(())
    }
}
