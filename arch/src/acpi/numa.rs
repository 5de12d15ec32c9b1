// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! NUMA nodes in the ACPI tables: SRAT, SLIT and `_PXM`.
//!
//! Owns their formats. ACPI calls a node a proximity domain; that of anything is a number in its inputs, and domain 0
//! where nothing else is said. Must never know what a node is made of on the host.
//!
//! Format: ACPI 6.5, sections 5.2.16 (SRAT), 5.2.17 (SLIT) and 6.2.15 (`_PXM`).

use acpi_tables::aml::Name;
use acpi_tables::sdt::Sdt;

use super::inputs::{AcpiCpu, AcpiInputs, AcpiMemory};
use super::tables::FIRST_X2APIC_ID;
use super::{AcpiError, OEM_ID, OEM_REVISION, OEM_TABLE_ID};

/// Most domains: the SLIT has a byte for each pair, and lies in the area below 1 MiB.
pub const DOMAINS_MAX: u32 = 256;

const SRAT_REVISION: u8 = 3;
/// The table's header and its two fields.
const SRAT_FIXED_BYTES: u32 = 48;
const TYPE_APIC_AFFINITY: u8 = 0;
const TYPE_MEMORY_AFFINITY: u8 = 1;
const TYPE_X2APIC_AFFINITY: u8 = 2;
const TYPE_INITIATOR_AFFINITY: u8 = 5;
const AFFINITY_ENABLED: u32 = 1;
const AFFINITY_HOT_PLUGGABLE: u32 = 1 << 1;
/// A generic initiator is named by its PCI address.
const HANDLE_PCI: u8 = 1;

const SLIT_REVISION: u8 = 1;
/// The table's header and the number of domains.
const SLIT_FIXED_BYTES: u32 = 44;
const SLIT_COUNT_OFFSET: usize = 36;

/// A PCI device that is a node of its own, without processors and memory (a generic initiator).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcpiInitiator {
    /// The domain.
    pub domain: u32,
    /// PCI segment of the device.
    pub segment: u16,
    /// Its bus.
    pub bus: u8,
    /// Its device number, below 32.
    pub device: u8,
    /// Its function, below 8.
    pub function: u8,
}

/// The NUMA nodes of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcpiNuma {
    /// Distances from each domain to each, in the order of their numbers: as many rows as columns. 10 is that of a
    /// domain to itself.
    pub distances: Vec<Vec<u8>>,
    /// PCI segments with their domains; others are in domain 0.
    pub segments: Vec<(u8, u32)>,
    /// Devices that are nodes.
    pub initiators: Vec<AcpiInitiator>,
}

impl AcpiNuma {
    /// The domain of the devices of a PCI segment.
    pub(super) fn domain_of_segment(&self, id: u8) -> u32 {
        self.segments.iter().find(|(segment, _)| *segment == id).map_or(0, |(_, domain)| *domain)
    }
}

impl AcpiInputs {
    /// Checks that everything is in a domain that has distances; without NUMA nodes, in domain 0.
    pub(super) fn check_domains(&self) -> Result<(), AcpiError> {
        let nodes = self.numa.as_ref().map_or(1, |numa| numa.distances.len());
        let numa = self.numa.iter();
        let others = numa.flat_map(|numa| {
            let initiators = numa.initiators.iter().map(|initiator| initiator.domain);
            initiators.chain(numa.segments.iter().map(|(_, domain)| *domain))
        });
        let cpus = self.cpus.iter().map(|cpu| cpu.domain);
        let mut all = cpus.chain(self.memory.iter().map(|memory| memory.domain)).chain(others);
        let is_unknown = |domain: &u32| usize::try_from(*domain).map_or(true, |n| n >= nodes);
        match all.find(is_unknown) {
            Some(domain) => Err(AcpiError::Domain { domain, nodes }),
            None => Ok(()),
        }
    }
}

/// The object that tells the domain of a device.
pub(super) fn proximity(domain: u32) -> Name {
    Name::new("_PXM".into(), &domain)
}

/// Which processors and memory are near each other, and which memory may come later, as addresses: a guest that has
/// little memory at first learns that it may need to reach some above 4 GiB with devices that cannot (Linux:
/// `max_possible_pfn`). A table that names some memory and processors has to name all. None for a machine without
/// NUMA nodes whose memory stays as it is.
pub(super) fn srat(inputs: &AcpiInputs) -> Option<Vec<u8>> {
    if inputs.numa.is_none() && !inputs.memory.iter().any(|memory| memory.hotplug) {
        return None;
    }
    let mut table =
        Sdt::new(*b"SRAT", SRAT_FIXED_BYTES, SRAT_REVISION, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    // A reserved field that has to be 1.
    table.write_u32(36, 1);
    let mut entries = Vec::new();
    by_domain(&inputs.cpus, |cpu| cpu.domain).for_each(|cpu| push_cpu(&mut entries, cpu));
    let memory = by_domain(&inputs.memory, |memory| memory.domain);
    memory.for_each(|memory| push_memory(&mut entries, memory));
    let initiators = inputs.numa.as_ref().map_or(&[][..], |numa| &numa.initiators);
    let initiators = by_domain(initiators, |initiator| initiator.domain);
    initiators.for_each(|initiator| push_initiator(&mut entries, initiator));
    table.append_slice(&entries);
    Some(table.as_slice().to_vec())
}

/// In the order of domains: Linux numbers its nodes as it comes across them here.
fn by_domain<T: Copy>(all: &[T], domain: impl Fn(&T) -> u32) -> impl Iterator<Item = T> {
    let mut sorted = all.to_vec();
    sorted.sort_by_key(domain);
    sorted.into_iter()
}

fn push_cpu(entries: &mut Vec<u8>, cpu: AcpiCpu) {
    match u8::try_from(cpu.apic_id) {
        Ok(apic_id) if cpu.apic_id < FIRST_X2APIC_ID => {
            let [domain, rest @ ..] = cpu.domain.to_le_bytes();
            entries.extend([TYPE_APIC_AFFINITY, 16, domain, apic_id]);
            entries.extend(AFFINITY_ENABLED.to_le_bytes());
            entries.push(0); // SAPIC
            entries.extend(rest);
            entries.extend(0_u32.to_le_bytes()); // clock domain
        }
        _ => {
            entries.extend([TYPE_X2APIC_AFFINITY, 24, 0, 0]);
            entries.extend(cpu.domain.to_le_bytes());
            entries.extend(cpu.apic_id.to_le_bytes());
            entries.extend(AFFINITY_ENABLED.to_le_bytes());
            entries.extend([0; 8]); // clock domain, reserved
        }
    }
}

fn push_memory(entries: &mut Vec<u8>, memory: AcpiMemory) {
    let hotplug = if memory.hotplug { AFFINITY_HOT_PLUGGABLE } else { 0 };
    entries.extend([TYPE_MEMORY_AFFINITY, 40]);
    entries.extend(memory.domain.to_le_bytes());
    entries.extend([0; 2]);
    entries.extend(memory.range.gpa.to_le_bytes());
    entries.extend(memory.range.len_bytes.to_le_bytes());
    entries.extend([0; 4]);
    entries.extend((AFFINITY_ENABLED | hotplug).to_le_bytes());
    entries.extend([0; 8]);
}

fn push_initiator(entries: &mut Vec<u8>, initiator: AcpiInitiator) {
    let AcpiInitiator { domain, segment, bus, device, function } = initiator;
    entries.extend([TYPE_INITIATOR_AFFINITY, 32, 0, HANDLE_PCI]);
    entries.extend(domain.to_le_bytes());
    entries.extend(segment.to_le_bytes());
    // Device in the upper five bits of a byte, function in the lower three, as on the bus.
    entries.extend([bus, device << 3 | function & 7]);
    entries.extend([0; 12]);
    entries.extend(AFFINITY_ENABLED.to_le_bytes());
    entries.extend([0; 4]);
}

/// How far each domain is from each.
pub(super) fn slit(inputs: &AcpiInputs) -> Option<Vec<u8>> {
    let numa = inputs.numa.as_ref()?;
    let mut table =
        Sdt::new(*b"SLIT", SLIT_FIXED_BYTES, SLIT_REVISION, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.write_u64(SLIT_COUNT_OFFSET, numa.distances.len() as u64);
    table.append_slice(&numa.distances.concat());
    Some(table.as_slice().to_vec())
}
