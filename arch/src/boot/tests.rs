// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the boot protocols on images made here, and on a real bzImage where one is given.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io::Cursor;
use std::io::Write;

use linux_loader::loader::bootparam::boot_params;
use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use proptest::prelude::*;
use vm_memory::ByteValued;

use super::*;

const MIB: u64 = 1 << 20;
const ENTRY_GPA: u32 = 0x20_0000;

fn guest(ranges: &[(u64, u64)]) -> GuestMemory {
    let ranges: Vec<_> = ranges
        .iter()
        .map(|&(gpa, len)| (GuestAddress(gpa), usize::try_from(len).unwrap()))
        .collect();
    GuestMemory::from_ranges(&ranges).unwrap()
}

fn spec(cmdline: &str) -> BootSpec<'_> {
    BootSpec { cmdline, rsdp_gpa: layout::RSDP_GPA, reserved: &[], later: &[], ram_is_zero: true }
}

fn boot(mem: &GuestMemory, kernel: &[u8]) -> Result<BootEntry, BootError> {
    load_from(mem, &mut Cursor::new(kernel), None::<&mut Cursor<&[u8]>>, &spec("quiet"))
}

fn boot_with(mem: &GuestMemory, kernel: &[u8], initrd: &[u8]) -> Result<BootEntry, BootError> {
    load_from(mem, &mut Cursor::new(kernel), Some(&mut Cursor::new(initrd)), &spec("quiet"))
}

fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
    bytes[offset..offset + value.len()].copy_from_slice(value);
}

fn note(name: &[u8], kind: u32, desc: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(u32::try_from(name.len()).unwrap().to_le_bytes());
    bytes.extend(u32::try_from(desc.len()).unwrap().to_le_bytes());
    bytes.extend(kind.to_le_bytes());
    for part in [name, desc] {
        bytes.extend(part);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

/// An ELF of 64 bits with one loaded segment of 16 bytes (and bss) and one note segment.
fn elf64(notes: &[u8], load_gpa: u64, mem_bytes: u64) -> Vec<u8> {
    let mut image = vec![0; 0x200];
    put(&mut image, 0, b"\x7fELF\x02\x01\x01");
    put(&mut image, 18, &62_u16.to_le_bytes());
    put(&mut image, 32, &64_u64.to_le_bytes());
    put(&mut image, 54, &56_u16.to_le_bytes());
    put(&mut image, 56, &2_u16.to_le_bytes());
    let mut header = |at: usize, kind: u32, fields: [u64; 6]| {
        put(&mut image, at, &kind.to_le_bytes());
        for (index, field) in fields.iter().enumerate() {
            put(&mut image, at + 8 + 8 * index, &field.to_le_bytes());
        }
    };
    header(64, 1, [0x100, load_gpa, load_gpa, 16, mem_bytes, 0x1000]);
    header(120, 4, [0x200, 0, 0, notes.len() as u64, notes.len() as u64, 4]);
    put(&mut image, 0x100, b"kernel text here");
    image.extend_from_slice(notes);
    image
}

fn pvh_elf() -> Vec<u8> {
    let notes =
        [note(b"GNU\0", 3, &[7; 20]), note(b"Xen\0", 18, &ENTRY_GPA.to_le_bytes())].concat();
    elf64(&notes, u64::from(ENTRY_GPA), 0x2000)
}

/// The same as a 32-bit ELF.
fn pvh_elf32() -> Vec<u8> {
    let notes = note(b"Xen\0", 18, &ENTRY_GPA.to_le_bytes());
    let mut image = vec![0; 0x200];
    put(&mut image, 0, b"\x7fELF\x01\x01\x01");
    put(&mut image, 18, &3_u16.to_le_bytes());
    put(&mut image, 28, &52_u32.to_le_bytes());
    put(&mut image, 42, &32_u16.to_le_bytes());
    put(&mut image, 44, &2_u16.to_le_bytes());
    let notes_len = u32::try_from(notes.len()).unwrap();
    for (at, fields) in [
        (52, [1, 0x100, 0, ENTRY_GPA, 16, 0x1000, 0, 0x1000]),
        (84, [4, 0x200, 0, 0, notes_len, notes_len, 0, 4]),
    ] {
        for (index, field) in fields.iter().enumerate() {
            put(&mut image, at + 4 * index, &u32::to_le_bytes(*field));
        }
    }
    put(&mut image, 0x100, b"kernel text here");
    image.extend(notes);
    image
}

const XLF_64: u16 = 1;
const XLF_64_AND_ABOVE_4G: u16 = 3;

fn bzimage(xloadflags: u16, init_bytes: u32) -> Vec<u8> {
    let mut image = vec![0; 1024 + 0x1000];
    image[0x1f1] = 1; // one setup sector after the boot sector
    put(&mut image, 0x1f4, &(0x1000_u32 / 16).to_le_bytes());
    put(&mut image, 0x1fe, &0xaa55_u16.to_le_bytes());
    put(&mut image, 0x200, &[0xeb, 0x6a]);
    put(&mut image, 0x202, b"HdrS");
    put(&mut image, 0x206, &0x020f_u16.to_le_bytes());
    image[0x211] = 1;
    put(&mut image, 0x22c, &0x7fff_ffff_u32.to_le_bytes());
    put(&mut image, 0x230, &0x20_0000_u32.to_le_bytes());
    image[0x234] = 1;
    put(&mut image, 0x236, &xloadflags.to_le_bytes());
    put(&mut image, 0x238, &2047_u32.to_le_bytes());
    put(&mut image, 0x258, &0x100_0000_u64.to_le_bytes());
    put(&mut image, 0x260, &init_bytes.to_le_bytes());
    put(&mut image, 1024 + 0x200, b"64-bit entry");
    image
}

fn start_info(mem: &GuestMemory) -> hvm_start_info {
    let mut info = hvm_start_info::default();
    mem.read_slice(info.as_mut_slice(), GuestAddress(layout::PVH_START_INFO_GPA)).unwrap();
    info
}

fn zero_page(mem: &GuestMemory) -> boot_params {
    let mut params = boot_params::default();
    mem.read_slice(params.as_mut_slice(), GuestAddress(layout::ZERO_PAGE_GPA)).unwrap();
    params
}

fn bytes_at(mem: &GuestMemory, gpa: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    mem.read_slice(&mut bytes, GuestAddress(gpa)).unwrap();
    bytes
}

#[test]
fn pvh_elf_of_either_class_is_loaded_and_entered() {
    for image in [pvh_elf(), pvh_elf32()] {
        let mem = guest(&[(0, 16 * MIB)]);
        let entry = boot(&mem, &image).unwrap();
        let expected = BootEntry::Pvh {
            entry_gpa: u64::from(ENTRY_GPA),
            start_info_gpa: layout::PVH_START_INFO_GPA,
        };
        assert_eq!(entry, expected);
        assert_eq!(bytes_at(&mem, u64::from(ENTRY_GPA), 16), b"kernel text here");
        assert_eq!(bytes_at(&mem, layout::CMDLINE_GPA, 6), b"quiet\0");
        let info = start_info(&mem);
        assert_eq!((info.magic, info.version, info.nr_modules), (0x336e_c578, 1, 0));
        assert_eq!((info.rsdp_paddr, info.cmdline_paddr), (0xa_0000, layout::CMDLINE_GPA));
        assert_eq!(bytes_at(&mem, layout::EBDA_POINTER_GPA, 2), [0x00, 0xa0]);
    }
}

/// As firmware gives it, in a note of 4-byte units.
#[test]
fn pvh_entry_of_64_bits_is_taken_below_4_gib() {
    let mem = guest(&[(0, 16 * MIB)]);
    let elf = |entry_gpa: u64| {
        elf64(&note(b"Xen\0", 18, &entry_gpa.to_le_bytes()), u64::from(ENTRY_GPA), 0x2000)
    };
    let inside_gpa = u64::from(ENTRY_GPA) + 8;
    let entry = boot(&mem, &elf(inside_gpa)).unwrap();
    assert!(matches!(entry, BootEntry::Pvh { entry_gpa, .. } if entry_gpa == inside_gpa));
    let error = boot(&mem, &elf((1 << 32) | inside_gpa)).unwrap_err();
    assert!(error.to_string().contains("above 4 GiB"), "{error}");
}

#[test]
fn pvh_memory_map_lists_ram_around_the_tables() {
    let mem = guest(&[(0, 8 * MIB), (8 * MIB, 8 * MIB), (layout::HIGH_RAM_64_GPA, MIB)]);
    boot(&mem, &pvh_elf()).unwrap();
    let info = start_info(&mem);
    let map: Vec<_> = (0..u64::from(info.memmap_entries))
        .map(|index| {
            let mut entry = hvm_memmap_table_entry::default();
            let gpa = info.memmap_paddr + index * 24;
            mem.read_slice(entry.as_mut_slice(), GuestAddress(gpa)).unwrap();
            (entry.addr, entry.size, entry.type_)
        })
        .collect();
    let expected = [
        (0, 0xa_0000, 1),
        (0xa_0000, 0x6_0000, 2),
        (MIB, 15 * MIB, 1),
        (layout::ECAM_GPA, layout::ECAM_BYTES, 2),
        (layout::KVM_IDENTITY_MAP_GPA, 0x4000, 2),
        (layout::HIGH_RAM_64_GPA, MIB, 1),
    ];
    assert_eq!(map, expected);
}

#[test]
fn pvh_initramfs_is_at_the_top_of_low_ram() {
    let mem = guest(&[(0, 16 * MIB), (layout::HIGH_RAM_64_GPA, 16 * MIB)]);
    boot_with(&mem, &pvh_elf(), b"initramfs contents").unwrap();
    let info = start_info(&mem);
    let mut module = hvm_modlist_entry::default();
    mem.read_slice(module.as_mut_slice(), GuestAddress(info.modlist_paddr)).unwrap();
    assert_eq!(info.nr_modules, 1);
    assert_eq!((module.paddr, module.size), (16 * MIB - 0x1000, 18));
    assert_eq!(bytes_at(&mem, module.paddr, 18), b"initramfs contents");
}

#[test]
fn bss_is_cleared_when_memory_was_used() {
    let mem = guest(&[(0, 16 * MIB)]);
    let bss_gpa = u64::from(ENTRY_GPA) + 16;
    mem.write_slice(&[0xff; 0x2000], GuestAddress(bss_gpa)).unwrap();
    let spec = BootSpec { ram_is_zero: false, ..spec("") };
    let image = pvh_elf();
    load_from(&mem, &mut Cursor::new(image), None::<&mut Cursor<&[u8]>>, &spec).unwrap();
    assert_eq!(bytes_at(&mem, bss_gpa, 0x2000 - 16), vec![0; 0x2000 - 16]);
    assert_eq!(bytes_at(&mem, bss_gpa + 0x2000 - 16, 1), [0xff]);
}

#[test]
fn bzimage_is_loaded_where_it_prefers() {
    let mem = guest(&[(0, 64 * MIB)]);
    let entry = boot(&mem, &bzimage(XLF_64_AND_ABOVE_4G, 0x10_0000)).unwrap();
    let expected = BootEntry::Linux64 {
        entry_gpa: 0x100_0200,
        zero_page_gpa: layout::ZERO_PAGE_GPA,
        page_table_gpa: layout::BOOT_PAGE_TABLES_GPA,
    };
    assert_eq!(entry, expected);
    assert_eq!(bytes_at(&mem, 0x100_0200, 12), b"64-bit entry");
    let params = zero_page(&mem);
    let hdr = params.hdr;
    assert_eq!(size_of::<boot_params>(), 4096);
    assert_eq!({ hdr.header }, u32::from_le_bytes(*b"HdrS"));
    assert_eq!(hdr.type_of_loader, 0xff);
    assert_eq!({ hdr.cmd_line_ptr }, 0x2_0000);
    assert_eq!({ hdr.init_size }, 0x10_0000);
    assert_eq!({ params.acpi_rsdp_addr }, 0xa_0000);
    assert_eq!(params.e820_entries, 5);
    let table = params.e820_table;
    let ram = table.iter().filter(|entry| { entry.r#type } == 1).map(|entry| entry.size);
    assert_eq!(ram.sum::<u64>(), 64 * MIB - 0x6_0000);
}

#[test]
fn the_reset_vector_resets_whatever_the_kernel_is() {
    for kernel in [pvh_elf(), bzimage(XLF_64, 0)] {
        let mem = guest(&[(0, 64 * MIB)]);
        boot(&mem, &kernel).unwrap();
        let code = bytes_at(&mem, 0xf_fff0, 9);
        assert_eq!(code, [0xba, 0x00, 0x06, 0xb0, 1, 0xee, 0xf4, 0xeb, 0xfd]);
    }
}

#[test]
fn identity_page_tables_map_each_address_to_itself() {
    let mem = guest(&[(0, 64 * MIB)]);
    boot(&mem, &bzimage(XLF_64, 0)).unwrap();
    let read = |gpa: u64| mem.read_obj::<u64>(GuestAddress(gpa)).unwrap();
    for gpa in [0, 0x100_0200, 0xbfff_ffff, 0xfee0_0000, 0xffff_ffff_u64] {
        let pml4e = read(layout::BOOT_PAGE_TABLES_GPA + (gpa >> 39 & 511) * 8);
        let pdpte = read((pml4e & !0xfff) + (gpa >> 30 & 511) * 8);
        let pde = read((pdpte & !0xfff) + (gpa >> 21 & 511) * 8);
        assert_eq!((pml4e & 3, pdpte & 3, pde & 0x83), (3, 3, 0x83));
        assert_eq!(pde & !0xfff, gpa & !0x1f_ffff);
    }
}

#[test]
fn old_kernel_gets_its_initramfs_below_its_limit() {
    let mem = guest(&[(0, 64 * MIB)]);
    let mut image = bzimage(XLF_64, 0);
    put(&mut image, 0x22c, &0x1ff_ffff_u32.to_le_bytes());
    boot_with(&mem, &image, &[1; 100]).unwrap();
    assert_eq!({ zero_page(&mem).hdr.ramdisk_image }, 0x1ff_f000);
}

#[test]
fn new_kernel_may_have_its_initramfs_above_four_gib() {
    let mem = guest(&[(0, 18 * MIB), (layout::HIGH_RAM_64_GPA, 16 * MIB)]);
    let initrd = vec![7; 17 << 19]; // 8.5 MiB: neither side of the kernel has so much
    let image = bzimage(XLF_64_AND_ABOVE_4G, 0x10_0000);
    let small = guest(&[(0, 18 * MIB)]);
    // Between 1 MiB and the kernel at 16 MiB there are 15.
    boot_with(&small, &image, &initrd).unwrap();
    assert_eq!({ zero_page(&small).ext_ramdisk_image }, 0);

    let initrd = vec![7; 15 << 20 | 1];
    boot_with(&mem, &image, &initrd).unwrap();
    let params = zero_page(&mem);
    assert_eq!({ params.ext_ramdisk_image }, 1);
    assert_eq!({ params.hdr.ramdisk_size }, (15 << 20) | 1);
    let error = boot_with(&mem, &bzimage(XLF_64, 0x10_0000), &initrd).unwrap_err();
    assert!(matches!(error, BootError::InitramfsTooLarge { .. }), "{error}");
}

#[test]
fn command_line_limits_are_those_of_the_kernel() {
    let mem = guest(&[(0, 64 * MIB)]);
    let image = bzimage(XLF_64, 0);
    let try_boot = |cmdline: &str, image: &[u8]| {
        load_from(&mem, &mut Cursor::new(image), None::<&mut Cursor<&[u8]>>, &spec(cmdline))
    };
    try_boot(&"x".repeat(2047), &image).unwrap();
    let error = try_boot(&"x".repeat(2048), &image).unwrap_err();
    assert!(matches!(error, BootError::CmdlineTooLong { len_bytes: 2048, max_bytes: 2047 }));
    try_boot(&"x".repeat(0xffff), &pvh_elf()).unwrap();
    let error = try_boot(&"x".repeat(0x1_0000), &pvh_elf()).unwrap_err();
    assert!(matches!(error, BootError::CmdlineTooLong { max_bytes: 0xffff, .. }));
    let error = try_boot("console=ttyS0 é", &pvh_elf()).unwrap_err();
    assert!(matches!(error, BootError::CmdlineNotAscii { position: 14 }));
    assert!(try_boot("a\0b", &image).is_err());
}

#[test]
fn what_is_not_a_kernel_is_named() {
    let mem = guest(&[(0, 64 * MIB)]);
    let refused = |image: &[u8]| boot(&mem, image).unwrap_err();
    assert!(matches!(refused(b""), BootError::UnknownFormat));
    assert!(matches!(refused(b"#!/bin/sh\n"), BootError::UnknownFormat));
    assert!(matches!(refused(&[0; 9000]), BootError::UnknownFormat));
    assert!(matches!(refused(b"\x7fELF"), BootError::Truncated { .. }));
    let no_note = elf64(&note(b"GNU\0", 18, &[0; 4]), u64::from(ENTRY_GPA), 16);
    let message = refused(&no_note).to_string();
    assert!(message.contains("CONFIG_PVH=y"), "{message}");
    let mut arm = pvh_elf();
    put(&mut arm, 18, &183_u16.to_le_bytes());
    assert!(refused(&arm).to_string().contains("not for x86"));
    let mut old = bzimage(XLF_64, 0);
    put(&mut old, 0x206, &0x0204_u16.to_le_bytes());
    assert!(refused(&old).to_string().contains("protocol 2.04"));
    assert!(matches!(refused(&bzimage(0, 0)), BootError::NoLinux64Entry { .. }));
}

#[test]
fn truncated_images_are_named() {
    let mem = guest(&[(0, 64 * MIB)]);
    for image in [pvh_elf(), pvh_elf32(), bzimage(XLF_64, 0)] {
        let mut shorter = image.clone();
        shorter.truncate(image.len() - 32);
        let error = boot(&mem, &shorter).unwrap_err();
        assert!(matches!(error, BootError::Truncated { image: Image::Kernel, .. }), "{error}");
    }
}

#[test]
fn kernels_stay_inside_ram_and_clear_of_boot_data() {
    let mem = guest(&[(0, 16 * MIB)]);
    let entry_note = |gpa: u32| note(b"Xen\0", 18, &gpa.to_le_bytes());
    let refused = |image: &[u8]| boot(&mem, image).unwrap_err();
    let low = elf64(&entry_note(0x9000), 0x9000, 16);
    assert!(matches!(refused(&low), BootError::KernelInLowMemory { gpa: 0x9000 }));
    let beyond = elf64(&entry_note(ENTRY_GPA), u64::from(ENTRY_GPA), 16 * MIB);
    assert!(matches!(refused(&beyond), BootError::KernelOutsideRam { .. }));
    let wrapping = elf64(&entry_note(ENTRY_GPA), u64::from(ENTRY_GPA), u64::MAX);
    assert!(matches!(refused(&wrapping), BootError::KernelOutsideRam { .. }));
    let outside = elf64(&entry_note(ENTRY_GPA - 1), u64::from(ENTRY_GPA), 16);
    assert!(matches!(refused(&outside), BootError::EntryOutsideKernel { .. }));
    let inverted = elf64(&entry_note(ENTRY_GPA), u64::from(ENTRY_GPA), 8);
    assert!(matches!(refused(&inverted), BootError::MalformedElf { .. }));
    // At 16 MiB there is no RAM here.
    assert!(matches!(refused(&bzimage(XLF_64, 0)), BootError::KernelOutsideRam { .. }));
}

#[test]
fn initramfs_must_have_contents_and_room() {
    let mem = guest(&[(0, 16 * MIB)]);
    let refused = |initrd: &[u8]| boot_with(&mem, &pvh_elf(), initrd).unwrap_err();
    assert!(matches!(refused(b""), BootError::InitramfsEmpty));
    assert!(matches!(refused(&vec![0; 16 << 20]), BootError::InitramfsTooLarge { .. }));
}

#[test]
fn pipe_and_directory_are_read_errors() {
    let mem = guest(&[(0, 16 * MIB)]);
    let mut directory = File::open("/").unwrap();
    let error = load_kernel(&mem, &mut directory, None, &spec("")).unwrap_err();
    assert!(!error.to_string().is_empty());
    let (reader, _writer) = std::io::pipe().unwrap();
    let mut pipe = File::from(std::os::fd::OwnedFd::from(reader));
    let error = load_kernel(&mem, &mut pipe, None, &spec("")).unwrap_err();
    assert!(matches!(error, BootError::Read { image: Image::Kernel, .. }), "{error}");
}

#[test]
fn files_load_as_well_as_bytes() {
    let mem = guest(&[(0, 16 * MIB)]);
    let mut kernel = tempfile::tempfile().unwrap();
    kernel.write_all(&pvh_elf()).unwrap();
    let mut initrd = tempfile::tempfile().unwrap();
    initrd.write_all(&[5; 5000]).unwrap();
    load_kernel(&mem, &mut kernel, Some(&mut initrd), &spec("")).unwrap();
    assert_eq!(bytes_at(&mem, 16 * MIB - 0x2000, 5000), [5; 5000]);
}

/// Given by the environment because no kernel is part of this repository.
#[test]
fn real_bzimage_is_accepted() {
    let Some(path) = std::env::var_os("GODWIT_TEST_BZIMAGE") else {
        test_skip::skip!("GODWIT_TEST_BZIMAGE does not name a bzImage");
        return;
    };
    let mem = guest(&[(0, 512 * MIB)]);
    let mut kernel = File::open(path).unwrap();
    let entry = load_kernel(&mem, &mut kernel, None, &spec("console=hvc0")).unwrap();
    let BootEntry::Linux64 { entry_gpa, .. } = entry else { panic!("{entry:?}") };
    assert_eq!(entry_gpa & 0xf_ffff, 0x200);
    assert_ne!(bytes_at(&mem, entry_gpa, 16), [0; 16]);
    assert!({ zero_page(&mem).hdr.version } >= 0x020c);
}

fn mutated(image: Vec<u8>, changes: &[(usize, u8)]) -> Vec<u8> {
    let mut image = image;
    let len = image.len();
    for &(at, value) in changes {
        image[at % len] = value;
    }
    image
}

#[test]
fn a_whole_bzimage_is_entered() {
    assert!(fuzz_kernel_image(&bzimage(XLF_64_AND_ABOVE_4G, 0x1000)));
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_no_kernel(bytes: Vec<u8>) {
        prop_assert!(!fuzz_kernel_image(&bytes));
        prop_assert!(!fuzz_kernel_image(&[b"\x7fELF\x02\x01".as_slice(), &bytes].concat()));
    }

    /// What a damaged one that is taken must be all the same, the fuzz entry asserts.
    #[test]
    fn a_damaged_elf_is_refused_or_entered_in_ram(
        changes in prop::collection::vec((0_usize..0x240, any::<u8>()), 1..12),
    ) {
        for whole in [pvh_elf(), pvh_elf32()] {
            let damaged = mutated(whole.clone(), &changes);
            prop_assert!(fuzz_kernel_image(&whole));
            let is_taken = fuzz_kernel_image(&damaged);
            prop_assert!(!is_taken || damaged.starts_with(b"\x7fELF"));
        }
    }

    #[test]
    fn a_damaged_bzimage_is_refused_or_entered_in_ram(
        changes in prop::collection::vec((0x1f1_usize..0x268, any::<u8>()), 1..12),
        len in 0_usize..6000,
    ) {
        let mut image = mutated(bzimage(XLF_64_AND_ABOVE_4G, 0x1000), &changes);
        image.resize(len, 0);
        let is_taken = fuzz_kernel_image(&image);
        // Not without all of its code.
        prop_assert!(!is_taken || len > 1024, "{len} bytes");
    }

    #[test]
    fn placed_range_is_free(
        ram_mib in prop::collection::vec((1_u64..4096, 1_u64..64), 1..4),
        kernel_mib in (1_u64..64, 1_u64..32),
        len_bytes in 1_u64..(64 << 20),
        limit_gpa: u64,
    ) {
        let ram: Vec<_> = ram_mib
            .iter()
            .map(|&(gpa, len)| GpaRange { gpa: gpa * MIB, len_bytes: len * MIB })
            .collect();
        let kernel = GpaRange { gpa: kernel_mib.0 * MIB, len_bytes: kernel_mib.1 * MIB };
        if let Some(gpa) = memmap::place_high(&ram, kernel, len_bytes, limit_gpa) {
            let placed = GpaRange { gpa, len_bytes };
            prop_assert!(!placed.overlaps(&kernel));
            prop_assert!(placed.end_gpa() <= limit_gpa && gpa >= MIB && gpa % 4096 == 0);
            prop_assert!(ram.iter().any(|r| r.gpa <= gpa && placed.end_gpa() <= r.end_gpa()));
        }
    }
}
