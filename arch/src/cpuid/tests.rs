// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of CPUID on host tables made here.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
use proptest::prelude::*;

use super::table::find;
use super::*;

fn word(text: &[u8]) -> u32 {
    u32::from_le_bytes(text.try_into().unwrap())
}

pub(super) fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
    let flags = if matches!(function, 4 | 7 | 0xb | 0xd | 0x1f | 0x8000_001d) {
        KVM_CPUID_FLAG_SIGNIFCANT_INDEX
    } else {
        0
    };
    kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, ..Default::default() }
}

pub(super) fn host(vendor: &[u8; 12]) -> CpuId {
    let vendor_words = [0x1f, word(&vendor[..4]), word(&vendor[8..]), word(&vendor[4..8])];
    let kvm = [0x4000_0001, word(b"KVMK"), word(b"VMKV"), word(b"M\0\0\0")];
    CpuId::from_entries(&[
        entry(0, 0, vendor_words),
        entry(1, 0, [0x50654, 0xff40_0800, OSXSAVE | MONITOR | VMX | 1, 0x078b_fbff]),
        entry(4, 0, [0xfc00_c121, 0, 63, 0]),
        entry(4, 1, [0xfc00_c143, 0, 1023, 0]),
        entry(4, 2, [0xfc00_c163, 0, 4095, 0]),
        entry(4, 3, [0; 4]),
        entry(5, 0, [64, 64, 3, 0]),
        entry(7, 0, [1, 1 << 16 | 1 << 5, OSPKE | 1 << 3, 1 << 24 | 1 << 25 | 1 << 10]),
        entry(7, 1, [1 << 21 | 1 << 4, 0, 0, 0]),
        entry(0xb, 0, [9, 9, 9, 9]),
        entry(0xd, 0, [0x6_02e7, 0, 11008, 0]),
        entry(0xd, 2, [256, 576, 0, 0]),
        entry(0xd, 9, [8, 2688, 0, 0]),
        entry(0xd, 18, [8192, 2816, 6, 0]),
        entry(0x15, 0, [0; 4]),
        entry(0x1d, 0, [1, 0, 0, 0]),
        entry(0x4000_0000, 0, kvm),
        entry(0x4000_0001, 0, [0x0100_7efb, 0, 0, 0]),
        entry(0x8000_0001, 0, [0, 0, SVM | 1, 0x2c10_0800]),
        entry(0x8000_0008, 0, [0x0000_392e, 0, 0x4fff, 0]),
        entry(0x8000_000a, 0, [1, 8, 0, 0xf]),
        entry(0x8000_001d, 3, [0x0003_c163, 0, 4095, 0]),
        entry(0x8000_001e, 0, [77, 77, 77, 0]),
        entry(0x8000_0026, 0, [1, 1, 1, 1]),
    ])
    .unwrap()
}

pub(super) const INTEL: &[u8; 12] = b"GenuineIntel";
pub(super) const AMD: &[u8; 12] = b"AuthenticAMD";

fn leaf(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
    *find(cpuid.as_slice(), function, index).unwrap()
}

fn config(t: u16, c: u16, d: u16, p: u16) -> CpuidConfig {
    CpuidConfig::new(CpuTopology::new(t, c, d, p).unwrap())
}

#[test]
fn features_are_those_of_a_guest() {
    let cpuid = common_cpuid(&host(INTEL), &config(1, 1, 1, 1)).for_vcpu(0).unwrap();
    let ecx = leaf(&cpuid, 1, 0).ecx;
    assert_eq!(ecx & (OSXSAVE | MONITOR), 0);
    assert_eq!(ecx & (HYPERVISOR | X2APIC | TSC_DEADLINE | VMX | 1), ecx);
    assert_eq!(leaf(&cpuid, 7, 0).ecx, 1 << 3);
    assert!(find(cpuid.as_slice(), 5, 0).is_none());
    assert_eq!(leaf(&cpuid, 0x4000_0000, 0).ebx, word(b"KVMK"));
    assert_eq!(leaf(&cpuid, 1, 0).edx & HTT, 0);
}

#[test]
fn nested_off_hides_both_kinds() {
    let config = CpuidConfig { nested: false, tsc_deadline: false, ..config(1, 1, 1, 1) };
    let cpuid = common_cpuid(&host(AMD), &config).for_vcpu(0).unwrap();
    assert_eq!(leaf(&cpuid, 1, 0).ecx & (VMX | TSC_DEADLINE), 0);
    assert_eq!(leaf(&cpuid, 0x8000_0001, 0).ecx & SVM, 0);
    assert!(find(cpuid.as_slice(), 0x8000_000a, 0).is_none());
}

#[test]
fn amx_goes_with_its_state() {
    let without = common_cpuid(&host(INTEL), &config(1, 1, 1, 1)).for_vcpu(0).unwrap();
    assert_eq!(leaf(&without, 7, 0).edx, 1 << 10);
    assert_eq!(leaf(&without, 7, 1).eax, 1 << 4);
    assert_eq!(leaf(&without, 0xd, 0).eax, 0x2e7);
    assert_eq!(leaf(&without, 0xd, 0).ecx, 2696);
    assert!(find(without.as_slice(), 0xd, 18).is_none());
    assert!(find(without.as_slice(), 0x1d, 0).is_none());
    let with = CpuidConfig { amx: true, ..config(1, 1, 1, 1) };
    let with = common_cpuid(&host(INTEL), &with).for_vcpu(0).unwrap();
    assert_eq!(leaf(&with, 0xd, 0).ecx, 11008);
    assert_eq!(leaf(&with, 7, 0).edx & (3 << 24), 3 << 24);
}

#[test]
fn intel_topology_and_caches() {
    let vm = common_cpuid(&host(INTEL), &config(2, 4, 2, 2));
    let cpuid = vm.for_vcpu(21).unwrap();
    // vCPU 21: package 1, die 0, core 2, thread 1; fields of 1, 2, 1 and 1 bits.
    let id = 1 << 4 | 2 << 1 | 1;
    assert_eq!(leaf(&cpuid, 1, 0).ebx, id << 24 | 16 << 16 | 0x0800);
    assert_ne!(leaf(&cpuid, 1, 0).edx & HTT, 0);
    let levels: Vec<_> = (0..3)
        .map(|index| leaf(&cpuid, 0xb, index))
        .map(|e| (e.eax, e.ebx, e.ecx, e.edx))
        .collect();
    assert_eq!(levels, [(1, 2, 0x100, id), (4, 16, 0x201, id), (0, 0, 2, id)]);
    let levels: Vec<_> = (0..3)
        .map(|index| leaf(&cpuid, 0x1f, index))
        .map(|e| (e.eax, e.ebx, e.ecx, e.edx))
        .collect();
    assert_eq!(levels, [(1, 2, 0x100, id), (3, 8, 0x201, id), (4, 16, 0x502, id)]);
    let sharing = |index| leaf(&cpuid, 4, index).eax >> 14 & 0xfff;
    assert_eq!((sharing(0), sharing(1), sharing(2)), (1, 1, 7));
    assert_eq!(leaf(&cpuid, 4, 0).eax >> 26, 7);
    assert_eq!(leaf(&cpuid, 4, 3).eax, 0);
}

#[test]
fn amd_topology() {
    let vm = common_cpuid(&host(AMD), &config(2, 3, 2, 2));
    let cpuid = vm.for_vcpu(23).unwrap();
    // The last vCPU: package 1, die 1, core 2, thread 1; fields of 1, 2, 1 and 1 bits.
    let ext = leaf(&cpuid, 0x8000_001e, 0);
    assert_eq!(ext.eax, 1 << 4 | 1 << 3 | 2 << 1 | 1);
    assert_eq!(ext.ebx, 0b110 | 1 << 8);
    assert_eq!(ext.ecx, 3 | 1 << 8);
    assert_eq!(leaf(&cpuid, 0x8000_0008, 0).ecx & 0xf0ff, 4 << 12 | 0xb);
    assert_eq!(leaf(&cpuid, 1, 0).ebx >> 16 & 0xff, 12);
    assert_ne!(leaf(&cpuid, 0x8000_0001, 0).ecx & CMP_LEGACY, 0);
    assert_eq!(leaf(&cpuid, 0x8000_001d, 3).eax >> 14 & 0xfff, 7);
    assert!(find(cpuid.as_slice(), 0x8000_0026, 0).is_none());
    assert!(find(cpuid.as_slice(), 0x1f, 0).is_none());
}

#[test]
fn large_apic_ids_are_whole_in_the_extended_leaf() {
    let config = CpuidConfig::new(CpuTopology::flat(1000).unwrap());
    let cpuid = common_cpuid(&host(INTEL), &config).for_vcpu(999).unwrap();
    assert_eq!(leaf(&cpuid, 0xb, 0).edx, 999);
    assert_eq!(leaf(&cpuid, 1, 0).ebx >> 24, 0xe7);
}

#[test]
fn physical_address_bits_are_the_least_of_three() {
    assert_eq!(phys_bits(&host(INTEL), 52), 46);
    assert_eq!(phys_bits(&host(INTEL), 40), 40);
    let mut limited = host(INTEL);
    for entry in limited.as_mut_slice() {
        if entry.function == 0x8000_0008 {
            entry.eax = 0x0030_3934;
        }
    }
    assert_eq!(phys_bits(&limited, 52), 48);
    let cpuid = common_cpuid(&limited, &CpuidConfig { max_phys_bits: 52, ..config(1, 1, 1, 1) });
    assert_eq!(leaf(&cpuid.for_vcpu(0).unwrap(), 0x8000_0008, 0).eax, 0x0000_3930);
}

/// The frequency that Linux computes (`native_calibrate_tsc`), in kHz: in 32 bits, and none if the
/// leaf says nothing.
fn khz_of_linux(leaf: &kvm_cpuid_entry2) -> Option<u32> {
    if leaf.eax == 0 || leaf.ebx == 0 {
        return None;
    }
    Some((leaf.ecx / 1000).wrapping_mul(leaf.ebx) / leaf.eax)
}

/// What DPDK computes (`get_tsc_freq_arch`), in Hz: the ratio is cut off first.
fn hz_of_dpdk(leaf: &kvm_cpuid_entry2) -> Option<u64> {
    (leaf.ebx != 0 && leaf.ecx != 0).then(|| u64::from(leaf.ecx) * u64::from(leaf.ebx / leaf.eax))
}

#[test]
fn no_reader_computes_a_wrong_tsc_frequency() {
    // The host's own crystal does not clock the guest's APIC timer.
    let mut with_crystal = host(INTEL);
    for entry in with_crystal.as_mut_slice().iter_mut().filter(|entry| entry.function == 0x15) {
        (entry.eax, entry.ebx, entry.ecx) = (2, 242, 24_000_000);
    }
    for host in [host(INTEL), host(AMD), with_crystal] {
        for khz in [1_000_000, 1_999_999, 2_500_000, 2_900_000, 3_000_000, 4_294_967] {
            let config = CpuidConfig { tsc_khz: Some(khz), ..config(1, 1, 1, 1) };
            let cpuid = common_cpuid(&host, &config).for_vcpu(0).unwrap();
            let crystal = find(cpuid.as_slice(), 0x15, 0).copied().unwrap_or_default();
            assert!(khz_of_linux(&crystal).is_none_or(|computed| computed == khz));
            assert!(hz_of_dpdk(&crystal).is_none_or(|hz| hz == u64::from(khz) * 1000));
            // Its crystal counts as the clock of the APIC timer.
            assert!(matches!(crystal.ecx, 0 | 1_000_000_000));
            assert_eq!(leaf(&cpuid, 0x4000_0010, 0).eax, khz);
            assert_eq!(leaf(&cpuid, 0x4000_0010, 0).ebx, 1_000_000);
            assert_eq!(leaf(&cpuid, 0x4000_0000, 0).eax, 0x4000_0010);
        }
    }
}

#[test]
fn hyperv_takes_the_first_place() {
    let config = CpuidConfig { hyperv: true, tsc_khz: Some(1), ..config(1, 4, 1, 1) };
    let vm = common_cpuid(&host(INTEL), &config);
    let cpuid = vm.for_vcpu(0).unwrap();
    assert_eq!(leaf(&cpuid, 0x4000_0000, 0).ebx, word(b"Micr"));
    assert_eq!(leaf(&cpuid, 0x4000_0001, 0).eax, word(b"Hv#1"));
    assert_eq!(leaf(&cpuid, 0x4000_0005, 0).eax, 4);
    // Bits of the specification's section 2.4.3, each with the registers that it promises.
    let promised = leaf(&cpuid, 0x4000_0003, 0);
    assert_eq!((promised.eax, promised.edx), (0b1010_0110_1110, 1 << 8));
    assert_eq!(leaf(&cpuid, 0x4000_0100, 0).ebx, word(b"KVMK"));
    assert_eq!(leaf(&cpuid, 0x4000_0101, 0).eax, 0x0100_7efb);
    assert_eq!(cpuid_compat(vm.entries(), vm.entries()), Ok(()));
}

#[test]
fn compat_names_what_is_missing() {
    let source = common_cpuid(&host(INTEL), &config(1, 2, 1, 1));
    let mut dest = source.clone();
    assert_eq!(cpuid_compat(source.entries(), dest.entries()), Ok(()));
    dest.table.edit(7, 0, |leaf| leaf.ebx &= !(1 << 16));
    dest.table.edit(1, 0, |leaf| leaf.ecx &= !1);
    dest.table.edit(0x4000_0001, 0, |leaf| leaf.eax &= !(1 << 5));
    dest.table.edit(0x8000_0008, 0, |leaf| leaf.eax = 39);
    let missing = cpuid_compat(source.entries(), dest.entries()).unwrap_err();
    let text: Vec<_> = missing.iter().map(ToString::to_string).collect();
    assert_eq!(
        text,
        [
            "46 physical address bits, there 39",
            "sse3 (CPUID 0x1.0x0 ECX bit 0)",
            "avx512f (CPUID 0x7.0x0 EBX bit 16)",
            "kvm-steal-time (CPUID 0x40000001.0x0 EAX bit 5)",
        ]
    );
    // The way back is open: the other side has more.
    assert_eq!(cpuid_compat(dest.entries(), source.entries()), Ok(()));
}

#[test]
fn compat_counts_unnamed_bits_and_other_vendors() {
    let source = common_cpuid(&host(INTEL), &config(1, 2, 1, 1));
    let mut other = common_cpuid(&host(AMD), &config(1, 2, 1, 1));
    let missing = cpuid_compat(source.entries(), other.entries()).unwrap_err();
    assert!(matches!(&missing[0], MissingFeature::Vendor { dest, .. } if dest == "AuthenticAMD"));
    other = source.clone();
    other.table.edit(7, 1, |leaf| leaf.eax |= 1 << 31);
    let missing = cpuid_compat(other.entries(), source.entries()).unwrap_err();
    assert_eq!(missing[0].to_string(), "unnamed feature (CPUID 0x7.0x1 EAX bit 31)");
}

#[test]
fn what_the_vmm_says_of_topology_is_no_feature_of_the_host() {
    for (vendor, function, edit) in [
        (INTEL, 1, (|leaf| leaf.edx |= 1 << 28) as fn(&mut kvm_cpuid_entry2)),
        (AMD, 0x8000_0001, |leaf| leaf.ecx |= 1 << 1 | 1 << 22),
    ] {
        let mut source = common_cpuid(&host(vendor), &config(1, 1, 1, 1));
        let mut dest = source.clone();
        dest.table.edit(1, 0, |leaf| leaf.edx &= !(1 << 28));
        dest.table.edit(0x8000_0001, 0, |leaf| leaf.ecx &= !(1 << 1 | 1 << 22));
        source.table.edit(function, 0, edit);
        assert_eq!(cpuid_compat(source.entries(), dest.entries()), Ok(()), "{function:#x}");
    }
}

#[test]
fn compat_counts_performance_counters() {
    let vm = |function, regs: [u32; 4]| {
        let entries: Vec<_> = host(INTEL)
            .as_slice()
            .iter()
            .copied()
            .filter(|leaf| leaf.function != function)
            .collect();
        [entries, vec![entry(function, 0, regs)]].concat()
    };
    let lost = |function, there, here| {
        let missing = cpuid_compat(&vm(function, there), &vm(function, here)).err();
        missing.map(|all| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
    };
    // Version 2, 8 counters of 48 bits, 7 events of which one is not there; 3 fixed ones of 48 bits.
    let there = [0x0730_0802, 1 << 6, 0, 48 << 5 | 3];
    assert_eq!(lost(0xa, there, there), None);
    let without_events = lost(0xa, there, [0x0730_0802, 1 << 6 | 1, 0, 48 << 5 | 3]).unwrap();
    assert!(without_events.starts_with("missing PMU events (CPUID 0xa EBX)"), "{without_events}");
    let shorter = lost(0xa, there, [0x0530_0802, 0, 0, 48 << 5 | 3]).unwrap();
    assert!(shorter.starts_with("missing PMU events"), "{shorter}");
    let none = lost(0xa, there, [0; 4]).unwrap();
    for word in ["PMU version (CPUID 0xa EAX) 0x2, there 0x0", "PMU counters", "width", "fixed"] {
        assert!(none.contains(word), "{word}: {none}");
    }
    let narrower = lost(0xa, there, [0x0728_0802, 1 << 6, 0, 48 << 5 | 3]).unwrap();
    assert_eq!(narrower, "width of PMU counters (CPUID 0xa EAX) 0x30, there 0x28");
    let fewer = lost(0xa, there, [0x0730_0402, 1 << 6, 0, 48 << 5 | 2]).unwrap();
    assert!(fewer.contains("PMU counters (CPUID 0xa EAX) 0x8, there 0x4"), "{fewer}");
    assert!(fewer.contains("fixed PMU counters (CPUID 0xa EDX) 0x3, there 0x2"), "{fewer}");
    // A guest that was shown none lacks nothing, and more is no less.
    assert_eq!(lost(0xa, [0; 4], there), None);
    assert_eq!(lost(0xa, there, [0x0830_0905, 1 << 6, 0, 48 << 5 | 4]), None);
    let amd = lost(0x8000_0022, [1, 6, 0, 0], [0, 4, 0, 0]).unwrap();
    assert!(amd.contains("PMU features") && amd.contains("0x6, there 0x4"), "{amd}");
}

#[test]
fn empty_host_table_is_no_panic() {
    let empty = CpuId::from_entries(&[]).unwrap();
    let config = CpuidConfig { tsc_khz: Some(1), hyperv: true, ..config(2, 2, 2, 2) };
    let shown = common_cpuid(&empty, &config).for_vcpu(u32::MAX).unwrap();
    // What does not come from the host: the hypervisor's own leaves.
    assert!(shown.as_slice().iter().any(|entry| entry.function == 0x4000_0000), "{shown:?}");
}

proptest! {
    #[test]
    fn any_host_and_topology_is_no_panic(
        values in prop::collection::vec((0_u32..0x30, 0_u32..20, any::<[u32; 4]>()), 0..60),
        counts in prop_oneof![any::<[u16; 4]>(), prop::array::uniform4(1_u16..9)],
        vcpu: u32,
        flags in any::<[bool; 4]>(),
    ) {
        let entries: Vec<_> = values
            .iter()
            .flat_map(|&(f, i, regs)| [entry(f, i, regs), entry(f | 0x8000_0000, i, regs)])
            .chain(host(AMD).as_slice().iter().copied())
            .collect();
        let host = CpuId::from_entries(&entries).unwrap();
        let [t, c, d, p] = counts;
        if let Ok(topology) = CpuTopology::new(t, c, d, p) {
            let [nested, amx, hyperv, msi_ext_dest_id] = flags;
            let config = CpuidConfig { nested, amx, msi_ext_dest_id, hyperv, ..CpuidConfig::new(topology) };
            let vm = common_cpuid(&host, &config);
            let own = vm.for_vcpu(vcpu).unwrap();
            let ids = own.as_slice().iter().filter(|it| matches!(it.function, 0xb | 0x1f));
            let ids: Vec<_> = ids.collect();
            let apic_id = topology.apic_id(vcpu);
            prop_assert!(ids.iter().any(|entry| entry.function == 0xb));
            for entry in ids {
                prop_assert_eq!(entry.edx, apic_id, "{:#x}", entry.function);
            }
            prop_assert_eq!(leaf(&own, 1, 0).ebx >> 24, apic_id & 0xff);
            prop_assert_eq!(cpuid_compat(vm.entries(), vm.entries()), Ok(()));
        }
    }
}

/// docs/cloud-hypervisor-state.md, section 5.7.
#[test]
fn a_platform_decides_what_is_counted_and_told() {
    let invariant = |is_invariant: bool| {
        let mut entries = host(INTEL).as_slice().to_vec();
        entries.push(entry(0x8000_0007, 0, [0, 0, 0, u32::from(is_invariant) << 8]));
        CpuId::from_entries(&entries).unwrap()
    };
    let rules = CpuidRules {
        flat_count: FlatCount::AtBoot,
        guest_address_bits: true,
        timing_leaf: TimingLeaf::InvariantTsc,
        msi_ext_dest_id: true,
    };
    let shown = |is_invariant, hyperv| {
        let config = CpuidConfig {
            counted: CpuTopology::flat(2).unwrap(),
            rules,
            tsc_khz: Some(2_500_000),
            hyperv,
            ..CpuidConfig::new(CpuTopology::flat(8).unwrap())
        };
        common_cpuid(&invariant(is_invariant), &config).for_vcpu(5).unwrap()
    };
    let cpuid = shown(true, false);
    assert_eq!(leaf(&cpuid, 0xb, 1).ebx, 2, "the vCPUs at boot");
    assert_eq!((leaf(&cpuid, 0xb, 0).edx, leaf(&cpuid, 1, 0).ebx >> 24), (5, 5), "its APIC id");
    let [bits, _, guest_bits, _] = leaf(&cpuid, 0x8000_0008, 0).eax.to_le_bytes();
    assert_eq!((bits, guest_bits), (46, 46));
    assert_eq!(leaf(&cpuid, 0x4000_0001, 0).eax >> 15 & 1, 1);
    assert_eq!(leaf(&cpuid, 0x4000_0000, 0).eax, 0x4000_0010);
    let timing = leaf(&cpuid, 0x4000_0010, 0);
    assert_eq!((timing.eax, timing.ebx), (2_500_000, 1_000_000));
    assert!(find(shown(false, false).as_slice(), 0x4000_0010, 0).is_none());
    assert!(find(shown(true, true).as_slice(), 0x4000_0110, 0).is_none());
}
