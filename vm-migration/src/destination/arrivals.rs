// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections that have just been made, until each has said what it is.
//!
//! Owns them, the few bytes that each has said so far, and a deadline for each. Nothing here waits:
//! what has arrived is taken, and the caller polls. So a peer that connects and says nothing, or a
//! byte now and then, holds up neither the other connections nor what the caller does beside. It takes
//! no byte beyond a hello, and believes none.

use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::options::CONNECTIONS_MAX;
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::protocol::codec::{HEADER_BYTES, Header};
use crate::protocol::message::{Answer, Command, Message, Recover, Role};
use crate::transport::{Connection, Listener};

/// Connections that may have said too little at a time: a full set, and some strangers. When there
/// are more, the oldest one goes.
const PENDING_MAX: usize = 2 * CONNECTIONS_MAX as usize + 64;

/// How long one that was refused may take to read why.
const REFUSED_TIME: Duration = Duration::from_secs(1);

/// How long nothing is accepted after the system had no descriptor or no memory for a connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// Longest payload of a message that can come first: those that are due have less.
const PAYLOAD_BYTES_MAX: usize = 64;

/// The longest that one may say first.
const HELLO_BYTES_MAX: usize = HEADER_BYTES + PAYLOAD_BYTES_MAX;

/// What connections say first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expect {
    /// A message.
    Message,
    /// What they are for.
    Role,
    /// The same, and a token; or the message of a source that comes back.
    RoleAndToken,
}

/// What one has said.
#[derive(Debug)]
pub(super) enum Hello {
    /// It belongs to a set. The token is empty where none is expected.
    Extra(Role, Vec<u8>, Channel),
    /// A source that has lost its connections.
    Recover(Recover, Channel),
    /// Another short message.
    Message(Message, Channel),
    /// Something else.
    Other(Channel),
}

struct Pending {
    connection: Connection,
    said: Vec<u8>,
    deadline: Instant,
    /// It was told why it is of no use; what it still sends is thrown away.
    refused: bool,
}

/// The connections.
pub(super) struct Arrivals {
    expect: Expect,
    /// How long each may take.
    limit: Duration,
    pending: Vec<Pending>,
    /// Nothing is accepted before.
    exhausted_until: Option<Instant>,
}

impl Arrivals {
    /// Nobody has connected. Each connection may take `limit` to say what it is.
    pub(super) fn new(expect: Expect, limit: Duration) -> Self {
        Self { expect, limit, pending: Vec::new(), exhausted_until: None }
    }

    /// Appends what is to be polled for reading.
    pub(super) fn add_fds(&self, listener: &Listener, fds: &mut Vec<RawFd>) {
        if self.exhausted_until.is_none_or(|until| Instant::now() >= until) {
            fds.push(listener.as_raw_fd());
        }
        fds.extend(self.pending.iter().map(|pending| pending.connection.as_raw_fd()));
    }

    /// True when no connection has still to say what it is.
    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.pending.iter().all(|pending| pending.refused)
    }

    /// Accepts who waits and reads what is there; gives those that have said all.
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
                Said::All => hellos.push(pending.hello(self.expect)),
                Said::Part if now < pending.deadline => self.pending.push(pending),
                Said::Part => {
                    log::warn!("a connection that did not say what it is for was closed");
                }
                Said::Ended => log::debug!("a connection ended before it said what it is for"),
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
        loop {
            match listener.accept_now(cancel, self.limit) {
                Ok(Some(connection)) => {
                    if self.pending.len() >= PENDING_MAX {
                        log::warn!("too many connections say nothing: the oldest one is closed");
                        self.pending.remove(0);
                    }
                    let deadline = now + self.limit;
                    let said = Vec::with_capacity(HELLO_BYTES_MAX);
                    self.pending.push(Pending { connection, said, deadline, refused: false });
                }
                Ok(None) => return,
                Err(error) => {
                    log::warn!("no connection can be accepted: {}", error_text::chain(&error));
                    self.exhausted_until = Some(now + EXHAUSTED_PAUSE);
                    return;
                }
            }
        }
    }

    /// Tells one that it is of no use, and forgets it as soon as it has had time to read that.
    pub(super) fn refuse(&mut self, channel: Channel, reason: &str) {
        self.answer(channel, &Answer::Error { reason: reason.to_string() });
    }

    /// The last word to one, which is forgotten as soon as it has had time to read that.
    pub(super) fn answer(&mut self, channel: Channel, answer: &Answer) {
        let Some(connection) = channel.into_connection() else { return };
        // It has sent little and been sent nothing: this does not block.
        connection.set_stall_timeout(Duration::ZERO);
        if connection.send(&answer.encode()).is_ok() {
            connection.shut_down_sending();
            let deadline = Instant::now() + REFUSED_TIME;
            self.pending.push(Pending { connection, said: Vec::new(), deadline, refused: true });
        }
    }
}

enum Said {
    All,
    Part,
    Ended,
}

impl Pending {
    /// How long the hello is, as far as that can be known from what was said.
    fn len(&self, expect: Expect) -> usize {
        let Some(code) = self.said.first_chunk::<2>().map(|code| u16::from_le_bytes(*code)) else {
            return if expect == Expect::Message { HEADER_BYTES } else { 2 };
        };
        let is_role = Role::read(&mut &self.said[..2]).is_ok();
        match expect {
            Expect::RoleAndToken if is_role => 2 + TOKEN_BYTES,
            Expect::RoleAndToken if comes_back(code) => self.message_len(),
            Expect::Role | Expect::RoleAndToken => 2,
            Expect::Message => self.message_len(),
        }
    }

    /// The same of a message; of one that is too long to come first, its header.
    fn message_len(&self) -> usize {
        let header = self.said.first_chunk::<HEADER_BYTES>().map(|header| Header::decode(*header));
        let payload = header.and_then(|header| usize::try_from(header.len_bytes).ok());
        HEADER_BYTES + payload.filter(|len| *len <= PAYLOAD_BYTES_MAX).unwrap_or(0)
    }

    fn read(&mut self, expect: Expect) -> Said {
        loop {
            let len = self.len(expect);
            if self.said.len() >= len {
                return Said::All;
            }
            let mut bytes = [0; HELLO_BYTES_MAX];
            let room = &mut bytes[..len - self.said.len()];
            match self.connection.receive_now(room) {
                Ok(Some(received)) => self.said.extend_from_slice(&bytes[..received]),
                Ok(None) => return Said::Part,
                Err(_) => return Said::Ended,
            }
        }
    }

    /// Throws away what a refused one sends; false when it has closed the connection.
    fn drain(&mut self) -> bool {
        let mut sink = [0; 4096];
        self.connection.receive_now(&mut sink).is_ok()
    }

    fn hello(self, expect: Expect) -> Hello {
        let channel = Channel::new(self.connection);
        let said = &mut &self.said[..];
        if expect != Expect::Message
            && let Ok(role) = Role::read(&mut &self.said[..])
        {
            return Hello::Extra(role, said[2..].to_vec(), channel);
        }
        match Message::read(said) {
            Ok(Message::Recover(recover)) => Hello::Recover(recover, channel),
            Ok(message) => Hello::Message(message, channel),
            Err(_) => Hello::Other(channel),
        }
    }
}

/// The first bytes of what a source says that has lost its connections.
fn comes_back(code: u16) -> bool {
    [Command::Recover, Command::Verdict].iter().any(|command| command.code() == code)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;
    use crate::transport::{Address, WaitEnd, wait_readable};

    fn listen() -> (Listener, String) {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let Address::Tcp { host, port } = listener.address().clone() else { panic!() };
        (listener, format!("{host}:{port}"))
    }

    /// Polls until somebody has said all.
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
    fn who_drips_bytes_holds_nobody_up_and_goes_in_the_end() {
        let (listener, at) = listen();
        let mut arrivals = Arrivals::new(Expect::Message, Duration::from_millis(300));
        let mut slow = TcpStream::connect(&at).unwrap();
        slow.write_all(&[0x10]).unwrap();
        let recover = Recover { id: [7; 16], attempt: 3, bulk: 1, urgent: 2, alive: true };
        let mut ours = TcpStream::connect(&at).unwrap();
        ours.write_all(&Message::Recover(recover).encode()).unwrap();
        ours.write_all(b"what follows").unwrap();
        match &mut next(&mut arrivals, &listener)[..] {
            [Hello::Recover(heard, channel)] => {
                assert_eq!(*heard, recover);
                let mut rest = [0; 12];
                crate::protocol::codec::ByteSource::read_exact(&mut channel.reader, &mut rest)
                    .unwrap();
                assert_eq!(&rest, b"what follows");
            }
            other => panic!("{other:?}"),
        }
        // Its deadline is its own, however often it sends a byte.
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
