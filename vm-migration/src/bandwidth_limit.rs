// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A limit on bytes per second that several threads share.
//!
//! Owns one atomic: the time at which the link is free again. A thread advances it by the time that its
//! bytes take, and then sleeps until the old value. No thread holds a lock, and none exceeds the rate by
//! more than one reservation.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The limit.
#[derive(Debug)]
pub(crate) struct BandwidthLimit {
    /// 0 for none.
    bytes_per_s: u64,
    start: Instant,
    /// Nanoseconds after `start`.
    free_at: AtomicU64,
}

impl BandwidthLimit {
    pub(crate) fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s, start: Instant::now(), free_at: AtomicU64::new(0) }
    }

    /// The rate; 0 for none.
    pub(crate) fn bytes_per_s(&self) -> u64 {
        self.bytes_per_s
    }

    /// Bytes that take about `time` at this rate; `None` without a limit.
    pub(crate) fn bytes_in(&self, time: Duration) -> Option<u64> {
        (self.bytes_per_s > 0).then(|| {
            let bytes = u128::from(self.bytes_per_s) * time.as_micros() / 1_000_000;
            u64::try_from(bytes).unwrap_or(u64::MAX)
        })
    }

    /// Reserves the time that `bytes` take; returns how long to wait before sending them.
    pub(crate) fn reserve(&self, bytes: u64) -> Duration {
        if self.bytes_per_s == 0 {
            return Duration::ZERO;
        }
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.reserve_at(now, bytes).saturating_sub(now))
    }

    /// The same with a clock of the caller's; returns the moment.
    fn reserve_at(&self, now: u64, bytes: u64) -> u64 {
        let takes = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s);
        let takes = u64::try_from(takes).unwrap_or(u64::MAX);
        let mut free_at = self.free_at.load(Ordering::Relaxed);
        loop {
            let begin = free_at.max(now);
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
    use super::*;

    #[test]
    fn no_limit_never_waits() {
        let pace = BandwidthLimit::new(0);
        assert_eq!((pace.reserve(u64::MAX), pace.bytes_in(Duration::MAX)), (Duration::ZERO, None));
    }

    #[test]
    fn pieces_follow_each_other_at_the_rate_and_an_idle_link_saves_nothing_up() {
        let pace = BandwidthLimit::new(1000);
        assert_eq!(pace.reserve_at(0, 500), 0);
        assert_eq!(pace.reserve_at(0, 500), 500_000_000);
        assert_eq!(pace.reserve_at(10_000_000_000, 1), 10_000_000_000);
        assert_eq!(pace.reserve_at(10_000_000_000, 1), 10_001_000_000);
        assert_eq!(pace.bytes_in(Duration::from_millis(5)), Some(5));
    }

    #[test]
    fn threads_share_one_rate() {
        let pace = BandwidthLimit::new(1 << 30);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).map(|_| pace.reserve_at(0, 1 << 20)).max());
            }
        });
        let total = pace.free_at.load(Ordering::Relaxed);
        assert!(total.abs_diff(4000 * 1_000_000_000 / 1024) < 4000, "{total}");
    }
}
