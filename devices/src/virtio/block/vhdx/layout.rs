// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Layout of a VHDX image: headers, regions and metadata.
//!
//! Owns their checks and limits: regions lie in the file and do not overlap. Numbers are little-endian, and headers and
//! region tables have a CRC-32C.

use std::io;

use imago::StorageExt as _;

use crate::virtio::block::formatted::FormatError;
use crate::virtio::block::store::Store;

/// Alignment of regions and blocks.
pub(super) const MIB: u64 = 1 << 20;
const FILE_SIGNATURE: &[u8] = b"vhdxfile";
pub(super) const HEADER_OFFSETS: [u64; 2] = [64 << 10, 128 << 10];
pub(super) const HEADER_BYTES: usize = 4 << 10;
const REGION_TABLE_OFFSETS: [u64; 2] = [192 << 10, 256 << 10];
const TABLE_BYTES: usize = 64 << 10;
const TABLE_ENTRY_BYTES: usize = 32;
const REGIONS_MAX: u32 = 2047;
const ITEMS_MAX: u32 = 1023;
/// Maximum size of a disk in this format.
const DISK_BYTES_MAX: u64 = 64 << 40;
const BLOCK_BYTES: std::ops::RangeInclusive<u64> = MIB..=256 * MIB;
/// Maximum size of a block allocation table, which stays in memory: 8 TiB in the smallest blocks.
const TABLE_BYTES_MAX: u64 = 64 << 20;

/// Offset of the checksum, after the signature.
const CHECKSUM_OFFSET: usize = 4;
const HEADER_SEQUENCE: usize = 8;
const HEADER_FILE_GUID: usize = 16;
const HEADER_DATA_GUID: usize = 32;
const HEADER_LOG_GUID: usize = 48;
const HEADER_VERSION: usize = 66;
const HEADER_LOG: usize = 68;

type Guid = [u8; 16];

pub(super) const BAT_REGION: Guid =
    [0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0, 0x42, 0x9d, 0x64, 0x11, 0x5e, 0x9b, 0xfd, 0x4a, 8];
pub(super) const METADATA_REGION: Guid =
    [6, 0xa2, 0x7c, 0x8b, 0x90, 0x47, 0x9a, 0x4b, 0xb8, 0xfe, 0x57, 0x5f, 5, 0x0f, 0x88, 0x6e];
pub(super) const FILE_PARAMETERS: Guid = [
    0x37, 0x67, 0xa1, 0xca, 0x36, 0xfa, 0x43, 0x4d, 0xb3, 0xb6, 0x33, 0xf0, 0xaa, 0x44, 0xe7, 0x6b,
];
pub(super) const DISK_SIZE: Guid = [
    0x24, 0x42, 0xa5, 0x2f, 0x1b, 0xcd, 0x76, 0x48, 0xb2, 0x11, 0x5d, 0xbe, 0xd8, 0x3b, 0xf4, 0xb8,
];
pub(super) const LOGICAL_SECTOR: Guid =
    [0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 9, 0x47, 0xba, 0x47, 0xf2, 0x33, 0xa8, 0xfa, 0xab, 0x5f];
/// Metadata items that are accepted and not used.
pub(super) const OTHER_ITEMS: [Guid; 2] = [
    // Physical sector size.
    [
        0xc7, 0x48, 0xa3, 0xcd, 0x5d, 0x44, 0x71, 0x44, 0x9c, 0xc9, 0xe9, 0x88, 0x52, 0x51, 0xc5,
        0x56,
    ],
    // Identity of the disk.
    [0xab, 0x12, 0xca, 0xbe, 0xe6, 0xb2, 0x23, 0x45, 0x93, 0xef, 0xc3, 9, 0xe0, 0, 0xc7, 0x46],
];
const HAS_PARENT: u32 = 2;
const IS_REQUIRED_ITEM: u32 = 4;
const IS_REQUIRED_REGION: u32 = 1;

/// A part of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Area {
    pub(super) offset: u64,
    pub(super) len_bytes: u64,
}

/// The parsed metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) size_bytes: u64,
    pub(super) block_bytes: u64,
    pub(super) sector_bytes: u64,
    /// The block allocation table.
    pub(super) table: Area,
    /// Areas in which no block may lie: headers, log and regions.
    pub(super) reserved: Vec<Area>,
}

/// The current header: the valid one with the higher sequence number.
pub(super) struct Header {
    pub(super) number: usize,
    pub(super) bytes: Vec<u8>,
}

impl Header {
    pub(super) fn read(store: &Store) -> Result<Self, FormatError> {
        let mut signature = [0; 8];
        store.read(&mut signature[..], 0)?;
        if signature != *FILE_SIGNATURE {
            return Err(FormatError::Signature("VHDX"));
        }
        let mut newest: Option<Self> = None;
        for (number, offset) in HEADER_OFFSETS.into_iter().enumerate() {
            let bytes = read(store, offset, HEADER_BYTES)?;
            let header = Self { number, bytes };
            if is_whole(&header.bytes, b"head")
                && newest.as_ref().is_none_or(|other| other.sequence() < header.sequence())
            {
                newest = Some(header);
            }
        }
        let Some(header) = newest else { return damaged("it has no header that is whole") };
        let version = u16_at(&header.bytes, HEADER_VERSION);
        if version != 1 {
            return Err(FormatError::Unsupported(format!("version {version} of the format")));
        }
        // Entries of the log have not been applied.
        if !header.bytes.get(HEADER_LOG_GUID..).is_some_and(|rest| rest.starts_with(&[0; 16])) {
            return damaged(
                "it was not closed, and its log is to be carried out first (qemu-img check -r all)",
            );
        }
        Ok(header)
    }

    /// Area of the log, which is reserved although it is empty.
    fn log(&self) -> Option<Area> {
        let len_bytes = u32_at(&self.bytes, HEADER_LOG).into();
        let offset = u64_at(&self.bytes, HEADER_LOG + 4);
        (len_bytes > 0).then_some(Area { offset, len_bytes })
    }

    fn sequence(&self) -> u64 {
        u64_at(&self.bytes, HEADER_SEQUENCE)
    }

    /// Marks the image as modified by new GUIDs: writes the header that is not current, which becomes the current one,
    /// and then the other.
    pub(super) fn announce(&mut self, store: &Store, identity: [Guid; 2]) -> io::Result<()> {
        for _ in 0..HEADER_OFFSETS.len() {
            self.number = (self.number + 1) % HEADER_OFFSETS.len();
            let sequence = self.sequence().wrapping_add(1);
            put(&mut self.bytes, HEADER_SEQUENCE, &sequence.to_le_bytes());
            for (at, guid) in [HEADER_FILE_GUID, HEADER_DATA_GUID].into_iter().zip(identity) {
                put(&mut self.bytes, at, &guid);
            }
            let checksum = checksum(&self.bytes);
            put(&mut self.bytes, CHECKSUM_OFFSET, &checksum.to_le_bytes());
            let offset = HEADER_OFFSETS.get(self.number).copied().unwrap_or_default();
            store.write(&self.bytes, offset)?;
            // One of them is valid at any time.
            imago::Storage::sync(store)?;
        }
        Ok(())
    }
}

impl Layout {
    /// Reads and checks the layout.
    pub(super) fn read(store: &Store, file_len_bytes: u64) -> Result<Self, FormatError> {
        let header = Header::read(store)?;
        let tables = REGION_TABLE_OFFSETS.map(|offset| read(store, offset, TABLE_BYTES));
        let mut whole = None;
        for table in tables {
            whole = whole.or(Some(table?).filter(|table| is_whole(table, b"regi")));
        }
        let Some(table) = whole else { return damaged("it has no region table that is whole") };
        let count = u32_at(&table, 8);
        if count > REGIONS_MAX {
            return damaged("its region table is longer than it can be");
        }
        let (mut bat, mut metadata) = (None, None);
        let mut reserved = vec![Area { offset: 0, len_bytes: MIB }];
        for entry in entries(&table, 16, count) {
            let offset = u64_at(entry, 16);
            let area = Area { offset, len_bytes: u32_at(entry, 24).into() };
            let slot = if entry.starts_with(&BAT_REGION) {
                &mut bat
            } else if entry.starts_with(&METADATA_REGION) {
                &mut metadata
            } else if u32_at(entry, 28) & IS_REQUIRED_REGION != 0 {
                return Err(FormatError::Unsupported("a region of an unknown kind".to_owned()));
            } else {
                continue;
            };
            if slot.replace(area).is_some() {
                return damaged("it has a region twice");
            }
            reserved.push(area);
        }
        let (Some(bat), Some(metadata)) = (bat, metadata) else {
            return damaged("it has no block allocation table, or no metadata");
        };
        reserved.extend(header.log());
        check_areas(&mut reserved, file_len_bytes)?;
        Metadata::read(store, metadata)?.layout(bat, reserved)
    }

    /// Number of payload entries between two sector bitmap entries of the table.
    pub(super) fn chunk_blocks(&self) -> u64 {
        (self.sector_bytes << 23) / self.block_bytes
    }

    pub(super) fn blocks(&self) -> u64 {
        self.size_bytes.div_ceil(self.block_bytes)
    }

    /// Number of entries of the table in use.
    pub(super) fn entries(&self) -> u64 {
        let blocks = self.blocks();
        blocks + blocks.saturating_sub(1) / self.chunk_blocks()
    }
}

/// Checks that areas are aligned, lie in the file and do not overlap.
fn check_areas(areas: &mut [Area], file_len_bytes: u64) -> Result<(), FormatError> {
    areas.sort_unstable_by_key(|area| area.offset);
    let mut end = 0;
    for area in areas.iter() {
        let area_end = area.offset.saturating_add(area.len_bytes);
        let is_aligned = area.offset.is_multiple_of(MIB) && area.len_bytes.is_multiple_of(MIB);
        if area.offset < end || area_end > file_len_bytes || !is_aligned || area.len_bytes == 0 {
            return damaged(format!("it has a region at {:#x}", area.offset));
        }
        end = area_end;
    }
    Ok(())
}

#[derive(Default)]
struct Metadata {
    parameters: Option<[u8; 8]>,
    size_bytes: Option<[u8; 8]>,
    sector_bytes: Option<[u8; 4]>,
}

impl Metadata {
    fn read(store: &Store, region: Area) -> Result<Self, FormatError> {
        let table = read(store, region.offset, TABLE_BYTES)?;
        let count = u32::from(u16_at(&table, 10));
        if !table.starts_with(b"metadata") || count > ITEMS_MAX {
            return damaged("its metadata have no table");
        }
        let mut found = Self::default();
        for entry in entries(&table, TABLE_ENTRY_BYTES, count) {
            let (offset, len_bytes) = (u64::from(u32_at(entry, 16)), u64::from(u32_at(entry, 20)));
            let is_inside = offset.saturating_add(len_bytes) <= region.len_bytes;
            if len_bytes > 0 && (offset < TABLE_BYTES as u64 || !is_inside) {
                return damaged("an item of its metadata is not among them");
            }
            let at = region.offset.saturating_add(offset);
            if entry.starts_with(&FILE_PARAMETERS) {
                found.parameters = Some(item(store, at, len_bytes)?);
            } else if entry.starts_with(&DISK_SIZE) {
                found.size_bytes = Some(item(store, at, len_bytes)?);
            } else if entry.starts_with(&LOGICAL_SECTOR) {
                found.sector_bytes = Some(item(store, at, len_bytes)?);
            } else if u32_at(entry, 24) & IS_REQUIRED_ITEM != 0
                && !OTHER_ITEMS.iter().any(|guid| entry.starts_with(guid))
            {
                return Err(FormatError::Unsupported("metadata of an unknown kind".to_owned()));
            }
        }
        Ok(found)
    }

    fn layout(self, table: Area, reserved: Vec<Area>) -> Result<Layout, FormatError> {
        let (Some(parameters), Some(size), Some(sector)) =
            (self.parameters, self.size_bytes, self.sector_bytes)
        else {
            return damaged("its metadata do not say what its disk is");
        };
        if u32_at(&parameters, 4) & HAS_PARENT != 0 {
            return Err(FormatError::Unsupported("a parent image".to_owned()));
        }
        let layout = Layout {
            size_bytes: u64::from_le_bytes(size),
            block_bytes: u32_at(&parameters, 0).into(),
            sector_bytes: u32::from_le_bytes(sector).into(),
            table,
            reserved,
        };
        let Layout { size_bytes, block_bytes, sector_bytes, .. } = layout;
        if !BLOCK_BYTES.contains(&block_bytes) || !block_bytes.is_power_of_two() {
            return damaged(format!("its blocks have {block_bytes} bytes"));
        }
        if !matches!(sector_bytes, 512 | 4096) {
            return damaged(format!("its sectors have {sector_bytes} bytes"));
        }
        if size_bytes > DISK_BYTES_MAX || !size_bytes.is_multiple_of(sector_bytes) {
            return damaged(format!("its disk has {size_bytes} bytes"));
        }
        let table_bytes = layout.entries().saturating_mul(8);
        if table_bytes > TABLE_BYTES_MAX {
            return Err(FormatError::Unsupported(format!("a table of {table_bytes} bytes")));
        }
        if table_bytes > table.len_bytes {
            return damaged("its block allocation table is too short for its disk");
        }
        Ok(layout)
    }
}

fn item<const LEN: usize>(
    store: &Store,
    offset: u64,
    len_bytes: u64,
) -> Result<[u8; LEN], FormatError> {
    if len_bytes < LEN as u64 {
        return damaged("an item of its metadata is too short");
    }
    let mut bytes = [0; LEN];
    store.read(&mut bytes[..], offset)?;
    Ok(bytes)
}

/// Entries of a table after its header.
fn entries(table: &[u8], head_bytes: usize, count: u32) -> impl Iterator<Item = &[u8]> {
    let entries = table.get(head_bytes..).unwrap_or_default();
    entries.chunks_exact(TABLE_ENTRY_BYTES).take(usize::try_from(count).unwrap_or(0))
}

fn read(store: &Store, offset: u64, len: usize) -> Result<Vec<u8>, FormatError> {
    let mut bytes = vec![0; len];
    store.read(&mut bytes, offset)?;
    Ok(bytes)
}

fn is_whole(bytes: &[u8], signature: &[u8]) -> bool {
    bytes.starts_with(signature) && u32_at(bytes, CHECKSUM_OFFSET) == checksum(bytes)
}

/// Writes the checksum of a structure.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn seal(structure: &mut [u8]) {
    let checksum = checksum(structure);
    put(structure, CHECKSUM_OFFSET, &checksum.to_le_bytes());
}

/// Checksum of a structure, computed with a checksum field of zero.
pub(super) fn checksum(bytes: &[u8]) -> u32 {
    let (head, rest) = bytes.split_at_checked(CHECKSUM_OFFSET).unwrap_or((bytes, &[]));
    let sum = crc32c::crc32c_append(crc32c::crc32c(head), &[0; 4]);
    crc32c::crc32c_append(sum, rest.get(4..).unwrap_or_default())
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    let found = bytes.get(at..).and_then(|rest| rest.first_chunk());
    found.copied().map_or(0, u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let found = bytes.get(at..).and_then(|rest| rest.first_chunk());
    found.copied().map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let found = bytes.get(at..).and_then(|rest| rest.first_chunk());
    found.copied().map_or(0, u64::from_le_bytes)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    for (to, from) in bytes.iter_mut().skip(at).zip(value) {
        *to = *from;
    }
}

pub(super) fn damaged<T>(why: impl Into<String>) -> Result<T, FormatError> {
    Err(FormatError::Damaged(why.into()))
}
