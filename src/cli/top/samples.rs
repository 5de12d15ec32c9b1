// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The text of metrics, as a VMM gives it (OpenMetrics 1.0), and what changed between two texts.
//!
//! Owns the parser. It takes what any peer may send, and must never know a metric by its name.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use thiserror::Error;

/// The most samples that are kept: a VM with 254 vCPUs and a hundred devices has some 5000.
const SAMPLES_MAX: usize = 20_000;

/// A text is none.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MalformedMetrics {
    /// A line cannot be read.
    #[error("line {line} is no sample: '{text}'")]
    Line {
        /// Its number, from 1.
        line: usize,
        /// The beginning of it.
        text: String,
    },
    /// More than is kept.
    #[error("there are more than {SAMPLES_MAX} samples")]
    TooMany,
    /// The text breaks off.
    #[error("they do not end with '# EOF'")]
    Cut,
}

#[derive(Debug, PartialEq)]
struct Sample {
    labels: Vec<(String, String)>,
    value: f64,
}

/// All samples of one moment.
#[derive(Debug)]
pub struct Samples {
    at: Instant,
    /// By name, each in the order of the text.
    named: BTreeMap<String, Vec<Sample>>,
}

impl Samples {
    /// Reads a text that came at this time.
    pub fn read(text: &str, at: Instant) -> Result<Self, MalformedMetrics> {
        let mut named = BTreeMap::<String, Vec<Sample>>::new();
        let (mut is_whole, mut count) = (false, 0);
        for (number, line) in (1..).zip(text.lines()) {
            if line == "# EOF" {
                is_whole = true;
                break;
            }
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            count += 1;
            if count > SAMPLES_MAX {
                return Err(MalformedMetrics::TooMany);
            }
            let malformed = || {
                let beginning = line.chars().take(80).map(printable).collect();
                MalformedMetrics::Line { line: number, text: beginning }
            };
            let (name, sample) = sample(line).ok_or_else(malformed)?;
            named.entry(name.to_owned()).or_default().push(sample);
        }
        if is_whole { Ok(Self { at, named }) } else { Err(MalformedMetrics::Cut) }
    }

    /// The samples of a metric.
    fn of(&self, name: &str) -> &[Sample] {
        self.named.get(name).map_or(&[], Vec::as_slice)
    }

    /// Time since another moment; never zero.
    pub fn since(&self, before: &Self) -> Duration {
        self.at.saturating_duration_since(before.at).max(Duration::from_millis(1))
    }

    /// The value of a metric whose labels include these.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.of(name).iter().find(|sample| sample.has(labels)).map(|sample| sample.value)
    }

    /// The sum over all samples of a metric; `None` if there are none.
    pub fn sum(&self, name: &str) -> Option<f64> {
        let samples = self.of(name);
        (!samples.is_empty()).then(|| samples.iter().map(|sample| sample.value).sum())
    }

    /// The values of a label among the samples of a metric, in their order.
    pub fn label_values(&self, name: &str, label: &str) -> Vec<&str> {
        self.of(name).iter().filter_map(|sample| sample.label(label)).collect()
    }

    /// A label of the only sample of a metric.
    pub fn label(&self, name: &str, label: &str) -> Option<&str> {
        self.of(name).first()?.label(label)
    }

    /// Which of a metric's samples is 1, by this label.
    pub fn chosen(&self, name: &str, label: &str) -> Option<&str> {
        self.of(name).iter().find(|sample| sample.value > 0.5)?.label(label)
    }

    /// By how much a counter has risen since another moment, a second. One that has begun anew has not risen, and one that
    /// is new neither.
    pub fn rate(&self, before: &Self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let (now, then) = (self.value(name, labels)?, before.value(name, labels));
        Some((now - then.unwrap_or(now)).max(0.0) / self.since(before).as_secs_f64())
    }
}

impl Sample {
    fn label(&self, wanted: &str) -> Option<&str> {
        self.labels.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str())
    }

    fn has(&self, labels: &[(&str, &str)]) -> bool {
        labels.iter().all(|(name, value)| self.label(name) == Some(value))
    }
}

/// `name{label="value",...} number`, and a time that is not looked at.
fn sample(line: &str) -> Option<(&str, Sample)> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at_checked(end)?;
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.push((label.to_owned(), value));
            rest = after.strip_prefix(',').unwrap_or(after);
            if after.starts_with(',') == rest.starts_with('}') {
                return None;
            }
        }
        rest = rest.strip_prefix('}')?;
    }
    let value: f64 = rest.strip_prefix(' ')?.split(' ').next()?.parse().ok()?;
    let is_name =
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_:".contains(&b));
    (is_name && value.is_finite()).then_some((name, Sample { labels, value }))
}

/// What comes from a VMM is shown on a terminal, which takes control characters for commands.
fn printable(character: char) -> char {
    if character.is_control() { char::REPLACEMENT_CHARACTER } else { character }
}

/// A value up to its closing quote, and what follows.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, text.get(at + 1..)?)),
            '\\' => value.push(match characters.next()?.1 {
                'n' => ' ',
                other => printable(other),
            }),
            other => value.push(printable(other)),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<Samples, MalformedMetrics> {
        Samples::read(text, Instant::now())
    }

    #[test]
    fn samples_are_found_by_name_and_labels() {
        let text = "# TYPE a counter\n# HELP a It is.\na_total{device=\"d,0\",kind=\"x\\\"}\\\\\\n\"} 5 17.5\n\
                    a_total{device=\"e\",kind=\"y\"} 7\nplain 0.25\nstate{state=\"Running\"} 1\nstate{state=\"Paused\"} 0\n\
                    empty{} 3\n# EOF\n";
        let samples = read(text).expect("samples");
        assert_eq!(samples.value("a_total", &[("device", "d,0")]), Some(5.0));
        assert_eq!(samples.value("a_total", &[("device", "d,0"), ("kind", "x\"}\\ ")]), Some(5.0));
        assert_eq!(samples.value("a_total", &[("device", "f")]), None);
        assert_eq!(samples.sum("a_total"), Some(12.0));
        assert_eq!(samples.sum("b_total"), None);
        assert_eq!(samples.value("plain", &[]), Some(0.25));
        assert_eq!(samples.value("empty", &[]), Some(3.0));
        assert_eq!(samples.label_values("a_total", "device"), ["d,0", "e"]);
        assert_eq!(samples.chosen("state", "state"), Some("Running"));
    }

    #[test]
    fn rates_are_of_counters_that_rise() {
        let at = Instant::now();
        let samples = |text: &str, after_ms| {
            Samples::read(text, at + Duration::from_millis(after_ms)).expect("samples")
        };
        let before = samples("a 10\nb 10\n# EOF\n", 0);
        let now = samples("a 30\nb 2\nc 9\n# EOF\n", 2000);
        let rate = |name| now.rate(&before, name, &[]);
        assert_eq!(
            (rate("a"), rate("b"), rate("c"), rate("d")),
            (Some(10.0), Some(0.0), Some(0.0), None)
        );
        assert!(before.since(&now) > Duration::ZERO);
    }

    #[test]
    fn what_is_no_text_of_metrics_is_refused() {
        for line in [
            "a",
            "a x",
            "{} 1",
            "a{ 1",
            "a{b=\"c} 1",
            "a{b=\"c\"d=\"e\"} 1",
            "a{b=\"c\",} 1",
            "a{b=\"c\"}1",
            "a NaN",
            "a +Inf",
            "é 1",
        ] {
            let error = read(&format!("good 1\n{line}\n# EOF\n")).expect_err(line);
            assert_eq!(error, MalformedMetrics::Line { line: 2, text: line.to_owned() });
        }
        let escape = read("a{b=\"\x1b[2J\"} 1\n# EOF\n").expect("a sample");
        assert_eq!(escape.label("a", "b"), Some("\u{fffd}[2J"), "no command for a terminal");
        let error = read("\x1b]52;\n# EOF\n").expect_err("no sample").to_string();
        assert!(!error.contains('\x1b'), "{error:?}");
        assert_eq!(read("a 1\n").expect_err("cut"), MalformedMetrics::Cut);
        let many = format!("{}# EOF\n", "a 1\n".repeat(SAMPLES_MAX + 1));
        assert_eq!(read(&many).expect_err("too many"), MalformedMetrics::TooMany);
    }

    proptest! {
        /// Whatever comes is read or refused.
        #[test]
        fn any_text_is_read_or_refused_by_its_line(text in "(?s).{0,200}", line in "[a-z]{0,3}[{]?([a-z]{0,2}=?\"?[\\\\n,}a]{0,3}\"?,?){0,3}[}]? ?[0-9.e+-]{0,4}") {
            for text in [text, format!("{line}\n# EOF\n")] {
                let is_whole = text.lines().any(|line| line == "# EOF");
                match read(&text) {
                    Ok(samples) => {
                        prop_assert!(is_whole);
                        let lines = text.lines().take_while(|line| *line != "# EOF");
                        let told = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
                        let kept = samples.named.values().map(Vec::len).sum::<usize>();
                        prop_assert_eq!(kept, told.count());
                    }
                    Err(MalformedMetrics::Line { line, text: told }) => {
                        let named = text.lines().nth(line - 1).unwrap_or_default();
                        prop_assert!(told.chars().count() <= 80 && !told.chars().any(char::is_control));
                        prop_assert_eq!(told.chars().next(), named.chars().next().map(printable));
                    }
                    Err(MalformedMetrics::Cut) => prop_assert!(!is_whole),
                    Err(MalformedMetrics::TooMany) => prop_assert!(false, "not so many lines"),
                }
            }
        }

        #[test]
        fn what_is_written_is_read(value in "[^\\p{Cc}]{0,20}", number in -1e9..1e9_f64) {
            let escaped = value.replace('\\', "\\\\").replace('"', "\\\"");
            let samples = read(&format!("a{{b=\"{escaped}\"}} {number}\n# EOF\n")).expect("a sample");
            prop_assert_eq!(samples.value("a", &[("b", &value)]), Some(number));
        }
    }
}
