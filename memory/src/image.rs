// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM that begins as a private mapping of a file: the memory of a snapshot that several VMs are made of.
//!
//! Owns which zones can be such a mapping, and where in the file a region begins. The file must never be written:
//! what the guest writes stays in this process, and what it only reads is the page cache's, once for all VMs.

use std::fs::File;
use std::sync::Arc;

use crate::PAGE_BYTES;
use crate::backing::ZoneBacking;
use crate::config::{Backing, ZoneSpec};
use crate::layout::Placement;
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
}

/// Why guest RAM cannot be a mapping of a file.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
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
    /// The parts of guest RAM in a file. Its length must be known to contain them, and it must not become shorter: an
    /// access to what is missing would be a SIGBUS.
    pub fn new(file: Arc<File>, ranges: Vec<ImageRange>) -> Self {
        Self { file, ranges }
    }

    /// The backing of a zone, which the file's contents are in from the start.
    pub(crate) fn backing(&self, zone: &ZoneSpec) -> Result<ZoneBacking, ImageError> {
        let why = match &zone.backing {
            _ if zone.shared => Some("it is shared memory"),
            _ if zone.block_bytes.is_some() => Some("the guest plugs and unplugs it"),
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

#[cfg(all(test, not(loom)))]
#[path = "image_tests.rs"]
mod tests;
