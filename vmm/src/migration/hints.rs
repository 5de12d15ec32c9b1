// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Free page hints of the guest's balloon, in the form that the migration uses.
//!
//! Owns the adaption of maps of regions to words; region indexes are the same on both sides.

use std::ops::Range;
use std::time::Duration;

use vm_migration::vm::FreePageHints;

/// The free page hints of a machine's balloon.
pub struct MachineHints(pub(super) devices::virtio::balloon::FreePageHints);

impl FreePageHints for MachineHints {
    fn wait(&self, limit: Duration) -> bool {
        self.0.wait(limit)
    }

    fn named(&self) -> u64 {
        self.0.named_bytes()
    }

    fn free_words(&self, region: usize, pages: Range<u64>, words: &mut [u64]) {
        words.fill(0);
        if let Some(map) = self.0.maps().get(region) {
            for (word, free) in words.iter_mut().zip(map.to_words(pages)) {
                *word = free;
            }
        }
    }
}
