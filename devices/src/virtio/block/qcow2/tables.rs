// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Check of the layout of a qcow2 image.
//!
//! Owns the conditions for using an image: its header, L1 table, refcount table, refcount blocks and L2 tables lie in
//! the file and do not overlap, so that no table is read or written as another, and before writing that none of their
//! clusters counts as free, so that none is allocated again. Data clusters are not checked: one that overlaps a table
//! harms only the image. Needs memory for one number per table; [`super::header`] limits the tables.

use imago::StorageExt as _;

use super::header::{Header, OFFSET_MAX, Table, damaged};
use crate::virtio::block::formatted::FormatError;
use crate::virtio::block::store::Store;

/// Offset bits of an L1 entry.
const ENTRY_OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// What an entry refers to has no other reference.
const COPIED: u64 = 1 << 63;
const L1_RESERVED: u64 = 0x7f00_0000_0000_01fe;
/// Bytes of a table read at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// What is going to be done with an image that passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Reading, which uses no refcounts.
    Read,
    /// Loading it for writing later: another host still writes to it, and has refcounts in memory.
    WriteLater,
    /// Writing to it.
    Write,
}

/// Checks the layout for a purpose.
pub(super) fn check(
    store: &Store,
    header: &Header,
    file_len_bytes: u64,
    purpose: Purpose,
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
    let mut blocks = Vec::new();
    if purpose != Purpose::Read {
        places.take("refcount table", header.references, &mut taken)?;
        for entry in read(store, header.references)? {
            let entry = entry?;
            places.take_cluster("refcount block", entry, &mut taken)?;
            blocks.push(entry);
        }
    }
    taken.sort_unstable();
    if let Some(pair) = taken.windows(2).find(|pair| pair.first() == pair.last()) {
        let offset = pair.first().map_or(0, |cluster| cluster << header.cluster_bits);
        return damaged(format!("two of its tables are at {offset:#x}"));
    }
    match purpose {
        Purpose::Read => Ok(()),
        Purpose::WriteLater => check_counts(store, header, &blocks, &[0]),
        Purpose::Write => check_counts(store, header, &blocks, &taken),
    }
}

/// Numbers of the L2 tables that a snapshot may share, in their order. A write makes a table of its own of such a one, and
/// what its entries say of their clusters is not to be relied on.
pub(super) fn shared(store: &Store, header: &Header) -> Result<Vec<u32>, FormatError> {
    let mut shared = Vec::new();
    for (number, entry) in (0..).zip(read(store, header.l1)?) {
        let entry = entry?;
        if entry & ENTRY_OFFSET != 0 && entry & COPIED == 0 {
            shared.push(number);
        }
    }
    Ok(shared)
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

/// Checks that each of these clusters, in ascending order, has a refcount; otherwise it would be allocated again.
fn check_counts(
    store: &Store,
    header: &Header,
    blocks: &[u64],
    clusters: &[u64],
) -> Result<(), FormatError> {
    let block_bits = u64::from(header.cluster_bits) + 3 - u64::from(header.reference_order);
    let mut block = vec![0; usize::try_from(header.cluster_bytes()).unwrap_or(0)];
    for clusters in clusters.chunk_by(|one, other| one >> block_bits == other >> block_bits) {
        let Some(index) = clusters.first().map(|cluster| cluster >> block_bits) else { continue };
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        match blocks.get(index) {
            Some(offset) if *offset != 0 => store.read(&mut block, *offset)?,
            _ => block.fill(0),
        }
        for cluster in clusters {
            let entry = cluster & ((1 << block_bits) - 1);
            if is_free(&block, entry, header.reference_order) {
                let what = match cluster {
                    0 => "its header".to_owned(),
                    _ => format!("its table at {:#x}", cluster << header.cluster_bits),
                };
                return damaged(format!("{what} counts as free (qemu-img check -r all)"));
            }
        }
    }
    Ok(())
}

/// Whether an entry of a refcount block, of 2^order bits, is zero.
fn is_free(block: &[u8], entry: u64, order: u32) -> bool {
    let first_bit = entry << order;
    let first = usize::try_from(first_bit / 8).unwrap_or(usize::MAX);
    match order {
        0..=2 => {
            let mask = (1_u32 << (1 << order)) - 1;
            block.get(first).is_none_or(|byte| u32::from(*byte) >> (first_bit % 8) & mask == 0)
        }
        _ => block.iter().skip(first).take(1 << (order - 3)).all(|byte| *byte == 0),
    }
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
