// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Plugging and unplugging of memory blocks while the guest runs (virtio-mem).
//!
//! A zone with [`ZoneSpec::block_bytes`](crate::ZoneSpec) exists from the beginning: its addresses, its
//! mapping, its slot. It has no pages until a device plugs blocks in, and those of an unplugged
//! block are returned to the host. Owns which blocks the guest has, and the order in which a block is plugged
//! and unplugged: pages before passed-through devices reach them, devices before the guest is told.
//! Must never be relied on to keep a guest from touching a block that it does not have: such an access costs
//! the host a page, and its contents are lost to the guest.

use std::ops::Range;
use std::sync::Arc;

use crate::available::{self, InsufficientMemory, MemoryDemand};
use crate::pins::Pins;
use crate::plugged::Plugged;
use crate::populate::PopulateError;
use crate::ram::GuestRam;
use crate::region::{AccessError, RamRegion};

/// Why a block could not be plugged or unplugged.
#[derive(Debug, thiserror::Error)]
pub enum PlugError {
    /// Not blocks of a region, or not in the right state.
    #[error("addresses {start:#x}..{end:#x} are not blocks that could be {what}")]
    NotBlocks {
        /// First address.
        start: u64,
        /// First address after the range.
        end: u64,
        /// Plugged or unplugged.
        what: &'static str,
    },
    /// Memory must not change at the moment; to be retried.
    #[error("memory cannot come or go now: {reason}")]
    Busy {
        /// The reasons of the bans.
        reason: &'static str,
    },
    /// The host has no pages.
    #[error(transparent)]
    NoPages(#[from] PopulateError),
    /// Old contents of the block could not be cleared.
    #[error("the block at {gpa:#x} cannot be cleared")]
    NotCleared {
        /// The block.
        gpa: u64,
        /// Why.
        #[source]
        source: AccessError,
    },
    /// The block could not be mapped for passed-through devices.
    #[error("the block at {gpa:#x} cannot be mapped for passed-through devices")]
    NotMapped {
        /// The block.
        gpa: u64,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl RamRegion {
    /// Length of a block, if the region is plugged in blocks.
    pub fn block_bytes(&self) -> Option<u64> {
        self.plugged().map(|plugged| plugged.block_bytes)
    }

    /// Bytes that the guest may use now.
    pub fn usable_bytes(&self) -> u64 {
        let blocks = |plugged: &Plugged| plugged.count() * plugged.block_bytes;
        self.plugged().map_or(self.len_bytes(), blocks)
    }

    /// The bytes of the region that the guest may use now, as runs in order.
    pub fn usable_runs(&self) -> Vec<Range<u64>> {
        match self.plugged() {
            None => std::iter::once(0..self.len_bytes()).collect(),
            Some(plugged) => plugged.blocks().runs().map(|run| plugged.range_of(&run)).collect(),
        }
    }

    /// Whether the guest may use some, and whether all, of `range`, in bytes of the region.
    pub fn is_usable(&self, range: &Range<u64>) -> (bool, bool) {
        let Some(plugged) = self.plugged() else { return (true, true) };
        let blocks = range.start / plugged.block_bytes..range.end.div_ceil(plugged.block_bytes);
        let count = plugged.blocks().count_range(blocks.clone());
        (count > 0, count == blocks.end.saturating_sub(blocks.start))
    }

    /// Sets exactly these blocks as plugged, given as runs of bytes of the region, when a saved state is
    /// restored. No page is populated or discarded.
    ///
    /// # Errors
    /// When they are not blocks of this region.
    pub fn set_usable(&self, runs: &[Range<u64>]) -> Result<(), PlugError> {
        let blocks = runs.iter().map(|run| self.blocks_of(run)).collect::<Option<Vec<_>>>();
        let (Some(plugged), Some(blocks)) = (self.plugged(), blocks) else {
            let all = self.gpa()..self.gpa() + self.len_bytes();
            return Err(not_blocks(&all, "plugged"));
        };
        plugged.unplug(0..plugged.blocks().len());
        for run in blocks {
            plugged.plug(run);
        }
        Ok(())
    }

    /// The numbers of the blocks in `range`; `None` if it is not whole blocks.
    fn blocks_of(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let block = self.block_bytes()?;
        let whole = range.start.is_multiple_of(block) && range.end.is_multiple_of(block);
        let inside = range.start < range.end && range.end <= self.len_bytes();
        (whole && inside).then(|| range.start / block..range.end / block)
    }
}

fn not_blocks(gpa: &Range<u64>, what: &'static str) -> PlugError {
    PlugError::NotBlocks { start: gpa.start, end: gpa.end, what }
}

/// Bytes returned between two looks at whether that is to end: a fraction of a second.
const RETURN_STEP_BYTES: u64 = 1 << 30;

/// Only one thread plugs and unplugs: that of the device that owns the region.
impl GuestRam {
    /// Plugs the blocks of the guest physical range `gpa`, none of which is plugged. Their pages are zero.
    /// When this returns, passed-through devices reach them.
    ///
    /// # Errors
    /// When they are not such blocks, or the host has no pages for them; then nothing has changed.
    pub fn plug(&self, gpa: &Range<u64>) -> Result<(), PlugError> {
        let (region, plugged, blocks) = self.blocks_at(gpa, "plugged")?;
        if plugged.blocks().any(blocks.clone()) {
            return Err(not_blocks(gpa, "plugged"));
        }
        let bytes = plugged.range_of(&blocks);
        let pins = self.pins_or_busy()?;
        // Contents that arrive later would replace the zeros.
        if region.resident().absent_runs(RamRegion::pages_of(&bytes)).next().is_some() {
            return Err(PlugError::Busy { reason: "the contents of the block are still missing" });
        }
        // Pages may have stayed at the unplug, or the guest has written to blocks that it did not have.
        region
            .clear_in_place(&bytes)
            .map_err(|source| PlugError::NotCleared { gpa: gpa.start, source })?;
        if region.is_hugetlb() || region.spec().reserve || pins.is_some() {
            // A lack of memory would otherwise be a SIGBUS for the guest later.
            let populated = region.populate(&bytes, false, &|| true, |_| Ok(()));
            populated.inspect_err(|_: &PopulateError| drop(self.discard_unpinned(gpa.clone())))?;
        }
        // A caller that bans discards after this maps all memory that the guest then has.
        let noted = self.discards().unless_banned(pins.is_some(), || {
            plugged.unreturned.claim_range(blocks.clone());
            plugged.plug(blocks.clone());
        });
        if let Err(reason) = noted {
            self.discard_unpinned(gpa.clone());
            return Err(PlugError::Busy { reason });
        }
        if let Some(pins) = pins
            && let Err(source) = pins.pin(region, &bytes)
        {
            plugged.unplug(blocks);
            self.discard_unpinned(gpa.clone());
            return Err(PlugError::NotMapped { gpa: gpa.start, source });
        }
        Ok(())
    }

    /// Checks that the host has what [`plug`](Self::plug) would populate of `gpa`, which it does without a look: once the
    /// host has no memory left, the kernel ends a process of its choice. To be called where `/proc` may be read.
    ///
    /// # Errors
    /// The limit that is too low.
    pub fn check_plug(&self, gpa: &Range<u64>) -> Result<(), InsufficientMemory> {
        let Ok((region, plugged, blocks)) = self.blocks_at(gpa, "plugged") else { return Ok(()) };
        // That nothing can be plugged now, plugging says.
        let is_pinned = matches!(self.pins_or_busy(), Ok(Some(_)));
        if !region.takes_host_memory() || !(region.spec().reserve || is_pinned) {
            return Ok(());
        }
        let range = plugged.range_of(&blocks);
        let bytes = range.end.saturating_sub(range.start);
        available::check(&[MemoryDemand { bytes, node: region.spec().host_numa_node }])
    }

    /// Unplugs the blocks of the guest physical range `gpa`, all of which are plugged, and returns their
    /// pages to the host. No passed-through device reaches them when this returns.
    ///
    /// # Errors
    /// When they are not such blocks, or devices cannot be unmapped from them now; then nothing has changed.
    pub fn unplug(&self, gpa: &Range<u64>) -> Result<(), PlugError> {
        let (_, plugged, blocks) = self.blocks_at(gpa, "unplugged")?;
        if plugged.blocks().count_range(blocks.clone()) != blocks.end - blocks.start {
            return Err(not_blocks(gpa, "unplugged"));
        }
        let pins = self.pins_or_busy()?;
        let noted = self.discards().unless_banned(pins.is_some(), || {
            plugged.unplug(blocks.clone());
            plugged.unreturned.set_range(blocks.clone());
        });
        noted.map_err(|reason| PlugError::Busy { reason })?;
        self.return_pages(plugged, gpa, blocks);
        Ok(())
    }

    /// Unplugs all blocks, as no guest runs, and returns their pages to the host; those that are left when
    /// cancelled are cleared before they are plugged again.
    pub(crate) fn unplug_all(&self, is_cancelled: &dyn Fn() -> bool) {
        for region in self.regions() {
            let Some(plugged) = region.plugged() else { continue };
            let runs: Vec<_> = plugged.blocks().runs().collect();
            for run in runs {
                plugged.unplug(run.clone());
                plugged.unreturned.set_range(run);
            }
            let mut from = Some(0);
            while let Some(at) = from.filter(|_| !is_cancelled()) {
                from = self.retry_unplugged(region, at, RETURN_STEP_BYTES);
            }
        }
    }

    /// Returns the pages of unplugged blocks to the host.
    fn return_pages(&self, plugged: &Plugged, gpa: &Range<u64>, blocks: Range<u64>) {
        let discarded = self.discard_unpinned(gpa.clone());
        if discarded.covers(gpa) {
            plugged.unreturned.claim_range(blocks);
        } else if let Some(error) = discarded.error {
            // The guest does not miss the memory, but the host does.
            log::warn!("unplugged memory could not be discarded: {error}");
        }
    }

    /// Retries to return the remaining pages of unplugged blocks of `region` to the host, from block `from`
    /// on: after contents that were to arrive are here, or discards are allowed again. At most `budget_bytes`
    /// or one block per call; returns the block to continue with, if there are more.
    pub fn retry_unplugged(&self, region: &RamRegion, from: u64, budget_bytes: u64) -> Option<u64> {
        let plugged = region.plugged()?;
        let all = plugged.unreturned.len();
        let run = plugged.unreturned.runs_in(from..all).next()?;
        let end = run.end.min(run.start + (budget_bytes / plugged.block_bytes).max(1));
        let bytes = plugged.range_of(&(run.start..end));
        let gpa = region.gpa() + bytes.start..region.gpa() + bytes.end;
        self.return_pages(plugged, &gpa, run.start..end);
        (end < all).then_some(end)
    }

    /// What unpins memory that is to be discarded, if anything is pinned; an error where discards are banned.
    fn pins_or_busy(&self) -> Result<Option<Arc<dyn Pins>>, PlugError> {
        match (self.discards_banned(), self.pins()) {
            (Some(reason), None) => Err(PlugError::Busy { reason }),
            (_, pins) => Ok(pins),
        }
    }

    fn blocks_at(
        &self,
        gpa: &Range<u64>,
        what: &'static str,
    ) -> Result<(&RamRegion, &Plugged, Range<u64>), PlugError> {
        let found = || {
            let (region, start) = self.region_at(gpa.start)?;
            let end = start.checked_add(gpa.end.checked_sub(gpa.start)?)?;
            Some((&**region, region.plugged()?, region.blocks_of(&(start..end))?))
        };
        found().ok_or_else(|| not_blocks(gpa, what))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use parking_lot::Mutex;
    use proptest::prelude::*;

    use super::*;
    use crate::{RamConfig, RamLayout, ZoneSpec};

    const MIB: u64 = 1 << 20;
    const BLOCK: u64 = 2 * MIB;
    const START: u64 = 4 << 30;

    fn ram() -> GuestRam {
        let later =
            ZoneSpec { block_bytes: Some(BLOCK), shared: true, ..ZoneSpec::new("l", 8 * BLOCK) };
        let zones = vec![ZoneSpec::new("a", 4 * MIB), later];
        GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap()
    }

    fn blocks(first: u64, count: u64) -> Range<u64> {
        START + first * BLOCK..START + (first + count) * BLOCK
    }

    #[test]
    fn blocks_come_and_go_with_their_pages() {
        let ram = ram();
        let region = &ram.regions()[1];
        assert_eq!((region.gpa(), region.usable_bytes(), ram.total_bytes()), (START, 0, 4 * MIB));
        ram.plug(&blocks(1, 2)).unwrap();
        ram.plug(&blocks(4, 1)).unwrap();
        assert_eq!(region.usable_runs(), [BLOCK..3 * BLOCK, 4 * BLOCK..5 * BLOCK]);
        assert_eq!(region.is_usable(&(0..2 * BLOCK)), (true, false));
        assert_eq!(region.is_usable(&(BLOCK..3 * BLOCK)), (true, true));
        assert_eq!(region.is_usable(&(5 * BLOCK..6 * BLOCK)), (false, false));
        region.write_range(BLOCK, &[7; 4096]).unwrap();
        ram.unplug(&blocks(1, 1)).unwrap();
        assert_eq!(ram.total_bytes(), 4 * MIB + 2 * BLOCK);
        assert!(region.populated_runs(&(0..region.len_bytes())).unwrap().is_empty());
        ram.plug(&blocks(1, 1)).unwrap();
        assert!(region.page_is_zero(BLOCK / 4096).unwrap());
    }

    #[test]
    fn a_block_unplugged_while_it_arrives_goes_to_the_host_when_it_is_here() {
        let ram = ram();
        let region = &ram.regions()[1];
        ram.plug(&blocks(1, 2)).unwrap();
        let pages = RamRegion::pages_of(&(BLOCK..2 * BLOCK));
        let arriving = pages.start + 3..pages.start + 5;
        region.resident().set_absent(arriving.clone());
        ram.unplug(&blocks(1, 2)).unwrap();
        // The contents arrive nevertheless, and the guest must not see them in a block that is plugged anew.
        region.write_range(arriving.start * 4096, &[7; 8192]).unwrap();
        assert!(matches!(ram.plug(&blocks(1, 1)), Err(PlugError::Busy { .. })));
        let retry = || {
            let mut from = Some(0);
            while let Some(at) = from {
                from = ram.retry_unplugged(region, at, BLOCK);
            }
        };
        retry();
        let populated = || region.populated_runs(&(0..region.len_bytes())).unwrap();
        assert!(!populated().is_empty(), "what is still to arrive is left alone");
        region.resident().set_resident(arriving);
        retry();
        assert_eq!(populated(), []);
        ram.plug(&blocks(1, 1)).unwrap();
        assert!(pages.clone().all(|page| region.page_is_zero(page).unwrap()));
    }

    #[test]
    fn a_block_is_zero_whatever_was_left_in_it() {
        let ram = ram();
        let region = &ram.regions()[1];
        // Written by a guest that does not have the block, while nothing may be discarded.
        region.write_range(BLOCK + 4096, &[7; 4096]).unwrap();
        let ban = ram.ban_discards("a test");
        ban.except_unpinned(Arc::new(Fake::default()));
        ram.track_device_writes(true);
        ram.plug(&blocks(1, 1)).unwrap();
        assert!((0..512).all(|page| region.page_is_zero(512 + page).unwrap()));
        let dirty = ram.take_device_dirty(START + BLOCK, BLOCK).unwrap();
        assert_eq!(dirty[0] & 0b11, 0b10, "a migration sends it anew");
    }

    #[test]
    fn only_blocks_that_fit_are_plugged_and_unplugged() {
        let ram = ram();
        ram.plug(&blocks(3, 1)).unwrap();
        for bad in [blocks(2, 2), blocks(7, 2), 0..BLOCK, blocks(2, 0), START + 4096..START + BLOCK]
        {
            let refused = ram.plug(&bad);
            assert!(matches!(refused, Err(PlugError::NotBlocks { .. })), "{bad:x?}: {refused:?}");
        }
        for bad in [blocks(2, 2), blocks(0, 1), 0..BLOCK, blocks(3, 0)] {
            assert!(matches!(ram.unplug(&bad), Err(PlugError::NotBlocks { .. })), "{bad:x?}");
        }
        assert!(ram.regions()[1].usable_runs().iter().eq([&(3 * BLOCK..4 * BLOCK)]));
    }

    #[test]
    fn a_saved_state_is_checked() {
        let ram = ram();
        let region = &ram.regions()[1];
        region.set_usable(&[0..BLOCK, 2 * BLOCK..4 * BLOCK]).unwrap();
        assert_eq!(region.usable_bytes(), 3 * BLOCK);
        for bad in [1..BLOCK, 7 * BLOCK..9 * BLOCK, BLOCK..BLOCK] {
            assert!(region.set_usable(std::slice::from_ref(&bad)).is_err(), "{bad:x?}");
        }
        assert_eq!(region.usable_bytes(), 3 * BLOCK);
        assert!(ram.regions()[0].set_usable(&[]).is_err());
    }

    /// Records its calls, and refuses to pin one block.
    #[derive(Default)]
    struct Fake(Mutex<Vec<(&'static str, Range<u64>)>>);

    impl Pins for Fake {
        fn grain_bytes(&self, _region: &RamRegion) -> u64 {
            BLOCK
        }

        fn unpin(&self, _region: &RamRegion, range: &Range<u64>) -> Vec<Range<u64>> {
            self.0.lock().push(("unpin", range.clone()));
            vec![range.clone()]
        }

        fn repin(&self, _region: &RamRegion, _range: &Range<u64>) {}

        fn pin(
            &self,
            _region: &RamRegion,
            range: &Range<u64>,
        ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            if range.contains(&(5 * BLOCK)) {
                return Err("the limit".into());
            }
            self.0.lock().push(("pin", range.clone()));
            Ok(())
        }
    }

    #[test]
    fn devices_reach_a_block_before_the_guest_has_it_and_until_it_goes() {
        let ram = ram();
        let ban = ram.ban_discards("a test");
        assert!(matches!(ram.plug(&blocks(0, 1)), Err(PlugError::Busy { .. })));
        let pins = Arc::new(Fake::default());
        ban.except_unpinned(Arc::<Fake>::clone(&pins));
        ram.plug(&blocks(0, 1)).unwrap();
        let region = &ram.regions()[1];
        assert!(region.populated_runs(&(0..4 * BLOCK)).unwrap().iter().eq([&(0..BLOCK)]));
        assert!(matches!(ram.plug(&blocks(5, 1)), Err(PlugError::NotMapped { .. })));
        assert!(region.usable_runs().iter().eq([&(0..BLOCK)]));
        ram.unplug(&blocks(0, 1)).unwrap();
        assert!(region.populated_runs(&(0..8 * BLOCK)).unwrap().is_empty());
        let asked = pins.0.lock().clone();
        let failed = 5 * BLOCK..6 * BLOCK;
        assert_eq!(asked, [("pin", 0..BLOCK), ("unpin", failed), ("unpin", 0..BLOCK)]);
    }

    #[test]
    fn what_would_be_populated_has_to_be_there() {
        const LEN_BYTES: u64 = 8 << 40;
        let with = |later: ZoneSpec| {
            let later = ZoneSpec { block_bytes: Some(BLOCK), shared: true, ..later };
            let zones = vec![ZoneSpec::new("a", 4 * MIB), later];
            GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap()
        };
        let ram = with(ZoneSpec::new("l", LEN_BYTES));
        let all = START..START + LEN_BYTES;
        ram.check_plug(&all).unwrap();
        let ban = ram.ban_discards("a test");
        ban.except_unpinned(Arc::new(Fake::default()));
        let refused = ram.check_plug(&all).unwrap_err();
        assert_eq!(refused.needed_bytes, LEN_BYTES);
        ram.check_plug(&blocks(0, 1)).unwrap();
        // That they are no blocks, plugging says.
        ram.check_plug(&(START + 1..u64::MAX)).unwrap();
        assert_eq!(ram.regions()[1].usable_bytes(), 0);
    }

    proptest! {
        /// However blocks come and go, and are restored, their number is that of the map.
        #[test]
        fn the_number_of_blocks_is_that_of_the_map(
            steps in prop::collection::vec((0..3_u8, 0..8_u64, 1..4_u64), 1..40),
        ) {
            let ram = ram();
            let region = &ram.regions()[1];
            for (step, first, count) in steps {
                let bytes = first * BLOCK..(first + count) * BLOCK;
                match step {
                    0 => drop(ram.plug(&blocks(first, count))),
                    1 => drop(ram.unplug(&blocks(first, count))),
                    _ => drop(region.set_usable(std::slice::from_ref(&bytes))),
                }
                let in_map: u64 = region.usable_runs().iter().map(|run| run.end - run.start).sum();
                prop_assert_eq!(region.usable_bytes(), in_map);
            }
        }

        #[test]
        fn any_range_is_harmless(start: u64, end: u64, offset in 0..20 * BLOCK, len in 0..20 * BLOCK) {
            let ram = ram();
            for range in [start..end, START + offset..START + offset + len] {
                let plugged = ram.plug(&range).is_ok();
                prop_assert_eq!(ram.unplug(&range).is_ok(), plugged);
                prop_assert_eq!(ram.regions()[1].usable_bytes(), 0);
            }
        }
    }
}
