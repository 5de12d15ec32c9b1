// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long memory will still be populated and mapped for passed-through devices: whether a guest's driver can
//! wait for it.
//!
//! Owns the longest wait that a guest is to see, and the estimate. The rate of this host with this memory is
//! measured, as pages, processors and the IOMMU make more difference than any table could say. The beginning of
//! memory stands for all of it: a later zone of other pages is not seen, nor that other threads have populated some of
//! it, but for [`PopulatedBefore`]. Must never wait for longer than a guest may for its devices to be opened.

use std::time::{Duration, Instant};

use crate::pinning::{MapSample, PinProgress, PinState, Pinning, SMALL_BYTES};

/// The longest wait at the gate that is planned. Linux reports a stall of RCU after 21 s by default, and some
/// kernels are configured for less; waits of a virtual machine that is short of processors come on top.
pub const GATE_WAIT_MAX: Duration = Duration::from_secs(5);

/// How often it is looked whether enough has been mapped.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Time that a measurement takes at least, unless all is mapped before: the first chunks may have been there.
const MEASURE_MIN: Duration = Duration::from_millis(50);

/// Time for a measurement in which no chunk is done yet: one of 1 GiB pages may take that long.
const FIRST_CHUNK_MAX: Duration = Duration::from_secs(1);

/// Time for a measurement, which delays the devices; about as long as one takes to be reset.
const MEASURE_MAX: Duration = Duration::from_millis(300);

/// One of so many parts of the memory has to be mapped for a measurement.
const SAMPLE_DIVISOR: u64 = 32;

/// What was populated before mapping began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PopulatedBefore {
    /// Bytes populated in that time.
    pub bytes: u64,
    /// Bytes that threads populated at the same time. What they had not done by the end is not in `bytes`.
    pub at_once_bytes: u64,
    /// Bytes of the memory that are still to be populated.
    pub left_bytes: u64,
    /// The time.
    pub took: Duration,
}

impl PopulatedBefore {
    /// Time that populating the rest will take: never none, as long as there is a rest.
    fn left(&self) -> Duration {
        // If less is done than threads work on at a time, as of 1 GiB pages, the rate is at most that.
        let bytes = self.bytes.max(self.at_once_bytes);
        at_rate(self.left_bytes, bytes, self.took).unwrap_or(Duration::MAX)
    }

    /// The part of that which the measurement between `first` and `now` does not show: it is taken to have met all
    /// memory that was there first, which is not populated again.
    fn unseen(&self, first: &PinProgress, now: &PinProgress) -> Duration {
        if is_over(now) || now.processed_bytes >= now.total_bytes {
            return Duration::ZERO;
        }
        let there_bytes = now.total_bytes.saturating_sub(self.left_bytes);
        let there_bytes = there_bytes.saturating_add(self.at_once_bytes);
        let there_bytes = there_bytes.saturating_sub(first.processed_bytes);
        let measured_bytes = done_bytes(first, now);
        let unseen_bytes = there_bytes.min(measured_bytes);
        at_rate(unseen_bytes, measured_bytes, self.left()).unwrap_or(Duration::MAX)
    }
}

/// Whether a driver that enables DMA now would have to wait for longer than [`GATE_WAIT_MAX`]; also if
/// nothing is mapped while that is measured. `is_cancelled` ends the measurement early.
pub fn is_too_long(
    pinning: &Pinning,
    before: Option<PopulatedBefore>,
    is_cancelled: impl Fn() -> bool,
) -> bool {
    let begun = Instant::now();
    let first = pinning.progress();
    // What others who populate the memory take to end is no measure of it.
    let took = || {
        let since = pinning.populating_since().map(|since| since.max(begun));
        since.map_or(Duration::ZERO, |since| since.elapsed())
    };
    if first.total_bytes < SMALL_BYTES {
        return false;
    }
    loop {
        let now = pinning.progress();
        let took = took();
        let unseen = before.map_or(Duration::ZERO, |before| before.unseen(&first, &now));
        let left = remaining(&first, &now, took).map(|left| left.saturating_add(unseen));
        let has_sample = done_bytes(&first, &now) >= now.total_bytes / SAMPLE_DIVISOR;
        let is_measured = left.is_some() && has_sample && took >= MEASURE_MIN;
        let is_over_time =
            if left.is_some() { took >= MEASURE_MAX } else { begun.elapsed() >= FIRST_CHUNK_MAX };
        if is_measured || is_over_time || is_cancelled() || is_over(&now) {
            return left.is_none_or(|left| left > GATE_WAIT_MAX);
        }
        if pinning.ends_within(POLL_INTERVAL) {
            // Its state says how; a thread that panicked has left none, and its gate has failed.
            return false;
        }
    }
}

fn is_over(progress: &PinProgress) -> bool {
    !matches!(progress.state, PinState::Pinning)
}

fn done_bytes(first: &PinProgress, now: &PinProgress) -> u64 {
    now.processed_bytes.saturating_sub(first.processed_bytes)
}

/// Time that is left `now`, with the rate since `first`, which is `took` ago; `None` if nothing was done in it.
fn remaining(first: &PinProgress, now: &PinProgress, took: Duration) -> Option<Duration> {
    if is_over(now) {
        return Some(Duration::ZERO);
    }
    let unprocessed_bytes = now.total_bytes.saturating_sub(now.processed_bytes);
    let unmapped_bytes = now.total_bytes.saturating_sub(now.pinned_bytes);
    let processing = at_rate(unprocessed_bytes, done_bytes(first, now), took)?;
    let mapping = match now.sample {
        MapSample::Unneeded => Duration::ZERO,
        MapSample::Begun => return None,
        MapSample::Taken { bytes, took } => at_rate(unmapped_bytes, bytes, took)?,
    };
    Some(processing.saturating_add(mapping))
}

/// Time for `left_bytes` if `bytes` took so long.
fn at_rate(left_bytes: u64, bytes: u64, took: Duration) -> Option<Duration> {
    if left_bytes == 0 {
        return Some(Duration::ZERO);
    }
    let nanos = u128::from(left_bytes).checked_mul(took.as_nanos())?;
    let nanos = nanos.checked_div(u128::from(bytes))?;
    Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn progress(processed_gib: u64, total_gib: u64, state: PinState) -> PinProgress {
        let (processed_bytes, total_bytes) = (processed_gib * GIB, total_gib * GIB);
        let sample = MapSample::Unneeded;
        PinProgress { pinned_bytes: 0, processed_bytes, sample, total_bytes, state }
    }

    #[test]
    fn what_is_left_takes_as_long_as_what_was_done() {
        let left = |first, now, total, took_ms| {
            let (first, now) = (progress(first, total, PinState::Pinning), now);
            let now = progress(now, total, PinState::Pinning);
            remaining(&first, &now, Duration::from_millis(took_ms))
        };
        assert_eq!(left(0, 40, 512, 100), Some(Duration::from_millis(1180)));
        assert_eq!(
            left(10, 50, 4096, 100),
            Some(Duration::from_millis(10115)),
            "not since the start"
        );
        assert_eq!(left(7, 7, 512, 300), None);
        let most = remaining(
            &progress(0, 0, PinState::Pinning),
            &PinProgress {
                processed_bytes: 1,
                total_bytes: u64::MAX,
                ..progress(0, 0, PinState::Pinning)
            },
            Duration::MAX,
        );
        assert!(most.is_none_or(|most| most > GATE_WAIT_MAX));
    }

    #[test]
    fn memory_that_is_mapped_last_is_still_to_be_mapped() {
        let first = progress(0, 512, PinState::Pinning);
        let populated = progress(512, 512, PinState::Pinning);
        let left =
            |sample| remaining(&first, &PinProgress { sample, ..populated.clone() }, MEASURE_MAX);
        assert_eq!(left(MapSample::Unneeded), Some(Duration::ZERO));
        assert_eq!(left(MapSample::Begun), None);
        let nothing_done = remaining(&populated, &populated, MEASURE_MAX);
        assert_eq!(nothing_done, Some(Duration::ZERO), "all was populated before");
        let sample = MapSample::Taken { bytes: GIB, took: Duration::from_millis(20) };
        assert_eq!(left(sample), Some(Duration::from_millis(10_240)));
    }

    fn before(done_gib: u64, at_once_gib: u64, left_gib: u64) -> PopulatedBefore {
        PopulatedBefore {
            bytes: done_gib * GIB,
            at_once_bytes: at_once_gib * GIB,
            left_bytes: left_gib * GIB,
            took: Duration::from_millis(500),
        }
    }

    #[test]
    fn what_was_not_populated_before_is_still_to_be() {
        assert_eq!(before(128, 8, 384).left(), Duration::from_millis(1500));
        assert_eq!(before(512, 8, 0).left(), Duration::ZERO);
        let pages_in_work = before(0, 64, 512).left();
        assert_eq!(pages_in_work, Duration::from_secs(4), "nothing is done");
        assert_eq!(before(16, 64, 496).left(), Duration::from_millis(3875), "hardly anything is");
        assert_eq!(before(0, 0, 1).left(), Duration::MAX);
        assert_eq!(before(0, 0, 0).left(), Duration::ZERO);
    }

    #[test]
    fn a_measurement_shows_how_long_populating_takes_where_nothing_was_there() {
        let measured = |to_gib, before: PopulatedBefore| {
            let first = progress(0, 512, PinState::Pinning);
            before.unseen(&first, &progress(to_gib, 512, PinState::Pinning)).as_millis()
        };
        assert_eq!(measured(16, before(128, 8, 384)), 1500, "all of it was there");
        assert_eq!(measured(64, before(0, 16, 512)), 16_000 / 4, "at most a quarter was");
        assert_eq!(measured(512, before(128, 8, 384)), 0, "it is populated");
        let late = |first, now| {
            let (first, now) =
                (progress(first, 512, PinState::Pinning), progress(now, 512, PinState::Pinning));
            before(128, 8, 384).unseen(&first, &now).as_millis()
        };
        assert_eq!(late(128, 144), 1500 / 2, "half of it was, of what another device had mapped");
        assert_eq!(late(136, 152), 0, "none of it was");
        assert_eq!(measured(0, before(128, 8, 384)), 0, "there is no measurement");
        assert!(measured(16, before(0, 0, 511)) > 1 << 40, "it was, and nothing else is known");
    }

    #[test]
    fn nothing_is_left_of_what_has_ended() {
        let first = progress(0, 512, PinState::Pinning);
        for state in [
            PinState::Pinned { took: Duration::ZERO, at: Instant::now() },
            PinState::Failed("no memory".into()),
        ] {
            let now = progress(0, 512, state);
            assert_eq!(remaining(&first, &now, MEASURE_MAX), Some(Duration::ZERO));
        }
    }
}
