// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of one queue of a block device.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use memory::GuestMemory;
use virtio_queue::QueueState;

use super::counters::BlockCounters;
use super::image::Disk;
use super::request::{Limits, Operation, Request, SERIAL_BYTES, Status};
use super::ring::{Action, Done, Job, Ring};
use super::synchronous;
use crate::virtio::buffers::Segments;
use crate::virtio::queue::{Broken, WorkQueue};
use crate::virtio::worker::{Watch, Work};
use crate::{LogLimit, log_limited};

const KICK_TOKEN: u64 = 0;
const RING_TOKEN: u64 = 1;
/// Chains taken before other events are looked at.
const BUDGET: u32 = 128;

/// Whether written data may stay in a cache until a flush.
#[derive(Clone)]
pub(crate) struct CacheMode {
    /// The driver knows how to flush.
    pub(crate) flush_negotiated: bool,
    /// The configuration field, which the driver may change.
    pub(crate) writeback: Arc<AtomicBool>,
}

impl CacheMode {
    fn through(&self) -> bool {
        !(self.flush_negotiated && self.writeback.load(Ordering::Acquire))
    }
}

/// What a queue's worker shares with the others of the device.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) disk: Arc<Disk>,
    pub(crate) serial: [u8; SERIAL_BYTES],
    pub(crate) counters: Arc<BlockCounters>,
    pub(crate) cache: CacheMode,
    /// Space may be freed.
    pub(crate) sparse: bool,
    /// Failed requests are logged by it; the counter has them all.
    pub(crate) log: Arc<LogLimit>,
}

/// Serves one queue.
pub(crate) struct BlockWorker {
    queue: WorkQueue,
    shared: Shared,
    ring: Option<Ring>,
}

impl BlockWorker {
    pub(crate) fn new(queue: WorkQueue, shared: Shared, with_ring: bool) -> Self {
        let mut ring = None;
        if with_ring {
            match Ring::new(Arc::clone(&shared.disk), queue.size()) {
                Ok(made) => ring = Some(made),
                Err(error) => {
                    let path = shared.disk.path().display();
                    log_limited!(
                        shared.log,
                        Info,
                        "disk {path} uses synchronous I/O instead of io_uring: {error}"
                    );
                }
            }
        }
        Self { queue, shared, ring }
    }

    fn limits(&self) -> Limits {
        Limits {
            capacity_sectors: self.shared.disk.capacity_sectors(),
            readonly: self.shared.disk.readonly(),
        }
    }

    /// Takes and starts, or does, all that the driver made available.
    fn serve(&mut self) -> Result<(), Broken> {
        let memory = self.queue.memory().into_inner();
        loop {
            self.queue.suppress_kicks(&memory)?;
            let taken = self.take_all(&memory);
            // Also after a breach of the rules: what came before it was in order.
            if self.ring.as_mut().is_some_and(|ring| !ring.submit()) {
                // Comes back here after other events were looked at.
                self.queue.kick_self();
            }
            self.queue.notify(&memory)?;
            match taken? {
                Taken::All => {}
                // Whatever completes will come back here.
                Taken::NoRoom => return Ok(()),
                Taken::Budget => {
                    self.queue.kick_self();
                    return Ok(());
                }
            }
            if !self.queue.allow_kicks(&memory)? {
                return Ok(());
            }
        }
    }

    fn take_all(&mut self, memory: &Arc<GuestMemory>) -> Result<Taken, Broken> {
        for _ in 0..BUDGET {
            if self.ring.as_ref().is_some_and(|ring| !ring.has_room()) {
                return Ok(Taken::NoRoom);
            }
            let Some(chain) = self.queue.pop(memory)? else { return Ok(Taken::All) };
            let head = chain.head;
            let request = Request::parse(chain, memory, self.limits())
                .map_err(|why| self.queue.bad_chain(head, why))?;
            let Some(request) = self.start_in_ring(request, memory) else { continue };
            let started = Instant::now();
            let outcome = self.perform(&request.operation, memory);
            self.finish(memory, &request, outcome, started)?;
        }
        Ok(Taken::Budget)
    }

    /// Gives the request back if it has to be done here and now.
    fn start_in_ring(&mut self, request: Request, memory: &Arc<GuestMemory>) -> Option<Request> {
        let Some(ring) = &mut self.ring else { return Some(request) };
        let nothing = Segments::default();
        let through = self.shared.cache.through();
        let (action, offset, data) = match &request.operation {
            Operation::Read { offset, data } => (Action::Read, *offset, data),
            Operation::Write { offset, data } => (Action::Write { through }, *offset, data),
            Operation::Flush if !self.shared.disk.readonly() => {
                // The answer to a flush after one that failed is known.
                if self.shared.disk.check_stable().is_err() {
                    return Some(request);
                }
                (Action::Flush, 0, &nothing)
            }
            _ => return Some(request),
        };
        let Ok(ranges) = data.host_ranges(Arc::clone(memory)) else { return Some(request) };
        let is_transfer = action != Action::Flush;
        if is_transfer
            && (ranges.len_bytes() == 0
                || !synchronous::is_direct_ready(&self.shared.disk, offset, &ranges))
        {
            return Some(request);
        }
        let started = Instant::now();
        let job = Box::new(Job { request, action, offset, ranges, started, done_bytes: 0 });
        ring.push(job).err().map(|job| job.request)
    }

    /// Does an operation; gives the number of bytes written to guest memory.
    fn perform(&self, operation: &Operation, memory: &GuestMemory) -> Result<u64, Failure> {
        let disk = &self.shared.disk;
        let through = self.shared.cache.through();
        match operation {
            Operation::Read { offset, data } => {
                synchronous::read(disk, memory, *offset, data)?;
                Ok(data.len_bytes())
            }
            Operation::Write { offset, data } => {
                synchronous::write(disk, memory, *offset, data, through)?;
                Ok(0)
            }
            Operation::Flush => {
                synchronous::flush(disk)?;
                Ok(0)
            }
            Operation::GetId { data } => {
                Ok(synchronous::get_id(memory, data, &self.shared.serial)?)
            }
            // Offered only where space may be freed.
            Operation::Discard(_) if !self.shared.sparse => {
                Err(Failure::Status(Status::Unsupported))
            }
            Operation::Discard(ranges) => {
                synchronous::discard(disk, ranges)?;
                Ok(0)
            }
            Operation::WriteZeroes(ranges) => {
                let unmap = self.shared.sparse;
                synchronous::write_zeroes(disk, ranges, unmap, through)?;
                Ok(0)
            }
            Operation::Refused(status) => Err(Failure::Status(*status)),
        }
    }

    fn reap(&mut self) -> Result<(), Broken> {
        let Some(ring) = &mut self.ring else { return Ok(()) };
        let mut result = Ok(());
        for Done { job, result: done } in ring.take_completed() {
            let memory = Arc::clone(job.ranges.memory_arc());
            let mut written = 0;
            if let Operation::Read { data, .. } = &job.request.operation {
                // Also after an error: a part may have been transferred before it.
                data.mark_written(&memory, job.done_bytes);
                written = job.done_bytes;
            }
            let done = match job.action {
                Action::Flush => self.shared.disk.note_flush(done),
                Action::Write { through: true } => {
                    done.inspect_err(|error| self.shared.disk.note_failed_through(error))
                }
                _ => done,
            };
            let outcome = done.map(|()| written).map_err(Failure::Host);
            // Each is finished, whatever became of those before.
            result = self.finish(&memory, &job.request, outcome, job.started).and(result);
        }
        result
    }

    fn finish(
        &mut self,
        memory: &GuestMemory,
        request: &Request,
        outcome: Result<u64, Failure>,
        started: Instant,
    ) -> Result<(), Broken> {
        let (status, written) = match outcome {
            Ok(written) => (Status::Ok, written),
            Err(failure) => (self.note_failure(&request.operation, failure), 0),
        };
        if status == Status::Ok {
            let counters = &self.shared.counters;
            match &request.operation {
                Operation::Read { data, .. } => {
                    counters.read.done(data.len_bytes(), started.elapsed());
                }
                Operation::Write { data, .. } => {
                    counters.write.done(data.len_bytes(), started.elapsed());
                }
                _ => {}
            }
        }
        request.answer(memory, status);
        self.queue.add_used(memory, request.head, request.used_bytes(written))
    }

    fn note_failure(&self, operation: &Operation, failure: Failure) -> Status {
        self.shared.counters.errors.add(1);
        let error = match failure {
            Failure::Status(status) => return status,
            Failure::Host(error) => error,
        };
        let what = match operation {
            Operation::Read { .. } => "read",
            Operation::Write { .. } => "write",
            Operation::Flush => "flush",
            _ => "request",
        };
        let path = self.shared.disk.path().display();
        log_limited!(self.shared.log, Warn, "{what} on disk {path} failed: {error}");
        Status::IoError
    }
}

enum Taken {
    All,
    NoRoom,
    Budget,
}

/// Why a request failed.
enum Failure {
    /// The driver asked for something impossible.
    Status(Status),
    /// The host refused.
    Host(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Host(error)
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl Work for BlockWorker {
    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        watch.on(KICK_TOKEN, self.queue.kick().as_raw_fd())?;
        if let Some(ring) = &self.ring {
            watch.on(RING_TOKEN, ring.completed().as_raw_fd())?;
        }
        self.serve()
    }

    fn ready(&mut self, token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        if token == KICK_TOKEN {
            self.queue.take_kick();
        } else {
            self.reap()?;
        }
        self.serve()
    }

    fn drain(&mut self) -> Result<(), Broken> {
        let mut result = Ok(());
        while let Some(ring) = &self.ring
            && !ring.is_idle()
        {
            ring.wait();
            result = self.reap().and(result);
        }
        result?;
        let memory = self.queue.memory();
        self.queue.notify(&memory)
    }

    fn try_drain(&mut self, watch: &mut Watch) -> Result<bool, Broken> {
        let reaped = self.reap();
        watch.off(KICK_TOKEN);
        // The kernel may not have had room for all of it.
        let is_watched = self.ring.as_mut().filter(|ring| !ring.is_idle()).is_some_and(|ring| {
            ring.submit() && watch.on(RING_TOKEN, ring.completed().as_raw_fd()).is_ok()
        });
        if is_watched && reaped.is_ok() {
            return Ok(false);
        }
        // Also of a driver that broke a rule: what is in flight writes to guest memory all the same.
        self.drain().and(reaped).map(|()| true)
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        vec![self.queue.state()]
    }

    fn report_broken(&self) {
        self.queue.interrupt().needs_reset();
    }
}
