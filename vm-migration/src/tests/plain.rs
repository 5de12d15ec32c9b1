// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Peers that know only version 0 of the protocol, as hand-written bytes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use super::{
    Builder, FakeMemory, FakeVm, Guest, LIMITS, Target, assert_whole, loopback, memory, options,
    send,
};
use crate::layout::GpaRange;
use crate::protocol::codec::put_table;
use crate::ram::{GuestMemoryMap, slice};
use crate::source::SendFailure;
use crate::testing::Pace;
use crate::transport::Address;
use crate::{Cause, MemoryMode};

pub(super) fn header(code: u16, len: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&code.to_le_bytes());
    bytes[8..].copy_from_slice(&len.to_le_bytes());
    bytes
}

/// A destination of version 0: it knows commands 1 to 8, ignores spare header bytes, answers an
/// unknown command with an error and closes. Extra connections carry memory. Returns the commands.
pub(super) fn old_destination(listener: &TcpListener, memory: &Arc<FakeMemory>) -> Vec<u16> {
    let (mut control, _) = listener.accept().unwrap();
    let mut commands = Vec::new();
    loop {
        let mut head = [0; 16];
        if control.read_exact(&mut head).is_err() {
            return commands;
        }
        let code = u16::from_le_bytes([head[0], head[1]]);
        commands.push(code);
        let len = usize::try_from(u64::from_le_bytes(head[8..].try_into().unwrap())).unwrap();
        let mut payload = vec![0; len];
        match code {
            1 | 5 | 8 => assert_eq!(len, 0),
            2 | 3 => {
                control.read_exact(&mut payload).unwrap();
                serde_json::from_slice::<serde_json::Value>(&payload).unwrap();
            }
            4 => {
                control.read_exact(&mut payload).unwrap();
                take_contents(&mut control, &payload, memory);
            }
            _ => {
                control.write_all(&header(2, 0)).unwrap();
                return commands;
            }
        }
        control.write_all(&header(1, 0)).unwrap();
    }
}

fn take_contents(from: &mut TcpStream, table: &[u8], memory: &FakeMemory) {
    for entry in table.chunks_exact(16) {
        let word = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap());
        let range = GpaRange { gpa: word(0), len_bytes: word(8) };
        let run = memory.layout().locate(range).unwrap();
        let mut bytes = vec![0; usize::try_from(range.len_bytes).unwrap()];
        from.read_exact(&mut bytes).unwrap();
        slice(memory, run).write(&bytes);
    }
}

pub(super) fn tcp(listener: &TcpListener) -> Address {
    format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap()
}

#[test]
fn an_old_destination_gets_plain_precopy() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 21);
    guest.fill(&from, 70);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = options(&tcp(&listener));
    options.downtime = Duration::from_millis(5);
    let peer = {
        let to = Arc::clone(&to);
        std::thread::spawn(move || old_destination(&listener, &to))
    };
    let vm = FakeVm::new(&from, &guest).load(2, 80, Pace::Paced(64, Duration::from_micros(300)));
    let vm = vm.running();
    let calls = vm.calls();
    send(vm, &options).unwrap();
    let commands = peer.join().unwrap();
    assert_eq!(commands[..2], [1, 2]);
    assert_eq!(commands[commands.len() - 2..], [3, 5]);
    assert!(commands[2..commands.len() - 2].iter().all(|code| *code == 4));
    assert_whole(&guest, &to);
    let expected = [
        "config",
        "start log",
        "prepare_stop",
        "pause",
        "state",
        "release",
        "handed over",
        "log ends",
    ];
    let mut calls = calls.lock().clone();
    // A repeated call, if that took long.
    calls.dedup();
    assert_eq!(calls, expected);
}

#[test]
fn postcopy_to_an_old_destination_is_refused_and_the_guest_continues() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 22);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = options(&tcp(&listener));
    options.memory_mode = MemoryMode::Postcopy;
    let peer = std::thread::spawn(move || old_destination(&listener, &to));
    match *send(FakeVm::new(&from, &guest).running(), &options).unwrap_err() {
        SendFailure::Resumed { vm, error } => {
            assert!(vm.runs());
            assert!(matches!(error.cause, Cause::Unsupported { .. }), "{error:?}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(peer.join().unwrap(), [1, 6], "it was told that the source abandoned the migration");
}

#[test]
fn an_old_source_is_served_over_several_connections() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 23);
    guest.fill(&from, 50);
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let Address::Tcp { host, port } = &target.address else { panic!() };
    let connect = || TcpStream::connect((host.as_str(), *port)).unwrap();
    let mut control = connect();
    let ask = |stream: &mut TcpStream, bytes: &[u8]| {
        stream.write_all(bytes).unwrap();
        let mut answer = [0; 16];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, header(1, 0), "a plain Ok");
    };
    ask(&mut control, &header(1, 0));
    ask(&mut control, &[&header(2, 2)[..], b"{}"].concat());
    // A connection of another source, and one of no source.
    let mut second_source = connect();
    second_source.write_all(&header(1, 0)).unwrap();
    let mut stranger = connect();
    stranger.write_all(&[&1u16.to_le_bytes()[..], &header(99, 0)].concat()).unwrap();
    for mut other in [second_source, stranger] {
        let mut told = Vec::new();
        other.read_to_end(&mut told).unwrap();
        assert_eq!(u16::from_le_bytes([told[0], told[1]]), 2, "it is refused");
    }
    let mut extra = connect();
    extra.write_all(&1u16.to_le_bytes()).unwrap();
    for (region, info) in from.layout().regions().iter().enumerate() {
        let range = GpaRange { gpa: info.gpa, len_bytes: info.len_bytes };
        let run = from.layout().locate(range).unwrap();
        let mut message = header(4, 16).to_vec();
        put_table(&mut message, &[range]);
        for page in 0..run.count {
            for word in 0..512 {
                let value = from.word(region, page, word);
                let value = value.load(std::sync::atomic::Ordering::Relaxed);
                message.extend_from_slice(&value.to_le_bytes());
            }
        }
        ask(if region == 0 { &mut control } else { &mut extra }, &message);
    }
    ask(&mut control, &[&header(3, 2)[..], b"{}"].concat());
    ask(&mut control, &header(8, 0));
    let received = target.join().unwrap();
    assert!(!received.vm.runs(), "CompletePaused leaves the guest paused");
    assert_whole(&guest, &to);
}

#[test]
fn a_version_that_we_do_not_speak_is_refused() {
    let to = memory();
    let target = Target::start(&loopback(), Builder::new(&to, &Guest::new(&to, 1)), LIMITS);
    let Address::Tcp { host, port } = &target.address else { panic!() };
    let mut control = TcpStream::connect((host.as_str(), *port)).unwrap();
    let mut start = header(1, 0);
    start[2] = 9;
    control.write_all(&start).unwrap();
    let mut answer = [0; 2];
    control.read_exact(&mut answer).unwrap();
    assert_eq!(u16::from_le_bytes(answer), 2);
    drop(control);
    let error = target.join().unwrap_err().error;
    assert!(matches!(error.cause, Cause::Protocol(_)), "{error:?}");
}
