// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Negotiation of capabilities after Start: one JSON document each way.
//!
//! Owns the documents. Unknown fields and features are ignored, so that either side can be newer;
//! a feature is used only when both name it.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ProtocolError;
use super::formats::Formats;
use crate::layout::{Layout, RegionInfo};
use crate::options::{MemoryMode, RECOVER_TIMEOUT_DEFAULT, REJOIN_TIMEOUT};

/// Pages that became zeros travel as a flag.
pub const FEATURE_ZERO_PAGES: &str = "zero-pages";
/// The guest runs only after Confirm. Every negotiating peer has it.
pub const FEATURE_CONFIRM: &str = "confirm-handover";
/// Postcopy with bulk and urgent connections.
pub const FEATURE_POSTCOPY: &str = "postcopy";
/// Memory may be sent while the destination still builds the machine, and `AwaitMachine` tells
/// when that is done.
pub const FEATURE_EARLY_MEMORY: &str = "early-memory";
/// Contents of memory may come as zstd frames.
pub const FEATURE_ZSTD: &str = "zstd";
/// Memory may be handed over as file descriptors.
pub const FEATURE_LOCAL: &str = "local";

/// Large host pages of shared memory may come in pieces of 4 KiB in postcopy.
pub const FEATURE_PIECES: &str = "pieces";
/// The destination gets pages ready for memory that is announced.
pub const FEATURE_COMING: &str = "coming";
/// After a loss around the handover the source says on a new connection which side has the guest,
/// and an acknowledgement that has become old can be renewed.
pub const FEATURE_VERDICT: &str = "verdict";

/// What precopy that becomes postcopy has made old is thrown away before the guest stops.
pub const FEATURE_STALE: &str = "stale";

/// The last messages have the figures of their sender: Confirm those of the source,
/// `PostcopyDone` those of the destination, and the answer to it those of the process that served.
pub const FEATURE_FIGURES: &str = "figures";

/// Length of the token that extra connections show.
pub const TOKEN_BYTES: usize = 16;

/// What this version can do.
pub fn features() -> BTreeSet<String> {
    [
        FEATURE_ZERO_PAGES,
        FEATURE_CONFIRM,
        FEATURE_POSTCOPY,
        FEATURE_EARLY_MEMORY,
        FEATURE_ZSTD,
        FEATURE_LOCAL,
        FEATURE_PIECES,
        FEATURE_COMING,
        FEATURE_STALE,
        FEATURE_VERDICT,
        FEATURE_FIGURES,
    ]
    .map(String::from)
    .into()
}

/// The source's document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Name and version of the source, for messages and logs.
    pub software: String,
    /// What the source can do.
    pub features: BTreeSet<String>,
    /// How memory shall travel.
    pub memory_mode: MemoryMode,
    /// Connections for bulk memory alongside this one.
    pub bulk_connections: u16,
    /// Connections for requested pages.
    pub urgent_connections: u16,
    /// Memory is handed over as file descriptors before the configuration.
    #[serde(default)]
    pub local: bool,
    /// How long the source of a postcopy connects again by itself, in milliseconds; versions that
    /// do not tell use the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recover_timeout_ms: Option<u64>,
    /// The guest's memory.
    pub regions: Vec<RegionInfo>,
    /// What the documents that follow need; nothing is said by peers that know the first versions only.
    #[serde(default)]
    pub formats: Formats,
}

/// The destination's document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// Name and version of the destination.
    pub software: String,
    /// What the destination can do.
    pub features: BTreeSet<String>,
    /// What extra connections show to prove that they belong here.
    pub token: [u8; TOKEN_BYTES],
    /// How long the destination keeps the machine from its acknowledgement on without hearing from
    /// the source, in milliseconds; versions that do not tell keep it for the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promise_ms: Option<u64>,
    /// The newest documents that it reads.
    #[serde(default)]
    pub formats: Formats,
}

/// The destination's answer to Config: its backing decides the unit in which pages travel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepared {
    /// The guest's memory as the destination backs it.
    pub regions: Vec<RegionInfo>,
}

/// Name and version of this software.
pub fn software() -> String {
    format!("godwit {}", env!("CARGO_PKG_VERSION"))
}

macro_rules! document {
    ($name:ident, $what:literal) => {
        impl $name {
            /// Its bytes.
            pub fn to_json(&self) -> Vec<u8> {
                // Maps have string keys and no number is a float: serialising cannot fail.
                serde_json::to_vec(self).unwrap_or_default()
            }

            /// Reads one from a peer; nothing in it is trusted.
            ///
            /// # Errors
            /// When it is not such a document.
            pub fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
                serde_json::from_slice(bytes)
                    .map_err(|source| ProtocolError::Json { what: $what, source })
            }
        }
    };
}

document!(Offer, "capability offer");
document!(Accepted, "capability answer");
document!(Prepared, "memory layout");

impl Offer {
    /// The peer's memory, checked.
    ///
    /// # Errors
    /// When it is no memory layout.
    pub fn layout(&self) -> Result<Layout, ProtocolError> {
        Ok(Layout::new(self.regions.clone())?)
    }
}

/// Longest time that a peer may name: a year, the same as the option's for recovery.
const TIME_MAX: Duration = Duration::from_hours(366 * 24);

impl Offer {
    /// How long a source of a postcopy connects again by itself.
    pub fn recover_timeout(&self) -> Duration {
        time(self.recover_timeout_ms, RECOVER_TIMEOUT_DEFAULT)
    }
}

impl Accepted {
    /// How long the destination keeps the machine from its acknowledgement on.
    pub fn promise(&self) -> Duration {
        time(self.promise_ms, REJOIN_TIMEOUT)
    }
}

fn time(ms: Option<u64>, default: Duration) -> Duration {
    ms.map_or(default, Duration::from_millis).min(TIME_MAX)
}

/// A time as the documents have it.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// What both sides can do.
pub fn common(one: &BTreeSet<String>, other: &BTreeSet<String>) -> BTreeSet<String> {
    one.intersection(other).cloned().collect()
}
