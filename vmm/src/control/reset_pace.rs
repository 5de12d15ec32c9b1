// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How often a guest may reset its machine.
//!
//! Owns that count. Each reset builds a machine, writes events and lines, and begins the limits of the devices'
//! own lines anew, so a guest that resets without end would fill the host's disk. Must never hold up a reset by a client.

use std::time::{Duration, Instant};

/// Resets that are carried out at once.
const BURST_RESETS: u32 = 32;
/// Time after which another one is.
const RESET_EVERY: Duration = Duration::from_secs(1);

/// The resets of a guest, also of one that is started anew in the same process.
#[derive(Debug, Default)]
pub struct ResetPace {
    /// Resets that are not given back yet.
    used: u32,
    /// When the last one was given back, or the first one made.
    since: Option<Instant>,
}

impl ResetPace {
    fn refill(&mut self, now: Instant) {
        let Some(since) = self.since else { return };
        let resets = now.saturating_duration_since(since).as_secs() / RESET_EVERY.as_secs();
        let resets = u32::try_from(resets).unwrap_or(u32::MAX).min(self.used);
        self.used -= resets;
        self.since = (self.used > 0).then(|| since + RESET_EVERY * resets);
    }

    /// Until when a reset that is due has to wait; `None` if it can be carried out.
    pub fn waits_until(&mut self, now: Instant) -> Option<Instant> {
        self.refill(now);
        let since = self.since.filter(|_| self.used >= BURST_RESETS)?;
        since.checked_add(RESET_EVERY)
    }

    /// Counts a reset.
    pub fn count(&mut self, now: Instant) {
        self.refill(now);
        self.used = self.used.saturating_add(1);
        self.since.get_or_insert(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_carried_out_at_once_and_then_one_in_each_interval() {
        let (mut pace, begin) = (ResetPace::default(), Instant::now());
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
        now += RESET_EVERY * (2 * BURST_RESETS);
        for _ in 0..BURST_RESETS {
            assert_eq!(pace.waits_until(now), None);
            pace.count(now);
        }
        assert_eq!(pace.waits_until(now), Some(now + RESET_EVERY));
    }
}
