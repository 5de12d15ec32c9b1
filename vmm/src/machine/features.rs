// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether a guest's vCPUs can go on with this processor.
//!
//! Owns the comparison of what a machine's vCPUs were made to show with what they would be made to
//! show here. What KVM gives back of a vCPU is not compared: not every KVM gives back what it was
//! told.

use arch::cpuid::{VmCpuid, cpuid_compat};
use hypervisor::CpuidEntry;
use kvm_bindings::kvm_cpuid_entry2;

/// What all vCPUs of a machine are made to show, in the form that is saved.
pub fn shown(cpuid: &VmCpuid) -> Vec<CpuidEntry> {
    cpuid
        .entries()
        .iter()
        .map(|entry| CpuidEntry {
            function: entry.function,
            index: entry.index,
            flags: entry.flags,
            answer: [entry.eax, entry.ebx, entry.ecx, entry.edx],
        })
        .collect()
}

/// Compares what a saved machine showed with what this one would.
///
/// # Errors
/// Everything that is missing, in words.
pub fn check(saved: &[CpuidEntry], here: &VmCpuid) -> Result<(), String> {
    let saved: Vec<kvm_cpuid_entry2> = saved
        .iter()
        .map(|entry| {
            let [eax, ebx, ecx, edx] = entry.answer;
            let (function, index, flags) = (entry.function, entry.index, entry.flags);
            kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, padding: [0; 3] }
        })
        .collect();
    cpuid_compat(&saved, here.entries())
        .map_err(|missing| missing.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}
