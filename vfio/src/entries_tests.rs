// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How many mappings memory needs, and the size of pieces that follows from it.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::sync::Arc;

use memory::{GuestRam, RamConfig, RamHole, RamLayout, ZoneSpec};

use super::entries::Entries;
use crate::fakes::FakeTarget;
use crate::{DmaLimits, DmaMap, GuestRamPopulator, Pinning};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Memory that is never touched: some from the start, and zones that may get so many blocks each.
fn ram(boot_bytes: u64, zones: u64, blocks: u64, block_bytes: u64) -> Arc<GuestRam> {
    let mut all = vec![ZoneSpec { shared: true, ..ZoneSpec::new("boot", boot_bytes) }];
    for zone in 0..zones {
        let id = format!("later{zone}");
        let zone = ZoneSpec::new(&id, blocks * block_bytes);
        all.push(ZoneSpec { shared: true, block_bytes: Some(block_bytes), ..zone });
    }
    Arc::new(GuestRam::new(&RamConfig { zones: all }, RamLayout::default()).unwrap())
}

fn planned(ram: &Arc<GuestRam>, limit: u64) -> (u64, bool) {
    let limits = DmaLimits { entries: Some(limit), ..DmaLimits::default() };
    let target = Arc::new(FakeTarget { limits, ..FakeTarget::default() });
    let populator = GuestRamPopulator::new(Arc::clone(ram), None);
    let dma_map = DmaMap::plan(target, &populator, true, Box::new(|_| {}));
    (dma_map.piece_bytes(), Pinning::check(&dma_map, &populator, 0).is_ok())
}

#[test]
fn memory_that_may_come_is_counted_by_its_blocks() {
    let ram = ram(GIB, 1, 256, 16 * MIB);
    let entries = Entries::of(ram.regions(), 2 * MIB);
    assert_eq!(entries, Entries { pieces: 513, plugged: 0, blocks: 256 });
    // Its 4 GiB would be 2048 pieces. A quarter of the limit is left for other uses.
    assert_eq!(planned(&ram, 1100), (2 * MIB, true));
    assert_eq!(planned(&ram, 1000), (4 * MIB, true), "250, and 256 blocks");
    let gpa = ram.regions()[1].gpa();
    ram.plug(&(gpa..gpa + 32 * MIB)).unwrap();
    assert_eq!(Entries::of(ram.regions(), 2 * MIB).now(), 515);
}

#[test]
fn a_block_is_one_mapping_however_large_it_is() {
    let ram = ram(GIB, 1, 4, 256 * MIB);
    let populator = GuestRamPopulator::new(Arc::clone(&ram), None);
    let target = Arc::new(FakeTarget::default());
    let dma_map = DmaMap::plan(target, &populator, true, Box::new(|_| {}));
    assert_eq!(dma_map.chunk_bytes(), 256 * MIB, "no chunk ends within a block");
}

#[test]
fn memory_that_is_there_comes_before_blocks_beyond_the_limit() {
    let ram = ram(GIB, 4, 256, 16 * MIB);
    assert_eq!(planned(&ram, 2100), (2 * MIB, true), "787 are left for 1024 blocks");
    assert_eq!(planned(&ram, 1000), (4 * MIB, true), "375 are left for them");
    assert!(planned(&ram, 2).1, "one piece and a short one");
    assert!(!planned(&ram, 1).1);
}

/// As on hosts with an IOMMU of AMD's, where memory from 1011 GiB on is in three parts.
#[test]
fn terabytes_fit_into_the_mappings_of_type1() {
    const TIB: u64 = 1 << 40;
    const LIMIT: u64 = 65535;
    let high_hole = Some(RamHole { start: 1012 * GIB, end: TIB });
    let layout = RamLayout { high_hole, ..RamLayout::default() };
    for (size_bytes, lent, piece_bytes) in [
        (TIB, false, 64 * MIB),
        (2 * TIB, false, 64 * MIB),
        (4 * TIB, false, 128 * MIB),
        (TIB, true, 32 * MIB),
        (2 * TIB, true, 64 * MIB),
        (4 * TIB, true, 128 * MIB),
    ] {
        let zone = |id: &str| ZoneSpec { shared: true, ..ZoneSpec::new(id, size_bytes / 2) };
        let config = RamConfig { zones: vec![zone("a"), zone("b")] };
        let ram = Arc::new(GuestRam::new(&config, layout).unwrap());
        let limits = DmaLimits { entries: Some(LIMIT), ..DmaLimits::default() };
        let target = Arc::new(FakeTarget { limits, ..FakeTarget::default() });
        let populator = GuestRamPopulator::new(Arc::clone(&ram), None);
        let dma_map = DmaMap::plan(target.clone(), &populator, lent, Box::new(|_| {}));
        assert_eq!(dma_map.piece_bytes(), piece_bytes, "{size_bytes:#x}, {lent}");
        Pinning::check(&dma_map, &populator, 0).unwrap();
        for region in ram.regions() {
            dma_map.map(region, &(0..region.len_bytes())).unwrap();
        }
        assert_eq!(dma_map.mapped_bytes(), size_bytes);
        let mut mapped = target.mapped.lock().clone();
        mapped.sort_by_key(|piece| piece.start);
        assert!(mapped.len() as u64 <= LIMIT - LIMIT / 4, "{} mappings", mapped.len());
        assert!(mapped.array_windows().all(|[one, next]| one.end <= next.start));
        assert!(mapped.iter().all(|piece| piece.end <= 1012 * GIB || piece.start >= TIB));
        assert_eq!(mapped.last().map(|piece| piece.end), Some(size_bytes + 13 * GIB));
    }
}
