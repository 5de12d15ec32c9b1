// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vCPU threads.
//!
//! Owns the threads, their pause and resume, and the kick that gets a vCPU out of the guest. Must
//! never look at guest state: a caller that needs it runs a closure on the parked vCPU.
//!
//! ```text
//!            resume_all               KVM_RUN fails, triple fault ...
//!   Parked ─────────────▶ Running ────────────────────────────────▶ Stopped
//!     ▲                      │                                        │
//!     └──────────────────────┘                                        │
//!      pause_all, or a handler says Leave          stop_all: thread gone from any phase
//! ```
//!
//! # The kick
//!
//! A thread checks `leave` before it enters the guest; a signal makes it leave the guest. Between the
//! check and the entry a signal alone would be lost. Therefore `immediate_exit` is set, too, which the kernel
//! checks after the entry:
//!
//! | thread | does, in this order, all sequentially consistent |
//! | --- | --- |
//! | kicker | `leave` = 1; `immediate_exit` = 1; signal |
//! | vCPU | `immediate_exit` = 0; if `leave`: `immediate_exit` = 1; KVM_RUN |
//!
//! If the vCPU's 0 comes after the kicker's 1, the vCPU reads `leave` after that and sees it set.
//! Otherwise the kernel sees the kicker's 1, or the signal interrupts KVM_RUN. Both orders are in `flag`, with a model.
//!
//! A handler may wait on its thread while a page is missing. A kick calls [`ExitHandler::kicked`] and unparks the
//! thread after `leave` was set, the handler returns, and the vCPU sees `leave` before it enters the guest. The
//! handler keeps a kick that comes before its wait, as a parked thread does.
//!
//! `hold`, which keeps a throttled vCPU out of the guest for a while, works in the same way as `leave`; so
//! does `tasks_pending`, for which a running vCPU leaves the guest, runs the tasks and re-enters.
//!
//! A vCPU parks only when KVM_RUN has returned EINTR. If an exit was pending, that call has first completed
//! the port or memory access in the kernel, so the state that is then read is complete.

mod flag;
mod run_on_vcpu;
mod runner;
mod starting;

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use thiserror::Error;

use crate::exits::ExitHandler;
use crate::kick::{install_kick_handler, kick};
use crate::run_page::RunPage;
use crate::throttle::{Throttled, VcpuThrottle};
use crate::vcpu::Vcpu;

use flag::{Flag, get_out};
pub use run_on_vcpu::Standstill;
use starting::Started;

/// Time after which waiting for a vCPU is logged.
const SLOW_PAUSE: Duration = Duration::from_secs(5);

thread_local! {
    /// Whether this is a vCPU thread, which must not wait for vCPUs.
    static IS_VCPU: Cell<bool> = const { Cell::new(false) };
}

/// Called first on each new vCPU thread, with the index of the vCPU.
pub type OnStart = Arc<dyn Fn(u32) -> io::Result<()> + Send + Sync>;

/// Configuration of the vCPU threads.
#[derive(Clone)]
pub struct ThreadsConfig {
    /// Handles exits.
    pub handler: Arc<dyn ExitHandler>,
    /// Prepares each thread: CPU affinity, system call filter.
    pub on_start: Option<OnStart>,
}

/// Why an operation on vCPU threads failed.
#[derive(Debug, Error)]
pub enum ThreadsError {
    /// The kick's signal handler cannot be installed.
    #[error("cannot install the signal handler of vCPU threads")]
    Signal(#[source] io::Error),
    /// A thread cannot be started.
    #[error("cannot start the thread of vCPU {index}")]
    Spawn {
        /// Index of the vCPU.
        index: u32,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The hook for a new thread failed.
    #[error("cannot set up the thread of vCPU {index}")]
    Start {
        /// Index of the vCPU.
        index: u32,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// There is no such vCPU.
    #[error("there is no vCPU {index}")]
    Unknown {
        /// Index of the vCPU.
        index: u32,
    },
    /// The vCPU is running.
    #[error("vCPU {index} is not paused")]
    NotParked {
        /// Index of the vCPU.
        index: u32,
    },
    /// The thread has ended, or the closure panicked.
    #[error("the thread of vCPU {index} has ended")]
    Exited {
        /// Index of the vCPU.
        index: u32,
    },
    /// A vCPU has not left the guest in time.
    #[error("vCPU {index} has not left the guest or its device within {} ms", .within.as_millis())]
    Timeout {
        /// Index of the vCPU.
        index: u32,
        /// The time limit.
        within: Duration,
    },
    /// The operation waits for vCPUs and was called on a vCPU thread.
    #[error("a vCPU's thread cannot wait for vCPUs")]
    FromVcpu,
}

/// vCPUs that were not added to others, as one of them has no thread.
pub struct NotAdded {
    /// Why not.
    pub error: ThreadsError,
    /// How many were added.
    pub added: usize,
    /// Those without a thread. KVM makes no others of their numbers.
    pub unused: Vec<Vcpu>,
}

/// Requested state of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Park,
    Run,
    Exit,
}

/// Actual state of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Waiting outside the guest.
    Parked,
    /// In the guest or in the exit handler.
    Running,
    /// Waiting outside the guest, which it never enters again.
    Stopped,
    /// The thread has ended.
    Exited,
}

type Job = Box<dyn FnOnce(&mut Vcpu) + Send>;

struct Control {
    target: Target,
    phase: Phase,
    jobs: VecDeque<Job>,
}

/// State of a vCPU shared between its thread and the others.
struct Shared {
    index: u32,
    /// The kernel's id of the thread, once that has begun.
    thread_id: OnceLock<i32>,
    control: Mutex<Control>,
    /// Notified on every change of `control`.
    changed: Condvar,
    /// Whether the vCPU is to leave the guest; written under the lock of `control`.
    leave: Flag,
    /// Whether the throttle keeps the vCPU out of the guest; written under the lock of `control`.
    hold: Flag,
    /// Whether a running vCPU has to leave the guest for queued jobs; written under the lock of `control`,
    /// and cleared by the vCPU thread before it checks the queue.
    tasks_pending: Flag,
    run_page: Arc<RunPage>,
    /// What may wait on the thread; gone with the VM.
    handler: Weak<dyn ExitHandler>,
    /// The thread, until joined. Locked to signal or to take it.
    handle: Mutex<Option<JoinHandle<()>>>,
}

impl Throttled for Shared {
    fn hold(&self, on: bool) {
        let control = self.lock();
        if on && control.phase == Phase::Running {
            get_out(&self.hold, &*self.run_page, || self.signal());
        } else {
            self.hold.set(on);
        }
        drop(control);
        self.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Control> {
        self.control.lock()
    }

    fn wait(&self, control: &mut MutexGuard<'_, Control>) {
        self.changed.wait(control);
    }

    fn signal(&self) {
        if let Some(handler) = self.handler.upgrade() {
            handler.kicked(self.index);
        }
        let handle = self.handle.lock();
        if let Some(handle) = handle.as_ref() {
            kick(handle);
        }
    }

    /// Waits for the end of a hold, or for a reason to leave.
    fn stand_by(&self) {
        let mut control = self.lock();
        while self.hold.is_set() && !self.leave.is_set() {
            self.wait(&mut control);
        }
    }

    fn set_phase(&self, phase: Phase) {
        self.lock().phase = phase;
        self.changed.notify_all();
    }

    /// Waits for the thread's next action.
    fn next(&self) -> Next {
        let mut control = self.lock();
        loop {
            if control.target == Target::Exit {
                control.jobs.clear();
                return Next::Exit;
            }
            if let Some(job) = control.jobs.pop_front() {
                return Next::Job(job);
            }
            if control.target == Target::Run && control.phase == Phase::Parked {
                control.phase = Phase::Running;
                self.leave.set(false);
                return Next::Run;
            }
            self.wait(&mut control);
        }
    }
}

/// When dropped, marks the vCPU thread as ended, so that no other thread waits for it.
struct Exited<'a>(&'a Shared);

impl Drop for Exited<'_> {
    fn drop(&mut self) {
        self.0.set_phase(Phase::Exited);
    }
}

enum Next {
    Run,
    Job(Job),
    Exit,
}

struct Thread {
    shared: Arc<Shared>,
}

impl Thread {
    /// Requests a state; does not wait.
    fn request(&self, target: Target) {
        let mut control = self.shared.lock();
        if control.target == Target::Exit || control.phase == Phase::Exited {
            return;
        }
        control.target = target;
        if target != Target::Run && control.phase == Phase::Running {
            let Shared { leave, run_page, .. } = &*self.shared;
            get_out(leave, &**run_page, || self.shared.signal());
        }
        drop(control);
        self.shared.changed.notify_all();
    }

    /// Waits until the thread is out of the guest, up to a time; returns whether it is.
    fn is_out_by(&self, until: Instant) -> bool {
        let mut control = self.shared.lock();
        while control.phase == Phase::Running {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.shared.changed.wait_for(&mut control, left);
        }
        true
    }

    /// Waits until the thread is out of the guest.
    fn wait_out(&self) {
        let begin = Instant::now();
        let mut warned = false;
        let mut control = self.shared.lock();
        while control.phase == Phase::Running {
            let timeout = self.shared.changed.wait_for(&mut control, SLOW_PAUSE);
            if timeout.timed_out() && !warned {
                warned = true;
                let index = self.shared.index;
                log::warn!(
                    "vcpu{index} has not left the guest or its device for {:?}",
                    begin.elapsed()
                );
            }
        }
    }

    fn join(&self) {
        let handle = &self.shared.handle;
        let handle = handle.lock().take();
        if let Some(Err(_)) = handle.map(JoinHandle::join) {
            log::error!("the thread of vcpu{} panicked", self.shared.index);
        }
    }
}

/// The vCPUs of a VM, each on its own thread.
///
/// Methods may be called from any thread except vCPU threads. Dropping this ends the threads.
pub struct VcpuThreads {
    /// In order of their addition.
    threads: Vec<Thread>,
    /// Removed ones, parked: KVM keeps a vCPU as long as its VM.
    removed: Vec<Thread>,
    config: ThreadsConfig,
    standing: Arc<Mutex<Vec<Weak<Shared>>>>,
    first_run: Arc<OnceLock<Instant>>,
}

impl VcpuThreads {
    /// Starts a thread per vCPU, all parked.
    pub fn start(vcpus: Vec<Vcpu>, config: ThreadsConfig) -> Result<Self, ThreadsError> {
        install_kick_handler().map_err(ThreadsError::Signal)?;
        let mut all = Self {
            threads: Vec::new(),
            removed: Vec::new(),
            config,
            standing: Arc::default(),
            first_run: Arc::default(),
        };
        // On failure, dropping `all` ends those that have started.
        all.add(vcpus).map_err(|not_added| not_added.error)?;
        Ok(all)
    }

    /// Starts threads for further vCPUs, all parked.
    ///
    /// # Errors
    /// One of them has no thread. Those before it are added; those after it count as removed.
    pub fn add(&mut self, mut vcpus: Vec<Vcpu>) -> Result<(), NotAdded> {
        let (config, first_run) = (&self.config, &self.first_run);
        // All of them inherit one filter of system calls: making it takes longer than starting a thread.
        let started = stoppable_thread::start_group("vcpu", || {
            starting::start(std::mem::take(&mut vcpus), config, first_run)
        });
        let Started { first, later, unused, error } = match started {
            Ok(started) => started,
            Err(source) => {
                let error = ThreadsError::Spawn { index: 0, source };
                return Err(NotAdded { error, added: 0, unused: vcpus });
            }
        };
        let added = first.len();
        self.standing.lock().extend(first.iter().map(|thread| Arc::downgrade(&thread.shared)));
        self.threads.extend(first);
        self.removed.extend(later);
        error.map_or(Ok(()), |error| Err(NotAdded { error, added, unused }))
    }

    /// Removes the vCPU that was added last, and parks it. Does not wait until it has left the guest.
    pub fn remove_last(&mut self) {
        let Some(thread) = self.threads.pop() else { return };
        thread.request(Target::Park);
        self.standing
            .lock()
            .retain(|other| !std::ptr::eq(other.as_ptr(), &raw const *thread.shared));
        self.removed.push(thread);
    }

    /// Adds a vCPU again that was removed, parked, after `prepare` has run on its thread; false if no vCPU with
    /// this index was removed.
    ///
    /// # Errors
    /// [`ThreadsError::NotParked`] if it has not left the guest yet; it stays removed, also when `prepare` fails.
    pub fn add_again<E: Send + 'static>(
        &mut self,
        index: u32,
        prepare: impl FnOnce(&mut Vcpu) -> Result<(), E> + Send + 'static,
    ) -> Result<Result<bool, E>, ThreadsError> {
        refuse_vcpu_thread()?;
        let is_meant = |thread: &Thread| thread.shared.index == index;
        let Some(at) = self.removed.iter().position(is_meant) else { return Ok(Ok(false)) };
        let Some(thread) = self.removed.get(at) else { return Ok(Ok(false)) };
        let prepared = thread.submit(prepare)?.recv();
        match prepared.map_err(|_| ThreadsError::Exited { index })? {
            Ok(()) => {}
            Err(error) => return Ok(Err(error)),
        }
        let thread = self.removed.remove(at);
        self.standing.lock().push(Arc::downgrade(&thread.shared));
        self.threads.push(thread);
        Ok(Ok(true))
    }

    /// The vCPUs that are not removed, in order of their addition: index, and the kernel's id of the thread.
    pub fn thread_ids(&self) -> Vec<(u32, i32)> {
        let id = |thread: &Thread| Some((thread.shared.index, *thread.shared.thread_id.get()?));
        self.threads.iter().filter_map(id).collect()
    }

    /// All threads, those of removed vCPUs, too.
    fn all(&self) -> impl Iterator<Item = &Thread> {
        self.threads.iter().chain(&self.removed)
    }

    /// Number of vCPUs.
    pub fn count(&self) -> usize {
        self.threads.len()
    }

    /// When the first vCPU was about to execute its first instruction.
    pub fn first_run(&self) -> Option<Instant> {
        self.first_run.get().copied()
    }

    /// Pauses all vCPUs; returns when all have left the guest and their state is complete.
    ///
    /// Waits for exit handlers: a vCPU whose handler does not return cannot be paused.
    pub fn pause_all(&self) -> Result<(), ThreadsError> {
        refuse_vcpu_thread()?;
        self.threads.iter().for_each(|thread| thread.request(Target::Park));
        self.all().for_each(Thread::wait_out);
        Ok(())
    }

    /// The same with a time limit, after which those that ran continue to run.
    ///
    /// # Errors
    /// [`ThreadsError::Timeout`] names a vCPU that did not leave.
    pub fn pause_all_within(&self, within: Duration) -> Result<(), ThreadsError> {
        refuse_vcpu_thread()?;
        let until = Instant::now() + within;
        let before: Vec<Target> =
            self.threads.iter().map(|thread| thread.shared.lock().target).collect();
        self.threads.iter().for_each(|thread| thread.request(Target::Park));
        let Some(slow) = self.all().find(|thread| !thread.is_out_by(until)) else {
            return Ok(());
        };
        let ran = self.threads.iter().zip(before).filter(|(_, before)| *before == Target::Run);
        ran.for_each(|(thread, _)| thread.request(Target::Run));
        Err(ThreadsError::Timeout { index: slow.shared.index, within })
    }

    /// Resumes the vCPUs after the first `count`. Does not block.
    pub fn resume_after(&self, count: usize) {
        self.threads.iter().skip(count).for_each(|thread| thread.request(Target::Run));
    }

    /// Resumes all vCPUs that have not stopped for good. Does not block.
    pub fn resume_all(&self) {
        self.threads.iter().for_each(|thread| thread.request(Target::Run));
    }

    /// Ends all threads, whatever their vCPUs do, and joins them.
    pub fn stop_all(&self) -> Result<(), ThreadsError> {
        refuse_vcpu_thread()?;
        self.all().for_each(|thread| thread.request(Target::Exit));
        self.all().for_each(Thread::join);
        Ok(())
    }

    /// A throttle on all vCPUs. Throttled vCPUs can still be paused and ended.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn throttle(&self) -> io::Result<VcpuThrottle> {
        let throttled = |thread: &Thread| -> Arc<dyn Throttled> { thread.shared.clone() };
        VcpuThrottle::start(self.threads.iter().map(throttled).collect())
    }

    /// Whether every vCPU is out of the guest.
    pub fn all_parked(&self) -> bool {
        self.all().all(|thread| thread.shared.lock().phase != Phase::Running)
    }

    /// Runs `f` for the parked vCPU `index`, on its thread.
    pub fn on_one<R, F>(&self, index: u32, f: F) -> Result<R, ThreadsError>
    where
        R: Send + 'static,
        F: FnOnce(&mut Vcpu) -> R + Send + 'static,
    {
        refuse_vcpu_thread()?;
        let thread = self
            .threads
            .iter()
            .find(|thread| thread.shared.index == index)
            .ok_or(ThreadsError::Unknown { index })?;
        thread.submit(f)?.recv().map_err(|_| ThreadsError::Exited { index })
    }

    /// Runs `f` for every parked vCPU, on their threads concurrently. Results are in the order of the vCPUs
    /// in [`VcpuThreads::start`] and [`VcpuThreads::add`].
    pub fn on_each<R, F>(&self, f: F) -> Result<Vec<R>, ThreadsError>
    where
        R: Send + 'static,
        F: Fn(&mut Vcpu) -> R + Send + Sync + 'static,
    {
        refuse_vcpu_thread()?;
        let f = Arc::new(f);
        let mut answers = Vec::with_capacity(self.threads.len());
        for thread in &self.threads {
            let f = Arc::clone(&f);
            answers.push((thread.shared.index, thread.submit(move |vcpu| f(vcpu))?));
        }
        answers
            .into_iter()
            .map(|(index, answer)| answer.recv().map_err(|_| ThreadsError::Exited { index }))
            .collect()
    }
}

impl Thread {
    fn submit<R, F>(&self, f: F) -> Result<mpsc::Receiver<R>, ThreadsError>
    where
        R: Send + 'static,
        F: FnOnce(&mut Vcpu) -> R + Send + 'static,
    {
        let index = self.shared.index;
        let (done, answer) = mpsc::sync_channel(1);
        let mut control = self.shared.lock();
        match (control.phase, control.target) {
            (Phase::Exited, _) | (_, Target::Exit) => return Err(ThreadsError::Exited { index }),
            (Phase::Running, _) | (Phase::Parked, Target::Run) => {
                return Err(ThreadsError::NotParked { index });
            }
            (Phase::Parked, Target::Park) | (Phase::Stopped, _) => {}
        }
        control.jobs.push_back(Box::new(move |vcpu: &mut Vcpu| {
            let _ = done.send(f(vcpu));
        }));
        drop(control);
        self.shared.changed.notify_all();
        Ok(answer)
    }
}

impl Drop for VcpuThreads {
    fn drop(&mut self) {
        if self.stop_all().is_err() {
            // Dropped by a handler: that thread ends by itself, and cannot be joined.
            self.all().for_each(|thread| thread.request(Target::Exit));
        }
    }
}

fn refuse_vcpu_thread() -> Result<(), ThreadsError> {
    if IS_VCPU.get() { Err(ThreadsError::FromVcpu) } else { Ok(()) }
}
