// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Name resolution and connecting: from an address to a connected socket.
//!
//! Owns the time limit and the cancel of both. It does not know what a connection is for.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use socket2::{SockAddr, Socket, Type};

use super::wait::{WaitEnd, wait};
use super::{Address, TransportError};
use crate::cancel::Cancel;

/// How often a wait for name resolution checks for a cancel.
const RESOLVE_POLL: Duration = Duration::from_millis(20);

/// Why a connection was not established.
pub(super) enum ConnectEnd {
    Cancelled,
    Failed(io::Error),
}

/// Connects to one address.
pub(super) fn connect_one(
    address: &SockAddr,
    cancel: &Cancel,
    timeout: Duration,
) -> Result<Socket, ConnectEnd> {
    let attempt = || -> io::Result<(Socket, bool)> {
        let socket = Socket::new(address.domain(), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(address) {
            Ok(()) => Ok((socket, true)),
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok((socket, false)),
            Err(error) => Err(error),
        }
    };
    let (socket, connected) = attempt().map_err(ConnectEnd::Failed)?;
    if connected {
        return Ok(socket);
    }
    match wait(&[socket.as_raw_fd()], libc::POLLOUT, cancel, Some(timeout)) {
        Ok(WaitEnd::Ready(_)) => match socket.take_error() {
            Ok(None) => Ok(socket),
            Ok(Some(error)) | Err(error) => Err(ConnectEnd::Failed(error)),
        },
        Ok(WaitEnd::Cancelled) => Err(ConnectEnd::Cancelled),
        Ok(WaitEnd::TimedOut) => Err(ConnectEnd::Failed(io::Error::from(io::ErrorKind::TimedOut))),
        Err(error) => Err(ConnectEnd::Failed(error)),
    }
}

/// Resolves an address to socket addresses. Names are resolved on a thread of their own, because
/// the resolver has neither a time limit nor a cancel; an abandoned thread ends with the resolver.
pub(super) fn resolve(
    address: &Address,
    cancel: &Cancel,
    timeout: Duration,
) -> Result<Vec<SockAddr>, TransportError> {
    let failed = |source| TransportError::Resolve { address: address.clone(), source };
    let (host, port) = match address {
        Address::Unix(path) => return SockAddr::unix(path).map(|one| vec![one]).map_err(failed),
        Address::Tcp { host, port } => (host.clone(), *port),
    };
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port).into()]);
    }
    let (sender, receiver) = mpsc::channel();
    stoppable_thread::spawn("mig-resolve", move || {
        let found = (host.as_str(), port).to_socket_addrs();
        let _ = sender.send(found.map(|all| all.map(SockAddr::from).collect::<Vec<_>>()));
    })
    .map_err(failed)?;
    let deadline = Instant::now() + timeout;
    loop {
        match receiver.recv_timeout(RESOLVE_POLL) {
            Ok(found) => return found.map_err(failed),
            Err(_) if cancel.is_cancelled() => return Err(TransportError::Cancelled),
            Err(_) if Instant::now() < deadline => {}
            Err(_) => return Err(failed(io::Error::from(io::ErrorKind::TimedOut))),
        }
    }
}
