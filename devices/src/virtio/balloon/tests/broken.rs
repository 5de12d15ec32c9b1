// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a balloon does for the host when its driver breaks the rules of a queue, or goes.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::*;
use crate::virtio::test_driver::ProbingInterrupt;

#[test]
fn what_is_in_the_balloon_goes_although_the_driver_broke_a_queue() {
    let mut guest = Guest::new(|_| {}).start();
    guest.ram.regions()[1].resident().set_absent(0..4);
    guest.send_pages(INFLATE, &[pfn(UNUSED_GPA)]);
    assert_eq!(guest.byte(UNUSED_GPA), 7);
    guest.driver.queues[DEFLATE].set_available(1000);
    guest.driver.queues[DEFLATE].kick();
    guest.driver.interrupt.wait_broken();
    guest.ram.regions()[1].resident().set_resident(0..4);
    guest.device.handle().retry();
    let until = Instant::now() + Duration::from_secs(20);
    while guest.byte(UNUSED_GPA) != 0 {
        assert!(Instant::now() < until, "it stays");
        std::thread::yield_now();
    }
}

#[test]
fn a_reset_waits_while_the_driver_is_told_of_a_size() {
    let guest = Guest::new(|_| {}).start();
    let shared = Arc::clone(&guest.device.shared);
    let probed = Arc::clone(&shared);
    let probe = ProbingInterrupt::new(move || probed.driver.try_lock().is_none());
    let mut driver = shared.driver().unwrap();
    driver.interrupt = probe.clone();
    shared.set_driver(Some(driver));
    guest.device.handle().resize(0).unwrap();
    guest.device.handle().resize(PAGE_BYTES).unwrap();
    assert!(probe.was_right.load(Ordering::Acquire), "its driver cannot go meanwhile");
    shared.set_driver(None);
}
