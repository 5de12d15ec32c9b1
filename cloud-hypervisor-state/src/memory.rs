// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The state of the memory manager: where RAM is, and memory devices of ACPI.

use serde::{Deserialize, Serialize};

use crate::lists::{Fixed, List, is_name};

/// Maximum number of ranges of a snapshot's memory.
const RANGES_MAX: usize = 1 << 16;
/// Maximum number of mappings: KVM has 32764 slots.
const MAPPINGS_MAX: usize = 32764;
const PAGE_BYTES: u64 = 4096;

/// A range of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryRange {
    /// Its start.
    pub gpa: u64,
    /// Its length in bytes.
    pub length: u64,
}

/// Ranges in the order of the snapshot's file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryRanges {
    /// The ranges.
    pub data: List<MemoryRange, RANGES_MAX>,
}

/// A slot of RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RamMapping {
    /// Number of the slot.
    pub slot: u32,
    /// Its start.
    pub gpa: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Id of its zone.
    pub zone_id: String,
    /// Whether it is the region of a memory device.
    pub virtio_mem: bool,
    /// Its place in the zone's file.
    pub file_offset: u64,
}

/// Kind of a constant region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "names of the format")]
pub enum ArchRegionKind {
    Ram,
    SubRegion,
    Reserved,
}

/// A region of the address space that is the same for every VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArchRegion {
    /// Its start.
    pub base: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Its kind.
    pub r_type: ArchRegionKind,
}

/// A memory device of ACPI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HotplugSlot {
    /// Its start.
    pub base: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Whether it is there.
    pub active: bool,
    /// Whether the guest has not acknowledged that it came.
    pub inserting: bool,
    /// Whether the guest has not acknowledged that it is to go.
    pub removing: bool,
}

/// State of the memory manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryManager {
    /// Of a snapshot: the ranges of its memory file.
    pub memory_ranges: MemoryRanges,
    /// All slots of RAM.
    pub guest_ram_mappings: List<RamMapping, MAPPINGS_MAX>,
    /// Start of the window of 64-bit BARs.
    pub start_of_device_area: u64,
    /// RAM at boot in bytes.
    pub boot_ram: u64,
    /// RAM in bytes.
    pub current_ram: u64,
    /// Constant regions.
    pub arch_mem_regions: List<ArchRegion, 16>,
    /// Memory devices of ACPI.
    pub hotplug_slots: Fixed<HotplugSlot, 8>,
    /// Number of the next slot.
    pub next_memory_slot: u32,
    /// Register by which the guest selects a memory device.
    pub selected_slot: u64,
    /// The memory device that comes next.
    pub next_hotplug_slot: u64,
}

impl MemoryManager {
    /// The first value that is out of bounds, with its path.
    pub(crate) fn problem(&self) -> Option<String> {
        let ranges = (0_usize..).zip(self.memory_ranges.data.iter()).map(|(index, range)| {
            (format!("memory_ranges.data[{index}]"), range.gpa, range.length)
        });
        let mappings = (0_usize..).zip(self.guest_ram_mappings.iter()).map(|(index, mapping)| {
            (format!("guest_ram_mappings[{index}]"), mapping.gpa, mapping.size)
        });
        let cannot_be = |(at, gpa, bytes): (String, u64, u64)| {
            let is_aligned = gpa.is_multiple_of(PAGE_BYTES) && bytes.is_multiple_of(PAGE_BYTES);
            let fits = bytes != 0 && gpa.checked_add(bytes).is_some();
            (!is_aligned || !fits)
                .then(|| format!("{at}: {bytes:#x} bytes at {gpa:#x} are no range of pages"))
        };
        let zones = (0_usize..).zip(self.guest_ram_mappings.iter());
        let nameless = zones.filter(|(_, mapping)| !is_name(&mapping.zone_id));
        let nameless = nameless.map(|(index, _)| {
            format!("guest_ram_mappings[{index}].zone_id: not the name of a zone")
        });
        let registers = [
            ("selected_slot", self.selected_slot, u64::from(u8::MAX)),
            ("next_hotplug_slot", self.next_hotplug_slot, 8),
        ];
        let beyond = registers.into_iter().filter(|(_, value, max)| value > max);
        let beyond = beyond.map(|(name, value, max)| format!("{name}: {value} is above {max}"));
        ranges.chain(mappings).filter_map(cannot_be).chain(nameless).chain(beyond).next()
    }
}
