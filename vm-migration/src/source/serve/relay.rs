// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Takeover of page serving by another process.
//!
//! Ensures that only one of the two processes connects. The source serves while its page server takes over: the
//! page server connects as after lost connections, and the source ends when the page server reports that it
//! serves. Without that report the source continues, with attempts of higher numbers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use page_bitmap::PageBitmap;

use super::reconnect::Reconnect;
use super::{End, Grain, Server};
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Failure, GuestLocation, MigrationError, Side, Step};
use crate::options::SendOptions;
use crate::page_server::{PageServerHandle, TakeoverOutcome, TakeoverRequest, Terms};
use crate::progress::{Event as ProgressEvent, Phase, Progress, ProgressDocument};
use crate::ram::GuestMemoryMap;
use crate::report::FailureReport;
use crate::session::Session;
use crate::source::Context;
use crate::steering::Steering;

/// Which process reconnects after a set of connections is lost.
pub(super) struct Relay {
    pub reconnect: Reconnect,
    /// The page server, if it has not been told to take over.
    pub page_server: Option<Box<dyn PageServerHandle>>,
}

impl<M: GuestMemoryMap> Server<M> {
    /// Watches a set of connections; if there is a page server, has it take over.
    pub(super) fn attend(
        &self,
        control: Channel,
        session: &Session,
        relay: &mut Relay,
        context: Context<'_>,
    ) -> Result<End, Failure> {
        let Some(page_server) = relay.page_server.take() else {
            return self.watch(control, session, context);
        };
        let takeover = self.takeover(&mut relay.reconnect);
        std::thread::scope(|scope| {
            let transfer = || self.transfer(page_server, &takeover, session);
            let transferring = stoppable_thread::spawn_scoped(scope, "mig-hand-on", transfer);
            let end = self.watch(control, session, context);
            match transferring {
                Ok(transferring) => match transferring.join() {
                    Ok(Some(TakeoverOutcome::Serving)) => Ok(End::HandedOn),
                    Ok(Some(TakeoverOutcome::Complete)) => Ok(End::Done),
                    Ok(None) | Err(_) => end,
                },
                Err(error) => {
                    self.takeover_failed(format!("there is no thread for it: {error}"));
                    end
                }
            }
        })
    }

    /// Has the page server take over; the set of connections ends then.
    fn transfer(
        &self,
        page_server: Box<dyn PageServerHandle>,
        takeover: &TakeoverRequest,
        session: &Session,
    ) -> Option<TakeoverOutcome> {
        let began = Instant::now();
        match page_server.take_over(takeover) {
            Ok(taken) => {
                self.progress.page_server.serves(began.elapsed());
                session.fate().stop().cancel();
                Some(taken)
            }
            // The last page arrived first: nothing was left to take over.
            Err(error) if self.is_done.load(Ordering::SeqCst) => {
                log::info!("the page server was not needed: {}", error_text::chain(&*error));
                None
            }
            Err(error) => {
                self.takeover_failed(error_text::chain(&*error));
                None
            }
        }
    }

    fn takeover_failed(&self, why: String) {
        log::error!("the page server has not taken over, this process continues: {why}");
        self.progress.page_server.failed(why);
        self.progress.tell(ProgressEvent::PageServerFailed);
    }

    /// The request for the page server, which gets the next attempt.
    fn takeover(&self, reconnect: &mut Reconnect) -> TakeoverRequest {
        let attempt = reconnect.reserve_attempt();
        let Reconnect { to, tls, id, bulk, urgent, timeout, limits, .. } = reconnect;
        let units = self.grains.iter().map(Grain::pages).collect();
        let terms = Terms { id: *id, attempt, bulk: *bulk, urgent: *urgent, units };
        TakeoverRequest::new(
            (to, tls.as_ref()),
            limits,
            *timeout,
            self.bandwidth_limit.bytes_per_s(),
            terms,
        )
    }
}

/// Serves the remaining pages of a guest in place of the process that had it, until the destination has every
/// page. `taken` is called once, with the outcome of the takeover.
///
/// # Errors
/// When the takeover failed, which was reported to `taken`; or the operator has abandoned the migration.
pub fn serve_for_another<M: GuestMemoryMap>(
    memory: Arc<M>,
    takeover: &TakeoverRequest,
    steering: &Steering,
    progress: &Arc<Progress>,
    taken: impl FnOnce(Result<TakeoverOutcome, &Cause>),
) -> Result<ProgressDocument, Box<MigrationError>> {
    let began = Instant::now();
    let mut taken = Some(taken);
    let mut answer = |result: Result<TakeoverOutcome, &Cause>| {
        if let Some(taken) = taken.take() {
            if result.is_ok() {
                progress.page_server.serves(began.elapsed());
            }
            taken(result);
        }
    };
    let total_bytes = memory.layout().regions().iter().map(|region| region.len_bytes).sum();
    progress.counters.total_bytes.set(total_bytes);
    let serve = || -> Result<(), Failure> {
        const STEP: &str = "taking over from the VMM";
        let options = SendOptions { steering: steering.clone(), ..takeover.options().step(STEP)? };
        let never = Cancel::new().map_err(Cause::Resource).step(STEP)?;
        let context = Context { options: &options, progress, cancel: &never };
        let server = Arc::new(empty_server(memory, takeover, &options, progress));
        let counts = (usize::from(takeover.bulk), usize::from(takeover.urgent));
        let mut reconnect = Reconnect::new(&options, takeover.id, counts.0, counts.1);
        reconnect.next_attempt_is(takeover.attempt);
        let connected = progress.run(Phase::Connect, || reconnect.connect(&server))?;
        let Some(connections) = connected else {
            answer(Ok(TakeoverOutcome::Complete));
            return Ok(());
        };
        progress.run(Phase::Serve, || {
            let mut session = Session::new()?;
            let control = server.serve_on_set(&mut session, connections)?;
            answer(Ok(TakeoverOutcome::Serving));
            let relay = Relay { reconnect, page_server: None };
            let result = server.watch(control, &session, context);
            server.serve_on(result, session, relay, context).map(drop)
        })
    };
    let result = serve();
    match result {
        Ok(()) => {
            progress.finish(Phase::Done);
            Ok(progress.snapshot())
        }
        Err(Failure { step, cause }) => {
            answer(Err(&cause));
            let (side, phase, guest) =
                (Side::Source, progress.phase(), GuestLocation::PostcopyPaused);
            let error = MigrationError { side, phase, step, guest, cause };
            progress.fail(Phase::PostcopyPaused, FailureReport::new(&error));
            Err(Box::new(error))
        }
    }
}

/// A server that gets the set of missing pages from the destination.
fn empty_server<M: GuestMemoryMap>(
    memory: Arc<M>,
    takeover: &TakeoverRequest,
    options: &SendOptions,
    progress: &Arc<Progress>,
) -> Server<M> {
    let regions = memory.layout().regions().iter().zip(&takeover.units);
    let missing =
        regions.map(|(region, (_, unit))| PageBitmap::new(region.pages() / unit)).collect();
    let grains = takeover.units.iter().map(|(piece, unit)| Grain::new(*piece, *unit)).collect();
    Server::new(memory, missing, grains, options, Arc::clone(progress))
}
