// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Hands over to a PVH kernel: start info, module list and memory map in guest memory.
//!
//! Owns what the PVH boot ABI (`hvm_start_info` of the Xen public headers, version 1) says about
//! memory; registers are [`crate::regs`]'s. Must never write outside the boot data areas of
//! [`crate::layout`].

use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use memory::GuestMemory;
use vm_memory::{GuestAddress, GuestMemoryError};

use super::error::BootError;
use super::memmap::Entry;
use crate::layout::{self, GpaRange};

const START_INFO_MAGIC: u32 = 0x336e_c578;
/// Version 1 brought the memory map.
const START_INFO_VERSION: u32 = 1;

/// Writes everything that `ebx` leads to.
pub fn write_start_info(
    mem: &GuestMemory,
    map: &[Entry],
    initramfs: Option<GpaRange>,
    rsdp_gpa: u64,
) -> Result<(), BootError> {
    let entries: Vec<_> = map
        .iter()
        .map(|entry| hvm_memmap_table_entry {
            addr: entry.range.gpa,
            size: entry.range.len_bytes,
            type_: entry.kind,
            reserved: 0,
        })
        .collect();
    let start_info = hvm_start_info {
        magic: START_INFO_MAGIC,
        version: START_INFO_VERSION,
        nr_modules: u32::from(initramfs.is_some()),
        modlist_paddr: initramfs.map_or(0, |_| layout::PVH_MODLIST_GPA),
        cmdline_paddr: layout::CMDLINE_GPA,
        rsdp_paddr: rsdp_gpa,
        memmap_paddr: layout::PVH_MEMMAP_GPA,
        memmap_entries: u32::try_from(entries.len()).unwrap_or(0),
        ..hvm_start_info::default()
    };
    let gpa = layout::PVH_START_INFO_GPA;
    let mut params = BootParams::new(&start_info, GuestAddress(gpa));
    params.set_sections(&entries, GuestAddress(layout::PVH_MEMMAP_GPA));
    if let Some(range) = initramfs {
        let module = hvm_modlist_entry {
            paddr: range.gpa,
            size: range.len_bytes,
            ..hvm_modlist_entry::default()
        };
        params.set_modules(&[module], GuestAddress(layout::PVH_MODLIST_GPA));
    }
    // The configurator does not pass the memory's own error on; what it can be is an address
    // without RAM.
    PvhBootConfigurator::write_bootparams(&params, mem).map_err(|_| BootError::Write {
        what: "the PVH start info",
        gpa,
        source: GuestMemoryError::InvalidGuestAddress(GuestAddress(gpa)),
    })
}
