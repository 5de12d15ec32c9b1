// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reconnection of the source of a postcopy after its connections were lost.
//!
//! Owns the listening address, and the proof that it is the same migration: the token that was agreed at the
//! start, and an attempt number that grows. Other peers are refused with a reason. It changes no page state
//! before all connections are established.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::arrivals::{Arrivals, Expect, Hello};
use super::late_reconnects::{EndedMigration, LateReconnects, is_past};
use super::negotiate::random_token;
use super::refusals;
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::options::{CONNECTIONS_MAX, URGENT_CONNECTIONS_MAX};
use crate::protocol::ProtocolError;
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::protocol::message::{Answer, Message, Recover, Role};
use crate::session::ALIVE_EVERY;
use crate::steering::{self, LOOK_EVERY, Steering};
use crate::transport::{Connection, Listener, TransportError, WaitEnd, wait_readable};

/// How long a connection may take to send its first message.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(2);

/// Identity, address and limits of a migration whose source may reconnect.
#[derive(Clone)]
pub(crate) struct Rejoin {
    /// The address at which the source reconnects.
    pub listener: Arc<Listener>,
    /// The token of the migration.
    pub id: [u8; TOKEN_BYTES],
    /// Number of the last attempt that was accepted.
    pub attempt: u32,
    /// Longest silence of the source.
    pub stall: Duration,
    pub steering: Steering,
    /// How long a source that does not know the outcome may reconnect and is told.
    pub reconnect_window: Duration,
    pub late_reconnects: LateReconnects,
    /// Ended migrations whose sources may still ask.
    pub ended: Vec<EndedMigration>,
}

/// A reconnected source that has proved that it belongs to this migration.
pub(crate) struct Returned {
    control: Channel,
    recover: Recover,
}

impl Returned {
    /// The first connection.
    pub(super) fn connection(&self) -> Arc<Connection> {
        Arc::clone(&self.control.connection)
    }
}

/// A new set of connections, over which the missing pages have been listed.
pub(crate) struct Connections {
    pub control: Channel,
    pub bulk: Vec<Channel>,
    pub urgent: Vec<Channel>,
}

impl Rejoin {
    /// Accepts connections while no set of connections is being set up.
    pub(super) fn arrivals(&self) -> Arrivals {
        Arrivals::new(Expect::Message, self.stall)
    }

    /// Takes the connections that have arrived, without blocking. If several prove to be the source, the
    /// last one counts: the source has abandoned its earlier attempts.
    pub(super) fn meet(&mut self, arrivals: &mut Arrivals, cancel: &Cancel) -> Option<Returned> {
        let mut returned = None;
        for hello in arrivals.take(&self.listener, cancel) {
            let (reason, channel) = match hello {
                Hello::Message(Message::Recover(recover), control)
                    if is_past(&self.ended, &recover.id) =>
                {
                    arrivals.dismiss(control, &Answer::ok());
                    continue;
                }
                Hello::Message(Message::Recover(recover), control) => {
                    match self.admit(control, recover) {
                        Ok(source) => {
                            returned = Some(source);
                            continue;
                        }
                        Err(refused) => refused,
                    }
                }
                Hello::Other(channel)
                | Hello::Message(_, channel)
                | Hello::Extra(_, _, channel) => (refusals::PAGES_TO_COME, channel),
            };
            arrivals.refuse(channel, reason);
        }
        returned
    }

    /// Checks a connected source that asks to continue.
    ///
    /// # Errors
    /// When it does not belong to this migration: the connection and the reason to send.
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
            return Err("this is another migration: the VM here has another source");
        }
        if recover.attempt <= self.attempt {
            return Err("this attempt to recover is older than an earlier one");
        }
        if !(1..=CONNECTIONS_MAX).contains(&recover.bulk) || recover.urgent > URGENT_CONNECTIONS_MAX
        {
            return Err("the numbers of connections are not valid");
        }
        Ok(())
    }

    /// Waits for the source to reconnect, until the deadline or without limit.
    ///
    /// # Errors
    /// When the operator abandons the migration, the deadline has passed, or the engine has ended.
    pub(crate) fn wait(
        &mut self,
        ended: &Cancel,
        deadline: Option<Instant>,
    ) -> Result<Returned, Cause> {
        let mut arrivals = self.arrivals();
        loop {
            if self.steering.is_abandoned() {
                return Err(Cause::Cancelled);
            }
            if let Some(steering::Recover::At(address)) = self.steering.take_recover() {
                match Listener::bind_unless(&address, ended) {
                    Ok(listener) => {
                        let tls = self.listener.tls().cloned();
                        self.listener = Arc::new(listener.with_tls(tls));
                    }
                    Err(error) => log::error!("{}", error_text::chain(&error)),
                }
            }
            let mut fds = Vec::new();
            arrivals.add_fds(&self.listener, &mut fds);
            let end = wait_readable(&fds, ended, Some(LOOK_EVERY));
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                return Err(Cause::Cancelled);
            }
            match end {
                Ok(WaitEnd::Cancelled) => return Err(Cause::Cancelled),
                Ok(WaitEnd::TimedOut | WaitEnd::Ready(_)) => {}
                Err(error) => {
                    // The host lacks a resource now; the guest waits, and so does this thread.
                    log::warn!("cannot wait for the source: {error}");
                    std::thread::sleep(LOOK_EVERY);
                }
            }
            if let Some(returned) = self.meet(&mut arrivals, ended) {
                return Ok(returned);
            }
        }
    }

    /// Accepts all connections of a reconnected source, and tells it which pages are missing. The
    /// connections may come in any order and at the same time; the wait ends when none has joined for as
    /// long as a peer may be silent.
    pub(crate) fn connect(
        &self,
        returned: Returned,
        missing: impl FnOnce() -> Result<Vec<u8>, Cause>,
        cancel: &Cancel,
    ) -> Result<Connections, Failure> {
        const STEP: &str = "accepting the connections of a recovery";
        let Returned { mut control, recover } = returned;
        let token = random_token().map_err(Cause::Resource).step(STEP)?;
        let answer = Answer::Ok { offer_taken: recover.alive, payload: token.to_vec() };
        control.connection.send(&answer.encode()).step(STEP)?;
        let mut arrivals = Arrivals::new(Expect::RoleAndToken, self.stall);
        let (mut joined, mut told) = (Instant::now(), Instant::now());
        let (bulk_count, urgent_count) = (usize::from(recover.bulk), usize::from(recover.urgent));
        let (mut bulk, mut urgent) = (Vec::new(), Vec::new());
        while bulk.len() < bulk_count || urgent.len() < urgent_count {
            if joined.elapsed() > self.stall {
                return Err(TransportError::Timeout { what: STEP, after: self.stall }).step(STEP);
            }
            if recover.alive && told.elapsed() >= ALIVE_EVERY.min(self.stall / 3) {
                control.connection.send(&Message::Alive.encode()).step(STEP)?;
                told = Instant::now();
            }
            let mut fds = vec![control.connection.as_raw_fd()];
            arrivals.add_fds(&self.listener, &mut fds);
            match wait_readable(&fds, cancel, Some(LOOK_EVERY))
                .map_err(Cause::Resource)
                .step(STEP)?
            {
                WaitEnd::Cancelled => return Err(Cause::Cancelled).step(STEP),
                WaitEnd::Ready(0) if matches!(control.has_data(), Ok(false)) => {}
                // No message is expected on the first connection, so data means that it has ended.
                WaitEnd::Ready(0) => return Err(TransportError::Closed).step(STEP),
                WaitEnd::Ready(_) | WaitEnd::TimedOut => {}
            }
            for hello in arrivals.take(&self.listener, cancel) {
                let (set, count, channel) = match hello {
                    Hello::Extra(Role::Memory, shown, channel) if shown == token => {
                        (&mut bulk, bulk_count, channel)
                    }
                    Hello::Extra(Role::Fault, shown, channel) if shown == token => {
                        (&mut urgent, urgent_count, channel)
                    }
                    Hello::Message(Message::Start { .. } | Message::Check, channel) => {
                        arrivals.refuse(channel, refusals::PAGES_TO_COME);
                        continue;
                    }
                    Hello::Extra(_, _, channel)
                    | Hello::Message(_, channel)
                    | Hello::Other(channel) => {
                        arrivals.refuse(channel, &ProtocolError::Token.to_string());
                        continue;
                    }
                };
                if set.len() < count && channel.yes().is_ok() {
                    channel.connection.set_stall_timeout(self.stall);
                    set.push(channel);
                    joined = Instant::now();
                }
            }
        }
        const TELL: &str = "telling the source what is missing";
        let missing = control.busy(recover.alive, missing).step(TELL)?;
        control.tell(&Message::Pending(missing)).step(TELL)?;
        if recover.alive {
            control.answer_of_busy(self.stall).step(TELL)?;
        } else {
            control.answer(self.stall).step(TELL)?;
        }
        Ok(Connections { control, bulk, urgent })
    }
}

#[cfg(all(test, not(loom)))]
#[path = "rejoin_tests.rs"]
mod tests;
