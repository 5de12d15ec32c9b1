// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The report of a migration as a picture: what it came to, its phases, its course in time, its rounds,
//! and how long faults waited.
//!
//! Owns the drawing. What it draws it takes from the report and from nowhere else. What is not known is not drawn.

mod axes;

use std::fmt::Write as _;

use vmm::api::types::document::{LatencySnapshot, Mode, Phase};
use vmm::api::types::history::Sample;
use vmm::api::{MigrationReport, ProgressDocument};

use axes::{Axis, Panel, bytes_of, count_of, text, time_of};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 90.0;
/// Height of a panel, and of the gap between two, which holds ticks and a heading.
const PANEL: f64 = 160.0;
const GAP: f64 = 62.0;
const LINE: f64 = 18.0;
/// Height of the phase band.
const BAND: f64 = 22.0;
/// Width of a character.
const LETTER: f64 = 6.5;
/// Maximum number of threads in the table; the report has all.
const THREADS_SHOWN: usize = 32;
/// Maximum number of phases in the list.
const PHASES_SHOWN: usize = 24;

const BLUE: &str = "#4878a8";
const RED: &str = "#c04040";
const GREY: &str = "#777";

/// Draws the chart of a report; `vm` is the name of the VM.
pub fn svg(report: &MigrationReport, vm: &str) -> String {
    let mut body = String::new();
    text(&mut body, (LEFT, 28.0), "start", 16, &title(&report.progress, vm));
    text(&mut body, (LEFT, 50.0), "start", 12, &figures(&report.progress));
    let mut top = phases(&mut body, report, 70.0) + GAP - 20.0;
    for panel in [amounts, rates, rounds, latency] {
        if let Some(bottom) = panel(&mut body, report, top) {
            top = bottom + GAP;
        }
    }
    let height = table(&mut body, report, top - GAP / 4.0);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"#fff\"/>\n{body}</svg>\n"
    )
}

/// The title: VM, mode, time, and result.
fn title(progress: &ProgressDocument, vm: &str) -> String {
    let ProgressDocument { side, phase, mode, postcopy, began_unix_ms, .. } = progress;
    let mode = match (mode, postcopy) {
        (None, _) => "",
        (Some(Mode::Auto), true) => " (auto, at the end postcopy)",
        (Some(Mode::Auto), false) => " (auto, precopy only)",
        (Some(Mode::Local), _) => " (local)",
        (Some(Mode::Postcopy), _) => " (postcopy)",
        (Some(Mode::Precopy), _) => " (precopy)",
    };
    let mut title = format!("Migration of {vm}{mode}: {phase} at the {side}");
    if let Some(at_ms) = began_unix_ms {
        let at = std::time::UNIX_EPOCH + std::time::Duration::from_millis(*at_ms);
        let utc = vmm::events::utc(at);
        // To the second.
        let (day, time) = utc.split_once('T').unwrap_or((&utc, ""));
        let _ = write!(title, ", {day} {} UTC", time.get(..8).unwrap_or(time));
    }
    title
}

/// The key figures that are known.
fn figures(progress: &ProgressDocument) -> String {
    let mut parts = vec![format!("{} in all", time_of(number(progress.elapsed_ms) * 1e3))];
    let mut add = |name: &str, value: Option<String>| {
        parts.extend(value.map(|value| format!("{name}{value}")));
    };
    add("downtime ", progress.downtime_us.map(|us| time_of(number(us))));
    let moved = progress.moved_bytes().map(|bytes| bytes_of(number(bytes)));
    let all = progress.total_bytes.map(|bytes| format!(" for {}", bytes_of(number(bytes))));
    add("memory moved: ", moved.map(|moved| format!("{moved}{}", all.unwrap_or_default())));
    add("rounds: ", progress.round.map(|round| round.to_string()));
    let faults = progress.faults.seen.filter(|_| progress.postcopy);
    add("faults: ", faults.map(|faults| faults.to_string()));
    parts.join(", ")
}

/// End of the time axis in milliseconds.
fn end_ms(report: &MigrationReport) -> u64 {
    let last = report.timeline.last().map_or(0, |sample| sample.at_ms);
    last.max(report.progress.elapsed_ms).max(1)
}

fn time_axis(report: &MigrationReport) -> Axis {
    Axis::of_times(number(end_ms(report)))
}

/// Draws the numbered band of phases and its legend. Returns the bottom.
fn phases(out: &mut String, report: &MigrationReport, top: f64) -> f64 {
    // Waiting for a source is not part of the migration; phases without duration are only listed.
    let known: Vec<_> = report.phases.iter().filter(|one| one.phase != Phase::Listen).collect();
    let axis = time_axis(report);
    let mut entries = Vec::new();
    for (index, passage) in known.iter().enumerate() {
        let next = known.get(index + 1).map_or(end_ms(report), |next| next.at_ms);
        let (from, to) = (number(passage.at_ms), number(next.max(passage.at_ms)));
        let (left, right) = (axis.across(from), axis.across(to));
        let label = (index + 1).to_string();
        let shade = if index % 2 == 0 { "#d8e2ec" } else { "#b4c7d9" };
        let _ = writeln!(
            out,
            "<rect class=\"phase\" x=\"{left:.1}\" y=\"{top}\" width=\"{:.1}\" height=\"{BAND}\" \
             fill=\"{shade}\"/>",
            (right - left).max(0.3)
        );
        if right - left > LETTER * (count(&label) + 1.0) {
            text(out, (f64::midpoint(left, right), top + 15.0), "middle", 11, &label);
        }
        let took = time_of((to - from) * 1e3);
        entries.push(format!("{label} {} {took}", passage.phase));
    }
    let hidden = entries.len().saturating_sub(PHASES_SHOWN);
    entries.truncate(PHASES_SHOWN);
    if hidden > 0 {
        entries.push(format!("and {hidden} more"));
    }
    // Wrapped, so that the legend stays within the chart.
    let (mut line, mut y) = (String::new(), top + BAND + LINE);
    for entry in entries {
        if !line.is_empty() && (count(&line) + count(&entry) + 4.0) * LETTER > axes::inner() {
            text(out, (LEFT, y), "start", 11, &line);
            (line, y) = (String::new(), y + LINE);
        }
        if !line.is_empty() {
            line.push_str("    ");
        }
        line.push_str(&entry);
    }
    text(out, (LEFT, y), "start", 11, &line);
    y
}

/// Draws the remaining memory, if known, and the memory transferred.
fn amounts(out: &mut String, report: &MigrationReport, top: f64) -> Option<f64> {
    report.timeline.first()?;
    let samples = &report.timeline;
    let moved = samples.iter().map(|sample| sample.moved_bytes).max().unwrap_or(0);
    // A single point makes no line.
    let known = samples.iter().filter_map(|sample| sample.remaining_bytes);
    let left = known.clone().max().filter(|_| known.count() > 1);
    let most = number(moved.max(left.unwrap_or(0)));
    let heading =
        if left.is_some() { "Memory: moved (blue), to come (grey)" } else { "Memory moved" };
    let panel = Panel::new(out, top, heading, time_axis(report), Axis::of_bytes(most, ""));
    panel.left_ticks(out, GREY);
    let at = |sample: &Sample| number(sample.at_ms);
    let remaining = samples.iter().filter_map(|s| Some((at(s), number(s.remaining_bytes?))));
    panel.line(out, remaining.filter(|_| left.is_some()), GREY);
    panel.line(out, samples.iter().map(|s| (at(s), number(s.moved_bytes))), BLUE);
    Some(top + PANEL)
}

/// Draws the transfer rate, and the faults in postcopy.
fn rates(out: &mut String, report: &MigrationReport, top: f64) -> Option<f64> {
    let rates: Vec<(f64, f64, f64)> = report
        .timeline
        .windows(2)
        .filter_map(|pair| {
            let [before, after] = pair else { return None };
            let seconds = number(after.at_ms.saturating_sub(before.at_ms)) / 1e3;
            let moved = number(after.moved_bytes.saturating_sub(before.moved_bytes));
            let faults = number(after.faults.saturating_sub(before.faults));
            (seconds > 0.0).then(|| (number(after.at_ms), moved / seconds, faults / seconds))
        })
        .collect();
    rates.first()?;
    let top_of = |pick: fn(&(f64, f64, f64)) -> f64| rates.iter().map(pick).fold(0.0, f64::max);
    let (fastest, most_faults) = (top_of(|rate| rate.1), top_of(|rate| rate.2));
    let heading =
        if most_faults > 0.0 { "Rate: memory (blue), faults (red)" } else { "Rate of memory" };
    let panel = Panel::new(out, top, heading, time_axis(report), Axis::of_bytes(fastest, "/s"));
    panel.left_ticks(out, BLUE);
    panel.line(out, rates.iter().map(|rate| (rate.0, rate.1)), BLUE);
    if most_faults > 0.0 {
        let faults = panel.with(Axis::of(most_faults, |count| format!("{}/s", count_of(count))));
        faults.right_ticks(out, RED);
        faults.line(out, rates.iter().map(|rate| (rate.0, rate.2)), RED);
    }
    Some(top + PANEL)
}

/// Draws the bytes to send in each round, and the guest's write rate in the one before.
fn rounds(out: &mut String, report: &MigrationReport, top: f64) -> Option<f64> {
    let (rounds, end) = (&report.rounds, number(end_ms(report)));
    rounds.first()?;
    let most = rounds.iter().map(|round| round.remaining_bytes).max().unwrap_or(0);
    let dirty = rounds.iter().filter_map(|round| round.dirty_bytes_per_s).max();
    let heading = "Rounds: to send (blue bars), the guest writes (red)";
    let panel = Panel::new(out, top, heading, time_axis(report), Axis::of_bytes(number(most), ""));
    panel.left_ticks(out, BLUE);
    for (index, round) in rounds.iter().enumerate() {
        let next = rounds.get(index + 1).map_or(end, |next| number(next.at_ms));
        let span = (number(round.at_ms), next.min(end));
        let told = format!("round {}: {}", round.round, bytes_of(number(round.remaining_bytes)));
        panel.bar(out, span, number(round.remaining_bytes), &told);
    }
    if let Some(dirty) = dirty {
        let written = panel.with(Axis::of_bytes(number(dirty), "/s"));
        written.right_ticks(out, RED);
        let points = rounds
            .iter()
            .filter_map(|round| Some((number(round.at_ms), number(round.dirty_bytes_per_s?))));
        written.line(out, points, RED);
    }
    Some(top + PANEL)
}

/// Draws how long faults waited, on a logarithmic time axis.
fn latency(out: &mut String, report: &MigrationReport, top: f64) -> Option<f64> {
    let (first, last) = (report.latency.first()?, report.latency.last()?);
    let LatencySnapshot { count, p50, p99, max, .. } = report.progress.faults.latency_us?;
    let [median, rare, longest] = [p50, p99, max].map(|us| time_of(number(us)));
    let heading = format!(
        "Faults that waited for the peer: {count}, median {median}, p99 {rare}, longest {longest}"
    );
    let most = report.latency.iter().map(|bucket| bucket.count).max().unwrap_or(1).max(1);
    let across = Axis::of_powers(number(first.from_us), number(last.below_us));
    let panel = Panel::new(out, top, &heading, across, Axis::of(number(most), count_of));
    panel.left_ticks(out, BLUE);
    for bucket in &report.latency {
        let span = (number(bucket.from_us), number(bucket.below_us));
        let told = format!("{} to {}: {}", time_of(span.0), time_of(span.1), bucket.count);
        panel.bar(out, span, number(bucket.count), &told);
    }
    for us in [p50, p99] {
        panel.mark(out, number(us));
    }
    Some(top + PANEL)
}

/// Draws the table of waiting times by thread. Returns the height of the chart.
fn table(out: &mut String, report: &MigrationReport, top: f64) -> f64 {
    if report.threads.is_empty() {
        return top;
    }
    let columns = [LEFT, 260.0, 360.0, 460.0, 560.0];
    let mut y = top;
    let mut row = |cells: [String; 5]| {
        for (x, cell) in columns.into_iter().zip(cells) {
            text(out, (x, y), "start", 12, &cell);
        }
        y += LINE;
    };
    row(["thread", "waits", "median", "p99", "longest"].map(str::to_owned));
    for thread in report.threads.iter().take(THREADS_SHOWN) {
        let LatencySnapshot { count, p50, p99, max, .. } = thread.latency_us;
        let [p50, p99, max] = [p50, p99, max].map(|us| time_of(number(us)));
        row([thread.name.clone(), count.to_string(), p50, p99, max]);
    }
    y
}

#[expect(clippy::cast_precision_loss, reason = "it becomes a place in a picture")]
fn number(value: u64) -> f64 {
    value as f64
}

/// Number of characters of a text.
fn count(text: &str) -> f64 {
    number(text.chars().count() as u64)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
