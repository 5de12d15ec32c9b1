// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections of other clients: before the source connects, while memory is sent, and while the source is
//! disconnected. They send nothing, a byte now and then, or something else, and the migration continues.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::recovery::wait_until;
use super::{
    Builder, FakeVm, Guest, LIMITS, Target, assert_whole, loopback, memory, options, send,
};
use crate::Address;
use crate::commit::Verdict;
use crate::progress::Phase;
use crate::protocol::codec::Header;
use crate::protocol::message::{Answer, Message, Recover};

fn connect(address: &Address) -> TcpStream {
    let Address::Tcp { host, port } = address else { panic!("{address}") };
    TcpStream::connect((host.as_str(), *port)).unwrap()
}

/// Data that does not begin a migration.
fn noises() -> Vec<Vec<u8>> {
    let recover = Recover { id: [1; 16], attempt: 1, bulk: 1, urgent: 1, alive: false };
    vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 64],
        vec![0; 16],
        vec![b'x'],
        Header::new(1, 1 << 40).encode().to_vec(),
        Message::Complete.encode(),
        Message::Confirm(Vec::new()).encode(),
        Message::State(b"{}".to_vec()).encode(),
        Message::Recover(recover).encode(),
        Message::Verdict { id: [1; 16], verdict: Verdict::Committed }.encode(),
    ]
}

#[test]
fn who_is_not_the_source_ends_no_wait_for_it() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 5);
    guest.fill(&from, 30);
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    // More than are examined together, before the source and still there when it comes.
    let mut silent: Vec<_> = (0..400).map(|_| connect(&target.address)).collect();
    for _ in 0..20 {
        drop(connect(&target.address));
    }
    for noise in noises() {
        let mut stranger = connect(&target.address);
        stranger.write_all(&noise).unwrap();
        silent.push(stranger);
    }
    assert_eq!(target.progress.phase(), Phase::Listen);
    let began = Instant::now();
    send(FakeVm::new(&from, &guest).running(), &options(&target.address)).unwrap();
    assert!(began.elapsed() < LIMITS.answer);
    drop(target.join().unwrap());
    assert_whole(&guest, &to);
}

#[test]
fn strangers_hear_why_they_go() {
    let to = memory();
    let target = Target::start(&loopback(), Builder::new(&to, &Guest::new(&to, 1)), LIMITS);
    for noise in noises() {
        if noise.len() < 16 {
            continue;
        }
        let mut stranger = connect(&target.address);
        stranger.write_all(&noise).unwrap();
        let mut told = Vec::new();
        stranger.read_to_end(&mut told).unwrap();
        let answer = Answer::read(&mut &told[..]);
        assert!(matches!(answer, Ok(Answer::Error { .. })), "{noise:?}: {answer:?}");
    }
    target.cancel.cancel();
    target.join().unwrap_err();
}

/// Connects again and again, each time with a byte now and then, until `end`.
fn drip(address: &Address, end: &AtomicBool) {
    let mut all: Vec<TcpStream> = Vec::new();
    while !end.load(Ordering::Relaxed) {
        let Address::Tcp { host, port } = address else { return };
        if all.len() < 100
            && let Ok(stream) = TcpStream::connect((host.as_str(), *port))
        {
            stream.set_nonblocking(true).unwrap();
            all.push(stream);
        }
        for stream in &mut all {
            // A role and part of a token, or of a header.
            let _ = stream.write(&[2]);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn bytes_that_trickle_do_not_hold_memory_up() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 6);
    guest.fill(&from, 50);
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| drip(&target.address, &end));
        wait_until("strangers", || target.progress.phase() == Phase::Listen);
        std::thread::sleep(Duration::from_millis(100));
        let mut options = options(&target.address);
        options.connections = 4;
        let began = Instant::now();
        let sent = send(FakeVm::new(&from, &guest).running(), &options);
        let took = began.elapsed();
        end.store(true, Ordering::Relaxed);
        sent.unwrap();
        assert!(took < LIMITS.stall, "it took {took:?}");
    });
    drop(target.join().unwrap());
    assert_whole(&guest, &to);
}
