// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saving and restoring the state of devices.
//!
//! Owns the form of a saved state, and the one way in which a device's plain state becomes a [`DeviceSnapshot`] and back. A
//! snapshot comes from outside and is untrusted: kind and version are checked here, the
//! values by the device.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Saved state of a device; plain data, versioned, untrusted until validated by the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSnapshot {
    /// Kind of the device, such as `virtio-block`.
    pub kind: String,
    /// Version of `data`; unknown versions are refused.
    pub version: u32,
    /// State of the device itself.
    pub data: serde_json::Value,
}

/// Why a saved state is refused.
#[derive(Debug, Error)]
pub enum StateError {
    /// The state is of another kind of device.
    #[error("the state is that of a {found}, not of a {expected}")]
    Kind {
        /// Kind of this device.
        expected: &'static str,
        /// Kind in the state.
        found: String,
    },
    /// The version is unknown.
    #[error("state version {found} of {kind} is not known here (newest known: {newest})")]
    Version {
        /// Kind of device.
        kind: &'static str,
        /// The version.
        found: u32,
        /// Newest known version.
        newest: u32,
    },
    /// The state is malformed.
    #[error("the state of {kind} cannot be read")]
    Malformed {
        /// Kind of device.
        kind: &'static str,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// A value is invalid.
    #[error("the state of {kind} is inconsistent: {why}")]
    Invalid {
        /// Kind of device.
        kind: &'static str,
        /// What is wrong.
        why: String,
    },
}

/// A legacy device with saved state.
///
/// Both methods are called while the vCPUs are paused.
pub trait Snapshot {
    /// Saves the state.
    fn save(&self) -> DeviceSnapshot;
    /// Restores a state. On error the device is unchanged.
    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError>;
}

/// Kind and version of a device's state.
#[derive(Clone, Copy)]
pub(crate) struct StateFormat {
    /// Kind of device.
    pub(crate) kind: &'static str,
    /// Newest version that is read, and the version that is written. The oldest is 1.
    pub(crate) newest: u32,
}

impl StateFormat {
    pub(crate) fn encode<T: Serialize>(self, state: &T) -> DeviceSnapshot {
        // Plain structs of numbers, strings and lists always have a JSON form; if not, the reader refuses
        // the null.
        let data = serde_json::to_value(state).unwrap_or_default();
        DeviceSnapshot { kind: self.kind.to_owned(), version: self.newest, data }
    }

    pub(crate) fn decode<T: DeserializeOwned>(
        self,
        snapshot: &DeviceSnapshot,
    ) -> Result<T, StateError> {
        if snapshot.kind != self.kind {
            return Err(StateError::Kind { expected: self.kind, found: snapshot.kind.clone() });
        }
        if !(1..=self.newest).contains(&snapshot.version) {
            return Err(StateError::Version {
                kind: self.kind,
                found: snapshot.version,
                newest: self.newest,
            });
        }
        T::deserialize(&snapshot.data)
            .map_err(|source| StateError::Malformed { kind: self.kind, source })
    }

    pub(crate) fn invalid(self, why: impl Into<String>) -> StateError {
        StateError::Invalid { kind: self.kind, why: why.into() }
    }
}
