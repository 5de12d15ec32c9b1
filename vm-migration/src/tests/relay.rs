// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A relay between a source and a destination that reads their messages, and cuts, delays or changes them.
//!
//! Owns the frames of the first connection. On all others it only reads what the source sends, and only
//! where no connection is cut.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;

use super::loopback;
use crate::layout::to_usize;
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::protocol::message::Command;
use crate::transport::ByteSource as _;
use crate::transport::{Connection, Listener, Reader, TransportError, wait_readable};
use crate::{Address, Cancel};

/// Command, six spare bytes, and the length of the payload.
const HEADER_BYTES: usize = 16;

/// Where the relay acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Point {
    /// Instead of passing the message on.
    Message,
    /// Instead of passing its answer on.
    Answer,
}

/// What the relay does there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Close,
    Rubbish,
    Stall,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub at: Command,
    pub point: Point,
    pub act: Act,
}

/// What a relay does in addition to forwarding.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rule {
    Nothing,
    Cut(Cut),
    /// The first message of this kind is forwarded, and its answer is delayed by this time.
    Late(Command, Duration),
    /// This feature is removed from the capabilities of both sides.
    Without(&'static str),
}

/// A frame: header and payload, the contents after a table of Memory, and a descriptor that came with it.
type Frame = (Vec<u8>, Option<OwnedFd>);

/// The relay's end of a connection.
struct End {
    connection: Arc<Connection>,
    reader: Reader,
}

impl End {
    fn new(connection: Arc<Connection>) -> Self {
        let mut reader = Reader::new(Arc::clone(&connection));
        reader.welcome_descriptors(true);
        Self { connection, reader }
    }

    /// Whether there is something to read, or the connection has ended.
    fn has_data(&self) -> bool {
        self.reader.has_buffered() || !matches!(self.connection.has_data_now(), Ok(false))
    }

    fn frame(&mut self) -> Result<Frame, TransportError> {
        let mut bytes = Vec::new();
        self.more(HEADER_BYTES as u64, &mut bytes)?;
        let code = u16::from_le_bytes([bytes[0], bytes[1]]);
        let payload = word(&bytes[8..HEADER_BYTES]);
        self.more(payload, &mut bytes)?;
        if code == Command::Memory.code() {
            let contents = runs_bytes(&bytes).into_iter().sum();
            self.more(contents, &mut bytes)?;
        }
        if code == Command::MemoryZstd.code() {
            let frame = u32::from_le_bytes(bytes[2..6].try_into().unwrap());
            self.more(frame.into(), &mut bytes)?;
        }
        Ok((bytes, self.reader.take_descriptor()))
    }

    fn more(&mut self, count: u64, bytes: &mut Vec<u8>) -> Result<(), TransportError> {
        let start = bytes.len();
        bytes.resize(start + to_usize(count), 0);
        self.reader.read_exact(&mut bytes[start..])
    }

    fn pass(&self, (bytes, descriptor): &Frame) -> Result<(), TransportError> {
        match descriptor {
            Some(descriptor) => self.connection.send_with_descriptor(bytes, descriptor.as_fd()),
            None => self.connection.send(bytes),
        }
    }
}

/// Forwards the first connection message by message, in turns, and all others as data arrives.
pub(super) struct Relay {
    pub address: Address,
    pub seen: Arc<Mutex<Vec<Command>>>,
    /// Length of the shortest run of contents on the further connections.
    pub shortest_bytes: Arc<AtomicU64>,
    /// Ends the wait for further connections.
    cancel: Cancel,
    /// Dropping it ends a stall.
    _end: Sender<()>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

/// Longer than any case.
const FOR_EVER: Duration = Duration::from_hours(1);

impl Relay {
    pub fn start(to: &Address, rule: Rule) -> Self {
        let at = match to {
            Address::Tcp { .. } => loopback(),
            Address::Unix(path) => Address::Unix(path.with_extension("relay")),
        };
        let tls = super::tls::of_this_thread(&at);
        let (ours, theirs) =
            tls.map_or((None, None), |(source, destination)| (Some(source), Some(destination)));
        let listener = Listener::bind(&at).unwrap().with_tls(theirs);
        let address = listener.address().clone();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (end, ended) = channel();
        let (record, to) = (Arc::clone(&seen), to.clone());
        let shortest_bytes = Arc::new(AtomicU64::new(u64::MAX));
        let shortest = Arc::clone(&shortest_bytes);
        let cancel = Cancel::new().unwrap();
        let until = cancel.clone();
        std::thread::spawn(move || {
            // What is forwarded ends with its connections.
            let never = Cancel::new().unwrap();
            let connect = || {
                let tls = ours.as_ref();
                Connection::connect_secured(&to, tls, &never, FOR_EVER, FOR_EVER).map(Arc::new)
            };
            let accept = || {
                let connection = listener.accept(&until, None, FOR_EVER)?;
                connection.set_cancel(&never);
                Ok::<_, TransportError>(Arc::new(connection))
            };
            let Ok(source) = accept() else { return };
            let Ok(destination) = connect() else { return };
            let (source, destination) = (End::new(source), End::new(destination));
            std::thread::spawn(move || {
                let ends = [&source, &destination].map(|end| Arc::clone(&end.connection));
                let _ = relay_control(source, destination, rule, &record, &ended);
                for end in ends {
                    end.shut_down();
                }
            });
            while let Ok(source) = accept() {
                let Ok(destination) = connect() else { return };
                let (from, to) = (Arc::clone(&source), Arc::clone(&destination));
                let shortest = Arc::clone(&shortest);
                // After a cut the connections are different ones from those at the beginning.
                std::thread::spawn(move || match rule {
                    Rule::Without(_) => copy_messages(from, &to, &shortest),
                    Rule::Nothing | Rule::Cut(_) | Rule::Late(..) => copy(&from, &to),
                });
                std::thread::spawn(move || copy(&destination, &source));
            }
        });
        Self { address, seen, shortest_bytes, cancel, _end: end }
    }
}

fn copy(from: &Connection, to: &Connection) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count) = from.receive_some(&mut bytes) {
        if to.send(&bytes[..count]).is_err() {
            break;
        }
    }
    from.shut_down();
    to.shut_down();
}

/// Like `copy`, and examines the messages.
fn copy_messages(from: Arc<Connection>, to: &Connection, shortest: &AtomicU64) {
    let mut from = End::new(from);
    // The role of the connection, and the token.
    let mut hello = [0; size_of::<u16>() + TOKEN_BYTES];
    let _ = from.reader.read_exact(&mut hello).and_then(|()| to.send(&hello));
    while let Ok((bytes, _)) = from.frame() {
        if let Some(bytes) = runs_bytes(&bytes).into_iter().min() {
            shortest.fetch_min(bytes, Ordering::Relaxed);
        }
        if to.send(&bytes).is_err() {
            break;
        }
    }
    from.connection.shut_down();
    to.shut_down();
}

/// Lengths of the runs whose contents a message carries.
fn runs_bytes(message: &[u8]) -> Vec<u64> {
    if message[..2] != Command::Memory.code().to_le_bytes() {
        return Vec::new();
    }
    let table_bytes = to_usize(word(&message[8..HEADER_BYTES]));
    let table = &message[HEADER_BYTES..HEADER_BYTES + table_bytes];
    table.chunks_exact(16).map(|entry| word(&entry[8..])).collect()
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().unwrap())
}

fn relay_control(
    mut source: End,
    mut destination: End,
    rule: Rule,
    seen: &Mutex<Vec<Command>>,
    ended: &Receiver<()>,
) -> Result<(), TransportError> {
    // After Confirm the destination sends the messages.
    let (mut speaker, mut listener) = (&mut source, &mut destination);
    let cut = if let Rule::Cut(cut) = rule { Some(cut) } else { None };
    loop {
        let mut message = next_message(speaker, listener)?;
        let code = u16::from_le_bytes([message.0[0], message.0[1]]);
        let command = Command::from_code(code).unwrap();
        let first = !seen.lock().contains(&command);
        seen.lock().push(command);
        let here = |point| cut.filter(|cut| first && cut.at == command && cut.point == point);
        if let Some(cut) = here(Point::Message) {
            return act(cut.act, listener, ended);
        }
        forget(rule, command, &mut message.0);
        listener.pass(&message)?;
        if command == Command::Abandon {
            return Ok(());
        }
        let mut answer = answer_of(listener, speaker)?;
        forget(rule, command, &mut answer.0);
        if let Some(cut) = here(Point::Answer) {
            return act(cut.act, speaker, ended);
        }
        if let Rule::Late(late, by) = rule
            && first
            && late == command
        {
            std::thread::sleep(by);
        }
        speaker.pass(&answer)?;
        if command == Command::Confirm {
            (speaker, listener) = (listener, speaker);
        }
    }
}

/// The next message of the side that sends them. What the other side says without having been asked is passed on meanwhile.
fn next_message(speaker: &mut End, listener: &mut End) -> Result<Frame, TransportError> {
    let never = Cancel::new().unwrap();
    loop {
        if speaker.has_data() {
            return speaker.frame();
        }
        if listener.has_data() {
            let unasked = listener.frame()?;
            speaker.pass(&unasked)?;
            if !is_unasked(&unasked) {
                // A refusal, after which nothing comes.
                return Err(TransportError::Closed);
            }
            continue;
        }
        let both = [&*speaker, &*listener].map(|end| end.connection.as_fd().as_raw_fd());
        wait_readable(&both, &never, None).unwrap();
    }
}

/// The answer to a message. What the side says without having been asked is passed on before.
fn answer_of(listener: &mut End, speaker: &End) -> Result<Frame, TransportError> {
    loop {
        let frame = listener.frame()?;
        if !is_unasked(&frame) {
            return Ok(frame);
        }
        speaker.pass(&frame)?;
    }
}

fn is_unasked((bytes, _): &Frame) -> bool {
    bytes[..2] == Command::BlobsWritten.code().to_le_bytes()
}

/// Removes the feature from the capabilities that the sides exchange.
fn forget(rule: Rule, command: Command, bytes: &mut Vec<u8>) {
    let (Rule::Without(feature), Command::Capabilities) = (rule, command) else { return };
    // A refusal is not a document.
    let Ok(mut document) = serde_json::from_slice::<serde_json::Value>(&bytes[HEADER_BYTES..])
    else {
        return;
    };
    let features = document["features"].as_array_mut().unwrap();
    features.retain(|known| known != feature);
    bytes.truncate(HEADER_BYTES);
    bytes.extend(serde_json::to_vec(&document).unwrap());
    let payload = (bytes.len() - HEADER_BYTES) as u64;
    bytes[8..HEADER_BYTES].copy_from_slice(&payload.to_le_bytes());
}

fn act(act: Act, victim: &mut End, ended: &Receiver<()>) -> Result<(), TransportError> {
    match act {
        Act::Close => {}
        Act::Rubbish => {
            victim.connection.send(&[0xee; 64])?;
            // The victim has received it when it answers or closes.
            let _ = victim.reader.read_exact(&mut [0; 1]);
        }
        Act::Stall => {
            let _ = ended.recv();
        }
    }
    Ok(())
}
