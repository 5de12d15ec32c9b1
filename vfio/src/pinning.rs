// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The pipeline that populates, pins and maps guest memory for DMA while the guest runs.
//!
//! Owns its thread and the progress, and opens or fails the gate. Memory is mapped as soon as it is
//! populated, on the thread that populated it, while other memory is being populated. If mapping would slow
//! populating down, and is little work, it is done when all memory is populated. A failure is
//! reported to every waiter; no waiter may wait forever.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::dma::{Populating, Populator};
use super::dma_map::DmaMap;
use super::error::PinError;
use super::gate::DmaGate;

/// How far it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinState {
    /// Under way.
    Pinning,
    /// All memory is mapped.
    Pinned {
        /// For how long it was being mapped.
        took: Duration,
        /// When the last piece was. The gate opens after this.
        at: Instant,
    },
    /// It is not, and will not be: the reason.
    Failed(Arc<str>),
}

/// How far it is, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinProgress {
    /// Bytes mapped; what the balloon has taken out is not.
    pub pinned_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
    /// Its outcome.
    pub state: PinState,
}

struct Shared {
    total_bytes: u64,
    dma_map: Arc<DmaMap>,
    stop: AtomicBool,
    state: Mutex<PinState>,
    gate: Arc<DmaGate>,
    yields_to_guest: bool,
}

/// Told once how it ended, unless it was cancelled; on the pipeline's thread.
pub type OnEnd = Box<dyn FnOnce(&PinState) + Send>;

/// Guest memory on its way into the IOMMU. Dropping it cancels and waits for the threads.
pub struct Pinning {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<(), PinError>>>,
    /// Disconnected when the thread has nothing more to do.
    ended: Receiver<()>,
}

impl Pinning {
    /// Checks the limits and begins; `gate` is settled at the end, whatever that is. `yields_to_guest`: the guest runs
    /// meanwhile, and goes first until it waits at the gate.
    ///
    /// # Errors
    /// A limit that is too low, or no thread.
    pub fn start(
        dma_map: Arc<DmaMap>,
        populator: Arc<dyn Populator>,
        gate: Arc<DmaGate>,
        yields_to_guest: bool,
        on_end: OnEnd,
    ) -> Result<Self, PinError> {
        Self::check(&dma_map, populator.as_ref())?;
        let (total_bytes, _) = populator.total_bytes();
        let shared = Arc::new(Shared {
            total_bytes,
            dma_map,
            stop: AtomicBool::new(false),
            state: Mutex::new(PinState::Pinning),
            gate,
            yields_to_guest,
        });
        let inner = Arc::clone(&shared);
        let (end, ended) = channel();
        let run = move || {
            let result = inner.run(populator.as_ref(), on_end);
            drop::<Sender<()>>(end);
            result
        };
        let thread = stoppable_thread::spawn("pin", run);
        Ok(Self { shared, thread: Some(thread.map_err(PinError::Thread)?), ended })
    }

    /// All memory of `pieces` is mapped: the gate is open, and nothing remains to be done.
    pub fn complete(dma_map: Arc<DmaMap>, gate: Arc<DmaGate>, on_end: OnEnd) -> Self {
        let state = PinState::Pinned { took: Duration::ZERO, at: Instant::now() };
        gate.open();
        let shared = Arc::new(Shared {
            total_bytes: dma_map.mapped_bytes(),
            dma_map,
            stop: AtomicBool::new(false),
            state: Mutex::new(state.clone()),
            gate,
            yields_to_guest: false,
        });
        on_end(&state);
        Self { shared, thread: None, ended: channel().1 }
    }

    /// Whether the limits allow it, without beginning.
    ///
    /// # Errors
    /// The one that is too low.
    pub fn check(dma_map: &DmaMap, populator: &dyn Populator) -> Result<(), PinError> {
        let (total_bytes, counted_bytes) = populator.total_bytes();
        let entries = populator.chunks(dma_map.piece_bytes());
        dma_map.target().limits().check(entries, total_bytes, counted_bytes)
    }

    /// How far it is.
    pub fn progress(&self) -> PinProgress {
        let Shared { total_bytes, dma_map, state, .. } = &*self.shared;
        let lost = dma_map.lost().map(PinState::Failed);
        let pinned_bytes = dma_map.mapped_bytes();
        PinProgress {
            pinned_bytes,
            // A guest may have got more memory since.
            total_bytes: pinned_bytes.max(*total_bytes),
            state: lost.unwrap_or_else(|| state.lock().clone()),
        }
    }

    /// Waits for the end, for no longer than `timeout`; returns whether it has ended. [`Pinning::wait`] does
    /// not block then.
    pub fn has_ended_within(&self, timeout: Duration) -> bool {
        self.shared.gate.help();
        self.ended.recv_timeout(timeout) != Err(RecvTimeoutError::Timeout)
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

    /// What ends it without owning it.
    pub fn abandonment(&self) -> PinningAbort {
        PinningAbort(Arc::clone(&self.shared))
    }

    /// Ends it soon; accesses that wait at the gate are refused. Nothing is mapped again.
    pub fn cancel(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.gate.fail("the VM ends");
        self.shared.dma_map.close();
    }
}

/// Ends a [`Pinning`] without owning it: no function needs memory any more, nor will one again.
#[derive(Clone)]
pub struct PinningAbort(Arc<Shared>);

impl PinningAbort {
    /// Nothing more is mapped; the state is failed from here on, for this reason or the one for which mapping
    /// has failed already, and vCPUs that wait at the gate continue without. Does not wait.
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

    /// Unmaps and unpins everything, after [`begin`](Self::begin). No function may reach memory.
    pub fn unmap(&self) {
        self.0.dma_map.unmap_lost();
    }
}

impl Drop for Pinning {
    fn drop(&mut self) {
        self.cancel();
        // The failure of something that is not wanted any more.
        let _ = self.wait();
        self.shared.dma_map.wait_for_call();
    }
}

/// Settles the gate in whatever way its thread ends.
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
        if self.stop.load(Ordering::Relaxed) {
            *self.state.lock() = PinState::Failed("the VM ends".into());
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
            // The callback looks at functions that have been let through, or refused.
            PinState::Failed(reason) => self.gate.fail(reason),
            _ => self.gate.open(),
        }
        on_end(&state);
        result
    }

    fn go_on(&self) -> Result<(), PinError> {
        if self.stop.load(Ordering::Relaxed) { Err(PinError::Cancelled) } else { Ok(()) }
    }

    fn pin(self: &Arc<Self>, populator: &dyn Populator) -> Result<(), PinError> {
        let (shared, kept) = (Arc::clone(self), Arc::new(Mutex::new(Vec::new())));
        let keep = Arc::clone(&kept);
        populator.populate(Populating {
            chunk_bytes: self.dma_map.chunk_bytes(),
            on_chunk: Arc::new(move |region, range| {
                shared.go_on()?;
                if shared.dma_map.target().maps_last(region) {
                    keep.lock().push((region.gpa(), range));
                    return Ok(());
                }
                Ok(shared.dma_map.map(region, &range)?)
            }),
            yields_to_guest: self.yields_to_guest,
            begun: &|help| {
                if self.yields_to_guest {
                    self.gate.helped_by(help);
                }
            },
        })?;
        for (gpa, range) in std::mem::take(&mut *kept.lock()) {
            self.go_on()?;
            if let Some(region) = populator.regions().iter().find(|region| region.gpa() == gpa) {
                self.dma_map.map(region, &range)?;
            }
        }
        // What was left out, such as memory whose contents are still to arrive, is not mapped.
        let is_whole = self.dma_map.mapped_bytes() == self.total_bytes;
        if is_whole { Ok(()) } else { Err(PinError::Cancelled) }
    }
}
