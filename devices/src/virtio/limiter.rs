// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limits on the bytes and operations of devices.
//!
//! Owns the two buckets of a limit, which the queues of several devices may share, and for each queue the timer
//! that wakes its thread when the next request may pass. A thread that has to wait leaves requests in its
//! queue and goes on with everything else. Must never sleep, and never hold a lock.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use log::error;
use rate_limit::TokenBucket;
use vmm_sys_util::timerfd::TimerFd;

use super::device::ActivateError;

/// Longest time for which a timer is set; it is set again afterwards.
const TIMER_MAX: Duration = Duration::from_hours(1);

/// Parameters of a bucket; no limit if `size` or `refill_ms` is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketConfig {
    /// Tokens that it holds.
    pub size: u64,
    /// Tokens that it holds in addition at the start, which are not refilled.
    pub burst: u64,
    /// Milliseconds in which an empty bucket is refilled.
    pub refill_ms: u64,
}

impl BucketConfig {
    fn bucket(self) -> Option<TokenBucket> {
        TokenBucket::new(self.size, self.burst, self.refill_ms)
    }
}

/// A limit on bytes and operations, which several queues share.
#[derive(Debug)]
pub struct RateLimiter {
    bytes: Option<TokenBucket>,
    ops: Option<TokenBucket>,
    clock: Clock,
}

#[derive(Debug)]
enum Clock {
    Since(Instant),
    #[cfg(test)]
    Set(AtomicU64),
}

impl Clock {
    fn now_nanos(&self) -> u64 {
        match self {
            Self::Since(start) => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            #[cfg(test)]
            Self::Set(nanos) => nanos.load(Ordering::Relaxed),
        }
    }
}

impl RateLimiter {
    /// A limit with full buckets for bytes and operations; `None` if neither limits anything.
    pub fn new(bytes: BucketConfig, ops: BucketConfig) -> Option<Arc<Self>> {
        Self::with_clock(bytes, ops, Clock::Since(Instant::now()))
    }

    fn with_clock(bytes: BucketConfig, ops: BucketConfig, clock: Clock) -> Option<Arc<Self>> {
        let (bytes, ops) = (bytes.bucket(), ops.bucket());
        let limits = bytes.is_some() || ops.is_some();
        limits.then(|| Arc::new(Self { bytes, ops, clock }))
    }

    /// A limit whose clock a test sets; it begins at 0.
    #[cfg(test)]
    pub(super) fn for_test(bytes: BucketConfig, ops: BucketConfig) -> Arc<Self> {
        let limiter = Self::with_clock(bytes, ops, Clock::Set(AtomicU64::new(0)));
        limiter.unwrap_or_else(|| panic!("no limit is being tested"))
    }

    /// Sets the clock of [`Self::for_test`].
    #[cfg(test)]
    pub(super) fn set_clock(&self, to: Duration) {
        if let Clock::Set(nanos) = &self.clock {
            nanos.store(u64::try_from(to.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }

    fn take(&self, now: u64, bytes: u64) -> Result<(), u64> {
        if let Some(ops) = &self.ops {
            ops.take(now, 1)?;
        }
        let taken = self.bytes.as_ref().map_or(Ok(()), |bucket| bucket.take(now, bytes));
        if taken.is_err()
            && let Some(ops) = &self.ops
        {
            ops.put_back(1);
        }
        taken
    }

    fn check(&self, now: u64) -> Result<(), u64> {
        [&self.ops, &self.bytes].into_iter().flatten().try_for_each(|bucket| bucket.check(now))
    }

    fn charge(&self, now: u64, bytes: u64) {
        if let Some(ops) = &self.ops {
            ops.charge(now, 1);
        }
        if let Some(bucket) = &self.bytes {
            bucket.charge(now, bytes);
        }
    }
}

/// What a queue does with its limit, on the queue's thread.
pub(super) struct Throttle {
    limiter: Arc<RateLimiter>,
    timer: TimerFd,
}

impl Throttle {
    /// For a queue with or without a limit.
    ///
    /// # Errors
    /// The host has no timer.
    pub(super) fn new(limiter: Option<&Arc<RateLimiter>>) -> Result<Option<Self>, ActivateError> {
        let Some(limiter) = limiter else { return Ok(None) };
        let timer = TimerFd::new().map_err(|error| ActivateError::Resource {
            what: "make a timer for the device's limit",
            source: io::Error::from(error),
        })?;
        Ok(Some(Self { limiter: Arc::clone(limiter), timer }))
    }

    /// The timer, which is to be watched with `Watch::on_signal`: it is never read.
    pub(super) fn fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// Takes an operation of `bytes` bytes from the buckets. If it has to wait, nothing is taken, and the
    /// timer is set.
    pub(super) fn passes(&mut self, bytes: u64) -> bool {
        let now = self.limiter.clock.now_nanos();
        let taken = self.limiter.take(now, bytes);
        self.set_timer(now, taken)
    }

    /// Whether an operation of a size that is not known yet may be done; otherwise the timer is set.
    pub(super) fn may_begin(&mut self) -> bool {
        let now = self.limiter.clock.now_nanos();
        let checked = self.limiter.check(now);
        self.set_timer(now, checked)
    }

    /// Takes what an operation has turned out to need, also beyond what is there.
    pub(super) fn charge(&self, bytes: u64) {
        self.limiter.charge(self.limiter.clock.now_nanos(), bytes);
    }

    /// Sets the timer to the time in an error.
    fn set_timer(&mut self, now: u64, verdict: Result<(), u64>) -> bool {
        let Err(until) = verdict else { return true };
        // Zero would switch it off.
        let wait = Duration::from_nanos(until.saturating_sub(now).max(1)).min(TIMER_MAX);
        match self.timer.reset(wait, None) {
            Ok(()) => false,
            Err(error) => {
                // The times are valid, so that the kernel has no reason for this.
                error!("a device goes on without its limit, as its timer cannot be set: {error}");
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    const NONE: BucketConfig = BucketConfig { size: 0, burst: 0, refill_ms: 0 };

    fn bucket(size: u64, refill_ms: u64) -> BucketConfig {
        BucketConfig { size, burst: 0, refill_ms }
    }

    #[test]
    fn nothing_to_limit_is_no_limit() {
        assert!(RateLimiter::new(NONE, NONE).is_none());
        assert!(RateLimiter::new(bucket(1, 0), bucket(0, 1)).is_none());
        assert!(Throttle::new(None).unwrap().is_none());
    }

    #[test]
    fn what_waits_for_bytes_takes_no_operation() {
        let limiter = RateLimiter::for_test(bucket(100, 100), bucket(2, 1000));
        let mut throttle = Throttle::new(Some(&limiter)).unwrap().unwrap();
        assert!(throttle.passes(200));
        assert!(!throttle.passes(1));
        assert!(!throttle.passes(1));
        limiter.set_clock(Duration::from_millis(101));
        assert!(throttle.passes(1), "the second operation is still there");
        limiter.set_clock(Duration::from_millis(300));
        assert!(!throttle.may_begin() && !throttle.passes(0), "operations are used up");
        limiter.set_clock(Duration::from_millis(500));
        assert!(throttle.passes(0));
    }

    #[test]
    fn the_timer_goes_off_when_the_next_one_may_pass() {
        let limiter = RateLimiter::new(NONE, bucket(1, 1)).unwrap();
        let mut throttle = Throttle::new(Some(&limiter)).unwrap().unwrap();
        let mut count = 0;
        while count < 20 {
            if throttle.passes(0) {
                count += 1;
            } else {
                throttle.timer.wait().unwrap();
            }
        }
        assert!(limiter.clock.now_nanos() >= 19_000_000);
    }
}
