// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A real-time clock, seen from its driver.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{SystemTime, UNIX_EPOCH};

use super::{Rtc, RtcConfig};
use crate::virtio::test_driver::{BORDER, DATA, Driver, readable, writable};

const READ: u8 = 1;
const ANSWER: u64 = DATA + 0x100;

fn started() -> (Rtc, Driver) {
    let mut device = Rtc::new(RtcConfig { id: "rtc".to_owned() });
    let driver = Driver::new(1, 16);
    driver.activate_all(&mut device);
    (device, driver)
}

fn now_ns() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap()
}

#[test]
fn it_shows_the_time_of_the_host() {
    let (_device, mut driver) = started();
    driver.write(DATA, &[READ]);
    driver.track_writes();
    let before = now_ns();
    // Parts of any size will do.
    driver.queues[0].add(&[
        readable(DATA, 3),
        readable(DATA + 3, 13),
        writable(BORDER - 10, 12),
        writable(BORDER + 2, 40),
    ]);
    driver.queues[0].kick();
    assert_eq!(driver.wait_used(0), (0, 16));
    let after = now_ns();
    let answer = driver.read(BORDER - 10, 16);
    assert_eq!(answer[..8], [0; 8]);
    let shown = u64::from_le_bytes(answer[8..].try_into().unwrap());
    assert!((before..=after).contains(&shown), "{before} {shown} {after}");
    assert!(driver.was_written(BORDER - 10) && driver.was_written(BORDER));
}

#[test]
fn an_answer_is_cut_where_there_is_no_more_room() {
    let (_device, mut driver) = started();
    driver.write(DATA, &[READ]);
    driver.write(ANSWER, &[0xff; 16]);
    driver.queues[0].add(&[readable(DATA, 16), writable(ANSWER, 9)]);
    driver.queues[0].kick();
    assert_eq!(driver.wait_used(0), (0, 9));
    assert_eq!(driver.read(ANSWER, 8), [0; 8]);
    assert_eq!(driver.read(ANSWER + 9, 7), [0xff; 7]);
    // Nothing is asked.
    driver.queues[0].add(&[writable(ANSWER, 16)]);
    driver.queues[0].kick();
    assert_eq!(driver.wait_used(0).1, 8);
    assert_eq!(driver.read(ANSWER, 1), [4]);
}

#[test]
fn requests_without_room_need_a_reset() {
    let (_device, mut driver) = started();
    driver.queues[0].add(&[readable(DATA, 16)]);
    driver.queues[0].kick();
    driver.interrupt.wait_broken();
}
