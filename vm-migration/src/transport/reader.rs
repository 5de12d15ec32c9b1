// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The reading end of a connection.
//!
//! May contain `unsafe`: receiving into guest memory. Owns the few bytes that are read ahead, and the
//! one descriptor that may have arrived with them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::TransportError;
use super::secured::copy_to;
use super::socket::{Connection, guest_iovec};
use crate::ram::GuestSlice;

/// A source of bytes: a connection, or a slice in tests and fuzzing.
pub trait ByteSource {
    /// Fills the buffer or fails.
    ///
    /// # Errors
    /// When the source ends or fails before the buffer is full.
    fn read_exact(&mut self, buf: &mut [u8]) -> Result<(), TransportError>;

    /// Fills guest memory, all slices in order, or fails.
    ///
    /// # Errors
    /// As [`read_exact`](Self::read_exact); part of the memory may have been written then.
    fn read_guest(&mut self, slices: &[GuestSlice<'_>]) -> Result<(), TransportError>;

    /// The next bytes, which then count as read, where they are in memory already and need not be copied.
    fn lend(&mut self, len: usize) -> Option<&[u8]> {
        let _ = len;
        None
    }
}

impl ByteSource for &[u8] {
    fn read_exact(&mut self, buf: &mut [u8]) -> Result<(), TransportError> {
        let (head, tail) = self.split_at_checked(buf.len()).ok_or(TransportError::Closed)?;
        buf.copy_from_slice(head);
        *self = tail;
        Ok(())
    }

    fn read_guest(&mut self, slices: &[GuestSlice<'_>]) -> Result<(), TransportError> {
        for slice in slices {
            let (head, tail) = self.split_at_checked(slice.len()).ok_or(TransportError::Closed)?;
            slice.write(head);
            *self = tail;
        }
        Ok(())
    }
}

/// Bytes that [`Reader`] reads ahead: a header, a table of some entries, and little of what follows,
/// because pages are better received in place.
pub(super) const AHEAD_BYTES: usize = 256;

/// Bytes that are read ahead where a requested page is waited for: the message and the page come in one call, which is
/// worth more than that the page is copied once more.
pub(crate) const AHEAD_WITH_PAGE_BYTES: usize = AHEAD_BYTES + 4096;

/// The reading side of a connection, with a small read-ahead buffer.
#[derive(Debug)]
pub struct Reader {
    connection: Arc<Connection>,
    ahead: Box<[u8]>,
    start: usize,
    end: usize,
    /// Descriptors are accepted; otherwise the kernel closes them.
    takes_descriptors: bool,
    /// A descriptor that has arrived and has not been taken yet.
    descriptor: Option<OwnedFd>,
}

impl Reader {
    /// A reader for a connection that has no other one.
    pub fn new(connection: Arc<Connection>) -> Self {
        Self {
            connection,
            ahead: Box::new([0; AHEAD_BYTES]),
            start: 0,
            end: 0,
            takes_descriptors: false,
            descriptor: None,
        }
    }

    /// Reads ahead up to `len_bytes` from here on. What has been read ahead is kept.
    pub(crate) fn read_ahead_up_to(&mut self, len_bytes: usize) {
        let kept = self.read_ahead();
        let mut ahead = vec![0; len_bytes.max(kept.len())];
        ahead[..kept.len()].copy_from_slice(kept);
        (self.start, self.end) = (0, kept.len());
        self.ahead = ahead.into_boxed_slice();
    }

    /// Sets whether descriptors are accepted, one at a time.
    pub(crate) fn welcome_descriptors(&mut self, welcome: bool) {
        self.takes_descriptors = welcome;
        self.descriptor = None;
    }

    /// Takes the descriptor that came with the data read so far.
    pub(crate) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptor.take()
    }

    /// Receives into the caller's buffer, or into the read-ahead buffer.
    fn receive_some(&mut self, buf: Option<&mut [u8]>) -> Result<usize, TransportError> {
        let buf = buf.unwrap_or(&mut self.ahead[..]);
        if !self.takes_descriptors {
            return self.connection.receive_some(buf);
        }
        let (len, descriptor) = self.connection.receive_with_descriptor(buf)?;
        if descriptor.is_some() && self.descriptor.is_some() {
            let source = io::Error::other("a descriptor came before the last one was used");
            return Err(TransportError::Io { what: "receiving a descriptor", source });
        }
        self.descriptor = descriptor.or(self.descriptor.take());
        Ok(len)
    }

    /// True when data is buffered here that a poll of the socket does not show.
    pub(crate) fn has_buffered(&self) -> bool {
        self.start < self.end || self.connection.has_buffered()
    }

    /// What has been read ahead.
    pub(crate) fn read_ahead(&self) -> &[u8] {
        &self.ahead[self.start..self.end]
    }

    fn take(&mut self, len_max: usize) -> &[u8] {
        let len = len_max.min(self.end - self.start);
        self.start += len;
        &self.ahead[self.start - len..self.start]
    }
}

impl ByteSource for Reader {
    fn read_exact(&mut self, buf: &mut [u8]) -> Result<(), TransportError> {
        let mut at = 0;
        while at < buf.len() {
            if self.start == self.end {
                if buf.len() - at >= self.ahead.len() {
                    at += self.receive_some(Some(&mut buf[at..]))?;
                    continue;
                }
                (self.start, self.end) = (0, self.receive_some(None)?);
            }
            let left = buf.len() - at;
            let taken = self.take(left);
            let len = taken.len();
            buf[at..at + len].copy_from_slice(taken);
            at += len;
        }
        Ok(())
    }

    fn lend(&mut self, len: usize) -> Option<&[u8]> {
        (len <= self.end - self.start).then(|| self.take(len))
    }

    fn read_guest(&mut self, slices: &[GuestSlice<'_>]) -> Result<(), TransportError> {
        let mut pieces = Vec::with_capacity(slices.len());
        for slice in slices {
            let mut piece = guest_iovec(slice);
            let taken = self.take(slice.len());
            if !taken.is_empty() {
                // SAFETY: the piece is the whole slice, of which `taken` is no longer. Guest memory is mapped writable
                // while `slices` borrows it, and no code in this process holds references into it.
                unsafe { copy_to(&mut piece, taken) }?;
            }
            pieces.push(piece);
        }
        // SAFETY: guest memory is mapped writable while `slices` borrows it, and no code in this
        // process holds references into it.
        unsafe { self.connection.receive(&mut pieces) }
    }
}
