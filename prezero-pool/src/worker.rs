// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Worker threads, which create and clear memory at idle priority, and map it for devices.
//!
//! Owns the threads and their queues: for each NUMA node one for memory and, if it has slots with a device,
//! one for mapping, so that a device that is slow to open delays no memory. A job is shared among the
//! configured number of threads. Must never decide what is done.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

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
    /// Release its memory, which no other process has, and make new memory in its place.
    Renew { slot: usize, class: Class, memory: SlotMemory },
    /// Clear its memory, which no other process has.
    Scrub { slot: usize, class: Class, memory: SlotMemory },
    /// Map it for its device.
    Pin { slot: usize, class: Class, memory: SlotMemory },
}

impl Job {
    fn class(&self) -> &Class {
        match self {
            Self::Build { class, .. }
            | Self::Renew { class, .. }
            | Self::Scrub { class, .. }
            | Self::Pin { class, .. } => class,
        }
    }

    fn queue(&self) -> QueueOf {
        let is_for_devices = matches!(self, Self::Pin { .. });
        QueueOf { node: self.class().node, is_for_devices }
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

/// Names a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct QueueOf {
    node: Option<u32>,
    is_for_devices: bool,
}

/// The threads.
#[derive(Debug)]
pub struct Workers {
    queues: BTreeMap<QueueOf, Sender<Job>>,
    done: Receiver<JobResult>,
}

impl Workers {
    /// Starts the threads for the nodes that `classes` name; `wake` becomes readable when something is done.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        classes: &[Class],
        options: &Arc<ZeroingOptions>,
        wake: &EventFd,
    ) -> io::Result<Self> {
        let (report, done) = channel();
        let mut queues = BTreeMap::new();
        for class in classes {
            for is_for_devices in [false, true] {
                let queue = QueueOf { node: class.node, is_for_devices };
                if queues.contains_key(&queue) || (is_for_devices && class.device.is_none()) {
                    continue;
                }
                let (sender, jobs) = channel();
                queues.insert(queue, sender);
                let (report, wake) = (report.clone(), wake.try_clone()?);
                let options = Arc::clone(options);
                let worker = Worker { node: class.node, jobs, report, wake, options };
                stoppable_thread::spawn("zeroer", move || worker.run())?;
            }
        }
        Ok(Self { queues, done })
    }

    /// Gives work to a thread of its node.
    pub fn submit(&self, job: Job) {
        // Threads end with the process only.
        if let Some(queue) = self.queues.get(&job.queue()) {
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
    jobs: Receiver<Job>,
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
        while let Ok(job) = self.jobs.recv() {
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
            Job::Renew { slot, class, memory } => {
                // Its pages go with its last file, but for those that a former user has kept hold of: these
                // stay what they are, and are in no memfd any more.
                drop(memory);
                let result = SlotMemory::build(&class, &self.options);
                JobResult { slot, outcome: JobOutcome::Memory { scrubbed: false, result } }
            }
            Job::Scrub { slot, class, memory } => {
                let result = memory.scrub(&class, &self.options).map(|()| memory);
                JobResult { slot, outcome: JobOutcome::Memory { scrubbed: true, result } }
            }
            Job::Pin { slot, class, memory } => {
                let result = Prepinned::new(&class, &memory, self.options.threads);
                JobResult { slot, outcome: JobOutcome::Pinned { memory, result } }
            }
        }
    }
}
