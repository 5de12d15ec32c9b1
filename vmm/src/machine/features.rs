// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether a guest's vCPUs can continue with this processor.
//!
//! Owns the comparison of what a machine's vCPUs were made to show with what they would be made to
//! show here. What KVM returns of a vCPU is not compared: not every KVM returns what it was
//! told.

use arch::cpuid::{CpuTopology, VmCpuid, cpuid_compat};
use arch::feature_msrs::{feature_msrs_compat, indices, untold_weaknesses};
use hypervisor::{CpuidEntry, MsrValue};
use kvm_bindings::kvm_cpuid_entry2;

/// The CPUID shown to all vCPUs of a machine, in the saved form.
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

/// The CPUID of which [`shown`] is the saved form, for vCPUs that are added to a machine.
pub fn as_shown(saved: &[CpuidEntry], topology: CpuTopology) -> VmCpuid {
    VmCpuid::from_entries(entries(saved), topology)
}

fn entries(saved: &[CpuidEntry]) -> Vec<kvm_cpuid_entry2> {
    let entries = saved.iter().map(|entry| {
        let [eax, ebx, ecx, edx] = entry.answer;
        let (function, index, flags) = (entry.function, entry.index, entry.flags);
        kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, padding: [0; 3] }
    });
    entries.collect()
}

/// Compares the CPUID shown by a saved machine with what this host would show.
///
/// # Errors
/// Lists everything that is missing.
pub fn check(saved: &[CpuidEntry], here: &VmCpuid) -> Result<(), String> {
    let saved = entries(saved);
    cpuid_compat(&saved, here.entries())
        .map_err(|missing| missing.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}

/// The MSRs of a vCPU that describe processor features.
pub fn describing(msrs: &[MsrValue]) -> Vec<MsrValue> {
    let indices = indices();
    msrs.iter().copied().filter(|msr| indices.contains(&msr.index)).collect()
}

/// Compares feature MSRs with those of vCPUs on this host. `shown` is the CPUID that the guest has seen.
///
/// # Errors
/// Lists every mismatch.
pub fn check_msrs(
    saved: &[MsrValue],
    here: &[MsrValue],
    shown: &[CpuidEntry],
) -> Result<(), String> {
    const ECX: usize = 2;
    const EDX: usize = 3;
    let was_shown = |function, register: usize, bit: u32| {
        let leaf = shown.iter().find(|leaf| (leaf.function, leaf.index) == (function, 0));
        leaf.is_some_and(|leaf| leaf.answer[register] >> bit & 1 == 1)
    };
    let nested = was_shown(1, ECX, 5);
    // A guest that was not shown the feature cannot read its MSR.
    let readable = |msr: &&MsrValue| match msr.index {
        0x10a => was_shown(7, EDX, 29),
        0x345 => was_shown(1, ECX, 15),
        _ => true,
    };
    let saved: Vec<MsrValue> = saved.iter().filter(readable).copied().collect();
    let pairs =
        |list: &[MsrValue]| -> Vec<_> { list.iter().map(|msr| (msr.index, msr.value)).collect() };
    let (saved, here) = (pairs(&saved), pairs(here));
    feature_msrs_compat(&saved, &here, nested).map_err(|missing| missing.join(", "))?;
    let can_read = was_shown(7, EDX, 29);
    if let Some(names) = untold_weaknesses(&saved, &here).filter(|_| can_read) {
        log::warn!(
            "this processor has vulnerabilities that were not reported to the guest when it booted: {names}; its \
             kernel mitigates them when it boots again"
        );
    }
    Ok(())
}

/// Whether the guest was shown shadow stacks.
pub fn has_shadow_stacks(shown: &[CpuidEntry]) -> bool {
    const SHSTK: u32 = 1 << 7;
    let features = shown.iter().filter(|leaf| (leaf.function, leaf.index) == (7, 0));
    features.into_iter().any(|leaf| leaf.answer[2] & SHSTK != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_register_counts_for_a_guest_that_was_shown_its_feature() {
        let leaf = |function, ecx, edx| CpuidEntry {
            function,
            index: 0,
            flags: 0,
            answer: [0, 0, ecx, edx],
        };
        let saved = [0x10a, 0x345, 0x48c].map(|index| MsrValue { index, value: 0x20 });
        let missing = |shown: &[CpuidEntry]| {
            let text = check_msrs(&saved, &[], shown).err().unwrap_or_default();
            ["0x10a", "0x345", "0x48c"].map(|index| text.contains(index))
        };
        assert_eq!(missing(&[leaf(1, 0, 0), leaf(7, 0, 0)]), [false; 3]);
        assert_eq!(missing(&[leaf(7, 0, 1 << 29)]), [true, false, false]);
        assert_eq!(missing(&[leaf(1, 1 << 15, 0)]), [false, true, false]);
        assert_eq!(missing(&[leaf(1, 1 << 5, 0)]), [false, false, true]);
    }
}
