// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The recordings of cloud-hypervisor v53 in `tests/data/cloud-hypervisor-53`: they are whole, and the stand-in that
//! sends them takes nothing for an answer that the program itself would not. With `GODWIT_UPSTREAM_BIN`, the program
//! takes them as well.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::upstream::{self, Connection, Frame, command};
use crate::harness::{Suite, runs, skip, wait_for};

/// Its value is the program, or a script that runs it, with the options that the host makes necessary.
const PROGRAM: &str = "GODWIT_UPSTREAM_BIN";

const PRECOPY: [&str; 2] = ["plain-1", "all-2"];
const SNAPSHOTS: [&str; 15] = [
    "plain-1",
    "plain-2",
    "disk-1",
    "legacy-2",
    "debian-2",
    "debian-plugged",
    "all-2",
    "added",
    "acpi-hotplug",
    "virtio-mem",
    "zones",
    "segments",
    "topology",
    "large",
    "iommu",
];

pub fn add(suite: &mut Suite) {
    suite.add("upstream_recorded::streams_are_whole", streams);
    suite.add("upstream_recorded::snapshots_are_whole", snapshots);
    suite.add("upstream_recorded::several_connections", connections);
    suite.add("upstream_recorded::postcopy", postcopy);
    suite.add("upstream_recorded::the_stand_in_reads_what_the_program_reads", stand_in);
    suite.add("upstream_recorded::the_program_takes_its_own_stream", live);
}

fn document(connection: &Connection, kind: u16) -> Value {
    let frame = connection.requests.iter().find(|frame| frame.kind == kind).expect("in the stream");
    serde_json::from_slice(&frame.payload).expect("JSON")
}

/// What a node says of itself; its text is JSON too.
fn state(node: &Value) -> Value {
    let text = node["snapshot_data"]["state"].as_str().expect("a node with data");
    serde_json::from_str(text).expect("JSON")
}

/// All nodes of a tree of states, by name.
fn nodes(node: &Value, into: &mut BTreeSet<String>) {
    for (name, child) in node["snapshots"].as_object().expect("children") {
        into.insert(name.clone());
        nodes(child, into);
    }
    if !node["snapshot_data"].is_null() {
        state(node);
    }
}

fn kinds(connection: &Connection) -> Vec<u16> {
    connection.requests.iter().map(|frame| frame.kind).collect()
}

/// Each request has an answer, which is Ok and nothing else.
#[track_caller]
fn is_answered(connection: &Connection) {
    let ok = Frame { kind: 1, between: [0; 6], payload: Vec::new(), contents: Vec::new() };
    assert_eq!(connection.answers, vec![ok; connection.requests.len()]);
}

/// The RAM that the configuration names, slot by slot.
fn ram(config: &Value) -> Vec<(u64, u64)> {
    let mappings = config["memory_manager_data"]["guest_ram_mappings"].as_array();
    let number = |value: &Value| value.as_u64().expect("a number");
    let ranges = mappings.expect("slots").iter();
    ranges.map(|slot| (number(&slot["gpa"]), number(&slot["size"]))).collect()
}

fn streams() {
    for name in PRECOPY {
        let [connection] = &upstream::stream(name)[..] else { panic!("{name}: one connection") };
        is_answered(connection);
        let kinds = kinds(connection);
        let (begin, rest) = kinds.split_at(2);
        let (memory, end) = rest.split_at(rest.len() - 2);
        assert_eq!(begin, [command::START, command::CONFIG], "{name}");
        assert!(!memory.is_empty() && memory.iter().all(|kind| *kind == command::MEMORY), "{name}");
        assert_eq!(end, [command::STATE, command::COMPLETE], "{name}");
        // The first round is all of RAM; later ones are parts of it.
        let ram = ram(&document(connection, command::CONFIG));
        assert_eq!(connection.requests[2].ranges(), ram, "{name}");
        let is_ram = |(gpa, len): &(u64, u64)| {
            ram.iter().any(|(first, all)| first <= gpa && gpa + len <= first + all)
        };
        let later = connection.requests.iter().filter(|frame| frame.kind == command::MEMORY);
        assert!(later.flat_map(Frame::ranges).all(|range| is_ram(&range)), "{name}");
        nodes(&document(connection, command::STATE), &mut BTreeSet::new());
    }
}

fn snapshots() {
    let folder = upstream::folder().join("snapshots");
    let there: BTreeSet<_> = fs::read_dir(&folder)
        .expect("the folder")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    assert_eq!(there, SNAPSHOTS.map(str::to_owned).into(), "what is there, and what is known here");
    for name in SNAPSHOTS {
        let read = |file: &str| -> Value {
            let text = fs::read(folder.join(name).join(file)).expect("the file");
            serde_json::from_slice(&text).expect("JSON")
        };
        let (config, tree) = (read("config.json"), read("state.json"));
        let mut names = BTreeSet::new();
        nodes(&tree, &mut names);
        for vcpu in 0..config["cpus"]["boot_vcpus"].as_u64().expect("a number") {
            assert!(names.contains(&vcpu.to_string()), "{name}: no vCPU {vcpu}");
        }
        let packed = folder.join(name).join("memory-ranges.runs");
        let Ok(packed) = fs::read(packed) else { continue };
        let memory = state(&tree["snapshots"]["memory-manager"]);
        let ranges = memory["memory_ranges"]["data"].as_array().expect("ranges");
        let len: u64 = ranges.iter().filter_map(|range| range["length"].as_u64()).sum();
        let whole = runs::unpack(&packed);
        assert_eq!(u64::try_from(whole.len()).ok(), Some(len), "{name}");
        let control = usize::try_from(guest_reader::abi::CONTROL_GPA).expect("64 bits");
        assert_eq!(&whole[control..control + 8], b"GWTGUEST", "{name}: no guest");
    }
}

fn connections() {
    let [control, further @ ..] = &upstream::stream("connections-3")[..] else { panic!("none") };
    assert_eq!(further.len(), 3, "beside the first one");
    let expected = [command::START, command::CONFIG, command::STATE, command::COMPLETE];
    assert_eq!(kinds(control), expected);
    for connection in further {
        assert_eq!(connection.role, Some(1));
        is_answered(connection);
        assert!(kinds(connection).iter().all(|kind| *kind == command::MEMORY));
    }
    let sent: u64 = further
        .iter()
        .flat_map(|connection| &connection.requests)
        .flat_map(Frame::ranges)
        .map(|(_, len)| len)
        .sum();
    let all: u64 = ram(&document(control, command::CONFIG)).iter().map(|(_, len)| len).sum();
    assert!(sent >= all, "{sent} of {all} bytes");
}

fn postcopy() {
    let [control, faults] = &upstream::stream("postcopy")[..] else { panic!("two connections") };
    let expected = [command::START, command::CONFIG, command::STATE, command::COMPLETE];
    assert_eq!(kinds(control), expected);
    assert_eq!(faults.role, Some(2));
    let mut asked = BTreeSet::new();
    for (request, answer) in faults.requests.iter().zip(&faults.answers) {
        let [(gpa, len)] = request.ranges()[..] else { panic!("one range") };
        assert_eq!((request.kind, answer.kind), (command::PAGE_FAULT, 1));
        assert_eq!(u64::try_from(answer.payload.len()).ok(), Some(len));
        assert!(asked.insert(gpa), "{gpa:#x} twice");
    }
    assert_eq!(faults.requests.len(), faults.answers.len());
    let [(0, all)] = ram(&document(control, command::CONFIG))[..] else { panic!("one slot") };
    assert!(asked.into_iter().eq((0..all).step_by(4096)), "not every page");
}

/// A destination that answers each request so; what the stand-in says of it.
fn answered(answer: &'static [u8]) -> Result<(), upstream::Misread> {
    let [connection] = &upstream::stream("plain-1")[..] else { panic!("one connection") };
    let (mut here, mut there) = UnixStream::pair().expect("two sockets");
    let lens: Vec<_> = connection.requests.iter().map(|frame| frame.encode().len()).collect();
    let destination = std::thread::spawn(move || {
        for len in lens {
            if there.read_exact(&mut vec![0; len]).is_err() || there.write_all(answer).is_err() {
                return;
            }
        }
    });
    let result = upstream::replay(&mut here, &connection.requests, |_, _| ());
    drop(here);
    destination.join().expect("no panic");
    result
}

fn stand_in() {
    const OK: [u8; 16] = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    answered(&OK).expect("what such a destination answers");
    let refused: [(&[u8], &str); 4] = [
        (&[2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "status 2"),
        (&[2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, b'n', b'o'], "a payload of 2 bytes"),
        (&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], "more than an answer"),
        (&[1, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0], "not zero"),
    ];
    for (answer, why) in refused {
        let misread = answered(answer).expect_err(why);
        assert!(misread.why.contains(why), "{misread:?} for {answer:?}");
        assert_eq!((misread.request, misread.command), (0, command::START));
    }
}

/// The program, which listens; it ends with this.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A request to its API; the status.
fn api(socket: &Path, method: &str, path: &str, body: &Value) -> Option<u16> {
    let mut socket = UnixStream::connect(socket).ok()?;
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let request = format!(
        "{method} /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(request.as_bytes()).ok()?;
    let mut status = [0; 12];
    socket.read_exact(&mut status).ok()?;
    std::str::from_utf8(&status[9..]).ok()?.parse().ok()
}

fn live() {
    let Some(program) = std::env::var_os(PROGRAM) else {
        skip(format!("{PROGRAM} names no cloud-hypervisor v53"));
    };
    let folder = TempDir::with_prefix("godwit-upstream-").expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::File::create(at("disk")).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    let mut command = Command::new(program);
    command.arg("--api-socket").arg(at("api")).arg("--log-file").arg(at("log"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _program = Program(command.spawn().expect("the program can be started"));
    let socket = at("api");
    wait_for("its API", || api(&socket, "GET", "vmm.ping", &Value::Null));
    let url = json!({"receiver_url": format!("unix:{}", at("migration").display())});
    let received = std::thread::spawn({
        let socket = socket.clone();
        move || api(&socket, "PUT", "vm.receive-migration", &url)
    });
    let mut peer = wait_for("the migration's socket", || UnixStream::connect(at("migration")).ok());
    let [connection] = &upstream::stream("plain-1")[..] else { panic!("one connection") };
    let disk = at("disk");
    let result = upstream::replay(&mut peer, &connection.requests, |kind, document| {
        if kind == command::CONFIG {
            document["vm_config"]["disks"][0]["path"] = json!(disk);
        }
    });
    let log = || fs::read_to_string(at("log")).unwrap_or_default();
    // What the processor that was recorded has and this one lacks is refused with the configuration.
    match result {
        Err(misread) if misread.command == command::CONFIG && log().contains("CPUID") => {
            skip(format!("the recorded vCPUs do not fit this processor: {}", log()))
        }
        result => result.unwrap_or_else(|misread| panic!("{misread:?}\n{}", log())),
    }
    assert_eq!(received.join().expect("no panic"), Some(204), "{}", log());
}
