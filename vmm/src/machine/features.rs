// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether a guest's vCPUs can go on with this processor.
//!
//! Owns the comparison of what it was made to show with what it would be made to show here. What KVM
//! gives back of a vCPU is not compared: not every KVM gives back what it was told.

use arch::cpuid::{VmCpuid, cpuid_compat};
use hypervisor::CpuidEntry;
use kvm_bindings::kvm_cpuid_entry2;

/// What vCPUs were made to show, in the form that is saved.
pub fn save(promised: &[kvm_cpuid_entry2]) -> Vec<CpuidEntry> {
    let save = |entry: &kvm_cpuid_entry2| CpuidEntry {
        function: entry.function,
        index: entry.index,
        flags: entry.flags,
        answer: [entry.eax, entry.ebx, entry.ecx, entry.edx],
    };
    promised.iter().map(save).collect()
}

/// The same, back from its saved form.
pub fn restore(saved: &[CpuidEntry]) -> Vec<kvm_cpuid_entry2> {
    let restore = |entry: &CpuidEntry| {
        let [eax, ebx, ecx, edx] = entry.answer;
        let (function, index, flags) = (entry.function, entry.index, entry.flags);
        kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, padding: [0; 3] }
    };
    saved.iter().map(restore).collect()
}

/// Compares what a guest was shown with what it would be shown here.
///
/// # Errors
/// Everything that is missing, in words.
pub fn compare(shown: &[kvm_cpuid_entry2], here: &VmCpuid) -> Result<(), String> {
    cpuid_compat(shown, here.entries())
        .map_err(|missing| missing.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}
