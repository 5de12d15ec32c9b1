// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Holds: ranges that are being read, or collapsed into huge pages, and must not be discarded meanwhile.
//!
//! A migration checks which pages are populated and reads those, at the speed of its connection. If one of
//! them is discarded in between, the read makes a new page in shared memory, which is returned to the host
//! only when the VM ends; and where no huge page is free, the access fails. So a range is held from
//! the check until it has been read, and a discard waits until the range is not held.
//!
//! Owns the ranges of one region that are held, and those that are being discarded. Holds do not exclude
//! each other, nor do discards, and a waiting discard comes before later holds. Must never delay the
//! guest's balloon for longer than [`WAIT_MAX`] in each [`WINDOW`], over all ranges together: a connection may
//! stall, and a vCPU that resets the balloon waits for the balloon's work.

use std::ops::Range;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// How long a discard waits for a held range. A migration reads what it holds within some tens of
/// milliseconds, unless its connection stalls.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// The period in which all discards together wait for no longer than that.
const WINDOW: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct Ranges {
    /// Held ranges by slot: a round holds as many as its messages have parts, so each is found by its index.
    held: Vec<Option<Range<u64>>>,
    /// Free slots.
    free: Vec<usize>,
    /// Discards that wait until their range is not held.
    waiting: Vec<Range<u64>>,
    discarding: Vec<Range<u64>>,
    /// Start of the current period.
    window: Option<Instant>,
    /// Time that was spent waiting in it.
    spent: Duration,
}

impl Ranges {
    fn is_held(&self, range: &Range<u64>) -> bool {
        self.held.iter().flatten().any(|held| meet(held, range))
    }

    /// What is left of `wait_max` in the period that contains `now`.
    fn left(&mut self, wait_max: Duration, now: Instant) -> Duration {
        let is_over = |began: Instant| now.saturating_duration_since(began) >= WINDOW;
        if self.window.is_none_or(is_over) {
            (self.window, self.spent) = (Some(now), Duration::ZERO);
        }
        wait_max.saturating_sub(self.spent)
    }
}

/// The held ranges of one region, in bytes from its start.
#[derive(Debug, Default)]
pub struct Holds {
    ranges: Mutex<Ranges>,
    changed: Condvar,
}

fn meet(one: &Range<u64>, other: &Range<u64>) -> bool {
    other.start < one.end && one.start < other.end
}

fn overlap(ranges: &[Range<u64>], range: &Range<u64>) -> bool {
    ranges.iter().any(|other| meet(other, range))
}

/// Removes one of the ranges that equal `range`.
fn remove(ranges: &mut Vec<Range<u64>>, range: &Range<u64>) {
    if let Some(at) = ranges.iter().position(|other| other == range) {
        ranges.swap_remove(at);
    }
}

impl Holds {
    fn ranges(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock()
    }

    /// Holds `range` until the result is dropped. A discard of it that is in progress has ended when this
    /// returns.
    pub fn hold(&self, range: Range<u64>) -> PageHold<'_> {
        let mut ranges = self.ranges();
        while overlap(&ranges.discarding, &range) || overlap(&ranges.waiting, &range) {
            self.changed.wait(&mut ranges);
        }
        let place = ranges.free.pop().unwrap_or(ranges.held.len());
        match ranges.held.get_mut(place) {
            Some(free) => *free = Some(range),
            None => ranges.held.push(Some(range)),
        }
        PageHold { holds: self, place }
    }

    /// Registers that `range` is being discarded until the result is dropped. Waits while it is held, for
    /// [`WAIT_MAX`] at most.
    pub fn begin_discard(&self, range: Range<u64>) -> DiscardGuard<'_> {
        self.begin_discard_within(range, WAIT_MAX)
    }

    fn begin_discard_within(&self, range: Range<u64>, wait_max: Duration) -> DiscardGuard<'_> {
        let mut ranges = self.ranges();
        if ranges.is_held(&range) {
            let began = Instant::now();
            let until = began + ranges.left(wait_max, began);
            ranges.waiting.push(range.clone());
            while ranges.is_held(&range) {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    log::debug!("memory is returned while it is still read or collapsed");
                    break;
                }
                self.changed.wait_for(&mut ranges, left);
            }
            remove(&mut ranges.waiting, &range);
            ranges.spent = ranges.spent.saturating_add(began.elapsed());
        }
        ranges.discarding.push(range.clone());
        DiscardGuard { holds: self, range }
    }
}

/// A held range, which is being read.
#[derive(Debug)]
pub struct PageHold<'a> {
    holds: &'a Holds,
    place: usize,
}

impl Drop for PageHold<'_> {
    fn drop(&mut self) {
        let mut ranges = self.holds.ranges();
        if let Some(held) = ranges.held.get_mut(self.place) {
            *held = None;
            ranges.free.push(self.place);
        }
        // Only discards wait for the end of a hold.
        let is_awaited = !ranges.waiting.is_empty();
        drop(ranges);
        if is_awaited {
            self.holds.changed.notify_all();
        }
    }
}

/// A range that is being discarded.
#[derive(Debug)]
pub struct DiscardGuard<'a> {
    holds: &'a Holds,
    range: Range<u64>,
}

impl Drop for DiscardGuard<'_> {
    fn drop(&mut self) {
        remove(&mut self.holds.ranges().discarding, &self.range);
        self.holds.changed.notify_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use super::*;

    /// Long enough for anything that does not wait, on all but the busiest hosts.
    const A_WHILE: Duration = Duration::from_millis(100);

    #[test]
    fn all_discards_share_one_time_limit() {
        let holds = Holds::default();
        let _held = holds.hold(0..1 << 20);
        let began = Instant::now();
        for page in 0..100 {
            drop(holds.begin_discard_within(page * 4096..(page + 1) * 4096, A_WHILE));
        }
        assert!(began.elapsed() >= A_WHILE);
        assert!(began.elapsed() < A_WHILE * 20, "{:?}", began.elapsed());
        // In the next period it waits again.
        let mut ranges = holds.ranges();
        assert_eq!(ranges.left(A_WHILE, began), Duration::ZERO);
        assert_eq!(ranges.left(A_WHILE, began + A_WHILE + WINDOW), A_WHILE);
    }

    #[test]
    fn a_waiting_discard_comes_before_later_holds() {
        let holds = Holds::default();
        let first = holds.hold(0..10);
        let (held, is_held) = channel();
        std::thread::scope(|scope| {
            let discarding =
                scope.spawn(|| holds.begin_discard_within(5..15, Duration::from_mins(1)));
            while holds.ranges().waiting.is_empty() {
                std::thread::yield_now();
            }
            scope.spawn(|| {
                let _second = holds.hold(8..9);
                let _ = held.send(());
            });
            assert_eq!(is_held.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout));
            drop(first);
            // The discard ends, and only then the other range is held.
            let discarding = discarding.join().expect("it leaves");
            assert_eq!(is_held.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout));
            drop(discarding);
            is_held.recv_timeout(Duration::from_mins(1)).expect("it is held");
        });
    }

    #[test]
    fn what_is_held_leaves_when_it_is_not_and_other_ranges_at_once() {
        let holds = Holds::default();
        let (first, second) = (holds.hold(10..20), holds.hold(10..20));
        drop(holds.begin_discard(0..10));
        drop(holds.begin_discard(20..30));
        let (left, is_left) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _discarding = holds.begin_discard_within(19..21, Duration::from_mins(1));
                let _ = left.send(());
            });
            drop(first);
            assert_eq!(is_left.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout));
            drop(second);
            assert_eq!(is_left.recv(), Ok(()));
        });
        let ranges = holds.ranges();
        assert!(ranges.held.iter().all(Option::is_none) && ranges.discarding.is_empty());
        assert_eq!(ranges.held.len(), ranges.free.len());
    }

    #[test]
    fn a_hold_begins_when_what_leaves_has_left() {
        let holds = Holds::default();
        let (first, second) = (holds.begin_discard(0..8), holds.begin_discard(4..12));
        let (held, is_held) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _held = holds.hold(11..12);
                let _ = held.send(());
            });
            drop(first);
            assert_eq!(is_held.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout));
            drop(second);
            assert_eq!(is_held.recv(), Ok(()));
        });
    }

    #[test]
    fn a_connection_that_stands_still_keeps_no_page_from_the_host() {
        let holds = Holds::default();
        let _held = holds.hold(0..8);
        let began = Instant::now();
        drop(holds.begin_discard_within(7..8, A_WHILE));
        assert!(began.elapsed() >= A_WHILE);
    }
}
