// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a migration is expected to take, from measured rates. A pure function of them.
//!
//! Owns the rounds that precopy would have. It must never have rules of its own for the rest: when precopy stops is decided by
//! the policy of real rounds, and what the stop costs by their forecast. docs/migration.md has the model in words.

use std::time::Duration;

use super::super::convergence::{Decision, Forecast, Policy, StateCost, time_for};
use crate::migration_check::MigrationForecast;
use crate::options::SendOptions;

/// Most rounds that are computed. A guest that needs more writes as fast as the link carries.
const ROUNDS_MAX: u32 = 10_000;

/// The least that a round takes, whatever there is to send.
const SHORTEST_ROUND: Duration = Duration::from_millis(1);

/// What has been measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    /// Bytes to move.
    pub memory_bytes: u64,
    /// Bytes per second of the link.
    pub link_rate: u64,
    pub round_trip: Duration,
    /// Bytes per second that the guest writes.
    pub dirty_rate: u64,
    /// Reading the dirty log.
    pub scan: Duration,
    /// Pausing, state, and start.
    pub switch_over: Duration,
    /// Long parts of the state.
    pub state_bytes: u64,
    /// Devices may write any page until they stop.
    pub is_unlogged: bool,
}

impl Measured {
    /// The rate at which memory is sent: that of the link, or the limit in the options.
    fn rate(&self, options: &SendOptions) -> u64 {
        match options.bandwidth_bytes_per_s {
            0 => self.link_rate,
            limit => self.link_rate.min(limit),
        }
    }

    fn forecast(&self, options: &SendOptions) -> Forecast {
        Forecast {
            switch_over: self.switch_over,
            round_trip: self.round_trip,
            scan: self.scan,
            sweep: Duration::ZERO,
            link_rate: self.rate(options),
            is_measured: true,
            state: StateCost { bytes: self.state_bytes, is_apart: true },
        }
    }
}

/// Precopy: rounds in which the guest goes on writing at the present rate, until the policy ends them.
pub(super) fn precopy(measured: &Measured, options: &SendOptions) -> MigrationForecast {
    let forecast = measured.forecast(options);
    let Measured { memory_bytes, dirty_rate, scan, round_trip, .. } = *measured;
    let unlogged = measured.is_unlogged.then_some(memory_bytes);
    let mut policy = Policy::new(options);
    let (mut left, mut elapsed) = (memory_bytes, Duration::ZERO);
    let mut expected = forecast.downtime(left, unlogged);
    for _ in 0..ROUNDS_MAX {
        let sending = time_for(left, forecast.link_rate);
        let round = sending.saturating_add(scan).saturating_add(round_trip).max(SHORTEST_ROUND);
        elapsed = elapsed.saturating_add(round);
        let runs_percent = u64::from(100_u8.saturating_sub(policy.throttle_percent()));
        left = written(dirty_rate / 100 * runs_percent, round).min(memory_bytes);
        expected = forecast.downtime(left, unlogged);
        let (decision, _) = policy.decide(left, expected, elapsed);
        match decision {
            Decision::Round => {}
            Decision::Stop => {
                let allowed = policy.allowed();
                let converges = expected.total() <= allowed || expected.is_unavoidable(allowed);
                return of(elapsed, expected.total(), converges);
            }
            Decision::Abort | Decision::Postcopy => break,
        }
    }
    of(elapsed, expected.total(), false)
}

/// Postcopy: the guest is stopped for what does not depend on its memory, which follows at the rate of the link.
pub(super) fn postcopy(measured: &Measured, options: &SendOptions) -> MigrationForecast {
    let downtime = measured.forecast(options).downtime(0, None).total();
    of(time_for(measured.memory_bytes, measured.rate(options)), downtime, true)
}

/// Bytes that are written at a rate within a time.
fn written(bytes_per_s: u64, within: Duration) -> u64 {
    let bytes = u128::from(bytes_per_s).saturating_mul(within.as_micros()) / 1_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

fn of(before: Duration, downtime: Duration, converges: bool) -> MigrationForecast {
    let ms = |time: Duration| u64::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u64::MAX);
    MigrationForecast {
        duration_ms: ms(before.saturating_add(downtime)),
        downtime_ms: ms(downtime),
        converges,
    }
}

/// Microseconds of a time.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{Convergence, TimeoutStrategy};

    const MIB: u64 = 1 << 20;
    const MS: Duration = Duration::from_millis(1);

    fn options() -> SendOptions {
        let mut options = SendOptions::new("unix:/x".parse().expect("an address"));
        options.downtime = 300 * MS;
        options
    }

    fn idle() -> Measured {
        Measured {
            memory_bytes: 1000 * MIB,
            link_rate: 100 * MIB,
            round_trip: MS,
            dirty_rate: 0,
            scan: MS,
            switch_over: 6 * MS,
            state_bytes: 0,
            is_unlogged: false,
        }
    }

    #[test]
    fn an_idle_guest_takes_as_long_as_its_memory() {
        let precopy = precopy(&idle(), &options());
        // One round of 10 s, the scan and a round trip; then three round trips, a scan and the switch.
        assert_eq!((precopy.duration_ms, precopy.downtime_ms), (10_012, 10));
        assert!(precopy.converges);
        let postcopy = postcopy(&idle(), &options());
        assert_eq!((postcopy.duration_ms, postcopy.downtime_ms), (10_010, 10));
        assert!(postcopy.converges);
    }

    #[test]
    fn a_guest_that_writes_takes_rounds() {
        let busy = Measured { dirty_rate: 50 * MIB, ..idle() };
        let writes_half = precopy(&busy, &options());
        // Each round leaves half of the one before: 10 s, 5 s, ..., until the rest fits.
        assert!(writes_half.converges && writes_half.downtime_ms <= 300, "{writes_half:?}");
        assert!((19_000..21_000).contains(&writes_half.duration_ms), "{writes_half:?}");
        assert_eq!(postcopy(&busy, &options()), postcopy(&idle(), &options()), "it does not count");
    }

    #[test]
    fn a_guest_that_writes_faster_than_the_link_carries_does_not_converge() {
        let busy = Measured { dirty_rate: 150 * MIB, ..idle() };
        let never = precopy(&busy, &options());
        assert!(!never.converges, "{never:?}");
        // All of its memory, at four fifths of the rate.
        assert_eq!(never.downtime_ms, 12_510);
        let ignore = SendOptions { timeout_strategy: TimeoutStrategy::Ignore, ..options() };
        let stopped = precopy(&busy, &ignore);
        assert!(!stopped.converges && stopped.duration_ms < 60_000, "{stopped:?}");
        let throttle = SendOptions { convergence: Convergence::Throttle, ..options() };
        assert!(precopy(&busy, &throttle).converges, "until it writes slower");
        let raise = SendOptions {
            convergence: Convergence::RaiseDowntime,
            downtime_max: Some(20_000 * MS),
            ..options()
        };
        assert!(precopy(&busy, &raise).converges, "as long as that takes");
    }

    #[test]
    fn a_limit_of_the_options_is_the_rate() {
        let limited = SendOptions { bandwidth_bytes_per_s: 10 * MIB, ..options() };
        assert_eq!(precopy(&idle(), &limited).duration_ms, 100_012);
        let above = SendOptions { bandwidth_bytes_per_s: 1000 * MIB, ..options() };
        assert_eq!(precopy(&idle(), &above), precopy(&idle(), &options()));
    }

    #[test]
    fn what_nothing_logs_is_sent_again_during_the_stop() {
        let unlogged = Measured { is_unlogged: true, ..idle() };
        let again = precopy(&unlogged, &options());
        assert_eq!((again.converges, again.downtime_ms), (false, 12_510));
        let allowed = SendOptions { downtime: 13_000 * MS, ..options() };
        assert!(precopy(&unlogged, &allowed).converges);
    }

    #[test]
    fn no_value_is_too_large_for_it() {
        let most = Measured {
            memory_bytes: u64::MAX,
            link_rate: 0,
            round_trip: Duration::from_hours(1),
            dirty_rate: u64::MAX,
            scan: Duration::MAX,
            switch_over: Duration::MAX,
            state_bytes: u64::MAX,
            is_unlogged: true,
        };
        assert!(!precopy(&most, &options()).converges);
        assert!(postcopy(&most, &options()).duration_ms > 0);
        let local = Measured { memory_bytes: 0, link_rate: 0, ..idle() };
        assert!(precopy(&local, &options()).converges, "nothing is sent");
    }
}
