// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Stable storage of an image: whether data that the guest counts as written is on it, and whether what
//! is read is not older than that.
//!
//! Owns the page cache of an image as far as a VMM can: writing it back, dropping it, and the
//! record that a flush has failed. Linux reports a failed writeback once and treats the pages as
//! clean afterwards, so a later successful flush says nothing about what was lost: after one
//! failure every flush of the same open file fails.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::image::{Disk, DiskError};
use super::no_space::is_full;
use crate::syscalls::check;

/// State of an open image.
#[derive(Debug, Default)]
pub(super) struct Condition {
    /// The errno of the first failed flush; 0 if none.
    failed: AtomicI32,
    /// Number of bytes locked, if any. Held while the lock is changed.
    locked_bytes: Mutex<Option<u64>>,
}

impl Condition {
    pub(super) fn locked_bytes(&self) -> MutexGuard<'_, Option<u64>> {
        self.locked_bytes.lock()
    }
}

impl Disk {
    /// Makes earlier writes stable. No effect on a read-only disk.
    pub(super) fn flush(&self) -> io::Result<()> {
        if self.readonly() {
            return Ok(());
        }
        self.check_stable()?;
        self.write_tables()?;
        self.note_flush(self.file().sync_data())
    }

    /// The same; an image in a format also needs no repair afterwards, until the next write, so that a copy of it can be
    /// used as it is.
    pub(super) fn write_back(&self) -> io::Result<()> {
        self.flush()?;
        let Some(formatted) = self.formatted().filter(|_| !self.readonly()) else { return Ok(()) };
        self.note_tables(formatted.close())
    }

    fn note_tables(&self, result: io::Result<()>) -> io::Result<()> {
        match result {
            Err(error) if !is_full(&error) => self.note_flush(Err(error)),
            other => other,
        }
    }

    /// Writes modified tables of an image in a format. Tables for which there is no space are not lost; the next
    /// call writes them.
    pub(super) fn write_tables(&self) -> io::Result<()> {
        let Some(formatted) = self.formatted().filter(|_| !self.readonly()) else { return Ok(()) };
        self.note_tables(formatted.write_tables())
    }

    /// Writes and drops the tables of an image in a format, before another VM may change them.
    pub(super) fn unload(&self) -> io::Result<()> {
        let Some(formatted) = self.formatted() else { return Ok(()) };
        formatted.unload().or_else(|error| {
            log::error!("disk {}: its tables could not be written: {error}", self.path().display());
            // The tables are dropped, so the data are lost.
            self.note_flush(Err(error))
        })
    }

    /// Records the result of a flush; returns the result for the request.
    pub(super) fn note_flush(&self, result: io::Result<()>) -> io::Result<()> {
        if let Err(error) = result {
            let number = error.raw_os_error().unwrap_or(libc::EIO);
            // The first error is kept.
            let _ = self.condition.failed.compare_exchange(
                0,
                number,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            return Err(error);
        }
        // The host reports an error once, perhaps to the flush of another queue.
        self.check_stable()
    }

    /// Records a failed write that was to be stable on completion. Through the page cache, the error may be
    /// that of another write.
    pub(super) fn note_failed_through(&self, error: &io::Error) {
        if !self.direct()
            && let Some(number) = error.raw_os_error()
        {
            let _ = self.note_flush(Err(io::Error::from_raw_os_error(number)));
        }
    }

    /// The error of the first failed flush.
    pub(super) fn check_stable(&self) -> io::Result<()> {
        match self.condition.failed.load(Ordering::Acquire) {
            0 => Ok(()),
            number => Err(io::Error::from_raw_os_error(number)),
        }
    }

    /// Drops the host's cached contents of the image, so that writes of another host are read. Dirty pages
    /// are written back first; data without a copy elsewhere is never dropped.
    pub(super) fn drop_cache(&self) -> Result<(), DiskError> {
        self.drop_cache_after(write_out)
    }

    /// The same, with the function that writes a file's cache back.
    pub(super) fn drop_cache_after(
        &self,
        write_out: impl FnOnce(&File) -> io::Result<()>,
    ) -> Result<(), DiskError> {
        let error = |source| DiskError::Cache { path: self.path().to_owned(), source };
        self.unload().map_err(error)?;
        if !self.readonly() {
            // This error reports a failed write-back, which no later flush reports again: it counts as a
            // failed flush.
            write_out(self.file()).or_else(|failed| self.note_flush(Err(failed))).map_err(error)?;
        }
        let fd = self.file().as_raw_fd();
        // SAFETY: only numbers are passed; the descriptor is open. A length of zero means to the end.
        match unsafe { libc::posix_fadvise(fd, 0, 0, libc::POSIX_FADV_DONTNEED) } {
            0 => Ok(()),
            number => Err(error(io::Error::from_raw_os_error(number))),
        }
    }
}

/// Writes a file's dirty pages back and waits for it. Unlike a flush this does not make the data stable on
/// the device, which another reader of the device does not need.
fn write_out(file: &File) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: only numbers are passed; the descriptor is open. A length of zero means to the end.
    check(unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, flags) }).map(drop)
}
