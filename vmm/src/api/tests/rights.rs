// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptors that come with requests: each reaches the device that it is for, or the client is told
//! that it did not.

use std::os::fd::{AsFd as _, OwnedFd};

use super::super::client::ClientError;
use super::super::endpoints::Method::Put;
use super::super::rights::{self, MAX_REQUEST_FDS};
use super::*;
use crate::config::NewDevice;

/// What the VMM of these tests does with a device's descriptors: it writes the place of each into it.
pub fn use_descriptors(device: &NewDevice) {
    let fds = match device {
        NewDevice::Net(net) => net.fds.clone().unwrap_or_default().0,
        NewDevice::Host(host) => host.fd.clone().into_iter().collect(),
        _ => Vec::new(),
    };
    for (place, fd) in (b'0'..).zip(&fds) {
        UnixStream::from(fd.duplicate().unwrap()).write_all(&[place]).unwrap();
    }
}

/// Descriptors to send, and their other ends.
fn pairs(count: usize) -> (Vec<OwnedFd>, Vec<UnixStream>) {
    let pair = || UnixStream::pair().unwrap();
    let (ours, theirs): (Vec<_>, Vec<_>) = std::iter::repeat_with(pair).take(count).unzip();
    for stream in &ours {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    }
    (theirs.into_iter().map(OwnedFd::from).collect(), ours)
}

/// What came through the descriptors until no process held them any more.
fn said(others: Vec<UnixStream>) -> Vec<String> {
    others.into_iter().map(|mut other| read_to_end(&mut other)).collect()
}

/// Reads one answer, and not a byte of the next.
fn read_answer(stream: &mut UnixStream) -> String {
    let mut answer = String::new();
    let mut take = |bytes: usize, until: &str| {
        for _ in 0..bytes {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            answer.push(byte[0].into());
            if !until.is_empty() && answer.ends_with(until) {
                break;
            }
        }
        answer.clone()
    };
    let head = take(4096, "\r\n\r\n");
    let length = head.split("Content-Length: ").nth(1).and_then(|rest| rest.split('\r').next());
    take(length.map_or(0, |length| length.parse().unwrap()), "")
}

fn refusal(result: Result<Option<String>, ClientError>) -> (String, String) {
    let ClientError::Refused { status, reasons } = result.unwrap_err() else {
        panic!("no refusal")
    };
    (status, reasons.join(": "))
}

fn ask(name: &str, body: &str, fds: Vec<OwnedFd>) -> Result<Option<String>, ClientError> {
    Fixture::new().client().ask_with(Put, name, Some(body.to_owned()), fds)
}

#[test]
fn a_network_device_gets_its_queues_in_order() {
    let (fds, others) = pairs(3);
    // Numbers in the body mean nothing: they are those of the client.
    ask("vm.add-net", r#"{"fds": [7, 8, 9], "num_queues": 6}"#, fds).unwrap();
    assert_eq!(said(others), ["0", "1", "2"]);
    let (fds, others) = pairs(1);
    ask("vm.add-device", r#"{"fd": null}"#, fds).unwrap();
    assert_eq!(said(others), ["0"]);
}

#[test]
fn they_may_come_with_any_byte_of_their_request() {
    let fixture = Fixture::new();
    let request = b"PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}";
    for at in [0, 20, request.len() - 1] {
        let (fds, others) = pairs(1);
        let mut stream = fixture.connect();
        stream.write_all(&request[..at]).unwrap();
        let sent = rights::send(&stream, &request[at..=at], &[fds[0].as_fd()]).unwrap();
        assert_eq!(sent, 1);
        stream.write_all(&request[at + 1..]).unwrap();
        drop(fds);
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        assert_eq!(&status, b"HTTP/1.1 204");
        drop(stream);
        assert_eq!(said(others), ["0"], "sent with byte {at}");
    }
}

#[test]
fn the_next_request_of_a_connection_does_not_get_them() {
    let fixture = Fixture::new();
    let mut stream = fixture.connect();
    let request = |name: &str| {
        format!("PUT /api/v1/{name} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}")
    };
    let mut status = |name: &str, fds: &[OwnedFd]| {
        let fds: Vec<_> = fds.iter().map(OwnedFd::as_fd).collect();
        let text = request(name);
        let sent = rights::send(&stream, text.as_bytes(), &fds).unwrap();
        assert_eq!(sent, text.len());
        read_answer(&mut stream)
    };
    let (fds, others) = pairs(2);
    let refused = status("vm.nothing-of-that-kind", &fds);
    assert!(refused.starts_with("HTTP/1.1 4"), "{refused}");
    drop(fds);
    let answer = status("vm.add-net", &[]);
    assert!(answer.contains("HTTP/1.1 204"), "{answer}");
    assert_eq!(said(others), ["", ""], "closed with the request that they came with");
}

/// Whose they were is not known then, and the request behind would be carried out without its own.
#[test]
fn a_request_behind_one_that_is_refused_for_them_is_not_carried_out() {
    let fixture = Fixture::new();
    let mut stream = fixture.connect();
    let (fds, others) = pairs(1);
    let both = "PUT /api/v1/vm.pause HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n\
                PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}";
    let sent = rights::send(&stream, both.as_bytes(), &[fds[0].as_fd()]).unwrap();
    assert_eq!(sent, both.len());
    drop(fds);
    let mut answers = String::new();
    stream.read_to_string(&mut answers).unwrap();
    assert!(answers.starts_with("HTTP/1.1 400") && answers.contains("vm.pause takes"), "{answers}");
    assert_eq!(answers.matches("HTTP/1.1").count(), 1, "{answers}");
    assert_eq!(said(others), [""], "and closes them");
}

#[test]
fn a_request_that_takes_none_says_so() {
    for (name, body) in [("vm.boot", ""), ("vm.add-disk", "{}"), ("vm.pause", "")] {
        let (fds, others) = pairs(1);
        let (status, reason) = refusal(ask(name, body, fds));
        assert_eq!(status, "BadRequest");
        assert!(reason.contains(name) && reason.contains("no descriptors"), "{reason}");
        assert_eq!(said(others), [""], "and closes them");
    }
    let (status, reason) = refusal(ask("vm.add-device", "{}", pairs(2).0));
    assert!(status == "BadRequest" && reason.contains("one descriptor, 2 came"), "{reason}");
}

#[test]
fn a_vm_that_arrives_gets_as_many_as_are_named() {
    let body = r#"{"source_url": "file:///s", "net_fds": [{"id": "lan", "num_fds": 2}]}"#;
    for count in [0, 1, 3] {
        let (status, reason) = refusal(ask("vm.restore", body, pairs(count).0));
        assert_eq!(status, "BadRequest");
        assert!(reason.contains("the 2 descriptors that its net_fds"), "{reason}");
    }
    ask("vm.restore", body, pairs(2).0).unwrap();
    let none = r#"{"receiver_url": "unix:/s"}"#;
    let (_, reason) = refusal(ask("vm.receive-migration", none, pairs(1).0));
    assert!(reason.contains("1 came with the request"), "{reason}");
}

#[test]
fn too_many_are_closed_and_refused() {
    let fixture = Fixture::new();
    let mut stream = fixture.connect();
    let text = "PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
                Content-Length: 2\r\n\r\n{}";
    let (fds, others) = pairs(1);
    let (first, rest) = text.split_at(text.len() - 4);
    let many = vec![fds[0].as_fd(); 200];
    for byte in first.as_bytes().chunks(1).take(MAX_REQUEST_FDS / 200 + 1) {
        assert_eq!(rights::send(&stream, byte, &many).unwrap(), 1);
    }
    stream.write_all(&first.as_bytes()[MAX_REQUEST_FDS / 200 + 1..]).unwrap();
    stream.write_all(rest.as_bytes()).unwrap();
    drop(many);
    drop(fds);
    let answer = read_to_end(&mut stream);
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("more than 512"), "{answer}");
    assert_eq!(said(others), [""]);
}
