// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The HTTP server against clients that mean no good, or are just slow: the VM continues, and so does
//! the requests of all other clients.

use std::io::{Read, Write};

use crate::harness::{Suite, Vmm, api};
use crate::lifecycle::config;

pub fn add(suite: &mut Suite) {
    suite.add("http::malformed_requests", malformed);
    suite.add("http::bodies_that_are_wrong", bodies);
    suite.add("http::oversized_body", oversized);
    suite.add("http::slow_and_silent_clients_disturb_no_other", slow);
    suite.add("http::many_clients_at_once", many);
    suite.add("http::connection_is_kept_open", keep_alive);
}

fn assert_alive(vmm: &Vmm) {
    vmm.api().get("vmm.ping").ok();
}

fn malformed() {
    let vmm = Vmm::empty();
    let junk: [&[u8]; 7] = [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /api/v1/vmm.ping HTTP/9.9\r\n\r\n",
        b"PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"PUT /api/v1/vm.create HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ];
    for bytes in junk {
        let mut stream = vmm.api().connect().expect("a connection");
        stream.write_all(bytes).expect("bytes can be sent");
        stream.shutdown(std::net::Shutdown::Write).expect("one side can be closed");
        // An answer with an error, or an end: but an end.
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.is_empty() || !answer.contains(" 200 "), "{bytes:?}: {answer}");
        assert_alive(&vmm);
    }
    let api = vmm.api();
    assert_eq!(api.get("vm.nothing").status, 404);
    assert_eq!(
        api.raw(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .expect("an answer")
            .status,
        404
    );
    let wrong = api.put("vm.info", "");
    assert!(wrong.status == 404 || wrong.status == 405, "{wrong:?}");
    vmm.shut_down();
}

fn bodies() {
    let vmm = Vmm::empty();
    let api = vmm.api();
    let cases = [
        ("", "empty"),
        ("{", "EOF"),
        ("[]", "VmConfig"),
        ("{}", "payload"),
        (r#"{"payload":{"kernel":"/k"},"memory":{"size":"lots"}}"#, "size"),
        (r#"{"payload":{"kernel":"/k"},"memory":{"size":-1}}"#, "size"),
        (r#"{"payload":{"kernel":"/k"},"cpus":{"boot_vcpus":0,"max_vcpus":1}}"#, "boot_vcpus"),
        (r#"{"payload":{"kernel":"/k"},"tpm":{"socket":""}}"#, "needs a socket"),
        (r#"{"payload":{"kernel":"/k"},"balloon":{"size":0,"iommu":true}}"#, "not supported"),
        (
            r#"{"payload":{"kernel":"/k"},"disks":[{"path":"/d","id":"a"},{"path":"/e","id":"a"}]}"#,
            "used twice",
        ),
    ];
    for (body, text) in cases {
        let answer = api.put("vm.create", body);
        assert!(answer.status == 400, "{body}: {answer:?}");
        assert!(
            answer.body.to_lowercase().contains(&text.to_lowercase()),
            "{body}: no {text} in {answer:?}"
        );
        assert_eq!(api.get("vm.info").status, 404, "{body} left a VM behind");
    }
    vmm.shut_down();
}

fn oversized() {
    let vmm = Vmm::empty();
    let api = vmm.api();
    let length: u64 = 1 << 40;
    let text =
        format!("PUT /api/v1/vm.create HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{");
    let answer = api.raw(text.as_bytes()).expect("an answer before the body is complete");
    assert!(answer.status == 413 || answer.status == 400, "{answer:?}");
    let before = crate::harness::process::status_kib(vmm.pid(), "VmRSS");
    let big = format!("{{\"payload\":{{\"kernel\":\"{}\"}}}}", "x".repeat(64 << 20));
    if let Ok(answer) = api.request("PUT", "vm.create", Some(&big)) {
        assert!(answer.status == 413 || answer.status == 400, "{}", answer.status);
    }
    let grown = crate::harness::process::status_kib(vmm.pid(), "VmRSS").saturating_sub(before);
    assert!(grown < 16 << 10, "{grown} KiB more are resident after an oversized body");
    assert_alive(&vmm);
    vmm.shut_down();
}

/// Clients that stay silent, for whom the server has no time limit before their first byte, and others that
/// stop in the middle of a head: a server that waited for one of them would answer no other client.
fn slow() {
    let vmm = Vmm::empty();
    let mut silent: Vec<_> = (0..20).map(|_| vmm.api().connect().expect("a connection")).collect();
    for (index, stream) in silent.iter_mut().enumerate() {
        let text = b"PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 50\r\n\r\n{";
        let sent = if index % 2 == 0 { 0 } else { index * 2 };
        stream.write_all(&text[..sent]).expect("bytes can be sent");
    }
    for _ in 0..50 {
        assert_alive(&vmm);
    }
    vmm.api().put("vm.create", &config(128)).ok();
    drop(silent);
    vmm.shut_down();
}

fn many() {
    let vmm = Vmm::boot(1, "size=128M,shared=on", "workload=random-write mem=16M");
    std::thread::scope(|scope| {
        for worker in 0..8 {
            let api = vmm.api();
            scope.spawn(move || {
                for round in 0..20 {
                    match (worker + round) % 4 {
                        0 => drop(api.put("vm.pause", "")),
                        1 => drop(api.put("vm.resume", "")),
                        2 => assert_eq!(api.get("vm.info").status, 200),
                        _ => assert_eq!(api.get("vmm.ping").status, 200),
                    }
                }
            });
        }
    });
    // Whatever the last one was: the VM can be brought to run.
    vmm.api().put("vm.resume", "");
    assert_eq!(vmm.api().state(), "Running");
    vmm.wait_for_heartbeat();
    vmm.verify();
    vmm.shut_down();
}

fn keep_alive() {
    let vmm = Vmm::empty();
    let mut stream = vmm.api().connect().expect("a connection");
    for _ in 0..3 {
        stream
            .write_all(b"GET /api/v1/vmm.ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .expect("bytes can be sent");
        assert_eq!(api::read_answer(&mut stream).expect("an answer").status, 200);
    }
    vmm.shut_down();
}
