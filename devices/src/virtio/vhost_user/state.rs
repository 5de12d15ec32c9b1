// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a vhost-user device.
//!
//! Owns which have one: a network, whose back end keeps nothing that is not in guest memory and the rings; and a file system
//! whose back end gives its state. It means nothing here, and the back end that takes it has to check it. The other back ends
//! have a state of their own, which does not move.

use serde::{Deserialize, Serialize};

use super::config_space::ConfigSpace;
use super::error::VhostUserError;
use super::net_link::{NetLink, NetState};
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

/// Of a file system.
const FS_FORMAT: StateFormat = StateFormat { kind: "vhost-user-fs", newest: 1 };

/// Plain data, untrusted.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FsSaved {
    /// The state of the back end, two digits for each byte.
    back_end: String,
}

/// The state of a file system whose back end has given `state`; without one it is refused when it is restored.
pub(super) fn save_fs(state: &[u8]) -> DeviceSnapshot {
    let digit = |half: u8| char::from_digit(u32::from(half), 16).unwrap_or('0');
    let digits = state.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]);
    FS_FORMAT.encode(&FsSaved { back_end: digits.collect() })
}

/// What the back end of a file system has given.
pub(super) fn fs_state(snapshot: &DeviceSnapshot) -> Result<Vec<u8>, StateError> {
    let FsSaved { back_end } = FS_FORMAT.decode(snapshot)?;
    let (pairs, rest) = back_end.as_bytes().as_chunks::<2>();
    let byte = |pair: &[u8; 2]| {
        let [high, low] = pair.map(|digit| char::from(digit).to_digit(16));
        u8::try_from(high? << 4 | low?).ok()
    };
    let state: Option<Vec<u8>> = pairs.iter().map(byte).collect();
    match state {
        Some(state) if rest.is_empty() && !state.is_empty() => Ok(state),
        _ => Err(FS_FORMAT.invalid("it has no state of a back end")),
    }
}

/// Why the back end has not taken it.
pub(super) fn not_taken(error: &VhostUserError) -> StateError {
    FS_FORMAT.invalid(error_text::chain(error))
}

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

/// Restores a state, once it has been found to be one of this device, whose drivers are told the MTU `here`.
pub(super) fn restore(
    link: &NetLink,
    here: Option<u16>,
    snapshot: &DeviceSnapshot,
) -> Result<(), StateError> {
    let Saved { active_pairs, announce_pending, mtu } = FORMAT.decode(snapshot)?;
    if !(1..=link.pairs_max).contains(&active_pairs) {
        return Err(FORMAT.invalid(format!(
            "{active_pairs} queue pairs in use, and the device has {}",
            link.pairs_max
        )));
    }
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
