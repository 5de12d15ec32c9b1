// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The bits of `IA32_ARCH_CAPABILITIES` and what each means for a guest that goes to another host.
//!
//! Owns that list. The register is read by a guest's kernel once, when it boots, and decides which
//! mitigations it runs with; it is not told later that it runs elsewhere. KVM takes any value for
//! it from a VMM (`vcpu->arch.arch_capabilities`), so this comparison is the only thing that keeps a
//! guest from a host on which it is not safe. What KVM shows of it is the host's own register, cut
//! down to what means something in a guest, with bits added for what the host's kernel deals with
//! (`kvm_get_arch_capabilities`, `KVM_SUPPORTED_ARCH_CAP`).

/// What a bit means for a guest that was shown it, or was not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    /// The guest does without a mitigation, or counts on one, because of it: it must be there.
    Promise,
    /// The same, but a host with all of these bits does not need what it is about.
    PromiseUnless(u64),
    /// The same, for a guest that runs guests of its own; no other looks at it.
    NestedPromise,
    /// It names a weakness. A host that has not got it keeps all that the guest counts on; on a host
    /// that has it, a guest that was not told runs without what it would do against it.
    Weakness,
    /// A register or control that KVM gives to no guest: not shown by any KVM, and if it were, the
    /// guest could not use it.
    HostOnly,
}

use Meaning::{HostOnly, NestedPromise, Promise, PromiseUnless, Weakness};

const fn bit(number: u32) -> u64 {
    1 << number
}

/// No device memory leaks stale data by any of the three ways that Intel names.
const NO_STALE_MMIO_DATA: u64 = bit(13) | bit(14) | bit(15);
const RFDS_NO: u64 = bit(27);

/// Number, name in Intel's manual and in Linux, meaning. A bit that is not here is younger than this
/// list: KVM shows no bit that means nothing to a guest, so it counts as a promise.
const BITS: [(u32, &str, Meaning); 33] = [
    // Without them Linux separates page tables, flushes caches and buffers, and forbids speculation.
    (0, "RDCL_NO", Promise),
    // Set once, IBRS protects forever; elsewhere it would have to be set on each entry to the kernel.
    (1, "IBRS_ALL", Promise),
    // Return predictions may come from elsewhere when the return buffer is empty.
    (2, "RSBA", Weakness),
    // "Do not flush the L1 data cache before VM entry, the hypervisor below does."
    (3, "SKIP_L1DFL_VMENTRY", NestedPromise),
    (4, "SSB_NO", Promise),
    (5, "MDS_NO", Promise),
    // A guest in page tables of its own cannot bring a processor down; only hypervisors care.
    (6, "PSCHANGE_MC_NO", NestedPromise),
    // MSR 0x122 is there: guests write it, Linux whenever a vCPU comes up. Without it that is a fault.
    (7, "TSX_CTRL", Promise),
    (8, "TAA_NO", Promise),
    (9, "MCU_CONTROL", HostOnly),
    (10, "MISC_PACKAGE_CTLS", HostOnly),
    (11, "ENERGY_FILTERING_CTL", HostOnly),
    (12, "DOITM", HostOnly),
    (13, "SBDR_SSDP_NO", Promise),
    (14, "FBSDP_NO", Promise),
    (15, "PSDP_NO", Promise),
    (16, "MCU_ENUMERATION", HostOnly),
    // VERW empties fill buffers, and the guest has it do so, instead of something else.
    (17, "FB_CLEAR", PromiseUnless(NO_STALE_MMIO_DATA)),
    (18, "FB_CLEAR_CTRL", HostOnly),
    // As RSBA, within one kind of predictor.
    (19, "RRSBA", Weakness),
    (20, "BHI_NO", Promise),
    (21, "XAPIC_DISABLE_STATUS", HostOnly),
    (22, "MCU_EXTENDED_SERVICE", HostOnly),
    (23, "OVERCLOCKING_STATUS", HostOnly),
    (24, "PBRSB_NO", Promise),
    // The host's kernel decides on it; guests are told GDS_NO where the weakness is dealt with.
    (25, "GDS_CTRL", HostOnly),
    (26, "GDS_NO", Promise),
    (27, "RFDS_NO", Promise),
    // VERW empties register files, too.
    (28, "RFDS_CLEAR", PromiseUnless(RFDS_NO)),
    (29, "IGN_UMONITOR", HostOnly),
    (30, "MON_UMON_MITG", HostOnly),
    (32, "PBOPT", HostOnly),
    (62, "ITS_NO", Promise),
];

/// Bits of `guest` that it relies on and that `host` cannot keep. `nested` says whether the guest can
/// run guests of its own.
pub fn lost(guest: u64, host: u64, nested: bool) -> u64 {
    let is_dispensable = |meaning: Meaning| match meaning {
        Promise => false,
        PromiseUnless(safe) => host & safe == safe,
        NestedPromise => !nested,
        Weakness | HostOnly => true,
    };
    let dispensable = BITS.iter().filter(|(.., meaning)| is_dispensable(*meaning));
    let dispensable = dispensable.fold(0, |bits, (number, ..)| bits | bit(*number));
    guest & !host & !dispensable
}

/// What a guest is told that may run on either of two hosts: what both promise, and what either suffers from.
pub fn common(first: u64, second: u64) -> u64 {
    let in_common = |number: u32| {
        let meaning =
            BITS.iter().find(|(other, ..)| *other == number).map(|(.., meaning)| *meaning);
        let (here, there) = (first & bit(number) != 0, second & bit(number) != 0);
        match meaning {
            None | Some(Promise | NestedPromise) => here && there,
            // A host that does not need it is none on which it would be missed.
            Some(PromiseUnless(safe)) => {
                let fits = |has: bool, host: u64| has || host & safe == safe;
                (here || there) && fits(here, first) && fits(there, second)
            }
            Some(Weakness) => here || there,
            Some(HostOnly) => false,
        }
    };
    (0..u64::BITS).filter(|number| in_common(*number)).fold(0, |bits, number| bits | bit(number))
}

/// Weaknesses of `host` that `guest` was not told of.
pub fn untold(guest: u64, host: u64) -> u64 {
    let weaknesses = BITS.iter().filter(|(.., meaning)| *meaning == Weakness);
    let weaknesses = weaknesses.fold(0, |bits, (number, ..)| bits | bit(*number));
    // One that was told of the wider weakness does what is to be done against the narrower one.
    let told = if guest & bit(2) != 0 { guest | bit(19) } else { guest };
    host & !told & weaknesses
}

/// The bits by their names.
pub fn names(bits: u64) -> String {
    let name = |number: u32| {
        let known = BITS.iter().find(|(other, ..)| *other == number);
        known.map_or_else(|| format!("bit {number}"), |(_, name, _)| (*name).to_owned())
    };
    let set = (0..u64::BITS).filter(|number| bits & bit(*number) != 0);
    set.map(name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_that_a_guest_relies_on_must_be_there() {
        let promises = [0, 1, 4, 5, 7, 8, 13, 14, 15, 17, 20, 24, 26, 27, 28, 62];
        // Of younger processors: what they mean is not known here.
        let unknown = [31, 33, 61, 63];
        for number in promises.into_iter().chain(unknown) {
            assert_eq!(lost(bit(number), 0, false), bit(number), "{number}");
            assert_eq!(lost(bit(number), bit(number), false), 0, "{number}");
            assert_eq!(lost(0, bit(number), true), 0, "{number}: more than was promised");
        }
    }

    #[test]
    fn what_promises_nothing_may_differ() {
        let nothing = [2, 9, 10, 11, 12, 16, 18, 19, 21, 22, 23, 25, 29, 30, 32];
        for number in nothing {
            assert_eq!(lost(bit(number), 0, true), 0, "{number}");
        }
        for hypervisors in [3, 6] {
            assert_eq!(lost(bit(hypervisors), 0, false), 0);
            assert_eq!(lost(bit(hypervisors), 0, true), bit(hypervisors));
        }
    }

    #[test]
    fn a_host_without_the_weakness_needs_no_means_against_it() {
        // Ice Lake clears fill buffers, Sapphire Rapids does not need to.
        assert_eq!(lost(bit(17), NO_STALE_MMIO_DATA, false), 0);
        assert_eq!(lost(bit(17), NO_STALE_MMIO_DATA & !bit(14), false), bit(17));
        assert_eq!(lost(bit(28), RFDS_NO, false), 0);
    }

    #[test]
    fn only_what_is_relied_on_is_lost_between_two_real_hosts() {
        let (server, smaller) = (0x4000_0000_0d08_e0eb, 0x4000_0000_0c00_0069);
        assert_eq!(server & !smaller, 0x108_e082, "bits that differ");
        let kept = lost(server, smaller, true);
        let expected = "IBRS_ALL, TSX_CTRL, SBDR_SSDP_NO, FBSDP_NO, PSDP_NO, PBRSB_NO";
        assert_eq!(names(kept), expected);
        assert_eq!(lost(smaller, server, true), 0);
    }

    #[test]
    fn what_two_hosts_have_in_common_is_lost_on_neither() {
        let (server, smaller, older) =
            (0x4000_0000_0d08_e0eb, 0x4000_0000_0c00_0069, 0x0002_0e0c_u64);
        for (first, second) in
            [(server, smaller), (smaller, older), (server, older), (NO_STALE_MMIO_DATA, bit(17))]
        {
            let both = common(first, second);
            assert_eq!(both, common(second, first));
            for host in [first, second] {
                assert_eq!(lost(both, host, true), 0, "{both:#x} on {host:#x}");
                assert_eq!(untold(both, host), 0, "{both:#x} on {host:#x}");
            }
        }
        assert_eq!(
            names(common(server, smaller)),
            "RDCL_NO, SKIP_L1DFL_VMENTRY, MDS_NO, PSCHANGE_MC_NO, RRSBA, GDS_NO, RFDS_NO, ITS_NO"
        );
        // One clears fill buffers, the other does not need to.
        assert_eq!(common(NO_STALE_MMIO_DATA, bit(17)), bit(17));
        assert_eq!(common(bit(13), bit(17)), 0);
        // What is not known is no promise of both unless both have it.
        assert_eq!(common(bit(31) | bit(9), bit(31) | bit(9)), bit(31));
    }

    #[test]
    fn a_weakness_that_the_guest_was_not_told_of_is_named() {
        assert_eq!(names(untold(0, bit(19) | bit(0))), "RRSBA");
        assert_eq!(untold(bit(19), bit(19)), 0);
        assert_eq!(untold(bit(2), bit(19)), 0, "RSBA is more than RRSBA");
        assert_eq!(untold(bit(19), bit(2)), bit(2));
        assert_eq!(untold(bit(2) | bit(19), 0), 0);
    }

    #[test]
    fn names_have_the_numbers_of_the_manual() {
        for (number, name, _) in BITS {
            assert_eq!(names(bit(number)), name);
        }
        assert_eq!(names(bit(31) | 1), "RDCL_NO, bit 31");
    }
}
