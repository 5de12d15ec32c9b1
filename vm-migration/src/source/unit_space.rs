// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Index space of all guest memory in dirty-log units, which connections claim slice by slice.
//!
//! Owns the first index of each region. A slice never spans two regions.

use std::ops::Range;

use crate::cursor::Cursor;
use crate::layout::{Layout, PAGE_BYTES};

/// Pages in a unit, the least that is claimed at once: the granularity of the kernel's dirty logs.
pub(crate) const UNIT_PAGES: u64 = 64;

/// Most units that are claimed at once. One call clears their dirty bits and their contents are one
/// message: at 1 GB/s a page waits 4 ms between the two.
pub(crate) const UNITS_MAX: u64 = 16;

/// Bytes of a unit.
pub(crate) const UNIT_BYTES: u64 = UNIT_PAGES * PAGE_BYTES;

/// Consecutive pages of one region, beginning at a multiple of [`UNIT_PAGES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    pub region: usize,
    pub first: u64,
    pub pages: u64,
}

/// The units of all regions, numbered consecutively; each region begins with a new unit.
#[derive(Debug)]
pub(crate) struct UnitSpace {
    /// By region: its first unit, and its number of pages.
    regions: Vec<(u64, u64)>,
    pub(super) units: u64,
}

impl UnitSpace {
    pub(crate) fn new(layout: &Layout) -> Self {
        let mut units = 0;
        let mut place = |pages: u64| {
            let first = units;
            units += pages.div_ceil(UNIT_PAGES);
            (first, pages)
        };
        let regions = layout.regions().iter().map(|info| place(info.pages())).collect();
        Self { regions, units }
    }

    fn region_at(&self, unit: u64) -> usize {
        self.regions.partition_point(|(first, _)| *first <= unit).saturating_sub(1)
    }

    /// Number of units from `unit` to the end of its region.
    fn left_in_region(&self, unit: u64) -> u64 {
        let next = self.region_at(unit) + 1;
        self.regions.get(next).map_or(self.units, |(first, _)| *first) - unit
    }

    /// The pages of units of one region.
    fn slice(&self, units: &Range<u64>) -> Slice {
        let region = self.region_at(units.start);
        let (region_first, region_pages) = self.regions[region];
        let first = (units.start - region_first) * UNIT_PAGES;
        let end = ((units.end - region_first) * UNIT_PAGES).min(region_pages);
        Slice { region, first, pages: end - first }
    }

    /// All units, in slices of the greatest length.
    pub(crate) fn slices(&self) -> impl Iterator<Item = Slice> {
        self.slices_of(0..self.units)
    }

    /// A range of units, in slices of the greatest length.
    pub(super) fn slices_of(&self, units: Range<u64>) -> impl Iterator<Item = Slice> {
        let mut at = units.start;
        std::iter::from_fn(move || {
            let left = units.end.saturating_sub(at);
            let count = UNITS_MAX.min(left).min(self.left_in_region(at));
            let slice = (left > 0).then(|| self.slice(&(at..at + count)));
            at += count;
            slice
        })
    }

    /// Claims the next slice, of as many units as `wanted` returns for the number that is left.
    pub(super) fn claim(&self, cursor: &Cursor, wanted: impl Fn(u64) -> u64) -> Option<Slice> {
        let units = cursor.claim(|start, left| wanted(left).min(self.left_in_region(start)))?;
        Some(self.slice(&units))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::{Backing, RegionInfo};

    proptest! {
        #[test]
        fn slices_cover_each_page_once_and_never_leave_a_region(
            sizes in prop::collection::vec(1u64..3000, 1..6), wants in prop::collection::vec(1u64..40, 1..8),
        ) {
            let mut gpa = 0;
            let regions = sizes.iter().map(|pages| {
                let info = RegionInfo {
                    name: String::new(),
                    gpa,
                    len_bytes: pages * PAGE_BYTES,
                    host_page_bytes: PAGE_BYTES,
                    backing: Backing::Shared,
                };
                gpa += (pages + 7) * PAGE_BYTES;
                info
            });
            let space = UnitSpace::new(&Layout::new(regions.collect()).expect("a layout"));
            let cursor = Cursor::new(space.units);
            let mut next = vec![0; sizes.len()];
            let mut turn = 0;
            while let Some(slice) = space.claim(&cursor, |_| wants[turn % wants.len()]) {
                prop_assert_eq!(slice.first, next[slice.region]);
                prop_assert!(slice.first.is_multiple_of(UNIT_PAGES) && slice.pages > 0);
                prop_assert!(slice.pages <= wants[turn % wants.len()] * UNIT_PAGES);
                next[slice.region] += slice.pages;
                turn += 1;
            }
            prop_assert_eq!(next, sizes);
        }
    }
}
