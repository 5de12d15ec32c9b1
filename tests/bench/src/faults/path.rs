// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench fault-path`: what a page costs that a vCPU waits for, end to end between two processes, by each fault source
//! and for 1 to 160 vCPUs, beside a bare round trip and a copy on as many threads.
//!
//! Owns the candidates, their order and the targets. In each run every candidate has one turn with each number of
//! vCPUs. Must never leave out a fault source that this machine lacks without saying so.

use std::error::Error;

use super::floor::{self, Into};
use super::moved::{self, Counted};
use crate::machine;
use crate::pair::Programs;
use crate::pair::ours::Ours;
use crate::report::{Figure, Report, Target};

/// Numbers of vCPUs.
const VCPUS: [u32; 5] = [1, 4, 16, 64, 160];
/// Those of the targets: the second must not lose against the first.
const FEW: u32 = 16;
const MANY: u32 = 160;
/// Pages that the floor brings in each turn.
const FLOOR_PAGES: usize = 20_000;
/// What the processor time of a page may be by that of the floor.
const FLOOR_RATIO_MAX: f64 = 1.3;
/// What must be left of a figure with many vCPUs.
const LEFT_MIN: f64 = 0.9;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Candidate {
    Floor,
    /// The same into memory that is not populated.
    FloorNew,
    /// This program, with this fault source.
    Source(&'static str),
}

use Candidate::{Floor, FloorNew, Source};

const SIGBUS: Candidate = Source("sigbus");
const CANDIDATES: [Candidate; 5] = [Floor, FloorNew, Source("uffd"), SIGBUS, Source("exit")];

impl Candidate {
    const fn name(self) -> &'static str {
        match self {
            Floor => "floor",
            FloorNew => "floor into new memory",
            Source(name) => name,
        }
    }

    fn measure(self, programs: &Programs, vcpus: u32) -> Result<[f64; 4], Box<dyn Error>> {
        let of_floor = |into| {
            let floor = floor::measure(usize::try_from(vcpus)?, FLOOR_PAGES, into)?;
            let floor::Floor { pages_per_s, processor_us, median_us, p99_us } = floor;
            Ok([pages_per_s / 1e3, processor_us, median_us, p99_us])
        };
        match self {
            Floor => of_floor(Into::Populated),
            FloorNew => of_floor(Into::New),
            Source(name) => {
                let moved =
                    moved::measure(&Programs { vcpus, ..*programs }, name, Counted::Nothing)?;
                let moved::Moved { pages_per_s, processor_us, median_us, p99_us, .. } = moved;
                Ok([pages_per_s / 1e3, processor_us, median_us, p99_us])
            }
        }
    }
}

const RATE: &str = "pages";
const PROCESSOR: &str = "processor time of a page";
/// What is measured, in the order of the values above.
const WHAT: [(&str, &str); 4] =
    [(RATE, "thousand/s"), (PROCESSOR, "us"), ("wait, median", "us"), ("wait, p99", "us")];

/// Values of a candidate with so many vCPUs.
type Value = (Candidate, u32, [f64; 4]);

/// Runs the benchmark.
pub fn run(programs: &Programs, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut notes = vec![
        "processor time is that of both processes without their vCPUs' time in the guest, which the kernel's ticks \
         find; KVM's own part of a fault is in it, and not in the floor"
            .to_owned(),
    ];
    let mut candidates = vec![Floor, FloorNew];
    for candidate in CANDIDATES {
        let Source(name) = candidate else { continue };
        let options = format!(",memory_mode=postcopy,fault_source={name}");
        match Ours::refusal(programs, &options)? {
            None => candidates.push(candidate),
            Some(why) => {
                eprintln!("SKIPPED {name}: {why}");
                notes.push(format!("SKIPPED {name}: {why}"));
            }
        }
    }
    let mut values: Vec<Value> = Vec::new();
    for run in 0..runs {
        for vcpus in VCPUS {
            for turn in 0..candidates.len() {
                let Some(&candidate) = candidates.get((turn + run) % candidates.len()) else {
                    continue;
                };
                let name = format!("{}, {vcpus} vCPUs", candidate.name());
                eprintln!("run {} of {runs}: {name}", run + 1);
                let measured = candidate.measure(programs, vcpus);
                values.push((
                    candidate,
                    vcpus,
                    measured.map_err(|error| format!("{name}: {error}"))?,
                ));
            }
        }
    }
    let mut figures = Vec::new();
    for candidate in candidates {
        for vcpus in VCPUS {
            for (index, (what, unit)) in WHAT.into_iter().enumerate() {
                let of = |value: &&Value| (value.0, value.1) == (candidate, vcpus);
                let list = values.iter().filter(of).filter_map(|value| value.2.get(index).copied());
                figures.extend(Figure::of(name(candidate, vcpus, what), unit, list.collect()));
            }
        }
    }
    let targets = targets(&figures);
    Ok(Report { name: "fault-path", machine: machine::name(), figures, targets, notes })
}

fn name(candidate: Candidate, vcpus: u32, what: &str) -> String {
    let many = if matches!(candidate, Source(_)) { "vCPUs" } else { "threads" };
    format!("{}, {vcpus} {many}: {what}", candidate.name())
}

/// Of the medians.
fn targets(figures: &[Figure]) -> Vec<Target> {
    let value = |candidate, vcpus, what| {
        let name = name(candidate, vcpus, what);
        figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
    };
    let ratio = |top: Option<f64>, bottom: Option<f64>| Some(top? / bottom?);
    let mut targets = Vec::new();
    let by_floor = ratio(value(SIGBUS, FEW, PROCESSOR), value(Floor, FEW, PROCESSOR));
    let what = format!("sigbus, {FEW} vCPUs: {PROCESSOR} by that of the floor");
    targets.extend(by_floor.map(|ratio| Target::at_most(&what, ratio, FLOOR_RATIO_MAX)));
    for candidate in CANDIDATES.into_iter().filter(|one| matches!(one, Source(_))) {
        let rate = ratio(value(candidate, MANY, RATE), value(candidate, FEW, RATE));
        let used = ratio(value(candidate, FEW, PROCESSOR), value(candidate, MANY, PROCESSOR));
        for (what, ratio) in [("pages a second", rate), ("pages a second of processor time", used)]
        {
            let what = format!("{}: {what} of {MANY} vCPUs by those of {FEW}", candidate.name());
            targets.extend(ratio.map(|ratio| Target::at_least(&what, ratio, LEFT_MIN)));
        }
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_compare_medians_of_one_run_and_leave_out_what_was_not_measured() {
        let figure = |candidate, vcpus, what, value| {
            Figure::of(name(candidate, vcpus, what), "us", vec![value]).expect("a value")
        };
        let figures = [
            figure(Floor, FEW, PROCESSOR, 10.0),
            figure(SIGBUS, FEW, PROCESSOR, 12.0),
            figure(SIGBUS, MANY, PROCESSOR, 15.0),
            figure(SIGBUS, FEW, RATE, 100.0),
            figure(SIGBUS, MANY, RATE, 95.0),
        ];
        let targets = targets(&figures);
        let met: Vec<(f64, bool)> = targets.iter().map(|one| (one.value, one.met)).collect();
        assert_eq!(met, [(1.2, true), (0.95, true), (0.8, false)]);
    }
}
