// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Serve: pages go to a guest that already runs at the destination.
//!
//! | file | owns |
//! | --- | --- |
//! | `mod` | the pending bits, and the phase: serving, losing connections, serving again |
//! | `pages` | which pages go out: chunks of the background, pieces of what was asked for |
//! | `answers` | the order in which the requests of one connection are answered |
//! | `threads` | bulk pushers and urgent servers, one for each connection |
//! | `reconnect` | how lost connections are made again |
//! | `relay` | handing over to another process, and continuing in place of one |
//!
//! The thread that clears a pending bit sends the page, once. Bulk pushers claim small chunks and send them
//! on connections whose queues are kept short; urgent servers, each a thread with a separate connection,
//! claim requested pages. There is no lock and no queue between them. A page that is one large host page at
//! the destination is sent in pieces of 4 KiB where the destination can assemble them, so that neither kind
//! of thread waits for a large page of the other, and a later request does not wait for a large page.
//! When a connection is lost, all are ended, and on the next set the destination says what is still
//! missing: that becomes pending, whatever was claimed before.

mod answers;
mod pages;
mod reconnect;
mod relay;
#[cfg(all(test, not(loom)))]
pub(super) mod tests;
mod threads;

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use page_bitmap::PageBitmap;
use parking_lot::{Mutex, MutexGuard};
use rate_limit::RateLimit;

use super::handover::{HandedOver, Pages};
use super::{Context, PhaseFailure, Remains};
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::layout::PAGE_BYTES;
use crate::options::SendOptions;
use crate::progress::{Phase, Progress};
use crate::protocol::message::{Answer, Message};
use crate::protocol::{ProtocolError, runs};
use crate::ram::GuestMemoryMap;
use crate::session::{Rates, Session};
use crate::steering::LOOK_EVERY;
use crate::transport::{TransportError, WaitEnd, wait_readable};
use crate::vm::SourceVm;

pub(crate) use reconnect::Reconnect;
pub use relay::serve_for_another;
pub(crate) use threads::{
    BULK, Gate, URGENT, await_requests, serve_bulk, serve_urgent, vcpus_beside,
};

use pages::HINT_NONE;
use reconnect::Connections;
use relay::Relay;

/// In which units pages of a region are sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grain {
    /// Pages of 4 KiB that are claimed and sent together.
    piece_pages: u64,
    /// Pieces that the destination makes visible together.
    unit_pieces: u64,
}

impl Grain {
    /// For pages that the destination makes visible in units of `unit_pages`.
    pub(crate) fn new(piece_pages: u64, unit_pages: u64) -> Self {
        Self { piece_pages, unit_pieces: unit_pages / piece_pages }
    }

    /// Pages of 4 KiB in a piece and in a unit.
    fn pages(&self) -> (u64, u64) {
        (self.piece_pages, self.piece_pages * self.unit_pieces)
    }

    /// Sets all pieces of the units that are set.
    fn set_pieces(&self, pieces: &PageBitmap, units: &PageBitmap) {
        for run in units.runs() {
            pieces.set_range(run.start * self.unit_pieces..run.end * self.unit_pieces);
        }
    }

    /// The units with a piece that is set; `None` where a unit is one piece.
    fn units_of(&self, pieces: &PageBitmap) -> Option<PageBitmap> {
        if self.unit_pieces == 1 {
            return None;
        }
        let units = PageBitmap::new(pieces.len() / self.unit_pieces);
        for run in pieces.runs() {
            units.set_range(run.start / self.unit_pieces..run.end.div_ceil(self.unit_pieces));
        }
        Some(units)
    }
}

/// Number of background pieces that must fit in the stall timeout.
const PIECES_IN_STALL: u64 = 4;

/// State that the background and request threads share. It outlives connections.
pub(crate) struct Server<M> {
    memory: Arc<M>,
    /// By region: pieces that are still to be sent.
    pending: Vec<PageBitmap>,
    /// By region: sizes of pieces and units.
    grains: Vec<Grain>,
    /// The pending units that the destination has not been told of at the handover; `None` when that is all
    /// of them.
    untold: Option<Vec<PageBitmap>>,
    /// Where the guest faulted last, for the background threads.
    hint: AtomicU64,
    /// Requests that are being answered now: background threads yield to them.
    in_service: AtomicU32,
    /// The destination has reported that it has every page.
    is_done: AtomicBool,
    /// Bandwidth limit of the background.
    bandwidth_limit: RateLimit,
    /// With a limit, one background thread at a time checks it and claims; otherwise all would find it free
    /// at the same moment.
    turn: Mutex<()>,
    progress: Arc<Progress>,
}

impl<M> Server<M> {
    /// Takes the turn of a background thread to claim under the limit; `None` without a limit.
    fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        let is_limited = self.bandwidth_limit.bytes_per_s() > 0;
        is_limited.then(|| self.turn.lock())
    }
}

impl<M: GuestMemoryMap> Server<M> {
    /// Starts with the units that are missing at the destination.
    pub(crate) fn new(
        memory: Arc<M>,
        missing: Vec<PageBitmap>,
        grains: Vec<Grain>,
        options: &SendOptions,
        progress: Arc<Progress>,
    ) -> Self {
        let pending = missing.into_iter().zip(&grains).map(|(units, grain)| {
            if grain.unit_pieces == 1 {
                return units;
            }
            let pieces = PageBitmap::new(units.len() * grain.unit_pieces);
            grain.set_pieces(&pieces, &units);
            pieces
        });
        let largest = grains.iter().map(|grain| grain.piece_pages).max().unwrap_or(1);
        let pace = background_pace(options, largest * PAGE_BYTES);
        let bandwidth_limit = RateLimit::new(pace).with_lateness(pages::CHUNK_BYTES);
        progress.counters.guest_vcpus.store(options.vcpus.unwrap_or(0), Ordering::Relaxed);
        let server = Self {
            memory,
            pending: pending.collect(),
            grains,
            untold: None,
            hint: AtomicU64::new(HINT_NONE),
            in_service: AtomicU32::new(0),
            is_done: AtomicBool::new(false),
            bandwidth_limit,
            turn: Mutex::new(()),
            progress,
        };
        server.count_remaining();
        server
    }

    /// Notes that the destination has been told of these units.
    pub(crate) fn has_told(&mut self, told: &[PageBitmap]) {
        let pending = self.pending.iter().zip(&self.grains).zip(told);
        let untold = pending.map(|((pieces, grain), told)| match grain.units_of(pieces) {
            Some(units) => units.without(told),
            None => pieces.without(told),
        });
        self.untold = Some(untold.collect());
    }

    /// Encodes the pending units of which the destination has not been told.
    pub(crate) fn encode_pending(&self) -> Vec<u8> {
        if let Some(untold) = &self.untold {
            return runs::encode(untold);
        }
        let units = self.pending.iter().zip(&self.grains);
        let units: Vec<Option<PageBitmap>> =
            units.map(|(pieces, grain)| grain.units_of(pieces)).collect();
        let maps = self.pending.iter().zip(&units);
        runs::encode(maps.map(|(pieces, units)| units.as_ref().unwrap_or(pieces)))
    }

    /// True when some units are sent in pieces.
    fn sends_pieces(&self) -> bool {
        self.grains.iter().any(|grain| grain.unit_pieces > 1)
    }

    /// Pages of 4 KiB that are not claimed.
    fn pending_pages(&self) -> u64 {
        let counts = self.pending.iter().map(PageBitmap::count);
        counts.zip(&self.grains).map(|(pieces, grain)| pieces * grain.piece_pages).sum()
    }

    fn count_remaining(&self) {
        let bytes = self.pending_pages() * PAGE_BYTES;
        self.progress.counters.remaining_bytes.set(bytes);
    }

    /// Makes exactly the pages pending that are missing at the destination. No thread may serve meanwhile.
    /// After a failure the pending set is undefined, and this must be repeated.
    fn pend(&self, missing: &[u8]) -> Result<(), ProtocolError> {
        for map in &self.pending {
            map.clear();
        }
        if !self.sends_pieces() {
            runs::decode(missing, &self.pending)?;
            self.count_remaining();
            return Ok(());
        }
        let maps = self.pending.iter().zip(&self.grains);
        let units: Vec<PageBitmap> =
            maps.map(|(map, grain)| PageBitmap::new(map.len() / grain.unit_pieces)).collect();
        runs::decode(missing, &units)?;
        for ((map, units), grain) in self.pending.iter().zip(&units).zip(&self.grains) {
            grain.set_pieces(map, units);
        }
        self.count_remaining();
        Ok(())
    }
}

/// Rate of the background in bytes per second for pieces of `piece_bytes`: the configured limit, raised if it
/// is so low that the destination would take the silence for a lost connection.
fn background_pace(options: &SendOptions, piece_bytes: u64) -> u64 {
    let wanted = options.bandwidth_bytes_per_s;
    let stall_ms = u64::try_from(options.limits.stall.as_millis()).unwrap_or(u64::MAX).max(1);
    let least = (PIECES_IN_STALL * piece_bytes).saturating_mul(1000) / stall_ms;
    if wanted == 0 || wanted >= least {
        return wanted;
    }
    log::warn!(
        "memory is sent at {least} bytes per second, not at the {wanted} of the option bandwidth: the \
         destination receives it in pieces of {piece_bytes} bytes, and would regard the connection as lost"
    );
    least
}

/// Pages that the destination may still need after a failure in Serve.
pub struct Held<M> {
    server: Arc<Server<M>>,
}

impl<M: GuestMemoryMap> Held<M> {
    pub(crate) fn new(server: Arc<Server<M>>) -> Self {
        Self { server }
    }

    /// Pages of 4 KiB that had not been claimed for sending; some of the others may be missing as well.
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
    /// A page server sends the remaining pages.
    HandedOn,
    /// The connections were lost.
    Lost(Failure),
}

impl<V: SourceVm> HandedOver<V> {
    /// Serves pages until the destination has every one, over as many sets of connections as that takes, or
    /// until a page server takes over.
    pub(crate) fn serve(
        self,
        context: Context<'_>,
    ) -> Result<(Remains<V>, Phase), PhaseFailure<V>> {
        let Self { remains, control, pages, unconfirmed, log: _log } = self;
        let Some(pages) = pages else { return Ok((remains, Phase::Done)) };
        let Pages { server, mut session, bulk, reconnect, page_server } = pages;
        let mut relay = Relay { reconnect, page_server };
        let result = match unconfirmed {
            Some(doubt) => Ok(End::Lost(doubt.failure)),
            None => serve_bulk(&server, &mut session, bulk)
                .and_then(|()| server.attend(control, &session, &mut relay, context)),
        };
        match server.serve_on(result, session, relay, context) {
            Ok(last) => Ok((remains, last)),
            Err(failure) => {
                Err(PhaseFailure::HandedOver(remains, Some(Held::new(server)), failure))
            }
        }
    }
}

impl<M: GuestMemoryMap> Server<M> {
    /// Continues after a first set of connections with further ones, until one reaches the end. Returns the
    /// last phase.
    fn serve_on(
        self: &Arc<Self>,
        first: Result<End, Failure>,
        session: Session,
        mut relay: Relay,
        context: Context<'_>,
    ) -> Result<Phase, Failure> {
        let (mut result, mut session) = (first, session);
        loop {
            let lost = match result {
                Ok(End::Done) => return Ok(Phase::Done),
                Ok(End::HandedOn) => return Ok(Phase::HandedOn),
                // A waiting thread is also stopped when another connection of its set ends.
                Err(failure) if context.options.steering.is_abandoned() => return Err(failure),
                Ok(End::Lost(failure)) | Err(failure) => failure,
            };
            session.end();
            log::warn!("postcopy is paused: {}", lost.for_peer());
            self.progress.lost(lost.for_peer());
            let Some(connected) = relay.reconnect.until_connected(self)? else {
                return Ok(Phase::Done);
            };
            let connections;
            (session, connections) = connected;
            self.progress.recovered(Phase::Serve);
            log::info!("postcopy continues");
            result = self
                .serve_on_set(&mut session, connections)
                .and_then(|control| self.attend(control, &session, &mut relay, context));
        }
    }

    /// Starts all threads on a set of connections; returns the first connection.
    fn serve_on_set(
        self: &Arc<Self>,
        session: &mut Session,
        connections: Connections,
    ) -> Result<Channel, Failure> {
        let Connections { control, bulk, urgent } = connections;
        serve_urgent(self, session, urgent)?;
        serve_bulk(self, session, bulk)?;
        Ok(control)
    }

    /// Answers the last message, with figures if the message had some.
    fn say_end(&self, control: &Channel, figures: &[u8]) -> Result<(), TransportError> {
        self.progress.heard(figures);
        let payload =
            if figures.is_empty() { Vec::new() } else { self.progress.figures().to_json() };
        let answer = Answer::Ok { offer_taken: false, payload };
        control.connection.send(&answer.encode())
    }

    /// Answers the destination's keep-alives until it has every page, or a connection is lost.
    fn watch(
        &self,
        mut control: Channel,
        session: &Session,
        context: Context<'_>,
    ) -> Result<End, Failure> {
        const STEP: &str = "waiting for the destination to have all pages";
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
                WaitEnd::Ready(_) if control.has_data().map_err(Cause::Resource).step(STEP)? => {
                    heard = Instant::now();
                    match control.timed(Message::read).step(STEP)? {
                        Message::Alive => control.yes().step(STEP)?,
                        Message::PostcopyDone(figures) => {
                            // Set before the destination gets the answer and stops listening.
                            self.is_done.store(true, Ordering::SeqCst);
                            // It has every page; if this answer is lost, no page is.
                            if let Err(error) = self.say_end(&control, &figures) {
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
                // This also applies when bytes arrive that form no message: parts of a TLS record.
                WaitEnd::Ready(_) | WaitEnd::TimedOut if heard.elapsed() > stall => {
                    let what = "waiting for a sign of life";
                    return Err(TransportError::Timeout { what, after: stall }).step(STEP);
                }
                WaitEnd::Ready(_) | WaitEnd::TimedOut => {}
            }
            rates.sample(&self.progress);
            if context.options.steering.is_abandoned() {
                return Err(Cause::Cancelled).step(STEP);
            }
        }
    }
}
