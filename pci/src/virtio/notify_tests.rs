// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of doorbells whose eventfds another process has.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::os::fd::AsRawFd as _;
use std::sync::mpsc::channel;
use std::time::Duration;

use super::*;
use crate::fakes::FakeIoEvents;
use crate::virtio::rules::GODWIT;

const BAR_GPA: u64 = 0xc000_0000;
const NOTIFY_OFFSET: u64 = GODWIT.notify.offset as u64;
const DOORBELL: u64 = BAR_GPA + NOTIFY_OFFSET;
/// Longer than anything here takes on a busy machine.
const PATIENT: Duration = Duration::from_secs(20);

fn shared() -> (Arc<FakeIoEvents>, Notify) {
    let events = Arc::new(FakeIoEvents::default());
    let notify = Notify::new(1, Arc::<FakeIoEvents>::clone(&events), true, NOTIFY_OFFSET).unwrap();
    notify.bar_moved(Some(BAR_GPA));
    (events, notify)
}

#[test]
fn each_start_has_a_new_eventfd_that_is_signalled() {
    let (events, notify) = shared();
    notify.arm(vec![0]);
    assert!(events.addresses().is_empty(), "nothing is served yet");
    let first = notify.renew(0).unwrap();
    assert_eq!(first.read().unwrap(), 1);
    assert!(events.signal(DOORBELL));
    assert_eq!(first.read().unwrap(), 1);

    let second = notify.renew(0).unwrap();
    assert!(events.signal(DOORBELL));
    assert!(first.read().is_err(), "the driver no longer signals it");
    assert_eq!(second.read().unwrap(), 2);
    notify.bar_moved(Some(2 * BAR_GPA));
    assert!(events.signal(2 * BAR_GPA + NOTIFY_OFFSET));
    assert_eq!(second.read().unwrap(), 1);

    notify.disarm();
    assert!(events.addresses().is_empty());
    // A start that was under way when the driver reset the device.
    let third = notify.renew(0).unwrap();
    assert!(events.addresses().is_empty());
    assert_eq!(third.read().unwrap(), 1);
    assert_eq!(events.violations(), [""; 0]);
}

#[test]
fn a_device_that_shares_none_gets_none() {
    let events = Arc::new(FakeIoEvents::default());
    let notify = Notify::new(1, events, false, NOTIFY_OFFSET).unwrap();
    assert_eq!(notify.renew(0).unwrap_err().kind(), io::ErrorKind::Unsupported);
}

#[test]
fn an_eventfd_that_another_process_has_is_not_touched() {
    let (_events, notify) = shared();
    notify.arm(vec![0]);
    let (own, theirs) = (notify.handle(0).unwrap(), notify.renew(0).unwrap());
    // Reads of an empty one wait, and writes to a full one.
    // SAFETY: it changes no memory, and the descriptor is open.
    assert_eq!(unsafe { libc::fcntl(theirs.as_raw_fd(), libc::F_SETFL, 0) }, 0);
    theirs.write(u64::MAX - 2).unwrap();
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        notify.kick(0);
        notify.trapped(0);
        assert_eq!(own.read().unwrap(), 1, "the device is told of what was trapped");
        theirs.read().unwrap();
        notify.trapped(0);
        notify.disarm();
        assert!(own.read().is_err(), "what a reset has made void");
        drop(notify);
        done.send(()).unwrap();
    });
    is_done.recv_timeout(PATIENT).expect("nothing blocks");
}
