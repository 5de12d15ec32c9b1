// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fake machines on the destination: built over memory that is there already, in doubt, and running.
//!
//! Owns the steps of their arrival, each of which a test may hold up or let fail.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use super::{Calls, Common, FakeBlobs, FakeVm, Inject};
use crate::commit::destination::InDoubt;
use crate::fault::FaultSource;
use crate::layout::to_usize;
use crate::options::MemoryMode;
use crate::protocol::formats::Formats;
use crate::ram::GuestMemoryMap as _;
use crate::testing::{FakeMemory, Guest, Pace};
use crate::vm::{
    ArrivalCheck, BlobInfo, BlobSink, DestinationBuilder, DestinationVm, GivenMemory,
    MappedMachine, VmError,
};

/// Builds a destination over existing memory.
pub struct Builder {
    common: Common,
    touch: Vec<(usize, u64)>,
    map_gate: Option<Receiver<()>>,
    gate: Option<Receiver<()>>,
    ready_gate: Option<Receiver<()>>,
    start_gate: Option<Receiver<()>>,
    from_state: bool,
    check: Option<Arc<dyn ArrivalCheck>>,
}

/// A fake machine on the destination.
pub struct FakeDestination {
    common: Common,
    touch: Vec<(usize, u64)>,
    device: Device,
    ready_gate: Option<Receiver<()>>,
    start_gate: Option<Receiver<()>>,
}

/// A thread of a machine, for which the machine waits when it is dropped.
#[derive(Default)]
struct Device(Option<std::thread::JoinHandle<()>>);

impl Drop for Device {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}

impl Builder {
    /// A builder for `guest`, in `memory`.
    pub fn new(memory: &Arc<FakeMemory>, guest: &Arc<Guest>) -> Self {
        let common = FakeVm::new(memory, guest).common;
        let (map_gate, gate, ready_gate, start_gate) = (None, None, None, None);
        let (touch, from_state, check) = (Vec::new(), false, None);
        Self { common, touch, map_gate, gate, ready_gate, start_gate, from_state, check }
    }

    /// Sets the number of vCPUs, the percentage of memory that they write, and their rate.
    #[must_use]
    pub fn load(mut self, vcpus: u64, hot: u64, pace: Pace) -> Self {
        (self.common.vcpus, self.common.hot, self.common.pace) = (vcpus, hot, pace);
        self
    }

    /// Sets what answers checks.
    #[must_use]
    pub fn answering(mut self, check: Arc<dyn ArrivalCheck>) -> Self {
        self.check = Some(check);
        self
    }

    /// Sets where it fails.
    #[must_use]
    pub fn inject(mut self, inject: Inject) -> Self {
        self.common.inject = inject;
        self
    }

    /// Gives it devices, which note what comes for them.
    #[must_use]
    pub fn blobs(mut self, blobs: &FakeBlobs) -> Self {
        self.common.blobs = blobs.clone();
        self
    }

    /// Sets the newest format versions that it reads.
    #[must_use]
    pub fn formats(mut self, formats: Formats) -> Self {
        self.common.formats = formats;
        self
    }

    /// Makes vCPUs resolve their own faults.
    #[must_use]
    pub fn own_faults(mut self) -> Self {
        self.common.own_faults = true;
        self
    }

    /// Sets the pages (region, page) that restoring the state reads through the guest's mapping.
    #[must_use]
    pub fn touch(mut self, pages: Vec<(usize, u64)>) -> Self {
        self.touch = pages;
        self
    }

    /// Makes it a machine that is built from its state.
    #[must_use]
    pub fn from_state(mut self) -> Self {
        self.from_state = true;
        self
    }

    /// Makes mapping memory wait until the gate is opened, or dropped.
    #[must_use]
    pub fn map_gate(mut self, gate: Receiver<()>) -> Self {
        self.map_gate = Some(gate);
        self
    }

    /// Makes building wait until the gate is opened, or dropped.
    #[must_use]
    pub fn gate(mut self, gate: Receiver<()>) -> Self {
        self.gate = Some(gate);
        self
    }

    /// The same for its readiness; a wait that is cancelled ends, and is recorded.
    #[must_use]
    pub fn ready_gate(mut self, gate: Receiver<()>) -> Self {
        self.ready_gate = Some(gate);
        self
    }

    /// The same for the start of its guest.
    #[must_use]
    pub fn start_gate(mut self, gate: Receiver<()>) -> Self {
        self.start_gate = Some(gate);
        self
    }

    /// Records its calls in `calls` as well.
    #[must_use]
    pub fn note_in(mut self, calls: &Calls) -> Self {
        self.common.calls = Arc::clone(calls);
        self
    }

    /// The recorded calls.
    pub fn calls(&self) -> Calls {
        Arc::clone(&self.common.calls)
    }
}

impl DestinationBuilder for Builder {
    type Vm = FakeDestination;
    type Mapped = FakeMapped;

    fn formats(&self) -> Formats {
        self.common.formats
    }

    fn check(&self) -> Option<Arc<dyn ArrivalCheck>> {
        self.check.clone()
    }

    fn map_memory(
        mut self,
        config_json: &[u8],
        given: Vec<GivenMemory>,
        _: MemoryMode,
    ) -> Result<FakeMapped, VmError> {
        if !given.is_empty() {
            let files = given.into_iter().map(|zone| zone.file).collect();
            self.common.memory = FakeMemory::over(self.common.memory.layout(), files)?;
        }
        if let Some(gate) = &self.map_gate {
            // Ends when the test opens the gate, or has ended.
            let _ = gate.recv();
        }
        self.common.call(Inject::Map, "map")?;
        let _: serde_json::Value = serde_json::from_slice(config_json)?;
        Ok(FakeMapped(self))
    }
}

/// A machine on the destination that has only its memory.
pub struct FakeMapped(Builder);

impl MappedMachine for FakeMapped {
    type Vm = FakeDestination;

    fn memory(&self) -> Arc<FakeMemory> {
        Arc::clone(&self.0.common.memory)
    }

    fn is_built_from_state(&self) -> bool {
        self.0.from_state
    }

    fn build_from_state(self, state_json: &[u8]) -> Result<FakeDestination, VmError> {
        let _: serde_json::Value = serde_json::from_slice(state_json)?;
        self.build()
    }

    fn build(self) -> Result<FakeDestination, VmError> {
        let Builder { common, touch, gate, ready_gate, start_gate, .. } = self.0;
        if let Some(gate) = gate {
            // Ends when the test opens the gate, or has ended.
            let _ = gate.recv();
        }
        common.call(Inject::Prepare, "prepare")?;
        Ok(FakeDestination { common, touch, device: Device::default(), ready_gate, start_gate })
    }
}

impl DestinationVm for FakeDestination {
    type Memory = FakeMemory;
    type Running = FakeVm;

    fn fault_source(&mut self) -> Result<Option<Arc<dyn FaultSource>>, VmError> {
        let Common { memory, vcpus, own_faults, .. } = &self.common;
        if !own_faults {
            return Ok(None);
        }
        Ok(Some(memory.refuse_missing_pages(to_usize(*vcpus))?))
    }

    fn await_ready(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), VmError> {
        if let Some(gate) = &self.ready_gate {
            while gate.recv_timeout(Duration::from_millis(5)) == Err(RecvTimeoutError::Timeout) {
                if is_cancelled() {
                    self.common.call(Inject::Nothing, "not ready")?;
                    return Err("cancelled".into());
                }
            }
        }
        self.common.call(Inject::Ready, "ready")
    }

    fn open_blobs(&mut self, blobs: &[BlobInfo]) -> Result<Vec<Box<dyn BlobSink>>, VmError> {
        self.common.calls.lock().push("await blobs");
        self.common.blobs.sinks(blobs)
    }

    fn apply_state(&mut self, state_json: &[u8]) -> Result<(), VmError> {
        self.common.call(Inject::Apply, "apply")?;
        if !state_json.is_empty() {
            self.common.blobs.apply(state_json)?;
        }
        for (region, page) in &self.touch {
            self.common.memory.word(*region, *page, 0).load(std::sync::atomic::Ordering::Relaxed);
        }
        Ok(())
    }

    fn take_exclusive(&mut self) -> Result<(), VmError> {
        self.common.call(Inject::Exclusive, "exclusive")
    }

    fn in_doubt(&mut self, _: InDoubt, lasts: bool) {
        if self.common.inject == Inject::TouchInDoubt && !lasts {
            let memory = Arc::clone(&self.common.memory);
            let (touched, begun) = std::sync::mpsc::channel();
            self.device.0 = Some(std::thread::spawn(move || {
                let _ = touched.send(());
                memory.word(0, 1, 0).load(Ordering::Relaxed);
            }));
            let _ = begun.recv();
        }
        let name = if lasts { "still in doubt" } else { "in doubt" };
        let _ = self.common.call(Inject::Nothing, name);
    }

    fn run(mut self, resume: bool) -> Result<FakeVm, (Self, VmError)> {
        if let Some(gate) = self.start_gate.take() {
            // A dropped gate counts as open.
            let _ = gate.recv();
        }
        if self.common.inject == Inject::RunOnce {
            self.common.inject = Inject::Nothing;
            let _ = self.common.call(Inject::Nothing, "run");
            return Err((self, "injected failure in run".into()));
        }
        if let Err(error) = self.common.call(Inject::Run, "run") {
            return Err((self, error));
        }
        debug_assert!(!self.common.memory.layout().regions().is_empty());
        let writers = resume.then(|| self.common.start());
        Ok(FakeVm { common: self.common, writers })
    }
}
