// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The dirty log as its readers see it.
//!
//! Owns the trait between the VM and the code that copies its memory. Must never know which that is.

use crate::memslots::MemslotError;

/// Tells which pages of a memory slot the guest wrote. A page is 4 KiB, also on huge pages.
pub trait DirtyLogSource: Send + Sync {
    /// Reads the log of `slot` into `bitmap`: bit n of word w is page 64 w + n of the slot.
    ///
    /// Bits stay set until [`DirtyLogSource::clear_dirty_log`], unless the host has no manual
    /// dirty log ([`crate::ManualDirtyLog::None`]): then reading clears the whole log.
    fn dirty_log(&self, slot: u32, bitmap: &mut Vec<u64>) -> Result<(), MemslotError>;

    /// Adds the log of `slot` to the bits that are in `bitmap` already, which grows to the length of
    /// the log. A reader that keeps pages noted between two readings needs this: where reading clears
    /// the log, what an earlier reading found is nowhere else.
    fn add_dirty_log(&self, slot: u32, bitmap: &mut Vec<u64>) -> Result<(), MemslotError> {
        if bitmap.is_empty() {
            return self.dirty_log(slot, bitmap);
        }
        let mut now = Vec::new();
        self.dirty_log(slot, &mut now)?;
        if bitmap.len() < now.len() {
            bitmap.resize(now.len(), 0);
        }
        for (word, bits) in bitmap.iter_mut().zip(now) {
            *word |= bits;
        }
        Ok(())
    }

    /// Clears the pages that are set in `bitmap`, whose bit 0 is `first_page`, and arms write
    /// protection for them again. Call it just before the pages are copied.
    ///
    /// `first_page` is a multiple of 64; `pages` is, too, or reaches to the end of the slot.
    fn clear_dirty_log(
        &self,
        slot: u32,
        first_page: u64,
        pages: u32,
        bitmap: &[u64],
    ) -> Result<(), MemslotError>;
}
