// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What stays mapped for DMA between two boots of a guest in the same memory.
//!
//! Owns which of the mappings stay. Must never leave one to memory that the next boot does not have: blocks that may be
//! plugged are not, and their pages go back to the host.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memory::RamRegion;
use parking_lot::{Condvar, Mutex};

use super::{DmaMap, OnLost, State, overlapping, remove_in, runs, span};
use crate::dma::DmaTarget;

/// What of guest memory stays mapped between two boots of a guest: guest physical addresses and lengths.
#[derive(Debug)]
pub struct KeptMappings {
    pieces: BTreeMap<u64, u64>,
    piece_bytes: u64,
    chunk_bytes: u64,
}

impl KeptMappings {
    /// Bytes that are mapped.
    pub fn mapped_bytes(&self) -> u64 {
        self.pieces.values().sum()
    }
}

impl DmaMap {
    /// A map of what has stayed mapped in the target since the guest ran before.
    pub fn kept(target: Arc<dyn DmaTarget>, kept: KeptMappings, on_lost: OnLost) -> Arc<Self> {
        let mapped_bytes = AtomicU64::new(kept.mapped_bytes());
        Arc::new(Self {
            target,
            piece_bytes: kept.piece_bytes,
            chunk_bytes: kept.chunk_bytes,
            state: Mutex::new(State { mapped: kept.pieces, ..State::default() }),
            unlocked: Condvar::new(),
            phase: Mutex::default(),
            mapped_bytes,
            on_lost,
        })
    }

    /// Closes the map and leaves what is mapped to the next boot of the guest, in the same memory, but for
    /// blocks that may be plugged: they are unmapped, as none is plugged then. Waits for kernel calls in
    /// progress. No function may access memory.
    ///
    /// # Errors
    /// Why all has to be unmapped instead.
    pub(in super::super) fn leave(
        &self,
        regions: &[Arc<RamRegion>],
    ) -> Result<KeptMappings, Arc<str>> {
        self.close();
        let mut state = self.state_without_calls();
        if let Some(reason) = self.lost() {
            return Err(reason);
        }
        for region in regions.iter().filter(|region| region.block_bytes().is_some()) {
            let all = region.gpa()..region.gpa().saturating_add(region.len_bytes());
            for run in runs(&overlapping(&state.mapped, &all).collect::<Vec<_>>()) {
                let unmapped = self.target.unmap(&span(&run));
                unmapped.map_err(|error| format!("a block of memory stays mapped: {error}"))?;
            }
            remove_in(&mut state.mapped, &all, |_, _| true);
        }
        self.mapped_bytes.store(0, Ordering::Relaxed);
        let pieces = std::mem::take(&mut *state).mapped;
        Ok(KeptMappings { pieces, piece_bytes: self.piece_bytes, chunk_bytes: self.chunk_bytes })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use std::io;
    use std::ops::Range;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use memory::{GuestRam, Pins, RamConfig, RamLayout, ZoneSpec};

    use super::*;
    use crate::fakes::FakeTarget;
    use crate::{DmaGate, GuestRamPopulator, PinState, Pinning};

    const MIB: u64 = 1 << 20;
    const PIECE: u64 = 2 * MIB;
    /// Blocks that may be plugged begin here.
    const LATER: u64 = 4 << 30;
    /// Longer than anything here takes.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// Eight pieces, and as much that may be plugged.
    fn ram() -> Arc<GuestRam> {
        let zone = |id: &str| ZoneSpec { shared: true, ..ZoneSpec::new(id, 8 * PIECE) };
        let later = ZoneSpec { block_bytes: Some(PIECE), ..zone("later") };
        let config = RamConfig { zones: vec![zone("mem0"), later] };
        Arc::new(GuestRam::new(&config, RamLayout::default()).unwrap())
    }

    fn no_loss() -> OnLost {
        Box::new(|reason| panic!("{reason}"))
    }

    fn start(dma_map: &Arc<DmaMap>, ram: &Arc<GuestRam>) -> (Pinning, Arc<DmaGate>) {
        let populator = Arc::new(GuestRamPopulator::new(Arc::clone(ram), None));
        let (gate, on_end) = (Arc::new(DmaGate::default()), Box::new(|_: &PinState| {}));
        let pinning =
            Pinning::start(Arc::clone(dma_map), populator, Arc::clone(&gate), false, on_end);
        (pinning.unwrap(), gate)
    }

    /// Maps all memory in small pieces.
    fn first_boot(target: &Arc<FakeTarget>, ram: &Arc<GuestRam>) -> (Arc<DmaMap>, Pinning) {
        let target: Arc<dyn DmaTarget> = target.clone();
        let populator = GuestRamPopulator::new(Arc::clone(ram), None);
        let dma_map = DmaMap::plan(target, &populator, true, no_loss());
        let (pinning, _gate) = start(&dma_map, ram);
        (dma_map, pinning)
    }

    /// Maps what is missing, and waits for it.
    fn next_boot(target: &Arc<FakeTarget>, ram: &Arc<GuestRam>, kept: KeptMappings) -> Pinning {
        let target: Arc<dyn DmaTarget> = target.clone();
        let (mut pinning, gate) = start(&DmaMap::kept(target, kept, no_loss()), ram);
        pinning.wait().unwrap();
        assert!(gate.is_open());
        assert_eq!(pinning.progress().pinned_bytes, 8 * PIECE);
        pinning
    }

    fn sorted(target: &FakeTarget) -> Vec<Range<u64>> {
        let mut mapped = target.mapped.lock().clone();
        mapped.sort_by_key(|piece| piece.start);
        mapped
    }

    fn all_pieces() -> Vec<Range<u64>> {
        (0..8).map(|at| at * PIECE..(at + 1) * PIECE).collect()
    }

    #[test]
    fn what_the_guest_gave_back_is_mapped_again_and_all_else_once() {
        let (ram, target) = (ram(), Arc::new(FakeTarget::default()));
        let (dma_map, mut pinning) = first_boot(&target, &ram);
        pinning.wait().unwrap();
        let given_back = 2 * PIECE..4 * PIECE;
        assert_eq!(dma_map.unpin(&ram.regions()[0], &given_back), [given_back]);
        let kept = pinning.leave(ram.regions()).unwrap();
        assert_eq!((kept.mapped_bytes(), target.unmaps()), (6 * PIECE, 1));
        ram.restart(&|| false);
        target.prepared.lock().clear();
        let pinning = next_boot(&target, &ram, kept);
        assert_eq!(sorted(&target), all_pieces(), "each is mapped once");
        // And once more: nothing was left over.
        let kept = pinning.leave(ram.regions()).unwrap();
        drop(next_boot(&target, &ram, kept));
        assert_eq!(sorted(&target), all_pieces());
        assert_eq!(target.unmaps(), 1);
    }

    #[test]
    fn blocks_are_unmapped_before_their_pages_go() {
        let (ram, target) = (ram(), Arc::new(FakeTarget::default()));
        let (dma_map, mut pinning) = first_boot(&target, &ram);
        pinning.wait().unwrap();
        ram.plug(&(LATER..LATER + 3 * PIECE)).unwrap();
        dma_map.pin(&ram.regions()[1], &(0..3 * PIECE)).unwrap();
        assert!(target.is_mapped(LATER..LATER + 3 * PIECE).is_some());
        let kept = pinning.leave(ram.regions()).unwrap();
        assert_eq!(sorted(&target), all_pieces());
        assert_eq!(kept.mapped_bytes(), 8 * PIECE);
        assert!(
            dma_map.unpin(&ram.regions()[0], &(0..8 * PIECE)).is_empty(),
            "it is the next one's"
        );
        assert_eq!(sorted(&target), all_pieces());
    }

    #[test]
    fn a_block_that_stays_mapped_keeps_all_from_staying() {
        let (ram, target) = (ram(), Arc::new(FakeTarget::default()));
        let (dma_map, mut pinning) = first_boot(&target, &ram);
        pinning.wait().unwrap();
        ram.plug(&(LATER..LATER + PIECE)).unwrap();
        dma_map.pin(&ram.regions()[1], &(0..PIECE)).unwrap();
        target.keeps_all.store(true, Ordering::Relaxed);
        let why = pinning.leave(ram.regions()).unwrap_err();
        assert!(why.contains("stays mapped"), "{why}");
    }

    #[test]
    fn what_is_mapped_when_the_guest_reboots_stays_and_the_rest_follows() {
        let (tell, told) = channel();
        let tell = Mutex::new(tell);
        let kernel = Arc::new(DmaGate::default());
        let hold = Arc::clone(&kernel);
        let before = Box::new(move |gpa| {
            if gpa == 0 {
                return Ok(());
            }
            let _ = tell.lock().send(());
            hold.wait().map_err(io::Error::other)
        });
        let target = Arc::new(FakeTarget { before: Some(before), ..FakeTarget::default() });
        let ram = ram();
        let (_, pinning) = first_boot(&target, &ram);
        // The second piece is being mapped.
        told.recv_timeout(PATIENCE).unwrap();
        pinning.cancel();
        kernel.open();
        let kept = pinning.leave(ram.regions()).unwrap();
        let mapped_bytes = kept.mapped_bytes();
        assert!((PIECE..8 * PIECE).contains(&mapped_bytes), "{mapped_bytes:#x}");
        drop(next_boot(&target, &ram, kept));
        assert_eq!(sorted(&target), all_pieces());
    }

    #[test]
    fn after_a_failure_nothing_stays() {
        let before = Box::new(|_| Err(io::Error::from_raw_os_error(libc::ENOMEM)));
        let target = Arc::new(FakeTarget { before: Some(before), ..FakeTarget::default() });
        let ram = ram();
        let (_, pinning) = first_boot(&target, &ram);
        assert!(pinning.ends_within(PATIENCE));
        pinning.leave(ram.regions()).unwrap_err();

        let target = Arc::new(FakeTarget::default());
        let (_, mut pinning) = first_boot(&target, &ram);
        pinning.wait().unwrap();
        let abort = pinning.abandonment();
        abort.begin(&"the last device has failed".into());
        abort.unmap();
        // As the machine does before it ends.
        pinning.cancel();
        let why = pinning.leave(ram.regions()).unwrap_err();
        assert_eq!(why.as_ref(), "the last device has failed");
    }
}
