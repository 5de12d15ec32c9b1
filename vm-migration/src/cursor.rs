// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A shared cursor over a range of indices, which several threads claim part by part.
//!
//! Owns [`Cursor`]: the index up to which the range has been claimed. A claimant chooses the length of its
//! part once it knows where the part begins, so that slow threads take short parts, and parts get shorter
//! towards the end. Each index belongs to exactly one claim. It must never take a lock. Checked by a loom
//! model (`--cfg loom`).

use std::ops::Range;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// The numbers `0..end`, claimed by several threads in ascending order.
#[derive(Debug)]
pub(crate) struct Cursor {
    next: AtomicU64,
    end: u64,
}

impl Cursor {
    /// A cursor of which nothing is claimed yet.
    pub(crate) fn new(end: u64) -> Self {
        Self { next: AtomicU64::new(0), end }
    }

    /// All numbers below this one are claimed.
    pub(crate) fn reached(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Claims the next range; `None` when all is claimed. `wanted` gets the start of the range and how
    /// many numbers are left from there, and returns how many to claim, which is clamped to 1 and what is
    /// left. It may be called more than once.
    pub(crate) fn claim(&self, wanted: impl Fn(u64, u64) -> u64) -> Option<Range<u64>> {
        // Relaxed: only the claimed numbers pass between threads; the data that they index was complete
        // before the threads began.
        let mut start = self.next.load(Ordering::Relaxed);
        while start < self.end {
            let left = self.end - start;
            let end = start + wanted(start, left).clamp(1, left);
            let swap =
                self.next.compare_exchange_weak(start, end, Ordering::Relaxed, Ordering::Relaxed);
            match swap {
                Ok(_) => return Some(start..end),
                Err(now) => start = now,
            }
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_follow_each_other_to_the_end(
            end in 0u64..500, wants in prop::collection::vec(0u64..600, 1..40),
        ) {
            let cursor = Cursor::new(end);
            let (mut at, mut turn) = (0, 0);
            while let Some(piece) = cursor.claim(|start, left| {
                assert_eq!(start + left, end);
                wants[turn % wants.len()]
            }) {
                prop_assert_eq!(piece.start, at);
                prop_assert_eq!(piece.end - at, wants[turn % wants.len()].clamp(1, end - at));
                (at, turn) = (piece.end, turn + 1);
            }
            prop_assert_eq!(at, end);
        }
    }

    #[test]
    fn threads_never_share_a_place() {
        let cursor = Cursor::new(100_000);
        let claims = |step: u64| {
            let all = std::iter::from_fn(|| cursor.claim(|_, _| step));
            all.flatten().collect::<Vec<u64>>()
        };
        let mut all = std::thread::scope(|scope| {
            let other = scope.spawn(|| claims(3));
            let mut mine = claims(5);
            mine.extend(other.join().unwrap());
            mine
        });
        all.sort_unstable();
        assert!(all.into_iter().eq(0..100_000));
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Two connections with different step sizes: together they claim every number once.
    #[test]
    fn two_claimants_share_everything_and_nothing_twice() {
        loom::model(|| {
            let cursor = Arc::new(Cursor::new(4));
            let claim = |step| {
                let cursor = Arc::clone(&cursor);
                move || {
                    let mut mine = 0_u32;
                    while let Some(piece) = cursor.claim(|_, left| step + u64::from(left > 2)) {
                        for place in piece {
                            assert_eq!(mine & 1 << place, 0);
                            mine |= 1 << place;
                        }
                    }
                    mine
                }
            };
            let other = thread::spawn(claim(1));
            let mine = claim(2)();
            let theirs = other.join().unwrap();
            assert_eq!(mine & theirs, 0);
            assert_eq!(mine | theirs, 0b1111);
        });
    }
}
