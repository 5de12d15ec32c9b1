// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Layout of the memory file: where pages of guest RAM are in it, and how they are grouped.
//!
//! A chunk has one checksum; a block is what one thread reads or writes at a time. Both lie within one
//! region. Owns these numbers and the only conversions between them.

use crate::layout::{Layout, PAGE_BYTES, PageRun, to_usize};

/// Pages in a chunk: few enough to resolve a fault quickly, and enough to keep the index small (an
/// eighth of a permille of memory).
pub(crate) const CHUNK_PAGES: u64 = 16;

/// Chunks in a block: 4 MiB.
pub(crate) const BLOCK_CHUNKS: u64 = 64;

const BLOCK_PAGES: u64 = CHUNK_PAGES * BLOCK_CHUNKS;

/// Place of a region in the memory file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionPlace {
    /// Pages of 4 KiB.
    pub pages: u64,
    /// Index of its first chunk.
    pub first_chunk: u64,
    /// Offset of its first byte in the file.
    pub offset_bytes: u64,
    first_block: u64,
}

/// Places of all regions in the memory file.
#[derive(Clone, Debug)]
pub(crate) struct Geometry {
    regions: Vec<RegionPlace>,
    chunks: u64,
    blocks: u64,
    len_bytes: u64,
}

impl Geometry {
    /// Places the regions one after the other.
    pub(crate) fn new(layout: &Layout) -> Self {
        let mut all = Self { regions: Vec::new(), chunks: 0, blocks: 0, len_bytes: 0 };
        for region in layout.regions() {
            let pages = region.pages();
            all.regions.push(RegionPlace {
                pages,
                first_chunk: all.chunks,
                offset_bytes: all.len_bytes,
                first_block: all.blocks,
            });
            all.chunks += pages.div_ceil(CHUNK_PAGES);
            all.blocks += pages.div_ceil(BLOCK_PAGES);
            // The regions of a layout do not overlap, so the sum fits an address space.
            all.len_bytes += region.len_bytes;
        }
        all
    }

    /// The regions, in the order of the layout.
    pub(crate) fn regions(&self) -> &[RegionPlace] {
        &self.regions
    }

    /// Number of chunks.
    pub(crate) fn chunks(&self) -> u64 {
        self.chunks
    }

    /// Number of blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Length of the memory file.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The pages of a block.
    pub(crate) fn block(&self, block: u64) -> PageRun {
        let after = self.regions.partition_point(|region| region.first_block <= block);
        let region = after.saturating_sub(1);
        let place = &self.regions[region];
        let first = (block - place.first_block) * BLOCK_PAGES;
        PageRun { region, first, count: BLOCK_PAGES.min(place.pages - first) }
    }

    /// The pages of chunk number `chunk` of a region.
    pub(crate) fn chunk(&self, region: usize, chunk: u64) -> PageRun {
        let first = chunk * CHUNK_PAGES;
        let count = CHUNK_PAGES.min(self.regions[region].pages - first);
        PageRun { region, first, count }
    }

    /// The chunks of a run that begins at a chunk: index in the file, and pages.
    pub(crate) fn chunks_of(&self, run: PageRun) -> impl Iterator<Item = (usize, PageRun)> + '_ {
        debug_assert!(run.first.is_multiple_of(CHUNK_PAGES));
        let first_chunk = self.regions[run.region].first_chunk;
        (run.first / CHUNK_PAGES..run.end().div_ceil(CHUNK_PAGES))
            .map(move |chunk| (to_usize(first_chunk + chunk), self.chunk(run.region, chunk)))
    }

    /// Offset of a page in the file.
    pub(crate) fn offset_of(&self, region: usize, page: u64) -> u64 {
        self.regions[region].offset_bytes + page * PAGE_BYTES
    }
}
