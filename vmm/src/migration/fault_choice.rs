// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Choice of the fault source for `fault_source=auto`.
//!
//! Owns the rule, a function of what is known of host, memory and guest, and the message that says why no
//! better source is used. Must never query the host, and never fail: `uffd`, where vCPUs wait, always works.

use hypervisor::{CpuidEntry, UserfaultSupport};
use thiserror::Error;

/// CPUID leaf and bit of ECX for VMX.
const VMX: (u32, u32) = (1, 1 << 5);
/// CPUID leaf and bit of ECX for SVM.
const SVM: (u32, u32) = (0x8000_0001, 1 << 2);

/// Facts about host and guest on which the fault source depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostAndGuest {
    /// KVM checks a userfault bitmap before it accesses host memory.
    pub has_bitmap: bool,
    /// KVM uses shadow paging, and so reads the guest's page tables itself.
    pub shadow_paging: bool,
    /// KVM reports the address of a refused access.
    pub says_where: bool,
    /// All memory is shared, so that vCPUs can have a separate mapping.
    pub shared_memory: bool,
    /// The receive request announces postcopy.
    pub expects_postcopy: bool,
    /// The guest may run nested guests.
    pub may_nest: bool,
    /// The guest is shown Hyper-V.
    pub has_hyperv: bool,
}

impl HostAndGuest {
    /// What is known of a host by its KVM, before memory and guest are: the best of them is assumed.
    pub fn of_host(
        patched: Option<UserfaultSupport>,
        shadow_paging: bool,
        expects_postcopy: bool,
    ) -> Self {
        Self {
            has_bitmap: patched.is_some_and(|support| support.slot_flag.is_some()),
            says_where: patched.is_some_and(|support| support.refused_faults),
            shadow_paging,
            shared_memory: true,
            expects_postcopy,
            may_nest: false,
            has_hyperv: false,
        }
    }
}

/// The chosen fault source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// vCPUs exit on accesses to marked pages.
    Exit,
    /// vCPU accesses to missing pages are refused with SIGBUS.
    Sigbus,
    /// All threads wait in userfaultfd.
    Uffd(VcpuFaultsUnavailable),
}

/// Why vCPUs wait for missing pages instead of fetching them.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum VcpuFaultsUnavailable {
    /// KVM would fail to read missing page tables.
    #[error("KVM uses no two-dimensional paging here, so it reads the guest's page tables itself")]
    ShadowPaging,
    /// Refused addresses would have to be traced, and halted vCPUs would have to stay in the guest.
    #[error(
        "this KVM does not report the address of a failed access (fault_source=sigbus traces it, and \
         then an idle vCPU occupies a processor for as long as the VM runs in this process)"
    )]
    NoAddress,
    /// Private memory has only one mapping.
    #[error(
        "the VM has private memory, which cannot be mapped separately for vCPUs (shared=on or \
         hugepages=on memory can)"
    )]
    PrivateMemory,
    /// It has a cost, which is only worth paying for postcopy.
    #[error("receive-migration was not given memory_mode=postcopy or auto")]
    NotExpected,
    /// KVM itself reads the state of nested guests.
    #[error(
        "the guest may run guests of its own, whose state KVM reads itself (--cpus nested=off)"
    )]
    Nesting,
    /// KVM fills pages that the guest names at any time.
    #[error("the guest is shown Hyper-V, whose pages KVM fills itself (--cpus kvm_hyperv=off)")]
    Hyperv,
}

/// Chooses the best fault source that is certain to work.
pub fn choose(known: HostAndGuest) -> Choice {
    let reasons = [
        (known.shadow_paging, VcpuFaultsUnavailable::ShadowPaging),
        (!known.expects_postcopy, VcpuFaultsUnavailable::NotExpected),
        (!known.says_where, VcpuFaultsUnavailable::NoAddress),
        (!known.shared_memory, VcpuFaultsUnavailable::PrivateMemory),
        (known.may_nest, VcpuFaultsUnavailable::Nesting),
        (known.has_hyperv, VcpuFaultsUnavailable::Hyperv),
    ];
    if known.has_bitmap {
        // KVM's own accesses wait, so no restriction applies.
        return Choice::Exit;
    }
    match reasons.iter().find(|(is_there, _)| *is_there) {
        Some((_, reason)) => Choice::Uffd(*reason),
        None => Choice::Sigbus,
    }
}

/// Whether a guest that was shown this CPUID finds Hyper-V.
pub fn has_hyperv(shown: &[CpuidEntry]) -> bool {
    const FIRST_HYPERVISOR: u32 = 0x4000_0000;
    const HYPERV: u32 = u32::from_le_bytes(*b"Micr");
    shown.iter().any(|entry| entry.function == FIRST_HYPERVISOR && entry.answer[1] == HYPERV)
}

/// Whether a guest that was shown this CPUID may run nested guests; true if the CPUID is not known.
pub fn may_nest(shown: &[CpuidEntry]) -> bool {
    let has = |(function, bit): (u32, u32)| {
        shown.iter().any(|entry| {
            let [_, _, ecx, _] = entry.answer;
            entry.function == function && ecx & bit != 0
        })
    };
    shown.is_empty() || has(VMX) || has(SVM)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BEST_WITHOUT_BITMAP: HostAndGuest = HostAndGuest {
        has_bitmap: false,
        shadow_paging: false,
        says_where: true,
        shared_memory: true,
        expects_postcopy: true,
        may_nest: false,
        has_hyperv: false,
    };

    #[test]
    fn hyperv_is_known_by_its_name() {
        let leaf = |function, text: &[u8; 4]| CpuidEntry {
            function,
            answer: [0, u32::from_le_bytes(*text), 0, 0],
            ..CpuidEntry::default()
        };
        assert!(has_hyperv(&[leaf(1, b"Auth"), leaf(0x4000_0000, b"Micr")]));
        assert!(!has_hyperv(&[leaf(0x4000_0000, b"KVMK"), leaf(0x4000_0100, b"Micr")]));
    }

    #[test]
    fn vcpus_are_refused_pages_only_where_nothing_speaks_against_it() {
        let best = BEST_WITHOUT_BITMAP;
        assert_eq!(choose(best), Choice::Sigbus);
        for (known, reason) in [
            (HostAndGuest { shadow_paging: true, ..best }, VcpuFaultsUnavailable::ShadowPaging),
            (HostAndGuest { says_where: false, ..best }, VcpuFaultsUnavailable::NoAddress),
            (HostAndGuest { shared_memory: false, ..best }, VcpuFaultsUnavailable::PrivateMemory),
            (HostAndGuest { expects_postcopy: false, ..best }, VcpuFaultsUnavailable::NotExpected),
            (HostAndGuest { may_nest: true, ..best }, VcpuFaultsUnavailable::Nesting),
            (HostAndGuest { has_hyperv: true, ..best }, VcpuFaultsUnavailable::Hyperv),
        ] {
            assert_eq!(choose(known), Choice::Uffd(reason), "{known:?}");
        }
    }

    proptest! {
        #[test]
        fn marks_are_used_wherever_they_are(flags in any::<[bool; 6]>()) {
            let [shadow_paging, says_where, shared_memory, expects_postcopy, may_nest, has_hyperv] =
                flags;
            let known = HostAndGuest {
                has_bitmap: true,
                shadow_paging,
                says_where,
                shared_memory,
                expects_postcopy,
                may_nest,
                has_hyperv,
            };
            prop_assert_eq!(choose(known), Choice::Exit);
            let without = choose(HostAndGuest { has_bitmap: false, ..known });
            let best = HostAndGuest { has_bitmap: false, ..known } == BEST_WITHOUT_BITMAP;
            prop_assert_eq!(without == Choice::Sigbus, best);
        }
    }

    #[test]
    fn a_guest_that_was_shown_virtualisation_may_nest() {
        let entry =
            |function, ecx| CpuidEntry { function, index: 0, flags: 0, answer: [0, 0, ecx, 0] };
        assert!(may_nest(&[]));
        assert!(may_nest(&[entry(0, 0), entry(1, VMX.1)]));
        assert!(may_nest(&[entry(1, 0), entry(SVM.0, SVM.1 | 1)]));
        assert!(!may_nest(&[entry(1, !VMX.1), entry(SVM.0, !SVM.1), entry(7, u32::MAX)]));
    }
}
