// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `docs/limits.md` against the sources: each constant has the value that the page says, each test exists, and no limit
//! of a peer is missing. Also that the other pages on security name tests that exist.
//!
//! Sources are read as text: a limit is a line `const NAME: type = expression;`, or a field of a `Default`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const PAGE: &str = "docs/limits.md";

/// Modules of which each limit has to be in [`PAGE`] or in `docs/migration.md`.
const PEERS: &[&str] = &[
    "cloud-hypervisor-state/src",
    "devices/src/endpoint",
    "devices/src/tpm",
    "devices/src/virtio/block/qcow2",
    "devices/src/virtio/block/vhd.rs",
    "devices/src/virtio/block/vhdx",
    "devices/src/virtio/vdpa",
    "devices/src/virtio/vhost_user",
    "devices/src/virtio/vsock",
    "prezero-pool-client/src",
    "prezero-pool/src/connections.rs",
    "prezero-pool/src/server.rs",
    "vfio/src/migration",
    "vfio/src/user",
    "vm-migration/src/channel.rs",
    "vm-migration/src/destination",
    "vm-migration/src/options.rs",
    "vm-migration/src/page_server",
    "vm-migration/src/protocol",
    "vm-migration/src/snapshot",
    "vm-migration/src/source",
    "vm-migration/src/transport",
    "vmm/src/api",
    "vmm/src/machine/tpms.rs",
];
/// Limits in these that are none of a peer: of this side's own steps, or a part of another limit.
const OWN: &[&str] = &[
    // Threads, chunks and times of a destination's own work.
    "CHUNKS_MAX",
    "END_TIMEOUT",
    "LET_GO_MAX",
    "READERS_MAX",
    "THREADS_MAX",
    // How a refused client hears why, within the limits of a connection.
    "REFUSED_TIME",
    "HELLO_BYTES_MAX",
    // Names and files of the configuration.
    "FILE_BYTES_MAX",
    "HOST_BYTES_MAX",
    "PATH_BYTES_MAX",
    // Sizes of records that this side makes, and of pieces that it sends or places.
    "CONTENTS_PAGES_MAX",
    "OVERHEAD_BYTES_MAX",
    "PLAIN_BYTES_MAX",
    "RECORDS_MAX",
    "RECORD_BYTES_MAX",
    "MESSAGE_BYTES_MAX",
    "MISSING_BYTES_MAX",
    "GAP_PAGES_MAX",
    // Steps of a source's own work, what it queues, and defaults.
    "AGAIN_BYTES_MAX",
    "AHEAD_MAX",
    "ASKED_MAX",
    "BULK_CHUNK_TIME",
    "DOWNTIME_MAX_FACTOR",
    "FRAME_PERCENT_MAX",
    "GIVE_WAY_MAX",
    "HINTS_TIME_MAX",
    "MESSAGE_RUNS_MAX",
    "PACED_TIME",
    "PAUSE_MAX",
    "PREPARES_MAX",
    "STALE_ROUNDS_MAX",
    "STALLED_ROUNDS_MAX",
    "THROTTLE_MAX_PERCENT",
    "TIMEOUT_DEFAULT",
    "UNANSWERED_MAX",
    "UNITS_MAX",
    // Characters of a name in a message.
    "SHOWN_MAX",
    // Turns of a socket device.
    "LARGE_MAX",
    // A read that ends at once.
    "READ_TIME_MIN",
    "ROUNDS_MAX",
    "TAKEN_RANGES_MAX",
    // A year, above which a time is none.
    "TIME_MAX",
];

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Source files below a path.
fn sources(path: &Path, found: &mut Vec<PathBuf>) {
    if path.is_file() {
        if path.extension().is_some_and(|end| end == "rs") {
            found.push(path.to_owned());
        }
        return;
    }
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name != "target" && !name.to_string_lossy().starts_with('.') {
            sources(&entry.path(), found);
        }
    }
}

/// What is between backticks.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// The expression of a constant, or of a field of the defaults.
fn expression<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    if let Some(field) = name.strip_prefix("Limits::") {
        let defaults = text.split_once("impl Default for Limits")?.1;
        let (_, rest) = defaults.split_once(&format!(" {field}: "))?;
        return Some(rest.split_once(",\n")?.0);
    }
    let (_, rest) = text.split_once(&format!("const {name}: "))?;
    Some(rest.split_once('=')?.1.split_once(';')?.0.trim())
}

/// The value of an expression of literals and of constants of the same text.
fn value(text: &str, expression: &str) -> Option<u128> {
    let both = |(one, other): (&str, &str)| Some((value(text, one)?, value(text, other)?));
    let expression = expression.trim();
    if let Some((one, other)) = expression.split_once(" << ").and_then(both) {
        return one.checked_shl(u32::try_from(other).ok()?);
    }
    if let Some((one, other)) = expression.split_once(" + ").and_then(both) {
        return one.checked_add(other);
    }
    if let Some((one, other)) = expression.split_once(" - ").and_then(both) {
        return one.checked_sub(other);
    }
    if let Some((one, other)) = expression.split_once(" * ").and_then(both) {
        return one.checked_mul(other);
    }
    let number = expression.split(" as ").next()?;
    if let Some((_, name)) = number.rsplit_once("::").filter(|(of, _)| !of.ends_with("Duration")) {
        // `libc::PIPE_BUF` and constants of another module.
        return (name == "PIPE_BUF").then_some(4096);
    }
    for (unit, ms) in [("millis", 1), ("secs", 1000), ("mins", 60_000), ("hours", 3_600_000)] {
        if let Some(rest) = number.strip_prefix(&format!("Duration::from_{unit}(")) {
            return value(text, rest.strip_suffix(')')?)?.checked_mul(ms);
        }
    }
    match number.replace('_', "").parse() {
        Ok(number) => Some(number),
        Err(_) => value(text, self::expression(text, number)?),
    }
}

/// As the page writes it: `16 KiB`, `10 s`, `128`.
fn written(name: &str, expression: &str, value: u128) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let is_bytes = name.to_lowercase().contains("bytes") || name == "REGION_MAX";
    let whole = |unit: u128| value >= unit && value.is_multiple_of(unit);
    if expression.contains("Duration") || name.ends_with("_MS_MAX") || name == "CONFIG_LIMIT" {
        for (unit, ms) in [("days", 86_400_000), ("min", 60_000), ("s", 1000)] {
            if whole(ms) {
                return format!("{} {unit}", value / ms);
            }
        }
        return format!("{value} ms");
    }
    match UNITS.iter().find(|(_, shift)| is_bytes && whole(1 << shift)) {
        Some((unit, shift)) => format!("{} {unit}", value >> shift),
        None if is_bytes => format!("{value} bytes"),
        None => value.to_string(),
    }
}

/// A line of the page with the value that the sources have; other lines as they are.
fn line_now(line: &str) -> String {
    let mut cells: Vec<String> = line.split('|').map(str::to_owned).collect();
    let [_, _, name, kept, path, _, _] = &mut cells[..] else { return line.to_owned() };
    let (Some(name), Some(path)) = (quoted(name).next(), quoted(path).next()) else {
        return line.to_owned();
    };
    let text = read(path);
    let Some(expression) = expression(&text, name) else { panic!("{path} has no {name}") };
    // What it is made of may be in a file beside it.
    let mut beside = Vec::new();
    sources(Path::new(ROOT).join(path).parent().expect("a folder"), &mut beside);
    let text = beside
        .iter()
        .fold(text.clone(), |all, file| all + &fs::read_to_string(file).expect("a source"));
    let value = value(&text, expression)
        .unwrap_or_else(|| panic!("{path}: {name} is {expression}, which the test cannot read"));
    *kept = format!(" {} ", written(name, expression, value));
    cells.join("|")
}

#[test]
fn the_values_of_limits_are_those_of_the_sources() {
    let page = read(PAGE);
    let now: String = page.lines().map(|line| line_now(line) + "\n").collect();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(Path::new(ROOT).join(PAGE), &now).expect("the page");
        return;
    }
    let stale = page.lines().zip(now.lines()).find(|(kept, now)| kept != now);
    assert_eq!(stale, None, "{PAGE} is stale, run the test with UPDATE_DOCS=1");
}

/// Whether a constant of this name is a limit.
fn is_limit(name: &str) -> bool {
    const WORDS: [&str; 6] = ["MAX", "LIMIT", "TIMEOUT", "WITHIN", "TIME", "PATIENCE"];
    name.split('_').any(|word| WORDS.contains(&word))
}

#[test]
fn every_limit_of_a_peer_is_on_a_page() {
    let pages = read(PAGE) + &read("docs/migration.md");
    let named: BTreeSet<&str> = quoted(&pages).collect();
    let mut missing = Vec::new();
    let mut seen = BTreeSet::new();
    for path in PEERS {
        let mut files = Vec::new();
        sources(&Path::new(ROOT).join(path), &mut files);
        assert!(!files.is_empty(), "nothing in {path}");
        for file in files {
            let name = file.strip_prefix(ROOT).unwrap_or(&file).to_string_lossy();
            if ["tests", "fuzz", "scripted"].iter().any(|what| name.contains(what)) {
                continue;
            }
            let text = fs::read_to_string(&file).expect("a source");
            for line in
                text.lines().filter(|line| line.starts_with("const ") || line.starts_with("pub"))
            {
                let Some((before, rest)) = line.split_once("const ") else { continue };
                // Not a parameter of a type.
                if before.contains('<') {
                    continue;
                }
                let Some((constant, _)) = rest.split_once(": ") else { continue };
                if !is_limit(constant) {
                    continue;
                }
                seen.insert(constant.to_owned());
                if !named.contains(constant) && !OWN.contains(&constant) {
                    missing.push(format!("{constant} ({})", file.display()));
                }
            }
        }
    }
    assert_eq!(missing, Vec::<String>::new(), "add a row to {PAGE}, or the name to OWN");
    let gone: Vec<_> = OWN.iter().filter(|name| !seen.contains(**name)).collect();
    assert!(gone.is_empty(), "no constants any more: {gone:?}");
}

/// Names of functions, modules and fuzz targets, and of tests that are no functions.
fn all_tests() -> BTreeSet<String> {
    let mut files = Vec::new();
    sources(Path::new(ROOT), &mut files);
    let mut found = BTreeSet::new();
    let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
    for text in files.iter().map(|file| fs::read_to_string(file).expect("a source")) {
        for begin in ["fn ", "mod "] {
            let after = text.split(begin).skip(1);
            found.extend(
                after.filter_map(|rest| rest.split(|it| !is_part(it)).next()).map(str::to_owned),
            );
        }
        found.extend(text.split('"').filter(|text| text.contains("::")).map(str::to_owned));
    }
    found.extend(read("fuzz/Cargo.toml").split('"').map(str::to_owned));
    found
}

/// Whether something of this name is a test, a module of tests, or a fuzz target.
fn exists(all: &BTreeSet<String>, name: &str) -> bool {
    // `strangers::*`: the module; `virtio_*`: any of them.
    let last = name.trim_end_matches("::*").rsplit("::").next().unwrap_or(name);
    match last.strip_suffix('*') {
        Some(begin) => all.iter().any(|name| name.starts_with(begin)),
        None => all.contains(last) || all.contains(name),
    }
}

#[test]
fn the_tests_of_limits_exist() {
    let all = all_tests();
    for page in [PAGE, "docs/migration.md"] {
        let text = read(page);
        let mut rows = 0;
        let tables = text.split("\n\n").filter(|part| {
            part.lines()
                .next()
                .is_some_and(|head| head.starts_with("| what") && head.ends_with("| tests |"))
        });
        for line in tables.flat_map(|table| table.lines().skip(2)) {
            let cell = line.trim_end_matches(" |").rsplit('|').next().unwrap_or_default();
            assert!(cell.contains('`') || cell.trim() == "none", "{page}: no test in {line}");
            rows += 1;
            for name in quoted(cell) {
                assert!(exists(&all, name), "{page} names {name}, which is no test");
            }
        }
        assert!(rows > 10, "{page}: {rows} rows");
    }
}

#[test]
fn the_tests_of_threats_and_misuse_exist() {
    let all = all_tests();
    let mut seen = 0;
    for page in ["docs/threat-model.md", "docs/virtio-misuse.md"] {
        let text = read(page);
        for line in text.lines().filter(|line| line.starts_with('|')) {
            let cell = line.trim_end_matches(" |").rsplit('|').next().unwrap_or_default();
            // Groups of the lab and programs are named as well.
            for name in quoted(cell)
                .filter(|name| !name.contains(['-', '/', ' ']) && !name.ends_with("tests"))
            {
                seen += 1;
                assert!(exists(&all, name), "{page} names {name}, which is no test");
            }
        }
    }
    assert!(seen > 100, "{seen}");
}

#[test]
fn the_totals_of_misuse_add_up() {
    let text = read("docs/virtio-misuse.md");
    let (_, totals) = text.split_once("## Totals").expect("the totals");
    let numbers = |line: &str| -> Vec<u32> {
        let cells = line.split('|').skip(2).take(4);
        cells.map(|cell| cell.trim().replace(',', "").parse().expect("a number")).collect()
    };
    let rows = totals.lines().skip_while(|line| !line.starts_with("| ---")).skip(1);
    let rows: Vec<_> = rows.take_while(|line| line.starts_with('|')).map(numbers).collect();
    let (all, areas) = rows.split_last().expect("rows");
    for row in &rows {
        assert_eq!(row[0], row[1..].iter().sum::<u32>(), "{row:?}");
    }
    for (column, sum) in all.iter().enumerate() {
        assert_eq!(*sum, areas.iter().map(|row| row[column]).sum::<u32>(), "column {column}");
    }
}
