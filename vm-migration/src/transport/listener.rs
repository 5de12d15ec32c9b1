// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Listening sockets for incoming migrations.
//!
//! Owns the file of a Unix socket, which it removes, and whether connections are to use TLS. Must never read a
//! byte of a connection.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use socket2::{Domain, SockAddr, Socket, Type};

use super::reach::resolve;
use super::socket::{Connection, is_tcp};
use super::tls::{Handshake, ServerTls};
use super::wait::{WaitEnd, wait};
use super::{Address, TransportError};
use crate::cancel::Cancel;

/// Backlog of a listener: a migration opens up to 257 connections at once.
const BACKLOG: i32 = 257;

/// Sockets with a file, for a process that ends while threads still have them.
static WITH_FILE: Mutex<Vec<Weak<Bound>>> = Mutex::new(Vec::new());

/// A listening socket. A Unix socket's file is removed when the last listener on it is dropped, or by
/// [`Self::remove_all_files`].
#[derive(Debug)]
pub struct Listener {
    bound: Arc<Bound>,
    /// Certificates, if connections use TLS.
    tls: Option<ServerTls>,
}

#[derive(Debug)]
struct Bound {
    socket: Socket,
    address: Address,
    /// The socket file that was created here: path, device, inode.
    made: Mutex<Option<(PathBuf, u64, u64)>>,
}

fn file_at(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|there| (there.dev(), there.ino()))
}

impl Listener {
    /// Listens. A stale socket file is replaced; one with a listener is not.
    ///
    /// # Errors
    /// When the address is in use, or does not belong to this host.
    pub fn bind(address: &Address) -> Result<Self, TransportError> {
        let failed = |source| TransportError::Listen { address: address.clone(), source };
        Self::bind_unless(address, &Cancel::new().map_err(failed)?)
    }

    /// Like [`bind`](Self::bind); a cancel ends the wait for name resolution.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub fn bind_unless(address: &Address, cancel: &Cancel) -> Result<Self, TransportError> {
        let failed = |source| TransportError::Listen { address: address.clone(), source };
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for candidate in resolve(address, cancel, super::CONNECT_TIMEOUT)? {
            if let Address::Unix(path) = address {
                remove_stale(path, &candidate).map_err(|error| match error.kind() {
                    io::ErrorKind::AddrInUse => TransportError::InUse(address.clone()),
                    _ => failed(error),
                })?;
            }
            match Self::bind_one(address, &candidate) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = error,
            }
        }
        if last.kind() == io::ErrorKind::AddrInUse {
            return Err(TransportError::InUse(address.clone()));
        }
        Err(failed(last))
    }

    fn bind_one(address: &Address, candidate: &SockAddr) -> io::Result<Self> {
        let socket = Socket::new(candidate.domain(), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        if is_tcp(&socket)? {
            socket.set_reuse_address(true)?;
        }
        socket.bind(candidate)?;
        let made = match address {
            Address::Unix(path) => {
                let (device, inode) = file_at(path)?;
                Some((path.clone(), device, inode))
            }
            Address::Tcp { .. } => None,
        };
        let has_file = made.is_some();
        let mut bound = Bound { socket, address: address.clone(), made: Mutex::new(made) };
        bound.socket.listen(BACKLOG)?;
        if let (Address::Tcp { port, .. }, Some(local)) =
            (&mut bound.address, bound.socket.local_addr()?.as_socket())
        {
            *port = local.port();
        }
        let bound = Arc::new(bound);
        if has_file {
            let mut all = WITH_FILE.lock();
            all.retain(|bound| bound.strong_count() > 0);
            all.push(Arc::downgrade(&bound));
        }
        Ok(Self { bound, tls: None })
    }

    /// Removes the file of every Unix socket that listens, for a process that ends without dropping them: a
    /// guest that lacks pages is kept to the last, with the listener for its source.
    pub fn remove_all_files() {
        let all = std::mem::take(&mut *WITH_FILE.lock());
        for bound in all.iter().filter_map(Weak::upgrade) {
            bound.remove_file();
        }
    }

    /// The same socket; connections accepted by the result use TLS with these certificates, or no TLS if
    /// `None`.
    pub(crate) fn with_tls(&self, tls: Option<ServerTls>) -> Self {
        Self { bound: Arc::clone(&self.bound), tls }
    }

    /// The certificates, if connections use TLS.
    pub(crate) fn tls(&self) -> Option<&ServerTls> {
        self.tls.as_ref()
    }

    /// The TLS handshake for a connection that was accepted here, if it needs one.
    ///
    /// # Errors
    /// When the certificates cannot be used.
    pub(crate) fn handshake(&self) -> Result<Option<Handshake>, TransportError> {
        Ok(self.tls.as_ref().map(Handshake::server).transpose()?)
    }

    /// The address on which it listens, with the actual port.
    pub fn address(&self) -> &Address {
        &self.bound.address
    }

    /// Accepts a waiting connection; `None` when there is none. Its [`handshake`](Self::handshake) is still
    /// to be done.
    ///
    /// # Errors
    /// When the host lacks a resource for it.
    pub(crate) fn accept_now(
        &self,
        cancel: &Cancel,
        stall_timeout: Duration,
    ) -> Result<Option<Connection>, TransportError> {
        loop {
            match self.bound.socket.accept() {
                Ok((socket, _)) => {
                    return Connection::new(socket, cancel, stall_timeout).map(Some);
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(None),
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    _ => return Err(TransportError::io("accepting a connection")(error)),
                },
            }
        }
    }

    /// Waits for a connection and carries out its handshake.
    ///
    /// # Errors
    /// When none comes in time, the wait is cancelled, or the handshake fails.
    pub fn accept(
        &self,
        cancel: &Cancel,
        timeout: Option<Duration>,
        stall_timeout: Duration,
    ) -> Result<Connection, TransportError> {
        const WHAT: &str = "waiting for a connection";
        loop {
            match self.bound.socket.accept() {
                Ok((socket, _)) => {
                    let connection = Connection::new(socket, cancel, stall_timeout)?;
                    return match self.handshake()? {
                        Some(handshake) => connection.shake_hands(handshake),
                        None => Ok(connection),
                    };
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => {}
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => return Err(TransportError::Io { what: WHAT, source: error }),
                },
            }
            match wait(&[self.bound.socket.as_raw_fd()], libc::POLLIN, cancel, timeout) {
                Ok(WaitEnd::Ready(_)) => {}
                Ok(WaitEnd::Cancelled) => return Err(TransportError::Cancelled),
                Ok(WaitEnd::TimedOut) => {
                    let after = timeout.unwrap_or_default();
                    return Err(TransportError::Timeout { what: WHAT, after });
                }
                Err(source) => return Err(TransportError::Io { what: WHAT, source }),
            }
        }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.bound.socket.as_raw_fd()
    }
}

impl Bound {
    fn remove_file(&self) {
        // Once: another process may have made a file of that name, and even of that number, by the next time.
        let Some((path, device, inode)) = self.made.lock().take() else { return };
        // Another listener may have created its own file there by now.
        if file_at(&path).is_ok_and(|there| there == (device, inode)) {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        self.remove_file();
    }
}

/// Removes a socket file without a listener; an error of kind `AddrInUse` if it has one.
fn remove_stale(path: &std::path::Path, address: &SockAddr) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !metadata.file_type().is_socket() {
        return Err(io::Error::other("a file that is not a socket is in the way"));
    }
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    probe.set_nonblocking(true)?;
    match probe.connect(address) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        _ => Err(io::Error::from(io::ErrorKind::AddrInUse)),
    }
}
