// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A function that sleeps and wakes, on a bus with everything around it made up.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;

use parking_lot::Mutex;

use crate::fakes::{FakeFunction, POWER_OFFSET as POWER};
use crate::tests::{BELOW, Rig};
use pci::{PciDevice as _, register};

const D0: [u8; 2] = [0, 0];
const D3_HOT: [u8; 2] = [3, 0];
const DECODE: [u8; 2] = [2, 0];

#[test]
fn bars_are_out_of_reach_while_the_function_sleeps() {
    let rig = Rig::new();
    rig.write(register::COMMAND, &DECODE);
    let shown = rig.slots.shown();
    assert!(!shown.is_empty());
    let (slots, seen) = (Arc::clone(&rig.slots), Arc::new(Mutex::new(Vec::new())));
    let saw = Arc::clone(&seen);
    let look = move || saw.lock().push(slots.shown().len());
    assert!(rig.host.on_power.set(Box::new(look)).is_ok());
    rig.write(POWER, &D3_HOT);
    assert_eq!(*seen.lock(), [0], "hidden before the host's function sleeps");
    assert_eq!(rig.slots.shown(), []);
    assert_eq!(rig.read(POWER), D3_HOT);
    rig.write(POWER, &D0);
    assert_eq!(*seen.lock(), [0, 0], "shown once it is awake");
    assert_eq!(rig.slots.shown(), shown);
    rig.check();
}

#[test]
fn a_bar_that_moves_meanwhile_is_shown_where_it_is() {
    let rig = Rig::new();
    rig.write(register::COMMAND, &DECODE);
    rig.write(POWER, &D3_HOT);
    let to = u32::try_from(BELOW + 0x10_0000).expect("below 4 GiB");
    rig.write(register::BAR0 + 8, &to.to_le_bytes());
    assert_eq!(rig.slots.shown(), []);
    rig.write(POWER, &D0);
    assert!(rig.slots.shown().iter().any(|range| range.start == u64::from(to)));
    rig.write(POWER, &D3_HOT);
    rig.write(register::COMMAND, &[0, 0]);
    rig.write(POWER, &D0);
    assert_eq!(rig.slots.shown(), [], "it does not decode");
    rig.check();
}

#[test]
fn a_function_that_does_not_sleep_or_is_reset_is_awake() {
    let rig = Rig::prepared(FakeFunction::config(), |host| {
        host.ignores_power.store(true, Ordering::Relaxed);
    });
    rig.write(register::COMMAND, &DECODE);
    let shown = rig.slots.shown();
    rig.write(POWER, &D3_HOT);
    assert_eq!(rig.slots.shown(), shown, "it is awake");
    rig.host.ignores_power.store(false, Ordering::Relaxed);
    rig.write(POWER, &D3_HOT);
    assert_eq!(rig.slots.shown(), []);
    rig.host.put_config(POWER, &D0);
    // Any later write finds it awake.
    rig.write(register::INTERRUPT_LINE, &[5]);
    assert_eq!(rig.slots.shown(), shown);
    rig.check();
}

#[test]
fn accesses_that_leave_the_guest_reach_a_sleeping_function_no_more() {
    let rig = Rig::prepared(FakeFunction::config(), |host| host.set_rom(0x800, &[0x55, 0xaa]));
    rig.write(register::COMMAND, &DECODE);
    let reads = |index, offset| {
        let mut data = [0; 2];
        rig.device.read_bar(index, offset, &mut data);
        data
    };
    rig.device.write_bar(0, 0x10, &[1, 2]);
    rig.write(POWER, &D3_HOT);
    assert_eq!((reads(0, 0x10), reads(pci::ROM_INDEX, 0)), ([0xff; 2], [0xff; 2]));
    rig.device.write_bar(0, 0x10, &[3, 4]);
    rig.write(POWER, &D0);
    assert_eq!((reads(0, 0x10), reads(pci::ROM_INDEX, 0)), ([1, 2], [0x55, 0xaa]));
    rig.check();
}

#[test]
fn it_is_woken_before_its_dma_is_stopped() {
    let rig = Rig::new();
    rig.write(register::COMMAND, &DECODE);
    rig.write(POWER, &D3_HOT);
    rig.host.config_writes.lock().clear();
    rig.device.disarm();
    let writes = rig.host.config_writes.lock().clone();
    assert_eq!(writes, [(POWER, vec![0]), (register::COMMAND, DECODE.to_vec())]);
}

#[test]
fn an_access_during_a_write_that_wakes_it_arrives() {
    let rig = Rig::new();
    rig.write(register::COMMAND, &DECODE);
    let (device, threads) = (Arc::clone(&rig.device), Arc::new(Mutex::new(Vec::new())));
    let (begun, has_begun) = mpsc::channel();
    let (begun, has_begun, started) =
        (Mutex::new(begun), Mutex::new(has_begun), Arc::clone(&threads));
    // On another vCPU, while the function counts as asleep: it stays awake.
    let access = move || {
        let (device, begun) = (Arc::clone(&device), begun.lock().clone());
        started.lock().push(thread::spawn(move || {
            begun.send(()).unwrap();
            device.write_bar(0, 0x10, &[5]);
        }));
        has_begun.lock().recv().unwrap();
    };
    assert!(rig.host.on_power.set(Box::new(access)).is_ok());
    rig.write(POWER, &D0);
    threads.lock().drain(..).for_each(|thread| thread.join().unwrap());
    let mut data = [0];
    rig.device.read_bar(0, 0x10, &mut data);
    assert_eq!(data, [5]);
    rig.check();
}
