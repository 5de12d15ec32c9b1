// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Announces to the destination which memory will come, so that it can populate it in time.
//!
//! Owns how far ahead of the first round it looks, and which memory is announced: blocks of the size of a
//! huge page that are fully populated here and hold data. An announcement is advice: memory that is not
//! announced arrives as well, and announced memory need not come. It must never announce more than fits
//! in addition to what the destination has populated already.

use std::ops::Range;

use super::unit_space::UNIT_PAGES;
use crate::layout::{PAGE_BYTES, PageRun, to_usize};
use crate::ram::{self, GuestMemoryMap};

/// Pages in a block: those of a huge page.
const BLOCK_PAGES: u64 = 512;

/// Pages of a block that are sampled, and how many of them must not be zero. Memory that was populated
/// and never written (by `prefault=on`) is left as holes.
const LOOKS: u64 = 8;
const LOOKS_FULL_MIN: u64 = LOOKS / 2;

/// Units that are examined together, 2 GiB: finding their populated pages takes about 20 ms.
const WINDOW_UNITS: u64 = (2 << 30) / (UNIT_PAGES * PAGE_BYTES);

/// Tracks how far memory has been announced to the destination.
#[derive(Debug, Default)]
pub(super) struct Announcer {
    told: u64,
}

impl Announcer {
    /// The units to examine next when the round has reached unit `reached` of `units`: the first window
    /// at once, each further one when half of the window before has been sent.
    pub(super) fn due(&mut self, reached: u64, units: u64) -> Option<Range<u64>> {
        let start = self.told;
        if start >= units || reached.saturating_add(WINDOW_UNITS / 2) < start {
            return None;
        }
        self.told = start.saturating_add(WINDOW_UNITS).min(units);
        Some(start..self.told)
    }
}

/// The blocks of a populated run that hold enough data to be announced.
pub(super) fn full_blocks<M: GuestMemoryMap>(
    memory: &M,
    region: usize,
    run: Range<u64>,
) -> impl Iterator<Item = PageRun> {
    let end = run.end;
    let starts = (run.start.next_multiple_of(BLOCK_PAGES)..end).step_by(to_usize(BLOCK_PAGES));
    let whole = starts.filter(move |start| end - start >= BLOCK_PAGES);
    whole.filter(move |start| is_full(memory, region, *start)).map(move |start| PageRun {
        region,
        first: start,
        count: BLOCK_PAGES,
    })
}

fn is_full<M: GuestMemoryMap>(memory: &M, region: usize, start: u64) -> bool {
    let step = BLOCK_PAGES / LOOKS;
    let looks = (0..LOOKS).map(|look| start + look * step + step / 2);
    let full =
        looks.filter(|page| !ram::is_zero(memory, PageRun { region, first: *page, count: 1 }));
    full.count() as u64 >= LOOKS_FULL_MIN
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use super::*;
    use crate::layout::Backing;
    use crate::testing::FakeMemory;

    #[test]
    fn windows_follow_each_other_half_a_window_ahead() {
        let mut announcer = Announcer::default();
        let units = 2 * WINDOW_UNITS + 5;
        assert_eq!(announcer.due(0, units), Some(0..WINDOW_UNITS));
        assert_eq!(announcer.due(0, units), None);
        assert_eq!(announcer.due(WINDOW_UNITS / 2 - 1, units), None);
        let second = WINDOW_UNITS..2 * WINDOW_UNITS;
        assert_eq!(announcer.due(WINDOW_UNITS / 2, units), Some(second));
        assert_eq!(announcer.due(units, units), Some(2 * WINDOW_UNITS..units));
        assert_eq!(announcer.due(units, units), None);
        assert_eq!(Announcer::default().due(0, 0), None);
    }

    #[test]
    fn only_whole_blocks_that_hold_something_are_announced() {
        let memory = FakeMemory::new(&[(0, 4 * BLOCK_PAGES)], Backing::Shared, PAGE_BYTES).unwrap();
        for page in 0..3 * BLOCK_PAGES {
            let content = [u8::from(page < 2 * BLOCK_PAGES); 4096];
            ram::slice(&*memory, PageRun { region: 0, first: page, count: 1 }).write(&content);
        }
        let blocks = |first, count| {
            let blocks = full_blocks(&*memory, 0, first..first + count);
            blocks.map(|run| (run.first, run.count)).collect::<Vec<_>>()
        };
        let (one, two) = ((0, BLOCK_PAGES), (BLOCK_PAGES, BLOCK_PAGES));
        assert_eq!(blocks(0, 3 * BLOCK_PAGES), [one, two]);
        assert_eq!(blocks(1, 2 * BLOCK_PAGES - 1), [two]);
        assert_eq!(blocks(0, 2 * BLOCK_PAGES - 1), [one]);
        assert_eq!(blocks(1, BLOCK_PAGES), []);
        assert_eq!(blocks(7, 20), []);
    }
}
