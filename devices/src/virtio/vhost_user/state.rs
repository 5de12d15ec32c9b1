// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a vhost-user device.
//!
//! Owns which have one: a network, whose back end keeps nothing that is not in guest memory and the rings. The other back ends
//! have a state of their own, which does not move.

use serde::{Deserialize, Serialize};

use super::config_space::ConfigSpace;
use super::net_link::{NetLink, NetState};
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

const FORMAT: StateFormat = StateFormat { kind: "vhost-user-net", newest: 1 };

/// Plain data, untrusted.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    active_pairs: u16,
    announce_pending: bool,
    /// That the driver was told, in bytes.
    mtu: Option<u16>,
}

pub(super) fn save(link: &NetLink, config: &ConfigSpace) -> DeviceSnapshot {
    let NetState { active_pairs, announce_pending } = link.state();
    FORMAT.encode(&Saved { active_pairs, announce_pending, mtu: config.mtu() })
}

/// Restores a state, once it has been found to be one of this device.
pub(super) fn restore(
    link: &NetLink,
    config: &ConfigSpace,
    snapshot: &DeviceSnapshot,
) -> Result<(), StateError> {
    let Saved { active_pairs, announce_pending, mtu } = FORMAT.decode(snapshot)?;
    if !(1..=link.pairs_max).contains(&active_pairs) {
        return Err(FORMAT.invalid(format!(
            "{active_pairs} queue pairs in use, and the device has {}",
            link.pairs_max
        )));
    }
    let here = config.mtu();
    if mtu.is_some_and(|mtu| here.is_none_or(|here| here < mtu)) {
        return Err(FORMAT.invalid(format!(
            "the driver has an MTU of {} bytes, and the device {}",
            mtu.unwrap_or(0),
            here.map_or_else(|| "none".to_owned(), |here| here.to_string())
        )));
    }
    link.set_state(NetState { active_pairs, announce_pending });
    Ok(())
}
