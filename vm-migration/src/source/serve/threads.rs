// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The threads of Serve: each owns a connection.
//!
//! Owns the priority of requests over the background. A pusher checks between two chunks whether requests
//! are being answered and yields to them, keeps to the bandwidth limit of the background, and answers the
//! requests that arrive on its own connection: without urgent connections all requests arrive there. A
//! thread that answers checks between two pieces for further requests.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::Server;
use super::answers::{Answers, SendReason};
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::protocol::ProtocolError;
use crate::protocol::message::Message;
use crate::ram::GuestMemoryMap;
use crate::session::{Session, SessionState, Urgency};
use crate::source::negotiate::Links;
use crate::transport::{Connection, wait_readable};

/// Longest time for which a background thread yields, several answers long: endless requests must not
/// stop the background. It spins meanwhile, because waking up takes longer than an answer.
const GIVE_WAY_MAX: Duration = Duration::from_micros(50);

/// The names of threads that serve requests, and of those of the background.
pub(crate) const URGENT: &str = "mig-urgent";
pub(crate) const BULK: &str = "mig-bulk";

/// How many of the guest's vCPUs run on this host when the threads of the background work: they have stopped at the source
/// then, and where they run they compete only if that is this host.
pub(crate) fn vcpus_beside(connection: &Connection, vcpus: u32) -> u32 {
    if connection.stays_on_this_host() { vcpus } else { 0 }
}

/// What is served, once the guest has stopped: nothing if all of memory goes before.
type Behind<M> = OnceLock<Option<Arc<Server<M>>>>;

/// What is behind it is served, once the guest has stopped.
pub(crate) struct Gate<M>(Arc<Behind<M>>);

impl<M> Gate<M> {
    /// From now on threads that wait for requests answer them, and need not be woken for that.
    pub(crate) fn open(&self, server: &Arc<Server<M>>) {
        // There is one stop.
        let _ = self.0.set(Some(Arc::clone(server)));
    }

    /// There will be no requests: a connection for them may end.
    pub(crate) fn stay_shut(&self) {
        let _ = self.0.set(None);
    }
}

/// Has a thread wait for the first request on each connection for those, while the guest runs: at the stop none has to be
/// woken, and a connection that is lost before is noticed.
pub(crate) fn await_requests<M: GuestMemoryMap>(links: &mut Links) -> Result<Gate<M>, Failure> {
    let gate = Arc::new(OnceLock::new());
    let sends_pieces = links.sends_pieces();
    let Some(session) = &mut links.serving else { return Ok(Gate(gate)) };
    for channel in links.urgent.drain(..) {
        if sends_pieces {
            keep_queue_short(&channel)?;
        }
        let serve = |gate: &Behind<M>, channel: &mut Channel, stop: &Cancel| {
            let server = await_first_request(gate, channel)?;
            answer_requests(&server, channel, stop)
        };
        let behind = Arc::clone(&gate);
        let fail = move |fate: &SessionState, failure: Failure| {
            let why = failure.for_peer();
            if fate.fails_with(failure) && behind.get().is_none() {
                // Before the switch to postcopy this has no other effect.
                log::warn!(
                    "a connection for requested pages is lost, so there can be no postcopy: {why}"
                );
            }
        };
        start((&gate, channel), session, (URGENT, Urgency::Now), serve, fail)?;
    }
    Ok(Gate(gate))
}

/// Waits until there is a request, and for what.
fn await_first_request<M>(
    gate: &Behind<M>,
    channel: &mut Channel,
) -> Result<Arc<Server<M>>, Failure> {
    const STEP: &str = "waiting for page requests";
    if !channel.reader.has_buffered() {
        channel.connection.wait_for_data(None).step(STEP)?;
    }
    // It is there before the destination is told that it may ask.
    if let Some(Some(server)) = gate.get() {
        return Ok(Arc::clone(server));
    }
    let got = channel.timed(Message::read).step(STEP)?.command().name();
    Err(ProtocolError::Unexpected { got, expected: "nothing before the handover" }).step(STEP)
}

/// Pieces in the queue would delay the next requested page.
fn keep_queue_short(channel: &Channel) -> Result<(), Failure> {
    channel.connection.keep_queue_short().step("preparing to serve page requests")
}

/// Has a thread serve each connection for requests.
pub(crate) fn serve_urgent<M: GuestMemoryMap>(
    server: &Arc<Server<M>>,
    session: &mut Session,
    channels: Vec<Channel>,
) -> Result<(), Failure> {
    for channel in channels {
        if server.sends_pieces() {
            keep_queue_short(&channel)?;
        }
        let (part, kind) = ((server, channel), (URGENT, Urgency::Now));
        start(part, session, kind, answer_requests, SessionState::fail)?;
    }
    Ok(())
}

/// Has a background thread push on each connection.
pub(crate) fn serve_bulk<M: GuestMemoryMap>(
    server: &Arc<Server<M>>,
    session: &mut Session,
    channels: Vec<Channel>,
) -> Result<(), Failure> {
    let threads = u32::try_from(channels.len()).unwrap_or(u32::MAX);
    for channel in channels {
        channel.connection.keep_queue_short().step("preparing to push pages")?;
        let push = |server: &Server<M>, channel: &mut Channel, stop: &Cancel| {
            push_bulk(server, channel, stop)?;
            // The connection stays open until the destination reports on the first one that it has every
            // page.
            answer_requests(server, channel, stop)
        };
        let vcpus = server.progress.counters.guest_vcpus.load(Ordering::Relaxed);
        let vcpus = vcpus_beside(&channel.connection, vcpus);
        let urgency = Urgency::Later { vcpus, threads };
        start((server, channel), session, (BULK, urgency), push, SessionState::fail)?;
    }
    Ok(())
}

/// `serves` is what it serves, or will.
fn start<S: Send + Sync + 'static>(
    (serves, channel): (&Arc<S>, Channel),
    session: &mut Session,
    (name, urgency): (&'static str, Urgency),
    work: impl FnOnce(&S, &mut Channel, &Cancel) -> Result<(), Failure> + Send + 'static,
    fail: impl FnOnce(&SessionState, Failure) + Send + 'static,
) -> Result<(), Failure> {
    let fate = Arc::clone(session.fate());
    let stop = fate.stop().clone();
    channel.connection.set_cancel(&stop);
    session.spawn(
        name,
        urgency,
        (Arc::clone(serves), channel),
        move |(serves, channel)| work(serves, channel, &stop),
        move |failure| fail(&fate, failure),
    )
}

/// Sends pages until none is pending.
fn push_bulk<M: GuestMemoryMap>(
    server: &Server<M>,
    channel: &mut Channel,
    stop: &Cancel,
) -> Result<(), Failure> {
    const STEP: &str = "pushing pages";
    let mut at = (0, 0);
    let mut answers = Answers::new(server);
    loop {
        while channel.reader.has_buffered() || has_data(&channel.connection, stop).step(STEP)? {
            answer(&mut answers, server, channel, stop)?;
        }
        // Before the claim: a claimed page cannot be requested until it has arrived.
        yield_to_requests(server);
        let turn = server.turn();
        let pause = server.bandwidth_limit.reserve(0);
        if !pause.is_zero() {
            drop(turn);
            sleep(pause, &channel.connection, stop).step(STEP)?;
            continue;
        }
        let Some(chunk) = server.next_chunk(&mut at) else { return Ok(()) };
        server.bandwidth_limit.reserve(chunk.data_bytes());
        drop(turn);
        let pages = server.send(&channel.connection, &chunk).step(STEP)?;
        server.progress.counters.bulk_pages.fetch_add(pages, Ordering::Relaxed);
    }
}

/// True when there is data to read, or the connection has ended.
fn has_data(connection: &Connection, stop: &Cancel) -> Result<bool, Cause> {
    if stop.is_cancelled() {
        return Err(Cause::Cancelled);
    }
    connection.has_data_now().map_err(Cause::Resource)
}

fn yield_to_requests<M>(server: &Server<M>) {
    if server.in_service.load(Ordering::Relaxed) == 0 {
        return;
    }
    let since = Instant::now();
    while server.in_service.load(Ordering::Relaxed) > 0 && since.elapsed() < GIVE_WAY_MAX {
        std::thread::yield_now();
    }
}

/// Sleeps for `pause`, or until a request arrives or the thread is to stop.
fn sleep(pause: Duration, connection: &Connection, stop: &Cancel) -> Result<(), Cause> {
    const SHORT: Duration = Duration::from_millis(2);
    if pause < SHORT {
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        return Ok(());
    }
    wait_readable(&[connection.as_raw_fd()], stop, Some(pause)).map(drop).map_err(Cause::Resource)
}

/// Answers requests until the connection ends.
fn answer_requests<M: GuestMemoryMap>(
    server: &Server<M>,
    channel: &mut Channel,
    stop: &Cancel,
) -> Result<(), Failure> {
    let mut answers = Answers::new(server);
    loop {
        answer(&mut answers, server, channel, stop)?;
    }
}

/// Reads a request and answers it, together with those that arrive meanwhile. `answers` is empty before
/// and after.
fn answer<M: GuestMemoryMap>(
    answers: &mut Answers<'_, M>,
    server: &Server<M>,
    channel: &mut Channel,
    stop: &Cancel,
) -> Result<(), Failure> {
    const STEP: &str = "serving page requests";
    let counters = &server.progress.counters;
    if !channel.reader.has_buffered() {
        channel.connection.wait_for_data(None).step(STEP)?;
    }
    take_request(channel, answers)?;
    while let Some((reply, why)) = answers.next_piece() {
        if !reply.is_empty() {
            let pages = server.send(&channel.connection, &reply).step(STEP)?;
            let sent = match why {
                SendReason::Requested => &counters.urgent_pages,
                SendReason::Readahead => &counters.prefetched_pages,
            };
            sent.fetch_add(pages, Ordering::Relaxed);
        }
        answers.sent();
        while !answers.is_done()
            && answers.has_room()
            && (channel.reader.has_buffered() || has_data(&channel.connection, stop).step(STEP)?)
        {
            take_request(channel, answers)?;
        }
    }
    Ok(())
}

fn take_request<M: GuestMemoryMap>(
    channel: &mut Channel,
    answers: &mut Answers<'_, M>,
) -> Result<(), Failure> {
    const STEP: &str = "receiving page requests";
    match channel.timed(Message::read).step(STEP)? {
        Message::PageFault(ranges) => answers.wait_for(&ranges).step(STEP),
        Message::Ahead(ranges) => answers.add_readahead(&ranges).step(STEP),
        other => {
            let got = other.command().name();
            Err(ProtocolError::Unexpected { got, expected: "PageFault" }).step(STEP)
        }
    }
}
