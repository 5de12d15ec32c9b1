// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Parts of the state between the devices that they are read of and the connections.
//!
//! Owns the threads that read, one for each blob, in order and no further than its window beyond what is written of it; and
//! all that they touch, with them: a call into a device may never return, and its thread is left behind then. So nothing here
//! borrows, and what is waited for has a limit ([`Flows::end`]). Must never know what the bytes mean.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::bell::Bell;
use crate::error::{Cause, Failure, Step};
use crate::layout::to_usize;
use crate::left_threads::Stay;
use crate::protocol::ProtocolError;
use crate::protocol::blobs::{BlobChunk, BlobError, BlobInfo, CHUNK_BYTES_MAX, window_bytes};
use crate::vm::BlobSource;

const STEP: &str = "reading the state of devices";

/// What all threads share.
pub(super) struct Flows {
    pub infos: Vec<BlobInfo>,
    pub window_bytes: u64,
    pub state: Mutex<State>,
    /// A chunk has come, more was written, a blob or its thread has ended, or something has failed.
    changed: Condvar,
    /// The same, for the thread of the first connection.
    pub bell: Bell,
}

pub(super) struct State {
    /// By blob.
    pub flows: Vec<Flow>,
    /// The blob whose turn it is to be sent.
    turn: usize,
    failure: Option<Failure>,
    /// All threads are to end.
    is_over: bool,
}

/// How far a blob has come.
#[derive(Default)]
pub(super) struct Flow {
    /// Chunks that are still to be sent.
    chunks: VecDeque<BlobChunk>,
    /// The end of what was read.
    read: u64,
    /// What the destination has written.
    written: u64,
    /// All is read.
    pub is_read: bool,
    /// Its thread, which has ended before it begins.
    stay: Stay,
}

/// What a connection has to send next.
pub(super) enum Next {
    Chunk(BlobChunk),
    /// Nothing now.
    Nothing,
    /// Nothing any more.
    Over,
}

/// How all ended.
pub(super) struct Ended {
    /// The lengths of the blobs, or the first failure.
    pub lens: Result<Vec<u64>, Failure>,
    /// The blobs whose devices hang, and for how long.
    pub left: Vec<(usize, Duration)>,
}

impl State {
    /// The next chunk, of each blob in turn.
    pub(super) fn take(&mut self) -> Option<BlobChunk> {
        let turn = self.turn;
        let (before, after) = self.flows.split_at_mut_checked(turn)?;
        let mut flows = (turn..).zip(after).chain((0..).zip(before));
        let (number, chunk) =
            flows.find_map(|(number, flow)| Some((number, flow.chunks.pop_front()?)))?;
        self.turn = number + 1;
        Some(chunk)
    }

    /// Bytes that are read here, and written there.
    pub(super) fn moved(&self) -> u64 {
        let both = self.flows.iter().flat_map(|flow| [flow.read, flow.written]);
        both.fold(0, u64::saturating_add)
    }

    pub(super) fn is_taken(&self) -> bool {
        self.flows.iter().all(|flow| flow.is_read && flow.chunks.is_empty())
    }

    pub(super) fn is_written(&self) -> bool {
        self.is_taken() && self.flows.iter().all(|flow| flow.written == flow.read)
    }
}

impl Flows {
    pub(super) fn new(infos: &[BlobInfo]) -> Result<Self, Failure> {
        let flows = infos.iter().map(|_| Flow::default()).collect();
        Ok(Self {
            infos: infos.to_vec(),
            window_bytes: window_bytes(infos.len()),
            state: Mutex::new(State { flows, turn: 0, failure: None, is_over: false }),
            changed: Condvar::new(),
            bell: Bell::new().map_err(Cause::Resource).step(STEP)?,
        })
    }

    /// Starts a thread for each blob. One that cannot be started is a failure of all.
    pub(super) fn start(
        self: &Arc<Self>,
        sources: Vec<Box<dyn BlobSource>>,
    ) -> Vec<JoinHandle<()>> {
        let mut readers = Vec::new();
        for (number, source) in (0_u16..).zip(sources) {
            let flows = Arc::clone(self);
            let read = move || flows.read(number, source);
            match stoppable_thread::spawn("mig-state", read) {
                Ok(reader) => readers.push(reader),
                Err(error) => {
                    self.fail(Failure::new(STEP, Cause::Resource(error)));
                    self.end_of(number.into());
                }
            }
        }
        readers
    }

    /// Ends all threads, and waits for them; for those in the call of a device no longer than `leave`, and not at all for one that
    /// has hung for `patience` by now. Those that remain are left behind.
    pub(super) fn end(
        &self,
        readers: Vec<JoinHandle<()>>,
        leave: Duration,
        patience: Duration,
    ) -> Ended {
        let mut state = self.state.lock();
        state.is_over = true;
        self.changed.notify_all();
        let deadline = Instant::now() + leave;
        let is_awaited = |flow: &Flow| !flow.stay.has_ended && flow.stay.hangs(patience).is_none();
        while state.flows.iter().any(is_awaited)
            && !self.changed.wait_until(&mut state, deadline).timed_out()
        {}
        let mut left = Vec::new();
        for (number, (flow, info)) in state.flows.iter_mut().zip(&self.infos).enumerate() {
            if !flow.stay.has_ended {
                flow.chunks.clear();
                flow.stay.leave(&info.name);
                left.push((number, flow.stay.hangs(Duration::ZERO).unwrap_or(leave)));
            }
        }
        let lens = match state.failure.take() {
            Some(failure) => Err(failure),
            None => Ok(state.flows.iter().map(|flow| flow.read).collect()),
        };
        drop(state);
        if left.is_empty() {
            for reader in readers {
                reader.join().unwrap_or_else(|panic| resume_unwind(panic));
            }
        }
        Ended { lens, left }
    }

    /// Whether the call of a device takes so long already.
    pub(super) fn one_hangs(&self, limit: Duration) -> bool {
        self.state.lock().flows.iter().any(|flow| flow.stay.hangs(limit).is_some())
    }

    pub(super) fn has_failed(&self) -> bool {
        self.state.lock().failure.is_some()
    }

    fn notify(&self) {
        self.changed.notify_all();
        self.bell.ring();
    }

    pub(super) fn noting(&self, done: Result<(), Failure>) {
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

    /// The thread of a blob has ended, or there is none.
    fn end_of(&self, number: usize) {
        let mut state = self.state.lock();
        if let (Some(flow), Some(info)) = (state.flows.get_mut(number), self.infos.get(number)) {
            flow.stay.end(&info.name);
        }
        drop(state);
        self.notify();
    }

    /// Reads a blob to its end. A failure is noted.
    fn read(&self, number: u16, source: Box<dyn BlobSource>) {
        let _ended = EndOfThread { flows: self, number: number.into() };
        let Some(info) = self.infos.get(usize::from(number)) else { return };
        // Also its end is a call into the device, however this ends.
        let mut source = Some(Open { flows: self, number, source: Some(source) });
        let read = self.read_all(number, info, &mut source);
        // Before it counts as read, so that nothing is taken for whole, and before the end of the source, which may hang: then
        // the migration ends with what has failed first.
        self.noting(read);
        drop(source);
        if let Some(flow) = self.state.lock().flows.get_mut(usize::from(number)) {
            flow.is_read = true;
        }
        self.notify();
    }

    /// Makes a call into a device.
    fn calling<T>(&self, number: u16, call: impl FnOnce() -> T) -> T {
        let note = |called: Option<Instant>| {
            if let Some(flow) = self.state.lock().flows.get_mut(usize::from(number)) {
                flow.stay.called = called;
            }
        };
        note(Some(Instant::now()));
        let done = call();
        note(None);
        done
    }

    fn read_all(
        &self,
        number: u16,
        info: &BlobInfo,
        open: &mut Option<Open<'_>>,
    ) -> Result<(), Failure> {
        let mut offset = 0;
        while !self.is_over() {
            let mut bytes = vec![0; to_usize(CHUNK_BYTES_MAX)];
            let mut count = 0;
            while let Some(room) = bytes.get_mut(count..).filter(|room| !room.is_empty()) {
                let Some(source) = open else { break };
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
                return Ok(());
            }
            offset = end;
            if is_last {
                // The device is done before the destination learns that this is all.
                *open = None;
                self.put(BlobChunk { blob: number, offset, bytes: Vec::new() });
                return Ok(());
            }
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        let state = self.state.lock();
        state.is_over || state.failure.is_some()
    }

    /// Queues a chunk once it is within the window; false when everything is to end.
    pub(super) fn put(&self, chunk: BlobChunk) -> bool {
        let end = chunk.offset + chunk.bytes.len() as u64;
        let mut state = self.state.lock();
        loop {
            if state.is_over || state.failure.is_some() {
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
    pub(super) fn next(&self, may_wait: bool) -> Next {
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

    /// The next chunk for the first connection, whose work ends when all is written.
    pub(super) fn next_to_lead(&self, may_send: bool) -> Next {
        let mut state = self.state.lock();
        if state.failure.is_some() || state.is_written() {
            return Next::Over;
        }
        let chunk = if may_send { state.take() } else { None };
        chunk.map_or(Next::Nothing, Next::Chunk)
    }

    /// Notes how much of each blob is written.
    pub(super) fn note_written(&self, written: &[u64]) -> Result<(), ProtocolError> {
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
}

/// A source that is being read.
struct Open<'a> {
    flows: &'a Flows,
    number: u16,
    /// Present until it is dropped.
    source: Option<Box<dyn BlobSource>>,
}

impl Open<'_> {
    fn read(&mut self, room: &mut [u8]) -> Result<usize, crate::vm::VmError> {
        let Some(source) = &mut self.source else { return Ok(0) };
        self.flows.calling(self.number, || source.read(room))
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let source = self.source.take();
        self.flows.calling(self.number, || drop(source));
    }
}

/// Says that a thread has ended, also if it has panicked: then the others end as well.
struct EndOfThread<'a> {
    flows: &'a Flows,
    number: usize,
}

impl Drop for EndOfThread<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let what = std::io::Error::other("a thread that reads the state of a device panicked");
            self.flows.fail(Failure::new(STEP, Cause::Resource(what)));
        }
        self.flows.end_of(self.number);
    }
}

#[cfg(all(test, not(loom)))]
#[path = "flows_tests.rs"]
mod tests;
