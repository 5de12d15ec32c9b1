// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A peer that closes, lies or stalls at every message.
//!
//! A relay between a real source and a real destination lets a clean migration pass and notes its
//! messages; that list, times before and after the message, times what the relay does there, is
//! the table of cases. After each case exactly one side has the guest, the one that the state
//! machine says, and it is whole.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{
    Builder, FakeVm, Guest, LIMITS, ReceiveResult, SendResult, Target, assert_whole, have_uffd,
    loopback, memory, options, send,
};
use crate::error::chain;
use crate::protocol::message::Command;
use crate::source::SendFailure;
use crate::testing::FakeMemory;
use crate::{Address, GuestIs, Limits, MemoryMode};

/// Limits of the cases in which somebody stalls; each costs that much.
const SHORT: Limits =
    Limits { answer: Duration::from_millis(1500), prepare: Duration::from_millis(1500), ..LIMITS };

/// Where the relay acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    /// Instead of passing the message on.
    Message,
    /// Instead of passing its answer on.
    Answer,
}

/// What it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Close,
    Rubbish,
    Stall,
}

#[derive(Clone, Copy, Debug)]
struct Cut {
    at: Command,
    point: Point,
    act: Act,
}

/// One frame: header and payload, and behind a Memory table the contents.
fn frame(from: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    more_of(from, 16, &mut bytes)?;
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let code = u16::from_le_bytes([bytes[0], bytes[1]]);
    let payload = word(&bytes[8..]);
    more_of(from, payload, &mut bytes)?;
    if code == Command::Memory.code() {
        let contents = bytes[16..].chunks_exact(16).map(|entry| word(&entry[8..])).sum();
        more_of(from, contents, &mut bytes)?;
    }
    Ok(bytes)
}

fn more_of(from: &mut TcpStream, count: u64, bytes: &mut Vec<u8>) -> io::Result<()> {
    let read = from.take(count).read_to_end(bytes)?;
    if read as u64 == count { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Passes the first connection on frame by frame, all others byte by byte.
struct Relay {
    address: Address,
    seen: Arc<Mutex<Vec<Command>>>,
    /// Dropping it ends a stall.
    _end: Sender<()>,
}

impl Relay {
    fn start(to: &Address, cut: Option<Cut>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap();
        let Address::Tcp { host, port } = to.clone() else { panic!() };
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (end, ended) = channel();
        let record = Arc::clone(&seen);
        std::thread::spawn(move || {
            let connect = || TcpStream::connect((host.as_str(), port));
            let Ok((source, _)) = listener.accept() else { return };
            let Ok(destination) = connect() else { return };
            for stream in [&source, &destination] {
                stream.set_nodelay(true).unwrap();
            }
            std::thread::spawn(move || {
                let streams = (source.try_clone().unwrap(), destination.try_clone().unwrap());
                let _ = relay_control(source, destination, cut, &record, &ended);
                let _ = (streams.0.shutdown(Shutdown::Both), streams.1.shutdown(Shutdown::Both));
            });
            while let Ok((source, _)) = listener.accept() {
                let Ok(destination) = connect() else { return };
                copy_both(&source, &destination);
            }
        });
        Self { address, seen, _end: end }
    }
}

fn copy_both(one: &TcpStream, other: &TcpStream) {
    for (from, to) in [(one, other), (other, one)] {
        let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        for stream in [&from, &to] {
            stream.set_nodelay(true).unwrap();
        }
        std::thread::spawn(move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
        });
    }
}

fn relay_control(
    mut source: TcpStream,
    mut destination: TcpStream,
    cut: Option<Cut>,
    seen: &Mutex<Vec<Command>>,
    ended: &Receiver<()>,
) -> io::Result<()> {
    // After Confirm the destination is the one that speaks.
    let (mut speaker, mut listener) = (&mut source, &mut destination);
    loop {
        let message = frame(speaker)?;
        let command = Command::from_code(u16::from_le_bytes([message[0], message[1]])).unwrap();
        let first = !seen.lock().unwrap().contains(&command);
        seen.lock().unwrap().push(command);
        let here = |point| cut.filter(|cut| first && cut.at == command && cut.point == point);
        if let Some(cut) = here(Point::Message) {
            return act(cut.act, listener, ended);
        }
        listener.write_all(&message)?;
        if command == Command::Abandon {
            return Ok(());
        }
        let answer = frame(listener)?;
        if let Some(cut) = here(Point::Answer) {
            return act(cut.act, speaker, ended);
        }
        speaker.write_all(&answer)?;
        if command == Command::Confirm {
            (speaker, listener) = (listener, speaker);
        }
    }
}

fn act(act: Act, victim: &mut TcpStream, ended: &Receiver<()>) -> io::Result<()> {
    match act {
        Act::Close => {}
        Act::Rubbish => {
            victim.write_all(&[0xee; 64])?;
            // The victim has seen it when it says so or leaves.
            let _ = victim.read(&mut [0; 16]);
        }
        Act::Stall => {
            let _ = ended.recv();
        }
    }
    Ok(())
}

/// Both sides of one migration through a relay.
struct Run {
    from: Arc<FakeMemory>,
    to: Arc<FakeMemory>,
    guest: Arc<Guest>,
    sent: SendResult,
    /// What the destination returned, and what its Fault phase did.
    received: ReceiveResult,
    faults_well: Option<bool>,
    commands: Vec<Command>,
}

/// Runs a case until it gets as far as its cut: on a loaded machine a short limit can strike
/// before, and a round without a page that became zero has no ZeroPages.
fn run(mode: MemoryMode, cut: Cut) -> Run {
    const TRIES: usize = 20;
    let mut limits = if cut.act == Act::Stall { SHORT } else { LIMITS };
    for _ in 0..TRIES {
        let run = run_within(limits, mode, Some(cut));
        if run.commands.contains(&cut.at) {
            return run;
        }
        limits = LIMITS;
    }
    panic!("{cut:?} was not reached in {TRIES} migrations");
}

fn run_within(limits: Limits, mode: MemoryMode, cut: Option<Cut>) -> Run {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 41);
    guest.fill(&from, 30);
    // A block that is worth an announcement.
    guest.fill_all(&from, 0, 512..1024);
    let target = Target::start(&loopback(), Builder::new(&to, &guest), limits);
    let relay = Relay::start(&target.address, cut);
    let mut options = options(&relay.address);
    (options.memory_mode, options.limits) = (mode, limits);
    let cancel = target.cancel.clone();
    let receiver = std::thread::spawn(move || {
        let mut received = target.join();
        let faults = received.as_mut().ok().and_then(|received| received.faults.take());
        let well = faults.map(|faults| match faults.wait() {
            Ok(_) => true,
            Err(paused) => {
                // The guest has to be gone before its missing pages are given up; its writers
                // would wait for ever, so they are let go and stopped, and nothing is checked.
                assert_eq!(paused.error.guest, GuestIs::PostcopyPaused);
                false
            }
        });
        (received, well)
    });
    let sent = send(FakeVm::new(&from, &guest).running(), &options);
    if sent.is_err() {
        cancel.cancel();
    }
    let commands = relay.seen.lock().unwrap().clone();
    let (received, faults_well) = receiver.join().unwrap();
    drop(relay);
    Run { from, to, guest, sent, received, faults_well, commands }
}

/// Checks one case against the state machine; returns its line of the table.
fn check(mode: MemoryMode, cut: Cut, run: Run) -> String {
    let Run { from, to, guest, sent, received, faults_well, .. } = run;
    let case = format!("{mode:?} {:?} {:?} {:?}", cut.at, cut.point, cut.act);
    let confirm = cut.at == Command::Confirm;
    // Once the guest belongs to the destination and pages are missing, lost connections are made
    // again: as if nothing had been.
    let heals = mode == MemoryMode::Postcopy && (confirm || cut.at == Command::PostcopyDone);
    let outcome = match sent {
        Ok(_) => {
            assert!(heals, "{case}");
            "healed".to_string()
        }
        Err(failure) => match *failure {
            SendFailure::Resumed { mut vm, error } => {
                assert!(!confirm && cut.at != Command::PostcopyDone, "{case}: {}", chain(&error));
                assert!(vm.runs(), "{case}");
                let failure = received.as_ref().map(drop).unwrap_err();
                let left = [GuestIs::NotHere, GuestIs::InDoubt];
                assert!(left.contains(&failure.error.guest), "{case}: {failure:?}");
                vm.stop();
                assert_whole(&guest, &from);
                chain(&error)
            }
            SendFailure::HandedOver { error, held, .. } => {
                assert!(confirm && !heals && held.is_none(), "{case}: {}", chain(&error));
                chain(&error)
            }
            SendFailure::StillPaused { error, .. } => panic!("{case}: {error:?}"),
        },
    };
    match received {
        Ok(mut received) => {
            assert!(received.vm.runs(), "{case}");
            received.vm.stop();
            assert_eq!(faults_well.is_some(), mode == MemoryMode::Postcopy, "{case}");
            assert_ne!(faults_well, Some(false), "{case}");
            assert_whole(&guest, &to);
        }
        Err(failure) if confirm => {
            assert!(!heals, "{case}: {failure:?}");
            assert_eq!((cut.point, failure.error.guest), (Point::Message, GuestIs::InDoubt));
            assert!(failure.vm.is_some(), "{case}");
        }
        Err(_) => {}
    }
    format!("{case}: {outcome}")
}

fn table(mode: MemoryMode) {
    const AT_ONCE: usize = 6;
    let clean = run_within(LIMITS, mode, None);
    clean.sent.unwrap();
    let mut received = clean.received.unwrap();
    received.vm.stop();
    assert_whole(&clean.guest, &clean.to);
    let mut steps = clean.commands;
    // Comes or not, depending on how long it takes; a loss there is that of `recovery`.
    steps.retain(|command| *command != Command::Alive);
    steps.sort_by_key(|command| command.code());
    steps.dedup();
    assert!(steps.len() >= 7, "{steps:?}");
    assert_eq!(steps.contains(&Command::Coming), mode == MemoryMode::Precopy, "{steps:?}");
    let mut cases = Vec::new();
    for at in steps {
        for point in [Point::Message, Point::Answer] {
            for act in [Act::Close, Act::Rubbish, Act::Stall] {
                cases.push(Cut { at, point, act });
            }
        }
    }
    let cases = Mutex::new(cases);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some(cut) = cases.lock().unwrap().pop() else { return };
                    println!("{}", check(mode, cut, run(mode, cut)));
                }
            });
        }
    });
}

#[test]
fn a_cut_at_any_message_of_precopy() {
    table(MemoryMode::Precopy);
}

#[test]
fn a_cut_at_any_message_of_postcopy() {
    if have_uffd() {
        table(MemoryMode::Postcopy);
    }
}
