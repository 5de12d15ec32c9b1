// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Other host NUMA nodes for the memory zones of a VM that arrives or is restored.
//!
//! Owns the family and its text form. It must never know which nodes there are.

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
