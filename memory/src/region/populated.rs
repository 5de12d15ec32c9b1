// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Populated parts of a region.
//!
//! Owns which way of asking the kernel suits the kind of memory; the ways themselves are in
//! [`crate::populated`]. Must never populate a page, and never leave out data when in doubt.

use std::io;
use std::ops::Range;

use super::{AccessError, RamRegion};
use crate::image::runs_within;
use crate::lanes::PageKind;
use crate::populate::THP_BYTES;
use crate::populated::{
    copied_runs, data_runs_by_page, hugetlb_runs, mapped_data_runs, private_runs, push_run,
};
use crate::zone_kind::ZoneKind;

/// Granularity in which it is noted what engines have populated: their chunks are multiples of it.
pub(super) const BLOCK_BYTES: u64 = THP_BYTES;

/// Sorted and disjoint runs that contain the same bytes.
fn joined(mut runs: Vec<Range<u64>>) -> Vec<Range<u64>> {
    runs.sort_unstable_by_key(|run| run.start);
    let mut joined = Vec::with_capacity(runs.len());
    for run in runs {
        push_run(&mut joined, run);
    }
    joined
}

impl RamRegion {
    /// The kind of the pages of a part, and whether it is known to be populated: without asking the kernel, and wrong
    /// only about how long it takes.
    pub fn page_kind(&self, range: &Range<u64>) -> PageKind {
        let is_hugetlb = self.is_hugetlb();
        let is_transparent = !is_hugetlb && self.spec().thp && self.kind() != ZoneKind::PrivateFile;
        PageKind {
            page_bytes: if is_transparent { THP_BYTES } else { self.page_bytes() },
            is_hugetlb,
            is_shared: self.kind() == ZoneKind::Shared,
            is_there: self.is_prezeroed() || self.is_ahead(range),
        }
    }

    /// Notes that an engine has populated all of a part.
    pub(crate) fn note_ahead(&self, range: &Range<u64>) {
        self.ahead.set_range(Self::blocks_inside(range));
    }

    /// Notes that a part is discarded.
    pub(super) fn forget_ahead(&self, range: &Range<u64>) {
        self.ahead.claim_range(range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES));
    }

    fn is_ahead(&self, range: &Range<u64>) -> bool {
        let blocks = Self::blocks_inside(range);
        let count = blocks.end - blocks.start;
        count > 0 && self.ahead.count_range(blocks) == count
    }

    fn blocks_inside(range: &Range<u64>) -> Range<u64> {
        let start = range.start.div_ceil(BLOCK_BYTES);
        start..(range.end / BLOCK_BYTES).max(start)
    }

    /// The parts of `range` that were populated and not discarded since, found without populating any.
    /// May include too much, never too little; sorted, disjoint, whole pages.
    ///
    /// # Errors
    /// When the range is not whole pages of the region.
    pub fn populated_runs(&self, range: &Range<u64>) -> Result<Vec<Range<u64>>, AccessError> {
        self.check_pages(range)?;
        let answer = self.ask_populated(range);
        Ok(answer.unwrap_or_else(|error| {
            log::debug!("memory zone '{}': populated pages unknown: {error}", self.zone_id());
            vec![range.clone()]
        }))
    }

    pub(super) fn ask_populated(&self, range: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let base = self.file_offset;
        let in_file = base + range.start..base + range.end;
        if let (Some(data), Some(pagemap)) = (&self.zone.backing.image_data, &self.pagemap) {
            let in_image = runs_within(data, &in_file);
            let mut runs: Vec<_> = in_image.map(|run| run.start - base..run.end - base).collect();
            runs.extend(private_runs(pagemap, &self.main, range.clone())?);
            return Ok(joined(runs));
        }
        let runs = match (self.kind(), &self.zone.backing.file, &self.pagemap) {
            (ZoneKind::Shared, Some(file), _) if self.is_hugetlb() => {
                let size = self.zone.spec.size_bytes;
                hugetlb_runs(file, size, self.page_bytes(), &self.zone.hugetlb_mappings(), in_file)?
            }
            (ZoneKind::Shared, Some(file), _) if !self.zone.mincore_tells => {
                data_runs_by_page(file, in_file)?
            }
            (ZoneKind::Shared, Some(file), _) => {
                // SAFETY: the region maps its part of the file from `host_addr` on, and `range`
                // lies in the region.
                unsafe { mapped_data_runs(file, in_file, self.host_addr() + range.start)? }
            }
            (ZoneKind::PrivateAnonymous, _, Some(pagemap)) => {
                return private_runs(pagemap, &self.main, range.clone());
            }
            // Others may write the file, and what it holds shows in no page table.
            _ => return Ok(vec![range.clone()]),
        };
        Ok(runs.into_iter().map(|run| run.start - base..run.end - base).collect())
    }

    /// The parts of `range` that are populated with memory of this VM alone. They are those of
    /// [`populated_runs`](Self::populated_runs), but for a private mapping of a file: what it only shows of the file is not
    /// the VM's, and takes memory when it is written. Where the page tables do not tell (before Linux 6.7), none of such
    /// a mapping is.
    pub fn own_runs(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let runs = match (self.kind(), &self.pagemap) {
            (ZoneKind::PrivateFile, Some(pagemap)) => {
                copied_runs(pagemap, &self.main, range.clone()).ok()
            }
            (ZoneKind::PrivateFile, None) => None,
            _ => self.populated_runs(range).ok(),
        };
        runs.unwrap_or_default()
    }

    /// How much of private memory is populated, as the page tables say; nothing where they do not.
    pub(crate) fn private_bytes(&self) -> u64 {
        if self.kind() == ZoneKind::Shared || self.pagemap.is_none() {
            return 0;
        }
        let usable = self.usable_runs();
        let runs = usable.iter().flat_map(|run| self.own_runs(run));
        runs.map(|run| run.end - run.start).sum()
    }

    pub(super) fn note_populated(&self, range: Range<u64>) {
        let runs = self.ask_populated(&range).unwrap_or_else(|_| vec![range]);
        for run in runs {
            self.zero.set_data(Self::pages_of(&run));
        }
    }

    /// Updates the zero map from the kernel's information: whatever is populated may hold data.
    ///
    /// Switch dirty logging on first; see [`ZeroMap`].
    ///
    /// # Errors
    /// When the range is not whole pages of the region.
    pub fn sync_zero_map(&self, range: &Range<u64>) -> Result<(), AccessError> {
        self.check_pages(range)?;
        self.note_populated(range.clone());
        Ok(())
    }
}
