// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Downtime as the host's clock sees it: the longest time in which no heartbeat was observed.
//!
//! A second opinion on the gaps that the guest itself records, which depend on its TSC having
//! been carried over right. Its grain is the interval at which the caller looks.

use std::time::{Duration, Instant};

/// Watches one heartbeat, or the sum of several, across one VMM or the two of a migration.
#[derive(Clone, Copy, Debug)]
pub struct Pulse {
    beat: Option<u64>,
    changed: Instant,
    longest: Duration,
}

impl Pulse {
    /// A watch that starts at `now`.
    pub fn new(now: Instant) -> Self {
        Self { beat: None, changed: now, longest: Duration::ZERO }
    }

    /// Takes note of what the heartbeat is at `now`; any change is a sign of life.
    pub fn observe(&mut self, beat: u64, now: Instant) {
        if self.beat.is_some_and(|before| before != beat) {
            self.longest = self.longest.max(now.saturating_duration_since(self.changed));
        }
        if self.beat != Some(beat) {
            self.beat = Some(beat);
            self.changed = now;
        }
    }

    /// The longest time between two signs of life so far.
    pub fn longest(&self) -> Duration {
        self.longest
    }

    /// How long ago the latest one was, at `now`.
    pub fn silent_for(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_silence_between_two_beats_counts() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut pulse = Pulse::new(start);
        for (ms, beat) in [(0, 5), (1, 6), (2, 6), (9, 6), (10, 7), (12, 8), (40, 8)] {
            pulse.observe(beat, at(ms));
        }
        assert_eq!(pulse.longest(), Duration::from_millis(9));
        assert_eq!(pulse.silent_for(at(40)), Duration::from_millis(28));
    }
}
