// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The state of devices that another process serves.

use serde::{Deserialize, Serialize};

use crate::lists::{Fixed, List, present};

/// Maximum length in bytes of the state of a back end: its bytes are numbers, of which a document has a limited count.
const BACKEND_STATE_BYTES_MAX: usize = 4 << 20;
const RINGS_MAX: usize = 1024;

/// Configuration of a file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FsConfig {
    /// Its tag, with zeros behind it.
    pub tag: Fixed<u8, 36>,
    /// Number of its request queues.
    pub num_request_queues: u32,
}

/// State of a vhost-user device with a configuration of type `C`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VhostUser<C> {
    /// Offered features.
    pub avail_features: u64,
    /// Accepted features.
    pub acked_features: u64,
    /// Configuration.
    pub config: C,
    /// Protocol features in use.
    pub acked_protocol_features: u64,
    /// Number of queues.
    pub vu_num_queues: u64,
    /// Whether the back end makes requests.
    pub backend_req_support: bool,
    /// Position of each ring, if the back end has given its state.
    #[serde(deserialize_with = "present")]
    pub vring_bases: Option<List<u64, RINGS_MAX>>,
    /// State of the back end.
    #[serde(deserialize_with = "present")]
    pub backend_state: Option<List<u8, BACKEND_STATE_BYTES_MAX>>,
}
