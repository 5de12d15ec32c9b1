// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The DMA map of guest memory: mapped pieces, and those that are temporarily unmapped.
//!
//! Owns the record of every mapping. A mapping cannot be split, and unmapping one that a device may be
//! using, even for an instant, would break its DMA; so a piece is unmapped when the guest uses nothing of
//! it, and mapped again in full before the guest may use any of it.
//!
//! ```text
//!   mapped -- the balloon has all of it --> unmapped, discarded
//!     ^                                          |
//!     +-- populated, mapped <-- the guest takes some of it back, and waits
//! ```
//!
//! Kernel calls on different ranges run concurrently, on as many threads as ask for them; those on
//! overlapping ranges exclude each other. Each call has its range locked, while the lock of the
//! record itself is held for look-ups only. A thread locks one range at a time, so no two threads wait for
//! each other.

mod kept;

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memory::{Pins, RamRegion};
use parking_lot::{Condvar, Mutex, MutexGuard};

pub use kept::KeptMappings;

use super::dma::{DmaTarget, Populator};
use super::entries::{self, Entries};
use super::error::PinError;
use super::ranges::{overlapping, remove_in};

/// Piece size in bytes; large enough for the kernel to pin large runs at once, and no larger.
const PIECE_BYTES: u64 = 64 << 20;
/// Piece size where memory is discarded and populated again: balloon pages are mostly whole huge pages of
/// the guest. Half of this would cost the IOMMU its large pages; twice this would leave much memory
/// undiscarded.
const LENT_PIECE_BYTES: u64 = 2 << 20;
/// Bytes that a thread populates at a time. No smaller than a piece, so that threads rarely contend.
const CHUNK_BYTES: u64 = 64 << 20;

/// Called once with the reason when a piece could not be mapped again: devices must stop.
pub type OnLost = Box<dyn Fn(&Arc<str>) + Send + Sync>;

/// Whether pieces may be mapped and unmapped.
#[derive(Default)]
enum Phase {
    #[default]
    Open,
    /// Everything is about to be unmapped.
    Closed,
    /// Mapping has failed for this reason, and devices were stopped.
    Lost(Arc<str>),
}

/// Currently mapped and unmapped pieces: guest physical addresses and lengths.
#[derive(Default)]
struct State {
    mapped: BTreeMap<u64, u64>,
    unmapped: BTreeMap<u64, u64>,
    /// Ranges with a kernel call in progress, each locked by one thread: disjoint.
    locked: BTreeMap<u64, u64>,
}

impl State {
    fn mapped_bytes_in(&self, range: &Range<u64>) -> u64 {
        let part = |(start, len): (u64, u64)| {
            start.saturating_add(len).min(range.end).saturating_sub(start.max(range.start))
        };
        overlapping(&self.mapped, range).map(part).sum()
    }

    fn is_locked(&self, range: &Range<u64>) -> bool {
        overlapping(&self.locked, range).next().is_some()
    }
}

/// A locked range of guest physical addresses; unlocked when dropped, also by a panic.
struct RangeLock<'a> {
    dma_map: &'a DmaMap,
    start: u64,
}

impl Drop for RangeLock<'_> {
    fn drop(&mut self) {
        self.dma_map.state.lock().locked.remove(&self.start);
        self.dma_map.unlocked.notify_all();
    }
}

/// The pieces in which guest memory is mapped; see the module.
pub struct DmaMap {
    target: Arc<dyn DmaTarget>,
    piece_bytes: u64,
    chunk_bytes: u64,
    /// Locked briefly, never during a kernel call.
    state: Mutex<State>,
    /// Notified when a range is unlocked.
    unlocked: Condvar,
    /// Locked last and only briefly, so that closing does not wait for the kernel.
    phase: Mutex<Phase>,
    /// For status requests, which must not wait either.
    mapped_bytes: AtomicU64,
    on_lost: OnLost,
}

/// Groups adjacent pieces into runs.
fn runs(mappings: &[(u64, u64)]) -> Vec<Vec<(u64, u64)>> {
    let mut runs: Vec<Vec<(u64, u64)>> = Vec::new();
    for piece in mappings {
        match runs.last_mut() {
            Some(run) if run.last().is_some_and(|(start, len)| start + len == piece.0) => {
                run.push(*piece);
            }
            _ => runs.push(vec![*piece]),
        }
    }
    runs
}

fn span(run: &[(u64, u64)]) -> Range<u64> {
    let start = run.first().map_or(0, |(start, _)| *start);
    start..run.last().map_or(start, |(start, len)| start + len)
}

impl DmaMap {
    /// A map with nothing mapped. `lent`: memory is to be discarded and populated again, so pieces are as
    /// small as the limit on mappings allows, a quarter of which is left for other uses. Blocks that may be
    /// plugged have a mapping each, whatever the size of pieces; room for all of them is left where possible.
    pub fn plan(
        target: Arc<dyn DmaTarget>,
        populator: &dyn Populator,
        lent: bool,
        on_lost: OnLost,
    ) -> Arc<Self> {
        let allowed = target.limits().entries.map_or(u64::MAX, |entries| entries - entries / 4);
        let entries = |piece_bytes| Entries::of(populator.regions(), piece_bytes);
        // More blocks than that may be refused when they are plugged, in favour of the memory that is there.
        let for_blocks = |entries: &Entries| entries.blocks.min(allowed / 2);
        let is_over = |entries: &Entries| entries.pieces > allowed - for_blocks(entries);
        let mut piece_bytes = if lent { LENT_PIECE_BYTES } else { PIECE_BYTES };
        let longest_bytes = populator.regions().iter().map(|region| region.len_bytes()).max();
        while longest_bytes.is_some_and(|longest| piece_bytes < longest)
            && is_over(&entries(piece_bytes))
        {
            piece_bytes *= 2;
        }
        let wanted = entries(piece_bytes);
        if wanted.pieces.saturating_add(wanted.blocks) > allowed {
            log::warn!(
                "the {} blocks that memory may have plugged may exceed what the IOMMU maps for \
                 passed-through devices, {allowed} pieces: raise dma_entry_limit for all of them",
                wanted.blocks
            );
        }
        // A chunk that ended within a block would be the end of a piece.
        let block_bytes =
            populator.regions().iter().filter_map(|region| region.block_bytes()).max();
        Arc::new(Self {
            target,
            piece_bytes,
            chunk_bytes: piece_bytes.max(CHUNK_BYTES).max(block_bytes.unwrap_or(0)),
            state: Mutex::default(),
            unlocked: Condvar::new(),
            phase: Mutex::default(),
            mapped_bytes: AtomicU64::new(0),
            on_lost,
        })
    }

    /// A map of which all of `mapped` is mapped in the target already, in pieces of `piece_bytes`.
    pub fn prepinned(
        target: Arc<dyn DmaTarget>,
        mapped: BTreeMap<u64, u64>,
        piece_bytes: u64,
        on_lost: OnLost,
    ) -> Arc<Self> {
        let mapped_bytes = AtomicU64::new(mapped.values().sum());
        Arc::new(Self {
            target,
            piece_bytes,
            chunk_bytes: piece_bytes.max(CHUNK_BYTES),
            state: Mutex::new(State { mapped, ..State::default() }),
            unlocked: Condvar::new(),
            phase: Mutex::default(),
            mapped_bytes,
            on_lost,
        })
    }

    pub(super) fn target(&self) -> &dyn DmaTarget {
        self.target.as_ref()
    }

    /// Size of a piece in bytes, unless the host page is larger.
    pub fn piece_bytes(&self) -> u64 {
        self.piece_bytes
    }

    /// Bytes to be populated at a time.
    pub(super) fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// Bytes that are currently mapped.
    pub(super) fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes.load(Ordering::Relaxed)
    }

    /// Maps what is not mapped of a part of a region, which must be populated. Called on several threads
    /// concurrently.
    pub(super) fn map(&self, region: &RamRegion, range: &Range<u64>) -> Result<(), PinError> {
        let grain = self.grain_bytes(region);
        let of = |part: &Range<u64>| region.gpa() + part.start..region.gpa() + part.end;
        if self.state.lock().mapped_bytes_in(&of(range)) == 0 {
            self.target.prepare(region, range);
        }
        let mut at = range.start;
        while at < range.end {
            let end = (at / grain).saturating_add(1).saturating_mul(grain).min(range.end);
            let piece = of(&(at..end));
            let (_lock, is_mapped) = self
                .lock_range(|state| {
                    let mapped_bytes = state.mapped_bytes_in(&piece);
                    (piece.clone(), mapped_bytes == piece.end - piece.start)
                })
                .ok_or(PinError::Cancelled)?;
            if !is_mapped {
                self.map_piece(region, &(at..end))?;
            }
            at = end;
        }
        Ok(())
    }

    /// Locks the range that `choose` finds in the record, as soon as no other thread has any of it locked;
    /// `None` if pieces may not be mapped and unmapped any more.
    fn lock_range<T>(
        &self,
        choose: impl Fn(&State) -> (Range<u64>, T),
    ) -> Option<(RangeLock<'_>, T)> {
        let mut state = self.state.lock();
        loop {
            // Under the lock of the record: what waits until no range is locked, after it has closed the map,
            // has every call behind it.
            if !self.is_open() {
                return None;
            }
            let (range, chosen) = choose(&state);
            if !state.is_locked(&range) {
                state.locked.insert(range.start, range.end.saturating_sub(range.start));
                return Some((RangeLock { dma_map: self, start: range.start }, chosen));
            }
            self.unlocked.wait(&mut state);
        }
    }

    /// The record, when no kernel call is in progress.
    fn state_without_calls(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        while !state.locked.is_empty() {
            self.unlocked.wait(&mut state);
        }
        state
    }

    fn is_open(&self) -> bool {
        matches!(*self.phase.lock(), Phase::Open)
    }

    /// Maps a piece, which the calling thread has locked.
    fn map_piece(&self, region: &RamRegion, piece: &Range<u64>) -> Result<(), PinError> {
        let (gpa, len_bytes) = (region.gpa() + piece.start, piece.end - piece.start);
        let failed = |source: io::Error| PinError::Map { gpa, len_bytes, source };
        self.target.map(region, piece).map_err(failed)?;
        let mut state = self.state.lock();
        state.unmapped.remove(&gpa);
        state.mapped.insert(gpa, len_bytes);
        self.mapped_bytes.fetch_add(len_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Ends mapping and unmapping, except for kernel calls in progress: everything is about to be
    /// unmapped, or left as it is.
    pub(super) fn close(&self) {
        let mut phase = self.phase.lock();
        if matches!(*phase, Phase::Open) {
            *phase = Phase::Closed;
        }
    }

    /// Waits for the kernel calls in progress, after [`close`](Self::close).
    pub(super) fn wait_for_calls(&self) {
        drop(self.state_without_calls());
    }

    /// Ends mapping for good: devices must stop, for this reason unless there is one already.
    pub(super) fn lose(&self, reason: &Arc<str>) {
        let mut phase = self.phase.lock();
        if matches!(*phase, Phase::Open) {
            *phase = Phase::Lost(Arc::clone(reason));
        }
    }

    /// Unmaps everything, after [`lose`](Self::lose). Waits for kernel calls in progress.
    pub(super) fn unmap_lost(&self) {
        let mut state = self.state_without_calls();
        self.target.unmap_all();
        *state = State::default();
        self.mapped_bytes.store(0, Ordering::Relaxed);
    }

    /// The reason why devices must stop, if they must.
    pub(super) fn lost(&self) -> Option<Arc<str>> {
        match &*self.phase.lock() {
            Phase::Lost(reason) => Some(Arc::clone(reason)),
            Phase::Open | Phase::Closed => None,
        }
    }

    fn map_again(&self, region: &RamRegion, range: &Range<u64>) -> Result<(), PinError> {
        let gpa = region.gpa();
        let asked = gpa + range.start..gpa + range.end;
        if asked.is_empty() {
            return Ok(());
        }
        // Also what lies in the range and is being mapped by another thread: it is waited for.
        let locked = self.lock_range(|state| {
            let wanted: Vec<_> = overlapping(&state.unmapped, &asked).collect();
            let pieces = span(&wanted);
            let all = if wanted.is_empty() {
                asked.clone()
            } else {
                asked.start.min(pieces.start)..asked.end.max(pieces.end)
            };
            (all, wanted)
        });
        let Some((_lock, wanted)) = locked else { return Ok(()) };
        for run in runs(&wanted) {
            let bytes = span(&run);
            let pages = bytes.start - gpa..bytes.end - gpa;
            region.populate_for_io(&pages).map_err(|source| PinError::Repopulate { source })?;
            for (start, len) in run {
                self.map_piece(region, &(start - gpa..start - gpa + len))?;
            }
        }
        Ok(())
    }
}

impl Pins for DmaMap {
    fn grain_bytes(&self, region: &RamRegion) -> u64 {
        entries::grain_bytes(region, self.piece_bytes)
    }

    fn unpin(&self, region: &RamRegion, range: &Range<u64>) -> Vec<Range<u64>> {
        let gpa = region.gpa();
        let range = gpa + range.start..gpa + range.end;
        if range.is_empty() {
            return Vec::new();
        }
        let is_usable =
            |start: u64, len: u64| region.is_usable(&(start - gpa..start - gpa + len)).1;
        let is_inside = |(start, len): &(u64, u64)| {
            range.start <= *start && start.saturating_add(*len) <= range.end
        };
        let locked = self.lock_range(|state| {
            let pieces = overlapping(&state.mapped, &range).filter(is_inside);
            (range.clone(), pieces.collect::<Vec<_>>())
        });
        let Some((_lock, inside)) = locked else { return Vec::new() };
        // Unplugged blocks are not mapped again on request.
        remove_in(&mut self.state.lock().unmapped, &range, |start, len| !is_usable(*start, *len));
        let mut gone = Vec::new();
        for run in runs(&inside) {
            let bytes = span(&run);
            if let Err(error) = self.target.unmap(&bytes) {
                log::warn!("memory at {:#x} stays mapped for DMA: {error}", bytes.start);
                continue;
            }
            let mut state = self.state.lock();
            for (start, len) in run {
                state.mapped.remove(&start);
                self.mapped_bytes.fetch_sub(len, Ordering::Relaxed);
                if is_usable(start, len) {
                    state.unmapped.insert(start, len);
                }
            }
            gone.push(bytes.start - gpa..bytes.end - gpa);
        }
        gone
    }

    fn repin(&self, region: &RamRegion, range: &Range<u64>) {
        if let Err(error) = self.map_again(region, range) {
            let reason: Arc<str> = error_text::chain(&error).into();
            let mut phase = self.phase.lock();
            if !matches!(*phase, Phase::Open) {
                return;
            }
            *phase = Phase::Lost(Arc::clone(&reason));
            drop(phase);
            (self.on_lost)(&reason);
        }
    }

    fn pin(
        &self,
        region: &RamRegion,
        range: &Range<u64>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.map(region, range).map_err(|error| {
            self.unpin(region, range);
            Box::new(error).into()
        })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use std::sync::atomic::AtomicBool;

    use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};
    use proptest::prelude::*;

    use super::*;
    use crate::fakes::FakeTarget;
    use crate::{DmaLimits, GuestRamPopulator};

    const MIB: u64 = 1 << 20;
    const GPA: u64 = 8 * MIB;

    fn ram(len_bytes: u64) -> Arc<GuestRam> {
        let layout =
            RamLayout { hole_start: GPA, hole_end: 2 * GPA, end: 1 << 40, ..RamLayout::default() };
        let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", len_bytes) }];
        Arc::new(GuestRam::new(&RamConfig { zones }, layout).unwrap())
    }

    fn dma_map(target: &Arc<FakeTarget>, ram: &Arc<GuestRam>, on_lost: OnLost) -> Arc<DmaMap> {
        let populator = GuestRamPopulator::new(Arc::clone(ram), None);
        let target: Arc<dyn DmaTarget> = target.clone();
        let dma_map = DmaMap::plan(target, &populator, true, on_lost);
        for region in ram.regions() {
            dma_map.map(region, &(0..region.len_bytes())).unwrap();
        }
        dma_map
    }

    fn no_loss() -> OnLost {
        Box::new(|reason| panic!("{reason}"))
    }

    #[test]
    fn pieces_are_as_small_as_the_limit_allows() {
        let ram = ram(256 * MIB);
        let size = |entries, lent| {
            let limits = DmaLimits { entries, ..DmaLimits::default() };
            let target = Arc::new(FakeTarget { limits, ..FakeTarget::default() });
            let populator = GuestRamPopulator::new(Arc::clone(&ram), None);
            DmaMap::plan(target, &populator, lent, no_loss()).piece_bytes()
        };
        assert_eq!((size(None, true), size(None, false)), (2 * MIB, 64 * MIB));
        assert_eq!((size(Some(65535), true), size(Some(100), true)), (2 * MIB, 4 * MIB));
    }

    #[test]
    fn a_piece_goes_as_a_whole_and_comes_back_as_a_whole() {
        let ram = ram(8 * MIB);
        let region = &ram.regions()[0];
        let target = Arc::new(FakeTarget::default());
        let dma_map = dma_map(&target, &ram, no_loss());
        assert_eq!(
            dma_map.unpin(region, &(MIB..7 * MIB)),
            [Range { start: 2 * MIB, end: 6 * MIB }]
        );
        assert_eq!((dma_map.mapped_bytes(), target.unmaps()), (4 * MIB, 1));
        assert!(dma_map.unpin(region, &(2 * MIB..6 * MIB)).is_empty(), "once");
        ram.discard_in_region(0, &(2 * MIB..6 * MIB)).unwrap();
        dma_map.repin(region, &(0..2 * MIB));
        assert_eq!(dma_map.mapped_bytes(), 4 * MIB);
        dma_map.repin(region, &(4 * MIB - 1..4 * MIB));
        assert_eq!(target.is_mapped(2 * MIB..4 * MIB), Some(1), "in one mapping");
        assert_eq!(target.is_mapped(4 * MIB..6 * MIB), None);
        let there = region.populated_runs(&(0..region.len_bytes())).unwrap();
        assert_eq!(there, [Range { start: 2 * MIB, end: 4 * MIB }], "populated before");
    }

    #[test]
    fn what_cannot_be_mapped_again_is_told_once_and_ends_it() {
        let ram = ram(8 * MIB);
        let region = &ram.regions()[0];
        let full = Arc::new(AtomicBool::new(false));
        let target = Arc::new(FakeTarget {
            before: Some({
                let full = Arc::clone(&full);
                Box::new(move |_| {
                    let errno = io::Error::from_raw_os_error(libc::ENOMEM);
                    if full.load(Ordering::Relaxed) { Err(errno) } else { Ok(()) }
                })
            }),
            ..FakeTarget::default()
        });
        let told = Arc::new(AtomicU64::new(0));
        let on_lost: OnLost = Box::new({
            let told = Arc::clone(&told);
            move |reason| {
                assert!(reason.contains("ulimit -l"), "{reason}");
                told.fetch_add(1, Ordering::Relaxed);
            }
        });
        let dma_map = dma_map(&target, &ram, on_lost);
        assert_eq!(dma_map.unpin(region, &(0..4 * MIB)).len(), 1);
        full.store(true, Ordering::Relaxed);
        dma_map.repin(region, &(0..MIB));
        dma_map.repin(region, &(0..MIB));
        assert_eq!(told.load(Ordering::Relaxed), 1);
        assert!(dma_map.unpin(region, &(4 * MIB..8 * MIB)).is_empty(), "nothing goes any more");
        assert!(dma_map.lost().unwrap().contains("ulimit -l"));
    }

    proptest! {
        /// Whatever is unmapped and mapped again, all memory that the guest may use is mapped, in the
        /// original pieces.
        #[test]
        fn what_the_guest_may_use_is_mapped(
            steps in prop::collection::vec((any::<bool>(), 0..20 * MIB, 0..8 * MIB), 1..40),
        ) {
            let ram = ram(19 * MIB);
            let target = Arc::new(FakeTarget::default());
            let dma_map = dma_map(&target, &ram, no_loss());
            for (goes, start, len) in steps {
                for region in ram.regions() {
                    let end = (start + len).min(region.len_bytes()) / 4096 * 4096;
                    let range = (start / 4096 * 4096).min(end)..end;
                    if goes {
                        for part in dma_map.unpin(region, &range) {
                            prop_assert!(range.start <= part.start && part.end <= range.end);
                            let gpa = region.gpa() + part.start..region.gpa() + part.end;
                            prop_assert_eq!(target.mapped_bytes_in(&gpa), 0);
                        }
                    } else {
                        dma_map.repin(region, &range);
                        let gpa = region.gpa() + range.start..region.gpa() + range.end;
                        prop_assert_eq!(target.mapped_bytes_in(&gpa), range.end - range.start);
                    }
                }
            }
            for region in ram.regions() {
                dma_map.repin(region, &(0..region.len_bytes()));
            }
            let mapped: Vec<_> = target.mapped.lock().clone();
            prop_assert_eq!(mapped.len(), 10);
            prop_assert!(mapped.iter().all(|piece| piece.end - piece.start <= 2 * MIB));
        }
    }
}
