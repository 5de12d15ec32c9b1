// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Hands over to the 64-bit entry of a Linux kernel: zero page and identity page tables.
//!
//! Owns what Documentation/arch/x86/boot.rst of Linux asks of guest memory for the "64-bit boot
//! protocol"; registers are [`crate::regs`]'s. Must never write outside the boot data areas of
//! [`crate::layout`].

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use memory::GuestMemory;
use vm_memory::{ByteValued, Bytes, GuestAddress};

use super::bzimage::{HEADER_OFFSET, SetupHeader};
use super::error::BootError;
use super::memmap::Entry;
use crate::layout::{self, GpaRange, PAGE_BYTES};

/// "No assigned number": what every loader without one says.
const LOADER_UNDEFINED: u8 = 0xff;
const LOADED_HIGH: u8 = 1;
/// Text mode is not there, and "normal" asks for nothing.
const VIDEO_MODE_NORMAL: u16 = 0xffff;

const PRESENT_WRITABLE: u64 = 0x3;
const LARGE_PAGE: u64 = 0x80;
const LARGE_PAGE_BYTES: u64 = 2 << 20;
/// Page directories, one GiB each.
const IDENTITY_GIB: u64 = 4;

/// Writes the zero page: header of the image, memory map, initramfs, command line, RSDP.
pub fn write_zero_page(
    mem: &GuestMemory,
    header: &SetupHeader,
    load_gpa: u64,
    map: &[Entry],
    initramfs: Option<GpaRange>,
    rsdp_gpa: u64,
) -> Result<(), BootError> {
    let mut params = boot_params::default();
    let end = HEADER_OFFSET + header.bytes.len();
    if let Some(place) = params.as_mut_slice().get_mut(HEADER_OFFSET..end) {
        place.copy_from_slice(&header.bytes);
    }
    let (image_low, image_high) = split(initramfs.map_or(0, |range| range.gpa));
    let (size_low, size_high) = split(initramfs.map_or(0, |range| range.len_bytes));
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.loadflags |= LOADED_HIGH;
    params.hdr.vid_mode = VIDEO_MODE_NORMAL;
    params.hdr.code32_start = split(load_gpa).0;
    params.hdr.cmd_line_ptr = split(layout::CMDLINE_GPA).0;
    params.hdr.ramdisk_image = image_low;
    params.hdr.ramdisk_size = size_low;
    // A list of further data that only a loader may start.
    params.hdr.setup_data = 0;
    params.ext_ramdisk_image = image_high;
    params.ext_ramdisk_size = size_high;
    params.acpi_rsdp_addr = rsdp_gpa;
    let mut table = params.e820_table;
    for (slot, entry) in table.iter_mut().zip(map) {
        *slot = boot_e820_entry {
            addr: entry.range.gpa,
            size: entry.range.len_bytes,
            r#type: entry.kind,
        };
    }
    params.e820_table = table;
    params.e820_entries = u8::try_from(map.len()).unwrap_or(0);
    write(mem, params.as_slice(), layout::ZERO_PAGE_GPA, "the zero page")
}

/// Writes page tables that map the first 4 GiB onto themselves with 2 MiB pages, which every
/// 64-bit CPU has.
pub fn write_identity_page_tables(mem: &GuestMemory) -> Result<(), BootError> {
    let pml4_gpa = layout::BOOT_PAGE_TABLES_GPA;
    let pdpt_gpa = pml4_gpa + PAGE_BYTES;
    let first_pd_gpa = pdpt_gpa + PAGE_BYTES;
    let what = "the boot page tables";

    let entry_to = |gpa: u64| gpa | PRESENT_WRITABLE;
    write(mem, &table([entry_to(pdpt_gpa)]), pml4_gpa, what)?;
    let directories = (0..IDENTITY_GIB).map(|gib| entry_to(first_pd_gpa + gib * PAGE_BYTES));
    write(mem, &table(directories), pdpt_gpa, what)?;
    for gib in 0..IDENTITY_GIB {
        let pages = (0..512).map(|page| {
            let gpa = (gib << 30) + page * LARGE_PAGE_BYTES;
            entry_to(gpa) | LARGE_PAGE
        });
        write(mem, &table(pages), first_pd_gpa + gib * PAGE_BYTES, what)?;
    }
    Ok(())
}

/// A page table with these entries and nothing after them.
fn table(entries: impl IntoIterator<Item = u64>) -> Vec<u8> {
    let mut bytes: Vec<u8> = entries.into_iter().flat_map(u64::to_le_bytes).collect();
    bytes.resize(4096, 0);
    bytes
}

fn split(value: u64) -> (u32, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of the number")]
    let halves = (value as u32, (value >> 32) as u32);
    halves
}

fn write(mem: &GuestMemory, bytes: &[u8], gpa: u64, what: &'static str) -> Result<(), BootError> {
    mem.write_slice(bytes, GuestAddress(gpa)).map_err(|source| BootError::Write {
        what,
        gpa,
        source,
    })
}
