// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The memory index: which pages the memory file holds, and the checksum of each chunk.
//!
//! ```text
//! header   magic 8, version u32, pages per chunk u32, chunks u64, zero u64     all little-endian
//! entry    CRC-32C of the chunk's present pages u32, one bit for each present page u16, zero u16
//! ```
//!
//! A page whose bit is clear is zero, and its bytes in the file are not read. Owns the format of
//! the file; every number in it is checked against the machine's memory before it is used.

use std::path::Path;

use super::error::SnapshotError;
use super::geometry::{CHUNK_PAGES, Geometry};
use crate::layout::to_usize;

const MAGIC: [u8; 8] = *b"GODWITMX";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 32;
const ENTRY_BYTES: usize = 8;

/// Index entry of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// CRC-32C of the present pages, in order.
    pub crc: u32,
    /// A bit for each present page.
    pub present: u16,
}

impl Entry {
    /// Packs the entry into an atomic's value.
    pub(crate) fn pack(self) -> u64 {
        u64::from(self.crc) | u64::from(self.present) << 32
    }

    /// Unpacks an atomic's value.
    pub(crate) fn unpack(word: u64) -> Self {
        let [c0, c1, c2, c3, p0, p1, ..] = word.to_le_bytes();
        Self { crc: u32::from_le_bytes([c0, c1, c2, c3]), present: u16::from_le_bytes([p0, p1]) }
    }
}

/// The entries of all chunks, in the order of the file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Index {
    entries: Vec<Entry>,
}

/// Why bytes are not a valid index.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum IndexFault {
    /// The magic number differs.
    Foreign,
    /// The version is newer than supported.
    Newer(u32),
    /// Anything else.
    Malformed(&'static str),
}

impl IndexFault {
    /// The error for the index at `path`.
    pub(crate) fn at(self, path: &Path) -> SnapshotError {
        let path = path.to_owned();
        match self {
            Self::Foreign => SnapshotError::Foreign(path),
            Self::Newer(found) => SnapshotError::Newer { path, found, known: VERSION },
            Self::Malformed(why) => SnapshotError::Malformed { path, why: why.to_owned() },
        }
    }
}

impl Index {
    /// An index of these entries.
    pub(crate) fn new(entries: Vec<Entry>) -> Self {
        Self { entries }
    }

    /// The entry of a chunk.
    pub(crate) fn entry(&self, chunk: usize) -> Entry {
        self.entries[chunk]
    }

    /// Length of the index file for a number of chunks.
    pub(crate) fn len_bytes(chunks: u64) -> u64 {
        (HEADER_BYTES as u64).saturating_add(chunks.saturating_mul(ENTRY_BYTES as u64))
    }

    /// Number of present pages.
    pub(crate) fn present_pages(&self) -> u64 {
        self.entries.iter().map(|entry| u64::from(entry.present.count_ones())).sum()
    }

    /// Encodes the index.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let chunks = self.entries.len() as u64;
        let mut out = Vec::with_capacity(to_usize(Self::len_bytes(chunks)));
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&u32::try_from(CHUNK_PAGES).unwrap_or(0).to_le_bytes());
        out.extend_from_slice(&chunks.to_le_bytes());
        out.extend_from_slice(&[0; 8]);
        for entry in &self.entries {
            out.extend_from_slice(&entry.pack().to_le_bytes());
        }
        out
    }

    /// Decodes the index of a memory with this geometry.
    pub(crate) fn decode(bytes: &[u8], geometry: &Geometry) -> Result<Self, IndexFault> {
        let bad = IndexFault::Malformed;
        let (header, rest) =
            bytes.split_first_chunk::<HEADER_BYTES>().ok_or(bad("it has no header"))?;
        let (words, _) = header.as_chunks::<8>();
        if words[0] != MAGIC {
            return Err(IndexFault::Foreign);
        }
        let [v0, v1, v2, v3, p0, p1, p2, p3] = words[1];
        match u32::from_le_bytes([v0, v1, v2, v3]) {
            VERSION => {}
            0 => return Err(bad("its version is 0")),
            newer => return Err(IndexFault::Newer(newer)),
        }
        if u64::from(u32::from_le_bytes([p0, p1, p2, p3])) != CHUNK_PAGES {
            return Err(bad("its chunks have another size"));
        }
        let chunks = u64::from_le_bytes(words[2]);
        if chunks != geometry.chunks() {
            return Err(bad("it is for another amount of memory"));
        }
        let (entries, tail) = rest.as_chunks::<ENTRY_BYTES>();
        if words[3] != [0; 8] || !tail.is_empty() || entries.len() as u64 != chunks {
            return Err(bad("its length does not fit"));
        }
        let mut at = entries.iter();
        let mut all = Vec::with_capacity(entries.len());
        for (region, place) in geometry.regions().iter().enumerate() {
            for chunk in 0..place.pages.div_ceil(CHUNK_PAGES) {
                let word = at.next().map_or(0, |word| u64::from_le_bytes(*word));
                let entry = Entry::unpack(word);
                let pages = geometry.chunk(region, chunk).count;
                if entry.pack() != word || u64::from(entry.present) >> pages != 0 {
                    return Err(bad("an entry has bits that mean nothing"));
                }
                if entry.present == 0 && entry.crc != 0 {
                    return Err(bad("a chunk without pages has a checksum"));
                }
                all.push(entry);
            }
        }
        Ok(Self { entries: all })
    }
}

/// Entry point of the fuzz target: decoding returns for any bytes, and what it accepts is encoded
/// to the same bytes.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_index(bytes: &[u8]) {
    use crate::layout::{Backing, Layout, PAGE_BYTES, RegionInfo};
    let region = |gpa, pages| RegionInfo {
        name: String::new(),
        gpa,
        len_bytes: pages * PAGE_BYTES,
        host_page_bytes: PAGE_BYTES,
        backing: Backing::Shared,
    };
    let Ok(layout) = Layout::new(vec![region(0, 40), region(1 << 32, 3)]) else { return };
    let geometry = Geometry::new(&layout);
    if let Ok(index) = Index::decode(bytes, &geometry) {
        assert_eq!(index.encode(), bytes);
    }
}
