// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fake machines on both sides, which fail where they are told to and note what was done to them.
//!
//! Owns what both sides have in common, and the source's; the other is in `destination`.

mod blobs;
mod destination;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

pub use blobs::{BlobFault, FakeBlobs, Gated};
pub use destination::{Builder, FakeDestination, FakeMapped};

use super::guest::{Guest, Pace, Writers};
use super::memory::{FakeLog, FakeMemory};
use super::page_server::FakePageServer;
use crate::borders::Borders;
use crate::layout::{GpaRange, to_usize};
use crate::page_server::PageServerHandle;
use crate::protocol::formats::Formats;
use crate::ram::GuestMemoryMap as _;
use crate::vm::{
    BlobInfo, BlobSource, FreePageHints, PausedVm, PlainPeer, SourceVm, Throttle, VmError,
};

/// The calls that a machine received, in order.
pub type Calls = Arc<Mutex<Vec<&'static str>>>;

/// The step at which a machine fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is named after the step that fails")]
pub enum Inject {
    #[default]
    Nothing,
    Config,
    StartLog,
    PrepareStop,
    Pause,
    State,
    Release,
    Resume,
    Map,
    Prepare,
    Ready,
    Apply,
    Exclusive,
    Run,
    /// No failure: preparing the stop takes longer than the downtime.
    PreparesStopSlowly,
    /// No failure: preparing the stop takes until it is cancelled.
    NeverPreparesStop,
    /// `Run` fails the first time.
    RunOnce,
    /// No failure: releasing exclusive resources takes a second.
    ReleaseLate,
    /// No failure: when the machine comes into doubt a device touches a page, and the machine waits
    /// for that device when it is dropped.
    TouchInDoubt,
    /// No failure: the guest dirties all of its memory all the time.
    Busy,
    /// No failure: nothing logs what two of its devices write.
    Unlogged,
    /// No failure: after the handover the process lacks descriptors for the next two sets of
    /// connections (in this crate's own tests).
    Descriptors,
}

#[derive(Clone)]
struct Common {
    memory: Arc<FakeMemory>,
    guest: Arc<Guest>,
    vcpus: u64,
    hot: u64,
    pace: Pace,
    inject: Inject,
    calls: Calls,
    /// Throttle from which on the guest dirties nothing; `None` without a throttle.
    calms_at: Option<u8>,
    throttled: Throttled,
    /// The guest reports that it does not use any page of a region from this one on.
    free_from: Option<u64>,
    /// Number of queries until all free pages are reported.
    hint_looks: u64,
    /// vCPUs resolve their own faults at the destination.
    own_faults: bool,
    /// The page server that sends the remaining pages.
    page_server: Option<Arc<FakePageServer>>,
    /// The format versions that its documents need, or that it reads.
    formats: Formats,
    met: Met,
    /// A destination of plain version 0 is another program, with these borders of mappings.
    for_other: Option<Borders>,
    /// The state of its devices: what they have at the source, and what has come at the destination.
    blobs: FakeBlobs,
}

/// The format versions that a machine was told the destination reads.
pub type Met = Arc<Mutex<Option<Formats>>>;

/// The throttle values that were set on a machine, in order.
pub type Throttled = Arc<Mutex<Vec<u8>>>;

/// Free page hints of a fake machine.
struct FakeHints {
    first: u64,
    /// Queries until all pages are reported; none counts before.
    looks_left: AtomicU64,
    calls: Calls,
}

impl FreePageHints for FakeHints {
    fn wait(&self, limit: Duration) -> bool {
        let left = self.looks_left.load(Ordering::Relaxed);
        self.looks_left.store(left.saturating_sub(1), Ordering::Relaxed);
        if left > 0 {
            std::thread::sleep(limit);
        }
        left == 0
    }

    fn named(&self) -> u64 {
        // A new number each time.
        u64::MAX - self.looks_left.load(Ordering::Relaxed)
    }

    fn free_words(&self, _: usize, pages: Range<u64>, words: &mut [u64]) {
        words.fill(0);
        let first = if self.named() == u64::MAX { self.first } else { pages.end };
        for page in pages.clone().filter(|page| *page >= first) {
            words[to_usize((page - pages.start) / 64)] |= 1 << ((page - pages.start) % 64);
        }
    }
}

impl Drop for FakeHints {
    fn drop(&mut self) {
        self.calls.lock().push("hints done");
    }
}

/// The throttle of a fake machine, which records its values.
struct FakeThrottle {
    throttled: Throttled,
    memory: Arc<FakeMemory>,
    calms_at: u8,
}

impl Throttle for FakeThrottle {
    fn set(&mut self, percent: u8) {
        self.throttled.lock().push(percent);
        self.memory.set_calm(percent >= self.calms_at);
    }
}

impl Drop for FakeThrottle {
    fn drop(&mut self) {
        self.set(0);
    }
}

impl Common {
    fn call(&self, step: Inject, name: &'static str) -> Result<(), VmError> {
        self.calls.lock().push(name);
        if self.inject == step { Err(format!("injected failure in {name}").into()) } else { Ok(()) }
    }

    fn start(&self) -> Writers {
        Writers::start(&self.guest, &self.memory, self.vcpus, self.hot, self.pace)
    }
}

/// A machine whose guest may run.
pub struct FakeVm {
    common: Common,
    writers: Option<Writers>,
}

/// A machine whose guest is stopped.
pub struct FakePaused {
    common: Common,
    ran: bool,
}

impl FakeVm {
    /// A machine over `memory`, not running yet.
    pub fn new(memory: &Arc<FakeMemory>, guest: &Arc<Guest>) -> Self {
        let common = Common {
            memory: Arc::clone(memory),
            guest: Arc::clone(guest),
            vcpus: 2,
            hot: 100,
            pace: Pace::Paced(64, std::time::Duration::from_micros(200)),
            inject: Inject::Nothing,
            calls: Calls::default(),
            calms_at: None,
            throttled: Throttled::default(),
            free_from: None,
            hint_looks: 0,
            own_faults: false,
            page_server: None,
            formats: Formats::default(),
            met: Met::default(),
            for_other: None,
            blobs: FakeBlobs::default(),
        };
        Self { common, writers: None }
    }

    /// Adds a throttle; from `percent` on a busy log has nothing to record.
    #[must_use]
    pub fn calms_at(mut self, percent: u8) -> Self {
        self.common.calms_at = Some(percent);
        self
    }

    /// Makes the guest give hints: no page from this one of each region on is in use. But once it has
    /// been asked, and before it reports, it uses every other of these pages again.
    #[must_use]
    pub fn free_from(mut self, page: u64) -> Self {
        self.common.free_from = Some(page);
        self
    }

    /// Sets the number of queries until all pages are reported; there are always some more.
    #[must_use]
    pub fn slow_hints(mut self, looks: u64) -> Self {
        self.common.hint_looks = looks;
        self
    }

    /// Sets the page server for the last pages.
    #[must_use]
    pub fn page_server(mut self, page_server: &Arc<FakePageServer>) -> Self {
        self.common.page_server = Some(Arc::clone(page_server));
        self
    }

    /// Sets the format versions that its documents need.
    #[must_use]
    pub fn formats(mut self, formats: Formats) -> Self {
        self.common.formats = formats;
        self
    }

    /// Makes it one that another program can take, which every destination of plain version 0 is then. That one maps its
    /// memory in these pieces.
    #[must_use]
    pub fn for_other(mut self, mappings: impl IntoIterator<Item = GpaRange>) -> Self {
        self.common.for_other = Some(Borders::of(mappings));
        self
    }

    /// Gives it devices with this state.
    #[must_use]
    pub fn blobs(mut self, blobs: &FakeBlobs) -> Self {
        self.common.blobs = blobs.clone();
        self
    }

    /// The format versions that it was told the destination reads.
    pub fn met(&self) -> Met {
        Arc::clone(&self.common.met)
    }

    /// The throttle values that were set.
    pub fn throttled(&self) -> Throttled {
        Arc::clone(&self.common.throttled)
    }

    /// Sets the number of vCPUs, the percentage of memory that they write, and their rate.
    #[must_use]
    pub fn load(mut self, vcpus: u64, hot: u64, pace: Pace) -> Self {
        (self.common.vcpus, self.common.hot, self.common.pace) = (vcpus, hot, pace);
        self
    }

    /// Sets where it fails.
    #[must_use]
    pub fn inject(mut self, inject: Inject) -> Self {
        self.common.inject = inject;
        self
    }

    /// Starts its vCPUs.
    #[must_use]
    pub fn running(mut self) -> Self {
        self.writers = Some(self.common.start());
        self
    }

    /// The recorded calls.
    pub fn calls(&self) -> Calls {
        Arc::clone(&self.common.calls)
    }

    /// True while its vCPUs run.
    pub fn runs(&self) -> bool {
        self.writers.is_some()
    }

    /// Its guest.
    pub fn guest(&self) -> &Arc<Guest> {
        &self.common.guest
    }

    /// Its memory.
    pub fn memory(&self) -> &Arc<FakeMemory> {
        &self.common.memory
    }

    /// Stops its vCPUs for good.
    pub fn stop(&mut self) {
        self.writers = None;
    }
}

impl SourceVm for FakeVm {
    type Memory = FakeMemory;
    type Log = FakeLog;
    type Paused = FakePaused;

    fn config_json(&mut self) -> Result<Vec<u8>, VmError> {
        self.common.call(Inject::Config, "config")?;
        Ok(br#"{"fake":true}"#.to_vec())
    }

    fn formats(&self) -> Formats {
        self.common.formats
    }

    fn meet(&mut self, newest: Formats) {
        *self.common.met.lock() = Some(newest);
    }

    fn meet_plain(&mut self) -> Result<PlainPeer, VmError> {
        Ok(self.common.for_other.clone().map_or(PlainPeer::Own, PlainPeer::Other))
    }

    fn blobs(&mut self, apart: bool) -> Result<Vec<BlobInfo>, VmError> {
        Ok(if apart { self.common.blobs.infos() } else { Vec::new() })
    }

    fn blob_bytes(&self) -> u64 {
        self.common.blobs.len_bytes()
    }

    fn memory(&self) -> Arc<FakeMemory> {
        Arc::clone(&self.common.memory)
    }

    fn start_dirty_log(&mut self) -> Result<FakeLog, VmError> {
        self.common.call(Inject::StartLog, "start log")?;
        let Common { inject, memory, calls, .. } = &self.common;
        let log = FakeLog::new(Arc::clone(memory), *inject == Inject::Busy, Arc::clone(calls));
        if *inject == Inject::Unlogged {
            return Ok(log.without_log_of(&["gpu0", "gpu1"]));
        }
        Ok(log)
    }

    fn throttle(&self) -> Option<Box<dyn Throttle>> {
        let Common { throttled, memory, calms_at, .. } = &self.common;
        let (throttled, memory) = (Arc::clone(throttled), Arc::clone(memory));
        calms_at.map(|calms_at| -> Box<dyn Throttle> {
            Box::new(FakeThrottle { throttled, memory, calms_at })
        })
    }

    fn may_give_hints(&self) -> bool {
        self.common.free_from.is_some()
    }

    fn free_page_hints(&self) -> Option<Box<dyn FreePageHints>> {
        let Common { memory, guest, free_from, hint_looks, .. } = &self.common;
        let first = (*free_from)?;
        for (region, info) in memory.layout().regions().iter().enumerate() {
            for page in (first..info.pages()).step_by(2) {
                guest.visit(memory, region, page, false);
            }
        }
        let looks_left = AtomicU64::new(*hint_looks);
        Some(Box::new(FakeHints { first, looks_left, calls: Arc::clone(&self.common.calls) }))
    }

    fn page_server(&mut self) -> Result<Option<Box<dyn PageServerHandle>>, VmError> {
        let Common { page_server, memory, .. } = &self.common;
        page_server.as_ref().map(|page_server| page_server.start(memory)).transpose()
    }

    fn switch_over_time(&self) -> Duration {
        Duration::from_micros(200)
    }

    fn prepare_stop(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), VmError> {
        self.common.call(Inject::PrepareStop, "prepare_stop")?;
        if let Inject::PreparesStopSlowly = self.common.inject {
            // Longer than any part of the downtime.
            std::thread::sleep(Duration::from_millis(200));
        }
        if let Inject::NeverPreparesStop = self.common.inject {
            while !is_cancelled() {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn pause(self) -> Result<FakePaused, (Self, VmError)> {
        if let Err(error) = self.common.call(Inject::Pause, "pause") {
            return Err((self, error));
        }
        let ran = self.writers.is_some();
        drop(self.writers);
        Ok(FakePaused { common: self.common, ran })
    }
}

impl PausedVm for FakePaused {
    type Running = FakeVm;
    type Remains = Arc<FakeMemory>;

    fn ran_before(&self) -> bool {
        self.ran
    }

    fn open_blobs(&mut self) -> Result<Vec<Box<dyn BlobSource>>, VmError> {
        self.common.calls.lock().push("read blobs");
        Ok(self.common.blobs.sources())
    }

    fn leave_blob(&mut self, number: usize) -> String {
        self.common.calls.lock().push("leave");
        self.common.blobs.leave(number);
        "giving its state".to_owned()
    }

    fn state_json(&mut self, blobs: &[u64]) -> Result<Vec<u8>, VmError> {
        self.common.call(Inject::State, "state")?;
        Ok(self.common.blobs.state(blobs))
    }

    fn release_exclusive(&mut self) -> Result<(), VmError> {
        if self.common.inject == Inject::ReleaseLate {
            std::thread::sleep(Duration::from_secs(1));
        }
        self.common.call(Inject::Release, "release")
    }

    fn resume(self) -> Result<FakeVm, (Self, VmError)> {
        if let Err(error) = self.common.call(Inject::Resume, "resume") {
            return Err((self, error));
        }
        let writers = self.ran.then(|| self.common.start());
        Ok(FakeVm { common: self.common, writers })
    }

    fn handed_over(self) -> Arc<FakeMemory> {
        #[cfg(test)]
        if self.common.inject == Inject::Descriptors {
            crate::session::SHORT_OF_DESCRIPTORS.set(2);
        }
        let _ = self.common.call(Inject::Nothing, "handed over");
        self.common.memory
    }
}
