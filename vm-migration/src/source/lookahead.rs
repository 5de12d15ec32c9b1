// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the guest keeps writing is not worth sending in the first round.
//!
//! The first round sends every page, and one that the guest writes all the time goes out again in
//! the second. So the dirty bits are cleared not just before a page is copied but a window ahead of
//! that: what has been written again when its turn comes is left out, and the second round, which
//! finds it dirty, sends it. A page that is left out is never sent more often for it, and a page that
//! is not is sent as before.
//!
//! Owns which windows have been cleared, and what had been written when the first of a window was
//! claimed. It never decides which pages there are, and a failure to look ahead only means that a
//! window's slices are cleared and sent one by one.

use std::sync::OnceLock;

use super::lane::{UNIT_PAGES, UNITS_MAX};
use super::line::{Line, Slice};
use crate::layout::{PAGE_BYTES, to_usize};
use crate::vm::DirtyLog;

/// Windows of a round: the time that one of them takes is how soon a page must be written again to
/// be left out.
const WINDOWS: u64 = 16;

/// Most of a window, in units: each costs a look at the log of a whole region.
const WINDOW_UNITS_MAX: u64 = (8 << 30) / (UNIT_PAGES * PAGE_BYTES);

/// A stretch of the line.
#[derive(Debug, Default)]
struct Window {
    /// Its dirty bits have been cleared ahead of its turn.
    cleared: OnceLock<bool>,
    /// What had been written since then when its turn came: a word for each unit. `None` where
    /// that is not known.
    written: OnceLock<Option<Vec<u64>>>,
}

/// The windows of a first round.
#[derive(Debug)]
pub(crate) struct Lookahead {
    window_units: u64,
    windows: Vec<Window>,
}

impl Lookahead {
    /// For a line of so many units of which nothing is cleared yet.
    pub(crate) fn new(units: u64) -> Self {
        let window_units = (units / WINDOWS).clamp(UNITS_MAX, WINDOW_UNITS_MAX);
        let windows = (0..units.div_ceil(window_units)).map(|_| Window::default()).collect();
        Self { window_units, windows }
    }

    /// For a line of which everything was cleared before.
    pub(crate) fn cleared(units: u64) -> Self {
        let new = Self::new(units);
        let done = |window: Window| Window { cleared: OnceLock::from(true), ..window };
        Self { windows: new.windows.into_iter().map(done).collect(), ..new }
    }

    /// Units from one of them to the end of its window: a slice must not reach beyond it.
    pub(crate) fn room(&self, unit: u64) -> u64 {
        self.window_units - unit % self.window_units
    }

    /// What of a slice that has been claimed was written since its dirty bits were cleared; `None`
    /// when they have to be cleared now.
    ///
    /// Whoever asks first in a window looks, and clears the one behind it; the others wait for that.
    pub(crate) fn written(&self, slice: Slice, line: &Line, log: &impl DirtyLog) -> Option<&[u64]> {
        let number = slice.unit / self.window_units;
        let window = self.windows.get(to_usize(number))?;
        let written = window.written.get_or_init(|| {
            // The first one has nobody who could have cleared it long enough ago.
            let may_look = number > 0 || window.cleared.get().is_some();
            let written = (may_look && self.clear(number, line, log))
                .then(|| self.look(number, line, log))
                .flatten();
            self.clear(number + 1, line, log);
            written
        });
        let first = to_usize(slice.unit % self.window_units);
        let words = to_usize(slice.pages.div_ceil(UNIT_PAGES));
        written.as_ref()?.get(first..first + words)
    }

    fn units(&self, number: u64, line: &Line) -> std::ops::Range<u64> {
        let first = number * self.window_units;
        first..(first + self.window_units).min(line.units())
    }

    /// Clears a window's dirty bits, if nobody has.
    fn clear(&self, number: u64, line: &Line, log: &impl DirtyLog) -> bool {
        let Some(window) = self.windows.get(to_usize(number)) else { return false };
        *window.cleared.get_or_init(|| {
            let mut words = vec![0; to_usize(UNITS_MAX)];
            let slices = line.slices_of(self.units(number, line), UNITS_MAX);
            for Slice { region, first, pages, .. } in slices {
                let words = &mut words[..to_usize(pages.div_ceil(UNIT_PAGES))];
                if let Err(error) = log.collect_and_clear(region, first..first + pages, words) {
                    log::debug!("the dirty log is not cleared ahead: {error}");
                    return false;
                }
            }
            true
        })
    }

    fn look(&self, number: u64, line: &Line, log: &impl DirtyLog) -> Option<Vec<u64>> {
        let units = self.units(number, line);
        let mut written = vec![0; to_usize(units.end - units.start)];
        for Slice { region, first, pages, unit } in line.slices_of(units.clone(), u64::MAX) {
            let start = to_usize(unit - units.start);
            let words = written.get_mut(start..start + to_usize(pages.div_ceil(UNIT_PAGES)))?;
            if let Err(error) = log.written_since(region, first..first + pages, words) {
                log::debug!("the dirty log cannot be read ahead: {error}");
                return None;
            }
        }
        Some(written)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::cursor::Cursor;
    use crate::layout::Backing;
    use crate::ram::GuestMemoryMap;
    use crate::testing::{FakeLog, FakeMemory};

    const PAGES: [u64; 2] = [5 * 1024, 11 * 1024 + 7];

    fn memory() -> Arc<FakeMemory> {
        let regions = [(0, PAGES[0]), (1 << 32, PAGES[1])];
        FakeMemory::new(&regions, Backing::Shared, PAGE_BYTES).unwrap()
    }

    /// A first round without contents: `before` is called with the number of each slice before it is
    /// claimed; returns, by region, which pages were left out.
    fn round(
        memory: &FakeMemory,
        ahead: &Lookahead,
        log: &FakeLog,
        mut before: impl FnMut(usize),
    ) -> Vec<Vec<bool>> {
        let line = Line::new(memory.layout());
        let cursor = Cursor::new(line.units());
        let mut left_out: Vec<Vec<bool>> =
            PAGES.iter().map(|pages| vec![false; to_usize(*pages)]).collect();
        for number in 0.. {
            before(number);
            let claim = |start, _| UNITS_MAX.min(ahead.room(start));
            let Some(slice) = line.claim(&cursor, claim) else { break };
            let range = slice.first..slice.first + slice.pages;
            let words = ahead.written(slice, &line, log);
            if let Some(words) = words {
                for page in range {
                    let bit = page - slice.first;
                    left_out[slice.region][to_usize(page)] =
                        words[to_usize(bit / 64)] >> (bit % 64) & 1 == 1;
                }
            } else {
                let mut words = vec![0; to_usize(slice.pages.div_ceil(64))];
                log.collect_and_clear(slice.region, range, &mut words).unwrap();
            }
        }
        left_out
    }

    fn is_dirty(log: &FakeLog, region: usize, page: u64) -> bool {
        let first = page / 64 * 64;
        let mut words = [0];
        log.written_since(region, first..(first + 64).min(PAGES[region]), &mut words).unwrap();
        words[0] >> (page % 64) & 1 == 1
    }

    #[test]
    fn what_is_written_again_while_it_waits_is_left_out() {
        let memory = memory();
        let log = FakeLog::new(Arc::clone(&memory), false);
        log.begin_round().unwrap();
        let ahead = Lookahead::new(Line::new(memory.layout()).units());
        // Windows are slices here. Before the fourth the fifth has not been cleared, so what is
        // written there now is cleared with the rest and goes out.
        let left_out = round(&memory, &ahead, &log, |slice| {
            if slice == 3 {
                memory.mark_dirty(0, 3 * 1024 + 5);
                memory.mark_dirty(0, 4 * 1024 + 6);
            }
        });
        let out: Vec<_> = left_out[0].iter().enumerate().filter(|(_, out)| **out).collect();
        assert_eq!(out, [(3 * 1024 + 5, &true)]);
        assert!(left_out[1].iter().all(|out| !out));
        assert!(is_dirty(&log, 0, 3 * 1024 + 5) && !is_dirty(&log, 0, 4 * 1024 + 6));
    }

    #[test]
    fn where_all_was_cleared_before_the_first_window_is_looked_at_too() {
        let memory = memory();
        let log = FakeLog::new(Arc::clone(&memory), false);
        log.begin_round().unwrap();
        let line = Line::new(memory.layout());
        crate::source::round::clear_all(&log, memory.layout()).unwrap();
        memory.mark_dirty(0, 0);
        let left_out = round(&memory, &Lookahead::cleared(line.units()), &log, |_| {});
        assert!(left_out[0][0] && !left_out[0][1] && is_dirty(&log, 0, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        /// A write is lost when it comes after the page was sent, or the page was not sent at all,
        /// and the next round does not find it.
        #[test]
        fn no_write_is_lost(
            writes in prop::collection::vec((0usize..20, 0usize..2, 0u64..12 * 1024), 1..200),
        ) {
            let memory = memory();
            let log = FakeLog::new(Arc::clone(&memory), false);
            log.begin_round().unwrap();
            let line = Line::new(memory.layout());
            let ahead = Lookahead::new(line.units());
            let per_slice = UNITS_MAX * UNIT_PAGES;
            let slice_of = |region: usize, page: u64| match region {
                0 => page / per_slice,
                _ => PAGES[0].div_ceil(per_slice) + page / per_slice,
            };
            let writes: Vec<_> =
                writes.into_iter().map(|(at, region, page)| (at, region, page % PAGES[region])).collect();
            let left_out = round(&memory, &ahead, &log, |slice| {
                for (_, region, page) in writes.iter().filter(|(at, ..)| *at == slice) {
                    memory.mark_dirty(*region, *page);
                }
            });
            for (at, region, page) in writes {
                let sent_later = at as u64 <= slice_of(region, page) && !left_out[region][to_usize(page)];
                prop_assert!(sent_later || at > 16 || is_dirty(&log, region, page), "{at}: {region}, {page}");
            }
        }
    }
}
