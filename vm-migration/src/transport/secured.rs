// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections with TLS: the same calls as without, over records.
//!
//! May contain `unsafe`: plaintext is copied to guest memory. Waits, limits and cancel are those of
//! `socket`. Contents of guest memory are copied once on each side: into the record that is sent, and out of
//! the one that is received.

use std::io;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use super::reader::ByteSource;
use super::socket::{Connection, Part, guest_iovec, send_now};
use super::tls::{ClientTls, Handshake, Left, Opener, Progress, Stream, TlsError};
use super::wait::{WaitEnd, wait};
use super::{Address, TransportError};
use crate::ram::GuestSlice;

const HANDSHAKE: &str = "agreeing on TLS";

impl Connection {
    /// Carries out the client's TLS handshake, if certificates are given, within the stall timeout.
    pub(super) fn secure(
        self,
        tls: Option<&ClientTls>,
        to: &Address,
    ) -> Result<Self, TransportError> {
        let Some(tls) = tls else { return Ok(self) };
        let Address::Tcp { host, .. } = to else {
            return Err(TlsError::Unix(to.to_string()).into());
        };
        let handshake = Handshake::client(tls, host)?;
        self.shake_hands(handshake)
    }

    /// True when there is data to read now, or the connection has ended. A poll of the socket may report
    /// bytes of a TLS record that is not complete yet.
    ///
    /// # Errors
    /// When the poll fails.
    pub(crate) fn has_data_now(&self) -> io::Result<bool> {
        if let Some(tls) = &self.tls {
            return Ok(self.has_plain_now(tls));
        }
        let end =
            wait(&[self.socket.as_raw_fd()], libc::POLLIN, &self.cancel(), Some(Duration::ZERO))?;
        Ok(matches!(end, WaitEnd::Ready(_)))
    }

    /// True when data is buffered that a poll of the socket does not show.
    pub(super) fn has_buffered(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.opener().is_ready(tls))
    }

    /// Carries out a handshake, within the stall timeout.
    pub(super) fn shake_hands(mut self, mut handshake: Handshake) -> Result<Self, TransportError> {
        let after = self.stall_timeout();
        let deadline = Instant::now() + after;
        loop {
            let events = match handshake.advance(&self.socket)? {
                Progress::Done(stream) => {
                    self.tls = Some(stream);
                    return Ok(self);
                }
                Progress::WantsRead => libc::POLLIN,
                Progress::WantsWrite => libc::POLLOUT,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            match self.wait(events, Some(left), HANDSHAKE) {
                Ok(()) if left.is_zero() => {}
                Err(TransportError::Timeout { .. }) => {}
                Ok(()) => continue,
                Err(error) => return Err(error),
            }
            return Err(TransportError::Timeout { what: HANDSHAKE, after });
        }
    }

    /// Continues a handshake as far as possible; true when it is complete.
    pub(crate) fn advance(&mut self, handshake: &mut Handshake) -> Result<bool, TlsError> {
        let Progress::Done(stream) = handshake.advance(&self.socket)? else { return Ok(false) };
        self.tls = Some(stream);
        Ok(true)
    }

    /// Sends a message as TLS records, a batch at a time.
    pub(super) fn send_sealed(
        &self,
        tls: &Stream,
        parts: &[Part<'_>],
        sent_bytes: &mut u64,
        total: &mut Option<Instant>,
    ) -> Result<(), TransportError> {
        let mut sealer = tls.sealer();
        if sealer.is_broken {
            return Err(TransportError::Closed);
        }
        let mut left = Left::new(parts);
        // Nothing is sealed while nothing can be sent: a wait that fails here leaves the stream intact, and
        // another message can follow.
        self.wait_for_room(total)?;
        // A sealed record has used its sequence number, and has to be sent.
        sealer.is_broken = true;
        loop {
            let records = sealer.batch(&mut left, tls)?;
            if records.is_empty() {
                sealer.is_broken = false;
                return Ok(());
            }
            let iovec = |record: &Vec<u8>| libc::iovec {
                iov_base: record.as_ptr().cast_mut().cast(),
                iov_len: record.len(),
            };
            let mut pieces: Vec<_> = records.iter().map(iovec).collect();
            // SAFETY: the pieces are the records, which outlive the call.
            unsafe { self.send_all(&mut pieces, sent_bytes, total)? };
        }
    }

    /// Waits until plaintext is available.
    fn fill(&self, tls: &Stream, opener: &mut Opener) -> Result<(), TransportError> {
        while !opener.has_plain(tls)? {
            match opener.receive(&self.socket) {
                Ok(0) => return Err(TransportError::Closed),
                Ok(_) => {}
                Err(error) => self.wait_to_read(error)?,
            }
        }
        Ok(())
    }

    /// Receives what the socket has; false when that yields no plaintext.
    fn fill_now(&self, tls: &Stream, opener: &mut Opener) -> Result<bool, TransportError> {
        while !opener.has_plain(tls)? {
            match opener.receive(&self.socket) {
                Ok(0) => return Err(TransportError::Closed),
                Ok(_) => {}
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(false),
                    io::ErrorKind::Interrupted => {}
                    _ => return Err(TransportError::Closed),
                },
            }
        }
        Ok(true)
    }

    /// Receives what the socket has; true when a reader need not wait, possibly because of the end of the
    /// stream.
    fn poll_now(&self, tls: &Stream, opener: &mut Opener) -> bool {
        while !opener.is_ready(tls) {
            match opener.receive(&self.socket) {
                Ok(1..) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Ok(_) | Err(_) => return true,
            }
        }
        true
    }

    /// Receives into pieces until all are full.
    ///
    /// # Safety
    /// As [`receive`](Self::receive).
    pub(super) unsafe fn receive_opened(
        &self,
        tls: &Stream,
        pieces: &mut [libc::iovec],
    ) -> Result<(), TransportError> {
        let mut opener = tls.opener();
        for piece in pieces {
            while piece.iov_len > 0 {
                self.fill(tls, &mut opener)?;
                let plain = opener.plain();
                let len = plain.len().min(piece.iov_len);
                // SAFETY: the piece is writable for its length, as the caller promises.
                unsafe { copy_to(piece, &plain[..len]) }?;
                opener.taken(len);
                self.has_read(len);
            }
        }
        Ok(())
    }

    fn take(&self, opener: &mut Opener, buf: &mut [u8]) -> usize {
        let plain = opener.plain();
        let len = plain.len().min(buf.len());
        buf[..len].copy_from_slice(&plain[..len]);
        opener.taken(len);
        self.has_read(len);
        len
    }

    pub(super) fn receive_some_opened(
        &self,
        tls: &Stream,
        buf: &mut [u8],
    ) -> Result<usize, TransportError> {
        let mut opener = tls.opener();
        self.fill(tls, &mut opener)?;
        Ok(self.take(&mut opener, buf))
    }

    pub(super) fn receive_now_opened(
        &self,
        tls: &Stream,
        buf: &mut [u8],
    ) -> Result<Option<usize>, TransportError> {
        let mut opener = tls.opener();
        let is_there = self.fill_now(tls, &mut opener)?;
        Ok(is_there.then(|| self.take(&mut opener, buf)))
    }

    /// Copies from the first record that has not been consumed whole. A failure is left for the read that
    /// follows.
    pub(super) fn peek_opened(&self, tls: &Stream, buf: &mut [u8]) -> usize {
        let mut opener = tls.opener();
        self.poll_now(tls, &mut opener);
        let plain = opener.plain();
        let len = plain.len().min(buf.len());
        buf[..len].copy_from_slice(&plain[..len]);
        len
    }

    pub(super) fn has_plain_now(&self, tls: &Stream) -> bool {
        self.poll_now(tls, &mut tls.opener())
    }

    /// Waits until plaintext can be read. In the middle of a record no wait exceeds the stall timeout.
    pub(super) fn wait_for_plain(
        &self,
        tls: &Stream,
        timeout: Option<Duration>,
        what: &'static str,
    ) -> Result<(), TransportError> {
        let since = Instant::now();
        let mut opener = tls.opener();
        while !self.poll_now(tls, &mut opener) {
            let left = timeout.map(|timeout| timeout.saturating_sub(since.elapsed()));
            let stall = opener.has_part().then(|| self.stall_timeout());
            let limit = left.into_iter().chain(stall).min();
            match self.wait(libc::POLLIN, limit, what) {
                Err(TransportError::Timeout { after, .. }) => {
                    let after = timeout.filter(|_| limit == left).unwrap_or(after);
                    return Err(TransportError::Timeout { what, after });
                }
                waited => waited?,
            }
        }
        Ok(())
    }

    /// Sends the closing alert, if that is possible without blocking.
    pub(super) fn say_goodbye(&self) {
        if let Some(alert) = self.tls.as_ref().and_then(|tls| tls.close_notify()) {
            let _ = send_now(&self.socket, &alert);
        }
    }
}

/// Bytes that have been received into a buffer. Unlike a slice as a source it populates the guest memory into which
/// it is read, as a host without a page for that is no reason to end the process.
pub(crate) struct ReceivedBytes<'b>(pub &'b [u8]);

impl ByteSource for ReceivedBytes<'_> {
    fn read_exact(&mut self, buf: &mut [u8]) -> Result<(), TransportError> {
        self.0.read_exact(buf)
    }

    fn read_guest(&mut self, slices: &[GuestSlice<'_>]) -> Result<(), TransportError> {
        for slice in slices {
            let bytes = self.lend(slice.len()).ok_or(TransportError::Closed)?;
            let mut piece = guest_iovec(slice);
            // SAFETY: guest memory is mapped writable while `slices` borrows it, and no code in this process holds
            // references into it.
            unsafe { copy_to(&mut piece, bytes) }?;
        }
        Ok(())
    }

    fn lend(&mut self, len: usize) -> Option<&[u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }
}

/// Copies bytes to the start of a piece of guest memory, and advances the piece. Pages that are not populated
/// are populated first: the kernel reports an error when it has none, where the copy would end the process
/// with SIGBUS.
///
/// # Safety
/// The piece must be writable for the length of `bytes`, and nothing may have a reference into it.
pub(super) unsafe fn copy_to(piece: &mut libc::iovec, bytes: &[u8]) -> Result<(), TransportError> {
    const PAGE_BYTES: usize = 4096;
    let address = piece.iov_base.addr();
    let before = address % PAGE_BYTES;
    let start = piece.iov_base.wrapping_byte_sub(before);
    // SAFETY: populating changes no contents, and fails where nothing is mapped.
    if unsafe { libc::madvise(start, before + bytes.len(), libc::MADV_POPULATE_WRITE) } != 0 {
        let error = io::Error::last_os_error();
        // Linux before 5.14 does not have MADV_POPULATE_WRITE.
        if error.raw_os_error() != Some(libc::EINVAL) {
            return Err(TransportError::NoPage { what: "receiving" });
        }
    }
    // SAFETY: the piece is writable for so many bytes, as the caller promises, and a record is ordinary
    // memory of this process.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), piece.iov_base.cast(), bytes.len()) };
    piece.iov_base = piece.iov_base.wrapping_byte_add(bytes.len());
    piece.iov_len -= bytes.len();
    Ok(())
}
