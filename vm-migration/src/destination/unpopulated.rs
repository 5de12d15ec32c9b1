// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory into which nothing has arrived yet.
//!
//! Owns one bit for each stretch of 64 pages that was never filled. Receiving into a page that the host has
//! not populated costs a fault in the middle of the copy; populating an entire stretch beforehand costs far
//! less, and is needed once. Short runs are left to faults: populating around scattered pages would allocate
//! pages that the source never had.

use std::io;

use page_bitmap::PageBitmap;

use crate::layout::{Layout, PageRun};
use crate::ram::GuestMemoryMap;

/// Pages in a stretch, the unit in which population is tracked.
const STRETCH_PAGES: u64 = 64;

/// The stretches that have not been populated, by region.
#[derive(Debug)]
pub(crate) struct Unpopulated(Vec<PageBitmap>);

impl Unpopulated {
    /// All stretches of a layout.
    pub(crate) fn new(layout: &Layout) -> Self {
        let map = |pages: u64| {
            let map = PageBitmap::new(pages / STRETCH_PAGES);
            map.set_range(0..map.len());
            map
        };
        Self(layout.regions().iter().map(|region| map(region.pages())).collect())
    }

    /// Populates a run if it holds a whole stretch that was not populated before.
    pub(crate) fn populate<M: GuestMemoryMap>(&self, memory: &M, run: PageRun) -> io::Result<()> {
        let first = run.first.div_ceil(STRETCH_PAGES);
        if self.0[run.region].claim_range(first..run.end() / STRETCH_PAGES) > 0 {
            memory.populate(run)?;
        }
        Ok(())
    }

    /// Claims a run for the thread that will populate it; false, with nothing claimed, when its first
    /// stretch is claimed already.
    pub(crate) fn take(&self, run: PageRun) -> bool {
        let first = run.first.div_ceil(STRETCH_PAGES);
        let end = run.end() / STRETCH_PAGES;
        let map = &self.0[run.region];
        first < end && map.claim(first) && {
            map.claim_range(first..end);
            true
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use super::*;
    use crate::layout::{Backing, PAGE_BYTES};
    use crate::testing::FakeMemory;

    #[test]
    fn whole_stretches_are_populated_once_and_nothing_outside_the_run() {
        let memory = FakeMemory::new(&[(0, 1000)], Backing::Shared, PAGE_BYTES).unwrap();
        let fresh = Unpopulated::new(memory.layout());
        let populated = || memory.populated_bytes(0).unwrap() / PAGE_BYTES;
        let fill = |first, count| {
            fresh.populate(&*memory, PageRun { region: 0, first, count }).unwrap();
        };
        for (first, count) in [(0, 63), (1, 126), (990, 10)] {
            fill(first, count);
            assert_eq!(populated(), 0, "{first}+{count} has no whole stretch");
        }
        fill(10, 120);
        assert_eq!(populated(), 120);
        memory.discard(PageRun { region: 0, first: 0, count: 1000 }).unwrap();
        fill(64, 64);
        assert_eq!(populated(), 0, "it was filled before");
        fill(0, 1000);
        assert_eq!(populated(), 1000);
    }
}
