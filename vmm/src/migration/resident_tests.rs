// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is brought in, and which guests are not taken.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use kvm_bindings::kvm_dtable;
use memory::{Backing, RamConfig, RamLayout, ZoneSpec};

use super::*;

const MIB: u64 = 1 << 20;
const STRONG: KvmLimits = KvmLimits { shadow_paging: false, async_page_faults: false };

fn ram() -> GuestRam {
    let zone = ZoneSpec { backing: Backing::Memfd, ..ZoneSpec::new("t", 8 * MIB) };
    GuestRam::new(&RamConfig { zones: vec![zone] }, RamLayout::default()).unwrap()
}

fn populated(ram: &GuestRam) -> Vec<u64> {
    let runs = ram.regions()[0].populated_runs(&(0..8 * MIB)).unwrap();
    runs.into_iter().flat_map(|run| run.step_by(PAGE_BYTES)).collect()
}

fn put(ram: &GuestRam, table: u64, index: u64, entry: u64) {
    let handle = ram.guest_memory();
    handle.memory().write_obj(entry, GuestAddress(table + 8 * index)).unwrap();
}

fn long_mode(cr3: u64) -> kvm_sregs {
    kvm_sregs { cr0: CR0_PG, cr3, efer: EFER_LMA, ..Default::default() }
}

#[test]
fn every_table_that_the_vcpu_uses_is_brought_in_and_nothing_else() {
    let ram = ram();
    put(&ram, 0x1000, 0, 0x2000 | 7);
    put(&ram, 0x1000, 511, 0x2000 | 7);
    // A table that has itself as an entry, one of small pages, a large page, and an absent one.
    put(&ram, 0x2000, 1, 0x3000 | 7);
    put(&ram, 0x3000, 0, 0x10_0000 | 7);
    put(&ram, 0x3000, 1, 0x20_0000 | 0x87);
    put(&ram, 0x3000, 2, 0x30_0000);
    put(&ram, 0x3000, 3, 0x3000 | 7);
    let handle = ram.guest_memory();
    tables(0, &long_mode(0x1000), &handle.memory()).unwrap();
    assert_eq!(populated(&ram), [0x1000, 0x2000, 0x3000, 0x10_0000]);
}

#[test]
fn entries_that_point_nowhere_are_let_be_and_a_root_outside_ram_is_not() {
    let ram = ram();
    put(&ram, 0x1000, 0, 0xffff_ffff_f000 | 7);
    let handle = ram.guest_memory();
    tables(0, &long_mode(0x1000), &handle.memory()).unwrap();
    let outside = tables(3, &long_mode(1 << 40), &handle.memory());
    assert_eq!(outside, Err(NotRefusable::NotRam(3)));
    let legacy = kvm_sregs { efer: 0, ..long_mode(0x1000) };
    assert_eq!(tables(1, &legacy, &handle.memory()), Err(NotRefusable::PageTables(1)));
}

#[test]
fn tables_that_refer_to_each_other_everywhere_end() {
    let ram = ram();
    for table in [0x1000, 0x2000] {
        for index in 0..512 {
            put(&ram, table, index, (0x1000 + (index & 1) * 0x1000) | 7);
        }
    }
    let five = kvm_sregs { cr4: CR4_LA57, ..long_mode(0x1000) };
    tables(0, &five, &ram.guest_memory().memory()).unwrap();
}

#[test]
fn guests_that_this_kvm_would_fail_are_named() {
    let system = kvm_sregs {
        idt: kvm_dtable { base: 0xffff_fe00_0000_0000, limit: 4095, ..Default::default() },
        ..long_mode(0x1000)
    };
    check(0, &system, STRONG).unwrap();
    let shadow = KvmLimits { shadow_paging: true, ..STRONG };
    assert_eq!(check(2, &system, shadow), Err(NotRefusable::ShadowPaging(2)));
    check(2, &long_mode(0x1000), shadow).unwrap();
    for nested in [
        kvm_sregs { cr4: CR4_VMXE, ..Default::default() },
        kvm_sregs { efer: EFER_SVME, ..Default::default() },
    ] {
        assert_eq!(check(3, &nested, STRONG), Err(NotRefusable::Nested(3)));
    }
}

#[test]
fn only_asynchronous_page_faults_that_are_on_are_held_back() {
    let msr = |index, value| MsrValue { index, value };
    let mut msrs = [msr(0x10, 1), msr(MSR_ASYNC_PF_EN, 0x5009), msr(MSR_ASYNC_PF_EN, 0x6008)];
    let held: Vec<_> = switch_off(&mut msrs).collect();
    assert_eq!(held, [msr(MSR_ASYNC_PF_EN, 0x5009)]);
    assert_eq!(msrs.map(|msr| msr.value), [1, 0x5008, 0x6008]);
}
