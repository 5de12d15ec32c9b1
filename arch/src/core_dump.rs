// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! ELF core files of a guest: their headers and notes.
//!
//! Owns the format that debuggers of kernels (crash, drgn, gdb) read: an ELF64 core file whose
//! segments have guest-physical addresses, with the notes `CORE` (`NT_PRSTATUS`) and `QEMU` of each
//! vCPU, and the guest's own `VMCOREINFO`, if it was found. Virtual addresses of segments are zero, as
//! in any dump that was made without walking page tables. Must never read guest memory.

use std::ops::Range;

use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use linux_loader::elf::{EI_NIDENT, ET_CORE, PT_LOAD, PT_NOTE};

/// Length of a page; contents of memory begin at a multiple of it.
const PAGE_BYTES: usize = 4096;
const EHDR_BYTES: u16 = 64;
const PHDR_BYTES: u16 = 56;
const EM_X86_64: u16 = 62;
const NT_PRSTATUS: u32 = 1;
/// Type of the notes `QEMU` and `VMCOREINFO`.
const NT_NONE: u32 = 0;
const PRSTATUS_BYTES: usize = 336;
const QEMU_STATE_BYTES: usize = 440;
/// Largest description of a `VMCOREINFO` note: Linux's has at most a page.
pub const VMCOREINFO_BYTES_MAX: usize = 4096;
/// A name of up to 11 characters, padded.
const NOTE_HEADER_BYTES: usize = 12;
/// The name of Linux's note, with its end.
const VMCOREINFO_NAME: &[u8] = b"VMCOREINFO\0";
/// Length of the header of Linux's note: three words and the padded name.
const VMCOREINFO_HEADER_BYTES: usize = NOTE_HEADER_BYTES + 12;
/// With what the text of the note begins.
const VMCOREINFO_START: &[u8] = b"OSRELEASE=";

/// A range of guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoreRange {
    /// First guest-physical address.
    pub gpa: u64,
    /// Length.
    pub len_bytes: u64,
}

/// Registers of a vCPU in a core file.
#[derive(Clone, Copy, Debug)]
pub struct CoreVcpu {
    /// General registers.
    pub regs: kvm_regs,
    /// Segments, descriptor tables and control registers.
    pub sregs: kvm_sregs,
    /// `IA32_KERNEL_GS_BASE`.
    pub kernel_gs_base: u64,
}

/// A core file to be written: its ranges lie one after the other from [`Self::memory_offset`] on.
#[derive(Clone, Debug)]
pub struct CoreFile {
    ranges: Vec<CoreRange>,
    vcpus: Vec<CoreVcpu>,
}

impl CoreFile {
    /// A core file of these ranges and vCPUs.
    pub fn new(ranges: Vec<CoreRange>, vcpus: Vec<CoreVcpu>) -> Self {
        Self { ranges, vcpus }
    }

    /// Offset of the first byte of memory in the file, a multiple of 4096: there is room for a
    /// `VMCOREINFO` note before it, as that note is only found while memory is written.
    pub fn memory_offset(&self) -> u64 {
        self.header_len() as u64
    }

    fn header_len(&self) -> usize {
        let vcpu = note_len(PRSTATUS_BYTES) + note_len(QEMU_STATE_BYTES);
        let notes = vcpu * self.vcpus.len() + note_len(VMCOREINFO_BYTES_MAX);
        (self.notes_offset() + notes).next_multiple_of(PAGE_BYTES)
    }

    fn notes_offset(&self) -> usize {
        usize::from(EHDR_BYTES) + usize::from(PHDR_BYTES) * (self.ranges.len() + 1)
    }

    /// All bytes before [`Self::memory_offset`]. A `vmcoreinfo` of more than
    /// [`VMCOREINFO_BYTES_MAX`] is left out.
    pub fn header(&self, vmcoreinfo: Option<&[u8]>) -> Vec<u8> {
        let notes = self.notes(vmcoreinfo);
        let mut out = Out::default();
        // 64 bits, little endian, version 1 of the format, of no particular system.
        let mut ident = [0; EI_NIDENT];
        ident[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        out.bytes(&ident);
        out.u16(ET_CORE);
        out.u16(EM_X86_64);
        out.u32(1);
        out.u64(0);
        out.u64(EHDR_BYTES.into());
        out.u64(0);
        out.u32(0);
        out.u16(EHDR_BYTES);
        out.u16(PHDR_BYTES);
        // A guest has a few ranges; the format's extension for more is not needed.
        out.u16(u16::try_from(self.ranges.len() + 1).unwrap_or(u16::MAX));
        out.u16(0);
        out.u16(0);
        out.u16(0);
        out.program_header(
            PT_NOTE,
            self.notes_offset() as u64,
            CoreRange { gpa: 0, len_bytes: notes.len() as u64 },
        );
        let mut offset = self.memory_offset();
        for range in &self.ranges {
            out.program_header(PT_LOAD, offset, *range);
            offset += range.len_bytes;
        }
        out.bytes(&notes);
        out.0.resize(self.header_len(), 0);
        out.0
    }

    /// All notes of one kind first, as readers expect that count them to find a vCPU.
    fn notes(&self, vmcoreinfo: Option<&[u8]>) -> Vec<u8> {
        let mut out = Out::default();
        for (index, vcpu) in (0..).zip(&self.vcpus) {
            out.note(b"CORE\0", NT_PRSTATUS, &prstatus(index, vcpu));
        }
        for vcpu in &self.vcpus {
            out.note(b"QEMU\0", NT_NONE, &qemu_state(vcpu));
        }
        if let Some(text) = vmcoreinfo.filter(|text| text.len() <= VMCOREINFO_BYTES_MAX) {
            out.note(VMCOREINFO_NAME, NT_NONE, text);
        }
        out.0
    }
}

/// Where the text of Linux's `VMCOREINFO` note lies relative to the page that begins with `start`, if this is
/// one: Linux keeps its note at the start of a page. The bytes are the guest's; the text is only shown to
/// debuggers.
pub fn vmcoreinfo_at(start: &[u8]) -> Option<Range<usize>> {
    let word = |at: usize| Some(u32::from_le_bytes(*start.get(at..)?.first_chunk()?));
    let len = usize::try_from(word(4)?).ok()?;
    let text = start.get(VMCOREINFO_HEADER_BYTES..)?;
    let is_one = usize::try_from(word(0)?).ok()? == VMCOREINFO_NAME.len()
        && word(8)? == NT_NONE
        && start.get(NOTE_HEADER_BYTES..)?.starts_with(VMCOREINFO_NAME)
        && text.starts_with(VMCOREINFO_START)
        && (VMCOREINFO_START.len()..=VMCOREINFO_BYTES_MAX).contains(&len);
    is_one.then_some(VMCOREINFO_HEADER_BYTES..VMCOREINFO_HEADER_BYTES + len)
}

/// Length of a note whose name has up to 12 bytes.
const fn note_len(description_bytes: usize) -> usize {
    NOTE_HEADER_BYTES + 12 + description_bytes.next_multiple_of(4)
}

/// `struct elf_prstatus` of Linux on x86-64. The process number is the vCPU's, from 1.
fn prstatus(index: u32, vcpu: &CoreVcpu) -> Vec<u8> {
    let (r, s) = (&vcpu.regs, &vcpu.sregs);
    let mut out = Out(vec![0; 32]);
    out.u32(index.saturating_add(1));
    out.0.resize(112, 0);
    // In the order of Linux's `struct user_regs_struct`; the 16th is a system call's number.
    for value in [r.r15, r.r14, r.r13, r.r12, r.rbp, r.rbx, r.r11, r.r10, r.r9, r.r8, r.rax, r.rcx]
    {
        out.u64(value);
    }
    for value in [r.rdx, r.rsi, r.rdi, u64::MAX, r.rip, u64::from(s.cs.selector), r.rflags, r.rsp] {
        out.u64(value);
    }
    out.u64(s.ss.selector.into());
    out.u64(s.fs.base);
    out.u64(s.gs.base);
    for segment in [&s.ds, &s.es, &s.fs, &s.gs] {
        out.u64(segment.selector.into());
    }
    out.0.resize(PRSTATUS_BYTES, 0);
    out.0
}

/// Version 1 of the state of a vCPU in QEMU's dumps, from which debuggers read what `NT_PRSTATUS` lacks:
/// control registers and descriptor tables.
fn qemu_state(vcpu: &CoreVcpu) -> Vec<u8> {
    let (r, s) = (&vcpu.regs, &vcpu.sregs);
    let mut out = Out::default();
    out.u32(1);
    out.len(QEMU_STATE_BYTES);
    for value in [r.rax, r.rbx, r.rcx, r.rdx, r.rsi, r.rdi, r.rsp, r.rbp, r.r8, r.r9, r.r10, r.r11]
    {
        out.u64(value);
    }
    for value in [r.r12, r.r13, r.r14, r.r15, r.rip, r.rflags] {
        out.u64(value);
    }
    for segment in [&s.cs, &s.ds, &s.es, &s.fs, &s.gs, &s.ss, &s.ldt, &s.tr] {
        out.segment(segment);
    }
    out.table(&s.gdt);
    out.table(&s.idt);
    for value in [s.cr0, 0, s.cr2, s.cr3, s.cr4, vcpu.kernel_gs_base] {
        out.u64(value);
    }
    out.0
}

/// Bytes being written, little endian.
#[derive(Default)]
struct Out(Vec<u8>);

impl Out {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    /// A length of this module, all of which are small.
    fn len(&mut self, len: usize) {
        self.u32(u32::try_from(len).unwrap_or(u32::MAX));
    }

    fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    fn program_header(&mut self, kind: u32, offset: u64, range: CoreRange) {
        self.u32(kind);
        self.u32(0);
        self.u64(offset);
        self.u64(0);
        self.u64(range.gpa);
        self.u64(range.len_bytes);
        self.u64(if kind == PT_LOAD { range.len_bytes } else { 0 });
        self.u64(0);
    }

    fn note(&mut self, name: &[u8], kind: u32, description: &[u8]) {
        self.len(name.len());
        self.len(description.len());
        self.u32(kind);
        for part in [name, description] {
            self.bytes(part);
            self.0.resize(self.0.len().next_multiple_of(4), 0);
        }
    }

    /// A segment, its attributes as in the second word of a descriptor (SDM volume 3, 3.4.5).
    fn segment(&mut self, s: &kvm_segment) {
        let flags = u32::from(s.type_) << 8
            | u32::from(s.s) << 12
            | u32::from(s.dpl) << 13
            | u32::from(s.present) << 15
            | u32::from(s.avl) << 20
            | u32::from(s.l) << 21
            | u32::from(s.db) << 22
            | u32::from(s.g) << 23;
        self.u32(s.selector.into());
        self.u32(s.limit);
        self.u32(flags);
        self.u32(0);
        self.u64(s.base);
    }

    fn table(&mut self, table: &kvm_dtable) {
        self.u32(0);
        self.u32(table.limit.into());
        self.u64(0);
        self.u64(table.base);
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

    use std::fs;
    use std::process::Command;

    use super::*;

    fn vcpu(base: u64) -> CoreVcpu {
        let regs = kvm_regs {
            rip: base + 1,
            rsp: base + 2,
            r15: base + 3,
            rflags: 2,
            ..Default::default()
        };
        let mut sregs = kvm_sregs { cr3: base + 4, ..Default::default() };
        sregs.cs = kvm_segment {
            selector: 0x10,
            type_: 11,
            s: 1,
            present: 1,
            l: 1,
            g: 1,
            ..Default::default()
        };
        sregs.idt.base = base + 5;
        CoreVcpu { regs, sregs, kernel_gs_base: base + 6 }
    }

    fn file() -> CoreFile {
        let ranges = [(0, 0x8000), (1 << 32, 0x4000)];
        let ranges = ranges.map(|(gpa, len_bytes)| CoreRange { gpa, len_bytes });
        CoreFile::new(ranges.to_vec(), vec![vcpu(0x1000), vcpu(0x2000)])
    }

    fn u64_at(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(*bytes[at..].first_chunk().unwrap())
    }

    #[test]
    fn the_header_fills_the_room_before_memory() {
        let text = vec![b'x'; VMCOREINFO_BYTES_MAX];
        for text in [None, Some(&text[..])] {
            let header = file().header(text);
            assert_eq!(header.len() as u64, file().memory_offset());
            // The second range follows the first in the file.
            assert_eq!(u64_at(&header, 64 + 2 * 56 + 8), file().memory_offset() + 0x8000);
            assert_eq!(u64_at(&header, 64 + 2 * 56 + 24), 1 << 32);
        }
    }

    #[test]
    fn notes_have_the_registers_where_readers_look() {
        let notes = file().notes(Some(b"OSRELEASE=1"));
        let prstatus = note_len(PRSTATUS_BYTES) - 4;
        let second = &notes[prstatus..];
        assert_eq!(&second[12..17], b"CORE\0");
        // `pr_pid` is at 32 of the description, `pr_reg` at 112, `rip` its 17th.
        assert_eq!(second[20 + 32], 2);
        assert_eq!(u64_at(second, 20 + 112), 0x2003);
        assert_eq!(u64_at(second, 20 + 112 + 16 * 8), 0x2001);
        let qemu = &notes[2 * prstatus..];
        assert_eq!(&qemu[12..17], b"QEMU\0");
        assert_eq!(u64_at(qemu, 20 + 8 + 16 * 8), 0x1001);
        // Segments follow 18 registers; `cs` of 64-bit code.
        assert_eq!(&qemu[20 + 152..20 + 164], [0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0x9b, 0xa0, 0]);
        // After eight segments and two tables: `cr3` is the fourth control register.
        assert_eq!(u64_at(qemu, 20 + 152 + 9 * 24 + 16), 0x1005);
        assert_eq!(u64_at(qemu, 20 + 152 + 240 + 24), 0x1004);
        assert_eq!(u64_at(qemu, 20 + QEMU_STATE_BYTES - 8), 0x1006);
        assert!(notes.windows(11).any(|text| text == b"OSRELEASE=1"));
    }

    #[test]
    fn each_register_is_at_its_place() {
        let regs = kvm_regs {
            r15: 0,
            r14: 1,
            r13: 2,
            r12: 3,
            rbp: 4,
            rbx: 5,
            r11: 6,
            r10: 7,
            r9: 8,
            r8: 9,
            rax: 10,
            rcx: 11,
            rdx: 12,
            rsi: 13,
            rdi: 14,
            rip: 16,
            rflags: 18,
            rsp: 19,
        };
        let segment =
            |selector| kvm_segment { selector, base: u64::from(selector), ..Default::default() };
        let sregs = kvm_sregs {
            cs: segment(17),
            ss: segment(20),
            fs: segment(25),
            gs: segment(26),
            ds: segment(23),
            es: segment(24),
            ldt: segment(31),
            tr: segment(32),
            cr0: 33,
            cr2: 35,
            cr3: 36,
            cr4: 37,
            ..Default::default()
        };
        let vcpu = CoreVcpu { regs, sregs, kernel_gs_base: 38 };
        // `struct user_regs_struct`; the bases of `fs` and `gs` come before the selectors, and no system call is
        // in progress.
        let words = |bytes: &[u8]| -> Vec<u64> {
            (0..bytes.len() / 8).map(|at| u64_at(bytes, 8 * at)).collect()
        };
        let expected = [
            (0..15).collect(),
            vec![u64::MAX],
            (16..21).collect(),
            vec![25, 26],
            (23..27).collect(),
        ];
        assert_eq!(words(&prstatus(0, &vcpu)[112..328]), expected.concat());
        let state = qemu_state(&vcpu);
        assert_eq!(
            words(&state[8..152]),
            [10, 5, 11, 12, 13, 14, 19, 4, 9, 8, 7, 6, 3, 2, 1, 0, 16, 18]
        );
        let selectors: Vec<u8> = (0..8).map(|at| state[152 + 24 * at]).collect();
        assert_eq!(selectors, [17, 23, 24, 25, 26, 20, 31, 32]);
        assert_eq!(words(&state[392..440]), [33, 0, 35, 36, 37, 38]);
    }

    #[test]
    fn linux_notes_are_recognised_and_their_length_is_limited() {
        let mut page = Out::default();
        page.note(VMCOREINFO_NAME, 0, b"OSRELEASE=6.12\n");
        let page = page.0;
        assert_eq!(vmcoreinfo_at(&page), Some(24..39));
        for at in (0..4).chain(8..23).chain(24..34) {
            let mut other = page.clone();
            other[at] ^= 1;
            assert_eq!(vmcoreinfo_at(&other), None, "byte {at}");
        }
        for len in [0_u32, 9, 4097, u32::MAX] {
            let mut other = page.clone();
            other[4..8].copy_from_slice(&len.to_le_bytes());
            assert_eq!(vmcoreinfo_at(&other), None, "{len}");
        }
        for len in 0..34 {
            assert_eq!(vmcoreinfo_at(&page[..len]), None);
        }
    }

    #[test]
    fn binutils_reads_it() {
        let path = tempfile::tempdir().unwrap();
        let path = path.path().join("core");
        let mut bytes = file().header(Some(b"OSRELEASE=6.12"));
        bytes.resize(bytes.len() + 0xc000, 0);
        fs::write(&path, bytes).unwrap();
        let Ok(readelf) = Command::new("readelf").args(["-hln", "-W"]).arg(&path).output() else {
            return test_skip::skip!("there is no readelf");
        };
        let text = String::from_utf8_lossy(&readelf.stdout);
        assert!(readelf.stderr.is_empty(), "{}", String::from_utf8_lossy(&readelf.stderr));
        for part in [
            "CORE (Core file)",
            "X86-64",
            "NT_PRSTATUS",
            "QEMU",
            "VMCOREINFO",
            "0x0000000100000000",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
