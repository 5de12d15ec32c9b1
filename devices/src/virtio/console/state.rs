// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a console.

use serde::{Deserialize, Serialize};

use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

const FORMAT: StateFormat = StateFormat { kind: "virtio-console", newest: 1 };

/// Plain data, untrusted; every value is valid.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ConsoleState {
    columns: u16,
    rows: u16,
}

pub(super) fn save((columns, rows): (u16, u16)) -> DeviceSnapshot {
    FORMAT.encode(&ConsoleState { columns, rows })
}

/// Columns and rows.
pub(super) fn check(snapshot: &DeviceSnapshot) -> Result<(u16, u16), StateError> {
    let state: ConsoleState = FORMAT.decode(snapshot)?;
    Ok((state.columns, state.rows))
}
