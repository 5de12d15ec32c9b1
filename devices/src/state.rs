// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saving and restoring the state of devices.
//!
//! Owns the form of a saved state, and the one way in which a device's plain state becomes a [`DeviceSnapshot`] and back. A
//! snapshot comes from outside and is untrusted: kind and version are checked here, the
//! values by the device.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A device's saved state: plain, versioned and untrusted until the device has checked it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSnapshot {
    /// What kind of device wrote it, for example `virtio-block`.
    pub kind: String,
    /// Version of `data`; a reader refuses versions that it does not know.
    pub version: u32,
    /// The device's own part.
    pub data: serde_json::Value,
}

/// Why a saved state was refused.
#[derive(Debug, Error)]
pub enum StateError {
    /// Another kind of device wrote it.
    #[error("the state is that of a {found}, not of a {expected}")]
    Kind {
        /// The kind that this device is.
        expected: &'static str,
        /// The kind that the state names.
        found: String,
    },
    /// A newer program wrote it.
    #[error("state version {found} of {kind} is not known here (newest known: {newest})")]
    Version {
        /// Kind of device.
        kind: &'static str,
        /// Version found.
        found: u32,
        /// Newest version that can be read.
        newest: u32,
    },
    /// The data do not parse.
    #[error("the state of {kind} cannot be read")]
    Malformed {
        /// Kind of device.
        kind: &'static str,
        /// What the parser says.
        #[source]
        source: serde_json::Error,
    },
    /// A value is impossible.
    #[error("the state of {kind} is inconsistent: {why}")]
    Invalid {
        /// Kind of device.
        kind: &'static str,
        /// What is wrong.
        why: String,
    },
}

/// A legacy device whose state can be saved and restored.
///
/// Both are called while the vCPUs do not run.
pub trait Snapshot {
    /// The device's state.
    fn save(&self) -> DeviceSnapshot;
    /// Takes a saved state. On an error the device is as it was.
    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError>;
}

/// What identifies a device's saved state.
#[derive(Clone, Copy)]
pub(crate) struct StateFormat {
    /// Kind of device.
    pub(crate) kind: &'static str,
    /// Newest version that is read, and the version that is written. The oldest is 1.
    pub(crate) newest: u32,
}

impl StateFormat {
    pub(crate) fn encode<T: Serialize>(self, state: &T) -> DeviceSnapshot {
        // Plain structs of numbers, strings and lists always have a JSON form; were it ever not
        // so, the reader refuses the null.
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
