// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One end of a connection with TLS, and the other end of its socket.
//!
//! May contain `unsafe`: receiving into pieces of memory. Owns the end's progress, and what it has sent that nothing has
//! received. Asserts what holds for a reader whatever the peer sends.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::Duration;

use rustls::ContentType;

use super::super::record::Stream;
use super::super::{ClientTls, Handshake, ServerTls};
use super::provider::HOST;
use crate::cancel::Cancel;
use crate::transport::{Connection, TransportError};

/// Type, version and length of a record.
const HEADER_BYTES: usize = 5;

/// A message that announces other keys, and asks the peer for such.
const KEY_UPDATE_REQUESTED: [u8; 5] = [24, 0, 0, 1, 1];

/// Records that are kept to be repeated.
const KEPT_RECORDS: usize = 16;

/// Longest single read.
const READ_BYTES_MAX: usize = 1 << 15;

enum State {
    Agreeing(Box<Handshake>),
    Secured,
    Failed,
}

/// One end.
pub(super) struct End {
    connection: Connection,
    state: State,
    wire: UnixStream,
    /// What it has sent: a record each, or what is left of one.
    pub outgoing: VecDeque<Vec<u8>>,
    /// The last records that it has sent.
    pub kept: VecDeque<Vec<u8>>,
    /// Checksum of all that it has sent, and its length.
    pub digest: (u32, usize),
    /// The data that it was told to send.
    pub said: Vec<u8>,
    /// Data of the peer that was read.
    pub heard_bytes: usize,
    /// It has ended its sending direction.
    pub has_closed: bool,
    /// A read has failed: each that follows must fail as well.
    is_over: bool,
}

fn never() -> &'static Cancel {
    static NEVER: OnceLock<Cancel> = OnceLock::new();
    NEVER.get_or_init(|| Cancel::new().expect("there are descriptors"))
}

impl End {
    /// A source.
    pub(super) fn client(tls: &ClientTls) -> Self {
        Self::new(Handshake::client(tls, HOST).expect("the configuration is valid"))
    }

    /// A destination.
    pub(super) fn server(tls: &ServerTls) -> Self {
        Self::new(Handshake::server(tls).expect("the configuration is valid"))
    }

    fn new(handshake: Handshake) -> Self {
        let (ours, wire) = UnixStream::pair().expect("there are descriptors");
        wire.set_nonblocking(true).expect("it is a socket");
        // No wait: what cannot go on at once has failed.
        let connection = Connection::over(ours, never(), Duration::ZERO).expect("it is a socket");
        connection.socket.set_send_buffer_size(1 << 20).expect("it is a socket");
        let mut end = Self {
            connection,
            state: State::Agreeing(Box::new(handshake)),
            wire,
            outgoing: VecDeque::new(),
            kept: VecDeque::new(),
            digest: (0, 0),
            said: Vec::new(),
            heard_bytes: 0,
            has_closed: false,
            is_over: false,
        };
        end.go_on();
        end
    }

    pub(super) fn is_secured(&self) -> bool {
        matches!(self.state, State::Secured)
    }

    pub(super) fn has_failed(&self) -> bool {
        matches!(self.state, State::Failed)
    }

    /// Nothing can come any more: the handshake or a read has failed.
    pub(super) fn is_over(&self) -> bool {
        self.has_failed() || self.is_over
    }

    /// Continues the handshake, and takes what the end has sent.
    pub(super) fn go_on(&mut self) {
        if let State::Agreeing(handshake) = &mut self.state {
            match self.connection.advance(handshake) {
                Ok(true) => self.state = State::Secured,
                Ok(false) => {}
                Err(error) => {
                    assert!(!error_text::chain(&error).is_empty());
                    self.state = State::Failed;
                }
            }
        }
        self.collect();
    }

    fn collect(&mut self) {
        let mut bytes = Vec::new();
        // An error is the end of what there is.
        let _ = self.wire.read_to_end(&mut bytes);
        self.digest.0 = crc32c::crc32c_append(self.digest.0, &bytes);
        self.digest.1 += bytes.len();
        while !bytes.is_empty() {
            let payload = match bytes.first_chunk::<HEADER_BYTES>() {
                Some([.., high, low]) => usize::from(u16::from_be_bytes([*high, *low])),
                None => bytes.len(),
            };
            let rest = bytes.split_off(bytes.len().min(HEADER_BYTES + payload));
            if self.kept.len() == KEPT_RECORDS {
                self.kept.pop_front();
            }
            self.kept.push_back(bytes.clone());
            self.outgoing.push_back(std::mem::replace(&mut bytes, rest));
        }
    }

    /// Gives it bytes of its peer; returns how many its socket accepts.
    pub(super) fn give(&mut self, bytes: &[u8]) -> usize {
        self.wire.write(bytes).unwrap_or(0)
    }

    /// Ends what its peer sends.
    pub(super) fn give_end(&mut self) {
        let _ = self.wire.shutdown(Shutdown::Write);
        self.go_on();
    }

    fn stream(&self) -> Option<&Stream> {
        self.connection.tls.as_deref().filter(|_| !self.has_closed)
    }

    /// Sends `len` bytes of data.
    pub(super) fn send(&mut self, len: usize) {
        if self.stream().is_none() {
            return;
        }
        let from = self.said.len();
        self.said.extend((from..from + len).map(|at| (at % 251).to_le_bytes()[0]));
        let sent = self.connection.send(&self.said[from..]);
        assert!(sent.is_ok(), "{sent:?}");
        self.collect();
    }

    /// Sends a record of any type, as a peer does that has a certificate and breaks the rules.
    pub(super) fn seal(&mut self, typ: ContentType, payload: &[u8], changes_keys: bool) {
        let Some(stream) = self.stream() else { return };
        let record = stream.seal_for_test(typ, payload);
        if changes_keys {
            stream.change_keys_for_test();
        }
        if typ == ContentType::ApplicationData {
            self.said.extend_from_slice(payload);
        }
        self.outgoing.push_back(record);
    }

    /// Changes its keys, and asks the peer to change its own.
    pub(super) fn ask_for_keys(&mut self) {
        self.seal(ContentType::Handshake, &KEY_UPDATE_REQUESTED, true);
    }

    /// Makes it change its keys after this number of records.
    pub(super) fn change_keys_after(&self, records: u64) {
        if let Some(stream) = self.stream() {
            stream.change_keys_after(records);
        }
    }

    /// Ends its sending direction.
    pub(super) fn close(&mut self) {
        if self.stream().is_some() {
            self.connection.shut_down_sending();
            self.has_closed = true;
            self.collect();
        }
    }

    /// Reads in one of several ways up to `len` bytes, and compares what was read with what the peer has said, if that
    /// cannot have been changed on the way. Returns the length.
    pub(super) fn read(&mut self, how: u8, len: usize, said: Option<&[u8]>) -> usize {
        if self.connection.tls.is_none() {
            return 0;
        }
        let mut buf = vec![0; len.clamp(1, READ_BYTES_MAX)];
        let read = match how % 5 {
            0 => self.connection.receive_now(&mut buf),
            1 => self.read_when_ready(&mut buf),
            2 => self.read_after_a_wait(&mut buf),
            3 => self.read_what_was_seen(&mut buf),
            _ => self.read_into_pieces(&mut buf),
        };
        let len = match read {
            Ok(read) => {
                assert!(!self.is_over, "a read follows one that has failed");
                read.unwrap_or(0)
            }
            Err(error) => {
                assert!(!matches!(error, TransportError::Timeout { .. }), "a read has waited");
                self.is_over = true;
                0
            }
        };
        let next = self.heard_bytes + len;
        if let Some(said) = said {
            assert!(said.get(self.heard_bytes..next) == Some(&buf[..len]), "the peer sent no such");
        }
        self.heard_bytes = next;
        len
    }

    fn read_when_ready(&self, buf: &mut [u8]) -> Result<Option<usize>, TransportError> {
        match self.connection.has_data_now() {
            Ok(true) => self.connection.receive_some(buf).map(Some),
            _ => Ok(None),
        }
    }

    fn read_after_a_wait(&self, buf: &mut [u8]) -> Result<Option<usize>, TransportError> {
        let waited = self.connection.wait_for_data(Some(Duration::ZERO));
        let read = self.connection.receive_now(buf);
        assert_eq!(waited.is_err(), matches!(read, Ok(None)), "the wait says what a read finds");
        read
    }

    /// What a look ahead sees is what is read then.
    fn read_what_was_seen(&self, buf: &mut [u8]) -> Result<Option<usize>, TransportError> {
        let mut seen = vec![0; buf.len()];
        let len = self.connection.peek_now(&mut seen);
        let read = self.connection.receive_now(buf);
        assert_eq!(len, read.as_ref().map_or(0, |read| read.unwrap_or(0)));
        assert!(seen[..len] == buf[..len]);
        read
    }

    /// Reads what is there into two pieces, as into guest memory.
    fn read_into_pieces(&self, buf: &mut [u8]) -> Result<Option<usize>, TransportError> {
        let len = self.connection.peek_now(buf);
        buf.fill(0);
        if len == 0 {
            return self.connection.receive_now(buf);
        }
        let (first, second) = buf[..len].split_at_mut(len / 3);
        let mut pieces = [first, second]
            .map(|piece| libc::iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: piece.len() });
        // SAFETY: the pieces are parts of `buf`, which is borrowed exclusively and not used meanwhile.
        unsafe { self.connection.receive(&mut pieces) }?;
        Ok(Some(len))
    }
}
