// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The header of a qcow2 image.
//!
//! Owns its limits: a header that is accepted here is bounded in size and uses no unsupported feature. Of its fields only
//! the feature bits are written here.

use std::io;

use imago::StorageExt as _;

use crate::virtio::block::formatted::FormatError;
use crate::virtio::block::store::Store;

const MAGIC: &[u8] = b"QFI\xfb";
const HEADER_BYTES_V2: usize = 72;
const HEADER_BYTES_V3: usize = 104;
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Maximum sizes of the tables that stay in memory, which are those of QEMU.
const L1_BYTES_MAX: u64 = 32 << 20;
const REFERENCE_TABLE_BYTES_MAX: u64 = 8 << 20;
/// Maximum order of a refcount, which has 2^order bits.
const REFERENCE_ORDER_MAX: u32 = 6;
const BACKING_NAME_BYTES_MAX: u32 = 1023;
/// Limit of offsets, which have 56 bits.
pub(super) const OFFSET_MAX: u64 = 1 << 56;
/// Length of an entry of the feature name table.
const FEATURE_NAME_BYTES: usize = 48;

const EXTENSION_END: u32 = 0;
const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXTENSION_FEATURE_NAMES: u32 = 0x6803_f857;

/// Unsupported incompatible features, with their names.
const INCOMPATIBLE: [(u64, &str); 3] = [
    (1 << 2, "an external data file"),
    (1 << 3, "another compression than deflate"),
    (1 << 4, "subclusters (extended L2 entries)"),
];
/// Offsets of the feature bits in the header of version 3.
const INCOMPATIBLE_AT: usize = 72;
const AUTOCLEAR_AT: usize = 88;

const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;

/// A table in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) offset: u64,
    pub(super) entries: u64,
}

impl Table {
    pub(super) fn len_bytes(self) -> u64 {
        self.entries.saturating_mul(8)
    }

    /// Its start and end in the file.
    pub(super) fn area(self) -> std::ops::Range<u64> {
        self.offset..self.offset.saturating_add(self.len_bytes())
    }
}

/// Reference to a backing file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BackingName {
    pub(super) name: String,
    pub(super) format: Option<String>,
}

/// The parsed header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) cluster_bits: u32,
    pub(super) size_bytes: u64,
    pub(super) l1: Table,
    pub(super) references: Table,
    /// A refcount has 2^order bits.
    pub(super) reference_order: u32,
    pub(super) backing: Option<BackingName>,
    /// Whether clusters can be freed without exposing the backing file (version 3).
    pub(super) can_free: bool,
    /// Whether it is marked as in use: a host writes to it, or did until it died, and its refcounts may be wrong.
    pub(super) is_dirty: bool,
    /// Whether it has features that a writer that does not know them has to clear.
    pub(super) has_autoclear: bool,
}

impl Header {
    /// The bytes that the library changes: offset and length of the refcount table, when that grows.
    pub(super) const MAY_CHANGE: std::ops::Range<usize> = 48..60;

    /// Maximum length of a header, which is the largest cluster.
    pub(super) const BYTES_MAX: u64 = 1 << *CLUSTER_BITS.end();

    /// Reads and checks the header.
    pub(super) fn read(store: &Store) -> Result<Self, FormatError> {
        let mut fixed = [0; HEADER_BYTES_V3];
        store.read(&mut fixed[..], 0)?;
        let cluster_bits = Fields(&fixed).cluster_bits()?;
        let mut cluster = vec![0; 1 << cluster_bits];
        store.read(&mut cluster, 0)?;
        Self::parse(&cluster, cluster_bits)
    }

    /// Parses the first cluster.
    fn parse(cluster: &[u8], cluster_bits: u32) -> Result<Self, FormatError> {
        let fields = Fields(cluster);
        // Another one than was read before, if the file changed in between.
        if fields.cluster_bits()? != cluster_bits {
            return damaged("its header changes while it is read");
        }
        let cluster_bytes = 1_u64 << cluster_bits;
        let version = fields.u32(4);
        let is_v3 = match version {
            2 => false,
            3 => true,
            other => return unsupported(format!("version {other} of the format")),
        };
        if fields.u32(32) != 0 {
            return unsupported("encryption");
        }
        let (mut reference_order, mut header_bytes) = (4, HEADER_BYTES_V2);
        if is_v3 {
            check_features(fields.u64(INCOMPATIBLE_AT))?;
            reference_order = fields.u32(96);
            header_bytes = usize::try_from(fields.u32(100)).unwrap_or(usize::MAX);
            if !(HEADER_BYTES_V3..=cluster.len()).contains(&header_bytes) {
                return damaged(format!("its header has {header_bytes} bytes"));
            }
            // The field of the compression type.
            if header_bytes > HEADER_BYTES_V3 && fields.bytes(104, 1) != [0] {
                return unsupported("another compression than deflate");
            }
        }
        if reference_order > REFERENCE_ORDER_MAX {
            return damaged("its reference counts have more than 64 bits");
        }
        let size_bytes = fields.u64(24);
        let l1 = Table { offset: fields.u64(40), entries: fields.u32(36).into() };
        let references = fields.references(cluster_bits);
        // What one entry of the first table stands for.
        let l2_reach_bytes = (cluster_bytes / 8).saturating_mul(cluster_bytes);
        let entries_needed = size_bytes.div_ceil(l2_reach_bytes);
        if size_bytes > OFFSET_MAX || entries_needed.saturating_mul(8) > L1_BYTES_MAX {
            return damaged(format!(
                "its disk of {size_bytes} bytes is too large for its clusters"
            ));
        }
        if l1.len_bytes() > L1_BYTES_MAX || l1.entries < entries_needed {
            return damaged(format!("its L1 table has {} entries", l1.entries));
        }
        if references.len_bytes() > REFERENCE_TABLE_BYTES_MAX || references.entries == 0 {
            return damaged(format!("its refcount table has {} entries", references.entries));
        }
        let mut backing = fields.backing_name(cluster_bytes)?;
        if is_v3 {
            let format = backing_format(cluster, header_bytes)?;
            if let Some(backing) = &mut backing {
                backing.format = format;
            }
        }
        Ok(Self {
            cluster_bits,
            size_bytes,
            l1,
            references,
            reference_order,
            backing,
            can_free: is_v3,
            is_dirty: is_v3 && fields.u64(INCOMPATIBLE_AT) & DIRTY != 0,
            has_autoclear: is_v3 && fields.u64(AUTOCLEAR_AT) != 0,
        })
    }

    /// Where the refcount table is, according to a header with this start.
    pub(super) fn references_area(start: &[u8]) -> Option<std::ops::Range<u64>> {
        let fields = Fields(start);
        Some(fields.references(fields.cluster_bits().ok()?).area())
    }

    /// Fails if it is marked as in use, when no other host can have it in use.
    pub(super) fn check_closed(&self) -> Result<(), FormatError> {
        if self.is_dirty {
            return damaged(
                "it was not closed, and its reference counts may be wrong (qemu-img check -r all)",
            );
        }
        Ok(())
    }

    /// Marks an image of version 3 as in use or as closed. No other incompatible feature is supported, so no other bit
    /// is set.
    pub(super) fn mark(store: &Store, is_dirty: bool) -> io::Result<()> {
        let bits = if is_dirty { DIRTY } else { 0 };
        store.write(&bits.to_be_bytes()[..], INCOMPATIBLE_AT as u64)
    }

    /// Clears the features that only a writer that knows them keeps up to date.
    pub(super) fn clear_autoclear(store: &Store) -> io::Result<()> {
        store.write(&[0; 8][..], AUTOCLEAR_AT as u64)
    }

    pub(super) fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }
}

/// Big-endian fields of the header; zero beyond its end.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes(&self, at: usize, len: usize) -> &[u8] {
        self.0.get(at..).and_then(|rest| rest.get(..len)).unwrap_or_default()
    }

    fn u32(&self, at: usize) -> u32 {
        self.bytes(at, 4).first_chunk().copied().map_or(0, u32::from_be_bytes)
    }

    fn u64(&self, at: usize) -> u64 {
        self.bytes(at, 8).first_chunk().copied().map_or(0, u64::from_be_bytes)
    }

    fn cluster_bits(&self) -> Result<u32, FormatError> {
        if !self.0.starts_with(MAGIC) {
            return Err(FormatError::Signature("qcow2"));
        }
        let bits = self.u32(20);
        if CLUSTER_BITS.contains(&bits) {
            return Ok(bits);
        }
        damaged(format!("its clusters have 2^{bits} bytes"))
    }

    fn references(&self, cluster_bits: u32) -> Table {
        let len_bytes = u64::from(self.u32(56)) << cluster_bits;
        Table { offset: self.u64(48), entries: len_bytes / 8 }
    }

    fn backing_name(&self, cluster_bytes: u64) -> Result<Option<BackingName>, FormatError> {
        let (offset, len) = (self.u64(8), self.u32(16));
        if offset == 0 {
            return Ok(None);
        }
        let is_inside = offset.checked_add(len.into()).is_some_and(|end| end < cluster_bytes);
        if len == 0 || len > BACKING_NAME_BYTES_MAX || !is_inside {
            return damaged("the name of its backing file is not in its header");
        }
        let (at, len) = (usize::try_from(offset).unwrap_or(0), usize::try_from(len).unwrap_or(0));
        match std::str::from_utf8(self.bytes(at, len)) {
            Ok(name) if !name.contains('\0') => {
                Ok(Some(BackingName { name: name.to_owned(), format: None }))
            }
            _ => damaged("the name of its backing file is not text"),
        }
    }
}

fn check_features(incompatible: u64) -> Result<(), FormatError> {
    if incompatible & CORRUPT != 0 {
        return damaged("it is marked as such (qemu-img check -r all)");
    }
    let incompatible = incompatible & !DIRTY;
    match INCOMPATIBLE.iter().find(|(bit, _)| incompatible & bit != 0) {
        Some((_, what)) => unsupported(*what),
        None if incompatible != 0 => {
            unsupported(format!("the incompatible feature bits {incompatible:#x}"))
        }
        None => Ok(()),
    }
}

/// Checks the header extensions and returns the format of the backing file.
fn backing_format(cluster: &[u8], header_bytes: usize) -> Result<Option<String>, FormatError> {
    let mut at = header_bytes;
    let mut format = None;
    loop {
        let head = Fields(cluster);
        if head.bytes(at, 8).len() < 8 {
            return damaged("the extensions of its header do not end");
        }
        let (kind, len) = (head.u32(at), head.u32(at + 4));
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        at += 8;
        let data = head.bytes(at, len);
        if data.len() != len {
            return damaged("an extension of its header is not in its first cluster");
        }
        match kind {
            EXTENSION_END => return Ok(format),
            EXTENSION_BACKING_FORMAT => match std::str::from_utf8(data) {
                Ok(text) if format.is_none() => format = Some(text.to_owned()),
                _ => return damaged("the format of its backing file is not one word"),
            },
            EXTENSION_FEATURE_NAMES if !len.is_multiple_of(FEATURE_NAME_BYTES) => {
                return damaged("its table of feature names is cut off");
            }
            _ => {}
        }
        // It cannot overflow: both are within a cluster.
        at += len.next_multiple_of(8);
    }
}

pub(super) fn damaged<T>(why: impl Into<String>) -> Result<T, FormatError> {
    Err(FormatError::Damaged(why.into()))
}

fn unsupported<T>(what: impl Into<String>) -> Result<T, FormatError> {
    Err(FormatError::Unsupported(what.into()))
}
