// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How the source of a postcopy comes back after its connections were lost.
//!
//! Owns the place where it connects, and the proof that it is the same migration: the token that
//! was agreed upon at the start, and a number that grows with each attempt. Anybody else is turned
//! away with a reason. It changes nothing about pages before all connections are there.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::linger::Lingering;
use super::negotiate::random_token;
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::options::CONNECTIONS_MAX;
use crate::protocol::ProtocolError;
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::protocol::codec::ByteSource;
use crate::protocol::message::{Answer, Message, Recover, Role};
use crate::steering::{self, LOOK_EVERY, Steering};
use crate::transport::{Listener, TransportError, WaitEnd, wait_readable};

/// How long a peer that has connected may take to say what it is.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(2);

/// What recovery needs to know of the migration.
#[derive(Clone)]
pub(crate) struct Rejoin {
    /// Where the source connects.
    pub listener: Arc<Listener>,
    /// The migration.
    pub id: [u8; TOKEN_BYTES],
    /// The last attempt that was accepted.
    pub attempt: u32,
    /// Longest silence.
    pub stall: Duration,
    pub steering: Steering,
    /// How long a source that has not heard the end may come back and be told.
    pub linger: Duration,
    pub lingering: Lingering,
}

/// A source that has proved to be ours.
pub(crate) struct Returned {
    control: Channel,
    recover: Recover,
}

/// A new set of connections; what is missing has been told.
pub(crate) struct Connections {
    pub control: Channel,
    pub bulk: Vec<Channel>,
    pub urgent: Vec<Channel>,
}

impl Rejoin {
    /// Accepts one connection that waits to be, and finds out whether it is the source's.
    pub(crate) fn greet(&mut self, cancel: &Cancel) -> Option<Returned> {
        match self.try_greet(cancel) {
            Ok(returned) => Some(returned),
            Err(cause) => {
                let why = error_text::chain(&cause);
                log::warn!("a connection during postcopy was turned away: {why}");
                None
            }
        }
    }

    fn try_greet(&mut self, cancel: &Cancel) -> Result<Returned, Cause> {
        let connection = self.listener.accept(cancel, Some(Duration::ZERO), HELLO_TIMEOUT)?;
        let mut control = Channel::new(connection);
        let refused = match Message::read(&mut control.reader)? {
            Message::Recover(recover) => match self.check(&recover) {
                Ok(()) => {
                    self.attempt = recover.attempt;
                    control.connection.set_stall_timeout(self.stall);
                    return Ok(Returned { control, recover });
                }
                Err(reason) => reason,
            },
            _ => "a VM is here already, and pages of it are still to come from where it was",
        };
        control.refuse(refused);
        Err(Cause::Refused(refused.to_string()))
    }

    /// A source that has connected and asks to go on.
    ///
    /// # Errors
    /// It is not this migration's; with the connection, to say why.
    pub(super) fn admit(
        &mut self,
        control: Channel,
        recover: Recover,
    ) -> Result<Returned, (&'static str, Channel)> {
        match self.check(&recover) {
            Ok(()) => {
                self.attempt = recover.attempt;
                control.connection.set_stall_timeout(self.stall);
                Ok(Returned { control, recover })
            }
            Err(reason) => Err((reason, control)),
        }
    }

    fn check(&self, recover: &Recover) -> Result<(), &'static str> {
        if recover.id != self.id {
            return Err("this is another migration: the VM here did not come from there");
        }
        if recover.attempt <= self.attempt {
            return Err("this attempt to recover is older than one that was made already");
        }
        if recover.bulk == 0 || recover.bulk.max(recover.urgent) > CONNECTIONS_MAX {
            return Err("the numbers of connections make no sense");
        }
        Ok(())
    }

    /// Waits for the source to come back, until a deadline or for as long as it takes.
    ///
    /// # Errors
    /// When a person gives up, it is too late, or the engine has ended.
    pub(crate) fn wait(
        &mut self,
        ended: &Cancel,
        deadline: Option<Instant>,
    ) -> Result<Returned, Cause> {
        loop {
            if self.steering.gives_up() {
                return Err(Cause::Cancelled);
            }
            if let Some(steering::Recover::At(address)) = self.steering.take_recover() {
                match Listener::bind(&address) {
                    Ok(listener) => self.listener = Arc::new(listener),
                    Err(error) => log::error!("{}", error_text::chain(&error)),
                }
            }
            let fds = [self.listener.as_raw_fd()];
            let end = wait_readable(&fds, ended, Some(LOOK_EVERY));
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                return Err(Cause::Cancelled);
            }
            match end.map_err(Cause::Resource)? {
                WaitEnd::Cancelled => return Err(Cause::Cancelled),
                WaitEnd::TimedOut => {}
                WaitEnd::Ready(_) => {
                    if let Some(returned) = self.greet(ended) {
                        return Ok(returned);
                    }
                }
            }
        }
    }

    /// Takes all connections of a source that has come back, and tells it what is missing.
    pub(crate) fn connect(
        &self,
        returned: Returned,
        missing: impl FnOnce() -> Result<Vec<u8>, Cause>,
        cancel: &Cancel,
    ) -> Result<Connections, Failure> {
        const STEP: &str = "taking the connections of a recovery";
        let Returned { mut control, recover } = returned;
        let token = random_token().map_err(Cause::Resource).step(STEP)?;
        let answer = Answer::Ok { offer_taken: false, payload: token.to_vec() };
        control.connection.send(&answer.encode()).step(STEP)?;
        let deadline = Instant::now() + self.stall;
        let (mut bulk, mut urgent) = (Vec::new(), Vec::new());
        while bulk.len() < usize::from(recover.bulk) || urgent.len() < usize::from(recover.urgent) {
            let left = deadline.saturating_duration_since(Instant::now());
            let fds = [self.listener.as_raw_fd(), control.connection.as_raw_fd()];
            match wait_readable(&fds, cancel, Some(left)).map_err(Cause::Resource).step(STEP)? {
                WaitEnd::Cancelled => return Err(Cause::Cancelled).step(STEP),
                WaitEnd::TimedOut => {
                    return Err(TransportError::Timeout { what: STEP, after: self.stall })
                        .step(STEP);
                }
                WaitEnd::Ready(0) => match self.extra(&token, cancel) {
                    Ok((Role::Memory, channel)) => bulk.push(channel),
                    Ok((Role::Fault, channel)) => urgent.push(channel),
                    Err(cause) => {
                        let why = error_text::chain(&cause);
                        log::warn!("a connection during a recovery was turned away: {why}");
                    }
                },
                // Nothing is due on the first connection: it has ended.
                WaitEnd::Ready(_) => return Err(TransportError::Closed).step(STEP),
            }
        }
        const TELL: &str = "telling the source what is missing";
        control.tell(&Message::Pending(missing().step(TELL)?)).step(TELL)?;
        control.answer(self.stall).step(TELL)?;
        Ok(Connections { control, bulk, urgent })
    }

    fn extra(&self, token: &[u8; TOKEN_BYTES], cancel: &Cancel) -> Result<(Role, Channel), Cause> {
        let connection = self.listener.accept(cancel, Some(Duration::ZERO), HELLO_TIMEOUT)?;
        let mut channel = Channel::new(connection);
        let role = Role::read(&mut channel.reader)?;
        let mut shown = [0; TOKEN_BYTES];
        channel.reader.read_exact(&mut shown)?;
        if shown != *token {
            return Err(ProtocolError::Token.into());
        }
        channel.yes()?;
        channel.connection.set_stall_timeout(self.stall);
        Ok((role, channel))
    }
}
