// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The number of IOMMU mappings that guest memory needs, by the grain in which each region is mapped.
//!
//! Owns that grain. type1 has a limit on mappings, so the count has to be neither too low, or mapping fails in the
//! middle, nor too high, or pieces become so large that a balloon can give nothing back.

use std::sync::Arc;

use memory::RamRegion;

/// Size of the mappings of a region in bytes. Hot-plugged memory is mapped by its blocks; all others in pieces of
/// `piece_bytes`, or of a host page, if that is larger. All are powers of two.
pub(super) fn grain_bytes(region: &RamRegion, piece_bytes: u64) -> u64 {
    region.block_bytes().unwrap_or_else(|| piece_bytes.max(region.page_bytes())).max(1)
}

/// Numbers of mappings; upper bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entries {
    /// Of memory that is there from the start.
    pub pieces: u64,
    /// Of plugged blocks.
    pub plugged: u64,
    /// Of all blocks, plugged or not.
    pub blocks: u64,
}

impl Entries {
    /// Those of `regions`, with pieces of `piece_bytes`.
    pub(super) fn of(regions: &[Arc<RamRegion>], piece_bytes: u64) -> Self {
        let mut entries = Self::default();
        for region in regions {
            let grain = grain_bytes(region, piece_bytes);
            if region.block_bytes().is_some() {
                entries.plugged += region.usable_bytes().div_ceil(grain);
                entries.blocks += region.len_bytes().div_ceil(grain);
            } else {
                // Chunks end at host huge pages, so that the first and the last piece of a region may be short.
                entries.pieces += region.len_bytes().div_ceil(grain) + 1;
            }
        }
        entries
    }

    /// Those that are needed now.
    pub(super) fn now(self) -> u64 {
        self.pieces.saturating_add(self.plugged)
    }
}
