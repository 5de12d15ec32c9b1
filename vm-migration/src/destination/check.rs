// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks of a migration: what it would fail with here, answered while a source is awaited.
//!
//! Owns the few checks that are answered at a time, each on a thread of its own, so that neither a peer that stalls nor storage
//! that does not respond delays the source. They end with the wait: what is left of them holds nothing that a machine needs.
//! Must never end the wait, whatever the peer sends.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Context;
use super::negotiate::{random_token, read, refusals, unexpected};
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::protocol::ProtocolError;
use crate::protocol::capabilities::{Accepted, features, millis, software};
use crate::protocol::check::{CHECK_TRANSFER_BYTES_MAX, CheckFindings, CheckRequest};
use crate::protocol::formats::Formats;
use crate::protocol::message::{Answer, Message};
use crate::protocol::runs;
use crate::transport::TransportError;
use crate::vm::{ArrivalCheck, AskedMigration};

/// How long a check may take in total, without the finding of what is lacking: a peer that sends a little now and then keeps
/// others from asking.
const TIME_MAX: Duration = Duration::from_secs(30);

/// Most checks that are answered at a time. One whose peer has left may not have noticed yet when the next comes.
pub(crate) const RUNNING_MAX: usize = 4;

/// A check that is being answered.
struct Running {
    cancel: Cancel,
    thread: JoinHandle<()>,
}

/// Answers checks while a source is awaited.
pub(super) struct Checks {
    check: Option<Arc<dyn ArrivalCheck>>,
    known: Formats,
    rejoin: Duration,
    answer: Duration,
    running: Vec<Running>,
}

impl Checks {
    pub(super) fn new(
        check: Option<Arc<dyn ArrivalCheck>>,
        known: Formats,
        context: Context<'_>,
    ) -> Self {
        let limits = &context.options.limits;
        Self { check, known, rejoin: limits.rejoin, answer: limits.answer, running: Vec::new() }
    }

    /// Answers the check that a connection has begun.
    ///
    /// # Errors
    /// The connection, and why it is refused.
    pub(super) fn begin(&mut self, control: Channel) -> Result<(), (Channel, &'static str)> {
        let Some(check) = self.check.clone() else {
            return Err((control, "this destination answers no checks"));
        };
        self.running.retain(|running| !running.thread.is_finished());
        if self.running.len() >= RUNNING_MAX {
            return Err((
                control,
                "other checks are being answered here; try again when they are over",
            ));
        }
        let Ok(cancel) = Cancel::new() else {
            return Err((control, "the host has no descriptor for a check"));
        };
        control.connection.set_cancel(&cancel);
        control.connection.set_stall_timeout(self.answer);
        let answering = Answering { control, check, known: self.known, rejoin: self.rejoin };
        match stoppable_thread::spawn("mig-check", move || answering.run()) {
            Ok(thread) => self.running.push(Running { cancel, thread }),
            // The connection was dropped with what was to answer it.
            Err(error) => log::warn!("a check of a migration is not answered: {error}"),
        }
        Ok(())
    }
}

impl Drop for Checks {
    fn drop(&mut self) {
        self.running.iter().for_each(|running| running.cancel.cancel());
    }
}

/// The answer to one check.
struct Answering {
    control: Channel,
    check: Arc<dyn ArrivalCheck>,
    known: Formats,
    rejoin: Duration,
}

impl Answering {
    fn run(mut self) {
        match self.answer() {
            Ok(()) => {}
            Err(Failure { cause: Cause::Transport(TransportError::Closed), .. }) => {
                log::info!("the check of a migration ended before it was over");
            }
            Err(Failure { cause: Cause::Cancelled, .. }) => {
                self.control.refuse("the destination does not wait for a migration any more");
            }
            Err(failure) => {
                log::warn!("a check of a migration ended {}", failure.for_peer());
                if failure.peer_listens() {
                    self.control.refuse(&failure.for_peer());
                }
            }
        }
    }

    fn answer(&mut self) -> Result<(), Failure> {
        const STEP: &str = "answering a check of a migration";
        let token = random_token().map_err(Cause::Resource).step(STEP)?;
        let accepted = Accepted {
            connections_max: None,
            software: software(),
            features: features(),
            token,
            promise_ms: Some(millis(self.rejoin)),
            formats: self.known,
        };
        self.send(&Answer::Ok { offer_taken: true, payload: accepted.to_json() })?;
        let request = match read(&mut self.control, "waiting for what a check is about")? {
            Message::Capabilities(json) => CheckRequest::parse(&json).step(STEP)?,
            other => return Err(unexpected(&other, "Capabilities")),
        };
        log::info!("{:?} checks a migration to here", request.offer.software);
        let layout = request.offer.layout().step(STEP)?;
        self.send(&Answer::ok())?;
        let config = match read(&mut self.control, "waiting for the configuration")? {
            Message::Config(config) => config,
            other => return Err(unexpected(&other, "Config")),
        };
        let is_unix = self.control.connection.is_unix();
        let mut found = refusals(&request.offer, &layout, self.known, is_unix);
        if request.offer.memory_mode.may_postcopy() {
            found.extend(runs::check_fits(&layout).step(STEP).err());
        }
        let text = |failure: &Failure| error_text::chain(&failure.cause);
        let mut problems: Vec<String> = found.iter().map(text).collect();
        let asked = AskedMigration {
            mode: request.offer.memory_mode,
            local: request.offer.local,
            move_bytes: request.move_bytes,
        };
        let CheckFindings { problems: more, warnings } =
            self.control.busy(true, || self.check.findings(&config, asked));
        problems.extend(more);
        log::info!("the check found {} problems, {} warnings", problems.len(), warnings.len());
        let payload = CheckFindings { problems, warnings }.to_json();
        self.send(&Answer::Ok { offer_taken: false, payload })?;
        self.take_bytes()
    }

    fn send(&self, answer: &Answer) -> Result<(), Failure> {
        self.control.connection.send(&answer.encode()).step("answering a check of a migration")
    }

    /// Discards the bytes that measure the link, until the source has enough.
    fn take_bytes(&mut self) -> Result<(), Failure> {
        const STEP: &str = "taking bytes that measure the link";
        let began = Instant::now();
        let mut taken = 0;
        loop {
            let bytes = match read(&mut self.control, STEP) {
                Ok(Message::CheckBytes(bytes)) => bytes.len() as u64,
                Ok(other) => return Err(unexpected(&other, "CheckBytes")),
                Err(Failure { cause: Cause::Transport(TransportError::Closed), .. }) => {
                    log::info!("the check of a migration is over");
                    return Ok(());
                }
                Err(failure) => return Err(failure),
            };
            taken += bytes.max(1);
            if taken > CHECK_TRANSFER_BYTES_MAX || began.elapsed() > TIME_MAX {
                let why = "it does not end";
                return Err(ProtocolError::Malformed { what: "check", why }).step(STEP);
            }
            self.control.yes().step(STEP)?;
        }
    }
}
