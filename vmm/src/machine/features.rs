// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether a guest's vCPUs can go on with this processor.
//!
//! Owns the comparison of what it was shown with what it would be shown here.

use arch::cpuid::{VmCpuid, cpuid_compat};
use hypervisor::VcpuState;
use kvm_bindings::kvm_cpuid_entry2;

/// Compares the features of a saved vCPU with those of this machine.
///
/// # Errors
/// Everything that is missing, in words.
pub fn check(saved: &VcpuState, here: &VmCpuid) -> Result<(), String> {
    let shown: Vec<kvm_cpuid_entry2> = saved
        .cpuid
        .iter()
        .map(|entry| {
            let [eax, ebx, ecx, edx] = entry.answer;
            let (function, index, flags) = (entry.function, entry.index, entry.flags);
            kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, padding: [0; 3] }
        })
        .collect();
    compare(&shown, here)
}

/// Compares what a guest was shown with what it would be shown here.
///
/// # Errors
/// Everything that is missing, in words.
pub fn compare(shown: &[kvm_cpuid_entry2], here: &VmCpuid) -> Result<(), String> {
    cpuid_compat(shown, here.entries())
        .map_err(|missing| missing.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}
