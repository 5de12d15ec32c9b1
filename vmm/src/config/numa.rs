// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! NUMA nodes of the guest (`--numa`).
//!
//! Owns their definition, and the rules between them and what they name. What no node names belongs to node 0: vCPUs,
//! memory and PCI segments. It must never depend on the nodes of a host: those of zones are in `memory`.

use std::collections::{BTreeMap, BTreeSet};

use super::codec::{Id, Int, IntList, JsonOnly, One, Opt, TextList, ValueCodec, pair_items};
use super::error::ConfigError;
use super::family::option_family;

/// Distance of a node to itself; that to another is longer (ACPI 6.5, section 5.2.17).
pub const OWN_DISTANCE: u8 = 10;

/// Distance between nodes where none is given.
pub const DEFAULT_DISTANCE: u8 = 20;

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
    /// A NUMA node of the guest. What no node names belongs to node 0.
    NumaConfig "numa" {
        /// Number of the node.
        guest_numa_id: u32 = 0, "guest_numa_id" as One<Int>, required(), range(0, 255);
        /// vCPUs of the node, also those that are to come later.
        cpus: Option<Vec<u32>> = None, "cpus" as Opt<IntList>;
        /// Distances to other nodes, from 11 to 255. One that is given in one direction counts for the other as well;
        /// 20 if it is given in none.
        distances: Option<Vec<NumaDistance>> = None, "distances" as Opt<DistancesText>;
        /// Memory zones of the node.
        memory_zones: Option<Vec<String>> = None, "memory_zones" as Opt<TextList>;
        /// PCI segments of the node. Segment 0 can be in node 0 only.
        pci_segments: Option<Vec<u16>> = None, "pci_segments" as Opt<IntList>;
        /// Passed-through device that is the node, which then has no vCPUs and memory (a generic initiator of ACPI).
        device_id: Option<String> = None, "device_id" as Opt<Id>;
    }
}

/// What nodes can name.
pub struct NumaScope<'a> {
    /// Number of vCPUs that there may be.
    pub max_vcpus: u32,
    /// Names of the memory zones.
    pub zones: BTreeSet<&'a str>,
    /// Number of PCI segments.
    pub segments: u16,
}

/// What nodes have named so far, with the node.
#[derive(Default)]
struct Named<'a> {
    cpus: BTreeMap<u32, u32>,
    zones: BTreeMap<&'a str, u32>,
    segments: BTreeMap<u16, u32>,
    devices: BTreeMap<&'a str, u32>,
}

/// Records that a node names something.
fn name<T: Ord + Copy + std::fmt::Display>(
    what: &str,
    thing: T,
    node: u32,
    named: &mut BTreeMap<T, u32>,
) -> Result<(), String> {
    match named.insert(thing, node) {
        Some(other) if other == node => Err(format!("{what} '{thing}' is named twice")),
        Some(other) => Err(format!("{what} '{thing}' is in node {other} as well")),
        None => Ok(()),
    }
}

/// Validates the nodes of a guest.
///
/// # Errors
/// The first violated rule, with the node.
pub fn validate(nodes: &[NumaConfig], scope: &NumaScope<'_>) -> Result<(), ConfigError> {
    let mut ids = BTreeSet::new();
    for node in nodes {
        if !ids.insert(node.guest_numa_id) {
            return Err(refusal(node, "there is another node of this number".to_owned()));
        }
    }
    let mut named = Named::default();
    for node in nodes {
        node.validate(scope, &ids, &mut named).map_err(|problem| refusal(node, problem))?;
    }
    Ok(())
}

/// Checks that the devices that nodes name are among those with these ids. Not for a guest that has run: a device may
/// have been removed.
///
/// # Errors
/// Names the node and the device.
pub fn check_devices(nodes: &[NumaConfig], ids: &BTreeSet<&str>) -> Result<(), ConfigError> {
    for node in nodes {
        match node.device_id.as_deref() {
            Some(id) if !ids.contains(id) => {
                return Err(refusal(node, format!("there is no --device '{id}'")));
            }
            _ => {}
        }
    }
    Ok(())
}

fn refusal(node: &NumaConfig, problem: String) -> ConfigError {
    ConfigError::Device { what: "numa", id: node.guest_numa_id.to_string(), problem }
}

impl NumaConfig {
    fn validate<'a>(
        &'a self,
        scope: &NumaScope<'_>,
        ids: &BTreeSet<u32>,
        named: &mut Named<'a>,
    ) -> Result<(), String> {
        self.check_kind()?;
        let id = self.guest_numa_id;
        for cpu in self.cpus.iter().flatten() {
            if *cpu >= scope.max_vcpus {
                let max = scope.max_vcpus;
                return Err(format!("there is no vCPU {cpu}, the VM has at most {max}"));
            }
            name("vCPU", *cpu, id, &mut named.cpus)?;
        }
        for zone in self.memory_zones.iter().flatten() {
            if !scope.zones.contains(zone.as_str()) {
                return Err(format!("there is no memory zone '{zone}'"));
            }
            name("memory zone", zone.as_str(), id, &mut named.zones)?;
        }
        for segment in self.pci_segments.iter().flatten() {
            if *segment >= scope.segments {
                let count = scope.segments;
                return Err(format!("there is no PCI segment {segment}, the VM has {count}"));
            }
            if *segment == 0 && id != 0 {
                return Err("PCI segment 0 is in node 0".to_owned());
            }
            name("PCI segment", *segment, id, &mut named.segments)?;
        }
        if let Some(device) = self.device_id.as_deref() {
            name("device", device, id, &mut named.devices)?;
        }
        self.check_distances(ids)
    }

    /// A node has vCPUs or memory, or is a device.
    fn check_kind(&self) -> Result<(), String> {
        let (cpus, zones) = (self.cpus.as_ref(), self.memory_zones.as_ref());
        let lists = [("cpus", cpus.map(Vec::len)), ("memory_zones", zones.map(Vec::len))];
        if let Some((what, _)) = lists.iter().find(|(_, len)| *len == Some(0)) {
            return Err(format!("its list of {what} is empty"));
        }
        let has_own = self.cpus.is_some() || self.memory_zones.is_some();
        match self.device_id.as_deref() {
            Some("") => Err("its device_id is empty".to_owned()),
            Some(_) if has_own => Err("device_id excludes cpus and memory_zones".to_owned()),
            None if !has_own => Err("it needs cpus, memory_zones or a device_id".to_owned()),
            _ => Ok(()),
        }
    }

    fn check_distances(&self, ids: &BTreeSet<u32>) -> Result<(), String> {
        let mut seen = BTreeSet::new();
        for NumaDistance { destination, distance } in self.distances.iter().flatten() {
            if !ids.contains(destination) {
                return Err(format!(
                    "it has a distance to node {destination}, which does not exist"
                ));
            }
            if !seen.insert(destination) {
                return Err(format!("it has two distances to node {destination}"));
            }
            // cloud-hypervisor takes any distance of a node to itself, and says 10.
            let is_own = *destination == self.guest_numa_id;
            if *distance < OWN_DISTANCE || (*distance == OWN_DISTANCE && !is_own) {
                return Err(format!(
                    "the distance to node {destination} is {distance}, and has to be from 11 to 255: 10 is that of a \
                     node to itself"
                ));
            }
        }
        Ok(())
    }

    /// The given distance to another node.
    fn distance_to(&self, other: u32) -> Option<u8> {
        let mut given = self.distances.iter().flatten();
        given.find(|given| given.destination == other).map(|given| given.distance)
    }
}

/// Distances from each node to each, in the order of their numbers, from 0 to the highest one that is given.
pub fn distances(nodes: &[NumaConfig]) -> Vec<Vec<u8>> {
    let count = nodes.iter().map(|node| node.guest_numa_id.saturating_add(1)).max().unwrap_or(1);
    let given = |from: u32, to: u32| {
        nodes.iter().find(|node| node.guest_numa_id == from).and_then(|node| node.distance_to(to))
    };
    let distance = |from: u32, to: u32| {
        if from == to {
            return OWN_DISTANCE;
        }
        given(from, to).or_else(|| given(to, from)).unwrap_or(DEFAULT_DISTANCE)
    };
    (0..count).map(|from| (0..count).map(|to| distance(from, to)).collect()).collect()
}

/// `[node@distance,...]`.
#[derive(Debug)]
pub struct DistancesText;

impl ValueCodec<Vec<NumaDistance>> for DistancesText {
    const SYNTAX: &'static str = "<list_of_distances_to_destination_nodes>";

    fn parse(raw: &str) -> Result<Vec<NumaDistance>, String> {
        const EXPECTED: &str = "expected nodes with their distances up to 255, like [1@20,2@30]";
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
