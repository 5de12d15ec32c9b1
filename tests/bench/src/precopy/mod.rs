// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench precopy`: what a live migration costs, beside a raw copy over the same loopback, beside
//! ourselves with the dirty log cleared once per round, and beside QEMU.
//!
//! Owns the workloads, the candidates and their order: in each run every candidate migrates each
//! guest once, so that a machine that gets slower meanwhile does so for all. What is measured of a
//! migration is [`measure`]'s. Must never let a candidate count its own bytes or time.

mod judge;
mod measure;
mod ours;
mod qemu;
mod raw;
mod watch;

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::loopback::Loopback;
use crate::machine;
use crate::report::Report;
use measure::{Pair, Sample};

/// Guest RAM.
pub const MEMORY_MIB: u64 = 1024;
/// vCPUs of the guest.
pub const VCPUS: u32 = 2;

/// What the guest does meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// As in the figures.
    pub name: &'static str,
    /// The guest's command line.
    pub cmdline: &'static str,
    /// Set once its memory is filled, before anything is measured.
    pub then: &'static str,
    /// Whether work is page visits; otherwise readings of the clock.
    pub visits: bool,
}

/// The three guests. 42,553 ns between two writes of each of two vCPUs are 47,000 a second in all.
pub const WORKLOADS: [Workload; 3] = [
    Workload {
        name: "idle",
        cmdline: "workload=fill",
        then: "workload=idle reset=1",
        visits: false,
    },
    Workload {
        name: "random-writing",
        cmdline: "workload=random-write mem=700M pace_ns=42553",
        then: "reset=1",
        visits: true,
    },
    Workload {
        name: "hot-set-writing",
        cmdline: "workload=hot-write hot_permille=250 hot_percent=95",
        then: "reset=1",
        visits: true,
    },
];

/// Who migrates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Candidate {
    /// The bytes alone, with nothing else running.
    RawAlone,
    /// The bytes alone, while the guest runs.
    RawBeside,
    /// This program, so many connections.
    Ours(u16),
    /// This program, the dirty log cleared once per round.
    OursPerRound,
    /// QEMU, one stream.
    Qemu,
    /// QEMU, multifd with 4 channels.
    QemuMultifd,
}

impl Candidate {
    const ALL: [Self; 7] = [
        Self::RawAlone,
        Self::RawBeside,
        Self::Ours(1),
        Self::Ours(4),
        Self::OursPerRound,
        Self::Qemu,
        Self::QemuMultifd,
    ];

    /// As in the figures.
    pub fn name(self) -> String {
        match self {
            Self::RawAlone => "raw copy alone".to_owned(),
            Self::RawBeside => "raw copy beside the guest".to_owned(),
            Self::Ours(1) => "godwit".to_owned(),
            Self::Ours(count) => format!("godwit, {count} connections"),
            Self::OursPerRound => "godwit, dirty_clear=round".to_owned(),
            Self::Qemu => "qemu".to_owned(),
            Self::QemuMultifd => "qemu, multifd 4".to_owned(),
        }
    }
}

/// What is measured with.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    /// `cloud-hypervisor`.
    pub vmm: &'a Path,
    /// `ch-remote`.
    pub remote: &'a Path,
    /// The test guest's image.
    pub guest: &'a Path,
    /// Allowed downtime, the same for all.
    pub downtime_ms: u64,
}

/// One measured migration, or raw copy.
pub struct Taken {
    /// Who.
    pub candidate: Candidate,
    /// Index in [`WORKLOADS`].
    pub workload: usize,
    /// What came of it.
    pub sample: Sample,
}

/// Measures.
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
    // The host may have to find this memory for the first time, which must not count.
    raw::copy((3 * MEMORY_MIB) << 20)?;
    let mut taken = Vec::new();
    for run in 0..runs {
        for (index, workload) in WORKLOADS.iter().enumerate() {
            for turn in 0..candidates.len() {
                // Each run begins with another candidate, so that nobody always follows the same.
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

/// Everybody who can take part; why the others cannot goes to `notes`, and to standard error.
fn available(setup: &Setup, notes: &mut Vec<String>) -> Vec<Candidate> {
    let mut skip = |what: &str, why: &str| {
        eprintln!("SKIPPED {what}: {why}");
        notes.push(format!("SKIPPED {what}: {why}"));
    };
    let per_round = Command::new(setup.remote)
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
            Candidate::Qemu | Candidate::QemuMultifd => qemu.is_none(),
            _ => true,
        })
        .collect()
}

fn sample(
    setup: &Setup,
    candidate: Candidate,
    workload: Workload,
) -> Result<Sample, Box<dyn Error>> {
    let ours = |option: &str| ours::Ours::start(setup, workload.cmdline, option);
    let mut pair: Box<dyn Pair> = match candidate {
        Candidate::RawAlone | Candidate::RawBeside => {
            let pair = ours("")?;
            let prepared = measure::prepare(pair.source_pid(), workload)?;
            let _running = (candidate == Candidate::RawBeside).then_some(pair);
            return Ok(Sample::raw(raw::copy(prepared.populated_bytes)?));
        }
        Candidate::Ours(connections) => Box::new(ours(&format!(",connections={connections}"))?),
        Candidate::OursPerRound => Box::new(ours(",dirty_clear=round")?),
        Candidate::Qemu => Box::new(qemu::Qemu::start(setup, workload.cmdline, None)?),
        Candidate::QemuMultifd => Box::new(qemu::Qemu::start(setup, workload.cmdline, Some(4))?),
    };
    measure::migration(pair.as_mut(), workload)
}

/// Milliseconds.
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
