// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! File access for images in a format and their backing files, behind the `Storage` trait of `imago`, which aligns
//! direct I/O.
//!
//! Owns the limits of the file: a read beyond its end is an error and does not return zeros. Has no state except the
//! open file, so that data written by another host are read after the image has been loaded again.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use imago::Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use parking_lot::RwLock;

use super::image::{Disk, file_or_device_len_bytes};
use super::placed::Place;
use super::synchronous::AlignedBuffer;
use crate::syscalls::check;

/// An open file and how to access it.
#[derive(Clone)]
pub(super) struct StoreFile {
    pub(super) path: PathBuf,
    pub(super) file: Arc<File>,
    pub(super) is_writable: bool,
    pub(super) is_direct: bool,
    /// Alignment of addresses and offsets for direct I/O in bytes; 1 without direct I/O.
    pub(super) address_align_bytes: usize,
    pub(super) offset_align_bytes: usize,
    #[cfg(test)]
    pub(super) refusal: Arc<super::tests::Refusal>,
}

impl StoreFile {
    /// The file of a disk whose format has not been set yet.
    pub(super) fn of(disk: &Disk) -> Self {
        Self {
            path: disk.path().to_owned(),
            file: disk.share_file(),
            is_writable: !disk.readonly(),
            is_direct: disk.direct(),
            address_align_bytes: disk.address_align_bytes(),
            offset_align_bytes: usize::try_from(disk.offset_align_bytes()).unwrap_or(4096),
            #[cfg(test)]
            refusal: Arc::clone(&disk.refusal),
        }
    }
}

/// A file as used by the driver of a format.
pub(super) struct Store {
    of: StoreFile,
    /// Unit of allocation. The rest of the unit in which the file ends reads as zeros.
    unit_bytes: u64,
    /// The bytes of the header that may change, if nothing else in the first unit may.
    head: Option<Range<usize>>,
    /// Tables of which a failed write is never repeated.
    tables: Option<Arc<Tables>>,
    helper: CommonStorageHelper,
}

/// Tables whose changes are written once, when they are made, and the record that such a write has failed: what is in
/// memory is then not in the file, and no flush may succeed until the image has been loaded again.
pub(super) struct Tables {
    /// Start and end of each in the file.
    areas: RwLock<Vec<Range<u64>>>,
    /// A table that moves, as a header with this start has it.
    moved: fn(&[u8]) -> Option<Range<u64>>,
    has_failed: AtomicBool,
}

impl Tables {
    pub(super) fn new(areas: Vec<Range<u64>>, moved: fn(&[u8]) -> Option<Range<u64>>) -> Self {
        Self { areas: RwLock::new(areas), moved, has_failed: AtomicBool::new(false) }
    }

    /// Records that a write, or a flush, has failed.
    pub(super) fn fail(&self) {
        self.has_failed.store(true, Ordering::Release);
    }

    /// Whether no such write has failed.
    pub(super) fn check(&self) -> io::Result<()> {
        if self.has_failed.load(Ordering::Acquire) {
            return Err(io::Error::other("an earlier write to a table of the image has failed"));
        }
        Ok(())
    }

    fn contain(&self, offset: u64, len_bytes: u64) -> bool {
        let end = offset.saturating_add(len_bytes);
        self.areas.read().iter().any(|area| offset < area.end && area.start < end)
    }
}

impl Store {
    pub(super) fn new(of: StoreFile, unit_bytes: u64) -> Self {
        Self { of, unit_bytes, head: None, tables: None, helper: CommonStorageHelper::default() }
    }

    /// Refuses writes to the first unit except those of the header that is there, in which only these bytes may
    /// change, whatever the tables of the image state, so that a guest cannot change the header.
    pub(super) fn with_header(self, may_change: Range<usize>) -> Self {
        Self { head: Some(may_change), ..self }
    }

    /// Records failed writes to these tables, and to the header.
    pub(super) fn with_tables(self, tables: Arc<Tables>) -> Self {
        Self { tables: Some(tables), ..self }
    }

    fn write_piece(&self, piece: &[u8], offset: u64) -> io::Result<()> {
        self.check_place(offset, piece)?;
        self.check_writable()?;
        self.of.file.write_all_at(piece, offset)?;
        if let Some(tables) = self.tables.as_ref().filter(|_| offset == 0) {
            tables.areas.write().extend((tables.moved)(piece));
        }
        Ok(())
    }

    fn read_piece(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match self.of.file.read_at(rest, offset + done as u64) {
                // A call that would go on from what is not aligned was cut short by the end of the file.
                Ok(0) => return self.fill_behind_end(rest, offset),
                Ok(len) if !len.is_multiple_of(self.of.offset_align_bytes) => {
                    let rest = rest.get_mut(len..).unwrap_or_default();
                    return self.fill_behind_end(rest, offset);
                }
                Ok(len) => done += len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Completes a read at `offset` that reached the end of the file: `rest` is the part of its buffer beyond.
    fn fill_behind_end(&self, rest: &mut [u8], offset: u64) -> io::Result<()> {
        rest.fill(0);
        let len_bytes = file_or_device_len_bytes(&self.of.file)?;
        if offset < len_bytes.checked_next_multiple_of(self.unit_bytes).unwrap_or(len_bytes) {
            return Ok(());
        }
        let error = format!("the image points to {offset:#x}, behind its end at {len_bytes:#x}");
        Err(io::Error::new(io::ErrorKind::UnexpectedEof, error))
    }

    /// Where a range is for a transfer that does not come through here, if that needs no care: aligned, and clear of the
    /// header and of the tables whose writes are recorded.
    pub(super) fn place(&self, offset: u64, len_bytes: u64) -> Option<Place> {
        let align = u64::try_from(self.of.offset_align_bytes).unwrap_or(u64::MAX);
        let is_aligned = offset.is_multiple_of(align) && len_bytes.is_multiple_of(align);
        let is_of_tables =
            self.tables.as_ref().is_some_and(|tables| tables.contain(offset, len_bytes));
        let address_align_bytes = self.of.address_align_bytes;
        // Otherwise a request nearby may read, change and write what belongs to this one as well.
        let is_aligned = is_aligned && address_align_bytes <= self.of.offset_align_bytes;
        let is_plain = is_aligned && offset >= self.unit_bytes && !is_of_tables;
        is_plain.then_some(Place { offset, address_align_bytes })
    }

    /// Whether both are the same open file.
    pub(super) fn is_same_file(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.of.file, &other.of.file)
    }

    fn check_place(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match &self.head {
            Some(may_change) if offset < self.unit_bytes => {
                if offset == 0 && !bytes.is_empty() && self.is_header(bytes, may_change)? {
                    return Ok(());
                }
                Err(io::Error::other("the image has data where its header is"))
            }
            _ => Ok(()),
        }
    }

    /// Whether these bytes, which are aligned, are those at the start of the file, except for a range.
    fn is_header(&self, bytes: &[u8], may_change: &Range<usize>) -> io::Result<bool> {
        let mut buffer = AlignedBuffer::new(bytes.len());
        let now = buffer.get_mut(bytes.len())?;
        self.read_piece(now, 0)?;
        let mut pairs = bytes.iter().zip(now.iter()).enumerate();
        Ok(pairs.all(|(at, (new, old))| new == old || may_change.contains(&at)))
    }

    fn check_writable(&self) -> io::Result<()> {
        #[cfg(test)]
        self.of.refusal.check()?;
        if self.of.is_writable { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    fn fallocate(&self, mode: libc::c_int, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.check_writable()?;
        self.check_place(offset, &[])?;
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let offset = libc::off_t::try_from(offset).map_err(invalid)?;
        let len_bytes = libc::off_t::try_from(len_bytes).map_err(invalid)?;
        let fd = self.of.file.as_raw_fd();
        // SAFETY: only numbers are passed; the descriptor is open.
        match check(unsafe { libc::fallocate(fd, mode, offset, len_bytes) }) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                // What writes zeros itself then.
                Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV) => {
                    Err(io::ErrorKind::Unsupported.into())
                }
                _ => Err(error),
            },
        }
    }

    /// Extends the file with zeros to this length, if it is shorter. A device cannot be extended.
    pub(super) fn grow(&self, len_bytes: u64) -> io::Result<()> {
        self.check_writable()?;
        if file_or_device_len_bytes(&self.of.file)? >= len_bytes {
            return Ok(());
        }
        if self.of.file.metadata()?.is_file() {
            return self.of.file.set_len(len_bytes);
        }
        Err(io::ErrorKind::StorageFull.into())
    }

    /// Punches a hole, which reads as zeros; `false` if the host does not support it.
    pub(super) fn punch_hole(&self, offset: u64, len_bytes: u64) -> io::Result<bool> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        match self.fallocate(mode, offset, len_bytes) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(false),
            other => other.map(|()| true),
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.of.path.display(), f)
    }
}

impl Storage for Store {
    fn mem_align(&self) -> usize {
        self.of.address_align_bytes
    }

    fn req_align(&self) -> usize {
        self.of.offset_align_bytes
    }

    fn size(&self) -> io::Result<u64> {
        file_or_device_len_bytes(&self.of.file)
    }

    unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, mut offset: u64) -> io::Result<()> {
        for mut piece in bufv.into_inner() {
            self.read_piece(&mut piece, offset)?;
            offset = offset.saturating_add(piece.len() as u64);
        }
        Ok(())
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, mut offset: u64) -> io::Result<()> {
        for piece in bufv.into_inner() {
            self.write_piece(&piece, offset).inspect_err(|_| {
                if let Some(tables) = &self.tables
                    && tables.contain(offset, piece.len() as u64)
                {
                    tables.fail();
                }
            })?;
            offset = offset.saturating_add(piece.len() as u64);
        }
        Ok(())
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        // Grows the file, unlike a hole: what is behind its end is an error.
        self.fallocate(libc::FALLOC_FL_ZERO_RANGE, offset, length)
    }

    unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.fallocate(libc::FALLOC_FL_ZERO_RANGE, offset, length)
    }

    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.punch_hole(offset, length).map(drop)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.of.file.sync_data()
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }
}
