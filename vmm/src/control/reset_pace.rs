// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How often a guest may reset its machine.
//!
//! Owns that count. Each reset builds a machine, writes events and lines, and begins the limits of the devices'
//! own lines anew, so a guest that resets without end would fill the host's disk. Must never hold up a reset by a client.

use std::time::{Duration, Instant};

use rate_limit::TokenBucket;

/// Resets that are carried out at once.
const BURST_RESETS: u64 = 32;
/// Time after which another one is.
const RESET_EVERY: Duration = Duration::from_secs(1);

/// The resets of a guest, also of one that is started anew in the same process.
#[derive(Debug)]
pub struct ResetPace {
    bucket: Option<TokenBucket>,
    begun: Instant,
}

impl Default for ResetPace {
    fn default() -> Self {
        let refill_ms = BURST_RESETS * RESET_EVERY.as_secs() * 1000;
        Self { bucket: TokenBucket::new(BURST_RESETS, 0, refill_ms), begun: Instant::now() }
    }
}

impl ResetPace {
    fn nanos(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.begun).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Until when a reset that is due has to wait; `None` if it can be carried out.
    pub fn waits_until(&self, now: Instant) -> Option<Instant> {
        let until = self.bucket.as_ref()?.check(self.nanos(now)).err()?;
        self.begun.checked_add(Duration::from_nanos(until))
    }

    /// Counts a reset.
    pub fn count(&self, now: Instant) {
        if let Some(bucket) = &self.bucket {
            bucket.charge(self.nanos(now), 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_carried_out_at_once_and_then_one_in_each_interval() {
        let pace = ResetPace::default();
        let begin = pace.begun;
        for _ in 0..BURST_RESETS {
            assert_eq!(pace.waits_until(begin), None);
            pace.count(begin);
        }
        let mut now = begin;
        for number in 1..=5 {
            assert_eq!(pace.waits_until(now), Some(begin + RESET_EVERY * number));
            now = begin + RESET_EVERY * number;
            assert_eq!(pace.waits_until(now), None);
            pace.count(now);
        }
        // A quiet while gives all of them back, and no more.
        now += RESET_EVERY * 100;
        for _ in 0..BURST_RESETS {
            assert_eq!(pace.waits_until(now), None);
            pace.count(now);
        }
        assert_eq!(pace.waits_until(now), Some(now + RESET_EVERY));
    }
}
