// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The event monitor: which events a life gives, in which order, and their form.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;

use tempfile::TempDir;

use crate::harness::{Api, Suite, Vmm, VmmBuilder, wait_for};
use crate::lifecycle::config;

pub fn add(suite: &mut Suite) {
    suite.add("events::life_of_a_vm", life);
    suite.add("events::a_panic_of_the_guest", panics);
    suite.add("events::a_successor_keeps_its_socket_while_the_last_are_written", successor);
}

/// What the guest reports to its panic device is an event, and the guest keeps running.
fn panics() {
    for (reported, name) in [(1, "panic"), (2, "crash_loaded")] {
        let guest = format!("workload=random-write mem=32M panic={reported}");
        let vmm = VmmBuilder::guest(1, "size=128M,shared=on", &guest).with(&["--pvpanic"]).start();
        let event = wait_for("the event of the panic device", || {
            vmm.events().into_iter().find(|event| event["event"] == "panic")
        });
        assert_eq!(event["source"], "guest", "{event}");
        assert_eq!(event["properties"]["event"], name, "{event}");
        vmm.wait_for_work(1_000);
        vmm.verify();
        assert_eq!(vmm.api().state(), "Running");
        vmm.shut_down();
    }
}

fn life() {
    let vmm = Vmm::empty();
    let api = vmm.api();
    api.put("vm.create", &config(128)).ok();
    for step in ["vm.boot", "vm.pause", "vm.resume", "vm.shutdown", "vm.delete"] {
        api.put(step, "").ok();
    }
    let wanted = [
        ("vmm", "starting"),
        ("vm", "booting"),
        ("vm", "booted"),
        ("vm", "pausing"),
        ("vm", "paused"),
        ("vm", "resuming"),
        ("vm", "resumed"),
        ("vm", "shutdown"),
        ("vm", "deleted"),
    ];
    let events = wait_for("the last event", || {
        let events = vmm.events();
        events.iter().any(|event| event["event"] == "deleted").then_some(events)
    });
    let mut next = 0;
    let mut last = (0, 0);
    for event in &events {
        let time = &event["timestamp"];
        let time = (time["secs"].as_u64().expect("secs"), time["nanos"].as_u64().expect("nanos"));
        assert!(time >= last, "time runs backwards: {events:?}");
        last = time;
        assert!(event.get("properties").is_some(), "{event}");
        if next < wanted.len()
            && (event["source"] == wanted[next].0)
            && event["event"] == wanted[next].1
        {
            next += 1;
        }
    }
    assert_eq!(next, wanted.len(), "{:?} is missing in {events:?}", wanted.get(next));
    vmm.shut_down();
}

/// A VMM that ends waits for the reader of its events. What another one has made at its path meanwhile is not
/// removed, also if the file system has given it the same number.
fn successor() {
    let folder = TempDir::with_prefix("godwit-successor-").expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let made = std::process::Command::new("mkfifo").arg(at("events")).status().expect("mkfifo");
    assert!(made.success());
    let reader = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(at("events"));
    let reader = reader.expect("a reader, which does not read");
    // SAFETY: only numbers are passed, and the descriptor is open.
    let room_bytes = unsafe { libc::fcntl(reader.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
    assert_eq!(room_bytes, 4096, "{}", std::io::Error::last_os_error());
    let socket = at("api");
    let path = |path: std::path::PathBuf| path.to_str().expect("UTF-8").to_owned();
    let events = format!("path={}", path(at("events")));
    let mut vmm = VmmBuilder::new(&["--api-socket", &path(at("api")), "--event-monitor", &events])
        .bare()
        .spawn();
    wait_for("the socket", || Api::new(&socket).request("GET", "vmm.ping", None).ok().map(drop));
    fs::hard_link(&socket, at("successor")).expect("another name");
    let api = Api::new(&socket);
    // Each is an event or two.
    for _ in 0..40 {
        api.put("vm.create", &config(64)).ok();
        api.put("vm.delete", "").ok();
    }
    api.put("vmm.shutdown", "").ok();
    wait_for("the end of its socket", || (!socket.exists()).then_some(()));
    fs::rename(at("successor"), &socket).expect("another socket");
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
    assert!(socket.exists(), "it was removed");
}
