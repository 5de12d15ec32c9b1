// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Feature MSRs: registers that describe the processor to its guest, in addition to CPUID.
//!
//! Owns which ones they are and what each may lose on the way to another host: the rules are those by which
//! KVM takes or refuses a value for a vCPU, so that a refusal comes before a guest has stopped for it. A
//! register that is not named here is left to KVM.

use crate::arch_capabilities;

const ARCH_CAPABILITIES: u32 = 0x10a;
const PERF_CAPABILITIES: u32 = 0x345;
/// Fields of the performance capabilities that a guest has as a whole or not at all: the format of
/// branch records; that of precise samples (kind of trap, registers, number of the format, baseline,
/// timing) if it has any. KVM takes a value that has one only where its own is the same.
const PERF_FORMATS: [Field; 2] =
    [Field { is_used: 0x3f, whole: 0x3f }, Field { is_used: 0xf00, whole: 0x2_4fc0 }];
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
    /// These fields are the same or not used; all other bits are promises.
    Fields(&'static [Field]),
    /// Each bit by its own meaning.
    Mitigations,
}

/// Bits that belong together.
struct Field {
    /// A guest that has none of these does not use the field.
    is_used: u64,
    /// All of its bits.
    whole: u64,
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
    (ARCH_CAPABILITIES, "architectural capabilities", Rule::Mitigations),
    (PERF_CAPABILITIES, "performance monitoring", Rule::Fields(&PERF_FORMATS)),
];

/// Numbers of all registers that are compared.
pub fn indices() -> Vec<u32> {
    OTHERS.iter().chain(&VMX).map(|(index, ..)| *index).collect()
}

impl Rule {
    /// Bits of `guest` that `host` cannot keep. `nested` says whether the guest was shown VMX.
    fn lost(self, guest: u64, host: u64, nested: bool) -> u64 {
        const LOW: u64 = 0xffff_ffff;
        match self {
            Self::Promises => guest & !host,
            Self::Mitigations => arch_capabilities::lost(guest, host, nested),
            Self::Fields(fields) => fields.iter().fold(guest & !host, |lost, field| {
                if guest & field.is_used == 0 { lost } else { lost | (guest ^ host) & field.whole }
            }),
            Self::Required => host & !guest,
            Self::Controls => (guest & !host & !LOW) | (host & !guest & LOW),
            Self::Same(mask) => ((guest ^ host) & mask) | (guest & !host & !mask),
        }
    }

    /// A value with which a guest can run on either of two hosts; `None` if there is none. A register that one of them lacks
    /// is zero.
    fn common(self, first: u64, second: u64) -> Option<u64> {
        const LOW: u64 = 0xffff_ffff;
        if first == 0 || second == 0 {
            return match self {
                // A weakness of one counts although the other has no register for it.
                Self::Mitigations => Some(arch_capabilities::common(first, second)),
                Self::Promises | Self::Fields(_) => Some(0),
                // What one of them requires the other does not have.
                Self::Controls | Self::Required | Self::Same(_) => (first == second).then_some(0),
            };
        }
        match self {
            Self::Promises => Some(first & second),
            Self::Mitigations => Some(arch_capabilities::common(first, second)),
            // Each is of one model, by which KVM decides who may have it.
            Self::Fields(fields) => {
                Some(fields.iter().fold(first & second, |both, field| both & !field.whole))
            }
            Self::Required => Some(first | second),
            Self::Controls => {
                let (must, may) = ((first | second) & LOW, (first & second) >> 32);
                (must & !may == 0).then_some(must | may << 32)
            }
            Self::Same(mask) => ((first ^ second) & mask == 0).then_some(first & second),
        }
    }
}

/// Numbers and values.
type Msrs = Vec<(u32, u64)>;

/// What two hosts have in common of these registers, in the order of their numbers, without those that are zero; those of
/// VMX apart. There is `None` of them if their VMX has nothing in common: what a guest finds in these registers is a number,
/// or a control that has to be one on one host and may not be on the other.
pub fn common_feature_msrs(first: &[(u32, u64)], second: &[(u32, u64)]) -> (Msrs, Option<Msrs>) {
    let common = |(index, _, rule): &(u32, &str, Rule)| {
        Some((*index, rule.common(value(first, *index), value(second, *index))?))
    };
    let known = |msrs: Msrs| msrs.into_iter().filter(|(_, value)| *value != 0).collect();
    let others = OTHERS.iter().filter_map(common).collect();
    let vmx: Option<Msrs> = VMX.iter().map(common).collect();
    (known(others), vmx.map(known))
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
    let rules = OTHERS.iter().chain(VMX.iter().filter(|_| nested));
    let missing: Vec<String> = rules
        .filter_map(|&(index, name, rule)| {
            let (there, here) = (value(guest, index), value(host, index));
            let lost = if there == 0 { 0 } else { rule.lost(there, here, nested) };
            let names = match rule {
                Rule::Mitigations => format!(": {}", arch_capabilities::names(lost)),
                _ => String::new(),
            };
            (lost != 0).then(|| {
                format!(
                    "{name} (MSR {index:#x}: {there:#x}, there {here:#x}, bits {lost:#x}{names})"
                )
            })
        })
        .collect();
    if missing.is_empty() { Ok(()) } else { Err(missing) }
}

fn value(list: &[(u32, u64)], wanted: u32) -> u64 {
    list.iter().find(|(index, _)| *index == wanted).map_or(0, |(_, value)| *value)
}

/// What this host suffers from and the guest was not told of, in words: it continues all the same, and
/// the log should tell. `None` where there is nothing of the kind.
pub fn untold_weaknesses(guest: &[(u32, u64)], host: &[(u32, u64)]) -> Option<String> {
    let pair = (value(guest, ARCH_CAPABILITIES), value(host, ARCH_CAPABILITIES));
    let untold = arch_capabilities::untold(pair.0, pair.1);
    (untold != 0).then(|| arch_capabilities::names(untold))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    #[test]
    fn promises_controls_and_numbers_are_judged_each_by_its_rule() {
        assert_eq!(Rule::Promises.lost(0b101, 0b100, false), 0b001);
        assert_eq!(Rule::Promises.lost(0b100, 0b111, false), 0);
        assert_eq!(Rule::Required.lost(0b100, 0b110, true), 0b010);
        // What must be one here and may be zero there; what may be one there and not here.
        assert_eq!(Rule::Controls.lost(0x2_0000_0001, 0x1_0000_0003, true), 0x2_0000_0002);
        assert_eq!(Rule::Controls.lost(0x1_0000_0003, 0x3_0000_0001, true), 0);
        assert_eq!(Rule::Same(0xf).lost(0x15, 0x16, true), 0x3);
        assert_eq!(Rule::Same(0xf).lost(0x25, 0x15, true), 0x20);
        assert_eq!(Rule::Same(0xf).lost(0x05, 0x35, true), 0);
    }

    #[test]
    fn formats_of_performance_records_are_the_same_or_not_used() {
        let lost = |guest, host| Rule::Fields(&PERF_FORMATS).lost(guest, host, false);
        const FW_WRITES: u64 = 1 << 13;
        // Branch records: another format, none there, none here.
        assert_eq!(lost(FW_WRITES | 5, FW_WRITES | 6), 3);
        assert_eq!(lost(FW_WRITES | 5, FW_WRITES), 5);
        assert_eq!(lost(FW_WRITES, FW_WRITES | 5), 0);
        assert_eq!(lost(FW_WRITES | 5, FW_WRITES | 5), 0);
        // Precise samples: format 4 with a baseline, or with less or more around it.
        let samples = 0x4000 | 0x400 | 0xc0;
        assert_eq!(lost(samples, samples), 0);
        assert_eq!(lost(samples, samples & !0x4000), 0x4000);
        assert_eq!(lost(samples & !0x4000, samples), 0x4000);
        assert_eq!(lost(samples, samples ^ 0x700), 0x700);
        assert_eq!(lost(0, samples), 0);
        // Everything else is had or not.
        assert_eq!(lost(FW_WRITES, 0), FW_WRITES);
        assert_eq!(lost(0x1000, 0x3000), 0);
    }

    #[test]
    fn what_is_lost_is_named_with_both_values() {
        let guest = [(0x345, 0x2000), (0x10a, 1 << 24 | 2), (0x48c, 0xff)];
        assert_eq!(feature_msrs_compat(&guest, &guest, true), Ok(()));
        let host = [(0x345, 0), (0x10a, 2), (0x48c, 0x7f)];
        let missing = feature_msrs_compat(&guest, &host, true).unwrap_err().join(", ");
        for word in ["0x345", "0x10a", "0x48c", "0x2000", "PBRSB_NO", "0x80"] {
            assert!(missing.contains(word), "{word}: {missing}");
        }
        // VMX counts only for a guest that was shown it.
        let missing = feature_msrs_compat(&guest, &host, false).unwrap_err();
        assert_eq!(missing.len(), 2, "{missing:?}");
        assert_eq!(feature_msrs_compat(&[], &host, true), Ok(()));
        assert_eq!(feature_msrs_compat(&[(0x10a, 0)], &[], true), Ok(()));
    }
}
