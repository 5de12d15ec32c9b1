// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! When precopy stops: a pure decision over measured rates.
//!
//! Owns the policy and its constants; it measures nothing and touches nothing. A guest that
//! writes faster than the link carries is noticed after [`STALLED_ROUNDS_MAX`] rounds that did not
//! help.

use std::time::Duration;

use crate::options::TimeoutStrategy;

/// Rounds in a row without real progress after which further rounds are considered useless.
pub(crate) const STALLED_ROUNDS_MAX: u32 = 3;

/// Progress is real when less than this share of the best so far is left.
const PROGRESS_PERCENT: u64 = 95;

/// What to do after looking at the dirty pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Send another round.
    Round,
    /// Stop the guest now.
    Stop,
    /// The downtime will not be reached and nobody allowed to exceed it.
    GiveUp,
}

/// The policy of one migration.
#[derive(Debug)]
pub(crate) struct Convergence {
    downtime: Duration,
    timeout: Duration,
    strategy: TimeoutStrategy,
    best_bytes: u64,
    stalled_rounds: u32,
}

impl Convergence {
    pub(crate) fn new(downtime: Duration, timeout: Duration, strategy: TimeoutStrategy) -> Self {
        Self { downtime, timeout, strategy, best_bytes: u64::MAX, stalled_rounds: 0 }
    }

    /// Rounds in a row that did not help.
    pub(crate) fn stalled_rounds(&self) -> u32 {
        self.stalled_rounds
    }

    /// Decides with `remaining_bytes` dirty, a stop expected to cost `expected`, `elapsed` after
    /// the first round began. Stalled rounds end precopy only where exceeding the downtime is
    /// allowed; else the guest may calm down until the timeout.
    pub(crate) fn decide(
        &mut self,
        remaining_bytes: u64,
        expected: Duration,
        elapsed: Duration,
    ) -> Decision {
        if expected <= self.downtime {
            return Decision::Stop;
        }
        let helped = u128::from(remaining_bytes) * 100
            < u128::from(self.best_bytes) * u128::from(PROGRESS_PERCENT);
        if helped {
            self.best_bytes = remaining_bytes;
            self.stalled_rounds = 0;
        } else {
            self.stalled_rounds += 1;
        }
        let over = elapsed >= self.timeout;
        match self.strategy {
            TimeoutStrategy::Cancel if over => Decision::GiveUp,
            TimeoutStrategy::Ignore if over => Decision::Stop,
            TimeoutStrategy::Ignore if self.stalled_rounds >= STALLED_ROUNDS_MAX => Decision::Stop,
            _ => Decision::Round,
        }
    }
}

/// How long `bytes` take at a rate; without a measured rate, too long.
pub(crate) fn time_for(bytes: u64, bytes_per_s: u64) -> Duration {
    if bytes == 0 {
        return Duration::ZERO;
    }
    if bytes_per_s == 0 {
        return Duration::MAX;
    }
    let micros = u128::from(bytes) * 1_000_000 / u128::from(bytes_per_s);
    u64::try_from(micros).map_or(Duration::MAX, Duration::from_micros)
}

/// Bytes per second.
pub(crate) fn rate(bytes: u64, took: Duration) -> u64 {
    let micros = took.as_micros().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000 / micros).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const HOUR: Duration = Duration::from_hours(1);

    fn policy(strategy: TimeoutStrategy) -> Convergence {
        Convergence::new(100 * MS, HOUR, strategy)
    }

    #[test]
    fn it_stops_as_soon_as_the_downtime_fits() {
        let mut policy = policy(TimeoutStrategy::Cancel);
        assert_eq!(policy.decide(1000, 101 * MS, MS), Decision::Round);
        assert_eq!(policy.decide(900, 100 * MS, MS), Decision::Stop);
    }

    #[test]
    fn useless_rounds_end_precopy_only_where_that_is_allowed() {
        for (strategy, end) in
            [(TimeoutStrategy::Ignore, Decision::Stop), (TimeoutStrategy::Cancel, Decision::Round)]
        {
            let mut policy = policy(strategy);
            assert_eq!(policy.decide(1000, HOUR, MS), Decision::Round);
            assert_eq!(policy.decide(960, HOUR, MS), Decision::Round);
            assert_eq!(policy.decide(990, HOUR, MS), Decision::Round);
            assert_eq!(policy.decide(1000, HOUR, MS), end);
        }
    }

    #[test]
    fn a_round_that_helps_starts_the_count_anew() {
        let mut policy = policy(TimeoutStrategy::Ignore);
        for remaining in [1000, 990, 980, 900, 890, 880] {
            assert_eq!(policy.decide(remaining, HOUR, MS), Decision::Round);
        }
        assert_eq!(policy.stalled_rounds(), 2);
    }

    #[test]
    fn the_timeout_does_what_the_strategy_says() {
        let at_end = |strategy| policy(strategy).decide(1000, HOUR, HOUR);
        assert_eq!(at_end(TimeoutStrategy::Cancel), Decision::GiveUp);
        assert_eq!(at_end(TimeoutStrategy::Ignore), Decision::Stop);
    }

    #[test]
    fn time_at_a_rate_never_overflows() {
        assert_eq!(time_for(0, 0), Duration::ZERO);
        assert_eq!(time_for(1, 0), Duration::MAX);
        assert_eq!(time_for(1_000_000, 1_000_000), Duration::from_secs(1));
        assert!(time_for(u64::MAX, 1) > HOUR);
        assert_eq!(rate(5, Duration::ZERO), 5_000_000);
    }
}
