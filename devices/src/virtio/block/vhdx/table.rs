// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The block allocation table of a VHDX image.
//!
//! Owns the offset of each block in the file, the set of modified parts of the table, and the offset of the next new
//! block. A new block is entered after its data have been written.

use std::collections::BTreeSet;
use std::io;

use imago::StorageExt as _;

use super::layout::{Area, Layout, MIB, damaged};
use crate::virtio::block::formatted::FormatError;
use crate::virtio::block::store::Store;

const STATE: u64 = 7;
const OFFSET: u64 = !0xf_ffff;
const FULLY_PRESENT: u64 = 6;
const PARTIALLY_PRESENT: u64 = 7;
/// States of blocks without data: not present, undefined, zero, unmapped.
const ABSENT: std::ops::RangeInclusive<u64> = 0..=3;
/// Entries of the table written at a time: 4 KiB.
const PIECE_ENTRIES: usize = 512;

pub(super) struct BlockTable {
    entries: Vec<u64>,
    chunk_blocks: u64,
    block_bytes: u64,
    offset: u64,
    /// Number of blocks.
    blocks: u64,
    /// Modified pieces.
    changed: BTreeSet<usize>,
    /// Offset of the next new block.
    end: u64,
}

impl BlockTable {
    /// Reads and checks the table.
    pub(super) fn read(
        store: &Store,
        layout: &Layout,
        file_len_bytes: u64,
    ) -> Result<Self, FormatError> {
        let count = usize::try_from(layout.entries()).unwrap_or(usize::MAX);
        let mut bytes = vec![0; count.saturating_mul(8)];
        store.read(&mut bytes, layout.table.offset)?;
        let (entries, _) = bytes.as_chunks();
        let entries = entries.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let mut table = Self {
            entries,
            chunk_blocks: layout.chunk_blocks(),
            block_bytes: layout.block_bytes,
            offset: layout.table.offset,
            blocks: layout.blocks(),
            changed: BTreeSet::new(),
            end: 0,
        };
        table.check(layout, file_len_bytes)?;
        Ok(table)
    }

    fn check(&mut self, layout: &Layout, file_len_bytes: u64) -> Result<(), FormatError> {
        let mut places = layout.reserved.clone();
        for block in 0..self.blocks {
            let entry = self.entry(block);
            match entry & STATE {
                FULLY_PRESENT => {
                    places.push(Area { offset: entry & OFFSET, len_bytes: self.block_bytes });
                }
                PARTIALLY_PRESENT => return damaged("it has parts of blocks, and no parent image"),
                state if ABSENT.contains(&state) => {}
                state => return damaged(format!("it has a block in the state {state}")),
            }
        }
        places.sort_unstable_by_key(|place| place.offset);
        let mut end = 0;
        for place in places {
            let place_end = place.offset.saturating_add(place.len_bytes);
            if place.offset < end || place_end > file_len_bytes {
                return damaged(format!("it has a block at {:#x}", place.offset));
            }
            end = place_end;
        }
        // After everything else in the file.
        self.end = file_len_bytes.next_multiple_of(MIB);
        Ok(())
    }

    fn index(&self, block: u64) -> usize {
        usize::try_from(block + block / self.chunk_blocks).unwrap_or(usize::MAX)
    }

    fn entry(&self, block: u64) -> u64 {
        self.entries.get(self.index(block)).copied().unwrap_or(0)
    }

    /// Offset of a block in the file; `None` if it has no data.
    pub(super) fn place(&self, block: u64) -> Option<u64> {
        let entry = self.entry(block);
        (entry & STATE == FULLY_PRESENT).then_some(entry & OFFSET)
    }

    /// Whether all blocks have data.
    pub(super) fn is_complete(&self) -> bool {
        (0..self.blocks).all(|block| self.place(block).is_some())
    }

    /// Offset for the next new block; unchanged until [`Self::set`] or [`Self::skip`].
    pub(super) fn next_place(&self) -> u64 {
        self.end
    }

    /// Never uses a place for a block.
    pub(super) fn skip(&mut self, place: u64) {
        self.end = self.end.max(place.saturating_add(self.block_bytes));
    }

    /// Enters a block.
    pub(super) fn set(&mut self, block: u64, place: u64) {
        let index = self.index(block);
        self.skip(place);
        if let Some(entry) = self.entries.get_mut(index) {
            *entry = place | FULLY_PRESENT;
            self.changed.insert(index / PIECE_ENTRIES);
        }
    }

    /// Writes modified pieces; after an error the rest stays modified.
    pub(super) fn write(&mut self, store: &Store) -> io::Result<()> {
        while let Some(piece) = self.changed.first().copied() {
            let first = piece * PIECE_ENTRIES;
            let last = self.entries.len().min(first + PIECE_ENTRIES);
            let entries = self.entries.get(first..last).unwrap_or_default();
            let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
            store.write(&bytes, self.offset + 8 * first as u64)?;
            self.changed.remove(&piece);
        }
        Ok(())
    }

    pub(super) fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }
}
