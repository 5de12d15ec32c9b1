// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The network and the peers fail at every step of the protocol.
//!
//! Every message of the protocol ([`relay::rows`]), before it is passed on and before its answer
//! is, times what happens there, is a case: afterwards the guest is where the state machine says,
//! whole, both sides that are left say why, and both can be used again at once.
//!
//! A few cases of each table are drawn, by a seed that is printed and that `GODWIT_CUT_SEED` repeats. With
//! `GODWIT_CUT_TABLES=1` there are all of them, and the tables are printed and kept as files.

use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::{Duration, Instant, UNIX_EPOCH};

use parking_lot::Mutex;
use serde_json::Value;
use vm_migration::protocol::message::Command;

use crate::harness::migrate::{Reception, migrate};
use crate::harness::relay::{self, Link, Point, Relay, Row, Setting};
use crate::harness::{Mode, Suite, Transport, Vmm, wait_for};

/// For one table; each case is about two seconds.
const LIMIT: Duration = Duration::from_mins(6);
/// What the guest writes cannot be compressed, so there is something else in front of it.
const FILLER: u8 = 0x5a;
const FILLER_GPA: u64 = 16 << 20;
const FILLER_BYTES: usize = 16 << 20;
/// Until a case gets to its step.
const REACH: Duration = Duration::from_secs(20);
/// Cases at once: the guests keep a processor busy each.
const AT_ONCE: usize = 2;
/// Cases of a table that are drawn where not all of them are asked for.
const DRAWN: usize = 4;

/// What happens at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    KillSource,
    KillDestination,
    /// All connections end.
    Cut,
    /// The message is not delivered until the migration is cancelled, or it is after all.
    Stall,
}

impl Act {
    const ALL: [Self; 4] = [Self::KillSource, Self::KillDestination, Self::Cut, Self::Stall];

    const fn name(self) -> &'static str {
        match self {
            Self::KillSource => "source_killed",
            Self::KillDestination => "destination_killed",
            Self::Cut => "cut",
            Self::Stall => "stalled",
        }
    }
}

/// How far the handover is at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The destination has not acknowledged it.
    Before,
    /// It has, and the source does not know.
    Acknowledged,
    /// The source has handed the guest over, and the destination does not know.
    Given,
    /// The guest runs at the destination.
    After,
    /// With all its pages.
    Complete,
}

fn stage(row: Row) -> Stage {
    match (row.command, row.point, row.mode) {
        // The three are sent in one go.
        (
            Command::Pending | Command::State | Command::Complete | Command::CompletePaused,
            Point::Answer,
            _,
        ) => Stage::Acknowledged,
        (Command::Confirm, Point::Message, _) => Stage::Given,
        (Command::Confirm, Point::Answer, Mode::Precopy) | (Command::PostcopyDone, ..) => {
            Stage::Complete
        }
        (Command::Confirm, Point::Answer, Mode::Postcopy) => Stage::After,
        (..) if row.mode == Mode::Postcopy && row.link != Link::Control => Stage::After,
        (..) => Stage::Before,
    }
}

/// Where the guest has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// At the source, as before.
    Source,
    /// At the destination, whole.
    Destination,
    /// Whole at the destination, which waits for a person to say that it runs nowhere else.
    Standing,
    /// At the destination, and waits for pages that are lost.
    Waiting,
    /// Nowhere: its only host was killed, or each side has one half of it.
    Lost,
}

fn expected(row: Row, act: Act) -> Place {
    let at = stage(row);
    match act {
        Act::KillSource | Act::Cut => match at {
            Stage::Before | Stage::Acknowledged if act == Act::Cut => Place::Source,
            Stage::Given | Stage::After if heals(row, act) => Place::Destination,
            Stage::Acknowledged | Stage::Given if row.mode == Mode::Precopy => Place::Standing,
            Stage::Before | Stage::Acknowledged | Stage::Given => Place::Lost,
            Stage::After => Place::Waiting,
            Stage::Complete => Place::Destination,
        },
        Act::KillDestination => match at {
            Stage::Before | Stage::Acknowledged => Place::Source,
            Stage::Given | Stage::After | Stage::Complete => Place::Lost,
        },
        Act::Stall => match at {
            Stage::Before | Stage::Acknowledged => Place::Source,
            Stage::Given | Stage::After | Stage::Complete => Place::Destination,
        },
    }
}

/// Connections of a postcopy are made again.
fn heals(row: Row, act: Act) -> bool {
    let given = [Stage::Given, Stage::After, Stage::Complete].contains(&stage(row));
    act == Act::Cut && row.mode == Mode::Postcopy && given
}

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        for act in Act::ALL {
            let name = format!("cuts::{}_{}", mode.name(), act.name());
            suite.add_long(&name, LIMIT, move || {
                table(mode, act);
            });
        }
    }
    suite.add("cuts::every_message_has_been_seen", every_message);
}

/// Both ends of a migration that has got to its row.
pub struct Stopped {
    pub source: Vmm,
    pub destination: Vmm,
    pub relay: Relay,
    pub reception: Reception,
}

/// Begins a migration, and waits until it has got to `row`. Whether pages become zero while they
/// are copied, or are asked for while they are under way, is for chance: then it is tried again.
pub fn stop_at(row: Row) -> Stopped {
    stop_at_after(row, |_| {})
}

/// The same; `prepare` sees the source before it begins.
pub fn stop_at_after(row: Row, mut prepare: impl FnMut(&Vmm)) -> Stopped {
    const TRIES: u32 = 20;
    for _ in 0..TRIES {
        let stopped = begin(row, &mut prepare);
        let start = Instant::now();
        loop {
            if stopped.relay.wait(Duration::from_millis(20)) {
                return stopped;
            }
            let progress = stopped.destination.api().get("vm.migration-progress").json();
            if progress["phase"] == "done" {
                break;
            }
            let seen = stopped.relay.seen();
            assert!(start.elapsed() < REACH, "{row:?} was not reached, only {seen:?}");
        }
    }
    panic!("{row:?} was not reached in {TRIES} migrations");
}

fn begin(row: Row, prepare: &mut impl FnMut(&Vmm)) -> Stopped {
    let cmdline = match row.setting {
        Setting::ZeroPages => "workload=random-write prefill=0 write_percent=30 mem=32M",
        Setting::Compressed => "workload=random-write mem=2M",
        _ => "workload=random-write mem=32M",
    };
    // Only what is resident can be written from outside.
    let prefault = if row.setting == Setting::Compressed { "on" } else { "off" };
    let source = Vmm::boot(1, &format!("size=96M,shared=on,prefault={prefault}"), cmdline);
    if row.setting == Setting::Compressed {
        let filler = vec![FILLER; FILLER_BYTES];
        source.guest().memory().write(FILLER_GPA, &filler).expect("guest memory");
    }
    if row.setting == Setting::Paused {
        source.api().put("vm.pause", "").ok();
    }
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, row.mode);
    let relay = Relay::start(&reception.url, row.mode, Some(row));
    let connections = if row.setting == Setting::Connections { 3 } else { 1 };
    let compression = if row.setting == Setting::Compressed { "zstd" } else { "none" };
    let option = format!(
        "destination_url={},memory_mode={},connections={connections},timeout_s=4,\
         timeout_strategy=ignore,compression={compression}",
        relay.url,
        row.mode.name(),
    );
    prepare(&source);
    source.remote_ok(&["send-migration", &option]);
    Stopped { source, destination, relay, reception }
}

/// The relay holds the first message, so that the destination has heard nothing of the source: it continues
/// waiting for one, whatever happens to this one.
pub fn is_unheard(row: Row) -> bool {
    row.command == Command::Start && row.point == Point::Message
}

/// The progress document of a migration that is over; `None` when the VMM has ended.
pub fn ended(vmm: &Vmm) -> Option<Value> {
    wait_for("the end of the migration", || {
        let Ok(answer) = vmm.api().request("GET", "vm.migration-progress", None) else {
            return Some(None);
        };
        let document = answer.json();
        let over = ["done", "failed", "postcopy-paused", "in-doubt"].map(Value::from);
        over.contains(&document["phase"]).then_some(Some(document))
    })
}

/// The reason in a document, which must have side, step and cause.
fn reason(document: &Value, side: &str) -> String {
    let error = &document["error"];
    assert_eq!(error["side"], side, "{document}");
    assert!(error["step"].as_str().is_some_and(|step| !step.is_empty()), "{document}");
    let chain: Vec<&str> =
        error["chain"].as_array().expect("a chain").iter().filter_map(Value::as_str).collect();
    assert!(chain.len() >= 2, "{document}");
    chain.join(": ")
}

/// One case; gives its line of the table.
fn case(row: Row, act: Act) -> String {
    let Stopped { mut source, mut destination, relay, reception } = stop_at(row);
    let (place, at) = (expected(row, act), stage(row));
    match act {
        Act::KillSource => source.signal(libc::SIGKILL),
        Act::KillDestination => destination.signal(libc::SIGKILL),
        Act::Cut => relay.cut(),
        Act::Stall if place == Place::Source => {
            let answer = source.api().put("vm.migration-cancel", "").ok().json();
            assert_eq!(
                (&answer["side"], &answer["guest"]),
                (&"source".into(), &"on-source".into())
            );
        }
        Act::Stall => relay.release(),
    }
    if act == Act::KillSource {
        source.wait_for_exit();
        // What it had sent still arrives.
        if at == Stage::Complete {
            relay.release();
        }
        if row.point == Point::Answer && place != Place::Lost {
            let _ = ended(&destination);
        }
    }
    if act == Act::KillDestination {
        destination.wait_for_exit();
        relay.cut();
    }
    if heals(row, act) {
        heal(&source, &reception);
    }
    if act == Act::KillSource && row.mode == Mode::Postcopy && place == Place::Lost {
        relay.cut();
        if at != Stage::Before {
            // It waits for the source for as long as it takes; only a person knows that it is dead.
            destination.wait_for_event("migration-in-doubt");
            let refused = destination.api().put("vm.migration-cancel", "");
            assert_eq!(refused.status, 409, "{refused:?}");
            destination.api().put("vm.delete", r#"{"force":true}"#).ok();
        }
    }
    let source_document = (act != Act::KillSource).then(|| ended(&source)).flatten();
    relay.cut();
    if act != Act::KillDestination && is_unheard(row) {
        destination.remote_ok(&["migration-cancel"]);
    }
    let destination_document = (act != Act::KillDestination).then(|| ended(&destination)).flatten();
    // It is answered when the doubt is over.
    let waits = destination_document.as_ref().is_some_and(is_in_doubt);
    let (output, reception) =
        if waits { (None, Some(reception)) } else { (Some(reception.finish()), None) };
    let (here, there) = (source_document.as_ref(), destination_document.as_ref());
    let told = tell(here, there);
    let context = format!("{row:?} {act:?}: {place:?}\n{told}\n{output:?}");
    judge(row, here, there, place, &context);
    settle(row, source, destination, place, act, &context);
    drop(reception.map(Reception::finish));
    format!("| {:?} | {:?} | {:?} | {place:?} | {told} |", row.command, row.link, row.point)
}

/// The network is whole again, by another way.
fn heal(source: &Vmm, reception: &Reception) {
    wait_for("the loss", || {
        let Ok(answer) = source.api().request("GET", "vm.migration-progress", None) else {
            return Some(());
        };
        let document = answer.json();
        if document["phase"] == "postcopy-paused" {
            source.remote(&["migration-recover", &reception.url]);
        }
        (document["phase"] == "done" || document["recovery"]["recoveries"] != 0).then_some(())
    });
    wait_for("the end", || {
        let answer = source.api().request("GET", "vm.migration-progress", None);
        answer.ok().is_none_or(|answer| answer.json()["phase"] == "done").then_some(())
    });
}

fn tell(source: Option<&Value>, destination: Option<&Value>) -> String {
    let mut text = String::new();
    for (side, document) in [("source", source), ("destination", destination)] {
        let Some(document) = document else { continue };
        let said = if !document["error"].is_null() {
            reason(document, side)
        } else if holds_still(document) || is_in_doubt(document) {
            let why = document["recovery"]["reason"].as_str();
            let how = if is_in_doubt(document) { "is in doubt" } else { "holds still" };
            format!("the {side} {how}: {}", why.expect("a reason"))
        } else {
            continue;
        };
        let _ = write!(text, "{}{said}", if text.is_empty() { "" } else { " // " });
    }
    text
}

/// It has lost its connections, and waits for others.
fn holds_still(document: &Value) -> bool {
    document["phase"] == "postcopy-paused" && document["error"].is_null()
}

/// The connection was lost at the commit. The source knows what it did, and the destination does not.
fn is_in_doubt(document: &Value) -> bool {
    document["phase"] == "in-doubt"
}

/// What both sides say about where the guest is.
fn judge(
    row: Row,
    source: Option<&Value>,
    destination: Option<&Value>,
    place: Place,
    context: &str,
) {
    let guest = |document: Option<&Value>| match document {
        Some(document) if holds_still(document) => Value::from("postcopy-paused"),
        Some(document) if is_in_doubt(document) => {
            let at_source = document["side"] == "source";
            Value::from(if at_source { "on-destination" } else { "in-doubt" })
        }
        Some(document) => document["error"]["guest"].clone(),
        None => Value::Null,
    };
    if let Some(document) = source {
        let after = if row.mode == Mode::Postcopy { "postcopy-paused" } else { "on-destination" };
        match place {
            Place::Source => assert_eq!(guest(source), "on-source", "{context}"),
            Place::Destination if document["phase"] == "done" => {}
            _ => assert_eq!(guest(source), after, "{context}"),
        }
    }
    if destination.is_some() {
        let said = guest(destination);
        match place {
            Place::Source | Place::Lost => assert!(
                ["not-here", "in-doubt"].contains(&said.as_str().unwrap_or_default()),
                "{context}"
            ),
            Place::Destination => assert_eq!(said, Value::Null, "{context}"),
            Place::Standing => assert_eq!(said, "in-doubt", "{context}"),
            Place::Waiting => assert_eq!(said, "postcopy-paused", "{context}"),
        }
    }
}

/// The guest is where it should be, and every VMM that is left can be used.
fn settle(row: Row, mut source: Vmm, mut destination: Vmm, place: Place, act: Act, context: &str) {
    match place {
        Place::Source => {
            wait_for("the guest at the source", || (source.api().state() != "").then_some(()));
            if act == Act::KillDestination {
                destination = Vmm::empty();
            } else if destination.api().get("vm.info").status == 200 {
                // The source's last word got lost: it has arrived and must not be started.
                assert_eq!(stage(row), Stage::Acknowledged, "{context}");
                assert_eq!(destination.api().state(), "Paused", "{context}");
                destination.api().put("vm.delete", r#"{"force":true}"#).ok();
            }
            moves_on(row, source, &destination);
        }
        Place::Standing => {
            assert_eq!(destination.api().state(), "Paused", "{context}");
            destination.api().put("vm.resume", "").ok();
            let back = free(source, act == Act::KillSource);
            moves_on(row, destination, &back);
        }
        Place::Destination => {
            if act != Act::KillSource && row.mode == Mode::Precopy {
                // Whether it has ended or was left in doubt, it can be replaced at once.
                let _ = source.exited();
            }
            drop(source);
            moves_on(row, destination, &Vmm::empty());
        }
        Place::Waiting => {
            // Nothing takes it apart but the end of its VMM, which is always possible.
            for name in ["vm.delete", "vm.shutdown", "vm.reboot"] {
                let answer = destination.api().put(name, "");
                assert_eq!(answer.status, 409, "{name}: {answer:?}");
                assert!(answer.body.contains("vmm.shutdown"), "{answer:?}");
            }
            destination.api().put("vmm.shutdown", r#"{"force":true}"#).ok();
            assert_eq!(destination.wait_for_exit(), 0, "{context}");
            drop(free(source, act == Act::KillSource));
        }
        Place::Lost => {
            if act != Act::KillDestination {
                assert_eq!(destination.api().get("vm.info").status, 404, "{context}");
                usable(&destination);
            }
            if act == Act::KillDestination
                && stage(row) == Stage::Complete
                && row.point == Point::Answer
                && row.mode == Mode::Postcopy
            {
                // It had heard that the guest is complete, and has ended well.
                assert_eq!(source.wait_for_exit(), 0, "{context}");
            } else {
                drop(free(source, act == Act::KillSource));
            }
        }
    }
}

/// A source that has given its guest away is free once it is told that it is not needed any more.
fn free(source: Vmm, is_killed: bool) -> Vmm {
    if is_killed {
        return Vmm::empty();
    }
    // What has handed it over is a thread, which may be ahead of the one that answers.
    let shown = wait_for("the source to show the guest no more", || {
        Some(source.api().get("vm.info")).filter(|shown| [404, 409].contains(&shown.status))
    });
    if shown.status == 409 {
        let refused = source.api().put("vm.delete", "");
        assert!(refused.status == 409 && refused.body.contains("force"), "{refused:?}");
        source.api().put("vm.delete", r#"{"force":true}"#).ok();
    } else {
        source.api().put("vm.delete", "").ok();
    }
    usable(&source);
    source
}

/// The VMM has no guest and takes one.
fn usable(vmm: &Vmm) {
    let reception = Reception::start(vmm, Transport::Tcp, Mode::Precopy);
    let answer = vmm.api().put("vm.migration-cancel", "").ok().json();
    assert_eq!(answer["guest"], "not-here", "{answer}");
    let output = reception.finish();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("cancelled"), "{output:?}");
}

/// The guest moves from one VMM to the other, and is whole there.
fn moves_on(row: Row, from: Vmm, to: &Vmm) {
    migrate(from, to, Transport::Tcp, Mode::Precopy);
    if to.api().state() == "Paused" {
        assert_eq!(row.setting, Setting::Paused, "the guest was not paused");
        to.verify_paused();
        to.api().put("vm.resume", "").ok();
    }
    if row.setting == Setting::Compressed {
        let guest = to.guest();
        let mut found = vec![0; FILLER_BYTES];
        guest.memory().read_or_zero(FILLER_GPA, &mut found).expect("guest memory");
        assert!(found.iter().all(|byte| *byte == FILLER), "what was compressed is not what it was");
        // The guest knows nothing of it.
        found.fill(0);
        guest.memory().write(FILLER_GPA, &found).expect("guest memory");
    }
    to.wait_for_work(2_000);
    to.verify();
}

/// Some of these rows, others for each seed and act.
fn draw(rows: &mut Vec<(usize, Row)>, act: Act) {
    let given = std::env::var("GODWIT_CUT_SEED").ok();
    let seed: u64 = given.map_or_else(
        || UNIX_EPOCH.elapsed().expect("a clock after 1970").as_secs(),
        |seed| seed.parse().expect("GODWIT_CUT_SEED is a number"),
    );
    println!("     GODWIT_CUT_SEED={seed}");
    rows.sort_by_cached_key(|(number, _)| {
        let mut hash = DefaultHasher::new();
        (seed, act.name(), number).hash(&mut hash);
        hash.finish()
    });
    rows.truncate(DRAWN);
}

/// The cases of a mode and an act.
fn table(mode: Mode, act: Act) {
    let mut rows: Vec<_> = relay::rows(mode).into_iter().enumerate().collect();
    assert!(rows.len() >= 14, "{rows:?}");
    let is_whole = std::env::var_os("GODWIT_CUT_TABLES").is_some();
    if !is_whole {
        draw(&mut rows, act);
    }
    let left = Mutex::new(rows);
    let (lines, failed) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some((number, row)) = left.lock().pop() else { return };
                    match std::panic::catch_unwind(|| case(row, act)) {
                        Ok(line) => lines.lock().push((number, line)),
                        Err(_) => failed.lock().push(row),
                    }
                }
            });
        }
    });
    let mut lines = lines.into_inner();
    lines.sort();
    let lines: Vec<String> = lines.into_iter().map(|(_, line)| line).collect();
    let failed = failed.into_inner();
    let head = "| message | connection | held before | guest afterwards | what the sides say |\n\
                | --- | --- | --- | --- | --- |";
    let text = format!("## {}, {}\n\n{head}\n{}\n", mode.name(), act.name(), lines.join("\n"));
    println!("{text}");
    assert!(failed.is_empty(), "{} cases failed: {failed:?}", failed.len());
    if !is_whole {
        return;
    }
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuts");
    let file = folder.join(format!("{}-{}.md", mode.name(), act.name()));
    std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&file, &text)).expect("a file");
    println!("     kept in {}", file.display());
}

/// Clean migrations, one of each setting, send every message that has a row: none is left out
/// because it is not sent any more.
fn every_message() {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        for row in relay::rows(mode) {
            // The others are reached by their own cases.
            if row.point == Point::Message && row.command == Command::PostcopyDone {
                let Stopped { mut source, destination, relay, reception } = stop_at(row);
                relay.release();
                assert!(reception.finish().status.success(), "{}", destination.output());
                assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
                let seen = relay.seen();
                let wanted =
                    relay::rows(mode).into_iter().filter(|row| row.setting == Setting::Usual);
                for row in wanted {
                    assert!(seen.contains(&row.command), "{:?} is not among {seen:?}", row.command);
                }
                destination.verify();
            }
        }
    }
}
