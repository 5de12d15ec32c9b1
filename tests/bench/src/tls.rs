// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench tls`: cost of TLS for a migration, compared with the same migration without it.
//!
//! Owns the certificates and the order: each run measures every variant with TLS and without. Must never
//! compare across runs.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use tempfile::TempDir;
use vm_migration::testing::TestCa;

use crate::loopback::Loopback;
use crate::machine;
use crate::pair::ours::Ours;
use crate::pair::{IDLE, MEMORY_MIB, Pair as _, Programs, RANDOM_WRITING, float, ms, prepare};
use crate::postcopy::guest::{self, CUT_US};
use crate::raw;
use crate::report::{Figure, Report};

/// Migration variants: name, options of the source.
const PRECOPY: [(&str, &str); 2] =
    [("precopy, 1 connection", ""), ("precopy, 4 connections", ",connections=4")];

/// At full rate, and at a rate that leaves the link free for requested pages.
const POSTCOPY: [(&str, &str); 2] =
    [("postcopy, full rate", ""), ("postcopy, 1 Gbit/s", ",bandwidth=125000000")];

const RATE: &str = "memory per second";
const MEDIAN: &str = "access that waited, median";
const P99: &str = "access that waited, p99";
const TOTAL: &str = "until the last page";

/// A value: variant, TLS or not, figure, unit.
type Value = (&'static str, bool, &'static str, &'static str, f64);

fn name(way: &str, with_tls: bool, what: &str) -> String {
    format!("{way}, {}: {what}", if with_tls { "TLS" } else { "plain" })
}

/// Runs the benchmark.
pub fn run(programs: &Programs, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut notes = Vec::new();
    if Loopback::enter() == Loopback::Shared {
        notes.push("no network namespace of our own (needs root)".to_owned());
    }
    let folder = TempDir::with_prefix("godwit-bench-")?;
    TestCa::new().write_all(folder.path(), &["127.0.0.1"]);
    let mut values: Vec<Value> = Vec::new();
    for run in 0..runs {
        // The order alternates, so that a machine that slows down affects both alike.
        for with_tls in [run % 2 == 1, run % 2 == 0] {
            let dir = with_tls.then(|| folder.path());
            let told = if with_tls { "TLS" } else { "plain" };
            for (way, options) in PRECOPY {
                eprintln!("run {} of {runs}: {way}, {told}", run + 1);
                let rate = precopy(programs, options, dir)?;
                values.push((way, with_tls, RATE, "MiB/s", rate));
            }
            for (way, options) in POSTCOPY {
                eprintln!("run {} of {runs}: {way}, {told}", run + 1);
                values.extend(postcopy(programs, (way, options), dir)?);
            }
        }
    }
    notes.extend(ratios(&values));
    let figures = figures(&values);
    Ok(Report { name: "tls", machine: machine::name(), figures, targets: Vec::new(), notes })
}

fn tls(dir: Option<&Path>) -> String {
    dir.map(|dir| format!(",tls_dir={}", dir.display())).unwrap_or_default()
}

/// Migrates an idle guest; MiB of its memory per second, from the request to the end.
fn precopy(programs: &Programs, options: &str, dir: Option<&Path>) -> Result<f64, Box<dyn Error>> {
    let tls = tls(dir);
    let mut pair = Ours::start(programs, IDLE.cmdline, &tls, &format!("{options}{tls}"))?;
    let populated = prepare(pair.source_pid(), IDLE)?.populated_bytes;
    raw::warm((2 * MEMORY_MIB) << 20)?;
    let start = Instant::now();
    pair.migrate()?;
    Ok(float(populated >> 20) / (ms(start.elapsed()) / 1e3))
}

/// Migrates a writing guest, and reads how long its accesses took.
fn postcopy(
    programs: &Programs,
    (way, options): (&'static str, &str),
    dir: Option<&Path>,
) -> Result<[Value; 3], Box<dyn Error>> {
    const MODE: &str = ",memory_mode=postcopy";
    let tls = tls(dir);
    let (receive, send) = (format!("{MODE}{tls}"), format!("{MODE}{options}{tls}"));
    let mut pair = Ours::start(programs, RANDOM_WRITING.cmdline, &receive, &send)?;
    let moved = guest::migration(&mut pair, RANDOM_WRITING)?;
    let quantile = |share| float(moved.accesses.quantile_above_ns(CUT_US, share)) / 1e3;
    let with_tls = dir.is_some();
    Ok([
        (way, with_tls, MEDIAN, "us", quantile(0.5)),
        (way, with_tls, P99, "us", quantile(0.99)),
        (way, with_tls, TOTAL, "ms", moved.total_ms),
    ])
}

/// One figure for each measured quantity, in the order of the first measurement.
fn figures(values: &[Value]) -> Vec<Figure> {
    let mut all: Vec<(String, &'static str, Vec<f64>)> = Vec::new();
    for (way, with_tls, what, unit, value) in values {
        let name = name(way, *with_tls, what);
        match all.iter_mut().find(|(known, ..)| *known == name) {
            Some((_, _, list)) => list.push(*value),
            None => all.push((name, *unit, vec![*value])),
        }
    }
    all.into_iter().filter_map(|(name, unit, list)| Figure::of(name, unit, list)).collect()
}

/// Ratios of TLS to plain, of the medians.
fn ratios(values: &[Value]) -> Vec<String> {
    let figures = figures(values);
    let value = |name: &str| figures.iter().find(|figure| figure.name == name).map(|f| f.value);
    let mut ratios = Vec::new();
    for (way, with_tls, what, ..) in values {
        let text = || {
            let (plain, secured) = (name(way, false, what), name(way, true, what));
            Some(format!("{way}: {what}, TLS by plain: {:.2}", value(&secured)? / value(&plain)?))
        };
        ratios.extend(text().filter(|text| !with_tls && !ratios.contains(text)));
    }
    ratios
}

#[cfg(test)]
mod tests {
    use super::{Value, ratios};

    #[test]
    fn what_is_compared_is_of_one_kind() {
        let value = |with_tls, value| -> Value { ("a", with_tls, "rate", "MiB/s", value) };
        let values = [value(false, 4.0), value(true, 3.0), value(false, 4.0), value(true, 3.0)];
        assert_eq!(ratios(&values), ["a: rate, TLS by plain: 0.75"]);
        assert!(ratios(&values[..1]).is_empty());
    }
}
