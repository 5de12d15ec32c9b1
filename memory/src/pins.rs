// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interface to memory pinned for passed-through devices, and to its unpinning before a discard.
//!
//! Owns the contract between code that discards memory and code that has pinned it. A device does not know
//! what the guest does with its pages, so pinned memory may be discarded only if the guest promises to notify
//! the host before it uses the memory again: only then can it be pinned anew in time. Must
//! never discard memory of a guest without that promise, such as one that reports free pages.

use std::fmt;
use std::ops::Range;

use crate::discards;
use crate::region::RamRegion;

/// Pins guest memory for devices. Ranges are bytes of a region.
pub trait Pins: Send + Sync {
    /// Granularity of unpinning in a region: memory that was pinned as a unit is unpinned as a unit, and
    /// begins at a multiple of this.
    fn grain_bytes(&self, region: &RamRegion) -> u64;
    /// Unpins what it can of `range`; returns the parts, in order. Devices do not reach them any more when
    /// this returns.
    fn unpin(&self, region: &RamRegion, range: &Range<u64>) -> Vec<Range<u64>>;
    /// Pins all unpinned memory again that overlaps `range`. When this returns, devices reach it, or
    /// permanently reach nothing at all.
    fn repin(&self, region: &RamRegion, range: &Range<u64>);
    /// Pins `range`, which is populated and of which nothing is pinned. Devices reach it when this returns.
    ///
    /// # Errors
    /// Why it cannot be pinned; then nothing of it is.
    fn pin(
        &self,
        region: &RamRegion,
        range: &Range<u64>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

/// Keeps pages of guest memory from being discarded, except those that its pins unpin first.
pub type DiscardBan = discards::DiscardBan<dyn Pins>;

impl fmt::Debug for dyn Pins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pins")
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;
    use crate::{GuestRam, PAGE_BYTES, RamConfig, RamLayout, ZoneSpec};

    const MIB: u64 = 1 << 20;

    /// Unpins in units of 1 MiB.
    #[derive(Default)]
    struct Fake {
        gone: Mutex<Vec<Range<u64>>>,
        back: Mutex<Vec<Range<u64>>>,
    }

    impl Pins for Fake {
        fn grain_bytes(&self, _region: &RamRegion) -> u64 {
            MIB
        }

        fn unpin(&self, _region: &RamRegion, range: &Range<u64>) -> Vec<Range<u64>> {
            let whole = range.start.next_multiple_of(MIB)..range.end / MIB * MIB;
            let parts: Vec<_> = Some(whole).filter(|whole| !whole.is_empty()).into_iter().collect();
            self.gone.lock().extend(parts.clone());
            parts
        }

        fn repin(&self, _region: &RamRegion, range: &Range<u64>) {
            self.back.lock().push(range.clone());
        }

        fn pin(
            &self,
            _region: &RamRegion,
            _range: &Range<u64>,
        ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            Ok(())
        }
    }

    fn ram() -> GuestRam {
        let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("a", 4 * MIB) }];
        GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap()
    }

    #[test]
    fn pinned_memory_goes_in_whole_units_and_only_for_a_guest_that_will_ask() {
        let (ram, pins) = (ram(), Arc::new(Fake::default()));
        let region = Arc::clone(&ram.regions()[0]);
        assert_eq!(ram.discard_unit_bytes(&region), PAGE_BYTES);
        let ban = ram.ban_discards("a test");
        assert_eq!(ram.discard_unpinned(0..2 * MIB).deferred_bytes, 2 * MIB);
        ban.except_unpinned(pins.clone());
        assert_eq!(ram.discard_unit_bytes(&region), MIB);
        let discarded = ram.discard(0..2 * MIB);
        assert_eq!(
            (discarded.len_bytes(), discarded.deferred_bytes),
            (0, 2 * MIB),
            "it need not ask"
        );
        let discarded = ram.discard_unpinned(MIB / 2..3 * MIB - PAGE_BYTES);
        assert_eq!(discarded.ranges, [Range { start: MIB, end: 2 * MIB }]);
        assert_eq!(discarded.deferred_bytes, 3 * MIB / 2 - PAGE_BYTES);
        assert_eq!(*pins.gone.lock(), discarded.ranges);
        ram.repin(&(MIB..MIB + PAGE_BYTES));
        ram.repin(&(4 * MIB..u64::MAX));
        assert_eq!(*pins.back.lock(), [Range { start: MIB, end: MIB + PAGE_BYTES }]);
    }

    #[test]
    fn another_ban_keeps_all_of_it() {
        let (ram, pins) = (ram(), Arc::new(Fake::default()));
        let first = ram.ban_discards("a test");
        first.except_unpinned(pins.clone());
        let second = ram.ban_discards("a test");
        assert_eq!(ram.discard_unpinned(0..MIB).deferred_bytes, MIB);
        // What was unpinned before the second began is pinned again for the first.
        ram.repin(&(2 * MIB..3 * MIB));
        assert_eq!(*pins.back.lock(), [Range { start: 2 * MIB, end: 3 * MIB }]);
        drop(second);
        assert_eq!(ram.discard_unpinned(0..MIB).len_bytes(), MIB);
        drop(first);
        assert_eq!(ram.discard(MIB..2 * MIB).len_bytes(), MIB);
        assert_eq!(pins.gone.lock().len(), 1, "no holder is asked without a ban");
    }
}
