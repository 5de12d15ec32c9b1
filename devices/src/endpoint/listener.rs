// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A listening Unix socket and its path, for a console or a socket device.
//!
//! Owns the path from binding to removal: a socket that a dead process has left behind is replaced, one at
//! which another process listens is not, and only a socket that was made here is removed.

use std::fs::{self, TryLockError};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use log::{info, warn};

use crate::syscalls;

/// Number of attempts to lock the directory, and the time between them.
const LOCK_TRIES: u32 = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// A socket that listens at a path; the path is removed when this is dropped.
pub(crate) struct PathListener {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the created socket file.
    made: (u64, u64),
}

fn file_at(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}

impl PathListener {
    /// Listens at `path`; replaces the stale socket of a process that has ended.
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        // Keeps other processes from binding between the check of a stale socket and its removal.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        // A directory that cannot be read is used without the lock.
        let _folder = match fs::File::open(folder.unwrap_or(Path::new("."))) {
            Ok(folder) => {
                lock(&folder);
                Some(folder)
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => None,
            Err(error) => return Err(error),
        };
        remove_stale(path)?;
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path: path.to_owned(), made: file_at(path)? })
    }

    pub(crate) fn accept(&self) -> io::Result<UnixStream> {
        self.listener.accept().map(|(peer, _)| peer)
    }

    /// Removes the path, if it is still the socket created here.
    pub(crate) fn remove(&self) {
        // Another process may have put its own socket there in the meantime.
        if file_at(&self.path).is_ok_and(|there| there == self.made)
            && let Err(error) = fs::remove_file(&self.path)
        {
            warn!("the socket {} cannot be removed: {error}", self.path.display());
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl AsRawFd for PathListener {
    fn as_raw_fd(&self) -> RawFd {
        self.listener.as_raw_fd()
    }
}

impl Drop for PathListener {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Locks the directory until it is closed. Another user can hold this lock forever, so the wait is limited
/// to the time that any VMM holds it.
fn lock(folder: &fs::File) {
    for _ in 0..LOCK_TRIES {
        match folder.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            _ => break,
        }
    }
}

fn remove_stale(path: &Path) -> io::Result<()> {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|there| there.file_type().is_socket());
    if !is_socket {
        // Binding fails with the name of the existing file.
        return Ok(());
    }
    match syscalls::connect_now(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            info!("replacing the stale socket {}", path.display());
            fs::remove_file(path)
        }
        _ => Ok(()),
    }
}
