// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fault: the guest runs here and its pages arrive, pushed and on request.
//!
//! Owns the phase: it watches the connections, and when they are lost or stall it keeps all page state
//! as it is (vCPUs that need a missing page wait, the others continue) until the source reconnects,
//! however often that happens.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fault::FaultThreads;
use super::rejoin::Returned;
use crate::channel::Channel;
use crate::error::{Cause, Failure, GuestLocation, MigrationError, Side, Step};
use crate::progress::{Phase, Progress, ProgressDocument};
use crate::protocol::message::{Answer, Message};
use crate::ram::GuestMemoryMap;
use crate::report::FailureReport;
use crate::session::{ALIVE_EVERY, Rates};
use crate::steering::LOOK_EVERY;
use crate::transport::{TransportError, WaitEnd, wait_readable};

const STEP: &str = "waiting for the last page";

/// The guest runs here and its pages arrive.
pub struct Faulting<M: GuestMemoryMap> {
    threads: FaultThreads<M>,
    control: Channel,
    began: Instant,
    /// Unanswered messages on the first connection.
    unanswered: u32,
    /// The failure, if the connections were lost before the phase began.
    lost: Option<Failure>,
    /// The source accepts figures with the last message.
    tells_figures: bool,
}

/// A postcopy that will not continue: its vCPUs wait for their pages.
///
/// Dropping this value makes the waiters see zeros where contents are missing, so end the guest first.
pub struct PostcopyPaused<M: GuestMemoryMap> {
    /// The failure.
    pub error: MigrationError,
    faulting: Faulting<M>,
}

impl<M: GuestMemoryMap> PostcopyPaused<M> {
    /// Pages of 4 KiB that have not arrived.
    pub fn missing_pages(&self) -> u64 {
        self.faulting.threads.engine.missing_pages()
    }
}

impl<M: GuestMemoryMap> std::fmt::Debug for PostcopyPaused<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostcopyPaused")
            .field("error", &self.error)
            .field("missing_pages", &self.missing_pages())
            .finish_non_exhaustive()
    }
}

/// How a set of connections ended.
enum End {
    /// Every page is here.
    Complete,
    /// Lost. The source may have noticed first and have reconnected already.
    Lost(Failure, Option<Box<Returned>>),
}

impl<M: GuestMemoryMap> Faulting<M> {
    /// With connections, or with the failure of those that were lost.
    pub(crate) fn new(
        threads: FaultThreads<M>,
        control: Channel,
        lost: Option<Failure>,
        tells_figures: bool,
    ) -> Self {
        Self { threads, control, began: Instant::now(), unanswered: 0, lost, tells_figures }
    }

    /// Begins the phase; it ends in [`wait`](Self::wait).
    pub(crate) fn begin(&mut self) {
        self.began = Instant::now();
        self.threads.dismiss_parked();
        self.threads.engine.progress().begin_long(Phase::Fault);
    }

    /// Waits until every page is here, and tells the source. The source re-establishes lost connections;
    /// until then the guest waits where it needs a missing page.
    ///
    /// # Errors
    /// When this host cannot continue, or the operator has abandoned the migration: both sides keep what
    /// they have.
    pub fn wait(mut self) -> Result<ProgressDocument, Box<PostcopyPaused<M>>> {
        let engine = Arc::clone(&self.threads.engine);
        let result = self.wait_until_complete();
        let progress = engine.progress();
        progress.end_long(Phase::Fault, self.began.elapsed(), result.is_ok());
        match result {
            Ok(()) => {
                // The guest is complete: the state of the connection does not matter to it any more.
                progress.all_pages_came();
                let said = self.say_done();
                if let Err(failure) = &said {
                    let why = failure.for_peer();
                    log::warn!("the source does not know that all pages are here: {why}");
                }
                self.threads.answer_late_reconnects(said.is_ok());
                progress.finish(Phase::Done);
                Ok(progress.snapshot())
            }
            Err(Failure { step, cause }) => {
                self.threads.answer_for_others();
                let error = MigrationError {
                    side: Side::Destination,
                    phase: Phase::Fault,
                    step,
                    guest: GuestLocation::PostcopyPaused,
                    cause,
                };
                progress.fail(Phase::PostcopyPaused, FailureReport::new(&error));
                Err(Box::new(PostcopyPaused { error, faulting: self }))
            }
        }
    }

    fn wait_until_complete(&mut self) -> Result<(), Failure> {
        if let Some(lost) = self.lost.take() {
            self.recover(&lost, None)?;
        }
        loop {
            match self.watch()? {
                End::Complete => break,
                End::Lost(failure, returned) => self.recover(&failure, returned)?,
            }
        }
        self.release()
    }

    /// Stops catching accesses once every page is here. When the host lacks a resource for that, the
    /// guest continues as before, and it is retried.
    fn release(&self) -> Result<(), Failure> {
        let engine = &self.threads.engine;
        let steering = &self.threads.rejoin.steering;
        engine.release(|| steering.is_abandoned()).step("leaving postcopy")?;
        engine.memory.use_small_pages(false);
        Ok(())
    }

    /// Watches a set of connections until every page is here, or the set is lost.
    fn watch(&mut self) -> Result<End, Failure> {
        let engine = Arc::clone(&self.threads.engine);
        let fate = Arc::clone(self.threads.session.fate());
        let stall = self.threads.rejoin.stall;
        self.control.connection.set_cancel(engine.failed());
        self.control.connection.set_stall_timeout(stall);
        self.unanswered = 0;
        let mut pulse = Pulse::new(engine.progress(), stall);
        let mut arrivals = self.threads.rejoin.arrivals();
        loop {
            if engine.complete().is_cancelled() {
                return Ok(End::Complete);
            }
            let mut fds =
                vec![engine.complete().fd(), fate.stop().fd(), self.control.connection.as_raw_fd()];
            arrivals.add_fds(&self.threads.rejoin.listener, &mut fds);
            let end = wait_readable(&fds, engine.failed(), Some(LOOK_EVERY));
            // A resource that the host lacks now may be available for another set of connections.
            let end = match end.map_err(Cause::Resource).step(STEP) {
                Ok(end) => end,
                Err(failure) => return Ok(End::Lost(failure, None)),
            };
            let lost = match end {
                WaitEnd::Cancelled if !engine.complete().is_cancelled() => {
                    let lost = || Failure::new(STEP, Cause::Cancelled);
                    return Err(engine.take_failure().unwrap_or_else(lost));
                }
                WaitEnd::Cancelled | WaitEnd::Ready(0) => None,
                WaitEnd::Ready(1) => {
                    let lost = || Failure::new(STEP, TransportError::Closed);
                    Some((fate.take_failure().unwrap_or_else(lost), None))
                }
                WaitEnd::Ready(2) if matches!(self.control.has_data(), Ok(false)) => None,
                WaitEnd::Ready(2) => self.take_answer().err().map(|failure| (failure, None)),
                WaitEnd::Ready(_) | WaitEnd::TimedOut => {
                    let returned = self.threads.rejoin.meet(&mut arrivals, engine.failed());
                    let lost = Failure::new(STEP, TransportError::Closed);
                    returned.map(|returned| (lost, Some(Box::new(returned))))
                }
            };
            let lost = lost.or_else(|| {
                let asked = pulse.beat(self, engine.longest_wait(), engine.progress());
                asked.err().map(|failure| (failure, None))
            });
            if engine.complete().is_cancelled() {
                return Ok(End::Complete);
            }
            if let Some((failure, returned)) = lost {
                return Ok(End::Lost(failure, returned));
            }
            if self.threads.rejoin.steering.is_abandoned() {
                return Err(Cause::Cancelled).step(STEP);
            }
        }
    }

    /// Takes one answer on the first connection.
    fn take_answer(&mut self) -> Result<Vec<u8>, Failure> {
        match self.control.timed(Answer::read).step(STEP)? {
            Answer::Ok { payload, .. } => {
                self.unanswered = self.unanswered.saturating_sub(1);
                Ok(payload)
            }
            Answer::Error { reason } => Err(Cause::Refused(reason)).step(STEP),
        }
    }

    /// Pauses postcopy until the source has reconnected.
    fn recover(&mut self, lost: &Failure, returned: Option<Box<Returned>>) -> Result<(), Failure> {
        let engine = Arc::clone(&self.threads.engine);
        let progress = Arc::clone(engine.progress());
        self.control.connection.shut_down();
        self.threads.disconnect();
        log::warn!("postcopy is paused: {}", lost.for_peer());
        progress.lost(lost.for_peer());
        let mut returned = returned;
        loop {
            if engine.complete().is_cancelled() {
                return Ok(());
            }
            let source = match returned.take() {
                Some(source) => *source,
                None => self
                    .threads
                    .rejoin
                    .wait(engine.failed(), None)
                    .step("waiting for the source")?,
            };
            progress.enter(Phase::PostcopyRecover);
            let joined = self.threads.take_over(source, engine.failed());
            match joined {
                Ok(control) => {
                    self.control = control;
                    log::info!("postcopy continues");
                    progress.recovered(Phase::Fault);
                    return Ok(());
                }
                Err(failure) => {
                    self.threads.disconnect();
                    log::warn!("postcopy does not continue yet: {}", failure.for_peer());
                    progress.cannot_recover(failure.for_peer());
                    progress.enter(Phase::PostcopyPaused);
                }
            }
        }
    }

    fn say_done(&mut self) -> Result<(), Failure> {
        let progress = Arc::clone(self.threads.engine.progress());
        let figures = if self.tells_figures { progress.figures().to_json() } else { Vec::new() };
        self.control.connection.send(&Message::PostcopyDone(figures).encode()).step(STEP)?;
        // The answers to earlier messages come first.
        self.unanswered += 1;
        while self.unanswered > 0 {
            let told = self.take_answer()?;
            progress.heard(&told);
        }
        Ok(())
    }
}

/// Asks the source periodically whether it is there, and detects that nothing moves.
struct Pulse {
    stall: Duration,
    asked: Instant,
    /// When something arrived last, and how much had arrived by then.
    moved: (Instant, u64),
    rates: Rates,
}

impl Pulse {
    fn new(progress: &Progress, stall: Duration) -> Self {
        let now = Instant::now();
        let moved = (now, progress.pages_come());
        Self { stall, asked: now, moved, rates: Rates::new(progress) }
    }

    fn beat<M: GuestMemoryMap>(
        &mut self,
        faulting: &mut Faulting<M>,
        longest_wait: Duration,
        progress: &Progress,
    ) -> Result<(), Failure> {
        let after = self.stall;
        let stalled = |what| Err(TransportError::Timeout { what, after }).step(STEP);
        self.rates.sample(progress);
        let moved = progress.pages_come();
        if moved != self.moved.1 {
            self.moved = (Instant::now(), moved);
        }
        if longest_wait > self.stall {
            return stalled("waiting for a requested page");
        }
        if self.moved.0.elapsed() > self.stall {
            return stalled("waiting for any page");
        }
        if faulting.unanswered > 0 {
            if self.asked.elapsed() > self.stall {
                return stalled("waiting for a sign of life");
            }
        } else if self.asked.elapsed() >= ALIVE_EVERY.min(self.stall / 3) {
            faulting.control.connection.send(&Message::Alive.encode()).step(STEP)?;
            faulting.unanswered += 1;
            self.asked = Instant::now();
        }
        Ok(())
    }
}
