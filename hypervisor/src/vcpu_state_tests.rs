// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the saved form of a vCPU that need no KVM.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::cell::RefCell;
use std::collections::BTreeMap;

use kvm_bindings::{kvm_cpuid_entry2, kvm_segment};
use proptest::prelude::*;

use super::*;
use crate::shadow_stack::{self, OneRegs};
use crate::vcpu_save::{is_diagnostic, plain_events};

fn sample() -> VcpuState {
    VcpuState {
        version: VCPU_STATE_VERSION,
        cpuid: vec![CpuidEntry { function: 7, index: 1, flags: 1, answer: [1, 2, 3, 4] }],
        mp_state: 3,
        regs: kvm_regs { rip: 0x1234_5678_9abc_def0, ..Default::default() },
        sregs: kvm_sregs {
            cs: kvm_segment { base: 0xffff_0000, selector: 0xf000, ..Default::default() },
            cr3: 0x1000,
            ..Default::default()
        },
        pdptrs: Some([1, 2, 3, 4]),
        xsave: Blob::new(&[0x7f, 3, 0, 1]),
        xcrs: kvm_xcrs { nr_xcrs: 1, ..Default::default() },
        debugregs: kvm_debugregs { dr7: 0x400, ..Default::default() },
        lapic: Blob::new(&[0xff; 1024]),
        msrs: vec![MsrValue { index: 0xc000_0082, value: u64::MAX }],
        events: kvm_vcpu_events { sipi_vector: 9, ..Default::default() },
        tsc: TscState { khz: Some(2_000_000), value: 5, offset: Some(u64::MAX) },
        nested: None,
        ssp: Some(0x7fff_0008),
    }
}

#[test]
fn every_field_survives_json() {
    let state = sample();
    let text = serde_json::to_string(&state).unwrap();
    assert_eq!(serde_json::from_str::<VcpuState>(&text).unwrap(), state);
}

#[test]
fn a_sound_state_passes_the_check() {
    sample().check().unwrap();
}

#[test]
fn another_version_is_refused() {
    for version in [0, VCPU_STATE_VERSION + 1] {
        let state = VcpuState { version, ..sample() };
        assert!(matches!(state.check(), Err(VcpuStateError::Version(found)) if found == version));
    }
}

#[test]
fn version_1_has_nothing_that_came_later() {
    let old = VcpuState { version: 1, ssp: None, ..sample() };
    old.check().unwrap();
    // A program of that time knows no such field, and refuses such a flag of events.
    assert!(!serde_json::to_string(&old).unwrap().contains("ssp"));
    let refused = |state: VcpuState| match state.check() {
        Err(VcpuStateError::NotInVersion { version: 1, what }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(VcpuState { ssp: Some(0), ..old.clone() }), "a shadow-stack pointer");
    let mut events = old.events;
    events.flags |= KVM_VCPUEVENT_VALID_TRIPLE_FAULT;
    assert_eq!(plain_events(events), old.events);
    events.triple_fault.pending = 1;
    assert_eq!(plain_events(events), events);
    assert_eq!(refused(VcpuState { events, ..old }), "a pending triple fault");
}

#[test]
fn an_unknown_field_is_refused_by_name() {
    let mut value = serde_json::to_value(sample()).unwrap();
    value["later"] = 1.into();
    let error = serde_json::from_value::<VcpuState>(value).unwrap_err();
    assert!(error.to_string().contains("`later`"), "{error}");
}

#[test]
fn lists_have_limits() {
    let state = VcpuState { cpuid: vec![CpuidEntry::default(); 257], ..sample() };
    assert!(matches!(state.check(), Err(VcpuStateError::TooMany { count: 257, .. })));
    let state = VcpuState { msrs: vec![MsrValue::default(); 1025], ..sample() };
    assert!(matches!(state.check(), Err(VcpuStateError::TooMany { count: 1025, .. })));
}

#[test]
fn an_oversized_local_apic_is_refused() {
    let state = VcpuState { lapic: Blob::new(&[1; 1025]), ..sample() };
    assert!(matches!(state.check(), Err(VcpuStateError::Blob { what: "local APIC", .. })));
}

#[test]
fn a_nested_state_that_lies_about_its_size_is_refused() {
    let with_size = |size: u32, bytes: usize| {
        let mut buffer = vec![0_u8; bytes];
        buffer[4..8].copy_from_slice(&size.to_le_bytes());
        buffer[bytes - 1] = 1;
        VcpuState { nested: Some(Blob::new(&buffer)), ..sample() }.check()
    };
    with_size(128, 128).unwrap();
    with_size(8320, 8320).unwrap();
    // The kernel would read past the end of the buffer.
    assert!(matches!(with_size(8321, 8320), Err(VcpuStateError::Nested)));
    assert!(matches!(with_size(u32::MAX, 128), Err(VcpuStateError::Nested)));
    assert!(matches!(with_size(127, 128), Err(VcpuStateError::Nested)));
    assert!(matches!(with_size(128, 8321), Err(VcpuStateError::Blob { .. })));
}

#[test]
fn refused_registers_are_named_with_their_values() {
    let error = VcpuStateError::MsrsRefused(vec![MsrValue { index: 0x10a, value: 0x2b }]);
    assert_eq!(error.to_string(), "this host does not take MSR 0x10a = 0x2b");
    assert!(!is_diagnostic(0x10a));
    assert!(is_diagnostic(0xc1));
}

#[test]
fn pages_shared_with_kvm_are_found_with_the_second_half_of_a_straddling_one() {
    let msr = |index, value| MsrValue { index, value };
    let state = VcpuState {
        msrs: vec![
            msr(0x4b56_4d01, 0x5ff1),
            msr(0x4b56_4d03, 0x9041),
            msr(0x4b56_4d04, 0),
            msr(0x174, 0x7_0000),
        ],
        ..sample()
    };
    assert_eq!(Vec::from_iter(state.pages_used_by_kvm()), [0x5000, 0x6000, 0x9000]);
}

#[test]
fn pages_that_kvm_fills_as_hyperv_are_found() {
    let msr = |index, value| MsrValue { index, value };
    let state = VcpuState {
        msrs: vec![
            msr(0x4000_0000, 0x8_1000),
            msr(0x4000_0001, 0x1001),
            msr(0x4000_0021, 0x2001),
            msr(0x4000_0073, 0x3001),
            msr(0x4000_0082, 0x4001),
            msr(0x4000_0083, 0x5001),
            msr(0x4000_0090, 0x1_0000),
        ],
        ..sample()
    };
    let pages = Vec::from_iter(state.pages_used_by_kvm());
    assert_eq!(pages, [0x1000, 0x2000, 0x3000, 0x4000, 0x5000]);
}

proptest! {
    #[test]
    fn any_text_is_a_state_or_an_error(cut in 0_usize..4000, byte in any::<u8>()) {
        let mut text = serde_json::to_vec(&sample()).unwrap();
        let at = cut % text.len();
        text[at] = byte;
        if let Ok(state) = serde_json::from_slice::<VcpuState>(&text) {
            let again = serde_json::from_str::<VcpuState>(&serde_json::to_string(&state).unwrap());
            prop_assert_eq!(again.unwrap(), state.clone());
            if state.check().is_ok() {
                prop_assert!((1..=VCPU_STATE_VERSION).contains(&state.version));
            }
        }
        prop_assert!(serde_json::from_slice::<VcpuState>(&text[..at]).is_err(), "cut at {}", at);
    }
}

proptest! {
    /// A state passes only within each of the limits that KVM is counted on to keep.
    #[test]
    fn what_passes_the_check_is_within_the_limits(
        version in 0..VCPU_STATE_VERSION + 2,
        counts in (0_usize..300, 0_usize..1100),
        lapic in 1000_usize..1050,
        nested in prop::option::of((0_u32..9000, 128_usize..8400)),
    ) {
        let nested_blob = nested.map(|(size, len)| {
            let mut buffer = vec![1; len];
            buffer[4..8].copy_from_slice(&size.to_le_bytes());
            Blob::new(&buffer)
        });
        let state = VcpuState {
            version,
            cpuid: vec![CpuidEntry::default(); counts.0],
            msrs: vec![MsrValue::default(); counts.1],
            lapic: Blob::new(&vec![1; lapic]),
            nested: nested_blob,
            ssp: None,
            ..sample()
        };
        // What is not there of it is zero: the buffer for the kernel has always its full length.
        let nested_fits =
            nested.is_none_or(|(size, len)| (128..=8320).contains(&size) && len <= 8320);
        let fits = (1..=VCPU_STATE_VERSION).contains(&version)
            && counts.0 <= 256
            && counts.1 <= 1024
            && lapic <= 1024
            && nested_fits;
        prop_assert_eq!(state.check().is_ok(), fits, "{:?}", state.check());
    }
}

/// A vCPU of a KVM that has the register, as far as that goes.
#[derive(Default)]
struct WithPointer {
    registers: RefCell<BTreeMap<u64, Vec<u8>>>,
}

impl OneRegs for WithPointer {
    fn get(&self, number: u64, bytes: &mut [u8]) -> Result<(), kvm_ioctls::Error> {
        let registers = self.registers.borrow();
        let value = registers.get(&number).ok_or_else(|| kvm_ioctls::Error::new(libc::ENOENT))?;
        bytes.copy_from_slice(value);
        Ok(())
    }

    fn set(&self, number: u64, bytes: &[u8]) -> Result<(), kvm_ioctls::Error> {
        self.registers.borrow_mut().insert(number, bytes.to_vec());
        Ok(())
    }
}

#[test]
fn the_pointer_of_shadow_stacks_goes_from_one_vcpu_to_the_other() {
    // As Linux 6.18 has it: x86, of KVM's own kind, 64 bits, the first.
    const NUMBER: u64 = 0x2030_0003_0000_0000;
    const POINTER: u64 = 0x7f12_3456_7ff8;
    let leaf = |ecx| kvm_cpuid_entry2 { function: 7, ecx, ..Default::default() };
    let (source, destination) = (WithPointer::default(), WithPointer::default());
    source.set(NUMBER, &POINTER.to_ne_bytes()).unwrap();

    let ssp = shadow_stack::save(&source, &[leaf(1 << 7)]).unwrap();
    let state = VcpuState { version: 2, ssp, ..sample() };
    let json = serde_json::to_string(&state).unwrap();
    let read: VcpuState = serde_json::from_str(&json).unwrap();
    read.check().unwrap();
    shadow_stack::restore(&destination, read.ssp).unwrap();
    assert_eq!(*destination.registers.borrow(), *source.registers.borrow());
    assert_eq!(destination.registers.borrow()[&NUMBER], POINTER.to_ne_bytes());

    // KVM has no such register for a vCPU that was not shown the feature: it is not asked.
    let without = WithPointer::default();
    assert_eq!(shadow_stack::save(&without, &[leaf(!(1 << 7))]).unwrap(), None);
    shadow_stack::restore(&without, None).unwrap();
    assert!(without.registers.borrow().is_empty());
    assert!(shadow_stack::save(&without, &[leaf(1 << 7)]).is_err(), "nothing is made up");
}
