// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Events as their readers find them, and their list.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;

use super::*;

#[test]
fn events_are_pretty_and_separated_by_blank_lines() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("events");
    std::fs::write(&path, "old").unwrap();
    let monitor =
        EventMonitor::start(EventTarget::parse(&format!("path={}", path.display())).unwrap())
            .unwrap();
    monitor.tell("vm", "booting", &[]);
    monitor.tell("virtio-device", "activated", &[("id", "__rng")]);
    assert!(monitor.flush(Duration::from_secs(10)));
    let text = std::fs::read_to_string(&path).unwrap();
    // What was there is kept.
    let text = text.strip_prefix("old").unwrap();
    let blocks: Vec<_> = text.split("\n\n").collect();
    assert_eq!((blocks.len(), blocks[2]), (3, ""));
    assert!(blocks[0].starts_with("{\n  \"timestamp\": {\n    \"secs\": "), "{text}");
    let first: serde_json::Value = serde_json::from_str(blocks[0]).unwrap();
    let wallclock = first["wallclock"].as_str().unwrap();
    assert!(wallclock.starts_with("20") && wallclock.ends_with('Z'), "{wallclock}");
    assert!(blocks[0].ends_with(
        "Z\",\n  \"source\": \"vm\",\n  \"event\": \"booting\",\n  \"properties\": null\n}"
    ));
    let second: serde_json::Value = serde_json::from_str(blocks[1]).unwrap();
    assert_eq!(second["properties"]["id"], "__rng");
}

#[test]
fn a_reader_that_does_not_read_never_blocks_and_losses_are_counted() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let monitor = EventMonitor::start(EventTarget::Fd(ours.into())).unwrap();
    let long = "x".repeat(4096);
    // Until the other end takes no more, events find room again, and the next one says how many did not.
    let begun = std::time::Instant::now();
    let mut told = 0;
    while told < QUEUE_EVENTS * 2 || monitor.queue.lost() == 0 {
        monitor.tell("vm", "migration-failed", &[("error", &long)]);
        told += 1;
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    assert!(!monitor.flush(Duration::from_millis(1)));
    // Once it reads, what is left arrives and says how much is missing.
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        let mut chunk = vec![0_u8; 1 << 16];
        while !text.contains("lost_events_before") {
            let n = theirs.read(&mut chunk).unwrap();
            text.push_str(std::str::from_utf8(&chunk[..n]).unwrap());
        }
    });
    while !reader.is_finished() {
        monitor.tell("vm", "booted", &[]);
        std::thread::yield_now();
    }
    reader.join().unwrap();
}

#[test]
fn a_reader_that_is_gone_does_no_harm() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let monitor = EventMonitor::start(EventTarget::Fd(ours.into())).unwrap();
    monitor.tell("vm", "booted", &[]);
    monitor.tell("vm", "deleted", &[]);
    assert!(monitor.flush(Duration::from_secs(10)));
}

/// A named pipe.
fn pipe(folder: &std::path::Path) -> PathBuf {
    let path = folder.join("events");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    path
}

/// Waits until nothing has it open to read: a program that another test starts at this moment has all
/// descriptors of this process for an instant.
fn wait_for_no_reader(path: &std::path::Path) {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).custom_flags(libc::O_NONBLOCK);
    while options.open(path).is_ok() {
        std::thread::yield_now();
    }
}

/// A reader of it, which may be there before a writer.
fn reader_of(path: &std::path::Path) -> File {
    std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).unwrap()
}

/// Reads until there are so many events, which is soon.
fn read_events(reader: &mut File, count: usize) -> Vec<serde_json::Value> {
    let (mut text, began) = (Vec::new(), Instant::now());
    let mut chunk = vec![0_u8; 1 << 16];
    loop {
        let found = by_braces(&text);
        if found.len() >= count {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{} of {count} events", found.len());
        match reader.read(&mut chunk) {
            Ok(read) => text.extend_from_slice(&chunk[..read]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => panic!("{error}"),
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_reader_of_a_pipe_that_stops_for_a_while_misses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = pipe(folder.path());
    let mut reader = reader_of(&path);
    let monitor = EventMonitor::start(EventTarget::Path(path)).unwrap();
    let long = "x".repeat(1000);
    // More than a pipe holds.
    for _ in 0..200 {
        monitor.tell("vm", "migration-phase", &[("phase", &long)]);
    }
    assert!(!monitor.flush(Duration::from_millis(100)), "it waits for the reader");
    let events = read_events(&mut reader, 200);
    assert!(events.iter().all(|event| event["properties"].get("lost_events_before").is_none()));
    assert!(monitor.flush(Duration::from_secs(30)));
}

#[test]
fn a_pipe_that_has_a_reader_again_has_events_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = pipe(folder.path());
    let mut first = reader_of(&path);
    let monitor = EventMonitor::start(EventTarget::Path(path.clone())).unwrap();
    monitor.tell("vm", "booting", &[]);
    read_events(&mut first, 1);
    drop(first);
    wait_for_no_reader(&path);
    for _ in 0..3 {
        monitor.tell("vm", "booted", &[]);
    }
    assert!(monitor.flush(Duration::from_secs(30)), "it does not wait without a reader");
    let mut second = reader_of(&path);
    monitor.tell("vm", "pausing", &[]);
    monitor.tell("vm", "paused", &[]);
    let events = read_events(&mut second, 2);
    assert_eq!(events[0]["event"], "pausing");
    assert_eq!(events[0]["properties"]["lost_events_before"], "3");
    assert_eq!(events[1]["properties"], serde_json::Value::Null);
}

/// Every `emit("source", "event"` in a file.
fn emitted(text: &str) -> Vec<(String, String)> {
    let literal = |text: &str| {
        let (name, rest) = text.trim_start().strip_prefix('"')?.split_once('"')?;
        Some((name.to_owned(), rest.trim_start().strip_prefix(',')?.to_owned()))
    };
    text.split("emit(")
        .skip(1)
        .filter_map(|after| {
            let (source, rest) = literal(after)?;
            Some((source, literal(&rest)?.0))
        })
        .collect()
}

/// Every file of the crate but those of the list itself.
fn sources() -> Vec<String> {
    let mut folders = vec![PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
    let mut texts = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("events") {
                folders.push(path);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                texts.push(std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    texts
}

#[test]
fn what_is_told_and_what_is_listed_are_the_same() {
    let sources = sources();
    for (source, event) in sources.iter().flat_map(|text| emitted(text)) {
        let known = NAMES.iter().any(|(s, e, _)| (*s, *e) == (&*source, &*event));
        assert!(known, "{source}.{event} is not among the names");
    }
    // The name of some stands apart from the call.
    for (source, event, _) in NAMES {
        let literal = format!("\"{event}\"");
        let is_told = sources.iter().any(|text| text.contains(&literal));
        assert!(is_told, "{source}.{event} is listed and never told");
    }
    let text = "emit(\n \"vm\",\n \"booted\", &[])";
    assert_eq!(emitted(text), [("vm".to_owned(), "booted".to_owned())]);
}

#[test]
fn the_page_of_the_documents_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/events.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, page()).unwrap();
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    assert!(kept == page(), "docs/events.md is stale, run the test with UPDATE_DOCS=1");
}

fn event(properties: &[(&'static str, String)]) -> Event {
    let (time, wallclock) = (Duration::from_secs(1), UNIX_EPOCH);
    Event { time, wallclock, source: "vm", name: "booted", properties: properties.to_vec() }
}

/// What libvirt's reader finds: it counts braces, wherever they stand.
fn by_braces(text: &[u8]) -> Vec<serde_json::Value> {
    let mut found = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, byte) in text.iter().enumerate() {
        match byte {
            b'{' => {
                depth += 1;
                if depth == 1 {
                    start = at;
                }
            }
            b'}' if depth > 0 => {
                depth -= 1;
                if depth == 0 {
                    found.push(serde_json::from_slice(&text[start..=at]).unwrap());
                }
            }
            _ => {}
        }
    }
    found
}

#[test]
fn a_reader_that_counts_braces_finds_every_event() {
    let awkward = "disk '/a{b' is gone: \"{\" — ü";
    let mut text = event(&[("error", awkward.to_owned())]).into_text();
    text.extend(event(&[]).into_text());
    let found = by_braces(&text);
    assert_eq!(found.len(), 2, "{}", String::from_utf8_lossy(&text));
    assert_eq!(found[0]["properties"]["error"], awkward);
    assert_eq!(found[1]["properties"], serde_json::Value::Null);
}

#[test]
fn an_event_fits_into_a_pipe_and_its_longest_property_is_cut() {
    for long in ["x".repeat(10_000), "ü{".repeat(20_000)] {
        let short = "kept".to_owned();
        let text = event(&[("id", short.clone()), ("error", long.clone())]).into_text();
        assert!(text.len() <= text::EVENT_MAX_BYTES && text.len() > 1000, "{}", text.len());
        let found = by_braces(&text);
        assert_eq!(found[0]["properties"]["id"], short);
        let error = found[0]["properties"]["error"].as_str().unwrap();
        let kept = error.strip_suffix("...").unwrap();
        assert!(!kept.is_empty() && long.starts_with(kept), "{error}");
    }
    // Wherever characters begin: a peer or a path may have chosen them.
    for character in ["\u{e9}", "\u{20ac}", "\u{1f600}"] {
        for ahead in 0..character.len() {
            let long = "a".repeat(ahead) + &character.repeat(5000);
            let text = event(&[("error", long.clone())]).into_text();
            assert!(text.len() <= text::EVENT_MAX_BYTES, "{}", text.len());
            let found = by_braces(&text);
            let error = found[0]["properties"]["error"].as_str().unwrap();
            assert!(long.starts_with(error.strip_suffix("...").unwrap()), "{error}");
        }
    }
    let fits = "y".repeat(3000);
    let text = event(&[("error", fits.clone())]).into_text();
    assert_eq!(by_braces(&text)[0]["properties"]["error"], fits);
}

/// What begins, and how it can end: one of these follows.
const PAIRS: &[(&str, &[&str])] = &[
    ("booting", &["booted", "boot-failed"]),
    ("prefault-started", &["prefault-completed", "prefault-cancelled", "prefault-failed"]),
    ("resizing", &["resized", "resize-failed"]),
    ("pausing", &["paused", "pause-failed"]),
    ("resuming", &["resumed", "resume-failed", "restore-failed"]),
    ("snapshotting", &["snapshotted", "snapshot-failed"]),
    ("restoring", &["restored", "restore-failed"]),
    ("rebooting", &["rebooted", "reboot-failed"]),
    ("device-removing", &["device-removed"]),
    ("disk-full", &["disk-has-room", "rebooted", "shutdown"]),
    ("migration-starting", &["migration-finished", "migration-handed-on", "migration-failed"]),
    ("coredumping", &["coredumped", "coredump-failed"]),
    ("migration-cancelling", &["migration-cancelled"]),
    ("migration-receive-ready", &["migration-receive-finished", "migration-receive-failed"]),
];

#[test]
fn what_begins_has_an_end() {
    let is_known = |name: &str| NAMES.iter().any(|(_, event, _)| *event == name);
    for (begin, ends) in PAIRS {
        assert!(is_known(begin) && ends.iter().all(|end| is_known(end)), "{begin}");
    }
    for (_, event, _) in NAMES.iter().filter(|(_, event, _)| event.ends_with("ing")) {
        let is_step = ["starting", "migration-handing", "postcopy-migration-recovering"];
        let has_end = PAIRS.iter().any(|(begin, _)| begin == event);
        let is_page_server = event.starts_with("page-server");
        assert!(has_end || is_step.contains(event) || is_page_server, "{event} has no end");
    }
}

#[test]
fn the_wall_clock_is_told_in_utc() {
    let at =
        |secs, micros| utc(UNIX_EPOCH + Duration::from_secs(secs) + Duration::from_micros(micros));
    assert_eq!(at(0, 0), "1970-01-01T00:00:00.000000Z");
    assert_eq!(at(951_782_399, 7), "2000-02-28T23:59:59.000007Z");
    assert_eq!(at(951_782_400, 0), "2000-02-29T00:00:00.000000Z");
    assert_eq!(at(1_716_278_535, 542_701), "2024-05-21T08:02:15.542701Z");
    assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000000Z");
}

#[test]
fn targets() {
    assert!(matches!(EventTarget::parse("path=/x"), Ok(EventTarget::Path(_))));
    for bad in ["", "/x", "path=", "fd=", "fd=x", "fd=-1", "fd=1000000"] {
        assert!(EventTarget::parse(bad).is_err(), "{bad}");
    }
    let missing = EventTarget::Path("/nonexistent/dir/file".into());
    assert!(matches!(EventMonitor::start(missing), Err(EventError::Open { .. })));
}
