// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The convergence policy: when precopy stops, and which measure is taken when it does not converge. A pure
//! function of measured rates.
//!
//! Owns the policy, its constants, and the estimate of the downtime of a stop; it measures nothing and has
//! no side effects. A round that leaves at least as many dirty pages as the one before shows that the guest
//! writes faster than the link carries; the option [`Convergence`] says what is done then.

use std::time::Duration;

use crate::figures::rate;
use crate::options::{Convergence, SendOptions, TimeoutStrategy};

/// Consecutive rounds without real progress before the first measure; after that each further such round
/// leads to another.
const STALLED_ROUNDS_BEFORE_MEASURES: u32 = 2;

/// Consecutive rounds without real progress after which further rounds are considered useless.
const STALLED_ROUNDS_MAX: u32 = 3;

/// Progress is real when less than this percentage of the least dirty memory so far is left.
const PROGRESS_PERCENT: u64 = 95;

/// Initial throttle, as a percentage of time.
const THROTTLE_FIRST_PERCENT: u8 = 20;

/// Increase of the throttle per step.
const THROTTLE_STEP_PERCENT: u8 = 10;

/// Highest throttle: the guest stays alive.
const THROTTLE_MAX_PERCENT: u8 = 99;

/// Factor by which the allowed downtime is multiplied per step.
const DOWNTIME_STEP: u32 = 2;

/// Message round trips while the guest is stopped: the last pages, the state, the handover.
const ROUND_TRIPS: u32 = 3;

/// Percentage of the measured rate that is assumed for the last pages, which are fewer and more scattered
/// than those of the measurement.
const RATE_PERCENT: u64 = 80;

/// Least number of bytes that must be sent for a low rate to be meaningful.
const RATE_BYTES_MIN: u64 = 1 << 20;

/// Rate at which a device is assumed to give its state where the link was not measured, and to give and take it where
/// its state is sent within the document: read, sent and written one after the other.
const STATE_BYTES_PER_S: u64 = 100 << 20;

/// How parts of the state are sent that have many bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StateCost {
    /// Their length, as far as it is known.
    pub bytes: u64,
    /// They travel on all connections while they are read and written; otherwise in the document, as base64.
    pub is_apart: bool,
}

/// Decision after counting the dirty pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Send another round.
    Round,
    /// Stop the guest now.
    Stop,
    /// End the migration: the downtime will not be reached, and the options do not allow exceeding it.
    Abort,
    /// Send the rest of memory by postcopy: the downtime will not be reached.
    Postcopy,
}

/// A measure against a guest that writes too fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measure {
    /// Keep its vCPUs out of the guest for this share of the time, in percent.
    Throttle(u8),
    /// Allow this downtime.
    AllowDowntime(Duration),
}

/// Measured costs of a stop.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Forecast {
    /// Pausing, state, and start.
    pub switch_over: Duration,
    /// Message round trip time.
    pub round_trip: Duration,
    /// Reading the dirty log of all memory.
    pub scan: Duration,
    /// Going through all memory in a round that finds almost nothing; the shortest so far, 0 before one.
    pub sweep: Duration,
    /// Rate of the last round in bytes per second; 0 before.
    pub link_rate: u64,
    /// A round was long enough to measure the link.
    pub is_measured: bool,
    /// Long parts of the state.
    pub state: StateCost,
}

/// Expected downtime if the guest were stopped now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    /// The part that does not depend on the guest's writes.
    pub fixed: Duration,
    /// The part for the remaining pages.
    pub pages: Duration,
    /// In place of that, the part for all memory, where a device may have written any page until it stops. No
    /// round makes it shorter.
    pub unlogged: Duration,
}

impl Expected {
    /// Sum of all parts.
    pub(crate) fn total(self) -> Duration {
        self.fixed.saturating_add(self.pages).saturating_add(self.unlogged)
    }

    /// True when the fixed part exceeds three quarters of `allowed` and memory needs a quarter at most:
    /// further rounds would not help.
    pub(crate) fn is_unavoidable(self, allowed: Duration) -> bool {
        self.fixed > allowed * 3 / 4 && self.pages.saturating_add(self.unlogged) <= allowed / 4
    }
}

impl Forecast {
    /// Takes the measurement of a round that sent `sent` bytes.
    pub(crate) fn measured(&mut self, sent: u64, took: Duration) {
        let (now, before) = (rate(sent, took), self.link_rate);
        if sent >= RATE_BYTES_MIN {
            self.is_measured = true;
            // The fixed cost of a round is counted separately. This at most doubles the measured rate.
            self.link_rate = rate(sent, took.saturating_sub(self.sweep).max(took / 2));
            return;
        }
        // A short round understates the rate of the link, and shows the fixed cost of a round instead.
        let bytes = if before == 0 { Duration::ZERO } else { time_for(sent, before) };
        let sweep = took.saturating_sub(bytes.saturating_add(self.round_trip));
        self.sweep = if self.sweep.is_zero() { sweep } else { self.sweep.min(sweep) };
        self.link_rate = before.max(now);
    }

    /// The expected downtime with `remaining_bytes` left, or with all `unlogged_bytes` of memory to be sent again.
    pub(crate) fn downtime(&self, remaining_bytes: u64, unlogged_bytes: Option<u64>) -> Expected {
        let rate = u128::from(self.link_rate) * u128::from(RATE_PERCENT) / 100;
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        let costs = [self.scan, self.sweep, ROUND_TRIPS * self.round_trip, self.state_time(rate)];
        let fixed = costs.into_iter().fold(self.switch_over, Duration::saturating_add);
        let (pages, unlogged) = match unlogged_bytes {
            None => (time_for(remaining_bytes, rate), Duration::ZERO),
            Some(bytes) => (Duration::ZERO, time_for(bytes.max(remaining_bytes), rate)),
        };
        Expected { fixed, pages, unlogged }
    }
}

impl Forecast {
    /// How long the long parts of the state take at this rate of the link.
    fn state_time(&self, rate: u64) -> Duration {
        let StateCost { bytes, is_apart } = self.state;
        // Rounds that have next to nothing to send say next to nothing about the link.
        let rate = if self.is_measured { rate } else { rate.max(STATE_BYTES_PER_S) };
        if is_apart {
            return time_for(bytes, rate);
        }
        let text_bytes = bytes.div_ceil(3).saturating_mul(4);
        time_for(bytes, STATE_BYTES_PER_S).saturating_add(time_for(text_bytes, rate))
    }
}

/// The convergence policy of one migration.
#[derive(Debug)]
pub(crate) struct Policy {
    convergence: Convergence,
    /// The rest of memory may be sent by postcopy.
    may_postcopy: bool,
    /// Downtime that is allowed now.
    allowed: Duration,
    /// Upper limit of the allowed downtime.
    cap: Duration,
    timeout: Duration,
    strategy: TimeoutStrategy,
    best_bytes: u64,
    stalled_rounds: u32,
    throttle_percent: u8,
}

impl Policy {
    pub(crate) fn new(options: &SendOptions) -> Self {
        Self {
            convergence: options.convergence,
            may_postcopy: options.mode().may_postcopy(),
            allowed: options.downtime,
            cap: options.downtime_cap(),
            timeout: options.timeout,
            strategy: options.timeout_strategy,
            best_bytes: u64::MAX,
            stalled_rounds: 0,
            throttle_percent: 0,
        }
    }

    /// Consecutive rounds without real progress.
    pub(crate) fn stalled_rounds(&self) -> u32 {
        self.stalled_rounds
    }

    /// The next round is measured against none before it.
    pub(crate) fn begin_anew(&mut self) {
        (self.best_bytes, self.stalled_rounds) = (u64::MAX, 0);
    }

    /// Downtime that is allowed now.
    pub(crate) fn allowed(&self) -> Duration {
        self.allowed
    }

    /// Decides with `remaining_bytes` dirty, an expected downtime of `expected`, and `elapsed` since the
    /// first round began; also returns the measure to take, if any.
    ///
    /// Costs that do not depend on memory may alone exceed the allowed downtime; then the guest stops as
    /// soon as its pages take at most a quarter of it.
    ///
    /// When no measure is left, stalled rounds end precopy only where exceeding the downtime is allowed;
    /// otherwise the guest may write less before the timeout. What is not logged takes as long after any number of
    /// rounds, so precopy ends at once.
    pub(crate) fn decide(
        &mut self,
        remaining_bytes: u64,
        expected: Expected,
        elapsed: Duration,
    ) -> (Decision, Option<Measure>) {
        if expected.total() <= self.allowed || expected.is_unavoidable(self.allowed) {
            return (Decision::Stop, None);
        }
        if !expected.unlogged.is_zero() {
            return self.decide_without_log(expected);
        }
        let helped = u128::from(remaining_bytes) * 100
            < u128::from(self.best_bytes) * u128::from(PROGRESS_PERCENT);
        if helped {
            self.best_bytes = remaining_bytes;
            self.stalled_rounds = 0;
        } else {
            self.stalled_rounds += 1;
        }
        let end = self.end();
        let ends = end != Decision::Abort;
        if elapsed >= self.timeout {
            return (end, None);
        }
        match self.measure() {
            Some(Measure::AllowDowntime(allowed)) if expected.total() <= allowed => {
                (Decision::Stop, Some(Measure::AllowDowntime(allowed)))
            }
            Some(measure) => (Decision::Round, Some(measure)),
            None if ends && self.exhausted() => (end, None),
            None => (Decision::Round, None),
        }
    }

    /// The end of a precopy that does not reach the allowed downtime.
    fn end(&self) -> Decision {
        match self.strategy {
            _ if self.may_postcopy => Decision::Postcopy,
            TimeoutStrategy::Ignore => Decision::Stop,
            TimeoutStrategy::Cancel => Decision::Abort,
        }
    }

    fn decide_without_log(&mut self, expected: Expected) -> (Decision, Option<Measure>) {
        if self.convergence == Convergence::RaiseDowntime && expected.total() <= self.cap {
            self.allowed = self.cap;
            return (Decision::Stop, Some(Measure::AllowDowntime(self.cap)));
        }
        (self.end(), None)
    }

    /// The share of time for which vCPUs are kept out of the guest, in percent.
    pub(crate) fn throttle_percent(&self) -> u8 {
        self.throttle_percent
    }

    /// Takes the next measure, if one is due.
    fn measure(&mut self) -> Option<Measure> {
        match self.convergence {
            Convergence::Throttle => {
                let begun = self.throttle_percent > 0;
                let due = if begun { 1 } else { STALLED_ROUNDS_BEFORE_MEASURES };
                let more = self.throttle_percent < THROTTLE_MAX_PERCENT;
                (self.stalled_rounds >= due && more).then(|| {
                    let step = if begun { THROTTLE_STEP_PERCENT } else { THROTTLE_FIRST_PERCENT };
                    self.throttle_percent =
                        (self.throttle_percent + step).min(THROTTLE_MAX_PERCENT);
                    Measure::Throttle(self.throttle_percent)
                })
            }
            Convergence::RaiseDowntime => {
                let due = self.stalled_rounds >= STALLED_ROUNDS_BEFORE_MEASURES;
                (due && self.allowed < self.cap).then(|| {
                    let least = Duration::from_millis(1);
                    self.allowed =
                        self.allowed.max(least).saturating_mul(DOWNTIME_STEP).min(self.cap);
                    Measure::AllowDowntime(self.allowed)
                })
            }
            Convergence::None | Convergence::Postcopy => None,
        }
    }

    /// True when rounds do not help and no measure is left.
    fn exhausted(&self) -> bool {
        let done = match self.convergence {
            Convergence::Throttle => self.throttle_percent >= THROTTLE_MAX_PERCENT,
            Convergence::RaiseDowntime => self.allowed >= self.cap,
            Convergence::None | Convergence::Postcopy => true,
        };
        done && self.stalled_rounds >= STALLED_ROUNDS_MAX
    }
}

/// How long `bytes` take at a rate; very long without a measured rate.
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

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const HOUR: Duration = Duration::from_hours(1);

    fn options(strategy: TimeoutStrategy) -> SendOptions {
        let mut options = SendOptions::new("unix:/x".parse().expect("an address"));
        (options.downtime, options.timeout) = (100 * MS, HOUR);
        options.timeout_strategy = strategy;
        options
    }

    /// An expected downtime that consists of pages only.
    fn pages(pages: Duration) -> Expected {
        Expected { fixed: Duration::ZERO, pages, unlogged: Duration::ZERO }
    }

    fn policy(strategy: TimeoutStrategy) -> Policy {
        Policy::new(&options(strategy))
    }

    #[test]
    fn after_a_long_wait_rounds_are_not_measured_against_those_before() {
        let mut policy = policy(TimeoutStrategy::Ignore);
        policy.decide(1000, pages(HOUR), MS);
        policy.decide(1000, pages(HOUR), MS);
        assert_eq!(policy.stalled_rounds(), 1);
        policy.begin_anew();
        // All that was written during the wait.
        assert_eq!(policy.decide(9000, pages(HOUR), MS), (Decision::Round, None));
        assert_eq!(policy.stalled_rounds(), 0);
    }

    #[test]
    fn what_a_round_costs_by_itself_is_part_of_a_stop() {
        let mut forecast = Forecast { round_trip: MS, ..Forecast::default() };
        forecast.measured(100 << 20, 1000 * MS);
        assert_eq!((forecast.link_rate, forecast.sweep), (100 << 20, Duration::ZERO));
        // Rounds that only go through all slices.
        forecast.measured(0, 300 * MS);
        forecast.measured(4096, 251 * MS + time_for(4096, 100 << 20));
        forecast.measured(0, 400 * MS);
        assert_eq!((forecast.link_rate, forecast.sweep), (100 << 20, 250 * MS));
        assert_eq!(forecast.downtime(0, None).fixed, 250 * MS + ROUND_TRIPS * MS);
    }

    const ROUND: (Decision, Option<Measure>) = (Decision::Round, None);
    const STOP: (Decision, Option<Measure>) = (Decision::Stop, None);

    #[test]
    fn it_stops_as_soon_as_the_downtime_fits() {
        let mut policy = policy(TimeoutStrategy::Cancel);
        assert_eq!(policy.decide(1000, pages(101 * MS), MS), ROUND);
        assert_eq!(policy.decide(900, pages(100 * MS), MS), STOP);
    }

    #[test]
    fn useless_rounds_end_precopy_only_where_that_is_allowed() {
        for (strategy, end) in [(TimeoutStrategy::Ignore, STOP), (TimeoutStrategy::Cancel, ROUND)] {
            let mut policy = policy(strategy);
            assert_eq!(policy.decide(1000, pages(HOUR), MS), ROUND);
            assert_eq!(policy.decide(960, pages(HOUR), MS), ROUND);
            assert_eq!(policy.decide(990, pages(HOUR), MS), ROUND);
            assert_eq!(policy.decide(1000, pages(HOUR), MS), end);
        }
    }

    #[test]
    fn a_round_that_helps_starts_the_count_anew() {
        let mut policy = policy(TimeoutStrategy::Ignore);
        for remaining in [1000, 990, 980, 900, 890, 880] {
            assert_eq!(policy.decide(remaining, pages(HOUR), MS), ROUND);
        }
        assert_eq!(policy.stalled_rounds(), 2);
    }

    #[test]
    fn the_timeout_does_what_the_strategy_says() {
        let at_end = |strategy| policy(strategy).decide(1000, pages(HOUR), HOUR);
        assert_eq!(at_end(TimeoutStrategy::Cancel), (Decision::Abort, None));
        assert_eq!(at_end(TimeoutStrategy::Ignore), STOP);
    }

    #[test]
    fn throttling_goes_up_in_steps_while_it_does_not_help() {
        let mut policy = Policy::new(&SendOptions {
            convergence: Convergence::Throttle,
            ..options(TimeoutStrategy::Cancel)
        });
        let throttle = |percent| (Decision::Round, Some(Measure::Throttle(percent)));
        assert_eq!(policy.decide(1000, pages(HOUR), MS), ROUND);
        assert_eq!(policy.decide(1000, pages(HOUR), MS), ROUND);
        assert_eq!(policy.decide(1000, pages(HOUR), MS), throttle(20));
        assert_eq!(policy.decide(800, pages(HOUR), MS), ROUND, "that helped");
        assert_eq!(policy.decide(800, pages(HOUR), MS), throttle(30));
        for percent in [40, 50, 60, 70, 80, 90, 99] {
            assert_eq!(policy.decide(800, pages(HOUR), MS), throttle(percent));
        }
        assert_eq!(policy.decide(800, pages(HOUR), MS), ROUND, "there is no more of it");
    }

    #[test]
    fn the_downtime_is_doubled_up_to_its_cap_and_never_beyond() {
        let mut policy = Policy::new(&SendOptions {
            convergence: Convergence::RaiseDowntime,
            downtime_max: Some(500 * MS),
            ..options(TimeoutStrategy::Cancel)
        });
        let allow = |decision, ms| (decision, Some(Measure::AllowDowntime(ms * MS)));
        assert_eq!(policy.decide(1000, pages(HOUR), MS), ROUND);
        assert_eq!(policy.decide(1000, pages(HOUR), MS), ROUND);
        assert_eq!(policy.decide(1000, pages(900 * MS), MS), allow(Decision::Round, 200));
        assert_eq!(policy.decide(1000, pages(900 * MS), MS), allow(Decision::Round, 400));
        assert_eq!(policy.decide(1000, pages(450 * MS), MS), allow(Decision::Stop, 500));
        assert_eq!(policy.decide(1000, pages(501 * MS), MS), ROUND);
        assert_eq!(policy.decide(1000, pages(500 * MS), MS), STOP);
    }

    #[test]
    fn the_forecast_counts_what_does_not_depend_on_memory() {
        let forecast = Forecast {
            switch_over: 7 * MS,
            round_trip: 10 * MS,
            sweep: Duration::ZERO,
            scan: 2 * MS,
            link_rate: 1_000_000,
            ..Forecast::default()
        };
        let expected = forecast.downtime(800_000, None);
        let unlogged = Duration::ZERO;
        assert_eq!(expected, Expected { fixed: 39 * MS, pages: 1000 * MS, unlogged });
        assert_eq!(expected.total(), 1039 * MS);
        assert!(Forecast::default().downtime(1, None).total() > HOUR, "no rate was measured");
        // All memory is sent again, with what is left of it.
        let expected = forecast.downtime(400_000, Some(800_000));
        let (pages, unlogged) = (Duration::ZERO, 1000 * MS);
        assert_eq!(expected, Expected { fixed: 39 * MS, pages, unlogged });
        assert_eq!(expected.total(), 1039 * MS);
        assert_eq!(forecast.downtime(800_000, Some(1)).unlogged, 1000 * MS);
    }

    #[test]
    fn the_forecast_counts_the_state_of_devices_at_the_measured_rate() {
        const MIB: u64 = 1 << 20;
        let mut forecast = Forecast { round_trip: MS, ..Forecast::default() };
        forecast.state = StateCost { bytes: 4000 * MIB, is_apart: true };
        let fixed =
            |forecast: &Forecast| forecast.downtime(0, None).fixed.saturating_sub(ROUND_TRIPS * MS);
        assert_eq!(fixed(&forecast), 40_000 * MS, "as assumed, as nothing was measured");
        forecast.measured(4096, 1000 * MS);
        assert_eq!(fixed(&forecast), 40_000 * MS + forecast.sweep, "nor by such a round");
        forecast.measured(1250 * MIB, 1000 * MS + forecast.sweep);
        assert_eq!(forecast.link_rate, 1250 * MIB);
        assert_eq!(fixed(&forecast), 4000 * MS + forecast.sweep, "four fifths of the rate");
        // A slower link, which is not assumed to be faster than it is.
        forecast.measured(10 * MIB, 1000 * MS + forecast.sweep);
        assert_eq!(fixed(&forecast), 500_000 * MS + forecast.sweep);
        // To an older destination: read and written one after the other, with four characters for three bytes.
        forecast.measured(1250 * MIB, 1000 * MS + forecast.sweep);
        forecast.state = StateCost { bytes: 300 * MIB, is_apart: false };
        assert_eq!(fixed(&forecast), (3000 + 400) * MS + forecast.sweep);
        forecast.state.bytes = u64::MAX;
        assert!(forecast.downtime(u64::MAX, None).total() > HOUR, "without an overflow");
    }

    #[test]
    fn a_guest_is_not_kept_waiting_for_a_downtime_that_it_cannot_reach() {
        let stops = |fixed, pages| {
            let mut policy = policy(TimeoutStrategy::Cancel);
            let expected = Expected { fixed, pages, unlogged: Duration::ZERO };
            policy.decide(1000, expected, MS) == STOP
        };
        assert!(stops(60 * MS, 40 * MS) && !stops(60 * MS, 41 * MS), "it can be reached");
        assert!(stops(300 * MS, 25 * MS), "it cannot, and there is next to nothing left");
        assert!(!stops(300 * MS, 26 * MS), "much is left");
    }

    #[test]
    fn no_rounds_are_spent_on_what_they_cannot_make_shorter() {
        let decide = |strategy, convergence, unlogged| {
            let mut policy = Policy::new(&SendOptions {
                convergence,
                downtime_max: Some(500 * MS),
                ..options(strategy)
            });
            let expected = Expected { fixed: 10 * MS, pages: Duration::ZERO, unlogged };
            policy.decide(1000, expected, MS)
        };
        let (none, raise) = (Convergence::None, Convergence::RaiseDowntime);
        let (cancel, ignore) = (TimeoutStrategy::Cancel, TimeoutStrategy::Ignore);
        assert_eq!(decide(cancel, none, 90 * MS), STOP, "as short as is allowed");
        assert_eq!(decide(cancel, none, 91 * MS), (Decision::Abort, None));
        assert_eq!(decide(ignore, none, 91 * MS), STOP);
        let raised = Some(Measure::AllowDowntime(500 * MS));
        assert_eq!(decide(cancel, raise, 490 * MS), (Decision::Stop, raised));
        assert_eq!(decide(cancel, raise, 491 * MS), (Decision::Abort, None));
        assert_eq!(decide(cancel, Convergence::Throttle, 91 * MS), (Decision::Abort, None));
        assert_eq!(decide(cancel, Convergence::Postcopy, 91 * MS), (Decision::Postcopy, None));
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
