// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rate limit: a number of bytes per second that several threads share. [`TokenBucket`] is a
//! limit on tokens of any kind, which saves up to a given number of them.
//!
//! Owns one atomic for each limit: the time at which the next piece of work may begin. A thread advances it by the
//! time that its bytes take, and waits until the old value. No thread holds a lock, and none exceeds the
//! rate by more than one reservation and the limit's allowance for lateness. A [`RateLimit`] must never let a
//! pause be made up for by a longer burst than that.

mod bucket;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub use bucket::TokenBucket;

const NANOS_PER_S: u128 = 1_000_000_000;

/// A limit on bytes per second.
#[derive(Debug)]
pub struct RateLimit {
    /// 0 for none.
    bytes_per_s: AtomicU64,
    start: Instant,
    /// Nanoseconds after `start`.
    free_at: AtomicU64,
    /// How much a thread that is late may make up for at once.
    late_bytes: u64,
}

impl RateLimit {
    /// A limit of `bytes_per_s`; 0 for none.
    pub fn new(bytes_per_s: u64) -> Self {
        let bytes_per_s = AtomicU64::new(bytes_per_s);
        Self { bytes_per_s, start: Instant::now(), free_at: AtomicU64::new(0), late_bytes: 0 }
    }

    /// The same, but a thread that comes after its turn makes up for up to `late_bytes` at once: pieces that
    /// take less time than a busy host needs to wake a thread would else keep far below the rate.
    #[must_use]
    pub fn with_lateness(self, late_bytes: u64) -> Self {
        Self { late_bytes, ..self }
    }

    /// The rate; 0 for none.
    pub fn bytes_per_s(&self) -> u64 {
        self.bytes_per_s.load(Ordering::Relaxed)
    }

    /// Changes the rate, 0 for none. What was reserved before keeps its time.
    pub fn set_bytes_per_s(&self, bytes_per_s: u64) {
        self.bytes_per_s.store(bytes_per_s, Ordering::Relaxed);
    }

    /// Bytes that take about `time` at this rate; `None` without a limit.
    pub fn bytes_in(&self, time: Duration) -> Option<u64> {
        let bytes_per_s = self.bytes_per_s();
        (bytes_per_s > 0).then(|| {
            let bytes = u128::from(bytes_per_s) * time.as_micros() / 1_000_000;
            u64::try_from(bytes).unwrap_or(u64::MAX)
        })
    }

    /// Reserves the time that `bytes` take; returns how long to wait before working on them.
    pub fn reserve(&self, bytes: u64) -> Duration {
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.reserve_at(now, bytes).saturating_sub(now))
    }

    /// Waits for the turn of `bytes` more.
    pub fn wait(&self, bytes: u64) {
        let pause = self.reserve(bytes);
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }

    /// The same as [`reserve`](Self::reserve) with a clock of the caller's; returns the moment.
    fn reserve_at(&self, now: u64, bytes: u64) -> u64 {
        let rate = self.bytes_per_s();
        let time_of = |bytes: u64| {
            let nanos = (u128::from(bytes) * NANOS_PER_S).checked_div(rate.into())?;
            Some(u64::try_from(nanos).unwrap_or(u64::MAX))
        };
        let (Some(takes), Some(late)) = (time_of(bytes), time_of(self.late_bytes)) else {
            return now;
        };
        let earliest = now.saturating_sub(late);
        let mut free_at = self.free_at.load(Ordering::Relaxed);
        loop {
            let begin = free_at.max(earliest);
            let end = begin.saturating_add(takes);
            let swap = self.free_at.compare_exchange_weak(
                free_at,
                end,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match swap {
                Ok(_) => return begin,
                Err(current) => free_at = current,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn no_limit_never_waits() {
        let limit = RateLimit::new(0);
        assert_eq!(
            (limit.reserve(u64::MAX), limit.bytes_in(Duration::MAX)),
            (Duration::ZERO, None)
        );
    }

    #[test]
    fn pieces_follow_each_other_at_the_rate_and_an_idle_link_saves_nothing_up() {
        let limit = RateLimit::new(1000);
        assert_eq!(limit.reserve_at(0, 500), 0);
        assert_eq!(limit.reserve_at(0, 500), 500_000_000);
        assert_eq!(limit.reserve_at(10_000_000_000, 1), 10_000_000_000);
        assert_eq!(limit.reserve_at(10_000_000_000, 1), 10_001_000_000);
        assert_eq!(limit.bytes_in(Duration::from_millis(5)), Some(5));
    }

    #[test]
    fn a_late_thread_makes_up_for_a_little() {
        let limit = RateLimit::new(1000).with_lateness(20);
        assert_eq!(limit.reserve_at(1_000_000_000, 10), 980_000_000);
        assert_eq!(limit.reserve_at(1_000_000_000, 10), 990_000_000);
        assert_eq!(limit.reserve_at(1_000_000_000, 10), 1_000_000_000);
        assert_eq!(limit.reserve_at(1_000_000_000, 10), 1_010_000_000, "no more than was allowed");
        // Each piece begins a millisecond after its turn: nothing is lost.
        let last = (0..100).fold(1_020_000_000, |now, _| {
            let late = limit.reserve_at(now, 0).max(now) + 1_000_000;
            limit.reserve_at(late, 1);
            late
        });
        assert_eq!((last, limit.reserve_at(last, 0)), (1_120_000_000, 1_120_000_000));
    }

    #[test]
    fn a_thread_waits_for_its_turn() {
        let limit = RateLimit::new(1000);
        let begun = Instant::now();
        limit.wait(30);
        limit.wait(1);
        assert!(begun.elapsed() >= Duration::from_millis(30));
        assert!(limit.reserve(1_000_000).as_millis() <= 1);
        assert!(limit.reserve(1) > Duration::from_secs(990));
    }

    #[test]
    fn a_rate_that_changes_holds_for_what_comes_after() {
        let limit = RateLimit::new(1000);
        limit.reserve_at(0, 500);
        limit.set_bytes_per_s(2000);
        assert_eq!(limit.reserve_at(0, 500), 500_000_000);
        assert_eq!(limit.reserve_at(0, 0), 750_000_000);
        limit.set_bytes_per_s(0);
        assert_eq!(limit.reserve_at(7, u64::MAX), 7);
    }

    #[test]
    fn threads_share_one_rate() {
        let limit = RateLimit::new(1 << 30);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).map(|_| limit.reserve_at(0, 1 << 20)).max());
            }
        });
        let total = limit.free_at.load(Ordering::Relaxed);
        assert!(total.abs_diff(4000 * 1_000_000_000 / 1024) < 4000, "{total}");
    }

    proptest! {
        /// Whenever pieces come: none begins before it has come or before its turn, none waits
        /// for more than those before it, and no time is saved up.
        #[test]
        fn the_rate_holds_over_any_stretch(
            rate in 1u64..1 << 40,
            pieces in prop::collection::vec((0u64..1 << 34, 0u64..1 << 32), 1..50),
        ) {
            let limit = RateLimit::new(rate);
            let (mut now, mut free_at) = (0, 0);
            for (passes, bytes) in pieces {
                now += passes;
                let begin = limit.reserve_at(now, bytes);
                prop_assert_eq!(begin, now.max(free_at));
                let takes = u128::from(bytes) * NANOS_PER_S / u128::from(rate);
                free_at = u64::try_from(u128::from(begin) + takes).unwrap_or(u64::MAX);
            }
        }

        /// The largest numbers wait forever rather than not at all.
        #[test]
        fn nothing_wraps(rate in 1u64.., now: u64, first: u64, second: u64) {
            let limit = RateLimit::new(rate);
            let begin = limit.reserve_at(now, first);
            prop_assert_eq!(begin, now);
            prop_assert!(limit.reserve_at(now, second) >= begin);
            limit.reserve_at(u64::MAX, u64::MAX);
            prop_assert_eq!(limit.reserve_at(now, 1), u64::MAX);
        }

        /// What `bytes_in` grants for a time takes no longer than that time.
        #[test]
        fn bytes_for_a_time_take_that_time(rate in 1u64.., micros in 0u64..10_000_000) {
            let limit = RateLimit::new(rate);
            let time = Duration::from_micros(micros);
            let bytes = limit.bytes_in(time);
            prop_assert!(bytes.is_some());
            limit.reserve_at(0, bytes.unwrap_or_default());
            prop_assert!(u128::from(limit.reserve_at(0, 0)) <= time.as_nanos());
        }
    }
}
