// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Initial register state of the boot vCPU.
//!
//! Owns what the two boot protocols say about registers, and the MSRs and local APIC pins that
//! firmware would have set on every vCPU. Other vCPUs wait for INIT and SIPI, so KVM's reset state
//! is right for their general registers. Must never touch guest memory or make an ioctl: the
//! caller sets what is returned here.

use kvm_bindings::{kvm_dtable, kvm_fpu, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};

use crate::layout;

// Segment types (Intel SDM volume 3, section 3.4.5): accessed, as KVM checks on VM entry.
const CODE_EXECUTE_READ: u8 = 0xb;
const DATA_READ_WRITE: u8 = 0x3;
const TSS_BUSY: u8 = 0xb;

// Selectors of the boot GDT, as the 64-bit Linux boot protocol names them.
const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Bit 1 of the flags is always set; interrupts are off.
const RFLAGS_RESERVED: u64 = 2;

// MSR numbers (Intel SDM volume 4).
const MSR_IA32_SYSENTER_CS: u32 = 0x174;
const MSR_IA32_SYSENTER_ESP: u32 = 0x175;
const MSR_IA32_SYSENTER_EIP: u32 = 0x176;
const MSR_IA32_MISC_ENABLE: u32 = 0x1a0;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
const MSR_STAR: u32 = 0xc000_0081;
const MSR_LSTAR: u32 = 0xc000_0082;
const MSR_CSTAR: u32 = 0xc000_0083;
const MSR_SYSCALL_MASK: u32 = 0xc000_0084;
const MSR_KERNEL_GS_BASE: u32 = 0xc000_0102;

const MISC_ENABLE_FAST_STRING: u64 = 1;
const MTRR_ENABLE: u64 = 1 << 11;
const MTRR_WRITE_BACK: u64 = 6;

/// Where the boot vCPU starts, and by which protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootEntry {
    /// 32-bit protected mode, paging off, `ebx` leading to the start info.
    Pvh {
        /// First instruction.
        entry_gpa: u64,
        /// `hvm_start_info`.
        start_info_gpa: u64,
    },
    /// 64-bit mode on identity page tables, `rsi` leading to the zero page.
    Linux64 {
        /// First instruction.
        entry_gpa: u64,
        /// `struct boot_params`.
        zero_page_gpa: u64,
        /// Root of the page tables, for CR3.
        page_table_gpa: u64,
    },
}

/// General registers of the boot vCPU.
pub fn boot_regs(entry: &BootEntry) -> kvm_regs {
    let common = kvm_regs { rflags: RFLAGS_RESERVED, ..kvm_regs::default() };
    match *entry {
        BootEntry::Pvh { entry_gpa, start_info_gpa } => {
            kvm_regs { rip: entry_gpa, rbx: start_info_gpa, ..common }
        }
        BootEntry::Linux64 { entry_gpa, zero_page_gpa, .. } => kvm_regs {
            rip: entry_gpa,
            rsi: zero_page_gpa,
            rsp: layout::BOOT_STACK_GPA,
            rbp: layout::BOOT_STACK_GPA,
            ..common
        },
    }
}

/// Segments and control registers of the boot vCPU. `current` is what KVM reports for the fresh
/// vCPU; what a boot protocol leaves open (the APIC base) is kept from it.
pub fn boot_sregs(entry: &BootEntry, current: &kvm_sregs) -> kvm_sregs {
    let long_mode = matches!(entry, BootEntry::Linux64 { .. });
    let data = flat_segment(DATA_SELECTOR, DATA_READ_WRITE, false);
    let mut sregs = kvm_sregs {
        cs: flat_segment(CODE_SELECTOR, CODE_EXECUTE_READ, long_mode),
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        tr: task_segment(),
        gdt: table(layout::BOOT_GDT_GPA, 4 * 8 - 1),
        idt: table(layout::BOOT_IDT_GPA, 7),
        cr0: CR0_PE | CR0_ET,
        cr4: 0,
        efer: 0,
        ..*current
    };
    if let BootEntry::Linux64 { page_table_gpa, .. } = *entry {
        sregs.cr3 = page_table_gpa;
        sregs.cr4 = CR4_PAE;
        sregs.cr0 |= CR0_PG;
        sregs.efer = EFER_LME | EFER_LMA;
    }
    sregs
}

/// The floating-point unit as after FNINIT, SSE exceptions masked.
pub fn boot_fpu() -> kvm_fpu {
    kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..kvm_fpu::default() }
}

/// MSRs that every vCPU starts with, as firmware would leave them: a guest takes those of the vCPU that
/// boots for those of all. Time stamp counters are not among them: KVM starts those of one VM together,
/// and a write would only disturb that.
pub fn boot_msrs() -> Vec<kvm_msr_entry> {
    let values = [
        (MSR_IA32_SYSENTER_CS, 0),
        (MSR_IA32_SYSENTER_ESP, 0),
        (MSR_IA32_SYSENTER_EIP, 0),
        (MSR_STAR, 0),
        (MSR_CSTAR, 0),
        (MSR_KERNEL_GS_BASE, 0),
        (MSR_SYSCALL_MASK, 0),
        (MSR_LSTAR, 0),
        // Without this a guest that trusts its MTRRs runs uncached.
        (MSR_MTRR_DEF_TYPE, MTRR_ENABLE | MTRR_WRITE_BACK),
    ];
    values
        .into_iter()
        .map(|(index, data)| kvm_msr_entry { index, data, ..kvm_msr_entry::default() })
        .collect()
}

/// Bits that every vCPU has set in an MSR besides those that KVM has set, which say what its processor
/// lacks (branch trace store, precise event-based sampling).
pub const BOOT_MSR_BITS: (u32, u64) = (MSR_IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING);

/// The GDT that goes with [`boot_sregs`], for guests that reload a segment before they have one of
/// their own. The code entry is 64-bit code in long mode and flat 32-bit code otherwise.
pub(crate) fn boot_gdt_bytes(entry: &BootEntry) -> [u8; 32] {
    let long_mode = matches!(entry, BootEntry::Linux64 { .. });
    let mut bytes = [0; 32];
    bytes[16..24].copy_from_slice(
        &descriptor(&flat_segment(CODE_SELECTOR, CODE_EXECUTE_READ, long_mode)).to_le_bytes(),
    );
    bytes[24..32].copy_from_slice(
        &descriptor(&flat_segment(DATA_SELECTOR, DATA_READ_WRITE, false)).to_le_bytes(),
    );
    bytes
}

fn flat_segment(selector: u16, type_: u8, long_mode: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl: 0,
        // In 64-bit code the default operand size bit must be clear.
        db: u8::from(!long_mode),
        s: 1,
        l: u8::from(long_mode),
        g: 1,
        ..kvm_segment::default()
    }
}

/// VM entry insists on a busy task segment although it is not used.
fn task_segment() -> kvm_segment {
    kvm_segment { limit: 0x67, type_: TSS_BUSY, present: 1, ..kvm_segment::default() }
}

fn table(base: u64, limit: u16) -> kvm_dtable {
    kvm_dtable { base, limit, ..kvm_dtable::default() }
}

/// The descriptor of a segment with base 0 (Intel SDM volume 3, figure 3-8).
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(if segment.g == 1 { segment.limit >> 12 } else { segment.limit });
    let access = u64::from(segment.type_)
        | u64::from(segment.s) << 4
        | u64::from(segment.dpl) << 5
        | u64::from(segment.present) << 7;
    let flags = u64::from(segment.l) << 1 | u64::from(segment.db) << 2 | u64::from(segment.g) << 3;
    (limit & 0xffff) | access << 40 | ((limit >> 16) & 0xf) << 48 | flags << 52
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    const PVH: BootEntry = BootEntry::Pvh { entry_gpa: 0x100_0000, start_info_gpa: 0x6000 };
    const LINUX: BootEntry =
        BootEntry::Linux64 { entry_gpa: 0x100_0200, zero_page_gpa: 0x7000, page_table_gpa: 0x9000 };

    #[test]
    fn pvh_starts_in_flat_protected_mode() {
        let current = kvm_sregs { apic_base: 0xfee0_0900, ..kvm_sregs::default() };
        let sregs = boot_sregs(&PVH, &current);
        assert_eq!(sregs.cr0 & (CR0_PE | CR0_PG), CR0_PE);
        assert_eq!((sregs.cr4, sregs.efer, sregs.cr3), (0, 0, 0));
        assert_eq!((sregs.cs.db, sregs.cs.l, sregs.cs.limit), (1, 0, u32::MAX));
        assert_eq!((sregs.tr.limit, sregs.tr.type_), (0x67, 0xb));
        assert_eq!(sregs.apic_base, current.apic_base);
        let regs = boot_regs(&PVH);
        assert_eq!((regs.rip, regs.rbx, regs.rflags), (0x100_0000, 0x6000, 2));
    }

    #[test]
    fn linux_starts_in_long_mode() {
        let sregs = boot_sregs(&LINUX, &kvm_sregs::default());
        assert_eq!(sregs.cr0 & (CR0_PE | CR0_PG), CR0_PE | CR0_PG);
        assert_eq!((sregs.cr4, sregs.efer, sregs.cr3), (CR4_PAE, 0x500, 0x9000));
        assert_eq!((sregs.cs.selector, sregs.cs.db, sregs.cs.l), (0x10, 0, 1));
        assert_eq!(sregs.ds.selector, 0x18);
        let regs = boot_regs(&LINUX);
        assert_eq!((regs.rip, regs.rsi), (0x100_0200, 0x7000));
    }

    #[test]
    fn gdt_has_the_segments_in_use() {
        let entry =
            |gdt: [u8; 32], at: usize| u64::from_le_bytes(gdt[at..at + 8].try_into().unwrap());
        let gdt = boot_gdt_bytes(&PVH);
        assert_eq!(entry(gdt, 0), 0);
        assert_eq!(entry(gdt, 0x10), 0x00cf_9b00_0000_ffff);
        assert_eq!(entry(gdt, 0x18), 0x00cf_9300_0000_ffff);
        assert_eq!(entry(boot_gdt_bytes(&LINUX), 0x10), 0x00af_9b00_0000_ffff);
    }

    #[test]
    fn mtrr_default_is_write_back() {
        let msrs = boot_msrs();
        let mtrr = msrs.iter().find(|msr| msr.index == MSR_MTRR_DEF_TYPE).unwrap();
        assert_eq!(mtrr.data, 0x806);
    }
}
