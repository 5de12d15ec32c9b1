// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Serve: pages go to a guest that already runs at the destination.
//!
//! | file | owns |
//! | --- | --- |
//! | `mod` | the pending bits, and the phase: serving, losing connections, serving again |
//! | `pages` | which pages go out in what order: chunks of the background, answers to requests |
//! | `threads` | bulk pushers and urgent servers, one for each connection |
//! | `reconnect` | how lost connections are made again |
//!
//! Whoever clears a pending bit sends the page, once. Bulk pushers claim small chunks and send them
//! on connections whose queues are kept short; urgent servers, each a thread with a connection of
//! its own, claim what was asked for. No lock and no queue is between them. When a connection is
//! lost, all are ended, and the destination says on the next set what it still lacks: that becomes
//! pending, whatever has been claimed before.

mod pages;
mod reconnect;
mod threads;

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use super::handover::{HandedOver, Pages};
use super::negotiate::Links;
use super::{Context, Remains, Setback};
use crate::bitmap::ClaimMap;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::layout::PAGE_BYTES;
use crate::options::SendOptions;
use crate::pace::Pace;
use crate::progress::{Phase, Progress};
use crate::protocol::message::Message;
use crate::protocol::{ProtocolError, runs};
use crate::ram::GuestMemoryMap;
use crate::session::{Rates, Session};
use crate::steering::LOOK_EVERY;
use crate::transport::{TransportError, WaitEnd, wait_readable};
use crate::vm::SourceVm;

pub(crate) use reconnect::Reconnect;
pub(crate) use threads::{serve_bulk, serve_urgent};

use pages::HINT_NONE;

/// What bulk pushers and urgent servers share. It outlives connections.
pub(crate) struct Server<M> {
    memory: Arc<M>,
    /// Per region, in units: still to be sent.
    pending: Vec<ClaimMap>,
    /// Per region: pages of 4 KiB in a unit.
    unit_pages: Vec<u64>,
    /// Where the guest faulted last, for the pushers.
    hint: AtomicU64,
    /// Requests that are being answered now: pushers let them go first.
    in_service: AtomicU32,
    /// Limit of the pushers.
    pace: Pace,
    progress: Arc<Progress>,
}

impl<M: GuestMemoryMap> Server<M> {
    pub(crate) fn new(
        memory: Arc<M>,
        pending: Vec<ClaimMap>,
        links: &Links,
        options: &SendOptions,
        progress: Arc<Progress>,
    ) -> Self {
        let unit_pages: Vec<u64> =
            (0..pending.len()).map(|region| links.unit_pages(region)).collect();
        let server = Self {
            memory,
            pending,
            unit_pages,
            hint: AtomicU64::new(HINT_NONE),
            in_service: AtomicU32::new(0),
            pace: Pace::new(options.bandwidth_bytes_per_s),
            progress,
        };
        server.count_remaining();
        server
    }

    pub(crate) fn pending(&self) -> &[ClaimMap] {
        &self.pending
    }

    /// Pages of 4 KiB that nobody has claimed.
    fn pending_pages(&self) -> u64 {
        let counts = self.pending.iter().map(ClaimMap::count);
        counts.zip(&self.unit_pages).map(|(units, unit)| units * unit).sum()
    }

    fn count_remaining(&self) {
        let bytes = self.pending_pages() * PAGE_BYTES;
        self.progress.counters.remaining_bytes.store(bytes, Ordering::Relaxed);
    }

    /// What the destination lacks is pending, and nothing else. Nobody may serve meanwhile.
    fn pend(&self, missing: &[u8]) -> Result<(), ProtocolError> {
        for map in &self.pending {
            map.claim_run(0, map.len());
        }
        runs::decode(missing, &self.pending)?;
        self.count_remaining();
        Ok(())
    }
}

/// Pages that a destination may still need after a failure in Serve.
pub struct Held<M> {
    server: Arc<Server<M>>,
}

impl<M: GuestMemoryMap> Held<M> {
    pub(crate) fn new(server: Arc<Server<M>>) -> Self {
        Self { server }
    }

    /// Pages of 4 KiB that had not been claimed for sending; some of the others may be lost, too.
    pub fn unsent_pages(&self) -> u64 {
        self.server.pending_pages()
    }
}

impl<M: GuestMemoryMap> std::fmt::Debug for Held<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("unsent_pages", &self.unsent_pages()).finish()
    }
}

/// How a set of connections ended.
enum End {
    /// The destination has every page.
    Done,
    /// Lost.
    Lost(Failure),
}

impl<V: SourceVm> HandedOver<V> {
    /// Serves pages until the destination has every one, over as many sets of connections as that
    /// takes.
    pub(crate) fn serve(self, context: Context<'_>) -> Result<Remains<V>, Setback<V>> {
        let Self { remains, control, pages, unconfirmed } = self;
        let Some(pages) = pages else { return Ok(remains) };
        let Pages { server, mut session, bulk, reconnect } = pages;
        let result = match unconfirmed {
            Some(failure) => Ok(End::Lost(failure)),
            None => serve_bulk(&server, &mut session, bulk)
                .and_then(|()| server.watch(control, &session, context)),
        };
        match server.serve_on(result, session, reconnect, context) {
            Ok(()) => Ok(remains),
            Err(failure) => Err(Setback::HandedOver(remains, Some(Held::new(server)), failure)),
        }
    }
}

impl<M: GuestMemoryMap> Server<M> {
    /// What comes after a first set of connections: more of them, until one comes to the end.
    fn serve_on(
        self: &Arc<Self>,
        first: Result<End, Failure>,
        session: Session,
        mut reconnect: Reconnect,
        context: Context<'_>,
    ) -> Result<(), Failure> {
        let (mut result, mut session) = (first, session);
        loop {
            let lost = match result {
                Ok(End::Done) => return Ok(()),
                Err(failure) if matches!(failure.cause, Cause::Cancelled) => return Err(failure),
                Ok(End::Lost(failure)) | Err(failure) => failure,
            };
            session.end();
            log::warn!("postcopy holds still: {}", lost.for_peer());
            self.progress.lost(lost.for_peer());
            let Some(connections) = reconnect.until_connected(self)? else { return Ok(()) };
            session = Session::new()?;
            self.progress.recovered(Phase::Serve);
            log::info!("postcopy goes on");
            result = serve_urgent(self, &mut session, connections.urgent)
                .and_then(|()| serve_bulk(self, &mut session, connections.bulk))
                .and_then(|()| self.watch(connections.control, &session, context));
        }
    }

    /// Answers the destination's signs of life until it has everything, or a connection is lost.
    fn watch(
        &self,
        mut control: Channel,
        session: &Session,
        context: Context<'_>,
    ) -> Result<End, Failure> {
        const STEP: &str = "waiting for the destination to be complete";
        let fate = session.fate();
        let stall = context.options.limits.stall;
        control.connection.set_cancel(fate.stop());
        control.connection.set_stall_timeout(stall);
        let mut heard = Instant::now();
        let mut rates = Rates::new(&self.progress);
        loop {
            let fds = [control.connection.as_raw_fd()];
            let end = if control.reader.has_buffered() {
                WaitEnd::Ready(0)
            } else {
                wait_readable(&fds, fate.stop(), Some(LOOK_EVERY))
                    .map_err(Cause::Resource)
                    .step(STEP)?
            };
            match end {
                WaitEnd::Cancelled => {
                    let lost = || Failure::new(STEP, TransportError::Closed);
                    return Ok(End::Lost(fate.take_failure().unwrap_or_else(lost)));
                }
                WaitEnd::TimedOut if heard.elapsed() > stall => {
                    let what = "waiting for a sign of life";
                    return Err(TransportError::Timeout { what, after: stall }).step(STEP);
                }
                WaitEnd::TimedOut => {}
                WaitEnd::Ready(_) => {
                    heard = Instant::now();
                    match Message::read(&mut control.reader).step(STEP)? {
                        Message::Alive => control.yes().step(STEP)?,
                        Message::PostcopyDone => {
                            // It has every page; if it does not hear this, nothing is lost.
                            if let Err(error) = control.yes() {
                                log::warn!("the end could not be acknowledged: {error}");
                            }
                            control.connection.finish_sending(stall);
                            return Ok(End::Done);
                        }
                        other => {
                            let got = other.command().name();
                            let error = ProtocolError::Unexpected { got, expected: "PostcopyDone" };
                            return Err(error).step(STEP);
                        }
                    }
                }
            }
            rates.sample(&self.progress);
            if context.options.steering.gives_up() {
                return Err(Cause::Cancelled).step(STEP);
            }
        }
    }
}
