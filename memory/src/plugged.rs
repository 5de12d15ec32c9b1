// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Maps of the blocks of a region that its guest gets one by one.
//!
//! Owns which blocks the guest has, and which of the others the host has not got back. In which order blocks come and
//! go is decided in [`crate::plugging`].

use std::io;
use std::ops::Range;

use page_bitmap::PageBitmap;

/// Which blocks of a region are plugged.
#[derive(Debug)]
pub(crate) struct Plugged {
    /// Length of a block.
    pub block_bytes: u64,
    /// The plugged blocks.
    pub blocks: PageBitmap,
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
            unreturned: PageBitmap::sparse(count)?,
        })
    }

    /// The bytes of the region in these blocks.
    pub fn range_of(&self, blocks: &Range<u64>) -> Range<u64> {
        blocks.start * self.block_bytes..blocks.end * self.block_bytes
    }
}
