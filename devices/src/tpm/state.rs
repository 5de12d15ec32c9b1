// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of the TPM: its registers, and the emulator's state, which only the emulator understands.
//!
//! Owns the form and its limits.

use serde::{Deserialize, Serialize};

use super::crb::BUFFER_BYTES;
use super::emulator::{BLOB_BYTES_MAX, StateBlob, StateBlobs};
use crate::state::{StateError, StateFormat};

pub(super) const FORMAT: StateFormat = StateFormat { kind: "tpm", newest: 1 };

/// Registers and the used part of the buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedRegisters {
    pub(super) is_assigned: bool,
    pub(super) is_idle: bool,
    pub(super) buffer: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedTpm {
    registers: SavedRegisters,
    permanent: StateBlob,
    volatile: StateBlob,
    save_state: StateBlob,
}

impl SavedTpm {
    pub(super) fn new(registers: SavedRegisters, blobs: StateBlobs) -> Self {
        let [permanent, volatile, save_state] = blobs;
        Self { registers, permanent, volatile, save_state }
    }

    /// What was saved, checked.
    pub(super) fn into_parts(self) -> Result<(SavedRegisters, StateBlobs), StateError> {
        if self.registers.buffer.len() > BUFFER_BYTES {
            return Err(FORMAT.invalid("its buffer is longer than the device's"));
        }
        let blobs = [self.permanent, self.volatile, self.save_state];
        if blobs.iter().any(|blob| blob.bytes.len() > BLOB_BYTES_MAX) {
            return Err(FORMAT.invalid(format!("a part has more than {BLOB_BYTES_MAX} bytes")));
        }
        Ok((self.registers, blobs))
    }
}
