// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Parts of the state that are sent as bytes, while they are read, on all connections.
//!
//! Owns the threads: one for each blob reads it, in order, and one for each connection sends whatever chunk is next. That
//! of the first connection hears as well how much of each blob is written, and asks whether the destination is alive while
//! there is nothing to send. A blob is read ahead of what is written of it by its window at most, which is all that this
//! side holds of it, and what the destination relies on: one that is read or written slowly holds up no other. Must never
//! know what the bytes mean.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rate_limit::RateLimit;

use super::negotiate::Links;
use super::{Context, check_cancel};
use crate::bell::{Bell, readable};
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::layout::to_usize;
use crate::protocol::ProtocolError;
use crate::protocol::blobs::{BlobChunk, BlobError, BlobInfo, CHUNK_BYTES_MAX, window_bytes};
use crate::protocol::message::Message;
use crate::session::ALIVE_EVERY;
use crate::transport::{Part, TransportError};
use crate::vm::{BlobSource, PausedVm};

/// Most unanswered messages on one connection.
const UNANSWERED_MAX: usize = 4;

/// How often a wait for the bandwidth limit checks for a cancel.
const PACED_LOOK: Duration = Duration::from_millis(20);

const STEP: &str = "sending the state of devices";

/// Sends all blobs; returns their lengths when all of them are written.
pub(super) fn send_blobs<P: PausedVm>(
    vm: &mut P,
    control: &mut Channel,
    links: &mut Links,
    context: Context<'_>,
) -> Result<Vec<u64>, Failure> {
    const OPENING: &str = "reading the state of devices";
    if links.blobs.is_empty() {
        return Ok(Vec::new());
    }
    let began = Instant::now();
    let limit = context.options.limits.answer;
    let sources = control.busy_asking(limit, || vm.open_blobs()).step(OPENING)?;
    let sources = sources.map_err(Cause::Vm).step(OPENING)?;
    if sources.len() != links.blobs.len() {
        let what = "the VM's devices have changed since the migration began".to_owned();
        return Err(Cause::Unsupported { what, remedy: "repeat the migration" }).step(STEP);
    }
    let pipe = Pipe::new(&links.blobs, context)?;
    let sent = pipe.run(sources, control, &mut links.memory);
    let lens = sent.map_err(|failure| match failure.cause {
        // The first connection may carry the reason why others have ended.
        Cause::Transport(error) if !links.memory.is_empty() => {
            Failure { step: failure.step, cause: control.explain(error) }
        }
        _ => failure,
    })?;
    let (bytes, took) = (lens.iter().sum::<u64>(), began.elapsed().as_millis());
    log::info!("{bytes} bytes of the state of {} devices were sent in {took} ms", lens.len());
    Ok(lens)
}

/// What the threads share.
struct Pipe<'a> {
    infos: &'a [BlobInfo],
    window_bytes: u64,
    state: Mutex<State>,
    /// A chunk has come, more was written, a blob has ended, or something has failed.
    changed: Condvar,
    /// The same, for the thread of the first connection.
    bell: Bell,
    bandwidth_limit: RateLimit,
    context: Context<'a>,
}

struct State {
    /// By blob.
    flows: Vec<Flow>,
    /// The blob whose turn it is to be sent.
    turn: usize,
    failure: Option<Failure>,
}

/// How far a blob has come.
#[derive(Default)]
struct Flow {
    /// Chunks that are still to be sent.
    chunks: VecDeque<BlobChunk>,
    /// The end of what was read.
    read: u64,
    /// What the destination has written.
    written: u64,
    /// All is read.
    is_read: bool,
}

/// What a connection has to send next.
enum Next {
    Chunk(BlobChunk),
    /// Nothing now.
    Nothing,
    /// Nothing any more.
    Over,
}

impl State {
    /// The next chunk, of each blob in turn.
    fn take(&mut self) -> Option<BlobChunk> {
        let turn = self.turn;
        let (before, after) = self.flows.split_at_mut_checked(turn)?;
        let mut flows = (turn..).zip(after).chain((0..).zip(before));
        let (number, chunk) =
            flows.find_map(|(number, flow)| Some((number, flow.chunks.pop_front()?)))?;
        self.turn = number + 1;
        Some(chunk)
    }

    /// Bytes that are read here, and written there.
    fn moved(&self) -> u64 {
        let both = self.flows.iter().flat_map(|flow| [flow.read, flow.written]);
        both.fold(0, u64::saturating_add)
    }

    fn is_taken(&self) -> bool {
        self.flows.iter().all(|flow| flow.is_read && flow.chunks.is_empty())
    }

    fn is_written(&self) -> bool {
        self.is_taken() && self.flows.iter().all(|flow| flow.written == flow.read)
    }
}

impl<'a> Pipe<'a> {
    fn new(infos: &'a [BlobInfo], context: Context<'a>) -> Result<Self, Failure> {
        let flows = infos.iter().map(|_| Flow::default()).collect();
        Ok(Self {
            infos,
            window_bytes: window_bytes(infos.len()),
            state: Mutex::new(State { flows, turn: 0, failure: None }),
            changed: Condvar::new(),
            bell: Bell::new().map_err(Cause::Resource).step(STEP)?,
            bandwidth_limit: RateLimit::new(context.options.bandwidth_bytes_per_s),
            context,
        })
    }

    fn run(
        &self,
        sources: Vec<Box<dyn BlobSource>>,
        control: &mut Channel,
        further: &mut [Channel],
    ) -> Result<Vec<u64>, Failure> {
        let lens = std::thread::scope(|scope| {
            let mut readers = Vec::new();
            for ((number, info), source) in (0_u16..).zip(self.infos).zip(sources) {
                let read = move || self.read(number, info, source);
                match stoppable_thread::spawn_scoped(scope, "mig-state", read) {
                    Ok(reader) => readers.push(reader),
                    Err(error) => self.fail(Failure::new(STEP, Cause::Resource(error))),
                }
            }
            for channel in further {
                let spawned = stoppable_thread::spawn_scoped(scope, "mig-send", move || {
                    self.noting(self.send_chunks(channel));
                });
                if let Err(error) = spawned {
                    // The others send all of it.
                    log::warn!("the state of devices is sent on fewer connections: {error}");
                    break;
                }
            }
            self.noting(self.lead(control));
            let lens = readers
                .into_iter()
                .map(|reader| reader.join().unwrap_or_else(|panic| resume_unwind(panic)));
            lens.collect::<Vec<u64>>()
        });
        match self.state.lock().failure.take() {
            Some(failure) => Err(failure),
            None => Ok(lens),
        }
    }

    fn notify(&self) {
        self.changed.notify_all();
        self.bell.ring();
    }

    fn noting(&self, done: Result<(), Failure>) {
        if let Err(failure) = done {
            self.fail(failure);
        }
    }

    /// Ends everything. What the destination says counts for more than the end of a connection.
    fn fail(&self, failure: Failure) {
        let mut state = self.state.lock();
        let says_more = |before: &Failure| {
            matches!(before.cause, Cause::Transport(_))
                && matches!(failure.cause, Cause::Refused(_))
        };
        if state.failure.as_ref().is_none_or(says_more) {
            state.failure = Some(failure);
        }
        drop(state);
        self.notify();
    }

    /// Reads a blob to its end; returns its length. A failure is noted.
    fn read(&self, number: u16, info: &BlobInfo, source: Box<dyn BlobSource>) -> u64 {
        let len = self.read_all(number, info, source);
        let len = len.map_err(|failure| self.fail(failure)).unwrap_or_default();
        if let Some(flow) = self.state.lock().flows.get_mut(usize::from(number)) {
            flow.is_read = true;
        }
        self.notify();
        len
    }

    fn read_all(
        &self,
        number: u16,
        info: &BlobInfo,
        mut source: Box<dyn BlobSource>,
    ) -> Result<u64, Failure> {
        const STEP: &str = "reading the state of devices";
        let mut offset = 0;
        loop {
            check_cancel(self.context.cancel, STEP)?;
            let mut bytes = vec![0; to_usize(CHUNK_BYTES_MAX)];
            let mut count = 0;
            while let Some(room) = bytes.get_mut(count..).filter(|room| !room.is_empty()) {
                match source.read(room).map_err(Cause::Vm).step(STEP)? {
                    0 => break,
                    read => count += read,
                }
            }
            bytes.truncate(count);
            let end = offset + count as u64;
            if end > info.len_bytes_max {
                let (name, len_bytes_max) = (info.name.clone(), info.len_bytes_max);
                let too_long = BlobError::TooLong { name, end, len_bytes_max };
                return Err(ProtocolError::from(too_long)).step(STEP);
            }
            let is_last = count < to_usize(CHUNK_BYTES_MAX);
            if count > 0 && !self.put(BlobChunk { blob: number, offset, bytes }) {
                return Ok(end);
            }
            offset = end;
            if is_last {
                // The device is done before the destination learns that this is all.
                drop(source);
                self.put(BlobChunk { blob: number, offset, bytes: Vec::new() });
                return Ok(offset);
            }
        }
    }

    /// Queues a chunk once it is within the window; false when everything is to end.
    fn put(&self, chunk: BlobChunk) -> bool {
        let end = chunk.offset + chunk.bytes.len() as u64;
        let mut state = self.state.lock();
        loop {
            if state.failure.is_some() {
                return false;
            }
            let Some(flow) = state.flows.get_mut(usize::from(chunk.blob)) else { return false };
            if end <= flow.written + self.window_bytes {
                flow.read = end;
                flow.chunks.push_back(chunk);
                break;
            }
            self.changed.wait(&mut state);
        }
        drop(state);
        self.notify();
        true
    }

    /// The next chunk for a further connection; waits for one with `may_wait`.
    fn next(&self, may_wait: bool) -> Next {
        let mut state = self.state.lock();
        loop {
            if state.failure.is_some() {
                return Next::Over;
            }
            if let Some(chunk) = state.take() {
                return Next::Chunk(chunk);
            }
            match (state.is_taken(), may_wait) {
                (true, _) => return Next::Over,
                (_, false) => return Next::Nothing,
                (_, true) => self.changed.wait(&mut state),
            }
        }
    }

    /// Sends chunks on a further connection until there are no more.
    fn send_chunks(&self, channel: &mut Channel) -> Result<(), Failure> {
        let mut unanswered = 0;
        loop {
            let next = match unanswered {
                UNANSWERED_MAX.. => Next::Nothing,
                count => self.next(count == 0),
            };
            match next {
                Next::Chunk(chunk) => {
                    self.wait_for_turn(chunk.bytes.len() as u64)?;
                    send_chunk(channel, &chunk)?;
                    unanswered += 1;
                }
                Next::Nothing | Next::Over => {
                    if unanswered == 0 {
                        return Ok(());
                    }
                    let limit = channel.connection.stall_timeout();
                    channel.answer(limit).step(STEP)?;
                    unanswered -= 1;
                }
            }
        }
    }

    /// The next chunk for the first connection, whose work ends when all is written.
    fn next_to_lead(&self, may_send: bool) -> Next {
        let mut state = self.state.lock();
        if state.failure.is_some() || state.is_written() {
            return Next::Over;
        }
        let chunk = if may_send { state.take() } else { None };
        chunk.map_or(Next::Nothing, Next::Chunk)
    }

    /// Sends chunks on the first connection, and hears how much is written, until that is all.
    fn lead(&self, control: &mut Channel) -> Result<(), Failure> {
        let limit = control.connection.stall_timeout();
        let mut unanswered = 0;
        // When the destination was heard last, or asked for the first time since.
        let mut since = Instant::now();
        let mut sent_at = since;
        // How far all have come, and since when: the guest stands still meanwhile, and a destination that answers may wait for a
        // device there that never ends.
        let patience = self.context.options.limits.prepare;
        let (mut moved, mut moved_at) = (0, since);
        loop {
            check_cancel(self.context.cancel, STEP)?;
            if control.has_data().map_err(Cause::Resource).step(STEP)? {
                match control.hear_of_blobs().step(STEP)? {
                    Some(written) => self.note_written(&written).step(STEP)?,
                    None => unanswered = one_less(unanswered).step(STEP)?,
                }
                since = Instant::now();
                continue;
            }
            let pause = self.bandwidth_limit.reserve(0);
            match self.next_to_lead(unanswered < UNANSWERED_MAX && pause.is_zero()) {
                Next::Chunk(chunk) => {
                    self.bandwidth_limit.reserve(chunk.bytes.len() as u64);
                    send_chunk(control, &chunk)?;
                }
                Next::Over if unanswered == 0 || self.has_failed() => return Ok(()),
                Next::Nothing if unanswered == 0 && sent_at.elapsed() >= ALIVE_EVERY => {
                    control.tell(&Message::Alive).step(STEP)?;
                }
                Next::Nothing | Next::Over => {
                    let now_moved = self.state.lock().moved();
                    if now_moved != moved {
                        (moved, moved_at) = (now_moved, Instant::now());
                    } else if moved_at.elapsed() >= patience {
                        let waited_s = patience.as_secs();
                        return Err(Cause::DeviceStands { waited_s }).step(STEP);
                    }
                    if unanswered > 0 && since.elapsed() >= limit {
                        let timeout = TransportError::Timeout { what: STEP, after: limit };
                        return Err(timeout).step(STEP);
                    }
                    let pause = if pause.is_zero() { ALIVE_EVERY } else { pause };
                    self.wait(control, pause.min(ALIVE_EVERY)).step(STEP)?;
                    continue;
                }
            }
            sent_at = Instant::now();
            if unanswered == 0 {
                since = sent_at;
            }
            unanswered += 1;
        }
    }

    /// Waits until there may be something to send or to hear, or a cancel.
    fn wait(&self, control: &Channel, limit: Duration) -> Result<(), Cause> {
        use std::os::fd::AsRawFd as _;
        let (cancel, socket) = (self.context.cancel.fd(), control.connection.as_raw_fd());
        let mut polled = [self.bell.entry(), readable(cancel), readable(socket)];
        self.bell.wait_with(&mut polled, Some(limit)).map(drop).map_err(Cause::Resource)
    }

    fn has_failed(&self) -> bool {
        self.state.lock().failure.is_some()
    }

    /// Notes how much of each blob is written.
    fn note_written(&self, written: &[u64]) -> Result<(), ProtocolError> {
        let malformed = |why| ProtocolError::Malformed { what: "BlobsWritten", why };
        let mut state = self.state.lock();
        if written.len() != state.flows.len() {
            return Err(malformed("it has another number of parts of the state"));
        }
        for (flow, written) in state.flows.iter_mut().zip(written) {
            if !(flow.written..=flow.read).contains(written) {
                return Err(malformed("it has less than before, or more than was sent"));
            }
            flow.written = *written;
        }
        drop(state);
        self.notify();
        Ok(())
    }

    /// Waits until the bandwidth limit allows so many bytes more.
    fn wait_for_turn(&self, bytes: u64) -> Result<(), Failure> {
        loop {
            let pause = self.bandwidth_limit.reserve(0);
            if pause.is_zero() {
                self.bandwidth_limit.reserve(bytes);
                return Ok(());
            }
            check_cancel(self.context.cancel, STEP)?;
            std::thread::sleep(pause.min(PACED_LOOK));
        }
    }
}

fn send_chunk(channel: &mut Channel, chunk: &BlobChunk) -> Result<(), Failure> {
    let parts = [Part::Bytes(&chunk.head()), Part::Bytes(&chunk.bytes)];
    let sent = channel.connection.send_parts(&parts);
    sent.map_err(|error| channel.explain(error)).step(STEP)
}

fn one_less(unanswered: usize) -> Result<usize, ProtocolError> {
    let what = "an answer";
    unanswered.checked_sub(1).ok_or(ProtocolError::Malformed { what, why: "nothing was asked" })
}

#[cfg(all(test, not(loom)))]
#[path = "blobs_tests.rs"]
mod tests;
