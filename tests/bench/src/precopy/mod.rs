// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench precopy`: cost of a live migration, compared with a raw copy over the same loopback, with the dirty
//! log cleared once per round, with another build of this program if one is given, and with QEMU.
//!
//! Owns the workloads, the candidates and their order: in each run every candidate migrates each guest once,
//! so that a machine that slows down affects all. [`measure`] measures a migration. Must never let a
//! candidate count its own bytes or time.

mod judge;
pub mod measure;
pub mod watch;

use std::error::Error;
use std::process::Command;

use crate::loopback::Loopback;
use crate::pair::ours::Ours;
use crate::pair::qemu::{self, Qemu, Way};
use crate::pair::{IDLE, LARGE_WRITING, Pair, Programs, RANDOM_WRITING, Workload, prepare};
use crate::pool::{Pool, UNLIMITED};
use crate::report::Report;
use crate::{machine, raw};
use measure::Sample;

/// The workloads; the last one is that of the large guest, which is measured alone.
pub const WORKLOADS: [Workload; 4] = [
    IDLE,
    RANDOM_WRITING,
    Workload {
        name: "hot-set-writing",
        cmdline: "workload=hot-write hot_permille=250 hot_percent=95",
        then: "reset=1",
        visits: true,
    },
    LARGE_WRITING,
];
/// The index of the last one.
pub const LARGE: usize = WORKLOADS.len() - 1;

/// The VMM that migrates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Candidate {
    /// A raw copy, with nothing else running.
    RawAlone,
    /// A raw copy while the guest runs.
    RawAlongside,
    /// The same, into memory that the host has to allocate, as a migration's destination has to.
    RawNew,
    /// This program, with this many connections.
    Ours(u16),
    /// The same into memory of a pool.
    OursReady(u16),
    /// This program, with the dirty log cleared once per round.
    OursPerRound,
    /// This program, with memory handed over instead of copied, to compare with the copy.
    OursLocal,
    /// Another build of this program, with this many connections.
    Baseline(u16),
    /// QEMU, one stream.
    Qemu,
    /// QEMU, multifd with 4 channels.
    QemuMultifd,
}

impl Candidate {
    const ALL: [Self; 13] = [
        Self::RawAlone,
        Self::RawAlongside,
        Self::RawNew,
        Self::Ours(1),
        Self::Ours(4),
        Self::OursReady(1),
        Self::OursReady(4),
        Self::OursPerRound,
        Self::OursLocal,
        Self::Baseline(1),
        Self::Baseline(4),
        Self::Qemu,
        Self::QemuMultifd,
    ];

    /// True for those that a large guest is measured with: into memory that is there, and what they are compared with.
    fn is_for_large(self) -> bool {
        matches!(self, Self::RawAlongside | Self::OursReady(_) | Self::QemuMultifd)
    }

    /// Name in the figures.
    pub fn name(self) -> String {
        match self {
            Self::RawAlone => "raw copy alone".to_owned(),
            Self::RawAlongside => "raw copy alongside the guest".to_owned(),
            Self::RawNew => "raw copy into new memory alongside the guest".to_owned(),
            Self::Ours(1) => "godwit".to_owned(),
            Self::Ours(count) => format!("godwit, {count} connections"),
            Self::OursReady(1) => "godwit, ready memory".to_owned(),
            Self::OursReady(count) => format!("godwit, ready memory, {count} connections"),
            Self::OursPerRound => "godwit, dirty_clear=round".to_owned(),
            Self::OursLocal => "godwit, local=on".to_owned(),
            Self::Baseline(1) => "baseline".to_owned(),
            Self::Baseline(count) => format!("baseline, {count} connections"),
            Self::Qemu => "qemu".to_owned(),
            Self::QemuMultifd => "qemu, multifd 4".to_owned(),
        }
    }
}

/// The configuration of the benchmark.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    /// The programs.
    pub programs: Programs<'a>,
    /// Another build of the programs for comparison.
    pub baseline: Option<Programs<'a>>,
    /// Allowed downtime, the same for all.
    pub downtime_ms: u64,
    /// The guest is the large one.
    pub large: bool,
}

/// A measured migration, or raw copy.
pub struct Taken {
    /// The candidate.
    pub candidate: Candidate,
    /// Index in [`WORKLOADS`].
    pub workload: usize,
    /// The result.
    pub sample: Sample,
}

/// Runs the benchmark.
pub fn run(setup: &Setup, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut notes = Vec::new();
    if Loopback::enter() == Loopback::Shared {
        notes.push(
            "no network namespace of our own (needs root): bytes sent include what others send \
             over this machine's loopback"
                .to_owned(),
        );
    }
    let candidates = available(setup, &mut notes);
    let mut taken = Vec::new();
    for run in 0..runs {
        let mine = |entry: &(usize, &Workload)| (entry.0 == LARGE) == setup.large;
        for (index, workload) in WORKLOADS.iter().enumerate().filter(mine) {
            for turn in 0..candidates.len() {
                // Each run begins with another candidate, so that no candidate always follows the same one.
                let Some(candidate) = candidates.get((turn + run) % candidates.len()).copied()
                else {
                    continue;
                };
                let name = candidate.name();
                eprintln!("run {} of {runs}: {}: {name}", run + 1, workload.name);
                let sample = sample(setup, candidate, *workload)
                    .map_err(|error| format!("{name}, {} guest: {error}", workload.name))?;
                taken.push(Taken { candidate, workload: index, sample });
            }
        }
    }
    let (figures, targets) = judge::judge(&taken, setup.downtime_ms);
    Ok(Report { name: "precopy", machine: machine::name(), figures, targets, notes })
}

/// All candidates that can run; the reasons for the others go to `notes` and standard error.
fn available(setup: &Setup, notes: &mut Vec<String>) -> Vec<Candidate> {
    let mut skip = |what: &str, why: &str| {
        eprintln!("SKIPPED {what}: {why}");
        notes.push(format!("SKIPPED {what}: {why}"));
    };
    let per_round = Command::new(setup.programs.remote)
        .args(["send-migration", "--help"])
        .output()
        .is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("dirty_clear="));
    if !per_round {
        skip("godwit, dirty_clear=round", "send-migration of this build has no key dirty_clear");
    }
    let qemu = qemu::missing();
    if let Some(why) = &qemu {
        skip("qemu", why);
    }
    Candidate::ALL
        .into_iter()
        .filter(|candidate| match candidate {
            Candidate::OursPerRound => per_round,
            Candidate::Baseline(_) => setup.baseline.is_some(),
            Candidate::Qemu | Candidate::QemuMultifd => qemu.is_none(),
            _ => true,
        })
        .filter(|candidate| !setup.large || candidate.is_for_large())
        .collect()
}

fn sample(
    setup: &Setup,
    candidate: Candidate,
    workload: Workload,
) -> Result<Sample, Box<dyn Error>> {
    let (programs, downtime_ms) = (&setup.programs, setup.downtime_ms);
    let start = |programs: &Programs, option: &str| {
        let send = format!(",downtime_ms={downtime_ms}{option}");
        Ours::start(programs, workload.cmdline, "", &send)
    };
    let ours = |option: &str| start(programs, option);
    let local = || {
        let send = format!(",downtime_ms={downtime_ms},local=on");
        Ours::start_local(programs, workload.cmdline, "", &send)
    };
    let qemu =
        |channels| Qemu::start(programs, workload.cmdline, Way::Precopy { downtime_ms, channels });
    let mut pair: Box<dyn Pair> = match candidate {
        Candidate::RawAlone | Candidate::RawAlongside | Candidate::RawNew => {
            let pair = ours("")?;
            let prepared = prepare(pair.source_pid(), workload)?;
            let _running = (candidate != Candidate::RawAlone).then_some(pair);
            let is_new = candidate == Candidate::RawNew;
            let to = if is_new { raw::To::New } else { raw::To::Populated };
            raw::warm(2 * prepared.populated_bytes)?;
            return Ok(Sample::raw(raw::copy(prepared.populated_bytes, to)?));
        }
        Candidate::Ours(connections) => Box::new(ours(&format!(",connections={connections}"))?),
        Candidate::OursReady(connections) => {
            let pool = Pool::start(programs.vmm, &[programs.memory_mib], UNLIMITED)?;
            let send = format!(",downtime_ms={downtime_ms},connections={connections}");
            let mut pair = Ours::start(programs, workload.cmdline, &pool.option(), &send)?;
            let sample = measure::migration(&mut pair, workload)?;
            if pool.slots("lent") != Some(1) {
                return Err("the destination did not take memory of the pool".into());
            }
            return Ok(sample);
        }
        Candidate::Baseline(connections) => {
            let baseline = setup.baseline.as_ref().ok_or("there is no other build")?;
            Box::new(start(baseline, &format!(",connections={connections}"))?)
        }
        Candidate::OursPerRound => Box::new(ours(",dirty_clear=round")?),
        Candidate::OursLocal => Box::new(local()?),
        Candidate::Qemu => Box::new(qemu(None)?),
        Candidate::QemuMultifd => Box::new(qemu(Some(4))?),
    };
    measure::migration(pair.as_mut(), workload)
}
