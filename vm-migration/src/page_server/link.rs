// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The socket between a source and its page server.
//!
//! Owns the frames and their order. A source waits for an answer no longer than the time limit that it
//! passes; a page server waits for its takeover request for as long as the source runs.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use zeroize::Zeroizing;

use super::takeover::{ServedMemory, TakeoverRequest};
use super::{TakeoverOutcome, take_over_limit};
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::Cause;
use crate::layout::Layout;
use crate::options::Limits;
use crate::protocol::ProtocolError;
use crate::protocol::codec::{Header, read_payload};
use crate::protocol::message::Answer;
use crate::ram::GuestMemoryMap;
use crate::transport::{ByteSource, Connection, TransportError};

const MEMORY: u16 = 1;
const FILE: u16 = 2;
const TAKEOVER: u16 = 3;

/// Longest description of memory: 4096 regions with names of 128 bytes, doubled.
const MEMORY_BYTES_MAX: u64 = 4 << 20;

/// Longest takeover request: 4096 pairs of numbers, doubled, and three files of 64 KiB with certificates.
const CHARGE_BYTES_MAX: u64 = 1 << 20;

/// How long a page server may take to start and to map the memory, on a busy host and with many regions.
const START_LIMIT: Duration = Duration::from_secs(20);

/// A message to the page server, unchecked.
#[derive(PartialEq, Eq)]
enum Order {
    Memory(Vec<u8>),
    /// Number of a file, whose descriptor comes with the message.
    File(u32),
    /// It may hold a private key: never logged, and zeroed after use.
    TakeoverRequest(Zeroizing<Vec<u8>>),
}

impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Order").field(&self.name()).finish_non_exhaustive()
    }
}

impl Order {
    fn name(&self) -> &'static str {
        match self {
            Self::Memory(_) => "a description of memory",
            Self::File(_) => "a file",
            Self::TakeoverRequest(_) => "a takeover request",
        }
    }

    /// The encoded header and payload.
    fn encode(&self) -> (Vec<u8>, Cow<'_, [u8]>) {
        let (code, payload): (_, Cow<'_, [u8]>) = match self {
            Self::Memory(json) => (MEMORY, json.into()),
            Self::File(number) => (FILE, number.to_le_bytes().to_vec().into()),
            Self::TakeoverRequest(json) => (TAKEOVER, json.as_slice().into()),
        };
        (Header::new(code, payload.len() as u64).encode().to_vec(), payload)
    }

    fn read(from: &mut impl ByteSource) -> Result<Self, ProtocolError> {
        let Header { code, len_bytes, .. } = Header::read(from)?;
        let what = "an order to a page server";
        match code {
            MEMORY => Ok(Self::Memory(read_payload(from, what, len_bytes, MEMORY_BYTES_MAX)?)),
            TAKEOVER => {
                let json = read_payload(from, what, len_bytes, CHARGE_BYTES_MAX)?;
                Ok(Self::TakeoverRequest(Zeroizing::new(json)))
            }
            FILE if len_bytes == 4 => {
                let mut number = [0; 4];
                from.read_exact(&mut number)?;
                Ok(Self::File(u32::from_le_bytes(number)))
            }
            FILE => Err(ProtocolError::BadLength { what, len_bytes }),
            other => Err(ProtocolError::UnknownCommand(other)),
        }
    }
}

fn channel(socket: UnixStream, stall: Duration) -> Result<Channel, Cause> {
    let never = Cancel::new().map_err(Cause::Resource)?;
    Ok(Channel::new(Connection::over(socket, &never, stall)?))
}

/// The source's end of the socket pair.
#[derive(Debug)]
pub struct SourceEnd {
    channel: Channel,
    limits: Limits,
}

impl SourceEnd {
    /// Uses one end of a socket pair.
    ///
    /// # Errors
    /// When the host lacks a resource.
    pub fn new(socket: UnixStream, limits: Limits) -> Result<Self, Cause> {
        Ok(Self { channel: channel(socket, START_LIMIT)?, limits })
    }

    fn order(&mut self, order: &Order, file: Option<BorrowedFd<'_>>) -> Result<(), Cause> {
        let (header, payload) = order.encode();
        let connection = &self.channel.connection;
        let sent = connection.send(&header).and_then(|()| match file {
            Some(file) => connection.send_with_descriptor(&payload, file),
            None => connection.send(&payload),
        });
        sent.map_err(|error| self.channel.explain(error))
    }

    /// Sends the memory's description and files, for the page server to map.
    ///
    /// # Errors
    /// When some of the memory has no file, or the page server refuses it.
    pub fn give_memory<M: GuestMemoryMap>(&mut self, memory: &M) -> Result<(), Cause> {
        let (description, files) = ServedMemory::of(memory)?;
        self.order(&Order::Memory(description.to_json()), None)?;
        self.channel.answer(START_LIMIT)?;
        for (number, file) in (0..).zip(files) {
            self.order(&Order::File(number), Some(file))?;
            self.channel.answer(START_LIMIT)?;
        }
        Ok(())
    }

    /// Tells the page server to take over.
    ///
    /// # Errors
    /// When it fails, or does not answer in time: see [`super::PageServerHandle::take_over`].
    pub fn takeover(&mut self, takeover: &TakeoverRequest) -> Result<TakeoverOutcome, Cause> {
        self.order(&Order::TakeoverRequest(Zeroizing::new(takeover.to_json())), None)?;
        let answer = self.channel.answer(take_over_limit(&self.limits))?;
        match answer.payload.as_slice() {
            [] => Ok(TakeoverOutcome::Serving),
            _ => Ok(TakeoverOutcome::Complete),
        }
    }
}

/// The page server's end of the socket pair.
#[derive(Debug)]
pub struct PageServerEnd {
    channel: Channel,
}

impl PageServerEnd {
    /// Uses the other end of the pair.
    ///
    /// # Errors
    /// When the host lacks a resource.
    pub fn new(socket: UnixStream) -> Result<Self, Cause> {
        let mut channel = channel(socket, START_LIMIT)?;
        channel.reader.welcome_descriptors(true);
        Ok(Self { channel })
    }

    fn next(&mut self) -> Result<Order, Cause> {
        Ok(Order::read(&mut self.channel.reader)?)
    }

    /// Receives the memory, which `make` maps.
    ///
    /// # Errors
    /// When the message does not describe memory, or it cannot be mapped; the source has been told why.
    pub fn take_memory<T>(
        &mut self,
        make: impl FnOnce(&ServedMemory, Vec<File>) -> Result<T, Cause>,
    ) -> Result<(ServedMemory, T), Cause> {
        let taken = self.try_take_memory(make);
        self.tell(taken.as_ref().map(|_| TakeoverOutcome::Serving));
        taken
    }

    fn try_take_memory<T>(
        &mut self,
        make: impl FnOnce(&ServedMemory, Vec<File>) -> Result<T, Cause>,
    ) -> Result<(ServedMemory, T), Cause> {
        let unexpected = |order: &Order, expected| {
            let got = order.name();
            Cause::from(ProtocolError::Unexpected { got, expected })
        };
        let memory = match self.next()? {
            Order::Memory(json) => ServedMemory::parse(&json)?,
            other => return Err(unexpected(&other, "a description of memory")),
        };
        let mut files = Vec::new();
        for number in 0..memory.files {
            self.channel.yes()?;
            match self.next()? {
                Order::File(got) if got == number => {}
                other => return Err(unexpected(&other, "the next file")),
            }
            let file = self.channel.reader.take_descriptor().map(|fd: OwnedFd| File::from(fd));
            let why = "no descriptor came with it";
            files.push(file.ok_or(ProtocolError::Malformed { what: "file", why })?);
        }
        let made = make(&memory, files)?;
        Ok((memory, made))
    }

    /// Waits for the takeover request; `None` when the source ends without one.
    ///
    /// # Errors
    /// When another message comes; the source has been told.
    pub fn wait_for_takeover(&mut self, layout: &Layout) -> Result<Option<TakeoverRequest>, Cause> {
        if !self.channel.reader.has_buffered() {
            match self.channel.connection.wait_for_data(None) {
                Ok(()) => {}
                Err(TransportError::Closed) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        let takeover = match self.next() {
            Ok(Order::TakeoverRequest(json)) => {
                TakeoverRequest::parse(&json, layout).map_err(Cause::from)
            }
            Ok(other) => {
                let (got, expected) = (other.name(), "a takeover request");
                Err(ProtocolError::Unexpected { got, expected }.into())
            }
            Err(Cause::Transport(TransportError::Closed)) => return Ok(None),
            Err(error) => Err(error),
        };
        if let Err(cause) = &takeover {
            self.tell(Err(cause));
        }
        takeover.map(Some)
    }

    /// Sends the outcome to the source. A source that has ended needs no answer: the takeover stands.
    pub fn tell(&self, taken: Result<TakeoverOutcome, &Cause>) {
        let answer = match taken {
            Ok(TakeoverOutcome::Serving) => Answer::ok(),
            Ok(TakeoverOutcome::Complete) => Answer::Ok { offer_taken: false, payload: vec![1] },
            Err(cause) => Answer::Error { reason: error_text::chain(cause) },
        };
        if let Err(error) = self.channel.connection.send(&answer.encode()) {
            log::warn!("the VMM cannot be answered: {}", error_text::chain(&error));
        }
    }
}

/// Reads and checks messages until the bytes end or are invalid, for fuzzing.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_orders(data: &[u8]) {
    let mut from = data;
    let mut layout = None;
    while let Ok(order) = Order::read(&mut from) {
        let (header, payload) = order.encode();
        let again = Order::read(&mut [&header, &*payload].concat().as_slice());
        assert!(again.is_ok_and(|again| again == order));
        match order {
            Order::Memory(json) => {
                let Ok(memory) = ServedMemory::parse(&json) else { continue };
                let again = ServedMemory::parse(&memory.to_json()).ok();
                assert_eq!(again.as_ref(), Some(&memory));
                layout = memory.layout().ok();
                assert!(layout.is_some());
            }
            Order::File(_) => {}
            Order::TakeoverRequest(json) => {
                let Some(layout) = &layout else { continue };
                let Ok(takeover) = TakeoverRequest::parse(&json, layout) else { continue };
                assert!(takeover.options().is_ok());
                let again = TakeoverRequest::parse(&takeover.to_json(), layout).ok();
                assert_eq!(again.as_ref(), Some(&takeover));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_order_holds_is_not_in_its_debug_form() {
        let request = Order::TakeoverRequest(Zeroizing::new(b"{\"key\":77}".to_vec()));
        let told = format!("{request:?} {:#?}", Order::Memory(vec![77; 3]));
        assert!(told.contains("a takeover request"), "{told}");
        assert!(!told.contains("key") && !told.contains("77") && !told.contains("107"), "{told}");
    }
}
