// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Driver for qcow2 images, on top of `imago`.
//!
//! Owns the mapping of disk operations to those of the library, and punching holes for freed clusters, which the library
//! does not do. The library orders its writes of tables so that a crash at most leaks clusters.

use std::io;

use imago::{FormatAccess, Mapping};

use super::header::Header;
use crate::virtio::block::formatted::FormatDriver;
use crate::virtio::block::request::Range;
use crate::virtio::block::store::Store;

/// Bytes of zeros written at a time.
const ZEROS_BYTES: usize = 1 << 18;

pub(super) struct Qcow2Driver {
    image: FormatAccess<Store>,
    /// The file of the image, for punching holes.
    holes: Store,
    cluster_bytes: u64,
    size_bytes: u64,
    can_free: bool,
}

impl Qcow2Driver {
    pub(super) fn new(image: FormatAccess<Store>, holes: Store, header: &Header) -> Self {
        let (cluster_bytes, size_bytes) = (header.cluster_bytes(), header.size_bytes);
        Self { image, holes, cluster_bytes, size_bytes, can_free: header.can_free }
    }

    /// Start and end of the whole clusters in a range; the last cluster of the disk may be shorter.
    fn whole_clusters(&self, range: Range) -> Option<(u64, u64)> {
        let end = range.offset.checked_add(range.len_bytes)?.min(self.size_bytes);
        let start = range.offset.checked_next_multiple_of(self.cluster_bytes)?;
        let is_end_of_disk = end == self.size_bytes;
        let end = if is_end_of_disk { end } else { end / self.cluster_bytes * self.cluster_bytes };
        (start < end).then_some((start, end))
    }

    /// Punches holes for whole clusters that are about to be freed and are not shared. Must come before freeing
    /// them, after which they may be in use again.
    fn punch_holes(&self, start: u64, end: u64) -> io::Result<()> {
        let mut offset = start;
        while offset < end {
            let (mapping, len_bytes) = self.image.get_mapping(offset, end - offset)?;
            if len_bytes == 0 {
                break;
            }
            // Backing files and clusters shared with an internal snapshot are not writable.
            if let Mapping::Raw { offset: host_offset, writable: true, .. } = mapping {
                self.holes.punch_hole(host_offset, len_bytes)?;
            }
            offset = offset.saturating_add(len_bytes);
        }
        Ok(())
    }
}

impl FormatDriver for Qcow2Driver {
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.image.read(buffer, offset)
    }

    fn write(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.image.write(buffer, offset)
    }

    fn discard(&mut self, range: Range) -> io::Result<()> {
        let Some((start, end)) = self.whole_clusters(range).filter(|_| self.can_free) else {
            return Ok(());
        };
        self.punch_holes(start, end)?;
        self.image.discard_to_zero(start, end - start)
    }

    fn write_zeroes(&mut self, range: Range) -> io::Result<()> {
        if self.can_free {
            return self.image.write_zeroes(range.offset, range.len_bytes);
        }
        // Version 2 knows no clusters that are zero without being written.
        let zeros = vec![0; ZEROS_BYTES];
        let (mut offset, end) = (range.offset, range.offset.saturating_add(range.len_bytes));
        while offset < end {
            let len_bytes = usize::try_from(end - offset).unwrap_or(ZEROS_BYTES).min(ZEROS_BYTES);
            self.image.write(zeros.get(..len_bytes).unwrap_or_default(), offset)?;
            offset = offset.saturating_add(len_bytes as u64);
        }
        Ok(())
    }

    fn write_zeroes_and_free(&mut self, range: Range) -> io::Result<()> {
        if !self.can_free {
            return self.write_zeroes(range);
        }
        if let Some((start, end)) = self.whole_clusters(range) {
            self.punch_holes(start, end)?;
        }
        self.image.discard_to_zero(range.offset, range.len_bytes)
    }

    fn write_tables(&self) -> io::Result<()> {
        self.image.flush()
    }
}
