// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One set of connections of a postcopy and its threads.
//!
//! Owns the first failure of a set and the end of all its threads, and those that were started before there was anything
//! for them to do: they wait, and none has to be started at a moment for which the guest is stopped. A set is never
//! repaired: when one of its connections is lost, all of them end, and recovery makes another set. State that outlives a
//! set (which pages are missing, which threads wait) is kept elsewhere.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, SendError, Sender};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use stoppable_thread::{Builder, StoppableThread};

use crate::cancel::Cancel;
use crate::error::{Cause, Failure, Step};
use crate::figures::rate;
use crate::layout::PAGE_BYTES;
use crate::progress::Progress;
#[cfg(test)]
use crate::threads::ThreadLimit;

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
        self.fails_with(failure);
    }

    /// The same; true if it is the first.
    pub(crate) fn fails_with(&self, failure: Failure) -> bool {
        // Errors that follow from the stop are not its cause.
        let mut is_first = false;
        if !matches!(failure.cause, Cause::Cancelled) {
            let mut first = self.failure.lock();
            is_first = first.is_none();
            first.get_or_insert(failure);
        }
        self.stop.cancel();
        is_first
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
    /// It is one of so many threads that work in the background, on a host on which so many vCPUs of the guest run.
    Later { vcpus: u32, threads: u32 },
}

/// What a thread does that was started before it was known.
type Work = Box<dyn FnOnce() + Send>;

/// A thread that waits for what it is to do. Dropping this lets it end.
#[derive(Debug)]
struct Parked {
    name: &'static str,
    work: Sender<Work>,
}

/// The threads of a set of connections. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Session {
    fate: Arc<SessionState>,
    /// Those that wait for what they are to do.
    parked: Vec<Parked>,
    /// All of them.
    threads: Vec<StoppableThread>,
    #[cfg(test)]
    limit: Option<ThreadLimit>,
}

impl Session {
    pub(crate) fn new() -> Result<Self, Failure> {
        const STEP: &str = "preparing to serve pages";
        #[cfg(test)]
        test_short_of_descriptors().map_err(Cause::Resource).step(STEP)?;
        let stop = Cancel::new().map_err(Cause::Resource).step(STEP)?;
        let fate = Arc::new(SessionState { stop, failure: Mutex::new(None) });
        Ok(Self {
            fate,
            parked: Vec::new(),
            threads: Vec::new(),
            #[cfg(test)]
            limit: ThreadLimit::of_caller(),
        })
    }

    pub(crate) fn fate(&self) -> &Arc<SessionState> {
        &self.fate
    }

    /// Starts a thread that waits until [`spawn`](Self::spawn) has something to do for one of its name, or the set ends.
    ///
    /// # Errors
    /// The host gives no thread.
    pub(crate) fn park(&mut self, name: &'static str, urgency: Urgency) -> io::Result<()> {
        let (work, given) = mpsc::channel::<Work>();
        self.start(name, urgency, move || {
            if let Ok(work) = given.recv() {
                work();
            }
        })?;
        self.parked.push(Parked { name, work });
        Ok(())
    }

    /// Lets those end that wait for something to do, but for so many of this name. The end of the set waits for them.
    pub(crate) fn dismiss(&mut self, name: &str, but: usize) {
        let mut stay = but;
        self.parked.retain(|parked| {
            let goes = parked.name == name && stay == 0;
            stay -= usize::from(parked.name == name && !goes);
            !goes
        });
    }

    /// Has a thread that owns `part` (a connection) do this: one that waits, or else a new one. Its failure is noted
    /// before the peer can see the connection end.
    pub(crate) fn spawn<T: Send + 'static>(
        &mut self,
        name: &'static str,
        urgency: Urgency,
        mut part: T,
        work: impl FnOnce(&mut T) -> Result<(), Failure> + Send + 'static,
        fail: impl FnOnce(Failure) + Send + 'static,
    ) -> Result<(), Failure> {
        let mut body: Work = Box::new(move || {
            if let Err(failure) = work(&mut part) {
                fail(failure);
            }
            drop(part);
        });
        if let Some(at) = self.parked.iter().rposition(|parked| parked.name == name) {
            match self.parked.swap_remove(at).work.send(body) {
                Ok(()) => return Ok(()),
                Err(SendError(back)) => body = back,
            }
        }
        self.start(name, urgency, body).map_err(Cause::Resource).step("starting a page thread")
    }

    fn start(
        &mut self,
        name: &'static str,
        urgency: Urgency,
        body: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        #[cfg(test)]
        if let Some(limit) = &self.limit {
            limit.begin(name)?;
        }
        let stop = self.fate.stop.clone();
        let builder = Builder::new(name);
        let builder = match urgency {
            // A thread of the VMM has no capability for it afterwards.
            Urgency::Now => builder.before_hook(hurry),
            Urgency::Later { vcpus, threads } => match nice_for(vcpus, threads, processors()) {
                0 => builder,
                nice => builder.before_hook(move || be_nice(nice)),
            },
        };
        self.threads.push(StoppableThread::build(builder, move || stop.cancel(), body)?);
        Ok(())
    }

    /// Ends all threads, and then closes their connections.
    pub(crate) fn end(&mut self) {
        self.fate.stop.cancel();
        self.parked.clear();
        #[cfg(test)]
        if let Some(limit) = &self.limit {
            limit.end(self.threads.len());
        }
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

/// The niceness with which those threads of the background that share a processor get about as much of it together as
/// the guest's vCPUs that do: as a thread among many each would get next to nothing, and the guest would wait for each of
/// its pages. 0, as for any thread, where there are no more vCPUs than processors, or than threads that have to share.
fn nice_for(vcpus: u32, threads: u32, processors: u32) -> libc::c_int {
    /// The scheduler gives a thread so much more for each step.
    const STEP: f64 = 1.25;
    let mut share = f64::from(processors.max(threads).max(1)) * STEP;
    let mut nice = 0;
    while share <= f64::from(vcpus) && nice > NICE_MIN {
        share *= STEP;
        nice -= 1;
    }
    nice
}

/// Processors that this process may use; 1 if that is not known.
fn processors() -> u32 {
    u32::try_from(process_facts::usable_processors()).unwrap_or(u32::MAX)
}

/// Sets the niceness of the calling thread, as far as this process may.
fn be_nice(nice: libc::c_int) {
    // SAFETY: changes how the calling thread, which 0 stands for, is scheduled, and touches no memory.
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
}

/// The niceness of a thread that is to go before all others that are scheduled by it.
const NICE_MIN: libc::c_int = -19;

/// Gives the calling thread a high scheduling priority, as far as this process may: it sleeps most of the
/// time, and a vCPU waits for it when it wakes. Without the permission nothing changes.
fn hurry() {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: changes how the calling thread is scheduled and touches no memory but `priority`.
    let real_time = unsafe {
        libc::sched_setscheduler(0, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, &raw const priority)
    };
    if real_time != 0 {
        be_nice(NICE_MIN);
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

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

    use super::*;
    use crate::testing::Calls;

    #[test]
    fn the_background_weighs_as_much_as_the_vcpus_that_share_its_processor() {
        for (vcpus, processors) in [(0, 2), (0, 0), (1, 1), (2, 2), (64, 64), (160, 256)] {
            assert_eq!(nice_for(vcpus, 1, processors), 0, "{vcpus} on {processors}");
        }
        assert_eq!(nice_for(2, 1, 0), nice_for(2, 1, 1), "at least one");
        assert_eq!([3, 4, 16, 64].map(|vcpus| nice_for(vcpus, 1, 2)), [-1, -3, -9, -15]);
        assert_eq!([160, u32::MAX].map(|vcpus| nice_for(vcpus, 1, 2)), [NICE_MIN; 2]);
    }

    #[test]
    fn threads_of_the_background_that_share_a_processor_weigh_that_together() {
        for threads in [0, 1, 2] {
            assert_eq!(nice_for(64, threads, 2), -15, "{threads} have a processor each");
        }
        assert_eq!(
            [4, 8, 32, 64, 128].map(|threads| nice_for(64, threads, 2)),
            [-12, -9, -3, 0, 0]
        );
        // A step is a quarter: the sum is that of the vCPUs, or less by a step.
        for (vcpus, threads, processors) in [(64, 4, 2), (160, 16, 8), (100, 7, 3)] {
            let each = 1.25_f64.powi(-nice_for(vcpus, threads, processors));
            let (all, of_vcpus) = (each * f64::from(threads), f64::from(vcpus));
            assert!((of_vcpus / 1.25..=of_vcpus).contains(&all), "{all} against {of_vcpus}");
        }
    }

    /// A set, what notes the threads that it starts, and where one says that it works.
    fn limited(most: usize) -> (Session, ThreadLimit, Calls) {
        let calls = Calls::default();
        let limit = ThreadLimit::set(most, &calls);
        let session = Session::new().unwrap();
        ThreadLimit::lift();
        (session, limit, calls)
    }

    #[test]
    fn what_is_to_be_done_is_done_by_a_thread_that_waits_or_else_by_a_new_one() {
        let (mut session, _, calls) = limited(2);
        session.park("waits", Urgency::Now).unwrap();
        let (done, works) = mpsc::channel();
        let spawn = |name, session: &mut Session| {
            let done = done.clone();
            let work = move |(): &mut ()| {
                let thread = std::thread::current();
                done.send(thread.name().unwrap().to_owned()).unwrap();
                Ok(())
            };
            session.spawn(name, Urgency::Now, (), work, |failure| panic!("{failure:?}"))
        };
        spawn("waits", &mut session).unwrap();
        assert_eq!(works.recv().unwrap(), "waits");
        assert_eq!(calls.lock().len(), 1, "the one that waited");
        spawn("another", &mut session).unwrap();
        assert_eq!(works.recv().unwrap(), "another");
        assert_eq!(calls.lock().len(), 2);
        let failure = spawn("waits", &mut session).unwrap_err();
        assert_eq!(failure.step, "starting a page thread", "none waits any more");
    }

    #[test]
    fn threads_that_wait_end_with_the_set_and_before_if_they_are_let_go() {
        let (mut session, limit, _) = limited(9);
        for name in ["one", "other", "one", "one"] {
            session.park(name, Urgency::Now).unwrap();
        }
        session.dismiss("one", 1);
        let names: Vec<_> = session.parked.iter().map(|parked| parked.name).collect();
        assert_eq!(names, ["one", "other"]);
        drop(session);
        assert_eq!(limit.there(), 0);
    }
}
