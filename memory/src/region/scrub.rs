// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Scrubbing of a region that no guest uses: cleared with non-temporal stores, and verified to the last byte.
//!
//! Owns what a pool of zeroed memory does with its slots. Both steps work on the `main` mapping, so that
//! no second one is made. Must never be used on memory of a guest that may run.

use std::ops::Range;

use super::{AccessError, RamRegion};
use crate::zero::{is_zero_volatile, zero_streaming};

impl RamRegion {
    /// Zeroes `range` in place with non-temporal stores. It must be populated: a hole would be populated by a
    /// fault, which ends the process when there is no memory.
    ///
    /// # Errors
    /// When the range is not whole pages of the region.
    pub fn clear(&self, range: &Range<u64>) -> Result<(), AccessError> {
        self.check_pages(range)?;
        let slice = self.main_slice(range)?;
        let guard = slice.ptr_guard_mut();
        // SAFETY: whole pages, so aligned and a multiple of 64, inside a mapping that `slice`
        // borrows; guest memory is only ever reached through raw pointers.
        unsafe { zero_streaming(guard.as_ptr(), guard.len()) };
        Ok(())
    }

    /// True when all of `range` is zero now.
    ///
    /// # Errors
    /// When the range is not whole pages of the region.
    pub fn is_clear(&self, range: &Range<u64>) -> Result<bool, AccessError> {
        self.check_pages(range)?;
        let slice = self.main_slice(range)?;
        let guard = slice.ptr_guard();
        // SAFETY: whole pages inside a mapping that `slice` borrows.
        Ok(unsafe { is_zero_volatile(guard.as_ptr().cast(), guard.len()) })
    }
}
