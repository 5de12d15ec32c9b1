// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Pool memory that is already mapped for a device when the VM starts.
//!
//! Owns the comparison of the mappings that the pool reports with the memory of this VM. Must never trust
//! the pool's addresses or lengths: a device that reached other memory than the guest gave it
//! would write to unexpected addresses.

use std::collections::BTreeMap;

use memory::{GuestRam, RamRegion};
use prezero_pool_client::{PinnedGrant, PinnedRegion, pieces};

use super::error::VfioError;

/// The mapped pieces, as guest physical addresses and lengths, if they cover all of `ram`.
///
/// # Errors
/// They do not.
pub fn mapped_pieces(ram: &GuestRam, grant: &PinnedGrant) -> Result<BTreeMap<u64, u64>, VfioError> {
    let own = regions_of(ram);
    if let Some(why) = first_difference(&own, &grant.regions) {
        return Err(VfioError::OtherMemory(why));
    }
    let is_pools = |region: &RamRegion| region.is_prezeroed() && region.block_bytes().is_none();
    if let Some(region) = ram.regions().iter().find(|region| !is_pools(region)) {
        let why = format!("what the VM has at {:#x} is not what the pool gave", region.gpa());
        return Err(VfioError::OtherMemory(why));
    }
    let page_bytes = ram.regions().iter().map(|region| region.page_bytes());
    let all = own
        .iter()
        .zip(page_bytes)
        .flat_map(|(region, page_bytes)| pieces(*region, grant.piece_bytes, page_bytes));
    Ok(all.map(|piece| (piece.gpa, piece.len_bytes)).collect())
}

/// The regions as the pool describes them: zones have the numbers of their order.
fn regions_of(ram: &GuestRam) -> Vec<PinnedRegion> {
    let (mut all, mut zones) = (Vec::new(), Vec::new());
    for region in ram.regions() {
        if zones.last() != Some(&region.zone_id()) {
            zones.push(region.zone_id());
        }
        all.push(PinnedRegion {
            zone: zones.len().saturating_sub(1),
            gpa: region.gpa(),
            len_bytes: region.len_bytes(),
            offset: region.file_offset(),
        });
    }
    all
}

fn first_difference(own: &[PinnedRegion], granted: &[PinnedRegion]) -> Option<String> {
    let at = (0..own.len().max(granted.len())).find(|at| own.get(*at) != granted.get(*at))?;
    let shown = |regions: &[PinnedRegion]| {
        regions.get(at).map_or_else(
            || "nothing more".to_owned(),
            |PinnedRegion { zone, gpa, len_bytes, offset }| {
                format!("{len_bytes} bytes at {gpa:#x}, from byte {offset:#x} of zone {zone} on")
            },
        )
    };
    Some(format!("the VM has {}, and the pool has mapped {}", shown(own), shown(granted)))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use std::sync::Arc;

    use memory::{LATER_ALIGN_BYTES, Lease, ProvidedFile, RamConfig, RamHole, RamLayout, ZoneSpec};
    use prezero_pool_client::{PinnedZone, SlotPages};

    use super::*;
    use crate::fakes::FakeTarget;
    use crate::{DmaGate, DmaMap, PinState, Pinning};

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    const TIB: u64 = 1 << 40;
    const LAYOUT: RamLayout = RamLayout {
        hole_start: 4 * MIB,
        hole_end: 8 * MIB,
        high_hole: None,
        end: 1 << 40,
        later_align_bytes: LATER_ALIGN_BYTES,
    };

    /// Memory of zones of these sizes, from a pool or not. It is never touched.
    fn ram_of(sizes: &[u64], layout: RamLayout, is_pools: bool) -> Arc<GuestRam> {
        let zone = |(at, size_bytes): (usize, &u64)| ZoneSpec {
            shared: true,
            ..ZoneSpec::new(format!("mem{at}"), *size_bytes)
        };
        let config = RamConfig { zones: sizes.iter().enumerate().map(zone).collect() };
        let own = GuestRam::new(&config, layout).unwrap();
        if !is_pools {
            return Arc::new(own);
        }
        let given = config.zones.iter().map(|zone| {
            let mut regions = own.regions().iter();
            let region = regions.find(|region| region.zone_id() == zone.id).unwrap();
            let file = Arc::clone(region.file().unwrap());
            ProvidedFile::prezeroed(&zone.id, file, Lease::new(Arc::new(())))
        });
        let given: Vec<_> = given.collect();
        Arc::new(GuestRam::with_provided(&config, layout, &given).unwrap())
    }

    /// 6 MiB of memory in two regions, from a pool or not.
    fn ram(is_pools: bool) -> Arc<GuestRam> {
        ram_of(&[6 * MIB], LAYOUT, is_pools)
    }

    fn region(zone: usize, gpa: u64, len_bytes: u64, offset: u64) -> PinnedRegion {
        PinnedRegion { zone, gpa, len_bytes, offset }
    }

    fn grant_of(piece_bytes: u64, sizes: &[u64], regions: Vec<PinnedRegion>) -> PinnedGrant {
        let zone =
            |size_bytes: &u64| PinnedZone { size_bytes: *size_bytes, pages: SlotPages::Small };
        PinnedGrant {
            device: "0000:65:00.0".parse().unwrap(),
            zones: sizes.iter().map(zone).collect(),
            piece_bytes,
            device_id: 1,
            space_id: 2,
            table_id: 3,
            regions,
        }
    }

    fn grant() -> PinnedGrant {
        let regions = vec![region(0, 0, 4 * MIB, 0), region(0, 8 * MIB, 2 * MIB, 4 * MIB)];
        grant_of(MIB, &[6 * MIB], regions)
    }

    /// Makes a grant one of other memory.
    type Change = fn(&mut PinnedGrant);

    #[test]
    fn what_is_mapped_is_compared_with_the_memory() {
        let ram_of_pool = ram(true);
        let mapped = mapped_pieces(&ram_of_pool, &grant()).unwrap();
        let all = [0, 1, 2, 3, 8, 9].map(|at| (at * MIB, MIB));
        assert_eq!(mapped.into_iter().collect::<Vec<_>>(), all);
        let error = mapped_pieces(&ram(false), &grant()).unwrap_err().to_string();
        assert!(error.contains("what the VM has at 0x0 is not what the pool gave"), "{error}");
        let changes: [(Change, &str); 5] = [
            (|grant| grant.regions[1].gpa += MIB, "at 0x900000"),
            (|grant| grant.regions[1].offset -= MIB, "from byte 0x300000"),
            (|grant| grant.regions[1].len_bytes -= MIB, "has mapped 1048576 bytes"),
            (|grant| grant.regions[1].zone = 1, "of zone 1"),
            (|grant| grant.regions.truncate(1), "has mapped nothing more"),
        ];
        for (change, named) in changes {
            let mut other = grant();
            change(&mut other);
            let error = mapped_pieces(&ram_of_pool, &other).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
            assert!(error.contains("2097152 bytes at 0x800000"), "{error}");
        }
    }

    /// As hosts with an IOMMU of AMD's have it, and others.
    fn layout(has_hole: bool) -> RamLayout {
        let hole = RamHole { start: 1012 * GIB, end: TIB };
        RamLayout { high_hole: has_hole.then_some(hole), ..RamLayout::default() }
    }

    #[test]
    fn terabytes_are_mapped_around_the_hole_or_not_at_all() {
        let rest = |size_bytes| size_bytes - 1011 * GIB;
        for size_bytes in [1012 * GIB, TIB, 2 * TIB, 4 * TIB] {
            let split = vec![
                region(0, 0, 3 * GIB, 0),
                region(0, 4 * GIB, 1008 * GIB, 3 * GIB),
                region(0, TIB, rest(size_bytes), 1011 * GIB),
            ];
            let whole =
                vec![region(0, 0, 3 * GIB, 0), region(0, 4 * GIB, size_bytes - 3 * GIB, 3 * GIB)];
            for (has_hole, regions, other) in [(true, &split, &whole), (false, &whole, &split)] {
                let ram = ram_of(&[size_bytes], layout(has_hole), true);
                let grant = grant_of(64 * MIB, &[size_bytes], regions.clone());
                let mapped = mapped_pieces(&ram, &grant).unwrap();
                assert_eq!(mapped.len() as u64, size_bytes / (64 * MIB));
                assert_eq!(mapped.values().sum::<u64>(), size_bytes);
                let end = mapped.last_key_value().map(|(gpa, len_bytes)| gpa + len_bytes);
                assert_eq!(end, Some(size_bytes + if has_hole { 13 * GIB } else { GIB }));
                let in_hole = mapped.range(1012 * GIB - 64 * MIB + 1..TIB).count();
                assert_eq!(in_hole == 0, has_hole, "{size_bytes:#x}");
                let error = mapped_pieces(&ram, &grant_of(64 * MIB, &[size_bytes], other.clone()));
                let error = error.unwrap_err().to_string();
                assert!(error.contains("at 0x100000000"), "{error}");

                let target = Arc::new(FakeTarget::default());
                let dma_map = DmaMap::prepinned(target, mapped, 64 * MIB, Box::new(|_| {}));
                assert_eq!(dma_map.mapped_bytes(), size_bytes);
            }
        }
    }

    #[test]
    fn zones_of_a_node_each_are_compared_in_their_order() {
        let sizes = [TIB, 2 * TIB, TIB];
        let ram = ram_of(&sizes, layout(true), true);
        let regions = vec![
            region(0, 0, 3 * GIB, 0),
            region(0, 4 * GIB, 1008 * GIB, 3 * GIB),
            region(0, TIB, 13 * GIB, 1011 * GIB),
            region(1, 1037 * GIB, 2 * TIB, 0),
            region(2, 3085 * GIB, TIB, 0),
        ];
        let grant = grant_of(64 * MIB, &sizes, regions);
        let mapped = mapped_pieces(&ram, &grant).unwrap();
        assert_eq!((mapped.len(), mapped.values().sum::<u64>()), (65536, 4 * TIB));
        let mut swapped = grant.clone();
        (swapped.regions[3].zone, swapped.regions[4].zone) = (2, 1);
        let error = mapped_pieces(&ram, &swapped).unwrap_err().to_string();
        assert!(error.contains("of zone 1 on, and the pool has mapped"), "{error}");
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
