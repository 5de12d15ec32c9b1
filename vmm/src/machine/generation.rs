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

/// Why a guest has no new generation ID.
#[derive(Debug, Error)]
pub enum GenerationError {
    /// The host has no random numbers.
    #[error("cannot make a generation ID: the host gives no random numbers")]
    Random,
    /// It has no memory where it belongs.
    #[error("cannot write the generation ID to guest memory at {:#x}", layout::GENERATION_ID_GPA)]
    Write(#[source] GuestMemoryError),
}

/// Writes a new one.
///
/// # Errors
/// No random numbers, no memory there.
pub fn write_new(ram: &GuestRam) -> Result<(), GenerationError> {
    let id: [u8; GENERATION_ID_LEN_BYTES] =
        crate::config::random_bytes().ok_or(GenerationError::Random)?;
    let memory = ram.guest_memory();
    let memory = memory.memory();
    let at = GuestAddress(layout::GENERATION_ID_GPA);
    memory.write_slice(&id, at).map_err(GenerationError::Write)
}

impl Machine {
    /// Makes the guest of a machine that has been restored another one than all its copies, if it can be
    /// told; it finds out when it runs. Memory and state must be here.
    ///
    /// # Errors
    /// As [`write_new`].
    pub fn renew_generation(&self) -> Result<(), GenerationError> {
        if self.parts.legacy.generation().gpa().is_some() {
            write_new(&self.parts.ram)?;
            self.parts.legacy.tell_generation_changed();
        } else {
            log::info!("the guest has no generation ID, so it cannot be told that it is a copy");
        }
        Ok(())
    }
}
