// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptors that come with a request over the API socket (SCM_RIGHTS).
//!
//! Owns descriptors that have arrived and not yet been taken by a request, and the rule for which request
//! takes them. A descriptor comes with bytes of its request, and is assigned to the request whose body has
//! been read when it arrives; a request that takes none is refused, rather than having its descriptors
//! dropped. None outlives its connection.

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use thiserror::Error;

use super::request::{ApiError, ApiErrorKind, VmmRequest};
use crate::config::{ArrivingFds, ConfigFd, ConfigFds, NewDevice};

/// Most descriptors that one message carries (unix(7)).
const MAX_MESSAGE_FDS: usize = 253;

/// Most descriptors of a request: a network device has at most 254 queue pairs.
pub const MAX_REQUEST_FDS: usize = 512;

/// Why descriptors could not be received.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum RightsError {
    /// More than [`MAX_REQUEST_FDS`].
    #[error("more than {MAX_REQUEST_FDS} descriptors came with one request")]
    TooMany,
    /// The descriptor limit of this process is reached.
    #[error(
        "not all descriptors that were sent could be received: the VMM has as many open as it may have \
         (RLIMIT_NOFILE)"
    )]
    Truncated,
    /// The socket takes none.
    #[error("descriptors came with a request to a socket that takes none")]
    Refused,
}

#[derive(Debug, Default)]
struct ArrivedFds {
    fds: Vec<OwnedFd>,
    failure: Option<RightsError>,
}

/// Descriptors received on a connection for its next request.
#[derive(Clone, Debug, Default)]
pub struct ReceivedFds {
    arrived: Rc<RefCell<ArrivedFds>>,
    refuses: bool,
}

impl ReceivedFds {
    /// For a connection that takes none: the kernel installs none in this process.
    pub fn refusing() -> Self {
        Self { refuses: true, ..Self::default() }
    }

    /// Takes the descriptors received so far, for the request that has been read.
    ///
    /// # Errors
    /// Some could not be received; the others are closed.
    pub fn take(&self) -> Result<Vec<OwnedFd>, RightsError> {
        let ArrivedFds { fds, failure } = self.arrived.take();
        failure.map_or(Ok(fds), Err)
    }

    /// Reads bytes, and keeps the descriptors that arrive with them.
    ///
    /// # Errors
    /// Those of `recvmsg`.
    pub fn read(&self, socket: impl AsFd, buf: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MESSAGE_FDS))];
        let mut control = if self.refuses {
            RecvAncillaryBuffer::default()
        } else {
            RecvAncillaryBuffer::new(&mut space)
        };
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut pieces = [IoSliceMut::new(buf)];
        let message = rustix::net::recvmsg(socket, &mut pieces, &mut control, flags)?;
        let arrived = &mut *self.arrived.borrow_mut();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = part {
                arrived.fds.extend(fds);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) {
            let why = if self.refuses { RightsError::Refused } else { RightsError::Truncated };
            arrived.failure = Some(why);
        } else if arrived.fds.len() > MAX_REQUEST_FDS {
            arrived.failure = Some(RightsError::TooMany);
        }
        if arrived.failure.is_some() {
            arrived.fds.clear();
        }
        Ok(message.bytes)
    }
}

/// Sends bytes with descriptors; returns the number of bytes sent.
///
/// # Errors
/// Those of `sendmsg`, which refuses more descriptors than a message can carry.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MESSAGE_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a request carries at most {MAX_MESSAGE_FDS} descriptors"),
        ));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
}

/// Passes the descriptors received with a request of the endpoint `name` to the request.
///
/// # Errors
/// The request takes no descriptors, or another number of them.
pub fn attach(name: &str, request: &mut VmmRequest, fds: Vec<OwnedFd>) -> Result<(), ApiError> {
    let count = fds.len();
    let mut fds = fds.into_iter().map(ConfigFd::received);
    let refuse = |expected: &str| {
        let message = format!("{name} takes {expected}, {count} came with the request");
        Err(ApiError::new(ApiErrorKind::BadRequest, message))
    };
    let fill = |arriving: &mut ArrivingFds, fds| {
        if arriving.expected() == count {
            arriving.fill(fds);
            return Ok(());
        }
        let expected = arriving.expected();
        refuse(&format!(
            "the {expected} descriptors that its net_fds and vfio_fds (with one for iommufd_fd) name"
        ))
    };
    match request {
        VmmRequest::AddDevice(device) => match device.as_mut() {
            NewDevice::Net(net) if count > 0 => net.fds = Some(ConfigFds(fds.collect())),
            NewDevice::Host(_) if count > 1 => return refuse("one descriptor"),
            NewDevice::Host(host) if count == 1 => host.fd = fds.next(),
            NewDevice::Disk(_)
            | NewDevice::Fs(_)
            | NewDevice::GenericVhostUser(_)
            | NewDevice::Pmem(_)
            | NewDevice::User(_)
            | NewDevice::Vdpa(_)
            | NewDevice::Vsock(_)
                if count > 0 =>
            {
                return refuse("no descriptors");
            }
            _ => {}
        },
        VmmRequest::Restore(config) => {
            let mut arriving = config.arriving_fds();
            fill(&mut arriving, fds.collect())?;
            config.set_arriving_fds(arriving);
        }
        VmmRequest::ReceiveMigration(data) => {
            let mut arriving = data.arriving_fds();
            fill(&mut arriving, fds.collect())?;
            data.set_arriving_fds(arriving);
        }
        _ if count > 0 => return refuse("no descriptors"),
        _ => {}
    }
    Ok(())
}
