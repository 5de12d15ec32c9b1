// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Other host NUMA nodes, or another pool, for the memory zones of a VM that arrives or is restored.
//!
//! Owns the family and its text form. It must never know which nodes there are.

use std::path::{Path, PathBuf};

use super::codec::{JsonOnly, ValueCodec, pair_items};
use super::family::option_family;
use super::option_string::{quote, unquote};

option_family! {
    /// New host NUMA node for a memory zone.
    VmMemoryZoneUpdateData "zone-update" {
        /// The zone.
        id: String = String::new(), "" as JsonOnly, required_json();
        /// The node.
        host_numa_node: u32 = 0, "" as JsonOnly, required_json();
    }
}

/// Where the memory of a VM that arrives or is restored comes from on this host.
#[derive(Clone, Debug, Default)]
pub struct MemoryUpdates {
    /// New nodes for zones.
    pub zones: Vec<VmMemoryZoneUpdateData>,
    /// Another pool for all zones.
    pub pool: Option<PoolUpdate>,
}

/// Another pool of prezeroed memory than the configuration names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolUpdate {
    /// None.
    Off,
    /// The one with this socket.
    At(PathBuf),
}

impl MemoryUpdates {
    /// As a request has them; a pool `off` is none.
    pub fn new(zones: Option<&Vec<VmMemoryZoneUpdateData>>, pool: Option<&PathBuf>) -> Self {
        let pool = pool.map(|path| {
            if path == Path::new("off") { PoolUpdate::Off } else { PoolUpdate::At(path.clone()) }
        });
        Self { zones: zones.cloned().unwrap_or_default(), pool }
    }
}

/// `[zone@node,...]`.
#[derive(Debug)]
pub struct ZoneUpdates;

impl ValueCodec<Vec<VmMemoryZoneUpdateData>> for ZoneUpdates {
    const SYNTAX: &'static str = "<list_of_zones_with_host_nodes>";

    fn parse(raw: &str) -> Result<Vec<VmMemoryZoneUpdateData>, String> {
        const EXPECTED: &str = "expected zones with nodes of the host, like [low@1,high@0]";
        let one = |(id, node): (&str, &str)| {
            let host_numa_node = node.parse().map_err(|_| EXPECTED.to_owned())?;
            Ok(VmMemoryZoneUpdateData { id: unquote(id), host_numa_node })
        };
        pair_items(raw).ok_or(EXPECTED)?.into_iter().map(one).collect()
    }

    fn print(value: &Vec<VmMemoryZoneUpdateData>) -> String {
        let one = |it: &VmMemoryZoneUpdateData| format!("{}@{}", quote(&it.id), it.host_numa_node);
        format!("[{}]", value.iter().map(one).collect::<Vec<_>>().join(","))
    }
}
