// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a persistent memory device: where the guest has its memory.
//!
//! Owns the format. Must never hold the contents, which are in the file.

use serde::{Deserialize, Serialize};

use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

const FORMAT: StateFormat = StateFormat { kind: "virtio-pmem", newest: 1 };

/// Plain data, untrusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PmemState {
    pub(super) gpa: u64,
    pub(super) len_bytes: u64,
}

pub(super) fn save(state: PmemState) -> DeviceSnapshot {
    FORMAT.encode(&state)
}

/// The guest has mapped the memory, so that it must be where it was.
pub(super) fn check(snapshot: &DeviceSnapshot, here: PmemState) -> Result<(), StateError> {
    let there: PmemState = FORMAT.decode(snapshot)?;
    if there == here {
        return Ok(());
    }
    Err(FORMAT.invalid(format!(
        "the guest has {:#x} bytes at {:#x}, and here are {:#x} bytes at {:#x}",
        there.len_bytes, there.gpa, here.len_bytes, here.gpa
    )))
}
