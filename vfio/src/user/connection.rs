// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The connection to a device server.
//!
//! Owns the socket: bytes and descriptors go out and come in within a time limit, and descriptors that come in are owned
//! at once, so that none leaks. Must never block beyond the limit.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::protocol::FDS_TAKEN_MAX;
use super::received::ReceivedFd;

/// Descriptors for which there is room, so that one too many is seen as such, and closed.
const FDS_ROOM: usize = FDS_TAKEN_MAX + 1;

/// When an operation has to be over.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    until: Option<Instant>,
    /// How long it may take.
    pub limit: Duration,
}

impl Deadline {
    /// From now on.
    pub fn within(limit: Duration) -> Self {
        Self { until: Instant::now().checked_add(limit), limit }
    }

    /// The time that is left; `None` if there is none.
    pub fn left(&self) -> Option<Duration> {
        let left = self.until?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }
}

/// Why bytes have not gone out or come in.
#[derive(Debug)]
pub enum TransferError {
    /// The other side has closed the connection.
    HungUp,
    /// The time is over.
    Late,
    /// More descriptors came than are taken.
    TooManyFds,
    /// The kernel's error.
    Io(io::Error),
}

impl From<Errno> for TransferError {
    fn from(error: Errno) -> Self {
        match error {
            Errno::CONNRESET | Errno::PIPE => Self::HungUp,
            error => Self::Io(error.into()),
        }
    }
}

/// A connected socket.
#[derive(Debug)]
pub struct Connection(UnixStream);

impl Connection {
    /// Over a connected socket.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self(stream))
    }

    /// Sends all of the bytes, and the descriptors along with the first of them.
    ///
    /// # Errors
    /// What has kept it from that; a part may have gone out.
    pub fn send(
        &self,
        mut bytes: &[u8],
        mut fds: &[BorrowedFd<'_>],
        deadline: &Deadline,
    ) -> Result<(), TransferError> {
        while !bytes.is_empty() {
            let mut space = vec![MaybeUninit::uninit(); cmsg_space!(ScmRights(fds.len()))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(TransferError::Io(io::ErrorKind::InvalidInput.into()));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(sent) => {
                    bytes = bytes.get(sent..).unwrap_or_default();
                    fds = &[];
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Fills the buffer; descriptors that come along are added to `fds`. Without that, there may be none, and the kernel
    /// drops them.
    ///
    /// # Errors
    /// What has kept it from that.
    pub fn receive(
        &self,
        mut buffer: &mut [u8],
        mut fds: Option<&mut Vec<ReceivedFd>>,
        deadline: &Deadline,
    ) -> Result<(), TransferError> {
        while !buffer.is_empty() {
            match self.receive_some(buffer, fds.as_deref_mut()) {
                Ok(0) => return Err(TransferError::HungUp),
                Ok(received) => buffer = buffer.get_mut(received..).unwrap_or_default(),
                Err(TransferError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(PollFlags::IN, deadline)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether there is something to receive, or the connection has ended.
    pub fn is_readable(&self) -> bool {
        let mut polled = [PollFd::new(&self.0, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut polled, Some(&now)), Ok(count) if count > 0)
    }

    fn receive_some(
        &self,
        buffer: &mut [u8],
        fds: Option<&mut Vec<ReceivedFd>>,
    ) -> Result<usize, TransferError> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_ROOM))];
        let room = if fds.is_some() { space.as_mut_slice() } else { &mut [] };
        let mut control = RecvAncillaryBuffer::new(room);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = loop {
            match recvmsg(&self.0, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
                Ok(received) => break received,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        };
        let mut count = 0;
        if let Some(fds) = fds {
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(come) = message {
                    fds.extend(come.map(ReceivedFd::from));
                }
            }
            count = fds.len();
        }
        if count > FDS_TAKEN_MAX || received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(TransferError::TooManyFds);
        }
        Ok(received.bytes)
    }

    fn wait(&self, flags: PollFlags, deadline: &Deadline) -> Result<(), TransferError> {
        let left = deadline.left().ok_or(TransferError::Late)?;
        let left = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&self.0, flags)], Some(&left)) {
            // Also after the time is over, which the next wait finds.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsRawFd for Connection {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
