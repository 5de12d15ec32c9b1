// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the boot loader hands over: command line, memory map, ACPI tables.
//!
//! Copies everything out before other memory is written; the loader may have put it anywhere.

use crate::abi::control::CMDLINE_MAX;
use crate::layout::{List, Span};
use crate::mem;

const START_MAGIC: u32 = 0x336e_c578;
const MEMORY_MAP_RAM: u32 = 1;
const MEMORY_MAP_ENTRY_BYTES: u64 = 24;
/// More entries than any loader makes; keeps rubbish from becoming an endless loop.
const MEMORY_MAP_MAX: u32 = 256;
const TABLES_MAX: u64 = 256;

/// The hand-over, copied.
pub struct StartInfo {
    cmdline: [u8; CMDLINE_MAX],
    cmdline_bytes: usize,
    /// RAM.
    pub ram: List<Span>,
    /// Enabled processors in the MADT, 0 when there is none.
    pub processors: u64,
}

impl StartInfo {
    /// Reads the structure that PVH boot passes; none when it is not one or has no memory map.
    pub fn read(gpa: u64) -> Option<Self> {
        if gpa == 0 || mem::load32(gpa) != START_MAGIC || mem::load32(gpa + 4) < 1 {
            return None;
        }
        let mut info = Self {
            cmdline: [0; CMDLINE_MAX],
            cmdline_bytes: 0,
            ram: List::new(),
            processors: processors(mem::load(gpa + 32)),
        };
        let (map, entries) = (mem::load(gpa + 40), mem::load32(gpa + 48));
        for index in 0..u64::from(entries.min(MEMORY_MAP_MAX)) {
            let entry = map + index * MEMORY_MAP_ENTRY_BYTES;
            let (start, bytes) = (mem::load(entry), mem::load(entry + 8));
            if mem::load32(entry + 16) == MEMORY_MAP_RAM && bytes > 0 {
                info.ram.push(Span { start, end: start.saturating_add(bytes) });
            }
        }
        let cmdline = mem::load(gpa + 24);
        if cmdline != 0 {
            for (slot, address) in info.cmdline.iter_mut().zip(cmdline..) {
                *slot = mem::load8(address);
                if *slot == 0 {
                    break;
                }
                info.cmdline_bytes += 1;
            }
        }
        (!info.ram.as_slice().is_empty()).then_some(info)
    }

    /// The command line.
    pub fn cmdline(&self) -> &[u8] {
        self.cmdline.get(..self.cmdline_bytes).unwrap_or(&[])
    }
}

/// Counts the enabled local APICs of the MADT.
fn processors(rsdp: u64) -> u64 {
    if rsdp == 0 || mem::load(rsdp) != u64::from_le_bytes(*b"RSD PTR ") {
        return 0;
    }
    let extended = mem::load8(rsdp + 15) >= 2 && mem::load(rsdp + 24) != 0;
    let (root, width) =
        if extended { (mem::load(rsdp + 24), 8) } else { (u64::from(mem::load32(rsdp + 16)), 4) };
    let tables = u64::from(mem::load32(root + 4)).saturating_sub(36) / width;
    for index in 0..tables.min(TABLES_MAX) {
        let slot = root + 36 + index * width;
        let table = if width == 8 { mem::load(slot) } else { u64::from(mem::load32(slot)) };
        if mem::load32(table) == u32::from_le_bytes(*b"APIC") {
            return madt_processors(table);
        }
    }
    0
}

fn madt_processors(madt: u64) -> u64 {
    const ENABLED: u32 = 1;
    let end = madt + u64::from(mem::load32(madt + 4));
    let mut entry = madt + 44;
    let mut count = 0;
    while entry + 2 <= end {
        let (kind, bytes) = (mem::load8(entry), u64::from(mem::load8(entry + 1)));
        let flags = match kind {
            0 => mem::load32(entry + 4),
            9 => mem::load32(entry + 8),
            _ => 0,
        };
        count += u64::from(flags & ENABLED);
        if bytes == 0 {
            break;
        }
        entry += bytes;
    }
    count
}
