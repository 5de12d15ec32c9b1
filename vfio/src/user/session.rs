// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A session with a device server.
//!
//! Owns the order of messages: one command at a time, whose answer is waited for within a limit; and the rule that the
//! first violation is the last, after which every command fails at once. A command of the server (to read or write guest
//! memory, which it has mapped) is refused whenever it comes. A command that the server refuses ends nothing.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use devices::unix_connect::{BETWEEN_ATTEMPTS, connect_within};
use parking_lot::Mutex;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::answers::{self, Limits};
use super::connection::{Connection, Deadline, TransferError};
use super::protocol::{self, Command, HEADER_LEN_BYTES, Header, Kind, TRANSFER_LEN_BYTES_MAX};
use super::received::ReceivedFd;
use crate::user_error::UserError;

/// Time for an operation of one or several commands: what a guest reads or writes, a reset, all steps at the start. A
/// guest complains of a processor that does nothing for 20 seconds.
pub const OPERATION_LIMIT: Duration = Duration::from_secs(10);

/// Length of what a command of the server may have: an address, a length, and bytes to write.
const COMMAND_LEN_BYTES_MAX: usize = 64 + TRANSFER_LEN_BYTES_MAX as usize;
/// Length of what is read at once of a payload that is of no use.
const PIECE_LEN_BYTES: usize = 4096;

/// A command with what belongs to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question<'a> {
    pub command: Command,
    pub payload: &'a [u8],
    /// Descriptors that go along.
    pub fds: &'a [BorrowedFd<'a>],
    /// Length of the longest payload that an answer may have.
    pub room: usize,
    /// Descriptors may come with the answer.
    pub takes_fds: bool,
}

impl<'a> Question<'a> {
    /// Without descriptors.
    pub fn new(command: Command, payload: &'a [u8], room: usize) -> Self {
        Self { command, payload, fds: &[], room, takes_fds: false }
    }

    /// With descriptors.
    pub fn with(self, fds: &'a [BorrowedFd<'a>]) -> Self {
        Self { fds, ..self }
    }

    /// With an answer that may have descriptors.
    pub fn taking_fds(self) -> Self {
        Self { takes_fds: true, ..self }
    }
}

/// An answer.
#[derive(Debug)]
pub(super) struct Answer {
    /// What follows its header.
    pub payload: Vec<u8>,
    /// The descriptors that came along.
    pub fds: Vec<ReceivedFd>,
}

struct Exchange {
    connection: Connection,
    last_id: u16,
}

/// A session.
pub(super) struct Session {
    /// Locked from a command to its answer.
    exchange: Mutex<Exchange>,
    /// The same connection, to end it while a thread waits for an answer.
    ending: UnixStream,
    /// Why the session has ended.
    lost: OnceLock<Arc<str>>,
    /// What the thread of [`super::watch`] waits at: for a hang-up while a command is under way, otherwise for
    /// anything.
    epoll: Epoll,
    limits: Limits,
    limit: Duration,
}

/// Token of the connection in the epoll instance.
pub(super) const CONNECTION: u64 = 1;

fn interest(is_idle: bool) -> EpollEvent {
    let incoming = if is_idle { EventSet::IN } else { EventSet::empty() };
    EpollEvent::new(incoming | EventSet::READ_HANG_UP, CONNECTION)
}

impl Session {
    /// Connects to the server at `path` and greets it. One that has just ended a session may be there again a moment
    /// later.
    ///
    /// # Errors
    /// There is no server, or it does not speak the protocol.
    pub fn open(path: &Path, limit: Duration) -> Result<Self, UserError> {
        let begun = Instant::now();
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            let stream = connect_within(path, left, &|| false).map_err(|source| {
                let (path, limit_ms) = (path.to_owned(), limit.as_millis());
                UserError::Connect { path, limit_ms, source }
            })?;
            match Self::over(stream, limit) {
                // It was queued where a server that has just ended had listened.
                Err(error) if error.is_hang_up() && begun.elapsed() < limit => {
                    std::thread::sleep(BETWEEN_ATTEMPTS);
                }
                opened => return opened,
            }
        }
    }

    /// The same over a connection.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn over(stream: UnixStream, limit: Duration) -> Result<Self, UserError> {
        let resource = |what| move |source| UserError::Resource { what, source };
        let ending = stream.try_clone().map_err(resource("duplicate a descriptor"))?;
        let connection = Connection::new(stream).map_err(resource("prepare a connection"))?;
        let epoll = Epoll::new().map_err(resource("make an epoll instance"))?;
        let fd = connection.as_raw_fd();
        let added = epoll.ctl(ControlOperation::Add, fd, interest(true));
        added.map_err(resource("watch a connection"))?;
        let mut session = Self {
            exchange: Mutex::new(Exchange { connection, last_id: 0 }),
            ending,
            lost: OnceLock::new(),
            epoll,
            limits: Limits::default(),
            limit,
        };
        let deadline = session.deadline();
        let greeting = protocol::version();
        let limits = session.ask(
            &Question::new(Command::Version, &greeting, answers::VERSION_LEN_BYTES_MAX),
            &deadline,
            |answer| answers::version(&answer.payload),
        )?;
        session.limits = limits;
        Ok(session)
    }

    /// What the server takes in one message.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// For an operation that begins now.
    pub fn deadline(&self) -> Deadline {
        Deadline::within(self.limit)
    }

    /// Why the session has ended, if it has.
    pub fn lost(&self) -> Option<&Arc<str>> {
        self.lost.get()
    }

    /// The epoll instance with the connection.
    pub fn epoll(&self) -> &Epoll {
        &self.epoll
    }

    /// Ends the session: nothing is asked any more.
    pub fn end(&self, why: &str) {
        let _ = self.lost.set(why.into());
        // The server may have ended it before.
        let _ = self.ending.shutdown(std::net::Shutdown::Both);
    }

    /// Asks, and has `check` look at the answer.
    ///
    /// # Errors
    /// The session has ended before, or ends now; or the server refuses the command.
    pub fn ask<T>(
        &self,
        question: &Question<'_>,
        deadline: &Deadline,
        check: impl FnOnce(Answer) -> Result<T, String>,
    ) -> Result<T, UserError> {
        let mut exchange = self.exchange.lock();
        if let Some(why) = self.lost.get() {
            return Err(UserError::Lost(Arc::clone(why)));
        }
        self.be_idle(&exchange, false);
        let answer = exchange.ask(question, deadline);
        let result = answer.and_then(|answer| {
            let name = question.command.name();
            check(answer).map_err(|problem| UserError::Answer { command: name, problem })
        });
        match &result {
            Err(error) if error.ends_session() => self.end(&error_text::chain(error)),
            _ => self.be_idle(&exchange, true),
        }
        result
    }

    /// Handles what has come without a command, or the end of the connection; returns whether it was a command.
    pub fn attend(&self) -> bool {
        let exchange = self.exchange.lock();
        if self.lost.get().is_some() || !exchange.connection.is_readable() {
            return false;
        }
        let deadline = self.deadline();
        match exchange.refuse_command(&deadline) {
            Ok(()) => true,
            Err(error) => {
                self.end(&error_text::chain(&error));
                false
            }
        }
    }

    /// Has the watching thread see what comes, or not, as it is for the thread that waits for an answer.
    fn be_idle(&self, exchange: &Exchange, is_idle: bool) {
        let fd = exchange.connection.as_raw_fd();
        // The descriptor is there: at worst the thread looks once too often.
        let _ = self.epoll.ctl(ControlOperation::Modify, fd, interest(is_idle));
    }
}

impl Exchange {
    fn ask(&mut self, question: &Question<'_>, deadline: &Deadline) -> Result<Answer, UserError> {
        let Question { command, payload, fds, room, takes_fds } = *question;
        let name = command.name();
        let failed = |error| failed(error, name, deadline);
        self.last_id = self.last_id.wrapping_add(1);
        let header = Header::command(self.last_id, command, payload.len());
        let message = [header.bytes().as_slice(), payload].concat();
        self.connection.send(&message, fds, deadline).map_err(failed)?;
        loop {
            let mut fds = Vec::new();
            let room_for_fds = takes_fds.then_some(&mut fds);
            let answer = self.header(room_for_fds, deadline).map_err(failed)?;
            let wrong = |problem: String| UserError::Answer { command: name, problem };
            let kind = answer.kind();
            let len = answer.payload_len_bytes();
            let (Some(kind), Some(len)) = (kind, len) else {
                return Err(wrong(format!("no message has the header {answer:x?}")));
            };
            if let Kind::Command { wants_reply } = kind {
                drop(fds);
                self.refuse(&answer, len, wants_reply, deadline)?;
                if deadline.left().is_none() {
                    return Err(failed(TransferError::Late));
                }
                continue;
            }
            if (answer.id, answer.command) != (header.id, header.command) {
                let (id, command) = (answer.id, answer.command);
                return Err(wrong(format!("it is to command {command}, message {id}")));
            }
            if kind == Kind::Failure {
                if len > room {
                    return Err(wrong(format!("a refusal has {len} bytes")));
                }
                self.skip(len, deadline).map_err(failed)?;
                // It may leave the reason out.
                let errno = i32::try_from(answer.error).ok().filter(|errno| *errno > 0);
                let source = io::Error::from_raw_os_error(errno.unwrap_or(libc::EIO));
                return Err(UserError::Refused { command: name, source });
            }
            if len > room {
                return Err(wrong(format!("it has {len} bytes, and {room} are the most")));
            }
            let mut payload = vec![0; len];
            let room_for_fds = takes_fds.then_some(&mut fds);
            self.connection.receive(&mut payload, room_for_fds, deadline).map_err(failed)?;
            return Ok(Answer { payload, fds });
        }
    }

    /// Receives one message that is no answer, and refuses it.
    fn refuse_command(&self, deadline: &Deadline) -> Result<(), UserError> {
        let header = self.header(None, deadline);
        let header = header.map_err(|error| unasked(error, deadline))?;
        match (header.kind(), header.payload_len_bytes()) {
            (Some(Kind::Command { wants_reply }), Some(len)) => {
                self.refuse(&header, len, wants_reply, deadline)
            }
            _ => Err(UserError::Message(format!("an answer to nothing: {header:x?}"))),
        }
    }

    /// Refuses a command, of which the header has come.
    fn refuse(
        &self,
        header: &Header,
        len: usize,
        wants_reply: bool,
        deadline: &Deadline,
    ) -> Result<(), UserError> {
        if len > COMMAND_LEN_BYTES_MAX {
            return Err(UserError::Message(format!("a command of {len} bytes")));
        }
        let failed = |error| unasked(error, deadline);
        self.skip(len, deadline).map_err(failed)?;
        if wants_reply {
            let answer = header.refusal(libc::EOPNOTSUPP).bytes();
            self.connection.send(&answer, &[], deadline).map_err(failed)?;
        }
        Ok(())
    }

    fn header(
        &self,
        fds: Option<&mut Vec<ReceivedFd>>,
        deadline: &Deadline,
    ) -> Result<Header, TransferError> {
        let mut bytes = [0; HEADER_LEN_BYTES];
        self.connection.receive(&mut bytes, fds, deadline)?;
        Ok(Header::parse(&bytes))
    }

    fn skip(&self, len: usize, deadline: &Deadline) -> Result<(), TransferError> {
        let mut piece = [0; PIECE_LEN_BYTES];
        let mut left = len;
        while left > 0 {
            let now = left.min(PIECE_LEN_BYTES);
            let part = piece.get_mut(..now).unwrap_or_default();
            self.connection.receive(part, None, deadline)?;
            left -= now;
        }
        Ok(())
    }
}

/// The same for a message that is no answer.
fn unasked(error: TransferError, deadline: &Deadline) -> UserError {
    match error {
        TransferError::Late => UserError::Message("a part of a message".to_owned()),
        TransferError::TooManyFds => UserError::Message("descriptors".to_owned()),
        other => failed(other, "nothing", deadline),
    }
}

fn failed(error: TransferError, command: &'static str, deadline: &Deadline) -> UserError {
    match error {
        TransferError::HungUp => UserError::HungUp,
        TransferError::Late => UserError::Late { command, limit_ms: deadline.limit.as_millis() },
        TransferError::TooManyFds => {
            let problem = "it brings more descriptors than there may be".to_owned();
            UserError::Answer { command, problem }
        }
        TransferError::Io(error) => UserError::Connection(error),
    }
}
