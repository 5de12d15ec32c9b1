// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Large host pages that are assembled from pieces of 4 KiB.
//!
//! Owns, for one region, which pieces no thread has begun to receive, and how many pieces of each host page
//! are not in place yet. The thread that claims a piece may write it; only the thread that puts the last
//! piece of a host page in place learns that it was the last, whichever connections the others arrived on.
//! It touches no contents and maps nothing. Checked by a loom model.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

use page_bitmap::PageBitmap;

use crate::layout::to_usize;

/// The state of host pages that are assembled from pieces, in one region.
#[derive(Debug)]
pub(crate) struct PartialPages {
    /// Pages of 4 KiB in a host page.
    unit_pages: u64,
    /// By page: no thread has begun to receive it.
    absent: PageBitmap,
    /// By host page: number of pages that are not in place.
    open: Box<[AtomicU64]>,
    /// By host page: it has contents other than zeros.
    filled: PageBitmap,
}

impl PartialPages {
    /// Starts with all of the host pages in `missing` still to come.
    pub(crate) fn new(missing: &PageBitmap, unit_pages: u64) -> Self {
        let units = missing.len();
        let pieces = Self {
            unit_pages,
            absent: PageBitmap::new(units * unit_pages),
            open: (0..units).map(|_| AtomicU64::new(0)).collect(),
            filled: PageBitmap::new(units),
        };
        // No page of them is claimed, so the bits are the whole state.
        for run in missing.runs() {
            pieces.absent.set_range(run.start * unit_pages..run.end * unit_pages);
        }
        pieces.begin_again(missing, |_| {});
        pieces
    }

    /// Expects all of the missing host pages again. `partly` is called for each of which parts may have
    /// arrived and must be discarded. No thread may receive pages meanwhile.
    pub(crate) fn begin_again(&self, missing: &PageBitmap, mut partly: impl FnMut(u64)) {
        for unit in missing.runs().flatten() {
            let first_page = unit * self.unit_pages;
            if !self.are_absent(first_page, self.unit_pages) {
                partly(unit);
                self.absent.set_range(first_page..first_page + self.unit_pages);
                self.filled.claim(unit);
            }
            self.open[to_usize(unit)].store(self.unit_pages, Ordering::Release);
        }
    }

    /// True when no thread has begun to receive any of these pages.
    pub(crate) fn are_absent(&self, first: u64, count: u64) -> bool {
        self.absent.count_range(first..first + count) == count
    }

    /// Claims pages, all or none for the caller's purposes: false means that another thread is receiving
    /// one of them, and the caller must place none.
    pub(crate) fn claim(&self, first: u64, count: u64) -> bool {
        self.absent.claim_range(first..first + count) == count
    }

    /// Marks claimed pages as in place, as contents or as zeros. `complete` is called with each host page
    /// that is complete now, and whether it has any contents.
    pub(crate) fn put<E>(
        &self,
        first: u64,
        count: u64,
        contents: bool,
        mut complete: impl FnMut(u64, bool) -> Result<(), E>,
    ) -> Result<(), E> {
        let end = first + count;
        let mut page = first;
        while page < end {
            let unit = page / self.unit_pages;
            let next = end.min((unit + 1) * self.unit_pages);
            if contents {
                self.filled.set(unit);
            }
            let placed = next - page;
            // The thread that reaches zero sees what all others have written before.
            if self.open[to_usize(unit)].fetch_sub(placed, Ordering::AcqRel) == placed {
                complete(unit, self.filled.get(unit))?;
            }
            page = next;
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    fn pieces(units: u64, missing: &[u64], unit_pages: u64) -> (PageBitmap, PartialPages) {
        let map = PageBitmap::new(units);
        for unit in missing {
            map.set(*unit);
        }
        let pieces = PartialPages::new(&map, unit_pages);
        (map, pieces)
    }

    fn put(pieces: &PartialPages, first: u64, count: u64, contents: bool) -> Vec<(u64, bool)> {
        let mut complete = Vec::new();
        let note = |unit, filled| {
            complete.push((unit, filled));
            Ok::<_, Infallible>(())
        };
        let Ok(()) = pieces.put(first, count, contents, note);
        complete
    }

    #[test]
    fn the_last_piece_completes_a_host_page_and_contents_anywhere_fill_it() {
        let (_, pieces) = pieces(3, &[0, 2], 8);
        assert!(pieces.claim(0, 5) && pieces.claim(5, 3) && pieces.claim(16, 8));
        assert_eq!(put(&pieces, 5, 3, true), []);
        assert_eq!(put(&pieces, 0, 5, false), [(0, true)]);
        assert_eq!(put(&pieces, 16, 8, false), [(2, false)]);
    }

    #[test]
    fn pages_that_are_present_or_claimed_cannot_be_claimed() {
        let (_, pieces) = pieces(2, &[1], 8);
        assert!(!pieces.claim(7, 1), "of a host page that is here");
        assert!(!pieces.are_absent(7, 2));
        assert!(pieces.are_absent(8, 8) && pieces.claim(9, 2));
        assert!(!pieces.are_absent(8, 2) && !pieces.claim(10, 2));
    }

    #[test]
    fn after_a_loss_all_of_a_host_page_comes_again() {
        let (map, pieces) = pieces(2, &[0, 1], 4);
        assert!(pieces.claim(0, 4) && pieces.claim(4, 3));
        assert_eq!(put(&pieces, 0, 4, true), [(0, true)]);
        assert_eq!(put(&pieces, 4, 2, true), []);
        map.claim(0);
        let mut partly = Vec::new();
        pieces.begin_again(&map, |unit| partly.push(unit));
        assert_eq!(partly, [1]);
        assert!(!pieces.claim(0, 4), "it is complete");
        assert!(pieces.claim(4, 4));
        assert_eq!(put(&pieces, 4, 4, false), [(1, false)]);
    }

    proptest! {
        #[test]
        fn each_host_page_is_complete_once(
            cuts in prop::collection::btree_set(1u64..64, 0..12), order in any::<u64>(), unit in 1u64..17,
        ) {
            let units = 64_u64.div_ceil(unit);
            let all: Vec<u64> = (0..units).collect();
            let (_, pieces) = pieces(units, &all, unit);
            let mut edges: Vec<u64> = cuts.into_iter().collect();
            edges.insert(0, 0);
            edges.push(units * unit);
            let mut runs: Vec<_> = edges.windows(2).map(|edge| (edge[0], edge[1] - edge[0])).collect();
            runs.sort_by_key(|(first, _)| (first + 1).wrapping_mul(order | 1));
            let mut complete = Vec::new();
            for (first, count) in runs {
                prop_assert!(pieces.claim(first, count));
                complete.extend(put(&pieces, first, count, true).into_iter().map(|(unit, _)| unit));
            }
            complete.sort_unstable();
            prop_assert_eq!(complete, all);
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use std::convert::Infallible;

    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    fn arrive(pieces: &PartialPages, first: u64, contents: bool) -> u32 {
        if !pieces.claim(first, 1) {
            return 0;
        }
        let mut complete = 0;
        let note = |_: u64, filled: bool| {
            // Page 0 has contents, so the thread that completes the host page must see that.
            assert!(filled);
            complete += 1;
            Ok::<_, Infallible>(())
        };
        let Ok(()) = pieces.put(first, 1, contents, note);
        complete
    }

    /// Two connections bring a piece each of one host page, and both try to claim a third: one of the two
    /// completes it, once.
    #[test]
    fn pieces_from_two_connections_complete_a_host_page_once() {
        loom::model(|| {
            let missing = PageBitmap::new(1);
            missing.set(0);
            let pieces = Arc::new(PartialPages::new(&missing, 3));
            let other = {
                let pieces = Arc::clone(&pieces);
                thread::spawn(move || arrive(&pieces, 0, true) + arrive(&pieces, 2, false))
            };
            let here = arrive(&pieces, 1, false) + arrive(&pieces, 2, false);
            assert_eq!(here + other.join().unwrap(), 1);
        });
    }
}
