// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! TLS records of an established connection.
//!
//! Owns the framing, the sequence numbers, and the change of keys; rustls protects each record. Each
//! direction has separate state, so that the reading and the sending thread do not wait for each other. It
//! never waits: it takes from the socket what is available, and its caller polls.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rustls::client::ClientConnectionData;
use rustls::crypto::cipher::{
    InboundOpaqueMessage, InboundPlainMessage, MessageDecrypter, MessageEncrypter, OutboundChunks,
    OutboundPlainMessage,
};
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets,
    InvalidMessage, ProtocolVersion, Tls13CipherSuite,
};
use socket2::Socket;

use super::control::{Control, Messages, OUR_KEY_UPDATE};
use super::{ClientTls, TlsError};
use crate::transport::TransportError;
use crate::transport::socket::{Part, receive_into};

/// Most plaintext bytes in a record.
const PLAIN_BYTES_MAX: usize = 16 << 10;

/// Content type, version, length.
const HEADER_BYTES: usize = 5;

/// Most bytes that protection adds to a record.
const OVERHEAD_BYTES_MAX: usize = 256;

/// Longest record.
const RECORD_BYTES_MAX: usize = HEADER_BYTES + PLAIN_BYTES_MAX + OVERHEAD_BYTES_MAX;

/// Receive buffer: some records per system call. The longest handshake message fits.
const INCOMING_BYTES: usize = 4 * RECORD_BYTES_MAX;

/// Records that are sealed and sent together: as many as a receiver reads with one system call.
const BATCH_RECORDS: usize = 4;

/// Most consecutive records without data: empty ones, tickets, key updates. This program sends one at a time,
/// other servers some tickets. Such records end no wait, and more of them would keep a reader from checking
/// its time limits and a cancel.
pub(super) const EMPTY_RECORDS_MAX: u32 = 32;

/// Records after which keys are changed for any cipher: half of the limit of AES-GCM.
const RECORDS_MAX: u64 = 1 << 23;

const SENDING: &str = "sending";
const RECEIVING: &str = "receiving";

/// Received bytes that have not been consumed.
#[derive(Debug)]
pub(crate) struct Incoming {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Incoming {
    pub(super) fn new() -> Self {
        Self { bytes: vec![0; INCOMING_BYTES].into_boxed_slice(), start: 0, end: 0 }
    }

    /// A buffer without capacity.
    pub(super) fn empty() -> Self {
        Self { bytes: Box::default(), start: 0, end: 0 }
    }

    /// Receives available bytes; 0 at the end of the stream.
    pub(super) fn receive(&mut self, socket: &Socket) -> io::Result<usize> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.bytes.len() - self.end < RECORD_BYTES_MAX {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.bytes.len() {
            // A handshake message longer than allowed.
            return Err(io::Error::other("the peer sends more than a message may have"));
        }
        let received = receive_into(socket, &mut self.bytes[self.end..])?;
        self.end += received;
        Ok(received)
    }

    pub(super) fn there(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.end]
    }

    pub(super) fn discard(&mut self, len: usize) {
        self.start = self.end.min(self.start + len);
    }

    /// The end of the complete record that begins at offset `from`; `None` if it is incomplete.
    ///
    /// # Errors
    /// When the bytes are not a record.
    pub(super) fn record_end(&self, from: usize) -> Result<Option<usize>, TlsError> {
        let there = self.bytes.get(self.start + from..self.end).unwrap_or_default();
        let kinds = 20..=23;
        let is_record = |there: &[u8]| {
            there.first().is_none_or(|kind| kinds.contains(kind))
                && there.get(1).is_none_or(|version| *version == 3)
        };
        if !is_record(there) {
            return Err(TlsError::NotTls);
        }
        let Some([_, _, _, high, low]) = there.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let len = HEADER_BYTES + usize::from(u16::from_be_bytes([*high, *low]));
        if len > RECORD_BYTES_MAX {
            let source = InvalidMessage::MessageTooLarge.into();
            return Err(TlsError::Protocol { what: RECEIVING, source });
        }
        Ok((there.len() >= len).then_some(from + len))
    }
}

/// The source of new keys.
pub(super) enum Keys {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl Keys {
    fn suite(&self) -> Result<&'static Tls13CipherSuite, Error> {
        let suite = match self {
            Self::Client(keys) => keys.negotiated_cipher_suite(),
            Self::Server(keys) => keys.negotiated_cipher_suite(),
        };
        suite.tls13().ok_or(Error::HandshakeNotComplete)
    }

    fn next(&mut self, sending: bool) -> Result<ConnectionTrafficSecrets, Error> {
        let (_, secrets) = match (self, sending) {
            (Self::Client(keys), true) => keys.update_tx_secret()?,
            (Self::Client(keys), false) => keys.update_rx_secret()?,
            (Self::Server(keys), true) => keys.update_tx_secret()?,
            (Self::Server(keys), false) => keys.update_rx_secret()?,
        };
        Ok(secrets)
    }
}

fn encrypter(
    suite: &Tls13CipherSuite,
    secrets: ConnectionTrafficSecrets,
) -> Result<Box<dyn MessageEncrypter>, Error> {
    use ConnectionTrafficSecrets::{Aes128Gcm, Aes256Gcm, Chacha20Poly1305};
    match secrets {
        Aes128Gcm { key, iv } | Aes256Gcm { key, iv } | Chacha20Poly1305 { key, iv } => {
            Ok(suite.aead_alg.encrypter(key, iv))
        }
        _ => Err(Error::HandshakeNotComplete),
    }
}

fn decrypter(
    suite: &Tls13CipherSuite,
    secrets: ConnectionTrafficSecrets,
) -> Result<Box<dyn MessageDecrypter>, Error> {
    use ConnectionTrafficSecrets::{Aes128Gcm, Aes256Gcm, Chacha20Poly1305};
    match secrets {
        Aes128Gcm { key, iv } | Aes256Gcm { key, iv } | Chacha20Poly1305 { key, iv } => {
            Ok(suite.aead_alg.decrypter(key, iv))
        }
        _ => Err(Error::HandshakeNotComplete),
    }
}

/// The unsent rest of a message.
pub(crate) struct Left<'p, 'm> {
    parts: &'p [Part<'m>],
    /// Bytes of the first part that are sealed already.
    done: usize,
}

impl<'p, 'm> Left<'p, 'm> {
    pub(crate) fn new(parts: &'p [Part<'m>]) -> Self {
        Self { parts, done: 0 }
    }

    /// Copies the plaintext of the next record. Guest memory is read in whole words, each once.
    fn fill(&mut self, plain: &mut Vec<u8>) {
        const WORD: usize = size_of::<u64>();
        plain.clear();
        while let Some((part, rest)) = self.parts.split_first() {
            let room = PLAIN_BYTES_MAX - plain.len();
            let (taken, len) = match part {
                Part::Bytes(bytes) => {
                    let left = &bytes[self.done..];
                    let taken = left.len().min(room);
                    plain.extend_from_slice(&left[..taken]);
                    (taken, bytes.len())
                }
                Part::Guest(slice) => {
                    let left = slice.skip(self.done);
                    let taken = left.len().min(room / WORD * WORD);
                    left.first(taken).append_to(plain);
                    (taken, slice.len())
                }
            };
            self.done += taken;
            if self.done < len {
                return;
            }
            (self.parts, self.done) = (rest, 0);
        }
    }
}

/// State of the sending direction.
pub(crate) struct Sealer {
    encrypter: Box<dyn MessageEncrypter>,
    sequence: u64,
    /// Plaintext of the current record.
    plain: Vec<u8>,
    /// Sealed records were not all sent: nothing can follow.
    pub is_broken: bool,
}

impl Sealer {
    fn seal(&mut self, typ: ContentType, payload: &[u8]) -> Result<Vec<u8>, Error> {
        let (version, payload) = (ProtocolVersion::TLSv1_2, OutboundChunks::Single(payload));
        let plain = OutboundPlainMessage { typ, version, payload };
        let sealed = self.encrypter.encrypt(plain, self.sequence)?;
        self.sequence += 1;
        Ok(sealed.encode())
    }

    /// Seals the next records of a message; none when all of it is sealed.
    pub(crate) fn batch(
        &mut self,
        left: &mut Left<'_, '_>,
        stream: &Stream,
    ) -> Result<Vec<Vec<u8>>, TransportError> {
        self.try_batch(left, stream).map_err(|error| TlsError::of(SENDING, error).into())
    }

    fn try_batch(
        &mut self,
        left: &mut Left<'_, '_>,
        stream: &Stream,
    ) -> Result<Vec<Vec<u8>>, Error> {
        let mut records = Vec::with_capacity(BATCH_RECORDS + 1);
        let mut plain = std::mem::take(&mut self.plain);
        while records.len() < BATCH_RECORDS {
            left.fill(&mut plain);
            if plain.is_empty() {
                break;
            }
            let is_old = self.sequence >= stream.records_max.load(Ordering::Relaxed);
            if stream.rekey.swap(false, Ordering::Relaxed) || is_old {
                records.push(self.seal(ContentType::Handshake, &OUR_KEY_UPDATE)?);
                self.encrypter = encrypter(stream.suite, stream.keys().next(true)?)?;
                self.sequence = 0;
            }
            records.push(self.seal(ContentType::ApplicationData, &plain)?);
        }
        self.plain = plain;
        Ok(records)
    }
}

/// State of the receiving direction.
pub(crate) struct Opener {
    incoming: Incoming,
    /// Range of the decrypted plaintext in `incoming`.
    plain: Range<usize>,
    decrypter: Box<dyn MessageDecrypter>,
    sequence: u64,
    /// Consecutive records without data.
    empty_records: u32,
    messages: Messages,
    /// The stream has ended.
    is_over: bool,
    /// The failure, until it is returned to a reader.
    failure: Option<TransportError>,
}

impl Opener {
    /// True when plaintext of a complete record is available.
    ///
    /// # Errors
    /// When the connection has ended, or a record cannot be decrypted.
    pub(crate) fn has_plain(&mut self, stream: &Stream) -> Result<bool, TransportError> {
        match self.is_ready(stream) {
            true if self.plain.is_empty() => {
                Err(self.failure.take().unwrap_or(TransportError::Closed))
            }
            ready => Ok(ready),
        }
    }

    /// True when a reader need not wait: there is plaintext, or the end of the stream to report.
    pub(crate) fn is_ready(&mut self, stream: &Stream) -> bool {
        if !self.is_over {
            match self.open(stream) {
                Ok(ready) => return ready,
                Err(failure) => (self.is_over, self.failure) = (true, Some(failure)),
            }
        }
        true
    }

    fn open(&mut self, stream: &Stream) -> Result<bool, TransportError> {
        while self.plain.is_empty() {
            let Some(len) = self.incoming.record_end(0)? else { return Ok(false) };
            match self.open_one(len, stream) {
                Ok(true) => self.count_empty()?,
                Ok(false) => return Err(TransportError::Closed),
                Err(error) => return Err(TlsError::of(RECEIVING, error).into()),
            }
        }
        Ok(true)
    }

    /// Counts consecutive records without data.
    fn count_empty(&mut self) -> Result<(), TlsError> {
        if !self.plain.is_empty() {
            self.empty_records = 0;
            return Ok(());
        }
        self.empty_records += 1;
        if self.empty_records > EMPTY_RECORDS_MAX { Err(TlsError::NoData) } else { Ok(()) }
    }

    /// Decrypts the next record; false when it closes the connection.
    fn open_one(&mut self, len: usize, stream: &Stream) -> Result<bool, Error> {
        let at = self.incoming.start;
        self.incoming.discard(len);
        let record = &mut self.incoming.bytes[at..at + len];
        let (header, sealed) = record.split_at_mut(HEADER_BYTES);
        let typ = ContentType::from(header[0]);
        if typ != ContentType::ApplicationData {
            return Err(InvalidMessage::InvalidContentType.into());
        }
        let begin = sealed.as_ptr().addr();
        let sealed = InboundOpaqueMessage::new(typ, ProtocolVersion::TLSv1_2, sealed);
        let InboundPlainMessage { typ, payload, .. } =
            self.decrypter.decrypt(sealed, self.sequence)?;
        self.sequence += 1;
        if self.messages.is_partial() && typ != ContentType::Handshake {
            return Err(InvalidMessage::UnexpectedMessage("in the middle of a message").into());
        }
        match (typ, payload) {
            (ContentType::ApplicationData, payload) => {
                let start = at + HEADER_BYTES + (payload.as_ptr().addr() - begin);
                self.plain = start..start + payload.len();
                Ok(true)
            }
            (ContentType::Alert, [_, alert]) => match AlertDescription::from(*alert) {
                AlertDescription::CloseNotify => Ok(false),
                alert => Err(Error::AlertReceived(alert)),
            },
            (ContentType::Handshake, payload) => {
                let is_client = stream.client.is_some();
                match self.messages.take(payload, is_client)? {
                    None => {}
                    Some(Control::KeyUpdate(asked)) => {
                        self.decrypter = decrypter(stream.suite, stream.keys().next(false)?)?;
                        self.sequence = 0;
                        if asked {
                            stream.rekey.store(true, Ordering::Relaxed);
                        }
                    }
                }
                Ok(true)
            }
            _ => Err(InvalidMessage::InvalidContentType.into()),
        }
    }

    /// Receives available bytes; 0 at the end of the stream.
    pub(crate) fn receive(&mut self, socket: &Socket) -> io::Result<usize> {
        self.incoming.receive(socket)
    }

    /// True when a part of a record is buffered.
    pub(crate) fn has_part(&self) -> bool {
        self.incoming.start < self.incoming.end
    }

    /// The available plaintext.
    pub(crate) fn plain(&self) -> &[u8] {
        &self.incoming.bytes[self.plain.clone()]
    }

    /// Consumes `len` bytes of the plaintext.
    pub(crate) fn taken(&mut self, len: usize) {
        self.plain.start = self.plain.end.min(self.plain.start + len);
    }
}

/// An established TLS connection.
pub(crate) struct Stream {
    suite: &'static Tls13CipherSuite,
    /// Locked while the keys of one direction change.
    keys: Mutex<Keys>,
    /// Locked by the thread that sends.
    sealer: Mutex<Sealer>,
    /// Locked by the thread that reads.
    opener: Mutex<Opener>,
    /// The peer requests new keys of this side.
    rekey: AtomicBool,
    /// Most records that are sent with one key.
    records_max: AtomicU64,
    /// At a source: its configuration, for further connections.
    client: Option<ClientTls>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").finish_non_exhaustive()
    }
}

impl Stream {
    pub(super) fn new(
        secrets: ExtractedSecrets,
        keys: Keys,
        incoming: Incoming,
        client: Option<ClientTls>,
    ) -> Result<Self, Error> {
        let suite = keys.suite()?;
        let (sequence, secret) = secrets.tx;
        let encrypter = encrypter(suite, secret)?;
        let sealer = Sealer { encrypter, sequence, plain: Vec::new(), is_broken: false };
        let (sequence, secret) = secrets.rx;
        let opener = Opener {
            incoming,
            plain: 0..0,
            decrypter: decrypter(suite, secret)?,
            sequence,
            empty_records: 0,
            messages: Messages::default(),
            is_over: false,
            failure: None,
        };
        let records_max = (suite.common.confidentiality_limit / 2).min(RECORDS_MAX);
        Ok(Self {
            suite,
            keys: Mutex::new(keys),
            sealer: Mutex::new(sealer),
            opener: Mutex::new(opener),
            rekey: AtomicBool::new(false),
            records_max: AtomicU64::new(records_max),
            client,
        })
    }

    fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock()
    }

    pub(crate) fn sealer(&self) -> MutexGuard<'_, Sealer> {
        self.sealer.lock()
    }

    pub(crate) fn opener(&self) -> MutexGuard<'_, Opener> {
        self.opener.lock()
    }

    /// The configuration of this connection, at a source.
    pub(crate) fn client(&self) -> Option<&ClientTls> {
        self.client.as_ref()
    }

    /// The closing alert; `None` where it would be in the middle of a message.
    pub(crate) fn close_notify(&self) -> Option<Vec<u8>> {
        const WARNING: u8 = 1;
        // A thread that is sending now has not finished its message.
        let mut sealer = self.sealer.try_lock()?;
        if sealer.is_broken {
            return None;
        }
        sealer.is_broken = true;
        sealer.seal(ContentType::Alert, &[WARNING, AlertDescription::CloseNotify.into()]).ok()
    }

    /// Makes keys change after this number of records.
    #[cfg(all(any(test, feature = "testing"), not(loom)))]
    pub(super) fn change_keys_after(&self, records: u64) {
        self.records_max.store(records, Ordering::Relaxed);
    }

    /// Seals a record outside of the regular order.
    #[cfg(all(any(test, feature = "testing"), not(loom)))]
    pub(super) fn seal_for_test(&self, typ: ContentType, payload: &[u8]) -> Vec<u8> {
        #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
        self.sealer().seal(typ, payload).unwrap()
    }

    /// Changes the keys as after a record that announces it.
    #[cfg(all(any(test, feature = "testing"), not(loom)))]
    pub(super) fn change_keys_for_test(&self) {
        #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
        let mut sealer = self.sealer();
        sealer.encrypter = encrypter(self.suite, self.keys().next(true).unwrap()).unwrap();
        sealer.sequence = 0;
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn is_asked_for_keys(&self) -> bool {
        self.rekey.load(Ordering::Relaxed)
    }
}
