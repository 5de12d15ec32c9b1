// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A watchdog, seen from its driver and from the owner of the machine.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::{Watchdog, WatchdogConfig, WatchdogHandle};
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
fn a_guest_that_waits_for_memory_is_not_stuck_and_has_the_whole_time_afterwards() {
    const PERIOD: Duration = Duration::from_millis(40);
    let (mut device, told) = watchdog(PERIOD);
    let mut driver = Driver::new(1, 8);
    driver.activate_all(&mut device);
    let handle = device.handle();
    handle.stop();
    feed(&mut driver);
    let periods = PERIOD * 5;
    assert_eq!(told.recv_timeout(periods), Err(RecvTimeoutError::Timeout), "its memory comes");
    // Neither does a pause meanwhile begin what must not run.
    device.pause();
    device.resume();
    assert_eq!(told.recv_timeout(periods), Err(RecvTimeoutError::Timeout), "it still does");
    let began = Instant::now();
    handle.start();
    told.recv_timeout(PATIENCE).unwrap();
    assert!(began.elapsed() >= PERIOD, "{:?}", began.elapsed());
    handle.start();
    assert!(told.try_recv().is_err(), "it is told once");
}

#[test]
fn a_buffer_that_was_given_before_the_clock_is_looked_at_counts() {
    let handle = WatchdogHandle::new();
    let now = Instant::now();
    assert!(handle.left(LONG, now).unwrap() > LONG / 2);
    let Some(long_ago) = now.checked_sub(LONG) else { return };
    // Where the clock has run only since the watchdog was made, the guest has had no longer.
    assert!(handle.left(LONG, long_ago).unwrap() > LONG / 2);
    assert_eq!(handle.left(Duration::ZERO, now), None);
    handle.stop();
    assert_eq!(handle.left(LONG, long_ago), Some(LONG));
}

#[test]
fn a_paused_guest_is_not_stuck() {
    let (mut device, told) = watchdog(SHORT);
    let mut driver = Driver::new(1, 8);
    device.pause();
    driver.activate_all(&mut device);
    driver.write(DATA, &[0xff, 0xff]);
    driver.queues[0].add(&[writable(DATA, 2)]);
    driver.queues[0].kick();
    assert_eq!(told.recv_timeout(SHORT * 50), Err(RecvTimeoutError::Timeout));
    device.resume();
    told.recv_timeout(PATIENCE).unwrap();
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
        device.pause();
        assert_eq!(device.save().data["is_armed"], false, "it begins with none of them");
    }
}

/// A watchdog that was armed and whose queue broke then, while time does not count.
fn armed_and_broken(timeout: Duration) -> (Watchdog, Receiver<()>) {
    let (mut device, told) = watchdog(timeout);
    let mut driver = Driver::new(1, 8);
    driver.activate_all(&mut device);
    device.handle().stop();
    feed(&mut driver);
    driver.queues[0].set_available(1000);
    driver.queues[0].kick();
    driver.interrupt.wait_broken();
    (device, told)
}

#[test]
fn a_guest_that_spoilt_its_queue_and_hangs_is_stuck() {
    const PERIOD: Duration = Duration::from_millis(40);
    for is_paused_meanwhile in [false, true] {
        let (mut device, told) = armed_and_broken(PERIOD);
        if is_paused_meanwhile {
            device.pause();
            assert_eq!(device.save().data["is_armed"], true);
            device.resume();
        }
        assert!(told.try_recv().is_err());
        let began = Instant::now();
        device.handle().start();
        told.recv_timeout(PATIENCE).unwrap();
        assert!(began.elapsed() >= PERIOD, "{:?}", began.elapsed());
        device.pause();
        assert_eq!(device.save().data["is_armed"], false, "it has run out");
        drop(device);
        assert_eq!(told.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected));
    }
}

#[test]
fn a_driver_that_resets_its_broken_watchdog_disarms_it() {
    let (mut device, told) = armed_and_broken(SHORT);
    device.reset();
    device.handle().start();
    assert_eq!(device.save().data["is_armed"], false);
    assert_eq!(told.recv_timeout(SHORT * 50), Err(RecvTimeoutError::Timeout));
}
