// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fault: the guest runs here and its pages arrive, pushed and on request.
//!
//! Owns the threads around the engine: one reader for each queue of faults, one receiver for each
//! connection. Requests are pipelined: a reader asks for all faults of one read in one message and
//! never waits for an answer. When a connection is lost everything stays as it is
//! ([`PostcopyPaused`]): vCPUs that need a missing page wait, the others go on.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::engine::{Engine, Via};
use super::negotiate::unexpected;
use crate::channel::Channel;
use crate::error::{Cause, Failure, GuestIs, MigrationError, Side, Step};
use crate::fault::FaultWait;
use crate::progress::{Phase, Snapshot};
use crate::protocol::message::{Answer, Message};
use crate::ram::GuestMemoryMap;
use crate::report::FailureReport;
use crate::transport::{Connection, WaitEnd, wait_readable};

/// The sending end of an urgent connection; several readers may share one. Held for one message.
type Asker = Arc<Mutex<Arc<Connection>>>;

/// The engine and its threads. Dropping stops the threads; the waiters of missing pages are let
/// go, so the guest must be gone by then, or complete.
pub(crate) struct FaultThreads<M: GuestMemoryMap> {
    engine: Arc<Engine<M>>,
    threads: Vec<JoinHandle<()>>,
}

impl<M: GuestMemoryMap> FaultThreads<M> {
    /// Starts everybody.
    pub(crate) fn start(
        engine: Arc<Engine<M>>,
        bulk: Vec<Channel>,
        urgent: Vec<Channel>,
    ) -> Result<Self, Failure> {
        let mut all = Self { engine, threads: Vec::new() };
        let mut askers = Vec::new();
        let channels = bulk.into_iter().map(|channel| (Via::Bulk, channel));
        let channels = channels.chain(urgent.into_iter().map(|channel| (Via::Urgent, channel)));
        for (via, channel) in channels {
            channel.connection.set_cancel(all.engine.failed());
            if via == Via::Urgent {
                askers.push(Arc::new(Mutex::new(Arc::clone(&channel.connection))));
            }
            all.spawn("mig-pages", channel, move |engine, channel| {
                take_pages(engine, channel, via)
            })?;
        }
        for reader in 0..all.engine.source().readers() {
            let asker: Asker = Arc::clone(&askers[reader % askers.len()]);
            all.spawn("mig-faults", asker, move |engine, asker| {
                ask_for_faults(engine, reader, asker)
            })?;
        }
        Ok(all)
    }

    /// Starts a thread that owns a connection. What goes wrong is noted before the peer can see
    /// the connection end.
    fn spawn<C: Send + 'static>(
        &mut self,
        name: &str,
        mut connection: C,
        work: impl FnOnce(&Engine<M>, &mut C) -> Result<(), Failure> + Send + 'static,
    ) -> Result<(), Failure> {
        let engine = Arc::clone(&self.engine);
        let body = move || {
            let work = std::panic::AssertUnwindSafe(|| work(&engine, &mut connection));
            let result = std::panic::catch_unwind(work)
                .unwrap_or(Err(Failure::new("receiving pages", Cause::Panicked)));
            if let Err(failure) = result {
                engine.fail(failure);
            }
            drop(connection);
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(body);
        self.threads.push(thread.map_err(Cause::Resource).step("starting a page thread")?);
        Ok(())
    }

    /// See [`Engine::commit`].
    pub(crate) fn commit(&self) -> Result<(), Failure> {
        self.engine.commit()
    }

    pub(crate) fn take_failure(&self) -> Option<Failure> {
        self.engine.take_failure()
    }
}

impl<M: GuestMemoryMap> Drop for FaultThreads<M> {
    fn drop(&mut self) {
        self.engine.failed().cancel();
        self.engine.source().stop_readers();
        for thread in self.threads.drain(..) {
            // A panic has been noted as a failure already.
            let _ = thread.join();
        }
    }
}

/// Takes pages off a connection until it ends or all is over.
fn take_pages<M: GuestMemoryMap>(
    engine: &Engine<M>,
    channel: &mut Channel,
    via: Via,
) -> Result<(), Failure> {
    const STEP: &str = "receiving pages";
    loop {
        if !channel.reader.has_buffered() {
            channel.connection.wait_for_data(None).step(STEP)?;
        }
        match Message::read(&mut channel.reader).step(STEP)? {
            Message::Memory(ranges) => {
                engine.take_contents(&mut channel.reader, &ranges, via).step(STEP)?;
            }
            Message::ZeroPages(ranges) => engine.take_zeros(&ranges, via).step(STEP)?,
            Message::Elsewhere(ranges) if via == Via::Urgent => {
                engine.take_elsewhere(&ranges).step(STEP)?;
            }
            other => return Err(unexpected(&other, "Memory or ZeroPages")),
        }
    }
}

/// Reads faults of one queue and asks for their pages.
fn ask_for_faults<M: GuestMemoryMap>(
    engine: &Engine<M>,
    reader: usize,
    asker: &Asker,
) -> Result<(), Failure> {
    const STEP: &str = "asking for pages";
    let mut faults = Vec::new();
    loop {
        faults.clear();
        match engine.source().next_faults(reader, &mut faults).step(STEP)? {
            FaultWait::Stopped => return Ok(()),
            FaultWait::Faults => {}
        }
        let ask = engine.take_faults(&faults).step(STEP)?;
        if !ask.is_empty() {
            let bytes = Message::PageFault(ask).encode();
            let connection = asker.lock().unwrap_or_else(PoisonError::into_inner);
            connection.send(&bytes).step(STEP)?;
        }
    }
}

/// The guest runs here and its pages arrive.
pub struct Faulting<M: GuestMemoryMap> {
    threads: FaultThreads<M>,
    control: Channel,
    began: Instant,
}

/// Postcopy that lost its source: vCPUs wait for their pages.
///
/// Dropping this value lets the waiters see zeros where contents are missing, so end the guest
/// before.
pub struct PostcopyPaused<M: GuestMemoryMap> {
    /// What happened.
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

impl<M: GuestMemoryMap> Faulting<M> {
    pub(crate) fn new(threads: FaultThreads<M>, control: Channel) -> Self {
        Self { threads, control, began: Instant::now() }
    }

    /// The phase begins; it ends in [`wait`](Self::wait).
    pub(crate) fn begin(&mut self) {
        self.began = Instant::now();
        self.threads.engine.progress().begin_long(Phase::Fault);
    }

    /// Waits until every page is here, and tells the source.
    ///
    /// # Errors
    /// When the source is lost: the guest waits where it needs a missing page, and both sides keep
    /// what they have.
    pub fn wait(mut self) -> Result<Snapshot, Box<PostcopyPaused<M>>> {
        let engine = Arc::clone(&self.threads.engine);
        let result = self.wait_until_complete();
        let progress = engine.progress();
        progress.end_long(Phase::Fault, self.began.elapsed(), result.is_ok());
        match result {
            Ok(()) => {
                progress.finish(Phase::Done);
                Ok(progress.snapshot())
            }
            Err(Failure { step, cause }) => {
                let error = MigrationError {
                    side: Side::Destination,
                    phase: Phase::Fault,
                    step,
                    guest: GuestIs::PostcopyPaused,
                    cause,
                };
                progress.fail(Phase::PostcopyPaused, FailureReport::new(&error));
                Err(Box::new(PostcopyPaused { error, faulting: self }))
            }
        }
    }

    fn wait_until_complete(&mut self) -> Result<(), Failure> {
        const STEP: &str = "waiting for the last page";
        let engine = &self.threads.engine;
        // The first descriptor wins: with everything here, a failure does not matter any more.
        let end = wait_readable(&[engine.complete().fd()], engine.failed(), None);
        let end = end.map_err(Cause::Resource).step(STEP)?;
        if end == WaitEnd::Cancelled && !engine.complete().is_cancelled() {
            let lost = || Failure::new(STEP, Cause::Cancelled);
            return Err(engine.take_failure().unwrap_or_else(lost));
        }
        engine.source().release().step("leaving postcopy")?;
        // The guest is complete: what happens to the connection now cannot hurt it.
        if let Err(cause) = self.say_done() {
            let why = crate::error::chain(&cause);
            log::warn!("the source could not be told that all pages are here: {why}");
        }
        Ok(())
    }

    fn say_done(&mut self) -> Result<(), Cause> {
        self.control.connection.send(&Message::PostcopyDone.encode())?;
        match Answer::read(&mut self.control.reader)? {
            Answer::Ok { .. } => Ok(()),
            Answer::Error { reason } => Err(Cause::Refused(reason)),
        }
    }
}
