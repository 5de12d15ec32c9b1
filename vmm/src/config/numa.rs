// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! NUMA nodes of the guest (`--numa`).
//!
//! Owns their definition. This version knows them by name only.

use super::codec::{Id, Int, IntList, JsonOnly, One, Opt, TextList, ValueCodec, pair_items};
use super::family::option_family;

option_family! {
    /// Distance to another NUMA node.
    NumaDistance "distance" {
        /// The other node.
        destination: u32 = 0, "" as JsonOnly, required_json();
        /// The distance.
        distance: u8 = 0, "" as JsonOnly, required_json();
    }
}

option_family! {
    /// A NUMA node of the guest.
    NumaConfig "numa" {
        /// Number of the node.
        guest_numa_id: u32 = 0, "guest_numa_id" as One<Int>, required_json();
        /// vCPUs of the node.
        cpus: Option<Vec<u32>> = None, "cpus" as Opt<IntList>;
        /// Distances to other nodes.
        distances: Option<Vec<NumaDistance>> = None, "distances" as Opt<DistancesText>;
        /// Memory zones of the node.
        memory_zones: Option<Vec<String>> = None, "memory_zones" as Opt<TextList>;
        /// PCI segments of the node.
        pci_segments: Option<Vec<u16>> = None, "pci_segments" as Opt<IntList>;
        /// Device of the node.
        device_id: Option<String> = None, "device_id" as Opt<Id>;
    }
}

/// `[node@distance,...]`.
#[derive(Debug)]
pub struct DistancesText;

impl ValueCodec<Vec<NumaDistance>> for DistancesText {
    const SYNTAX: &'static str = "<list_of_distances_to_destination_nodes>";

    fn parse(raw: &str) -> Result<Vec<NumaDistance>, String> {
        const EXPECTED: &str = "expected nodes with their distances, like [1@20,2@30]";
        pair_items(raw)
            .ok_or(EXPECTED)?
            .into_iter()
            .map(|(node, distance)| {
                let destination = node.parse().map_err(|_| EXPECTED.to_owned())?;
                let distance = distance.parse().map_err(|_| EXPECTED.to_owned())?;
                Ok(NumaDistance { destination, distance })
            })
            .collect()
    }

    fn print(value: &Vec<NumaDistance>) -> String {
        let items: Vec<_> =
            value.iter().map(|d| format!("{}@{}", d.destination, d.distance)).collect();
        format!("[{}]", items.join(","))
    }
}
