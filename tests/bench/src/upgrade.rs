// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench upgrade`: how long a guest stands still while another process takes the place of its VMM, compared with the
//! migration by `local=on` that it consists of, between two VMMs that are there already.
//!
//! Owns the order: each run measures both, in turns. The guest's memory is one file all the time, so it is watched from
//! outside without regard to the process. Must never compare across runs.

use std::error::Error;
use std::time::{Duration, Instant};

use guest_reader::Guest;

use crate::machine;
use crate::pair::ours::{InPlace, Ours};
use crate::pair::{
    IDLE, PATIENCE, Pair as _, Programs, RANDOM_WRITING, Workload, float, ms, prepare,
};
use crate::precopy::watch::Watch;
use crate::report::{Figure, Report, Target};

/// Longest time that the guest may stand still.
const DOWNTIME_MS: f64 = 50.0;

/// Time after the end in which a gap still counts.
const AFTER: Duration = Duration::from_millis(500);

const WORKLOADS: [Workload; 2] = [IDLE, RANDOM_WRITING];

/// Both ways, in the order of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Upgrade,
    Local,
}

impl Way {
    const ALL: [Self; 2] = [Self::Upgrade, Self::Local];

    const fn name(self) -> &'static str {
        match self {
            Self::Upgrade => "ch-remote upgrade",
            Self::Local => "local=on alone",
        }
    }
}

const GAP: &str = "downtime, longest gap of a vCPU";
const SILENCE: &str = "downtime, seen from outside";
const TOTAL: &str = "total";

/// One measured value.
struct Value {
    workload: &'static str,
    way: Way,
    what: &'static str,
    ms: f64,
}

/// Runs the benchmark.
pub fn run(programs: &Programs, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut values = Vec::new();
    for run in 0..runs {
        let mut ways = Way::ALL;
        // The order alternates, so that a machine that slows down affects both alike.
        if run % 2 == 1 {
            ways.reverse();
        }
        for workload in WORKLOADS {
            for way in ways {
                eprintln!("run {} of {runs}: {}, {}", run + 1, workload.name, way.name());
                values.extend(measure(programs, workload, way)?);
            }
        }
    }
    let figures = figures(&values);
    let targets = targets(&figures);
    Ok(Report { name: "upgrade", machine: machine::name(), figures, targets, notes: Vec::new() })
}

/// Takes the time of one.
fn measure(
    programs: &Programs,
    workload: Workload,
    way: Way,
) -> Result<[Value; 3], Box<dyn Error>> {
    let [gap_ms, silence_ms, total_ms] = match way {
        Way::Upgrade => {
            let mut vmm = InPlace::start(programs, workload.cmdline)?;
            let pids = (vmm.pid(), vmm.pid());
            times(pids, workload, || vmm.upgrade())?
        }
        Way::Local => {
            let mut pair = Ours::start_local(programs, workload.cmdline, "", ",local=on")?;
            let pids = (pair.source_pid(), pair.destination_pid());
            times(pids, workload, || pair.migrate())?
        }
    };
    let value = |what, ms| Value { workload: workload.name, way, what, ms };
    Ok([value(GAP, gap_ms), value(SILENCE, silence_ms), value(TOTAL, total_ms)])
}

/// Has the guest of a process move, perhaps to another that is there already; gap, silence and total in ms.
fn times(
    (source_pid, destination_pid): (u32, u32),
    workload: Workload,
    act: impl FnOnce() -> Result<(), Box<dyn Error>>,
) -> Result<[f64; 3], Box<dyn Error>> {
    let guest = prepare(source_pid, workload)?.guest;
    // The same memory, also when the process has ended.
    let memory = Guest::attach_within(source_pid, PATIENCE)?;
    let before = workload.work(&memory.status()?);
    let watch = Watch::start(guest, destination_pid);
    let start = Instant::now();
    act()?;
    let total = start.elapsed();
    std::thread::sleep(AFTER);
    let silence = watch.longest_silence();
    let status = memory.status()?;
    if !status.complete() || status.errors() > 0 || workload.work(&status) <= before {
        return Err(format!("the guest does not run on: {status:?}").into());
    }
    Ok([float(status.gap_max_ns()) / 1e6, ms(silence), ms(total)])
}

fn name(workload: &str, way: Way, what: &str) -> String {
    format!("{workload}: {}: {what}", way.name())
}

fn figures(values: &[Value]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for workload in WORKLOADS {
        for way in Way::ALL {
            for what in [GAP, SILENCE, TOTAL] {
                let is_of = |value: &&Value| {
                    (value.workload, value.way, value.what) == (workload.name, way, what)
                };
                let list = values.iter().filter(is_of).map(|value| value.ms).collect();
                figures.extend(Figure::of(name(workload.name, way, what), "ms", list));
            }
        }
    }
    figures
}

/// The median downtime of each workload, by both clocks.
fn targets(figures: &[Figure]) -> Vec<Target> {
    let mut targets = Vec::new();
    for workload in WORKLOADS {
        for what in [GAP, SILENCE] {
            let name = name(workload.name, Way::Upgrade, what);
            let figure = figures.iter().find(|figure| figure.name == name);
            targets.extend(figure.map(|it| Target::at_most(&name, it.value, DOWNTIME_MS)));
        }
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_is_for_the_median_of_an_upgrade() {
        let value = |way, ms| Value { workload: IDLE.name, way, what: GAP, ms };
        let with = |middle| {
            let values = [1.0, middle, 90.0].map(|ms| value(Way::Upgrade, ms));
            let mut values = Vec::from(values);
            values.push(value(Way::Local, 70.0));
            targets(&figures(&values)).iter().map(|target| target.met).collect::<Vec<_>>()
        };
        assert_eq!(with(50.0), [true]);
        assert_eq!(with(50.1), [false]);
    }
}
