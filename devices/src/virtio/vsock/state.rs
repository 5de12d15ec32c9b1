// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a socket device: only its queues. Connections end with the process,
//! and a restored guest is always told so.

use serde::{Deserialize, Serialize};

use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

const FORMAT: StateFormat = StateFormat { kind: "virtio-vsock", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct VsockState {}

pub(super) fn save() -> DeviceSnapshot {
    FORMAT.encode(&VsockState {})
}

pub(super) fn check(snapshot: &DeviceSnapshot) -> Result<(), StateError> {
    FORMAT.decode::<VsockState>(snapshot).map(|_| ())
}
