// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Maps of the blocks of a region that its guest gets one by one.
//!
//! Owns which blocks the guest has, how many, and which of the others the host has not got back. In which order blocks come and
//! go is decided in [`crate::plugging`].

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use page_bitmap::PageBitmap;

/// Which blocks of a region are plugged.
#[derive(Debug)]
pub(crate) struct Plugged {
    /// Length of a block.
    pub block_bytes: u64,
    /// The plugged blocks.
    blocks: PageBitmap,
    /// Their number: each request of the guest asks for it, which is to cost no look at all blocks.
    count: AtomicU64,
    /// Unplugged blocks of which some pages were not returned to the host: contents were still to arrive, or
    /// pages were pinned.
    pub unreturned: PageBitmap,
}

impl Plugged {
    /// A map without plugged blocks for a region of this length.
    ///
    /// # Errors
    /// When the host has no memory for the maps.
    pub fn new(block_bytes: u64, len_bytes: u64) -> io::Result<Self> {
        let count = len_bytes / block_bytes.max(1);
        Ok(Self {
            block_bytes,
            blocks: PageBitmap::sparse(count)?,
            count: AtomicU64::new(0),
            unreturned: PageBitmap::sparse(count)?,
        })
    }

    /// The plugged blocks, for look-ups.
    pub fn blocks(&self) -> &PageBitmap {
        &self.blocks
    }

    /// Number of plugged blocks.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Notes that these blocks are plugged. Only one thread at a time notes any.
    pub fn plug(&self, blocks: Range<u64>) {
        self.count.fetch_add(self.blocks.set_range(blocks), Ordering::AcqRel);
    }

    /// Notes that these blocks are not plugged.
    pub fn unplug(&self, blocks: Range<u64>) {
        self.count.fetch_sub(self.blocks.claim_range(blocks), Ordering::AcqRel);
    }

    /// The bytes of the region in these blocks.
    pub fn range_of(&self, blocks: &Range<u64>) -> Range<u64> {
        blocks.start * self.block_bytes..blocks.end * self.block_bytes
    }
}
