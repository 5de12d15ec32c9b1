// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The lock that keeps two VMs from writing to one image.
//!
//! An open-file-description lock: it belongs to the image that this process has open, ends with
//! it, and is not lost when some other descriptor of the same file is closed.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::image::{Disk, DiskError};
use crate::syscalls::check;

/// Which bytes of the image are locked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockGranularity {
    /// The bytes of the disk. Some network file systems treat a lock on a whole file differently.
    #[default]
    ByteRange,
    /// The whole file, whatever its length.
    Full,
}

/// The lock of a block device's image: shared if it is read-only, exclusive otherwise.
///
/// A handle, so that the lock can be taken when the VM starts and be handed over with the
/// acknowledgement of a migration while the transport owns the device.
#[derive(Clone)]
pub struct DiskLock {
    pub(super) disk: Arc<Disk>,
    pub(super) granularity: LockGranularity,
}

impl DiskLock {
    /// Takes the lock, or fails at once. Taking it again changes nothing.
    pub fn lock(&self) -> Result<(), DiskError> {
        let kind = if self.disk.readonly() { libc::F_RDLCK } else { libc::F_WRLCK };
        self.set(kind).map_err(|source| {
            let path = self.disk.path().to_owned();
            match source.raw_os_error() {
                Some(libc::EAGAIN | libc::EACCES) => DiskError::InUse { path },
                _ => DiskError::Lock { path, source },
            }
        })
    }

    /// Gives the lock back. The guest must not write any more.
    pub fn unlock(&self) -> Result<(), DiskError> {
        self.set(libc::F_UNLCK)
            .map_err(|source| DiskError::Lock { path: self.disk.path().to_owned(), source })
    }

    fn set(&self, kind: libc::c_int) -> io::Result<()> {
        let len_bytes = match self.granularity {
            // A length of zero means to the end, however far that is.
            LockGranularity::Full => 0,
            LockGranularity::ByteRange => self.disk.file_len_bytes(),
        };
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let range = libc::flock {
            l_type: libc::c_short::try_from(kind).map_err(invalid)?,
            l_whence: libc::c_short::try_from(libc::SEEK_SET).map_err(invalid)?,
            l_start: 0,
            l_len: libc::off_t::try_from(len_bytes).map_err(invalid)?,
            l_pid: 0,
        };
        let fd = self.disk.file().as_raw_fd();
        // SAFETY: F_OFD_SETLK reads one flock, which lives during the call; the descriptor is open.
        check(unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const range) })?;
        Ok(())
    }
}
