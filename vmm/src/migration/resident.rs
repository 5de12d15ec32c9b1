// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Pages that must be resident before a vCPU runs whose accesses to missing pages fail.
//!
//! KVM reads some guest memory itself, through the vCPUs' mapping, and a refusal there is no exit:
//! the access fails, silently or as an error of the guest. Owns the list of those pages and brings
//! them in by touching them where accesses wait. State comes from a peer: everything in it is
//! bounded.

use std::collections::BTreeSet;

use hypervisor::{MsrValue, VcpuState};
use kvm_bindings::kvm_sregs;
use memory::{GuestMemory, GuestRam};
use thiserror::Error;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};

const PAGE_BYTES: usize = 4096;
const CR0_PG: u64 = 1 << 31;
const CR4_LA57: u64 = 1 << 12;
const CR4_VMXE: u64 = 1 << 13;
const EFER_LMA: u64 = 1 << 10;
const EFER_SVME: u64 = 1 << 12;
const MSR_ASYNC_PF_EN: u32 = 0x4b56_4d02;
/// Bit of [`MSR_ASYNC_PF_EN`]: the guest takes asynchronous page faults.
const ASYNC_PF_ENABLED: u64 = 1 << 0;

const ENTRY_PRESENT: u64 = 1 << 0;
const ENTRY_LARGE: u64 = 1 << 7;
const ENTRY_ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The shortest interrupt table of 64-bit code with an entry in it, as its limit.
const IDT_LIMIT_MIN: u16 = 15;

/// Page tables that are brought in at most: 1 GiB of them.
const TABLES_MAX: usize = 1 << 18;

/// What KVM cannot do for a vCPU that is refused pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmLimits {
    /// It reads the guest's page tables itself.
    pub shadow_paging: bool,
    /// It makes asynchronous page faults of refused ones, and waits forever.
    pub async_page_faults: bool,
}

/// Why vCPUs of a guest cannot be refused pages.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum NotRefusable {
    /// It runs guests.
    #[error("vCPU {0} runs guests of its own, whose state KVM reads itself: use fault_source=uffd")]
    Nested(usize),
    /// Its page tables change.
    #[error(
        "vCPU {0} runs an operating system, and this KVM, without two-dimensional paging, reads \
         its page tables itself: use fault_source=uffd"
    )]
    ShadowPaging(usize),
    /// Not the page tables of a 64-bit guest.
    #[error("vCPU {0} uses page tables of 32-bit code, or too many: use fault_source=uffd")]
    PageTables(usize),
    /// RAM that is not there.
    #[error("the page tables of vCPU {0} are not in RAM")]
    NotRam(usize),
}

/// Brings in what KVM itself needs of the vCPUs, before it gets their state.
///
/// # Errors
/// The guest is of a kind that cannot do with that.
pub fn bring_in(
    ram: &GuestRam,
    vcpus: &[VcpuState],
    kvm_limits: KvmLimits,
) -> Result<(), NotRefusable> {
    let handle = ram.guest_memory();
    let memory = handle.memory();
    for (index, vcpu) in vcpus.iter().enumerate() {
        check(index, &vcpu.sregs, kvm_limits)?;
        let cr3 = vcpu.sregs.cr3 & ENTRY_ADDRESS;
        for page in vcpu.pages_used_by_kvm().into_iter().chain([cr3]) {
            // Addresses that are not RAM are the guest's mistake, which KVM knows how to take.
            let _ = memory.read_obj::<u8>(GuestAddress(page));
        }
        if kvm_limits.shadow_paging && vcpu.sregs.cr0 & CR0_PG != 0 {
            tables(index, &vcpu.sregs, &memory)?;
        }
    }
    Ok(())
}

fn check(index: usize, sregs: &kvm_sregs, kvm_limits: KvmLimits) -> Result<(), NotRefusable> {
    if sregs.cr4 & CR4_VMXE != 0 || sregs.efer & EFER_SVME != 0 {
        return Err(NotRefusable::Nested(index));
    }
    if kvm_limits.shadow_paging && sregs.idt.base != 0 && sregs.idt.limit >= IDT_LIMIT_MIN {
        return Err(NotRefusable::ShadowPaging(index));
    }
    Ok(())
}

/// Switches asynchronous page faults off in the state of vCPUs; gives what each is to have again when
/// all memory is here, by the vCPU's place in the list.
///
/// A KVM that may make them keeps refused faults for itself, and a vCPU would never return.
pub fn hold_msrs(vcpus: &mut [VcpuState]) -> Vec<(usize, MsrValue)> {
    let mut held = Vec::new();
    for (index, vcpu) in vcpus.iter_mut().enumerate() {
        held.extend(switch_off(&mut vcpu.msrs).map(|msr| (index, msr)));
    }
    held
}

fn switch_off(msrs: &mut [MsrValue]) -> impl Iterator<Item = MsrValue> {
    let enabled =
        |msr: &&mut MsrValue| msr.index == MSR_ASYNC_PF_EN && msr.value & ASYNC_PF_ENABLED != 0;
    msrs.iter_mut().filter(enabled).map(|msr| {
        let before = *msr;
        msr.value &= !ASYNC_PF_ENABLED;
        before
    })
}

/// Reads all page tables that the vCPU uses now.
fn tables(index: usize, sregs: &kvm_sregs, memory: &GuestMemory) -> Result<(), NotRefusable> {
    if sregs.efer & EFER_LMA == 0 {
        return Err(NotRefusable::PageTables(index));
    }
    let top = if sregs.cr4 & CR4_LA57 != 0 { 5_u8 } else { 4 };
    let mut seen = BTreeSet::new();
    let mut next = vec![(top, sregs.cr3 & ENTRY_ADDRESS)];
    while let Some((level, table)) = next.pop() {
        if !seen.insert((level, table)) {
            continue;
        }
        if seen.len() > TABLES_MAX {
            return Err(NotRefusable::PageTables(index));
        }
        let mut bytes = [0_u8; PAGE_BYTES];
        let read = memory.read_slice(&mut bytes, GuestAddress(table));
        match read {
            Ok(()) => {}
            Err(_) if level == top => return Err(NotRefusable::NotRam(index)),
            // An entry may say anything while it is not used.
            Err(_) => continue,
        }
        if level == 1 {
            continue;
        }
        let (entries, _) = bytes.as_chunks::<8>();
        for entry in entries.iter().map(|entry| u64::from_le_bytes(*entry)) {
            let is_table = level > 3 || entry & ENTRY_LARGE == 0;
            if entry & ENTRY_PRESENT != 0 && is_table {
                next.push((level - 1, entry & ENTRY_ADDRESS));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "resident_tests.rs"]
mod tests;
