// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What cloud-hypervisor v53 sent, kept in `tests/data/cloud-hypervisor-53`, must make a VM here, and never a running one
//! before its source can know.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::{self, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::migrate::Reception;
use crate::harness::taps::Tap;
use crate::harness::upstream::{self, Connection, Misread, Socket, changed, command, replay};
use crate::harness::{Mode, Suite, Transport, Vmm, skip, wait_for};

pub fn add(suite: &mut Suite) {
    suite.add("upstream_arrives::plain_over_tcp", || arrives("plain-1", Transport::Tcp));
    suite.add("upstream_arrives::plain_over_unix", || arrives("plain-1", Transport::Unix));
    suite.add("upstream_arrives::all_devices_over_unix", all_devices);
    suite.add("upstream_arrives::several_connections", several);
    suite.add("upstream_arrives::one_that_was_paused_is_paused", paused);
    suite.add("upstream_arrives::a_table_may_name_a_page_twice", twice);
    suite.add("upstream_arrives::a_cut_leaves_no_running_guest", cuts);
    suite.add("upstream_arrives::the_guest_waits_until_the_answer_is_taken", waits);
    suite.add("upstream_arrives::in_doubt_it_is_started_or_deleted", in_doubt);
    suite.add("upstream_arrives::what_cannot_be_taken_over_is_named", refusals);
    suite.add("upstream_arrives::postcopy_is_refused", postcopy);
}

/// Where the recordings had their files, and their tap.
const RECORDED: &str = "/tmp/x/";
const RECORDED_TAP: &str = "chtap0";

/// A destination, and the files of a recorded VM.
struct There {
    vmm: Vmm,
    folder: TempDir,
}

impl There {
    fn new() -> Self {
        let folder = TempDir::with_prefix("godwit-upstream-").expect("a folder");
        for (name, len) in [("disk", 1 << 20), ("disk2", 1 << 20), ("pmem", 2 << 20)] {
            let file = File::create(folder.path().join(name));
            file.and_then(|file| file.set_len(len)).expect("a file");
        }
        fs::create_dir(folder.path().join("vs")).expect("a folder");
        Self { vmm: Vmm::empty(), folder }
    }

    /// Gives the configuration the paths of this machine.
    fn adapt(&self, kind: u16, document: &mut Value) {
        if kind == command::CONFIG {
            let here = format!("{}/", self.folder.path().display());
            move_paths(&mut document["vm_config"], &here);
        }
    }

    fn receive(&self, transport: Transport) -> Reception {
        Reception::start(&self.vmm, transport, Mode::Precopy)
    }

    fn is_empty(&self) -> bool {
        self.vmm.api().get("vm.info").status == 404
    }

    /// Skips where the processor is not like that of the recording.
    #[track_caller]
    fn fits(&self, result: Result<(), Misread>) {
        let Err(misread) = result else { return };
        // The reason comes after the answer.
        self.vmm.wait_for_event("migration-receive-failed");
        let (events, output) = (self.vmm.events(), self.vmm.output());
        if events.iter().any(|event| event.to_string().contains("lacks processor features")) {
            skip(format!("the recorded vCPUs do not fit this processor: {misread:?}"));
        }
        panic!("{misread:?}\n{output}");
    }

    #[track_caller]
    fn runs(&self, ended: &Output) {
        assert!(ended.status.success(), "{ended:?}\n{}", self.vmm.output());
        assert_eq!(self.vmm.api().state(), "Running");
        self.vmm.wait_for_work(200);
        self.vmm.verify();
    }

    #[track_caller]
    fn delete(&self) {
        self.vmm.api().put("vm.delete", "").ok();
    }
}

fn move_paths(value: &mut Value, here: &str) {
    match value {
        Value::String(text) if text == RECORDED_TAP => *text = format!("gwu{}", process::id()),
        Value::String(text) => *text = text.replace(RECORDED, here),
        Value::Array(items) => items.iter_mut().for_each(|item| move_paths(item, here)),
        Value::Object(fields) => fields.values_mut().for_each(|field| move_paths(field, here)),
        _ => {}
    }
}

fn unix(reception: &Reception) -> UnixStream {
    UnixStream::connect(reception.url.trim_start_matches("unix:")).expect("it listens")
}

fn tcp(reception: &Reception) -> TcpStream {
    TcpStream::connect(reception.url.trim_start_matches("tcp:")).expect("it listens")
}

fn one(name: &str) -> Connection {
    upstream::stream(name).into_iter().next().expect("a connection")
}

fn arrives(name: &str, transport: Transport) {
    let (there, source) = (There::new(), one(name));
    let reception = there.receive(transport);
    let adapt = |kind, document: &mut Value| there.adapt(kind, document);
    there.fits(match transport {
        Transport::Unix => replay(&mut unix(&reception), &source.requests, adapt),
        Transport::Tcp => replay(&mut tcp(&reception), &source.requests, adapt),
    });
    there.runs(&reception.finish());
    there.delete();
    there.vmm.shut_down();
}

fn all_devices() {
    // Skips where no tap can be made.
    Tap::open().close();
    arrives("all-2", Transport::Unix);
}

fn several() {
    let there = There::new();
    let connections = upstream::stream("connections-3");
    let [control, further @ ..] = &connections[..] else { panic!("none") };
    let reception = there.receive(Transport::Tcp);
    let mut first = tcp(&reception);
    let adapt = |kind, document: &mut Value| there.adapt(kind, document);
    let (before, after) = control.requests.split_at(2);
    there.fits(replay(&mut first, before, adapt));
    let mut sockets: Vec<_> = further.iter().map(|_| tcp(&reception)).collect();
    for (socket, connection) in sockets.iter_mut().zip(further) {
        let role = connection.role.expect("a role").to_le_bytes();
        socket.write_all(&role).expect("it listens");
        there.fits(replay(socket, &connection.requests, adapt));
    }
    drop(sockets);
    there.fits(replay(&mut first, after, adapt));
    there.runs(&reception.finish());
    there.delete();
    there.vmm.shut_down();
}

/// Its source was paused when the migration began.
fn paused() {
    let (there, mut source) = (There::new(), one("plain-1"));
    let reception = there.receive(Transport::Unix);
    source.requests.last_mut().expect("requests").kind = command::COMPLETE_PAUSED;
    let adapt = |kind, document: &mut Value| there.adapt(kind, document);
    there.fits(replay(&mut unix(&reception), &source.requests, adapt));
    let ended = reception.finish();
    assert!(ended.status.success(), "{ended:?}\n{}", there.vmm.output());
    assert_eq!(there.vmm.api().state(), "Paused");
    there.vmm.api().put("vm.resume", "").ok();
    there.vmm.wait_for_work(200);
    there.vmm.verify();
    there.delete();
    there.vmm.shut_down();
}

/// The last table is two lists, of which both may name a page: here all of the first table once more.
fn twice() {
    let (there, mut source) = (There::new(), one("plain-1"));
    let reception = there.receive(Transport::Unix);
    let memory = |frame: &&mut upstream::Frame| frame.kind == command::MEMORY;
    let mut tables = source.requests.iter_mut().filter(memory);
    let first = tables.next().expect("a table");
    let (table, contents) = (first.payload.clone(), first.contents.clone());
    first.payload.extend(&table);
    first.contents.extend(&contents);
    let adapt = |kind, document: &mut Value| there.adapt(kind, document);
    there.fits(replay(&mut unix(&reception), &source.requests, adapt));
    there.runs(&reception.finish());
    there.delete();
    there.vmm.shut_down();
}

/// The connection ends before each request, or before the answer to it is read.
fn cuts() {
    let (there, source) = (There::new(), one("plain-1"));
    let adapt = |kind, document: &mut Value| there.adapt(kind, document);
    for count in 0..source.requests.len() {
        for is_asked in [false, true] {
            let before = there.vmm.events().len();
            let reception = there.receive(Transport::Unix);
            let mut socket = unix(&reception);
            there.fits(replay(&mut socket, &source.requests[..count], adapt));
            if is_asked {
                let request = changed(&source.requests[count], adapt).encode();
                socket.write_all(&request).expect("it reads");
            }
            drop(socket);
            let kind = source.requests[count].kind;
            if count == 0 && !is_asked {
                // No migration has begun, so that it is still awaited.
                there.vmm.remote_ok(&["migration-cancel"]);
                reception.finish();
                continue;
            }
            let ends = ["migration-receive-failed", "migration-in-doubt"];
            let end = there.vmm.wait_for_later_events(before, &ends);
            let info = there.vmm.api().get("vm.info");
            let runs = info.status == 200 && info.json()["state"] == "Running";
            assert!(!runs, "a guest runs after a cut at {kind}, asked: {is_asked}");
            if end.to_string().contains("migration-in-doubt") {
                assert!(is_asked && kind == command::COMPLETE, "in doubt at {kind}");
                there.vmm.api().put("vm.delete", r#"{"force":true}"#).ok();
            }
            let output = reception.finish();
            assert!(!output.status.success(), "cut at {kind}: {output:?}");
            assert!(there.is_empty(), "cut at {kind}: {}", there.vmm.output());
        }
    }
    // Nothing is left that would be in the way.
    let reception = there.receive(Transport::Unix);
    there.fits(replay(&mut unix(&reception), &source.requests, adapt));
    there.runs(&reception.finish());
    there.delete();
    there.vmm.shut_down();
}

/// Everything is sent, and the answer to Complete has come and is not read.
fn complete(there: &There, reception: &Reception) -> UnixStream {
    let source = one("plain-1");
    let adapt = |kind, document: &mut Value| there.adapt(kind, document);
    let mut socket = unix(reception);
    let (last, before) = source.requests.split_last().expect("requests");
    there.fits(replay(&mut socket, before, adapt));
    socket.write_all(&last.encode()).expect("it reads");
    wait_for("the answer to Complete", || has_data(&socket).then_some(()));
    socket
}

fn has_data(socket: &UnixStream) -> bool {
    use std::os::fd::AsRawFd as _;
    let mut polled = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live, exclusively borrowed entry.
    unsafe { libc::poll(&raw mut polled, 1, 0) == 1 }
}

fn waits() {
    let there = There::new();
    let reception = there.receive(Transport::Unix);
    let mut socket = complete(&there, &reception);
    // Far longer than a guest takes to start.
    for _ in 0..100 {
        assert!(!there.vmm.event_names().contains(&"resumed".to_owned()), "it runs too early");
        assert_ne!(there.vmm.api().get("vm.info").json()["state"], "Running");
    }
    socket.wait(true).expect("a socket");
    upstream::answer(&mut socket).expect("an answer");
    there.runs(&reception.finish());
    there.delete();
    there.vmm.shut_down();
}

fn in_doubt() {
    let there = There::new();
    for starts in [true, false] {
        let before = there.vmm.events().len();
        let reception = there.receive(Transport::Unix);
        drop(complete(&there, &reception));
        there.vmm.wait_for_later_events(before, &["migration-in-doubt"]);
        let info = there.vmm.api().get("vm.info").ok().json();
        assert_eq!(info["state"], "Paused", "{info}");
        if starts {
            there.vmm.api().put("vm.resume", "").ok();
            reception.finish();
            assert_eq!(there.vmm.api().state(), "Running");
            there.vmm.wait_for_work(200);
            there.vmm.verify();
            there.delete();
        } else {
            assert_eq!(there.vmm.api().put("vm.delete", "").status, 409);
            there.vmm.api().put("vm.delete", r#"{"force":true}"#).ok();
            reception.finish();
            assert!(there.is_empty());
        }
    }
    there.vmm.shut_down();
}

/// Changes the text in a node of the state.
fn in_node(document: &mut Value, path: &[&str], change: impl Fn(&mut Value)) {
    let mut node = document;
    for name in path {
        node = &mut node["snapshots"][*name];
    }
    let text = node["snapshot_data"]["state"].as_str().expect("a node with data");
    let mut state: Value = serde_json::from_str(text).expect("JSON");
    change(&mut state);
    node["snapshot_data"]["state"] = json!(state.to_string());
}

type Change = fn(u16, &mut Value);

fn refusals() {
    let changes: [(&str, Change); 9] = [
        ("qcow2", |kind, document| {
            if kind == command::CONFIG {
                document["vm_config"]["disks"][0]["image_type"] = json!("Qcow2");
            }
        }),
        ("iommu", |kind, document| {
            if kind == command::CONFIG {
                document["vm_config"]["iommu"] = json!(true);
            }
        }),
        ("vhost_user", |kind, document| {
            if kind == command::CONFIG {
                document["vm_config"]["disks"][0]["vhost_user"] = json!(true);
            }
        }),
        ("guest_ram_mappings", |kind, document| {
            if kind == command::CONFIG {
                document["memory_manager_data"]["guest_ram_mappings"][0]["gpa"] = json!(4096);
            }
        }),
        ("start_of_device_area", |kind, document| {
            if kind == command::CONFIG {
                let area = &mut document["memory_manager_data"]["start_of_device_area"];
                *area = json!(area.as_u64().expect("a number") + (1 << 20));
            }
        }),
        ("clock", |kind, document| {
            if kind == command::STATE {
                in_node(document, &[], |vm| drop(vm.as_object_mut().map(|vm| vm.remove("clock"))));
            }
        }),
        ("novelty", |kind, document| {
            if kind == command::STATE {
                in_node(document, &["cpu-manager", "0"], |vcpu| vcpu["Kvm"]["novelty"] = json!(1));
            }
        }),
        ("novel-device", |kind, document| {
            if kind == command::STATE {
                let node = json!({"snapshots": {}, "snapshot_data": null});
                document["snapshots"]["device-manager"]["snapshots"]["novel-device"] = node;
            }
        }),
        ("_disk0", |kind, document| {
            if kind == command::STATE {
                let devices = &mut document["snapshots"]["device-manager"]["snapshots"];
                devices.as_object_mut().map(|devices| devices.remove("_disk0"));
            }
        }),
    ];
    let (there, source) = (There::new(), one("plain-1"));
    for (name, change) in changes {
        let before = there.vmm.events().len();
        let reception = there.receive(Transport::Unix);
        let changed = |kind, document: &mut Value| {
            there.adapt(kind, document);
            change(kind, document);
        };
        let misread = replay(&mut unix(&reception), &source.requests, changed).expect_err(name);
        let why = there.vmm.wait_for_later_events(before, &["migration-receive-failed"]);
        if why.to_string().contains("lacks processor features") {
            skip("the recorded vCPUs do not fit this processor");
        }
        assert_eq!(misread.why, "status 2", "{name}: an Error, and nothing else");
        assert!(why.to_string().contains(name), "{name}: {why}");
        let output = reception.finish();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && told.contains(name), "{name}: {told}");
        assert!(there.is_empty(), "{name}");
    }
    there.vmm.shut_down();
}

fn postcopy() {
    let (there, source) = (There::new(), one("postcopy"));
    let reception = there.receive(Transport::Unix);
    let adapt = |kind, document: &mut Value| there.adapt(kind, document);
    let result = replay(&mut unix(&reception), &source.requests, adapt);
    let output = reception.finish();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    if told.contains("lacks processor features") {
        skip("the recorded vCPUs do not fit this processor");
    }
    let misread = result.expect_err("memory is missing");
    assert_eq!((misread.command, misread.why.as_str()), (command::STATE, "status 2"));
    assert!(told.contains("postcopy"), "{told}");
    assert!(there.is_empty());
    there.vmm.shut_down();
}
