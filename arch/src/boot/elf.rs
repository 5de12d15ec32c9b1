// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Loads a PVH kernel: an ELF file with a note that says where to enter it in 32-bit mode.
//!
//! Owns the parsing of ELF headers, program headers and notes. linux-loader has a loader for this
//! as well; it takes no 32-bit ELF, does not check that a segment's whole extent is RAM or that it
//! stays clear of boot data, and cannot say what was wrong. Must never load below 1 MiB.
//!
//! Format: System V ABI chapters 4 and 5; the note is `XEN_ELFNOTE_PHYS32_ENTRY` of the Xen
//! public headers, which the PVH boot ABI builds on.

use memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress};

use super::error::BootError;
use super::image::{Fields, ImageReader, ImageSource, is_ram};
use crate::layout::{GpaRange, HIGH_RAM_GPA};

/// First bytes of an ELF file.
pub const ELF_MAGIC: [u8; 4] = *b"\x7fELF";

const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const EM_386: u16 = 3;
const EM_X86_64: u16 = 62;
const NOTE_PHYS32_ENTRY: u32 = 18;
const NOTE_OWNER: &[u8] = b"Xen\0";

/// A kernel has a handful of program headers; Linux has five.
const MAX_PROGRAM_HEADERS: u16 = 128;
/// All notes of a Linux kernel together are less than one KiB.
const MAX_NOTE_BYTES: u64 = 64 << 10;

/// What was loaded.
#[derive(Debug, PartialEq, Eq)]
pub struct LoadedElf {
    /// Where the PVH note says to enter.
    pub entry_gpa: u32,
    /// From the lowest to the highest address that the kernel occupies.
    pub extent: GpaRange,
}

/// One program header, widened to 64 bits.
struct Segment {
    kind: u32,
    offset: u64,
    gpa: u64,
    file_bytes: u64,
    mem_bytes: u64,
    align: u64,
}

/// Where the fields of a header are, for the two ELF classes.
struct Class {
    header_bytes: usize,
    program_header_bytes: u16,
    wide: bool,
}

const CLASS_32: Class = Class { header_bytes: 52, program_header_bytes: 32, wide: false };
const CLASS_64: Class = Class { header_bytes: 64, program_header_bytes: 56, wide: true };

/// Loads all segments and finds the entry point. `ram_is_zero` says that the parts of segments
/// that the file does not fill (bss) need not be cleared.
pub fn load<S: ImageSource>(
    mem: &GuestMemory,
    image: &mut ImageReader<'_, S>,
    ram_is_zero: bool,
) -> Result<LoadedElf, BootError> {
    let segments = read_segments(image)?;
    let mut entry = None;
    for note in segments.iter().filter(|segment| segment.kind == PT_NOTE) {
        entry = entry.or(find_entry(image, note)?);
    }
    let entry_gpa = entry.ok_or(BootError::NoPvhNote)?;

    let loads = || segments.iter().filter(|s| s.kind == PT_LOAD && s.mem_bytes > 0);
    for segment in loads() {
        check_placement(mem, segment)?;
    }
    let inside = |s: &Segment| (s.gpa..s.gpa + s.mem_bytes).contains(&u64::from(entry_gpa));
    if !loads().any(inside) {
        return Err(BootError::EntryOutsideKernel { gpa: u64::from(entry_gpa) });
    }
    for segment in loads() {
        if segment.file_bytes > 0 {
            let (offset, len) = (segment.offset, segment.file_bytes);
            image.load(mem, offset, len, segment.gpa, "a program segment")?;
        }
        if !ram_is_zero {
            let bss_gpa = segment.gpa + segment.file_bytes;
            clear(mem, bss_gpa, segment.mem_bytes - segment.file_bytes)?;
        }
    }
    let start_gpa = loads().map(|s| s.gpa).min().unwrap_or(0);
    let end_gpa = loads().map(|s| s.gpa + s.mem_bytes).max().unwrap_or(0);
    Ok(LoadedElf { entry_gpa, extent: GpaRange::between(start_gpa, end_gpa) })
}

fn read_segments<S: ImageSource>(
    image: &mut ImageReader<'_, S>,
) -> Result<Vec<Segment>, BootError> {
    let mut ident = [0; 16];
    image.read_at(0, &mut ident, "the ELF header")?;
    let class = match ident[4] {
        1 => CLASS_32,
        2 => CLASS_64,
        _ => return Err(BootError::UnsupportedElf { what: "of an unknown class" }),
    };
    if ident[5] != 1 {
        return Err(BootError::UnsupportedElf { what: "not little-endian" });
    }
    let mut header = [0; 64];
    image.read_at(0, &mut header[..class.header_bytes], "the ELF header")?;
    let fields = Fields(&header);
    if !matches!(fields.u16(18), EM_386 | EM_X86_64) {
        return Err(BootError::UnsupportedElf { what: "not for x86" });
    }
    let (table_offset, entry_bytes, count) = if class.wide {
        (fields.u64(32), fields.u16(54), fields.u16(56))
    } else {
        (u64::from(fields.u32(28)), fields.u16(42), fields.u16(44))
    };
    if count == 0 {
        return Err(BootError::UnsupportedElf { what: "has no program headers" });
    }
    if count > MAX_PROGRAM_HEADERS {
        return Err(BootError::MalformedElf { what: "more than 128 program headers" });
    }
    if entry_bytes != class.program_header_bytes {
        return Err(BootError::MalformedElf { what: "program headers of an odd size" });
    }
    let mut table = vec![0; usize::from(count) * usize::from(entry_bytes)];
    image.read_at(table_offset, &mut table, "the program header table")?;
    Ok(table
        .chunks_exact(usize::from(entry_bytes))
        .map(|entry| parse_segment(Fields(entry), class.wide))
        .collect())
}

fn parse_segment(entry: Fields<'_>, wide: bool) -> Segment {
    if wide {
        Segment {
            kind: entry.u32(0),
            offset: entry.u64(8),
            gpa: entry.u64(24),
            file_bytes: entry.u64(32),
            mem_bytes: entry.u64(40),
            align: entry.u64(48),
        }
    } else {
        Segment {
            kind: entry.u32(0),
            offset: u64::from(entry.u32(4)),
            gpa: u64::from(entry.u32(12)),
            file_bytes: u64::from(entry.u32(16)),
            mem_bytes: u64::from(entry.u32(20)),
            align: u64::from(entry.u32(28)),
        }
    }
}

/// After this, `gpa + mem_bytes` does not overflow and `mem_bytes >= file_bytes`.
fn check_placement(mem: &GuestMemory, segment: &Segment) -> Result<(), BootError> {
    if segment.file_bytes > segment.mem_bytes {
        return Err(BootError::MalformedElf {
            what: "a segment larger in the file than in memory",
        });
    }
    if segment.gpa < HIGH_RAM_GPA {
        return Err(BootError::KernelInLowMemory { gpa: segment.gpa });
    }
    if !is_ram(mem, segment.gpa, segment.mem_bytes) {
        return Err(BootError::KernelOutsideRam { gpa: segment.gpa, len_bytes: segment.mem_bytes });
    }
    Ok(())
}

/// The PVH entry point of a note segment, if it has the note.
fn find_entry<S: ImageSource>(
    image: &mut ImageReader<'_, S>,
    segment: &Segment,
) -> Result<Option<u32>, BootError> {
    if segment.file_bytes > MAX_NOTE_BYTES {
        return Err(BootError::MalformedElf { what: "a note segment of more than 64 KiB" });
    }
    let mut notes = vec![0; usize::try_from(segment.file_bytes).unwrap_or(0)];
    image.read_at(segment.offset, &mut notes, "a note segment")?;
    let align = if segment.align == 8 { 8 } else { 4 };
    parse_notes(&notes, align)
}

/// Walks the notes (size of name, size of descriptor, type, name, descriptor, each padded).
fn parse_notes(notes: &[u8], align: usize) -> Result<Option<u32>, BootError> {
    const DAMAGED: BootError = BootError::MalformedElf { what: "a note reaches past its segment" };
    let mut rest = notes;
    while rest.len() >= 12 {
        let fields = Fields(rest);
        let (name_bytes, desc_bytes) = (fields.u32(0) as usize, fields.u32(4) as usize);
        let name_end = 12_usize.checked_add(name_bytes).ok_or(DAMAGED)?;
        let desc_start = name_end.checked_next_multiple_of(align).ok_or(DAMAGED)?;
        let desc_end = desc_start.checked_add(desc_bytes).ok_or(DAMAGED)?;
        let name = rest.get(12..name_end).ok_or(DAMAGED)?;
        let desc = rest.get(desc_start..desc_end).ok_or(DAMAGED)?;
        if fields.u32(8) == NOTE_PHYS32_ENTRY && name == NOTE_OWNER {
            let entry = match desc.len() {
                4 => u64::from(Fields(desc).u32(0)),
                8 => Fields(desc).u64(0),
                _ => return Err(BootError::MalformedElf { what: "a PVH entry of an odd size" }),
            };
            let entry = u32::try_from(entry)
                .map_err(|_| BootError::MalformedElf { what: "a PVH entry above 4 GiB" })?;
            return Ok(Some(entry));
        }
        // The last note need not be padded.
        let next = desc_end.checked_next_multiple_of(align).ok_or(DAMAGED)?;
        rest = rest.get(next..).unwrap_or(&[]);
    }
    Ok(None)
}

fn clear(mem: &GuestMemory, gpa: u64, len_bytes: u64) -> Result<(), BootError> {
    const ZEROS: [u8; 4096] = [0; 4096];
    let mut done_bytes = 0;
    while done_bytes < len_bytes {
        let chunk = (len_bytes - done_bytes).min(ZEROS.len() as u64);
        let chunk_len = usize::try_from(chunk).unwrap_or(ZEROS.len());
        let at_gpa = gpa + done_bytes;
        mem.write_slice(&ZEROS[..chunk_len], GuestAddress(at_gpa))
            .map_err(|source| BootError::Write { what: "the kernel's bss", gpa: at_gpa, source })?;
        done_bytes += chunk;
    }
    Ok(())
}
