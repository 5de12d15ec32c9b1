// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Worker threads, which create and clear memory at idle priority, and map it for devices.
//!
//! Owns the threads and their queues: for each NUMA node one for memory and, if it has slots with a device,
//! one for mapping, so that a device that is slow to open delays no memory. A job is shared among the
//! configured number of threads. Devices and address spaces, which may take long to close, are closed at normal priority,
//! on a thread of their own each time. Must never decide what is done.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use crate::config::{Class, SlotZone};
use crate::prepinned::{PinError, PinFailure, PinOrder, PinnedFiles, Prepinned};
use crate::slot::{PoolSlotError, SlotMemory, ZeroingOptions};
use crate::sys;

/// Something to do.
#[derive(Debug)]
pub enum Job {
    /// For the threads of a node.
    Work(Work),
    /// On a thread of its own.
    Close(Closing),
}

/// Something to do for a slot.
#[derive(Debug)]
pub enum Work {
    /// Make the memory of a zone.
    Build { slot: usize, part: usize, zone: SlotZone },
    /// Release its memory, which no other process has, and make new memory in its place.
    Renew { slot: usize, part: usize, zone: SlotZone, memory: SlotMemory },
    /// Clear its memory, which no other process has.
    Scrub { slot: usize, part: usize, zone: SlotZone, memory: SlotMemory },
    /// Map all memory of a slot for its device, unless that was taken back by then.
    Pin { slot: usize, class: Class, order: Arc<PinOrder> },
}

/// Something that may take long to close.
#[derive(Debug)]
pub enum Closing {
    /// A device, then what is mapped for it.
    Prepinned { slot: usize, prepinned: Prepinned },
    /// The same for memory that could not be mapped.
    Failed { slot: usize, memory: Vec<SlotMemory>, failure: PinFailure },
    /// What was sent to a user: if that user has gone, they are the last to have it.
    Sent(PinnedFiles),
}

impl From<Work> for Job {
    fn from(work: Work) -> Self {
        Self::Work(work)
    }
}

impl From<Closing> for Job {
    fn from(closing: Closing) -> Self {
        Self::Close(closing)
    }
}

impl Work {
    /// The queue that it goes to.
    fn queue(&self) -> QueueOf {
        let (node, is_for_devices) = match self {
            Self::Build { zone, .. } | Self::Renew { zone, .. } | Self::Scrub { zone, .. } => {
                (zone.node, false)
            }
            Self::Pin { class, .. } => (class.only_node(), true),
        };
        QueueOf { node, is_for_devices }
    }
}

/// What came of it.
#[derive(Debug)]
pub enum JobOutcome {
    /// Memory of a zone, made or cleared.
    Memory { part: usize, scrubbed: bool, result: Result<SlotMemory, PoolSlotError> },
    /// The same memory, mapped for its device or not. In that case the device is closed, and
    /// [`Unpinned`](Self::Unpinned) follows.
    Pinned { memory: Vec<SlotMemory>, result: Result<Prepinned, PinError> },
    /// The device is closed. [`Unpinned`](Self::Unpinned) follows.
    Released,
    /// Nothing is mapped any more.
    Unpinned,
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

/// Takes what was done.
#[derive(Debug, Clone)]
struct Report {
    sender: Sender<JobResult>,
    wake: Arc<EventFd>,
}

impl Report {
    /// Returns whether it can still be received.
    fn send(&self, slot: usize, outcome: JobOutcome) -> bool {
        let is_received = self.sender.send(JobResult { slot, outcome }).is_ok();
        // A full counter wakes as well.
        let _ = self.wake.write(1);
        is_received
    }
}

/// The threads.
#[derive(Debug)]
pub struct Workers {
    queues: BTreeMap<QueueOf, Sender<Work>>,
    closer: Sender<Closing>,
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
        let (sender, done) = channel();
        let report = Report { sender, wake: Arc::new(wake.try_clone()?) };
        let (closer, jobs) = channel();
        let of_closer = report.clone();
        stoppable_thread::spawn("zeroer", move || {
            close_all(&jobs, &of_closer, |close| {
                stoppable_thread::spawn("zeroer", close).map(|_detached| ())
            });
        })?;
        let mut queues = BTreeMap::new();
        for class in classes {
            let memory = class.zones.iter().map(|zone| (zone.node, false));
            let devices = class.device.iter().map(|_| (class.only_node(), true));
            for (node, is_for_devices) in memory.chain(devices) {
                let queue = QueueOf { node, is_for_devices };
                if queues.contains_key(&queue) {
                    continue;
                }
                let (sender, jobs) = channel();
                queues.insert(queue, sender);
                let (report, closer) = (report.clone(), closer.clone());
                let worker = Worker { node, jobs, report, closer, options: Arc::clone(options) };
                stoppable_thread::spawn("zeroer", move || worker.run())?;
            }
        }
        Ok(Self { queues, closer, done })
    }

    /// Gives work to a thread of its node.
    pub fn submit(&self, job: Job) {
        // Threads end with the process only.
        match job {
            Job::Work(work) => {
                if let Some(queue) = self.queues.get(&work.queue()) {
                    let _ = queue.send(work);
                }
            }
            Job::Close(closing) => {
                let _ = self.closer.send(closing);
            }
        }
    }

    /// The next thing that is done.
    pub fn next_done(&self) -> Option<JobResult> {
        self.done.try_recv().ok()
    }
}

type Close = Box<dyn FnOnce() + Send>;

/// Closes what it gets: on threads that `start` starts, so that nothing waits for what takes long, or itself if there is
/// none to be had.
fn close_all(all: &Receiver<Closing>, report: &Report, start: impl Fn(Close) -> io::Result<()>) {
    while let Ok(closing) = all.recv() {
        let closing = Arc::new(Mutex::new(Some(closing)));
        let run = {
            let (closing, report) = (Arc::clone(&closing), report.clone());
            move || {
                let closing = closing.lock().take();
                if let Some(closing) = closing {
                    close(closing, &report);
                }
            }
        };
        if let Err(error) = start(Box::new(run.clone())) {
            log::warn!("no thread can be started that closes a device: {error}");
            run();
        }
    }
}

/// Closes a device before what is mapped for it, which takes long.
fn close(closing: Closing, report: &Report) {
    match closing {
        Closing::Prepinned { slot, prepinned: Prepinned { iommufd, device, .. } } => {
            drop(device);
            report.send(slot, JobOutcome::Released);
            drop(iommufd);
            report.send(slot, JobOutcome::Unpinned);
        }
        Closing::Failed { slot, memory, failure: PinFailure { error, opened } } => {
            let (device, iommufd) = opened.unzip();
            drop(device);
            report.send(slot, JobOutcome::Pinned { memory, result: Err(error) });
            drop(iommufd);
            report.send(slot, JobOutcome::Unpinned);
        }
        Closing::Sent(PinnedFiles { memory, iommufd, device }) => {
            drop(device);
            drop(iommufd);
            drop(memory);
        }
    }
}

struct Worker {
    node: Option<u32>,
    jobs: Receiver<Work>,
    report: Report,
    /// For what it opened in vain: at its own priority it might be closed never.
    closer: Sender<Closing>,
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
        while let Ok(work) = self.jobs.recv() {
            if !self.carry_out(work) {
                return;
            }
        }
    }

    /// Returns whether its result can still be received.
    fn carry_out(&self, work: Work) -> bool {
        let made = |slot, part, scrubbed, result| {
            self.report.send(slot, JobOutcome::Memory { part, scrubbed, result })
        };
        match work {
            Work::Build { slot, part, zone } => {
                made(slot, part, false, SlotMemory::build(&zone, &self.options))
            }
            Work::Renew { slot, part, zone, memory } => {
                // Its pages go with its last file, but for those that a former user has kept hold of: these
                // stay what they are, and are in no memfd any more.
                drop(memory);
                made(slot, part, false, SlotMemory::build(&zone, &self.options))
            }
            Work::Scrub { slot, part, zone, memory } => {
                let result = memory.scrub(&zone, &self.options).map(|()| memory);
                made(slot, part, true, result)
            }
            Work::Pin { slot, class, order } => {
                // The memory of one that was taken back is the broker's again, and nothing is to be told.
                let Some(memory) = order.begin() else { return true };
                match Prepinned::new(&class, &memory, self.options.threads, &order) {
                    Ok(prepinned) => {
                        let result = Ok(prepinned);
                        self.report.send(slot, JobOutcome::Pinned { memory, result })
                    }
                    Err(failure) => {
                        self.closer.send(Closing::Failed { slot, memory, failure }).is_ok()
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::fs::File;
    use std::io::{PipeReader, Read as _, pipe};
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    use prezero_pool_client::PinnedGrant;

    use super::*;

    /// A file, and the end from which it is read that the file is closed.
    fn file() -> (PipeReader, File) {
        let (reader, writer) = pipe().unwrap();
        (reader, File::from(OwnedFd::from(writer)))
    }

    #[test]
    fn what_is_released_is_closed_by_others_than_who_asks_for_it() {
        let wake = EventFd::new(0).unwrap();
        let options = Arc::new(ZeroingOptions::unlimited());
        let workers = Workers::start(&[], &options, &wake).unwrap();
        let grant = PinnedGrant {
            device: "0000:65:00.0".parse().unwrap(),
            zones: Vec::new(),
            piece_bytes: 4096,
            device_id: 1,
            space_id: 2,
            table_id: 3,
            regions: Vec::new(),
        };
        let ((mut device_end, device), (mut iommufd_end, iommufd)) = (file(), file());
        let prepinned = Prepinned { iommufd, device, grant };
        workers.submit(Closing::Prepinned { slot: 7, prepinned }.into());
        let next = || {
            let done = workers.done.recv_timeout(Duration::from_secs(20)).unwrap();
            (done.slot, done.outcome)
        };
        assert!(matches!(next(), (7, JobOutcome::Released)));
        assert_eq!(device_end.read(&mut [0]).unwrap(), 0, "it is closed");
        assert!(matches!(next(), (7, JobOutcome::Unpinned)));
        assert!(wake.read().unwrap() > 0);
        assert_eq!(iommufd_end.read(&mut [0]).unwrap(), 0, "it is closed");

        let ((mut end, memory), (_, iommufd), (_, device)) = (file(), file(), file());
        let files = PinnedFiles { memory: vec![memory], iommufd, device };
        workers.submit(Closing::Sent(files).into());
        assert_eq!(end.read(&mut [0]).unwrap(), 0, "it is closed");
    }

    fn report() -> (Report, Receiver<JobResult>) {
        let (sender, done) = channel();
        (Report { sender, wake: Arc::new(EventFd::new(0).unwrap()) }, done)
    }

    #[test]
    fn without_a_thread_the_closer_itself_closes_the_device_first() {
        let ((mut device_end, device), (mut iommufd_end, iommufd)) = (file(), file());
        let (report, done) = report();
        let (closer, jobs) = channel();
        let failure = PinFailure { error: PinError::NoDevice, opened: Some((device, iommufd)) };
        closer.send(Closing::Failed { slot: 7, memory: Vec::new(), failure }).unwrap();
        drop(closer);
        close_all(&jobs, &report, |_close| Err(io::Error::other("none")));
        assert_eq!(device_end.read(&mut [0]).unwrap(), 0, "it is closed");
        assert_eq!(iommufd_end.read(&mut [0]).unwrap(), 0, "it is closed");
        let outcomes = [done.try_recv().unwrap(), done.try_recv().unwrap()];
        let [JobResult { slot: 7, outcome: first }, JobResult { slot: 7, outcome: second }] =
            outcomes
        else {
            panic!("of another slot");
        };
        assert!(matches!(first, JobOutcome::Pinned { result: Err(PinError::NoDevice), .. }));
        assert!(matches!(second, JobOutcome::Unpinned));
    }

    #[test]
    fn what_an_idle_worker_opened_in_vain_is_closed_by_others() {
        let (report, done) = report();
        let ((closer, closed), (_, jobs)) = (channel(), channel());
        let options = Arc::new(ZeroingOptions::unlimited());
        let worker = Worker { node: None, jobs, report, closer, options };
        let order = Arc::new(PinOrder::new(Vec::new()));
        // It has no device to map anything for.
        let class = Class { zones: Vec::new(), count: 1, device: None };
        let pin = || Work::Pin { slot: 7, class: class.clone(), order: Arc::clone(&order) };
        assert!(worker.carry_out(pin()));
        assert!(matches!(closed.try_recv(), Ok(Closing::Failed { slot: 7, .. })));
        // Nor is anything told of an order whose memory another has.
        assert!(worker.carry_out(pin()));
        assert!(closed.try_recv().is_err() && done.try_recv().is_err(), "the worker closed it");
    }
}
