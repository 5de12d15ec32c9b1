// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How a migration is seen from outside while it runs: one shared document, one stream of events.
//!
//! Owns the counters that every thread of a migration adds to, and the only place that announces
//! the begin and end of phases. Reading a snapshot never disturbs the migration. It must never
//! decide anything.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::error::Side;
use crate::fault::FaultSourceKind;
use crate::history::{Course, History, Passage, Sample};
use crate::latency::{Latencies, micros};
use crate::layout::PAGE_BYTES;
use crate::options::Convergence;
use crate::page_server::{PageServerSnapshot, Standing};
use crate::report::FailureReport;

pub use crate::latency::LatencySnapshot;

/// States of the two machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Phase {
    /// Nothing yet.
    Idle,
    /// Source: connecting.
    Connect,
    /// Destination: waiting for the source.
    Listen,
    /// Both: versions, capabilities, configuration.
    Negotiate,
    /// Source: memory while the guest runs.
    Precopy,
    /// Destination: memory arrives.
    Receive,
    /// Source: the guest is stopped, the last pages go.
    Stop,
    /// Source: state goes, the destination acknowledges.
    Handover,
    /// Destination: state goes in.
    Prepare,
    /// Destination: the guest starts.
    Run,
    /// Source: pages are served.
    Serve,
    /// Destination: pages arrive on demand.
    Fault,
    /// A connection is lost in postcopy; both sides hold still.
    PostcopyPaused,
    /// Postcopy connects again.
    PostcopyRecover,
    /// The connection was lost around the handover: destination: whether the guest is its own is not
    /// known; source: whether the destination knows is not.
    InDoubt,
    /// Over, well.
    Done,
    /// Source: over here; a page server sends the pages that are left.
    HandedOn,
    /// Over, not well.
    Failed,
}

impl Phase {
    const ALL: [Self; 18] = [
        Self::Idle,
        Self::Connect,
        Self::Listen,
        Self::Negotiate,
        Self::Precopy,
        Self::Receive,
        Self::Stop,
        Self::Handover,
        Self::Prepare,
        Self::Run,
        Self::Serve,
        Self::Fault,
        Self::PostcopyPaused,
        Self::PostcopyRecover,
        Self::InDoubt,
        Self::Done,
        Self::HandedOn,
        Self::Failed,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Connect => "connect",
            Self::Listen => "listen",
            Self::Negotiate => "negotiate",
            Self::Precopy => "precopy",
            Self::Receive => "receive",
            Self::Stop => "stop",
            Self::Handover => "handover",
            Self::Prepare => "prepare",
            Self::Run => "run",
            Self::Serve => "serve",
            Self::Fault => "fault",
            Self::PostcopyPaused => "postcopy-paused",
            Self::PostcopyRecover => "postcopy-recover",
            Self::InDoubt => "in-doubt",
            Self::Done => "done",
            Self::HandedOn => "handed-on",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One thing that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A phase begins.
    Begin(Phase),
    /// A phase ended well after so long.
    End(Phase, Duration),
    /// A phase failed after so long.
    Fail(Phase, Duration),
    /// A precopy round begins with so many bytes to send.
    Round {
        /// Number, from 1.
        round: u32,
        /// Bytes to send in it.
        remaining_bytes: u64,
    },
    /// A round of precopy did not help.
    Stalled {
        /// Its number.
        round: u32,
        /// What a stop would cost.
        expected_us: u64,
        /// What it may cost.
        allowed_us: u64,
    },
    /// From now on the vCPUs are kept out of the guest for this share of the time.
    Throttled {
        /// The share.
        percent: u8,
    },
    /// From now on the guest may stand still for so long.
    DowntimeAllowed {
        /// In microseconds.
        allowed_us: u64,
    },
    /// The page server has not taken over.
    PageServerFailed,
}

/// Gets every event, in order, on the thread that caused it. Must not block.
pub trait Observer: Send + Sync {
    /// Takes one.
    fn event(&self, side: Side, event: Event);
}

/// Counters; each is only ever added to, or set by one thread.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub round: AtomicU32,
    pub total_bytes: AtomicU64,
    pub remaining_bytes: AtomicU64,
    pub memory_bytes_sent: AtomicU64,
    pub memory_bytes_received: AtomicU64,
    pub zero_pages: AtomicU64,
    pub free_pages: AtomicU64,
    pub link_bytes_per_s: AtomicU64,
    pub dirty_bytes_per_s: AtomicU64,
    pub expected_downtime_us: AtomicU64,
    pub downtime_us: AtomicU64,
    pub allowed_downtime_us: AtomicU64,
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
}

/// What a running migration shows. Shared by all its threads and everyone who watches.
pub struct Progress {
    side: Side,
    observer: Option<Box<dyn Observer>>,
    phase: AtomicU8,
    started: OnceLock<Instant>,
    ended: OnceLock<Instant>,
    failure: OnceLock<FailureReport>,
    pub(crate) counters: Counters,
    convergence: OnceLock<Convergence>,
    fault_source: OnceLock<FaultSourceKind>,
    /// Why postcopy holds still, or held still last. Held for one copy.
    lost: Mutex<Option<String>>,
    /// The process that sends the pages that are left.
    pub(crate) page_server: Standing,
    /// Latencies of faults that waited for the peer. Held for one addition or one copy.
    latency: Mutex<Latencies>,
    /// For the report. Held for one note or one copy.
    course: Mutex<Course>,
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
    /// A migration that has not begun, seen by nobody but readers of snapshots.
    pub fn new(side: Side) -> Self {
        Self::build(side, None)
    }

    /// The same with somebody who gets each event.
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
            convergence: OnceLock::new(),
            fault_source: OnceLock::new(),
            lost: Mutex::new(None),
            page_server: Standing::default(),
            latency: Mutex::new(Latencies::new()),
            course: Mutex::new(Course::new()),
        }
    }

    /// Whose progress this is.
    pub fn side(&self) -> Side {
        self.side
    }

    /// The phase now.
    pub fn phase(&self) -> Phase {
        let number = usize::from(self.phase.load(Relaxed));
        Phase::ALL.get(number).copied().unwrap_or(Phase::Failed)
    }

    /// Runs one phase: announces its begin and its end. The only way to be in a phase.
    pub(crate) fn run<T, E>(
        &self,
        phase: Phase,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let began = *self.started.get_or_init(Instant::now);
        let start = if self.phase() == Phase::Idle { began } else { Instant::now() };
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

    /// Postcopy has lost its connections: it holds still.
    pub(crate) fn lost(&self, why: String) {
        self.counters.losses.fetch_add(1, Relaxed);
        self.cannot_recover(why);
        self.enter(Phase::PostcopyPaused);
    }

    /// An attempt to connect again has failed.
    pub(crate) fn cannot_recover(&self, why: String) {
        *self.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    /// Postcopy goes on in its phase.
    pub(crate) fn recovered(&self, phase: Phase) {
        self.counters.recoveries.fetch_add(1, Relaxed);
        self.enter(phase);
    }

    /// Ends such a phase.
    pub(crate) fn end_long(&self, phase: Phase, took: Duration, well: bool) {
        self.tell(if well { Event::End(phase, took) } else { Event::Fail(phase, took) });
    }

    /// Enters a last phase, one that does no work.
    pub(crate) fn finish(&self, phase: Phase) {
        let _ = self.ended.set(Instant::now());
        self.note_sample(true);
        self.enter(phase);
    }

    /// Enters a last phase with the reason, which whoever sees the phase sees as well.
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
        let passage = Passage { at_ms: self.elapsed_ms(), phase };
        self.course.lock().unwrap_or_else(PoisonError::into_inner).enter(passage);
        self.note_sample(false);
        log::info!("migration {}: {phase}", self.side);
        self.tell(Event::Begin(phase));
    }

    pub(crate) fn tell(&self, event: Event) {
        if let Some(observer) = &self.observer {
            observer.event(self.side, event);
        }
    }

    /// Takes note of where the migration is, if it is time for that. For the report.
    pub(crate) fn note_sample(&self, is_last: bool) {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        let c = &self.counters;
        let sample = Sample {
            at_ms: self.elapsed_ms(),
            remaining_bytes: get(&c.remaining_bytes),
            moved_bytes: get(&c.memory_bytes_sent).max(get(&c.memory_bytes_received)),
            faults: get(&c.faults),
            urgent_pages: get(&c.urgent_pages) + get(&c.prefetched_pages),
        };
        self.course.lock().unwrap_or_else(PoisonError::into_inner).sample(sample, is_last);
    }

    fn elapsed_ms(&self) -> u64 {
        let end = self.ended.get().copied().unwrap_or_else(Instant::now);
        let elapsed = self.started.get().map_or(Duration::ZERO, |start| end.duration_since(*start));
        u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn begin_round(&self, round: u32, remaining_bytes: u64) {
        self.counters.round.store(round, Relaxed);
        self.counters.remaining_bytes.store(remaining_bytes, Relaxed);
        self.note_sample(false);
        self.tell(Event::Round { round, remaining_bytes });
    }

    pub(crate) fn sent_down(&self, bytes: u64) {
        let subtract = |left: u64| Some(left.saturating_sub(bytes));
        let _ = self.counters.remaining_bytes.fetch_update(Relaxed, Relaxed, subtract);
    }

    /// Pages of 4 KiB that went or came in the background, and otherwise.
    pub(crate) fn pages_moved(&self) -> (u64, u64) {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        let c = &self.counters;
        (get(&c.bulk_pages), get(&c.urgent_pages) + get(&c.prefetched_pages))
    }

    /// Pages of 4 KiB that have come so far, those of large pages that are not complete included.
    pub(crate) fn pages_come(&self) -> u64 {
        let c = &self.counters;
        c.memory_bytes_received.load(Relaxed) / PAGE_BYTES + c.zero_pages.load(Relaxed)
    }

    /// Memory went out as a frame.
    pub(crate) fn compressed(&self, raw_bytes: u64, frame_bytes: u64) {
        self.counters.compressed_raw_bytes.fetch_add(raw_bytes, Relaxed);
        self.counters.compressed_frame_bytes.fetch_add(frame_bytes, Relaxed);
    }

    /// A connection has found out whether compression pays.
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

    pub(crate) fn fault_took(&self, thread: Option<u32>, latency: Duration) {
        let latency_us = micros(latency);
        self.counters.fault_wait_us.fetch_add(latency_us, Relaxed);
        let mut latencies = self.latency.lock().unwrap_or_else(PoisonError::into_inner);
        latencies.record(thread, latency_us);
    }

    /// Everything that was noted, for a report.
    pub fn history(&self) -> History {
        let progress = self.snapshot();
        let course = self.course.lock().unwrap_or_else(PoisonError::into_inner);
        let (phases, timeline) = (course.phases(), course.samples());
        drop(course);
        let latencies = self.latency.lock().unwrap_or_else(PoisonError::into_inner);
        let (latency, threads) = (latencies.buckets(), latencies.threads());
        History { progress, phases, timeline, latency, threads }
    }

    /// Everything, as of now.
    pub fn snapshot(&self) -> Snapshot {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        let c = &self.counters;
        let rate = get(&c.bulk_bytes_per_s) + get(&c.urgent_bytes_per_s);
        let remaining_ms =
            (get(&c.remaining_bytes) / 1000).saturating_mul(1_000_000).checked_div(rate);
        Snapshot {
            side: self.side,
            phase: self.phase(),
            elapsed_ms: self.elapsed_ms(),
            round: c.round.load(Relaxed),
            total_bytes: get(&c.total_bytes),
            remaining_bytes: get(&c.remaining_bytes),
            memory_bytes_sent: get(&c.memory_bytes_sent),
            memory_bytes_received: get(&c.memory_bytes_received),
            zero_pages: get(&c.zero_pages),
            free_pages: get(&c.free_pages),
            link_bytes_per_s: get(&c.link_bytes_per_s),
            dirty_bytes_per_s: get(&c.dirty_bytes_per_s),
            expected_downtime_us: get(&c.expected_downtime_us),
            downtime_us: get(&c.downtime_us),
            allowed_downtime_us: get(&c.allowed_downtime_us),
            convergence: self.convergence.get().copied(),
            throttle_percent: c.throttle_percent.load(Relaxed),
            stalled_rounds: c.stalled_rounds.load(Relaxed),
            recovery: RecoverySnapshot {
                losses: c.losses.load(Relaxed),
                recoveries: c.recoveries.load(Relaxed),
                reason: self.lost.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            },
            compression: CompressionSnapshot {
                raw_bytes: get(&c.compressed_raw_bytes),
                frame_bytes: get(&c.compressed_frame_bytes),
                connections_on: c.compression_on.load(Relaxed),
                decisions: c.compression_decisions.load(Relaxed),
            },
            faults: FaultSnapshot {
                source: self.fault_source.get().copied(),
                seen: get(&c.faults),
                requested: get(&c.faults_requested),
                merged: get(&c.faults_merged),
                local: get(&c.faults_local),
                elsewhere: get(&c.faults_elsewhere),
                urgent_pages: get(&c.urgent_pages),
                bulk_pages: get(&c.bulk_pages),
                prefetched_pages: get(&c.prefetched_pages),
                bulk_bytes_per_s: get(&c.bulk_bytes_per_s),
                urgent_bytes_per_s: get(&c.urgent_bytes_per_s),
                remaining_ms,
                waited_us: get(&c.fault_wait_us),
                latency_us: self.latencies(),
            },
            page_server: self.page_server.snapshot(),
            error: self.failure.get().cloned(),
        }
    }

    fn latencies(&self) -> LatencySnapshot {
        self.latency.lock().unwrap_or_else(PoisonError::into_inner).snapshot()
    }
}

/// The progress document. Bytes are of guest memory; rates are measured, not wished.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Whose.
    pub side: Side,
    /// The phase now.
    pub phase: Phase,
    /// Since the first phase began, until the last ended.
    pub elapsed_ms: u64,
    /// Precopy round, from 1.
    pub round: u32,
    /// All guest memory.
    pub total_bytes: u64,
    /// Still to go in this round (precopy) or at all (postcopy).
    pub remaining_bytes: u64,
    /// Contents sent, each time counted.
    pub memory_bytes_sent: u64,
    /// Contents received, each time counted.
    pub memory_bytes_received: u64,
    /// Pages that were zero and did not travel, or as a flag.
    pub zero_pages: u64,
    /// Pages that the guest said it does not use, and that did not travel.
    pub free_pages: u64,
    /// Rate of the last round.
    pub link_bytes_per_s: u64,
    /// Rate at which the guest dirtied memory in the last round.
    pub dirty_bytes_per_s: u64,
    /// What a stop now would cost the guest: the last pages, state, round trips, start.
    pub expected_downtime_us: u64,
    /// What it did cost; 0 before.
    pub downtime_us: u64,
    /// What it may cost; `convergence` may raise it.
    pub allowed_downtime_us: u64,
    /// What is done about rounds that do not help (precopy at the source).
    pub convergence: Option<Convergence>,
    /// Share of the time for which vCPUs are kept out of the guest now.
    pub throttle_percent: u32,
    /// Rounds in a row that did not help.
    pub stalled_rounds: u32,
    /// Compression of bulk memory.
    pub compression: CompressionSnapshot,
    /// Postcopy faults.
    pub faults: FaultSnapshot,
    /// Why it failed, when it has.
    pub error: Option<FailureReport>,
    /// Lost connections of postcopy.
    pub recovery: RecoverySnapshot,
    /// The process that sends the pages that are left, where one was asked for (source).
    pub page_server: Option<PageServerSnapshot>,
}

/// How often postcopy lost its connections, and came back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RecoverySnapshot {
    /// Times that connections were lost.
    pub losses: u32,
    /// Times that they were made again.
    pub recoveries: u32,
    /// Why they were lost last, or could not be made again.
    pub reason: Option<String>,
}

/// Compression at the source, all connections together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CompressionSnapshot {
    /// Memory that went out compressed.
    pub raw_bytes: u64,
    /// What it was compressed to.
    pub frame_bytes: u64,
    /// Connections on which it was found to pay, and is on.
    pub connections_on: u32,
    /// How many times a connection has tried both ways and decided.
    pub decisions: u32,
}

/// Faults of a postcopy destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FaultSnapshot {
    /// What catches them.
    pub source: Option<FaultSourceKind>,
    /// All that were reported.
    pub seen: u64,
    /// That made a request.
    pub requested: u64,
    /// For pages that had been requested already.
    pub merged: u64,
    /// Resolved without the peer (zero pages, pages that had just arrived).
    pub local: u64,
    /// Requested pages that were in flight already.
    pub elsewhere: u64,
    /// Pages that came as answers to requests.
    pub urgent_pages: u64,
    /// Pages that came in the background.
    pub bulk_pages: u64,
    /// Pages that came along with requested ones before anybody touched them.
    pub prefetched_pages: u64,
    /// Rate of the background in the last second.
    pub bulk_bytes_per_s: u64,
    /// Rate of requested and prefetched pages in the last second.
    pub urgent_bytes_per_s: u64,
    /// Time until the last page at these rates; none while nothing moves.
    pub remaining_ms: Option<u64>,
    /// Sum of all waits for the peer, of all threads.
    pub waited_us: u64,
    /// Time from the report of a fault to its end, for those that waited for the peer.
    pub latency_us: LatencySnapshot,
}
