// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The layout of guest RAM: the regions, and the checked conversion of a peer's numbers to pages.
//!
//! Owns the arithmetic between guest physical addresses, pages of 4 KiB and the units in which a region's
//! pages travel. Nothing here touches memory. A number that came from a peer must become a [`PageRun`] here,
//! or an error, before any other code uses it.

use serde::{Deserialize, Serialize};

/// Bytes of the smallest page; dirty logs, bitmaps and ranges use it as their unit.
pub const PAGE_BYTES: u64 = 4096;

/// Most regions; bounds what a peer may describe. No machine has so many.
pub const REGIONS_MAX: usize = 4096;

/// Converts a count or length that is known to fit an address space of 64 bits.
#[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits, asserted below")]
pub(crate) const fn to_usize(value: u64) -> usize {
    const { assert!(usize::BITS == 64) };
    value as usize
}

/// How the host backs a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backing {
    /// A memfd or file, mapped shared: two mappings show the same pages.
    Shared,
    /// Private anonymous memory: one mapping only.
    Anonymous,
}

/// One region of guest RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionInfo {
    /// Name for messages (the zone or slot).
    pub name: String,
    /// First guest physical address, a multiple of 4 KiB.
    pub gpa: u64,
    /// Length, a multiple of `host_page_bytes`.
    pub len_bytes: u64,
    /// Page size of the host's backing: 4 KiB, or that of the hugetlb pool.
    pub host_page_bytes: u64,
    /// How the host backs it.
    pub backing: Backing,
}

impl RegionInfo {
    /// Pages of 4 KiB in this region.
    pub fn pages(&self) -> u64 {
        self.len_bytes / PAGE_BYTES
    }
}

/// A run of pages of 4 KiB inside one region; made only by checked constructors of [`Layout`] or
/// from a region's own page numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRun {
    /// Index of the region in its [`Layout`].
    pub region: usize,
    /// First page, counted from the region's start.
    pub first: u64,
    /// Number of pages, at least one.
    pub count: u64,
}

impl PageRun {
    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.count * PAGE_BYTES
    }

    /// Page number after the last.
    pub fn end(&self) -> u64 {
        self.first + self.count
    }

    /// Cuts the run into pieces of at most `pages` pages that begin at multiples of `pages` in the region.
    pub(crate) fn cut(self, pages: u64) -> impl Iterator<Item = Self> {
        let mut rest = self;
        std::iter::from_fn(move || {
            let count = (pages - rest.first % pages).min(rest.count);
            let piece = Self { count, ..rest };
            rest = Self { first: rest.first + count, count: rest.count - count, ..rest };
            (count > 0).then_some(piece)
        })
    }
}

/// A range of guest physical addresses in the protocol: start and length in bytes, unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpaRange {
    /// First guest physical address.
    pub gpa: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

/// Why regions do not form a valid layout, or a range is not part of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Too many regions.
    #[error("{0} memory regions are more than the {REGIONS_MAX} that are supported")]
    TooManyRegions(usize),
    /// No region at all.
    #[error("the machine has no memory region")]
    NoRegion,
    /// A region is misaligned, empty, wraps around, or overlaps the one before it.
    #[error("memory region {index} (gpa {gpa:#x}, {len_bytes:#x} bytes) is {what}")]
    BadRegion {
        /// Its index.
        index: usize,
        /// Its address.
        gpa: u64,
        /// Its length.
        len_bytes: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A range that is not guest RAM.
    #[error("range gpa {gpa:#x}, {len_bytes:#x} bytes is {what}")]
    BadRange {
        /// Its address.
        gpa: u64,
        /// Its length.
        len_bytes: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The two sides' machines differ.
    #[error("the memory layouts differ: {here} here, {there} at the peer")]
    Differs {
        /// Ours.
        here: String,
        /// The peer's.
        there: String,
    },
}

/// All regions of a machine, sorted by address, checked once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    regions: Vec<RegionInfo>,
}

impl Layout {
    /// Checks regions (from the virtual machine or from a peer) and keeps their order.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn new(regions: Vec<RegionInfo>) -> Result<Self, LayoutError> {
        if regions.is_empty() {
            return Err(LayoutError::NoRegion);
        }
        if regions.len() > REGIONS_MAX {
            return Err(LayoutError::TooManyRegions(regions.len()));
        }
        let mut free_from = 0;
        for (index, region) in regions.iter().enumerate() {
            let bad = |what| LayoutError::BadRegion {
                index,
                gpa: region.gpa,
                len_bytes: region.len_bytes,
                what,
            };
            let page = region.host_page_bytes;
            if page < PAGE_BYTES || !page.is_power_of_two() {
                return Err(bad("of an impossible page size"));
            }
            if region.len_bytes == 0 {
                return Err(bad("empty"));
            }
            if !region.gpa.is_multiple_of(PAGE_BYTES) || !region.len_bytes.is_multiple_of(page) {
                return Err(bad("not a whole number of pages"));
            }
            if region.gpa < free_from {
                return Err(bad("not after the region before it"));
            }
            free_from = region
                .gpa
                .checked_add(region.len_bytes)
                .ok_or_else(|| bad("beyond the address space"))?;
        }
        Ok(Self { regions })
    }

    /// The regions, by ascending address.
    pub fn regions(&self) -> &[RegionInfo] {
        &self.regions
    }

    /// All pages of 4 KiB.
    pub fn pages(&self) -> u64 {
        self.regions.iter().map(RegionInfo::pages).sum()
    }

    /// Finds the pages of a range, which must lie in one region and consist of whole pages.
    ///
    /// # Errors
    /// [`LayoutError::BadRange`] otherwise.
    pub fn locate(&self, range: GpaRange) -> Result<PageRun, LayoutError> {
        let GpaRange { gpa, len_bytes } = range;
        let bad = |what| LayoutError::BadRange { gpa, len_bytes, what };
        if len_bytes == 0 {
            return Err(bad("empty"));
        }
        if !gpa.is_multiple_of(PAGE_BYTES) || !len_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(bad("not a whole number of pages"));
        }
        let after = self.regions.partition_point(|region| region.gpa <= gpa);
        let region = after.checked_sub(1).ok_or_else(|| bad("outside guest RAM"))?;
        let info = &self.regions[region];
        let offset = gpa - info.gpa;
        if offset >= info.len_bytes || len_bytes > info.len_bytes - offset {
            return Err(bad("outside guest RAM"));
        }
        Ok(PageRun { region, first: offset / PAGE_BYTES, count: len_bytes / PAGE_BYTES })
    }

    /// Finds the pages of a range that may go on in regions that begin where the one before ends. Ends after the first
    /// error.
    pub fn locate_all(
        &self,
        range: GpaRange,
    ) -> impl Iterator<Item = Result<PageRun, LayoutError>> + '_ {
        let mut rest = Some(range);
        std::iter::from_fn(move || {
            let now = rest.take()?;
            let after = self.regions.partition_point(|region| region.gpa <= now.gpa);
            let region = after.checked_sub(1).and_then(|index| self.regions.get(index));
            let left =
                region.and_then(|info| info.len_bytes.checked_sub(now.gpa.checked_sub(info.gpa)?));
            let first = match left {
                Some(left) if left > 0 && left < now.len_bytes => {
                    // No region ends at the end of the address space.
                    rest = Some(GpaRange {
                        gpa: now.gpa.saturating_add(left),
                        len_bytes: now.len_bytes - left,
                    });
                    GpaRange { len_bytes: left, ..now }
                }
                _ => now,
            };
            let located = self.locate(first);
            if located.is_err() {
                rest = None;
            }
            Some(located)
        })
    }

    /// The addresses of a run, for the protocol.
    pub fn range_of(&self, run: PageRun) -> GpaRange {
        let region = &self.regions[run.region];
        GpaRange { gpa: region.gpa + run.first * PAGE_BYTES, len_bytes: run.len_bytes() }
    }

    /// Compares the guest-visible part of two layouts: addresses and lengths, not backings.
    ///
    /// # Errors
    /// [`LayoutError::Differs`] with a description of both.
    pub fn same_for_guest(&self, peer: &Self) -> Result<(), LayoutError> {
        let key = |layout: &Self| -> Vec<(u64, u64)> {
            layout.regions.iter().map(|r| (r.gpa, r.len_bytes)).collect()
        };
        if key(self) == key(peer) {
            return Ok(());
        }
        Err(LayoutError::Differs { here: self.to_string(), there: peer.to_string() })
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const SHOWN_MAX: usize = 8;
        for (index, region) in self.regions.iter().take(SHOWN_MAX).enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{:#x}+{:#x}", region.gpa, region.len_bytes)?;
        }
        match self.regions.len().saturating_sub(SHOWN_MAX) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use proptest::prelude::*;

    use super::*;

    fn region(gpa: u64, len_bytes: u64) -> RegionInfo {
        RegionInfo {
            name: "r".into(),
            gpa,
            len_bytes,
            host_page_bytes: PAGE_BYTES,
            backing: Backing::Shared,
        }
    }

    fn two() -> Layout {
        Layout::new(vec![region(0, 0x10_0000), region(0x1_0000_0000, 0x2000)]).unwrap()
    }

    #[test]
    fn overlapping_wrapping_and_odd_regions_are_refused() {
        for bad in [
            vec![],
            vec![region(0, 0)],
            vec![region(0, 100)],
            vec![region(7, 0x1000)],
            vec![region(0, 0x2000), region(0x1000, 0x1000)],
            vec![region(0x1000, 0x1000), region(0, 0x1000)],
            vec![region(u64::MAX - 0xfff, 0x2000)],
        ] {
            assert!(Layout::new(bad.clone()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_range_may_not_leave_its_region() {
        let layout = two();
        let at = |gpa, len_bytes| layout.locate(GpaRange { gpa, len_bytes });
        assert_eq!(at(0x1000, 0x1000).unwrap(), PageRun { region: 0, first: 1, count: 1 });
        assert_eq!(at(0x1_0000_1000, 0x1000).unwrap(), PageRun { region: 1, first: 1, count: 1 });
        assert!(at(0xf_f000, 0x2000).is_err());
        assert!(at(0x10_0000, 0x1000).is_err());
        assert!(at(0x1_0000_1000, u64::MAX - 0xfff).is_err());
        assert!(at(0x1000, 0).is_err());
    }

    #[test]
    fn a_layout_has_a_limit() {
        let region = |number: u64| RegionInfo {
            name: String::new(),
            gpa: number * 2 * PAGE_BYTES,
            len_bytes: PAGE_BYTES,
            host_page_bytes: PAGE_BYTES,
            backing: Backing::Shared,
        };
        let regions = |count: usize| Layout::new((0..count as u64).map(region).collect());
        assert!(regions(REGIONS_MAX).is_ok());
        let refused = regions(REGIONS_MAX + 1);
        assert_eq!(refused.unwrap_err(), LayoutError::TooManyRegions(REGIONS_MAX + 1));
    }

    #[test]
    fn a_run_is_cut_at_multiples() {
        let run = |first, count| PageRun { region: 2, first, count };
        let pieces: Vec<_> = run(3, 10).cut(4).collect();
        assert_eq!(pieces, [run(3, 1), run(4, 4), run(8, 4), run(12, 1)]);
        assert_eq!(run(8, 4).cut(4).collect::<Vec<_>>(), [run(8, 4)]);
        assert_eq!(run(0, 0).cut(4).count(), 0);
    }

    proptest! {
        #[test]
        fn what_is_located_lies_inside_and_comes_back(gpa: u64, len_bytes: u64) {
            let layout = two();
            let range = GpaRange { gpa, len_bytes };
            if let Ok(run) = layout.locate(range) {
                prop_assert!(run.end() <= layout.regions()[run.region].pages());
                prop_assert_eq!(layout.range_of(run), range);
            }
        }

        #[test]
        fn a_page_inside_is_always_found(page in 0u64..0x100) {
            let layout = two();
            let range = GpaRange { gpa: page * PAGE_BYTES, len_bytes: PAGE_BYTES };
            prop_assert_eq!(layout.locate(range).unwrap().first, page);
        }
    }
}
