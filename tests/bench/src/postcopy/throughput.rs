// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench postcopy-throughput`: the time until the last page, compared with a raw copy of the same bytes
//! over the same loopback, and the speed of the guest meanwhile.
//!
//! Owns the candidates, their order and the targets. Must never compare a migration whose guest keeps the
//! processors busy only with a raw copy on an idle machine: both are measured.

use std::error::Error;

use super::guest;
use crate::loopback::Loopback;
use crate::pair::ours::Ours;
use crate::pair::qemu::{self, Qemu, Way};
use crate::pair::{IDLE, LARGE_WRITING, Pair, Programs, RANDOM_WRITING, Workload, ms, prepare};
use crate::pool::{Pool, UNLIMITED};
use crate::report::{Figure, Report, Target};
use crate::{machine, raw};

/// The last one is that of the large guest, which is measured alone.
const WORKLOADS: [Workload; 3] = [IDLE, RANDOM_WRITING, LARGE_WRITING];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Candidate {
    RawAlone,
    RawAlongside,
    RawNew,
    Ours(u16),
    /// Into memory of a pool.
    OursReady(u16),
    Qemu {
        preempt: bool,
    },
}

const CANDIDATES: [Candidate; 9] = [
    Candidate::RawAlone,
    Candidate::RawAlongside,
    Candidate::RawNew,
    Candidate::Ours(1),
    Candidate::Ours(4),
    Candidate::OursReady(1),
    Candidate::OursReady(4),
    Candidate::Qemu { preempt: false },
    Candidate::Qemu { preempt: true },
];

impl Candidate {
    /// True for those that a large guest is measured with: into memory that is there, and what they are compared with.
    fn is_for_large(self) -> bool {
        matches!(self, Self::RawAlongside | Self::OursReady(_) | Self::Qemu { preempt: true })
    }

    fn name(self) -> String {
        match self {
            Self::RawAlone => "raw copy alone".to_owned(),
            Self::RawAlongside => "raw copy alongside the guest".to_owned(),
            Self::RawNew => "raw copy into new memory alongside the guest".to_owned(),
            Self::Ours(1) => "godwit".to_owned(),
            Self::Ours(count) => format!("godwit, {count} connections"),
            Self::OursReady(1) => "godwit, ready memory".to_owned(),
            Self::OursReady(count) => format!("godwit, ready memory, {count} connections"),
            Self::Qemu { preempt: false } => "qemu, postcopy".to_owned(),
            Self::Qemu { preempt: true } => "qemu, postcopy-preempt".to_owned(),
        }
    }

    /// Milliseconds until the last byte, and the guest's speed meanwhile, if there is a guest.
    fn measure(
        self,
        programs: &Programs,
        workload: Workload,
    ) -> Result<(f64, Option<f64>), Box<dyn Error>> {
        let ours_in = |connections: u16, receive: &str| {
            let send = format!(",memory_mode=postcopy,connections={connections}");
            let receive = format!(",memory_mode=postcopy{receive}");
            Ours::start(programs, workload.cmdline, &receive, &send)
        };
        let ours = |connections: u16| ours_in(connections, "");
        let mut pair: Box<dyn Pair> = match self {
            Self::RawAlone | Self::RawAlongside | Self::RawNew => {
                let pair = ours(1)?;
                let prepared = prepare(pair.source_pid(), workload)?;
                let _running = (self != Self::RawAlone).then_some(pair);
                let to = if self == Self::RawNew { raw::To::New } else { raw::To::Populated };
                raw::warm(2 * prepared.populated_bytes)?;
                return Ok((ms(raw::copy(prepared.populated_bytes, to)?), None));
            }
            Self::Ours(connections) => Box::new(ours(connections)?),
            Self::OursReady(connections) => {
                let pool = Pool::start(programs.vmm, &[programs.memory_mib], UNLIMITED)?;
                let mut pair = ours_in(connections, &pool.option())?;
                let moved = guest::migration(&mut pair, workload)?;
                if pool.slots("lent") != Some(1) {
                    return Err("the destination did not take memory of the pool".into());
                }
                return Ok((moved.total_ms, Some(moved.speed)));
            }
            Self::Qemu { preempt } => {
                let way = Way::Postcopy { preempt, bytes_per_s: 0 };
                Box::new(Qemu::start(programs, workload.cmdline, way)?)
            }
        };
        let moved = guest::migration(pair.as_mut(), workload)?;
        Ok((moved.total_ms, Some(moved.speed)))
    }
}

const TOTAL: &str = "until the last page";
const SPEED: &str = "speed of the guest by that before";

/// Runs the benchmark, with the large guest alone if it is that.
pub fn run(programs: &Programs, large: bool, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut notes = Vec::new();
    if Loopback::enter() == Loopback::Shared {
        notes.push("no network namespace of our own (needs root)".to_owned());
    }
    let missing = qemu::missing();
    if let Some(why) = &missing {
        eprintln!("SKIPPED qemu: {why}");
        notes.push(format!("SKIPPED qemu: {why}"));
    }
    let mut taken: Vec<(Workload, Candidate, f64, Option<f64>)> = Vec::new();
    for run in 0..runs {
        let mine = |workload: &Workload| (*workload == LARGE_WRITING) == large;
        for workload in WORKLOADS.into_iter().filter(mine) {
            for turn in 0..CANDIDATES.len() {
                let Some(candidate) = CANDIDATES.get((turn + run) % CANDIDATES.len()).copied()
                else {
                    continue;
                };
                let is_lacking = missing.is_some() && matches!(candidate, Candidate::Qemu { .. });
                if is_lacking || (large && !candidate.is_for_large()) {
                    continue;
                }
                let name = format!("{}: {}", workload.name, candidate.name());
                eprintln!("run {} of {runs}: {name}", run + 1);
                let found = candidate.measure(programs, workload);
                let (total, speed) = found.map_err(|error| format!("{name}: {error}"))?;
                taken.push((workload, candidate, total, speed));
            }
        }
    }
    let mut figures = Vec::new();
    for workload in WORKLOADS {
        for candidate in CANDIDATES {
            let mine = || taken.iter().filter(|entry| (entry.0, entry.1) == (workload, candidate));
            let name = |what| format!("{}: {}: {what}", workload.name, candidate.name());
            figures.extend(Figure::of(name(TOTAL), "ms", mine().map(|entry| entry.2).collect()));
            let speeds = mine().filter_map(|entry| entry.3).collect();
            figures.extend(Figure::of(name(SPEED), "", speeds));
        }
    }
    let targets = targets(&figures);
    Ok(Report { name: "postcopy-throughput", machine: machine::name(), figures, targets, notes })
}

fn targets(figures: &[Figure]) -> Vec<Target> {
    let total = |workload: Workload, candidate: Candidate| {
        let name = format!("{}: {}: {TOTAL}", workload.name, candidate.name());
        figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
    };
    let mut targets = Vec::new();
    for workload in WORKLOADS {
        let ready = total(workload, Candidate::OursReady(1));
        if let (Some(ready), Some(rival)) = (ready, total(workload, Candidate::RawAlongside)) {
            let rival_name = Candidate::RawAlongside.name();
            let name =
                format!("{}: godwit, ready memory: {TOTAL} by a {rival_name}", workload.name);
            targets.push(Target::at_most(&name, ready / rival, 1.25));
        }
        let ours = total(workload, Candidate::Ours(1));
        for raw in [Candidate::RawAlongside, Candidate::RawNew] {
            if let (Some(ours), Some(rival)) = (ours, total(workload, raw)) {
                let name = format!("{}: godwit: {TOTAL} by a {}", workload.name, raw.name());
                targets.push(Target::at_most(&name, ours / rival, 1.25));
            }
        }
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_memory_is_compared_with_a_copy_into_memory_that_is_there() {
        let figure = |candidate: Candidate, ms| {
            let name = format!("{}: {}: {TOTAL}", LARGE_WRITING.name, candidate.name());
            Figure::of(name, "ms", vec![ms]).expect("a value")
        };
        let mut figures = vec![figure(Candidate::RawAlongside, 1000.0)];
        assert!(targets(&figures).is_empty());
        figures.push(figure(Candidate::OursReady(1), 1251.0));
        let found = targets(&figures);
        assert_eq!(found.iter().map(|one| one.met).collect::<Vec<_>>(), [false]);
        assert!(found[0].name.starts_with("large, random-writing: godwit, ready memory"));
    }
}
