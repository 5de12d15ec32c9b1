// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests of a few instructions: one that halts, and one that does unpleasant things over and over.
//!
//! Owns the file that it boots from. Must never need a driver.

use std::path::{Path, PathBuf};

/// Where it is loaded, and entered in 32-bit mode without page tables, as PVH has it.
const LOAD_GPA: u32 = 0x20_0000;
const NOTE_OFFSET: u32 = 0xb0;
const CODE_OFFSET: u32 = 0xd0;

/// Writes so many newlines to the serial port, and then resets the machine by the keyboard controller.
fn code(newlines: u32) -> Vec<u8> {
    let mut code = vec![0xba, 0xf8, 0x03, 0, 0]; // mov edx, 0x3f8
    code.push(0xb9); // mov ecx, newlines
    code.extend(newlines.to_le_bytes());
    code.extend([0xb0, b'\n']); // mov al, newline
    code.extend([0xee, 0x49, 0x75, 0xfc]); // out dx, al; dec ecx; jnz to the out
    code.extend([0xb0, 0xfe, 0xe6, 0x64]); // mov al, 0xfe; out 0x64, al
    code.extend([0xf4, 0xeb, 0xfd]); // hlt; jmp to the hlt
    code
}

/// An ELF file with a PVH entry: header, two program headers, the note, the code.
fn elf(code: &[u8]) -> Vec<u8> {
    let len_bytes = u64::from(CODE_OFFSET) + u64::try_from(code.len()).expect("a length");
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    for half in [2_u16, 62] {
        file.extend(half.to_le_bytes()); // an executable for x86-64
    }
    file.extend(1_u32.to_le_bytes());
    for word in [u64::from(LOAD_GPA + CODE_OFFSET), 64, 0] {
        file.extend(word.to_le_bytes()); // entry, program headers, no section headers
    }
    file.extend(0_u32.to_le_bytes());
    for half in [64_u16, 56, 2, 0, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    let headers = [(1_u32, 0_u32, len_bytes, 0x1000_u64), (4, NOTE_OFFSET, 20, 4)];
    for (kind, offset, header_bytes, align) in headers {
        let gpa = u64::from(LOAD_GPA + offset);
        file.extend(kind.to_le_bytes());
        file.extend(5_u32.to_le_bytes()); // to be read and executed
        for word in [u64::from(offset), gpa, gpa, header_bytes, header_bytes, align] {
            file.extend(word.to_le_bytes());
        }
    }
    for word in [4_u32, 4, 18] {
        file.extend(word.to_le_bytes()); // XEN_ELFNOTE_PHYS32_ENTRY
    }
    file.extend(b"Xen\0");
    file.extend((LOAD_GPA + CODE_OFFSET).to_le_bytes());
    file.resize(CODE_OFFSET.try_into().expect("an offset"), 0);
    file.extend(code);
    file
}

/// Makes a payload in `folder` that does nothing at all, and takes no processor time for it.
pub fn halting(folder: &Path) -> PathBuf {
    let path = folder.join("halting");
    std::fs::write(&path, elf(&[0xf4, 0xeb, 0xfd])).expect("a file can be written");
    path
}

/// Makes a payload in `folder` that resets the machine all the time, after so many newlines.
pub fn resetting(folder: &Path, newlines: u32) -> PathBuf {
    let path = folder.join("resetting");
    std::fs::write(&path, elf(&code(newlines.max(1)))).expect("a file can be written");
    path
}
