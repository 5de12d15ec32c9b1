// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Check of the layout of a qcow2 image.
//!
//! Owns the conditions for using an image: its header, L1 table, refcount table, refcount blocks and L2 tables lie in
//! the file and do not overlap, so that no table is read or written as another. Data clusters are not checked: one that
//! overlaps a table harms only the image. Needs memory for one number per table; [`super::header`] limits the tables.

use imago::StorageExt as _;

use super::header::{Header, OFFSET_MAX, Table, damaged};
use crate::virtio::block::formatted::FormatError;
use crate::virtio::block::store::Store;

/// Offset bits of an L1 entry.
const ENTRY_OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const L1_RESERVED: u64 = 0x7f00_0000_0000_01fe;
/// Bytes of a table read at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// Checks the layout. The refcount structures are checked only if `may_write` is set; readers do not use them.
pub(super) fn check(
    store: &Store,
    header: &Header,
    file_len_bytes: u64,
    may_write: bool,
) -> Result<(), FormatError> {
    let places = Places { header, file_len_bytes };
    // Numbers of the clusters that are taken.
    let mut taken = vec![0];
    places.take("L1 table", header.l1, &mut taken)?;
    for entry in read(store, header.l1)? {
        let entry = entry?;
        if entry & L1_RESERVED != 0 {
            return damaged(format!("its L1 table has the entry {entry:#x}"));
        }
        places.take_cluster("L2 table", entry & ENTRY_OFFSET, &mut taken)?;
    }
    let mut first_block = None;
    if may_write {
        places.take("refcount table", header.references, &mut taken)?;
        for (index, entry) in read(store, header.references)?.enumerate() {
            let entry = entry?;
            if index == 0 {
                first_block = Some(entry);
            }
            places.take_cluster("refcount block", entry, &mut taken)?;
        }
    }
    taken.sort_unstable();
    if let Some(pair) = taken.windows(2).find(|pair| pair.first() == pair.last()) {
        let offset = pair.first().map_or(0, |cluster| cluster << header.cluster_bits);
        return damaged(format!("two of its tables are at {offset:#x}"));
    }
    if may_write { check_first_count(store, header, first_block.unwrap_or(0)) } else { Ok(()) }
}

struct Places<'a> {
    header: &'a Header,
    file_len_bytes: u64,
}

impl Places<'_> {
    /// Adds the clusters of a table, which must have an offset.
    fn take(&self, what: &str, table: Table, taken: &mut Vec<u64>) -> Result<(), FormatError> {
        if table.offset == 0 && table.entries > 0 {
            return damaged(format!("its {what} is nowhere"));
        }
        let clusters = table.len_bytes().div_ceil(self.header.cluster_bytes());
        for index in 0..clusters {
            let offset = table.offset.saturating_add(index << self.header.cluster_bits);
            self.take_cluster(what, offset, taken)?;
        }
        Ok(())
    }

    /// Adds a table of one cluster; offset 0 stands for none.
    fn take_cluster(
        &self,
        what: &str,
        offset: u64,
        taken: &mut Vec<u64>,
    ) -> Result<(), FormatError> {
        if offset == 0 {
            return Ok(());
        }
        let cluster_bytes = self.header.cluster_bytes();
        let is_inside = offset < self.file_len_bytes && offset < OFFSET_MAX;
        if !is_inside || !offset.is_multiple_of(cluster_bytes) {
            return damaged(format!("its {what} is at {offset:#x}"));
        }
        taken.push(offset >> self.header.cluster_bits);
        Ok(())
    }
}

/// Checks that the cluster of the header has a refcount; otherwise it would be allocated for data.
fn check_first_count(store: &Store, header: &Header, block: u64) -> Result<(), FormatError> {
    let mut bytes = [0; 8];
    if block != 0 {
        store.read(&mut bytes[..], block)?;
    }
    let bits = 1_u32 << header.reference_order;
    let is_zero = if bits < 8 {
        bytes.first().is_some_and(|byte| u32::from(*byte) & ((1 << bits) - 1) == 0)
    } else {
        let len = usize::try_from(bits / 8).unwrap_or(bytes.len());
        bytes.iter().take(len).all(|byte| *byte == 0)
    };
    if is_zero {
        return damaged("its header counts as free (qemu-img check -r all)");
    }
    Ok(())
}

/// Reads the entries of a table piece by piece.
fn read(
    store: &Store,
    table: Table,
) -> Result<impl Iterator<Item = Result<u64, FormatError>> + '_, FormatError> {
    let end = table.offset.checked_add(table.len_bytes());
    let Some(end) = end.filter(|end| *end <= OFFSET_MAX) else {
        return damaged(format!("it has a table at {:#x}", table.offset));
    };
    let pieces = (0..table.len_bytes().div_ceil(PIECE_BYTES)).flat_map(move |index| {
        let offset = table.offset + index * PIECE_BYTES;
        let len_bytes = (end - offset).min(PIECE_BYTES);
        let mut bytes = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
        let failed = store.read(&mut bytes, offset).err();
        let (entries, _) = bytes.as_chunks();
        let entries: Vec<_> = match failed {
            Some(error) => vec![Err(error.into())],
            None => entries.iter().map(|bytes| Ok(u64::from_be_bytes(*bytes))).collect(),
        };
        entries
    });
    Ok(pieces)
}
