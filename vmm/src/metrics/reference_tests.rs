// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The page and the dashboard against the definitions: the table of the page is generated, and the dashboard asks for
//! nothing that there is not.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::Value;

use super::families::{Definition, Family, Kind, Unit};

const MARK: &str =
    "<!-- From here on generated: UPDATE_DOCS=1 cargo test -p vmm --lib metrics -->\n";

fn docs(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs")).join(name)
}

/// Names of the samples of a family, with its labels.
fn samples(definition: &'static Definition) -> Vec<(String, Vec<&'static str>)> {
    let name = definition.name();
    let labels = definition.labels.to_vec();
    match definition.kind {
        Kind::Histogram => {
            let buckets = labels.iter().copied().chain(["le"]).collect();
            vec![
                (format!("{name}_bucket"), buckets),
                (format!("{name}_count"), labels.clone()),
                (format!("{name}_sum"), labels),
            ]
        }
        kind => vec![(format!("{name}{}", kind.suffix()), labels)],
    }
}

/// The labels of each sample, by name.
fn known() -> BTreeMap<String, Vec<&'static str>> {
    Family::ALL.iter().flat_map(|family| samples(family.definition())).collect()
}

fn table() -> String {
    let mut out = String::from(
        "\n## All metrics\n\n| metric | type | unit | labels | meaning |\n| --- | --- | --- | --- | --- |\n",
    );
    for definition in Family::ALL.iter().map(|family| family.definition()) {
        let name = definition.name();
        let suffix = definition.kind.suffix();
        let unit = match definition.unit {
            Unit::Plain => "",
            Unit::BytesPerSecond => "bytes per second",
            unit => unit.name(),
        };
        let labels: Vec<_> = definition.labels.iter().map(|label| format!("`{label}`")).collect();
        let (kind, labels) = (definition.kind.name(), labels.join(", "));
        let _ = writeln!(
            out,
            "| `{name}{suffix}` | {kind} | {unit} | {labels} | {} |",
            definition.help
        );
    }
    out
}

#[test]
fn the_page_is_up_to_date() {
    let path = docs("metrics.md");
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    let (hand_written, _) = kept.split_once(MARK).unwrap();
    let now = format!("{hand_written}{MARK}{}", table());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &now).unwrap();
        return;
    }
    assert!(kept == now, "docs/metrics.md is stale, run the test with UPDATE_DOCS=1");
}

fn is_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Each name of ours in a text, and what is behind it.
fn names(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.match_indices("godwit_").filter_map(|(at, _)| {
        let rest = &text[at..];
        let is_begin = !text[..at].ends_with(is_part);
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        is_begin.then(|| rest.split_at(end))
    })
}

#[test]
fn the_page_names_no_metric_that_there_is_not() {
    let page = std::fs::read_to_string(docs("metrics.md")).unwrap();
    let known = known();
    // The prefix alone is that of an expression for all of them.
    for (name, behind) in names(&page).filter(|(name, _)| *name != "godwit_") {
        // `godwit_balloon_*` and the like.
        let is_begin = behind.starts_with('*') && known.keys().any(|it| it.starts_with(name));
        let is_family = Family::ALL.iter().any(|family| family.definition().name() == name);
        assert!(known.contains_key(name) || is_begin || is_family, "{name} is no metric");
    }
}

/// All expressions below a value: of panels, and of variables.
fn expressions(value: &Value, out: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                match value.as_str() {
                    Some(text) if ["expr", "query", "definition"].contains(&key.as_str()) => {
                        out.push(text.to_owned());
                    }
                    _ => expressions(value, out),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| expressions(value, out)),
        _ => {}
    }
}

#[test]
fn the_dashboard_asks_for_metrics_and_labels_that_there_are() {
    let text = std::fs::read_to_string(docs("grafana/godwit.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let mut all = Vec::new();
    expressions(&dashboard, &mut all);
    let asking: Vec<_> = all.iter().filter(|text| text.contains("godwit_")).collect();
    assert!(asking.len() > 30, "{asking:?}");
    let known = known();
    for expression in asking {
        let mut found = 0;
        for (name, behind) in names(expression) {
            found += 1;
            let labels = known.get(name);
            let labels = labels.unwrap_or_else(|| panic!("{name} of {expression} is no metric"));
            let Some((matchers, _)) = behind.strip_prefix('{').and_then(|it| it.split_once('}'))
            else {
                continue;
            };
            for matcher in matchers.split(',') {
                let end = matcher.find(|c| !is_part(c)).unwrap_or(matcher.len());
                let label = matcher[..end].trim();
                // Those that Prometheus adds.
                let is_there = labels.contains(&label) || ["instance", "job"].contains(&label);
                assert!(is_there, "{label} of {expression} is no label of {name}");
            }
        }
        assert!(found > 0, "{expression}");
        // A rate is of what only grows.
        for (at, call) in
            ["rate(", "increase("].iter().flat_map(|call| expression.match_indices(call))
        {
            let inner = &expression[at + call.len()..];
            let (name, _) = names(inner).next().unwrap();
            let is_counted = ["_total", "_bucket", "_count", "_sum"];
            assert!(is_counted.iter().any(|end| name.ends_with(end)), "{name} in {expression}");
        }
    }
    // Its panels have ids and places of their own.
    let panels = dashboard["panels"].as_array().unwrap();
    let mut ids: Vec<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), panels.len());
    let overlaps = |a: &Value, b: &Value| {
        let place = |panel: &Value, key: &str| panel["gridPos"][key].as_u64().unwrap();
        let apart = |at: &str, len: &str| {
            place(a, at) + place(a, len) <= place(b, at)
                || place(b, at) + place(b, len) <= place(a, at)
        };
        !apart("x", "w") && !apart("y", "h")
    };
    for (number, panel) in panels.iter().enumerate() {
        let after = &panels[number + 1..];
        assert!(!after.iter().any(|other| overlaps(panel, other)), "{} overlaps", panel["title"]);
    }
}
