// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Every group of a vCPU's state on real KVM: an unusual value in each goes in by `set_state` and must
//! come out by `state`, so that a group which either of them leaves out fails. Skipped without
//! /dev/kvm.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use common::{kvm, vm};
use hypervisor::{Hypervisor, MsrValue, TimeBase, VcpuState, VcpuStateError};
use kvm_bindings as kvm;
use serde_json::{Value, json};

/// Groups whose fields are known by name here; a new one has to be given a value below.
const GROUPS: [&str; 15] = [
    "version",
    "cpuid",
    "mp_state",
    "regs",
    "sregs",
    "pdptrs",
    "xsave",
    "xcrs",
    "debugregs",
    "lapic",
    "msrs",
    "events",
    "tsc",
    "nested",
    "ssp",
];

const CR0_PROTECTED: u64 = 0x11;
const CR0_PAGING: u64 = 1 << 31;
/// DE, PAE, OSFXSR, OSXMMEXCPT.
const CR4: u64 = 1 << 3 | 1 << 5 | 1 << 9 | 1 << 10;
const CR4_OSXSAVE: u64 = 1 << 18;
/// SYSCALL and NX.
const EFER: u64 = 1 | 1 << 11;

const LEAF_1_XSAVE: u32 = 1 << 26;
const RDTSCP: u32 = 1 << 27;

/// Registers that every x86-64 processor has, each with a value of its own.
const MSRS: [(u32, u64); 17] = [
    // SYSENTER.
    (0x174, 0x1230),
    (0x175, 0xffff_8000_0000_1110),
    (0x176, 0xffff_8000_0000_2220),
    // MTRRs: two variable ones, all kinds of fixed ones, the default. Then PAT.
    (0x200, 0x8000_0006),
    (0x201, 0xf_c000_0800),
    (0x20e, 0x1_0000_0001),
    (0x250, 0x0606_0606_0606_0600),
    (0x259, 0x0505_0505_0505_0505),
    (0x26f, 0x0404_0404_0404_0404),
    (0x2ff, 0xc00),
    (0x277, 0x0105_0406_0007_0406),
    // STAR, LSTAR, CSTAR, SFMASK, kernel GS base.
    (0xc000_0081, 0x0023_0010_0000_0000),
    (0xc000_0082, 0xffff_8000_0000_3330),
    (0xc000_0083, 0xffff_8000_0000_4440),
    (0xc000_0084, 0x4_7700),
    (0xc000_0102, 0xffff_8000_0000_5550),
    // A variable that a guest's kernel adds to its counter.
    (0x3b, 0x77),
];

/// The state of a vCPU that has just been made.
fn fresh(kvm: &Hypervisor) -> VcpuState {
    let (vm, _memory) = vm(kvm, false);
    let vcpu = vm.create_vcpu(0).unwrap();
    vcpu.init(&common::waiting(kvm)).unwrap();
    vcpu.state().unwrap()
}

/// What comes out after `state` has gone in.
fn through(kvm: &Hypervisor, state: &VcpuState) -> VcpuState {
    let text = serde_json::to_string(state).unwrap();
    let state: VcpuState = serde_json::from_str(&text).unwrap();
    let (vm, _memory) = vm(kvm, false);
    let vcpu = vm.create_vcpu(0).unwrap();
    vcpu.set_state(&state, &TimeBase::default()).unwrap();
    vcpu.state().unwrap()
}

fn leaf(kvm: &Hypervisor, function: u32, index: u32) -> kvm::kvm_cpuid_entry2 {
    let cpuid = kvm.supported_cpuid().unwrap();
    let leaves = cpuid.as_slice().iter();
    let find = |leaf: &&kvm::kvm_cpuid_entry2| (leaf.function, leaf.index) == (function, index);
    leaves.clone().find(find).copied().unwrap_or_default()
}

/// Bytes of a blob, up to `len_bytes`.
fn bytes(hex: &Value, len_bytes: usize) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    let mut bytes: Vec<u8> = (0..hex.len() / 2)
        .map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap())
        .collect();
    bytes.resize(len_bytes, 0);
    bytes
}

fn hex(bytes: &[u8]) -> Value {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap();
    json!(bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 0xf)]).collect::<String>())
}

/// A blob through a change of its bytes.
fn change(
    state: &VcpuState,
    name: &str,
    len_bytes: usize,
    change: impl FnOnce(&mut [u8]),
) -> VcpuState {
    let mut value = serde_json::to_value(state).unwrap();
    let mut all = bytes(&value[name], len_bytes);
    change(&mut all);
    value[name] = hex(&all);
    serde_json::from_value(value).unwrap()
}

fn blob(state: &VcpuState, name: &str, len_bytes: usize) -> Vec<u8> {
    bytes(&serde_json::to_value(state).unwrap()[name], len_bytes)
}

const XSAVE: usize = 4096;
const LAPIC: usize = 1024;
/// Task priority, spurious interrupt vector, entries of timer, LINT0 and errors, divider.
const LAPIC_REGISTERS: [(usize, u32); 6] = [
    (0x80, 0x50),
    (0xf0, 0x1fe),
    (0x320, 0x300ef),
    (0x350, 0x10731),
    (0x370, 0x100ee),
    (0x3e0, 0xb),
];

fn unusual(kvm: &Hypervisor) -> VcpuState {
    let mut state = fresh(kvm);
    let has_avx = leaf(kvm, 0xd, 0).eax & 4 != 0;
    // Some hosts keep the state and do not show the guest the instruction.
    let has_xsave = leaf(kvm, 1, 0).ecx & LEAF_1_XSAVE != 0;
    state.mp_state = kvm::KVM_MP_STATE_HALTED;
    state.regs = kvm::kvm_regs {
        rax: 0x1011,
        rbx: 0x2022,
        rcx: 0x3033,
        rdx: 0x4044,
        rsi: 0x5055,
        rdi: 0x6066,
        rsp: 0x7077,
        rbp: 0x8088,
        r8: 0x9099,
        r9: 0xa0aa,
        r10: 0xb0bb,
        r11: 0xc0cc,
        r12: 0xd0dd,
        r13: 0xe0ee,
        r14: 0xf0ff,
        r15: 0x1_0111,
        rip: 0x2_0222,
        rflags: 0x8d7,
    };
    state.sregs.cr0 = CR0_PROTECTED;
    state.sregs.cr2 = 0x1234_5678;
    state.sregs.cr3 = 0x5000;
    state.sregs.cr4 = CR4 | if has_xsave { CR4_OSXSAVE } else { 0 };
    state.sregs.cr8 = 5;
    state.sregs.efer = EFER;
    state.sregs.fs.base = 0x11_1000;
    state.sregs.gs.base = 0x22_2000;
    state.sregs.gdt = kvm::kvm_dtable { base: 0x33_3000, limit: 0x77, ..Default::default() };
    state.sregs.idt = kvm::kvm_dtable { base: 0x44_4000, limit: 0x88, ..Default::default() };
    state.xcrs.xcrs[0].value = if has_avx { 7 } else { 1 };
    state.debugregs.db = [0x1000, 0x2000, 0x3000, 0x4000];
    state.debugregs.dr6 = 0xffff_0ff5;
    state.debugregs.dr7 = 0x455;
    for (index, value) in MSRS {
        let here = state.msrs.iter_mut().find(|msr| msr.index == index);
        here.unwrap_or_else(|| panic!("MSR {index:#x} is not saved")).value = value;
    }
    if leaf(kvm, 0x8000_0001, 0).edx & RDTSCP != 0 {
        state.msrs.iter_mut().find(|msr| msr.index == 0xc000_0103).unwrap().value = 0x765;
    }
    // KVM never tells the vector of a start-up message: that is in the local APIC until it is taken.
    state.events.exception.injected = 1;
    state.events.exception.nr = 14;
    state.events.exception.has_error_code = 1;
    state.events.exception.error_code = 5;
    state.events.nmi.pending = 1;
    state.events.nmi.masked = 1;
    state.events.interrupt.shadow = 1;
    if kvm.capabilities().triple_fault_event {
        state.version = 2;
        state.events.flags |= kvm::KVM_VCPUEVENT_VALID_TRIPLE_FAULT;
        state.events.triple_fault.pending = 1;
    }
    state.ssp = state.ssp.map(|_| 0x7fff_1230);
    let state = change(&state, "xsave", XSAVE, |area| {
        // Control word, MXCSR, the first ST and XMM registers, the upper half of YMM0, and what is valid.
        area[..2].copy_from_slice(&0x27f_u16.to_le_bytes());
        area[24..28].copy_from_slice(&0x1fa0_u32.to_le_bytes());
        area[32..40].fill(0x5a);
        area[160..176].fill(0xa5);
        area[512] = if has_avx { 7 } else { 3 };
        if has_avx {
            area[576..592].fill(0x3c);
        }
    });
    change(&state, "lapic", LAPIC, |page| {
        for (at, value) in LAPIC_REGISTERS {
            page[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
    })
}

#[test]
fn every_group_of_a_vcpus_state_comes_out_as_it_went_in() {
    let Some(kvm) = kvm() else { return };
    let (before, odd) = (fresh(&kvm), unusual(&kvm));
    let here = through(&kvm, &odd);
    assert_eq!(here.version, odd.version);
    assert_eq!(here.mp_state, odd.mp_state);
    assert_eq!(here.regs, odd.regs);
    assert_eq!(here.xcrs, odd.xcrs);
    assert_eq!(here.debugregs, odd.debugregs);
    assert_eq!(here.events, odd.events);
    assert_eq!(here.ssp, odd.ssp);
    // Segments are compared by what was set: real-mode access rights are made up by some KVMs.
    let fields = |s: &VcpuState| {
        let s = &s.sregs;
        let tables = [s.gdt.base, s.gdt.limit.into(), s.idt.base, s.idt.limit.into()];
        ([s.cr0, s.cr2, s.cr3, s.cr4, s.cr8, s.efer, s.apic_base, s.fs.base, s.gs.base], tables)
    };
    assert_eq!(fields(&here), fields(&odd));
    let part =
        |s: &VcpuState, name, from: usize, len: usize| blob(s, name, XSAVE)[from..][..len].to_vec();
    for (what, from, len) in [
        ("control word", 0, 2),
        ("MXCSR", 24, 4),
        ("ST0", 32, 8),
        ("XMM0", 160, 16),
        ("YMM0", 576, 16),
    ] {
        if what == "YMM0" && odd.xcrs.xcrs[0].value & 4 == 0 {
            continue;
        }
        assert_eq!(part(&here, "xsave", from, len), part(&odd, "xsave", from, len), "{what}");
        assert_ne!(part(&odd, "xsave", from, len), part(&before, "xsave", from, len), "{what}");
    }
    for (at, value) in LAPIC_REGISTERS {
        assert_eq!(part(&here, "lapic", at, 4), value.to_le_bytes(), "local APIC {at:#x}");
        assert_ne!(part(&before, "lapic", at, 4), value.to_le_bytes(), "local APIC {at:#x}");
    }
    let changed = odd.msrs.iter().filter(|msr| !before.msrs.contains(msr));
    assert!(changed.clone().count() >= MSRS.len());
    for msr in changed {
        assert!(here.msrs.contains(msr), "{msr:x?}, and here {:x?}", find(&here.msrs, msr.index));
    }
    // What is not given a value here is new.
    let names = serde_json::to_value(&odd).unwrap();
    for name in names.as_object().unwrap().keys() {
        assert!(GROUPS.contains(&name.as_str()), "no unusual value for {name}");
    }
    let unusual = [
        odd.mp_state != before.mp_state,
        odd.regs != before.regs,
        odd.xcrs != before.xcrs || odd.xcrs.xcrs[0].value == 1,
        odd.debugregs != before.debugregs,
        odd.events != before.events,
    ];
    assert_eq!(unusual, [true; 5]);
}

fn find(msrs: &[MsrValue], index: u32) -> Option<&MsrValue> {
    msrs.iter().find(|msr| msr.index == index)
}

#[test]
fn features_and_counter_come_out_as_they_went_in() {
    let Some(kvm) = kvm() else { return };
    let mut odd = fresh(&kvm);
    // A brand of its own.
    for entry in odd.cpuid.iter_mut().filter(|entry| entry.function == 0x8000_0003) {
        entry.answer = [0x6474_6f47, 0x6977, 7, 8];
    }
    odd.tsc.value = odd.tsc.value.wrapping_add(1 << 50);
    odd.tsc.offset = odd.tsc.offset.map(|offset| offset.wrapping_add(1 << 50));
    let here = through(&kvm, &odd);
    let brand = |state: &VcpuState| {
        let leaf = state.cpuid.iter().find(|entry| entry.function == 0x8000_0003);
        leaf.map(|leaf| leaf.answer)
    };
    assert_eq!(brand(&here), brand(&odd));
    assert_eq!(here.cpuid.len(), odd.cpuid.len());
    if odd.tsc.offset == Some(1 << 50) && here.tsc.offset == Some(0) {
        test_skip::skip!("the TSC, as this host cannot move a guest's TSC away from its own");
        return;
    }
    assert!(here.tsc.value >= odd.tsc.value, "{:?} {:?}", here.tsc, odd.tsc);
}

#[test]
fn page_directory_pointers_come_out_as_they_went_in() {
    let Some(kvm) = kvm() else { return };
    if !kvm.capabilities().sregs2 {
        test_skip::skip!("this KVM does not tell page directory pointers");
        return;
    }
    let mut odd = fresh(&kvm);
    odd.sregs.cr0 = CR0_PROTECTED | CR0_PAGING;
    odd.sregs.cr3 = 0x6000;
    odd.sregs.cr4 = 1 << 5;
    odd.pdptrs = Some([0x7001, 0x8001, 0x9001, 0xa001]);
    let here = through(&kvm, &odd);
    if here.sregs.cr0 & CR0_PAGING == 0 {
        test_skip::skip!("this KVM does not take 32-bit paging");
        return;
    }
    assert_eq!(here.pdptrs, odd.pdptrs);
}

/// Both tell of the host before anything is set.
#[test]
fn what_this_kvm_cannot_be_told_is_refused_by_name() {
    let Some(kvm) = kvm() else { return };
    let (vm, _memory) = vm(&kvm, false);
    let mut state = fresh(&kvm);
    state.version = 2;
    if !kvm.capabilities().one_reg {
        state.ssp = Some(8);
        let refused = vm.create_vcpu(0).unwrap().set_state(&state, &TimeBase::default());
        assert!(matches!(refused, Err(VcpuStateError::ShadowStack)), "{refused:?}");
        state.ssp = None;
    }
    if !kvm.capabilities().triple_fault_event {
        state.events.flags |= kvm::KVM_VCPUEVENT_VALID_TRIPLE_FAULT;
        state.events.triple_fault.pending = 1;
        let refused = vm.create_vcpu(1).unwrap().set_state(&state, &TimeBase::default());
        assert!(matches!(refused, Err(VcpuStateError::TripleFault)), "{refused:?}");
    }
}
