// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Moments at which a VM changes hands or stands still, and something else happens: a source whose
//! VM has moved is given another, a guest resets as it arrives or as it is paused.

use std::io::Write as _;

use serde_json::json;
use vm_migration::protocol::message::Command;

use crate::cuts::{Stopped, ended, stop_at};
use crate::harness::api::read_answer;
use crate::harness::migrate::{Reception, send_option};
use crate::harness::relay::{self, Point, Setting};
use crate::harness::{Mode, Suite, Transport, Vmm, wait_for};
use crate::meanwhile::{crash, crash_guest};

/// Pauses that a reset of the guest may meet.
const PAUSES: usize = 40;

pub fn add(suite: &mut Suite) {
    suite.add("turning::source_is_given_a_new_vm", || another_vm(Other::New));
    suite.add("turning::source_gets_its_vm_back", || another_vm(Other::Back));
    suite.add("turning::source_restores_a_vm", || another_vm(Other::Restored));
    suite.add("turning::source_that_was_told_to_end_takes_no_vm", refused_at_the_end);
    suite.add("turning::reset_as_it_arrives", reset_as_it_arrives);
    suite.add("turning::reset_as_it_is_paused", reset_as_it_is_paused);
}

/// Where the VM comes from that a source gets when its own has left.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Other {
    New,
    Back,
    Restored,
}

/// Moves the VM away while the progress is being watched, so that the source's process stays for
/// the watcher.
fn moved_away(source: &Vmm, destination: &Vmm) {
    // Also before there is anything to see.
    source.api().get("vm.migration-progress");
    let reception = Reception::start(destination, Transport::Tcp, Mode::Precopy);
    source.remote_ok(&["send-migration", &send_option(&reception.url, Mode::Precopy)]);
    assert!(reception.finish().status.success(), "{}", destination.output());
    source.wait_for_event("migration-finished");
}

/// The process of a source that gets another VM stays for that one.
fn another_vm(other: Other) {
    let source = Vmm::boot(1, "size=96M,shared=on", "workload=random-write mem=32M");
    let destination = Vmm::empty();
    let (api, directory) = (source.api(), source.path("snapshot"));
    let url = format!("file://{}", directory.display());
    if other == Other::Restored {
        std::fs::create_dir(&directory).expect("a directory");
        api.put("vm.pause", "").ok();
        api.put("vm.snapshot", &json!({ "destination_url": url }).to_string()).ok();
        api.put("vm.resume", "").ok();
    }
    moved_away(&source, &destination);
    match other {
        Other::New => {
            api.put("vm.create", &crate::lifecycle::config(96)).ok();
            api.put("vm.boot", "").ok();
        }
        Other::Back => {
            let reception = Reception::start(&source, Transport::Tcp, Mode::Precopy);
            let option = send_option(&reception.url, Mode::Precopy);
            destination.remote_ok(&["send-migration", &option]);
            assert!(reception.finish().status.success(), "{}", source.output());
        }
        Other::Restored => {
            let body = json!({ "source_url": url, "resume": true });
            api.put("vm.restore", &body.to_string()).ok();
        }
    }
    // The watcher sees the end of what it watched, which used to be the end of the process.
    api.get("vm.migration-progress").ok();
    source.wait_for_work(2_000);
    assert_eq!(api.state(), "Running");
    source.verify();
    source.shut_down();
    if other != Other::Back {
        destination.verify();
        destination.shut_down();
    }
}

/// One that ends as soon as its watcher has seen the end would take the VM with it.
fn refused_at_the_end() {
    let row = row(Mode::Precopy, Command::Config);
    let Stopped { mut source, destination, relay, reception } = stop_at(row);
    source.api().get("vm.migration-progress").ok();
    source.signal(libc::SIGTERM);
    wait_for("the log", || source.output().contains("told to end").then_some(()));
    relay.release();
    assert!(reception.finish().status.success(), "{}", destination.output());
    source.wait_for_event("migration-finished");
    let requests = [
        ("vm.create", crate::lifecycle::config(64)),
        ("vm.receive-migration", r#"{"receiver_url":"tcp:127.0.0.1:0"}"#.to_owned()),
        ("vm.restore", r#"{"source_url":"file:///nonexistent"}"#.to_owned()),
    ];
    for (name, body) in requests {
        let answer = source.api().put(name, &body);
        assert_eq!(answer.status, 409, "{name}: {answer:?}");
        assert!(answer.body.contains("told to end"), "{name}: {answer:?}");
    }
    ended(&source);
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.wait_for_work(2_000);
    destination.verify();
    destination.shut_down();
}

fn row(mode: Mode, command: Command) -> relay::Row {
    let wanted = |row: &relay::Row| {
        (row.command, row.point, row.setting) == (command, Point::Message, Setting::Usual)
    };
    relay::rows(mode).into_iter().find(wanted).expect("a row")
}

/// A guest whose first instruction at the destination resets it does so before the destination's
/// VMM has been told that it has arrived; it starts anew there all the same. (In postcopy its code has
/// not arrived then, and the reset waits for the last page in any case.)
fn reset_as_it_arrives() {
    for _ in 0..4 {
        let Stopped { mut source, destination, relay, reception } =
            stop_at(row(Mode::Precopy, Command::Confirm));
        crash(&destination);
        relay.release();
        assert!(reception.finish().status.success(), "{}", destination.output());
        assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
        destination.wait_for_event("rebooted");
        destination.wait_for_heartbeat();
        destination.verify();
        destination.shut_down();
    }
}

/// When a pause has been answered the VM stays paused, whatever its guest did just before.
fn reset_as_it_is_paused() {
    let vmm = Vmm::boot(1, "size=96M,shared=on", "workload=random-write mem=16M");
    let api = vmm.api();
    let request = |name: &str| {
        format!("PUT /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
    };
    let mut waited = 0;
    for round in 1..=PAUSES {
        vmm.wait_for_heartbeat();
        // It still fills its pages after a heartbeat, and would not be done while it is paused.
        let guest = vmm.guest();
        api.put("vm.pause", "").ok();
        // Resets at its next instruction, and is paused as soon as it continues.
        crash_guest(&guest);
        let mut stream = api.connect().expect("a connection");
        for name in ["vm.resume", "vm.pause"] {
            wait_for(name, || {
                stream.write_all(request(name).as_bytes()).expect("a write");
                let answer = read_answer(&mut stream).expect("an answer");
                // A reset that takes long on a busy host keeps a request no longer than it is documented to.
                (answer.status != 409).then(|| answer.ok())
            });
        }
        // Answered after whatever was on its way.
        for _ in 0..3 {
            assert_eq!(api.state(), "Paused", "round {round}: {}", vmm.output());
        }
        let resets = || vmm.event_names().iter().filter(|name| *name == "rebooted").count();
        waited += usize::from(resets() < round);
        api.put("vm.resume", "").ok();
        wait_for("the reset", || (resets() == round).then_some(()));
    }
    println!("     {waited} of {PAUSES} resets waited until the VM was resumed");
    vmm.wait_for_heartbeat();
    vmm.verify();
    vmm.shut_down();
}
