// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The progress of a migration: one shared document and one stream of events.
//!
//! Owns the counters that every thread of a migration adds to, the peer's own figures, and the only place
//! that announces the begin and end of phases. Reading a snapshot never blocks the migration. It must never
//! decide anything.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::document::{DOCUMENT_VERSION, Mode};
use crate::fault::FaultSourceKind;
use crate::figures::{Figures, Known};
use crate::history::{History, PhaseEntry, RoundBegin, Sample, Timeline};
use crate::latency::{Latencies, micros, name_threads};
use crate::layout::PAGE_BYTES;
use crate::options::Convergence;
use crate::own_figures::{Count, FiguresOfVcpus};
use crate::page_server_status::{Identity, PageServerStatus};
use crate::phase::Side;
use crate::protocol::capabilities::millis;

pub use crate::document::{
    CompressionSnapshot, FailureReport, FaultSnapshot, ProgressDocument, RecoverySnapshot,
};
pub use crate::latency::{FaultWaits, LatencySnapshot};
pub use crate::phase::Phase;

/// An event of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A phase begins.
    Begin(Phase),
    /// A phase ended successfully; with its duration.
    End(Phase, Duration),
    /// A phase failed; with its duration.
    Fail(Phase, Duration),
    /// A precopy round begins.
    Round {
        /// Number, from 1.
        round: u32,
        /// Bytes to send in the round.
        remaining_bytes: u64,
    },
    /// A precopy round did not reduce the expected downtime.
    Stalled {
        /// Its number.
        round: u32,
        /// The expected downtime.
        expected_us: u64,
        /// The allowed downtime.
        allowed_us: u64,
    },
    /// The vCPUs are throttled from now on.
    Throttled {
        /// Percentage of the time for which they are kept out of the guest.
        percent: u8,
    },
    /// The allowed downtime changes.
    DowntimeAllowed {
        /// In microseconds.
        allowed_us: u64,
    },
    /// The page server has not taken over.
    PageServerFailed,
}

/// Receives every event, in order, on the thread that caused it. Must not block.
pub trait Observer: Send + Sync {
    /// Handles one event.
    fn event(&self, side: Side, event: Event);
}

/// Counters; each is only added to, or set by one thread.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub round: AtomicU32,
    pub total_bytes: Known,
    pub remaining_bytes: Known,
    pub memory_bytes_sent: AtomicU64,
    pub memory_bytes_received: AtomicU64,
    pub zero_pages: AtomicU64,
    pub free_pages: AtomicU64,
    pub link_bytes_per_s: Known,
    pub dirty_bytes_per_s: Known,
    pub expected_downtime_us: Known,
    pub downtime_us: Known,
    pub allowed_downtime_us: Known,
    pub throttle_percent: AtomicU32,
    pub stalled_rounds: AtomicU32,
    pub compressed_raw_bytes: AtomicU64,
    pub compressed_frame_bytes: AtomicU64,
    pub compression_on: AtomicU32,
    pub compression_decisions: AtomicU32,
    pub faults: AtomicU64,
    pub faults_requested: AtomicU64,
    pub faults_merged: AtomicU64,
    pub faults_local: AtomicU64,
    pub faults_elsewhere: AtomicU64,
    pub urgent_pages: AtomicU64,
    pub bulk_pages: AtomicU64,
    pub prefetched_pages: AtomicU64,
    pub fault_wait_us: AtomicU64,
    pub bulk_bytes_per_s: AtomicU64,
    pub urgent_bytes_per_s: AtomicU64,
    pub losses: AtomicU32,
    pub recoveries: AtomicU32,
    /// vCPUs of the guest; 0 while that is not known. In no document.
    pub guest_vcpus: AtomicU32,
}

impl Counters {
    /// The counter; none for what is subtracted from `remaining_bytes`.
    fn of(&self, what: Count) -> Option<&AtomicU64> {
        Some(match what {
            Count::Faults => &self.faults,
            Count::Requested => &self.faults_requested,
            Count::Merged => &self.faults_merged,
            Count::Local => &self.faults_local,
            Count::Elsewhere => &self.faults_elsewhere,
            Count::UrgentPages => &self.urgent_pages,
            Count::BulkPages => &self.bulk_pages,
            Count::PrefetchedPages => &self.prefetched_pages,
            Count::WaitedMicros => &self.fault_wait_us,
            Count::ReceivedBytes => &self.memory_bytes_received,
            Count::ZeroPages => &self.zero_pages,
            Count::ArrivedBytes => return None,
        })
    }
}

/// The visible state of a running migration. Shared by all its threads and all watching clients.
pub struct Progress {
    side: Side,
    observer: Option<Box<dyn Observer>>,
    phase: AtomicU8,
    /// When the source connected, by both clocks.
    started: OnceLock<(Instant, SystemTime)>,
    ended: OnceLock<Instant>,
    failure: OnceLock<FailureReport>,
    pub(crate) counters: Counters,
    mode: OnceLock<Mode>,
    /// The peer's figures. Locked for one copy.
    peer: Mutex<Figures>,
    convergence: OnceLock<Convergence>,
    fault_source: OnceLock<FaultSourceKind>,
    /// The guest started at the destination before all of its memory was there.
    postcopy: AtomicBool,
    /// All of its memory is here; the connections may not have ended yet.
    all_pages: AtomicBool,
    /// Why postcopy is paused, or was paused last. Locked for one copy.
    lost: Mutex<Option<String>>,
    /// Until when the source reconnects by itself. Locked for one copy.
    reconnects_until: Mutex<Option<Instant>>,
    /// The process that sends the remaining pages.
    pub(crate) page_server: PageServerStatus,
    /// Latencies of faults that waited for the peer, but for those in `own`. Locked for one addition or one copy.
    latency: Mutex<Latencies>,
    /// Counted by vCPUs that resolve their own faults, in addition to `counters`.
    own: FiguresOfVcpus,
    /// Recorded for the report. Locked for one entry or one copy.
    course: Mutex<Timeline>,
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress")
            .field("side", &self.side)
            .field("phase", &self.phase())
            .finish_non_exhaustive()
    }
}

impl Progress {
    /// Progress of a migration that has not begun, without an observer.
    pub fn new(side: Side) -> Self {
        Self::build(side, None)
    }

    /// The same with an observer that receives each event.
    pub fn observed(side: Side, observer: Box<dyn Observer>) -> Self {
        Self::build(side, Some(observer))
    }

    fn build(side: Side, observer: Option<Box<dyn Observer>>) -> Self {
        Self {
            side,
            observer,
            phase: AtomicU8::new(Phase::Idle as u8),
            started: OnceLock::new(),
            ended: OnceLock::new(),
            failure: OnceLock::new(),
            counters: Counters::default(),
            mode: OnceLock::new(),
            peer: Mutex::default(),
            convergence: OnceLock::new(),
            fault_source: OnceLock::new(),
            postcopy: AtomicBool::new(false),
            all_pages: AtomicBool::new(false),
            lost: Mutex::new(None),
            reconnects_until: Mutex::new(None),
            page_server: PageServerStatus::default(),
            latency: Mutex::new(Latencies::new()),
            own: FiguresOfVcpus::default(),
            course: Mutex::new(Timeline::new()),
        }
    }

    /// Notes that there is a page server, which this process has started or is.
    pub fn has_page_server(&self, identity: Identity) {
        self.page_server.begin(identity);
    }

    /// The side that this process is.
    pub fn side(&self) -> Side {
        self.side
    }

    /// The current phase.
    pub fn phase(&self) -> Phase {
        let number = usize::from(self.phase.load(Relaxed));
        Phase::ALL.get(number).copied().unwrap_or(Phase::Failed)
    }

    /// Whether the last page of a postcopy migration has come to this destination. From then on the guest needs no
    /// peer; [`Phase::Done`] follows once the source has been told or its connection has stalled.
    pub fn has_all_pages(&self) -> bool {
        self.all_pages.load(Relaxed)
    }

    /// Notes that.
    pub(crate) fn all_pages_came(&self) {
        self.all_pages.store(true, Relaxed);
    }

    /// Runs one phase, and announces its begin and end. Phases are entered only through this, or through
    /// [`begin_long`](Self::begin_long).
    pub(crate) fn run<T, E>(
        &self,
        phase: Phase,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let start = Instant::now();
        if phase != Phase::Listen {
            // The wait for a source does not belong to the migration.
            self.started.get_or_init(|| (start, SystemTime::now()));
        }
        self.enter(phase);
        let result = work();
        let took = start.elapsed();
        self.tell(match result {
            Ok(_) => Event::End(phase, took),
            Err(_) => Event::Fail(phase, took),
        });
        result
    }

    /// Begins a phase that outlives the call that entered it; [`end_long`](Self::end_long) ends it.
    pub(crate) fn begin_long(&self, phase: Phase) {
        self.enter(phase);
    }

    /// Notes that postcopy has lost its connections and is paused.
    pub(crate) fn lost(&self, why: String) {
        self.counters.losses.fetch_add(1, Relaxed);
        self.cannot_recover(why);
        self.enter(Phase::PostcopyPaused);
    }

    /// Notes that an attempt to reconnect has failed.
    pub(crate) fn cannot_recover(&self, why: String) {
        *self.lost.lock() = Some(why);
    }

    /// Sets until when the source reconnects by itself; `None` while connected.
    pub(crate) fn reconnects_until(&self, until: Option<Instant>) {
        *self.reconnects_until.lock() = until;
    }

    /// Notes that postcopy continues in `phase`.
    pub(crate) fn recovered(&self, phase: Phase) {
        self.counters.recoveries.fetch_add(1, Relaxed);
        self.enter(phase);
    }

    /// Ends a phase that [`begin_long`](Self::begin_long) began.
    pub(crate) fn end_long(&self, phase: Phase, took: Duration, well: bool) {
        self.tell(if well { Event::End(phase, took) } else { Event::Fail(phase, took) });
    }

    /// Enters a final phase.
    pub(crate) fn finish(&self, phase: Phase) {
        let _ = self.ended.set(Instant::now());
        if phase == Phase::Done {
            self.counters.remaining_bytes.set(0);
        }
        // As long as its threads are there.
        self.name_threads();
        self.note_sample(true);
        self.enter(phase);
    }

    /// Enters a final phase with the failure; both become visible together.
    pub fn fail(&self, phase: Phase, failure: FailureReport) {
        let _ = self.failure.set(failure);
        self.finish(phase);
    }

    /// Notes a failure that does not end the migration.
    pub(crate) fn note_failure(&self, failure: FailureReport) {
        let _ = self.failure.set(failure);
    }

    pub(crate) fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Relaxed);
        if matches!(phase, Phase::Serve | Phase::Fault) {
            self.postcopy.store(true, Relaxed);
        }
        let entry = PhaseEntry { at_ms: self.elapsed_ms(), phase };
        self.course.lock().enter(entry);
        self.note_sample(false);
        log::info!("migration {}: {phase}", self.side);
        self.tell(Event::Begin(phase));
    }

    pub(crate) fn tell(&self, event: Event) {
        if let Some(observer) = &self.observer {
            observer.event(self.side, event);
        }
    }

    /// Records a sample for the report, if one is due.
    pub(crate) fn note_sample(&self, is_last: bool) {
        let c = &self.counters;
        let received = self.total(Count::ReceivedBytes);
        let sample = Sample {
            at_ms: self.elapsed_ms(),
            remaining_bytes: self.remaining_bytes(),
            moved_bytes: c.memory_bytes_sent.load(Relaxed).max(received),
            faults: self.total(Count::Faults),
            urgent_pages: self.pages_moved().1,
        };
        if is_last {
            self.course.lock().sample(sample, true);
        } else if let Some(mut course) = self.course.try_lock() {
            // Another thread is taking a sample, or making a report: this one is skipped.
            course.sample(sample, false);
        }
    }

    fn elapsed_ms(&self) -> u64 {
        let end = self.ended.get().copied().unwrap_or_else(Instant::now);
        let elapsed =
            self.started.get().map_or(Duration::ZERO, |start| end.duration_since(start.0));
        millis(elapsed)
    }

    pub(crate) fn begin_round(&self, round: u32, remaining_bytes: u64) {
        self.counters.round.store(round, Relaxed);
        let c = &self.counters;
        c.remaining_bytes.set(remaining_bytes);
        let begin = RoundBegin {
            at_ms: self.elapsed_ms(),
            round,
            remaining_bytes,
            link_bytes_per_s: c.link_bytes_per_s.get(),
            dirty_bytes_per_s: c.dirty_bytes_per_s.get(),
        };
        self.course.lock().begin_round(begin);
        self.note_sample(false);
        self.tell(Event::Round { round, remaining_bytes });
    }

    pub(crate) fn sent_down(&self, bytes: u64) {
        self.counters.remaining_bytes.sub(bytes);
    }

    /// Pages of 4 KiB that were sent or received in the background, and on request.
    pub(crate) fn pages_moved(&self) -> (u64, u64) {
        let urgent = self.total(Count::UrgentPages) + self.total(Count::PrefetchedPages);
        (self.total(Count::BulkPages), urgent)
    }

    /// Pages of 4 KiB that have arrived, including those of large pages that are not complete.
    pub(crate) fn pages_come(&self) -> u64 {
        self.total(Count::ReceivedBytes) / PAGE_BYTES + self.total(Count::ZeroPages)
    }

    /// Counts memory that was sent compressed.
    pub(crate) fn compressed(&self, raw_bytes: u64, frame_bytes: u64) {
        self.counters.compressed_raw_bytes.fetch_add(raw_bytes, Relaxed);
        self.counters.compressed_frame_bytes.fetch_add(frame_bytes, Relaxed);
    }

    /// Notes a connection's decision for or against compression.
    pub(crate) fn compression_is(&self, before: bool, now: bool) {
        self.counters.compression_decisions.fetch_add(1, Relaxed);
        match (before, now) {
            (false, true) => drop(self.counters.compression_on.fetch_add(1, Relaxed)),
            (true, false) => drop(self.counters.compression_on.fetch_sub(1, Relaxed)),
            _ => {}
        }
    }

    pub(crate) fn set_convergence(&self, policy: Convergence) {
        let _ = self.convergence.set(policy);
    }

    pub(crate) fn set_fault_source(&self, kind: FaultSourceKind) {
        let _ = self.fault_source.set(kind);
    }

    /// Sets how many vCPUs count for themselves from now on.
    pub(crate) fn vcpus_count(&self, vcpus: usize) {
        self.own.begin(vcpus);
    }

    /// Notes the thread of a vCPU, on it.
    pub(crate) fn is_thread_of(&self, vcpu: usize, thread: Option<u32>) {
        self.own.is_thread_of(vcpu, thread);
    }

    /// Counts, on the thread of this vCPU if it is one's.
    pub(crate) fn count(&self, vcpu: Option<usize>, what: Count, by: u64) {
        if vcpu.is_some_and(|vcpu| self.own.count(vcpu, what, by)) {
            return;
        }
        match self.counters.of(what) {
            Some(counter) => drop(counter.fetch_add(by, Relaxed)),
            None => self.sent_down(by),
        }
    }

    /// What all threads have counted.
    pub(crate) fn total(&self, what: Count) -> u64 {
        let common = self.counters.of(what).map_or(0, |counter| counter.load(Relaxed));
        common.saturating_add(self.own.sum(what))
    }

    fn remaining_bytes(&self) -> Option<u64> {
        let left = self.counters.remaining_bytes.get()?;
        Some(left.saturating_sub(self.own.sum(Count::ArrivedBytes)))
    }

    pub(crate) fn fault_took(&self, vcpu: Option<usize>, thread: Option<u32>, latency: Duration) {
        let latency_us = micros(latency);
        self.count(vcpu, Count::WaitedMicros, latency_us);
        if vcpu.is_some_and(|vcpu| self.own.record(vcpu, thread, latency_us)) {
            return;
        }
        let mut latencies = self.latency.lock();
        latencies.record(thread, latency_us);
    }

    /// How long faults waited for the peer, up to each of these bounds, which rise. Locks as a snapshot does.
    pub fn fault_waits(&self, bounds_us: &[u64]) -> FaultWaits {
        let (up_to, count) = self.latencies_together().up_to(bounds_us);
        FaultWaits { up_to, count, sum_us: self.total(Count::WaitedMicros) }
    }

    fn name_threads(&self) {
        name_threads(&self.latency);
        self.own.name_threads();
    }

    /// The latencies of all threads together, without those of each.
    fn latencies_together(&self) -> Latencies {
        let mut all = self.latency.lock().together();
        self.own.add_to(&mut all);
        all
    }

    /// The latencies of all threads.
    fn all_latencies(&self) -> Latencies {
        let mut all = self.latency.lock().clone();
        self.own.add_to(&mut all);
        all
    }

    /// Everything recorded, for a report.
    pub fn history(&self) -> History {
        let progress = self.snapshot();
        let course = self.course.lock();
        let (phases, timeline, own) = (course.phases(), course.samples(), course.rounds());
        drop(course);
        let peer = self.peer.lock().course.clone();
        let rounds = if own.is_empty() { peer.unwrap_or_default() } else { own };
        self.name_threads();
        let latencies = self.all_latencies();
        let (latency, threads) = (latencies.buckets(), latencies.threads());
        History { progress, phases, timeline, rounds, latency, threads }
    }

    /// The progress document as of now.
    pub fn snapshot(&self) -> ProgressDocument {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        let c = &self.counters;
        let peer = self.peer.lock().clone();
        let is_source = self.side == Side::Source;
        let is_destination = !is_source;
        // Each side counts some figures itself; the peer's figures provide the others.
        let sent = |own: u64, told: Option<u64>| if is_source { Some(own) } else { told };
        let met = |own: u64, told: Option<u64>| if is_destination { Some(own) } else { told };
        let known = |own: &Known, told: Option<u64>| own.get().or(told);
        let rate = get(&c.bulk_bytes_per_s) + get(&c.urgent_bytes_per_s);
        let remaining = self.remaining_bytes();
        let total = |what| self.total(what);
        let remaining_ms = remaining.map(|left| (left / 1000).saturating_mul(1_000_000));
        let began = self.started.get().map(|(_, at)| at.duration_since(UNIX_EPOCH));
        ProgressDocument {
            version: DOCUMENT_VERSION,
            side: self.side,
            phase: self.phase(),
            mode: self.mode.get().copied(),
            postcopy: self.postcopy.load(Relaxed),
            began_unix_ms: began.map(|since| millis(since.unwrap_or_default())),
            elapsed_ms: self.elapsed_ms(),
            round: if is_source { Some(c.round.load(Relaxed)) } else { peer.rounds },
            total_bytes: c.total_bytes.get(),
            remaining_bytes: remaining,
            memory_bytes_sent: sent(get(&c.memory_bytes_sent), peer.memory_bytes_sent),
            memory_bytes_received: met(total(Count::ReceivedBytes), peer.memory_bytes_received),
            zero_pages: total(Count::ZeroPages),
            free_pages: sent(get(&c.free_pages), peer.free_pages),
            link_bytes_per_s: known(&c.link_bytes_per_s, peer.link_bytes_per_s),
            dirty_bytes_per_s: known(&c.dirty_bytes_per_s, peer.dirty_bytes_per_s),
            expected_downtime_us: known(&c.expected_downtime_us, peer.expected_downtime_us),
            downtime_us: c.downtime_us.get(),
            allowed_downtime_us: known(&c.allowed_downtime_us, peer.allowed_downtime_us),
            convergence: self.convergence.get().copied(),
            throttle_percent: is_source.then(|| c.throttle_percent.load(Relaxed)),
            stalled_rounds: is_source.then(|| c.stalled_rounds.load(Relaxed)),
            recovery: RecoverySnapshot {
                losses: c.losses.load(Relaxed),
                recoveries: c.recoveries.load(Relaxed),
                reason: self.lost.lock().clone(),
                left_ms: self
                    .reconnects_until
                    .lock()
                    .map(|until| millis(until.saturating_duration_since(Instant::now()))),
            },
            compression: CompressionSnapshot {
                raw_bytes: get(&c.compressed_raw_bytes),
                frame_bytes: get(&c.compressed_frame_bytes),
                connections_on: c.compression_on.load(Relaxed),
                decisions: c.compression_decisions.load(Relaxed),
            },
            faults: FaultSnapshot {
                source: self.fault_source.get().copied(),
                seen: met(total(Count::Faults), peer.faults),
                requested: met(total(Count::Requested), peer.faults_requested),
                merged: met(total(Count::Merged), peer.faults_merged),
                local: met(total(Count::Local), peer.faults_local),
                elsewhere: met(total(Count::Elsewhere), peer.faults_elsewhere),
                urgent_pages: total(Count::UrgentPages),
                bulk_pages: total(Count::BulkPages),
                prefetched_pages: total(Count::PrefetchedPages),
                bulk_bytes_per_s: get(&c.bulk_bytes_per_s),
                urgent_bytes_per_s: get(&c.urgent_bytes_per_s),
                remaining_ms: remaining_ms.and_then(|left| left.checked_div(rate)),
                waited_us: met(total(Count::WaitedMicros), peer.waited_us),
                latency_us: if is_source { peer.latency_us } else { Some(self.latencies()) },
            },
            page_server: self.page_server.snapshot(),
            error: self.failure.get().cloned(),
        }
    }

    /// The figures of this side, to be sent to the peer.
    pub(crate) fn figures(&self) -> Figures {
        let mut figures = Figures::of(&self.snapshot());
        if self.side == Side::Source {
            let course = self.course.lock();
            figures.course = Some(course.rounds());
        }
        figures
    }

    /// Takes the peer's figures.
    pub(crate) fn heard(&self, payload: &[u8]) {
        if let Some(figures) = Figures::read(payload) {
            self.peer.lock().take(&figures);
        }
    }

    pub(crate) fn set_mode(&self, mode: Mode) {
        let _ = self.mode.set(mode);
    }

    fn latencies(&self) -> LatencySnapshot {
        self.latencies_together().snapshot()
    }
}
