// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A token bucket that several threads take from.
//!
//! Owns one atomic: the time at which the bucket will be full, or what is left of the one-time burst. Taking
//! tokens moves that time on by what they take to be refilled, so that no thread holds a lock. Must never
//! give out more in a time T than `size` + burst + rate · T, and the largest request once.
//!
//! ```text
//!     one-time burst is left                    it is used up
//!   BURST | its length in ns  -- take ...  -->  ns at which the bucket is full again
//!     (the bucket is full)                        <= now              full
//!                                                 now + refill time   empty
//!                                                 later               in debt
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

const NANOS_PER_MS: u128 = 1_000_000;
/// Marks the state in which the rest of the burst is left.
const BURST: u64 = 1 << 63;
/// Longest refill time: 146 years. Sums of two fit.
const REFILL_MAX_NANOS: u64 = 1 << 62;

/// A bucket of tokens. It begins full.
///
/// A request passes while at least one token is there; what it takes beyond those that are there is a debt, which
/// is refilled before another request passes. So each request passes at some time, however large, and small
/// ones do not keep a large one waiting forever.
#[derive(Debug)]
pub struct TokenBucket {
    size: u64,
    refill_nanos: u64,
    /// [`BURST`] and the nanoseconds left of the burst, or the time at which the bucket is full.
    state: AtomicU64,
}

impl TokenBucket {
    /// A bucket for `size` tokens, refilled at `size` tokens in `refill_ms` milliseconds, with `burst` tokens more
    /// that are not refilled. `None`, for no limit, if `size` or `refill_ms` is 0.
    ///
    /// Refill times beyond 146 years are taken for that long. A token counts in whole nanoseconds, rounded
    /// in favour of the limit: more than 10⁹ tokens a second are only exact for large requests.
    pub fn new(size: u64, burst: u64, refill_ms: u64) -> Option<Self> {
        if size == 0 || refill_ms == 0 {
            return None;
        }
        let refill_nanos = u64::try_from(u128::from(refill_ms) * NANOS_PER_MS);
        let refill_nanos = refill_nanos.unwrap_or(u64::MAX).min(REFILL_MAX_NANOS);
        let burst_nanos = u128::from(burst) * u128::from(refill_nanos) / u128::from(size);
        let burst_nanos = u64::try_from(burst_nanos).unwrap_or(u64::MAX).min(BURST - 1);
        Some(Self { size, refill_nanos, state: AtomicU64::new(BURST | burst_nanos) })
    }

    /// Nanoseconds in which `tokens` are refilled, up to [`BURST`] - 1.
    fn nanos(&self, tokens: u64) -> u64 {
        let nanos = (u128::from(tokens) * u128::from(self.refill_nanos))
            .div_ceil(u128::from(self.size.max(1)));
        u64::try_from(nanos).unwrap_or(u64::MAX).min(BURST - 1)
    }

    /// The time from which a request passes, in the state `state`; 0 while there is a burst.
    fn passes_from(&self, state: u64) -> u64 {
        if state & BURST != 0 {
            return 0;
        }
        state.saturating_add(self.nanos(1)).saturating_sub(self.refill_nanos)
    }

    /// The state after `tokens` have been taken at `now`.
    fn after(&self, state: u64, now: u64, tokens: u64) -> u64 {
        let mut cost = self.nanos(tokens);
        let mut full_at = state.max(now);
        if state & BURST != 0 {
            let burst = state & !BURST;
            if let Some(rest) = burst.checked_sub(cost).filter(|rest| *rest > 0) {
                return BURST | rest;
            }
            cost -= burst;
            full_at = now;
        }
        full_at.saturating_add(cost).min(BURST - 1)
    }

    /// Whether a request would pass at `now`, in nanoseconds since any moment, up to 2⁶².
    ///
    /// # Errors
    /// The time from which one may.
    pub fn check(&self, now: u64) -> Result<(), u64> {
        let from = self.passes_from(self.state.load(Ordering::Relaxed));
        if from <= now { Ok(()) } else { Err(from) }
    }

    /// Takes `tokens` at `now`, for a request that then passes.
    ///
    /// # Errors
    /// None is there, and nothing was taken: the time from which there may be one.
    pub fn take(&self, now: u64, tokens: u64) -> Result<(), u64> {
        let change =
            |state: u64| (self.passes_from(state) <= now).then(|| self.after(state, now, tokens));
        match self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change) {
            Ok(_) => Ok(()),
            Err(state) => Err(self.passes_from(state)),
        }
    }

    /// Takes `tokens` at `now` in any case, for a request whose size was not known before it was done.
    pub fn charge(&self, now: u64, tokens: u64) {
        let change = |state: u64| Some(self.after(state, now, tokens));
        // It always changes.
        let _ = self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
    }

    /// Puts `tokens` back that were taken for a request that did not pass after all.
    pub fn put_back(&self, tokens: u64) {
        let back = self.nanos(tokens);
        let change = |state: u64| {
            Some(match state & BURST {
                0 => state.saturating_sub(back),
                _ => BURST | (state & !BURST).saturating_add(back).min(BURST - 1),
            })
        };
        let _ = self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    /// When each request of these passes, the next right after the one before.
    fn times(bucket: &TokenBucket, requests: &[u64]) -> Vec<u64> {
        let mut now = 0;
        let mut pass = |tokens: &u64| {
            while let Err(from) = bucket.take(now, *tokens) {
                assert!(from > now, "a wait takes time");
                now = from;
            }
            now
        };
        requests.iter().map(&mut pass).collect()
    }

    #[test]
    fn a_bucket_without_size_or_time_is_no_limit() {
        assert!(TokenBucket::new(0, 9, 1).is_none());
        assert!(TokenBucket::new(1, 9, 0).is_none());
    }

    #[test]
    fn the_size_and_the_burst_pass_at_once_and_the_rest_at_the_rate() {
        let bucket = TokenBucket::new(4, 0, 100).unwrap();
        let expected = [0, 0, 0, 0, 25, 50, 75].map(|ms| ms * MS);
        assert_eq!(times(&bucket, &[1; 7]), expected);
        let bucket = TokenBucket::new(4, 2, 100).unwrap();
        let expected = [0, 0, 0, 0, 0, 0, 25, 50].map(|ms| ms * MS);
        assert_eq!(times(&bucket, &[1; 8]), expected);
    }

    #[test]
    fn a_bucket_fills_to_its_size_and_its_burst_is_there_once() {
        let bucket = TokenBucket::new(2, 3, 100).unwrap();
        // Time passes for nothing while the bucket is full.
        let later = 10_000 * MS;
        for _ in 0..5 {
            bucket.take(later, 1).unwrap();
        }
        assert_eq!(bucket.take(later, 1), Err(later + 50 * MS));
        let much_later = 20_000 * MS;
        for _ in 0..2 {
            bucket.take(much_later, 1).unwrap();
        }
        bucket.take(much_later, 1).unwrap_err();
    }

    #[test]
    fn what_is_larger_than_the_bucket_passes_and_is_paid_for_afterwards() {
        let bucket = TokenBucket::new(100, 0, 100).unwrap();
        assert_eq!(times(&bucket, &[1000, 1]), [0, 901 * MS]);
        let bucket = TokenBucket::new(100, 50, 100).unwrap();
        assert_eq!(times(&bucket, &[1000, 1]), [0, 851 * MS]);
    }

    #[test]
    fn what_is_put_back_is_there_again() {
        let bucket = TokenBucket::new(1, 0, 100).unwrap();
        for _ in 0..5 {
            bucket.take(0, 1).unwrap();
            bucket.check(0).unwrap_err();
            bucket.put_back(1);
            bucket.check(0).unwrap();
        }
        let bucket = TokenBucket::new(1, 1, 100).unwrap();
        bucket.charge(0, 1);
        bucket.charge(0, 1);
        assert_eq!(bucket.check(0), Err(100 * MS));
    }

    #[test]
    fn what_is_put_back_into_a_burst_is_there_once_more() {
        let pass =
            |bucket: &TokenBucket| (0..100).take_while(|_| bucket.take(0, 1).is_ok()).count();
        let bucket = TokenBucket::new(2, 3, 100).unwrap();
        bucket.take(0, 1).unwrap();
        bucket.put_back(1);
        assert_eq!(pass(&bucket), 5);
        let bucket = TokenBucket::new(1, 5, 100).unwrap();
        bucket.put_back(u64::MAX);
        assert_eq!(pass(&bucket), 100, "as much as was put back");
    }

    #[test]
    fn the_largest_debt_is_no_burst() {
        let bucket = TokenBucket::new(1, 0, u64::MAX).unwrap();
        bucket.charge(0, u64::MAX);
        bucket.charge(0, u64::MAX);
        bucket.check(REFILL_MAX_NANOS - 1).unwrap_err();
    }

    #[test]
    fn threads_take_no_more_together_than_one_alone() {
        let bucket = TokenBucket::new(1000, 500, 1000).unwrap();
        let taken: usize = std::thread::scope(|scope| {
            let take = || (0..1000).filter(|_| bucket.take(0, 1).is_ok()).count();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(take)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(taken, 1500);
    }

    proptest! {
        /// Whatever the requests and their times: in no span is more taken than the limit allows.
        #[test]
        fn no_span_gets_more_than_its_share(
            size in 1u64..1 << 34,
            burst in 0u64..1 << 34,
            refill_ms in 1u64..100_000,
            requests in prop::collection::vec((0u64..1 << 36, 0u64..1 << 34), 1..60),
        ) {
            let bucket = TokenBucket::new(size, burst, refill_ms).unwrap();
            let (mut now, mut passed) = (0_u64, Vec::new());
            for (wait, tokens) in requests {
                now += wait;
                match bucket.take(now, tokens) {
                    Ok(()) => passed.push((now, tokens)),
                    Err(from) => {
                        prop_assert!(from > now);
                        prop_assert!(bucket.check(from).is_ok());
                        prop_assert!(bucket.check(from - 1).is_err());
                    }
                }
            }
            for (first, (begin, _)) in passed.iter().enumerate() {
                let (mut sum, mut largest) = (0_u128, 0_u128);
                for (end, tokens) in passed.iter().skip(first) {
                    sum += u128::from(*tokens);
                    largest = largest.max(u128::from(*tokens));
                    let refilled = u128::from(end - begin) * u128::from(size)
                        / (u128::from(refill_ms) * NANOS_PER_MS);
                    let most = u128::from(size) + u128::from(burst) + refilled + largest + 1;
                    prop_assert!(sum <= most, "{sum} tokens in {} ns", end - begin);
                }
            }
        }

        /// A guest that always asks gets what the limit allows, within the rounding.
        #[test]
        fn the_rate_is_reached(size in 1u64..1000, refill_ms in 1u64..1000, tokens in 1u64..5000) {
            let bucket = TokenBucket::new(size, 0, refill_ms).unwrap();
            let count = 50;
            let times = times(&bucket, &vec![tokens; count]);
            let last = u128::from(*times.last().unwrap());
            let others = u128::from(tokens) * (count as u128 - 1);
            let due = others * u128::from(refill_ms) * NANOS_PER_MS / u128::from(size);
            prop_assert!(last <= due + 2 * count as u128, "{last} ns rather than {due}");
        }

        /// The largest numbers wait forever rather than not at all.
        #[test]
        fn nothing_wraps(
            size in 1u64..,
            burst: u64,
            refill_ms in 1u64..,
            now in 0u64..1 << 62,
            requests in prop::collection::vec(any::<u64>(), 0..10),
        ) {
            let bucket = TokenBucket::new(size, burst, refill_ms).unwrap();
            for tokens in requests {
                if let Err(from) = bucket.take(now, tokens) {
                    prop_assert!(from > now);
                }
                bucket.charge(now, tokens);
                bucket.put_back(tokens);
                bucket.charge(now, u64::MAX);
                bucket.put_back(tokens / 2);
            }
        }
    }
}
