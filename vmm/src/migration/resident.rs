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
/// Bit of [`MSR_ASYNC_PF_EN`]: the guest enables asynchronous page faults.
const ASYNC_PF_ENABLED: u64 = 1 << 0;

const ENTRY_PRESENT: u64 = 1 << 0;
const ENTRY_LARGE: u64 = 1 << 7;
const ENTRY_ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Limit of the shortest IDT of 64-bit code with an entry in it.
const IDT_LIMIT_MIN: u16 = 15;

/// Maximum number of page tables that are fetched: 1 GiB of them.
const TABLES_MAX: usize = 1 << 18;

/// What KVM cannot do for a vCPU whose accesses are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmLimits {
    /// KVM uses shadow paging, and so reads the guest's page tables itself.
    pub shadow_paging: bool,
    /// KVM turns refusals into asynchronous page faults, and waits forever.
    pub async_page_faults: bool,
}

/// Why a guest's vCPU accesses cannot be refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum NotRefusable {
    /// A vCPU runs nested guests.
    #[error("vCPU {0} runs guests of its own, whose state KVM reads itself: use fault_source=uffd")]
    Nested(usize),
    /// KVM reads page tables that the guest changes.
    #[error(
        "vCPU {0} runs an operating system, and this KVM, without two-dimensional paging, reads \
         its page tables itself: use fault_source=uffd"
    )]
    ShadowPaging(usize),
    /// A vCPU does not use 64-bit page tables.
    #[error("vCPU {0} uses page tables of 32-bit code, or too many: use fault_source=uffd")]
    PageTables(usize),
    /// A vCPU's page table is not in RAM.
    #[error("the page tables of vCPU {0} are not in RAM")]
    NotRam(usize),
}

/// Fetches the pages that KVM itself accesses for the vCPUs, before it gets their state.
///
/// # Errors
/// The guest needs more than that.
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
            // Addresses outside RAM are errors of the guest, which KVM handles.
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

/// Disables asynchronous page faults in the state of vCPUs. Returns the MSRs to set once all memory is
/// resident, by index of the vCPU in the list.
///
/// A KVM with asynchronous page faults would keep refusals to itself, and the vCPU would never exit.
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

/// Reads all page tables that the vCPU currently uses.
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
            // An entry that is not in use may hold anything.
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
