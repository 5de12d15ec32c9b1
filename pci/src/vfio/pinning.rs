// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The pipeline that makes guest memory ready for DMA while the guest runs.
//!
//! Owns its thread, the size of the pieces and the progress, and settles the gate. A piece is mapped
//! as soon as it is populated, on the thread that populated it, while others are being populated. A
//! failure is told to everybody who waits; nothing of it may end in waiting for ever.

use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::dma::{DmaTarget, Populator};
use super::error::PinError;
use super::gate::DmaGate;
use crate::locks::lock;

/// A piece is never cut later, so it is also the least that can be given back: not larger than needed
/// for the kernel to pin large runs at once.
const CHUNK_BYTES: u64 = 64 << 20;

/// How far it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinState {
    /// Under way.
    Pinning,
    /// All memory is mapped, after this long.
    Pinned(Duration),
    /// It is not, and will not be: the reason.
    Failed(Arc<str>),
}

/// How far it is, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinProgress {
    /// Bytes mapped.
    pub pinned_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
    /// What becomes of it.
    pub state: PinState,
}

struct Shared {
    total_bytes: u64,
    pinned_bytes: AtomicU64,
    stop: AtomicBool,
    state: Mutex<PinState>,
    gate: Arc<DmaGate>,
}

/// Told once how it ended, unless it was cancelled; on the pipeline's thread.
pub type OnEnd = Box<dyn FnOnce(&PinState) + Send>;

/// Guest memory on its way into the IOMMU. Dropping it cancels and waits for the threads.
pub struct Pinning {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<(), PinError>>>,
}

/// The size of pieces that leaves a quarter of the mappings for other things.
fn chunk_bytes(populator: &dyn Populator, entries: Option<u64>) -> u64 {
    let allowed = entries.map_or(u64::MAX, |entries| entries - entries / 4);
    let (total_bytes, _) = populator.total_bytes();
    let mut chunk_bytes = CHUNK_BYTES;
    while chunk_bytes < total_bytes && populator.chunks(chunk_bytes) > allowed {
        chunk_bytes *= 2;
    }
    chunk_bytes
}

impl Pinning {
    /// Checks the limits and begins; `gate` is settled at the end, whatever that is.
    ///
    /// # Errors
    /// A limit that is too low, or no thread.
    pub fn start(
        target: Arc<dyn DmaTarget>,
        populator: Arc<dyn Populator>,
        gate: Arc<DmaGate>,
        on_end: OnEnd,
    ) -> Result<Self, PinError> {
        let limits = target.limits();
        let chunk_bytes = chunk_bytes(populator.as_ref(), limits.entries);
        let (total_bytes, counted_bytes) = populator.total_bytes();
        limits.check(populator.chunks(chunk_bytes), total_bytes, counted_bytes)?;
        let shared = Arc::new(Shared {
            total_bytes,
            pinned_bytes: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            state: Mutex::new(PinState::Pinning),
            gate,
        });
        let inner = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("pin".to_owned())
            .spawn(move || inner.run(&target, populator.as_ref(), chunk_bytes, on_end))
            .map_err(PinError::Thread)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// How far it is.
    pub fn progress(&self) -> PinProgress {
        PinProgress {
            pinned_bytes: self.shared.pinned_bytes.load(Ordering::Relaxed),
            total_bytes: self.shared.total_bytes,
            state: lock(&self.shared.state).clone(),
        }
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The first failure. Later calls do not repeat it.
    pub fn wait(&mut self) -> Result<(), PinError> {
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(_panic)) => Err(PinError::Cancelled),
        }
    }

    /// Ends it soon; whoever waits at the gate is turned away.
    pub fn cancel(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.gate.fail("the VM ends");
    }
}

impl Drop for Pinning {
    fn drop(&mut self) {
        self.cancel();
        // The failure of something that nobody wants any more.
        let _ = self.wait();
    }
}

/// Settles the gate in whatever way its thread ends.
struct Settle<'a>(&'a DmaGate);

impl Drop for Settle<'_> {
    fn drop(&mut self) {
        self.0.fail("the thread that maps it has ended");
    }
}

impl Shared {
    fn run(
        self: Arc<Self>,
        target: &Arc<dyn DmaTarget>,
        populator: &dyn Populator,
        chunk_bytes: u64,
        on_end: OnEnd,
    ) -> Result<(), PinError> {
        let _settle = Settle(&self.gate);
        let start = Instant::now();
        let result = self.pin(target, populator, chunk_bytes);
        if self.stop.load(Ordering::Relaxed) {
            *lock(&self.state) = PinState::Failed("the VM ends".into());
            return Err(PinError::Cancelled);
        }
        let state = match &result {
            Ok(()) => PinState::Pinned(start.elapsed()),
            Err(error) => PinState::Failed(chain(error).into()),
        };
        *lock(&self.state) = state.clone();
        match &state {
            // Whoever is told looks at functions that have been let through, or turned away.
            PinState::Failed(reason) => self.gate.fail(reason),
            _ => self.gate.open(),
        }
        on_end(&state);
        result
    }

    fn pin(
        self: &Arc<Self>,
        target: &Arc<dyn DmaTarget>,
        populator: &dyn Populator,
        chunk_bytes: u64,
    ) -> Result<(), PinError> {
        let (shared, target) = (Arc::clone(self), Arc::clone(target));
        populator.populate(
            chunk_bytes,
            Arc::new(move |region, range| {
                if shared.stop.load(Ordering::Relaxed) {
                    return Err(PinError::Cancelled.into());
                }
                let len_bytes = range.end.saturating_sub(range.start);
                let gpa = region.gpa().saturating_add(range.start);
                target.map(region, &range).map_err(|source| PinError::Map {
                    gpa,
                    len_bytes,
                    source,
                })?;
                shared.pinned_bytes.fetch_add(len_bytes, Ordering::Relaxed);
                Ok(())
            }),
        )?;
        // What was left out, such as memory whose contents are still to arrive, is not mapped.
        let pinned_bytes = self.pinned_bytes.load(Ordering::Relaxed);
        if pinned_bytes == self.total_bytes { Ok(()) } else { Err(PinError::Cancelled) }
    }
}

/// An error and what is behind it, in one line.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
