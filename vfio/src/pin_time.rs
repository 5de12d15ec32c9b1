// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long memory will still be populated and mapped for passed-through devices: whether a guest's driver can
//! wait for it.
//!
//! Owns the longest wait that a guest is to see, and the estimate. The rate of this host with this memory is
//! measured, as pages, processors and the IOMMU make more difference than any table could say. The beginning of
//! memory stands for all of it: a later zone of other pages, or memory that another thread has populated so far, is
//! not seen. Must never wait for longer than a guest may for its devices to be opened.

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

/// Whether a driver that enables DMA now would have to wait for longer than [`GATE_WAIT_MAX`]; also if
/// nothing is mapped while that is measured. `is_cancelled` ends the measurement early.
pub fn is_too_long(pinning: &Pinning, is_cancelled: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    let first = pinning.progress();
    if first.total_bytes < SMALL_BYTES {
        return false;
    }
    loop {
        let now = pinning.progress();
        let took = begun.elapsed();
        let left = remaining(&first, &now, took);
        let has_sample = done_bytes(&first, &now) >= now.total_bytes / SAMPLE_DIVISOR;
        let is_measured = left.is_some() && has_sample && took >= MEASURE_MIN;
        let max = if left.is_some() { MEASURE_MAX } else { FIRST_CHUNK_MAX };
        if is_measured || took >= max || is_cancelled() || is_over(&now) {
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
