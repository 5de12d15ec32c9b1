// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a watchdog: whether its timer runs. Its value does not matter, as it starts anew.

use serde::{Deserialize, Serialize};

use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

const FORMAT: StateFormat = StateFormat { kind: "virtio-watchdog", newest: 1 };

/// Plain data, untrusted; every value is valid.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WatchdogState {
    is_armed: bool,
}

pub(super) fn save(is_armed: bool) -> DeviceSnapshot {
    FORMAT.encode(&WatchdogState { is_armed })
}

pub(super) fn check(snapshot: &DeviceSnapshot) -> Result<bool, StateError> {
    FORMAT.decode::<WatchdogState>(snapshot).map(|state| state.is_armed)
}
