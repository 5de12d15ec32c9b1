// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of one queue of a block device.

use std::cell::Cell;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use memory::GuestMemory;
use virtio_queue::QueueState;
use vmm_sys_util::eventfd::EventFd;

use super::counters::BlockCounters;
use super::image::Disk;
use super::limits::BlockLimits;
use super::long_transfer::{LongTransfer, Progress, UNDER_WAY_BYTES};
use super::no_space::{self, NoSpace, OnFull};
use super::perform::{Engine, Failure, Stability};
use super::pool::{Pool, PoolDone, PoolJob, QueueThreads};
use super::request::{Limits, Operation, Request, Status};
use super::ring::{Action, Done, Job, Ring};
use super::synchronous;
use crate::virtio::buffers::Segments;
use crate::virtio::limiter::Throttle;
use crate::virtio::queue::{Broken, WorkQueue};
use crate::virtio::worker::{Watch, Work};
use crate::{LogLimit, log_limited};

const KICK_TOKEN: u64 = 0;
const RING_TOKEN: u64 = 1;
const POOL_TOKEN: u64 = 2;
const LIMIT_TOKEN: u64 = 3;
/// Maximum number of chains handled before other events.
const BUDGET: u32 = 128;

/// State shared by the workers of a device.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) engine: Engine,
    /// Limits that the driver has read.
    pub(crate) limits: BlockLimits,
    /// Additional threads for an image in a format.
    pub(crate) threads: QueueThreads,
    pub(crate) counters: Arc<BlockCounters>,
    /// Requests that wait for free space.
    pub(crate) full: Arc<NoSpace>,
    /// Rate limit for logging failed requests; the counter includes all.
    pub(crate) log: Arc<LogLimit>,
}

/// Serves one queue.
pub(crate) struct BlockWorker {
    queue: WorkQueue,
    shared: Shared,
    ring: Option<Ring>,
    /// For an image in a format: does what the ring alone cannot.
    pool: Option<Pool>,
    /// Limit on the requests of the queue; those that have to wait stay in it.
    throttle: Option<Throttle>,
    /// The last request taken, if it is long; no other is in flight then.
    long: Option<LongTransfer>,
    /// Set while requests of the queue wait for free space, and no other may start.
    is_full: bool,
    /// Set while waiting requests are being retried, before any other may start.
    is_retrying: bool,
    /// Set once the driver has broken a rule; it gets no more completions.
    is_broken: Cell<bool>,
}

impl BlockWorker {
    pub(crate) fn new(queue: WorkQueue, shared: Shared, with_ring: bool) -> Self {
        let mut ring = None;
        let pool = shared.engine.disk.formatted().and_then(|_| Self::pool(&queue, &shared));
        let formatted = shared.engine.disk.formatted();
        // Nothing that may wait for operations of the ring runs on this thread.
        if with_ring && formatted.is_none_or(|it| pool.is_some() && it.has_places()) {
            match Ring::new(Arc::clone(&shared.engine.disk), queue.size()) {
                Ok(made) => ring = Some(made),
                Err(error) => {
                    let path = shared.engine.disk.path().display();
                    log_limited!(shared.log, Info, "disk {path} does without io_uring: {error}");
                }
            }
        }
        Self {
            queue,
            shared,
            ring,
            pool,
            throttle: None,
            long: None,
            is_full: false,
            is_retrying: false,
            is_broken: Cell::new(false),
        }
    }

    /// With a limit, if there is one.
    pub(super) fn limited(mut self, throttle: Option<Throttle>) -> Self {
        self.throttle = throttle;
        self
    }

    fn pool(queue: &WorkQueue, shared: &Shared) -> Option<Pool> {
        match Pool::new(shared.engine.clone(), &shared.threads, queue.index()) {
            Ok(pool) => Some(pool),
            Err(error) => {
                let path = shared.engine.disk.path().display();
                log_limited!(shared.log, Warn, "disk {path} is served by one thread: {error}");
                None
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.ring.as_ref().is_none_or(Ring::is_idle) && self.pool.as_ref().is_none_or(Pool::is_idle)
    }

    fn limits(&self) -> Limits {
        let disk = self.disk();
        Limits {
            capacity_sectors: disk.capacity_sectors(),
            readonly: disk.readonly(),
            ranges: self.shared.limits,
        }
    }

    fn disk(&self) -> &Disk {
        &self.shared.engine.disk
    }

    /// Takes and starts, or carries out, all available requests.
    fn serve(&mut self) -> Result<(), Broken> {
        let memory = self.queue.memory().into_inner();
        let mut budget = Budget { chains: BUDGET, len_bytes: UNDER_WAY_BYTES };
        loop {
            self.queue.suppress_kicks(&memory)?;
            let taken = self.take_all(&memory, &mut budget);
            // Also after a violation: earlier requests were valid.
            if let Some(ring) = &mut self.ring {
                ring.submit();
            }
            // What the kernel has done while it took them is answered with this interrupt, and not after another
            // round of events.
            let reaped = self.reap_ring();
            self.queue.notify(&memory)?;
            reaped?;
            // The kernel may not have accepted all, or not the rest of one that was done in part: called again after
            // other events.
            if self.ring.as_mut().is_some_and(|ring| !ring.is_submitted()) {
                self.queue.kick_self();
            }
            match taken? {
                Taken::All => {}
                // A completion, the timer of the limit, or the start after a pause, leads back here.
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

    fn take_all(
        &mut self,
        memory: &Arc<GuestMemory>,
        budget: &mut Budget,
    ) -> Result<Taken, Broken> {
        while budget.chains > 0 && budget.len_bytes > 0 {
            budget.chains -= 1;
            if let Some(long) = self.long.take() {
                self.go_on(long, memory)?;
                // Other events, such as a pause, are handled between two pieces.
                return Ok(Taken::Budget);
            }
            if !self.may_take() {
                return Ok(Taken::NoRoom);
            }
            let Some(chain) = self.queue.pop(memory)? else { return Ok(Taken::All) };
            let head = chain.head;
            let request = Request::parse(chain, memory, self.limits())
                .map_err(|why| self.queue.bad_chain(head, why))?;
            let len_bytes = request.operation.transfer_bytes();
            let begun = LongTransfer::begin(request);
            // Completions lead back here; a long one is taken once all have arrived.
            let has_turn = begun.is_err() || self.is_idle();
            if !has_turn || !self.passes_limit(len_bytes) {
                self.queue.undo_pop();
                return Ok(Taken::NoRoom);
            }
            let request = match begun {
                Ok(long) => {
                    self.long = Some(long);
                    continue;
                }
                Err(request) => request,
            };
            let done_bytes = self.begin(request, memory)?;
            budget.len_bytes = budget.len_bytes.saturating_sub(done_bytes);
        }
        Ok(Taken::Budget)
    }

    /// Whether the limit lets a request pass, which it then counts. A long one that a pause interrupts is done
    /// again afterwards, and counted again.
    fn passes_limit(&mut self, len_bytes: u64) -> bool {
        self.throttle.as_mut().is_none_or(|throttle| throttle.passes(len_bytes))
    }

    /// Does a piece of a long request.
    fn go_on(&mut self, long: LongTransfer, memory: &Arc<GuestMemory>) -> Result<(), Broken> {
        match long.go_on(|operation| self.shared.engine.perform(operation, memory)) {
            Progress::Unfinished(long) => {
                self.long = Some(long);
                Ok(())
            }
            Progress::Finished { request, started, outcome } => {
                self.finish(memory, request, outcome, started)
            }
        }
    }

    /// Returns a long request to the available ring; it is restarted when the queue resumes.
    fn put_back(&mut self) {
        if self.long.take().is_some() {
            self.queue.undo_pop();
        }
    }

    /// Whether another request may start now.
    fn may_take(&mut self) -> bool {
        self.is_retrying &= !self.is_idle();
        let has_room = self.ring.as_ref().is_none_or(Ring::has_room)
            && self.pool.as_ref().is_none_or(Pool::has_room);
        !self.is_full && !self.is_retrying && has_room
    }

    /// Starts a request, or carries it out; returns the bytes transferred synchronously.
    fn begin(&mut self, request: Request, memory: &Arc<GuestMemory>) -> Result<u64, Broken> {
        if self.pool.is_some()
            && !matches!(request.operation, Operation::GetId { .. } | Operation::Refused(_))
        {
            if let Some(request) = self.start_placed(request, memory) {
                self.start_in_pool(request, memory, Instant::now());
            }
            return Ok(0);
        }
        let Some(request) = self.start_in_ring(request, memory) else { return Ok(0) };
        let (started, len_bytes) = (Instant::now(), request.operation.transfer_bytes());
        let outcome = self.shared.engine.perform(&request.operation, memory);
        self.finish(memory, request, outcome, started)?;
        Ok(len_bytes)
    }

    /// Retries waiting requests. A long request was alone in its queue, and so is the only one and the last
    /// one taken.
    fn begin_kept(&mut self) -> Result<(), Broken> {
        self.is_full = false;
        let kept = self.shared.full.take(self.queue.index());
        self.is_retrying = !kept.is_empty();
        let memory = self.queue.memory().into_inner();
        for request in kept {
            match LongTransfer::begin(request) {
                Ok(long) => self.long = Some(long),
                Err(request) => {
                    self.begin(request, &memory)?;
                }
            }
        }
        Ok(())
    }

    fn start_in_pool(&mut self, request: Request, memory: &Arc<GuestMemory>, started: Instant) {
        if let Some(pool) = &mut self.pool {
            pool.push(PoolJob { request, memory: Arc::clone(memory), started });
        }
    }

    /// Returns the request if it cannot go straight to the file of an image in a format.
    fn start_placed(&mut self, request: Request, memory: &Arc<GuestMemory>) -> Option<Request> {
        let Engine { disk, .. } = &self.shared.engine;
        let (Some(ring), Some(formatted)) = (&mut self.ring, disk.formatted()) else {
            return Some(request);
        };
        let (action, offset, data) = match &request.operation {
            Operation::Read { offset, data } => (Action::Read, *offset, data),
            // A write that is stable at once takes the tables with it.
            Operation::Write { offset, data }
                if self.shared.engine.stability() == Stability::Later =>
            {
                (Action::Write { through: false }, *offset, data)
            }
            _ => return Some(request),
        };
        let Ok(ranges) = data.host_ranges(Arc::clone(memory)) else { return Some(request) };
        if ranges.len_bytes() == 0 {
            return Some(request);
        }
        let is_write = action != Action::Read;
        let transfer = formatted.begin_transfer(offset, data.len_bytes(), is_write);
        let Some(transfer) = transfer.filter(|it| ranges.is_aligned(it.place.address_align_bytes))
        else {
            return Some(request);
        };
        let (offset, started, transfer) = (transfer.place.offset, Instant::now(), Some(transfer));
        let job = Job { request, action, offset, transfer, ranges, started, done_bytes: 0 };
        ring.push(Box::new(job)).err().map(|job| job.request)
    }

    /// Returns the request if it has to be carried out synchronously.
    fn start_in_ring(&mut self, request: Request, memory: &Arc<GuestMemory>) -> Option<Request> {
        let Some(ring) = &mut self.ring else { return Some(request) };
        let nothing = Segments::default();
        let Engine { disk, .. } = &self.shared.engine;
        let (action, offset, data) = match &request.operation {
            Operation::Read { offset, data } => (Action::Read, *offset, data),
            Operation::Write { offset, data } => {
                let through = match self.shared.engine.stability() {
                    Stability::Later => false,
                    Stability::AtOnce => true,
                    Stability::Behind => return Some(request),
                };
                (Action::Write { through }, *offset, data)
            }
            Operation::Flush if !disk.readonly() => {
                // After a failed flush the result is known.
                if disk.check_stable().is_err() {
                    return Some(request);
                }
                (Action::Flush, 0, &nothing)
            }
            _ => return Some(request),
        };
        let Ok(ranges) = data.host_ranges(Arc::clone(memory)) else { return Some(request) };
        let is_transfer = action != Action::Flush;
        if is_transfer
            && (ranges.len_bytes() == 0 || !synchronous::is_direct_ready(disk, offset, &ranges))
        {
            return Some(request);
        }
        let started = Instant::now();
        let transfer = None;
        let job = Job { request, action, offset, transfer, ranges, started, done_bytes: 0 };
        ring.push(Box::new(job)).err().map(|job| job.request)
    }

    fn reap(&mut self) -> Result<(), Broken> {
        self.reap_pool().and(self.reap_ring())
    }

    fn reap_pool(&mut self) -> Result<(), Broken> {
        let Some(pool) = self.pool.as_mut().filter(|pool| !pool.is_idle()) else { return Ok(()) };
        let mut result = Ok(());
        for PoolDone { job, outcome } in pool.take_completed() {
            let PoolJob { request, memory, started } = job;
            // Each is finished, whatever happened to those before.
            result = self.finish(&memory, request, outcome, started).and(result);
        }
        result
    }

    fn reap_ring(&mut self) -> Result<(), Broken> {
        let Some(ring) = &mut self.ring else { return Ok(()) };
        let (mut result, mut again) = (Ok(()), Vec::new());
        for Done { job, result: done } in ring.take_completed() {
            let Job { request, action, transfer, ranges, started, done_bytes, .. } = *job;
            let memory = Arc::clone(ranges.memory_arc());
            let mut written = 0;
            if let Operation::Read { data, .. } = &request.operation {
                // Also after an error, as a part may have been transferred before.
                data.mark_written(&memory, done_bytes);
                written = done_bytes;
            }
            if transfer.is_some() && done.is_err() {
                // The driver knows what is behind the end of the file, and what an error means.
                drop(transfer);
                again.push((request, memory, started));
                continue;
            }
            let disk = &self.shared.engine.disk;
            let done = match action {
                Action::Flush => disk.note_flush(done).map_err(Failure::Flush),
                Action::Write { through: true } => {
                    done.inspect_err(|error| disk.note_failed_through(error)).map_err(Failure::Host)
                }
                _ => done.map_err(Failure::Host),
            };
            let outcome = done.map(|()| written);
            // Each is completed, whatever the result of earlier ones.
            result = self.finish(&memory, request, outcome, started).and(result);
        }
        for (request, memory, started) in again {
            self.start_in_pool(request, &memory, started);
        }
        result
    }

    fn finish(
        &mut self,
        memory: &GuestMemory,
        request: Request,
        outcome: Result<u64, Failure>,
        started: Instant,
    ) -> Result<(), Broken> {
        let (status, written) = match outcome {
            Ok(written) => (Status::Ok, written),
            Err(Failure::Host(error)) if self.is_to_be_kept(&request, &error) => {
                self.keep(request, &error);
                return Ok(());
            }
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

    fn is_to_be_kept(&self, request: &Request, error: &io::Error) -> bool {
        self.shared.engine.on_full == OnFull::Pause
            && request.operation.takes_room()
            && !self.is_broken.get()
            && no_space::is_full(error)
    }

    fn keep(&mut self, request: Request, error: &io::Error) {
        let Shared { engine, full, log, .. } = &self.shared;
        let (what, path) = (request.operation.name(), engine.disk.path().display());
        log_limited!(log, Warn, "{what} on disk {path} is kept until there is room: {error}");
        let memory = self.queue.memory_handle().clone();
        full.keep(self.queue.index(), request, engine.clone(), memory);
        if !std::mem::replace(&mut self.is_full, true) {
            full.tell();
        }
    }

    fn note_failure(&self, operation: &Operation, failure: Failure) -> Status {
        self.shared.counters.errors.add(1);
        let error = match failure {
            Failure::Status(status) => return status,
            Failure::Host(error) | Failure::Flush(error) => error,
        };
        let (what, path) = (operation.name(), self.disk().path().display());
        log_limited!(self.shared.log, Warn, "{what} on disk {path} failed: {error}");
        Status::IoError
    }
}

/// What may still be taken before other events, such as a pause, are handled: a driver that adds requests as fast as
/// they are completed must not keep the thread.
struct Budget {
    chains: u32,
    /// Bytes transferred synchronously.
    len_bytes: u64,
}

enum Taken {
    All,
    NoRoom,
    Budget,
}

impl Work for BlockWorker {
    fn kind(&self) -> &'static str {
        "device-block"
    }

    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        // None is read, which would be a system call for each request: what they announce is in the rings.
        watch.on_signal(KICK_TOKEN, self.queue.kick().as_raw_fd())?;
        if let Some(ring) = &self.ring {
            watch.on_signal(RING_TOKEN, ring.completed().as_raw_fd())?;
        }
        if let Some(pool) = &self.pool {
            watch.on_signal(POOL_TOKEN, pool.completed().as_raw_fd())?;
        }
        if let Some(throttle) = &self.throttle {
            watch.on_signal(LIMIT_TOKEN, throttle.fd())?;
        }
        // A pause that was withdrawn has seen to events, and not to all completions.
        self.reap()?;
        self.begin_kept()?;
        self.serve()
    }

    fn ready(&mut self, token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        match token {
            // Serving sets the limit's timer again, if it is too early.
            KICK_TOKEN | LIMIT_TOKEN => {}
            _ => self.reap()?,
        }
        self.serve()
    }

    fn drain(&mut self) -> Result<(), Broken> {
        self.put_back();
        let mut result = Ok(());
        while !self.is_idle() {
            // What the pool does may wait for transfers that only this thread ends.
            match (&self.ring, &self.pool) {
                (Some(ring), _) if !ring.is_idle() => ring.wait(),
                (_, Some(pool)) => pool.wait(),
                _ => {}
            }
            result = self.reap().and(result);
        }
        result?;
        let memory = self.queue.memory();
        self.queue.notify(&memory)
    }

    fn try_drain(&mut self, watch: &mut Watch) -> Result<bool, Broken> {
        self.put_back();
        let reaped = self.reap();
        watch.off(KICK_TOKEN);
        watch.off(LIMIT_TOKEN);
        // The kernel may not have accepted all of it.
        let is_ring_watched = self.ring.as_mut().is_none_or(|ring| {
            let mut is_watched = |fd: &EventFd| watch.on_signal(RING_TOKEN, fd.as_raw_fd()).is_ok();
            ring.is_idle() || ring.submit() && is_watched(ring.completed())
        });
        let is_pool_watched = self.pool.as_ref().is_none_or(|pool| {
            pool.is_idle() || watch.on_signal(POOL_TOKEN, pool.completed().as_raw_fd()).is_ok()
        });
        if is_ring_watched && is_pool_watched && reaped.is_ok() && !self.is_idle() {
            return Ok(false);
        }
        // Also if the driver broke a rule: operations in flight write to guest memory all the same.
        self.drain().and(reaped).map(|()| true)
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        vec![self.queue.state()]
    }

    fn report_broken(&self) {
        self.is_broken.set(true);
        drop(self.shared.full.take(self.queue.index()));
        self.queue.interrupt().needs_reset();
    }

    /// Behind the IOMMU, the driver may wait for the end of what is in flight; and other queues may, for that of
    /// transfers.
    fn start_broken(&mut self, _watch: &mut Watch) {
        // It is known to be broken.
        if self.queue.is_translated() {
            let _ = self.drain();
        }
        while self.pool.is_some()
            && let Some(ring) = self.ring.as_ref().filter(|ring| !ring.is_idle())
        {
            ring.wait();
            let _ = self.reap_ring();
        }
    }
}
