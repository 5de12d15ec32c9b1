// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disks with a limit on bytes or operations.

use std::time::{Duration, Instant};

use super::*;
use crate::virtio::{BucketConfig, RateLimiter};

const NONE: BucketConfig = BucketConfig { size: 0, burst: 0, refill_ms: 0 };

fn bucket(size: u64, refill_ms: u64) -> BucketConfig {
    BucketConfig { size, burst: 0, refill_ms }
}

fn limited(limiter: &Arc<RateLimiter>, synchronous: bool) -> Fixture {
    Fixture::new(|config| {
        config.limiter = Some(Arc::clone(limiter));
        config.disable_io_uring = synchronous;
    })
}

impl Fixture {
    /// Makes reads of one sector each available, all at once.
    fn add_reads(&mut self, count: usize) {
        self.header(abi::VIRTIO_BLK_T_IN, 0);
        for _ in 0..count {
            let buffers = [readable(HEADER, 16), writable(BUFFER, 512), writable(STATUS, 1)];
            self.driver.queues[0].add(&buffers);
        }
        self.driver.queues[0].kick();
    }

    /// Waits for so many reads, and checks that the device carries out no more for now: it takes all that may
    /// pass before it handles a pause.
    fn does(&mut self, count: u16) {
        for _ in 0..count {
            self.driver.wait_used(0);
        }
        assert_eq!(self.done(), count);
    }

    /// Reads that the device has carried out since it was started. A pause waits for those in flight.
    fn done(&mut self) -> u16 {
        let taken = self.device.pause()[0].1.next_avail;
        self.device.resume();
        assert_eq!(self.driver.queues[0].used_index(), taken, "what was taken is completed");
        taken
    }
}

#[test]
fn no_more_passes_than_the_limit_allows_and_nothing_is_lost_by_pauses() {
    with_both_engines(|synchronous| {
        for (limiter, passes) in [
            (RateLimiter::for_test(NONE, bucket(3, 3000)), 3),
            (RateLimiter::for_test(bucket(1024, 2000), bucket(9, 1)), 2),
        ] {
            let mut fixture = limited(&limiter, synchronous);
            fixture.add_reads(6);
            for _ in 0..passes {
                fixture.driver.wait_used(0);
            }
            for seconds in 0..3 {
                limiter.set_clock(Duration::from_secs(seconds));
                let expected = passes + u16::try_from(seconds).unwrap();
                // Resuming serves the queue, as the timer would: that one is set for real time.
                fixture.device.pause();
                fixture.device.resume();
                for _ in 0..seconds.min(1) {
                    fixture.driver.wait_used(0);
                }
                assert_eq!(fixture.done(), expected);
                assert_eq!(fixture.done(), expected);
            }
            limiter.set_clock(Duration::from_hours(1));
            // A notification makes the thread look as well.
            fixture.driver.queues[0].kick_anyway();
            for _ in passes + 2..6 {
                fixture.driver.wait_used(0);
            }
        }
    });
}

#[test]
fn the_timer_goes_on_with_the_queue_without_a_notification() {
    let started = Instant::now();
    let limiter = RateLimiter::new(NONE, bucket(1, 5)).unwrap();
    let mut fixture = limited(&limiter, true);
    fixture.add_reads(10);
    for _ in 0..10 {
        fixture.driver.wait_used(0);
    }
    assert!(started.elapsed() >= Duration::from_millis(45));
}

#[test]
fn disks_share_the_limit_of_their_group() {
    let limiter = RateLimiter::for_test(bucket(512 * 5, 1000), NONE);
    let mut disks = [limited(&limiter, true), limited(&limiter, true)];
    for (disk, passes) in disks.iter_mut().zip([4, 1]) {
        disk.add_reads(4);
        disk.does(passes);
    }
    limiter.set_clock(Duration::from_hours(1));
    let [_, second] = &mut disks;
    second.driver.queues[0].kick_anyway();
    for _ in 1..4 {
        second.driver.wait_used(0);
    }
}

#[test]
fn a_request_larger_than_the_bucket_passes_and_delays_the_next() {
    let limiter = RateLimiter::for_test(bucket(512, 1000), NONE);
    let mut fixture = limited(&limiter, true);
    let read = [writable(BUFFER, 2048)];
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 0, &read), (OK, 2049));
    fixture.add_reads(1);
    limiter.set_clock(Duration::from_millis(2900));
    assert_eq!(fixture.done(), 1);
    limiter.set_clock(Duration::from_millis(3100));
    fixture.driver.queues[0].kick_anyway();
    fixture.driver.wait_used(0);
}

#[test]
fn a_reset_in_the_middle_of_a_wait_is_immediate_and_refills_nothing() {
    let limiter = RateLimiter::for_test(NONE, bucket(2, 1_000_000));
    let mut fixture = limited(&limiter, true);
    fixture.add_reads(5);
    fixture.does(2);
    fixture.device.reset();
    limiter.set_clock(Duration::from_secs(500));
    fixture.driver = Driver::new(1, 64);
    let features = fixture.device.features();
    fixture.driver.activate(&mut fixture.device, features);
    fixture.add_reads(5);
    fixture.does(1);
    // Dropped in the middle of a wait as well.
}
