// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A peer that closes, lies or stalls at every message.
//!
//! A relay between a real source and a real destination lets a clean migration pass and notes its
//! messages; that list, times before and after the message, times what the relay does there, is
//! the table of cases. After each case exactly one side has the guest, the one that the state
//! machine says, and it is whole.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{
    Builder, FakeVm, Guest, LIMITS, ReceiveResult, SendResult, Target, assert_whole, have_uffd,
    loopback, memory, options, send,
};
use crate::error::chain;
use crate::layout::to_usize;
use crate::protocol::codec::ByteSource as _;
use crate::protocol::message::Command;
use crate::source::SendFailure;
use crate::testing::FakeMemory;
use crate::transport::{Connection, Listener, Reader, TransportError};
use crate::{Address, Cancel, Compression, GuestIs, Limits, MemoryMode};

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

/// How memory goes, beside the mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    Compressed,
    /// As descriptors, over a Unix socket.
    Local,
}

/// One frame: header and payload, behind a table of Memory the contents, and what came with it.
type Frame = (Vec<u8>, Option<OwnedFd>);

/// The relay's end of a connection.
struct End {
    connection: Arc<Connection>,
    reader: Reader,
}

impl End {
    fn new(connection: Connection) -> Self {
        let connection = Arc::new(connection);
        let mut reader = Reader::new(Arc::clone(&connection));
        reader.welcome_descriptors(true);
        Self { connection, reader }
    }

    fn frame(&mut self) -> Result<Frame, TransportError> {
        let mut bytes = Vec::new();
        self.more(16, &mut bytes)?;
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
        let code = u16::from_le_bytes([bytes[0], bytes[1]]);
        let payload = word(&bytes[8..]);
        self.more(payload, &mut bytes)?;
        if code == Command::Memory.code() {
            let contents = bytes[16..].chunks_exact(16).map(|entry| word(&entry[8..])).sum();
            self.more(contents, &mut bytes)?;
        }
        if code == Command::MemoryZstd.code() {
            let frame = u32::from_le_bytes(bytes[2..6].try_into().unwrap());
            self.more(frame.into(), &mut bytes)?;
        }
        Ok((bytes, self.reader.take_descriptor()))
    }

    fn more(&mut self, count: u64, bytes: &mut Vec<u8>) -> Result<(), TransportError> {
        let start = bytes.len();
        bytes.resize(start + to_usize(count), 0);
        self.reader.read_exact(&mut bytes[start..])
    }

    fn pass(&self, (bytes, descriptor): &Frame) -> Result<(), TransportError> {
        match descriptor {
            Some(descriptor) => self.connection.send_with_descriptor(bytes, descriptor.as_fd()),
            None => self.connection.send(bytes),
        }
    }
}

/// Passes the first connection on frame by frame, all others byte by byte.
struct Relay {
    address: Address,
    seen: Arc<Mutex<Vec<Command>>>,
    /// Ends the wait for further connections.
    cancel: Cancel,
    /// Dropping it ends a stall.
    _end: Sender<()>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

/// Longer than any case.
const FOR_EVER: Duration = Duration::from_hours(1);

impl Relay {
    fn start(to: &Address, cut: Option<Cut>) -> Self {
        let at = match to {
            Address::Tcp { .. } => loopback(),
            Address::Unix(path) => Address::Unix(path.with_extension("relay")),
        };
        let listener = Listener::bind(&at).unwrap();
        let address = listener.address().clone();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (end, ended) = channel();
        let (record, to) = (Arc::clone(&seen), to.clone());
        let cancel = Cancel::new().unwrap();
        let until = cancel.clone();
        std::thread::spawn(move || {
            // What is passed on ends with its connections.
            let never = Cancel::new().unwrap();
            let connect = || Connection::connect(&to, &never, FOR_EVER, FOR_EVER);
            let accept = || {
                let connection = listener.accept(&until, None, FOR_EVER)?;
                connection.set_cancel(&never);
                Ok::<_, TransportError>(connection)
            };
            let Ok(source) = accept() else { return };
            let Ok(destination) = connect() else { return };
            let (source, destination) = (End::new(source), End::new(destination));
            std::thread::spawn(move || {
                let ends = [&source, &destination].map(|end| Arc::clone(&end.connection));
                let _ = relay_control(source, destination, cut, &record, &ended);
                ends.iter().for_each(|end| end.shut_down());
            });
            while let Ok(source) = accept() {
                let Ok(destination) = connect() else { return };
                copy_both(source, destination);
            }
        });
        Self { address, seen, cancel, _end: end }
    }
}

fn copy_both(one: Connection, other: Connection) {
    let (one, other) = (Arc::new(one), Arc::new(other));
    for (from, to) in [(&one, &other), (&other, &one)] {
        let (from, to) = (Arc::clone(from), Arc::clone(to));
        std::thread::spawn(move || {
            let mut bytes = vec![0; 1 << 16];
            while let Ok(count) = from.receive_some(&mut bytes) {
                if to.send(&bytes[..count]).is_err() {
                    break;
                }
            }
            from.shut_down();
            to.shut_down();
        });
    }
}

fn relay_control(
    mut source: End,
    mut destination: End,
    cut: Option<Cut>,
    seen: &Mutex<Vec<Command>>,
    ended: &Receiver<()>,
) -> Result<(), TransportError> {
    // After Confirm the destination is the one that speaks.
    let (mut speaker, mut listener) = (&mut source, &mut destination);
    loop {
        let message = speaker.frame()?;
        let code = u16::from_le_bytes([message.0[0], message.0[1]]);
        let command = Command::from_code(code).unwrap();
        let first = !seen.lock().unwrap().contains(&command);
        seen.lock().unwrap().push(command);
        let here = |point| cut.filter(|cut| first && cut.at == command && cut.point == point);
        if let Some(cut) = here(Point::Message) {
            return act(cut.act, listener, ended);
        }
        listener.pass(&message)?;
        if command == Command::Abandon {
            return Ok(());
        }
        let answer = listener.frame()?;
        if let Some(cut) = here(Point::Answer) {
            return act(cut.act, speaker, ended);
        }
        speaker.pass(&answer)?;
        if command == Command::Confirm {
            (speaker, listener) = (listener, speaker);
        }
    }
}

fn act(act: Act, victim: &mut End, ended: &Receiver<()>) -> Result<(), TransportError> {
    match act {
        Act::Close => {}
        Act::Rubbish => {
            victim.connection.send(&[0xee; 64])?;
            // The victim has seen it when it says so or leaves.
            let _ = victim.reader.read_exact(&mut [0; 1]);
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
    guest: Arc<Guest>,
    sent: SendResult,
    /// What the destination returned, and what its Fault phase did.
    received: ReceiveResult,
    faults_well: Option<bool>,
    commands: Vec<Command>,
}

/// Runs a case until it gets as far as its cut: on a loaded machine a short limit can strike
/// before, and a round without a page that became zero has no ZeroPages.
fn run(mode: MemoryMode, kind: Kind, cut: Cut) -> Run {
    const TRIES: usize = 20;
    let mut limits = if cut.act == Act::Stall { SHORT } else { LIMITS };
    for _ in 0..TRIES {
        let run = run_within(limits, mode, kind, Some(cut));
        if run.commands.contains(&cut.at) {
            return run;
        }
        limits = LIMITS;
    }
    panic!("{cut:?} was not reached in {TRIES} migrations");
}

fn run_within(limits: Limits, mode: MemoryMode, kind: Kind, cut: Option<Cut>) -> Run {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 41);
    guest.fill(&from, 30);
    // A block that is worth an announcement.
    guest.fill_all(&from, 0, 512..1024);
    let dir = tempfile::tempdir().unwrap();
    let at = match kind {
        Kind::Local => Address::Unix(dir.path().join("mig")),
        Kind::Plain | Kind::Compressed => loopback(),
    };
    let target = Target::start(&at, Builder::new(&to, &guest), limits);
    let relay = Relay::start(&target.address, cut);
    let mut options = options(&relay.address);
    (options.memory_mode, options.limits, options.local) = (mode, limits, kind == Kind::Local);
    if kind == Kind::Compressed {
        options.compression = Compression::Zstd;
    }
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
    Run { from, guest, sent, received, faults_well, commands }
}

/// Checks one case against the state machine; returns its line of the table.
fn check(mode: MemoryMode, kind: Kind, cut: Cut, run: Run) -> String {
    let Run { from, guest, sent, received, faults_well, .. } = run;
    let case = format!("{mode:?} {kind:?} {:?} {:?} {:?}", cut.at, cut.point, cut.act);
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
            assert_whole(&guest, received.vm.memory());
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

/// All cases; `must` is a message that only this kind has.
fn table(mode: MemoryMode, kind: Kind, must: &[Command]) {
    const AT_ONCE: usize = 6;
    let clean = run_within(LIMITS, mode, kind, None);
    clean.sent.unwrap();
    let mut received = clean.received.unwrap();
    received.vm.stop();
    assert_whole(&clean.guest, received.vm.memory());
    let mut steps = clean.commands;
    // Comes or not, depending on how long it takes; a loss there is that of `recovery`.
    steps.retain(|command| *command != Command::Alive);
    steps.sort_by_key(|command| command.code());
    steps.dedup();
    assert!(steps.len() >= 7, "{steps:?}");
    assert!(must.iter().all(|command| steps.contains(command)), "{steps:?}");
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
                    println!("{}", check(mode, kind, cut, run(mode, kind, cut)));
                }
            });
        }
    });
}

#[test]
fn a_cut_at_any_message_of_precopy() {
    table(MemoryMode::Precopy, Kind::Plain, &[Command::Coming, Command::Memory]);
}

#[test]
fn a_cut_at_any_message_of_compressed_precopy() {
    table(MemoryMode::Precopy, Kind::Compressed, &[Command::MemoryZstd]);
}

#[test]
fn a_cut_at_any_message_when_memory_is_handed_over() {
    table(MemoryMode::Precopy, Kind::Local, &[Command::MemoryFd]);
}

#[test]
fn a_cut_at_any_message_of_postcopy() {
    if have_uffd() {
        table(MemoryMode::Postcopy, Kind::Plain, &[Command::Pending, Command::PostcopyDone]);
    }
}
