// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of baselines on host tables made here.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use proptest::prelude::*;

use super::super::tests::{AMD, INTEL, entry};
use super::super::{CpuTopology, CpuidConfig, common_cpuid};
use super::*;

const VMX_BASIC: u64 = 0x00d8_1000_0000_0004;

/// A host with XSAVE, and leaf 0x80000000.
fn host(maker: &[u8; 12]) -> CpuId {
    let mut table = Table::from_host(&super::super::tests::host(maker));
    table.edit(1, 0, |leaf| leaf.ecx |= XSAVE);
    table.0.push(entry(LEAF_EXTENDED, 0, [0x8000_0026, 0, 0, 0]));
    CpuId::from_entries(&table.0).unwrap()
}

fn changed(
    host: &CpuId,
    function: u32,
    index: u32,
    change: impl FnOnce(&mut kvm_cpuid_entry2),
) -> CpuId {
    let mut table = Table::from_host(host);
    table.edit(function, index, change);
    CpuId::from_entries(&table.0).unwrap()
}

fn bits(host: &CpuId, function: u32, index: u32, place: Register) -> u32 {
    read(host.as_slice(), (function, index, place))
}

/// What a guest of one vCPU is shown by a host with this baseline.
fn shown(baseline: &Baseline, host: &CpuId) -> Vec<kvm_cpuid_entry2> {
    let config = CpuidConfig::new(CpuTopology::flat(1).unwrap());
    common_cpuid(&baseline.limit(host).unwrap(), &config).entries().to_vec()
}

#[test]
fn a_host_has_all_of_its_own_baseline_and_shows_the_same_with_it() {
    for maker in [INTEL, AMD] {
        let host = host(maker);
        let own = Baseline::of_host(&host, &[(0x10a, 3), (0x480, VMX_BASIC), (0x9999, 1)]);
        assert_eq!(own.maker().as_bytes(), maker);
        assert!(own.msrs().iter().all(|(index, _)| *index != 0x9999));
        own.check(&own, true).unwrap();
        assert_eq!(own.common(&own).unwrap(), own);
        let limited = own.limit(&host).unwrap();
        let again = Baseline::of_host(&limited, own.msrs());
        assert_eq!(again, own);
        // All features are still there, and so is everything that is none.
        for (set, counted) in feature_registers() {
            let place = (set.function, set.index, set.register);
            assert_eq!(
                read(limited.as_slice(), place) & counted,
                read(host.as_slice(), place) & counted,
                "{place:x?}"
            );
        }
        assert_eq!(bits(&limited, 4, 2, Register::Ecx), 4095);
        assert_eq!(bits(&limited, 1, 0, Register::Eax), 0x50654);
    }
}

#[test]
fn what_one_host_lacks_no_guest_is_shown() {
    let new = host(INTEL);
    // Without AVX-512, AMX, a protection key, and with fewer address bits.
    let old = changed(&new, 7, 0, |leaf| (leaf.ebx, leaf.ecx, leaf.edx) = (1 << 5, 0, 1 << 10));
    let old = changed(&old, 0xd, 0, |leaf| leaf.eax = 7);
    let old = changed(&old, 0x8000_0008, 0, |leaf| leaf.eax = 0x0000_302a);
    let old = changed(&old, 0, 0, |leaf| leaf.eax = 0x16);
    let [of_new, of_old] = [&new, &old].map(|host| Baseline::of_host(host, &[]));
    let pool = of_new.common(&of_old).unwrap();
    assert_eq!(pool, of_old.common(&of_new).unwrap());
    assert_eq!(pool, of_old);
    for host in [&of_new, &of_old] {
        pool.check(host, true).unwrap();
    }
    let guests = [&new, &old].map(|host| shown(&pool, host));
    for guest in &guests {
        for other in &guests {
            cpuid_compat(guest, other).unwrap();
        }
        assert_eq!(find(guest, 7, 0).unwrap().ebx, 1 << 5);
        let area = find(guest, 0xd, 0).unwrap();
        assert_eq!((area.eax, area.ecx), (7, 832), "the area ends with AVX");
        assert!(guest.iter().all(|entry| entry.function != 0xd || entry.index <= 2));
        assert!(find(guest, 0x1d, 0).is_none(), "tiles");
        assert_eq!(find(guest, 0x8000_0008, 0).unwrap().eax & 0xff, 42);
        assert!(find(guest, 0, 0).unwrap().eax <= 0x16);
    }
    // The other way round each lack is named.
    let error = of_new.check(&of_old, true).unwrap_err().to_string();
    for name in ["avx512f", "pku", "46 physical address bits, there 42", "protection key state"] {
        assert!(error.contains(name), "{name}: {error}");
    }
}

#[test]
fn nested_use_counts_for_those_who_have_it() {
    let vmx = |basic| [(0x480_u32, basic), (0x485, 0x7004_c1e7)];
    let intel = host(INTEL);
    let with = Baseline::of_host(&intel, &vmx(VMX_BASIC));
    let without = changed(&intel, 1, 0, |leaf| leaf.ecx &= !VMX);
    let without = Baseline::of_host(&without, &[]);
    assert!(without.msrs().is_empty());
    let error = with.check(&without, true).unwrap_err().to_string();
    assert!(error.contains("vmx") && error.contains("0x480"), "{error}");
    with.check(&without, false).unwrap();
    assert_eq!(with.common(&without).unwrap(), without);
    // Another revision of its structures: no guest of both has VMX.
    let other = Baseline::of_host(&intel, &vmx(VMX_BASIC + 1));
    let pool = with.common(&other).unwrap();
    assert_eq!(read(pool.entries(), (1, 0, Register::Ecx)) & VMX, 0);
    assert!(pool.msrs().is_empty());
    let amd = host(AMD);
    let plain = changed(&amd, 0x8000_0001, 0, |leaf| leaf.ecx &= !SVM);
    let (with, without) = (Baseline::of_host(&amd, &[]), Baseline::of_host(&plain, &[]));
    with.check(&without, true).unwrap_err();
    with.check(&without, false).unwrap();
    assert!(find(&shown(&with.common(&without).unwrap(), &amd), LEAF_SVM, 0).is_none());
}

#[test]
fn counters_are_the_same_or_gone() {
    let with = |eax| {
        let mut table = Table::from_host(&host(INTEL));
        table.0.push(entry(0xa, 0, [eax, 0, 7, 0x603]));
        table.edit(1, 0, |leaf| leaf.ecx |= PDCM);
        CpuId::from_entries(&table.0).unwrap()
    };
    let (first, second) = (with(0x0730_0402), with(0x0730_0802));
    // Full-width writes; and formats, which are those of one model.
    let msrs = [(0x345, 0x2000)];
    assert_eq!(Baseline::of_host(&first, &[(0x345, 0x2fc5)]).msrs(), msrs);
    let of_first = Baseline::of_host(&first, &msrs);
    assert_eq!(of_first.msrs(), msrs);
    assert_eq!(of_first.common(&of_first).unwrap(), of_first);
    let pool = of_first.common(&Baseline::of_host(&second, &msrs)).unwrap();
    let guest = shown(&pool, &first);
    assert!(find(&guest, 0xa, 0).is_none());
    assert_eq!(read(&guest, (1, 0, Register::Ecx)) & PDCM, 0);
    assert!(pool.msrs().is_empty());
}

/// A host that says yes to everything, and has leaves and registers that are younger than this list.
#[test]
fn what_is_not_known_is_not_passed_on() {
    let all_ones = |table: &mut Table, function, index| {
        table.0.retain(|entry| (entry.function, entry.index) != (function, index));
        table.0.push(entry(function, index, [u32::MAX; 4]));
    };
    let intel = host(INTEL);
    let mut table = Table::from_host(&intel);
    for (function, index) in [
        (6, 0),
        (7, 0),
        (7, 1),
        (7, 2),
        (7, 3),
        (0x12, 0),
        (0x12, 1),
        (0x14, 0),
        (0x16, 0),
        (0x19, 0),
        (0x24, 0),
        (0x8000_0007, 0),
        (0x8000_001f, 0),
        (0x8000_0021, 0),
        (0x8000_0025, 0),
        (0xc000_0001, 0),
    ] {
        all_ones(&mut table, function, index);
    }
    let modern = CpuId::from_entries(&table.0).unwrap();
    let guest = shown(&Baseline::of_host(&intel, &[]), &modern);
    let own = shown(&Baseline::of_host(&intel, &[]), &intel);
    let features = |guest: &[kvm_cpuid_entry2], function, index| {
        let leaf = find(guest, function, index).copied().unwrap_or_default();
        (
            if function == 7 && index == 0 { 0 } else { leaf.eax },
            leaf.ebx & !(1 << 6 | 1 << 13),
            leaf.ecx,
            leaf.edx,
        )
    };
    for entry in &guest {
        let at = (entry.function, entry.index);
        assert_eq!(features(&guest, at.0, at.1), features(&own, at.0, at.1), "{at:x?}");
    }
    // And what it has is in a baseline of its own as far as it is known.
    let baseline = Baseline::of_host(&modern, &[]);
    baseline.check(&baseline, true).unwrap();
    assert_eq!(read(baseline.entries(), (7, 0, Register::Ebx)) & SGX, 0);
    assert_eq!(read(baseline.entries(), (7, 1, Register::Edx)) & AVX10, 0);
}

#[test]
fn weaknesses_and_models_are_those_of_the_pool() {
    const RRSBA: u64 = 1 << 19;
    let with = |eax, capabilities| {
        let host = changed(&host(INTEL), 7, 0, |leaf| leaf.edx |= ARCH_CAPABILITIES);
        let host = changed(&host, 1, 0, |leaf| leaf.eax = eax);
        (Baseline::of_host(&host, &[(0x10a, capabilities), (0x480, VMX_BASIC)]), host)
    };
    let ((old, _), (new, new_host)) = (with(0x50654, 1), with(0x806f8, RRSBA | 1));
    let error = old.check(&new, true).unwrap_err().to_string();
    assert!(error.contains("RRSBA"), "{error}");
    let pool = old.common(&new).unwrap();
    pool.check(&old, true).unwrap();
    pool.check(&new, true).unwrap();
    assert_eq!(pool.msrs()[0], (0x10a, RRSBA | 1));
    let guest = shown(&pool, &new_host);
    assert_eq!(find(&guest, 1, 0).unwrap().eax, 0x50654, "the model of the first");
    assert_eq!(new.beyond(&pool, true), None, "a weakness is nothing that guests lack");
    // Where VMX has nothing in common, the other registers have.
    let other = Baseline { msrs: vec![(0x10a, 1), (0x480, VMX_BASIC + 1)], ..old.clone() };
    let pool = old.common(&other).unwrap();
    assert_eq!(pool.msrs(), [(0x10a, 1)]);
    // What VMX guests may do without is written as nothing, as a host may have it.
    let guest = shown(&old, &new_host);
    let msrs = old.msrs_of_guest(&guest);
    for wanted in [(0x10a, 1), (0x480, VMX_BASIC), (0x48c, 0), (0x491, 0)] {
        assert!(msrs.contains(&wanted), "{msrs:x?}");
    }
    assert!(old.msrs_of_guest(&[]).contains(&(0x10a, 0)), "not shown");
    // KVM makes them up on AMD's.
    let amd = changed(&host(AMD), 7, 0, |leaf| leaf.edx |= ARCH_CAPABILITIES);
    let amd = Baseline::of_host(&amd, &[(0x10a, 1)]);
    assert!(amd.msrs().is_empty() && !ReadableMsrs::of(amd.entries()).arch_capabilities);
}

#[test]
fn emptying_buffers_is_not_missed_where_nothing_is_in_them() {
    let with = |eax, ecx| {
        let mut table = Table::from_host(&host(AMD));
        table.0.push(entry(0x8000_0021, 0, [eax, 0, ecx, 0]));
        let host = CpuId::from_entries(&table.0).unwrap();
        (Baseline::of_host(&host, &[]), host)
    };
    let ((old, old_host), (new, new_host)) = (with(1 << 5, 0), with(0, 3 << 1));
    cpuid_compat(old.entries(), new.entries()).unwrap();
    cpuid_compat(new.entries(), old.entries()).unwrap_err();
    cpuid_compat(old.entries(), with(0, 1 << 1).0.entries()).unwrap_err();
    for pool in [old.common(&new).unwrap(), new.common(&old).unwrap()] {
        pool.check(&old, true).unwrap();
        pool.check(&new, true).unwrap();
        for host in [&old_host, &new_host] {
            let leaf = *find(&shown(&pool, host), 0x8000_0021, 0).unwrap();
            assert_eq!((leaf.eax, leaf.ecx), (1 << 5, 0), "guests empty them");
        }
    }
    // One that does neither: no guest is told that it can.
    let pool = old.common(&with(0, 0).0).unwrap();
    assert!(!VERW_CLEAR.is_in(pool.entries()));
}

#[test]
fn makers_have_nothing_in_common() {
    let [intel, amd] = [INTEL, AMD].map(|maker| Baseline::of_host(&host(maker), &[]));
    let error = intel.common(&amd).unwrap_err().to_string();
    assert!(error.contains("GenuineIntel") && error.contains("AuthenticAMD"), "{error}");
    let error = intel.check(&amd, true).unwrap_err().to_string();
    assert!(error.contains("CPU vendor GenuineIntel, there AuthenticAMD"), "{error}");
}

proptest! {
    /// Of any two hosts of one maker: a guest of their baseline that has started on one can go to the other and back.
    #[test]
    fn guests_of_a_baseline_move_between_its_hosts(
        masks in prop::collection::vec(any::<[u32; 4]>(), 24),
        is_intel in any::<bool>(),
        msrs in prop::collection::vec(any::<u64>(), 2),
    ) {
        let whole = host(if is_intel { INTEL } else { AMD });
        let cut = |by: &dyn Fn(usize, usize) -> u32| {
            let mut table = Table::from_host(&whole);
            for (number, entry) in table.0.iter_mut().enumerate() {
                let keeps = matches!(entry.function, 1 | 6 | 7 | 0x4000_0001 | 0x8000_0001 | 0x8000_000a | 0x8000_0021)
                    || (entry.function, entry.index) == (0xd, 0);
                if keeps {
                    entry.eax &= by(0, number);
                    entry.ebx &= by(1, number);
                    // The area's length stays what it is.
                    entry.ecx &= if entry.function == 0xd { u32::MAX } else { by(2, number) };
                    entry.edx &= by(3, number);
                }
            }
            CpuId::from_entries(&table.0).unwrap()
        };
        let first = cut(&|place, number| masks[number % masks.len()][place]);
        let second = cut(&|place, number| masks[(number * 7 + 3) % masks.len()][place].rotate_left(5));
        let of_first = Baseline::of_host(&first, &[(0x10a, msrs[0])]);
        let of_second = Baseline::of_host(&second, &[(0x10a, msrs[1])]);
        let pool = of_first.common(&of_second).unwrap();
        prop_assert!(pool.check(&of_first, true).is_ok());
        prop_assert!(pool.check(&of_second, true).is_ok());
        let guests = [&first, &second].map(|host| shown(&pool, host));
        prop_assert_eq!(cpuid_compat(&guests[0], &guests[1]), Ok(()));
        prop_assert_eq!(cpuid_compat(&guests[1], &guests[0]), Ok(()));
        prop_assert_eq!(pool.common(&of_first).unwrap(), pool);
    }
}
