// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! NUMA nodes of the guest: from the options to what the ACPI tables and the memory devices say.
//!
//! Owns the translation only. Must never place memory: a node is what its zones have become in the guest's address
//! space, in as many pieces as the holes there make of them.

use arch::acpi::{AcpiInitiator, AcpiInputs, AcpiMemory, AcpiNuma};
use arch::layout::GpaRange;
use memory::GuestRam;
use pci::Bdf;

use super::ram::later_id;
use crate::config::VmConfig;
use crate::config::memory::HotplugMethod;
use crate::config::numa::{self, NumaConfig};

/// A guest with NUMA nodes.
#[derive(Clone, Copy)]
pub struct Nodes<'a>(&'a [NumaConfig]);

impl<'a> Nodes<'a> {
    /// The nodes of the guest; `None` if it is to know of none.
    pub fn of(config: &'a VmConfig) -> Option<Self> {
        config.numa.as_deref().filter(|nodes| !nodes.is_empty()).map(Self)
    }

    /// The number of the node of which `is_meant` is true; node 0 if it is of none.
    fn number(self, is_meant: impl Fn(&NumaConfig) -> bool) -> u32 {
        self.0.iter().find(|node| is_meant(node)).map_or(0, |node| node.guest_numa_id)
    }

    fn of_cpu(self, index: u32) -> u32 {
        self.number(|node| node.cpus.iter().flatten().any(|cpu| *cpu == index))
    }

    /// The node of a zone, or of what of it is plugged in later, by the id of either.
    pub fn of_zone(self, id: &str) -> u32 {
        let is_meant = |zone: &String| zone == id || later_id(zone) == id;
        self.number(|node| node.memory_zones.iter().flatten().any(is_meant))
    }

    /// PCI segments that are in another node than 0.
    fn segments(self) -> Vec<(u8, u32)> {
        let of_node = |node: &NumaConfig| {
            let id = node.guest_numa_id;
            let segments = node.pci_segments.clone().unwrap_or_default();
            segments.into_iter().filter_map(move |segment| Some((u8::try_from(segment).ok()?, id)))
        };
        self.0.iter().flat_map(of_node).collect()
    }

    /// Devices that are nodes, where they are on the bus. One that was removed is left out.
    fn initiators(self, place: impl Fn(&str) -> Option<Bdf>) -> Vec<AcpiInitiator> {
        let of_node = |node: &NumaConfig| {
            let id = node.device_id.as_deref()?;
            let Some(bdf) = place(id) else {
                log::warn!(
                    "NUMA node {} is without a device: '{id}' was removed",
                    node.guest_numa_id
                );
                return None;
            };
            Some(AcpiInitiator {
                domain: node.guest_numa_id,
                segment: bdf.segment(),
                bus: bdf.bus(),
                device: bdf.device(),
                function: bdf.function(),
            })
        };
        self.0.iter().filter_map(of_node).collect()
    }
}

/// Puts the nodes of the guest into the inputs of its ACPI tables, whose vCPUs are there, and all of its memory. `place`
/// tells where the passed-through device of an id is.
pub fn describe(
    inputs: &mut AcpiInputs,
    config: &VmConfig,
    ram: &GuestRam,
    place: impl Fn(&str) -> Option<Bdf>,
) {
    let nodes = Nodes::of(config);
    // Memory devices say themselves where they are. Without devices that reach less than all of memory, the guest need
    // not know beforehand, and would keep buffers for them.
    let is_acpi = config.memory.hotplug_method == HotplugMethod::Acpi;
    let tells = nodes.is_some() || !is_acpi || config.devices.iter().flatten().next().is_some();
    let regions = ram.regions().iter();
    let regions = regions.filter(|region| tells || region.block_bytes().is_none());
    let memory = regions.map(|region| AcpiMemory {
        range: GpaRange { gpa: region.gpa(), len_bytes: region.len_bytes() },
        hotplug: region.block_bytes().is_some(),
        domain: nodes.map_or(0, |nodes| nodes.of_zone(region.zone_id())),
    });
    inputs.memory = memory.collect();
    let Some(nodes) = nodes else { return };
    for (index, cpu) in (0_u32..).zip(&mut inputs.cpus) {
        cpu.domain = nodes.of_cpu(index);
    }
    inputs.numa = Some(AcpiNuma {
        distances: numa::distances(nodes.0),
        segments: nodes.segments(),
        initiators: nodes.initiators(place),
    });
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use memory::{RamConfig, ZoneSpec};
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::config::memory::HighHole;
    use crate::machine::ram::layout_of;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    /// A zone: MiB at boot, blocks of 2 MiB that may come, and its node.
    type Zone = (u64, u64, Option<u8>);

    fn config(zones: &[Zone], nodes: u8) -> VmConfig {
        let zone = |(n, (mib, blocks, _)): (u32, &Zone)| json!({ "id": format!("z{n}"), "size": mib * MIB, "hotplug_size": blocks * 2 * MIB });
        let json_zones: Vec<_> = (0..).zip(zones).map(zone).collect();
        let of_node = |node: u8| {
            let zones = (0..).zip(zones).filter(|(_, (.., of)): &(u32, &Zone)| *of == Some(node));
            let zones: Vec<_> = zones.map(|(n, _)| format!("z{n}")).collect();
            json!({ "guest_numa_id": node, "cpus": [node], "memory_zones": zones })
        };
        let nodes: Vec<_> = (0..nodes).map(of_node).collect();
        let config = json!({
            "payload": { "kernel": "/k" },
            "cpus": { "boot_vcpus": 1, "max_vcpus": 8 },
            "memory": { "size": 0, "hotplug_method": "VirtioMem", "zones": json_zones },
            "numa": nodes,
        });
        serde_json::from_value(config).unwrap()
    }

    /// RAM of such zones. Nothing of it is ever touched.
    fn ram(config: &VmConfig, high_hole: bool) -> GuestRam {
        let zones = config.memory.zones.iter().flatten();
        let now = zones.clone().map(|zone| ZoneSpec::new(zone.id.clone(), zone.size));
        let later = zones.filter_map(|zone| {
            let (size, block_bytes) = zone.later(config.memory.hotplug_method)?;
            let spec = ZoneSpec::new(later_id(&zone.id), size);
            Some(ZoneSpec { block_bytes: Some(block_bytes), ..spec })
        });
        let hole = if high_hole { HighHole::HyperTransport } else { HighHole::Off };
        let memory = crate::config::MemoryConfig { high_hole: Some(hole), ..config.memory.clone() };
        let config = RamConfig { zones: now.chain(later).collect() };
        GuestRam::new(&config, layout_of(46, memory.hole())).unwrap()
    }

    fn described(config: &VmConfig, ram: &GuestRam) -> AcpiInputs {
        let mut inputs = AcpiInputs::new(0..config.cpus.max_vcpus, Vec::new());
        describe(&mut inputs, config, ram, |id| Bdf::new(0, 0, 5, 0).ok().filter(|_| id == "gpu"));
        inputs
    }

    #[test]
    fn memory_devices_are_told_of_beforehand_where_that_matters() {
        let tells = |more: serde_json::Value| {
            let mut json = json!({
                "payload": { "kernel": "/k" },
                "cpus": { "boot_vcpus": 1, "max_vcpus": 1 },
                "memory": { "size": 64 * MIB, "hotplug_size": GIB },
            });
            json.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let config: VmConfig = serde_json::from_value(json).unwrap();
            let later =
                ZoneSpec { block_bytes: Some(128 * MIB), ..ZoneSpec::new(later_id("mem0"), GIB) };
            let zones = vec![ZoneSpec::new("mem0", 64 * MIB), later];
            let ram =
                GuestRam::new(&RamConfig { zones }, layout_of(46, config.memory.hole())).unwrap();
            described(&config, &ram).memory.iter().any(|memory| memory.hotplug)
        };
        assert!(!tells(json!({})), "nothing has to be set aside for devices that reach less");
        assert!(tells(json!({ "devices": [{ "path": "/d", "id": "gpu" }] })));
        let virtio_mem =
            json!({ "size": 64 * MIB, "hotplug_size": GIB, "hotplug_method": "VirtioMem" });
        assert!(tells(json!({ "memory": virtio_mem })));
        assert!(tells(json!({ "numa": [{ "guest_numa_id": 0, "cpus": [0] }] })));
    }

    /// Bytes of each node in pieces at boot and later, with what is in no zone of a node in node 0.
    fn bytes(zones: &[Zone], nodes: u8) -> Vec<(u64, u64)> {
        let of = |node: u8| {
            let mine = zones.iter().filter(|(.., of)| of.unwrap_or(0) == node);
            mine.fold((0, 0), |(now, later), (mib, blocks, _)| {
                (now + mib * MIB, later + blocks * 2 * MIB)
            })
        };
        (0..nodes).map(of).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn nodes_have_exactly_the_memory_of_their_zones(
            zones in prop::collection::vec(
                (prop_oneof![1_u64..64, 1000_u64..1100, 2000_u64..4200], 0_u64..3, prop::option::of(0_u8..4)),
                1..6,
            ),
            high_hole: bool,
        ) {
            let config = config(&zones, 4);
            let ram = ram(&config, high_hole);
            let inputs = described(&config, &ram);
            let mut found = vec![(0, 0); 4];
            for memory in &inputs.memory {
                let of_node = &mut found[usize::try_from(memory.domain).unwrap()];
                let bytes = if memory.hotplug { &mut of_node.1 } else { &mut of_node.0 };
                *bytes += memory.range.len_bytes;
            }
            prop_assert_eq!(found, bytes(&zones, 4));
            let mut ranges: Vec<_> = inputs.memory.iter().map(|memory| memory.range).collect();
            ranges.sort_unstable_by_key(|range| range.gpa);
            for (range, next) in ranges.iter().zip(ranges.iter().skip(1)) {
                prop_assert!(range.end_gpa() <= next.gpa);
            }
            // And nothing else than what the guest has.
            let all: u64 = ranges.iter().map(|range| range.len_bytes).sum();
            prop_assert_eq!(all, ram.regions().iter().map(|region| region.len_bytes()).sum::<u64>());
            let cpus: Vec<_> = inputs.cpus.iter().map(|cpu| cpu.domain).collect();
            prop_assert_eq!(cpus, [0, 1, 2, 3, 0, 0, 0, 0]);
        }
    }

    #[test]
    fn a_zone_that_a_hole_cuts_is_in_its_node_with_all_pieces() {
        let zones = [(2048, 0, Some(0)), (1010 * 1024, 0, Some(1)), (1, 0, None)];
        let config = config(&zones, 2);
        let memory = described(&config, &ram(&config, true)).memory;
        let pieces: Vec<_> =
            memory.iter().map(|piece| (piece.range.gpa / GIB, piece.domain)).collect();
        assert_eq!(pieces, [(0, 0), (2, 1), (4, 1), (1024, 1), (1025, 0)]);
    }

    #[test]
    fn a_device_is_a_node_where_it_is_on_the_bus() {
        let mut config = config(&[(64, 0, Some(0))], 1);
        let device = |id: &str, node| {
            serde_json::from_value(json!({ "guest_numa_id": node, "device_id": id })).unwrap()
        };
        config.numa.as_mut().unwrap().extend([device("gpu", 3), device("gone", 2)]);
        let numa = described(&config, &ram(&config, false)).numa.unwrap();
        let gpu = AcpiInitiator { domain: 3, segment: 0, bus: 0, device: 5, function: 0 };
        assert_eq!(numa.initiators, [gpu]);
        assert_eq!(numa.distances.len(), 4);
    }

    #[test]
    fn what_is_plugged_in_later_is_in_the_node_of_its_zone() {
        let config = config(&[(64, 2, Some(0)), (64, 2, Some(1))], 2);
        let nodes = Nodes::of(&config).unwrap();
        assert_eq!(
            ["z0", "z1", "__mem_z0", "__mem_z1", "?"].map(|id| nodes.of_zone(id)),
            [0, 1, 0, 1, 0]
        );
    }

    #[test]
    fn a_guest_without_nodes_is_told_of_none() {
        for numa in [None, Some(Vec::new())] {
            let config = VmConfig { numa, ..config(&[(64, 1, None)], 0) };
            let inputs = described(&config, &ram(&config, false));
            assert_eq!(inputs.numa, None);
            assert!(inputs.cpus.iter().all(|cpu| cpu.domain == 0));
            assert!(inputs.memory.iter().all(|memory| memory.domain == 0));
        }
    }
}
