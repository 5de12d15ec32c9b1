// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Every field of both PICs and of the IOAPIC on real KVM: an unusual value in each goes in and must come out of the
//! same chip, in the form in which it is saved. Skipped without /dev/kvm.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use common::{kvm, vm};
use hypervisor::{IrqchipState, IrqchipStateError, Vm};
use serde_json::{Value, json};

/// Length of the kernel's `struct kvm_irqchip`, and where the chip's own state begins.
const LEN_BYTES: usize = 520;
const CHIP: usize = 8;
const PIC_LEN_BYTES: usize = 16;
const IOAPIC_LEN_BYTES: usize = 24 + 24 * 8;
const PINS: usize = 24;
const MASKED: u64 = 1 << 16;

/// The fields of a PIC in their order, for a chip of which all lines are masked, so that nothing is delivered.
fn pic(seed: u8) -> [u8; PIC_LEN_BYTES] {
    [
        0x10 + seed, // levels seen last
        0x20 + seed, // requests
        0xff,        // all lines masked
        0x40,        // in service
        3,           // priority
        0x50 + 8 * seed,
        1, // the in-service register is read
        0,
        1, // special mask
        seed,
        1,
        1,
        1,
        1,
        0x08 << seed, // level-triggered lines
        0xf8,
    ]
}

/// The fields of the IOAPIC in their order. All pins are masked, and two have requests that wait for that to end.
fn ioapic() -> [u8; IOAPIC_LEN_BYTES] {
    let mut bytes = [0; IOAPIC_LEN_BYTES];
    bytes[..8].copy_from_slice(&0xfec0_0000_u64.to_le_bytes());
    // Register select, id, requests, padding.
    for (at, word) in [(8, 0x15_u32), (12, 3), (16, 1 << 5 | 1 << 20)] {
        bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    for pin in 0..PINS {
        let vector = 0x30 + pin as u64;
        let is_level = 1 << 15;
        let destination = (pin as u64 + 1) << 56;
        let low_priority = 1 << 8;
        let entry = vector | low_priority | is_level | MASKED | destination;
        bytes[24 + 8 * pin..32 + 8 * pin].copy_from_slice(&entry.to_le_bytes());
    }
    bytes
}

fn hex(bytes: &[u8]) -> Value {
    let digit = |half: u8| char::from_digit(u32::from(half), 16).unwrap();
    json!(bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect::<String>())
}

fn chip_of(state: &IrqchipState, name: &str) -> Vec<u8> {
    let state = serde_json::to_value(state).unwrap();
    let hex = state[name].as_str().unwrap();
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
    let mut bytes: Vec<u8> = (0..hex.len() / 2).map(byte).collect();
    bytes.resize(LEN_BYTES, 0);
    bytes.split_off(CHIP)
}

/// The state with this in place of a chip's own.
fn with_chip(state: &IrqchipState, name: &str, chip: &[u8]) -> IrqchipState {
    let mut state = serde_json::to_value(state).unwrap();
    let mut bytes = vec![0; LEN_BYTES];
    bytes[CHIP..CHIP + chip.len()].copy_from_slice(chip);
    // Which chip it is must not be taken from the state.
    bytes[0] = 0x77;
    state[name] = hex(&bytes);
    serde_json::from_value(state).unwrap()
}

fn machine() -> Option<Vm> {
    let kvm = kvm()?;
    let (vm, _memory) = vm(&kvm, false);
    vm.create_vcpu(0).unwrap();
    Some(vm)
}

#[test]
fn every_field_of_each_controller_comes_out_of_the_one_it_went_into() {
    let (Some(vm), Some(second)) = (machine(), machine()) else { return };
    let fresh = vm.irqchips().unwrap();
    let odd = with_chip(&fresh, "pic_master", &pic(1));
    let odd = with_chip(&odd, "pic_slave", &pic(2));
    let odd = with_chip(&odd, "ioapic", &ioapic());
    vm.set_irqchips(&odd).unwrap();
    let saved = vm.irqchips().unwrap();
    let text = serde_json::to_string(&saved).unwrap();
    second.set_irqchips(&serde_json::from_str(&text).unwrap()).unwrap();
    for here in [saved, second.irqchips().unwrap()] {
        assert_eq!(chip_of(&here, "pic_master")[..PIC_LEN_BYTES], pic(1), "first PIC");
        assert_eq!(chip_of(&here, "pic_slave")[..PIC_LEN_BYTES], pic(2), "second PIC");
        assert_eq!(chip_of(&here, "ioapic")[..IOAPIC_LEN_BYTES], ioapic(), "IOAPIC");
    }
}

/// One that fails leaves what comes after it as it was.
#[test]
fn a_state_that_is_too_long_is_refused_and_changes_no_chip_after_it() {
    let Some(vm) = machine() else { return };
    let fresh = vm.irqchips().unwrap();
    for (name, chip) in [("pic_slave", &pic(2)[..]), ("pic_master", &pic(1)[..])] {
        let mut long = serde_json::to_value(with_chip(&fresh, name, chip)).unwrap();
        long["pic_master"] = hex(&[1; LEN_BYTES + 1]);
        let long: IrqchipState = serde_json::from_value(long).unwrap();
        assert!(matches!(vm.set_irqchips(&long), Err(IrqchipStateError::Blob(_))));
        assert_eq!(vm.irqchips().unwrap(), fresh);
    }
}
