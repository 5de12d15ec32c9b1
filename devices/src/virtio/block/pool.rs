// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that carry out the requests of one queue on an image in a format.
//!
//! Owns every request from its submission to its completion, and the threads: dropping the pool waits for requests in
//! flight. Such a request may need several reads of several files one after another, during which the thread of the
//! queue could not start any other.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use memory::GuestMemory;
use parking_lot::{Condvar, Mutex, MutexGuard};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::long_transfer::UNDER_WAY_BYTES;
use super::perform::{Engine, Failure};
use super::request::Request;
use crate::syscalls;

/// Threads of one disk, divided among its queues; at least one for each. They mostly wait for storage, so their
/// number limits the requests in flight and does not depend on the number of CPUs.
const THREADS_PER_DISK: u16 = 8;
/// Maximum number of requests of a queue in flight.
const DEPTH_MAX: usize = 256;

/// A submitted request.
pub(super) struct PoolJob {
    pub(super) request: Request,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) started: Instant,
}

/// A completed request.
pub(super) struct PoolDone {
    pub(super) job: PoolJob,
    pub(super) outcome: Result<u64, Failure>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<PoolJob>,
    done: Vec<PoolDone>,
    ends: bool,
}

struct Shared {
    engine: Engine,
    /// Only locked briefly, never while a request is carried out.
    state: Mutex<State>,
    /// Signalled for a submitted request and at the end.
    work: Condvar,
    /// Signalled for a completed request.
    outcome: Condvar,
    completed: EventFd,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn next(&self) -> Option<PoolJob> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.waiting.pop_front() {
                return Some(job);
            }
            if state.ends {
                return None;
            }
            self.work.wait(&mut state);
        }
    }

    fn run(&self) {
        while let Some(job) = self.next() {
            let outcome = self.engine.perform(&job.request.operation, &job.memory);
            self.lock().done.push(PoolDone { job, outcome });
            self.outcome.notify_all();
            // The counter is full only if the queue's thread has been told often enough.
            let _ = self.completed.write(1);
        }
    }
}

/// Configuration of the threads of a disk.
#[derive(Clone, Default)]
pub(crate) struct QueueThreads {
    /// Id of the device.
    pub(super) device: String,
    pub(super) queues: u16,
    /// Host CPUs of each queue; empty for all.
    pub(super) cpus: Arc<Vec<Vec<usize>>>,
}

/// The threads of a queue.
pub(super) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    in_flight: usize,
    in_flight_bytes: u64,
}

impl Pool {
    /// Starts the threads of a queue.
    ///
    /// # Errors
    /// No thread could be started.
    pub(super) fn new(engine: Engine, of: &QueueThreads, queue: u16) -> io::Result<Self> {
        let completed = EventFd::new(EFD_NONBLOCK)?;
        let (state, work, outcome) = (Mutex::default(), Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { engine, state, work, outcome, completed });
        let mut pool = Self { shared, threads: Vec::new(), in_flight: 0, in_flight_bytes: 0 };
        let name = format!("{}_q{queue}", of.device);
        let cpus = of.cpus.get(usize::from(queue)).cloned().unwrap_or_default();
        for number in 0..(THREADS_PER_DISK / of.queues.max(1)).max(1) {
            let (shared, cpus) = (Arc::clone(&pool.shared), cpus.clone());
            let builder = stoppable_thread::Builder::new(format!("{name}_io{number}"));
            let run = move || {
                // The thread that starts it is that of a vCPU, which may be bound to one.
                let bound = if cpus.is_empty() {
                    syscalls::unbind_thread()
                } else {
                    syscalls::bind_thread(&cpus)
                };
                if let Err(error) = bound {
                    log::debug!("a thread of an image runs where a vCPU does: {error}");
                }
                shared.run();
            };
            match builder.kind("device-image").spawn(run) {
                Ok(thread) => pool.threads.push(thread),
                Err(error) if pool.threads.is_empty() => return Err(error),
                Err(error) => {
                    log::debug!("{name}: {number} threads for its image are enough: {error}");
                    break;
                }
            }
        }
        Ok(pool)
    }

    /// Signalled when requests have completed, perhaps after they were taken; to be watched with `Watch::on_signal`, as it
    /// is never read.
    pub(super) fn completed(&self) -> &EventFd {
        &self.shared.completed
    }

    pub(super) fn has_room(&self) -> bool {
        self.in_flight < DEPTH_MAX && self.in_flight_bytes < UNDER_WAY_BYTES
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    pub(super) fn push(&mut self, job: PoolJob) {
        self.in_flight += 1;
        let len_bytes = job.request.operation.transfer_bytes();
        self.in_flight_bytes = self.in_flight_bytes.saturating_add(len_bytes);
        self.shared.lock().waiting.push_back(job);
        self.shared.work.notify_one();
    }

    /// Waits until a request has completed, if any is in flight.
    pub(super) fn wait(&self) {
        let mut state = self.shared.lock();
        while !self.is_idle() && state.done.is_empty() {
            self.shared.outcome.wait(&mut state);
        }
    }

    pub(super) fn take_completed(&mut self) -> Vec<PoolDone> {
        let done = std::mem::take(&mut self.shared.lock().done);
        self.in_flight = self.in_flight.saturating_sub(done.len());
        for PoolDone { job, .. } in &done {
            let len_bytes = job.request.operation.transfer_bytes();
            self.in_flight_bytes = self.in_flight_bytes.saturating_sub(len_bytes);
        }
        done
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().ends = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // It ends by a panic only where the process does.
            let _ = thread.join();
        }
    }
}
