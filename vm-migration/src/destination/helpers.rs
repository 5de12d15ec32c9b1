// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that receive memory from extra connections while rounds arrive.
//!
//! Owns them from the first message of a connection to its end, whether something arrives there, and which of them
//! failed. A source may send only memory there, and the parts of the state that it has announced.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use super::Context;
use super::blobs::Blobs;
use super::negotiate::unexpected;
use super::tables::{take_frame, take_memory, take_zeros};
use super::unpopulated::Unpopulated;
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::layout::PAGE_BYTES;
use crate::progress::Progress;
use crate::protocol::ProtocolError;
use crate::protocol::blobs::BlobChunk;
use crate::protocol::inflate::Inflater;
use crate::protocol::message::Message;
use crate::ram::GuestMemoryMap;
use crate::transport::{Connection, TransportError};

/// Threads that receive memory from extra connections. Dropping this ends them.
pub(super) struct Helpers {
    threads: Vec<(Arc<Connection>, JoinHandle<Option<Channel>>)>,
    /// Ends their waits between two messages.
    stop: Cancel,
    /// Ends them, whatever they are doing.
    quit: Cancel,
    /// Readable once one of them failed.
    failed: Cancel,
    /// The first failure. Locked for one access.
    failure: Arc<Mutex<Option<Failure>>>,
    activity: Arc<Activity>,
    blobs: SharedBlobs,
}

/// Parts of the state, once they are announced.
pub(super) type SharedBlobs = Arc<OnceLock<Arc<Blobs>>>;

/// What arrives on extra connections, for the time limit of the first one: a source may send all memory here.
#[derive(Default)]
struct Activity {
    /// Pages that were received as contents or as zero, and parts of the state.
    pages: AtomicU64,
    /// Connections in the middle of a message, which has a time limit of its own.
    within: AtomicUsize,
}

impl Activity {
    fn has_gone_on(&self, seen: &mut u64, progress: &Progress) -> bool {
        let pieces = progress.counters.memory_bytes_received.load(Ordering::Relaxed);
        let sign = self.pages.load(Ordering::Relaxed).wrapping_add(pieces);
        let is_within = self.within.load(Ordering::Relaxed) > 0;
        is_within || std::mem::replace(seen, sign) != sign
    }
}

/// While a connection is in the middle of a message.
struct Within<'a>(&'a Activity);

impl<'a> Within<'a> {
    fn begin(activity: &'a Activity) -> Self {
        activity.within.fetch_add(1, Ordering::Relaxed);
        Self(activity)
    }
}

impl Drop for Within<'_> {
    fn drop(&mut self) {
        self.0.within.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Helpers {
    pub(super) fn new() -> Result<Self, Cause> {
        let cancel = || Cancel::new().map_err(Cause::Resource);
        let (stop, quit, failed) = (cancel()?, cancel()?, cancel()?);
        let (failure, activity, blobs) = (Arc::default(), Arc::default(), Arc::default());
        Ok(Self { threads: Vec::new(), stop, quit, failed, failure, activity, blobs })
    }

    /// The parts of the state that come on any connection.
    pub(super) fn blobs(&self) -> &SharedBlobs {
        &self.blobs
    }

    pub(super) fn start<M: GuestMemoryMap>(
        &mut self,
        (memory, fresh): (Arc<M>, Arc<Unpopulated>),
        mut channel: Channel,
        negotiated: bool,
        context: Context<'_>,
    ) -> Result<(), Failure> {
        let connection = Arc::clone(&channel.connection);
        connection.set_cancel(&self.stop);
        let (quit, cancel) = (self.quit.clone(), context.cancel.clone());
        let progress = Arc::clone(context.progress);
        let (failed, failure) = (self.failed.clone(), Arc::clone(&self.failure));
        let (activity, blobs) = (Arc::clone(&self.activity), Arc::clone(&self.blobs));
        let body = move || {
            let stops = [&quit, &cancel];
            let mut taken = 0;
            let part = (&mut channel, &mut taken, &*activity);
            let into = (&*memory, &*fresh, &*blobs);
            let rounds = take_rounds(into, part, negotiated, &progress, &stops);
            match rounds.map_err(|error| (taken, error)) {
                Ok(Rounds::Ended) => None,
                Ok(Rounds::Stopped) => Some(channel),
                Err((taken, error)) => {
                    let why = error.for_peer();
                    let of_the_peer =
                        matches!(error.cause, Cause::Protocol(_) | Cause::Transport(_));
                    if taken == 0 && !negotiated && of_the_peer {
                        // Nothing proves that the connection was the source's, which notices the end
                        // of its own.
                        channel.refuse(&why);
                        log::warn!(
                            "an extra connection was dropped before it carried memory: {why}"
                        );
                        return None;
                    }
                    // The peer reads the reason on this connection, and this side acts on the failure
                    // on the first one. A peer that has read it may end that one at once.
                    failure.lock().get_or_insert(error);
                    channel.refuse(&why);
                    failed.cancel();
                    None
                }
            }
        };
        let thread = stoppable_thread::spawn("mig-receive", body);
        let thread = thread.map_err(Cause::Resource).step("starting a receiver thread")?;
        self.threads.push((connection, thread));
        Ok(())
    }

    /// Number of connections that they read from.
    pub(super) fn count(&self) -> usize {
        self.threads.len()
    }

    /// Whether something arrives, or has arrived since `seen` was set by this: messages, and parts of long ones.
    pub(super) fn are_active(&self, seen: &mut u64, progress: &Progress) -> bool {
        self.activity.has_gone_on(seen, progress)
    }

    /// Readable once one of them failed.
    pub(super) fn failed_fd(&self) -> RawFd {
        self.failed.fd()
    }

    /// The failure of one of them.
    pub(super) fn failure(&self) -> Failure {
        let failure = self.failure.lock().take();
        // Without a recorded failure it has been reported already.
        failure.unwrap_or_else(|| Failure::new("receiving memory", Cause::Cancelled))
    }

    /// The reason why the source has closed the first connection, if that is what it was told on another one.
    pub(super) fn told(&self, failure: Failure) -> Failure {
        if !matches!(failure.cause, Cause::Transport(TransportError::Closed)) {
            return failure;
        }
        self.failure.lock().take().unwrap_or(failure)
    }

    /// Ends the threads; everything that they were sent is acknowledged.
    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        self.end();
        if self.failed.is_cancelled() { Err(self.failure()) } else { Ok(()) }
    }

    /// Ends the threads, of which everything that they were sent is acknowledged, and returns their
    /// connections for other use.
    pub(super) fn return_channels(&mut self) -> Result<Vec<Channel>, Failure> {
        self.stop.cancel();
        let mut channels = Vec::new();
        for (_, thread) in self.threads.drain(..) {
            match thread.join() {
                Ok(channel) => channels.extend(channel),
                Err(_) => self.failed.cancel(),
            }
        }
        if self.failed.is_cancelled() { Err(self.failure()) } else { Ok(channels) }
    }

    fn end(&mut self) {
        self.quit.cancel();
        for (connection, thread) in self.threads.drain(..) {
            connection.shut_down();
            if thread.join().is_err() {
                self.failed.cancel();
            }
        }
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.end();
    }
}

/// Takes bytes of a part of the state; only of those that were announced.
pub(super) fn take_chunk(blobs: &OnceLock<Arc<Blobs>>, chunk: BlobChunk) -> Result<(), Failure> {
    let Some(blobs) = blobs.get() else {
        return Err(unexpected(&Message::BlobChunk(chunk), "Memory"));
    };
    blobs.put(chunk).map_err(ProtocolError::from).step("receiving the state of devices")
}

/// Number of pages whose contents a message has, or says to be zero; 1 for a part of the state.
fn pages_of(message: &Message) -> u64 {
    match message {
        Message::Memory(ranges)
        | Message::ZeroPages(ranges)
        | Message::MemoryZstd { ranges, .. } => {
            ranges.iter().fold(0, |pages, range| pages.saturating_add(range.len_bytes / PAGE_BYTES))
        }
        Message::BlobChunk(_) => 1,
        _ => 0,
    }
}

/// Why a thread has ended.
enum Rounds {
    /// The connection ended.
    Ended,
    /// A stop was requested, and it was between two messages.
    Stopped,
}

/// Receives memory from an extra connection until it ends between two messages; counts those.
fn take_rounds<M: GuestMemoryMap>(
    (memory, fresh, blobs): (&M, &Unpopulated, &OnceLock<Arc<Blobs>>),
    (channel, taken, activity): (&mut Channel, &mut u64, &Activity),
    negotiated: bool,
    progress: &Progress,
    stops: &[&Cancel],
) -> Result<Rounds, Failure> {
    const STEP: &str = "receiving memory on an extra connection";
    let mut inflater = Inflater::default();
    loop {
        if !channel.reader.has_buffered() {
            match channel.connection.wait_for_data(None) {
                Err(TransportError::Cancelled) => return Ok(Rounds::Stopped),
                waited => waited.step(STEP)?,
            }
        }
        // The first message may be that of a stranger if the connection had to show no token.
        let _within = (negotiated || *taken > 0).then(|| Within::begin(activity));
        let message = match channel.timed(Message::read) {
            Err(ProtocolError::Transport(TransportError::Closed)) => return Ok(Rounds::Ended),
            message => message.step(STEP)?,
        };
        let pages = pages_of(&message);
        match message {
            Message::Memory(ranges) => {
                channel
                    .timed(|from| take_memory(memory, fresh, from, &ranges, (progress, stops)))
                    .step(STEP)?;
            }
            Message::MemoryZstd { ranges, frame_bytes } if negotiated => {
                let inflater = &mut inflater;
                channel
                    .timed(|from| {
                        take_frame(memory, (from, inflater), &ranges, frame_bytes, progress)
                    })
                    .step(STEP)?;
            }
            Message::ZeroPages(ranges) if negotiated => {
                take_zeros(memory, &ranges, progress, stops).step(STEP)?;
            }
            Message::BlobChunk(chunk) if negotiated => take_chunk(blobs, chunk)?,
            other => return Err(unexpected(&other, "Memory")),
        }
        *taken += 1;
        activity.pages.fetch_add(pages, Ordering::Relaxed);
        channel.yes().step(STEP)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::GpaRange;
    use crate::phase::Side;

    #[test]
    fn a_part_of_a_first_message_is_a_sign_of_life_and_an_empty_message_is_none() {
        let (activity, progress) = (Activity::default(), Progress::new(Side::Source));
        let mut seen = 0;
        assert!(!activity.has_gone_on(&mut seen, &progress));
        progress.counters.memory_bytes_received.fetch_add(1 << 24, Ordering::Relaxed);
        assert!(activity.has_gone_on(&mut seen, &progress));
        assert!(!activity.has_gone_on(&mut seen, &progress), "once");
        let within = Within::begin(&activity);
        assert!(activity.has_gone_on(&mut seen, &progress));
        drop(within);
        let nothing = GpaRange { gpa: 0, len_bytes: 0 };
        for empty in [vec![], vec![nothing; 3]] {
            assert_eq!(pages_of(&Message::Memory(empty.clone())), 0);
            assert_eq!(pages_of(&Message::MemoryZstd { ranges: empty, frame_bytes: 9 }), 0);
        }
        let page = GpaRange { gpa: 0, len_bytes: PAGE_BYTES };
        assert_eq!(pages_of(&Message::ZeroPages(vec![page, nothing, page])), 2);
    }
}
