// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM that begins as a private mapping of a file: the memory of a snapshot that several VMs are made of.
//!
//! Owns which zones can be such a mapping, and where in the file a region begins. The file must never be written:
//! what the guest writes stays in this process, and what it only reads is the page cache's, once for all VMs.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use crate::PAGE_BYTES;
use crate::backing::ZoneBacking;
use crate::config::{Backing, ZoneSpec};
use crate::file_lock::{self, FileUse, LockError};
use crate::layout::Placement;
use crate::populated::file_data_runs;
use crate::zone_file::{free_bytes, is_in_memory, is_on_nfs};
use crate::zone_kind::ZoneKind;

/// A part of guest RAM in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageRange {
    /// Guest physical address.
    pub gpa: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Where it begins in the file: whole pages of 4 KiB.
    pub offset_bytes: u64,
}

/// A file with the contents of all guest RAM.
#[derive(Debug, Clone)]
pub struct RamImage {
    file: Arc<File>,
    ranges: Vec<ImageRange>,
    /// The parts of the file that are not holes, sorted and disjoint. Looked up once, as the file stays as it is and each
    /// look takes time that grows with its size.
    data: Arc<[Range<u64>]>,
}

/// Why guest RAM cannot be a mapping of a file.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// Another process writes it.
    #[error("the file is in use by {holders}, which may write it")]
    InUse {
        /// The processes.
        holders: String,
    },
    /// A file in memory, whose holes would fill its file system.
    #[error(
        "the file is in memory (tmpfs), where holes take memory as soon as a guest touches them: {holes_bytes} bytes of \
         it are holes, and its file system has room for {free_bytes}; give that more, or put the file on a disk"
    )]
    NoRoom {
        /// Bytes of guest memory that are holes.
        holes_bytes: u64,
        /// Room that is left.
        free_bytes: u64,
    },
    /// A zone that is not private memory on small pages.
    #[error("memory zone '{zone}' cannot be a private mapping of a file, because {why}")]
    Zone {
        /// The zone.
        zone: String,
        /// The reason, in words.
        why: &'static str,
    },
    /// The file has no such part.
    #[error("the file has no guest memory {gpa:#x}+{len_bytes:#x}")]
    Layout {
        /// Guest physical address.
        gpa: u64,
        /// Length in bytes.
        len_bytes: u64,
    },
}

impl RamImage {
    /// The parts of guest RAM in a file, which is locked for reading. Its length must be known to contain them, and it
    /// must not become shorter: an access to what is missing would be a SIGBUS.
    ///
    /// # Errors
    /// When another process has it locked, or its file system has no room for its holes.
    pub fn new(file: Arc<File>, ranges: Vec<ImageRange>) -> Result<Self, ImageError> {
        // A lock that an NFS server forgets fails all reads from then on, which would not fail without one; and each lock
        // there drops what is cached of the file.
        let locked = if !is_on_nfs(&file) {
            file_lock::lock(&file, FileUse::Read)
        } else if file_lock::is_free(&file, FileUse::Read) {
            Ok(())
        } else {
            Err(LockError::Held)
        };
        match locked {
            Ok(()) => {}
            Err(LockError::Held) => {
                return Err(ImageError::InUse { holders: file_lock::holders(&file) });
            }
            Err(error) => log::debug!("an image of guest memory is not locked: {error:?}"),
        }
        let end = |range: &ImageRange| range.offset_bytes.saturating_add(range.len_bytes);
        let len_bytes = file.metadata().map_or(u64::MAX, |file| file.len());
        let all = 0..ranges.iter().map(end).max().unwrap_or(0).min(len_bytes);
        let data = file_data_runs(&file, all.clone()).unwrap_or_else(|error| {
            log::debug!("holes of an image of guest memory are unknown: {error}");
            vec![all.clone()]
        });
        let data_bytes: u64 = data.iter().map(|run| run.end - run.start).sum();
        let holes_bytes = (all.end - all.start).saturating_sub(data_bytes);
        if is_in_memory(&file)
            && let Some(free_bytes) = free_bytes(&file).filter(|free| *free < holes_bytes)
        {
            return Err(ImageError::NoRoom { holes_bytes, free_bytes });
        }
        Ok(Self { file, ranges, data: data.into() })
    }

    /// The backing of a zone, which the file's contents are in from the start.
    pub(crate) fn backing(&self, zone: &ZoneSpec) -> Result<ZoneBacking, ImageError> {
        let why = match &zone.backing {
            _ if zone.shared => Some("it is shared memory"),
            _ if zone.block_bytes.is_some() => Some("the guest plugs and unplugs it"),
            // The kernel keeps it with the file there.
            _ if zone.host_numa_node.is_some() && is_in_memory(&self.file) => {
                Some("the file is on tmpfs, where a node for one VM is the node of all")
            }
            Backing::Hugetlb { .. } => Some("it has huge pages"),
            Backing::File(_) => Some("it has a file of its own"),
            Backing::Memfd => Some("it is a memfd"),
            Backing::Auto | Backing::Anonymous => None,
        };
        if let Some(why) = why {
            return Err(ImageError::Zone { zone: zone.id.clone(), why });
        }
        Ok(ZoneBacking {
            kind: ZoneKind::PrivateFile,
            file: Some(Arc::clone(&self.file)),
            page_bytes: PAGE_BYTES,
            hugetlb: false,
            holds_data: true,
            prezeroed: false,
            locked: false,
            image_data: Some(Arc::clone(&self.data)),
        })
    }

    /// Where a region begins in the file.
    pub(crate) fn offset_of(&self, placement: &Placement) -> Result<u64, ImageError> {
        let (gpa, len_bytes) = (placement.gpa, placement.bytes.end - placement.bytes.start);
        let is_it = |range: &&ImageRange| (range.gpa, range.len_bytes) == (gpa, len_bytes);
        let found = self.ranges.iter().find(is_it);
        let aligned = found.filter(|range| range.offset_bytes.is_multiple_of(PAGE_BYTES));
        aligned.map(|range| range.offset_bytes).ok_or(ImageError::Layout { gpa, len_bytes })
    }
}

/// The parts of sorted and disjoint `runs` that lie in `range`.
pub fn runs_within(runs: &[Range<u64>], range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let first = runs.partition_point(|run| run.end <= range.start);
    let after = runs.partition_point(|run| run.start < range.end);
    let inside = runs.get(first..after).unwrap_or_default();
    inside.iter().map(|run| run.start.max(range.start)..run.end.min(range.end))
}

#[cfg(all(test, not(loom)))]
#[path = "image_tests.rs"]
mod tests;
