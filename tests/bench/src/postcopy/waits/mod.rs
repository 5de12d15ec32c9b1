// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench postcopy-waits`: where an access that waits for its page spends its time, step by step, and how much of that
//! is a wait for a processor.
//!
//! | file | owns |
//! | --- | --- |
//! | `record` | what the kernel records, of which threads and for how long |
//! | `events` | the lines of a record |
//! | `threads` | when a thread ran, slept, or had no processor |
//! | `calls` | system calls, and which received what another has sent |
//! | `chain` | the steps of each wait |
//! | `table` | the figures as a table |
//!
//! Owns the candidates and their order. Recording costs time on each step: totals are those of `postcopy-latency`.
//! `GODWIT_BENCH_TRACE=FILE` keeps the last record, to see what was not followed.

mod calls;
mod chain;
mod events;
mod record;
mod table;
mod threads;

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};

use guest_reader::Guest;

use self::chain::{Followed, Step, Way};
use super::guest::CUT_US;
use super::us;
use crate::loopback::Loopback;
use crate::machine;
use crate::pair::ours::Ours;
use crate::pair::{
    MEMORY_MIB, PATIENCE, Pair as _, Programs, RANDOM_WRITING, VCPUS, Workload, float, prepare,
};
use crate::raw;
use crate::report::{Figure, Report, Target};
use crate::trace::Instance;

pub use table::table;

/// What else the processors do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Load {
    name: &'static str,
    workload: Workload,
    vcpus: u32,
    /// The background; 0 for no limit.
    bytes_per_s: u64,
}

/// One vCPU, which works only between two waits, and a background that is hardly there and brings the last pages.
const IDLE: Load = Load {
    name: "idle processors",
    workload: Workload {
        name: "random-writing",
        cmdline: "workload=random-write mem=64M pace_ns=42553",
        then: "reset=1",
        visits: true,
    },
    vcpus: 1,
    bytes_per_s: 8 << 20,
};
const BUSY: Load =
    Load { name: "busy processors", workload: RANDOM_WRITING, vcpus: VCPUS, bytes_per_s: 0 };

const SOURCES: [(&str, Way); 3] =
    [("uffd", Way::Threads), ("sigbus", Way::Own), ("exit", Way::Own)];

/// A fault source and what else goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Candidate {
    source: &'static str,
    way: Way,
    load: Load,
}

impl Candidate {
    fn name(&self) -> String {
        format!("{}, {}", self.source, self.load.name)
    }
}

/// The row of all steps together.
const WHOLE: &str = "all";
const MEDIAN: &str = "median";
const P99: &str = "p99";
const MEAN: &str = "mean";
/// Of the mean: threads of both VMMs had the processor.
const OWN: &str = "mean behind threads of both VMMs";
/// Of the mean: others had it.
const OTHERS: &str = "mean behind other threads";
/// Of the mean: the processor had nothing to do, and was woken.
const ON_IDLE: &str = "mean until an idle processor woke";
/// Of the mean: work, and sleep for other reasons.
const REST: &str = "mean of the rest";
/// What has no processor, by any of the three.
const WITHOUT_P99: &str = "p99 without a processor";
/// What is known of a step.
const COLUMNS: [&str; 8] = [MEDIAN, P99, MEAN, OWN, OTHERS, ON_IDLE, WITHOUT_P99, REST];

/// Names a file for the last record.
const KEEP: &str = "GODWIT_BENCH_TRACE";

const FOLLOWED: &str = "waits followed";
const OTHERWISE: &str = "waits that ended otherwise";
const UNCLEAR: &str = "waits left out";
const GUEST_MEDIAN: &str = "by the guest's clock, median";
const GUEST_P99: &str = "by the guest's clock, p99";
/// Share of the waits that may be left out.
const UNCLEAR_MAX: f64 = 0.1;

/// A value: candidate, row and column or what else was measured, unit.
type Value = (String, String, &'static str, f64);

/// Runs the benchmark.
pub fn run(programs: &Programs, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut notes = vec![
        "recording costs time on each step: what an access takes without is measured by postcopy-latency".to_owned(),
        "times have a resolution of 1 us; the guest's clock has its way through KVM, and all accesses of 40 us or more"
            .to_owned(),
    ];
    if Loopback::enter() == Loopback::Shared {
        notes.push("no network namespace of our own (needs root)".to_owned());
    }
    drop(
        record::prepare()
            .map_err(|error| format!("the kernel's tracing cannot be used: {error}"))?,
    );
    let mut candidates = Vec::new();
    for (source, way) in SOURCES {
        let options = format!(",memory_mode=postcopy,fault_source={source}");
        match Ours::refusal(programs, &options)? {
            None => candidates.extend([IDLE, BUSY].map(|load| Candidate { source, way, load })),
            Some(why) => {
                eprintln!("SKIPPED {source}: {why}");
                notes.push(format!("SKIPPED {source}: {why}"));
            }
        }
    }
    let mut values: Vec<Value> = Vec::new();
    for run in 0..runs {
        for turn in 0..candidates.len() {
            let Some(&candidate) = candidates.get((turn + run) % candidates.len()) else {
                continue;
            };
            let name = candidate.name();
            eprintln!("run {} of {runs}: {name}", run + 1);
            let found = measure(programs, candidate).map_err(|error| format!("{name}: {error}"))?;
            values.extend(found);
        }
    }
    let figures = figures(&candidates, &values);
    let targets = targets(&figures, &candidates);
    Ok(Report { name: "postcopy-waits", machine: machine::name(), figures, targets, notes })
}

fn measure(programs: &Programs, candidate: Candidate) -> Result<Vec<Value>, Box<dyn Error>> {
    let Candidate { source, way, load } = candidate;
    let receive = format!(",memory_mode=postcopy,fault_source={source}");
    let send = format!(",memory_mode=postcopy,bandwidth={}", load.bytes_per_s);
    let programs = Programs { vcpus: load.vcpus, ..*programs };
    let mut pair = Ours::start(&programs, load.workload.cmdline, &receive, &send)?;
    let before = prepare(pair.source_pid(), load.workload)?.guest.histogram()?;
    raw::warm((2 * MEMORY_MIB) << 20)?;
    let instance: Instance = record::prepare()?;
    let pids = [pair.source_pid(), pair.destination_pid()];
    let (vcpus, over) = (usize::try_from(load.vcpus)?, AtomicBool::new(false));
    let (text, roles) = std::thread::scope(|scope| {
        let recording = scope.spawn(|| record::record(&instance, pids, vcpus, &over));
        let migrated = pair.migrate().map_err(|error| error.to_string());
        over.store(true, Ordering::Release);
        let recorded = recording.join().map_err(|_| "recording failed".to_owned())?;
        migrated.and(recorded)
    })?;
    drop(instance);
    let guest = Guest::attach_within(pair.destination_pid(), PATIENCE)?;
    let after = guest.status()?;
    if !after.complete() || after.errors() > 0 {
        return Err(format!("the guest arrived with errors: {after:?}").into());
    }
    let accesses = guest.histogram()?.since(&before);
    if let Some(path) = std::env::var_os(KEEP) {
        std::fs::write(path, format!("{roles:?}\n{text}"))?;
    }
    let followed = chain::follow(&events::parse(&text), &roles, way);
    let mut values = values(&candidate, &followed)?;
    for (what, share) in [(GUEST_MEDIAN, 0.5), (GUEST_P99, 0.99)] {
        let value = us(accesses.quantile_above_ns(CUT_US, share));
        values.push((candidate.name(), what.to_owned(), "us", value));
    }
    Ok(values)
}

/// What a set of waits says.
fn values(candidate: &Candidate, followed: &Followed) -> Result<Vec<Value>, Box<dyn Error>> {
    if followed.waits.is_empty() {
        return Err(format!("no wait could be followed: {followed:?}").into());
    }
    let name = candidate.name();
    let mut values = Vec::new();
    let whole = |steps: &Vec<Step>| steps.iter().copied().fold(Step::default(), Step::and);
    let rows = candidate.way.steps().iter().enumerate().map(|(number, row)| {
        let of = move |steps: &Vec<Step>| steps.get(number).copied().unwrap_or_default();
        (table::numbered(number, row), followed.waits.iter().map(of).collect::<Vec<Step>>())
    });
    let all = (WHOLE.to_owned(), followed.waits.iter().map(whole).collect());
    for (row, steps) in rows.chain([all]) {
        let columns = COLUMNS.into_iter().zip(columns(&steps));
        values.extend(
            columns.map(|(column, value)| (name.clone(), table::cell(&row, column), "us", value)),
        );
    }
    let counts = [
        (FOLLOWED, followed.waits.len()),
        (OTHERWISE, followed.otherwise),
        (UNCLEAR, followed.unclear),
    ];
    values.extend(
        counts.map(|(what, count)| (name.clone(), what.to_owned(), "", float(count as u64))),
    );
    Ok(values)
}

/// The columns of one step of many waits.
fn columns(steps: &[Step]) -> [f64; COLUMNS.len()] {
    let sorted = |of: fn(&Step) -> u64| {
        let mut all: Vec<u64> = steps.iter().map(of).collect();
        all.sort_unstable();
        all
    };
    let at = |all: &[u64], percent: usize| {
        let index = (all.len() * percent / 100).min(all.len().saturating_sub(1));
        float(all.get(index).copied().unwrap_or(0))
    };
    let mean = |all: &[u64]| float(all.iter().sum()) / float(all.len().max(1) as u64);
    let took = sorted(|step| step.us);
    let own = sorted(|step| step.without.own_us);
    let others = sorted(|step| step.without.others_us);
    let idle = sorted(|step| step.without.idle_us);
    let without = sorted(|step| step.without.all_us());
    let means = [mean(&took), mean(&own), mean(&others), mean(&idle)];
    let [took_mean, own, others, idle] = means;
    let rest = (took_mean - own - others - idle).max(0.0);
    [at(&took, 50), at(&took, 99), took_mean, own, others, idle, at(&without, 99), rest]
}

/// One figure for each measured quantity.
fn figures(candidates: &[Candidate], values: &[Value]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for candidate in candidates {
        let name = candidate.name();
        let mut known: Vec<&str> = Vec::new();
        for (who, what, unit, _) in values.iter().filter(|value| value.0 == name) {
            if known.contains(&what.as_str()) {
                continue;
            }
            known.push(what);
            let mine = values.iter().filter(|value| (&value.0, &value.1) == (who, what));
            let list = mine.map(|value| value.3).collect();
            figures.extend(Figure::of(format!("{who}: {what}"), unit, list));
        }
    }
    figures
}

fn targets(figures: &[Figure], candidates: &[Candidate]) -> Vec<Target> {
    let target = |candidate: &Candidate| {
        let value = |what| table::value(figures, &candidate.name(), what);
        let all = value(FOLLOWED)? + value(OTHERWISE)? + value(UNCLEAR)?;
        let what = format!("{}: share of {UNCLEAR}", candidate.name());
        Some(Target::at_most(&what, value(UNCLEAR)? / all, UNCLEAR_MAX))
    };
    candidates.iter().filter_map(target).collect()
}

#[cfg(test)]
mod tests {
    use super::threads::Without;
    use super::*;

    fn step(us: u64, own_us: u64, others_us: u64, idle_us: u64) -> Step {
        Step { us, without: Without { own_us, others_us, idle_us } }
    }

    #[test]
    fn columns_are_of_all_waits() {
        let mut steps = vec![step(10, 0, 2, 4); 99];
        steps.push(step(110, 100, 2, 4));
        let [median, p99, mean, own, others, idle, without_p99, rest] = columns(&steps);
        assert_eq!([median, p99, mean].map(Some), [10.0, 110.0, 11.0].map(Some));
        let without = [own, others, idle, without_p99, rest];
        assert_eq!(without.map(Some), [1.0, 2.0, 4.0, 106.0, 4.0].map(Some));
    }

    #[test]
    fn a_row_is_of_its_step_and_the_last_of_all() {
        let candidate = Candidate { source: "sigbus", way: Way::Own, load: IDLE };
        let wait: Vec<Step> = (1..=8).map(|us| step(us, 0, 0, us)).collect();
        let followed = Followed { waits: vec![wait], otherwise: 2, unclear: 1 };
        let values = values(&candidate, &followed).expect("there is a wait");
        let figures = figures(&[candidate], &values);
        let value = |what: &str| table::value(&figures, &candidate.name(), what);
        assert_eq!(value(&table::cell("3 source's thread wakes", MEAN)), Some(3.0));
        assert_eq!(value(&table::cell(WHOLE, MEDIAN)), Some(36.0));
        assert_eq!(value(&table::cell(WHOLE, ON_IDLE)), Some(36.0));
        let targets = targets(&figures, &[candidate]);
        let found: Vec<(f64, bool)> = targets.iter().map(|one| (one.value, one.met)).collect();
        assert_eq!(found, [(0.25, false)]);
    }

    #[test]
    fn without_a_wait_nothing_is_said() {
        let candidate = Candidate { source: "uffd", way: Way::Threads, load: BUSY };
        assert!(values(&candidate, &Followed::default()).is_err());
    }
}
