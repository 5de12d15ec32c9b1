// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sets of pages of the whole guest: a bitmap for each region.
//!
//! Owns how they are filled, from populated pages and from the dirty log, and how they are
//! expressed in the destination's units. Must never send anything.

use page_bitmap::{PageBitmap, runs_in_words};

use super::negotiate::Links;
use super::unit_space::{Slice, UnitSpace};
use crate::error::{Cause, Failure, Step};
use crate::layout::{Layout, to_usize};
use crate::ram::GuestMemoryMap;
use crate::vm::DirtyLog;

/// Pages whose dirty bits are read in one call: 4 KiB of bitmap.
const COLLECT_PAGES: u64 = 32 * 1024;

/// Empty maps with a bit for every page of every region.
pub(super) fn empty_maps(layout: &Layout) -> Vec<PageBitmap> {
    layout.regions().iter().map(|info| PageBitmap::new(info.pages())).collect()
}

/// Finds the populated pages, for postcopy. The dirty bits are cleared first, so that a page that
/// is populated after the scan passed it is dirty at the stop.
pub(super) fn scan<M: GuestMemoryMap>(
    memory: &M,
    log: &impl DirtyLog,
) -> Result<Vec<PageBitmap>, Failure> {
    log.begin_round().map_err(Cause::Vm).step("reading the dirty log")?;
    let layout = memory.layout();
    let maps = empty_maps(layout);
    let mut words = Vec::new();
    for Slice { region, first, pages } in UnitSpace::new(layout).slices() {
        words.resize(to_usize(pages.div_ceil(64)), 0);
        log.collect_and_clear(region, first..first + pages, &mut words)
            .map_err(Cause::Vm)
            .step("reading the dirty log")?;
        let runs = memory
            .populated_runs(region, first..first + pages)
            .map_err(Cause::Memory)
            .step("finding populated memory")?;
        for run in runs {
            maps[region].set_range(run);
        }
    }
    Ok(maps)
}

/// Adds the pages that were dirtied since the scan.
pub(super) fn add_dirty<M: GuestMemoryMap>(
    memory: &M,
    log: &impl DirtyLog,
    maps: &[PageBitmap],
) -> Result<(), Failure> {
    let mut words = vec![0; to_usize(COLLECT_PAGES / 64)];
    for (region, info) in memory.layout().regions().iter().enumerate() {
        for first in (0..info.pages()).step_by(to_usize(COLLECT_PAGES)) {
            let count = COLLECT_PAGES.min(info.pages() - first);
            let words = &mut words[..to_usize(count.div_ceil(64))];
            log.collect_and_clear(region, first..first + count, words)
                .map_err(Cause::Vm)
                .step("reading the dirty log")?;
            for run in runs_in_words(words, first) {
                maps[region].set_range(run);
            }
        }
    }
    Ok(())
}

/// Converts page maps to the units of the destination.
pub(super) fn in_units(pages: &[PageBitmap], links: &Links) -> Vec<PageBitmap> {
    let convert = |(region, map): (usize, &PageBitmap)| {
        let unit = links.unit_pages(region);
        if unit == 1 {
            return map.copy();
        }
        let units = PageBitmap::new(map.len() / unit);
        for run in map.runs() {
            units.set_range(run.start / unit..run.end.div_ceil(unit));
        }
        units
    };
    pages.iter().enumerate().map(convert).collect()
}
