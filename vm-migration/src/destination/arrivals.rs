// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Accepted connections before their hello is complete.
//!
//! Owns these connections, the bytes that each has sent so far, and a deadline for each. Nothing here
//! blocks: it reads what has arrived, and the caller polls. A peer that connects and sends nothing, or one
//! byte now and then, delays neither the other connections nor the caller. The TLS handshake is a part of
//! that, where the listener has certificates. It reads no byte beyond a hello and trusts none. Log lines about
//! refused connections are rate-limited.

use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use super::refusals;
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::options::CONNECTIONS_MAX;
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::protocol::codec::{HEADER_BYTES, Header};
use crate::protocol::message::{Answer, Command, Message, Role};
use crate::steering::LOOK_EVERY;
use crate::transport::tls::{self, Handshake};
use crate::transport::{Connection, Listener, TlsError, TransportError};

/// Most connections whose hello is incomplete: two full sets, and some of other clients. When there are more,
/// the oldest one is dropped.
const PENDING_MAX: usize = 2 * CONNECTIONS_MAX as usize + 64;

/// How long a refused connection stays open for its peer to read the reason.
const REFUSED_TIME: Duration = Duration::from_secs(1);

/// Most connections that one call accepts.
const ACCEPTED_MAX: usize = 64;

/// How long accepting pauses after the host had no descriptor or no memory for a connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// Longest payload of a message that a connection may begin with; the valid ones are shorter.
pub(super) const FIRST_PAYLOAD_BYTES_MAX: usize = 64;

/// Longest hello.
const HELLO_BYTES_MAX: usize = HEADER_BYTES + FIRST_PAYLOAD_BYTES_MAX;

/// The refusal, sent without TLS, of a connection with TLS where TLS is not used. The peer sees that it is
/// not a TLS record.
const HAS_NO_TLS: &str =
    "the source uses TLS, and this destination does not: give tls_dir to receive-migration as well";

/// Shortest time between two log messages about refused connections.
const COMPLAIN_EVERY: Duration = Duration::from_secs(10);

/// What a connection must send first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expect {
    /// A message with a payload of at most [`FIRST_PAYLOAD_BYTES_MAX`].
    Message,
    /// The role of the connection.
    Role,
    /// The role and a token; or the message of a source that reconnects.
    RoleAndToken,
}

/// The complete hello of a connection.
#[derive(Debug)]
pub(super) enum Hello {
    /// It belongs to a set. The token is empty where none is expected.
    Extra(Role, Vec<u8>, Channel),
    /// A whole message.
    Message(Message, Channel),
    /// Anything else.
    Other(Channel),
}

/// Log of refused connections: the first one is logged at once, the rest as a count.
#[derive(Debug, Default)]
struct RejectLog {
    /// When the last message was logged.
    told: Option<Instant>,
    /// Refused connections since then.
    kept_back: u64,
}

impl RejectLog {
    fn about(&mut self, reason: &str) {
        let now = Instant::now();
        if self.told.is_some_and(|told| now.duration_since(told) < COMPLAIN_EVERY) {
            self.kept_back += 1;
            return;
        }
        self.told = Some(now);
        match std::mem::take(&mut self.kept_back) {
            0 => log::warn!("a connection was turned away: {reason}"),
            count => log::warn!("a connection was turned away, and {count} before it: {reason}"),
        }
    }
}

struct Pending {
    connection: Connection,
    /// The TLS handshake while it lasts.
    handshake: Option<Handshake>,
    said: Vec<u8>,
    deadline: Instant,
    /// It was refused; what it still sends is discarded.
    refused: bool,
    /// It begins another migration, where a role is expected.
    begins: bool,
}

/// Connections that have been accepted and whose hello is incomplete.
pub(super) struct Arrivals {
    expect: Expect,
    /// Time limit for each hello.
    limit: Duration,
    pending: Vec<Pending>,
    /// Nothing is accepted before this time.
    exhausted_until: Option<Instant>,
    complaints: RejectLog,
}

impl Arrivals {
    /// No connection yet. Each has `limit` to send its hello.
    pub(super) fn new(expect: Expect, limit: Duration) -> Self {
        let complaints = RejectLog::default();
        Self { expect, limit, pending: Vec::new(), exhausted_until: None, complaints }
    }

    /// How long the caller may poll what [`add_fds`](Self::add_fds) names before it calls
    /// [`take`](Self::take) again; `None` for no limit.
    pub(super) fn look_again(&self) -> Option<Duration> {
        (!self.pending.is_empty() || self.exhausted_until.is_some()).then_some(LOOK_EVERY)
    }

    /// Appends the descriptors to be polled for reading.
    pub(super) fn add_fds(&self, listener: &Listener, fds: &mut Vec<RawFd>) {
        if self.exhausted_until.is_none_or(|until| Instant::now() >= until) {
            fds.push(listener.as_raw_fd());
        }
        fds.extend(self.pending.iter().map(|pending| pending.connection.as_raw_fd()));
    }

    /// True when no connection has an incomplete hello.
    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.pending.iter().all(|pending| pending.refused)
    }

    /// Accepts waiting connections and reads what is there; returns those whose hello is complete.
    pub(super) fn take(&mut self, listener: &Listener, cancel: &Cancel) -> Vec<Hello> {
        self.accept(listener, cancel);
        let now = Instant::now();
        let mut hellos = Vec::new();
        for mut pending in std::mem::take(&mut self.pending) {
            if pending.refused {
                if pending.drain() && now < pending.deadline {
                    self.pending.push(pending);
                }
                continue;
            }
            match pending.read(self.expect) {
                HelloState::Complete if pending.said.starts_with(&tls::FIRST_BYTES) => {
                    self.refuse(Channel::new(pending.connection), HAS_NO_TLS);
                }
                HelloState::Complete => hellos.push(pending.hello(self.expect)),
                HelloState::Failed(TlsError::NotTls) => {
                    self.refuse(Channel::new(pending.connection), refusals::NEEDS_TLS);
                }
                HelloState::Failed(error) => {
                    self.complaints.about(&error_text::chain(&error));
                    // It was sent an alert, and gets time to read that.
                    self.leave(pending.connection);
                }
                HelloState::Partial if now < pending.deadline => self.pending.push(pending),
                HelloState::Partial => self.complaints.about("it did not announce its purpose"),
                HelloState::Closed => {
                    log::debug!("a connection ended before it announced its purpose");
                }
            }
        }
        hellos
    }

    fn accept(&mut self, listener: &Listener, cancel: &Cancel) {
        let now = Instant::now();
        if self.exhausted_until.is_some_and(|until| now < until) {
            return;
        }
        self.exhausted_until = None;
        // Bounded, so that the caller gets on with its other work however fast clients connect.
        for _ in 0..ACCEPTED_MAX {
            match listener.accept_now(cancel, self.limit) {
                Ok(Some(connection)) => {
                    if self.pending.len() >= PENDING_MAX {
                        self.complaints.about("it is the oldest of too many silent ones");
                        self.pending.remove(0);
                    }
                    let handshake = match listener.handshake() {
                        Ok(handshake) => handshake,
                        Err(error) => {
                            self.complaints.about(&error_text::chain(&error));
                            continue;
                        }
                    };
                    let deadline = now + self.limit;
                    let said = Vec::with_capacity(HELLO_BYTES_MAX);
                    let (refused, begins) = (false, false);
                    let pending =
                        Pending { connection, handshake, said, deadline, refused, begins };
                    self.pending.push(pending);
                }
                Ok(None) => return,
                Err(error) => {
                    self.complaints.about(&error_text::chain(&error));
                    self.exhausted_until = Some(now + EXHAUSTED_PAUSE);
                    return;
                }
            }
        }
    }

    /// Sends a connection the reason why it is refused, and drops it once the peer has had time to read that.
    pub(super) fn refuse(&mut self, channel: Channel, reason: &str) {
        self.complaints.about(reason);
        self.dismiss(channel, &Answer::Error { reason: reason.to_string() });
    }

    /// Sends a connection its last answer, and drops it once the peer has had time to read that.
    pub(super) fn dismiss(&mut self, channel: Channel, answer: &Answer) {
        let Some(connection) = channel.into_connection() else { return };
        // It has sent little and been sent nothing, so this does not block.
        connection.set_stall_timeout(Duration::ZERO);
        if connection.send(&answer.encode()).is_ok() {
            self.leave(connection);
        }
    }

    /// Ends a connection that was sent its last bytes, once the peer has had time to read them.
    fn leave(&mut self, connection: Connection) {
        connection.shut_down_sending();
        let deadline = Instant::now() + REFUSED_TIME;
        let (handshake, said, refused, begins) = (None, Vec::new(), true, false);
        self.pending.push(Pending { connection, handshake, said, deadline, refused, begins });
    }
}

/// True when the bytes are the Start message of another migration, whose code is also a role's. A random
/// token does not have all of these bytes.
fn begins(said: &[u8]) -> bool {
    said.len() == HEADER_BYTES
        && matches!(Message::read(&mut &*said), Ok(Message::Start { version: 0, .. }))
}

enum HelloState {
    /// The TLS handshake failed.
    Failed(TlsError),
    Complete,
    Partial,
    Closed,
}

impl Pending {
    /// Length of the hello, as far as the bytes so far determine it.
    fn len(&self, expect: Expect) -> usize {
        match expect {
            Expect::Role if self.begins => HEADER_BYTES,
            Expect::RoleAndToken if begins(&self.said) => HEADER_BYTES,
            Expect::RoleAndToken if Role::read(&mut &self.said[..]).is_ok() => 2 + TOKEN_BYTES,
            Expect::Role | Expect::RoleAndToken if self.is_message() => {
                HEADER_BYTES + self.payload_len()
            }
            Expect::Role | Expect::RoleAndToken => 2,
            Expect::Message => HEADER_BYTES + self.payload_len(),
        }
    }

    /// True when the first bytes are those of a source that has lost its connections, or checks a migration.
    fn is_message(&self) -> bool {
        let code = self.said.first_chunk::<2>().map(|code| u16::from_le_bytes(*code));
        [Command::Recover, Command::Verdict, Command::Check]
            .iter()
            .any(|command| Some(command.code()) == code)
    }

    /// Payload length by the header of a message that may come first; 0 if there is none.
    fn payload_len(&self) -> usize {
        let Some(header) = self.said.first_chunk::<HEADER_BYTES>() else { return 0 };
        let Header { code, len_bytes, .. } = Header::decode(*header);
        let known = Command::from_code(code).is_ok();
        let len = usize::try_from(len_bytes).ok().filter(|len| *len <= FIRST_PAYLOAD_BYTES_MAX);
        len.filter(|_| known).unwrap_or(0)
    }

    fn read(&mut self, expect: Expect) -> HelloState {
        if let Some(handshake) = &mut self.handshake {
            match self.connection.advance(handshake) {
                Ok(true) => self.handshake = None,
                Ok(false) => return HelloState::Partial,
                // Port scanners and the like.
                Err(TlsError::Ended) => return HelloState::Closed,
                Err(error) => return HelloState::Failed(error),
            }
        }
        if expect == Expect::Role && self.said.is_empty() {
            // Without a token only the bytes that follow can tell: memory contents, or nothing yet.
            let mut ahead = [0; HEADER_BYTES];
            let there = self.connection.peek_now(&mut ahead);
            self.begins = begins(&ahead[..there]);
        }
        loop {
            let len = self.len(expect);
            if self.said.len() >= len {
                return HelloState::Complete;
            }
            let mut bytes = [0; HELLO_BYTES_MAX];
            let room = &mut bytes[..len - self.said.len()];
            match self.connection.receive_now(room) {
                Ok(Some(received)) => self.said.extend_from_slice(&bytes[..received]),
                Ok(None) => return HelloState::Partial,
                Err(TransportError::Tls(error)) => return HelloState::Failed(error),
                Err(_) => return HelloState::Closed,
            }
        }
    }

    /// Discards what a refused connection sends; false when the peer has closed it.
    fn drain(&mut self) -> bool {
        let mut sink = [0; 4096];
        self.connection.receive_now(&mut sink).is_ok()
    }

    fn hello(self, expect: Expect) -> Hello {
        let may_be_extra = match expect {
            Expect::Message => false,
            Expect::Role => !self.begins,
            Expect::RoleAndToken => !begins(&self.said),
        };
        let channel = Channel::new(self.connection);
        let said = &mut &self.said[..];
        if may_be_extra && let Ok(role) = Role::read(&mut &self.said[..]) {
            return Hello::Extra(role, said[2..].to_vec(), channel);
        }
        match Message::read(said) {
            Ok(message) => Hello::Message(message, channel),
            Err(_) => Hello::Other(channel),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;
    use crate::protocol::message::Recover;
    use crate::transport::{Address, WaitEnd, wait_readable};

    fn listen() -> (Listener, String) {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let Address::Tcp { host, port } = listener.address().clone() else { panic!() };
        (listener, format!("{host}:{port}"))
    }

    /// Polls until one hello is complete.
    fn next(arrivals: &mut Arrivals, listener: &Listener) -> Vec<Hello> {
        let cancel = Cancel::new().unwrap();
        let deadline = Instant::now() + Duration::from_mins(1);
        loop {
            let hellos = arrivals.take(listener, &cancel);
            if !hellos.is_empty() {
                return hellos;
            }
            assert!(Instant::now() < deadline);
            let mut fds = Vec::new();
            arrivals.add_fds(listener, &mut fds);
            let end = wait_readable(&fds, &cancel, Some(Duration::from_millis(100))).unwrap();
            assert_ne!(end, WaitEnd::Cancelled);
        }
    }

    #[test]
    fn a_client_that_drips_bytes_delays_no_other_and_is_dropped() {
        let (listener, at) = listen();
        let mut arrivals = Arrivals::new(Expect::Message, Duration::from_millis(300));
        let mut slow = TcpStream::connect(&at).unwrap();
        slow.write_all(&[0x10]).unwrap();
        let recover = Recover { id: [7; 16], attempt: 3, bulk: 1, urgent: 2, alive: true };
        let mut ours = TcpStream::connect(&at).unwrap();
        ours.write_all(&Message::Recover(recover).encode()).unwrap();
        ours.write_all(b"what follows").unwrap();
        match &mut next(&mut arrivals, &listener)[..] {
            [Hello::Message(Message::Recover(heard), channel)] => {
                assert_eq!(*heard, recover);
                let mut rest = [0; 12];
                crate::transport::ByteSource::read_exact(&mut channel.reader, &mut rest).unwrap();
                assert_eq!(&rest, b"what follows");
            }
            other => panic!("{other:?}"),
        }
        // Each connection has its own deadline, however often it sends a byte.
        let cancel = Cancel::new().unwrap();
        let deadline = Instant::now() + Duration::from_mins(1);
        let mut said = 1;
        while !arrivals.is_empty() {
            assert!(Instant::now() < deadline);
            if said < HEADER_BYTES - 1 {
                said += 1;
                let _ = slow.write_all(&[0]);
            }
            assert!(arrivals.take(&listener, &cancel).is_empty());
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_role_and_a_token_may_come_in_parts() {
        let (listener, at) = listen();
        let mut arrivals = Arrivals::new(Expect::RoleAndToken, Duration::from_secs(20));
        let mut extra = TcpStream::connect(&at).unwrap();
        extra.write_all(&[1, 0]).unwrap();
        extra.write_all(&[9; HEADER_BYTES - 2]).unwrap();
        let cancel = Cancel::new().unwrap();
        let deadline = Instant::now() + Duration::from_mins(1);
        while arrivals.pending.first().is_none_or(|pending| pending.said.len() < HEADER_BYTES) {
            assert!(arrivals.take(&listener, &cancel).is_empty());
            assert!(Instant::now() < deadline);
        }
        extra.write_all(&[9; 2]).unwrap();
        match &next(&mut arrivals, &listener)[..] {
            [Hello::Extra(Role::Memory, token, _)] => assert_eq!(token[..], [9; TOKEN_BYTES]),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn another_source_is_not_taken_for_a_connection_of_this_one() {
        let (listener, at) = listen();
        let mut arrivals = Arrivals::new(Expect::Role, Duration::from_secs(20));
        let mut second_source = TcpStream::connect(&at).unwrap();
        second_source.write_all(&Message::Start { version: 0, offer: true }.encode()).unwrap();
        match &next(&mut arrivals, &listener)[..] {
            [Hello::Message(Message::Start { version: 0, offer: true }, _)] => {}
            other => panic!("{other:?}"),
        }
        for follows in [&[][..], &Message::Memory(Vec::new()).encode()] {
            let mut extra = TcpStream::connect(&at).unwrap();
            extra.write_all(&[&[1, 0], follows].concat()).unwrap();
            let mut hellos = next(&mut arrivals, &listener);
            let Some(Hello::Extra(Role::Memory, token, mut channel)) = hellos.pop() else {
                panic!("{hellos:?}")
            };
            assert!(token.is_empty());
            if !follows.is_empty() {
                let message = Message::read(&mut channel.reader).unwrap();
                assert_eq!(message, Message::Memory(Vec::new()));
            }
        }
    }

    #[test]
    fn one_that_only_checks_is_heard_whatever_is_expected() {
        for expect in [Expect::Message, Expect::Role, Expect::RoleAndToken] {
            let (listener, at) = listen();
            let mut arrivals = Arrivals::new(expect, Duration::from_secs(20));
            let mut source = TcpStream::connect(&at).unwrap();
            source.write_all(&Message::Check.encode()).unwrap();
            let hellos = next(&mut arrivals, &listener);
            assert!(matches!(&hellos[..], [Hello::Message(Message::Check, _)]), "{hellos:?}");
        }
    }

    #[test]
    fn roles_come_with_tokens_and_strangers_hear_why_they_go() {
        let (listener, at) = listen();
        let mut arrivals = Arrivals::new(Expect::RoleAndToken, Duration::from_secs(20));
        let mut extra = TcpStream::connect(&at).unwrap();
        extra.write_all(&[2, 0]).unwrap();
        extra.write_all(&[9; TOKEN_BYTES]).unwrap();
        match &next(&mut arrivals, &listener)[..] {
            [Hello::Extra(Role::Fault, token, _)] => assert_eq!(token[..], [9; TOKEN_BYTES]),
            other => panic!("{other:?}"),
        }
        let mut stranger = TcpStream::connect(&at).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut hellos = next(&mut arrivals, &listener);
        let Some(Hello::Other(channel)) = hellos.pop() else { panic!("{hellos:?}") };
        for offer in [false, true] {
            let mut second_source = TcpStream::connect(&at).unwrap();
            second_source.write_all(&Message::Start { version: 0, offer }.encode()).unwrap();
            match &next(&mut arrivals, &listener)[..] {
                [Hello::Message(Message::Start { version: 0, offer: heard }, _)] => {
                    assert_eq!(*heard, offer);
                }
                other => panic!("{other:?}"),
            }
        }
        arrivals.refuse(channel, "not here");
        assert!(arrivals.is_empty());
        let heard = std::thread::spawn(move || {
            let mut all = Vec::new();
            stranger.read_to_end(&mut all).unwrap();
            all
        });
        let cancel = Cancel::new().unwrap();
        while !heard.is_finished() {
            arrivals.take(&listener, &cancel);
            std::thread::yield_now();
        }
        let heard = heard.join().unwrap();
        assert_eq!(
            Answer::read(&mut &heard[..]).unwrap(),
            Answer::Error { reason: "not here".into() }
        );
    }
}
