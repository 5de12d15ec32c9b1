// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A watchdog, seen from its driver and from the owner of the machine.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use super::{Watchdog, WatchdogConfig};
use crate::virtio::VirtioDevice;
use crate::virtio::test_driver::{DATA, Driver, readable, writable};

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);
/// A clock that does not run out, and one that does at once.
const LONG: Duration = Duration::from_hours(1);
const SHORT: Duration = Duration::from_millis(1);

fn watchdog(timeout: Duration) -> (Watchdog, Receiver<()>) {
    let (tell, told) = channel();
    let expired = Arc::new(move || {
        let _ = tell.send(());
    });
    (Watchdog::new(WatchdogConfig { id: "watchdog".to_owned(), timeout, expired }), told)
}

fn feed(driver: &mut Driver) {
    driver.write(DATA, &[0xff, 0xff]);
    driver.queues[0].add(&[writable(DATA, 2)]);
    driver.queues[0].kick();
    assert_eq!(driver.wait_used(0), (0, 1));
    assert_eq!(driver.read(DATA, 2), [1, 0xff]);
}

#[test]
fn the_clock_begins_with_the_first_buffer_and_tells_once() {
    let (mut device, told) = watchdog(SHORT);
    let mut driver = Driver::new(1, 8);
    driver.activate_all(&mut device);
    device.pause();
    assert_eq!(device.save().data["is_armed"], false);
    device.resume();
    // A clock that ran from the start would have told by the time that the first buffer is used.
    std::thread::yield_now();
    assert!(told.try_recv().is_err());
    feed(&mut driver);
    told.recv_timeout(PATIENCE).unwrap();
    device.pause();
    assert_eq!(device.save().data["is_armed"], false, "it has run out");
    device.reset();
    drop(device);
    assert_eq!(told.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected));
}

#[test]
fn a_clock_that_runs_stays_so_over_a_pause_and_elsewhere_and_ends_with_the_driver() {
    let (mut device, told) = watchdog(LONG);
    let mut driver = Driver::new(1, 8);
    driver.activate_all(&mut device);
    feed(&mut driver);
    let states = device.pause();
    let saved = device.save();
    assert_eq!(saved.data["is_armed"], true);
    assert!(told.try_recv().is_err());

    let (mut second, told) = watchdog(SHORT);
    let features = second.features();
    second.acknowledge_features(features);
    second.restore(&saved).unwrap();
    second.pause();
    driver.activate_restored(&mut second, features, &states);
    assert!(told.try_recv().is_err(), "it stands as long as the guest does");
    second.resume();
    told.recv_timeout(PATIENCE).unwrap();

    device.reset();
    assert_eq!(device.save().data["is_armed"], false);
}

#[test]
fn buffers_that_are_none_need_a_reset() {
    for buffer in [readable(DATA, 1), writable(1 << 40, 1)] {
        let (mut device, _told) = watchdog(LONG);
        let mut driver = Driver::new(1, 8);
        driver.activate_all(&mut device);
        driver.queues[0].add(&[buffer]);
        driver.queues[0].kick();
        driver.interrupt.wait_broken();
    }
}
