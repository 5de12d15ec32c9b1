// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a real-time clock: only its queue. The time is that of the host where the guest is.

use serde::{Deserialize, Serialize};

use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

const FORMAT: StateFormat = StateFormat { kind: "virtio-rtc", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RtcState {}

pub(super) fn save() -> DeviceSnapshot {
    FORMAT.encode(&RtcState {})
}

pub(super) fn check(snapshot: &DeviceSnapshot) -> Result<(), StateError> {
    FORMAT.decode::<RtcState>(snapshot).map(|_| ())
}
