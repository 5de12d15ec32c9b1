// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Stand-ins for KVM in tests of the crates above.
//!
//! Owns a dirty log in plain memory with the rules of the real one. Must never be more lenient
//! than KVM.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::dirty::DirtyLogSource;
use crate::memslots::{MemslotError, check_clear};

/// A dirty log that tests write to.
#[derive(Debug, Default)]
pub struct FakeDirtyLog {
    /// Page count and bits of each slot.
    slots: Mutex<BTreeMap<u32, (u64, Vec<u64>)>>,
    reading_clears: bool,
}

impl FakeDirtyLog {
    /// The log of a host without a manual dirty log: reading it clears it.
    pub fn cleared_by_reading() -> Self {
        Self { reading_clears: true, ..Self::default() }
    }

    /// Adds a slot of `pages` pages, all dirty, as KVM does with an initially set log.
    pub fn add_slot(&self, slot: u32, pages: u32) {
        let mut bits = vec![u64::MAX; usize::try_from(pages).map_or(0, |pages| pages.div_ceil(64))];
        if let Some(last) = bits.last_mut()
            && !pages.is_multiple_of(64)
        {
            *last = (1 << (pages % 64)) - 1;
        }
        self.lock().insert(slot, (u64::from(pages), bits));
    }

    /// Marks a page as the guest's write would.
    pub fn mark(&self, slot: u32, page: u64) {
        let mut slots = self.lock();
        let word = usize::try_from(page / 64).ok();
        let bits = slots.get_mut(&slot).filter(|(pages, _)| page < *pages).map(|(_, bits)| bits);
        if let Some(word) = word.and_then(|word| bits?.get_mut(word)) {
            *word |= 1 << (page % 64);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, (u64, Vec<u64>)>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DirtyLogSource for FakeDirtyLog {
    fn dirty_log(&self, slot: u32, bitmap: &mut Vec<u64>) -> Result<(), MemslotError> {
        let mut slots = self.lock();
        let (_, bits) = slots.get_mut(&slot).ok_or(MemslotError::Unknown { slot })?;
        bitmap.clone_from(bits);
        if self.reading_clears {
            bits.fill(0);
        }
        Ok(())
    }

    fn clear_dirty_log(
        &self,
        slot: u32,
        first_page: u64,
        pages: u32,
        bitmap: &[u64],
    ) -> Result<(), MemslotError> {
        let mut slots = self.lock();
        let (slot_pages, bits) = slots.get_mut(&slot).ok_or(MemslotError::Unknown { slot })?;
        check_clear(slot, *slot_pages, first_page, pages, bitmap.len())?;
        let first_word = usize::try_from(first_page / 64).unwrap_or(usize::MAX);
        let words = usize::try_from(pages.div_ceil(64)).unwrap_or(usize::MAX);
        for (bits, clear) in bits.iter_mut().skip(first_word).zip(bitmap.iter().take(words)) {
            *bits &= !clear;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    #[test]
    fn clearing_takes_only_the_given_bits_of_the_given_range() {
        let log = FakeDirtyLog::default();
        log.add_slot(3, 130);
        log.clear_dirty_log(3, 64, 66, &[0b11, 0b01]).unwrap();
        let mut bits = Vec::new();
        log.dirty_log(3, &mut bits).unwrap();
        assert_eq!(bits, [u64::MAX, u64::MAX - 3, 0b10]);
        log.mark(3, 65);
        log.mark(3, 130);
        log.dirty_log(3, &mut bits).unwrap();
        assert_eq!(bits, [u64::MAX, u64::MAX - 1, 0b10]);
    }

    #[test]
    fn what_two_readings_found_is_all_noted() {
        for log in [FakeDirtyLog::default(), FakeDirtyLog::cleared_by_reading()] {
            log.add_slot(0, 128);
            let mut noted = Vec::new();
            log.add_dirty_log(0, &mut noted).unwrap();
            assert_eq!(noted, [u64::MAX; 2]);
            log.clear_dirty_log(0, 0, 128, &noted).unwrap();
            noted.fill(0);
            log.mark(0, 5);
            log.add_dirty_log(0, &mut noted).unwrap();
            log.mark(0, 70);
            log.add_dirty_log(0, &mut noted).unwrap();
            assert_eq!(noted, [1 << 5, 1 << 6]);
        }
    }

    #[test]
    fn ranges_that_the_kernel_would_refuse_are_refused() {
        let log = FakeDirtyLog::default();
        log.add_slot(0, 200);
        for (first, pages, words) in
            [(1, 64, 1), (0, 63, 1), (0, 128, 1), (192, 64, 1), (256, 64, 1)]
        {
            let bits = vec![0; words];
            assert!(log.clear_dirty_log(0, first, pages, &bits).is_err(), "{first} {pages}");
        }
        assert!(log.clear_dirty_log(1, 0, 64, &[0]).is_err());
    }
}
