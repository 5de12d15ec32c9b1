// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections to the Unix socket of a process that is often started together with the VMM, and may listen a moment later.
//!
//! Owns the attempts, and their time limit. Must never block on a queue of connections that is full.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::syscalls;

/// Time between two attempts: hardly noticed at a start, and little work for the host.
pub const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(20);

/// Connects to `path`. Within `limit` it is tried again while nothing listens yet, or too many connections are
/// waiting, unless that is cancelled.
///
/// # Errors
/// The last attempt's.
pub fn connect_within(
    path: &Path,
    limit: Duration,
    is_cancelled: &dyn Fn() -> bool,
) -> io::Result<UnixStream> {
    let until = Instant::now().checked_add(limit);
    loop {
        match syscalls::connect_now(path) {
            Ok(socket) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) => {
                let is_over = until.is_none_or(|until| Instant::now() >= until);
                if is_over || is_cancelled() || !may_come(&error) {
                    return Err(error);
                }
                std::thread::sleep(BETWEEN_ATTEMPTS);
            }
        }
    }
}

fn may_come(error: &io::Error) -> bool {
    // A full queue of connections is WouldBlock.
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock
    )
}
