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

/// Pages that became zero are sent as a flag.
pub const FEATURE_ZERO_PAGES: &str = "zero-pages";
/// The guest runs only after Confirm. Every negotiating peer has this.
pub const FEATURE_CONFIRM: &str = "confirm-handover";
/// Postcopy with bulk and urgent connections.
pub const FEATURE_POSTCOPY: &str = "postcopy";
/// Memory may be sent while the destination still builds the machine; `AwaitMachine` is answered when
/// that is done.
pub const FEATURE_EARLY_MEMORY: &str = "early-memory";
/// Memory contents may be sent as zstd frames.
pub const FEATURE_ZSTD: &str = "zstd";
/// Memory may be handed over as file descriptors.
pub const FEATURE_LOCAL: &str = "local";

/// Large host pages of shared memory may be sent in pieces of 4 KiB in postcopy.
pub const FEATURE_PIECES: &str = "pieces";
/// The destination populates memory that is announced.
pub const FEATURE_COMING: &str = "coming";
/// After a loss around the handover the source reports on a new connection which side has the guest,
/// and an acknowledgement that has become too old can be renewed.
pub const FEATURE_VERDICT: &str = "verdict";

/// When precopy switches to postcopy, outdated pages are discarded before the guest stops.
pub const FEATURE_STALE: &str = "stale";

/// The last messages carry the figures of their sender: Confirm those of the source, `PostcopyDone`
/// those of the destination, and its answer those of the process that served the pages.
pub const FEATURE_FIGURES: &str = "figures";

/// While the destination prepares its machine, which may take long, it sends `Alive` once a second before it
/// answers `AwaitMachine`.
pub const FEATURE_PREPARING: &str = "preparing";

/// While the destination maps memory and builds the machine that its first answer waits for, or discards outdated pages, it
/// sends `Alive` once a second before it answers Config and Stale. Without, a source would have to wait long for a
/// destination that says nothing.
pub const FEATURE_MAPPING: &str = "mapping";

/// Long parts of the state are sent as bytes beside it, over all connections, each as fast as the destination writes it.
pub const FEATURE_BLOBS: &str = "blob-windows";

/// More connections for requested pages than [`CONNECTIONS_MAX`](crate::options::CONNECTIONS_MAX) are accepted.
pub const FEATURE_MANY_URGENT: &str = "many-urgent";

/// The destination may say that it takes fewer further connections than were offered.
pub const FEATURE_FEWER_CONNECTIONS: &str = "fewer-connections";

/// Before a migration the destination answers checks of it, on connections of their own.
pub const FEATURE_CHECK: &str = "check";

/// Length of the token that extra connections send.
pub const TOKEN_BYTES: usize = 16;

/// The features of this version.
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
        FEATURE_PREPARING,
        FEATURE_MAPPING,
        FEATURE_BLOBS,
        FEATURE_MANY_URGENT,
        FEATURE_FEWER_CONNECTIONS,
        FEATURE_CHECK,
    ]
    .map(String::from)
    .into()
}

/// The source's capabilities and parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Name and version of the source, for messages and logs.
    pub software: String,
    /// Features of the source.
    pub features: BTreeSet<String>,
    /// When memory is to be sent.
    pub memory_mode: MemoryMode,
    /// Extra connections for memory.
    pub bulk_connections: u16,
    /// Connections for requested pages.
    pub urgent_connections: u16,
    /// Connections for requested pages in their place, with a destination that has [`FEATURE_MANY_URGENT`]: more than an
    /// older one takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub many_urgent_connections: Option<u16>,
    /// Number of vCPUs of the guest, where it is known; absent from older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u32>,
    /// Memory is handed over as file descriptors before the configuration.
    #[serde(default)]
    pub local: bool,
    /// How long the source of a postcopy reconnects by itself, in milliseconds; absent from older
    /// versions, which use the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recover_timeout_ms: Option<u64>,
    /// The guest's memory.
    pub regions: Vec<RegionInfo>,
    /// The format versions that the following documents need; absent from peers that know only the
    /// first.
    #[serde(default)]
    pub formats: Formats,
}

/// The destination's capabilities and parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// Name and version of the destination.
    pub software: String,
    /// Features of the destination.
    pub features: BTreeSet<String>,
    /// The token that extra connections send to prove that they belong to this migration.
    pub token: [u8; TOKEN_BYTES],
    /// How long the destination keeps the machine after its acknowledgement without a message from the
    /// source, in milliseconds; absent from older versions, which use the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promise_ms: Option<u64>,
    /// The newest format versions that it reads.
    #[serde(default)]
    pub formats: Formats,
    /// The most further connections that it takes, if these are fewer than were offered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections_max: Option<u16>,
}

/// The destination's answer to Config: its backing determines the unit in which pages are sent.
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
            /// Encodes the document as JSON.
            pub fn to_json(&self) -> Vec<u8> {
                // Maps have string keys and no number is a float: serialising cannot fail.
                serde_json::to_vec(self).unwrap_or_default()
            }

            /// Parses a document of the peer; its contents are not trusted.
            ///
            /// # Errors
            /// When the bytes are not such a document.
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
    /// Connections for requested pages, where both sides know of many.
    pub fn urgent_connections(&self) -> u16 {
        self.many_urgent_connections.unwrap_or(self.urgent_connections)
    }

    /// The peer's memory layout, checked.
    ///
    /// # Errors
    /// When the regions do not form a valid layout.
    pub fn layout(&self) -> Result<Layout, ProtocolError> {
        Ok(Layout::new(self.regions.clone())?)
    }
}

/// Longest time that a peer may give: a year, as for the recovery option.
const TIME_MAX: Duration = Duration::from_hours(366 * 24);

impl Offer {
    /// How long the source of a postcopy reconnects by itself.
    pub fn recover_timeout(&self) -> Duration {
        time(self.recover_timeout_ms, RECOVER_TIMEOUT_DEFAULT)
    }
}

impl Accepted {
    /// How long the destination keeps the machine after its acknowledgement.
    pub fn promise(&self) -> Duration {
        time(self.promise_ms, REJOIN_TIMEOUT)
    }
}

fn time(ms: Option<u64>, default: Duration) -> Duration {
    ms.map_or(default, Duration::from_millis).min(TIME_MAX)
}

/// A duration in milliseconds, as in the documents.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The features that both sides have.
pub fn common(one: &BTreeSet<String>, other: &BTreeSet<String>) -> BTreeSet<String> {
    one.intersection(other).cloned().collect()
}
