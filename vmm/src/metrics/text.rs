// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The text of a scrape: OpenMetrics 1.0, or the older format of Prometheus.
//!
//! Owns how samples become text, and which of the formats a client gets. Samples of a family come together, in the
//! order of the table, whatever the order in which they were added. It must never know what a metric means.

use std::fmt::Write as _;

use super::families::{Family, Kind, Unit};

/// A format of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Version 0.0.4 of the text format of Prometheus, for tools that know no other.
    Prometheus,
}

/// Weight of a format that a client does not accept.
const REFUSED: u32 = 0;
/// Weight without `q=`.
const WHOLE: u32 = 1000;

/// The weight of a media range, in thousandths.
fn weight(parameters: &str) -> u32 {
    let weight = parameters.split(';').find_map(|it| it.trim().strip_prefix("q="));
    let Some(weight) = weight else { return WHOLE };
    let (whole, part) = weight.trim().split_once('.').unwrap_or((weight.trim(), ""));
    let digits = part.chars().chain("000".chars()).take(3).collect::<String>();
    match (whole.parse::<u32>(), digits.parse::<u32>()) {
        (Ok(0), Ok(part)) => part,
        (Ok(_), Ok(_)) => WHOLE,
        // What cannot be read asks for nothing in particular.
        _ => REFUSED,
    }
}

impl Format {
    /// What a client gets that accepts this (RFC 9110, 12.5.1): OpenMetrics, unless it prefers the other.
    pub fn for_accept(accept: Option<&str>) -> Self {
        let (mut open, mut plain) = (REFUSED, REFUSED);
        for range in accept.unwrap_or_default().split(',') {
            let (media, parameters) = range.split_once(';').unwrap_or((range, ""));
            let weight = weight(parameters);
            match media.trim().to_ascii_lowercase().as_str() {
                "application/openmetrics-text" | "application/*" | "*/*" => open = open.max(weight),
                "text/plain" | "text/*" => plain = plain.max(weight),
                _ => {}
            }
        }
        if plain > open { Self::Prometheus } else { Self::OpenMetrics }
    }

    /// The media type of the text.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => CONTENT_TYPE,
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// The media type of OpenMetrics.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A value: a number divided by a power of ten, so that it is written exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    number: u64,
    decimals: usize,
}

impl Value {
    /// A whole number.
    pub const fn whole(number: u64) -> Self {
        Self { number, decimals: 0 }
    }

    /// Milliseconds as seconds.
    pub const fn millis(number: u64) -> Self {
        Self { number, decimals: 3 }
    }

    /// Microseconds as seconds.
    pub const fn micros(number: u64) -> Self {
        Self { number, decimals: 6 }
    }

    /// Nanoseconds as seconds.
    pub const fn nanos(number: u64) -> Self {
        Self { number, decimals: 9 }
    }

    /// Hundredths as a ratio.
    pub const fn percent(number: u64) -> Self {
        Self { number, decimals: 2 }
    }

    /// 1 or 0.
    pub const fn flag(is_so: bool) -> Self {
        Self::whole(if is_so { 1 } else { 0 })
    }

    fn write(self, out: &mut String) {
        let Self { number, decimals } = self;
        let digits = format!("{number:0>width$}", width = decimals + 1);
        let (whole, part) = digits.split_at(digits.len() - decimals);
        out.push_str(whole);
        let part = part.trim_end_matches('0');
        if !part.is_empty() {
            out.push('.');
            out.push_str(part);
        }
    }
}

/// An upper bound of a bucket in microseconds, and the same in seconds as OpenMetrics writes it.
pub type Bound = (u64, &'static str);

/// What a histogram has counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Observations up to each bound, those up to the bounds before it included.
    pub up_to: Vec<u64>,
    /// All observations.
    pub count: u64,
    /// Their sum in microseconds.
    pub sum_us: u64,
}

struct Sample {
    suffix: &'static str,
    labels: Vec<(&'static str, String)>,
    value: Value,
}

/// The samples of a scrape.
pub struct Page {
    /// By family, in the order of the table.
    families: Vec<(Family, Vec<Sample>)>,
}

impl Default for Page {
    fn default() -> Self {
        Self { families: Family::ALL.iter().map(|family| (*family, Vec::new())).collect() }
    }
}

impl Page {
    fn push(&mut self, family: Family, sample: Sample) {
        if let Some((_, samples)) = self.families.iter_mut().find(|(known, _)| *known == family) {
            samples.push(sample);
        }
    }

    /// Adds a sample with a value for each label of its family.
    pub fn add(&mut self, family: Family, labels: &[&str], value: Value) {
        let labels = labelled(family, labels);
        self.push(family, Sample { suffix: family.definition().kind.suffix(), labels, value });
    }

    /// Adds a sample if there is a value.
    pub fn add_some(&mut self, family: Family, labels: &[&str], value: Option<Value>) {
        if let Some(value) = value {
            self.add(family, labels, value);
        }
    }

    /// Adds facts.
    pub fn info(&mut self, family: Family, labels: &[&str]) {
        self.add(family, labels, Value::whole(1));
    }

    /// Adds a sample for each state: 1 for the current one, 0 for the others.
    pub fn state(&mut self, family: Family, states: &[&str], now: &str) {
        for state in states {
            self.add(family, &[state], Value::flag(*state == now));
        }
    }

    /// Adds a histogram.
    pub fn histogram(
        &mut self,
        family: Family,
        labels: &[&str],
        bounds: &[Bound],
        observed: &Observed,
    ) {
        let own = labelled(family, labels);
        let mut add = |suffix, le: Option<&str>, value| {
            let mut labels = own.clone();
            labels.extend(le.map(|le| ("le", le.to_owned())));
            self.push(family, Sample { suffix, labels, value });
        };
        for ((_, le), up_to) in bounds.iter().zip(&observed.up_to) {
            add("_bucket", Some(le), Value::whole(*up_to));
        }
        add("_bucket", Some("+Inf"), Value::whole(observed.count));
        add("_count", None, Value::whole(observed.count));
        add("_sum", None, Value::micros(observed.sum_us));
    }

    /// The text of all families that have samples.
    pub fn write(&self, format: Format) -> String {
        let mut out = String::new();
        for (family, samples) in self.families.iter().filter(|(_, samples)| !samples.is_empty()) {
            let definition = family.definition();
            let name = definition.name();
            head(&mut out, *family, &name, format);
            for Sample { suffix, labels, value } in samples {
                out.push_str(&name);
                out.push_str(suffix);
                for (place, (label, text)) in labels.iter().enumerate() {
                    out.push(if place == 0 { '{' } else { ',' });
                    out.push_str(label);
                    out.push_str("=\"");
                    escape(&mut out, text);
                    out.push('"');
                }
                out.push_str(if labels.is_empty() { " " } else { "} " });
                value.write(&mut out);
                out.push('\n');
            }
        }
        if format == Format::OpenMetrics {
            out.push_str("# EOF\n");
        }
        out
    }
}

fn labelled(family: Family, values: &[&str]) -> Vec<(&'static str, String)> {
    let names = family.definition().labels;
    debug_assert_eq!(names.len(), values.len(), "{family:?}");
    names.iter().copied().zip(values.iter().map(ToString::to_string)).collect()
}

/// What is said of a family before its samples. In the older format a family is called as its samples are, and there is
/// neither a unit nor the kind of facts.
fn head(out: &mut String, family: Family, name: &str, format: Format) {
    let definition = family.definition();
    let (name, kind) = match format {
        Format::OpenMetrics => (name.to_owned(), definition.kind),
        Format::Prometheus => {
            let kind = if definition.kind == Kind::Info { Kind::Gauge } else { definition.kind };
            (format!("{name}{}", definition.kind.suffix()), kind)
        }
    };
    // Writing to a string cannot fail.
    let _ = writeln!(out, "# TYPE {name} {}", kind.name());
    if format == Format::OpenMetrics && definition.unit != Unit::Plain {
        let _ = writeln!(out, "# UNIT {name} {}", definition.unit.name());
    }
    let _ = writeln!(out, "# HELP {name} {}", definition.help);
}

/// Writes the value of a label. Names of devices and paths are chosen by users.
fn escape(out: &mut String, text: &str) {
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            other => out.push(other),
        }
    }
}
