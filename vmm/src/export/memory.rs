// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where guest memory is: mappings, memory devices of ACPI, and the ranges of a memory file.

use std::ops::Range;

use cloud_hypervisor_state::{
    ArchRegion, ArchRegionKind, Fixed, HotplugSlot, List, MemoryManager, MemoryRange, MemoryRanges,
    RamMapping,
};
use devices::virtio::DeviceSnapshot;
use memory::GuestRam;
use serde::Deserialize;

use super::error::{ExportError, ensure, fits};
use super::legacy::read;
use crate::adopt::{MemoryLayout, MemoryPart, PartKind};
use crate::config::VmConfig;
use crate::config::memory::HotplugMethod;
use crate::machine::{device_window_gpa, later_memory_id};

const WHAT: &str = "memory";
const DEVICES: &str = "memory hot-plug";
const DEVICES_MAX: usize = 8;
/// Newest version of the registers of memory devices that is understood here.
const DEVICES_VERSION: u32 = 2;
/// The regions that every VM there has; RAM goes on up to the last address.
const ARCH_REGIONS: [ArchRegion; 4] = [
    ArchRegion { base: 0, size: 0xc000_0000, r_type: ArchRegionKind::Ram },
    ArchRegion { base: 1 << 32, size: u64::MAX, r_type: ArchRegionKind::Ram },
    ArchRegion { base: 0xc000_0000, size: 0x2800_0000, r_type: ArchRegionKind::SubRegion },
    ArchRegion { base: 0xe800_0000, size: 0x1000_0000, r_type: ArchRegionKind::Reserved },
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Device {
    gpa: u64,
    len_bytes: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Registers {
    devices: Vec<Device>,
    coming: Vec<u8>,
    #[serde(default)]
    selected: u8,
}

/// Where the memory of a machine is.
///
/// # Errors
/// Its window for 64-bit BARs is not known.
pub fn layout_of(config: &VmConfig, ram: &GuestRam) -> Result<MemoryLayout, ExportError> {
    let method = config.memory.hotplug_method;
    let parts = ram.regions().iter().map(|region| {
        let gpa = region.gpa()..region.gpa().saturating_add(region.len_bytes());
        let kind = match (region.block_bytes(), method) {
            (None, _) => PartKind::Boot,
            (Some(_), HotplugMethod::VirtioMem) => PartKind::VirtioMem,
            (Some(_), HotplugMethod::Acpi) => {
                PartKind::Devices { plugged_bytes: region.usable_bytes() }
            }
        };
        let zone = match kind {
            PartKind::Boot => region.zone_id().to_owned(),
            PartKind::VirtioMem | PartKind::Devices { .. } => zone_of(region.zone_id()),
        };
        MemoryPart { zone, gpa, kind }
    });
    let mut parts: Vec<_> = parts.collect();
    parts.sort_by_key(|part| part.gpa.start);
    let window = device_window_gpa(config, ram);
    let unknown = || ExportError::refused(WHAT, "there is no window for 64-bit BARs");
    Ok(MemoryLayout { parts, device_area_gpa: window.ok_or_else(unknown)? })
}

/// The zone that a region of memory to come belongs to, by the id that this one has here.
pub fn zone_of(later_id: &str) -> String {
    let prefix = later_memory_id("");
    later_id.strip_prefix(&prefix).unwrap_or(later_id).to_owned()
}

/// The memory that has contents, by address: `devices` are the registers of memory devices, `plugged` the plugged blocks of
/// each virtio-mem device, as ranges of guest addresses. A range is never in two mappings: who restores it takes it for one
/// piece of host memory.
///
/// # Errors
/// The registers are not those of the memory that there is.
pub fn ranges(
    layout: &MemoryLayout,
    devices: Option<&DeviceSnapshot>,
    plugged: &[Range<u64>],
) -> Result<Vec<Range<u64>>, ExportError> {
    let registers = registers(layout, devices)?;
    let boot = layout.parts.iter().filter(|part| part.kind == PartKind::Boot);
    let boot = boot.map(|part| part.gpa.clone());
    let devices = registers.devices.iter();
    let devices = devices.map(|it| it.gpa..it.gpa.saturating_add(it.len_bytes));
    let mut ranges: Vec<_> = boot.chain(devices).chain(plugged.iter().cloned()).collect();
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| range.start);
    Ok(ranges)
}

/// The state of the memory manager. `devices` are the registers of memory devices; `requested_bytes` is what guests are to
/// have of virtio-mem devices, `ranges` what is in the memory file.
///
/// # Errors
/// There are more ranges than a document can have.
pub fn convert(
    layout: &MemoryLayout,
    devices: Option<&DeviceSnapshot>,
    requested_bytes: u64,
    ranges: &[Range<u64>],
) -> Result<MemoryManager, ExportError> {
    let registers = registers(layout, devices)?;
    let mut mappings: Vec<RamMapping> = Vec::new();
    let mut add = |gpa: u64, size: u64, zone: &str, virtio_mem: bool| {
        mappings.push(RamMapping {
            slot: u32::try_from(mappings.len()).unwrap_or(u32::MAX),
            gpa,
            size,
            zone_id: zone.to_owned(),
            virtio_mem,
            // Only zones in files have another, and those are refused.
            file_offset: 0,
        });
    };
    let mut boot_ram = 0_u64;
    for part in &layout.parts {
        let bytes = part.gpa.end.saturating_sub(part.gpa.start);
        match part.kind {
            PartKind::Boot => {
                boot_ram = boot_ram.saturating_add(bytes);
                add(part.gpa.start, bytes, &part.zone, false);
            }
            PartKind::VirtioMem => add(part.gpa.start, bytes, &part.zone, true),
            PartKind::Devices { .. } => {
                for device in &registers.devices {
                    add(device.gpa, device.len_bytes, &part.zone, false);
                }
            }
        }
    }
    let mut slots = [HotplugSlot::default(); DEVICES_MAX];
    for (number, (slot, device)) in slots.iter_mut().zip(&registers.devices).enumerate() {
        let inserting = registers.coming.iter().any(|coming| usize::from(*coming) == number);
        let (base, length) = (device.gpa, device.len_bytes);
        *slot = HotplugSlot { base, length, active: true, inserting, removing: false };
    }
    let devices_bytes =
        registers.devices.iter().fold(0, |sum: u64, it| sum.saturating_add(it.len_bytes));
    let ranges = ranges.iter().map(|range| MemoryRange {
        gpa: range.start,
        length: range.end.saturating_sub(range.start),
    });
    let next_memory_slot = u32::try_from(mappings.len()).unwrap_or(u32::MAX);
    Ok(MemoryManager {
        memory_ranges: MemoryRanges {
            data: fits(List::try_from(ranges.collect::<Vec<_>>()), || WHAT.to_owned())?,
        },
        guest_ram_mappings: fits(List::try_from(mappings), || WHAT.to_owned())?,
        start_of_device_area: layout.device_area_gpa,
        boot_ram,
        current_ram: boot_ram.saturating_add(devices_bytes).saturating_add(requested_bytes),
        arch_mem_regions: fits(List::try_from(ARCH_REGIONS.to_vec()), || WHAT.to_owned())?,
        hotplug_slots: Fixed::from(slots),
        next_memory_slot,
        selected_slot: registers.selected.into(),
        next_hotplug_slot: u64::try_from(registers.devices.len()).unwrap_or(0),
    })
}

/// The registers of memory devices; without a state all that is plugged in is one device that the guest knows of.
fn registers(
    layout: &MemoryLayout,
    devices: Option<&DeviceSnapshot>,
) -> Result<Registers, ExportError> {
    let room = layout.parts.iter().find_map(|part| match part.kind {
        PartKind::Devices { plugged_bytes } => Some((part.gpa.start, plugged_bytes)),
        _ => None,
    });
    let Some(state) = devices else {
        let one = room.filter(|(_, plugged)| *plugged > 0);
        let one = one.map(|(gpa, len_bytes)| Device { gpa, len_bytes });
        let devices = one.into_iter().collect();
        return Ok(Registers { devices, coming: Vec::new(), selected: 0 });
    };
    let registers: Registers = read(DEVICES, state, "memory-hotplug", DEVICES_VERSION)?;
    let end = registers.devices.last().map_or(0, |it| it.gpa.saturating_add(it.len_bytes));
    let starts = registers.devices.iter().map(|it| it.gpa).skip(1);
    let ends = registers.devices.iter().map(|it| it.gpa.saturating_add(it.len_bytes));
    let follow = starts.zip(ends).all(|(start, end)| start == end);
    let first = registers.devices.first().map(|it| it.gpa);
    let begin = first.is_none() || first == room.map(|(gpa, _)| gpa);
    let problem = || "its devices do not follow one another".to_owned();
    ensure(follow && begin, || DEVICES.to_owned(), problem)?;
    let plugged_end = room.map_or(0, |(gpa, plugged)| gpa.saturating_add(plugged));
    ensure(
        registers.devices.len() <= DEVICES_MAX && end == plugged_end,
        || DEVICES.to_owned(),
        || {
            format!(
                "its devices end at {end:#x}, and memory that is plugged in at {plugged_end:#x}"
            )
        },
    )?;
    Ok(registers)
}
