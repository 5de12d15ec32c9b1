// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Dirty log of the VMM's own devices, whose writes KVM's dirty log does not see.
//!
//! Owns one bitmap per region, filled by `vm-memory` on every access that goes through
//! [`GuestMemory`](crate::GuestMemory) and drained by migration. Must never lose a write that
//! happened after tracking was switched on, and must cost nothing while it is off.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use page_bitmap::PageBitmap;
use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};

use crate::PAGE_BYTES;
use crate::mapping::Mapping;

/// The dirty log of one region, in pages of 4 KiB. Clones share the log.
///
/// Tracking is off initially. A log that belongs to a [`RamRegion`](crate::RamRegion) also keeps
/// the region's mapping alive: every view of guest memory contains it, so memory stays mapped for
/// as long as any thread can reach it.
#[derive(Debug, Clone, Default)]
pub struct DeviceDirtyLog {
    log: Option<Arc<Log>>,
    /// Never read; it keeps the region mapped, see the type.
    _keeps_mapped: Option<Arc<Mapping>>,
}

#[derive(Debug)]
struct Log {
    tracking: AtomicBool,
    pages: PageBitmap,
}

impl DeviceDirtyLog {
    /// A log for `len_bytes` of memory that is not part of a region.
    ///
    /// # Errors
    /// When the host has no address space left for the bitmap.
    pub fn for_len(len_bytes: u64) -> io::Result<Self> {
        let pages = PageBitmap::sparse(len_bytes.div_ceil(PAGE_BYTES))?;
        let log = Arc::new(Log { tracking: AtomicBool::new(false), pages });
        Ok(Self { log: Some(log), _keeps_mapped: None })
    }

    pub(crate) fn keeping_mapped(len_bytes: u64, mapping: Arc<Mapping>) -> io::Result<Self> {
        Ok(Self { _keeps_mapped: Some(mapping), ..Self::for_len(len_bytes)? })
    }

    /// Switches tracking on, with an empty log, or off.
    ///
    /// After this has switched tracking on, a device's write is either visible to the caller
    /// already or will be in the log.
    pub fn set_tracking(&self, on: bool) {
        let Some(log) = &self.log else { return };
        if on && !log.tracking.load(Ordering::Relaxed) {
            log.pages.clear();
        }
        log.tracking.store(on, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// True while writes are logged.
    pub fn is_tracking(&self) -> bool {
        self.log.as_ref().is_some_and(|log| log.tracking.load(Ordering::SeqCst))
    }

    /// Moves the dirty bits of `pages` (numbered from the start of the region) to `out` and clears
    /// them; bit i of word w of `out` is page `pages.start + 64 * w + i`.
    ///
    /// Each word is moved atomically: a page is in `out` or still in the log. Call this before
    /// copying the page, never after.
    pub fn take(&self, pages: Range<u64>, out: &mut [u64]) {
        match &self.log {
            Some(log) => log.pages.take_words(pages, out),
            None => out.fill(0),
        }
        // The copy that follows must not read contents from before the bit was taken.
        fence(Ordering::SeqCst);
    }

    /// Restores bits that were taken for an attempt that then failed.
    pub fn put_back(&self, pages: Range<u64>, words: &[u64]) {
        if let Some(log) = &self.log {
            log.pages.or_words(pages, words);
        }
    }

    /// Number of dirty pages.
    pub fn count(&self) -> u64 {
        self.log.as_ref().map_or(0, |log| log.pages.count())
    }
}

impl<'a> WithBitmapSlice<'a> for DeviceDirtyLog {
    type S = RefSlice<'a, DeviceDirtyLog>;
}

impl Bitmap for DeviceDirtyLog {
    fn mark_dirty(&self, offset: usize, len: usize) {
        let Some(log) = &self.log else { return };
        // The write came first, then this. The fence pairs with the one in `set_tracking`: either
        // this sees tracking switched on, or the thread that switched it on sees the write.
        fence(Ordering::SeqCst);
        if len == 0 || !log.tracking.load(Ordering::Relaxed) {
            return;
        }
        let first = offset as u64 / PAGE_BYTES;
        let last = offset.saturating_add(len - 1) as u64 / PAGE_BYTES;
        log.pages.set_range(first..last + 1);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.log.as_ref().is_some_and(|log| log.pages.get(offset as u64 / PAGE_BYTES))
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, DeviceDirtyLog> {
        RefSlice::new(self, offset)
    }
}

impl NewBitmap for DeviceDirtyLog {
    /// For memory that `vm-memory` creates itself, as in tests.
    ///
    /// # Panics
    /// When the host is out of address space, which the trait cannot report.
    fn with_len(len: usize) -> Self {
        Self::for_len(len as u64).expect("no address space left for a dirty log")
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

    use super::*;
    use crate::GuestMemory;

    const MIB: u64 = 1 << 20;

    fn memory() -> GuestMemory {
        GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20), (GuestAddress(4 << 20), 1 << 20)])
            .unwrap()
    }

    fn log(memory: &GuestMemory, gpa: u64) -> &DeviceDirtyLog {
        memory.find_region(GuestAddress(gpa)).unwrap().get_mmap_bitmap()
    }

    trait GetBitmap {
        fn get_mmap_bitmap(&self) -> &DeviceDirtyLog;
    }

    impl GetBitmap for vm_memory::GuestRegionMmap<DeviceDirtyLog> {
        fn get_mmap_bitmap(&self) -> &DeviceDirtyLog {
            vm_memory::MmapRegion::bitmap(self)
        }
    }

    #[test]
    fn logs_only_while_tracking() {
        let memory = memory();
        memory.write_slice(&[1; 64], GuestAddress(0)).unwrap();
        assert_eq!(log(&memory, 0).count(), 0);
        log(&memory, 0).set_tracking(true);
        memory.write_slice(&[1; 64], GuestAddress(4096)).unwrap();
        log(&memory, 0).set_tracking(false);
        memory.write_slice(&[1; 64], GuestAddress(8192)).unwrap();
        assert!(log(&memory, 0).dirty_at(4096));
        assert_eq!(log(&memory, 0).count(), 1);
        // Switching on again begins with an empty log.
        log(&memory, 0).set_tracking(true);
        assert_eq!(log(&memory, 0).count(), 0);
    }

    #[test]
    fn a_write_across_pages_marks_each_and_reads_mark_none() {
        let memory = memory();
        let log = log(&memory, 4 * MIB);
        log.set_tracking(true);
        memory.write_slice(&[1; 4098], GuestAddress(4 * MIB + 3 * 4096 - 1)).unwrap();
        memory.read_slice(&mut [0; 4096], GuestAddress(4 * MIB)).unwrap();
        let mut words = [0; 4];
        log.take(0..MIB / PAGE_BYTES, &mut words);
        assert_eq!(words, [0b11100, 0, 0, 0]);
        assert_eq!(log.count(), 0);
        log.put_back(0..MIB / PAGE_BYTES, &words);
        assert_eq!(log.count(), 3);
    }

    #[test]
    fn slices_mark_relative_to_the_region() {
        let memory = memory();
        let region = memory.find_region(GuestAddress(4 * MIB)).unwrap();
        log(&memory, 4 * MIB).set_tracking(true);
        let slice = memory.get_slice(GuestAddress(4 * MIB + 0x5000), 0x2000).unwrap();
        slice.write_slice(&[7; 16], 0x1000).unwrap();
        assert!(region.bitmap().dirty_at(0x6000));
        assert_eq!(log(&memory, 4 * MIB).count(), 1);
    }

    #[test]
    fn the_default_log_ignores_everything() {
        let log = DeviceDirtyLog::default();
        log.set_tracking(true);
        log.mark_dirty(0, usize::MAX);
        assert!(!log.is_tracking() && !log.dirty_at(0));
        let sized = DeviceDirtyLog::for_len(8192).unwrap();
        sized.set_tracking(true);
        sized.mark_dirty(usize::MAX, usize::MAX);
        sized.mark_dirty(4096, usize::MAX);
        assert_eq!(sized.count(), 1);
    }
}
