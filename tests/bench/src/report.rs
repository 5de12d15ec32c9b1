// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results of a benchmark: figures, and targets that are met or not; as text and as JSON.
//!
//! Owns the format of both. Must never depend on what was measured.

use std::fmt::Write as _;

use serde::Serialize;

/// One measured figure.
#[derive(Debug, Serialize)]
pub struct Figure {
    /// Description of the figure.
    pub name: String,
    /// Median.
    pub value: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// Unit.
    pub unit: &'static str,
    /// Number of runs.
    pub runs: usize,
}

impl Figure {
    /// The median of `values`; `None` without values.
    pub fn of(name: String, unit: &'static str, mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let value = median(&values)?;
        let (min, max) = (*values.first()?, *values.last()?);
        Some(Self { name, value, min, max, unit, runs: values.len() })
    }
}

/// The middle of sorted values.
fn median(sorted: &[f64]) -> Option<f64> {
    let high = *sorted.get(sorted.len() / 2)?;
    let low = *sorted.get(sorted.len().saturating_sub(1) / 2)?;
    Some(f64::midpoint(low, high))
}

/// The target for a value.
#[derive(Debug, Serialize)]
pub struct Target {
    /// Description of the value.
    pub name: String,
    /// The measured value.
    pub value: f64,
    /// The limit.
    pub limit: f64,
    /// `lower` or `higher`.
    pub better: &'static str,
    /// True if the value is within the limit.
    pub met: bool,
}

impl Target {
    /// A value that must not be above its limit.
    pub fn at_most(name: &str, value: f64, limit: f64) -> Self {
        Self { name: name.to_owned(), value, limit, better: "lower", met: value <= limit }
    }

    /// A value that must not be below its limit.
    pub fn at_least(name: &str, value: f64, limit: f64) -> Self {
        Self { name: name.to_owned(), value, limit, better: "higher", met: value >= limit }
    }
}

/// The results of a benchmark.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Name of the benchmark.
    pub name: &'static str,
    /// Description of the machine.
    pub machine: String,
    /// The measured figures.
    pub figures: Vec<Figure>,
    /// The targets.
    pub targets: Vec<Target>,
    /// What could not be measured, and why.
    pub notes: Vec<String>,
}

impl Report {
    /// True if every target is met.
    pub fn all_met(&self) -> bool {
        self.targets.iter().all(|target| target.met)
    }

    /// The report as one JSON object.
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The report as text.
    pub fn text(&self) -> String {
        let mut out = format!("bench {} on {}\n", self.name, self.machine);
        let width = self.figures.iter().map(|figure| figure.name.len()).max().unwrap_or(0);
        for figure in &self.figures {
            let Figure { name, value, min, max, unit, runs } = figure;
            let _ = writeln!(
                out,
                "  {name:<width$} {value:>9.2} {unit:<4} ({min:.2} to {max:.2}, {runs} runs)"
            );
        }
        for Target { name, value, limit, met, better } in &self.targets {
            let word = if *met { "met    " } else { "NOT MET" };
            let bound = if *better == "lower" { "at most" } else { "at least" };
            let _ = writeln!(out, "  {word} {name}: {value:.2}, {bound} {limit:.2}");
        }
        for note in &self.notes {
            let _ = writeln!(out, "  note: {note}");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_even_and_odd_counts() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[1.0, 3.0]), Some(2.0));
        assert_eq!(median(&[1.0, 2.0, 9.0]), Some(2.0));
    }

    #[test]
    fn a_missed_target_is_seen() {
        let target = |value| vec![Target::at_most("x", value, 10.0)];
        let report = |value| Report {
            name: "n",
            machine: String::new(),
            figures: Vec::new(),
            targets: target(value),
            notes: Vec::new(),
        };
        assert!(report(10.0).all_met());
        assert!(!report(10.1).all_met());
        assert!(report(10.1).text().contains("NOT MET"));
        assert!(!Target::at_least("x", 0.79, 0.8).met && Target::at_least("x", 0.8, 0.8).met);
    }
}
