// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The text of scrapes against a strict reader of OpenMetrics 1.0, whatever is in the labels.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use vm_migration::{Progress, Side};

use super::devices;
use super::families::Family;
use super::hub::{Hub, Versions};
use super::reading::{PinReading, PopulatingReading, VcpuReading, VmReading, ZoneReading, states};
use super::text::{Format, Page, Value};

/// Labels by name.
type Labels = BTreeMap<String, String>;

#[derive(Debug, Default)]
struct Read {
    kind: String,
    unit: String,
    help: String,
    /// Name, labels, value.
    samples: Vec<(String, Labels, f64)>,
}

/// The value of a label up to its closing quote, and what is behind that.
fn quoted(text: &str) -> Result<(String, &str), String> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => match chars.next() {
                Some((_, 'n')) => value.push('\n'),
                Some((_, escaped @ ('"' | '\\'))) => value.push(escaped),
                other => return Err(format!("escape {other:?}")),
            },
            other => value.push(other),
        }
    }
    Err(format!("no end of {text:?}"))
}

fn sample(line: &str) -> Result<(String, Labels, f64), String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Labels::new();
    if let Some(within) = rest.strip_prefix('{') {
        rest = within;
        loop {
            let (label, value) = rest.split_once("=\"").ok_or("no label")?;
            let (value, behind) = quoted(value)?;
            if labels.insert(label.to_owned(), value).is_some() {
                return Err(format!("{label} twice"));
            }
            match behind.strip_prefix(',') {
                Some(next) => rest = next,
                None => break rest = behind.strip_prefix('}').ok_or("no end of labels")?,
            }
        }
    }
    let number = rest.strip_prefix(' ').ok_or("no space")?;
    let value = number.parse().map_err(|_| format!("{number:?} is no number"))?;
    Ok((name.to_owned(), labels, value))
}

/// Reads a text by the rules of OpenMetrics.
fn read(text: &str) -> Result<BTreeMap<String, Read>, String> {
    let body = text.strip_suffix("# EOF\n").ok_or("no end")?;
    let mut families: BTreeMap<String, Read> = BTreeMap::new();
    let mut current = String::new();
    // A line ends with a line feed and nothing else.
    for line in body.split_terminator('\n') {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "TYPE", name, kind] => {
                name.clone_into(&mut current);
                let family = Read { kind: kind.to_owned(), ..Read::default() };
                if families.insert(current.clone(), family).is_some() {
                    return Err(format!("{name} twice"));
                }
            }
            ["#", what @ ("UNIT" | "HELP"), name, text] if name == current => {
                let family = families.get_mut(name).ok_or("no type before")?;
                let field = if what == "UNIT" { &mut family.unit } else { &mut family.help };
                if !field.is_empty() || !family.samples.is_empty() {
                    return Err(format!("{line} again or late"));
                }
                text.clone_into(field);
            }
            _ => {
                let sample = sample(line).map_err(|error| format!("{line}: {error}"))?;
                let family = families.get_mut(&current).ok_or("no type before")?;
                let suffix = sample.0.strip_prefix(&current).ok_or_else(|| line.to_owned())?;
                let suffixes: &[&str] = match family.kind.as_str() {
                    "counter" => &["_total"],
                    "gauge" => &[""],
                    "info" => &["_info"],
                    "histogram" => &["_bucket", "_count", "_sum"],
                    other => return Err(format!("{other} is no type")),
                };
                if !suffixes.contains(&suffix) {
                    return Err(format!("{line} in a {}", family.kind));
                }
                family.samples.push(sample);
            }
        }
    }
    for (name, family) in &families {
        check(name, family).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok(families)
}

/// What holds for the samples of a family together.
fn check(name: &str, family: &Read) -> Result<(), String> {
    if family.samples.is_empty() || family.help.is_empty() {
        return Err("without samples or help".to_owned());
    }
    if !family.unit.is_empty() && !name.ends_with(&format!("_{}", family.unit)) {
        return Err(format!("unit {}", family.unit));
    }
    let mut seen = BTreeSet::new();
    let mut histograms: BTreeMap<Labels, Vec<(&str, f64, f64)>> = BTreeMap::new();
    for (sample, labels, value) in &family.samples {
        if !seen.insert((sample, labels)) {
            return Err(format!("{labels:?} twice"));
        }
        if !value.is_finite() || *value < 0.0 || family.kind == "info" && *value < 1.0 {
            return Err(format!("value {value}"));
        }
        let mut labels = labels.clone();
        let le = labels.remove("le");
        if (family.kind == "histogram" && sample.ends_with("_bucket")) != le.is_some() {
            return Err("le".to_owned());
        }
        let le = le.map_or(Ok(f64::NAN), |le| le.parse::<f64>()).map_err(|_| "bound")?;
        histograms.entry(labels).or_default().push((sample, le, *value));
    }
    if family.kind != "histogram" {
        return Ok(());
    }
    for samples in histograms.values() {
        let of = |end: &'static str| samples.iter().filter(move |it| it.0.ends_with(end));
        let buckets: Vec<_> = of("_bucket").collect();
        let rises = buckets.is_sorted_by(|a, b| a.1 < b.1 && a.2 <= b.2);
        let last = buckets.last().map(|last| (last.1, last.2));
        let counts: Vec<_> = of("_count").map(|it| it.2).collect();
        if !rises || counts.len() != 1 || last != Some((f64::INFINITY, counts[0])) {
            return Err(format!("{samples:?}"));
        }
        if of("_sum").count() != 1 {
            return Err("no sum".to_owned());
        }
    }
    Ok(())
}

const VERSIONS: Versions = Versions { own: "godwit v0", compatible: "53" };

/// A reading of a VM that has everything, with this name of a device of each kind.
fn full_reading(name: &str) -> VmReading {
    let devices = devices::all_counters().into_iter().enumerate().map(|(number, counters)| {
        let counters = counters.into_iter().map(|counter| (counter.to_owned(), number as u64 + 1));
        (format!("{name}{number}"), counters.collect())
    });
    let zone = |id: &str, allocated_bytes| ZoneReading {
        id: id.to_owned(),
        size_bytes: 1 << 30,
        allocated_bytes,
    };
    VmReading {
        state: states::RUNNING,
        activity: Some("migrated".to_owned()),
        uuid: Some(name.to_owned()),
        api_socket: Some(name.to_owned()),
        vcpus: Some(VcpuReading { present: 2, max: 4, cpu_ns: vec![(0, 1_500_000_000), (1, 7)] }),
        zones: vec![zone(&format!("{name}a"), Some(4096)), zone(&format!("{name}b"), None)],
        actual_bytes: Some(2 << 30),
        devices: devices.collect(),
        full_disks: vec![(name.to_owned(), 3)],
        populating: Some(PopulatingReading { state: "running".to_owned(), ..Default::default() }),
        pinning: Some(PinReading { state: "pinned".to_owned(), ..Default::default() }),
    }
}

/// A hub that has seen requests and a migration of this side.
fn hub(side: Side) -> Hub {
    let hub = Hub::default();
    hub.requests().note(Some("vm.info"), 200, Duration::from_millis(1));
    hub.requests().note(None, 404, Duration::from_secs(100));
    hub.follow(&Arc::new(Progress::new(side)));
    hub
}

fn scrape(side: Side, reading: &VmReading, format: Format) -> String {
    hub(side).text(VERSIONS, Some(reading), Duration::from_micros(5), format)
}

#[test]
fn each_family_is_as_its_definition_says() {
    // What only a migration in its middle knows is tested with the document.
    let is_later = |name: &str| name.contains("_migration_") || name.contains("_postcopy_");
    let texts = [Side::Source, Side::Destination]
        .map(|side| scrape(side, &full_reading("x"), Format::OpenMetrics));
    let read = texts.each_ref().map(|text| read(text).unwrap());
    for family in Family::ALL {
        let definition = family.definition();
        let name = definition.name();
        let found = read.iter().find_map(|families| families.get(&name));
        let Some(found) = found else {
            assert!(is_later(&name), "{name} is in no scrape");
            continue;
        };
        assert_eq!(
            (found.kind.as_str(), found.help.as_str()),
            (definition.kind.name(), definition.help)
        );
        assert_eq!(found.unit, definition.unit.name());
        for (_, labels, _) in &found.samples {
            let labels: Vec<_> = labels.keys().filter(|label| *label != "le").collect();
            let mut defined = definition.labels.to_vec();
            defined.sort_unstable();
            assert_eq!(labels, defined, "{name}");
        }
    }
    let known = Family::ALL.iter().map(|family| family.definition().name()).collect::<Vec<_>>();
    assert!(read.iter().flat_map(BTreeMap::keys).all(|name| known.contains(name)));
}

#[test]
fn numbers_are_exact() {
    let text = |value| {
        let mut page = Page::default();
        page.add(Family::Vcpus, &[], value);
        let text = page.write(Format::OpenMetrics);
        text.lines().rev().nth(1).unwrap().split(' ').nth(1).unwrap().to_owned()
    };
    for (value, written) in [
        (Value::whole(u64::MAX), "18446744073709551615"),
        (Value::whole(0), "0"),
        (Value::nanos(0), "0"),
        (Value::nanos(1), "0.000000001"),
        (Value::nanos(u64::MAX), "18446744073.709551615"),
        (Value::micros(1_000_000), "1"),
        (Value::micros(10_500_000), "10.5"),
        (Value::millis(5), "0.005"),
        (Value::percent(20), "0.2"),
        (Value::flag(true), "1"),
    ] {
        assert_eq!(text(value), written);
    }
}

#[test]
fn a_client_gets_the_format_that_it_prefers() {
    use Format::{OpenMetrics, Prometheus};
    let of_prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,\
                         application/openmetrics-text;version=0.0.1;q=0.4,\
                         text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
    for (accept, format) in [
        (None, OpenMetrics),
        (Some(""), OpenMetrics),
        (Some("*/*"), OpenMetrics),
        (Some(of_prometheus), OpenMetrics),
        (Some("text/html"), OpenMetrics),
        (Some("text/plain"), Prometheus),
        (Some("TEXT/Plain ; version=0.0.4"), Prometheus),
        (Some("text/*, application/openmetrics-text;q=0.999"), Prometheus),
        (Some("text/plain;q=0.5, */*;q=0.4"), Prometheus),
        (Some("text/plain;q=0"), OpenMetrics),
        (Some("text/plain;q=x, ;;,=;q=9.9999"), OpenMetrics),
    ] {
        assert_eq!(Format::for_accept(accept), format, "{accept:?}");
    }
}

#[test]
fn the_older_format_has_the_names_of_samples_and_no_new_kinds() {
    let text = scrape(Side::Destination, &full_reading("x"), Format::Prometheus);
    assert!(!text.contains("# EOF") && !text.contains("# UNIT"), "{text}");
    assert!(
        text.contains("# TYPE godwit_disk_reads_total counter\n# HELP godwit_disk_reads_total ")
    );
    assert!(text.contains("# TYPE godwit_build_info gauge\n"), "{text}");
    assert!(text.contains("# TYPE godwit_postcopy_fault_wait_seconds histogram\n"), "{text}");
    let kinds: BTreeSet<_> = text
        .lines()
        .filter(|line| line.starts_with("# TYPE "))
        .filter_map(|line| line.rsplit(' ').next())
        .collect();
    assert_eq!(kinds, BTreeSet::from(["counter", "gauge", "histogram"]));
}

#[test]
fn promtool_finds_no_fault() {
    let mut command = Command::new("promtool");
    command.args(["check", "metrics"]).stdin(Stdio::piped());
    let spawned = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let Ok(mut promtool) = spawned else {
        return test_skip::skip!("promtool (package prometheus) is not installed");
    };
    let text = scrape(Side::Destination, &full_reading("x\"\\\n"), Format::Prometheus);
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}\n{text}");
}

proptest! {
    #[test]
    fn any_name_of_a_device_comes_back_as_it_was(name in "\\PC*|[\\\\\"\n\r\t{}=, #\u{0}-\u{1f}]*") {
        let reading = full_reading(&name);
        for side in [Side::Source, Side::Destination] {
            let families = read(&scrape(side, &reading, Format::OpenMetrics));
            let families = families.map_err(TestCaseError::fail)?;
            let uuid = &families["godwit_vm"].samples[0].1["uuid"];
            prop_assert_eq!(uuid, &name);
            let read: BTreeSet<_> = families
                .values()
                .flat_map(|family| &family.samples)
                .filter_map(|(_, labels, _)| labels.get("device").cloned())
                .collect();
            let all = reading.devices.keys().cloned().chain([name.clone()]);
            prop_assert_eq!(read, all.collect());
        }
    }

    #[test]
    fn any_counts_are_read_as_they_are(counts in prop::collection::vec(any::<u64>(), 1..40)) {
        let mut page = Page::default();
        for (number, count) in counts.iter().enumerate() {
            page.add(Family::DiskReads, &[&number.to_string()], Value::whole(*count));
        }
        let text = page.write(Format::OpenMetrics);
        let families = read(&text).map_err(TestCaseError::fail)?;
        prop_assert_eq!(families["godwit_disk_reads"].samples.len(), counts.len());
        for (number, count) in counts.iter().enumerate() {
            let line = format!("godwit_disk_reads_total{{device=\"{number}\"}} {count}");
            prop_assert!(text.lines().any(|it| it == line), "no {}", line);
        }
    }

    #[test]
    fn what_is_chosen_was_offered(accept in prop_oneof![
        "\\PC*",
        "((TEXT|text|application|\\*|image)/(plain|\\*|openmetrics-text|png)(; ?q=[01](\\.[0-9]{0,4})?)?, ?){0,4}",
    ]) {
        let format = Format::for_accept(Some(&accept));
        let accept = accept.to_ascii_lowercase();
        let offers = |media: &[&str]| {
            accept.split(',').any(|range| {
                media.contains(&range.split(';').next().unwrap_or_default().trim())
            })
        };
        let (plain, open) = (
            offers(&["text/plain", "text/*"]),
            offers(&["application/openmetrics-text", "application/*", "*/*"]),
        );
        match format {
            // Without an offer, and where both are as welcome, it is OpenMetrics.
            Format::Prometheus => prop_assert!(plain),
            Format::OpenMetrics => prop_assert!(open || !plain || accept.contains("q=")),
        }
    }

    #[test]
    fn the_heavier_of_two_is_chosen(plain in 0..=1000_u32, open in 0..=1000_u32, turned: bool) {
        let weight = |it: u32| format!("{}.{:03}", it / 1000, it % 1000);
        let mut ranges = [
            format!("text/plain;version=0.0.4;q={}", weight(plain)),
            format!("application/openmetrics-text;version=1.0.0;q={}", weight(open)),
        ];
        if turned {
            ranges.reverse();
        }
        let format = Format::for_accept(Some(&ranges.join(",")));
        let expected = if plain > open { Format::Prometheus } else { Format::OpenMetrics };
        prop_assert_eq!(format, expected);
    }
}
