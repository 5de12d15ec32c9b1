// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM's dirty log: which pages of a memory slot the guest wrote. A page is 4 KiB, also on huge pages.
//!
//! Owns reading and clearing it ([`Vm::set_dirty_logging`] switches it on). Must never clear a page that
//! the caller did not name.

use crate::caps::ManualDirtyLog;
use crate::ioctl;
use crate::vm::MemslotError;
use crate::vm::Vm;

impl Vm {
    /// Reads the log of `slot` into `bitmap`: bit n of word w is page 64 w + n of the slot.
    ///
    /// Bits stay set until [`Vm::clear_dirty_log`], unless the host has no manual dirty log
    /// ([`ManualDirtyLog::None`]): then reading clears the whole log.
    ///
    /// # Errors
    /// Those of the kernel, and when the slot is unknown or not logged.
    pub fn dirty_log(&self, slot: u32, bitmap: &mut Vec<u64>) -> Result<(), MemslotError> {
        let slots = self.shared().slots.lock();
        let entry = slots.get(&slot).ok_or(MemslotError::Unknown { slot })?;
        if !entry.config.log_dirty {
            return Err(MemslotError::NotLogged { slot });
        }
        let pages = usize::try_from(entry.pages()).unwrap_or(usize::MAX);
        // SAFETY: `pages` is what the kernel was told for this slot, and the lock keeps it so.
        unsafe { ioctl::get_dirty_log(&self.shared().fd, slot, pages, bitmap) }
            .map_err(|source| MemslotError::Kernel { what: "read the dirty log of", slot, source })
    }

    /// Adds the log of `slot` to the bits in `bitmap`, which grows to the length of the log. Needed where
    /// reading clears the log, and a caller collects the bits of several readings.
    ///
    /// # Errors
    /// Those of [`Vm::dirty_log`].
    pub fn add_dirty_log(&self, slot: u32, bitmap: &mut Vec<u64>) -> Result<(), MemslotError> {
        if bitmap.is_empty() {
            return self.dirty_log(slot, bitmap);
        }
        let mut now = Vec::new();
        self.dirty_log(slot, &mut now)?;
        add(&now, bitmap);
        Ok(())
    }

    /// Clears the pages that are set in `bitmap`, whose bit 0 is `first_page`, and arms write
    /// protection for them again. Call it just before the pages are copied.
    ///
    /// `first_page` is a multiple of 64; `pages` is, too, or reaches to the end of the slot.
    ///
    /// # Errors
    /// Those of [`Vm::dirty_log`], and [`MemslotError::BadRange`].
    pub fn clear_dirty_log(
        &self,
        slot: u32,
        first_page: u64,
        pages: u32,
        bitmap: &[u64],
    ) -> Result<(), MemslotError> {
        let slots = self.shared().slots.lock();
        let entry = slots.get(&slot).ok_or(MemslotError::Unknown { slot })?;
        if !entry.config.log_dirty {
            return Err(MemslotError::NotLogged { slot });
        }
        check_clear(slot, entry.pages(), first_page, pages, bitmap.len())?;
        if pages == 0 || self.shared().capabilities.manual_dirty_log == ManualDirtyLog::None {
            return Ok(());
        }
        ioctl::clear_dirty_log(&self.shared().fd, slot, first_page, pages, bitmap)
            .map_err(|source| MemslotError::Kernel { what: "clear the dirty log of", slot, source })
    }
}

/// Adds the bits of `now` to `bitmap`, which grows to the same length.
fn add(now: &[u64], bitmap: &mut Vec<u64>) {
    if bitmap.len() < now.len() {
        bitmap.resize(now.len(), 0);
    }
    for (word, bits) in bitmap.iter_mut().zip(now) {
        *word |= bits;
    }
}

/// Checks the conditions of `KVM_CLEAR_DIRTY_LOG`, and that the bitmap covers the range.
fn check_clear(
    slot: u32,
    slot_pages: u64,
    first_page: u64,
    pages: u32,
    bitmap_words: usize,
) -> Result<(), MemslotError> {
    let count = u64::from(pages);
    let words = u64::try_from(bitmap_words).unwrap_or(u64::MAX);
    let fits = first_page
        .checked_add(count)
        .is_some_and(|end| end <= slot_pages && (count.is_multiple_of(64) || end == slot_pages));
    if fits && first_page.is_multiple_of(64) && words >= count.div_ceil(64) {
        Ok(())
    } else {
        Err(MemslotError::BadRange { slot, slot_pages, first_page, pages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_readings_found_is_all_noted() {
        let mut noted = vec![1 << 5];
        add(&[1 << 7, 1 << 6], &mut noted);
        add(&[1 << 8], &mut noted);
        assert_eq!(noted, [1 << 5 | 1 << 7 | 1 << 8, 1 << 6]);
    }

    #[test]
    fn ranges_that_the_kernel_would_refuse_are_refused() {
        for (first, pages, words) in [
            (1, 64, 1),
            (0, 63, 1),
            (0, 128, 1),
            (192, 64, 1),
            (256, 64, 1),
            (u64::MAX - 63, 64, 1),
        ] {
            assert!(check_clear(0, 200, first, pages, words).is_err(), "{first} {pages}");
        }
        for (first, pages, words) in [(0, 200, 4), (0, 64, 1), (128, 72, 2), (192, 8, 1)] {
            assert!(check_clear(0, 200, first, pages, words).is_ok(), "{first} {pages}");
        }
    }
}
