// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench postcopy-latency`: how long an access takes that waits for its page, by the guest's TSC.
//!
//! Owns the candidates, their order and the targets. In each run the floor and every candidate have
//! one turn, so that a machine that slows down affects all. Must never leave out accesses that waited
//! for other reasons.

use std::error::Error;

use guest_reader::rtt::{self, RoundTrips};

use super::guest::{self, CUT_US, Moved};
use super::stream::Stream;
use super::{floor, us};
use crate::loopback::Loopback;
use crate::machine;
use crate::pair::ours::Ours;
use crate::pair::qemu::{self, Qemu, Way};
use crate::pair::{Pair, Programs, RANDOM_WRITING, float};
use crate::pool::{Pool, UNLIMITED};
use crate::report::{Figure, Report, Target};

/// Number of round trips, and of faults of the floor, in each run.
const COUNT: usize = 5000;
/// 1 Gbit/s, in bytes per second.
const GIGABIT: u64 = 125_000_000;
/// Ratio up to which a build may be slower than the other in one run.
const BASELINE_RATIO_MAX: f64 = 1.1;
/// No limit.
const FULL: u64 = 0;

/// The VMM that migrates, and its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Candidate {
    /// This program, with the limit of the background, and whether requests have their own
    /// connections.
    Ours { bytes_per_s: u64, preempt: bool },
    /// The same into memory of a pool.
    Ready { bytes_per_s: u64 },
    /// Another build of this program, with the same options.
    Baseline { bytes_per_s: u64, preempt: bool },
    /// QEMU, with the same options.
    Qemu { bytes_per_s: u64, preempt: bool },
}

use Candidate::{Baseline, Ours as Godwit, Qemu as Other, Ready};

const CANDIDATES: [Candidate; 11] = [
    Godwit { bytes_per_s: FULL, preempt: true },
    Ready { bytes_per_s: FULL },
    Godwit { bytes_per_s: 10 * GIGABIT, preempt: true },
    Godwit { bytes_per_s: GIGABIT, preempt: true },
    Godwit { bytes_per_s: FULL, preempt: false },
    Godwit { bytes_per_s: GIGABIT, preempt: false },
    Baseline { bytes_per_s: FULL, preempt: true },
    Baseline { bytes_per_s: GIGABIT, preempt: true },
    Other { bytes_per_s: FULL, preempt: false },
    Other { bytes_per_s: FULL, preempt: true },
    Other { bytes_per_s: GIGABIT, preempt: true },
];

impl Candidate {
    fn name(self) -> String {
        let (who, bytes_per_s, how) = match self {
            Godwit { bytes_per_s, preempt: true } => ("godwit", bytes_per_s, ""),
            Godwit { bytes_per_s, preempt: false } => ("godwit", bytes_per_s, ", preempt=0"),
            Ready { bytes_per_s } => ("godwit, ready memory", bytes_per_s, ""),
            Baseline { bytes_per_s, preempt: true } => ("baseline", bytes_per_s, ""),
            Baseline { bytes_per_s, preempt: false } => ("baseline", bytes_per_s, ", preempt=0"),
            Other { bytes_per_s, preempt: true } => ("qemu", bytes_per_s, ", postcopy-preempt"),
            Other { bytes_per_s, preempt: false } => ("qemu", bytes_per_s, ", postcopy"),
        };
        format!("{who}{how}, {}", rate(bytes_per_s))
    }

    fn measure(
        self,
        programs: &Programs,
        baseline: Option<&Programs>,
    ) -> Result<Moved, Box<dyn Error>> {
        let cmdline = RANDOM_WRITING.cmdline;
        let start_in = |programs: &Programs, bytes_per_s: u64, preempt: bool, receive: &str| {
            let off = if preempt { "" } else { ",preempt=0" };
            let send = format!(",memory_mode=postcopy,bandwidth={bytes_per_s}{off}");
            Ours::start(programs, cmdline, &format!(",memory_mode=postcopy{receive}"), &send)
        };
        let start = |programs: &Programs, bytes_per_s: u64, preempt: bool| {
            start_in(programs, bytes_per_s, preempt, "")
        };
        let mut pair: Box<dyn Pair> = match self {
            Godwit { bytes_per_s, preempt } => Box::new(start(programs, bytes_per_s, preempt)?),
            Ready { bytes_per_s } => {
                let pool = Pool::start(programs.vmm, &[programs.memory_mib], UNLIMITED)?;
                let mut pair = start_in(programs, bytes_per_s, true, &pool.option())?;
                let moved = guest::migration(&mut pair, RANDOM_WRITING)?;
                if pool.slots("lent") != Some(1) {
                    return Err("the destination did not take memory of the pool".into());
                }
                return Ok(moved);
            }
            Baseline { bytes_per_s, preempt } => {
                let baseline = baseline.ok_or("there is no other build")?;
                Box::new(start(baseline, bytes_per_s, preempt)?)
            }
            Other { bytes_per_s, preempt } => {
                Box::new(Qemu::start(programs, cmdline, Way::Postcopy { preempt, bytes_per_s })?)
            }
        };
        guest::migration(pair.as_mut(), RANDOM_WRITING)
    }
}

fn rate(bytes_per_s: u64) -> String {
    match bytes_per_s {
        FULL => "full rate".to_owned(),
        _ => format!("{} Gbit/s", bytes_per_s / GIGABIT),
    }
}

/// Measurements of a socket without a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plain {
    /// A round trip, while a bulk stream of this many bytes per second, or none, is running.
    RoundTrip(Option<u64>),
    /// A fault, likewise.
    Floor(Option<u64>),
}

const PLAIN: [Plain; 6] = [
    Plain::RoundTrip(None),
    Plain::RoundTrip(Some(GIGABIT)),
    Plain::RoundTrip(Some(FULL)),
    FLOOR,
    Plain::Floor(Some(GIGABIT)),
    Plain::Floor(Some(FULL)),
];
const FLOOR: Plain = Plain::Floor(None);

impl Plain {
    fn name(self) -> String {
        let (Self::RoundTrip(beside) | Self::Floor(beside)) = self;
        let what = if matches!(self, Self::Floor(_)) { "floor" } else { "raw round trip" };
        match beside {
            None => format!("{what}, idle"),
            Some(bytes_per_s) => format!("{what}, alongside a stream at {}", rate(bytes_per_s)),
        }
    }

    fn measure(self) -> Result<RoundTrips, Box<dyn Error>> {
        let (Self::RoundTrip(beside) | Self::Floor(beside)) = self;
        let _stream = beside.map(Stream::start).transpose()?;
        Ok(match self {
            Self::RoundTrip(_) => rtt::measure(COUNT)?,
            Self::Floor(_) => floor::faults(COUNT)?,
        })
    }
}

const COUNTED: &str = "accesses that waited";
const MEDIAN: &str = "median";
const P99: &str = "p99";
const STALLED: &str = "guest stalled in all";
const GAP: &str = "longest gap of a vCPU";
const TOTAL: &str = "until the last page";

/// A value: candidate, figure, unit.
type Value = (String, &'static str, &'static str, f64);

/// Runs the benchmark.
pub fn run(
    programs: &Programs,
    baseline: Option<&Programs>,
    runs: usize,
) -> Result<Report, Box<dyn Error>> {
    let mut notes = vec![format!(
        "an access of the guest counts as one that waited when it took {CUT_US} us or more; above \
         4 ms its time is known to the next power of two"
    )];
    if Loopback::enter() == Loopback::Shared {
        notes.push("no network namespace of our own (needs root)".to_owned());
    }
    let missing = qemu::missing();
    if let Some(why) = &missing {
        eprintln!("SKIPPED qemu: {why}");
        notes.push(format!("SKIPPED qemu: {why}"));
    }
    let mut values: Vec<Value> = Vec::new();
    for run in 0..runs {
        for plain in PLAIN {
            eprintln!("run {} of {runs}: {}", run + 1, plain.name());
            let found = plain.measure().map_err(|error| format!("{}: {error}", plain.name()))?;
            values.push((plain.name(), MEDIAN, "us", us(found.p50_ns)));
            values.push((plain.name(), P99, "us", us(found.p99_ns)));
        }
        for turn in 0..CANDIDATES.len() {
            let Some(candidate) = CANDIDATES.get((turn + run) % CANDIDATES.len()).copied() else {
                continue;
            };
            let takes_part = match candidate {
                Godwit { .. } | Ready { .. } => true,
                Baseline { .. } => baseline.is_some(),
                Other { .. } => missing.is_none(),
            };
            if !takes_part {
                continue;
            }
            let name = candidate.name();
            eprintln!("run {} of {runs}: {name}", run + 1);
            let moved = candidate
                .measure(programs, baseline)
                .map_err(|error| format!("{name}: {error}"))?;
            values.extend(values_of(&name, &moved));
        }
    }
    let figures = figures(values);
    let targets = targets(&figures);
    Ok(Report { name: "postcopy-latency", machine: machine::name(), figures, targets, notes })
}

fn values_of(name: &str, moved: &Moved) -> [Value; 6] {
    let quantile = |share| us(moved.accesses.quantile_above_ns(CUT_US, share));
    [
        (COUNTED, "", float(moved.accesses.count_above(CUT_US))),
        (MEDIAN, "us", quantile(0.5)),
        (P99, "us", quantile(0.99)),
        (STALLED, "ms", moved.stalled_ms),
        (GAP, "ms", moved.gap_ms),
        (TOTAL, "ms", moved.total_ms),
    ]
    .map(|(what, unit, value)| (name.to_owned(), what, unit, value))
}

/// One figure for each measured quantity, in the order of the first measurement.
fn figures(values: Vec<Value>) -> Vec<Figure> {
    let mut all: Vec<(String, &'static str, Vec<f64>)> = Vec::new();
    for (who, what, unit, value) in values {
        let name = format!("{who}: {what}");
        match all.iter_mut().find(|(known, ..)| *known == name) {
            Some((_, _, list)) => list.push(value),
            None => all.push((name, unit, vec![value])),
        }
    }
    all.into_iter().filter_map(|(name, unit, list)| Figure::of(name, unit, list)).collect()
}

fn targets(figures: &[Figure]) -> Vec<Target> {
    let value = |who: &str, what: &str| {
        let name = format!("{who}: {what}");
        figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
    };
    let ratio = |what: &str, ours: Candidate, theirs: &str| {
        Some(value(&ours.name(), what)? / value(theirs, what)?)
    };
    let ours = |bytes_per_s, preempt| Godwit { bytes_per_s, preempt };
    let qemu = |preempt| Other { bytes_per_s: FULL, preempt }.name();
    let mut targets = Vec::new();
    let limited = [FULL, 10 * GIGABIT, GIGABIT].map(|bytes_per_s| ours(bytes_per_s, true));
    for us in limited.into_iter().chain([Ready { bytes_per_s: FULL }]) {
        for (what, limit) in [(MEDIAN, 1.5), (P99, 3.0)] {
            let name = format!("{}: {what} by that of the idle floor", us.name());
            let found = ratio(what, us, &FLOOR.name());
            targets.extend(found.map(|value| Target::at_most(&name, value, limit)));
        }
    }
    for bytes_per_s in [FULL, GIGABIT] {
        let (us, other) = (ours(bytes_per_s, true), Baseline { bytes_per_s, preempt: true });
        for what in [MEDIAN, TOTAL] {
            let name = format!("{}: {what} by the baseline's", us.name());
            let found = ratio(what, us, &other.name());
            targets.extend(found.map(|value| Target::at_most(&name, value, BASELINE_RATIO_MAX)));
        }
    }
    let full = ours(FULL, true);
    let stalled = ratio(STALLED, full, &qemu(true));
    let name = format!("{}: {STALLED} by that of {}", full.name(), qemu(true));
    targets.extend(stalled.map(|value| Target::at_most(&name, value, 0.25)));
    for preempt in [false, true] {
        let total = ratio(TOTAL, full, &qemu(preempt));
        let name = format!("{}: {TOTAL} by that of {}", full.name(), qemu(preempt));
        targets.extend(total.map(|value| Target::at_most(&name, value, 1.0)));
    }
    let (without, with) = (ours(GIGABIT, false), ours(GIGABIT, true));
    let name = format!("{}: {P99} by that of {}", without.name(), with.name());
    let worse = ratio(P99, without, &with.name());
    targets.extend(worse.map(|value| Target::at_least(&name, value, 10.0)));
    targets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_one_thing_become_one_figure() {
        let value = |value| (FLOOR.name(), MEDIAN, "us", value);
        let found = figures(vec![value(3.0), value(1.0), value(2.0)]);
        let medians: Vec<(f64, usize)> =
            found.iter().map(|figure| (figure.value, figure.runs)).collect();
        assert_eq!(medians, [(2.0, 3)]);
    }

    #[test]
    fn targets_are_missed_by_those_who_are_slower_and_left_out_without_a_rival() {
        let full = Godwit { bytes_per_s: FULL, preempt: true };
        let found = figures(vec![
            (FLOOR.name(), MEDIAN, "us", 50.0),
            (FLOOR.name(), P99, "us", 100.0),
            (full.name(), MEDIAN, "us", 76.0),
            (full.name(), P99, "us", 300.0),
            (full.name(), TOTAL, "ms", 900.0),
        ]);
        let met: Vec<bool> = targets(&found).iter().map(|target| target.met).collect();
        assert_eq!(met, [false, true]);
    }
}
