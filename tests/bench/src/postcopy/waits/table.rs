// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The figures of `postcopy-waits` as tables: a row for each step.
//!
//! Owns their names and the form. Must never measure.

use std::fmt::Write as _;

use super::{
    COLUMNS, FOLLOWED, GUEST_MEDIAN, GUEST_P99, MEAN, MEDIAN, ON_IDLE, OTHERS, OTHERWISE, OWN, P99,
    REST, UNCLEAR, WHOLE, WITHOUT_P99,
};
use crate::report::{Figure, Report};

/// Between a row and its column.
const BETWEEN: &str = " | ";

/// The name of a row, so that rows of one name in one table differ.
pub fn numbered(number: usize, step: &str) -> String {
    format!("{} {step}", number + 1)
}

/// What stands in the name of a figure behind its candidate.
pub fn cell(row: &str, column: &str) -> String {
    format!("{row}{BETWEEN}{column}")
}

/// The value of a figure.
pub fn value(figures: &[Figure], candidate: &str, what: &str) -> Option<f64> {
    let is_it = |figure: &&Figure| {
        figure.name.strip_prefix(candidate).and_then(|rest| rest.strip_prefix(": ")) == Some(what)
    };
    figures.iter().find(is_it).map(|figure| figure.value)
}

/// The report as text.
pub fn table(report: &Report) -> String {
    let figures = &report.figures;
    let mut out = format!("bench {} on {}\n", report.name, report.machine);
    let suffix = format!(": {}", cell(WHOLE, MEDIAN));
    let candidates = figures.iter().filter_map(|figure| figure.name.strip_suffix(&suffix));
    for candidate in candidates {
        let of = |what: &str| value(figures, candidate, what).unwrap_or(0.0);
        let _ = writeln!(
            out,
            "\n{candidate}: {:.0} waits followed, {:.0} ended otherwise, {:.0} left out; by the guest's clock a median \
             of {:.1} us and a p99 of {:.1}",
            of(FOLLOWED),
            of(OTHERWISE),
            of(UNCLEAR),
            of(GUEST_MEDIAN),
            of(GUEST_P99),
        );
        let _ = writeln!(out, "  {:<36} {:>27} | without a processor, mean and p99", "us", "");
        let _ = writeln!(
            out,
            "  {:<36} {MEDIAN:>8} {P99:>9} {MEAN:>8} | {:>8} {:>8} {:>10} {P99:>8} | {:>8}",
            "step", "own", "others", "idle woke", "rest"
        );
        for row in rows(figures, candidate) {
            let at = |column: &str| of(&cell(&row, column));
            let _ = writeln!(
                out,
                "  {row:<36} {:>8.0} {:>9.0} {:>8.1} | {:>8.1} {:>8.1} {:>10.1} {:>8.0} | {:>8.1}",
                at(MEDIAN),
                at(P99),
                at(MEAN),
                at(OWN),
                at(OTHERS),
                at(ON_IDLE),
                at(WITHOUT_P99),
                at(REST),
            );
        }
    }
    out.push('\n');
    for line in report.text().lines().filter(|line| is_verdict(line)) {
        let _ = writeln!(out, "{line}");
    }
    out
}

/// True for a line of a target or a note.
fn is_verdict(line: &str) -> bool {
    ["  met  ", "  NOT MET", "  note: "].iter().any(|begin| line.starts_with(begin))
}

/// The rows of a candidate in their order.
fn rows(figures: &[Figure], candidate: &str) -> Vec<String> {
    let last = format!("{BETWEEN}{}", COLUMNS[0]);
    let row = |figure: &Figure| {
        let rest = figure.name.strip_prefix(candidate)?.strip_prefix(": ")?;
        rest.strip_suffix(&last).map(str::to_owned)
    };
    figures.iter().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Target;

    #[test]
    fn a_table_has_a_row_for_each_step_and_what_is_left_of_the_mean() {
        let figure = |what: &str, value| {
            Figure::of(format!("uffd, busy: {what}"), "us", vec![value]).expect("a value")
        };
        let mut figures = Vec::new();
        for (row, scale) in [("1 a", 1.0), (WHOLE, 10.0)] {
            for (column, value) in
                COLUMNS.into_iter().zip([5.0, 90.0, 8.0, 4.5, 0.5, 1.0, 70.0, 2.0])
            {
                figures.push(figure(&cell(row, column), scale * value));
            }
        }
        figures.push(figure(FOLLOWED, 300.0));
        figures.push(figure(GUEST_MEDIAN, 60.0));
        let (name, machine) = ("postcopy-waits", "m".to_owned());
        let targets = vec![Target::at_most("share", 0.5, 0.1)];
        let text = table(&Report { name, machine, figures, targets, notes: vec!["n".to_owned()] });
        let words = |begin: &str| -> Vec<String> {
            let line = text.lines().find(|line| line.trim_start().starts_with(begin));
            line.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
        };
        assert_eq!(words("1 a").join(" "), "1 a 5 90 8.0 | 4.5 0.5 1.0 70 | 2.0");
        assert_eq!(words("all").join(" "), "all 50 900 80.0 | 45.0 5.0 10.0 700 | 20.0");
        assert!(text.contains("uffd, busy: 300 waits followed") && text.contains("median of 60.0"));
        assert!(text.contains("NOT MET share: 0.50") && text.contains("note: n"));
    }
}
