// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The page engine of postcopy: which pages are missing, which were requested, what an arrival means.
//!
//! Owns what an arrival of contents means for the guest, and the point from which on nothing is missing.
//! The maps of missing and requested units, and their memory ordering, are in `destination::demand`.
//! Contents are received from a connection in `destination::contents`. A large host page is one unit, whose pieces
//! are put together in `destination::assembly`. The engine never opens, polls or writes a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use page_bitmap::PageBitmap;
use parking_lot::Mutex;

use super::demand::{Demand, FaultLookup};
use super::stale::{Stale, mark_absent};
use super::tables::locate;
use super::waiters::{Waiters, Waiting};
use crate::cancel::Cancel;
use crate::error::{Cause, Failure};
use crate::fault::{Fault, FaultSource};
use crate::layout::{Backing, GpaRange, PAGE_BYTES, PageRun};
use crate::own_figures::Count;
use crate::partial_pages::PartialPages;
use crate::progress::Progress;
use crate::protocol::ProtocolError;
use crate::ram::GuestMemoryMap;
use crate::steering::LOOK_EVERY;
use crate::stride::Strides;
use crate::uffd::UffdError;

/// The error for contents of pages that are not missing.
pub(super) const NOT_MISSING: ProtocolError =
    ProtocolError::Malformed { what: "memory table", why: "it names pages that are not missing" };

/// Pages that are made visible with one of them, if they are here: they cost less than one more fault.
const AROUND_PAGES: u64 = 64;

/// How pages arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    /// Sent in the background.
    Bulk,
    /// Sent on request, and received by a thread that does not wait for them.
    Urgent,
    /// Received by the thread of this vCPU, which waits for a page.
    Own(usize),
}

impl Via {
    /// The vCPU whose thread it is.
    pub(super) fn vcpu(self) -> Option<usize> {
        if let Self::Own(vcpu) = self { Some(vcpu) } else { None }
    }
}

/// State of all missing memory.
pub(crate) struct Engine<M> {
    pub(super) memory: Arc<M>,
    pub(super) source: Arc<dyn FaultSource>,
    /// Missing and requested memory, in units.
    demand: Demand,
    /// For each region whose host pages are assembled from pieces: their state.
    pub(super) pieces: Vec<Option<PartialPages>>,
    /// Pages of 4 KiB in a unit, by region.
    pub(super) unit_pages: Vec<u64>,
    /// Whole units that may be partly in place because a connection was lost while they were received. Locked
    /// when that happens, and while there is no connection.
    pub(super) torn: Mutex<Vec<PageRun>>,
    /// Missing units in all regions.
    left: Left,
    /// Readable once nothing is missing.
    complete: Cancel,
    /// Readable once the engine itself failed, or its threads are to end for good.
    failed: Cancel,
    /// The first failure, and whether the guest may run on this memory. Locked for one access.
    fate: Mutex<EngineState>,
    /// vCPU threads that resolve their own faults.
    waiters: Waiters,
    pub(super) progress: Arc<Progress>,
}

/// Every arrival changes it, so it shares no cache line with what faults look at.
#[repr(align(128))]
struct Left(AtomicU64);

/// Outcome of the engine so far.
#[derive(Default)]
struct EngineState {
    committed: bool,
    failure: Option<Failure>,
}

impl<M: GuestMemoryMap> Engine<M> {
    /// Starts with the units that the source lists as missing. Contents of them that are here (from an
    /// earlier round, or of a machine built with populated memory) are discarded, so that nothing reads them, or
    /// stay where the fault source catches accesses to pages that are there. `stale` units are missing as well.
    pub(crate) fn new(
        memory: &Arc<M>,
        source: Arc<dyn FaultSource>,
        pending: &[u8],
        stale: Option<Stale>,
        progress: Arc<Progress>,
        cancel: &Cancel,
    ) -> Result<Self, Cause> {
        let stays = |region| source.holds_all_pages(region);
        let mut missing = Stale::new(&**memory);
        missing.throw_away(&**memory, pending, stays, cancel)?;
        if let Some(stale) = stale {
            missing.add(&**memory, &stale, stays, cancel)?;
        }
        Self::with_emptied(memory, source, missing.into_maps(), progress)
    }

    /// Starts with memory whose missing units (one map a region) are not populated.
    pub(crate) fn with_missing(
        memory: &Arc<M>,
        source: Arc<dyn FaultSource>,
        missing: Vec<PageBitmap>,
        progress: Arc<Progress>,
    ) -> Result<Self, Cause> {
        for (region, units) in missing.iter().enumerate() {
            mark_absent(&**memory, region, units);
        }
        Self::with_emptied(memory, source, missing, progress)
    }

    /// The same for memory that knows already which of its units are missing.
    pub(crate) fn with_emptied(
        memory: &Arc<M>,
        source: Arc<dyn FaultSource>,
        missing: Vec<PageBitmap>,
        progress: Arc<Progress>,
    ) -> Result<Self, Cause> {
        let regions = memory.layout().regions();
        let unit_pages: Vec<u64> =
            regions.iter().map(|region| region.host_page_bytes / PAGE_BYTES).collect();
        let mut left = 0;
        let mut missing_bytes = 0;
        let pieces = regions.iter().zip(&missing).map(|(region, missing)| {
            let together = region.backing == Backing::Shared && region.host_page_bytes > PAGE_BYTES;
            together.then(|| PartialPages::new(missing, region.host_page_bytes / PAGE_BYTES))
        });
        let pieces = pieces.collect();
        for (region, map) in missing.iter().enumerate() {
            let unit = unit_pages[region];
            left += map.count();
            missing_bytes += map.count() * unit * PAGE_BYTES;
        }
        progress.counters.remaining_bytes.set(missing_bytes);
        progress.vcpus_count(source.bells().len());
        let engine = Self {
            waiters: Waiters::new(source.bells()),
            source,
            demand: Demand::new(missing),
            pieces,
            unit_pages,
            torn: Mutex::default(),
            left: Left(AtomicU64::new(left)),
            complete: Cancel::new().map_err(Cause::Resource)?,
            failed: Cancel::new().map_err(Cause::Resource)?,
            fate: Mutex::default(),
            progress,
            memory: Arc::clone(memory),
        };
        if left == 0 {
            engine.complete.cancel();
        }
        Ok(engine)
    }

    pub(crate) fn source(&self) -> &Arc<dyn FaultSource> {
        &self.source
    }

    pub(crate) fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Readable once nothing is missing.
    pub(crate) fn complete(&self) -> &Cancel {
        &self.complete
    }

    /// Readable once the engine has failed.
    pub(crate) fn failed(&self) -> &Cancel {
        &self.failed
    }

    /// Notes that a set of connections has failed. Returns the failure if the engine continues without them;
    /// before it is committed it does not, and keeps the failure.
    pub(crate) fn fails_with_connections(&self, failure: Failure) -> Option<Failure> {
        let committed = self.fate.lock().committed;
        if committed {
            return Some(failure);
        }
        self.fail(failure);
        None
    }

    /// Notes a failure and stops all threads. Before the commit, a thread that waits for a page is released,
    /// because the machine is about to be dropped and no thread may wait forever. Once every page is here
    /// nothing can fail any more and nothing is stopped, because the source is still to be told.
    pub(crate) fn fail(&self, failure: Failure) {
        if self.complete.is_cancelled() {
            log::debug!("after the last page: {}", failure.for_peer());
            return;
        }
        let mut fate = self.fate.lock();
        // Errors that follow from the stop are not its cause.
        if !matches!(failure.cause, Cause::Cancelled) {
            fate.failure.get_or_insert(failure);
        }
        if !fate.committed
            && let Err(error) = self.source.release()
        {
            log::warn!("{error}");
        }
        self.failed.cancel();
        drop(fate);
        self.wake_vcpus();
    }

    /// Rings for all vCPUs that wait for a page: what they wait on may have ended.
    pub(super) fn wake_vcpus(&self) {
        self.waiters.wake_all();
    }

    /// From here on the guest may run on this memory: a failure makes it wait instead of ending the wait.
    pub(crate) fn commit(&self) -> Result<(), Failure> {
        let mut fate = self.fate.lock();
        match fate.failure.take() {
            Some(failure) => Err(failure),
            None if self.failed.is_cancelled() => {
                Err(Failure::new("receiving pages", Cause::Cancelled))
            }
            None => {
                fate.committed = true;
                Ok(())
            }
        }
    }

    /// Stops catching accesses. While the host lacks a resource for that it is retried, until `is_abandoned`
    /// returns true.
    ///
    /// # Errors
    /// The last error of the host.
    pub(crate) fn release(&self, is_abandoned: impl Fn() -> bool) -> Result<(), UffdError> {
        let mut warned = false;
        loop {
            match self.source.release() {
                Ok(()) => return Ok(()),
                Err(error) if is_abandoned() => return Err(error),
                Err(error) if !warned => {
                    warned = true;
                    log::warn!("page faults are still intercepted: {}", error_text::chain(&error));
                }
                Err(_) => {}
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    pub(crate) fn take_failure(&self) -> Option<Failure> {
        self.fate.lock().failure.take()
    }

    /// Number of missing pages of 4 KiB.
    pub(crate) fn missing_pages(&self) -> u64 {
        self.missing().iter().zip(&self.unit_pages).map(|(map, unit)| map.count() * unit).sum()
    }

    /// Looks faults up and returns the ranges to request from the source. All others have been resolved here
    /// or are requested already.
    pub(crate) fn take_faults(&self, faults: &[Fault]) -> Result<Vec<GpaRange>, Cause> {
        self.take_faults_of(None, faults)
    }

    /// The same on the thread of a vCPU.
    fn take_faults_of(
        &self,
        vcpu: Option<usize>,
        faults: &[Fault],
    ) -> Result<Vec<GpaRange>, Cause> {
        let mut ask = Vec::new();
        for fault in faults {
            self.progress.count(vcpu, Count::Faults, 1);
            let region = fault.region;
            let index = fault.page / self.unit_pages[region];
            let run = self.pages_of(region, index);
            match self.demand.fault(region, index, fault.thread) {
                FaultLookup::Present => {
                    // It has just arrived, or was never sent because it is zero.
                    self.progress.count(vcpu, Count::Local, 1);
                    self.show(region, index)?;
                    self.show_around(region, index);
                }
                FaultLookup::First => {
                    self.progress.count(vcpu, Count::Requested, 1);
                    ask.push(self.memory.layout().range_of(run));
                }
                FaultLookup::Repeated => self.progress.count(vcpu, Count::Merged, 1),
            }
        }
        Ok(ask)
    }

    /// Resolves the fault of a vCPU thread: lets `ask` send the request, if one is due, and then `wait` until the
    /// page is here (which it can look up, and which it may be already) or the vCPU's bell rings.
    ///
    /// # Errors
    /// As [`take_faults`](Self::take_faults).
    pub(crate) fn resolve<A>(
        &self,
        vcpu: usize,
        fault: Fault,
        ask: impl FnOnce(Vec<GpaRange>) -> A,
        wait: impl FnOnce(A, &Waiting<'_>, &dyn Fn() -> bool),
    ) -> Result<(), Cause> {
        let index = fault.page / self.unit_pages[fault.region];
        let Some(waiting) = self.waiters.register(vcpu, fault.region, index) else {
            let what = format!("thread {vcpu} brings pages and is none of those that may");
            return Err(Cause::Unsupported { what, remedy: "this is a defect, please report it" });
        };
        self.progress.is_thread_of(vcpu, fault.thread);
        let asked = ask(self.take_faults_of(Some(vcpu), &[fault])?);
        wait(asked, &waiting, &|| self.demand.is_missing(fault.region, index));
        Ok(())
    }

    /// True when a page of a range that was asked for has not come.
    pub(super) fn is_any_missing(&self, range: GpaRange) -> bool {
        let Ok(run) = self.memory.layout().locate(range) else { return false };
        let unit = self.unit_pages[run.region];
        let units = run.first / unit..run.end().div_ceil(unit);
        self.missing()[run.region].runs_in(units).next().is_some()
    }

    pub(super) fn pages_of(&self, region: usize, index: u64) -> PageRun {
        let unit = self.unit_pages[region];
        PageRun { region, first: index * unit, count: unit }
    }

    /// Predicts the next accesses of the faulting threads; returns the ranges to request although no thread
    /// waits for them yet.
    pub(crate) fn ahead_of(&self, faults: &[Fault], strides: &mut Strides) -> Vec<GpaRange> {
        let mut runs: Vec<PageRun> = Vec::new();
        for fault in faults {
            let unit = fault.page / self.unit_pages[fault.region];
            let Some(thread) = fault.thread else { continue };
            let Some(guess) = strides.fault(thread, fault.region, unit) else { continue };
            let map = &self.missing()[fault.region];
            let steps = (1..=guess.count).filter_map(|step| {
                let distance = guess.stride.checked_mul(i64::try_from(step).ok()?)?;
                unit.checked_add_signed(distance)
            });
            for index in steps.filter(|index| *index < map.len() && map.get(*index)) {
                let run = self.pages_of(fault.region, index);
                match runs.last_mut() {
                    Some(last) if last.region == run.region && last.end() == run.first => {
                        last.count += run.count;
                    }
                    _ => runs.push(run),
                }
            }
        }
        runs.iter().map(|run| self.memory.layout().range_of(*run)).collect()
    }

    /// The missing units, one map a region.
    pub(crate) fn missing(&self) -> &[PageBitmap] {
        self.demand.missing()
    }

    /// Duration of the longest running wait for a page.
    pub(crate) fn longest_wait(&self) -> Duration {
        self.demand.longest_wait()
    }

    /// Prepares for another set of connections; no thread works on the engine now. Parts of a unit that
    /// arrived without becoming visible are discarded, with the page if the host could not write it, or zeroed where
    /// all pages stay; other missing memory is as before and is not examined.
    pub(crate) fn begin_again(&self) -> Result<(), Cause> {
        let torn = std::mem::take(&mut *self.torn.lock());
        let mut partly = torn;
        for (region, map) in self.missing().iter().enumerate() {
            if let Some(pieces) = &self.pieces[region] {
                pieces.begin_again(map, |unit| partly.push(self.pages_of(region, unit)));
            }
        }
        for run in &partly {
            let unit = self.unit_pages[run.region];
            let units = run.first / unit..run.end() / unit;
            for units in self.missing()[run.region].runs_in(units) {
                let pages = PageRun {
                    region: run.region,
                    first: units.start * unit,
                    count: (units.end - units.start) * unit,
                };
                let emptied = if self.source.holds_all_pages(run.region) {
                    self.memory.make_zero(pages)
                } else {
                    self.memory.discard(pages)
                };
                if emptied.is_err() {
                    // Left for the next attempt.
                    let mut torn = self.torn.lock();
                    torn.extend(&partly);
                }
                emptied.map_err(Cause::Memory)?;
                self.memory.mark_absent(pages);
            }
        }
        Ok(())
    }

    /// Ranges that threads wait for and that are still missing, to be requested on a new connection.
    pub(crate) fn wishes(&self) -> Vec<GpaRange> {
        self.demand.begin_wishes();
        let regions = 0..self.missing().len();
        let range = |region, unit| self.memory.layout().range_of(self.pages_of(region, unit));
        let of = |region| self.demand.wishes(region).map(move |unit| range(region, unit));
        regions.flat_map(of).collect()
    }

    /// Handles the source's reply that requested pages are sent on another connection. If they have arrived
    /// meanwhile, the waiting thread is woken to check again; otherwise their arrival wakes it.
    pub(super) fn expect_elsewhere(&self, ranges: &[GpaRange], via: Via) -> Result<(), Cause> {
        for run in locate(self.memory.layout(), ranges)? {
            let unit = self.unit_pages[run.region];
            for index in run.first / unit..run.end().div_ceil(unit) {
                self.progress.count(via.vcpu(), Count::Elsewhere, 1);
                let waited_for = self.demand.is_wanted(run.region, index);
                if waited_for && !self.demand.is_missing(run.region, index) {
                    self.show(run.region, index)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that ranges are whole missing units, or pieces that no thread has begun to receive; contents
    /// for anything else would overwrite what the guest has written here.
    pub(super) fn check(&self, ranges: &[GpaRange]) -> Result<Vec<PageRun>, ProtocolError> {
        let runs = locate(self.memory.layout(), ranges)?;
        for run in &runs {
            let missing = if let Some(pieces) = &self.pieces[run.region] {
                pieces.are_absent(run.first, run.count)
            } else {
                let unit = self.unit_pages[run.region];
                let whole = run.first.is_multiple_of(unit) && run.count.is_multiple_of(unit);
                let map = &self.missing()[run.region];
                whole && (run.first / unit..run.end() / unit).all(|index| map.get(index))
            };
            if !missing {
                return Err(NOT_MISSING);
            }
        }
        Ok(runs)
    }

    /// Marks pages as resident; `wake` is called for each unit that a thread waits for.
    pub(super) fn arrived(
        &self,
        run: PageRun,
        via: Via,
        wake: impl Fn(usize, u64) -> Result<(), Cause>,
    ) -> Result<(), Cause> {
        let unit = self.unit_pages[run.region];
        let (first, count) = (run.first / unit, run.count / unit);
        let here = |index| {
            wake(run.region, index)?;
            self.waiters.wake(run.region, index, via.vcpu());
            Ok::<_, Cause>(())
        };
        let progress = &self.progress;
        let waited = |thread, took| progress.fault_took(via.vcpu(), thread, took);
        let arrival = self.demand.arrive((run.region, first, count), here, waited)?;
        let wanted = arrival.wanted * unit;
        if via == Via::Bulk {
            progress.count(None, Count::BulkPages, run.count);
        } else {
            progress.count(via.vcpu(), Count::UrgentPages, wanted);
            progress.count(via.vcpu(), Count::PrefetchedPages, run.count - wanted);
        }
        progress.count(via.vcpu(), Count::ArrivedBytes, run.len_bytes());
        if self.left.0.fetch_sub(arrival.cleared, Ordering::AcqRel) == arrival.cleared {
            self.complete.cancel();
        }
        Ok(())
    }

    /// Makes the neighbours of a unit visible that are here like it: in memory whose pages are all there, most of what
    /// came before the guest is accessed here for the first time, and each fault would cost as much as this.
    fn show_around(&self, region: usize, index: u64) {
        let unit = self.unit_pages[region];
        let around = AROUND_PAGES / unit;
        if around < 2 || !self.source.holds_all_pages(region) {
            return;
        }
        let missing = &self.missing()[region];
        let start = index - index % around;
        let end = (start + around).min(missing.len());
        let first = missing.runs_in(start..index).last().map_or(start, |run| run.end);
        let end = missing.runs_in(index..end).next().map_or(end, |run| run.start);
        let count = end.saturating_sub(first);
        self.source.show_more(PageRun { region, first: first * unit, count: count * unit });
    }

    /// Wakes the waiters of a unit that is not missing: they see its contents, or zeros if it has none.
    pub(super) fn show(&self, region: usize, index: u64) -> Result<(), Cause> {
        Ok(self.source.make_zero(self.pages_of(region, index))?)
    }
}
