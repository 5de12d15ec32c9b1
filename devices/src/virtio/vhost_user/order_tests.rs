// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the order of requests to a vhost-user back end, and of what is checked before the first.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::mpsc::{Receiver, channel};

use super::VhostUser;
use super::scripted::{
    Answer, GET_FEATURES, GET_PROTOCOL_FEATURES, GET_VRING_BASE, PROTOCOL_FEATURES, Request,
    back_end,
};
use super::tests::{PATIENT, SET_VRING_CALL, SET_VRING_ENABLE, SET_VRING_KICK, driver, over, ram};
use crate::virtio::VirtioDevice;

/// A device that its driver has activated, and the requests that its back end gets.
fn started(answer: fn(&Request) -> Answer) -> (VhostUser, Receiver<(u32, Vec<u8>)>) {
    let (asked, requests) = channel();
    let recorded = move |request: &Request| {
        let _ = asked.send((request.number, request.payload.clone()));
        answer(request)
    };
    let ram = ram(1, true);
    let (mut device, _) = over(back_end(recorded).unwrap(), PATIENT, &ram).unwrap();
    driver(&ram).activate_all(&mut device);
    (device, requests)
}

/// Back ends built on vhost-user-backend before 0.22 read the eventfd of a ring that is not enabled, and forget it;
/// 0.12 and 0.13 disable a ring that gets one.
#[test]
fn a_ring_is_enabled_before_its_signal_comes_and_after_it() {
    let (mut device, requests) = started(Request::usual);
    let next = || requests.recv_timeout(PATIENT).unwrap();
    while next().0 != SET_VRING_CALL {}
    let enable = (SET_VRING_ENABLE, vec![0, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(next(), enable);
    assert_eq!(next().0, SET_VRING_KICK);
    assert_eq!(next(), enable);
    device.reset();
}

#[test]
fn a_ring_that_the_back_end_cannot_reach_costs_the_driver_a_reset_and_no_more() {
    let ram = ram(2, true);
    let (mut device, losses) = over(back_end(Request::usual).unwrap(), PATIENT, &ram).unwrap();
    let wrong = driver(&ram);
    let features = device.features();
    let mut state = wrong.fresh(features).queues[0].queue.state();
    // In both regions.
    state.desc_table = (4 << 20) - 16;
    wrong.activate_restored(&mut device, features, &[(0, state)]);
    wrong.interrupt.wait_broken();
    assert!(losses.try_recv().is_err(), "the back end is blamed for it");
    device.reset();
    let right = driver(&ram);
    right.activate_all(&mut device);
    device.pause();
    assert!(!right.interrupt.is_broken(), "the back end was left");
    device.reset();
}

#[test]
fn a_queue_is_disabled_before_it_is_stopped() {
    let (mut device, requests) = started(Request::usual);
    let next = || requests.recv_timeout(PATIENT).unwrap();
    while next().0 != SET_VRING_KICK {}
    assert_eq!(next().0, SET_VRING_ENABLE);
    device.pause();
    assert_eq!(next(), (SET_VRING_ENABLE, vec![0; 8]));
    assert_eq!(next().0, GET_VRING_BASE);
}

#[test]
fn a_back_end_without_confirmations_is_asked_whether_it_follows() {
    let (mut device, requests) = started(|request| match request.number {
        GET_PROTOCOL_FEATURES => request.reply(&(PROTOCOL_FEATURES & !(1 << 3)).to_le_bytes()),
        _ => request.usual(),
    });
    let next = || requests.recv_timeout(PATIENT).unwrap().0;
    while next() != SET_VRING_KICK {}
    assert_eq!((next(), next()), (SET_VRING_ENABLE, GET_FEATURES));
    device.reset();
}
