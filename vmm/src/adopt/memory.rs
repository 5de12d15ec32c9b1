// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where guest memory is: zones, and memory that is added while the guest runs.
//!
//! Owns the check that a machine of this configuration has its memory at the same addresses.

use std::ops::Range;

use arch::layout::{HIGH_RAM_64_GPA, LOW_RAM_END_GPA};
use cloud_hypervisor_state::{HotplugSlot, MemoryManager, RamMapping};
use devices::virtio::DeviceSnapshot;
use serde_json::json;

use super::error::{AdoptError, ensure};
use super::legacy::state;
use super::own_states::MEM_BLOCK_BYTES;
use crate::config::MemoryConfig;
use crate::config::memory::{DEFAULT_ZONE, HotplugMethod, MemoryZoneConfig};

const PATH: &str = "memory-manager";
/// Version of the registers of memory devices that say which is selected.
const SELECTED_VERSION: u32 = 2;
/// What regions that are added later are aligned to.
const LATER_ALIGN_BYTES: u64 = 128 << 20;

/// What a part of guest memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// There from the boot on.
    Boot,
    /// Room for memory devices of ACPI, of which the first bytes are plugged in.
    Devices {
        /// Bytes that are plugged in.
        plugged_bytes: u64,
    },
    /// The region of a virtio-mem device.
    VirtioMem,
}

/// A part of guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPart {
    /// Id of its zone.
    pub zone: String,
    /// Its addresses.
    pub gpa: Range<u64>,
    /// What it is.
    pub kind: PartKind,
}

/// Where guest memory is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLayout {
    /// Its parts, by address.
    pub parts: Vec<MemoryPart>,
    /// Where the window for 64-bit BARs starts.
    pub device_area_gpa: u64,
}

impl MemoryLayout {
    /// Bytes below and above 4 GiB that were there at boot.
    pub fn low_and_high_bytes(&self) -> (u64, u64) {
        let boot = self.parts.iter().filter(|part| part.kind == PartKind::Boot);
        boot.fold((0, 0), |(low, high), part| {
            let bytes = part.gpa.end.saturating_sub(part.gpa.start);
            if part.gpa.start < LOW_RAM_END_GPA {
                (bytes.saturating_add(low), high)
            } else {
                (low, bytes.saturating_add(high))
            }
        })
    }

    /// Whether all bytes of a range are memory.
    pub fn holds(&self, gpa: u64, bytes: u64) -> bool {
        let Some(end) = gpa.checked_add(bytes) else { return false };
        self.parts.iter().any(|part| {
            let part_end = match part.kind {
                PartKind::Devices { plugged_bytes } => part.gpa.start.saturating_add(plugged_bytes),
                PartKind::Boot | PartKind::VirtioMem => part.gpa.end,
            };
            part.gpa.start <= gpa && end <= part_end
        })
    }

    /// Whether a range has a byte of memory, or of the room for it.
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        self.parts.iter().any(|part| part.gpa.start < range.end && range.start < part.gpa.end)
    }
}

/// A zone of the configuration: its id, its size, and the maximum of what may be added.
fn zones(config: &MemoryConfig) -> Vec<(String, u64, u64)> {
    match &config.zones {
        Some(zones) if !zones.is_empty() => zones
            .iter()
            .map(|zone| (zone.id.clone(), zone.size, zone.hotplug_size.unwrap_or(0)))
            .collect(),
        _ => vec![(DEFAULT_ZONE.to_owned(), config.size, config.hotplug_size.unwrap_or(0))],
    }
}

/// Bytes in which a memory device of a machine here adds the memory of a zone.
fn block_bytes(config: &MemoryConfig, zone: &str) -> Option<u64> {
    let alone = || MemoryZoneConfig {
        size: config.size,
        hotplug_size: config.hotplug_size,
        hugepages: config.hugepages,
        hugepage_size: config.hugepage_size,
        ..MemoryZoneConfig::default()
    };
    let zone = config.zones.iter().flatten().find(|it| it.id == zone).cloned();
    zone.unwrap_or_else(alone).later(config.hotplug_method).map(|(_, block_bytes)| block_bytes)
}

fn at(field: &str) -> String {
    format!("{PATH}: {field}")
}

/// The layout of a machine with this configuration. `early` is the state that came with the configuration, `manager` that
/// of the document.
///
/// # Errors
/// A mapping is where a machine of this configuration has none, or one is missing.
pub fn layout(
    config: &MemoryConfig,
    early: &MemoryManager,
    manager: &MemoryManager,
) -> Result<MemoryLayout, AdoptError> {
    // The guest may acknowledge a memory device in between, and select another.
    let place = |slot: &HotplugSlot| (slot.base, slot.length, slot.active);
    let slots = |manager: &MemoryManager| manager.hotplug_slots.each_ref().map(place);
    let is_same = early.guest_ram_mappings == manager.guest_ram_mappings
        && early.start_of_device_area == manager.start_of_device_area
        && slots(early) == slots(manager);
    ensure(
        is_same,
        || at("guest_ram_mappings"),
        || "it is not the one that came with the configuration".to_owned(),
    )?;
    let active: Vec<&HotplugSlot> =
        manager.hotplug_slots.iter().filter(|slot| slot.active).collect();
    let mut mappings: Vec<&RamMapping> = manager.guest_ram_mappings.iter().collect();
    mappings.sort_by_key(|mapping| mapping.gpa);
    let is_device = |mapping: &RamMapping| active.iter().any(|slot| slot.base == mapping.gpa);
    let boot = mappings.iter().filter(|mapping| !mapping.virtio_mem && !is_device(mapping));
    let mut parts = boot_parts(config, &boot.copied().collect::<Vec<_>>())?;
    let last_end = parts.last().map_or(0, |part: &MemoryPart| part.gpa.end);
    let next = last_end.max(HIGH_RAM_64_GPA).checked_next_multiple_of(LATER_ALIGN_BYTES);
    let beyond = || AdoptError::refused(at("guest_ram_mappings"), "memory up to the last address");
    let mut next = next.ok_or_else(beyond)?;
    for (zone, _, later_bytes) in zones(config).into_iter().filter(|(_, _, later)| *later > 0) {
        let gpa = next..next.saturating_add(later_bytes);
        next = gpa.end.checked_next_multiple_of(LATER_ALIGN_BYTES).unwrap_or(gpa.end);
        let kind = match config.hotplug_method {
            HotplugMethod::VirtioMem => {
                let is_there = mappings.iter().any(|mapping| {
                    let end = mapping.gpa.checked_add(mapping.size);
                    mapping.virtio_mem
                        && (mapping.gpa, end) == (gpa.start, Some(gpa.end))
                        && mapping.zone_id == zone
                });
                ensure(
                    is_there,
                    || at("guest_ram_mappings"),
                    || format!("no region of zone '{zone}' at {:#x}", gpa.start),
                )?;
                let block_bytes = block_bytes(config, &zone);
                ensure(
                    block_bytes == Some(MEM_BLOCK_BYTES),
                    || format!("memory zone '{zone}': hotplug_size"),
                    || {
                        let here = block_bytes.unwrap_or(0);
                        format!(
                            "{later_bytes:#x}: the guest adds 2 MiB at a time, and a machine here {here:#x} with \
                             more than 32 GiB or huge pages"
                        )
                    },
                )?;
                PartKind::VirtioMem
            }
            HotplugMethod::Acpi => {
                let plugged_bytes =
                    active.iter().fold(0, |sum: u64, slot| sum.saturating_add(slot.length));
                PartKind::Devices { plugged_bytes }
            }
        };
        parts.push(MemoryPart { zone, gpa, kind });
    }
    let regions = parts.iter().filter(|part| part.kind == PartKind::VirtioMem).count();
    let theirs = mappings.iter().filter(|mapping| mapping.virtio_mem).count();
    ensure(
        regions == theirs,
        || at("guest_ram_mappings"),
        || format!("{theirs} regions of memory devices, and the configuration has {regions}"),
    )?;
    check_slots(manager, &parts)?;
    let end = parts.last().map_or(0, |part| part.gpa.end);
    let device_area_gpa = manager.start_of_device_area;
    ensure(
        device_area_gpa >= end.max(HIGH_RAM_64_GPA),
        || at("start_of_device_area"),
        || format!("{device_area_gpa:#x} is below the end of memory, {end:#x}"),
    )?;
    Ok(MemoryLayout { parts, device_area_gpa })
}

/// Memory that was there at boot: zones in their order, from 0 to 3 GiB and from 4 GiB on, without gaps.
fn boot_parts(
    config: &MemoryConfig,
    mappings: &[&RamMapping],
) -> Result<Vec<MemoryPart>, AdoptError> {
    let mut parts = Vec::new();
    let mut left = mappings.iter();
    let mut gpa = 0_u64;
    for (zone, size, _) in zones(config) {
        let mut missing = size;
        while missing > 0 {
            if gpa == LOW_RAM_END_GPA {
                gpa = HIGH_RAM_64_GPA;
            }
            let room = if gpa < LOW_RAM_END_GPA { LOW_RAM_END_GPA - gpa } else { u64::MAX };
            let bytes = missing.min(room);
            let mapping = left.next();
            let is_there = mapping.is_some_and(|mapping| {
                (mapping.gpa, mapping.size, &mapping.zone_id) == (gpa, bytes, &zone)
            });
            let end = gpa.checked_add(bytes).filter(|_| is_there);
            let Some(end) = end else {
                let problem = format!("no {bytes:#x} bytes of zone '{zone}' at {gpa:#x}");
                return Err(AdoptError::refused(at("guest_ram_mappings"), problem));
            };
            parts.push(MemoryPart { zone: zone.clone(), gpa: gpa..end, kind: PartKind::Boot });
            (gpa, missing) = (end, missing.saturating_sub(bytes));
        }
    }
    match left.next() {
        Some(more) => Err(AdoptError::refused(
            at("guest_ram_mappings"),
            format!("memory at {:#x} that the configuration does not have", more.gpa),
        )),
        None => Ok(parts),
    }
}

/// Memory devices of ACPI: the first slots, one after another from the start of their room, and mapped.
fn check_slots(manager: &MemoryManager, parts: &[MemoryPart]) -> Result<(), AdoptError> {
    let room = parts.iter().find(|part| matches!(part.kind, PartKind::Devices { .. }));
    let mut next = room.map_or(0, |part| part.gpa.start);
    let end = room.map_or(0, |part| part.gpa.end);
    let mut is_over = false;
    for (number, slot) in manager.hotplug_slots.iter().enumerate() {
        let at = || at(&format!("hotplug_slots[{number}]"));
        ensure(!slot.removing, at, || "memory that is to go".to_owned())?;
        if !slot.active {
            is_over = true;
            ensure(!slot.inserting, at, || "it comes and is not there".to_owned())?;
            continue;
        }
        let after = slot.base.checked_add(slot.length).filter(|after| *after <= end);
        let is_mapped = manager.guest_ram_mappings.iter().any(|mapping| {
            !mapping.virtio_mem && (mapping.gpa, mapping.size) == (slot.base, slot.length)
        });
        let Some(after) = after.filter(|_| !is_over && slot.base == next && is_mapped) else {
            let problem = format!("{:#x} bytes at {:#x}, not at {next:#x}", slot.length, slot.base);
            return Err(AdoptError::refused(at(), problem));
        };
        next = after;
    }
    Ok(())
}

/// Bytes of memory devices of ACPI.
pub fn devices_bytes(manager: &MemoryManager) -> u64 {
    let active = manager.hotplug_slots.iter().filter(|slot| slot.active);
    active.fold(0, |sum: u64, slot| sum.saturating_add(slot.length))
}

/// Whether there is a memory device that the guest has not taken yet.
pub fn is_coming(manager: &MemoryManager) -> bool {
    manager.hotplug_slots.iter().any(|slot| slot.active && slot.inserting)
}

/// The registers of memory devices; `None` if there is none.
pub fn devices(manager: &MemoryManager) -> Option<DeviceSnapshot> {
    let active: Vec<&HotplugSlot> =
        manager.hotplug_slots.iter().filter(|slot| slot.active).collect();
    let coming: Vec<usize> =
        active.iter().enumerate().filter(|(_, slot)| slot.inserting).map(|(at, _)| at).collect();
    if active.is_empty() {
        return None;
    }
    let devices: Vec<_> =
        active.iter().map(|slot| json!({"gpa": slot.base, "len_bytes": slot.length})).collect();
    let mut registers = state("memory-hotplug", json!({"devices": devices, "coming": coming}));
    if let (true, Some(fields)) = (manager.selected_slot != 0, registers.data.as_object_mut()) {
        fields.insert("selected".to_owned(), json!(manager.selected_slot));
        registers.version = SELECTED_VERSION;
    }
    Some(registers)
}
