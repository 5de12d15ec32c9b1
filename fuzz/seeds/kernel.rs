// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds that are kernels: ELF files with a PVH entry, bzImages.

use super::{Seed, put};

const ENTRY_GPA: u32 = 0x10_0000;
/// Where contents and notes are in the ELF files.
const TEXT_OFFSET: u32 = 0x100;
const NOTES_OFFSET: u32 = 0x140;
const ELFNOTE_PHYS32_ENTRY: u32 = 18;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;

fn note(name: [u8; 4], kind: u32, contents: &[u8]) -> Vec<u8> {
    let len = u32::try_from(contents.len()).expect("a note is short");
    let mut bytes = [4, len, kind].map(u32::to_le_bytes).concat();
    bytes.extend_from_slice(&name);
    bytes.extend_from_slice(contents);
    bytes
}

fn entry_note() -> Vec<u8> {
    note(*b"Xen\0", ELFNOTE_PHYS32_ENTRY, &ENTRY_GPA.to_le_bytes())
}

/// ELF header, program headers of the 64-bit form, 16 bytes of text, notes.
fn elf64(notes: &[u8], segments: u16) -> Vec<u8> {
    let mut image = vec![0; NOTES_OFFSET as usize];
    put(&mut image, 0, b"\x7fELF\x02\x01\x01");
    put(&mut image, 16, &[2, 0, 62, 0, 1]);
    put(&mut image, 24, &u64::from(ENTRY_GPA).to_le_bytes());
    put(&mut image, 32, &64_u64.to_le_bytes());
    put(&mut image, 52, &64_u16.to_le_bytes());
    put(&mut image, 54, &56_u16.to_le_bytes());
    put(&mut image, 56, &segments.to_le_bytes());
    let (text, at) = (u64::from(TEXT_OFFSET), u64::from(ENTRY_GPA));
    let notes_len = notes.len() as u64;
    let headers = [
        (PT_LOAD, [text, at, at, 16, 0x2000, 0x1000]),
        (PT_NOTE, [u64::from(NOTES_OFFSET), 0, 0, notes_len, notes_len, 4]),
        (PT_LOAD, [text, at + 0x4000, at + 0x4000, 8, 8, 0x1000]),
    ];
    for (number, (kind, fields)) in headers.iter().enumerate().take(usize::from(segments)) {
        let start = 64 + 56 * number;
        put(&mut image, start, &kind.to_le_bytes());
        put(&mut image, start + 8, &fields.map(u64::to_le_bytes).concat());
    }
    put(&mut image, TEXT_OFFSET as usize, b"kernel text here");
    image.extend_from_slice(notes);
    image
}

fn elf32() -> Vec<u8> {
    let notes = entry_note();
    let notes_len = u32::try_from(notes.len()).expect("a note is short");
    let mut image = vec![0; NOTES_OFFSET as usize];
    put(&mut image, 0, b"\x7fELF\x01\x01\x01");
    put(&mut image, 16, &[2, 0, 3, 0, 1]);
    put(&mut image, 28, &52_u32.to_le_bytes());
    put(&mut image, 42, &32_u16.to_le_bytes());
    put(&mut image, 44, &2_u16.to_le_bytes());
    let load = [PT_LOAD, TEXT_OFFSET, 0, ENTRY_GPA, 16, 0x1000, 0, 0x1000];
    let note = [PT_NOTE, NOTES_OFFSET, 0, 0, notes_len, notes_len, 0, 4];
    put(&mut image, 52, &load.map(u32::to_le_bytes).concat());
    put(&mut image, 84, &note.map(u32::to_le_bytes).concat());
    put(&mut image, TEXT_OFFSET as usize, b"kernel text here");
    image.extend_from_slice(&notes);
    image
}

/// Boot sector, one sector of set-up, 1 KiB of kernel; for the fields see the boot protocol.
fn bzimage(xloadflags: u16, init_bytes: u32, relocatable: bool) -> Vec<u8> {
    const KERNEL_BYTES: u32 = 0x400;
    let mut image = vec![0; 1024 + KERNEL_BYTES as usize];
    image[0x1f1] = 1;
    put(&mut image, 0x1f4, &(KERNEL_BYTES / 16).to_le_bytes());
    put(&mut image, 0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]);
    put(&mut image, 0x202, b"HdrS\x0f\x02");
    image[0x211] = 1;
    put(&mut image, 0x22c, &0x7fff_ffff_u32.to_le_bytes());
    put(&mut image, 0x230, &0x20_0000_u32.to_le_bytes());
    image[0x234] = u8::from(relocatable);
    put(&mut image, 0x236, &xloadflags.to_le_bytes());
    put(&mut image, 0x238, &2047_u32.to_le_bytes());
    put(&mut image, 0x258, &0x100_0000_u64.to_le_bytes());
    put(&mut image, 0x260, &init_bytes.to_le_bytes());
    put(&mut image, 1024 + 0x200, b"64-bit entry");
    image
}

pub fn seeds() -> Vec<Seed> {
    let two_notes = [note(*b"GNU\0", 3, &[7; 20]), entry_note()].concat();
    vec![
        Seed::new("kernel_image", "pvh64", elf64(&two_notes, 2)),
        Seed::new("kernel_image", "pvh64-two-segments", elf64(&entry_note(), 3)),
        Seed::new("kernel_image", "pvh32", elf32()),
        Seed::new("kernel_image", "bzimage", bzimage(3, 0x10_0000, true)),
        Seed::new("kernel_image", "bzimage-fixed", bzimage(1, 0, false)),
        Seed::new("kernel_image", "elf-without-notes", elf64(&[], 1)),
    ]
}
