// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reconnection by the source of a postcopy.
//!
//! Owns the attempts, which begin soon and continue at growing intervals: automatic for a stated time, and at
//! the operator's request after that. It holds no guest and cannot run one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Server;
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::descriptors;
use crate::error::{Cause, Failure, Step};
use crate::opening::Opening;
use crate::options::{Limits, MemoryMode, SendOptions};
use crate::poll_thread::poll_while;
use crate::progress::Phase;
use crate::protocol::ProtocolError;
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::protocol::message::{Message, Recover, Role};
use crate::ram::GuestMemoryMap;
use crate::session::Session;
use crate::steering::{self, LOOK_EVERY, Steering};
use crate::transport::{Address, ClientTls, Connection};

/// Pause before the first attempt: the destination may not have noticed the loss yet.
const PAUSE_FIRST: Duration = Duration::from_millis(50);

/// Longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Parameters for reconnecting.
pub(crate) struct Reconnect {
    /// Address of the destination.
    pub to: Address,
    /// Certificates, if the destination uses TLS.
    pub tls: Option<ClientTls>,
    /// The token of the migration.
    pub id: [u8; TOKEN_BYTES],
    pub bulk: u16,
    pub urgent: u16,
    /// Numbers of connections at the start of the migration.
    counts: (u16, u16),
    /// How long to reconnect without a request.
    pub timeout: Duration,
    pub limits: Limits,
    pub steering: Steering,
    attempt: u32,
}

/// A new set of connections.
pub(crate) struct Connections {
    pub control: Channel,
    pub bulk: Vec<Channel>,
    pub urgent: Vec<Channel>,
}

impl Reconnect {
    pub(crate) fn new(
        options: &SendOptions,
        id: [u8; TOKEN_BYTES],
        bulk: usize,
        urgent: usize,
    ) -> Self {
        let count = |count| u16::try_from(count).unwrap_or(u16::MAX);
        Self {
            to: options.to.clone(),
            tls: options.tls.clone(),
            id,
            bulk: count(bulk),
            urgent: count(urgent),
            counts: (count(bulk), count(urgent)),
            timeout: options.recover_timeout,
            limits: Limits { answer: options.limits.stall, ..options.limits },
            steering: options.steering.clone(),
            attempt: 0,
        }
    }

    /// Retries until a new set of connections, and the resources for its threads, are there, and the pending
    /// pages are known; `None` when the destination turns out to have every page.
    ///
    /// # Errors
    /// When the operator abandons the migration.
    pub(super) fn until_connected<M: GuestMemoryMap>(
        &mut self,
        server: &Arc<Server<M>>,
    ) -> Result<Option<(Session, Connections)>, Failure> {
        const STEP: &str = "connecting again";
        let since = Instant::now();
        let mut pause = PAUSE_FIRST;
        server.progress.reconnects_until(since.checked_add(self.timeout));
        loop {
            self.wait(since, pause).step(STEP)?;
            pause = (pause * 2).min(PAUSE_MAX);
            // A host that lacks descriptors now may have some at the next attempt.
            let mut attempt = || {
                let session = Session::new()?;
                Ok(self.connect(server)?.map(|connections| (session, connections)))
            };
            let failure: Failure = match attempt() {
                Ok(connected) => {
                    server.progress.reconnects_until(None);
                    return Ok(connected);
                }
                Err(failure) => failure,
            };
            log::warn!("postcopy does not continue yet: {}", failure.for_peer());
            server.progress.cannot_recover(failure.for_peer());
            if server.progress.phase() != Phase::PostcopyPaused {
                server.progress.enter(Phase::PostcopyPaused);
            }
        }
    }

    /// Waits until the next attempt is due.
    fn wait(&mut self, since: Instant, pause: Duration) -> Result<(), Cause> {
        let next = Instant::now() + pause;
        loop {
            if self.steering.is_abandoned() {
                return Err(Cause::Cancelled);
            }
            if let Some((recover, connections_max)) = self.steering.take_recovery() {
                if let steering::Recover::At(address) = recover {
                    self.to = address;
                }
                if let Some(max) = connections_max {
                    let (bulk, urgent) = self.counts;
                    (self.bulk, self.urgent) = (bulk.min(max.max(1)), urgent.min(max));
                }
                return Ok(());
            }
            let left = next.saturating_duration_since(Instant::now());
            let in_time = since.elapsed() < self.timeout;
            if in_time && left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(if in_time { left.min(LOOK_EVERY) } else { LOOK_EVERY });
        }
    }

    /// Reserves the number of the next attempt for another process.
    pub(super) fn reserve_attempt(&mut self) -> u32 {
        self.attempt += 1;
        self.attempt
    }

    /// Continues with this number for the next attempt.
    pub(super) fn next_attempt_is(&mut self, attempt: u32) {
        self.attempt = attempt.saturating_sub(1);
    }

    /// Makes one attempt; `None` when the destination turns out to have every page.
    ///
    /// # Errors
    /// When it fails, or the operator abandons the migration.
    pub(super) fn connect<M: GuestMemoryMap>(
        &mut self,
        server: &Arc<Server<M>>,
    ) -> Result<Option<Connections>, Failure> {
        const STEP: &str = "connecting again";
        let abandoned = Cancel::new().map_err(Cause::Resource).step(STEP)?;
        let steering = self.steering.clone();
        let look = || {
            if steering.is_abandoned() {
                abandoned.cancel();
            }
        };
        let connected = poll_while(look, || self.connect_until(&abandoned, server));
        connected.map_err(Cause::Resource).step(STEP)?
    }

    fn connect_until<M: GuestMemoryMap>(
        &mut self,
        abandoned: &Cancel,
        server: &Arc<Server<M>>,
    ) -> Result<Option<Connections>, Failure> {
        const STEP: &str = "connecting again";
        let (limits, tls) = (&self.limits, self.tls.as_ref());
        let connection =
            Connection::connect_secured(&self.to, tls, abandoned, limits.connect, limits.answer)
                .step(STEP)?;
        let mut control = Channel::new(connection);
        self.attempt += 1;
        let Self { id, attempt, .. } = *self;
        let wanted = (self.bulk, self.urgent);
        let all = wanted.0.saturating_add(wanted.1);
        let room = descriptors::room(all);
        let (bulk, urgent) =
            descriptors::fewer_telling(wanted, room, MemoryMode::Postcopy, descriptors::FEW_HERE);
        let recover = Message::Recover(Recover { id, attempt, bulk, urgent, alive: true });
        let answer = control.ask(&recover, limits.answer).step("asking to continue")?;
        if answer.payload.is_empty() {
            return Ok(None);
        }
        server.progress.enter(Phase::PostcopyRecover);
        let alive = answer.offer_taken;
        let token: [u8; TOKEN_BYTES] = answer
            .payload
            .try_into()
            .map_err(|_| ProtocolError::Malformed { what: "token", why: "it has another length" })
            .step("asking to continue")?;
        let beside = &*control.connection;
        let opening =
            Opening { to: &self.to, beside, token: Some(&token), cancel: abandoned, limits };
        let mut roles = vec![Role::Memory; bulk.into()];
        roles.resize(usize::from(bulk) + usize::from(urgent), Role::Fault);
        let mut bulk_channels = opening.all(&roles).step("opening further connections")?;
        let urgent = bulk_channels.split_off(bulk.into());
        let missing = hear_missing(&mut control, limits.answer)?;
        const HEAR: &str = "receiving the set of missing pages";
        control.busy(alive, || server.pend(&missing)).step(HEAR)?;
        control.yes().step(HEAR)?;
        Ok(Some(Connections { control, bulk: bulk_channels, urgent }))
    }
}

/// Waits for the list of missing pages, as long as the destination sends keep-alives; abandoning the
/// migration ends the wait.
fn hear_missing(control: &mut Channel, limit: Duration) -> Result<Vec<u8>, Failure> {
    const STEP: &str = "receiving the set of missing pages";
    loop {
        if !control.reader.has_buffered() {
            control.connection.wait_for_data(Some(limit)).step(STEP)?;
        }
        match control.timed(Message::read).step(STEP)? {
            Message::Pending(missing) => return Ok(missing),
            Message::Alive => {}
            other => {
                let got = other.command().name();
                return Err(ProtocolError::Unexpected { got, expected: "Pending" }).step(STEP);
            }
        }
    }
}
