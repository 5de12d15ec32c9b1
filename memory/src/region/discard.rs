// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Discarding guest memory of a region.
//!
//! Owns the ways in which each kind of memory is discarded, or zeroed where it has to stay. In each case
//! the range reads as zero afterwards; must never discard or zero a byte outside it, also where a huge
//! page extends beyond it. Whether memory may be discarded is decided in [`crate::discards`].

use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use vm_memory::bitmap::Bitmap as _;

use super::{AccessError, RamRegion};
use crate::discards::Permit;
use crate::mapping::Advice;
use crate::zone_kind::ZoneKind;
use crate::{PAGE_BYTES, to_usize};

impl RamRegion {
    /// Discards `range`, in both mappings and for every process that shares it; it reads as zero from then
    /// on, and the zero map is updated. The resident map is not changed: a page that is still to arrive stays
    /// so.
    ///
    /// Memory that cannot be discarded (parts of hugetlb pages, private mappings of files, file systems
    /// without holes) is zeroed in place. The pages count as written, so that a migration in progress does
    /// not leave their old contents at its destination.
    ///
    /// # Errors
    /// When the range is not whole pages of the region, or the kernel refuses.
    pub(crate) fn discard(
        &self,
        range: &Range<u64>,
        _permit: &Permit<'_>,
    ) -> Result<(), AccessError> {
        self.check_pages(range)?;
        if range.is_empty() {
            return Ok(());
        }
        let failed = |source| AccessError::Discard {
            zone: self.zone_id().to_owned(),
            start: range.start,
            end: range.end,
            source,
        };
        // Before the pages go: a prefault that looks after that leaves them alone.
        self.discarded.set_range(Self::pages_of(range));
        self.forget_ahead(range);
        self.has_holes.store(true, Ordering::Release);
        match self.kind() {
            ZoneKind::PrivateAnonymous => {
                self.main.advise(range, Advice::DontNeed).map_err(failed)?;
            }
            ZoneKind::PrivateFile => self.zero_in_place(range)?,
            ZoneKind::Shared => self.discard_shared(range).map_err(failed)?,
        }
        self.note_zeroed(range);
        Ok(())
    }

    /// Zeroes the pages of `range` in place, so that devices keep them mapped; missing pages are populated,
    /// and all are resident afterwards. The zero map and the log are updated as by a discard.
    ///
    /// # Errors
    /// When the range is not whole pages of the region, or the host has no memory.
    pub(crate) fn zero_pages(&self, range: &Range<u64>) -> Result<(), AccessError> {
        self.check_pages(range)?;
        if range.is_empty() {
            return Ok(());
        }
        // A write to a page for which there is no memory would cause a SIGBUS.
        self.populate_for_io(range)?;
        self.zero_in_place(range)?;
        self.resident.set_resident(Self::pages_of(range));
        self.note_zeroed(range);
        Ok(())
    }

    /// The error of a discard that would take pages from devices.
    pub(crate) fn banned(&self, range: &Range<u64>, reason: &'static str) -> AccessError {
        let (zone, Range { start, end }) = (self.zone_id().to_owned(), range.clone());
        AccessError::Banned { zone, start, end, reason }
    }

    /// Forgets which pages the guest has given back, as another guest starts in the same memory.
    pub(crate) fn forget_discards(&self) {
        self.discarded.claim_range(0..self.len_pages());
    }

    fn note_zeroed(&self, range: &Range<u64>) {
        self.zero.set_zero(Self::pages_of(range));
        // After the pages hold zeros, so that a migration that takes this bit sends no older contents.
        self.device_dirty.mark_dirty(to_usize(range.start), to_usize(range.end - range.start));
    }

    fn discard_shared(&self, range: &Range<u64>) -> io::Result<()> {
        let page = self.page_bytes();
        let start = range.start.next_multiple_of(page);
        let end = range.end - range.end % page;
        if start >= end {
            return self.zero_populated(range);
        }
        match self.punch_hole(&(start..end)) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                self.zero_populated(range)
            }
            Err(error) => Err(error),
            Ok(()) => {
                self.zero_populated(&(range.start..start))?;
                self.zero_populated(&(end..range.end))
            }
        }
    }

    fn punch_hole(&self, range: &Range<u64>) -> io::Result<()> {
        let Some(file) = self.file() else { return Ok(()) };
        let at = libc::off_t::try_from(self.file_offset + range.start).map_err(io::Error::other)?;
        let len = libc::off_t::try_from(range.end - range.start).map_err(io::Error::other)?;
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        loop {
            // SAFETY: takes numbers only; the descriptor is open.
            if unsafe { libc::fallocate(file.as_raw_fd(), mode, at, len) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Zeroes `range` in the pages that it has: nothing is discarded, and no hole is populated. Pages that
    /// were not zero count as written. For memory that may be pinned, or is about to be used.
    ///
    /// # Errors
    /// When the range is not whole pages of the region, or the kernel cannot tell what is populated.
    pub(crate) fn clear_in_place(&self, range: &Range<u64>) -> Result<(), AccessError> {
        self.check_pages(range)?;
        for run in self.populated_runs(range)? {
            self.zero_in_place(&run)?;
            self.device_dirty.mark_dirty(to_usize(run.start), to_usize(run.end - run.start));
        }
        self.zero.set_zero(Self::pages_of(range));
        Ok(())
    }

    /// Zeroes the populated parts of `range`; the others are zero already.
    fn zero_populated(&self, range: &Range<u64>) -> io::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        for run in self.ask_populated(range)? {
            self.zero_in_place(&run).map_err(io::Error::other)?;
        }
        Ok(())
    }

    fn zero_in_place(&self, range: &Range<u64>) -> Result<(), AccessError> {
        const ZEROES: [u8; 4096] = [0; 4096];
        for page in range.clone().step_by(ZEROES.len()) {
            self.io_slice(&(page..page + PAGE_BYTES))?.copy_from(&ZEROES[..]);
        }
        Ok(())
    }
}
