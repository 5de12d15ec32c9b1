// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Network devices with limits.

use super::*;
use crate::virtio::{BucketConfig, RateLimiter};

const NONE: BucketConfig = BucketConfig { size: 0, burst: 0, refill_ms: 0 };

impl Fixture {
    /// With limits on receiving and transmitting.
    fn limited(receive: &Arc<RateLimiter>, transmit: &Arc<RateLimiter>) -> Self {
        let mut fixture = Self::new(0);
        fixture.device.reset();
        fixture.device.limit_by([receive, transmit].map(|limiter| Some(Arc::clone(limiter))));
        fixture.driver = Driver::new(3, 16);
        let features = fixture.device.features();
        fixture.driver.activate(&mut fixture.device, features);
        fixture
    }

    /// Frames received and transmitted once the device has done what it may for now.
    fn frames(&mut self) -> [u16; 2] {
        let states = self.device.pause();
        self.device.resume();
        [states[RECEIVE].1.next_avail, states[TRANSMIT].1.next_avail]
    }

    /// Makes frames and buffers available.
    fn offer(&mut self, received: usize, transmitted: usize) {
        for _ in 0..received {
            self.send_frame(100);
            self.driver.queues[RECEIVE].add(&[writable(DATA, 2000)]);
        }
        for _ in 0..transmitted {
            self.driver.queues[TRANSMIT].add(&[readable(DATA + 0x1000, 112)]);
        }
        self.driver.queues[RECEIVE].kick();
        self.driver.queues[TRANSMIT].kick();
    }
}

#[test]
fn each_direction_has_a_limit_of_its_own() {
    let frames = BucketConfig { size: 2, burst: 1, refill_ms: 2000 };
    let bytes = BucketConfig { size: 250, burst: 0, refill_ms: 1000 };
    let receive = RateLimiter::for_test(NONE, frames);
    let transmit = RateLimiter::for_test(bytes, NONE);
    let mut fixture = Fixture::limited(&receive, &transmit);
    fixture.offer(6, 6);
    for queue in [RECEIVE, RECEIVE, RECEIVE, TRANSMIT, TRANSMIT, TRANSMIT] {
        fixture.driver.wait_used(queue);
    }
    assert_eq!(fixture.frames(), [3, 3]);
    receive.set_clock(Duration::from_secs(1));
    // Starting to work again looks at the limits, as their timers would, which are set for real time.
    fixture.frames();
    fixture.driver.wait_used(RECEIVE);
    assert_eq!(fixture.frames(), [4, 3]);
    transmit.set_clock(Duration::from_millis(600));
    fixture.frames();
    fixture.driver.wait_used(TRANSMIT);
    assert_eq!(fixture.frames(), [4, 4]);
    for limiter in [&receive, &transmit] {
        limiter.set_clock(Duration::from_hours(1));
    }
    fixture.driver.queues[RECEIVE].kick_anyway();
    fixture.driver.queues[TRANSMIT].kick_anyway();
    for queue in [RECEIVE, RECEIVE, TRANSMIT, TRANSMIT] {
        fixture.driver.wait_used(queue);
    }
}

#[test]
fn the_timers_go_on_without_a_notification() {
    let started = Instant::now();
    let mut fixture = Fixture::new(0);
    fixture.device.reset();
    fixture.device.limit(NONE, BucketConfig { size: 1, burst: 0, refill_ms: 5 });
    fixture.driver = Driver::new(3, 16);
    let features = fixture.device.features();
    fixture.driver.activate(&mut fixture.device, features);
    fixture.offer(10, 10);
    for queue in [RECEIVE, TRANSMIT] {
        for _ in 0..10 {
            fixture.driver.wait_used(queue);
        }
    }
    assert!(started.elapsed() >= Duration::from_millis(45));
}

#[test]
fn a_frame_too_long_to_be_sent_costs_no_more_than_the_longest() {
    let bytes = BucketConfig { size: 70_000, burst: 0, refill_ms: 1000 };
    let none = RateLimiter::for_test(NONE, BucketConfig { size: 1, burst: 9, refill_ms: 1 });
    let transmit = RateLimiter::for_test(bytes, NONE);
    let mut fixture = Fixture::limited(&none, &transmit);
    fixture.driver.queues[TRANSMIT].add(&[readable(DATA, u32::MAX)]);
    fixture.driver.queues[TRANSMIT].add(&[readable(DATA, 100)]);
    fixture.driver.queues[TRANSMIT].kick();
    for _ in 0..2 {
        fixture.driver.wait_used(TRANSMIT);
    }
}
