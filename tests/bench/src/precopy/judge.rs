// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Evaluates the samples: medians per candidate and workload, and the targets.
//!
//! Owns the arithmetic only. A target that compares with a candidate that did not run is left out;
//! the notes of the report give the reason. Must never measure.

use super::measure::{Moved, Sample};
use super::{Candidate, LARGE, Taken, WORKLOADS};
use crate::report::{Figure, Target};

const TOTAL: &str = "total";
const GAP: &str = "downtime, longest gap of a vCPU";
const SILENCE: &str = "downtime, seen from outside";
const LOST: &str = "guest work lost";
const SENT: &str = "bytes sent by guest RAM";

/// A figure of a sample: name, unit, value.
type Column = (&'static str, &'static str, fn(&Sample) -> Option<f64>);

const COLUMNS: [Column; 5] = [
    (TOTAL, "ms", |sample| Some(sample.total_ms)),
    (GAP, "ms", |sample| Some(sample.moved?.gap_ms)),
    (SILENCE, "ms", |sample| Some(sample.moved?.silence_ms)),
    (LOST, "ms", |sample| Some(sample.moved?.lost_ms)),
    (SENT, "", |sample| Some(sample.moved?.sent_ratio)),
];

/// Ratio up to which a build may be slower than the other: medians of a few runs on a shared machine
/// differ by that much.
const BASELINE_RATIO_MAX: f64 = 1.1;

const IDLE: usize = 0;
const RANDOM: usize = 1;
const HOT: usize = 2;
/// The candidates to which the targets apply.
const OURS: [Candidate; 2] = [Candidate::Ours(1), Candidate::Ours(4)];
/// The same into memory of a pool.
const READY: [Candidate; 2] = [Candidate::OursReady(1), Candidate::OursReady(4)];

/// Computes figures and targets.
pub fn judge(taken: &[Taken], downtime_ms: u64) -> (Vec<Figure>, Vec<Target>) {
    let mut figures = Vec::new();
    for (index, workload) in WORKLOADS.iter().enumerate() {
        for candidate in Candidate::ALL {
            for (what, unit, _) in COLUMNS {
                let values = values(taken, candidate, index, what);
                let name = format!("{}: {}: {what}", workload.name, candidate.name());
                figures.extend(Figure::of(name, unit, values));
            }
        }
    }
    (figures, targets(taken, downtime_ms))
}

fn values(taken: &[Taken], candidate: Candidate, workload: usize, what: &str) -> Vec<f64> {
    let Some((_, _, read)) = COLUMNS.into_iter().find(|column| column.0 == what) else {
        return Vec::new();
    };
    taken
        .iter()
        .filter(|entry| entry.candidate == candidate && entry.workload == workload)
        .filter_map(|entry| read(&entry.sample))
        .collect()
}

fn targets(taken: &[Taken], downtime_ms: u64) -> Vec<Target> {
    let median = |candidate, workload, what| {
        let figure = Figure::of(String::new(), "", values(taken, candidate, workload, what))?;
        Some(figure.value)
    };
    let ratio = |what, workload, ours, theirs| {
        Some(median(ours, workload, what)? / median(theirs, workload, what)?)
    };
    let mut targets = Vec::new();
    for ours in OURS {
        let who = ours.name();
        for raw in [Candidate::RawAlongside, Candidate::RawNew] {
            let rate = ratio(TOTAL, IDLE, raw, ours);
            let name = format!("idle: {who}: rate by that of a {}", raw.name());
            targets.extend(rate.map(|value| Target::at_least(&name, value, 0.8)));
        }
    }
    for ready in READY {
        let who = ready.name();
        let rate = ratio(TOTAL, IDLE, Candidate::RawAlongside, ready);
        let name = format!("idle: {who}: rate by that of a {}", Candidate::RawAlongside.name());
        targets.extend(rate.map(|value| Target::at_least(&name, value, 0.8)));
        let name = format!("random-writing: {who}: guest work lost (ms)");
        let lost = median(ready, RANDOM, LOST);
        targets.extend(lost.map(|value| Target::at_most(&name, value, 150.0)));
        for workload in [RANDOM, LARGE] {
            let total = ratio(TOTAL, workload, ready, Candidate::QemuMultifd);
            let name = format!("{}: {who}: total by QEMU multifd's", WORKLOADS[workload].name);
            targets.extend(total.map(|value| Target::at_most(&name, value, 0.5)));
        }
    }
    let sent = ratio(SENT, HOT, Candidate::Ours(1), Candidate::OursPerRound);
    let name = "hot-set-writing: godwit: bytes by those with dirty_clear=round";
    targets.extend(sent.map(|value| Target::at_most(name, value, 0.75)));
    targets.extend(within(taken, downtime_ms));
    for (workload, connections) in [(IDLE, 1), (IDLE, 4), (RANDOM, 1), (RANDOM, 4)] {
        let (ours, theirs) = (Candidate::Ours(connections), Candidate::Baseline(connections));
        let name =
            format!("{}: {}: total by the baseline's", WORKLOADS[workload].name, ours.name());
        let total = ratio(TOTAL, workload, ours, theirs);
        targets.extend(total.map(|value| Target::at_most(&name, value, BASELINE_RATIO_MAX)));
    }
    for ours in OURS {
        let who = ours.name();
        let total = ratio(TOTAL, RANDOM, ours, Candidate::QemuMultifd);
        let name = format!("random-writing: {who}: total by QEMU multifd's");
        targets.extend(total.map(|value| Target::at_most(&name, value, 1.0)));
        let down = ratio(GAP, RANDOM, ours, Candidate::Qemu);
        let name = format!("random-writing: {who}: downtime by QEMU single stream's");
        targets.extend(down.map(|value| Target::at_most(&name, value, 0.5)));
        let name = format!("random-writing: {who}: guest work lost (ms)");
        let lost = median(ours, RANDOM, LOST);
        targets.extend(lost.map(|value| Target::at_most(&name, value, 300.0)));
    }
    targets
}

/// Share of this program's migrations whose downtime was within the limit.
fn within(taken: &[Taken], downtime_ms: u64) -> Option<Target> {
    let moved: Vec<Moved> = taken
        .iter()
        .filter(|entry| OURS.contains(&entry.candidate))
        .filter_map(|entry| entry.sample.moved)
        .collect();
    #[expect(clippy::cast_precision_loss, reason = "a number of migrations, and milliseconds")]
    let (all, limit_ms) = (moved.len() as f64, downtime_ms as f64);
    let good = moved.iter().filter(|one| one.gap_ms.max(one.silence_ms) <= limit_ms).count();
    #[expect(clippy::cast_precision_loss, reason = "a number of migrations")]
    let share = good as f64 / all;
    let name = format!("all guests: share of migrations with at most {downtime_ms} ms of downtime");
    (all > 0.0).then(|| Target::at_least(&name, share, 0.95))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(candidate: Candidate, workload: usize, total_ms: f64, gap_ms: f64) -> Taken {
        let moved = Moved { gap_ms, silence_ms: gap_ms, lost_ms: 10.0, sent_ratio: 1.0 };
        Taken { candidate, workload, sample: Sample { total_ms, moved: Some(moved) } }
    }

    #[test]
    fn targets_compare_with_those_who_took_part() {
        let mut taken = vec![
            entry(Candidate::Ours(1), RANDOM, 900.0, 20.0),
            entry(Candidate::Ours(1), RANDOM, 1000.0, 400.0),
            entry(Candidate::Ours(1), RANDOM, 1100.0, 20.0),
        ];
        let (figures, targets) = judge(&taken, 300);
        assert!(figures.iter().any(|figure| figure.name.contains(TOTAL) && figure.value > 999.0));
        let share = targets.iter().find(|target| target.name.contains("share")).map(|t| t.met);
        assert_eq!(share, Some(false), "two of three are not 19 of 20");
        assert!(!targets.iter().any(|target| target.name.contains("QEMU")));
        assert!(!targets.iter().any(|target| target.name.contains("baseline")));

        taken.push(entry(Candidate::Baseline(1), RANDOM, 900.0, 20.0));
        let (_, targets) = judge(&taken, 300);
        let total = targets.iter().find(|target| target.name.contains("baseline"));
        assert_eq!(total.map(|target| target.met), Some(false), "{total:?}");

        taken.push(entry(Candidate::QemuMultifd, RANDOM, 999.0, 20.0));
        let (_, targets) = judge(&taken, 300);
        let total = targets.iter().find(|target| target.name.contains("multifd"));
        assert_eq!(total.map(|target| target.met), Some(false), "{total:?}");
    }

    #[test]
    fn a_large_guest_takes_half_the_time_of_multifd() {
        let taken = [
            entry(Candidate::OursReady(1), LARGE, 501.0, 20.0),
            entry(Candidate::OursReady(4), LARGE, 499.0, 20.0),
            entry(Candidate::QemuMultifd, LARGE, 1000.0, 20.0),
        ];
        let (_, targets) = judge(&taken, 300);
        let found: Vec<(bool, bool)> = targets
            .iter()
            .map(|target| (target.name.starts_with("large, random-writing"), target.met))
            .collect();
        assert_eq!(found, [(true, false), (true, true)]);
    }
}
