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
use crate::syscalls::check;

/// What is known of an open image besides its contents.
#[derive(Debug, Default)]
pub(super) struct Condition {
    /// Number of the error of the first flush that failed; 0 if none has.
    failed: AtomicI32,
    /// How many bytes are locked, if any are. Held while the lock is changed.
    locked_bytes: Mutex<Option<u64>>,
}

impl Condition {
    pub(super) fn locked_bytes(&self) -> MutexGuard<'_, Option<u64>> {
        self.locked_bytes.lock()
    }
}

impl Disk {
    /// Puts on stable storage what was written before. Nothing was, if the disk is read-only.
    pub(super) fn flush(&self) -> io::Result<()> {
        if self.readonly() {
            return Ok(());
        }
        self.check_stable()?;
        self.note_flush(self.file().sync_data())
    }

    /// Takes note of how a flush went; returns what the flush request is completed with.
    pub(super) fn note_flush(&self, result: io::Result<()>) -> io::Result<()> {
        if let Err(error) = result {
            let number = error.raw_os_error().unwrap_or(libc::EIO);
            // The first one stays.
            let _ = self.condition.failed.compare_exchange(
                0,
                number,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            return Err(error);
        }
        // The host tells of a failure once: perhaps in answer to a flush of another queue.
        self.check_stable()
    }

    /// Takes note of a write that was to be on stable storage when it was done, and failed. Through
    /// the page cache, the failure may be that of another write.
    pub(super) fn note_failed_through(&self, error: &io::Error) {
        if !self.direct()
            && let Some(number) = error.raw_os_error()
        {
            let _ = self.note_flush(Err(io::Error::from_raw_os_error(number)));
        }
    }

    /// The error of the first flush that failed.
    pub(super) fn check_stable(&self) -> io::Result<()> {
        match self.condition.failed.load(Ordering::Acquire) {
            0 => Ok(()),
            number => Err(io::Error::from_raw_os_error(number)),
        }
    }

    /// Forgets what the page cache of this host has of the image, so that what another host wrote is
    /// read. What was written here before and is still in the cache is written back first; what has
    /// no copy elsewhere is never dropped.
    pub(super) fn drop_cache(&self) -> Result<(), DiskError> {
        self.drop_cache_after(write_out)
    }

    /// The same, with what writes the cache of a file back.
    pub(super) fn drop_cache_after(
        &self,
        write_out: impl FnOnce(&File) -> io::Result<()>,
    ) -> Result<(), DiskError> {
        let error = |source| DiskError::Cache { path: self.path().to_owned(), source };
        if !self.readonly() {
            // The host has told of a failed writeback with this answer, and tells no flush of it
            // again: it counts as a flush that failed.
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

/// Writes out what the page cache has of a file, and waits for it. Unlike a flush it does not have the
/// device put it on stable storage, which another reader of the device does not need.
fn write_out(file: &File) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: only numbers are passed; the descriptor is open. A length of zero means to the end.
    check(unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, flags) }).map(drop)
}
