// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vCPUs: structures of the kernel as their bytes, the local APIC in the format that v53 sets, and the CPUID by which it
//! compares hosts.
//!
//! Owns what is refused because v53 saves no such register: what is in use must not be lost.

use std::ops::RangeInclusive;

use cloud_hypervisor_state::{
    CpuidEntry as TheirEntry, Fixed, Fpu, KvmVcpu, Lapic, List, Msr, Structure, Vcpu, Xsave,
};
use hypervisor::{CpuidEntry, VcpuState};
use kvm_bindings::{KVM_VCPUEVENT_VALID_TRIPLE_FAULT, kvm_vcpu_events};
use serde::Serialize;

use super::error::{ExportError, ensure, fits};
use crate::adopt::ReadGuest;

const IA32_TSC: u32 = 0x10;
/// Mode bit of the local APIC's base address, and the register with the id.
const X2APIC: u64 = 1 << 10;
const APIC_ID: usize = 0x20;
const LAPIC_BYTES: usize = 1024;
/// Debug registers at reset, and the bits of DR7 that make a breakpoint work.
const DR6: u64 = 0xffff_0ff0;
const DR7_ENABLED: u64 = 0xff;
const DR7_AT_RESET: u64 = 0x400;
const XSAVE_REGION_BYTES: usize = 4096;
const WORD: usize = 4;
/// Longest area that a document can have: 60 KiB beyond the first part.
const XSAVE_BYTES_MAX: usize = XSAVE_REGION_BYTES + (60 << 10);
/// MSRs that KVM sets at once, which is how they are set there.
const MSRS_MAX: usize = 255;
/// Banks of machine checks, which v53 does not save itself.
const MACHINE_CHECKS: RangeInclusive<u32> = 0x400..=0x47f;
/// Configuration and count of each timer of Hyper-V, in turn.
const HYPERV_TIMERS: RangeInclusive<u32> = 0x4000_00b0..=0x4000_00b7;
const NESTED_HEADER_BYTES: usize = 128;
const NESTED_BYTES: usize = 8320;
/// Control registers and EFER: paging with page directory pointers.
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LMA: u64 = 1 << 10;
const PDPTRS_ALIGN: u64 = 32;

const LEAF_FEATURES: u32 = 1;
const LEAF_EXTENDED_FEATURES: u32 = 7;
const LEAF_XSAVE: u32 = 0xd;
const LEAF_KVM: u32 = 0x4000_0000;
const LEAF_KVM_FEATURES: u32 = 0x4000_0001;
const LEAF_TIMING: u32 = 0x4000_0010;
const LEAF_AMD_FEATURES: u32 = 0x8000_0001;
const LEAF_AMD_SIZES: u32 = 0x8000_0008;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;
/// Leaves with the topology, of which only the first sub-leaf is there before a vCPU is made.
const TOPOLOGY: [u32; 2] = [0xb, 0x1f];
const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;
/// Bits that are there for a vCPU only: number of logical processors and APIC id, OSXSAVE, HTT; OSPKE; compatibility and
/// topology of AMD, its number of cores; its ids.
const BITS_OF_VCPUS: [(u32, usize, u32); 9] = [
    (LEAF_FEATURES, EBX, 0xffff_0000),
    (LEAF_FEATURES, ECX, 1 << 27),
    (LEAF_FEATURES, EDX, 1 << 28),
    (LEAF_EXTENDED_FEATURES, ECX, 1 << 4),
    (LEAF_AMD_FEATURES, ECX, 1 << 1 | 1 << 22),
    (LEAF_AMD_SIZES, ECX, u32::MAX),
    (LEAF_AMD_TOPOLOGY, EAX, u32::MAX),
    (LEAF_AMD_TOPOLOGY, EBX, u32::MAX),
    (LEAF_AMD_TOPOLOGY, ECX, u32::MAX),
];

/// The state of a vCPU; what it loses is added to `losses`. `hyperv` is whether it has the registers of Hyper-V, which KVM
/// only accepts there if the document says so.
///
/// # Errors
/// A register is in use that is not saved there.
pub fn convert(
    index: usize,
    vcpu: &VcpuState,
    hyperv: bool,
    guest: &dyn ReadGuest,
    losses: &mut Vec<String>,
) -> Result<Vcpu, ExportError> {
    let source = Source { index, vcpu };
    source.check(guest, losses)?;
    let mut cpuid = Vec::new();
    cpuid.extend(vcpu.cpuid.iter().map(entry));
    let mut events = vcpu.events;
    // Not pending, and without a meaning there: KVM would refuse it.
    events.flags &= !KVM_VCPUEVENT_VALID_TRIPLE_FAULT;
    let (fpu, xsave) = source.floating_point()?;
    Ok(Vcpu::Kvm(Box::new(KvmVcpu {
        cpuid: fits(List::try_from(cpuid), || source.what())?,
        msrs: source.msrs(losses)?,
        vcpu_events: source.structure(&events)?,
        regs: source.structure(&vcpu.regs)?,
        sregs: source.structure(&vcpu.sregs)?,
        fpu,
        lapic_state: source.lapic()?,
        xsave,
        xcrs: source.structure(&vcpu.xcrs)?,
        mp_state: Structure::from(vcpu.mp_state.to_le_bytes()),
        tsc_khz: vcpu.tsc.khz,
        nested_state: source.nested()?,
        hyperv_synic: hyperv,
    })))
}

/// A vCPU that is converted.
struct Source<'a> {
    index: usize,
    vcpu: &'a VcpuState,
}

impl Source<'_> {
    fn what(&self) -> String {
        format!("vCPU {}", self.index)
    }

    /// Refuses what would be lost, and says what is.
    fn check(&self, guest: &dyn ReadGuest, losses: &mut Vec<String>) -> Result<(), ExportError> {
        let VcpuState { debugregs, ssp, events, .. } = self.vcpu;
        let what = || self.what();
        let enabled = debugregs.dr7 & DR7_ENABLED;
        let problem = || format!("breakpoints are in use (DR7 {:#x})", debugregs.dr7);
        ensure(enabled == 0, what, problem)?;
        let is_at_reset = debugregs.dr7 & !DR7_AT_RESET == 0 && debugregs.dr6 == DR6;
        if debugregs.db != [0; 4] || !is_at_reset {
            let index = self.index;
            losses.push(format!("vCPU {index} loses its debug registers: no breakpoint is in use"));
        }
        let uses_ssp = ssp.is_some_and(|ssp| ssp != 0);
        ensure(!uses_ssp, what, || "its shadow stack is in use".to_owned())?;
        let is_lost = has_triple_fault(events);
        ensure(!is_lost, what, || "a triple fault waits for it".to_owned())?;
        self.check_page_directory(guest)
    }

    /// The page directory pointers of PAE paging are read from memory there: they have to be those that the vCPU has.
    fn check_page_directory(&self, guest: &dyn ReadGuest) -> Result<(), ExportError> {
        let sregs = &self.vcpu.sregs;
        let is_pae =
            sregs.cr0 & CR0_PG != 0 && sregs.cr4 & CR4_PAE != 0 && sregs.efer & EFER_LMA == 0;
        let Some(loaded) = self.vcpu.pdptrs.filter(|_| is_pae) else { return Ok(()) };
        let first = sregs.cr3 / PDPTRS_ALIGN * PDPTRS_ALIGN;
        for (pointer, at) in loaded.into_iter().zip((0_u64..).map(|index| index * 8)) {
            let mut found = 0_u64;
            for part in 0..4 {
                let gpa = first.saturating_add(at).saturating_add(part * 2);
                let failed = |source| ExportError::Guest { what: self.what(), gpa, source };
                let word = guest.read_u16(gpa).map_err(failed)?;
                found |= u64::from(word) << (part * 16);
            }
            let problem = || "memory has other page directory pointers than it has".to_owned();
            ensure(found == pointer, || self.what(), problem)?;
        }
        Ok(())
    }

    /// The bytes of a structure of the kernel.
    fn structure<T: Serialize, const BYTES: usize>(
        &self,
        structure: &T,
    ) -> Result<Structure<BYTES>, ExportError> {
        let bytes: Vec<u8> = serde_json::from_value(serde_json::to_value(structure)?)?;
        let found = bytes.len();
        let problem = |_| ExportError::refused(self.what(), format!("{found} bytes of {BYTES}"));
        <[u8; BYTES]>::try_from(bytes).map(Structure::from).map_err(problem)
    }

    fn leaf(&self, function: u32) -> Option<&CpuidEntry> {
        self.vcpu.cpuid.iter().find(|entry| (entry.function, entry.index) == (function, 0))
    }

    /// The XSAVE area, as long as it can be on its host, and the registers that are in its first part once more.
    fn floating_point(&self) -> Result<(Fpu, Xsave), ExportError> {
        let used = self.vcpu.xsave.bytes();
        let longest = self.leaf(LEAF_XSAVE).map_or(0, |entry| entry.answer[ECX]);
        let longest = usize::try_from(longest).unwrap_or(usize::MAX);
        let problem = || format!("its CPUID says an XSAVE area of {longest} bytes");
        ensure(longest <= XSAVE_BYTES_MAX, || self.what(), problem)?;
        let len = longest.max(used.len()).max(XSAVE_REGION_BYTES).next_multiple_of(WORD);
        let mut bytes = vec![0; len];
        fits(self.vcpu.xsave.fill(&mut bytes), || self.what())?;
        let words = bytes
            .chunks_exact(WORD)
            .map(|word| u32::from_le_bytes(word.first_chunk().copied().unwrap_or_default()));
        let mut region = [0; XSAVE_REGION_BYTES / WORD];
        region.iter_mut().zip(words.clone()).for_each(|(to, from)| *to = from);
        let extra: Vec<u32> = words.skip(region.len()).collect();
        let xsave = Xsave {
            region: Fixed::from(region),
            extra: fits(List::try_from(extra), || self.what())?,
        };
        Ok((fpu(&bytes), xsave))
    }

    /// The register page, with the id in the upper byte of its register if the vCPU is in x2APIC mode: v53 enables the
    /// wide format for more vCPUs only than a machine here can have.
    fn lapic(&self) -> Result<Lapic, ExportError> {
        let mut bytes = [0; LAPIC_BYTES];
        fits(self.vcpu.lapic.fill(&mut bytes), || self.what())?;
        if self.vcpu.sregs.apic_base & X2APIC != 0
            && let Some(register) = bytes.get_mut(APIC_ID..).and_then(<[u8]>::first_chunk_mut)
        {
            let id = u32::from_le_bytes(*register);
            let problem = || format!("its APIC id {id:#x} is too large");
            ensure(id <= 0xff, || self.what(), problem)?;
            *register = (id << 24).to_le_bytes();
        }
        Ok(Lapic { regs: Fixed::from(bytes.map(u8::cast_signed)) })
    }

    /// All MSRs, the TSC among them, by their index; but a timer of Hyper-V has its count before its configuration, as a count
    /// may enable it. Where there are more than KVM sets at once, those of machine checks are left out.
    fn msrs<const MAX: usize>(
        &self,
        losses: &mut Vec<String>,
    ) -> Result<List<Msr, MAX>, ExportError> {
        let all = self.vcpu.msrs.iter().filter(|msr| msr.index != IA32_TSC);
        let mut msrs: Vec<_> = all.map(|msr| Msr { index: msr.index, data: msr.value }).collect();
        msrs.push(Msr { index: IA32_TSC, data: self.vcpu.tsc.value });
        if msrs.len() > MSRS_MAX {
            msrs.retain(|msr| !MACHINE_CHECKS.contains(&msr.index));
            losses.push(format!("vCPU {} loses its banks of machine checks", self.index));
        }
        let found = msrs.len();
        let problem = || format!("it has {found} MSRs, and {MSRS_MAX} can be set there");
        ensure(found <= MSRS_MAX, || self.what(), problem)?;
        msrs.sort_by_key(|msr| msr.index ^ u32::from(HYPERV_TIMERS.contains(&msr.index)));
        fits(List::try_from(msrs), || self.what())
    }

    /// The state of nested guests. One that is a header alone is not written: v53 has none then, and sets none.
    fn nested(&self) -> Result<Option<Structure<NESTED_BYTES>>, ExportError> {
        /// Where things are in the kernel's structure.
        const LENGTH: usize = 4;
        let Some(nested) = &self.vcpu.nested else { return Ok(None) };
        let mut buffer = [0; NESTED_BYTES];
        fits(nested.fill(&mut buffer), || self.what())?;
        let len = buffer.get(LENGTH..).and_then(<[u8]>::first_chunk).copied();
        let len = usize::try_from(len.map_or(0, u32::from_le_bytes)).unwrap_or(usize::MAX);
        let problem = || format!("its state of nested guests has {len} bytes");
        ensure(len <= NESTED_BYTES, || self.what(), problem)?;
        if len > NESTED_HEADER_BYTES {
            return Ok(Some(Structure::from(buffer)));
        }
        let problem = || {
            "it is ready to run nested guests and runs none (a hypervisor is loaded in the guest), for which \
             cloud-hypervisor 53 has no state"
                .to_owned()
        };
        ensure(is_idle(&buffer), || self.what(), problem)?;
        Ok(None)
    }
}

/// Whether a state of nested guests that is a header alone says nothing: a vCPU not in VMX operation, or one of SVM whose
/// global interrupt flag is set.
fn is_idle(header: &[u8]) -> bool {
    const FORMAT: usize = 2;
    const VMXON: usize = 8;
    const VMX: u16 = 0;
    const SVM: u16 = 1;
    const GIF_SET: u16 = 1 << 8;
    let half = |at: usize| {
        let found = header.get(at..).and_then(<[u8]>::first_chunk).copied();
        u16::from_le_bytes(found.unwrap_or_default())
    };
    let vmxon = header.get(VMXON..).and_then(<[u8]>::first_chunk).copied();
    match half(FORMAT) {
        VMX => vmxon.map(u64::from_le_bytes) == Some(u64::MAX),
        SVM => half(0) & GIF_SET != 0,
        _ => false,
    }
}

fn has_triple_fault(events: &kvm_vcpu_events) -> bool {
    events.flags & KVM_VCPUEVENT_VALID_TRIPLE_FAULT != 0 && events.triple_fault.pending != 0
}

/// The registers of the first 512 bytes of an XSAVE area. KVM does not say MXCSR with them.
fn fpu(xsave: &[u8]) -> Fpu {
    const ST: usize = 32;
    const XMM: usize = 160;
    fn number<const BYTES: usize>(xsave: &[u8], at: usize) -> [u8; BYTES] {
        xsave.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; BYTES])
    }
    let register = |first: usize| {
        move |index: usize| {
            Fixed::from(number(xsave, first.saturating_add(index.saturating_mul(16))))
        }
    };
    Fpu {
        fpr: Fixed::from(std::array::from_fn(register(ST))),
        fcw: u16::from_le_bytes(number(xsave, 0)),
        fsw: u16::from_le_bytes(number(xsave, 2)),
        ftwx: u8::from_le_bytes(number(xsave, 4)),
        last_opcode: u16::from_le_bytes(number(xsave, 6)),
        last_ip: u64::from_le_bytes(number(xsave, 8)),
        last_dp: u64::from_le_bytes(number(xsave, 16)),
        xmm: Fixed::from(std::array::from_fn(register(XMM))),
        mxcsr: 0,
    }
}

fn entry(entry: &CpuidEntry) -> TheirEntry {
    let CpuidEntry { function, index, flags, answer: [eax, ebx, ecx, edx] } = *entry;
    TheirEntry { function, index, flags, eax, ebx, ecx, edx }
}

/// The CPUID by which v53 compares hosts, from what all vCPUs were shown: without what a vCPU adds. What it does not
/// compare may differ from what it makes itself.
///
/// # Errors
/// There are more entries than a document can have.
pub fn common<const MAX: usize>(
    shown: &[CpuidEntry],
) -> Result<List<TheirEntry, MAX>, ExportError> {
    let last = shown.iter().find(|leaf| leaf.function == 0).map_or(0, |leaf| leaf.answer[EAX]);
    let mut entries = Vec::new();
    for leaf in shown {
        let is_beyond = leaf.index > 0 || leaf.function > last;
        let is_of_vcpu = TOPOLOGY.contains(&leaf.function) && is_beyond;
        if is_of_vcpu || leaf.function == LEAF_TIMING {
            continue;
        }
        let mut leaf = *leaf;
        if TOPOLOGY.contains(&leaf.function) {
            leaf.answer = [0; 4];
        }
        if leaf.function == LEAF_KVM {
            leaf.answer[EAX] = LEAF_KVM_FEATURES;
        }
        for (_, register, bits) in BITS_OF_VCPUS.iter().filter(|it| it.0 == leaf.function) {
            if let Some(value) = leaf.answer.get_mut(*register) {
                *value &= !bits;
            }
        }
        entries.push(entry(&leaf));
    }
    fits(List::try_from(entries), || "CPUID".to_owned())
}
