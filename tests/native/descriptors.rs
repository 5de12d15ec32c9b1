// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Taps that a client opened and sends with its request, as libvirt does: the guest's device uses that
//! tap and no other, for as long as the VM has the device and no longer.

use std::os::fd::{AsFd as _, BorrowedFd};

use serde_json::json;

use crate::harness::api::{Answer, read_answer};
use crate::harness::migrate::{Reception, send_option};
use crate::harness::taps::{Tap, inherited, interface_exists, send_with, taps_of};
use crate::harness::{Mode, Suite, Transport, Vmm, wait_for};
use crate::lifecycle::config;
use crate::snapshot::place;

pub fn add(suite: &mut Suite) {
    suite.add("descriptors::a_tap_that_was_sent_is_the_one_that_is_used", sent);
    suite.add("descriptors::they_are_closed_with_their_device", closed);
    suite.add("descriptors::those_that_no_request_takes_are_refused", refused);
    suite.add("descriptors::a_restored_vm_gets_new_ones", restored);
    suite.add("descriptors::a_vm_that_moves_gets_new_ones", moved);
}

/// The whole request in one message, and descriptors with it.
fn put_with(vmm: &Vmm, name: &str, body: &str, fds: &[BorrowedFd<'_>]) -> Answer {
    let mut stream = vmm.api().connect().expect("a connection");
    let text = format!(
        "PUT /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    send_with(&stream, &text, fds);
    read_answer(&mut stream).expect("an answer")
}

/// A VM that runs on a tap that was sent.
fn on_a_tap() -> (Vmm, String) {
    let vmm = Vmm::empty();
    vmm.api().put("vm.create", &config(128)).ok();
    let tap = Tap::open();
    // The shape of libvirt's body: no word of descriptors.
    let body = json!({"id": "lan", "mac": "2e:89:a8:e4:92:01", "num_queues": 2}).to_string();
    put_with(&vmm, "vm.add-net", &body, &[tap.fd.as_fd()]).ok();
    vmm.api().put("vm.boot", "").ok();
    vmm.wait_for_heartbeat();
    (vmm, tap.close())
}

fn sent() {
    let (vmm, name) = on_a_tap();
    assert_eq!(taps_of(&vmm), [name.as_str()]);
    let info = vmm.api().get("vm.info").ok().json();
    assert_eq!(info["config"]["net"][0]["fds"], json!([-1]), "its number is ours alone");
    vmm.api().put("vm.reboot", "").ok();
    vmm.wait_for_heartbeat();
    assert_eq!(taps_of(&vmm), [name.as_str()]);
    vmm.shut_down();
    assert!(!interface_exists(&name));
}

fn closed() {
    let vmm = Vmm::empty();
    vmm.api().put("vm.create", &config(128)).ok();
    let tap = Tap::open();
    // By ch-remote, which inherits it from its shell.
    inherited(&tap.fd, |number| vmm.remote_ok(&["add-net", &format!("fd=[{number}],id=lan")]));
    let name = tap.close();
    assert!(interface_exists(&name) && taps_of(&vmm) == [name.as_str()]);
    vmm.api().put("vm.remove-device", &json!({"id": "lan"}).to_string()).ok();
    wait_for("the tap to go with its device", || (!interface_exists(&name)).then_some(()));
    let second = Tap::open();
    put_with(&vmm, "vm.add-net", r#"{"id": "lan"}"#, &[second.fd.as_fd()]).ok();
    let name = second.close();
    vmm.api().put("vm.delete", "").ok();
    wait_for("the tap to go with its VM", || (!interface_exists(&name)).then_some(()));
    vmm.shut_down();
}

fn refused() {
    let vmm = Vmm::empty();
    let tap = Tap::open();
    let refusals = [
        ("vm.create", config(128), "takes no descriptors"),
        ("vm.restore", json!({"source_url": "file:///nowhere"}).to_string(), "takes the 0"),
    ];
    for (name, body, reason) in refusals {
        let answer = put_with(&vmm, name, &body, &[tap.fd.as_fd()]);
        assert!(answer.status == 400 && answer.body.contains(reason), "{answer:?}");
    }
    vmm.api().put("vm.create", &config(128)).ok();
    // One descriptor for two queue pairs.
    let body = json!({"id": "lan", "num_queues": 4}).to_string();
    let answer = put_with(&vmm, "vm.add-net", &body, &[tap.fd.as_fd()]);
    assert!(answer.status == 400 && answer.body.contains("1 descriptors for 2"), "{answer:?}");
    let answer = vmm.api().put("vm.add-net", r#"{"id": "lan", "fds": [5]}"#);
    assert!(answer.status == 400 && answer.body.contains("cannot be passed in JSON"), "{answer:?}");
    assert_eq!(taps_of(&vmm), [""; 0], "nothing of it stays");
    assert!(tap.exists());
    vmm.shut_down();
}

fn restored() {
    let (vmm, name) = on_a_tap();
    let (_folder, url) = place();
    vmm.remote_ok(&["pause"]);
    vmm.remote_ok(&["snapshot", &url]);
    vmm.shut_down();
    assert!(!interface_exists(&name));
    let vmm = Vmm::empty();
    let plain = vmm.remote(&["restore", &format!("source_url={url}")]);
    let error = String::from_utf8_lossy(&plain.stderr);
    assert!(!plain.status.success() && error.contains("lan"), "{error}");
    assert!(error.contains("SCM_RIGHTS"), "it says what to do: {error}");
    let tap = Tap::open();
    inherited(&tap.fd, |number| {
        vmm.remote_ok(&["restore", &format!("source_url={url},resume=on,net_fds=[lan@[{number}]]")])
    });
    assert_eq!(taps_of(&vmm), [tap.close().as_str()]);
    vmm.wait_for_heartbeat();
    vmm.verify();
    vmm.shut_down();
}

fn moved() {
    let (mut source, _) = on_a_tap();
    let destination = Vmm::empty();
    let tap = Tap::open();
    let reception = inherited(&tap.fd, |number| {
        let option = format!(",net_fds=[lan@[{number}]]");
        Reception::start_with(&destination, Transport::Unix, Mode::Postcopy, &option)
    });
    source.remote_ok(&["send-migration", &send_option(&reception.url, Mode::Postcopy)]);
    let output = reception.finish();
    assert!(output.status.success(), "{output:?}\n{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    assert_eq!(taps_of(&destination), [tap.close().as_str()]);
    destination.wait_for_heartbeat();
    destination.verify();
    destination.shut_down();
}
