// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of file systems of vhost-user whose back ends give and take their states.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::json;
use vm_memory::GuestAddressSpace as _;

use super::scripted::{
    Answer, CHECK_DEVICE_STATE, GET_PROTOCOL_FEATURES, MORE_PROTOCOL_FEATURES, Request,
    SET_DEVICE_STATE_FD, back_end,
};
use super::session::Session;
use super::tests::{PATIENT, SHORT, config, losses, ram};
use super::*;
use crate::virtio::{StateError, VirtioDevice as _};

const PROTOCOL_DEVICE_STATE: u64 = 1 << 19;
/// The answer that no other descriptor is to be used.
const USE_THIS: u64 = 1 << 8;
const FAILED: u64 = 1 << 8 | 1;

fn made(answer: impl FnMut(&Request) -> Answer + Send + 'static) -> (VhostUser, Receiver<String>) {
    made_within(answer, PATIENT)
}

fn made_within(
    answer: impl FnMut(&Request) -> Answer + Send + 'static,
    limit: Duration,
) -> (VhostUser, Receiver<String>) {
    let kind = VhostUserKind::Fs { tag: "tag".to_owned() };
    let session = Session::over(back_end(answer).unwrap(), kind.needs(1), limit).unwrap();
    let ram = ram(1, true);
    let config = VhostUserConfig { kind, ..config(1) };
    let (on_lost, lost) = losses();
    (VhostUser::over(session, config, &ram.guest_memory().memory(), on_lost).unwrap(), lost)
}

/// A back end that does something with the descriptor, and says how the transfer has ended.
fn transferring(
    mut transfer: impl FnMut(bool, File) + Send + 'static,
    begun: u64,
    done: u64,
) -> impl FnMut(&Request) -> Answer + Send + 'static {
    move |request| match request.number {
        GET_PROTOCOL_FEATURES => request.reply(&MORE_PROTOCOL_FEATURES.to_le_bytes()),
        SET_DEVICE_STATE_FD => {
            let is_load = request.payload[0] == 1;
            assert_eq!(request.payload[4..], [0; 4], "the phase: stopped");
            transfer(is_load, request.file.as_ref().unwrap().try_clone().unwrap());
            request.reply(&begun.to_le_bytes())
        }
        CHECK_DEVICE_STATE => request.reply(&done.to_le_bytes()),
        _ => request.usual_of_all(),
    }
}

#[test]
fn a_state_goes_from_one_back_end_to_another_as_it_is() {
    let given: Vec<u8> =
        (0..250_000_u32).flat_map(|at| (at.wrapping_mul(2_654_435_761)).to_le_bytes()).collect();
    let gives = given.clone();
    let source = transferring(
        move |is_load, mut file| {
            assert!(!is_load);
            let gives = gives.clone();
            std::thread::spawn(move || file.write_all(&gives).unwrap());
        },
        USE_THIS,
        0,
    );
    let (device, _lost) = made(source);
    let handle = device.handle();
    assert!(handle.has_state());
    handle.fetch_state().unwrap();
    let state = device.save();
    assert_eq!((state.kind.as_str(), state.version), ("vhost-user-fs", 1));

    let (taken, states) = channel();
    let destination = transferring(
        move |is_load, mut file| {
            assert!(is_load);
            let taken = taken.clone();
            std::thread::spawn(move || {
                let mut state = Vec::new();
                file.read_to_end(&mut state).unwrap();
                taken.send(state).unwrap();
            });
        },
        USE_THIS,
        0,
    );
    let (mut device, _lost) = made(destination);
    device.restore(&state).unwrap();
    assert!(states.recv_timeout(PATIENT).unwrap() == given, "other bytes");
}

#[test]
fn a_state_that_was_not_given_is_none() {
    let (device, _lost) = made(transferring(|_, _| (), USE_THIS, 0));
    let state = device.save();
    let (mut device, _lost) = made(transferring(|_, _| (), USE_THIS, 0));
    assert!(matches!(device.restore(&state), Err(StateError::Invalid { .. })));
    for wrong in [json!("0"), json!("0g"), json!("é0"), json!(1), json!(null)] {
        let mut other = state.clone();
        other.data["back_end"] = wrong.clone();
        device.restore(&other).expect_err(&wrong.to_string());
    }
}

#[test]
fn a_back_end_that_gives_none_is_named_and_goes_on() {
    let refuses = |begun: u64, done: u64| {
        let (device, lost) = made(transferring(|_, _| (), begun, done));
        let error = device.handle().fetch_state().unwrap_err().to_string();
        assert!(error.contains("has not given its state"), "{error}");
        assert!(!device.handle().is_lost() && lost.try_recv().is_err());
    };
    refuses(FAILED, 0);
    refuses(USE_THIS, 1);
    let (device, _lost) = made(|request| match request.number {
        GET_PROTOCOL_FEATURES => {
            request.reply(&(MORE_PROTOCOL_FEATURES & !PROTOCOL_DEVICE_STATE).to_le_bytes())
        }
        _ => request.usual_of_all(),
    });
    assert!(!device.handle().has_state());
    device.handle().fetch_state().unwrap_err();
}

#[test]
fn a_back_end_that_does_not_take_a_state_is_named() {
    let (device, _lost) = made(transferring(
        |_, mut file| {
            std::thread::spawn(move || file.write_all(b"state").unwrap());
        },
        USE_THIS,
        0,
    ));
    device.handle().fetch_state().unwrap();
    let state = device.save();
    for (begun, done) in [(FAILED, 0), (USE_THIS, 1)] {
        let (mut device, _lost) = made(transferring(|_, _| (), begun, done));
        let error = device.restore(&state).unwrap_err().to_string();
        assert!(error.contains("has not taken its state"), "{error}");
    }
}

#[test]
fn a_state_without_an_end_is_not_waited_for() {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keeps = Arc::clone(&kept);
    let answer = transferring(move |_, file| keeps.lock().push(file), USE_THIS, 0);
    let (device, lost) = made_within(answer, SHORT);
    let began = std::time::Instant::now();
    device.handle().fetch_state().unwrap_err();
    assert!(began.elapsed() < PATIENT && lost.try_recv().is_err());
}

#[test]
fn a_state_that_is_too_long_is_refused() {
    let (device, _lost) = made(transferring(
        |_, mut file| {
            std::thread::spawn(move || {
                let part = vec![7; 1 << 20];
                // Nothing reads it in the end.
                while file.write_all(&part).is_ok() {}
            });
        },
        USE_THIS,
        0,
    ));
    let error = error_text::chain(&device.handle().fetch_state().unwrap_err());
    assert!(error.contains("too long"), "{error}");
}
