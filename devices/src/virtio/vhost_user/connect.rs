// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections to the socket of a vhost-user back end.
//!
//! Owns the attempts, and their time limit: a back end is often started together with the VMM, and
//! may listen a moment later.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};

/// Time between two attempts: hardly noticed at a start, and little work for the host.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(20);

/// Connects to `path`. Within `limit` it is tried again while the back end does not listen yet, or has too many
/// connections waiting.
pub(super) fn connect(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let address = SockAddr::unix(path)?;
    let until = Instant::now().checked_add(limit);
    loop {
        match attempt(&address) {
            Ok(stream) => return Ok(stream),
            Err(error) => {
                let is_over = until.is_none_or(|until| Instant::now() >= until);
                if is_over || !may_come(&error) {
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

fn attempt(address: &SockAddr) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // A connection to a queue that is full would block without a limit.
    socket.set_nonblocking(true)?;
    socket.connect(address)?;
    socket.set_nonblocking(false)?;
    Ok(UnixStream::from(OwnedFd::from(socket)))
}
