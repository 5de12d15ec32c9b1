// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The path at which clients of the host reach a guest.
//!
//! Owns the listening socket for as long as a VM has the path: it is bound before the guest runs, and released
//! before the guest runs elsewhere, like an image's lock. Sockets of other processes next to it, to
//! which the guest connects, are only ever connected to.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use thiserror::Error;

use crate::endpoint::listener::PathListener;
use crate::syscalls;

/// Why the socket path cannot be used.
#[derive(Debug, Error)]
pub enum VsockSocketError {
    /// The socket cannot be bound.
    #[error("cannot listen at {path}")]
    Listen {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The directory does not exist.
    #[error("cannot look at the directory of {path}")]
    Directory {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// The listening socket of a device; see the module.
pub struct VsockSocket {
    path: PathBuf,
    /// Only locked briefly.
    listener: Mutex<Option<Arc<PathListener>>>,
}

impl VsockSocket {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, listener: Mutex::new(None) }
    }

    /// Starts listening, if it does not. A stale socket is replaced.
    ///
    /// # Errors
    /// Names the path: another process listens there, or it cannot be bound.
    pub fn attach(&self) -> Result<(), VsockSocketError> {
        let mut listener = self.listener.lock();
        if listener.is_none() {
            let bound = PathListener::bind(&self.path);
            let failed = |source| VsockSocketError::Listen { path: self.path.clone(), source };
            *listener = Some(Arc::new(bound.map_err(failed)?));
        }
        Ok(())
    }

    /// Whether it listens.
    pub fn is_attached(&self) -> bool {
        self.listener().is_some()
    }

    /// Whether it could listen if no other process did: its directory exists.
    ///
    /// # Errors
    /// Names the path.
    pub fn check(&self) -> Result<(), VsockSocketError> {
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        match std::fs::metadata(parent.unwrap_or(Path::new("."))) {
            Ok(_) => Ok(()),
            Err(source) => Err(VsockSocketError::Directory { path: self.path.clone(), source }),
        }
    }

    /// Releases the path. The device must be paused or gone; its connections are kept.
    pub fn detach(&self) {
        *self.listener.lock() = None;
    }

    /// Removes the path, for a process that exits without cleanup: a stale socket would be replaced, but
    /// suggests that a guest exists.
    pub fn remove_path(&self) {
        if let Some(listener) = self.listener() {
            listener.remove();
        }
    }

    pub(super) fn listener(&self) -> Option<Arc<PathListener>> {
        self.listener.lock().clone()
    }

    /// Connects to the listener for guest connections to `port`, without blocking.
    pub(super) fn connect_to_port(&self, port: u32) -> io::Result<OwnedFd> {
        let mut path = OsString::from(self.path.as_os_str());
        path.push(format!("_{port}"));
        syscalls::connect_now(Path::new(&path))
    }
}
