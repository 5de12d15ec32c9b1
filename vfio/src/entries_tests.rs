// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How many mappings memory needs, and the size of pieces that follows from it.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::sync::Arc;

use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};

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
