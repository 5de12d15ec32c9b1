// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the API with real sockets: good clients, bad clients, and the description.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

mod behaviour;
mod clients;
mod compatibility;
mod description;
mod rights;
mod scrapes;
mod sockets;
mod watchers;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use super::request::Responder;
use super::server::Limits;
use super::*;
use crate::config::VmConfig;
use crate::metrics::{VmReading, states};

/// A server with a VMM behind it that answers by rule.
struct Fixture {
    dir: tempfile::TempDir,
    server: Option<ApiServer>,
    /// Receive requests that the fake VMM holds back.
    held: Receiver<Responder>,
}

impl Fixture {
    fn new() -> Self {
        Self::with(Limits::default())
    }

    fn with(limits: Limits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = ApiListener::bind(ApiSocket::Path(dir.path().join("api"))).unwrap();
        let (handle, queue) = channel().unwrap();
        let (hold, held) = std::sync::mpsc::channel();
        std::thread::spawn(move || vmm(&queue, &hold));
        let server = ApiServer::start_with(server::Front::Api, listener, handle, limits).unwrap();
        Self { dir, server: Some(server), held }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("api")
    }

    fn client(&self) -> client::Client {
        client::Client::new(self.path())
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.path()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// Sends raw bytes and reads until the server closes.
    fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // The server may close before everything is written.
        let _ = stream.write_all(bytes);
        read_to_end(&mut stream)
    }

    fn ping(&self) {
        let text = self.client().ask(endpoints::Method::Get, "vmm.ping", None).unwrap().unwrap();
        assert!(text.contains("\"version\":\"53.0.0\""), "{text}");
    }

    /// The same where a client has so little time to ask that a busy host may make any client too
    /// slow, on which the server hangs up.
    fn ping_again_if_slow(&self) {
        let begun = Instant::now();
        while self.client().ask(endpoints::Method::Get, "vmm.ping", None).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(20), "no ping is answered");
        }
    }
}

/// Reads until the end; a reset after the answer counts as an end, silence does not.
fn read_to_end(stream: &mut UnixStream) -> String {
    let mut out = Vec::new();
    let mut chunk = [0_u8; 4096];
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => out.extend_from_slice(&chunk[..n]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                panic!("the server neither answers nor hangs up")
            }
            Err(_) => break,
        }
    }
    String::from_utf8(out).unwrap()
}

/// Answers: a fixed one for each request; receive requests are handed to the test.
fn vmm(queue: &ApiQueue, hold: &Sender<Responder>) {
    while let Some(call) = queue.wait() {
        let (request, responder) = call.into_parts();
        let refuse = |kind| Err(ApiError { kind, chain: vec!["outer".into(), "inner".into()] });
        let result = match request {
            VmmRequest::Ping => Ok(ApiReply::Ping(VmmPingResponse::default())),
            VmmRequest::Info => Ok(ApiReply::Info(Box::new(large_info()))),
            VmmRequest::Counters => Ok(ApiReply::Counters(BTreeMap::from([(
                "_net0".to_owned(),
                BTreeMap::from([("rx_bytes".to_owned(), 7)]),
            )]))),
            VmmRequest::Metrics => {
                let reading = VmReading { state: states::NONE, ..VmReading::default() };
                Ok(ApiReply::Metrics(Box::new(reading)))
            }
            VmmRequest::MigrationProgress => {
                let progress = vm_migration::Progress::new(vm_migration::Side::Source);
                Ok(ApiReply::Progress(Box::new(progress.snapshot())))
            }
            VmmRequest::Boot => refuse(ApiErrorKind::NotCreated),
            VmmRequest::Pause => refuse(ApiErrorKind::NotBooted),
            VmmRequest::Resume { .. } => refuse(ApiErrorKind::Conflict),
            VmmRequest::Reboot => refuse(ApiErrorKind::Failed),
            VmmRequest::ReceiveMigration(_) => {
                let _ = hold.send(responder);
                continue;
            }
            VmmRequest::AddDevice(device) => {
                rights::use_descriptors(&device);
                Ok(ApiReply::Empty)
            }
            _ => Ok(ApiReply::Empty),
        };
        responder.answer(result);
    }
}

/// An answer that does not fit into the buffers of a socket.
fn large_info() -> VmInfo {
    let mut config = VmConfig::default();
    config.payload.cmdline = Some("x".repeat(400 << 10));
    VmInfo { config, state: VmState::Running, ..VmInfo::default() }
}
