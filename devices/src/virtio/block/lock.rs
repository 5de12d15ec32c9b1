// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The lock that keeps two VMs from writing to one image.
//!
//! An open-file-description lock: it belongs to the image that this process has open, ends with
//! it, and is not lost when another descriptor of the same file is closed. The thread that releases it
//! has the image written back first, as another host may use it next.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::device::BlockConfig;
use super::formatted::Formatted;
use super::image::{Disk, DiskError};
use crate::syscalls::check;

/// Byte range of the image lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockGranularity {
    /// The bytes of the disk. Some network file systems treat whole-file locks differently.
    #[default]
    ByteRange,
    /// The whole file, whatever its length.
    Full,
}

/// The lock of an image: shared if read-only, exclusive otherwise.
///
/// A handle, so that it can be taken when the VM starts, and handed over when a migration is acknowledged,
/// while the transport owns the device.
#[derive(Clone)]
pub struct DiskLock {
    pub(super) disk: Arc<Disk>,
    pub(super) granularity: LockGranularity,
}

impl DiskLock {
    /// Opens a raw file or device that is not a disk of the guest; it is not locked yet.
    pub(in crate::virtio) fn open(path: PathBuf, readonly: bool) -> Result<Self, DiskError> {
        let raw = BlockConfig { path, readonly, ..BlockConfig::default() };
        Disk::open_as(&raw).map(Self::new)
    }

    /// The same for a file that is open already; `path` is for messages.
    pub(in crate::virtio) fn of(
        path: &Path,
        file: Arc<File>,
        readonly: bool,
    ) -> Result<Self, DiskError> {
        Disk::inspect(path, file, readonly, false).map(Self::new)
    }

    /// The same open file and lock, with the length that the file has now.
    pub(in crate::virtio) fn again(&self) -> Result<Self, DiskError> {
        let disk = Arc::new(self.disk.again()?);
        Ok(Self { disk, granularity: self.granularity })
    }

    fn new(disk: Disk) -> Self {
        Self { disk: Arc::new(disk), granularity: LockGranularity::default() }
    }

    /// The open file.
    pub(in crate::virtio) fn file(&self) -> &File {
        self.disk.file()
    }

    /// Has every flush fail from now on.
    #[cfg(test)]
    pub(in crate::virtio) fn fail_flushes(&self) {
        let error = io::Error::from_raw_os_error(libc::EIO);
        // The error is what it returns.
        let _ = self.disk.note_flush(Err(error));
    }

    /// Length of the file when it was opened.
    pub(in crate::virtio) fn file_len_bytes(&self) -> u64 {
        self.disk.file_len_bytes()
    }

    /// Length of the file now.
    ///
    /// # Errors
    /// The host does not say.
    pub fn host_len_bytes(&self) -> io::Result<u64> {
        self.disk.host_len_bytes()
    }

    /// Takes the lock, or fails without waiting. Idempotent.
    pub fn lock(&self) -> Result<(), DiskError> {
        let mut locked = self.disk.condition.locked_bytes();
        let len_bytes = Some(self.disk.file_len_bytes());
        if *locked == len_bytes {
            return Ok(());
        }
        self.take()?;
        if let Some(formatted) = self.disk.formatted()
            && let Err(source) = formatted.lock_others(true)
        {
            if locked.is_none() {
                // The first error is returned.
                let _ = self.set(libc::F_UNLCK);
            }
            return Err(self.disk.format_error(source));
        }
        *locked = len_bytes;
        Ok(())
    }

    /// Loads the tables of an image in a format, which must be locked. Until then all requests fail. Data written by
    /// another host are seen only after [`Self::drop_cache`].
    ///
    /// # Errors
    /// [`DiskError::Format`].
    pub fn load(&self) -> Result<(), DiskError> {
        let load = self.disk.formatted().map_or(Ok(()), Formatted::load);
        load.map_err(|source| self.disk.format_error(source))
    }

    /// Checks whether an image in a format can be loaded. Needs no lock, but no other VM may write to it meanwhile.
    ///
    /// # Errors
    /// [`DiskError::Format`].
    pub fn check_format(&self) -> Result<(), DiskError> {
        let check = self.disk.formatted().map_or(Ok(()), Formatted::check);
        check.map_err(|source| self.disk.format_error(source))
    }

    /// Whether the lock is held.
    pub fn is_held(&self) -> bool {
        self.disk.condition.locked_bytes().is_some()
    }

    fn take(&self) -> Result<(), DiskError> {
        let kind = if self.disk.readonly() { libc::F_RDLCK } else { libc::F_WRLCK };
        self.set(kind).map_err(|source| {
            let path = self.disk.path().to_owned();
            match source.raw_os_error() {
                Some(libc::EAGAIN | libc::EACCES) => DiskError::InUse { path },
                _ => DiskError::Lock { path, source },
            }
        })
    }

    /// Releases the lock. The device must be paused and its writes written back ([`Self::write_back`]).
    ///
    /// # Errors
    /// [`DiskError::NotStable`] if the tables of an image in a format cannot be written; the lock is released all the
    /// same, as nothing can recover them. [`DiskError::Format`] and [`DiskError::Lock`] if a lock stays held.
    pub fn unlock(&self) -> Result<(), DiskError> {
        let mut locked = self.disk.condition.locked_bytes();
        let unloaded = self.disk.unload().map_err(|source| self.not_stable(source));
        let others = self.disk.formatted().map_or(Ok(()), |formatted| formatted.lock_others(false));
        self.set(libc::F_UNLCK)
            .map_err(|source| DiskError::Lock { path: self.disk.path().to_owned(), source })?;
        *locked = None;
        unloaded.and(others.map_err(|source| self.disk.format_error(source)))
    }

    /// Whether a device of `config` can take over this open image ([`super::Block::over`]).
    pub fn fits(&self, config: &BlockConfig) -> bool {
        let disk = &self.disk;
        disk.path() == config.path
            && disk.readonly() == config.readonly
            && disk.direct() == config.direct
            && disk.format() == config.format
            && self.granularity == config.lock_granularity
    }

    /// Paths of the backing files.
    pub fn backing_paths(&self) -> Vec<PathBuf> {
        self.disk.formatted().map(Formatted::other_paths).unwrap_or_default()
    }

    /// Path of the image.
    pub fn path(&self) -> &Path {
        self.disk.path()
    }

    /// Whether the disk is writable, and so may need writing back.
    pub fn is_writable(&self) -> bool {
        !self.disk.readonly()
    }

    /// Whether the image is in a format, whose tables [`Self::write_back`] writes.
    pub fn is_formatted(&self) -> bool {
        self.disk.formatted().is_some()
    }

    /// Makes earlier writes stable, and leaves an image in a format that needs no repair before it is used, until the
    /// next write. Takes as long as the storage does.
    ///
    /// # Errors
    /// [`DiskError::NotStable`], also if an earlier flush by the guest or the VMM has failed: the lost data
    /// cannot be recovered, and the error persists until the image is opened again.
    pub fn write_back(&self) -> Result<(), DiskError> {
        self.disk.write_back().map_err(|source| self.not_stable(source))
    }

    /// Whether no flush has failed.
    ///
    /// # Errors
    /// [`DiskError::NotStable`].
    pub fn check_stable(&self) -> Result<(), DiskError> {
        self.disk.check_stable().map_err(|source| self.not_stable(source))
    }

    /// Drops the cached contents of the image, to which another host may have written. Nothing is done for
    /// a read-only disk, to which no other VM can write while it is locked.
    ///
    /// # Errors
    /// The host's error.
    pub fn drop_cache(&self) -> Result<(), DiskError> {
        if self.is_writable() { self.disk.drop_cache() } else { Ok(()) }
    }

    fn not_stable(&self, source: io::Error) -> DiskError {
        DiskError::NotStable { path: self.disk.path().to_owned(), source }
    }

    /// Whether the lock of a disk that is written, or only read, could be taken now; takes none. The image may be open
    /// for reading only.
    ///
    /// # Errors
    /// [`DiskError::InUse`].
    pub fn check_free(&self, is_written: bool) -> Result<(), DiskError> {
        let kind = if is_written { libc::F_WRLCK } else { libc::F_RDLCK };
        let path = || self.disk.path().to_owned();
        match is_free(self.disk.file(), kind, self.len_bytes(kind)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(DiskError::InUse { path: path() }),
            Err(source) => Err(DiskError::Lock { path: path(), source }),
        }
    }

    fn set(&self, kind: libc::c_int) -> io::Result<()> {
        set_lock(self.disk.file(), kind, self.len_bytes(kind))
    }

    /// Length of the range that is locked.
    fn len_bytes(&self, kind: libc::c_int) -> u64 {
        match self.granularity {
            // A length of zero extends to the end of the file.
            LockGranularity::Full => 0,
            // The file of an image in a format grows.
            LockGranularity::ByteRange if self.disk.formatted().is_some() => 0,
            // A disk may have been larger.
            LockGranularity::ByteRange if kind == libc::F_UNLCK => 0,
            LockGranularity::ByteRange => self.disk.file_len_bytes(),
        }
    }

    /// Has the lock, which is held, cover this many bytes.
    pub(super) fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        let kind = if self.disk.readonly() { libc::F_RDLCK } else { libc::F_WRLCK };
        set_lock(self.disk.file(), kind, len_bytes)
    }
}

/// Sets the lock on the whole of a file.
pub(super) fn set_whole_lock(file: &File, kind: libc::c_int) -> io::Result<()> {
    set_lock(file, kind, 0)
}

fn range(kind: libc::c_int, len_bytes: u64) -> io::Result<libc::flock> {
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    Ok(libc::flock {
        l_type: libc::c_short::try_from(kind).map_err(invalid)?,
        l_whence: libc::c_short::try_from(libc::SEEK_SET).map_err(invalid)?,
        l_start: 0,
        l_len: libc::off_t::try_from(len_bytes).map_err(invalid)?,
        l_pid: 0,
    })
}

fn set_lock(file: &File, kind: libc::c_int, len_bytes: u64) -> io::Result<()> {
    let range = range(kind, len_bytes)?;
    // SAFETY: F_OFD_SETLK reads one flock, which lives during the call; the descriptor is open.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) })?;
    Ok(())
}

fn is_free(file: &File, kind: libc::c_int, len_bytes: u64) -> io::Result<bool> {
    let mut range = range(kind, len_bytes)?;
    // SAFETY: F_OFD_GETLK reads and writes one flock, which lives during the call; the descriptor is open.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) })?;
    Ok(libc::c_int::from(range.l_type) == libc::F_UNLCK)
}
