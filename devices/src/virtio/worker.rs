// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The threads that serve a device's queues.
//!
//! Owns their life cycle: start, pause, resume, stop. What a thread is to do is a value that it reads
//! whenever it is woken, so a request cannot be lost, whatever the order of wake-ups. A paused thread
//! has nothing in flight, has published the state of its queues and waits only on the condition
//! variable. A thread whose driver broke a rule serves no more requests, but still does what its device owes
//! to the host, and answers pause, resume and stop. Requests in flight may take forever (storage that does not respond), so a
//! pause that is not complete can be waited for with a time limit, and cancelled at any time.
//!
//! ```text
//!            +------- resume -------+
//!            v                      |
//!   start > Run -- pause --> ... Paused
//!            |                |
//!            +---- stop ------+----> ended
//! ```

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::{debug, error};
use parking_lot::{Condvar, Mutex, MutexGuard};
use smallvec::SmallVec;
use stoppable_thread::StoppableThread;
use virtio_queue::QueueState;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::device::ActivateError;
use super::queue::Broken;
use crate::{LogLimit, log_limited, syscalls};

const CONTROL_TOKEN: u64 = u64::MAX;
/// Maximum number of events taken from epoll at a time.
const EVENTS_MAX: usize = 16;

/// The work of a worker thread. All methods are called on that thread.
pub(crate) trait Work: Send + 'static {
    /// Kind of the thread, by which the process prepares threads; device ids are chosen by clients.
    fn kind(&self) -> &'static str;
    /// Starts, or continues after a pause: sets the watched descriptors and serves pending requests, as an
    /// earlier thread may have cleared their notifications.
    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken>;
    /// Handles a watched descriptor that is ready.
    fn ready(&mut self, token: u64, watch: &mut Watch) -> Result<(), Broken>;
    /// Does what is done once for all descriptors that were ready together, after [`Work::ready`] for each of them; also
    /// after a wait that has ended at its limit ([`Watch::limit_wait`]).
    fn settle(&mut self, _watch: &mut Watch) -> Result<(), Broken> {
        Ok(())
    }
    /// Completes all requests in flight, so that guest memory is not accessed afterwards.
    fn drain(&mut self) -> Result<(), Broken>;
    /// Starts nothing new, handles completions, and returns whether nothing is in flight. Otherwise only
    /// their completion is watched, and this is called again. Not needed by a device with nothing in flight
    /// between two events.
    fn try_drain(&mut self, _watch: &mut Watch) -> Result<bool, Broken> {
        self.drain().map(|()| true)
    }
    /// The state of the queues, after `drain`.
    fn queue_states(&self) -> Vec<(u16, QueueState)>;
    /// Reports to the driver that the device needs a reset.
    fn report_broken(&self);
    /// After a violation, and after each later pause: sets the watched descriptors of what the device owes to
    /// the host although its driver broke a rule. It must not access the queues.
    fn start_broken(&mut self, _watch: &mut Watch) {}
    /// Handles a descriptor that [`Work::start_broken`] watches; must not access the queues.
    fn ready_broken(&mut self, _token: u64, _watch: &mut Watch) {}
}

/// The descriptors that a worker polls for input.
pub(crate) struct Watch {
    epoll: Arc<Epoll>,
    watched: Vec<(u64, RawFd)>,
    /// What the descriptor that is being handled is ready for.
    ready_for: EventSet,
    /// Limit of the next wait.
    limit: Option<Duration>,
    /// Whether the last wait has ended at its limit.
    has_timed_out: bool,
}

impl Watch {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Arc::new(Epoll::new()?),
            watched: Vec::new(),
            ready_for: EventSet::empty(),
            limit: None,
            has_timed_out: false,
        })
    }

    /// Where a device registers descriptors by itself, of which it has many: under tokens that are never used twice and
    /// are none of those of [`Self::on`]. It removes them by itself as well, before it answers for a broken driver.
    pub(crate) fn epoll(&self) -> Arc<Epoll> {
        Arc::clone(&self.epoll)
    }

    /// What the descriptor that [`Work::ready`] is called for is ready for.
    pub(crate) fn ready_for(&self) -> EventSet {
        self.ready_for
    }

    /// Ends the next wait after `limit` at the latest, in whole milliseconds.
    pub(crate) fn limit_wait(&mut self, limit: Duration) {
        self.limit = Some(limit);
    }

    /// Whether [`Work::settle`] is called because nothing was ready within the limit.
    pub(crate) fn has_timed_out(&self) -> bool {
        self.has_timed_out
    }

    fn set(&mut self, token: u64, fd: Option<RawFd>, events: EventSet) -> io::Result<()> {
        let index = self.watched.iter().position(|(watched, _)| *watched == token);
        let old = index.and_then(|index| self.watched.get(index)).map(|(_, fd)| *fd);
        if old == fd {
            return Ok(());
        }
        if let (Some(index), Some(old)) = (index, old) {
            self.watched.swap_remove(index);
            // Fails only for a closed descriptor, which epoll has removed already.
            let _ = self.epoll.ctl(ControlOperation::Delete, old, EpollEvent::default());
        }
        if let Some(fd) = fd {
            let event = EpollEvent::new(events, token);
            self.epoll.ctl(ControlOperation::Add, fd, event)?;
            self.watched.push((token, fd));
        }
        Ok(())
    }

    /// Watches `fd` for input under `token`, in place of an earlier one.
    pub(crate) fn on(&mut self, token: u64, fd: RawFd) -> Result<(), Broken> {
        self.watch(token, fd, EventSet::IN)
    }

    /// The same for an eventfd that is not read: it is ready once for each time that it has been signalled, or for
    /// several together.
    pub(crate) fn on_signal(&mut self, token: u64, fd: RawFd) -> Result<(), Broken> {
        self.watch(token, fd, EventSet::IN | EventSet::EDGE_TRIGGERED)
    }

    fn watch(&mut self, token: u64, fd: RawFd, events: EventSet) -> Result<(), Broken> {
        self.set(token, Some(fd), events).map_err(|error| {
            error!("cannot watch a descriptor: {error}");
            Broken::Device("the host refused to watch a descriptor")
        })
    }

    /// The same for what is owed to the host after a violation, which can only be logged.
    pub(crate) fn on_if_possible(&mut self, token: u64, fd: RawFd) {
        // The log has a line.
        let _ = self.on(token, fd);
    }

    /// Stops watching the descriptor of `token`.
    pub(crate) fn off(&mut self, token: u64) {
        // Removing cannot fail.
        let _ = self.set(token, None, EventSet::empty());
    }

    fn clear(&mut self) {
        let tokens: Vec<u64> = self.watched.iter().map(|(token, _)| *token).collect();
        for token in tokens {
            if token != CONTROL_TOKEN {
                self.off(token);
            }
        }
    }

    /// Waits until descriptors are ready.
    fn wait(&mut self) -> io::Result<Ready> {
        let timeout_ms = self.limit.map_or(-1, |limit| {
            // Not before the limit.
            i32::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
        });
        // A wait that is interrupted is repeated, with its limit.
        let ready = self.wait_for(timeout_ms)?;
        self.limit = None;
        self.has_timed_out = ready.is_empty();
        Ok(ready)
    }

    fn wait_for(&self, timeout_ms: i32) -> io::Result<Ready> {
        let mut events = [EpollEvent::default(); EVENTS_MAX];
        let count = self.epoll.wait(timeout_ms, &mut events)?;
        let ready =
            |event: &EpollEvent| (event.data(), EventSet::from_bits_truncate(event.events()));
        Ok(events.iter().take(count).map(ready).collect())
    }

    /// Has `work` handle what is ready now, without waiting.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn serve_ready(&mut self, work: &mut impl Work) -> Result<(), Broken> {
        let ready = self.wait_for(0).unwrap_or_default();
        self.has_timed_out = ready.is_empty();
        for (token, ready_for) in ready {
            self.ready_for = ready_for;
            work.ready(token, self)?;
        }
        work.settle(self)
    }
}

/// Tokens of descriptors that are ready, and for what each is.
type Ready = SmallVec<[(u64, EventSet); EVENTS_MAX]>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Run,
    Pause,
    Stop,
}

enum Actual {
    Running,
    Paused(Vec<(u16, QueueState)>),
    Ended,
}

struct Control {
    /// Only locked briefly, never during work.
    state: Mutex<(Wanted, Actual)>,
    changed: Condvar,
    /// Wakes the thread from epoll.
    wake: EventFd,
}

impl Control {
    fn lock(&self) -> MutexGuard<'_, (Wanted, Actual)> {
        self.state.lock()
    }

    fn want(&self, wanted: Wanted) {
        self.lock().0 = wanted;
        self.changed.notify_all();
        if let Err(error) = self.wake.write(1) {
            // The counter is saturated: the thread has been woken already.
            debug!("worker is being woken already: {error}");
        }
    }

    /// Withdraws a request to pause, and no other, as the thread may have been told to end by now.
    fn withdraw_pause(&self) {
        let mut state = self.lock();
        if state.0 == Wanted::Pause {
            state.0 = Wanted::Run;
            drop(state);
            self.changed.notify_all();
            let _ = self.wake.write(1);
        }
    }

    fn set_actual(&self, actual: Actual) {
        self.lock().1 = actual;
        self.changed.notify_all();
    }

    /// Called by the paused thread; returns the next request.
    fn wait_while_paused(&self) -> Wanted {
        let mut state = self.lock();
        while state.0 == Wanted::Pause {
            self.changed.wait(&mut state);
        }
        state.1 = Actual::Running;
        state.0
    }

    /// Waits until the thread has paused or ended, up to a time; returns whether it has.
    fn is_paused_by(&self, until: Instant) -> bool {
        let mut state = self.lock();
        loop {
            if !matches!(state.1, Actual::Running) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    /// Waits until the thread has paused or ended.
    fn wait_until_paused(&self) -> Vec<(u16, QueueState)> {
        let mut state = self.lock();
        loop {
            match &state.1 {
                Actual::Paused(states) => return states.clone(),
                Actual::Ended => return Vec::new(),
                Actual::Running => self.changed.wait(&mut state),
            }
        }
    }
}

/// Worker threads of devices that are being paused.
#[derive(Clone, Default)]
pub struct PendingPause(Vec<Arc<Control>>);

impl PendingPause {
    /// Waits until all have paused, up to a time; returns whether they have.
    pub fn wait_until(&self, until: Instant) -> bool {
        self.0.iter().all(|control| control.is_paused_by(until))
    }

    /// Lets them continue, whether paused yet or not; unless the device was paused again since.
    pub fn withdraw(&self) {
        self.0.iter().for_each(|control| control.withdraw_pause());
    }
}

/// Reports the end of the thread, whatever its cause.
struct EndGuard(Arc<Control>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.set_actual(Actual::Ended);
    }
}

struct Worker {
    control: Arc<Control>,
    _thread: StoppableThread,
}

/// All worker threads of a device.
#[derive(Default)]
pub(crate) struct Workers {
    threads: Vec<Worker>,
    /// Set by `pause`, also without threads: later ones start paused.
    paused: bool,
    /// Rate limit for messages that the driver can cause, shared by all threads of the device over time.
    log: Arc<LogLimit>,
}

impl Workers {
    /// Rate limit for messages about the device that its driver can cause.
    pub(crate) fn log_limit(&self) -> Arc<LogLimit> {
        Arc::clone(&self.log)
    }

    /// Starts a thread with the affinity `cpus`, or with none if empty: it must not inherit that of the
    /// caller.
    pub(crate) fn spawn(
        &mut self,
        name: &str,
        cpus: &[usize],
        work: impl Work,
    ) -> Result<(), ActivateError> {
        let spawned = Watch::new().and_then(|watch| self.try_spawn(name, cpus, work, watch));
        spawned.map_err(cannot_start)
    }

    /// The same for work that registers descriptors at the epoll of `watch`, and needs no CPUs of its own.
    pub(crate) fn spawn_with(
        &mut self,
        name: &str,
        work: impl Work,
        watch: Watch,
    ) -> Result<(), ActivateError> {
        self.try_spawn(name, &[], work, watch).map_err(cannot_start)
    }

    fn try_spawn(
        &mut self,
        name: &str,
        cpus: &[usize],
        work: impl Work,
        mut watch: Watch,
    ) -> io::Result<()> {
        let wake = EventFd::new(EFD_NONBLOCK)?;
        watch.set(CONTROL_TOKEN, Some(wake.as_raw_fd()), EventSet::IN)?;
        let wanted = if self.paused { Wanted::Pause } else { Wanted::Run };
        let control = Arc::new(Control {
            state: Mutex::new((wanted, Actual::Running)),
            changed: Condvar::new(),
            wake,
        });
        let for_thread = Arc::clone(&control);
        let (cpus, log, device) = (cpus.to_vec(), Arc::clone(&self.log), name.to_owned());
        // Linux truncates thread names to 15 bytes.
        let stop = {
            let control = Arc::clone(&control);
            move || control.want(Wanted::Stop)
        };
        let builder = stoppable_thread::Builder::new(name).kind(work.kind());
        let thread = StoppableThread::build(builder, stop, move || {
            let guard = EndGuard(for_thread);
            if cpus.is_empty() {
                if let Err(error) = syscalls::unbind_thread() {
                    log_limited!(log, Warn, "{device}: runs where a vCPU does: {error}");
                }
            } else if let Err(error) = syscalls::bind_thread(&cpus) {
                log_limited!(log, Warn, "{device}: cannot be bound to CPUs {cpus:?}: {error}");
            }
            run(work, watch, &guard.0, &|broken| {
                log_limited!(log, Warn, "{device}: device needs a reset: {broken}");
            });
        })?;
        self.threads.push(Worker { control, _thread: thread });
        Ok(())
    }

    /// Ends and joins all threads.
    pub(crate) fn stop(&mut self) {
        for worker in &self.threads {
            worker.control.want(Wanted::Stop);
        }
        self.threads.clear();
    }
}

fn cannot_start(source: io::Error) -> ActivateError {
    ActivateError::Resource { what: "start a thread for the device", source }
}

/// Pauses and resumes the threads of a device.
pub trait Pausing {
    /// Ends all accesses to guest memory, including requests in flight, and returns the state of the active
    /// queues with their indexes; none for a device that is not active. Idempotent.
    ///
    /// A device that is paused while not active starts paused when activated, and does not access guest
    /// memory before `resume`: that is how a VM is restored.
    fn pause(&mut self) -> Vec<(u16, QueueState)>;
    /// Starts a pause without waiting: no new request is taken from now on. `pause` waits for the rest. The
    /// caller may withdraw it ([`PendingPause::withdraw`]) at any point; a driver that resets and activates
    /// the device again also ends it.
    fn begin_pause(&mut self) -> PendingPause;
    /// Resumes after `pause`. Idempotent.
    fn resume(&mut self);
}

impl Pausing for Workers {
    /// Starts to pause all threads; those started meanwhile run.
    fn begin_pause(&mut self) -> PendingPause {
        for worker in &self.threads {
            worker.control.want(Wanted::Pause);
        }
        PendingPause(self.threads.iter().map(|worker| Arc::clone(&worker.control)).collect())
    }

    /// Pauses all threads once their requests in flight are completed; returns the states of their queues
    /// by ascending index.
    fn pause(&mut self) -> Vec<(u16, QueueState)> {
        self.paused = true;
        self.begin_pause();
        let states = self.threads.iter().flat_map(|worker| worker.control.wait_until_paused());
        let mut states: Vec<_> = states.collect();
        states.sort_by_key(|(index, _)| *index);
        states
    }

    fn resume(&mut self) {
        self.paused = false;
        for worker in &self.threads {
            worker.control.want(Wanted::Run);
        }
    }
}

fn run(mut work: impl Work, mut watch: Watch, control: &Control, complain: &dyn Fn(&Broken)) {
    let mut serving = false;
    let mut broken = false;
    let mut is_settled = true;
    let check = |result: Result<(), Broken>, work: &mut dyn Work, watch: &mut Watch| {
        let Err(error) = result else { return false };
        complain(&error);
        watch.clear();
        work.report_broken();
        work.start_broken(watch);
        // Behind the IOMMU, mappings are removed no sooner than what used them has ended.
        let _ = work.queue_states();
        true
    };
    loop {
        let mut wanted = control.lock().0;
        let mut is_draining = false;
        if wanted == Wanted::Pause {
            serving = false;
            let drained = work.try_drain(&mut watch);
            is_draining = matches!(drained, Ok(false));
            if !broken {
                broken = check(drained.map(drop), &mut work, &mut watch);
            }
            if !is_draining {
                control.set_actual(Actual::Paused(work.queue_states()));
                wanted = control.wait_while_paused();
            }
        }
        if wanted == Wanted::Stop {
            if let Err(error) = work.drain() {
                debug!("broken driver while stopping: {error}");
            }
            return;
        }
        if wanted == Wanted::Pause && !is_draining {
            continue;
        }
        if !serving && !is_draining {
            (serving, is_settled) = (true, true);
            if broken {
                // Descriptors left watched by a withdrawn drain are handled by no thread.
                watch.clear();
                work.start_broken(&mut watch);
            } else {
                let started = work.start(&mut watch);
                broken = check(started, &mut work, &mut watch);
            }
        }
        if !is_settled && !broken && !is_draining {
            // The pause for which it was left out has been withdrawn.
            is_settled = true;
            let settled = work.settle(&mut watch);
            broken = check(settled, &mut work, &mut watch);
        }
        let ready = match watch.wait() {
            Ok(ready) => ready,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                error!("a device's thread cannot wait for events and ends: {error}");
                let _ = work.drain();
                work.report_broken();
                return;
            }
        };
        for (token, ready_for) in ready {
            watch.ready_for = ready_for;
            if token == CONTROL_TOKEN {
                // An error means that it was not signalled, which does not matter.
                let _ = control.wake.read();
            } else if is_draining {
                // Only wakes the thread.
            } else if broken {
                work.ready_broken(token, &mut watch);
            } else {
                let served = work.ready(token, &mut watch);
                broken = check(served, &mut work, &mut watch);
            }
        }
        is_settled = broken || is_draining;
        // Nothing new is taken once a pause is wanted.
        if !is_settled && control.lock().0 == Wanted::Run {
            is_settled = true;
            let settled = work.settle(&mut watch);
            broken = check(settled, &mut work, &mut watch);
        }
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
