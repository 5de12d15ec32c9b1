// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Pool memory that is already mapped for a device when the VM starts.
//!
//! Owns the comparison of the mappings that the pool reports with the memory of this VM. Must never trust
//! the pool's addresses or lengths: a device that reached other memory than the guest gave it
//! would write to unexpected addresses.

use std::collections::BTreeMap;

use memory::GuestRam;
use prezero_pool_client::{PinnedGrant, PinnedRegion, pieces};

use super::error::VfioError;

/// The mapped pieces, as guest physical addresses and lengths, if they cover all of `ram`.
///
/// # Errors
/// They do not.
pub fn mapped_pieces(ram: &GuestRam, grant: &PinnedGrant) -> Result<BTreeMap<u64, u64>, VfioError> {
    let other = |what| Err(VfioError::OtherMemory(what));
    let regions = ram.regions();
    if regions.len() != grant.regions.len() {
        return other("it has another number of regions");
    }
    let mut mapped = BTreeMap::new();
    for (region, granted) in regions.iter().zip(&grant.regions) {
        let own = PinnedRegion {
            gpa: region.gpa(),
            len_bytes: region.len_bytes(),
            offset: region.file_offset(),
        };
        if own != *granted {
            return other("a region is elsewhere, or of another length");
        }
        if !region.is_prezeroed() || region.block_bytes().is_some() {
            return other("a region does not consist of what the pool gave");
        }
        let all = pieces(own, grant.piece_bytes, region.page_bytes());
        mapped.extend(all.map(|piece| (piece.gpa, piece.len_bytes)));
    }
    Ok(mapped)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use std::sync::Arc;

    use memory::{LATER_ALIGN_BYTES, Lease, ProvidedFile, RamConfig, RamLayout, ZoneSpec};
    use prezero_pool_client::SlotPages;

    use super::*;
    use crate::fakes::FakeTarget;
    use crate::{DmaGate, DmaMap, PinState, Pinning};

    const MIB: u64 = 1 << 20;
    const LAYOUT: RamLayout = RamLayout {
        hole_start: 4 * MIB,
        hole_end: 8 * MIB,
        high_hole: None,
        end: 1 << 40,
        later_align_bytes: LATER_ALIGN_BYTES,
    };

    /// 6 MiB of memory in two regions, from a pool or not.
    fn ram(is_pools: bool) -> Arc<GuestRam> {
        let zone = ZoneSpec { shared: true, ..ZoneSpec::new("mem0", 6 * MIB) };
        let config = RamConfig { zones: vec![zone] };
        let own = GuestRam::new(&config, LAYOUT).unwrap();
        if !is_pools {
            return Arc::new(own);
        }
        let file = Arc::clone(own.regions()[0].file().unwrap());
        let given = [ProvidedFile::prezeroed("mem0", file, Lease::new(Arc::new(())))];
        Arc::new(GuestRam::with_provided(&config, LAYOUT, &given).unwrap())
    }

    fn grant() -> PinnedGrant {
        let region = |gpa, len_bytes, offset| PinnedRegion { gpa, len_bytes, offset };
        PinnedGrant {
            size_bytes: 6 * MIB,
            pages: SlotPages::Small,
            piece_bytes: MIB,
            device_id: 1,
            space_id: 2,
            table_id: 3,
            regions: vec![region(0, 4 * MIB, 0), region(8 * MIB, 2 * MIB, 4 * MIB)],
        }
    }

    #[test]
    fn what_is_mapped_is_compared_with_the_memory() {
        let ram_of_pool = ram(true);
        let mapped = mapped_pieces(&ram_of_pool, &grant()).unwrap();
        let all = [0, 1, 2, 3, 8, 9].map(|at| (at * MIB, MIB));
        assert_eq!(mapped.into_iter().collect::<Vec<_>>(), all);
        assert!(mapped_pieces(&ram(false), &grant()).is_err(), "not the pool's memory");
        let changes: [fn(&mut PinnedGrant); 4] = [
            |grant| grant.regions[1].gpa += MIB,
            |grant| grant.regions[1].offset -= MIB,
            |grant| grant.regions[1].len_bytes -= MIB,
            |grant| grant.regions.truncate(1),
        ];
        for change in changes {
            let mut other = grant();
            change(&mut other);
            assert!(mapped_pieces(&ram_of_pool, &other).is_err(), "{other:?}");
        }
    }

    #[test]
    fn the_gate_is_open_and_all_is_pinned_from_the_start() {
        let target = Arc::new(FakeTarget::default());
        let mapped = mapped_pieces(&ram(true), &grant()).unwrap();
        let no_loss = Box::new(|reason: &Arc<str>| panic!("{reason}"));
        let dma_map = DmaMap::prepinned(target.clone(), mapped, MIB, no_loss);
        let gate = Arc::new(DmaGate::default());
        let (told, tell) = std::sync::mpsc::channel();
        let on_end = Box::new(move |state: &PinState| told.send(state.clone()).unwrap());
        let mut pinning = Pinning::complete(dma_map, Arc::clone(&gate), on_end);
        assert!(gate.is_open() && pinning.wait().is_ok());
        let progress = pinning.progress();
        assert_eq!((progress.pinned_bytes, progress.total_bytes), (6 * MIB, 6 * MIB));
        assert!(matches!(tell.recv().unwrap(), PinState::Pinned { .. }));
        assert!(target.mapped.lock().is_empty(), "nothing was mapped again");
    }
}
