// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The report of a migration as a picture: how long faults waited, and the course in time.
//!
//! Owns the drawing. Knows the report by its names only and takes one that has more or less in it;
//! what it draws it takes from there and from nowhere else.

use std::fmt::Write as _;

use serde::Deserialize;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 70.0;
const PANEL: f64 = 200.0;
/// Tops of the two panels.
const LATENCY_TOP: f64 = 70.0;
const COURSE_TOP: f64 = 340.0;
/// Where the table of threads begins.
const TABLE_TOP: f64 = 600.0;
const LINE: f64 = 18.0;
/// Threads that are listed; the report has all of them.
const THREADS_SHOWN: usize = 32;

/// The report, as far as it is drawn.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Report {
    progress: Progress,
    phases: Vec<Passage>,
    timeline: Vec<Sample>,
    latency: Vec<Bucket>,
    threads: Vec<Thread>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Progress {
    side: String,
    phase: String,
    elapsed_ms: u64,
    downtime_us: u64,
    faults: Faults,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Faults {
    latency_us: Quantiles,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Quantiles {
    count: u64,
    p50: u64,
    p99: u64,
    max: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Passage {
    at_ms: u64,
    phase: String,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Sample {
    at_ms: u64,
    remaining_bytes: u64,
    moved_bytes: u64,
    faults: u64,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Bucket {
    from_us: u64,
    below_us: u64,
    count: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Thread {
    name: String,
    latency_us: Quantiles,
}

/// Draws it.
pub fn svg(report: &Report) -> String {
    let threads = report.threads.len().min(THREADS_SHOWN);
    let rows = if threads == 0 { 0.0 } else { number(threads as u64) + 2.0 };
    let height = TABLE_TOP + rows * LINE;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"#fff\"/>\n"
    );
    let Progress { side, phase, elapsed_ms, downtime_us, .. } = &report.progress;
    let mut title = format!("Migration ({side}): {phase} in {elapsed_ms} ms");
    if *downtime_us > 0 {
        let _ = write!(title, ", downtime {:.1} ms", number(*downtime_us) / 1e3);
    }
    text(&mut out, LEFT, 28.0, "start", &title);
    latency(&mut out, report);
    course(&mut out, report);
    table(&mut out, report);
    out.push_str("</svg>\n");
    out
}

/// Waits, the time on a logarithmic scale.
fn latency(out: &mut String, report: &Report) {
    let Quantiles { count, p50, p99, max } = report.progress.faults.latency_us;
    frame(out, LATENCY_TOP);
    let heading = format!(
        "Faults that waited for the peer: {count}, median {p50} us, p99 {p99} us, longest {max} us"
    );
    text(out, LEFT, LATENCY_TOP - 10.0, "start", &heading);
    let (Some(first), Some(last)) = (report.latency.first(), report.latency.last()) else {
        return text(out, WIDTH / 2.0, LATENCY_TOP + PANEL / 2.0, "middle", "none");
    };
    let log = |us: u64| number(us.max(1)).log10();
    let (low, high) = (log(first.from_us).floor(), log(last.below_us).ceil().max(1.0));
    let across = |us: u64| LEFT + inner() * ((log(us) - low) / (high - low).max(1.0));
    let most = report.latency.iter().map(|bucket| bucket.count).max().unwrap_or(1).max(1);
    for bucket in &report.latency {
        let (from, to) = (across(bucket.from_us), across(bucket.below_us));
        let tall = PANEL * number(bucket.count) / number(most);
        let _ = writeln!(
            out,
            "<rect x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{tall:.1}\" \
             fill=\"#4878a8\"><title>{} to {} us: {}</title></rect>",
            LATENCY_TOP + PANEL - tall,
            (to - from).max(0.5),
            bucket.from_us,
            bucket.below_us,
            bucket.count
        );
    }
    for (us, name) in [(p50, "median"), (p99, "p99")] {
        mark(out, across(us), LATENCY_TOP, name);
    }
    let mut us = 1_u64;
    while log(us) <= high {
        if log(us) >= low {
            text(out, across(us), LATENCY_TOP + PANEL + 16.0, "middle", &format!("{us} us"));
        }
        let Some(next) = us.checked_mul(10) else { break };
        us = next;
    }
    text(out, LEFT - 6.0, LATENCY_TOP + 12.0, "end", &most.to_string());
}

/// What is left, and how fast it moved.
fn course(out: &mut String, report: &Report) {
    frame(out, COURSE_TOP);
    let end_ms = report.timeline.last().map_or(0, |sample| sample.at_ms);
    let end_ms = end_ms.max(report.progress.elapsed_ms).max(1);
    let most = report.timeline.iter().map(|sample| sample.remaining_bytes).max().unwrap_or(0);
    let rates: Vec<(u64, f64, f64)> = report
        .timeline
        .windows(2)
        .filter_map(|pair| {
            let [before, after] = pair else { return None };
            let seconds = number(after.at_ms.saturating_sub(before.at_ms)) / 1e3;
            let moved = number(after.moved_bytes.saturating_sub(before.moved_bytes));
            let faults = number(after.faults.saturating_sub(before.faults));
            (seconds > 0.0).then(|| (after.at_ms, moved / seconds, faults / seconds))
        })
        .collect();
    let top = |pick: fn(&(u64, f64, f64)) -> f64| rates.iter().map(pick).fold(0.0, f64::max);
    let (top_rate, top_faults) = (top(|rate| rate.1), top(|rate| rate.2));
    let heading = format!(
        "To come (grey, up to {:.0} MiB), memory moved (blue, up to {:.0} MiB/s), faults (red, up \
         to {top_faults:.0}/s)",
        number(most) / f64::from(1 << 20),
        top_rate / f64::from(1 << 20)
    );
    text(out, LEFT, COURSE_TOP - 10.0, "start", &heading);
    let across = |at_ms: u64| LEFT + inner() * number(at_ms) / number(end_ms);
    let up = |share: f64| COURSE_TOP + PANEL * (1.0 - share.clamp(0.0, 1.0));
    let remaining: Vec<(f64, f64)> = report
        .timeline
        .iter()
        .map(|sample| {
            (across(sample.at_ms), up(number(sample.remaining_bytes) / number(most.max(1))))
        })
        .collect();
    line(out, &remaining, "#999");
    let scaled = |pick: fn(&(u64, f64, f64)) -> f64, top: f64| -> Vec<(f64, f64)> {
        rates.iter().map(|rate| (across(rate.0), up(pick(rate) / top.max(1.0)))).collect()
    };
    line(out, &scaled(|rate| rate.1, top_rate), "#4878a8");
    line(out, &scaled(|rate| rate.2, top_faults), "#c04040");
    for passage in &report.phases {
        mark(out, across(passage.at_ms.min(end_ms)), COURSE_TOP, &passage.phase);
    }
    for step in 0..=4 {
        let at_ms = end_ms * step / 4;
        let label = format!("{at_ms} ms");
        text(out, across(at_ms), COURSE_TOP + PANEL + 16.0, "middle", &label);
    }
}

/// Waits of each thread.
fn table(out: &mut String, report: &Report) {
    if report.threads.is_empty() {
        return;
    }
    let columns = [LEFT, 260.0, 360.0, 460.0, 560.0];
    let mut row = |at: usize, cells: [String; 5]| {
        let y = TABLE_TOP + number(at as u64) * LINE;
        for (x, cell) in columns.into_iter().zip(cells) {
            text(out, x, y, "start", &cell);
        }
    };
    row(0, ["thread", "waits", "median", "p99", "longest"].map(str::to_owned));
    for (at, thread) in report.threads.iter().take(THREADS_SHOWN).enumerate() {
        let Quantiles { count, p50, p99, max } = thread.latency_us;
        let cells = [
            thread.name.clone(),
            count.to_string(),
            format!("{p50} us"),
            format!("{p99} us"),
            format!("{max} us"),
        ];
        row(at + 1, cells);
    }
}

fn inner() -> f64 {
    WIDTH - LEFT - RIGHT
}

#[expect(clippy::cast_precision_loss, reason = "it becomes a place in a picture")]
fn number(value: u64) -> f64 {
    value as f64
}

fn frame(out: &mut String, top: f64) {
    let _ = writeln!(
        out,
        "<rect x=\"{LEFT}\" y=\"{top}\" width=\"{}\" height=\"{PANEL}\" fill=\"#f8f8f8\" \
         stroke=\"#bbb\"/>",
        inner()
    );
}

/// A dashed line from top to bottom of a panel, with a name.
fn mark(out: &mut String, x: f64, top: f64, name: &str) {
    let bottom = top + PANEL;
    let _ = writeln!(
        out,
        "<line x1=\"{x:.1}\" y1=\"{top}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#333\" \
         stroke-dasharray=\"3 3\"/>\n<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"10\" \
         transform=\"rotate(90 {:.1} {:.1})\">{}</text>",
        x + 3.0,
        top + 4.0,
        x + 3.0,
        top + 4.0,
        escaped(name)
    );
}

fn line(out: &mut String, points: &[(f64, f64)], colour: &str) {
    let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(
        out,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
        points.join(" ")
    );
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    let words = escaped(words);
    let _ =
        writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
}

/// Names of threads and phases come from elsewhere.
fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::json;

    use super::*;

    fn drawn(value: serde_json::Value) -> String {
        svg(&serde_json::from_value(value).unwrap())
    }

    #[test]
    fn a_report_becomes_bars_lines_marks_and_a_row_for_each_thread() {
        let picture = drawn(json!({
            "progress": {"side": "destination", "phase": "done", "elapsed_ms": 900,
                "downtime_us": 4200, "faults": {"latency_us":
                    {"count": 12, "p50": 80, "p99": 900, "max": 1000}}},
            "phases": [{"at_ms": 10, "phase": "fault"}, {"at_ms": 900, "phase": "done"}],
            "timeline": [
                {"at_ms": 10, "remaining_bytes": 1 << 30, "moved_bytes": 0, "faults": 0},
                {"at_ms": 500, "remaining_bytes": 1 << 29, "moved_bytes": 1 << 29, "faults": 10},
                {"at_ms": 900, "remaining_bytes": 0, "moved_bytes": 1 << 30, "faults": 12}],
            "latency": [{"from_us": 70, "below_us": 90, "count": 10},
                {"from_us": 900, "below_us": 1100, "count": 2}],
            "threads": [{"name": "vcpu0", "latency_us": {"count": 7, "p50": 80}},
                {"name": "<vcpu1>", "latency_us": {"count": 5, "p50": 81}}],
            "more": [1, 2],
        }));
        let count = |what: &str| picture.matches(what).count();
        assert_eq!(count("fill=\"#4878a8\"><title>"), 2, "bars");
        assert_eq!(count("<polyline"), 3);
        assert_eq!(count("stroke-dasharray"), 4, "two quantiles and two phases");
        assert!(picture.contains("downtime 4.2 ms") && picture.contains(">vcpu0<"));
        assert!(picture.contains("&lt;vcpu1&gt;") && !picture.contains("<vcpu1>"));
        assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
    }

    #[test]
    fn a_migration_without_faults_or_samples_is_drawn_as_well() {
        for value in [json!({}), json!({"latency": [{"from_us": 0, "below_us": 1, "count": 1}]})] {
            let picture = drawn(value);
            assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"));
            assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
        }
    }
}
