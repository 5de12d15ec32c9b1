// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The memory map given to the guest, and the placement of the initramfs.
//!
//! Owns the reduction of guest memory regions to e820 entries; PVH uses the same numbers. Must
//! never call something RAM that is not backed.

use memory::GuestMemory;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

use super::error::BootError;
use crate::layout::{self, GpaRange};

/// e820 type of usable memory.
pub const TYPE_RAM: u32 = 1;
/// e820 type of addresses to stay away from.
pub const TYPE_RESERVED: u32 = 2;
/// Room for entries in the zero page; the PVH map keeps to it as well.
pub const MAX_ENTRIES: usize = 128;

/// One line of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Addresses.
    pub range: GpaRange,
    /// [`TYPE_RAM`] or [`TYPE_RESERVED`].
    pub kind: u32,
}

/// All RAM but what comes `later`, in ascending order, adjacent regions as one.
pub fn merged_ram(mem: &GuestMemory, later: &[GpaRange]) -> Vec<GpaRange> {
    let mut regions: Vec<GpaRange> = GuestMemoryBackend::iter(mem)
        .map(|region| GpaRange { gpa: region.start_addr().raw_value(), len_bytes: region.len() })
        .collect();
    regions.sort_by_key(|range| range.gpa);
    let mut merged: Vec<GpaRange> = Vec::with_capacity(regions.len());
    for range in regions {
        match merged.last_mut() {
            Some(last) if last.end_gpa() == range.gpa => last.len_bytes += range.len_bytes,
            _ => merged.push(range),
        }
    }
    for range in later {
        merged = merged.iter().flat_map(|ram| subtract(*ram, *range)).collect();
    }
    merged
}

/// The memory map: RAM without the ACPI and SMBIOS area, and what is reserved.
pub fn memory_map(
    mem: &GuestMemory,
    reserved: &[GpaRange],
    later: &[GpaRange],
) -> Result<Vec<Entry>, BootError> {
    let tables = GpaRange::between(layout::ACPI_GPA, layout::HIGH_RAM_GPA);
    let ecam = GpaRange { gpa: layout::ECAM_GPA, len_bytes: layout::ECAM_BYTES };
    let kvm = GpaRange::between(
        layout::KVM_IDENTITY_MAP_GPA,
        layout::KVM_TSS_GPA + layout::KVM_TSS_BYTES,
    );
    let mut holes = vec![tables, ecam, kvm];
    holes.extend_from_slice(reserved);

    let mut ram = merged_ram(mem, later);
    for hole in &holes {
        ram = ram.iter().flat_map(|range| subtract(*range, *hole)).collect();
    }
    let mut map: Vec<Entry> = ram.iter().map(|&range| Entry { range, kind: TYPE_RAM }).collect();
    map.extend(holes.iter().map(|&range| Entry { range, kind: TYPE_RESERVED }));
    map.retain(|entry| entry.range.len_bytes > 0);
    map.sort_by_key(|entry| entry.range.gpa);
    if map.len() > MAX_ENTRIES {
        return Err(BootError::MemoryMapTooLong { entries: map.len(), max: MAX_ENTRIES });
    }
    Ok(map)
}

/// What is left of `range` without `hole`: nothing, one piece or two.
fn subtract(range: GpaRange, hole: GpaRange) -> impl Iterator<Item = GpaRange> {
    let below = GpaRange::between(range.gpa, range.end_gpa().min(hole.gpa.max(range.gpa)));
    let above =
        GpaRange::between(hole.end_gpa().clamp(range.gpa, range.end_gpa()), range.end_gpa());
    let pieces = if range.overlaps(&hole) { [below, above] } else { [range, GpaRange::default()] };
    pieces.into_iter().filter(|piece| piece.len_bytes > 0)
}

/// The highest page-aligned place for `len_bytes` in RAM above 1 MiB that ends at or before
/// `limit_gpa` and stays clear of `occupied`.
pub fn place_high(
    ram: &[GpaRange],
    occupied: GpaRange,
    len_bytes: u64,
    limit_gpa: u64,
) -> Option<u64> {
    let low = GpaRange::between(0, layout::HIGH_RAM_GPA);
    let mut best = None;
    let free = ram
        .iter()
        .flat_map(|range| subtract(*range, low))
        .flat_map(|range| subtract(range, occupied));
    for range in free {
        let end_gpa = range.end_gpa().min(limit_gpa);
        let Some(start_gpa) = end_gpa.checked_sub(len_bytes) else { continue };
        let start_gpa = start_gpa & !(layout::PAGE_BYTES - 1);
        if start_gpa >= range.gpa {
            best = best.max(Some(start_gpa));
        }
    }
    best
}
