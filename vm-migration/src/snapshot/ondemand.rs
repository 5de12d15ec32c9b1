// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Restores memory while the guest runs: faulting pages first, all others in the background.
//!
//! Owns the threads that read the memory file, and the claims: a set bit of `unread` is a unit that has not
//! been read yet, and the thread that clears it reads it, once. The page engine of postcopy does the rest:
//! which threads wait, what an arrival means, when all is here. Nothing becomes visible to the guest before
//! its checksum was verified; a page that cannot be read never becomes visible, and a thread that needs it
//! waits until the process ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use page_bitmap::PageBitmap;
use parking_lot::Mutex;
use stoppable_thread::StoppableThread;

use super::block::{checksum_of, present_runs};
use super::copy::damaged;
use super::error::SnapshotError;
use super::file::{AlignedBuffer, MemoryFile};
use super::geometry::{CHUNK_PAGES, Geometry};
use super::index::Index;
use super::open::Opened;
use crate::cancel::Cancel;
use crate::destination::{Engine, Via};
use crate::error::{Cause, Failure, Side};
use crate::fault::{FaultSource, FaultWait};
use crate::layout::{GpaRange, PAGE_BYTES, PageRun, to_usize};
use crate::progress::{FaultSnapshot, Progress};
use crate::ram::GuestMemoryMap;
use crate::transport::{WaitEnd, wait_readable};
use crate::uffd::Uffd;

/// userfaultfds over which faults are distributed, each with its own reader thread.
const FAULT_READERS: usize = 4;

/// Threads that read in the background.
const FILLERS: usize = 2;

/// Most units that a background thread reads at once: 512 KiB of 4 KiB pages.
const FILL_UNITS: u32 = 8;

/// How long the background threads pause while a thread waits for a page.
const STAND_BACK: Duration = Duration::from_micros(100);

/// State that the threads share.
struct Shared<M: GuestMemoryMap> {
    engine: Engine<M>,
    memory: Arc<M>,
    file: MemoryFile,
    geometry: Geometry,
    index: Index,
    /// By region: units that have not been read.
    unread: Vec<PageBitmap>,
    /// By region: chunks that become visible together, because they share a host page.
    unit_chunks: Vec<u64>,
    /// Number of faults that are being resolved.
    urgent: AtomicU32,
    /// Where the guest faulted last: region in the upper 16 bits, the unit after the fault below.
    trail: AtomicU64,
    /// The first failure. Locked for one access.
    failure: Mutex<Option<SnapshotError>>,
}

/// How an on-demand restore ended.
#[derive(Clone, Debug)]
pub enum FillEnd {
    /// All memory is resident.
    Complete(Box<FillReport>),
    /// A stop was requested; the guest must have ended.
    Cancelled,
}

/// Result of an on-demand restore.
#[derive(Clone, Debug)]
pub struct FillReport {
    /// Time from the first preparation to the last page.
    pub took: Duration,
    /// Bytes of pages that are not zero.
    pub data_bytes: u64,
    /// The faults of the guest.
    pub faults: FaultSnapshot,
}

/// Memory that could not be read: threads that need a missing page wait. Dropping this would make them see
/// zeros, so keep it until the process or the guest has ended.
pub struct Stuck<M: GuestMemoryMap> {
    /// The failure.
    pub error: SnapshotError,
    _filling: Filling<M>,
}

impl<M: GuestMemoryMap> std::fmt::Debug for Stuck<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Stuck").field(&self.error).finish()
    }
}

/// Memory that is being restored on demand. Dropping it ends that, and waiters continue with whatever their
/// pages hold: the guest must have ended by then, or never have run.
pub struct Filling<M: GuestMemoryMap> {
    shared: Arc<Shared<M>>,
    threads: Vec<StoppableThread>,
    began: Instant,
    stop: Cancel,
}

impl<M: GuestMemoryMap> Filling<M> {
    /// Starts to watch the memory of a machine that has not run: from now on any access gets the contents of
    /// the snapshot. Pages without a fault are read by [`wait`](Self::wait), so that they do not delay the
    /// start of the guest. `stop` ends the restore once the guest has ended. The memory must be empty.
    ///
    /// # Errors
    /// When the snapshot does not match the machine, or memory cannot be watched.
    pub fn start(snapshot: Opened, memory: &Arc<M>, stop: Cancel) -> Result<Self, SnapshotError> {
        let began = Instant::now();
        let (geometry, index) = snapshot.index_for(memory.layout())?;
        // Each page has to fault by itself: a huge page around the first would make the others present, as
        // zeros.
        memory.use_small_pages(true);
        let source =
            Uffd::register(Arc::clone(memory), FAULT_READERS).map_err(SnapshotError::OnDemand)?;
        let source: Arc<dyn FaultSource> = Arc::new(source);
        let progress = Arc::new(Progress::new(Side::Destination));
        progress.set_fault_source(source.kind());
        let plan = Plan::new(&**memory, &geometry, &index);
        let engine = Engine::with_missing(memory, source, plan.missing, progress)
            .map_err(|cause| SnapshotError::Pages(error_text::chain(&cause)))?;
        let shared = Arc::new(Shared {
            engine,
            memory: Arc::clone(memory),
            file: snapshot.into_memory(),
            geometry,
            index,
            unread: plan.unread,
            unit_chunks: plan.unit_chunks,
            urgent: AtomicU32::new(0),
            trail: AtomicU64::new(NO_TRAIL),
            failure: Mutex::new(None),
        });
        let mut filling = Self { shared, threads: Vec::new(), began, stop };
        for reader in 0..filling.shared.engine.source().readers() {
            filling.spawn("restore-fault", move |shared| shared.answer_faults(reader))?;
        }
        Ok(filling)
    }

    fn spawn(
        &mut self,
        name: &str,
        work: impl FnOnce(&Shared<M>) -> Result<(), SnapshotError> + Send + 'static,
    ) -> Result<(), SnapshotError> {
        let shared = Arc::clone(&self.shared);
        let body = move || {
            if let Err(error) = work(&shared) {
                shared.fail(error);
            }
        };
        let stop = {
            let shared = Arc::clone(&self.shared);
            move || {
                shared.engine.failed().cancel();
                shared.engine.source().stop_readers();
            }
        };
        let thread = StoppableThread::spawn(name, stop, body);
        self.threads.push(thread.map_err(SnapshotError::Resource)?);
        Ok(())
    }

    /// The handle with which [`wait`](Self::wait) ends early.
    pub fn stop_handle(&self) -> Cancel {
        self.stop.clone()
    }

    /// From here on the guest may run: a failure makes it wait instead of ending the wait.
    ///
    /// # Errors
    /// The failure so far, if any.
    pub fn commit(&self) -> Result<(), SnapshotError> {
        self.shared.engine.commit().map_err(|failure| {
            let noted = self.take_failure();
            noted.unwrap_or_else(|| SnapshotError::Pages(error_text::chain(&failure.cause)))
        })
    }

    /// The recorded failure, which explains a follow-up error better than the error itself.
    pub fn take_failure(&self) -> Option<SnapshotError> {
        self.shared.failure.lock().take()
    }

    /// Reads all pages for which there was no fault, and waits until all memory is resident or a stop is
    /// requested.
    ///
    /// # Errors
    /// When contents cannot be read or are damaged: threads that need them keep waiting.
    pub fn wait(mut self) -> Result<FillEnd, Box<Stuck<M>>> {
        for _ in 0..FILLERS {
            if let Err(error) = self.spawn("restore-fill", Shared::fill) {
                return Err(Box::new(Stuck { error, _filling: self }));
            }
        }
        let engine = &self.shared.engine;
        let fds = [engine.complete().fd(), engine.failed().fd()];
        let error = match wait_readable(&fds, &self.stop, None) {
            Ok(WaitEnd::Cancelled | WaitEnd::TimedOut) => return Ok(FillEnd::Cancelled),
            Ok(WaitEnd::Ready(0)) => match engine.release(|| self.stop.is_cancelled()) {
                Ok(()) => {
                    self.shared.memory.use_small_pages(false);
                    return Ok(FillEnd::Complete(Box::new(self.report())));
                }
                Err(_) if self.stop.is_cancelled() => return Ok(FillEnd::Cancelled),
                Err(error) => SnapshotError::OnDemand(error),
            },
            Ok(WaitEnd::Ready(_)) => self.take_failure().unwrap_or_else(|| {
                let why = engine.take_failure();
                why.map_or(SnapshotError::Cancelled, |failure| {
                    SnapshotError::Pages(error_text::chain(&failure.cause))
                })
            }),
            Err(error) => SnapshotError::Resource(error),
        };
        Err(Box::new(Stuck { error, _filling: self }))
    }

    fn report(&self) -> FillReport {
        FillReport {
            took: self.began.elapsed(),
            data_bytes: self.shared.index.present_pages() * PAGE_BYTES,
            faults: self.shared.engine.progress().snapshot().faults,
        }
    }
}

impl<M: GuestMemoryMap> Drop for Filling<M> {
    fn drop(&mut self) {
        self.shared.engine.failed().cancel();
        self.shared.engine.source().stop_readers();
    }
}

/// The missing units of all regions, and the units in which they are read.
struct Plan {
    missing: Vec<PageBitmap>,
    unread: Vec<PageBitmap>,
    unit_chunks: Vec<u64>,
}

impl Plan {
    fn new<M: GuestMemoryMap>(memory: &M, geometry: &Geometry, index: &Index) -> Self {
        let mut plan = Self { missing: Vec::new(), unread: Vec::new(), unit_chunks: Vec::new() };
        for (region, info) in memory.layout().regions().iter().enumerate() {
            let host_pages = info.host_page_bytes / PAGE_BYTES;
            let unit_chunks = (host_pages / CHUNK_PAGES).max(1);
            let missing = PageBitmap::new(info.pages() / host_pages);
            let unread = PageBitmap::new(info.pages().div_ceil(CHUNK_PAGES).div_ceil(unit_chunks));
            let all = PageRun { region, first: 0, count: info.pages() };
            for (number, chunk) in geometry.chunks_of(all) {
                let present = index.entry(number).present;
                if present == 0 {
                    continue;
                }
                unread.set(chunk.first / CHUNK_PAGES / unit_chunks);
                for run in present_runs(chunk, present) {
                    let first = run.first / host_pages;
                    missing.set_range(first..run.end().div_ceil(host_pages));
                }
            }
            plan.missing.push(missing);
            plan.unread.push(unread);
            plan.unit_chunks.push(unit_chunks);
        }
        plan
    }
}

const NO_TRAIL: u64 = u64::MAX;
const TRAIL_UNIT_BITS: u32 = 48;

impl<M: GuestMemoryMap> Shared<M> {
    /// Notes the first failure, and stops all threads.
    fn fail(&self, error: SnapshotError) {
        let text = error_text::chain(&error);
        log::error!("memory cannot be restored: {text}");
        self.failure.lock().get_or_insert(error);
        let cause = Cause::Memory(std::io::Error::other(text));
        self.engine.fail(Failure::new("restoring memory", cause));
    }

    /// The pages of consecutive units.
    fn pages_of(&self, region: usize, unit: u64, count: u64) -> PageRun {
        let unit_pages = self.unit_chunks[region] * CHUNK_PAGES;
        let first = unit * unit_pages;
        let left = self.geometry.regions()[region].pages - first;
        PageRun { region, first, count: left.min(count * unit_pages) }
    }

    /// Resolves the faults of one queue until all memory is resident.
    fn answer_faults(&self, reader: usize) -> Result<(), SnapshotError> {
        let pages = |cause: &Cause| SnapshotError::Pages(error_text::chain(cause));
        let mut faults = Vec::new();
        let mut buffer = AlignedBuffer::new(0);
        loop {
            faults.clear();
            match self.engine.source().next_faults(reader, &mut faults) {
                Ok(FaultWait::Faults) => {}
                Ok(FaultWait::Stopped) => return Ok(()),
                Err(error) => return Err(SnapshotError::OnDemand(error)),
            }
            let ask = self.engine.take_faults(&faults).map_err(|cause| pages(&cause))?;
            self.urgent.fetch_add(1, Ordering::Relaxed);
            let answered = ask.into_iter().try_for_each(|range| self.answer(range, &mut buffer));
            self.urgent.fetch_sub(1, Ordering::Relaxed);
            answered?;
        }
    }

    /// Reads a requested unit, unless another thread is reading it.
    fn answer(&self, range: GpaRange, buffer: &mut AlignedBuffer) -> Result<(), SnapshotError> {
        let run = self.memory.layout().locate(range).map_err(SnapshotError::Layout)?;
        let unit = run.first / CHUNK_PAGES / self.unit_chunks[run.region];
        self.trail.store((run.region as u64) << TRAIL_UNIT_BITS | (unit + 1), Ordering::Relaxed);
        if self.unread[run.region].claim(unit) {
            self.resolve(self.pages_of(run.region, unit, 1), buffer, Via::Urgent)?;
        }
        Ok(())
    }

    /// Reads in the background until nothing is left, close to the guest's last fault.
    fn fill(&self) -> Result<(), SnapshotError> {
        let mut buffer = AlignedBuffer::new(0);
        let mut at = (0, 0);
        while !self.engine.failed().is_cancelled() {
            if self.urgent.load(Ordering::Relaxed) > 0 {
                std::thread::sleep(STAND_BACK);
            }
            let trail = self.trail.swap(NO_TRAIL, Ordering::Relaxed);
            if trail != NO_TRAIL {
                at = (to_usize(trail >> TRAIL_UNIT_BITS), trail & ((1 << TRAIL_UNIT_BITS) - 1));
            }
            let Some((region, claimed)) = self.claim_from(at) else { return Ok(()) };
            at = (region, claimed.base);
            for run in claimed.runs() {
                self.resolve(
                    self.pages_of(region, run.start, run.end - run.start),
                    &mut buffer,
                    Via::Bulk,
                )?;
            }
        }
        Ok(())
    }

    /// Claims the next units from a position on, or else from the beginning.
    fn claim_from(&self, (region, unit): (usize, u64)) -> Option<(usize, page_bitmap::Claimed)> {
        let claim = |region: usize, from: u64| {
            let units = if self.unit_chunks[region] == 1 { FILL_UNITS } else { 1 };
            Some((region, self.unread.get(region)?.claim_next(from, units)?))
        };
        let after = region + 1..self.unread.len();
        (region < self.unread.len())
            .then(|| claim(region, unit))
            .flatten()
            .or_else(|| after.into_iter().find_map(|region| claim(region, 0)))
            .or_else(|| (0..self.unread.len()).find_map(|region| claim(region, 0)))
    }

    /// Reads whole units, verifies them, and makes them visible to the guest.
    fn resolve(
        &self,
        run: PageRun,
        buffer: &mut AlignedBuffer,
        via: Via,
    ) -> Result<(), SnapshotError> {
        let len = to_usize(run.len_bytes());
        if buffer.bytes_mut().len() < len {
            *buffer = AlignedBuffer::new(run.count);
        }
        let bytes = &mut buffer.bytes_mut()[..len];
        self.file.read_buffer(bytes, self.geometry.offset_of(run.region, run.first))?;
        let mut runs: Vec<PageRun> = Vec::new();
        let mut clear_from = run.first;
        for (number, chunk) in self.geometry.chunks_of(run) {
            let entry = self.index.entry(number);
            let start = to_usize((chunk.first - run.first) * PAGE_BYTES);
            let content = &bytes[start..start + to_usize(chunk.len_bytes())];
            if checksum_of(content, chunk, entry.present) != entry.crc {
                return Err(damaged(self.file.path(), &*self.memory, chunk));
            }
            for present in present_runs(chunk, entry.present) {
                // In gaps between pages of the snapshot the file's contents are undefined.
                let gap = to_usize((clear_from - run.first) * PAGE_BYTES)
                    ..to_usize((present.first - run.first) * PAGE_BYTES);
                bytes[gap].fill(0);
                clear_from = present.end();
                match runs.last_mut() {
                    Some(last) if last.end() == present.first => last.count += present.count,
                    _ => runs.push(present),
                }
            }
        }
        bytes[to_usize((clear_from - run.first) * PAGE_BYTES)..].fill(0);
        if self.unit_chunks[run.region] > 1 {
            // A large host page becomes visible as a whole.
            runs = vec![run];
        }
        let mut scratch = Vec::new();
        for piece in runs {
            let start = to_usize((piece.first - run.first) * PAGE_BYTES);
            let mut content = &bytes[start..start + to_usize(piece.len_bytes())];
            let range = self.memory.layout().range_of(piece);
            self.engine
                .take_contents(&mut content, &[range], via, &mut scratch)
                .map_err(|cause| SnapshotError::Pages(error_text::chain(&cause)))?;
        }
        Ok(())
    }
}
