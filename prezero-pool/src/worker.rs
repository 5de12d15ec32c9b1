// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Worker threads, which create and clear memory at idle priority.
//!
//! Owns the threads and their queues, one for each NUMA node. Must never decide what is done.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use crate::config::Class;
use crate::prepinned::{PinError, Prepinned};
use crate::slot::{PoolSlotError, SlotMemory, ZeroingOptions};
use crate::sys;

/// Something to do for a slot.
#[derive(Debug)]
pub enum Job {
    /// Make its memory.
    Build { slot: usize, class: Class },
    /// Clear its memory, which no other process has.
    Scrub { slot: usize, class: Class, memory: SlotMemory },
    /// Map it for its device.
    Pin { slot: usize, class: Class, memory: SlotMemory },
}

impl Job {
    fn class(&self) -> &Class {
        match self {
            Self::Build { class, .. } | Self::Scrub { class, .. } | Self::Pin { class, .. } => {
                class
            }
        }
    }
}

/// What came of it.
#[derive(Debug)]
pub enum JobOutcome {
    /// Memory, made or cleared.
    Memory { scrubbed: bool, result: Result<SlotMemory, PoolSlotError> },
    /// The same memory, mapped for its device or not.
    Pinned { memory: SlotMemory, result: Result<Prepinned, PinError> },
}

/// What came of what.
#[derive(Debug)]
pub struct JobResult {
    pub slot: usize,
    pub outcome: JobOutcome,
}

/// The threads.
#[derive(Debug)]
pub struct Workers {
    queues: BTreeMap<Option<u32>, Sender<Job>>,
    done: Receiver<JobResult>,
}

impl Workers {
    /// Starts `threads` for each node that `classes` name; `wake` becomes readable when something
    /// is done.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        classes: &[Class],
        threads: NonZeroUsize,
        options: ZeroingOptions,
        wake: &EventFd,
    ) -> io::Result<Self> {
        let options = Arc::new(options);
        let (report, done) = channel();
        let mut queues = BTreeMap::new();
        for class in classes {
            if queues.contains_key(&class.node) {
                continue;
            }
            let (sender, receiver) = channel();
            queues.insert(class.node, sender);
            let receiver = Arc::new(Mutex::new(receiver));
            for _ in 0..threads.get() {
                let worker = Worker {
                    node: class.node,
                    jobs: Arc::clone(&receiver),
                    report: report.clone(),
                    wake: wake.try_clone()?,
                    options: Arc::clone(&options),
                };
                stoppable_thread::spawn("zeroer", move || worker.run())?;
            }
        }
        Ok(Self { queues, done })
    }

    /// Gives work to a thread of its node.
    pub fn submit(&self, job: Job) {
        // Threads end with the process only.
        if let Some(queue) = self.queues.get(&job.class().node) {
            let _ = queue.send(job);
        }
    }

    /// The next thing that is done.
    pub fn next_done(&self) -> Option<JobResult> {
        self.done.try_recv().ok()
    }
}

struct Worker {
    node: Option<u32>,
    /// Locked while a thread waits for work; the others wait for the lock instead.
    jobs: Arc<Mutex<Receiver<Job>>>,
    report: Sender<JobResult>,
    wake: EventFd,
    options: Arc<ZeroingOptions>,
}

impl Worker {
    fn run(self) {
        if self.options.idle_only
            && let Err(error) = sys::run_when_idle()
        {
            log::warn!("the priority of a thread cannot be lowered to idle: {error}");
        }
        if let Some(node) = self.node {
            memory::run_on_node(node);
        }
        loop {
            let job = self.jobs.lock().recv();
            let Ok(job) = job else { return };
            if self.report.send(self.carry_out(job)).is_err() {
                return;
            }
            // A full counter wakes as well.
            let _ = self.wake.write(1);
        }
    }

    fn carry_out(&self, job: Job) -> JobResult {
        match job {
            Job::Build { slot, class } => {
                let result = SlotMemory::build(&class, &self.options);
                JobResult { slot, outcome: JobOutcome::Memory { scrubbed: false, result } }
            }
            Job::Scrub { slot, class, memory } => {
                let result = memory.scrub(&class, &self.options).map(|()| memory);
                JobResult { slot, outcome: JobOutcome::Memory { scrubbed: true, result } }
            }
            Job::Pin { slot, class, memory } => {
                let result = Prepinned::new(&class, &memory);
                JobResult { slot, outcome: JobOutcome::Pinned { memory, result } }
            }
        }
    }
}
