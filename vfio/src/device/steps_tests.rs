// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A function that is taken from the guest while a thread is in a call for its state.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pci::{PciDevice as _, PciDeviceState, register};

use super::VfioPciDevice;
use crate::fakes::FakeFunction;
use crate::migration::fakes::{FakeHang, StepFailure};
use crate::migration::{DeviceState, MigrationError};
use crate::tests::Rig;

/// A function that can be moved.
fn rig() -> Rig {
    Rig::prepared(FakeFunction::config(), |host| host.migration.allow(true, b"rings"))
}

/// Has calls of this kind hang until the returned lock is free.
fn hang(rig: &Rig, kind: FakeHang) -> Arc<Mutex<()>> {
    let gate = Arc::new(Mutex::new(()));
    rig.host.migration.hardware_mut().hang = Some((kind, Arc::clone(&gate)));
    gate
}

fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        thread::yield_now();
    }
}

/// A function that is stopped and may reach memory, and the state of another one, which its driver uses.
fn before_restore() -> (Rig, PciDeviceState) {
    let [there, here] = [rig(), rig()];
    for rig in [&there, &here] {
        rig.gate.open();
    }
    there.device.write_config(register::COMMAND, &[0x06, 0]);
    for rig in [&there, &here] {
        rig.device.stop().unwrap();
    }
    (here, there.device.save().unwrap())
}

/// Restores a state on another thread, which comes to a call, and returns why it cannot.
fn restoring(rig: &Rig, state: PciDeviceState, call: &str) -> JoinHandle<String> {
    let device = Arc::clone(&rig.device);
    let restoring = thread::spawn(move || error_text::chain(&device.restore(&state).unwrap_err()));
    until(|| rig.device.call().is_some_and(|now| now.to_string().contains(call)));
    restoring
}

fn resets(rig: &Rig) -> u32 {
    *rig.host.resets.lock()
}

/// Reads the state on another thread, to its end or an error.
fn reading(device: &Arc<VfioPciDevice>) -> JoinHandle<Option<String>> {
    let mut reader = device.read_state().unwrap();
    thread::spawn(move || {
        loop {
            match reader.read(&mut [0; 64]) {
                Ok(0) => return None,
                Ok(_) => {}
                Err(error) => return Some(error_text::chain(&error)),
            }
        }
    })
}

#[test]
fn one_that_is_disarmed_while_it_is_read_is_left_to_the_thread_that_reads() {
    let rig = rig();
    rig.device.stop().unwrap();
    let gate = hang(&rig, FakeHang::Read);
    let closed = gate.lock();
    let reader = reading(&rig.device);
    until(|| rig.device.call().is_some_and(|call| call.to_string().contains("reading")));
    rig.device.disarm();
    assert!(rig.device.is_lost() && rig.device.is_hung());
    assert!(rig.host.is_left.load(Ordering::Relaxed), "it is not to be opened meanwhile");
    assert_eq!(resets(&rig), 0, "the kernel would wait for the call");
    drop(closed);
    assert!(reader.join().unwrap().is_some());
    assert!(rig.device.is_disarmed() && !rig.device.is_hung());
    assert!(!rig.host.is_left.load(Ordering::Relaxed), "its call has returned");
    assert_eq!(resets(&rig), 1);
    rig.device.disarm();
    assert_eq!(rig.device.leave(), "the end of its state");
    assert_eq!(resets(&rig), 1);
}

#[test]
fn one_that_is_disarmed_in_a_pause_is_left_to_the_thread_that_pauses() {
    let rig = rig();
    let gate = hang(&rig, FakeHang::Into(DeviceState::Stop));
    let closed = gate.lock();
    let device = Arc::clone(&rig.device);
    let pausing = thread::spawn(move || device.stop());
    until(|| rig.device.call().is_some());
    rig.device.disarm();
    assert!(rig.device.is_lost() && rig.device.is_hung());
    assert_eq!(resets(&rig), 0);
    drop(closed);
    assert!(matches!(pausing.join().unwrap(), Err(MigrationError::Left)));
    assert!(rig.device.is_disarmed());
    assert_eq!(resets(&rig), 1);
}

#[test]
fn one_that_is_disarmed_between_steps_is_reset_at_once() {
    let rig = rig();
    rig.device.stop().unwrap();
    let mut reader = rig.device.read_state().unwrap();
    assert!(reader.read(&mut [0; 4]).is_ok());
    rig.device.disarm();
    assert!(rig.device.is_disarmed() && !rig.device.is_left());
    assert!(!rig.host.is_left.load(Ordering::Relaxed));
    let error = error_text::chain(&reader.read(&mut [0; 4]).unwrap_err());
    assert!(error.contains("gone for the guest"), "{error}");
    drop(reader);
    assert_eq!(resets(&rig), 1);
}

#[test]
fn one_that_has_failed_is_left_while_its_thread_resets_it() {
    let rig = rig();
    rig.device.stop().unwrap();
    rig.host.migration.hardware_mut().failure = Some((DeviceState::StopCopy, StepFailure::Failed));
    let gate = hang(&rig, FakeHang::Reset);
    let closed = gate.lock();
    let reader = reading(&rig.device);
    until(|| resets(&rig) == 1);
    assert_eq!(rig.device.leave(), "the end of its state");
    assert!(rig.device.is_hung(), "it did not wait for the reset");
    assert_eq!(resets(&rig), 1);
    drop(closed);
    assert!(reader.join().unwrap().is_some());
    assert!(rig.device.is_disarmed());
    assert_eq!(resets(&rig), 1, "once is enough");
}

#[test]
fn one_that_hangs_at_the_end_of_its_load_is_left_without_a_wait() {
    let (rig, state) = before_restore();
    let gate = hang(&rig, FakeHang::Into(DeviceState::Stop));
    let closed = gate.lock();
    let restoring = restoring(&rig, state, "from state RESUMING to STOP");
    let device = Arc::clone(&rig.device);
    let leaving = thread::spawn(move || device.leave());
    let end = Instant::now() + Duration::from_secs(20);
    until(|| leaving.is_finished() || Instant::now() > end);
    assert!(leaving.is_finished(), "it waits for the call");
    assert_eq!(leaving.join().unwrap(), "its way from state RESUMING to STOP");
    assert_eq!(resets(&rig), 0);
    drop(closed);
    let error = restoring.join().unwrap();
    assert!(error.contains("was left behind"), "{error}");
    assert!(resets(&rig) == 1 && !rig.host.is_bus_master());
}

#[test]
fn one_that_is_lost_while_it_takes_its_state_is_not_set_to_work() {
    let (rig, state) = before_restore();
    let gate = hang(&rig, FakeHang::Write);
    let closed = gate.lock();
    let restoring = restoring(&rig, state, "bytes of its state");
    rig.device.lose();
    drop(closed);
    let error = restoring.join().unwrap();
    assert!(error.contains("gone for the guest"), "{error}");
    assert!(!rig.host.is_bus_master(), "it reaches no memory");
}
