// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether the memory of a snapshot, and that of the machine made here, are the guest's.
//!
//! Owns two checks, both before a byte is copied. A snapshot has all bytes of the guest's memory, each once: of zones
//! in a shared file it has none, and that file must never be emptied. And the machine has its memory and its device window
//! where the guest has found them.

use std::ops::Range;

use cloud_hypervisor_state::{Document, MemoryRange, Virtio};
use memory::GuestRam;

use super::error::{AdoptError, ensure};
use super::memory::{MemoryLayout, PartKind};
use super::own_states::plugged_blocks;
use crate::config::{MemoryConfig, VmConfig};
use crate::machine::{device_window_gpa, later_memory_id};

const RANGES: &str = "memory-manager: memory_ranges";

/// A range of guest memory with contents, and the id of its zone.
type Filled<'a> = (&'a str, Range<u64>);

/// The guest's memory by address: what was there at boot, and what is plugged in.
///
/// # Errors
/// The blocks of a memory device are not those of its region.
fn filled<'a>(
    layout: &'a MemoryLayout,
    document: &Document,
) -> Result<Vec<Filled<'a>>, AdoptError> {
    let mut filled: Vec<Filled<'a>> = Vec::new();
    for part in &layout.parts {
        let zone = part.zone.as_str();
        let start = part.gpa.start;
        match part.kind {
            PartKind::Boot => filled.push((zone, part.gpa.clone())),
            PartKind::Devices { plugged_bytes } => {
                filled.push((zone, start..start.saturating_add(plugged_bytes)));
            }
            PartKind::VirtioMem => {
                let Some((_, Virtio::Mem(mem))) = document.devices.virtio.get(zone) else {
                    let path = format!("device-manager/{zone}");
                    return Err(AdoptError::refused(path, "the node is missing"));
                };
                let runs = plugged_blocks(zone, mem)?;
                filled.extend(runs.into_iter().map(|run| {
                    let [first, end] = [run.start, run.end].map(|at| start.saturating_add(at));
                    (zone, first..end)
                }));
            }
        }
    }
    filled.retain(|(_, range)| !range.is_empty());
    filled.sort_by_key(|(_, range)| range.start);
    Ok(filled)
}

/// Checks that the ranges of a snapshot are the guest's memory, all of it and nothing else.
///
/// # Errors
/// Names the zone of which memory is missing, or the address of a range that is none.
pub fn check_ranges(
    layout: &MemoryLayout,
    document: &Document,
    config: &MemoryConfig,
) -> Result<(), AdoptError> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    let mut ranges: Vec<&MemoryRange> = document.memory.memory_ranges.data.iter().collect();
    ranges.sort_by_key(|range| range.gpa);
    for range in ranges {
        let gpa = range.gpa..range.gpa.saturating_add(range.length);
        match runs.last_mut() {
            Some(last) if gpa.start < last.end => {
                let problem = format!("the memory at {:#x} is there twice", gpa.start);
                return Err(AdoptError::refused(RANGES, problem));
            }
            Some(last) if gpa.start == last.end => last.end = gpa.end,
            _ => runs.push(gpa),
        }
    }
    let filled = filled(layout, document)?;
    for (zone, gpa) in &filled {
        let run = runs.partition_point(|run| run.start <= gpa.start).checked_sub(1);
        let run = run.and_then(|run| runs.get(run));
        ensure(
            run.is_some_and(|run| gpa.end <= run.end),
            || RANGES.to_owned(),
            || missing(zone, gpa, config),
        )?;
    }
    let mut all: Vec<Range<u64>> = Vec::new();
    for (_, gpa) in filled {
        match all.last_mut() {
            Some(last) if last.end == gpa.start => last.end = gpa.end,
            _ => all.push(gpa),
        }
    }
    // All that is to be there is: there must not be more.
    let mut expected = all.iter();
    match runs.iter().find(|run| expected.next() != Some(run)) {
        None => Ok(()),
        Some(run) => Err(AdoptError::refused(
            RANGES,
            format!("{:#x} to {:#x} is not all memory of the VM", run.start, run.end),
        )),
    }
}

/// Why memory of a zone is not there.
fn missing(zone: &str, gpa: &Range<u64>, config: &MemoryConfig) -> String {
    let file = config.zones.iter().flatten().find(|it| it.id == zone);
    let file = file.filter(|it| it.shared).and_then(|it| it.file.as_ref());
    let what = format!("{:#x} to {:#x}, memory of zone '{zone}'", gpa.start, gpa.end);
    match file {
        Some(file) => format!(
            "{what}, is not in the snapshot but only in {}: such a zone cannot be restored, and its file is left \
             as it is",
            file.display()
        ),
        None => format!("{what}, is not in the snapshot"),
    }
}

/// Checks that the memory of a machine, and its window for 64-bit BARs, are where the guest has found them.
///
/// # Errors
/// Names the zone, or the address.
pub fn check_made(
    layout: &MemoryLayout,
    config: &VmConfig,
    ram: &GuestRam,
) -> Result<(), AdoptError> {
    let mut made: Vec<(&str, Range<u64>)> = Vec::new();
    for region in ram.regions() {
        let gpa = region.gpa()..region.gpa().saturating_add(region.len_bytes());
        made.push((region.zone_id(), gpa));
    }
    let mut matched = 0_usize;
    for part in &layout.parts {
        let (gpa, later) = (&part.gpa, later_memory_id(&part.zone));
        let is_there = match part.kind {
            PartKind::Boot => made.contains(&(part.zone.as_str(), gpa.clone())),
            PartKind::VirtioMem => made.contains(&(later.as_str(), gpa.clone())),
            PartKind::Devices { plugged_bytes } => {
                let room = made.iter().find(|(zone, _)| *zone == later);
                if room.is_none() && plugged_bytes == 0 {
                    // There is no room for a device.
                    continue;
                }
                // The room is cut to what devices can have.
                room.is_some_and(|(_, room)| {
                    let plugged_end = gpa.start.saturating_add(plugged_bytes);
                    room.start == gpa.start && room.end <= gpa.end && plugged_end <= room.end
                })
            }
        };
        ensure(
            is_there,
            || "memory-manager: guest_ram_mappings".to_owned(),
            || format!("a machine here has no memory of zone '{}' at {:#x}", part.zone, gpa.start),
        )?;
        matched = matched.saturating_add(1);
    }
    ensure(
        matched == made.len(),
        || "memory-manager: guest_ram_mappings".to_owned(),
        || format!("a machine here has {} parts of memory, not {matched}", made.len()),
    )?;
    let window = device_window_gpa(config, ram);
    ensure(
        window == Some(layout.device_area_gpa),
        || "memory-manager: start_of_device_area".to_owned(),
        || {
            let (theirs, ours) = (layout.device_area_gpa, window.unwrap_or(0));
            format!("{theirs:#x}, and the 64-bit window of a machine here starts at {ours:#x}")
        },
    )
}

/// Checks that each network device whose tap was a descriptor has been given one.
///
/// # Errors
/// Names the device.
pub fn check_taps(without_tap: &[String], config: &VmConfig) -> Result<(), AdoptError> {
    let has_fds = |id: &String| {
        let mut nets = config.net.iter().flatten();
        let net = nets.find(|net| net.id.as_ref() == Some(id));
        net.and_then(|net| net.fds.as_ref()).is_some_and(|fds| !fds.0.is_empty())
    };
    match without_tap.iter().find(|id| !has_fds(id)) {
        None => Ok(()),
        Some(id) => Err(AdoptError::refused(
            format!("device-manager/{id}"),
            "its tap was given as a descriptor, and has to be again: name it in net_fds",
        )),
    }
}
