// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a platform decides about CPUID, beyond what the host and the options do.
//!
//! Owns the form of these rules. Must never know a platform by its name.

/// The vCPUs that the topology leaves count if no topology is configured. APIC ids are the same in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlatCount {
    /// All that there may ever be.
    Possible,
    /// Those that the guest boots with.
    AtBoot,
}

/// When the hypervisor's timing leaf is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimingLeaf {
    /// Whenever the frequency is known.
    Always,
    /// If the TSC is invariant, and KVM's leaves are shown.
    InvariantTsc,
}

/// The rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuidRules {
    /// vCPUs that topology leaves count.
    pub flat_count: FlatCount,
    /// The number of address bits is in the guest's field too (leaf 0x80000008, EAX bits 23 to 16).
    pub guest_address_bits: bool,
    /// When the timing leaf is shown.
    pub timing_leaf: TimingLeaf,
    /// The extended destination id of messages is shown; routes have to translate it.
    pub msi_ext_dest_id: bool,
}

/// The rules for this program's own guests.
pub const GODWIT_CPUID: CpuidRules = CpuidRules {
    flat_count: FlatCount::Possible,
    guest_address_bits: false,
    timing_leaf: TimingLeaf::Always,
    msi_ext_dest_id: false,
};
