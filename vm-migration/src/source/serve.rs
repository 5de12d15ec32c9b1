// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Serve: pages go to a guest that already runs at the destination.
//!
//! Owns the pending bits: whoever clears one sends the page. Bulk pushers claim small chunks and
//! send them on connections whose queues are kept short; urgent servers, each a thread with a
//! connection of its own, claim what was asked for. Nobody waits for anybody: no lock, no queue
//! between them. The one thing they share beside the bits is a hint where the guest faults.
//!
//! A lost connection ends this first form: everything is kept ([`Held`]) and nothing is sent.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::handover::HandedOver;
use super::negotiate::Links;
use super::round::{push, ranges};
use super::{Context, Remains, Setback};
use crate::bitmap::{ClaimMap, Claimed};
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::layout::{GpaRange, PAGE_BYTES, PageRun};
use crate::progress::Progress;
use crate::protocol::ProtocolError;
use crate::protocol::message::Message;
use crate::ram::{self, GuestMemoryMap};
use crate::transport::{Connection, Part, TransportError};
use crate::vm::SourceVm;

/// Bytes that a pusher claims at once: 0.1 ms at 10 Gbit/s, so little waits behind it.
const BULK_CHUNK_BYTES: u64 = 128 << 10;

/// Most units that one request may name.
const REQUEST_UNITS_MAX: u64 = 4096;

/// Bits of a hint that hold the unit; the region is above them.
const HINT_UNIT_BITS: u32 = 52;

/// No hint.
const HINT_NONE: u64 = u64::MAX;

/// What bulk pushers and urgent servers share.
pub(crate) struct Server<M> {
    memory: Arc<M>,
    /// Per region, in units: still to be sent.
    pending: Vec<ClaimMap>,
    /// Per region: pages of 4 KiB in a unit.
    unit_pages: Vec<u64>,
    /// Where the guest faulted last, for the pushers.
    hint: AtomicU64,
    /// Interrupts every wait of the threads and of the control connection.
    stop: Cancel,
    /// The destination has everything: ends of connections are no failures any more.
    finished: AtomicBool,
    /// What went wrong first. Held for one look.
    failure: Mutex<Option<Failure>>,
    progress: Arc<Progress>,
}

impl<M: GuestMemoryMap> Server<M> {
    pub(crate) fn new(
        memory: Arc<M>,
        pending: Vec<ClaimMap>,
        links: &Links,
        progress: Arc<Progress>,
    ) -> Result<Self, Failure> {
        let unit_pages: Vec<u64> =
            (0..pending.len()).map(|region| links.unit_pages(region)).collect();
        let pages: u64 =
            pending.iter().zip(&unit_pages).map(|(map, unit)| map.count() * unit).sum();
        progress.counters.remaining_bytes.store(pages * PAGE_BYTES, Ordering::Relaxed);
        let stop = Cancel::new().map_err(Cause::Resource).step("preparing to serve pages")?;
        Ok(Self {
            memory,
            pending,
            unit_pages,
            hint: AtomicU64::new(HINT_NONE),
            stop,
            finished: AtomicBool::new(false),
            failure: Mutex::new(None),
            progress,
        })
    }

    pub(crate) fn pending(&self) -> &[ClaimMap] {
        &self.pending
    }

    pub(crate) fn take_failure(&self) -> Option<Failure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Notes a failure, unless all is over, and stops everybody.
    fn fail(&self, failure: Failure) {
        if !self.finished.load(Ordering::SeqCst) {
            let mut first = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            // What others suffer because of the stop is not a cause.
            if !matches!(failure.cause, Cause::Cancelled) {
                first.get_or_insert(failure);
            }
        }
        self.stop.cancel();
    }

    /// Pushes pages until none is pending.
    fn push_bulk(&self, connection: &Connection) -> Result<(), Failure> {
        let mut at = (0, 0);
        while let Some((region, claimed)) = self.claim_chunk(&mut at) {
            let mut reply = Reply::default();
            for (first, count) in claimed.runs() {
                self.add(&mut reply, region, first, count);
            }
            let pages = self.send(connection, &reply).step("pushing pages")?;
            self.progress.counters.bulk_pages.fetch_add(pages, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Keeps a bulk connection open until the destination says on the first one that it has
    /// everything; an end before that is a loss.
    fn wait_for_end(&self, connection: &Connection) -> Result<(), Failure> {
        const STEP: &str = "waiting for the destination to be complete";
        connection.wait_for_data(None).step(STEP)?;
        if self.finished.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(TransportError::Closed).step(STEP)
    }

    /// Claims the next chunk at `at` or where the guest faulted since, moving on through all
    /// regions; `None` when nothing is pending anywhere.
    fn claim_chunk(&self, at: &mut (usize, u64)) -> Option<(usize, Claimed)> {
        let hint = self.hint.swap(HINT_NONE, Ordering::Relaxed);
        if hint != HINT_NONE {
            let region = usize::try_from(hint >> HINT_UNIT_BITS).unwrap_or(0);
            *at = (region, hint & ((1 << HINT_UNIT_BITS) - 1));
        }
        let regions = self.pending.len();
        // One step more than there are regions: the first one again, from its start.
        for step in 0..=regions {
            let region = (at.0 + step) % regions;
            let from = if step == 0 { at.1 } else { 0 };
            let chunk_units = BULK_CHUNK_BYTES / (self.unit_pages[region] * PAGE_BYTES);
            let max = u32::try_from(chunk_units.clamp(1, 64)).unwrap_or(1);
            if let Some(claimed) = self.pending[region].claim_next(from, max) {
                let last = claimed.base + 63 - u64::from(claimed.mask.leading_zeros());
                *at = (region, last + 1);
                return Some((region, claimed));
            }
        }
        None
    }

    /// Answers requests until the connection ends.
    fn serve_urgent(&self, channel: &mut Channel) -> Result<(), Failure> {
        const STEP: &str = "serving page requests";
        loop {
            if !channel.reader.has_buffered() {
                channel.connection.wait_for_data(None).step(STEP)?;
            }
            let ranges = match Message::read(&mut channel.reader).step(STEP)? {
                Message::PageFault(ranges) => ranges,
                other => {
                    let got = other.command().name();
                    let error = ProtocolError::Unexpected { got, expected: "PageFault" };
                    return Err(error).step(STEP);
                }
            };
            let reply = self.reply_to(&ranges).step(STEP)?;
            let pages = self.send(&channel.connection, &reply).step(STEP)?;
            self.progress.counters.urgent_pages.fetch_add(pages, Ordering::Relaxed);
        }
    }

    fn reply_to(&self, ranges: &[GpaRange]) -> Result<Reply, ProtocolError> {
        let mut reply = Reply::default();
        let mut asked = 0;
        for range in ranges {
            let run = self.memory.layout().locate(*range)?;
            let unit = self.unit_pages[run.region];
            let units = run.first / unit..run.end().div_ceil(unit);
            asked += units.end - units.start;
            if asked > REQUEST_UNITS_MAX {
                return Err(ProtocolError::Malformed {
                    what: "page request",
                    why: "it names too many pages",
                });
            }
            self.hint_at(run.region, units.end);
            for index in units {
                if self.pending[run.region].claim(index) {
                    self.add(&mut reply, run.region, index, 1);
                } else {
                    push(&mut reply.elsewhere, self.pages_of(run.region, index, 1));
                }
            }
        }
        Ok(reply)
    }

    fn hint_at(&self, region: usize, unit: u64) {
        let packed = (region as u64) << HINT_UNIT_BITS | unit;
        self.hint.store(packed, Ordering::Relaxed);
    }

    fn pages_of(&self, region: usize, first: u64, count: u64) -> PageRun {
        let unit = self.unit_pages[region];
        PageRun { region, first: first * unit, count: count * unit }
    }

    /// Adds claimed units, as data or as zeros.
    fn add(&self, reply: &mut Reply, region: usize, first: u64, count: u64) {
        for index in first..first + count {
            let run = self.pages_of(region, index, 1);
            let is_zero = ram::is_zero(&*self.memory, run);
            push(if is_zero { &mut reply.zero } else { &mut reply.data }, run);
        }
    }

    /// Sends a reply in one go; returns the number of pages.
    fn send(&self, connection: &Connection, reply: &Reply) -> Result<u64, Cause> {
        let memory = &*self.memory;
        let message = |runs: &Vec<PageRun>, wrap: fn(Vec<GpaRange>) -> Message| {
            if runs.is_empty() { Vec::new() } else { wrap(ranges(memory, runs)).encode() }
        };
        let data = message(&reply.data, Message::Memory);
        let mut rest = message(&reply.zero, Message::ZeroPages);
        rest.extend(message(&reply.elsewhere, Message::Elsewhere));
        let mut parts = Vec::with_capacity(2 + reply.data.len());
        parts.push(Part::Bytes(&data));
        parts.extend(reply.data.iter().map(|run| Part::Guest(ram::slice(memory, *run))));
        parts.push(Part::Bytes(&rest));
        connection.send_parts(&parts)?;
        let pages = |runs: &[PageRun]| runs.iter().map(|run| run.count).sum::<u64>();
        let (data_pages, zero_pages) = (pages(&reply.data), pages(&reply.zero));
        let counters = &self.progress.counters;
        counters.memory_bytes_sent.fetch_add(data_pages * PAGE_BYTES, Ordering::Relaxed);
        counters.zero_pages.fetch_add(zero_pages, Ordering::Relaxed);
        self.progress.sent_down((data_pages + zero_pages) * PAGE_BYTES);
        Ok(data_pages + zero_pages)
    }
}

/// Pages on their way out.
#[derive(Default)]
struct Reply {
    data: Vec<PageRun>,
    zero: Vec<PageRun>,
    elsewhere: Vec<PageRun>,
}

/// The threads of Serve. Dropping stops and joins them.
#[derive(Default)]
pub(crate) struct ServeThreads {
    stop: Option<Cancel>,
    threads: Vec<JoinHandle<()>>,
}

impl ServeThreads {
    /// Starts an urgent server for each channel.
    pub(crate) fn serve_urgent<M: GuestMemoryMap>(
        &mut self,
        server: &Arc<Server<M>>,
        channels: Vec<Channel>,
    ) -> Result<(), Failure> {
        for channel in channels {
            channel.connection.set_cancel(&server.stop);
            self.start("mig-urgent", server, channel, Server::serve_urgent)?;
        }
        Ok(())
    }

    fn serve_bulk<M: GuestMemoryMap>(
        &mut self,
        server: &Arc<Server<M>>,
        channels: Vec<Channel>,
    ) -> Result<(), Failure> {
        for channel in channels {
            channel.connection.keep_queue_short().step("preparing to push pages")?;
            channel.connection.set_cancel(&server.stop);
            self.start("mig-bulk", server, channel, |server, channel| {
                server.push_bulk(&channel.connection)?;
                server.wait_for_end(&channel.connection)
            })?;
        }
        Ok(())
    }

    /// Starts a thread that owns a connection. What goes wrong is noted before the peer can see
    /// the connection end.
    fn start<M: GuestMemoryMap>(
        &mut self,
        name: &str,
        server: &Arc<Server<M>>,
        mut channel: Channel,
        work: impl FnOnce(&Server<M>, &mut Channel) -> Result<(), Failure> + Send + 'static,
    ) -> Result<(), Failure> {
        self.stop = Some(server.stop.clone());
        let server = Arc::clone(server);
        let body = move || {
            let work = std::panic::AssertUnwindSafe(|| work(&server, &mut channel));
            let result = std::panic::catch_unwind(work)
                .unwrap_or(Err(Failure::new("serving pages", Cause::Panicked)));
            if let Err(failure) = result {
                server.fail(failure);
            }
            drop(channel);
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(body);
        self.threads.push(thread.map_err(Cause::Resource).step("starting a server thread")?);
        Ok(())
    }
}

impl Drop for ServeThreads {
    fn drop(&mut self) {
        if let Some(stop) = &self.stop {
            stop.cancel();
        }
        for thread in self.threads.drain(..) {
            // A panic has been noted as a failure already.
            let _ = thread.join();
        }
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
        let counts = self.server.pending.iter().map(ClaimMap::count);
        counts.zip(&self.server.unit_pages).map(|(units, unit)| units * unit).sum()
    }
}

impl<M: GuestMemoryMap> std::fmt::Debug for Held<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("unsent_pages", &self.unsent_pages()).finish()
    }
}

impl<V: SourceVm> HandedOver<V> {
    /// Serves pages until the destination has every one.
    pub(crate) fn serve(self, context: Context<'_>) -> Result<Remains<V>, Setback<V>> {
        let Self { remains, mut control, pages } = self;
        let Some(mut pages) = pages else { return Ok(remains) };
        let server = &pages.server;
        let limit = context.options.limits.answer;
        let done = pages
            .threads
            .serve_bulk(server, std::mem::take(&mut pages.bulk))
            .and_then(|()| server.wait_until_done(&mut control, limit));
        match done {
            Ok(()) => Ok(remains),
            Err(failure) => {
                server.fail(failure);
                let failure = server.take_failure();
                let failure =
                    failure.unwrap_or_else(|| Failure::new("serving pages", Cause::Cancelled));
                drop(pages.threads);
                let held = Some(Held::new(pages.server));
                Err(Setback::HandedOver(remains, held, failure))
            }
        }
    }
}

impl<M: GuestMemoryMap> Server<M> {
    fn wait_until_done(
        &self,
        control: &mut Channel,
        limit: std::time::Duration,
    ) -> Result<(), Failure> {
        const STEP: &str = "waiting for the destination to be complete";
        control.connection.set_cancel(&self.stop);
        if !control.reader.has_buffered() {
            control.connection.wait_for_data(None).step(STEP)?;
        }
        match Message::read(&mut control.reader).step(STEP)? {
            Message::PostcopyDone => {}
            other => {
                let got = other.command().name();
                let error = ProtocolError::Unexpected { got, expected: "PostcopyDone" };
                return Err(error).step(STEP);
            }
        }
        self.finished.store(true, Ordering::SeqCst);
        // It has every page; if it does not hear this answer, nothing is lost.
        if let Err(error) = control.yes() {
            log::warn!("the end of postcopy could not be acknowledged: {error}");
        }
        control.connection.finish_sending(limit);
        Ok(())
    }
}
