// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What sources of earlier versions sent, kept in `tests/data/streams`, must still make a VM here.
//!
//! Owns the form: all bytes that went each way on the one connection of a precopy migration.
//! `GODWIT_RECORD_STREAM=DIRECTORY` makes the test of that name record one of this version.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;
use vm_migration::layout::GpaRange;
use vm_migration::protocol::message::{Answer, Message};

use crate::harness::migrate::Reception;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, skip};
use crate::recorded;

/// What the source said, and what it was answered.
const SAID: &str = "source";
const ANSWERED: &str = "destination";

pub fn add(suite: &mut Suite) {
    for version in ["v1", "v2", "v3"] {
        suite.add(&format!("migration_recorded::{version}_arrives"), move || arrives(version));
        let name = format!("migration_recorded::{version}_is_sent_what_it_knows");
        suite.add(&name, move || is_sent_to(version));
    }
    suite.add("migration_recorded::v2_is_sent_no_32_bit_bar", sent_no_narrow_bar);
    suite.add("migration_recorded::unknown_fields_are_refused", unknown_fields);
    suite.add("migration_recorded::later_versions_are_refused", later_versions);
    suite.add("migration_recorded::record", record);
}

fn data(version: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/streams").join(version).join(name)
}

/// Passes bytes on until one side is done, and keeps them.
fn pass(mut from: UnixStream, mut to: UnixStream) -> Vec<u8> {
    let (mut kept, mut part) = (Vec::new(), vec![0; 65536]);
    while let Ok(count @ 1..) = from.read(&mut part) {
        kept.extend_from_slice(&part[..count]);
        if to.write_all(&part[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    kept
}

/// One message of a recorded stream, with its contents.
struct Frame {
    message: Message,
    bytes: Vec<u8>,
}

/// Splits a stream; configuration and state go through `change`.
fn frames(mut stream: &[u8], change: impl Fn(&mut Value)) -> Vec<Frame> {
    let mut frames = Vec::new();
    let change = |json: &[u8]| -> Vec<u8> {
        let mut value = serde_json::from_slice(json).expect("JSON");
        change(&mut value);
        value.to_string().into_bytes()
    };
    while !stream.is_empty() {
        let begin = stream;
        let message = match Message::read(&mut stream).expect("a message") {
            Message::Config(json) => Message::Config(change(&json)),
            Message::State(json) => Message::State(change(&json)),
            message => message,
        };
        let contents: u64 = match &message {
            Message::Memory(ranges) => ranges.iter().map(|range: &GpaRange| range.len_bytes).sum(),
            Message::MemoryZstd { frame_bytes, .. } => u64::from(*frame_bytes),
            _ => 0,
        };
        let contents = usize::try_from(contents).expect("small");
        let header = begin.len() - stream.len();
        let bytes = if matches!(message, Message::Config(_) | Message::State(_)) {
            message.encode()
        } else {
            begin[..header + contents].to_vec()
        };
        stream = &stream[contents..];
        frames.push(Frame { message, bytes });
    }
    frames
}

/// The first version with a disk: what it is about is in the state of disks.
fn has_disk(version: &str) -> bool {
    !["v1", "v2"].contains(&version)
}

fn make_disk(folder: &TempDir) -> PathBuf {
    let path = folder.path().join("recorded-disk");
    File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("a file");
    path
}

/// The VM that is recorded, paused: so its memory is sent once. With a disk if there is a folder for it.
fn source(folder: Option<&TempDir>) -> Vmm {
    let disk = folder.map(|folder| format!("path={}", make_disk(folder).display()));
    let disk: Vec<_> = disk.iter().flat_map(|disk| ["--disk", disk]).collect();
    let cpus = format!("boot=2,max_phys_bits={},nested=off", recorded::PHYS_BITS);
    let source = VmmBuilder::new(&["--console", "null", "--serial", "null"])
        .with(&["--kernel", crate::harness::image(), "--cmdline", "workload=random-write mem=256K"])
        .with(&["--cpus", &cpus, "--memory", "size=32M,shared=on"])
        .with(&disk)
        .unconfined()
        .start();
    source.wait_for_work(1_000);
    source.remote_ok(&["pause"]);
    source
}

fn record() {
    let Some(target) = std::env::var_os("GODWIT_RECORD_STREAM") else {
        skip("GODWIT_RECORD_STREAM names no directory to record to");
    };
    let target = Path::new(&target);
    let folder = TempDir::with_prefix("godwit-record-").expect("a folder");
    let source = source(Some(&folder));
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Unix, Mode::Precopy);
    let to = reception.url.trim_start_matches("unix:").to_owned();
    let path = source.path("recorder");
    let listener = UnixListener::bind(&path).expect("a socket");
    let recorder = std::thread::spawn(move || {
        let (from, _) = listener.accept().expect("a source");
        let to = UnixStream::connect(to).expect("it listens");
        let back = (to.try_clone().expect("a socket"), from.try_clone().expect("a socket"));
        let answers = std::thread::spawn(move || pass(back.0, back.1));
        let said = pass(from, to);
        (said, answers.join().expect("no panic"))
    });
    let option = format!("destination_url=unix:{},memory_mode=precopy", path.display());
    source.remote_ok(&["send-migration", "--wait", &option]);
    assert!(reception.finish().status.success());
    let (said, answered) = recorder.join().expect("no panic");
    destination.shut_down();
    let neutral = |value: &mut Value| {
        if value.get("vm_config").is_some() {
            recorded::neutral_document(value);
            // So that no path of the recording machine is kept.
            value["vm_config"]["payload"]["kernel"] = "recorded-guest".into();
            value["vm_config"]["disks"][0]["path"] = "recorded-disk".into();
        } else {
            recorded::neutral(value);
        }
    };
    let said: Vec<u8> = frames(&said, neutral).into_iter().flat_map(|frame| frame.bytes).collect();
    fs::create_dir_all(target).expect("the directory");
    fs::write(target.join(SAID), said).expect("written");
    fs::write(target.join(ANSWERED), answered).expect("written");
}

/// Plays the source of a recorded migration; what it is answered.
fn play(
    version: &str,
    to: &str,
    change: impl Fn(&mut Value),
) -> io::Result<Vec<(&'static str, Answer)>> {
    let stream = fs::read(data(version, SAID)).expect("the recorded stream");
    let mut socket = UnixStream::connect(to.trim_start_matches("unix:"))?;
    let mut answers = Vec::new();
    for frame in frames(&stream, change) {
        socket.write_all(&frame.bytes)?;
        let answer = read_answer(&mut socket)?;
        let refused = matches!(answer, Answer::Error { .. });
        answers.push((frame.message.command().name(), answer));
        if refused {
            break;
        }
    }
    Ok(answers)
}

/// Reads the 16 bytes of a header, then as many as it says.
fn read_answer(socket: &mut UnixStream) -> io::Result<Answer> {
    let mut bytes = vec![0; 16];
    socket.read_exact(&mut bytes)?;
    let len = u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
    bytes.resize(16 + usize::try_from(len).expect("small"), 0);
    socket.read_exact(&mut bytes[16..])?;
    Answer::read(&mut &bytes[..]).map_err(io::Error::other)
}

fn arrives(version: &str) {
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Unix, Mode::Precopy);
    let folder = TempDir::with_prefix("godwit-recorded-").expect("a folder");
    let disk = make_disk(&folder);
    let adapt = |value: &mut Value| {
        recorded::adapt(value);
        if let Some(path) = value.pointer_mut("/vm_config/disks/0/path") {
            *path = disk.to_str().expect("UTF-8").into();
        }
    };
    let answers = play(version, &reception.url, adapt).expect("the destination answers");
    let output = reception.finish();
    if let Some((_, Answer::Error { reason })) = answers.last() {
        panic!("{version} is refused: {reason}");
    }
    assert!(output.status.success(), "{output:?}");
    assert_eq!(answers.last().map(|(command, _)| *command), Some("Confirm"));
    assert_eq!(destination.api().state(), "Paused");
    destination.verify_paused();
    destination.remote_ok(&["resume"]);
    destination.wait_for_work(1_000);
    destination.api().put("vm.pause", "").ok();
    let (_, tsc_backwards) = destination.verify_all_but_tsc();
    // A host that shows guests its own counter, and that started later than the recording one did.
    let allowed = u64::from(destination.output().contains("cannot move a guest's TSC"));
    assert!(
        tsc_backwards.iter().all(|count| *count <= allowed),
        "the TSC went backwards: {tsc_backwards:?}, allowed: {allowed}"
    );
    destination.shut_down();
}

/// Names of all fields in a document; what is called by name in it (a device, say) counts as one.
fn fields(value: &Value, path: &str, out: &mut BTreeSet<String>) {
    match value {
        Value::Array(items) => {
            for item in items {
                fields(item, &format!("{path}[]"), out);
            }
        }
        Value::Object(map) => {
            for (name, value) in map {
                let path = format!("{path}.{name}");
                fields(value, &path, out);
                out.insert(path);
            }
        }
        _ => {}
    }
}

/// What a source said, as JSON: configuration, offer, state.
fn documents(stream: &[u8]) -> [Value; 3] {
    let mut found = [Value::Null, Value::Null, Value::Null];
    for frame in frames(stream, |_| ()) {
        let (at, json) = match frame.message {
            Message::Config(json) => (0, json),
            Message::Capabilities(json) => (1, json),
            Message::State(json) => (2, json),
            _ => continue,
        };
        found[at] = serde_json::from_slice(&json).expect("JSON");
    }
    found
}

/// Takes a migration as a destination of that version did; returns what the source said.
fn take_as(version: &str, listener: &UnixListener) -> Vec<u8> {
    let answered = fs::read(data(version, ANSWERED)).expect("the recorded answers");
    let mut answered = &answered[..];
    let (mut socket, _) = listener.accept().expect("a source");
    let (mut said, mut seen) = (Vec::new(), 0);
    loop {
        let mut head = [0; 16];
        if socket.read_exact(&mut head).is_err() {
            return said;
        }
        let len = u64::from_le_bytes(head[8..].try_into().expect("eight bytes"));
        let mut payload = vec![0; usize::try_from(len).expect("small")];
        socket.read_exact(&mut payload).expect("a payload");
        said.extend(head);
        said.extend(&payload);
        // Contents come behind the table of ranges.
        let last = &said[seen..];
        if let Ok(Message::Memory(ranges)) = Message::read(&mut &last[..]) {
            let len: u64 = ranges.iter().map(|range| range.len_bytes).sum();
            let mut contents = vec![0; usize::try_from(len).expect("small")];
            socket.read_exact(&mut contents).expect("contents");
            said.extend(contents);
        }
        seen = said.len();
        // Those to Start, to the offer and to the configuration have something to say.
        let answer = if answered.is_empty() {
            Answer::ok()
        } else {
            Answer::read(&mut answered).expect("a recorded answer")
        };
        if socket.write_all(&answer.encode()).is_err() {
            return said;
        }
    }
}

/// To a destination of that version goes what it knows, and nothing else.
fn is_sent_to(version: &str) {
    let folder = TempDir::with_prefix("godwit-recorded-").expect("a folder");
    let source = source(has_disk(version).then_some(&folder));
    let path = source.path("old");
    let listener = UnixListener::bind(&path).expect("a socket");
    let name = version.to_owned();
    let old = std::thread::spawn(move || take_as(&name, &listener));
    let option = format!("destination_url=unix:{},memory_mode=precopy", path.display());
    source.remote_ok(&["send-migration", "--wait", &option]);
    let now = documents(&old.join().expect("no panic"));
    let then = documents(&fs::read(data(version, SAID)).expect("the recorded stream"));
    for (what, at) in [("configuration", 0), ("state", 2)] {
        let (mut known, mut sent) = (BTreeSet::new(), BTreeSet::new());
        fields(&then[at], "", &mut known);
        fields(&now[at], "", &mut sent);
        let new: Vec<_> = sent.difference(&known).collect();
        // A program of that version reads nothing from alongside the configuration that it does not know.
        let new: Vec<_> = new.iter().filter(|path| !path.starts_with(".feature_msrs")).collect();
        assert!(new.is_empty(), "{what} that {version} does not know: {new:?}");
    }
    assert_eq!(now[2]["version"], then[2]["version"]);
    for vcpu in 0..2 {
        assert_eq!(now[2]["vcpus"][vcpu]["version"], then[2]["vcpus"][vcpu]["version"]);
    }
}

/// What such a destination cannot lay out as the guest has found it does not get on its way.
fn sent_no_narrow_bar() {
    let folder = TempDir::with_prefix("godwit-recorded-").expect("a folder");
    let source = source(Some(&folder));
    let path = source.path("old");
    let listener = UnixListener::bind(&path).expect("a socket");
    let old = std::thread::spawn(move || take_as("v2", &listener));
    let option = format!("destination_url=unix:{},memory_mode=precopy", path.display());
    let output = source.remote(&["send-migration", "--wait", &option]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{output:?}");
    assert!(
        said.contains("a machine state of version 3, and the newest known there is 2"),
        "{said}"
    );
    for frame in frames(&old.join().expect("no panic"), |_| ()) {
        let is_early = !matches!(frame.message, Message::Memory(_) | Message::State(_));
        assert!(is_early, "{:?} was sent", frame.message.command());
    }
    source.remote_ok(&["resume"]);
    source.wait_for_work(1_000);
    source.shut_down();
}

/// Plays a recorded stream with a change; the reason for which it is refused.
fn refusal(version: &str, change: impl Fn(&mut Value)) -> (&'static str, String) {
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Unix, Mode::Precopy);
    let answers = play(version, &reception.url, |value| {
        recorded::adapt(value);
        change(value);
    });
    let answers = answers.expect("the destination answers");
    assert!(!reception.finish().status.success());
    assert_eq!(destination.api().get("vm.info").status, 404, "something was left behind");
    destination.shut_down();
    match answers.into_iter().next_back() {
        Some((command, Answer::Error { reason })) => (command, reason),
        other => panic!("it was taken: {other:?}"),
    }
}

/// The state of each device refuses what it does not know, by name.
fn unknown_fields() {
    let mut places = vec![];
    let state = &documents(&fs::read(data("v1", SAID)).expect("the recorded stream"))[2];
    let names = |group: &str| -> Vec<String> {
        state[group].as_object().expect("an object").keys().cloned().collect()
    };
    places.extend(names("legacy").iter().map(|name| format!("/legacy/{name}/data")));
    for name in names("pci") {
        let parts = ["", "/config", "/msix", "/common", "/queues/0", "/device", "/device/data"];
        places.extend(parts.iter().map(|part| format!("/pci/{name}/state/data{part}")));
    }
    places.push("/pci_hotplug/data".to_owned());
    for place in &places {
        let (command, reason) = refusal("v1", |value| {
            if value.get("vcpus").is_some() {
                let object = value.pointer_mut(place).and_then(Value::as_object_mut);
                object.unwrap_or_else(|| panic!("{place}")).insert("from_later".into(), 1.into());
            }
        });
        assert!(
            command == "State" && reason.contains("`from_later`"),
            "{place}: {command} {reason}"
        );
    }
}

/// A configuration with a field of a later version, and an offer that needs a later version: before
/// any memory is sent.
fn later_versions() {
    let (command, reason) = refusal("v1", |value| {
        if let Some(config) = value.get_mut("vm_config") {
            config["cpus"]["from_later"] = true.into();
        }
    });
    assert!(command == "Config" && reason.contains("`from_later`"), "{command} {reason}");
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Unix, Mode::Precopy);
    let stream = fs::read(data("v1", SAID)).expect("the recorded stream");
    let mut socket =
        UnixStream::connect(reception.url.trim_start_matches("unix:")).expect("it listens");
    let mut last = Answer::ok();
    for frame in frames(&stream, |_| ()).into_iter().take(2) {
        let message = match frame.message {
            Message::Capabilities(json) => {
                let mut offer: Value = serde_json::from_slice(&json).expect("JSON");
                offer["formats"] = serde_json::json!({"config": 1, "state": 77});
                Message::Capabilities(offer.to_string().into_bytes())
            }
            message => message,
        };
        socket.write_all(&message.encode()).expect("it reads");
        last = read_answer(&mut socket).expect("it answers");
    }
    let Answer::Error { reason } = last else { panic!("{last:?}") };
    assert!(reason.contains("machine state of version 77"), "{reason}");
    assert!(!reception.finish().status.success());
    destination.shut_down();
}
