// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Giving back what the guest does not use.
//!
//! Owns the question of what may be given back: whole pages of the backing whose content is here,
//! while nobody forbids it. Whoever gives memory to a passed-through device forbids it with a
//! [`DiscardBan`], as the device would go on using the old pages; what becomes of memory that is let
//! go of in time is in [`crate::pins`]. The map of resident pages keeps
//! pages alone that are still to arrive: their content would come back after they were given up.
//!
//! Guest addresses come from a guest and are believed in nothing; what is not RAM is left out.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::PAGE_BYTES;
use crate::pins::Pins;
use crate::ram::GuestRam;
use crate::region::{AccessError, RamRegion, ZoneKind};

/// Given back with one lock held and one system call: a pause or a ban waits no longer than this
/// takes (64 MiB of 4 KiB pages in a memfd: some 10 ms).
const PIECE_BYTES: u64 = 64 << 20;

/// Somebody who forbids that memory is given back.
#[derive(Debug)]
struct Ban {
    number: u64,
    reason: &'static str,
    /// Who may let go of memory that is asked for before it is used again.
    pins: Option<Arc<dyn Pins>>,
}

/// Those who forbid that memory is given back, with their reasons.
///
/// The lock is held while memory is given back, so that whoever has got a ban knows that nothing
/// is given back any more.
#[derive(Debug, Default)]
pub(crate) struct DiscardBans(Mutex<Vec<Ban>>);

impl DiscardBans {
    fn lock(&self) -> MutexGuard<'_, Vec<Ban>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As long as it lives, no memory is given back to the host.
#[derive(Debug)]
pub struct DiscardBan {
    bans: Arc<DiscardBans>,
    number: u64,
}

impl DiscardBan {
    pub(crate) fn set_pins(&self, pins: Arc<dyn Pins>) {
        let mut bans = self.bans.lock();
        if let Some(ban) = bans.iter_mut().find(|ban| ban.number == self.number) {
            ban.pins = Some(pins);
        }
    }
}

impl Drop for DiscardBan {
    fn drop(&mut self) {
        let mut bans = self.bans.lock();
        let at = bans.iter().position(|ban| ban.number == self.number);
        let ended = at.map(|at| bans.remove(at));
        drop(bans);
        // Not under the lock: it may be the last to know of what is pinned.
        drop(ended);
    }
}

/// What became of a range that was to be given back.
#[derive(Debug, Default)]
pub struct GivenBack {
    /// Guest physical ranges that were given back and read as zero, in order.
    pub ranges: Vec<Range<u64>>,
    /// Bytes that may be given back later: they are still to arrive, or there is a ban.
    pub deferred_bytes: u64,
    /// The first failure. The range that it names was left alone.
    pub error: Option<AccessError>,
}

impl GivenBack {
    /// Bytes that were given back.
    pub fn len_bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// Whether all of `range` was given back.
    pub fn covers(&self, range: &Range<u64>) -> bool {
        let mut at = range.start;
        let first = self.ranges.partition_point(|given| given.end <= at);
        for given in self.ranges.iter().skip(first) {
            if at >= range.end || !given.contains(&at) {
                break;
            }
            at = given.end;
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
    /// Forbids to give memory back until the answer is dropped. Whatever was being given back when
    /// this was called has been when it returns.
    pub fn ban_discards(&self, reason: &'static str) -> DiscardBan {
        let bans = Arc::clone(self.discard_bans());
        let mut all = bans.lock();
        // In the order in which they came, so that the last number is the greatest.
        let number = all.last().map_or(0, |ban| ban.number.wrapping_add(1));
        all.push(Ban { number, reason, pins: None });
        drop(all);
        DiscardBan { bans, number }
    }

    /// Why no memory is given back now, if it is not.
    pub fn discards_banned(&self) -> Option<&'static str> {
        self.discard_bans().lock().first().map(|ban| ban.reason)
    }

    /// Does `change` while nobody can forbid or allow anything, if somebody's pins (`pinned`), or nobody
    /// at all, were what stood against it.
    ///
    /// # Errors
    /// The reason of who forbids it now.
    pub(crate) fn unless_banned<R>(
        &self,
        pinned: bool,
        change: impl FnOnce() -> R,
    ) -> Result<R, &'static str> {
        let bans = self.discard_bans().lock();
        match &bans[..] {
            [] => Ok(change()),
            [Ban { pins: Some(_), .. }] if pinned => Ok(change()),
            [first, ..] => Err(first.reason),
        }
    }

    /// Who lets go of pinned memory, if somebody does and nobody else forbids it.
    pub(crate) fn pins(&self) -> Option<Arc<dyn Pins>> {
        match &self.discard_bans().lock()[..] {
            [ban] => ban.pins.clone(),
            _ => None,
        }
    }

    /// Gives the memory of the guest physical `range` back to the host, in both mappings and for
    /// all who share it; it reads as zero from then on, and counts as written for migrations. The
    /// maps are up to date when this returns.
    ///
    /// What is no RAM, part of a page of the backing only, or cannot be given back (a private
    /// mapping of a file) is left as it is.
    pub fn give_back(&self, range: Range<u64>) -> GivenBack {
        self.give_back_if(range, false)
    }

    /// `asks`: the guest asks before it uses the memory again.
    pub(crate) fn give_back_if(&self, range: Range<u64>, asks: bool) -> GivenBack {
        let mut given = GivenBack::default();
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
                self.give_back_of(region, start..end, asks, &mut given);
            }
        }
        given
    }

    /// `range` is bytes of the region, whole pages of its backing.
    fn give_back_of(
        &self,
        region: &RamRegion,
        range: Range<u64>,
        asks: bool,
        given: &mut GivenBack,
    ) {
        let page = region.page_bytes();
        let unit = if asks { self.give_up_bytes(region) } else { page };
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
                // Units are counted from the begin of the region.
                let end = here.end.min((piece + step) / unit * unit);
                self.give_back_piece(region, piece..end, asks, given);
                piece = end;
            }
            let behind = absent.end.max(here.end).min(range.end);
            given.deferred_bytes += behind - here.end;
            at = behind;
        }
    }

    fn give_back_piece(
        &self,
        region: &RamRegion,
        piece: Range<u64>,
        asks: bool,
        given: &mut GivenBack,
    ) {
        let bans = self.discard_bans().lock();
        let len_bytes = piece.end - piece.start;
        let parts = match &bans[..] {
            [] => vec![piece],
            [Ban { pins: Some(pins), .. }] if asks => pins.let_go(region, &piece),
            _ => Vec::new(),
        };
        given.deferred_bytes += len_bytes;
        for part in parts {
            given.deferred_bytes -= part.end - part.start;
            match region.discard(&part) {
                Ok(()) => given.push(region.gpa() + part.start..region.gpa() + part.end),
                Err(error) => {
                    given.error.get_or_insert(error);
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

    use super::*;
    use crate::{Backing, RamConfig, RamLayout, ZoneSpec};

    const MIB: u64 = 1 << 20;

    fn ram(backing: &Backing) -> GuestRam {
        let zone = |id: &str| {
            let backing = backing.clone();
            ZoneSpec { backing, ..ZoneSpec::new(id, 4 * MIB) }
        };
        let layout = RamLayout { hole_start: 6 * MIB, hole_end: 16 * MIB, end: 1 << 40 };
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
    fn what_is_given_back_is_zero_and_gone_and_counts_as_written() {
        for backing in [Backing::Memfd, Backing::Anonymous] {
            let ram = ram(&backing);
            fill(&ram);
            ram.track_device_writes(true);
            // Over the border of two regions, and over the hole behind the second.
            let given = ram.give_back(3 * MIB..7 * MIB);
            assert!(given.covers(&(3 * MIB..6 * MIB)) && given.len_bytes() == 3 * MIB);
            assert!(given.error.is_none() && given.deferred_bytes == 0);
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
        ram.give_back(0..MIB);
        let left = region.populated_runs(&(0..region.len_bytes())).unwrap();
        assert_eq!(left.first().map(|run| run.start), Some(MIB));
    }

    #[test]
    fn pages_that_are_still_to_arrive_are_left_alone() {
        let ram = ram(&Backing::Memfd);
        fill(&ram);
        ram.regions()[0].resident().set_absent(2..4);
        let given = ram.give_back(0..8 * PAGE_BYTES);
        assert_eq!(given.ranges, [0..2 * PAGE_BYTES, 4 * PAGE_BYTES..8 * PAGE_BYTES]);
        assert_eq!(given.deferred_bytes, 2 * PAGE_BYTES);
        assert_eq!(byte(&ram, 2 * PAGE_BYTES), 7);
        assert!(!given.covers(&(0..3 * PAGE_BYTES)) && given.covers(&(0..2 * PAGE_BYTES)));
    }

    #[test]
    fn nothing_is_given_back_under_a_ban() {
        let ram = ram(&Backing::Memfd);
        fill(&ram);
        let (first, second) = (ram.ban_discards("a test"), ram.ban_discards("another"));
        drop(first);
        let given = ram.give_back(0..MIB);
        assert_eq!((given.len_bytes(), given.deferred_bytes), (0, MIB));
        assert_eq!(ram.discards_banned(), Some("another"));
        assert_eq!(byte(&ram, 0), 7);
        drop(second);
        assert_eq!(ram.discards_banned(), None);
        assert_eq!(ram.give_back(0..MIB).len_bytes(), MIB);
    }

    proptest! {
        #[test]
        fn any_range_is_harmless(start: u64, end: u64) {
            let ram = ram(&Backing::Memfd);
            for range in [start..end, start % (20 * MIB)..end % (20 * MIB), start..u64::MAX] {
                let given = ram.give_back(range.clone());
                for piece in &given.ranges {
                    prop_assert!(range.start <= piece.start && piece.end <= range.end);
                }
            }
        }
    }
}
