// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The commit of plain version 0: the source hands the guest over with the bytes of the answer to Complete.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use super::plain::header;
use super::recovery::wait_until;
use super::{Builder, FakeMemory, Guest, LIMITS, Target, assert_whole, loopback, memory};
use crate::commit::destination::Decision;
use crate::layout::GpaRange;
use crate::options::Limits;
use crate::progress::Phase;
use crate::protocol::codec::put_table;
use crate::steering::Steering;
use crate::testing::{Calls, Inject};
use crate::{Address, Cause, GuestLocation};

/// A socket in a folder of its own.
fn unix() -> (tempfile::TempDir, Address) {
    let folder = tempfile::tempdir().unwrap();
    let address = Address::Unix(folder.path().join("socket"));
    (folder, address)
}

fn ask(stream: &mut (impl Read + Write), bytes: &[u8]) {
    stream.write_all(bytes).unwrap();
    let mut answer = [0; 16];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, header(1, 0), "an Ok and nothing else");
}

/// Memory of one page of zeros, as a source would send it.
fn a_page() -> Vec<u8> {
    let mut message = header(4, 16).to_vec();
    put_table(&mut message, &[GpaRange { gpa: 0, len_bytes: 4096 }]);
    message.extend_from_slice(&[0; 4096]);
    message
}

fn connect(target: &Target) -> TcpStream {
    let Address::Tcp { host, port } = &target.address else { panic!() };
    TcpStream::connect((host.as_str(), *port)).unwrap()
}

/// The first connection of a source, whose configuration is taken.
fn up_to_config(target: &Target) -> TcpStream {
    let mut control = connect(target);
    ask(&mut control, &header(1, 0));
    ask(&mut control, &[&header(2, 2)[..], b"{}"].concat());
    control
}

fn up_to_state(stream: &mut (impl Read + Write)) {
    ask(stream, &header(1, 0));
    ask(stream, &[&header(2, 2)[..], b"{}"].concat());
    ask(stream, &a_page());
    ask(stream, &[&header(3, 2)[..], b"{}"].concat());
}

fn has(calls: &Calls, name: &'static str) -> bool {
    calls.lock().contains(&name)
}

/// Everything is sent over a Unix socket, and the answer to Complete is there and not taken.
fn up_to_answer(address: &Address) -> UnixStream {
    let Address::Unix(path) = address else { panic!() };
    let mut control = UnixStream::connect(path).unwrap();
    up_to_state(&mut control);
    control.write_all(&header(5, 0)).unwrap();
    wait_until("the answer", || {
        let mut answer = [std::mem::MaybeUninit::uninit(); 16];
        socket2::SockRef::from(&control).peek(&mut answer).is_ok_and(|len| len == answer.len())
    });
    control
}

fn guest() -> (Arc<FakeMemory>, Arc<Guest>) {
    let to = memory();
    let guest = Guest::new(&to, 31);
    (to, guest)
}

#[test]
fn the_guest_runs_once_the_answer_is_taken() {
    let (to, guest) = guest();
    let (_folder, address) = unix();
    let builder = Builder::new(&to, &guest);
    let calls = builder.calls();
    let target = Target::start(&address, builder, LIMITS);
    let mut control = up_to_answer(&address);
    assert!(!has(&calls, "run") && !target.is_over());
    let mut answer = [0; 16];
    control.read_exact(&mut answer).unwrap();
    assert_eq!(answer, header(1, 0));
    // The source ends at once, as it is free to.
    drop(control);
    let received = target.join().unwrap();
    assert!(received.vm.runs());
    assert!(!has(&calls, "in doubt"));
    drop(received);
    assert_whole(&guest, &to);
}

#[test]
fn the_guest_of_a_source_on_another_host_runs() {
    let (to, guest) = guest();
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let Address::Tcp { host, port } = &target.address else { panic!() };
    let mut control = TcpStream::connect((host.as_str(), *port)).unwrap();
    up_to_state(&mut control);
    ask(&mut control, &header(5, 0));
    assert!(target.join().unwrap().vm.runs());
}

/// Has the kernel drop all that comes to a socket, before it acknowledges it.
fn drop_all(socket: &TcpStream) {
    let code = u16::try_from(libc::BPF_RET | libc::BPF_K).unwrap();
    let nothing = socket2::SockFilter::new(code, 0, 0, 0);
    socket2::SockRef::from(socket).attach_filter(&[nothing]).unwrap();
}

/// Everything is sent over TCP, and the answer to Complete cannot be acknowledged.
fn up_to_dropped_answer(target: &Target) -> TcpStream {
    let Address::Tcp { host, port } = &target.address else { panic!() };
    let mut control = TcpStream::connect((host.as_str(), *port)).unwrap();
    up_to_state(&mut control);
    drop_all(&control);
    control.write_all(&header(5, 0)).unwrap();
    wait_until("the answer", || target.progress.phase() == Phase::Run);
    control
}

#[test]
fn the_guest_of_a_source_on_another_host_waits_for_its_acknowledgement() {
    let (to, guest) = guest();
    let builder = Builder::new(&to, &guest);
    let calls = builder.calls();
    let target = Target::start(&loopback(), builder, LIMITS);
    let mut control = up_to_dropped_answer(&target);
    // Several retransmissions.
    std::thread::sleep(Duration::from_millis(700));
    assert!(!has(&calls, "run") && !target.is_over());
    socket2::SockRef::from(&control).detach_filter().unwrap();
    let mut answer = [0; 16];
    control.read_exact(&mut answer).unwrap();
    assert_eq!(answer, header(1, 0));
    assert!(target.join().unwrap().vm.runs());
}

#[test]
fn a_source_on_another_host_that_resets_the_connection_leaves_it_in_doubt() {
    let (to, guest) = guest();
    let builder = Builder::new(&to, &guest);
    let (calls, steering) = (builder.calls(), Steering::new());
    let target = Target::steered(&loopback(), builder, LIMITS, steering.clone());
    let control = up_to_dropped_answer(&target);
    socket2::SockRef::from(&control).set_linger(Some(Duration::ZERO)).unwrap();
    drop(control);
    wait_until("the doubt", || target.progress.phase() == Phase::InDoubt);
    wait_until("the report", || has(&calls, "in doubt"));
    assert!(!has(&calls, "run"));
    steering.decide(Decision::Discarded);
    assert!(target.join().is_err());
}

#[test]
fn the_first_connection_may_be_silent_while_memory_comes_on_others() {
    let (to, guest) = guest();
    let limits = Limits { answer: Duration::from_millis(300), ..LIMITS };
    let target = Target::start(&loopback(), Builder::new(&to, &guest), limits);
    let mut control = up_to_config(&target);
    let mut extra = connect(&target);
    extra.write_all(&1u16.to_le_bytes()).unwrap();
    let began = std::time::Instant::now();
    // Longer than a source of plain version 0 may be silent.
    while began.elapsed() < 6 * limits.answer {
        ask(&mut extra, &a_page());
        std::thread::sleep(limits.answer / 3);
    }
    ask(&mut control, &[&header(3, 2)[..], b"{}"].concat());
    ask(&mut control, &header(5, 0));
    assert!(target.join().unwrap().vm.runs());
}

#[test]
fn a_source_without_versions_may_be_silent_for_a_while_and_not_for_ever() {
    let (to, guest) = guest();
    let limits = Limits { answer: Duration::from_millis(500), ..LIMITS };
    for (silent, is_taken) in [(2 * limits.answer, true), (20 * limits.answer, false)] {
        let target = Target::start(&loopback(), Builder::new(&to, &guest), limits);
        let mut control = up_to_config(&target);
        let began = std::time::Instant::now();
        wait_until("the end of the silence", || began.elapsed() >= silent || target.is_over());
        assert_eq!(target.is_over(), !is_taken);
        if is_taken {
            ask(&mut control, &a_page());
        } else {
            assert!(began.elapsed() >= 4 * limits.answer, "{:?}", began.elapsed());
            assert!(target.join().is_err());
        }
    }
}

#[test]
fn another_host_cannot_add_memory_to_that_of_a_source_without_a_token() {
    let (to, guest) = guest();
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let mut control = up_to_config(&target);
    let there = control.peer_addr().unwrap();
    let stranger =
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let elsewhere: std::net::SocketAddr = "127.0.0.2:0".parse().unwrap();
    stranger.bind(&elsewhere.into()).unwrap();
    stranger.connect(&there.into()).unwrap();
    let mut stranger = TcpStream::from(stranger);
    let mut message = 1u16.to_le_bytes().to_vec();
    let mut memory = a_page();
    memory.truncate(memory.len() - 4096);
    memory.extend_from_slice(&[0xee; 4096]);
    message.extend(memory);
    stranger.write_all(&message).unwrap();
    let mut told = [0; 16];
    stranger.read_exact(&mut told).unwrap();
    assert_eq!(told[..2], 2u16.to_le_bytes(), "an error");
    let first = to.word(0, 0, 0).load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(first, 0, "nothing of another host is in memory");
    // One of the source's own is taken.
    let mut extra = connect(&target);
    extra.write_all(&1u16.to_le_bytes()).unwrap();
    ask(&mut extra, &a_page());
    ask(&mut control, &[&header(3, 2)[..], b"{}"].concat());
    ask(&mut control, &header(5, 0));
    assert!(target.join().unwrap().vm.runs());
}

#[test]
fn an_answer_that_is_not_taken_leaves_it_in_doubt() {
    for (decision, runs) in [(Decision::RunsHere, true), (Decision::Discarded, false)] {
        let (to, guest) = guest();
        let (_folder, address) = unix();
        let builder = Builder::new(&to, &guest);
        let (calls, steering) = (builder.calls(), Steering::new());
        let target = Target::steered(&address, builder, LIMITS, steering.clone());
        drop(up_to_answer(&address));
        wait_until("the doubt", || target.progress.phase() == Phase::InDoubt);
        wait_until("the report", || has(&calls, "in doubt"));
        assert!(!has(&calls, "run"));
        steering.decide(decision);
        match target.join() {
            Ok(received) => assert!(runs && received.vm.runs()),
            Err(failure) => {
                assert!(!runs && failure.vm.is_none());
                assert_eq!(failure.error.guest, GuestLocation::NotHere);
            }
        }
    }
}

#[test]
fn what_fails_is_refused_before_the_answer_and_without_a_payload() {
    for inject in [Inject::Apply, Inject::Exclusive] {
        let (to, guest) = guest();
        let builder = Builder::new(&to, &guest).inject(inject);
        let target = Target::start(&loopback(), builder, LIMITS);
        let mut control = up_to_config(&target);
        ask(&mut control, &a_page());
        control.write_all(&[&header(3, 2)[..], b"{}"].concat()).unwrap();
        let mut told = Vec::new();
        control.read_to_end(&mut told).unwrap();
        assert_eq!(told, header(2, 0));
        let failure = target.join().unwrap_err();
        assert!(failure.vm.is_none());
    }
}

#[test]
fn a_state_without_memory_before_it_is_refused() {
    let (to, guest) = guest();
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let mut control = up_to_config(&target);
    control.write_all(&[&header(3, 2)[..], b"{}"].concat()).unwrap();
    let mut told = Vec::new();
    control.read_to_end(&mut told).unwrap();
    assert_eq!(told, header(2, 0));
    let error = target.join().unwrap_err().error;
    assert!(matches!(error.cause, Cause::Unsupported { .. }), "{error:?}");
}

#[test]
fn a_machine_of_its_state_is_built_when_that_has_come() {
    let (to, guest) = guest();
    let builder = Builder::new(&to, &guest).from_state();
    let calls = builder.calls();
    let target = Target::start(&loopback(), builder, LIMITS);
    let mut control = up_to_config(&target);
    ask(&mut control, &a_page());
    assert!(!has(&calls, "prepare"), "it is built too early");
    ask(&mut control, &[&header(3, 2)[..], b"{}"].concat());
    super::assert_in_order(&calls, &["map", "prepare", "ready", "apply", "exclusive"]);
    ask(&mut control, &header(8, 0));
    assert!(!target.join().unwrap().vm.runs());
}
