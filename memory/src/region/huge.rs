// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Collapsing a region of small pages into huge pages.
//!
//! Owns the check whether a block may be collapsed, and the call. Must never populate a page: a
//! block that is not fully populated stays as it is.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use super::RamRegion;
use crate::mapping::Advice;
use crate::populate::aligned_inside;
use crate::zone_kind::ZoneKind;

/// The result of a collapse of several blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collapsing {
    /// All are huge pages.
    Done,
    /// At least one is not: a page of it is in use, for I/O for example. Another try may succeed.
    InUse,
    /// There is no huge page, or the cgroup has no memory for one.
    NoMemory,
    /// It cannot be done: the memory is not of a kind that can be collapsed, or the kernel does not.
    Impossible,
}

impl Collapsing {
    /// By the kernel's error (`madvise(2)`, `MADV_COLLAPSE`): `EBUSY` is of the cgroup, and of pages that are to arrive.
    fn of(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Self::InUse,
            Some(libc::ENOMEM | libc::EBUSY) => Self::NoMemory,
            _ => Self::Impossible,
        }
    }
}

impl RamRegion {
    /// True when huge pages of either kind are wanted, as far as the host has them.
    pub fn wants_huge_pages(&self) -> bool {
        self.is_hugetlb() || self.spec().thp
    }

    /// True when huge pages are wanted that it did not come in: because it was mapped in small pages meanwhile,
    /// or because the host's settings do not provide any. Prezeroed memory has them, and its accesses map them.
    pub(crate) fn wants_collapse(&self) -> bool {
        let is_small = self.was_small() || self.zone.collapse && !self.was_prezeroed();
        is_small && self.zone.may_collapse() && self.takes_host_memory()
    }

    fn was_small(&self) -> bool {
        self.small_pages.load(Ordering::Acquire)
    }

    /// The part that could be huge pages, in bytes of the region: whole blocks.
    pub(crate) fn huge_blocks(&self) -> Range<u64> {
        aligned_inside(self.host_addr(), &(0..self.len_bytes()))
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

    /// Unmaps the whole blocks of `range` before they are collapsed. Nothing is lost by that, as the memory is shared; of
    /// private memory nothing is unmapped. The kernel unmaps page by page what it collapses, and stops all
    /// vCPUs for each: this stops them once. What the guest touches meanwhile faults.
    pub fn unmap(&self, range: &Range<u64>) {
        let blocks = aligned_inside(self.host_addr(), range);
        let is_possible = self.kind() == ZoneKind::Shared && !self.is_hugetlb();
        if self.check(range).is_err() || !is_possible || blocks.is_empty() {
            return;
        }
        let views = [Some(&self.main), self.alias.get(), self.vcpus.get()];
        for mapping in views.into_iter().flatten() {
            if let Err(error) = mapping.advise(&blocks, Advice::DontNeed) {
                log::debug!("memory is collapsed while it is mapped: {error}");
            }
        }
    }

    /// Collapses the whole blocks of `range` after it was filled with small pages. Costs a copy of every small
    /// page; where the file has huge pages already only the mappings change.
    pub fn collapse(&self, range: &Range<u64>) -> Collapsing {
        let blocks = aligned_inside(self.host_addr(), range);
        if self.check(range).is_err() || self.is_hugetlb() || blocks.is_empty() {
            return Collapsing::Impossible;
        }
        let of_vcpus = self.vcpus().map(|vcpus| &**vcpus);
        for mapping in [Some(&*self.main), of_vcpus].into_iter().flatten() {
            if let Err(error) = mapping.advise(&blocks, Advice::Collapse) {
                return Collapsing::of(&error);
            }
        }
        Collapsing::Done
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_collapse() {
        let of = |errno| Collapsing::of(&io::Error::from_raw_os_error(errno));
        assert_eq!(of(libc::EAGAIN), Collapsing::InUse);
        assert_eq!(of(libc::ENOMEM), Collapsing::NoMemory);
        assert_eq!(of(libc::EBUSY), Collapsing::NoMemory, "the cgroup is full");
        assert_eq!(of(libc::EINVAL), Collapsing::Impossible);
    }
}
