// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One set of connections of a postcopy and its threads.
//!
//! Owns the first failure of a set and the end of all its threads. A set is never repaired: when one of its
//! connections is lost, all of them end, and recovery makes another set. State that outlives a set (which
//! pages are missing, which threads wait) is kept elsewhere.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use stoppable_thread::{Builder, StoppableThread};

use crate::cancel::Cancel;
use crate::error::{Cause, Failure, Step};
use crate::figures::rate;
use crate::layout::PAGE_BYTES;
use crate::progress::Progress;

/// How often the destination asks whether the source is alive.
pub(crate) const ALIVE_EVERY: Duration = Duration::from_secs(1);

/// State of a set of connections, shared by its threads.
#[derive(Debug)]
pub(crate) struct SessionState {
    /// Ends every wait on the set's connections.
    stop: Cancel,
    /// The first failure. Locked for one access.
    failure: Mutex<Option<Failure>>,
}

impl SessionState {
    /// Notes a failure and ends the set.
    pub(crate) fn fail(&self, failure: Failure) {
        // Errors that follow from the stop are not its cause.
        if !matches!(failure.cause, Cause::Cancelled) {
            let mut first = self.failure.lock();
            first.get_or_insert(failure);
        }
        self.stop.cancel();
    }

    pub(crate) fn stop(&self) -> &Cancel {
        &self.stop
    }

    pub(crate) fn take_failure(&self) -> Option<Failure> {
        self.failure.lock().take()
    }
}

/// Scheduling priority of a thread when there are more threads than processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Another thread waits for its work.
    Now,
    /// It works in the background.
    Later,
}

/// The threads of a set of connections. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Session {
    fate: Arc<SessionState>,
    threads: Vec<StoppableThread>,
}

impl Session {
    pub(crate) fn new() -> Result<Self, Failure> {
        const STEP: &str = "preparing to serve pages";
        #[cfg(test)]
        test_short_of_descriptors().map_err(Cause::Resource).step(STEP)?;
        let stop = Cancel::new().map_err(Cause::Resource).step(STEP)?;
        let fate = Arc::new(SessionState { stop, failure: Mutex::new(None) });
        Ok(Self { fate, threads: Vec::new() })
    }

    pub(crate) fn fate(&self) -> &Arc<SessionState> {
        &self.fate
    }

    /// Starts a thread that owns `part` (a connection). Its failure is noted before the peer can see the
    /// connection end.
    pub(crate) fn spawn<T: Send + 'static>(
        &mut self,
        name: &str,
        urgency: Urgency,
        mut part: T,
        work: impl FnOnce(&mut T) -> Result<(), Failure> + Send + 'static,
        fail: impl FnOnce(Failure) + Send + 'static,
    ) -> Result<(), Failure> {
        let body = move || {
            if let Err(failure) = work(&mut part) {
                fail(failure);
            }
            drop(part);
        };
        let stop = self.fate.stop.clone();
        let builder = Builder::new(name);
        let builder = match urgency {
            // A thread of the VMM has no capability for it afterwards.
            Urgency::Now => builder.before_hook(hurry),
            Urgency::Later => builder,
        };
        let thread = StoppableThread::build(builder, move || stop.cancel(), body);
        self.threads.push(thread.map_err(Cause::Resource).step("starting a page thread")?);
        Ok(())
    }

    /// Ends all threads, and then closes their connections.
    pub(crate) fn end(&mut self) {
        self.fate.stop.cancel();
        self.threads.clear();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
thread_local! {
    /// How many of the next sets of the calling thread fail for lack of a descriptor.
    pub(crate) static SHORT_OF_DESCRIPTORS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
fn test_short_of_descriptors() -> std::io::Result<()> {
    let left = SHORT_OF_DESCRIPTORS.get();
    SHORT_OF_DESCRIPTORS.set(left.saturating_sub(1));
    if left > 0 { Err(std::io::Error::from_raw_os_error(libc::EMFILE)) } else { Ok(()) }
}

/// Gives the calling thread a high scheduling priority, as far as this process may: it sleeps most of the
/// time, and a vCPU waits for it when it wakes. Without the permission nothing changes.
fn hurry() {
    const NICE: libc::c_int = -19;
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: changes how the calling thread is scheduled and touches no memory but `priority`.
    let real_time = unsafe {
        libc::sched_setscheduler(0, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, &raw const priority)
    };
    if real_time != 0 {
        // SAFETY: as above; 0 is the calling thread.
        let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
    }
}

/// Rates over the last second for the progress document, and samples for the report.
pub(crate) struct Rates {
    /// Time and pages moved by then; the oldest sample is about a second old.
    samples: VecDeque<(Instant, (u64, u64))>,
}

impl Rates {
    /// Shortest distance between two samples.
    const EVERY: Duration = Duration::from_millis(50);

    pub(crate) fn new(progress: &Progress) -> Self {
        Self { samples: VecDeque::from([(Instant::now(), progress.pages_moved())]) }
    }

    pub(crate) fn sample(&mut self, progress: &Progress) {
        progress.note_sample(false);
        let now = Instant::now();
        let age = |at: Option<&(Instant, _)>| at.map(|at| now.duration_since(at.0));
        if age(self.samples.back()).is_some_and(|age| age < Self::EVERY) {
            return;
        }
        while age(self.samples.get(1)).is_some_and(|age| age >= ALIVE_EVERY) {
            self.samples.pop_front();
        }
        let (bulk, urgent) = progress.pages_moved();
        if let Some((at, before)) = self.samples.front() {
            let took = now.duration_since(*at);
            let rate = |now: u64, then: u64| rate(PAGE_BYTES * now.saturating_sub(then), took);
            let counters = &progress.counters;
            counters.bulk_bytes_per_s.store(rate(bulk, before.0), Ordering::Relaxed);
            counters.urgent_bytes_per_s.store(rate(urgent, before.1), Ordering::Relaxed);
        }
        self.samples.push_back((now, (bulk, urgent)));
    }
}
