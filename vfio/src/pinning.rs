// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The pipeline that populates, pins and maps guest memory for DMA while the guest runs.
//!
//! Owns its thread and the progress, and opens or fails the gate. Memory is mapped as soon as it is
//! populated, on the thread that populated it, while other memory is being populated. If mapping would slow
//! populating down, and is little work, it is done when all memory is populated. A failure is
//! reported to every waiter; no waiter may wait forever.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memory::RamRegion;
use parking_lot::Mutex;

use super::dma::{LanesQuery, PopulateBegun, Populating, Populator};
use super::dma_map::{DmaMap, KeptMappings};
use super::entries::Entries;
use super::error::PinError;
use super::gate::DmaGate;
use super::last::{self, LastKind};
use super::pin_time::{self, PinWork, Review};

/// Memory of which no guest sees the wait, also in 4 KiB pages mapped by one thread. Such devices are there
/// from the beginning, however busy the host is, and no sample is taken.
pub(crate) const SMALL_BYTES: u64 = 1 << 30;

/// Why mapping has failed that was cancelled.
const VM_ENDS: &str = "the VM ends";
/// Why mapping has failed that was abandoned.
const UNUSED: &str = "the devices that it was for are being removed";

/// State of mapping memory for DMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinState {
    /// In progress.
    Pinning,
    /// All memory is mapped.
    Pinned {
        /// Duration of the mapping.
        took: Duration,
        /// When the last piece was mapped. The gate opens after this.
        at: Instant,
    },
    /// Failed for good, with the reason.
    Failed(Arc<str>),
}

/// Progress in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinProgress {
    /// Bytes mapped; without what the balloon has unmapped.
    pub pinned_bytes: u64,
    /// Total bytes.
    pub total_bytes: u64,
    /// State.
    pub state: PinState,
}

/// What follows the end of the thread.
enum End {
    /// Its result is reported.
    Reported,
    /// Everything is unmapped and this is called, in place of a report.
    Abandoned(Option<OnAbandoned>),
    /// The thread has ended, or there is none.
    Over,
}

/// Called once, on the mapping thread, when nothing is mapped any more.
pub type OnAbandoned = Box<dyn FnOnce() + Send>;

struct Shared {
    total_bytes: u64,
    dma_map: Arc<DmaMap>,
    /// When populating began.
    begun: OnceLock<Instant>,
    /// How far that is.
    lanes: OnceLock<LanesQuery>,
    /// What is mapped last.
    last: Vec<LastKind>,
    /// Locked by the mapping thread, now and then, and to set it.
    watch: Mutex<Option<Watch>>,
    stop: AtomicBool,
    state: Mutex<PinState>,
    /// Locked briefly.
    end: Mutex<End>,
    gate: Arc<DmaGate>,
    yields_to_guest: bool,
}

/// Who wants to know of a forecast that is too long.
struct Watch {
    review: Review,
    on_long: OnLong,
}

/// Called once with the time that is left, on the mapping thread; must not block.
pub type OnLong = Box<dyn FnOnce(Duration) + Send>;

/// Called once with the result, unless cancelled; on the mapping thread.
pub type OnEnd = Box<dyn FnOnce(&PinState) + Send>;

/// Guest memory being populated and mapped for DMA. Dropping this cancels it and waits for the threads.
pub struct Pinning {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<(), PinError>>>,
    /// Disconnected when the thread has finished.
    ended: Receiver<()>,
}

impl Pinning {
    /// Checks the limits and starts; `gate` is decided at the end in any case. `yields_to_guest`:
    /// populating yields to the running guest until it waits at the gate.
    ///
    /// # Errors
    /// A limit is too low, or the thread cannot be started.
    pub fn start(
        dma_map: Arc<DmaMap>,
        populator: Arc<dyn Populator>,
        gate: Arc<DmaGate>,
        yields_to_guest: bool,
        on_end: OnEnd,
    ) -> Result<Self, PinError> {
        Self::check(&dma_map, populator.as_ref(), 0)?;
        let (total_bytes, _) = populator.total_bytes();
        let shared = Arc::new(Shared {
            total_bytes,
            begun: OnceLock::new(),
            lanes: OnceLock::new(),
            last: last::kinds(dma_map.target(), populator.regions()),
            watch: Mutex::default(),
            dma_map,
            stop: AtomicBool::new(false),
            state: Mutex::new(PinState::Pinning),
            end: Mutex::new(End::Reported),
            gate,
            yields_to_guest,
        });
        let inner = Arc::clone(&shared);
        let (end, ended) = channel();
        let makes_room = Arc::clone(&populator);
        let run = move || {
            let result = inner.run(populator.as_ref(), on_end);
            drop::<Sender<()>>(end);
            result
        };
        // Kept for a second attempt.
        let run = Arc::new(Mutex::new(Some(run)));
        let start = || {
            let run = Arc::clone(&run);
            stoppable_thread::spawn("pin", move || {
                let run = run.lock().take();
                run.map_or(Err(PinError::Cancelled), |run| run())
            })
        };
        let thread = or_with_room(start, makes_room.as_ref()).map_err(PinError::Thread)?;
        Ok(Self { shared, thread: Some(thread), ended })
    }

    /// For memory that is mapped already: the gate is open, and nothing is left to do.
    pub fn complete(dma_map: Arc<DmaMap>, gate: Arc<DmaGate>, on_end: OnEnd) -> Self {
        let state = PinState::Pinned { took: Duration::ZERO, at: Instant::now() };
        gate.open();
        let shared = Arc::new(Shared {
            total_bytes: dma_map.mapped_bytes(),
            begun: OnceLock::new(),
            lanes: OnceLock::new(),
            last: Vec::new(),
            watch: Mutex::default(),
            dma_map,
            stop: AtomicBool::new(false),
            state: Mutex::new(state.clone()),
            end: Mutex::new(End::Over),
            gate,
            yields_to_guest: false,
        });
        on_end(&state);
        Self { shared, thread: None, ended: channel().1 }
    }

    /// Checks the limits without starting. `kept_bytes` are mapped already, and are not in the map yet.
    ///
    /// # Errors
    /// The limit that is too low.
    pub fn check(
        dma_map: &DmaMap,
        populator: &dyn Populator,
        kept_bytes: u64,
    ) -> Result<(), PinError> {
        let (total_bytes, counted_bytes) = populator.total_bytes();
        // What has stayed mapped is within the limits.
        let kept_bytes = dma_map.mapped_bytes().saturating_add(kept_bytes);
        let total_bytes = total_bytes.saturating_sub(kept_bytes);
        let counted_bytes = counted_bytes.min(total_bytes);
        let entries = Entries::of(populator.regions(), dma_map.piece_bytes());
        dma_map.target().limits().check(entries.now(), total_bytes, counted_bytes)
    }

    /// Has `on_long` called as soon as what is left is forecast to take longer than a guest may wait, with `bars` for the
    /// BARs that are mapped after memory. The forecast is repeated until then, or the end.
    pub fn watch(&self, bars: Duration, on_long: OnLong) {
        *self.shared.watch.lock() = Some(Watch { review: Review::new(bars), on_long });
    }

    /// Whether it is memory of which no guest sees the wait: its devices are there from the beginning, however busy the host is,
    /// and nothing is forecast.
    pub fn is_small(&self) -> bool {
        self.shared.total_bytes < SMALL_BYTES
    }

    /// How far it is.
    pub(crate) fn work(&self) -> PinWork {
        self.shared.work()
    }

    /// The current progress.
    pub fn progress(&self) -> PinProgress {
        let Shared { total_bytes, dma_map, state, .. } = &*self.shared;
        let lost = dma_map.lost().map(PinState::Failed);
        let pinned_bytes = dma_map.mapped_bytes();
        PinProgress {
            pinned_bytes,
            // The guest may have got more memory since.
            total_bytes: pinned_bytes.max(*total_bytes),
            state: lost.unwrap_or_else(|| state.lock().clone()),
        }
    }

    /// Whether a driver that enables DMA now would have to wait for longer than
    /// [`GATE_WAIT_MAX`](pin_time::GATE_WAIT_MAX), with `bars` for the BARs that are mapped after memory; also if nothing is
    /// mapped while that is measured. `is_cancelled` ends the measurement early.
    pub fn is_too_long(&self, bars: Duration, is_cancelled: impl Fn() -> bool) -> bool {
        let begun = Instant::now();
        if self.is_small() {
            return false;
        }
        loop {
            let judged = pin_time::judge(&self.work(), bars, begun.elapsed(), is_cancelled());
            if let Some(is_too_long) = judged {
                return is_too_long;
            }
            if self.ends_within(pin_time::POLL_INTERVAL) {
                // Its state says how; a thread that panicked has left none, and its gate has failed.
                return false;
            }
        }
    }

    /// Waits for the end, up to `timeout`, while the guest goes first; returns whether it has ended.
    pub fn ends_within(&self, timeout: Duration) -> bool {
        self.ended.recv_timeout(timeout) != Err(RecvTimeoutError::Timeout)
    }

    /// Waits for the end, up to `timeout`; returns whether it has ended. [`Pinning::wait`] does not block
    /// then.
    pub fn has_ended_within(&self, timeout: Duration) -> bool {
        self.shared.gate.help();
        self.ends_within(timeout)
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The first failure. Later calls do not repeat it.
    pub fn wait(&mut self) -> Result<(), PinError> {
        self.shared.gate.help();
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(_panic)) => Err(PinError::Cancelled),
        }
    }

    /// A handle that can abort the mapping without owning it.
    pub fn abandonment(&self) -> PinningAbort {
        PinningAbort(Arc::clone(&self.shared))
    }

    /// Abandons it before its end, without waiting: its thread unmaps everything and calls `then`. The devices that
    /// it is for must never have reached memory. Returns whether it was still in progress; if not, nothing has
    /// changed.
    pub fn abandon(&self, then: OnAbandoned) -> bool {
        let mut end = self.shared.end.lock();
        if !matches!(*end, End::Reported) {
            return false;
        }
        *end = End::Abandoned(Some(then));
        drop(end);
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.gate.fail(UNUSED);
        self.shared.dma_map.close();
        true
    }

    /// Whether it was abandoned, and is still unmapping.
    pub fn is_being_abandoned(&self) -> bool {
        matches!(*self.shared.end.lock(), End::Abandoned(_))
    }

    /// Cancels it; accesses that wait at the gate are refused. Nothing is mapped again.
    pub fn cancel(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.gate.fail(VM_ENDS);
        self.shared.dma_map.close();
    }
}

impl Pinning {
    /// Cancels it, and leaves what is mapped so far to the next boot of the guest, in the same memory, of
    /// which `regions` are all; blocks that may be plugged are unmapped. No function may access memory.
    ///
    /// # Errors
    /// Why nothing can stay mapped: mapping has failed, or something cannot be unmapped.
    pub fn leave(mut self, regions: &[Arc<RamRegion>]) -> Result<KeptMappings, Arc<str>> {
        self.cancel();
        if let Err(error) = self.wait()
            && !matches!(error, PinError::Cancelled)
        {
            return Err(error_text::chain(&error).into());
        }
        let failed = match &*self.shared.state.lock() {
            PinState::Failed(reason) if reason.as_ref() != VM_ENDS => Some(Arc::clone(reason)),
            _ => None,
        };
        failed.map_or_else(|| self.shared.dma_map.leave(regions), Err)
    }
}

/// Aborts a [`Pinning`] without owning it, once no function needs memory, now or later.
#[derive(Clone)]
pub struct PinningAbort(Arc<Shared>);

impl PinningAbort {
    /// Ends mapping and sets the state to failed, for this reason unless it has failed already; vCPUs that
    /// wait at the gate are refused. Does not block.
    pub fn begin(&self, reason: &Arc<str>) {
        let failed = match &*self.0.state.lock() {
            PinState::Failed(first) => Some(Arc::clone(first)),
            _ => None,
        };
        let reason = failed.as_ref().unwrap_or(reason);
        self.0.stop.store(true, Ordering::Relaxed);
        self.0.gate.fail(reason);
        self.0.dma_map.lose(reason);
    }

    /// Unmaps and unpins everything, after [`begin`](Self::begin). No function may access memory.
    pub fn unmap(&self) {
        self.0.dma_map.unmap_lost();
    }
}

impl Drop for Pinning {
    fn drop(&mut self) {
        self.cancel();
        // The failure of a cancelled mapping does not matter.
        let _ = self.wait();
        self.shared.dma_map.wait_for_calls();
    }
}

/// Starts a thread; if the host gives none, once more when those of the populator have ended.
pub(crate) fn or_with_room<T>(
    start: impl Fn() -> io::Result<T>,
    populator: &dyn Populator,
) -> io::Result<T> {
    start().or_else(|_| {
        populator.make_room();
        start()
    })
}

/// Decides the gate however its thread ends.
struct FailGateOnExit<'a>(&'a DmaGate);

impl Drop for FailGateOnExit<'_> {
    fn drop(&mut self) {
        self.0.fail("the thread that maps it has ended");
    }
}

impl Shared {
    fn run(self: Arc<Self>, populator: &dyn Populator, on_end: OnEnd) -> Result<(), PinError> {
        let _fail_gate = FailGateOnExit(&self.gate);
        let start = Instant::now();
        let result = self.pin(populator);
        if let Some(then) = self.abandoned() {
            self.dma_map.unmap_lost();
            *self.state.lock() = PinState::Failed(UNUSED.into());
            *self.end.lock() = End::Over;
            then();
            return Err(PinError::Cancelled);
        }
        if self.stop.load(Ordering::Relaxed) {
            *self.state.lock() = PinState::Failed(VM_ENDS.into());
            return Err(PinError::Cancelled);
        }
        let state = match &result {
            Ok(()) => {
                let at = Instant::now();
                PinState::Pinned { took: at - start, at }
            }
            Err(error) => PinState::Failed(error_text::chain(error).into()),
        };
        *self.state.lock() = state.clone();
        match &state {
            // After the gate: the callback examines functions that were let through or refused.
            PinState::Failed(reason) => self.gate.fail(reason),
            _ => self.gate.open(),
        }
        on_end(&state);
        result
    }

    /// What was asked for if it was abandoned; from here on it cannot be.
    fn abandoned(&self) -> Option<OnAbandoned> {
        let mut end = self.end.lock();
        match &mut *end {
            End::Abandoned(then) => then.take(),
            End::Reported | End::Over => {
                *end = End::Over;
                None
            }
        }
    }

    fn go_on(&self) -> Result<(), PinError> {
        if self.stop.load(Ordering::Relaxed) { Err(PinError::Cancelled) } else { Ok(()) }
    }

    fn work(&self) -> PinWork {
        PinWork {
            // Not while others who populate the memory end.
            took: self.begun.get().map_or(Duration::ZERO, Instant::elapsed),
            lanes: self.lanes.get().map(|lanes| lanes()).unwrap_or_default(),
            last: self.last.iter().map(LastKind::progress).collect(),
            is_over: !matches!(*self.state.lock(), PinState::Pinning)
                || self.dma_map.lost().is_some(),
        }
    }

    /// Repeats the forecast if it is time to.
    fn review(&self) {
        let mut watch = self.watch.lock();
        let took = self.begun.get().map_or(Duration::ZERO, Instant::elapsed);
        let Some(current) = watch.as_mut().filter(|watch| watch.review.is_due(took)) else {
            return;
        };
        let Some(left) = current.review.look(&self.work()) else { return };
        let told = watch.take();
        drop(watch);
        if let Some(told) = told {
            (told.on_long)(left);
        }
    }

    /// Maps what has just been populated, or leaves it in `kept` until all is.
    fn put_to_use(
        &self,
        region: &RamRegion,
        range: Range<u64>,
        kept: &Mutex<Vec<(u64, Range<u64>)>>,
    ) -> Result<(), PinError> {
        self.go_on()?;
        let Some(last) = last::of(&self.last, region) else {
            return self.dma_map.map(region, &range);
        };
        // Only if a guest may have to wait.
        let is_sampled = self.yields_to_guest && self.total_bytes >= SMALL_BYTES;
        if is_sampled && last.begins_sample() {
            let begun = Instant::now();
            self.dma_map.map(region, &range)?;
            last.sampled(range.end.saturating_sub(range.start), begun.elapsed());
        } else {
            kept.lock().push((region.gpa(), range));
        }
        Ok(())
    }

    fn pin(self: &Arc<Self>, populator: &dyn Populator) -> Result<(), PinError> {
        let (shared, kept) = (Arc::clone(self), Arc::new(Mutex::new(Vec::new())));
        let stopping = Arc::clone(self);
        let keep = Arc::clone(&kept);
        populator.prepare();
        let _ = self.begun.set(Instant::now());
        populator.populate(Populating {
            chunk_bytes: self.dma_map.chunk_bytes(),
            on_chunk: Arc::new(move |region, range| Ok(shared.put_to_use(region, range, &keep)?)),
            is_stopped: Arc::new(move || stopping.stop.load(Ordering::Relaxed)),
            yields_to_guest: self.yields_to_guest,
            spares_mmap_lock: self.dma_map.target().takes_mmap_lock(),
            is_checked: false,
            begun: &|PopulateBegun { help, lanes }| {
                let _ = self.lanes.set(lanes);
                if self.yields_to_guest {
                    self.gate.helped_by(help);
                }
            },
            meanwhile: &|| self.review(),
        })?;
        for (gpa, range) in std::mem::take(&mut *kept.lock()) {
            self.go_on()?;
            if let Some(region) = populator.regions().iter().find(|region| region.gpa() == gpa) {
                self.dma_map.map(region, &range)?;
                let bytes = range.end.saturating_sub(range.start);
                if let Some(last) = last::of(&self.last, region) {
                    last.mapped(bytes);
                }
            }
            self.review();
        }
        // Regions left out, such as those whose contents are still to arrive, are not mapped.
        let is_whole = self.dma_map.mapped_bytes() == self.total_bytes;
        if is_whole { Ok(()) } else { Err(PinError::Cancelled) }
    }
}
