// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A rate limit on the bytes that all threads together touch.
//!
//! Owns the time at which the next piece of work may begin. Must never let a pause be made up for by a
//! burst afterwards.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A limit on bytes per second.
#[derive(Debug)]
pub struct RateLimit {
    bytes_per_s: Option<u64>,
    /// When the next piece may begin. Locked for a sum.
    next: Mutex<Instant>,
}

impl RateLimit {
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self { bytes_per_s, next: Mutex::new(Instant::now()) }
    }

    /// How long to wait from `now` before `bytes` more are touched.
    fn delay_for(&self, bytes: u64, now: Instant) -> Duration {
        let Some(rate) = self.bytes_per_s.filter(|rate| *rate > 0) else { return Duration::ZERO };
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
        let took = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = (*next).max(now);
        *next = begin.checked_add(took).unwrap_or(begin);
        begin.saturating_duration_since(now)
    }

    /// Waits for the turn of `bytes` more.
    pub fn wait(&self, bytes: u64) {
        let pause = self.delay_for(bytes, Instant::now());
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_holds_over_all_and_pauses_are_not_made_up_for() {
        let rate_limit = RateLimit::new(Some(1000));
        let start = Instant::now();
        assert_eq!(rate_limit.delay_for(500, start), Duration::ZERO);
        let second = rate_limit.delay_for(500, start);
        assert!(second <= Duration::from_millis(500) && second > Duration::from_millis(400));
        let later = start + Duration::from_secs(10);
        assert_eq!(rate_limit.delay_for(500, later), Duration::ZERO);
        assert_eq!(rate_limit.delay_for(500, later), Duration::from_millis(500));
        assert_eq!(RateLimit::new(None).delay_for(u64::MAX, start), Duration::ZERO);
    }
}
