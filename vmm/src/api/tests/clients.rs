// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Clients that behave, and clients that do not.

use std::io::{BufRead as _, BufReader};
use std::time::Instant;

use super::super::body::Body;
use super::super::client::ClientError;
use super::super::endpoints::ENDPOINTS;
use super::super::endpoints::Method::{Get, Put};
use super::*;
use crate::api::ProgressDocument;

const PING: &[u8] = b"GET /api/v1/vmm.ping HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n";

/// So little that a test need not wait long for its end. A test shortens only the limit that it is
/// about: on a busy host a client that behaves may take longer for anything.
const SHORT: Duration = Duration::from_millis(150);

fn head(path: &str, headers: &str) -> String {
    format!("PUT /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n")
}

/// Reads the answer to a ping, and not a byte of the next.
fn read_pong(stream: &mut UnixStream) {
    let mut text = String::new();
    while !text.ends_with('}') {
        let mut byte = [0_u8];
        stream.read_exact(&mut byte).unwrap();
        text.push(byte[0].into());
    }
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}

#[test]
fn answers_have_bodies_or_none() {
    let fixture = Fixture::new();
    let ask = |method, name| fixture.client().ask(method, name, None).unwrap();
    assert_eq!(ask(Put, "vm.shutdown"), None);
    assert_eq!(ask(Get, "vm.counters").as_deref(), Some(r#"{"_net0":{"rx_bytes":7}}"#));
    let progress: ProgressDocument =
        serde_json::from_str(&ask(Get, "vm.migration-progress").unwrap()).unwrap();
    assert_eq!(progress.phase.to_string(), "idle");
    let info: VmInfo = serde_json::from_str(&ask(Get, "vm.info").unwrap()).unwrap();
    assert_eq!(info, large_info());
}

#[test]
fn every_kind_of_failure_has_its_status_and_keeps_its_chain() {
    let fixture = Fixture::new();
    for (name, expected) in [
        ("vm.boot", "NotFound"),
        ("vm.pause", "MethodNotAllowed"),
        ("vm.resume", "Conflict"),
        ("vm.reboot", "InternalServerError"),
    ] {
        let error = fixture.client().ask(Put, name, None).unwrap_err();
        let ClientError::Refused { status, reasons } = error else { panic!("{error}") };
        assert_eq!((status.as_str(), reasons.join("/").as_str()), (expected, "outer/inner"));
    }
}

#[test]
fn paths_and_methods() {
    let fixture = Fixture::new();
    let status = |method: &str, path: &str| {
        let text = fixture.raw(
            format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes(),
        );
        text.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(status("GET", "/api/v1/vmm.ping"), "200");
    assert_eq!(status("GET", "/api/v1/vm.boot"), "405");
    assert_eq!(status("POST", "/api/v1/vm.create"), "405");
    assert_eq!(status("GET", "/api/v1/nothing"), "404");
    assert_eq!(status("GET", "/"), "404");
    assert_eq!(status("GET", "/api/v2/vmm.ping"), "404");
}

#[test]
fn headers_are_spelled_as_old_clients_look_for_them() {
    let fixture = Fixture::new();
    let text = fixture
        .raw(b"GET /api/v1/vmm.ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    // Whatever stands after the version is read as a number by cloud-hypervisor's own client.
    assert!(text.starts_with("HTTP/1.1 200 \r\n"), "{text}");
    assert!(text.contains("\r\nContent-Length: "), "{text}");
}

#[test]
fn bodies_that_are_wrong_get_reasons() {
    let fixture = Fixture::new();
    let refused = |name, body: &str| {
        let error = fixture.client().ask(Put, name, Some(body.to_owned())).unwrap_err();
        let ClientError::Refused { status, reasons } = error else { panic!("{error}") };
        assert_eq!(status, "BadRequest");
        reasons.join(": ")
    };
    assert!(refused("vm.create", "").contains("it is empty"));
    assert!(refused("vm.create", "{").contains("EOF"));
    assert!(refused("vm.create", "{}").contains("missing field `payload`"));
    assert!(refused("vm.create", r#"{"payload":{}}"#).contains("no kernel"));
    let unsupported =
        refused("vm.create", r#"{"payload":{"kernel":"/k"},"balloon":{"size":0,"iommu":true}}"#);
    assert!(
        unsupported.ends_with("'balloon.iommu' is not supported by this version"),
        "{unsupported}"
    );
    assert!(refused("vm.send-migration", "{}").contains("destination_url"));
    let url = r#"{"destination_url":"http://x"}"#;
    assert!(refused("vm.send-migration", url).contains("is not a migration address"));
    let unknown = refused("vm.create", r#"{"payload":{"kernel":"/k"},"no_field":{"x":1}}"#);
    assert!(unknown.contains("unknown field `no_field` of VmConfig"), "{unknown}");
    let good = r#"{"payload":{"kernel":"/k"}}"#.to_owned();
    assert_eq!(fixture.client().ask(Put, "vm.create", Some(good)).unwrap(), None);
}

#[test]
fn a_body_that_may_be_missing_may_be_null() {
    for endpoint in ENDPOINTS.iter().filter(|it| matches!(it.takes, Body::Optional(_))) {
        let force = |body: &str| match (endpoint.decode)(body.as_bytes()) {
            Ok(
                VmmRequest::VmmShutdown { force }
                | VmmRequest::Delete { force }
                | VmmRequest::Resume { force },
            ) => Ok(force),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.chain.join(": ")),
        };
        for body in ["", "null", "null\n", "{}", r#"{"force": null}"#, r#"{"force": false}"#] {
            assert_eq!(force(body), Ok(false), "{}: '{body}'", endpoint.path);
        }
        assert_eq!(force(r#"{"force": true}"#), Ok(true));
        assert!(force("[]").is_err_and(|error| error.contains("expected an object (ForceData)")));
    }
    let create = ENDPOINTS.iter().find(|it| it.path == "vm.create").unwrap();
    assert!((create.decode)(b"null").is_err(), "a body that has to be there");
}

#[test]
fn answers_are_ascii_as_clients_cut_them_anywhere() {
    let fixture = Fixture::new();
    let body = "{\"§{ü}\": 1, \"payload\": {}}";
    let length = format!("Content-Length: {}\r\nConnection: close\r\n", body.len());
    let text = fixture.raw((head("vm.create", &length) + body).as_bytes());
    assert!(text.is_ascii() && text.contains("unknown field `\\u00a7{\\u00fc}`"), "{text}");
}

#[test]
fn rubbish_is_answered_and_forgotten() {
    let fixture = Fixture::new();
    let rubbish: [&[u8]; 6] = [
        b"\0\xff\0\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PUT /api/v1/vm.create HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ];
    for bytes in rubbish {
        let text = fixture.raw(bytes);
        assert!(text.is_empty() || text.starts_with("HTTP/1.1 4"), "{bytes:?}: {text}");
        fixture.ping();
    }
}

#[test]
fn oversized_heads_and_bodies_are_refused_without_reading_them() {
    let fixture = Fixture::with(Limits { body_bytes: 1000, ..Limits::default() });
    let long = format!("X: {}\r\n", "x".repeat(64 << 10));
    let text = fixture.raw(head("vm.create", &long).as_bytes());
    assert!(text.starts_with("HTTP/1.1 431"), "{text}");
    let many = "X: y\r\n".repeat(500);
    let text = fixture.raw(head("vm.create", &many).as_bytes());
    assert!(text.starts_with("HTTP/1.1 431"), "{text}");
    let text = fixture.raw(head("vm.create", "Content-Length: 99999999999\r\n").as_bytes());
    assert!(text.starts_with("HTTP/1.1 413"), "{text}");
    let mut chunked = head("vm.create", "Transfer-Encoding: chunked\r\n");
    for _ in 0..20 {
        chunked.push_str("64\r\n");
        chunked.push_str(&"x".repeat(100));
        chunked.push_str("\r\n");
    }
    let text = fixture.raw(chunked.as_bytes());
    assert!(text.starts_with("HTTP/1.1 413"), "{text}");
    fixture.ping();
}

#[test]
fn slow_heads_are_closed_and_idle_connections_are_kept() {
    let fixture = Fixture::with(Limits { head_time: SHORT, ..Limits::default() });
    let mut used = fixture.connect();
    let mut answer = [0_u8; 16];
    used.write_all(PING).unwrap();
    used.read_exact(&mut answer).unwrap();
    let mut idle = fixture.connect();
    let mut slow = fixture.connect();
    slow.write_all(b"GET /api/v1/vmm.ping HT").unwrap();
    for _ in 0..20 {
        fixture.ping_again_if_slow();
    }
    // Ends by itself, and then the other two have said nothing for at least as long; the read
    // timeout of the test would show if it did not end.
    read_to_end(&mut slow);
    for stream in [&mut used, &mut idle] {
        stream.write_all(PING).unwrap();
        stream.read_exact(&mut answer).unwrap();
    }
    // A second head on a connection has the same limit as the first.
    idle.write_all(b"GET /api/v1/vmm.ping HT").unwrap();
    read_to_end(&mut idle);
}

#[test]
fn a_refusal_is_answered_after_the_body() {
    let fixture = Fixture::new();
    for path in ["vm.add-something", "nothing"] {
        let mut stream = fixture.connect();
        let body = vec![b'x'; 300 << 10];
        let length = format!("Content-Length: {}\r\nConnection: close\r\n", body.len());
        stream.write_all(head(path, &length).as_bytes()).unwrap();
        // A body that does not fit into the socket is taken in whole.
        stream.write_all(&body).unwrap();
        let text = read_to_end(&mut stream);
        assert!(text.starts_with("HTTP/1.1 501") || text.starts_with("HTTP/1.1 404"), "{text}");
    }
}

#[test]
fn slow_bodies_time_out() {
    let fixture = Fixture::with(Limits { body_time: SHORT, ..Limits::default() });
    let mut slow = fixture.connect();
    slow.write_all(head("vm.create", "Content-Length: 100\r\n").as_bytes()).unwrap();
    fixture.ping();
    let text = read_to_end(&mut slow);
    assert!(text.starts_with("HTTP/1.1 408"), "{text}");
}

#[test]
fn clients_that_do_not_read_time_out() {
    let fixture = Fixture::with(Limits { write_time: SHORT, ..Limits::default() });
    let mut deaf = fixture.connect();
    deaf.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    let info = b"GET /api/v1/vm.info HTTP/1.1\r\nHost: localhost\r\n\r\n";
    // Each answer has 400 KiB, which the socket cannot hold; the server must hang up.
    let begun = Instant::now();
    while deaf.write_all(info).is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(20), "the server never hung up");
        std::thread::yield_now();
    }
    fixture.ping();
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let fixture = Fixture::new();
    let mut stream = fixture.connect();
    let boot = head("vm.boot", "");
    stream.write_all(&[PING, boot.as_bytes(), PING].concat()).unwrap();
    let mut reader = BufReader::new(stream);
    let mut statuses = Vec::new();
    while statuses.len() < 3 {
        let mut length = 0;
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        statuses.push(line.split(' ').nth(1).unwrap().to_owned());
        while line != "\r\n" {
            if let Some(value) = line.strip_prefix("Content-Length: ") {
                length = value.trim().parse().unwrap();
            }
            line.clear();
            reader.read_line(&mut line).unwrap();
        }
        reader.read_exact(&mut vec![0; length]).unwrap();
    }
    assert_eq!(statuses, ["200", "404", "200"]);
}

#[test]
fn many_clients_at_once() {
    let fixture = Fixture::new();
    std::thread::scope(|scope| {
        for _ in 0..64 {
            let client = fixture.client();
            scope.spawn(move || {
                for _ in 0..5 {
                    assert!(client.ask(Get, "vmm.ping", None).unwrap().is_some());
                }
            });
        }
    });
}

#[test]
fn clients_that_only_hold_connections_keep_no_other_out() {
    let fixture = Fixture::with(Limits {
        connections: 2,
        head_time: Duration::from_mins(10),
        ..Limits::default()
    });
    let mut first = fixture.connect();
    let mut second = fixture.connect();
    // Answers prove that both are connected, not merely queued.
    for stream in [&mut first, &mut second] {
        stream.write_all(PING).unwrap();
        read_pong(stream);
    }
    // Half of a head that is valid so far: the server hangs up at once on any other.
    let (half, rest) = PING.split_at(PING.len() / 2);
    second.write_all(half).unwrap();
    fixture.ping();
    // The server has hung up on the one that was idle for longest, and on no other.
    read_to_end(&mut first);
    second.write_all(rest).unwrap();
    read_pong(&mut second);
    for _ in 0..5 {
        fixture.ping();
    }
}

#[test]
fn when_all_clients_are_busy_others_are_told_so() {
    let fixture = Fixture::with(Limits { connections: 1, ..Limits::default() });
    let waiting = fixture.client();
    let body = r#"{"receiver_url":"unix:/x"}"#.to_owned();
    let long = std::thread::spawn(move || waiting.ask(Put, "vm.receive-migration", Some(body)));
    let responder = fixture.held.recv().unwrap();
    let text = read_to_end(&mut fixture.connect());
    assert!(text.starts_with("HTTP/1.1 503"), "{text}");
    responder.answer(Ok(ApiReply::Empty));
    assert_eq!(long.join().unwrap().unwrap(), None);
    fixture.ping();
}

#[test]
fn a_long_request_blocks_no_other_and_is_answered_when_it_ends() {
    let fixture = Fixture::new();
    let waiting = fixture.client();
    let body = r#"{"receiver_url":"unix:/x"}"#.to_owned();
    let long = std::thread::spawn(move || waiting.ask(Put, "vm.receive-migration", Some(body)));
    let responder = fixture.held.recv().unwrap();
    for _ in 0..20 {
        fixture.ping();
    }
    assert!(!long.is_finished());
    responder.answer(Ok(ApiReply::Empty));
    assert_eq!(long.join().unwrap().unwrap(), None);
}

#[test]
fn a_client_that_leaves_during_a_long_request_does_no_harm() {
    let fixture = Fixture::new();
    let mut stream = fixture.connect();
    let body = r#"{"receiver_url":"unix:/x"}"#;
    let length = format!("Content-Length: {}\r\n", body.len());
    stream.write_all((head("vm.receive-migration", &length) + body).as_bytes()).unwrap();
    let responder = fixture.held.recv().unwrap();
    drop(stream);
    fixture.ping();
    responder.answer(Ok(ApiReply::Empty));
    fixture.ping();
}

#[test]
fn a_client_that_has_said_all_still_waits_for_the_answer() {
    let fixture = Fixture::new();
    let mut stream = fixture.connect();
    let body = r#"{"receiver_url":"unix:/x"}"#;
    let length = format!("Content-Length: {}\r\n", body.len());
    stream.write_all((head("vm.receive-migration", &length) + body).as_bytes()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let responder = fixture.held.recv_timeout(Duration::from_secs(20)).unwrap();
    // All that the server makes of the end comes before this.
    for _ in 0..20 {
        fixture.ping();
    }
    assert!(!responder.is_abandoned());
    responder.answer(Ok(ApiReply::Empty));
    let text = read_to_end(&mut stream);
    assert!(text.starts_with("HTTP/1.1 204"), "{text}");
}

#[test]
fn the_request_of_a_client_that_has_left_is_cancelled() {
    let fixture = Fixture::new();
    for with_half_close in [false, true] {
        let mut stream = fixture.connect();
        let body = r#"{"receiver_url":"unix:/x"}"#;
        let length = format!("Content-Length: {}\r\n", body.len());
        stream.write_all((head("vm.receive-migration", &length) + body).as_bytes()).unwrap();
        let responder = fixture.held.recv().unwrap();
        if with_half_close {
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            fixture.ping();
        }
        drop(stream);
        let begun = Instant::now();
        while !responder.is_abandoned() {
            assert!(begun.elapsed() < Duration::from_secs(20), "the request still waits");
            std::thread::yield_now();
        }
    }
}

#[test]
fn the_last_answer_goes_out_when_the_server_ends() {
    let mut fixture =
        Fixture::with(Limits { end_time: Duration::from_secs(20), ..Limits::default() });
    let waiting = fixture.client();
    let body = r#"{"receiver_url":"unix:/x"}"#.to_owned();
    let long = std::thread::spawn(move || waiting.ask(Put, "vm.receive-migration", Some(body)));
    let responder = fixture.held.recv().unwrap();
    let server = fixture.server.take().unwrap();
    let ending = std::thread::spawn(move || server.stop());
    responder.answer(Ok(ApiReply::Empty));
    assert_eq!(long.join().unwrap().unwrap(), None);
    ending.join().unwrap();
    assert!(!fixture.path().exists());
}

#[test]
fn an_unanswered_request_does_not_keep_the_server() {
    let mut fixture = Fixture::new();
    let waiting = fixture.client();
    let body = r#"{"receiver_url":"unix:/x"}"#.to_owned();
    let long = std::thread::spawn(move || waiting.ask(Put, "vm.receive-migration", Some(body)));
    let responder = fixture.held.recv().unwrap();
    fixture.server.take().unwrap().stop();
    assert!(long.join().unwrap().is_err());
    responder.answer(Ok(ApiReply::Empty));
}

#[test]
fn nobody_there() {
    let error = client::Client::new("/nonexistent/socket").ask(Get, "vmm.ping", None).unwrap_err();
    assert!(error.to_string().contains("'/nonexistent/socket' cannot be reached"), "{error}");
}
