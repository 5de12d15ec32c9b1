// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Contents of a memory message: runs of pages, gathered from slices until the message is full.
//!
//! Owns when a message is full, and how dirty pages are divided into resident pages and
//! holes. Must never read guest memory.

use std::ops::Range;

use crate::borders::Borders;
use crate::layout::{GpaRange, PageRun};
use crate::ram::{GuestMemoryMap, Hold};

/// Most runs of pages in one message.
const MESSAGE_RUNS_MAX: usize = 512;

/// Most zero pages in one message, plus up to a slice: the peer discards them before it answers or reads
/// on, which takes about a tenth of a second.
const MESSAGE_ZERO_BYTES: u64 = 1 << 30;

/// A run of pages in a region.
pub(super) type Run = Range<u64>;

/// Splits `runs` into the parts inside and outside of `populated`; all of them ascending.
pub(super) fn divide(runs: &[Run], populated: &[Run]) -> (Vec<Run>, Vec<Run>) {
    let (mut inside, mut outside) = (Vec::new(), Vec::new());
    let mut rest = populated.iter().peekable();
    for Run { start, end } in runs {
        let (mut at, end) = (*start, *end);
        while at < end {
            while rest.next_if(|run| run.end <= at).is_some() {}
            let next = rest.peek().map_or(end..end, |run| run.start.min(end)..run.end.min(end));
            if at < next.start {
                outside.push(at..next.start);
                at = next.start;
            }
            if at < next.end {
                inside.push(at..next.end);
                at = next.end;
            }
        }
    }
    (inside, outside)
}

/// Clears the bits of the last word that lie beyond the slice.
pub(super) fn mask_tail(words: &mut [u64], pages: u64) {
    let tail = pages % 64;
    if let (1.., Some(last)) = (tail, words.last_mut()) {
        *last &= (1 << tail) - 1;
    }
}

/// Appends a page or run, and merges it with the last one if they are adjacent.
pub(crate) fn push(runs: &mut Vec<PageRun>, run: PageRun) {
    match runs.last_mut() {
        Some(last) if last.region == run.region && last.end() == run.first => {
            last.count += run.count;
        }
        _ => runs.push(run),
    }
}

/// What is to be sent for some slices.
#[derive(Default)]
pub(super) struct Content<'m> {
    pub(super) data: Vec<PageRun>,
    pub(super) zero: Vec<PageRun>,
    /// Zero pages for a peer that takes them only as contents.
    pub(super) blank: Vec<PageRun>,
    /// Keeps the populated pages of `data` from being discarded.
    pub(super) held: Vec<Hold<'m>>,
    pub(super) skipped_zero_pages: u64,
    /// Pages that the round need not look at again.
    pub(super) done_pages: u64,
}

impl Content<'_> {
    /// Bytes that are sent as contents.
    pub(super) fn data_bytes(&self) -> u64 {
        self.data.iter().chain(&self.blank).map(PageRun::len_bytes).sum()
    }

    fn runs(&self) -> usize {
        self.data.len() + self.zero.len() + self.blank.len()
    }

    /// True when the message should be sent: more would keep the peer busy for long, however few bytes it
    /// has.
    pub(super) fn is_full(&self) -> bool {
        let zero_bytes: u64 = self.zero.iter().map(PageRun::len_bytes).sum();
        self.runs() >= MESSAGE_RUNS_MAX || zero_bytes >= MESSAGE_ZERO_BYTES
    }

    /// Adds pages that must become zero at the peer; they are not read again.
    pub(super) fn add_zero(&mut self, run: PageRun, has_flags: bool) {
        push(if has_flags { &mut self.zero } else { &mut self.blank }, run);
    }
}

/// The address ranges of runs, for a peer that takes a range only within its `borders`, if it has any.
pub(crate) fn ranges<M: GuestMemoryMap>(
    memory: &M,
    runs: &[PageRun],
    borders: Option<&Borders>,
) -> Vec<GpaRange> {
    let whole = runs.iter().map(|run| memory.layout().range_of(*run));
    match borders {
        None => whole.collect(),
        Some(borders) => whole.flat_map(|range| borders.cut(range)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use page_bitmap::runs_in_words;
    use proptest::prelude::*;

    use super::super::unit_space::{UNIT_PAGES, UNITS_MAX};
    use super::*;
    use crate::layout::PAGE_BYTES;

    #[test]
    fn zeros_of_one_message_are_thrown_away_in_a_moment() {
        let slice_pages = UNITS_MAX * UNIT_PAGES;
        let mut content = Content::default();
        let mut slices = 0;
        while !content.is_full() {
            assert!(slices * slice_pages * PAGE_BYTES <= MESSAGE_ZERO_BYTES, "it goes on and on");
            let run = PageRun { region: 0, first: slices * slice_pages, count: slice_pages };
            content.add_zero(run, true);
            slices += 1;
        }
        assert_eq!(content.zero.len(), 1, "a run however long");
    }

    proptest! {
        #[test]
        fn each_dirty_page_is_populated_or_not(dirty: [u64; 2], present: [u64; 2]) {
            let runs = |words: &[u64]| runs_in_words(words, 7).collect::<Vec<Run>>();
            let listed = |runs: Vec<Run>| runs.into_iter().flatten().collect::<Vec<_>>();
            let pages = |words: &[u64]| listed(runs(words));
            let (inside, outside) = divide(&runs(&dirty), &runs(&present));
            prop_assert_eq!(listed(inside), pages(&[dirty[0] & present[0], dirty[1] & present[1]]));
            prop_assert_eq!(listed(outside), pages(&[dirty[0] & !present[0], dirty[1] & !present[1]]));
        }
    }
}
