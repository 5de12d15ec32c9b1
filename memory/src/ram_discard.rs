// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Discarding memory that the guest does not use.
//!
//! Owns which part of a range is discarded: full pages of the backing that are resident. Whether they
//! may be discarded is decided in [`crate::discards`]; what happens to pinned memory that is unpinned
//! in time is in [`crate::pins`]. The map of resident pages excludes
//! pages that are still to arrive: their contents would come back after they were discarded.
//!
//! Guest addresses come from a guest and are not trusted; what is not RAM is left out.

use std::ops::Range;
use std::sync::Arc;

use crate::PAGE_BYTES;
use crate::pins::{DiscardBan, Pins};
use crate::ram::GuestRam;
use crate::region::{AccessError, RamRegion};
use crate::zone_kind::ZoneKind;

/// Most bytes that are discarded under one lock and by one system call: a pause or a ban waits no longer than
/// this takes (64 MiB of 4 KiB pages in a memfd: about 10 ms).
const PIECE_BYTES: u64 = 64 << 20;

/// Outcome of a discard.
#[derive(Debug, Default)]
pub struct Discarded {
    /// Guest physical ranges that were discarded and read as zero, in order.
    pub ranges: Vec<Range<u64>>,
    /// Bytes that may be discarded later, because they are still to arrive or there is a ban.
    pub deferred_bytes: u64,
    /// The first failure. Its range was left unchanged.
    pub error: Option<AccessError>,
}

impl Discarded {
    /// Bytes that were discarded.
    pub fn len_bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// True when all of `range` was discarded.
    pub fn covers(&self, range: &Range<u64>) -> bool {
        let mut at = range.start;
        let first = self.ranges.partition_point(|discarded| discarded.end <= at);
        for discarded in self.ranges.iter().skip(first) {
            if at >= range.end || !discarded.contains(&at) {
                break;
            }
            at = discarded.end;
        }
        at >= range.end
    }

    fn push(&mut self, range: Range<u64>) {
        match self.ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.ranges.push(range),
        }
    }
}

impl GuestRam {
    /// Bans discards until the result is dropped. Discards that were in progress have ended when this
    /// returns, so that memory may be pinned from then on.
    pub fn ban_discards(&self, reason: &'static str) -> DiscardBan {
        self.discards().ban(reason)
    }

    /// The reason of the current ban, if there is one.
    pub fn discards_banned(&self) -> Option<&'static str> {
        self.discards().banned()
    }

    /// What unpins pinned memory, if anything does and no other ban holds.
    pub(crate) fn pins(&self) -> Option<Arc<dyn Pins>> {
        self.discards().pins()
    }

    /// Discards `range` of the region with this index, in both mappings and for every process that shares it:
    /// it reads as zeros, and no page is left unless the backing does not support that. It counts as written
    /// for migrations, and both maps are up to date when this returns.
    ///
    /// # Errors
    /// When there is no such region, the range is not whole pages of it, the kernel refuses, or
    /// ([`AccessError::Banned`]) devices have memory mapped. What was discarded before stays discarded.
    pub fn discard_in_region(&self, index: usize, range: &Range<u64>) -> Result<(), AccessError> {
        let region = self.region(index)?;
        region.check_pages(range)?;
        for piece in pieces(region, range) {
            let _discarding = region.begin_discard(&piece);
            self.discards().decide(|decision| match decision {
                Ok(permit) => region.discard(&piece, &permit),
                Err(reason) => Err(region.banned(&piece, reason)),
            })?;
        }
        Ok(())
    }

    /// Makes `range` of the region with this index read as zeros: discards it like
    /// [`discard_in_region`](Self::discard_in_region), or writes zeros into the pages where devices have
    /// memory mapped, and where all of a region was populated beforehand: whatever the guest has given back of it since,
    /// pages that it has kept are promised to it.
    ///
    /// # Errors
    /// As [`discard_in_region`](Self::discard_in_region), except for a ban; and when the host has no memory
    /// for pages that are to be zeroed.
    pub fn make_zero(&self, index: usize, range: &Range<u64>) -> Result<(), AccessError> {
        let region = self.region(index)?;
        region.check_pages(range)?;
        for piece in pieces(region, range) {
            let _discarding = region.begin_discard(&piece);
            self.discards().decide(|decision| match decision {
                // A page that cannot be written, as it has a hardware error, is replaced.
                Ok(permit) if region.was_prezeroed() => {
                    region.zero_pages(&piece).or_else(|_unwritable| region.discard(&piece, &permit))
                }
                Ok(permit) => region.discard(&piece, &permit),
                Err(_reason) => region.zero_pages(&piece),
            })?;
        }
        Ok(())
    }

    fn region(&self, index: usize) -> Result<&RamRegion, AccessError> {
        let regions = self.regions().len();
        self.regions()
            .get(index)
            .map(|region| &**region)
            .ok_or(AccessError::NoRegion { index, regions })
    }

    /// Discards the memory of the guest physical `range`, unless there is a ban, in both mappings and for all
    /// processes that share it; it reads as zero from then on, and counts as written for migrations. The maps
    /// are up to date when this returns. For memory that may be pinned for devices see
    /// [`discard_unpinned`](Self::discard_unpinned).
    ///
    /// Addresses without RAM, parts of a backing's page, and memory that cannot be discarded (a private
    /// mapping of a file) are left unchanged.
    pub fn discard(&self, range: Range<u64>) -> Discarded {
        self.discard_range(range, false)
    }

    /// `may_unpin`: the guest announces its next use of the memory.
    pub(crate) fn discard_range(&self, range: Range<u64>, may_unpin: bool) -> Discarded {
        let mut discarded = Discarded::default();
        for region in self.regions() {
            let start = range.start.max(region.gpa());
            let end = range.end.min(region.gpa() + region.len_bytes());
            if start >= end || region.kind() == ZoneKind::PrivateFile {
                continue;
            }
            let page = region.page_bytes();
            let start = (start - region.gpa()).next_multiple_of(page);
            let end = (end - region.gpa()) / page * page;
            if start < end {
                self.discard_resident(region, start..end, may_unpin, &mut discarded);
            }
        }
        discarded
    }

    /// `range` is in bytes of the region, whole pages of its backing.
    fn discard_resident(
        &self,
        region: &RamRegion,
        range: Range<u64>,
        may_unpin: bool,
        discarded: &mut Discarded,
    ) {
        let page = region.page_bytes();
        let unit = if may_unpin { self.discard_unit_bytes(region) } else { page };
        let step = PIECE_BYTES.next_multiple_of(unit);
        let mut at = range.start;
        while at < range.end {
            let absent = region.resident().absent_runs(RamRegion::pages_of(&(at..range.end)));
            let absent = absent.into_iter().next().map_or(range.end..range.end, |run| {
                let start = run.start * PAGE_BYTES / page * page;
                start..(run.end * PAGE_BYTES).next_multiple_of(page)
            });
            let here = at..absent.start.max(at).min(range.end);
            let mut piece = here.start;
            while piece < here.end {
                // Units are counted from the start of the region.
                let end = here.end.min((piece + step) / unit * unit);
                self.discard_piece(region, piece..end, may_unpin, discarded);
                piece = end;
            }
            let behind = absent.end.max(here.end).min(range.end);
            discarded.deferred_bytes += behind - here.end;
            at = behind;
        }
    }

    fn discard_piece(
        &self,
        region: &RamRegion,
        piece: Range<u64>,
        may_unpin: bool,
        discarded: &mut Discarded,
    ) {
        discarded.deferred_bytes += piece.end - piece.start;
        // Before the lock of the decision, for which a ban waits.
        let _discarding = region.begin_discard(&piece);
        let unpin = may_unpin.then_some(|pins: &(dyn Pins + 'static)| pins.unpin(region, &piece));
        self.discards().release(&piece, unpin, |parts, permit| {
            for part in parts {
                discarded.deferred_bytes -= part.end - part.start;
                match region.discard(&part, permit) {
                    Ok(()) => discarded.push(region.gpa() + part.start..region.gpa() + part.end),
                    Err(error) => {
                        discarded.error.get_or_insert(error);
                    }
                }
            }
        });
    }
}

// Memory that is pinned for devices.
impl GuestRam {
    /// Like [`discard`](Self::discard), but unpins pinned memory first: for a guest that promises to call for
    /// [`repin`](Self::repin) before it uses the memory again. Pinned memory is discarded in units of
    /// [`discard_unit_bytes`](Self::discard_unit_bytes); the rest is left for another attempt.
    pub fn discard_unpinned(&self, range: Range<u64>) -> Discarded {
        self.discard_range(range, true)
    }

    /// True when memory is pinned for devices and may be discarded nevertheless.
    pub fn can_unpin(&self) -> bool {
        self.pins().is_some()
    }

    /// The unit in which memory of the region is discarded, in bytes from the region's start.
    pub fn discard_unit_bytes(&self, region: &RamRegion) -> u64 {
        let grain = self.pins().map_or(PAGE_BYTES, |pins| pins.grain_bytes(region));
        grain.max(region.page_bytes())
    }

    /// Pins the guest physical `range` again, which the guest is about to use. Devices reach it when this
    /// returns.
    pub fn repin(&self, range: &Range<u64>) {
        let Some(pins) = self.discards().pins_to_restore() else { return };
        for region in self.regions() {
            let start = range.start.max(region.gpa());
            let end = range.end.min(region.gpa().saturating_add(region.len_bytes()));
            if start < end {
                pins.repin(region, &(start - region.gpa()..end - region.gpa()));
            }
        }
    }
}

/// `range` in pieces that are decided one by one, so that a ban waits for one at most.
fn pieces(region: &RamRegion, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let step = PIECE_BYTES.next_multiple_of(region.page_bytes());
    let (mut at, end) = (range.start, range.end);
    std::iter::from_fn(move || {
        let start = at;
        // Counted from the start of the region, so that no piece cuts a page of the backing.
        at = (start / step).saturating_add(1).saturating_mul(step).min(end);
        (start < end).then_some(start..at)
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::sync::atomic::{AtomicBool, Ordering};

    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

    use super::*;
    use crate::{Backing, Lease, ProvidedFile, RamConfig, RamLayout, ZoneSpec};

    const MIB: u64 = 1 << 20;

    fn ram(backing: &Backing) -> GuestRam {
        let zone = |id: &str| {
            let backing = backing.clone();
            ZoneSpec { backing, ..ZoneSpec::new(id, 4 * MIB) }
        };
        let layout = RamLayout {
            hole_start: 6 * MIB,
            hole_end: 16 * MIB,
            end: 1 << 40,
            ..RamLayout::default()
        };
        GuestRam::new(&RamConfig { zones: vec![zone("a"), zone("b")] }, layout).unwrap()
    }

    fn fill(ram: &GuestRam) {
        for region in ram.regions() {
            let bytes = vec![7; usize::try_from(region.len_bytes()).unwrap()];
            let memory = ram.guest_memory().memory();
            memory.write_slice(&bytes, GuestAddress(region.gpa())).unwrap();
        }
    }

    fn byte(ram: &GuestRam, gpa: u64) -> u8 {
        ram.guest_memory().memory().read_obj(GuestAddress(gpa)).unwrap()
    }

    #[test]
    fn discarded_memory_is_zero_and_gone_and_counts_as_written() {
        for backing in [Backing::Memfd, Backing::Anonymous] {
            let ram = ram(&backing);
            fill(&ram);
            ram.track_device_writes(true);
            // Across two regions, and across the hole after the second.
            let discarded = ram.discard(3 * MIB..7 * MIB);
            assert!(discarded.covers(&(3 * MIB..6 * MIB)) && discarded.len_bytes() == 3 * MIB);
            assert!(discarded.error.is_none() && discarded.deferred_bytes == 0);
            assert_eq!((byte(&ram, 3 * MIB), byte(&ram, 3 * MIB - 1)), (0, 7));
            assert_eq!((byte(&ram, 6 * MIB - 1), byte(&ram, 16 * MIB)), (0, 7));
            let words = ram.take_device_dirty(0, 4 * MIB).unwrap();
            assert_eq!(words.iter().map(|word| word.count_ones()).sum::<u32>(), 256);
            assert!(ram.regions()[0].zero().is_zero(3 * MIB / PAGE_BYTES));
        }
    }

    #[test]
    fn memory_of_the_host_shrinks() {
        let ram = ram(&Backing::Memfd);
        fill(&ram);
        let region = &ram.regions()[0];
        ram.discard(0..MIB);
        let left = region.populated_runs(&(0..region.len_bytes())).unwrap();
        assert_eq!(left.first().map(|run| run.start), Some(MIB));
    }

    #[test]
    fn memory_that_was_populated_beforehand_stays_so_when_it_becomes_zero() {
        let zone = ZoneSpec { shared: true, thp: false, ..ZoneSpec::new("a", 4 * MIB) };
        let config = RamConfig { zones: vec![zone] };
        let before = GuestRam::new(&config, RamLayout::default()).unwrap();
        before.regions()[0].fill(&(0..4 * MIB)).unwrap();
        let file = Arc::clone(before.regions()[0].file().unwrap());
        let given = [ProvidedFile::prezeroed("a", file, Lease::new(Arc::new(())))];
        let ram = GuestRam::with_provided(&config, RamLayout::default(), &given).unwrap();
        fill(&ram);
        ram.make_zero(0, &(MIB..2 * MIB)).unwrap();
        assert_eq!((byte(&ram, MIB), byte(&ram, 2 * MIB - 1)), (0, 0));
        assert_eq!((byte(&ram, MIB - 1), byte(&ram, 2 * MIB)), (7, 7));
        let region = &ram.regions()[0];
        assert!(region.populated_runs(&(0..4 * MIB)).unwrap().iter().eq([&(0..4 * MIB)]));
        assert!(region.zero().is_zero(MIB / PAGE_BYTES));
        // Also once the guest has given some of it back.
        ram.discard(0..MIB);
        ram.make_zero(0, &(2 * MIB..3 * MIB)).unwrap();
        let left = region.populated_runs(&(0..4 * MIB)).unwrap();
        assert!(left.iter().eq([&(MIB..4 * MIB)]), "{left:?}");
    }

    #[test]
    fn pages_that_are_still_to_arrive_are_left_alone() {
        let ram = ram(&Backing::Memfd);
        fill(&ram);
        ram.regions()[0].resident().set_absent(2..4);
        let discarded = ram.discard(0..8 * PAGE_BYTES);
        assert_eq!(discarded.ranges, [0..2 * PAGE_BYTES, 4 * PAGE_BYTES..8 * PAGE_BYTES]);
        assert_eq!(discarded.deferred_bytes, 2 * PAGE_BYTES);
        assert_eq!(byte(&ram, 2 * PAGE_BYTES), 7);
        assert!(!discarded.covers(&(0..3 * PAGE_BYTES)) && discarded.covers(&(0..2 * PAGE_BYTES)));
    }

    #[test]
    fn memory_being_read_is_discarded_afterwards() {
        use std::sync::mpsc::{RecvTimeoutError, channel};
        let ram = ram(&Backing::Memfd);
        fill(&ram);
        let ways: [fn(&GuestRam); 3] = [
            |ram| assert!(ram.discard(0..MIB).covers(&(0..MIB))),
            |ram| ram.discard_in_region(0, &(0..MIB)).unwrap(),
            |ram| ram.make_zero(0, &(0..MIB)).unwrap(),
        ];
        for give in ways {
            let held = ram.regions()[0].hold(MIB - PAGE_BYTES..2 * MIB);
            let (discarded, is_given) = channel();
            std::thread::scope(|scope| {
                let ram = &ram;
                scope.spawn(move || {
                    give(ram);
                    let _ = discarded.send(());
                });
                let soon = is_given.recv_timeout(std::time::Duration::from_millis(100));
                assert_eq!(soon, Err(RecvTimeoutError::Timeout));
                drop(held);
                assert_eq!(is_given.recv(), Ok(()));
            });
        }
        assert!(super::tests::ram(&Backing::Anonymous).regions()[0].hold(0..MIB).is_none());
    }

    #[test]
    fn nothing_is_discarded_under_a_ban() {
        let ram = ram(&Backing::Memfd);
        fill(&ram);
        let (first, second) = (ram.ban_discards("a test"), ram.ban_discards("another"));
        drop(first);
        let discarded = ram.discard(0..MIB);
        assert_eq!((discarded.len_bytes(), discarded.deferred_bytes), (0, MIB));
        assert_eq!(ram.discards_banned(), Some("another"));
        assert_eq!(byte(&ram, 0), 7);
        drop(second);
        assert_eq!(ram.discards_banned(), None);
        assert_eq!(ram.discard(0..MIB).len_bytes(), MIB);
    }

    /// The populated parts, as seen by a device that has the pages mapped since before: they must be the
    /// same.
    fn populated(ram: &GuestRam, range: Range<u64>) -> Vec<Range<u64>> {
        ram.regions()[0].populated_runs(&range).unwrap()
    }

    #[test]
    fn what_is_to_be_zero_keeps_its_pages_while_devices_have_them() {
        for backing in [Backing::Memfd, Backing::Anonymous] {
            let ram = ram(&backing);
            fill(&ram);
            ram.track_device_writes(true);
            let ban = ram.ban_discards("a test");
            ram.make_zero(0, &(MIB..2 * MIB)).unwrap();
            assert_eq!(
                populated(&ram, MIB..2 * MIB),
                [Range { start: MIB, end: 2 * MIB }],
                "{backing:?}"
            );
            assert_eq!((byte(&ram, MIB), byte(&ram, 2 * MIB - 1)), (0, 0));
            assert_eq!((byte(&ram, MIB - 1), byte(&ram, 2 * MIB)), (7, 7));
            assert!(ram.regions()[0].zero().is_zero(MIB / PAGE_BYTES));
            let words = ram.take_device_dirty(0, 4 * MIB).unwrap();
            assert_eq!(words.iter().map(|word| word.count_ones()).sum::<u32>(), 256);
            drop(ban);
            ram.make_zero(0, &(MIB..2 * MIB)).unwrap();
            assert!(populated(&ram, MIB..2 * MIB).is_empty(), "the host may have them now");
            assert_eq!((byte(&ram, MIB), byte(&ram, MIB - 1)), (0, 7));
        }
    }

    #[test]
    fn what_is_to_be_missing_is_refused_while_devices_have_it() {
        let ram = ram(&Backing::Memfd);
        fill(&ram);
        let ban = ram.ban_discards("a test");
        let error = ram.discard_in_region(0, &(0..MIB)).unwrap_err();
        assert!(matches!(error, AccessError::Banned { reason: "a test", .. }), "{error}");
        assert_eq!(byte(&ram, 0), 7);
        // Pages are unpinned for guests that announce their use, and this one does not.
        ban.except_unpinned(Arc::new(UnpinsAll));
        assert!(ram.discard_in_region(0, &(0..MIB)).is_err());
        drop(ban);
        ram.discard_in_region(0, &(0..MIB)).unwrap();
        assert!(populated(&ram, 0..MIB).is_empty());
        assert!(matches!(
            ram.discard_in_region(9, &(0..MIB)),
            Err(AccessError::NoRegion { index: 9, .. })
        ));
    }

    /// Unpins everything.
    struct UnpinsAll;

    impl Pins for UnpinsAll {
        fn grain_bytes(&self, _: &RamRegion) -> u64 {
            PAGE_BYTES
        }

        fn unpin(&self, _: &RamRegion, range: &Range<u64>) -> Vec<Range<u64>> {
            vec![range.clone()]
        }

        fn repin(&self, _: &RamRegion, _: &Range<u64>) {}

        fn pin(
            &self,
            _: &RamRegion,
            _: &Range<u64>,
        ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            Ok(())
        }
    }

    /// Memory is pinned for a device while a migration zeroes it, in any order: what was populated when the
    /// ban had begun stays populated.
    #[test]
    fn pages_that_are_pinned_are_never_discarded() {
        for round in 0..20 {
            let ram = Arc::new(ram(&Backing::Memfd));
            fill(&ram);
            let stop = Arc::new(AtomicBool::new(false));
            let zeroers: Vec<_> = (0..2)
                .map(|part: u64| {
                    let (ram, stop) = (Arc::clone(&ram), Arc::clone(&stop));
                    std::thread::spawn(move || {
                        while !stop.load(Ordering::Relaxed) {
                            for page in (part..1024).step_by(2) {
                                let at = page * PAGE_BYTES;
                                ram.make_zero(0, &(at..at + PAGE_BYTES)).unwrap();
                            }
                        }
                    })
                })
                .collect();
            let ban = ram.ban_discards("a device");
            // As pinning does.
            let region = &ram.regions()[0];
            region.populate_for_io(&(0..4 * MIB)).unwrap();
            for _ in 0..20 {
                assert_eq!(
                    populated(&ram, 0..4 * MIB),
                    [Range { start: 0, end: 4 * MIB }],
                    "round {round}"
                );
            }
            stop.store(true, Ordering::Relaxed);
            for thread in zeroers {
                thread.join().unwrap();
            }
            assert_eq!(populated(&ram, 0..4 * MIB), [Range { start: 0, end: 4 * MIB }]);
            drop(ban);
        }
    }

    proptest! {
        #[test]
        fn any_range_is_harmless(start: u64, end: u64) {
            let ram = ram(&Backing::Memfd);
            for range in [start..end, start % (20 * MIB)..end % (20 * MIB), start..u64::MAX] {
                let discarded = ram.discard(range.clone());
                for piece in &discarded.ranges {
                    prop_assert!(range.start <= piece.start && piece.end <= range.end);
                }
            }
        }
    }
}
