// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the guest says of itself: its control page and one status page per vCPU.
//!
//! Plain values with times in nanoseconds, read from words of the ABI. Must never read memory.

use serde::Serialize;

use crate::abi::{balloon_failure, control, error, failure, param, stage, state, vcpu, workload};
use crate::memory::Words;
use crate::tsc;

/// The guest as a whole.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// How far it has come: `starting`, `mapped`, `running`, `failed`.
    pub stage: &'static str,
    /// Why it failed.
    pub failure: Option<&'static str>,
    /// The command line it was given.
    pub cmdline: String,
    /// Words of it that it did not understand.
    pub cmdline_refused: u64,
    /// Name of the workload in the parameter page, none when that page is not resident yet.
    pub workload: Option<&'static str>,
    /// Generation of the parameters.
    pub generation: Option<u64>,
    /// vCPUs asked for.
    pub vcpus_wanted: u64,
    /// vCPUs that came up.
    pub vcpus_online: u64,
    /// Test pages.
    pub pages: u64,
    /// RAM in the memory map.
    pub ram_bytes: u64,
    /// From the first instruction at CPL 3 to the start of the workload.
    pub setup_ns: u64,
    /// TSC at the first instruction at CPL 3.
    pub first_tsc: u64,
    /// TSC when the workload started.
    pub ready_tsc: u64,
    /// How it was allowed DMA by the device that its command line names, if it names one.
    pub bus_master: Option<BusMaster>,
    /// Seed of the pattern.
    pub seed: u64,
    /// The vCPUs in order; none where the page is not resident yet.
    pub vcpus: Vec<Option<VcpuStatus>>,
}

impl Status {
    pub(crate) fn new(page: &Words, parameters: Option<&Words>, khz: u64) -> Self {
        let ready = page.at(control::READY_TSC);
        let first = page.at(control::FIRST_TSC);
        let line = page.bytes(control::CMDLINE, page.at(control::CMDLINE_BYTES));
        let ready_after = ready.saturating_sub(first);
        Self {
            stage: match page.at(control::STAGE) {
                stage::MAPPED => "mapped",
                stage::RUNNING => "running",
                stage::FAILED => "failed",
                _ => "starting",
            },
            failure: failure_name(page.at(control::FAILURE)),
            cmdline: String::from_utf8_lossy(line).into_owned(),
            cmdline_refused: page.at(control::CMDLINE_REFUSED),
            workload: parameters.map(|words| name(&workload::NAMES, words.at(param::WORKLOAD))),
            generation: parameters.map(|words| words.at(param::GENERATION)),
            vcpus_wanted: page.at(control::VCPUS),
            vcpus_online: page.at(control::VCPUS_ONLINE),
            pages: page.at(control::PAGES),
            ram_bytes: page.at(control::RAM_BYTES),
            setup_ns: tsc::nanoseconds(ready_after, khz),
            first_tsc: first,
            ready_tsc: ready,
            bus_master: BusMaster::new(page, khz),
            seed: page.at(control::SEED),
            vcpus: Vec::new(),
        }
    }

    /// Whether every vCPU's page could be read.
    pub fn complete(&self) -> bool {
        self.vcpus.iter().all(Option::is_some)
    }

    /// The vCPUs that could be read.
    pub fn known(&self) -> impl Iterator<Item = &VcpuStatus> {
        self.vcpus.iter().flatten()
    }

    /// Iterations of all vCPUs that could be read.
    pub fn iterations(&self) -> u64 {
        self.known().map(|vcpu| vcpu.iterations).sum()
    }

    /// Errors of all vCPUs that could be read.
    pub fn errors(&self) -> u64 {
        self.known().map(|vcpu| vcpu.errors).sum()
    }

    /// The longest gap that any vCPU saw.
    pub fn gap_max_ns(&self) -> u64 {
        self.known().map(|vcpu| vcpu.gap_max.ns).max().unwrap_or(0)
    }

    /// Whether every vCPU is known and in this state.
    pub fn all_in(&self, state: &str) -> bool {
        self.complete() && !self.vcpus.is_empty() && self.known().all(|vcpu| vcpu.state == state)
    }
}

/// A device that was allowed DMA.
#[derive(Clone, Debug, Serialize)]
pub struct BusMaster {
    /// From the first instruction at CPL 3 to the write of Bus Master Enable.
    pub asked_ns: u64,
    /// How long that write took.
    pub waited_ns: u64,
    /// What the device's command register said then; all ones without a device.
    pub command: u16,
}

impl BusMaster {
    fn new(page: &Words, khz: u64) -> Option<Self> {
        let since =
            |later, earlier| tsc::nanoseconds(page.at(later).saturating_sub(page.at(earlier)), khz);
        (page.at(control::MASTER_ASKED_TSC) != 0).then(|| Self {
            asked_ns: since(control::MASTER_ASKED_TSC, control::FIRST_TSC),
            waited_ns: since(control::MASTER_GRANTED_TSC, control::MASTER_ASKED_TSC),
            command: u16::try_from(page.at(control::MASTER_COMMAND) & 0xffff).unwrap_or(u16::MAX),
        })
    }
}

/// One vCPU.
#[derive(Clone, Debug, Serialize)]
pub struct VcpuStatus {
    /// Increases whenever it runs.
    pub heartbeat: u64,
    /// `off`, `prefill`, `work`, `verify`, `done` or `paused`.
    pub state: &'static str,
    /// Generation of the parameters it works by.
    pub generation: u64,
    /// Page visits.
    pub iterations: u64,
    /// Pages written.
    pub writes: u64,
    /// Pages read.
    pub reads: u64,
    /// Pages checked.
    pub verified: u64,
    /// Pages found wrong.
    pub errors: u64,
    /// Complete passes over its pages.
    pub passes: u64,
    /// Page being written at this moment.
    pub in_flight: Option<u64>,
    /// Sum of the counters of its pages.
    pub counter_sum: u64,
    /// Its latest reading of the clock, ticks.
    pub last_tsc: u64,
    /// When its statistics began, ticks.
    pub start_tsc: u64,
    /// The longest gap between two readings of the clock: the downtime that it saw.
    pub gap_max: Gap,
    /// Its iterations at that gap.
    pub gap_max_iteration: u64,
    /// Number of gaps above the stall threshold.
    pub stalls: u64,
    /// Their sum.
    pub stall_total_ns: u64,
    /// Timed accesses.
    pub accesses: u64,
    /// Sum of their times.
    pub access_total_ns: u64,
    /// The longest.
    pub access_max_ns: u64,
    /// When it began, ticks.
    pub access_max_tsc: u64,
    /// Its page.
    pub access_max_page: u64,
    /// Readings of the clock that went back.
    pub tsc_backwards: u64,
    /// Long gaps since the start, of which the ring keeps the latest.
    pub gaps_noted: u64,
    /// The latest long gaps, oldest first.
    pub gaps: Vec<Gap>,
    /// The first errors.
    pub error_records: Vec<ErrorRecord>,
    /// What the balloon workloads did.
    pub balloon: BalloonStatus,
    /// Attacks of each kind by the hostile workload; none where it found nothing to attack.
    pub attacks: Option<Vec<u64>>,
}

/// What a vCPU did with the balloon.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
pub struct BalloonStatus {
    /// Pages that were reported or put into the balloon.
    pub given_pages: u64,
    /// Of them, those that the device said come back zeroed.
    pub told_pages: u64,
    /// Time that giving them took.
    pub give_ns: u64,
    /// Time that taking them out of the balloon took.
    pub back_ns: u64,
    /// Time from then on until all of them were there, and zero.
    pub take_ns: u64,
    /// Features that driver and device agreed on.
    pub features: u64,
    /// Why the workload ended early.
    pub failure: Option<&'static str>,
}

/// A time in which a vCPU did not run or waited.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
pub struct Gap {
    /// When it began, ticks.
    pub start_tsc: u64,
    /// How long it was.
    pub ns: u64,
}

/// A page that the guest found wrong.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
pub struct ErrorRecord {
    /// Its number.
    pub page: u64,
    /// Its address.
    pub gpa: u64,
    /// The counter it should have.
    pub counter: u64,
    /// The counter it has.
    pub found_counter: u64,
    /// The first wrong word.
    pub word: u64,
    /// What it should be.
    pub expected: u64,
    /// What it is.
    pub found: u64,
    /// When it was found, ticks.
    pub tsc: u64,
}

impl VcpuStatus {
    pub(crate) fn new(page: &Words, khz: u64) -> Self {
        let ns = |offset| tsc::nanoseconds(page.at(offset), khz);
        Self {
            heartbeat: page.at(vcpu::HEARTBEAT),
            state: name(&state::NAMES, page.at(vcpu::STATE)),
            generation: page.at(vcpu::GENERATION),
            iterations: page.at(vcpu::ITERATIONS),
            writes: page.at(vcpu::WRITES),
            reads: page.at(vcpu::READS),
            verified: page.at(vcpu::VERIFIED),
            errors: page.at(vcpu::ERRORS),
            passes: page.at(vcpu::PASSES),
            in_flight: page.at(vcpu::IN_FLIGHT).checked_sub(1),
            counter_sum: page.at(vcpu::COUNTER_SUM),
            last_tsc: page.at(vcpu::LAST_TSC),
            start_tsc: page.at(vcpu::START_TSC),
            gap_max: Gap { start_tsc: page.at(vcpu::GAP_MAX_TSC), ns: ns(vcpu::GAP_MAX) },
            gap_max_iteration: page.at(vcpu::GAP_MAX_ITERATION),
            stalls: page.at(vcpu::STALLS),
            stall_total_ns: ns(vcpu::STALL_TOTAL),
            accesses: page.at(vcpu::ACCESSES),
            access_total_ns: ns(vcpu::ACCESS_TOTAL),
            access_max_ns: ns(vcpu::ACCESS_MAX),
            access_max_tsc: page.at(vcpu::ACCESS_MAX_TSC),
            access_max_page: page.at(vcpu::ACCESS_MAX_PAGE),
            tsc_backwards: page.at(vcpu::TSC_BACKWARDS),
            gaps_noted: page.at(vcpu::GAPS_NOTED),
            gaps: gaps(page, khz),
            error_records: error_records(page),
            balloon: BalloonStatus {
                given_pages: page.at(vcpu::BALLOON_GIVEN),
                told_pages: page.at(vcpu::BALLOON_TOLD),
                give_ns: ns(vcpu::BALLOON_GIVE_TICKS),
                back_ns: ns(vcpu::BALLOON_BACK_TICKS),
                take_ns: ns(vcpu::BALLOON_TAKE_TICKS),
                features: page.at(vcpu::BALLOON_FEATURES),
                failure: balloon_failure_name(page.at(vcpu::BALLOON_FAILURE)),
            },
            attacks: (page.at(vcpu::HOSTILE_FAILURE) == 0).then(|| {
                (0..vcpu::ATTACK_KINDS).map(|kind| page.at(vcpu::ATTACKS + kind * 8)).collect()
            }),
        }
    }
}

fn balloon_failure_name(number: u64) -> Option<&'static str> {
    match number {
        0 => None,
        balloon_failure::DEVICE => Some("there is no balloon"),
        balloon_failure::LEGACY => Some("the balloon is not one of virtio 1"),
        balloon_failure::FEATURES => Some("the balloon lacks a feature"),
        balloon_failure::QUEUE => Some("the balloon lacks a queue"),
        balloon_failure::VCPUS => Some("balloon workloads are for one vCPU"),
        _ => Some("unknown failure"),
    }
}

fn gaps(page: &Words, khz: u64) -> Vec<Gap> {
    let noted = page.at(vcpu::GAPS_NOTED);
    (noted.saturating_sub(vcpu::MAX_GAPS)..noted)
        .map(|index| vcpu::GAPS + index % vcpu::MAX_GAPS * vcpu::GAP_BYTES)
        .map(|slot| Gap { start_tsc: page.at(slot), ns: tsc::nanoseconds(page.at(slot + 8), khz) })
        .collect()
}

fn error_records(page: &Words) -> Vec<ErrorRecord> {
    (0..page.at(vcpu::ERRORS).min(vcpu::MAX_ERRORS))
        .map(|index| vcpu::ERROR_RECORDS + index * vcpu::ERROR_BYTES)
        .map(|record| ErrorRecord {
            page: page.at(record + error::PAGE),
            gpa: page.at(record + error::GPA),
            counter: page.at(record + error::COUNTER),
            found_counter: page.at(record + error::FOUND_COUNTER),
            word: page.at(record + error::WORD),
            expected: page.at(record + error::EXPECTED),
            found: page.at(record + error::FOUND),
            tsc: page.at(record + error::TSC),
        })
        .collect()
}

fn name(names: &[&'static str], number: u64) -> &'static str {
    usize::try_from(number).ok().and_then(|index| names.get(index)).copied().unwrap_or("unknown")
}

fn failure_name(number: u64) -> Option<&'static str> {
    match number {
        0 => None,
        failure::START_INFO => Some("no start-of-day structure with a memory map"),
        failure::MEMORY => Some("too little memory"),
        failure::VCPU => Some("a vCPU did not come up"),
        failure::PANIC => Some("the guest program panicked"),
        _ => Some("unknown failure"),
    }
}
