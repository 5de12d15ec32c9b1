// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Per-page maps of a region: whether a page is resident, and whether it is known to be zero.
//!
//! Owns what a set bit means in each of the two bitmaps. In both, all bits are clear at boot, so that a new
//! guest costs nothing: everything is resident, and everything is zero.
//!
//! Must never be read as a statement about what the guest does: its stores change neither map.
//! See [`ZeroMap`] for how to ask about a running guest.

use std::io;
use std::ops::Range;

use page_bitmap::PageBitmap;

/// Pages whose contents are here: they have arrived, or were always local.
///
/// Stored as the pages that are **absent**, so that the map of a guest that was booted here is untouched.
/// Written by the destination of a migration (all absent at first) and by restore on demand; not by discard,
/// so that partly received pages that are discarded and sent again stay absent. Read by prefault and DMA
/// mapping, which skip absent pages, and by recovery, which sends the map to the source.
#[derive(Debug)]
pub struct ResidentMap {
    absent: PageBitmap,
}

impl ResidentMap {
    pub(crate) fn new(len_pages: u64) -> io::Result<Self> {
        Ok(Self { absent: PageBitmap::sparse(len_pages)? })
    }

    /// True when the contents of `page` are here, or it is past the end, where nothing is to arrive.
    pub fn is_resident(&self, page: u64) -> bool {
        !self.absent.get(page)
    }

    /// Notes that the contents of these pages are here.
    pub fn set_resident(&self, pages: Range<u64>) {
        self.absent.claim_range(pages);
    }

    /// Notes that the contents of these pages are still to arrive.
    pub fn set_absent(&self, pages: Range<u64>) {
        self.absent.set_range(pages);
    }

    /// Runs of pages whose contents are still to arrive.
    pub fn absent_runs(&self, pages: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        self.absent.runs_in(pages)
    }

    /// The bitmap of absent pages.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn absent(&self) -> &PageBitmap {
        &self.absent
    }
}

/// Pages that are known to be zero: never populated, ballooned, reported free, discarded, or
/// received as zero.
///
/// Stored as the pages that **may hold data**. Written by discard and by receivers of zero pages
/// (zero), by writers of what arrives (data), and by
/// [`RamRegion::sync_zero_map`](crate::RamRegion::sync_zero_map) (data wherever the kernel has a
/// page).
///
/// A running guest writes without notice: for it, a zero page is one that **was** zero at the last check.
/// Migration and snapshot switch dirty logging on, call `sync_zero_map`, and then treat a page that is zero
/// here and not in the dirty log as zero. Treating a page as data is always correct and only costs work.
#[derive(Debug)]
pub struct ZeroMap {
    data: PageBitmap,
}

impl ZeroMap {
    pub(crate) fn new(len_pages: u64) -> io::Result<Self> {
        Ok(Self { data: PageBitmap::sparse(len_pages)? })
    }

    /// True when `page` was zero at the last check. False past the end, where nothing is known.
    pub fn is_zero(&self, page: u64) -> bool {
        page < self.data.len() && !self.data.get(page)
    }

    /// Notes that these pages are zero.
    pub fn set_zero(&self, pages: Range<u64>) {
        self.data.claim_range(pages);
    }

    /// Notes that these pages may hold data.
    pub fn set_data(&self, pages: Range<u64>) {
        self.data.set_range(pages);
    }

    /// The runs of these pages that may hold data, in order.
    pub fn data_runs(&self, pages: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        self.data.runs_in(pages)
    }

    /// Number of pages that may hold data.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn data_count(&self) -> u64 {
        self.data.count()
    }

    /// The bitmap of pages that may hold data.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn data(&self) -> &PageBitmap {
        &self.data
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::host::testing::resident_bytes;

    #[test]
    fn data_of_a_range_is_what_is_not_known_to_be_zero() {
        let map = ZeroMap::new(100).unwrap();
        map.set_data(10..20);
        map.set_zero(12..14);
        assert!(map.data_runs(11..50).eq([11..12, 14..20]));
    }

    #[test]
    fn the_map_of_a_terabyte_uses_no_memory_until_written() {
        let pages = (1 << 40) / 4096;
        let map = ResidentMap::new(pages).unwrap();
        let bytes = || resident_bytes(map.absent.storage(), pages / 8);
        assert_eq!(bytes(), 0);
        map.set_absent(pages / 2..pages / 2 + 1);
        assert_eq!(bytes(), 4096);
        // Clearing clear bits only reads; reads map the shared zero page and allocate nothing.
        map.set_resident(0..pages);
        assert_eq!(map.absent_runs(0..pages).next(), None);
        assert_eq!(bytes(), 4096);
    }
}
