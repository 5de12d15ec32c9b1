// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The TLS handshake of one connection, without blocking.
//!
//! Owns the bytes received and to be sent meanwhile. The caller polls, and has the deadline. A peer that
//! sends nothing, or a byte now and then, costs no more than its buffer. rustls never gets a byte beyond
//! the record that it asks for, so what a peer sends right after its handshake is left for the record layer.

use std::io;

use rustls::Error;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus};
use socket2::Socket;

use super::record::{Incoming, Keys, Stream};
use super::{ClientTls, ServerTls, TlsError};
use crate::transport::socket::send_now;

const HANDSHAKE: &str = "agreeing on TLS";

/// Progress of a handshake.
#[derive(Debug)]
pub(crate) enum Progress {
    /// Complete, with the established stream.
    Done(Box<Stream>),
    /// Data of the peer is needed.
    WantsRead,
    /// The socket accepts no more data now.
    WantsWrite,
}

/// What rustls requests next.
enum Step {
    /// Another step.
    More,
    /// Another record of the peer.
    Record,
    /// All pending data is to be sent.
    Transmit,
    Done,
}

enum Engine {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

/// A handshake in progress.
pub(crate) struct Handshake {
    /// `None` when it is complete.
    engine: Option<Engine>,
    incoming: Incoming,
    /// Bytes of `incoming` that rustls has seen.
    shown: usize,
    outgoing: Vec<u8>,
    /// Bytes of `outgoing` that have been sent.
    gone: usize,
    /// The certificates, at a source.
    client: Option<ClientTls>,
}

impl std::fmt::Debug for Handshake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handshake").finish_non_exhaustive()
    }
}

/// Runs one step; returns how many bytes of the input can be discarded.
fn step<D>(
    UnbufferedStatus { discard, state }: UnbufferedStatus<'_, '_, D>,
    outgoing: &mut Vec<u8>,
) -> (usize, Result<Step, Error>) {
    let step = state.and_then(|state| match state {
        ConnectionState::EncodeTlsData(data) => encode(data, outgoing).map(|()| Step::More),
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Ok(Step::Transmit)
        }
        ConnectionState::BlockedHandshake => Ok(Step::Record),
        ConnectionState::WriteTraffic(_) => Ok(Step::Done),
        // Neither early data nor the end of the stream belongs to a handshake.
        _ => Err(Error::HandshakeNotComplete),
    });
    (discard, step)
}

fn encode<D>(mut data: EncodeTlsData<'_, D>, outgoing: &mut Vec<u8>) -> Result<(), Error> {
    let start = outgoing.len();
    let mut room = 0;
    loop {
        outgoing.resize(start + room, 0);
        match data.encode(&mut outgoing[start..]) {
            Ok(len) => {
                outgoing.truncate(start + len);
                return Ok(());
            }
            Err(EncodeError::InsufficientSize(size)) if size.required_size > room => {
                room = size.required_size;
            }
            Err(error) => return Err(Error::General(error.to_string())),
        }
    }
}

impl Handshake {
    fn new(engine: Engine, client: Option<ClientTls>) -> Self {
        let incoming = Incoming::new();
        Self { engine: Some(engine), incoming, shown: 0, outgoing: Vec::new(), gone: 0, client }
    }

    /// The handshake of a source with the destination `host`.
    ///
    /// # Errors
    /// When no certificate can name the host.
    pub(crate) fn client(tls: &ClientTls, host: &str) -> Result<Self, TlsError> {
        let name = ClientTls::name(host)?;
        let engine = UnbufferedClientConnection::new(tls.config.clone(), name)
            .map_err(|error| TlsError::of(HANDSHAKE, error))?;
        Ok(Self::new(Engine::Client(Box::new(engine)), Some(tls.clone())))
    }

    /// The handshake of a destination.
    ///
    /// # Errors
    /// When the configuration cannot be used.
    pub(crate) fn server(tls: &ServerTls) -> Result<Self, TlsError> {
        let engine = UnbufferedServerConnection::new(tls.config.clone())
            .map_err(|error| TlsError::of(HANDSHAKE, error))?;
        Ok(Self::new(Engine::Server(Box::new(engine)), None))
    }

    /// Continues as far as the received data allows.
    ///
    /// # Errors
    /// When the handshake fails; the peer was sent the alert, if the socket accepted it. The connection
    /// cannot be used afterwards.
    pub(crate) fn advance(&mut self, socket: &Socket) -> Result<Progress, TlsError> {
        loop {
            if !self.flush(socket)? {
                return Ok(Progress::WantsWrite);
            }
            match self.step() {
                Ok(Step::More | Step::Transmit) => {}
                Ok(Step::Done) => return self.finish(),
                Ok(Step::Record) => match self.incoming.record_end(self.shown)? {
                    Some(end) => self.shown = end,
                    None => match self.incoming.receive(socket) {
                        Ok(0) => return Err(TlsError::Ended),
                        Ok(_) => {}
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            return Ok(Progress::WantsRead);
                        }
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(_) => return Err(TlsError::Ended),
                    },
                },
                Err(error) => {
                    self.last_words(socket);
                    return Err(TlsError::of(HANDSHAKE, error));
                }
            }
        }
    }

    fn step(&mut self) -> Result<Step, Error> {
        let shown = &mut self.incoming.there()[..self.shown];
        let (discard, stepped) = match &mut self.engine {
            Some(Engine::Client(engine)) => {
                step(engine.process_tls_records(shown), &mut self.outgoing)
            }
            Some(Engine::Server(engine)) => {
                step(engine.process_tls_records(shown), &mut self.outgoing)
            }
            None => return Err(Error::HandshakeNotComplete),
        };
        self.incoming.discard(discard);
        self.shown = self.shown.saturating_sub(discard);
        stepped
    }

    /// Sends pending data; false when a part is left.
    fn flush(&mut self, socket: &Socket) -> Result<bool, TlsError> {
        while self.gone < self.outgoing.len() {
            match send_now(socket, &self.outgoing[self.gone..]) {
                Ok(0) => return Err(TlsError::Ended),
                Ok(sent) => self.gone += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // What the peer sent before it closed the connection explains the end.
                Err(_) if self.incoming.receive(socket).is_ok_and(|len| len > 0) => {
                    self.gone = self.outgoing.len();
                }
                Err(_) => return Err(TlsError::Ended),
            }
        }
        self.outgoing.clear();
        self.gone = 0;
        Ok(true)
    }

    /// Sends the alert of a failed handshake. A step that has nothing to encode would process what the peer has sent
    /// once more, and fail with a second alert.
    fn last_words(&mut self, socket: &Socket) {
        while self.has_to_encode() && self.step().is_ok() {}
        let _ = self.flush(socket);
    }

    fn has_to_encode(&self) -> bool {
        match &self.engine {
            Some(Engine::Client(engine)) => engine.wants_write(),
            Some(Engine::Server(engine)) => engine.wants_write(),
            None => false,
        }
    }

    fn finish(&mut self) -> Result<Progress, TlsError> {
        let failed = |error| TlsError::of(HANDSHAKE, error);
        let (secrets, keys) = match self.engine.take() {
            Some(Engine::Client(engine)) => {
                let (secrets, keys) = engine.dangerous_into_kernel_connection().map_err(failed)?;
                (secrets, Keys::Client(keys))
            }
            Some(Engine::Server(engine)) => {
                let (secrets, keys) = engine.dangerous_into_kernel_connection().map_err(failed)?;
                (secrets, Keys::Server(keys))
            }
            None => return Err(failed(Error::HandshakeNotComplete)),
        };
        let incoming = std::mem::replace(&mut self.incoming, Incoming::empty());
        let stream = Stream::new(secrets, keys, incoming, self.client.take());
        stream.map(|stream| Progress::Done(Box::new(stream))).map_err(failed)
    }
}
