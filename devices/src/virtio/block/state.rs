// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a block device.

use serde::{Deserialize, Serialize};

use super::image::Disk;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

const FORMAT: StateFormat = StateFormat { kind: "virtio-block", newest: 1 };

/// Plain data, untrusted.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BlockState {
    /// The writeback field, as set by the driver.
    writeback: bool,
    /// Size of the disk, which the driver has read.
    capacity_sectors: u64,
    readonly: bool,
}

pub(super) fn save(disk: &Disk, writeback: bool) -> DeviceSnapshot {
    FORMAT.encode(&BlockState {
        writeback,
        capacity_sectors: disk.capacity_sectors(),
        readonly: disk.readonly(),
    })
}

/// Validates a saved state against the present disk; returns the writeback field.
pub(super) fn check(disk: &Disk, snapshot: &DeviceSnapshot) -> Result<bool, StateError> {
    let state: BlockState = FORMAT.decode(snapshot)?;
    let here = disk.capacity_sectors();
    if state.capacity_sectors != here {
        return Err(FORMAT.invalid(format!(
            "disk {} has {here} sectors and had {}",
            disk.path().display(),
            state.capacity_sectors
        )));
    }
    if state.readonly != disk.readonly() {
        return Err(FORMAT.invalid(format!(
            "disk {} is {} and was not",
            disk.path().display(),
            if disk.readonly() { "read-only" } else { "writable" }
        )));
    }
    Ok(state.writeback)
}
