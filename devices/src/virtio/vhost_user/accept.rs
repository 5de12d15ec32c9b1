// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections from a vhost-user back end that connects itself.
//!
//! Owns the socket at which one is awaited, and the time limit.

use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::syscalls;
use crate::unix_connect::BETWEEN_ATTEMPTS;

/// Listens at `path` until a back end has connected, for `limit` at most. Nothing is left at the path then. A socket at
/// which nothing listens is replaced.
pub(super) fn accept(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let until = Instant::now().checked_add(limit);
    let listener = listen(path)?;
    let own = identity(path);
    let accepted = loop {
        match listener.accept() {
            Ok((stream, _)) => break Ok(stream),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => break Err(error),
            Err(_) if until.is_none_or(|until| Instant::now() >= until) => {
                break Err(io::ErrorKind::TimedOut.into());
            }
            Err(_) => std::thread::sleep(BETWEEN_ATTEMPTS),
        }
    };
    // A back end that comes later must not wait at a socket that is not served. It may have been removed already,
    // or replaced by another's.
    if own.is_some() && identity(path) == own {
        let _ = std::fs::remove_file(path);
    }
    let stream = accepted?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Which file is at a path.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let is_socket = std::fs::symlink_metadata(path)?.file_type().is_socket();
            if !is_socket {
                return Err(error);
            }
            let attempt = syscalls::connect_now(path);
            if !attempt.is_err_and(|it| it.kind() == io::ErrorKind::ConnectionRefused) {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            UnixListener::bind(path)?
        }
        bound => bound?,
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}
