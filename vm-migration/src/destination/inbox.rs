// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Messages of the source on a vCPU's own connection, read without blocking.
//!
//! Owns the bytes that have come and were not handled, and how far a message with contents has been handled: the
//! thread that reads may change between any two bytes. Contents are placed as soon as a whole unit of them is here.
//! Must never wait, and never keep more of a message than the peer has sent of it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::engine::{Engine, Via};
use super::negotiate::unexpected;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::layout::{GpaRange, to_usize};
use crate::protocol::ProtocolError;
use crate::protocol::codec::{HEADER_BYTES, Header, TABLE_BYTES_MAX};
use crate::protocol::message::{Command, Message};
use crate::ram::GuestMemoryMap;
use crate::transport::{Connection, ReceivedBytes};

const STEP: &str = "receiving pages";

/// Bytes received at once, to begin with: an answer with one page fits, and so does a piece of a large one.
const BUFFER_BYTES: usize = 32 << 10;

/// The reading end of a connection.
pub(super) struct Inbox {
    connection: Arc<Connection>,
    buffer: Vec<u8>,
    /// The bytes of the buffer that have come and were not handled.
    start: usize,
    end: usize,
    /// What a message of contents still brings.
    contents: VecDeque<GpaRange>,
    /// For the copies of the engine.
    scratch: Vec<u8>,
    /// Nothing is handled any more.
    closed: bool,
}

impl Inbox {
    pub(super) fn new(channel: Channel) -> Self {
        let Channel { connection, reader, .. } = channel;
        let mut buffer = reader.read_ahead().to_vec();
        let end = buffer.len();
        buffer.resize(BUFFER_BYTES.max(end), 0);
        let (contents, scratch) = (VecDeque::new(), Vec::new());
        Self { connection, buffer, start: 0, end, contents, scratch, closed: false }
    }

    pub(super) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Ends the handling of what comes.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Handles the next message, or the next contents of one, if they have come; false if not.
    ///
    /// # Errors
    /// When the connection has ended or sends what it must not, or pages cannot be placed. Contents for which the host
    /// has no memory stay here: [`is_short_of_memory`](Cause::is_short_of_memory).
    pub(super) fn take_next<M: GuestMemoryMap>(
        &mut self,
        engine: &Engine<M>,
        via: Via,
    ) -> Result<bool, Failure> {
        while !self.closed {
            let Some(need) = self.take_here(engine, via)? else { return Ok(true) };
            self.make_room(need);
            let room = self.buffer.get_mut(self.end..).unwrap_or_default();
            match self.connection.receive_now(room).step(STEP)? {
                Some(received) => self.end += received,
                None => return Ok(false),
            }
        }
        Ok(false)
    }

    fn here(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or_default()
    }

    /// Handles what is in the buffer; otherwise says how many bytes have to be there first.
    fn take_here<M: GuestMemoryMap>(
        &mut self,
        engine: &Engine<M>,
        via: Via,
    ) -> Result<Option<usize>, Failure> {
        if !self.contents.is_empty() {
            return self.take_contents(engine, via).step(STEP);
        }
        let Some(header) = self.here().first_chunk::<HEADER_BYTES>() else {
            return Ok(Some(HEADER_BYTES));
        };
        let header = Header::decode(*header);
        let what = Command::from_code(header.code).step(STEP)?.name();
        if header.len_bytes > TABLE_BYTES_MAX {
            let (len_bytes, max_bytes) = (header.len_bytes, TABLE_BYTES_MAX);
            return Err(ProtocolError::TooLong { what, len_bytes, max_bytes }).step(STEP);
        }
        let need = HEADER_BYTES + to_usize(header.len_bytes);
        let Some(bytes) = self.here().get(..need) else { return Ok(Some(need)) };
        let message = Message::read(&mut &*bytes).step(STEP)?;
        self.start += need;
        match message {
            Message::Memory(ranges) => self.contents = ranges.into(),
            Message::ZeroPages(ranges) => engine.take_zeros(&ranges, via).step(STEP)?,
            Message::Elsewhere(ranges) => engine.expect_elsewhere(&ranges, via).step(STEP)?,
            other => return Err(unexpected(&other, "Memory or ZeroPages")),
        }
        Ok(None)
    }

    /// Places the first of the contents of a message, if they are here.
    fn take_contents<M: GuestMemoryMap>(
        &mut self,
        engine: &Engine<M>,
        via: Via,
    ) -> Result<Option<usize>, Cause> {
        let (ranges, need) = engine.next_contents(&self.contents, via)?;
        let Some(bytes) = self.buffer.get(self.start..self.end).and_then(|here| here.get(..need))
        else {
            return Ok(Some(need));
        };
        engine.take_contents(&mut ReceivedBytes(bytes), &ranges, via, &mut self.scratch)?;
        self.start += need;
        for taken in ranges {
            match self.contents.front_mut() {
                Some(first) if first.len_bytes > taken.len_bytes => {
                    first.gpa = first.gpa.saturating_add(taken.len_bytes);
                    first.len_bytes -= taken.len_bytes;
                }
                _ => drop(self.contents.pop_front()),
            }
        }
        Ok(None)
    }

    /// Makes room for more bytes, of a message of which `need` have to be there. The buffer grows with what has come.
    fn make_room(&mut self, need: usize) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.start > 0 && self.buffer.len() - self.start < need {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.buffer.len() {
            let len = self.buffer.len();
            self.buffer.resize(need.min(2 * len).max(len + BUFFER_BYTES), 0);
        }
    }
}
