// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Collapsing a region of small pages into huge pages.
//!
//! Owns the check whether a block may be collapsed, and the call. Must never populate a page: a
//! block that is not fully populated stays as it is.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::{AccessError, RamRegion};
use crate::mapping::{Advice, Mapping};
use crate::populate::{THP_BYTES, aligned_inside};
use crate::to_usize;
use crate::zone_kind::ZoneKind;

impl RamRegion {
    /// True when huge pages are wanted that the host's settings do not provide by themselves. Prezeroed memory has
    /// them, and its accesses map them, unless it was mapped in small pages before.
    pub(crate) fn wants_collapse(&self) -> bool {
        self.zone.collapse && (!self.was_prezeroed() || self.was_small())
    }

    fn was_small(&self) -> bool {
        self.small_pages.load(Ordering::Acquire)
    }

    /// The blocks that could be huge pages, in bytes of the region.
    pub(crate) fn huge_blocks(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let whole = aligned_inside(self.host_addr(), &(0..self.len_bytes()));
        whole.step_by(to_usize(THP_BYTES)).map(|start| start..start + THP_BYTES)
    }

    /// Makes the host back the current mappings of this shared region with small pages only,
    /// whatever its settings for shared memory, without collapsing any; or restores what the zone
    /// asks for. Existing huge pages stay.
    pub fn use_small_pages(&self, small: bool) {
        if self.is_hugetlb() || self.kind() != ZoneKind::Shared {
            return;
        }
        if small {
            self.small_pages.store(true, Ordering::Release);
        }
        let views = [Some(&self.main), self.alias.get(), self.vcpus.get()];
        for mapping in views.into_iter().flatten() {
            if !small {
                self.advise_huge_pages(mapping);
            } else if let Err(error) = mapping.advise(&(0..self.len_bytes()), Advice::NoHugePage) {
                // A kernel without huge pages makes none.
                log::debug!("memory zone '{}' may get huge pages: {error}", self.zone_id());
            }
        }
    }

    /// True when every page of `block` is populated.
    pub(crate) fn is_populated(&self, block: &Range<u64>) -> bool {
        self.populated_runs(block).is_ok_and(|runs| runs == [block.clone()])
    }

    /// Collapses `range` after it was filled with small pages; best effort, returns true when the
    /// kernel did all of it. Costs a copy of every small page; where the file has huge pages already only the mappings
    /// change, each for itself.
    ///
    /// # Errors
    /// When the range lies outside the region.
    pub fn collapse(&self, range: &Range<u64>) -> Result<bool, AccessError> {
        self.check(range)?;
        let blocks = aligned_inside(self.host_addr(), range);
        let possible = !self.is_hugetlb() && !blocks.is_empty();
        let collapse = |mapping: &Mapping| mapping.advise(&blocks, Advice::Collapse).is_ok();
        if !possible {
            return Ok(false);
        }
        let of_vcpus =
            self.vcpus().filter(|_| self.was_prezeroed()).is_none_or(|vcpus| collapse(vcpus));
        Ok(collapse(&self.main) && of_vcpus)
    }
}
