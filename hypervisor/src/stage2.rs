// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fills stage-2 tables while the guest runs.
//!
//! After a migration or restore a guest has all of its memory, but empty stage-2 tables:
//! each page costs a fault at its first access. This module fills the tables before that, on the vCPUs'
//! threads, because KVM allows no other thread to do it. Owns what is still to be filled and the turns: all
//! vCPUs work at once for a short time, and then have at least as long for the guest. Must
//! never populate memory: its caller says what is populated.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use stoppable_thread::StoppableThread;

use crate::error::KvmError;
use crate::vcpu::Vcpu;

/// Time that a vCPU works at a time, unless one piece takes longer.
const TIME_SLICE: Duration = Duration::from_millis(1);

/// Bytes filled between two checks of the time: 512 small pages, or a large one.
const PIECE_BYTES: u64 = 2 << 20;

/// Interval of checks for a stop while a vCPU does not respond.
const LOOK: Duration = Duration::from_millis(20);

/// A vCPU whose stage-2 can be filled.
pub(crate) trait MapStage2 {
    /// Fills from `gpa` on; returns the number of bytes done.
    fn fill(&self, gpa: u64, len_bytes: u64) -> Result<u64, KvmError>;
}

impl MapStage2 for Vcpu {
    fn fill(&self, gpa: u64, len_bytes: u64) -> Result<u64, KvmError> {
        self.pre_fault_memory(gpa, len_bytes)
    }
}

/// Work to run on a vCPU thread.
pub(crate) type VcpuTask = Box<dyn FnOnce(&dyn MapStage2) + Send>;

/// A vCPU whose thread accepts such work.
pub(crate) trait RunOnVcpu: Send + Sync {
    /// Queues work for the vCPU thread, to run soon even while the guest runs; false if the thread has
    /// ended. Does not block.
    fn run_on_vcpu(&self, task: VcpuTask) -> bool;
}

/// Result of filling stage-2.
#[derive(Debug)]
pub struct Stage2Filled {
    /// Bytes of guest memory filled.
    pub filled_bytes: u64,
    /// Duration.
    pub took: Duration,
    /// The error that ended it early.
    pub error: Option<KvmError>,
    /// Whether it was stopped.
    pub is_stopped: bool,
}

/// A stage-2 prefault in progress. Dropping this stops it and waits for that.
#[derive(Debug)]
pub struct Stage2Fill {
    _thread: StoppableThread,
}

impl Stage2Fill {
    /// Starts the prefault. `runs` returns the guest physical ranges with memory; it and `done` are called
    /// on a separate thread.
    pub(crate) fn start(
        vcpus: Vec<Arc<dyn RunOnVcpu>>,
        runs: impl FnOnce() -> Vec<Range<u64>> + Send + 'static,
        done: impl FnOnce(Stage2Filled) + Send + 'static,
    ) -> io::Result<Self> {
        let work = Arc::new(Work::default());
        let body = {
            let work = Arc::clone(&work);
            move || {
                // The ranges may have to be waited for.
                let runs = runs();
                let begin = Instant::now();
                work.lock().extend(runs);
                work.fill_with(&vcpus);
                done(work.end(begin.elapsed()));
            }
        };
        Ok(Self { _thread: StoppableThread::spawn("stage2-fill", move || work.stop(), body)? })
    }
}

/// Remaining work and results.
#[derive(Debug, Default)]
struct Work {
    /// Only locked briefly.
    left: Mutex<VecDeque<Range<u64>>>,
    filled_bytes: AtomicU64,
    stopped: AtomicBool,
    /// Signalled with this lock when stopped; only locked briefly.
    rest: Mutex<()>,
    changed: Condvar,
    error: Mutex<Option<KvmError>>,
}

impl Work {
    fn lock(&self) -> parking_lot::MutexGuard<'_, VecDeque<Range<u64>>> {
        self.left.lock()
    }

    fn stop(&self) {
        let _rest = self.rest.lock();
        self.stopped.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    fn is_over(&self) -> bool {
        self.stopped.load(Ordering::SeqCst) || self.error.lock().is_some() || self.lock().is_empty()
    }

    fn end(&self, took: Duration) -> Stage2Filled {
        Stage2Filled {
            filled_bytes: self.filled_bytes.load(Ordering::SeqCst),
            took,
            error: self.error.lock().take(),
            is_stopped: self.stopped.load(Ordering::SeqCst),
        }
    }

    /// Uses all vCPUs in turns.
    fn fill_with(self: &Arc<Self>, vcpus: &[Arc<dyn RunOnVcpu>]) {
        while !self.is_over() {
            let begin = Instant::now();
            let (answer, answers) = mpsc::channel::<()>();
            let sent = vcpus.iter().filter(|vcpu| {
                let (work, answer) = (Arc::clone(self), answer.clone());
                vcpu.run_on_vcpu(Box::new(move |vcpu| {
                    work.turn(vcpu);
                    drop(answer);
                }))
            });
            if sent.count() == 0 {
                return self.stop();
            }
            drop(answer);
            // Disconnects when all tasks have finished or were dropped.
            while answers.recv_timeout(LOOK) == Err(mpsc::RecvTimeoutError::Timeout)
                && !self.stopped.load(Ordering::SeqCst)
            {}
            let mut rest = self.rest.lock();
            let awake = |(): &mut ()| !self.stopped.load(Ordering::SeqCst);
            self.changed.wait_while_for(&mut rest, awake, begin.elapsed());
        }
    }

    /// One time slice of a vCPU.
    fn turn(&self, vcpu: &dyn MapStage2) {
        let begin = Instant::now();
        while begin.elapsed() < TIME_SLICE && !self.is_over() {
            let Some(piece) = self.take() else { return };
            let mut at = piece.start;
            while at < piece.end {
                match vcpu.fill(at, piece.end - at) {
                    Ok(0) => break,
                    Ok(done) => {
                        at = at.saturating_add(done).min(piece.end);
                        self.filled_bytes.fetch_add(done, Ordering::SeqCst);
                    }
                    Err(error) => return self.failed(error, at..piece.end),
                }
            }
        }
    }

    fn failed(&self, error: KvmError, left: Range<u64>) {
        match error.errno() {
            // The vCPU has other work.
            libc::EINTR | libc::EAGAIN => self.lock().push_front(left),
            // The guest has returned the memory in the meantime.
            libc::ENOENT | libc::EFAULT => {}
            _ => {
                self.error.lock().get_or_insert(error);
            }
        }
    }

    /// The next piece, which ends at a multiple of the piece size.
    fn take(&self) -> Option<Range<u64>> {
        let mut left = self.lock();
        let run = left.pop_front()?;
        let cut = (run.start / PIECE_BYTES + 1).saturating_mul(PIECE_BYTES).min(run.end);
        if cut < run.end {
            left.push_front(cut..run.end);
        }
        Some(run.start..cut)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Records the requested ranges; fails as told.
    #[derive(Default)]
    struct Fake {
        filled: Mutex<Vec<Range<u64>>>,
        /// The errno of each call, from the last element on.
        fail: Mutex<Vec<i32>>,
    }

    impl MapStage2 for Fake {
        fn fill(&self, gpa: u64, len_bytes: u64) -> Result<u64, KvmError> {
            if let Some(errno) = self.fail.lock().pop() {
                let source = io::Error::from_raw_os_error(errno);
                return Err(KvmError { what: "fill", source });
            }
            // Like KVM, no more than a page, here of 1 MiB.
            let done = len_bytes.min(MIB - gpa % MIB);
            self.filled.lock().push(gpa..gpa + done);
            Ok(done)
        }
    }

    impl RunOnVcpu for Fake {
        fn run_on_vcpu(&self, task: VcpuTask) -> bool {
            task(self);
            true
        }
    }

    /// A vCPU whose thread has ended.
    struct ExitedVcpu;

    impl RunOnVcpu for ExitedVcpu {
        fn run_on_vcpu(&self, _task: VcpuTask) -> bool {
            false
        }
    }

    fn fill(vcpus: Vec<Arc<dyn RunOnVcpu>>, runs: Vec<Range<u64>>) -> Stage2Filled {
        let (tell, told) = mpsc::channel();
        let filling = Stage2Fill::start(vcpus, || runs, move |end| tell.send(end).unwrap());
        let _filling = filling.unwrap();
        told.recv().unwrap()
    }

    fn covered(fake: &Fake) -> Vec<Range<u64>> {
        let mut filled = fake.filled.lock().clone();
        filled.sort_by_key(|run| run.start);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for run in filled {
            match joined.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end,
                _ => joined.push(run),
            }
        }
        joined
    }

    #[test]
    fn all_that_is_there_is_filled_once_and_nothing_else() {
        let (fake, runs) =
            (Arc::new(Fake::default()), vec![4096..5 * MIB, 8 * MIB..8 * MIB + 4096]);
        let end = fill(vec![fake.clone(), fake.clone()], runs.clone());
        assert!(end.error.is_none() && !end.is_stopped, "{end:?}");
        assert_eq!(end.filled_bytes, 5 * MIB);
        assert_eq!(covered(&fake), runs);
    }

    #[test]
    fn an_interruption_costs_nothing_and_memory_that_has_gone_its_piece() {
        let fake = Arc::new(Fake::default());
        *fake.fail.lock() = vec![libc::ENOENT, libc::EAGAIN, libc::EINTR];
        let end = fill(vec![fake.clone()], vec![0..2 * MIB, 2 * MIB..5 * MIB]);
        assert!(end.error.is_none(), "{end:?}");
        assert_eq!(covered(&fake).first(), Some(&(2 * MIB..5 * MIB)));
    }

    #[test]
    fn a_kvm_that_cannot_do_it_ends_it() {
        let fake = Arc::new(Fake::default());
        *fake.fail.lock() = vec![libc::EOPNOTSUPP];
        let end = fill(vec![fake.clone()], vec![0..MIB, 2 * MIB..64 * MIB]);
        assert_eq!(end.error.map(|error| error.errno()), Some(libc::EOPNOTSUPP));
        assert_eq!(end.filled_bytes, 0);
    }

    #[test]
    fn it_ends_with_the_vcpus() {
        let end = fill(vec![Arc::new(ExitedVcpu)], vec![0..MIB, 2 * MIB..64 * MIB]);
        assert!(end.is_stopped && end.filled_bytes == 0, "{end:?}");
    }

    /// Accepts tasks and never runs them.
    struct UnresponsiveVcpu(Mutex<Vec<VcpuTask>>);

    impl RunOnVcpu for UnresponsiveVcpu {
        fn run_on_vcpu(&self, task: VcpuTask) -> bool {
            self.0.lock().push(task);
            true
        }
    }

    #[test]
    fn dropping_it_waits_for_no_vcpu() {
        let (tell, told) = mpsc::channel();
        let unresponsive: Arc<dyn RunOnVcpu> = Arc::new(UnresponsiveVcpu(Mutex::default()));
        let filling = Stage2Fill::start(
            vec![unresponsive],
            || vec![0..MIB, 2 * MIB..3 * MIB],
            move |end| {
                tell.send(end).unwrap();
            },
        );
        drop(filling.unwrap());
        assert!(told.recv().unwrap().is_stopped);
    }
}
