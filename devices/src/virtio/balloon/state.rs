// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a balloon.
//!
//! Which pages are in the balloon is not saved: they have no contents, as the memory that is saved or
//! migrated shows, and a driver that takes them out names them.

use serde::{Deserialize, Serialize};

use super::config::ConfigSpace;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

const FORMAT: StateFormat = StateFormat { kind: "virtio-balloon", newest: 1 };

/// Plain data, untrusted.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BalloonState {
    target_pages: u32,
    actual_pages: u32,
    poison: u32,
    /// Command number of the last hint request.
    hint_command: u32,
}

pub(super) fn save(config: ConfigSpace, hint_command: u32) -> DeviceSnapshot {
    let ConfigSpace { target_pages, actual_pages, poison } = config;
    FORMAT.encode(&BalloonState { target_pages, actual_pages, poison, hint_command })
}

/// Validates the configuration and last command against the maximum memory of the guest in pages.
pub(super) fn check(
    snapshot: &DeviceSnapshot,
    ram_pages: u64,
) -> Result<(ConfigSpace, u32), StateError> {
    let state: BalloonState = FORMAT.decode(snapshot)?;
    let BalloonState { target_pages, actual_pages, poison, hint_command } = state;
    if u64::from(target_pages) > ram_pages {
        return Err(FORMAT.invalid(format!(
            "the balloon is to have {target_pages} pages of a guest that has {ram_pages} at most"
        )));
    }
    Ok((ConfigSpace { target_pages, actual_pages, poison }, hint_command))
}
