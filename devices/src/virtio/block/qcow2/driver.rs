// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Driver for qcow2 images, on top of `imago`.
//!
//! Owns the mapping of disk operations to those of the library, punching holes for freed clusters, which the library
//! does not do, and the mark in the header of version 3 that the image is in use. The library publishes a new table
//! before its refcount, so that a process that dies can leave an image whose refcounts are too low: it keeps the mark, and
//! has to be repaired before the next use. Version 2 has no mark; what is checked when it is loaded must do.

use std::io;
use std::sync::Arc;

use imago::{FormatAccess, Mapping, Storage as _};
use parking_lot::RwLock;

use super::header::Header;
use crate::virtio::block::formatted::FormatDriver;
use crate::virtio::block::placed::Place;
use crate::virtio::block::request::Range;
use crate::virtio::block::store::{Store, Tables};

/// Bytes of zeros written at a time.
const ZEROS_BYTES: usize = 1 << 18;

pub(super) struct Qcow2Driver {
    image: FormatAccess<Store>,
    /// The file of the image, for punching holes.
    holes: Store,
    /// The file of the image, for its header.
    header: Store,
    /// Whether the header says that the image is in use. Locked for writing while that changes.
    is_marked: RwLock<bool>,
    /// Whether a write that nothing repeats has failed.
    tables: Arc<Tables>,
    /// Numbers of the L2 tables whose clusters have no place to rely on.
    shared: Vec<u32>,
    cluster_bytes: u64,
    size_bytes: u64,
    can_free: bool,
}

impl Qcow2Driver {
    /// The driver of an image with this header; `holes` and `header_store` are its file.
    pub(super) fn new(
        image: FormatAccess<Store>,
        holes: Store,
        header_store: Store,
        tables: Arc<Tables>,
        header: &Header,
        shared: Vec<u32>,
    ) -> Self {
        Self {
            image,
            holes,
            header: header_store,
            is_marked: RwLock::new(false),
            tables,
            shared,
            cluster_bytes: header.cluster_bytes(),
            size_bytes: header.size_bytes,
            can_free: header.can_free,
        }
    }

    /// Whether an address of the disk is one of an L2 table that may be shared.
    fn is_of_shared_table(&self, offset: u64) -> bool {
        // A table is a cluster of entries of 8 bytes.
        let reach_bytes = self.cluster_bytes.saturating_mul(self.cluster_bytes / 8);
        let number = offset.checked_div(reach_bytes).and_then(|it| u32::try_from(it).ok());
        number.is_none_or(|number| self.shared.binary_search(&number).is_ok())
    }

    /// Marks the image as in use, on stable storage, before anything in it changes.
    fn mark(&self) -> io::Result<()> {
        // Version 3 has the mark, and clusters that can be freed.
        if !self.can_free || *self.is_marked.read() {
            return Ok(());
        }
        let mut is_marked = self.is_marked.write();
        if !*is_marked {
            Header::mark(&self.header, true)?;
            self.sync()?;
            *is_marked = true;
        }
        Ok(())
    }

    /// Makes the file stable. After an error no flush succeeds, as the host reports it once.
    fn sync(&self) -> io::Result<()> {
        self.header.sync().inspect_err(|_| self.tables.fail())
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
        self.mark()?;
        self.image.write(buffer, offset)
    }

    fn place(&self, offset: u64, len_bytes: u64, write: bool) -> Option<Place> {
        let last = offset.checked_add(len_bytes.checked_sub(1)?)?;
        if self.is_of_shared_table(offset) || self.is_of_shared_table(last) {
            return None;
        }
        // The header has to say first that the image is in use.
        if write && self.can_free && !*self.is_marked.try_read()? {
            return None;
        }
        let (mapping, mapped_bytes) = self.image.get_mapping(offset, len_bytes).ok()?;
        // Only what is writable is in a cluster that belongs to no snapshot.
        let Mapping::Raw { storage, offset, writable, .. } = mapping else { return None };
        let is_whole = mapped_bytes >= len_bytes && storage.is_same_file(&self.header);
        if is_whole && (writable || !write) { storage.place(offset, len_bytes) } else { None }
    }

    fn discard(&mut self, range: Range) -> io::Result<()> {
        let Some((start, end)) = self.whole_clusters(range).filter(|_| self.can_free) else {
            return Ok(());
        };
        self.mark()?;
        self.punch_holes(start, end)?;
        self.image.discard_to_zero(start, end - start)
    }

    fn write_zeroes(&mut self, range: Range) -> io::Result<()> {
        self.mark()?;
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
        self.mark()?;
        if let Some((start, end)) = self.whole_clusters(range) {
            self.punch_holes(start, end)?;
        }
        self.image.discard_to_zero(range.offset, range.len_bytes)
    }

    fn write_tables(&self) -> io::Result<()> {
        self.tables.check()?;
        self.image.flush()
    }

    fn close(&mut self) -> io::Result<()> {
        self.write_tables()?;
        if *self.is_marked.read() {
            self.sync()?;
            Header::mark(&self.header, false)?;
            *self.is_marked.write() = false;
            self.sync()?;
        }
        Ok(())
    }
}
