// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of an entropy device: only its queue.

use serde::{Deserialize, Serialize};

use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

const FORMAT: StateFormat = StateFormat { kind: "virtio-rng", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RngState {}

pub(super) fn save() -> DeviceSnapshot {
    FORMAT.encode(&RngState {})
}

pub(super) fn check(snapshot: &DeviceSnapshot) -> Result<(), StateError> {
    FORMAT.decode::<RngState>(snapshot).map(|_| ())
}
