// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Registers that describe the processor to its guest, beside CPUID.
//!
//! Owns which ones they are and what each may lose on the way to another host: the rules are those by which
//! KVM takes or refuses a value for a vCPU, so that a refusal comes before a guest has stopped for it. A
//! register that is not named here is left to KVM.

const ARCH_CAPABILITIES: u32 = 0x10a;
const PERF_CAPABILITIES: u32 = 0x345;
const VMX_BASIC: u32 = 0x480;
const VMX_MISC: u32 = 0x485;

/// How a value of one host is judged on another.
#[derive(Clone, Copy)]
enum Rule {
    /// Each set bit is a promise.
    Promises,
    /// Bits 31:0 must be one where they are set, bits 63:32 may be one where they are set.
    Controls,
    /// A set bit must be one.
    Required,
    /// The bits of this mask are a number or a kind; all others are promises.
    Same(u64),
}

/// VMX: only for guests that were shown it.
const VMX: [(u32, &str, Rule); 15] = [
    // Revision, memory type.
    (VMX_BASIC, "VMX", Rule::Same(0x003c_0000_7fff_ffff)),
    (0x481, "VMX pin-based controls", Rule::Controls),
    (0x482, "VMX processor-based controls", Rule::Controls),
    (0x483, "VMX exit controls", Rule::Controls),
    (0x484, "VMX entry controls", Rule::Controls),
    // Rate of the preemption timer.
    (VMX_MISC, "VMX miscellaneous data", Rule::Same(0x1f)),
    (0x486, "VMX fixed bits of CR0", Rule::Required),
    (0x488, "VMX fixed bits of CR4", Rule::Required),
    (0x48b, "VMX secondary controls", Rule::Controls),
    (0x48c, "VMX EPT and VPID", Rule::Promises),
    (0x48d, "VMX true pin-based controls", Rule::Controls),
    (0x48e, "VMX true processor-based controls", Rule::Controls),
    (0x48f, "VMX true exit controls", Rule::Controls),
    (0x490, "VMX true entry controls", Rule::Controls),
    (0x491, "VMX functions", Rule::Promises),
];

const OTHERS: [(u32, &str, Rule); 2] = [
    (ARCH_CAPABILITIES, "architectural capabilities", Rule::Promises),
    // The format of branch records.
    (PERF_CAPABILITIES, "performance monitoring", Rule::Same(0x3f)),
];

/// Numbers of all registers that are compared.
pub fn indices() -> Vec<u32> {
    OTHERS.iter().chain(&VMX).map(|(index, ..)| *index).collect()
}

impl Rule {
    /// Bits of `guest` that `host` cannot keep.
    fn lost(self, guest: u64, host: u64) -> u64 {
        const LOW: u64 = 0xffff_ffff;
        match self {
            Self::Promises => guest & !host,
            Self::Required => host & !guest,
            Self::Controls => (guest & !host & !LOW) | (host & !guest & LOW),
            Self::Same(mask) => ((guest ^ host) & mask) | (guest & !host & !mask),
        }
    }
}

/// Compares the registers of a guest, as numbers and values, with what this host has for one.
/// `nested` says whether the guest was shown VMX.
///
/// # Errors
/// Each that does not fit, in words. A register that the guest has as zero promises nothing.
pub fn feature_msrs_compat(
    guest: &[(u32, u64)],
    host: &[(u32, u64)],
    nested: bool,
) -> Result<(), Vec<String>> {
    let value = |list: &[(u32, u64)], wanted| {
        list.iter().find(|(index, _)| *index == wanted).map_or(0, |(_, value)| *value)
    };
    let rules = OTHERS.iter().chain(VMX.iter().filter(|_| nested));
    let missing: Vec<String> = rules
        .filter_map(|&(index, name, rule)| {
            let (there, here) = (value(guest, index), value(host, index));
            let lost = if there == 0 { 0 } else { rule.lost(there, here) };
            (lost != 0).then(|| {
                format!("{name} (MSR {index:#x}: {there:#x}, there {here:#x}, bits {lost:#x})")
            })
        })
        .collect();
    if missing.is_empty() { Ok(()) } else { Err(missing) }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    #[test]
    fn promises_controls_and_numbers_are_judged_each_by_its_rule() {
        assert_eq!(Rule::Promises.lost(0b101, 0b100), 0b001);
        assert_eq!(Rule::Promises.lost(0b100, 0b111), 0);
        assert_eq!(Rule::Required.lost(0b100, 0b110), 0b010);
        // What must be one here and may be zero there; what may be one there and not here.
        assert_eq!(Rule::Controls.lost(0x2_0000_0001, 0x1_0000_0003), 0x2_0000_0002);
        assert_eq!(Rule::Controls.lost(0x1_0000_0003, 0x3_0000_0001), 0);
        assert_eq!(Rule::Same(0xf).lost(0x15, 0x16), 0x3);
        assert_eq!(Rule::Same(0xf).lost(0x25, 0x15), 0x20);
        assert_eq!(Rule::Same(0xf).lost(0x05, 0x35), 0);
    }

    #[test]
    fn what_is_lost_is_named_with_both_values() {
        let guest = [(0x345, 0x2000), (0x10a, 1 << 30 | 2), (0x48c, 0xff)];
        assert_eq!(feature_msrs_compat(&guest, &guest, true), Ok(()));
        let host = [(0x345, 0), (0x10a, 2), (0x48c, 0x7f)];
        let missing = feature_msrs_compat(&guest, &host, true).unwrap_err().join(", ");
        for word in ["0x345", "0x10a", "0x48c", "0x2000", "0x40000000", "0x80"] {
            assert!(missing.contains(word), "{word}: {missing}");
        }
        // VMX counts only for a guest that was shown it.
        let missing = feature_msrs_compat(&guest, &host, false).unwrap_err();
        assert_eq!(missing.len(), 2, "{missing:?}");
        assert_eq!(feature_msrs_compat(&[], &host, true), Ok(()));
        assert_eq!(feature_msrs_compat(&[(0x10a, 0)], &[], true), Ok(()));
    }
}
