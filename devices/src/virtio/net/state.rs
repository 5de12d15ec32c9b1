// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a network device.

use serde::{Deserialize, Serialize};

use super::config::{GUEST_OFFLOADS, Link, LinkState};
use super::tap::MacAddress;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

const FORMAT: StateFormat = StateFormat { kind: "virtio-net", newest: 1 };

/// Plain data, untrusted.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetState {
    mac: MacAddress,
    offloads: u64,
    active_pairs: u16,
    announce_pending: bool,
}

pub(super) fn save(link: &Link) -> DeviceSnapshot {
    let LinkState { mac, offloads, active_pairs, announce_pending } = link.state();
    FORMAT.encode(&NetState { mac, offloads, active_pairs, announce_pending })
}

/// Validates a saved state against the present device.
pub(super) fn check(link: &Link, snapshot: &DeviceSnapshot) -> Result<LinkState, StateError> {
    let NetState { mac, offloads, active_pairs, announce_pending } = FORMAT.decode(snapshot)?;
    if !(1..=link.max_pairs).contains(&active_pairs) {
        return Err(FORMAT.invalid(format!(
            "{active_pairs} queue pairs in use, and the device has {}",
            link.max_pairs
        )));
    }
    if offloads & !GUEST_OFFLOADS != 0 {
        return Err(FORMAT.invalid(format!("offloads {offloads:#x} are not known")));
    }
    Ok(LinkState { mac, offloads, active_pairs, announce_pending })
}
