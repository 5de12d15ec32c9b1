// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The engine that populates guest memory ahead of time: at boot, on restore, in the
//! background.
//!
//! Owns its threads, which work on a queue of chunks per NUMA node ([`crate::plan`]), and the progress counter. Must never
//! populate what is still to arrive (see [`ResidentMap`](crate::ResidentMap)), must start before userfaultfd
//! watches the memory, and must stop soon after it is asked to.
//!
//! ```text
//!   regions --cut--> queue of node 0 --> threads bound to node 0 --> populate --> hook
//!                    queue of node 1 --> threads bound to node 1 --> populate --> hook
//! ```

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use stoppable_thread::StoppableThread;

use crate::available::{InsufficientMemory, check_available};
use crate::homes::Homes;
use crate::lanes::PrefaultMeter;
use crate::plan::{Chunk, Queue, chunk_end, plan};
use crate::populate::{PopulateError, THP_BYTES};
use crate::processors::{run_on_node, yield_processor};
use crate::region::{AccessError, RamRegion};

/// Unit of work: 10 to 30 ms, large enough that the queue is no bottleneck, small enough to stop and to show
/// progress.
const CHUNK_BYTES: u64 = 64 << 20;
/// Stack size: the threads do little but call the kernel.
const STACK_BYTES: usize = 256 << 10;

/// How often a thread that waits for the end checks for a cancel.
const GIVE_UP_LOOK: Duration = Duration::from_millis(20);

/// The error of a failed hook.
pub type HookError = Box<dyn std::error::Error + Send + Sync>;

/// Called on an engine thread for every range (bytes of the region) as soon as it is populated, for example
/// to map it for DMA. An error stops the engine.
pub type ChunkHook = Arc<dyn Fn(&RamRegion, Range<u64>) -> Result<(), HookError> + Send + Sync>;

/// Populates a range (bytes of the region) in place of the kernel, on a thread of this node.
pub type PopulateModel = Arc<dyn Fn(Option<u32>, &RamRegion, &Range<u64>) + Send + Sync>;

/// Whether a caller wants an engine to stop; called often, so it must not block.
pub type StopQuery = Arc<dyn Fn() -> bool + Send + Sync>;

/// An event of an engine.
#[derive(Debug)]
pub enum PrefaultEvent<'a> {
    /// A chunk is done; reported by the thread that did it.
    Progress(PrefaultProgress),
    /// Everything is done.
    Completed(PrefaultProgress),
    /// It was cancelled.
    Cancelled(PrefaultProgress),
    /// It has failed.
    Failed(&'a PrefaultError),
}

/// Receives progress and the final event, on engine threads. The final event comes once, after all others.
pub type PrefaultObserver = Arc<dyn Fn(PrefaultEvent<'_>) + Send + Sync>;

/// Options for populating.
#[derive(Clone)]
pub struct PrefaultOptions {
    /// Number of threads; by default one for each CPU of the memory's NUMA node that the process may use. Every
    /// node with work gets at least one.
    pub threads: Option<NonZeroUsize>,
    /// The unit of work in bytes, rounded up to whole huge pages.
    pub chunk_bytes: u64,
    /// Called for each populated range.
    pub on_chunk: Option<ChunkHook>,
    /// Receives progress and the final event.
    pub observer: Option<PrefaultObserver>,
    /// The threads yield to all others in the process. Because they may then get almost no CPU time, a caller
    /// that comes to wait for them should [help](Prefault::helper).
    pub yields_to_guest: bool,
    /// Memory that was discarded before its turn is left alone: for a guest that runs meanwhile, and has a
    /// balloon or reports free pages. It counts as done.
    pub spares_discarded: bool,
    /// Others change the address space meanwhile: its lock is taken for short times only, where the kernel allows.
    pub spares_mmap_lock: bool,
    /// Looked at in the middle of a chunk, as [`Prefault::cancel`] is.
    pub is_stopped: Option<StopQuery>,
    /// Populating fails at once if the host gives fewer threads than planned, so that it takes none of the last.
    pub all_threads: bool,
    /// The caller has found that the host has memory for all of it: that is not checked again.
    pub is_checked: bool,
    /// For a benchmark of a host that is larger than this one: called instead of the kernel, and the memory of this
    /// host is not checked. Never set by a VMM.
    pub model: Option<PopulateModel>,
    /// The same: nodes of such a host on which memory without a node lies. By default those of this one.
    pub homes: Option<Homes>,
}

impl Default for PrefaultOptions {
    fn default() -> Self {
        Self {
            threads: None,
            chunk_bytes: CHUNK_BYTES,
            on_chunk: None,
            observer: None,
            yields_to_guest: false,
            spares_discarded: false,
            spares_mmap_lock: false,
            is_stopped: None,
            all_threads: false,
            is_checked: false,
            model: None,
            homes: None,
        }
    }
}

impl fmt::Debug for PrefaultOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefaultOptions")
            .field("threads", &self.threads)
            .field("chunk_bytes", &self.chunk_bytes)
            .field("on_chunk", &self.on_chunk.is_some())
            .field("observer", &self.observer.is_some())
            .field("yields_to_guest", &self.yields_to_guest)
            .field("spares_discarded", &self.spares_discarded)
            .field("spares_mmap_lock", &self.spares_mmap_lock)
            .field("is_stopped", &self.is_stopped.is_some())
            .field("all_threads", &self.all_threads)
            .field("is_checked", &self.is_checked)
            .field("model", &self.model.is_some())
            .field("homes", &self.homes)
            .finish()
    }
}

/// Progress of populating.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefaultProgress {
    /// Bytes done, including parts that were skipped because they are still to arrive.
    pub done_bytes: u64,
    /// Total bytes.
    pub total_bytes: u64,
}

/// Why populating did not complete.
#[derive(Debug, thiserror::Error)]
pub enum PrefaultError {
    /// Memory could not be populated.
    #[error(transparent)]
    Populate(#[from] PopulateError),
    /// The range to be populated is invalid.
    #[error("cannot populate guest memory")]
    Range(#[source] AccessError),
    /// The hook failed.
    #[error("memory zone '{zone}' was populated at byte {at:#x}, but could not be put to use")]
    Hook {
        /// The zone.
        zone: String,
        /// Offset in the region.
        at: u64,
        /// The hook's error.
        #[source]
        source: HookError,
    },
    /// The host would run out of memory.
    #[error(transparent)]
    InsufficientMemory(#[from] InsufficientMemory),
    /// No thread could be started.
    #[error("could not start a thread to populate guest memory")]
    Spawn(#[source] std::io::Error),
    /// [`Prefault::cancel`] was called before the end.
    #[error("populating guest memory was cancelled after {done_bytes} of {total_bytes} bytes")]
    Cancelled {
        /// Bytes done.
        done_bytes: u64,
        /// Total bytes.
        total_bytes: u64,
    },
}

struct Engine {
    queues: Vec<Queue>,
    done_bytes: AtomicU64,
    total_bytes: u64,
    stop: AtomicBool,
    on_chunk: Option<ChunkHook>,
    observer: Option<PrefaultObserver>,
    yields_to_guest: bool,
    spares_discarded: bool,
    spares_mmap_lock: bool,
    is_stopped: Option<StopQuery>,
    model: Option<PopulateModel>,
    /// Running threads and helpers; the last one reports the end. Locked briefly.
    working: Mutex<usize>,
    /// Notified when none is left.
    idle: Condvar,
    /// The first failure; `wait` takes it once. Locked briefly by a thread that fails.
    failure: Mutex<Option<PrefaultError>>,
}

/// Guest memory that is being populated. Dropping it cancels and waits for the threads.
pub struct Prefault {
    engine: Arc<Engine>,
    threads: Vec<StoppableThread>,
}

impl fmt::Debug for Prefault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefault").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

impl Prefault {
    /// Starts to populate all of `regions` that the guest may use now, and returns at once.
    ///
    /// # Errors
    /// When the host does not have that much memory, unless that was checked, or no thread (or not all) could be started.
    pub fn start(
        regions: &[Arc<RamRegion>],
        options: &PrefaultOptions,
    ) -> Result<Self, PrefaultError> {
        if options.model.is_none() && !options.is_checked {
            check_available(regions)?;
        }
        let (queues, counts) =
            plan(regions, options.chunk_bytes, options.homes.clone(), options.threads);
        let total_bytes = queues.iter().flat_map(|queue| &queue.chunks).map(Chunk::len_bytes).sum();
        let engine = Arc::new(Engine {
            queues,
            done_bytes: AtomicU64::new(0),
            total_bytes,
            stop: AtomicBool::new(false),
            on_chunk: options.on_chunk.clone(),
            observer: options.observer.clone(),
            yields_to_guest: options.yields_to_guest,
            spares_discarded: options.spares_discarded,
            spares_mmap_lock: options.spares_mmap_lock,
            is_stopped: options.is_stopped.clone(),
            model: options.model.clone(),
            working: Mutex::new(counts.iter().sum()),
            idle: Condvar::new(),
            failure: Mutex::new(None),
        });
        let started = Self { engine, threads: Vec::new() };
        // All threads inherit one filter of system calls: making it takes longer than starting a thread.
        let all = options.all_threads;
        stoppable_thread::start_group("prefault", move || started.start_threads(counts, all))
            .map_err(PrefaultError::Spawn)?
    }

    /// Starts so many threads for each queue, or as many of them as the host gives: one for each at least, or `all`.
    fn start_threads(mut self, counts: Vec<usize>, all: bool) -> Result<Self, PrefaultError> {
        for (queue, count) in counts.into_iter().enumerate() {
            for number in 0..count {
                let engine = Arc::clone(&self.engine);
                let name = format!("prefault{queue}.{number}");
                let stop = {
                    let engine = Arc::clone(&engine);
                    move || engine.cancel()
                };
                let builder = stoppable_thread::Builder::new(name).stack_bytes(STACK_BYTES);
                match StoppableThread::build(builder, stop, move || engine.serve(queue)) {
                    Ok(thread) => {
                        self.threads.push(thread);
                        if let Some(queue) = self.engine.queues.get(queue) {
                            queue.meter.add_thread();
                        }
                    }
                    Err(error) if number == 0 || all => return Err(PrefaultError::Spawn(error)),
                    Err(error) => {
                        log::warn!(
                            "{number} threads populate memory and not {count}, as no more can be started: {error}"
                        );
                        (number..count).for_each(|_| self.engine.end());
                        break;
                    }
                }
            }
        }
        Ok(self)
    }

    /// Current progress.
    pub fn progress(&self) -> PrefaultProgress {
        self.engine.progress()
    }

    /// True when every thread has ended, so that [`wait`](Self::wait) will not block.
    pub fn is_finished(&self) -> bool {
        self.threads.iter().all(StoppableThread::is_finished)
    }

    /// A handle with which a thread can help instead of only waiting.
    pub fn helper(&self) -> PrefaultHelper {
        PrefaultHelper(Arc::clone(&self.engine))
    }

    /// Reads how far each kind of page of each node is.
    pub fn meter(&self) -> PrefaultMeter {
        PrefaultMeter(self.engine.queues.iter().map(|queue| Arc::clone(&queue.meter)).collect())
    }

    /// Requests that the threads end, also in the middle of a chunk. What is populated stays populated.
    pub fn cancel(&self) {
        self.engine.cancel();
    }

    /// Waits for the end, and cancels when `is_cancelled`, which is polled, returns true.
    ///
    /// # Errors
    /// As [`Prefault::wait`].
    pub fn wait_unless(self, is_cancelled: &dyn Fn() -> bool) -> Result<(), PrefaultError> {
        while !self.engine.ends_within(GIVE_UP_LOOK) {
            if is_cancelled() {
                self.cancel();
                break;
            }
        }
        self.wait()
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The first failure of any thread, or that it was cancelled before the end.
    pub fn wait(mut self) -> Result<(), PrefaultError> {
        self.threads.drain(..).for_each(StoppableThread::join);
        self.engine.wait_for_helpers();
        let failure = self.engine.failure.lock().take();
        let PrefaultProgress { done_bytes, total_bytes } = self.progress();
        match failure {
            Some(failure) => Err(failure),
            None if done_bytes < total_bytes => {
                Err(PrefaultError::Cancelled { done_bytes, total_bytes })
            }
            None => Ok(()),
        }
    }
}

/// Lets waiting threads take a share of the work.
#[derive(Clone)]
pub struct PrefaultHelper(Arc<Engine>);

impl PrefaultHelper {
    /// Populates unclaimed chunks on the calling thread, with its own priority and CPU affinity. Returns when
    /// no chunk is left to claim.
    pub fn help(&self) {
        let mut working = self.0.working.lock();
        // The final event has been reported already.
        if *working == 0 {
            return;
        }
        *working += 1;
        drop(working);
        let _working = WorkerGuard(&self.0);
        self.0.queues.iter().for_each(|queue| self.0.work(queue));
    }
}

/// Registration of a worker; dropping it ends the registration, however the thread ends.
struct WorkerGuard<'a>(&'a Engine);

impl Drop for WorkerGuard<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Engine {
    fn cancel(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    fn progress(&self) -> PrefaultProgress {
        let done_bytes = self.done_bytes.load(Ordering::Relaxed);
        PrefaultProgress { done_bytes, total_bytes: self.total_bytes }
    }

    /// Main function of a thread.
    fn serve(&self, queue: usize) {
        let _working = WorkerGuard(self);
        let Some(queue) = self.queues.get(queue) else { return };
        if self.yields_to_guest {
            yield_processor();
        }
        if let Some(node) = queue.node {
            run_on_node(node);
        }
        self.work(queue);
    }

    fn end(&self) {
        let mut working = self.working.lock();
        *working = working.saturating_sub(1);
        if *working == 0 {
            drop(working);
            self.report_end();
            self.idle.notify_all();
        }
    }

    /// True when no thread works on it any more, now or within `within`.
    fn ends_within(&self, within: Duration) -> bool {
        let mut working = self.working.lock();
        self.idle.wait_while_for(&mut working, |working| *working > 0, within);
        *working == 0
    }

    fn wait_for_helpers(&self) {
        let mut working = self.working.lock();
        while *working > 0 {
            self.idle.wait(&mut working);
        }
    }

    fn report_end(&self) {
        let Some(observer) = &self.observer else { return };
        let progress = self.progress();
        // No other thread is left that could hold the lock for long.
        let failure = self.failure.lock();
        observer(match &*failure {
            Some(error) => PrefaultEvent::Failed(error),
            None if progress.done_bytes < progress.total_bytes => {
                PrefaultEvent::Cancelled(progress)
            }
            None => PrefaultEvent::Completed(progress),
        });
    }

    fn work(&self, queue: &Queue) {
        while !self.is_to_stop() {
            let next = queue.next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = queue.chunks.get(next) else { return };
            let begun = Instant::now();
            match self.populate(queue.node, chunk) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    self.stop.store(true, Ordering::Relaxed);
                    let mut failure = self.failure.lock();
                    failure.get_or_insert(error);
                    return;
                }
            }
            let len_bytes = chunk.len_bytes();
            queue.meter.add(chunk.lane, len_bytes, begun.elapsed());
            self.done_bytes.fetch_add(len_bytes, Ordering::Relaxed);
            if let Some(observer) = &self.observer {
                observer(PrefaultEvent::Progress(self.progress()));
            }
        }
    }

    fn is_to_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.is_stopped.as_ref().is_some_and(|query| query())
    }

    /// Populates a chunk; false if it was stopped before its end.
    fn populate(&self, node: Option<u32>, chunk: &Chunk) -> Result<bool, PrefaultError> {
        let region = &*chunk.region;
        let mut done = |range: Range<u64>| {
            let Some(hook) = &self.on_chunk else { return Ok(()) };
            let at = range.start;
            let zone = || region.zone_id().to_owned();
            hook(region, range).map_err(|source| PrefaultError::Hook { zone: zone(), at, source })
        };
        let all = vec![chunk.bytes.clone()];
        let parts = if self.spares_discarded { region.never_discarded(&chunk.bytes) } else { all };
        if let Some(model) = &self.model {
            let modelled = parts.into_iter().try_for_each(|part| {
                model(node, region, &part);
                done(part)
            });
            return modelled.map(|()| true);
        }
        for part in parts {
            let go_on = || !self.is_to_stop();
            if !region.populate(&part, self.spares_mmap_lock, &go_on, &mut done)? {
                return Ok(false);
            }
            region.note_ahead(&part);
        }
        Ok(true)
    }
}

/// Memory that can be populated in pieces, for a caller that processes each piece as soon as it is populated,
/// for example with a DMA mapping.
pub trait Populate: Send + Sync {
    /// Populates `range` (bytes, whole pages) on the calling thread and calls `done` for each chunk of it, in
    /// order. Chunks begin and end at huge pages wherever possible. Parts that are still to arrive are
    /// skipped without a call; memory that is populated already is reported at once.
    ///
    /// # Errors
    /// When the range is invalid, the host has no memory, or `done` failed.
    fn populate_chunks(
        &self,
        range: &Range<u64>,
        chunk_bytes: u64,
        done: &mut dyn FnMut(Range<u64>) -> Result<(), HookError>,
    ) -> Result<(), PrefaultError>;
}

impl Populate for RamRegion {
    fn populate_chunks(
        &self,
        range: &Range<u64>,
        chunk_bytes: u64,
        done: &mut dyn FnMut(Range<u64>) -> Result<(), HookError>,
    ) -> Result<(), PrefaultError> {
        self.main_slice(range).map_err(PrefaultError::Range)?;
        let align = self.page_bytes().max(THP_BYTES);
        let skew = self.host_addr() % align;
        let mut start = range.start;
        while start < range.end {
            let end = chunk_end(start, skew, chunk_bytes, align).min(range.end);
            self.populate(&(start..end), false, &|| true, |piece| {
                let at = piece.start;
                let zone = || self.zone_id().to_owned();
                done(piece).map_err(|source| PrefaultError::Hook { zone: zone(), at, source })
            })?;
            start = end;
        }
        Ok(())
    }
}

impl RamRegion {
    /// Populates `range` on the calling thread, holes included.
    ///
    /// # Errors
    /// When the range lies outside the region, or the host has no memory.
    pub fn fill(&self, range: &Range<u64>) -> Result<(), PrefaultError> {
        self.check_pages(range).map_err(PrefaultError::Range)?;
        self.populate::<PopulateError>(range, false, &|| true, |_| Ok(()))?;
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
#[path = "prefault_tests.rs"]
mod tests;
