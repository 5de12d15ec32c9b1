// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Since when pages are waited for.
//!
//! Owns a fixed table of waits, written by those who ask for pages and by those who receive them,
//! without a lock: a slot belongs to whoever put its key there with a compare-and-swap. A thread
//! has at most one wait, so the table is never nearly full; when all slots of a page's
//! neighbourhood are taken the wait is not measured, and nothing else depends on it. It must never
//! decide who is woken.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Slots; a power of two.
const SLOTS: usize = 4096;

/// Slots that a key may be in.
const NEIGHBOURS: usize = 16;

/// Bits of a key that hold the unit; the region is above them.
const UNIT_BITS: u32 = 48;

#[derive(Default)]
struct Slot {
    /// 0, or one more than the packed region and unit.
    key: AtomicU64,
    /// Microseconds after the table was made, plus 1; 0 while it is not known yet.
    since_us: AtomicU64,
    /// Who waits; 0 where that is not known.
    thread: AtomicU32,
}

/// The table.
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
        Self { slots: (0..SLOTS).map(|_| Slot::default()).collect(), start: Instant::now() }
    }

    fn neighbours(&self, key: u64) -> impl Iterator<Item = &Slot> {
        let home = home(key);
        (0..NEIGHBOURS).map(move |step| &self.slots[(home + step) % SLOTS])
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX - 1) + 1
    }

    /// A wait of `thread` begins.
    pub(crate) fn begin(&self, region: usize, unit: u64, thread: Option<u32>) {
        let key = key(region, unit);
        for slot in self.neighbours(key) {
            if slot.key.compare_exchange(0, key, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                slot.thread.store(thread.unwrap_or(0), Ordering::Relaxed);
                slot.since_us.store(self.now_us(), Ordering::Release);
                return;
            }
        }
    }

    /// A wait is over; whose it was and how long, where that was measured.
    pub(crate) fn end(&self, region: usize, unit: u64) -> Option<(Option<u32>, Duration)> {
        let key = key(region, unit);
        let slot = self.neighbours(key).find(|slot| slot.key.load(Ordering::Acquire) == key)?;
        let since_us = slot.since_us.swap(0, Ordering::AcqRel);
        let thread = Some(slot.thread.load(Ordering::Relaxed)).filter(|thread| *thread != 0);
        let took = self.now_us().saturating_sub(since_us);
        let ours = slot.key.compare_exchange(key, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        (ours && since_us != 0).then(|| (thread, Duration::from_micros(took)))
    }

    /// How long the longest wait has been going on.
    pub(crate) fn longest(&self) -> Duration {
        let now = self.now_us();
        let waits = self.slots.iter().filter(|slot| slot.key.load(Ordering::Acquire) != 0);
        let since = waits.map(|slot| slot.since_us.load(Ordering::Acquire));
        let oldest = since.filter(|since_us| *since_us != 0).min();
        Duration::from_micros(oldest.map_or(0, |since_us| now.saturating_sub(since_us)))
    }

    /// Counts all waits that go on as beginning now.
    pub(crate) fn restart_clock(&self) {
        let now = self.now_us();
        for slot in &self.slots {
            let since = slot.since_us.load(Ordering::Acquire);
            if since != 0 {
                // Whoever ends the wait meanwhile wins.
                let _ =
                    slot.since_us.compare_exchange(since, now, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
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
    }

    #[test]
    fn a_full_neighbourhood_measures_nothing_and_breaks_nothing() {
        let waits = Waits::new();
        for unit in 0..20_000 {
            waits.begin(0, unit, None);
        }
        let measured = (0..20_000).filter(|unit| waits.end(0, *unit).is_some()).count();
        assert!((SLOTS * 9 / 10..=SLOTS).contains(&measured), "{measured}");
        assert!(waits.slots.iter().all(|slot| slot.key.load(Ordering::Relaxed) == 0));
    }
}
