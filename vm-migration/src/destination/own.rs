// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections that belong to one vCPU each: its thread reads the answer to its own request there.
//!
//! Owns what is asked for on such a connection, the wait of the vCPU for it, and the one thread that reads on all of
//! them what no vCPU waits for: pages that were predicted, pages of a vCPU that was kicked, pages that other threads
//! have asked for there. Who reads is decided in `claim`, and read without blocking (`inbox`), so a vCPU's wait ends
//! at any byte, once what has come is placed, when its bell rings: its page has come on another connection, it was kicked, the set of
//! connections is over, or the engine has failed. When a set has been closed nothing of it is placed any more: the next
//! one begins with a list of what is missing. On the way of a fault no lock is shared with another vCPU.

use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::claim::Claim;
use super::engine::{Engine, Via};
use super::fault::receiver_failed;
use super::inbox::Inbox;
use super::waiters::Waiting;
use crate::bell::{Bell, Heard, readable};
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::layout::GpaRange;
use crate::ram::GuestMemoryMap;
use crate::session::SessionState;
use crate::transport::Connection;

/// Ranges that are remembered as asked for on one connection.
const ASKED_MAX: usize = 1024;

/// What was asked for on a connection and may not have come.
#[derive(Default)]
struct Asked {
    ranges: Vec<GpaRange>,
    /// There were more than are remembered: something may still come, as long as the connection lasts.
    has_more: bool,
}

/// A connection on which one vCPU asks, and reads the answers while it waits.
#[repr(align(128))]
pub(super) struct OwnConnection {
    claim: Claim<Inbox>,
    /// What was asked for here and may not have come. Locked for one look; seldom by others than the vCPU.
    asked: Mutex<Asked>,
    connection: Arc<Connection>,
    /// Nothing is read here any more.
    over: AtomicBool,
    /// Rings for the thread that reads what is left.
    others: Arc<Bell>,
    fate: Arc<SessionState>,
}

impl OwnConnection {
    pub(super) fn new(channel: Channel, others: &Arc<Bell>, fate: &Arc<SessionState>) -> Self {
        let inbox = Inbox::new(channel);
        Self {
            connection: Arc::clone(inbox.connection()),
            claim: Claim::new(inbox),
            asked: Mutex::default(),
            over: AtomicBool::new(false),
            others: Arc::clone(others),
            fate: Arc::clone(fate),
        }
    }

    /// Notes what is about to be asked for here.
    pub(super) fn note(&self, ranges: &[GpaRange]) {
        let mut asked = self.asked.lock();
        let room = ASKED_MAX.saturating_sub(asked.ranges.len());
        asked.has_more |= ranges.len() > room;
        asked.ranges.extend(ranges.iter().take(room));
    }

    /// Ends all reading here, and returns when nothing that came here is being placed any more.
    pub(super) fn close(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.connection.shut_down();
        self.claim.wait().close();
    }

    /// Has the answers read by the other thread: they were not asked for by the vCPU.
    pub(super) fn leave(&self) {
        self.claim.leave(&self.others);
    }

    fn is_owed<M: GuestMemoryMap>(&self, engine: &Engine<M>) -> bool {
        let mut asked = self.asked.lock();
        asked.ranges.retain(|range| engine.is_any_missing(*range));
        asked.has_more || !asked.ranges.is_empty()
    }

    /// Waits for a page on the thread of vCPU `vcpu`, which reads what comes here meanwhile. Returns when the page is
    /// here, or the vCPU's bell has rung. `asks`: the vCPU has just asked for something here, the page or others.
    pub(super) fn wait_for<M: GuestMemoryMap>(
        &self,
        engine: &Engine<M>,
        (vcpu, waiting): (usize, &Waiting<'_>),
        asks: bool,
        is_missing: impl Fn() -> bool,
    ) {
        if !is_missing() {
            if asks {
                // The answer comes all the same, and the vCPU does not read it.
                self.leave();
            }
            return;
        }
        let bell = waiting.bell();
        let end = (!self.over.load(Ordering::SeqCst)).then(|| self.claim.take(&self.others));
        let Some(mut inbox) = end.flatten() else { return bell.wait() };
        let read = self.read_until(&mut inbox, engine, (vcpu, bell), is_missing);
        self.claim.release(inbox, &self.others, || self.is_owed(engine));
        match read {
            Ok(()) => {}
            Err(failure) if failure.cause.is_short_of_memory() => {
                // The other thread waits for the host, and this one can be kicked.
                self.leave();
                bell.wait();
            }
            Err(failure) => {
                self.fail(engine, failure);
                bell.wait();
            }
        }
    }

    fn read_until<M: GuestMemoryMap>(
        &self,
        inbox: &mut Inbox,
        engine: &Engine<M>,
        (vcpu, bell): (usize, &Bell),
        is_missing: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        while is_missing() && !inbox.is_closed() {
            if inbox.take_next(engine, Via::Own(vcpu))? {
                // However much comes, a kick ends the wait.
                if bell.take_ring() {
                    return Ok(());
                }
                continue;
            }
            let heard = bell.wait_or(self.connection.as_raw_fd()).map_err(Cause::Resource);
            if heard.step("waiting for a page")? == Heard::Ring {
                return Ok(());
            }
        }
        Ok(())
    }

    fn fail<M: GuestMemoryMap>(&self, engine: &Engine<M>, failure: Failure) {
        self.over.store(true, Ordering::SeqCst);
        receiver_failed(engine, &self.fate, failure);
    }

    /// Reads what is here, on the other thread; with `any` also if nothing is expected.
    fn read_left<M: GuestMemoryMap>(&self, engine: &Engine<M>, any: bool) {
        if self.is_over() {
            return;
        }
        let Some(mut inbox) = self.claim.take_left(any) else { return };
        let read = loop {
            match inbox.take_next(engine, Via::Urgent) {
                Ok(true) if !self.fate.stop().is_cancelled() => {}
                Ok(_) => break Ok(()),
                Err(failure) => break Err(failure),
            }
        };
        self.claim.release_left(inbox, || self.is_owed(engine));
        if let Err(failure) = read {
            self.fail(engine, failure);
        }
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }
}

/// What the thread has that reads what is left on the connections of a set.
pub(super) struct Leftovers {
    pub(super) connections: Vec<Arc<OwnConnection>>,
    pub(super) bell: Arc<Bell>,
    /// How often those are looked at where nothing is expected.
    pub(super) look_every: Duration,
}

impl Leftovers {
    /// Reads what no vCPU waits for, until the set of connections is over.
    ///
    /// # Errors
    /// When the host cannot wait.
    pub(super) fn read<M: GuestMemoryMap>(
        &mut self,
        engine: &Engine<M>,
        fate: &SessionState,
    ) -> Result<(), Failure> {
        const STEP: &str = "receiving pages";
        let mut entries = Vec::new();
        let mut heard = Heard::Ring;
        let mut next_look = Instant::now() + self.look_every;
        while !fate.stop().is_cancelled() {
            let now = Instant::now();
            if now >= next_look {
                // Connections that have ended, and what was not expected, of which a part may have been received.
                self.connections.iter().for_each(|one| one.read_left(engine, true));
                next_look = now + self.look_every;
            } else if heard == Heard::Ring {
                // Of what was left since, a part may have been received already: that shows in no poll.
                for one in &self.connections {
                    one.read_left(engine, false);
                }
            }
            entries.clear();
            entries.extend([self.bell.entry(), readable(fate.stop().fd())]);
            entries.extend(self.connections.iter().map(|one| {
                let polls = one.claim.is_left() && !one.is_over();
                // Poll passes over what is negative.
                readable(if polls { one.connection.as_raw_fd() } else { -1 })
            }));
            let left = next_look.saturating_duration_since(Instant::now());
            let waited = self.bell.wait_with(&mut entries, Some(left));
            heard = waited.map_err(Cause::Resource).step(STEP)?;
            if heard == Heard::Ready {
                self.read_ready(engine, entries.get(2..).unwrap_or_default());
            }
        }
        Ok(())
    }

    /// Reads where something is ready, by an entry for each connection in their order.
    fn read_ready<M: GuestMemoryMap>(&self, engine: &Engine<M>, entries: &[libc::pollfd]) {
        for (one, entry) in self.connections.iter().zip(entries) {
            if entry.revents != 0 {
                one.read_left(engine, false);
            }
        }
    }
}

impl Drop for Leftovers {
    fn drop(&mut self) {
        // A vCPU that is about to release one keeps none open.
        for one in &self.connections {
            one.connection.shut_down();
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "own_tests.rs"]
mod tests;
