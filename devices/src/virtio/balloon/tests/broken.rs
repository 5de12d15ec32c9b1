// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A balloon whose driver broke the rules of a queue, seen from the host.

use std::time::Instant;

use super::*;

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
