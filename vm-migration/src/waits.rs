// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Accounting of waits for pages.
//!
//! Owns a fixed table of waits, written without a lock by the threads that request pages and by those that
//! receive them: a slot is reserved with a compare-and-swap, filled, and then gets its key, so that what is
//! read behind a key belongs to that wait. A thread has at most one wait, so the table is never nearly full;
//! when all slots of a page's neighbourhood are taken the wait is not measured, and nothing else depends on
//! it. It must never decide which thread is woken.

use std::time::{Duration, Instant};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Slots; a power of two.
const SLOTS: usize = if cfg!(loom) { 2 } else { 4096 };

/// Slots in which a key may be.
const NEIGHBOURS: usize = if cfg!(loom) { 1 } else { 16 };

/// Key of a free slot.
const FREE: u64 = 0;

/// Key of a slot that is being filled.
const RESERVED: u64 = u64::MAX;

/// Bits of a key that hold the unit; the bits above hold the region.
const UNIT_BITS: u32 = 48;

struct Slot {
    /// [`FREE`], [`RESERVED`], or one more than the packed region and unit.
    key: AtomicU64,
    /// Start of the wait in microseconds since the table was created.
    since_us: AtomicU64,
    /// The waiting thread; 0 if unknown.
    thread: AtomicU32,
}

impl Slot {
    fn new() -> Self {
        Self { key: AtomicU64::new(FREE), since_us: AtomicU64::new(0), thread: AtomicU32::new(0) }
    }

    /// True when a wait uses this slot.
    fn is_taken(&self) -> bool {
        !matches!(self.key.load(Ordering::Acquire), FREE | RESERVED)
    }
}

/// The table of waits for pages.
pub(crate) struct Waits {
    slots: Box<[Slot]>,
    start: Instant,
}

fn key(region: usize, unit: u64) -> u64 {
    ((region as u64) << UNIT_BITS | unit) + 1
}

fn home(key: u64) -> usize {
    usize::try_from(key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52).unwrap_or(0) % SLOTS
}

impl Waits {
    pub(crate) fn new() -> Self {
        Self { slots: (0..SLOTS).map(|_| Slot::new()).collect(), start: Instant::now() }
    }

    fn neighbours(&self, key: u64) -> impl Iterator<Item = &Slot> {
        let home = home(key);
        (0..NEIGHBOURS).map(move |step| &self.slots[(home + step) % SLOTS])
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Notes the start of a wait of `thread`.
    pub(crate) fn begin(&self, region: usize, unit: u64, thread: Option<u32>) {
        let key = key(region, unit);
        for slot in self.neighbours(key) {
            let reserve =
                slot.key.compare_exchange(FREE, RESERVED, Ordering::AcqRel, Ordering::Relaxed);
            if reserve.is_ok() {
                slot.thread.store(thread.unwrap_or(0), Ordering::Relaxed);
                slot.since_us.store(self.now_us(), Ordering::Relaxed);
                slot.key.store(key, Ordering::Release);
                return;
            }
        }
    }

    /// Ends a wait; returns its thread and duration, if it was recorded.
    pub(crate) fn end(&self, region: usize, unit: u64) -> Option<(Option<u32>, Duration)> {
        let key = key(region, unit);
        let slot = self.neighbours(key).find(|slot| slot.key.load(Ordering::Acquire) == key)?;
        let since_us = slot.since_us.load(Ordering::Relaxed);
        let thread = Some(slot.thread.load(Ordering::Relaxed)).filter(|thread| *thread != 0);
        let took = self.now_us().saturating_sub(since_us);
        // A unit has at most one wait, so a slot that still has the key belongs to this one.
        let ours =
            slot.key.compare_exchange(key, FREE, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        ours.then(|| (thread, Duration::from_micros(took)))
    }

    /// Duration of the longest running wait.
    pub(crate) fn longest(&self) -> Duration {
        let now = self.now_us();
        let waits = self.slots.iter().filter(|slot| slot.is_taken());
        let oldest = waits.map(|slot| slot.since_us.load(Ordering::Relaxed)).min();
        Duration::from_micros(oldest.map_or(0, |since_us| now.saturating_sub(since_us)))
    }

    /// True when no wait is in progress.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        !self.slots.iter().any(Slot::is_taken)
    }

    /// Restarts the clock of all waits in progress.
    pub(crate) fn restart_clock(&self) {
        let now = self.now_us();
        for slot in self.slots.iter().filter(|slot| slot.is_taken()) {
            // A wait that took the slot meanwhile began just now, too.
            slot.since_us.fetch_max(now, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_measured_once() {
        let waits = Waits::new();
        assert_eq!(waits.longest(), Duration::ZERO);
        waits.begin(1, 77, Some(5));
        assert!(waits.end(0, 77).is_none());
        assert_eq!(waits.end(1, 77).map(|wait| wait.0), Some(Some(5)));
        assert!(waits.end(1, 77).is_none());
        assert_eq!(waits.longest(), Duration::ZERO);
        assert!(waits.is_empty());
    }

    #[test]
    fn a_full_neighbourhood_measures_nothing_and_breaks_nothing() {
        let waits = Waits::new();
        for unit in 0..20_000 {
            waits.begin(0, unit, None);
        }
        let measured = (0..20_000).filter(|unit| waits.end(0, *unit).is_some()).count();
        assert!((SLOTS * 9 / 10..=SLOTS).contains(&measured), "{measured}");
        assert!(waits.is_empty());
    }
}
