// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Axes with ticks, and panels between them.
//!
//! Owns where a value lies in the picture, and the words for amounts and times. It must never know
//! what is drawn.

use std::fmt::Write as _;

use super::{LEFT, PANEL, RIGHT, WIDTH};

/// Approximate number of ticks of an axis.
const TICKS: f64 = 5.0;

/// Maximum number of powers of ten on a logarithmic axis.
const POWERS_MAX: i32 = 16;

/// Inner width of a panel.
pub fn inner() -> f64 {
    WIDTH - LEFT - RIGHT
}

/// A linear or logarithmic axis of a panel.
pub struct Axis {
    low: f64,
    high: f64,
    powers: bool,
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// A linear axis from 0 to at least `most`, with ticks at round numbers that `name` formats.
    pub fn of(most: f64, name: impl Fn(f64) -> String) -> Self {
        let most = if most.is_finite() && most > 0.0 { most } else { 1.0 };
        let step = round_step(most / TICKS);
        let mut ticks = Vec::new();
        let mut at = 0.0;
        while at < most + step {
            ticks.push((at, name(at)));
            at += step;
        }
        let high = ticks.last().map_or(most, |tick| tick.0);
        Self { low: 0.0, high, powers: false, ticks }
    }

    /// The same for bytes, with ticks at round numbers of the unit; `more` is appended to the labels.
    pub fn of_bytes(most: f64, more: &str) -> Self {
        let mut unit = 1.0;
        while unit * 1024.0 <= most {
            unit *= 1024.0;
        }
        let mut axis = Self::of(most / unit, |share| format!("{}{more}", bytes_of(share * unit)));
        axis.high *= unit;
        axis.ticks.iter_mut().for_each(|tick| tick.0 *= unit);
        axis
    }

    /// A time axis in milliseconds, from 0 to exactly `end`.
    pub fn of_times(end_ms: f64) -> Self {
        let mut axis = Self::of(end_ms, |ms| time_of(ms * 1e3));
        axis.ticks.retain(|(at, _)| *at <= end_ms);
        axis.high = end_ms.max(1.0);
        axis
    }

    /// A logarithmic time axis in microseconds, with a tick for each power of ten.
    pub fn of_powers(from_us: f64, to_us: f64) -> Self {
        let log = |us: f64| us.max(1.0).log10();
        let low = log(from_us).floor();
        let high = log(to_us).ceil().max(low + 1.0).min(low + f64::from(POWERS_MAX));
        let mut ticks = Vec::new();
        let mut power = low;
        while power <= high {
            let us = 10_f64.powf(power);
            ticks.push((us, time_of(us)));
            power += 1.0;
        }
        Self { low, high, powers: true, ticks }
    }

    /// Relative position of a value on the axis, from 0 to 1.
    fn share(&self, value: f64) -> f64 {
        let value = if self.powers { value.max(1.0).log10() } else { value };
        ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    /// Horizontal position of a value.
    pub fn across(&self, value: f64) -> f64 {
        LEFT + inner() * self.share(value)
    }
}

/// The next larger number of the form 1, 2 or 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    let step = [1.0, 2.0, 5.0].into_iter().map(|digit| digit * power).find(|step| *step >= least);
    step.unwrap_or(10.0 * power)
}

/// A frame with a heading and a horizontal axis.
pub struct Panel {
    top: f64,
    across: Axis,
    up: Axis,
}

impl Panel {
    /// Draws the frame, heading and horizontal axis.
    pub fn new(out: &mut String, top: f64, heading: &str, across: Axis, up: Axis) -> Self {
        let _ = writeln!(
            out,
            "<rect x=\"{LEFT}\" y=\"{top:.1}\" width=\"{}\" height=\"{PANEL}\" fill=\"#f8f8f8\" \
             stroke=\"#bbb\"/>",
            inner()
        );
        text(out, (LEFT, top - 8.0), "start", 12, heading);
        let bottom = top + PANEL;
        for (value, name) in &across.ticks {
            let x = across.across(*value);
            stroke(out, (x, bottom), (x, bottom + 4.0), "#333");
            text(out, (x, bottom + 17.0), "middle", 11, name);
        }
        Self { top, across, up }
    }

    /// The same panel with another vertical axis.
    pub fn with(&self, up: Axis) -> Self {
        let Axis { low, high, powers, .. } = self.across;
        let across = Axis { low, high, powers, ticks: Vec::new() };
        Self { top: self.top, across, up }
    }

    fn height(&self, value: f64) -> f64 {
        self.top + PANEL * (1.0 - self.up.share(value))
    }

    /// Draws the ticks of the left axis, with horizontal lines.
    pub fn left_ticks(&self, out: &mut String, colour: &str) {
        for (value, name) in &self.up.ticks {
            let y = self.height(*value);
            stroke(out, (LEFT - 4.0, y), (LEFT + inner(), y), "#ddd");
            coloured(out, (LEFT - 8.0, y + 4.0), "end", name, colour);
        }
    }

    /// Draws the ticks of the right axis.
    pub fn right_ticks(&self, out: &mut String, colour: &str) {
        let right = LEFT + inner();
        for (value, name) in &self.up.ticks {
            let y = self.height(*value);
            stroke(out, (right, y), (right + 4.0, y), colour);
            coloured(out, (right + 8.0, y + 4.0), "start", name, colour);
        }
    }

    /// A line through points.
    pub fn line(&self, out: &mut String, points: impl Iterator<Item = (f64, f64)>, colour: &str) {
        let place =
            |(x, y): (f64, f64)| format!("{:.1},{:.1}", self.across.across(x), self.height(y));
        let points: Vec<String> = points.map(place).collect();
        if points.is_empty() {
            return;
        }
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
            points.join(" ")
        );
    }

    /// Draws a bar from the bottom, with the tooltip `told`.
    pub fn bar(&self, out: &mut String, (from, to): (f64, f64), value: f64, told: &str) {
        let (left, right) = (self.across.across(from), self.across.across(to));
        let y = self.height(value);
        let _ = writeln!(
            out,
            "<rect x=\"{left:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\" \
             fill-opacity=\"0.6\"><title>{}</title></rect>",
            (right - left - 0.5).max(0.5),
            self.top + PANEL - y,
            super::BLUE,
            escaped(told)
        );
    }

    /// Draws a dashed vertical line.
    pub fn mark(&self, out: &mut String, value: f64) {
        let x = self.across.across(value);
        let _ = writeln!(
            out,
            "<line x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"#333\" \
             stroke-dasharray=\"3 3\"/>",
            self.top,
            self.top + PANEL
        );
    }
}

fn stroke(out: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    let _ = writeln!(
        out,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\"/>",
        from.0, from.1, to.0, to.1
    );
}

/// Draws text.
pub fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, size: u32, words: &str) {
    let words = escaped(words);
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" \
         xml:space=\"preserve\">{words}</text>"
    );
}

fn coloured(out: &mut String, (x, y): (f64, f64), anchor: &str, words: &str, colour: &str) {
    let words = escaped(words);
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"11\" \
         fill=\"{colour}\">{words}</text>"
    );
}

/// Escapes text: names of threads and phases come from the report.
fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A number with as few digits as needed.
fn short(value: f64) -> String {
    let digits = match value {
        _ if value >= 100.0 || value.fract() == 0.0 => 0,
        _ if value >= 10.0 || (value * 10.0).fract() == 0.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

/// Bytes as text.
pub fn bytes_of(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes;
    for unit in units {
        if value < 1024.0 || unit == "TiB" {
            return format!("{} {unit}", short(value));
        }
        value /= 1024.0;
    }
    String::new()
}

/// A time in microseconds as text.
pub fn time_of(us: f64) -> String {
    match us {
        _ if us <= 0.0 => "0".to_owned(),
        _ if us < 1e3 => format!("{} us", short(us)),
        _ if us < 1e6 => format!("{} ms", short(us / 1e3)),
        _ => format!("{} s", short(us / 1e6)),
    }
}

/// A count as text.
pub fn count_of(count: f64) -> String {
    match count {
        _ if count < 1e4 => short(count),
        _ if count < 1e6 => format!("{}k", short(count / 1e3)),
        _ => format!("{}M", short(count / 1e6)),
    }
}
