// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A destination of plain version 0 that is another program, as hand-written bytes: which side has the guest, whatever
//! fails.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use socket2::SockRef;

use super::plain::{header, tcp};
use super::{FakeMemory, FakeVm, Guest, memory, migrate, options};
use crate::Cancel;
use crate::Cause;
use crate::Progress;
use crate::Side;
use crate::error::GuestLocation;
use crate::layout::{GpaRange, PAGE_BYTES};
use crate::source::SendFailure;
use crate::testing::{Calls, Inject};

const OK: u16 = 1;
const REFUSED: u16 = 2;
const STATE: u16 = 3;
const MEMORY: u16 = 4;
const COMPLETE: u16 = 5;
const ABANDON: u16 = 6;

/// How long a destination may take with an answer, where it takes longer.
const SHORT: Duration = Duration::from_millis(500);

/// What the destination does at a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Ok,
    Refused,
    /// The connection ends without an answer.
    None,
    /// The connection ends after the answer.
    Last,
    /// Nothing, until more comes or the connection ends.
    Silent,
    /// Ok twice.
    Twice,
    /// Ok, after the migration was cancelled.
    Cancelled,
}

/// What it does when it is told to drop its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dropping {
    /// It answers this often and closes the connection, each once it has seen that the guest does not go on meanwhile.
    Answers(u32),
    /// It answers and keeps the connection.
    Stays,
}

/// A destination.
#[derive(Clone, Copy, Debug)]
struct Other {
    /// Message that it answers otherwise than with Ok.
    at: u16,
    answer: Answer,
    dropping: Dropping,
    inject: Inject,
    /// Limit of the source for its answers.
    limit: Duration,
}

impl Other {
    fn new(at: u16, answer: Answer) -> Self {
        let dropping = Dropping::Answers(1);
        Self { at, answer, dropping, inject: Inject::Nothing, limit: super::LIMITS.answer }
    }
}

/// Calls of the machine at the source.
type Called = Vec<&'static str>;

/// What the destination has seen.
#[derive(Default)]
struct Seen {
    /// Commands but those of memory.
    commands: Vec<u16>,
    /// The calls that there had been by the state, and by an Abandon.
    calls: Vec<Called>,
    /// How the connection ended, if the source ended it.
    end: Option<Result<(), ErrorKind>>,
    /// A connection that is kept.
    kept: Option<TcpStream>,
}

/// How the destination maps the memory: a region here is several mappings there.
fn mappings() -> Vec<GpaRange> {
    let pages = |gpa: u64, first: u64, count: u64| GpaRange {
        gpa: gpa + first * PAGE_BYTES,
        len_bytes: count * PAGE_BYTES,
    };
    let low = [(0, 100), (100, 1), (101, 900), (1001, 1047)];
    let high = [(0, 1000), (1000, 25)];
    let low = low.map(|(first, count)| pages(0, first, count));
    low.into_iter().chain(high.map(|(first, count)| pages(1 << 32, first, count))).collect()
}

/// Checks the rules for ranges of memory; their length in total.
fn check_ranges(payload: &[u8]) -> u64 {
    let ranges = payload.chunks_exact(16).map(|pair| {
        let word = |at: usize| u64::from_le_bytes(pair[at..at + 8].try_into().unwrap());
        GpaRange { gpa: word(0), len_bytes: word(8) }
    });
    let mut total = 0;
    for range in ranges {
        let holds = |it: &GpaRange| {
            it.gpa <= range.gpa && range.gpa + range.len_bytes <= it.gpa + it.len_bytes
        };
        assert!(mappings().iter().any(holds), "{range:?} is not in one mapping");
        total += range.len_bytes;
    }
    total
}

/// Takes a message; its command.
fn take(control: &mut TcpStream) -> std::io::Result<Option<u16>> {
    let mut head = [0; 16];
    match control.read(&mut head)? {
        0 => return Ok(None),
        len => control.read_exact(&mut head[len..])?,
    }
    let code = u16::from_le_bytes([head[0], head[1]]);
    let len = u64::from_le_bytes(head[8..].try_into().unwrap());
    assert!(code != ABANDON || len == 0, "it has no room for a reason");
    let mut payload = vec![0; usize::try_from(len).unwrap()];
    control.read_exact(&mut payload)?;
    if code == MEMORY {
        let mut contents = vec![0; usize::try_from(check_ranges(&payload)).unwrap()];
        control.read_exact(&mut contents)?;
    }
    Ok(Some(code))
}

fn yes(control: &mut TcpStream, count: usize) {
    control.write_all(&header(OK, 0).repeat(count)).unwrap();
}

/// The guest does not go on for a while.
fn stays(calls: &Calls) {
    let until = Instant::now() + Duration::from_millis(200);
    while Instant::now() < until {
        assert!(!has(&calls.lock(), "resume"), "before the machine was dropped");
        std::thread::yield_now();
    }
}

fn serve(listener: &TcpListener, other: Other, calls: &Calls, cancel: &Cancel) -> Seen {
    let (mut control, _) = listener.accept().unwrap();
    let mut seen = Seen::default();
    loop {
        let code = match take(&mut control) {
            Ok(Some(code)) => code,
            ended => {
                seen.end = Some(ended.map(drop).map_err(|error| error.kind()));
                return seen;
            }
        };
        if code != MEMORY {
            seen.commands.push(code);
        }
        if code == STATE || code == ABANDON {
            seen.calls.push(calls.lock().clone());
        }
        if code == ABANDON {
            let is_given = seen.commands.contains(&STATE);
            match other.dropping {
                Dropping::Answers(count) => {
                    for _ in 0..count {
                        yes(&mut control, 1);
                        if is_given {
                            stays(calls);
                        }
                    }
                    return seen;
                }
                Dropping::Stays => {
                    yes(&mut control, 1);
                    seen.kept = Some(control);
                    return seen;
                }
            }
        }
        match if code == other.at { other.answer } else { Answer::Ok } {
            Answer::Ok => yes(&mut control, 1),
            Answer::Refused => {
                control.write_all(&header(REFUSED, 0)).unwrap();
                return seen;
            }
            Answer::None => return seen,
            Answer::Last => {
                yes(&mut control, 1);
                return seen;
            }
            Answer::Silent => {}
            Answer::Twice => yes(&mut control, 2),
            Answer::Cancelled => {
                cancel.cancel();
                yes(&mut control, 1);
            }
        }
    }
}

type Ended = Result<(), Box<SendFailure<FakeVm>>>;

/// What came of a migration.
struct Run {
    ended: Ended,
    seen: Seen,
    calls: Calls,
}

impl Run {
    /// The failure of a migration after which the guest runs at the source.
    #[track_caller]
    fn resumed(self) -> (Cause, Seen) {
        match *self.ended.unwrap_err() {
            SendFailure::Resumed { vm, error } => {
                assert!(vm.runs(), "{error:?}");
                assert_eq!(error.guest, GuestLocation::OnSource);
                (error.cause, self.seen)
            }
            other => panic!("{other:?}"),
        }
    }

    /// It is not known where the guest runs, and nothing was done.
    #[track_caller]
    fn in_doubt(self) -> Seen {
        match *self.ended.unwrap_err() {
            SendFailure::StillPaused { error, .. } => {
                assert_eq!(error.guest, GuestLocation::InDoubt, "{error:?}");
            }
            other => panic!("{other:?}"),
        }
        let calls = self.calls.lock();
        assert!(!has(&calls, "resume") && !has(&calls, "handed over"), "{calls:?}");
        self.seen
    }
}

/// A guest with contents in each page.
fn full() -> (Arc<FakeMemory>, Arc<Guest>) {
    let from = memory();
    let guest = Guest::new(&from, 31);
    guest.fill(&from, 100);
    (from, guest)
}

/// Sends a guest to a destination.
fn sent(other: Other) -> Run {
    let (from, guest) = full();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = options(&tcp(&listener));
    options.limits.answer = other.limit;
    let vm = FakeVm::new(&from, &guest).inject(other.inject).for_other(mappings()).running();
    let (calls, cancel) = (vm.calls(), Cancel::new().unwrap());
    let peer: JoinHandle<Seen> = {
        let (calls, cancel) = (Arc::clone(&calls), cancel.clone());
        std::thread::spawn(move || serve(&listener, other, &calls, &cancel))
    };
    let progress = Arc::new(Progress::new(Side::Source));
    let ended = migrate(vm, &options, &progress, &cancel).map(drop);
    Run { ended, seen: peer.join().unwrap(), calls }
}

fn has(calls: &[&str], call: &str) -> bool {
    calls.contains(&call)
}

/// Each range of memory is checked by the destination.
#[test]
fn what_only_one_side_may_hold_is_released_before_the_state() {
    let Run { ended, seen, calls } = sent(Other::new(0, Answer::Ok));
    ended.unwrap();
    assert_eq!(seen.commands, [1, 2, STATE, COMPLETE]);
    assert!(has(&seen.calls[0], "release"), "{:?}", seen.calls);
    assert!(has(&calls.lock(), "handed over"));
}

#[test]
fn without_an_answer_to_the_last_message_nothing_is_done() {
    let seen = sent(Other::new(COMPLETE, Answer::None)).in_doubt();
    assert_eq!(seen.commands, [1, 2, STATE, COMPLETE], "it is not told to drop the machine");
}

/// What is under way of the last message is not sent again.
#[test]
fn in_doubt_the_connection_is_reset() {
    let silent = Other { limit: SHORT, ..Other::new(COMPLETE, Answer::Silent) };
    let seen = sent(silent).in_doubt();
    assert_eq!(seen.commands, [1, 2, STATE, COMPLETE]);
    assert_eq!(seen.end, Some(Err(ErrorKind::ConnectionReset)));
}

#[test]
fn whatever_fails_before_the_state_or_is_refused_leaves_the_guest_here() {
    for (at, answer) in [
        (2, Answer::Refused),
        (2, Answer::None),
        (MEMORY, Answer::Refused),
        (STATE, Answer::Refused),
        (COMPLETE, Answer::Refused),
    ] {
        let (_, seen) = sent(Other::new(at, answer)).resumed();
        assert_eq!(seen.commands.contains(&COMPLETE), at == COMPLETE, "{at} {answer:?}");
        assert!(!seen.commands.contains(&ABANDON), "{at} {answer:?}");
    }
}

/// It keeps its machine when a connection is lost.
#[test]
fn a_connection_that_is_lost_with_the_state_is_a_doubt() {
    for answer in [Answer::None, Answer::Last] {
        sent(Other::new(STATE, answer)).in_doubt();
    }
    // The end is there before the state is sent, and the message that would run the guest is not.
    let (from, guest) = full();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = options(&tcp(&listener));
    let vm = FakeVm::new(&from, &guest).inject(Inject::ReleaseLate).for_other(mappings());
    let vm = vm.running();
    let calls = vm.calls();
    let peer = {
        let calls = Arc::clone(&calls);
        std::thread::spawn(move || {
            let (mut control, _) = listener.accept().unwrap();
            let mut early = control.try_clone().unwrap();
            let answers = std::thread::spawn(move || {
                while !has(&calls.lock(), "state") {
                    std::thread::yield_now();
                }
                yes(&mut early, 1);
                early.shutdown(Shutdown::Write).unwrap();
            });
            let mut commands = Vec::new();
            while let Ok(Some(code)) = take(&mut control) {
                commands.push(code);
                if ![STATE, ABANDON].contains(&code) {
                    yes(&mut control, 1);
                }
            }
            answers.join().unwrap();
            commands
        })
    };
    let (progress, cancel) = (Arc::new(Progress::new(Side::Source)), Cancel::new().unwrap());
    let ended = migrate(vm, &options, &progress, &cancel).map(drop);
    let commands = peer.join().unwrap();
    assert!(commands.contains(&STATE) && !commands.contains(&COMPLETE), "{commands:?}");
    Run { ended, seen: Seen::default(), calls }.in_doubt();
}

/// An answer that belongs to no message would be taken for the answer to the last one.
#[test]
fn nothing_is_handed_over_with_an_answer_that_is_there_already() {
    let (cause, seen) = sent(Other::new(STATE, Answer::Twice)).resumed();
    assert!(matches!(cause, Cause::Unsupported { .. }), "{cause:?}");
    assert_eq!(seen.commands, [1, 2, STATE, ABANDON]);
}

/// It answers before it drops its machine, and closes the connection afterwards.
#[test]
fn the_destination_drops_its_machine_before_the_guest_goes_on_here() {
    let (cause, seen) = sent(Other::new(STATE, Answer::Cancelled)).resumed();
    assert!(matches!(cause, Cause::Cancelled), "{cause:?}");
    assert_eq!(seen.commands, [1, 2, STATE, ABANDON]);
    // It is told while the state is still being taken, and answers both.
    let silent = Other { limit: SHORT, ..Other::new(STATE, Answer::Silent) };
    let (_, seen) = sent(Other { dropping: Dropping::Answers(2), ..silent }).resumed();
    assert_eq!(seen.commands, [1, 2, STATE, ABANDON]);
}

#[test]
fn if_it_is_not_known_to_have_dropped_its_machine_nothing_is_done() {
    let cancelled = Other { limit: SHORT, ..Other::new(STATE, Answer::Cancelled) };
    let silent = Other { limit: SHORT, ..Other::new(STATE, Answer::Silent) };
    for other in [
        Other { dropping: Dropping::Stays, ..cancelled },
        Other { dropping: Dropping::Answers(0), ..cancelled },
        // That was the answer to the state.
        Other { dropping: Dropping::Answers(1), ..silent },
    ] {
        let seen = sent(other).in_doubt();
        assert_eq!(seen.commands, [1, 2, STATE, ABANDON], "{other:?}");
    }
}

/// It holds nothing before it has the state, and the guest does not wait for it.
#[test]
fn the_guest_goes_on_first_if_the_destination_has_no_state() {
    for inject in [Inject::State, Inject::Release] {
        let (_, seen) = sent(Other { inject, ..Other::new(0, Answer::Ok) }).resumed();
        assert_eq!(seen.commands, [1, 2, ABANDON], "{inject:?}");
        assert!(has(&seen.calls[0], "resume"), "{inject:?}: {:?}", seen.calls);
    }
}

/// The destination reads a message up to its announced length, whatever becomes of the connection.
#[test]
fn a_message_of_memory_that_is_cut_short_is_completed() {
    let (from, guest) = full();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    SockRef::from(&listener).set_recv_buffer_size(16 << 10).unwrap();
    let options = options(&tcp(&listener));
    let vm = FakeVm::new(&from, &guest).for_other(mappings()).running();
    let cancel = Cancel::new().unwrap();
    let peer = {
        let cancel = cancel.clone();
        std::thread::spawn(move || {
            let (mut control, _) = listener.accept().unwrap();
            for code in [1, 2] {
                assert_eq!(take(&mut control).unwrap(), Some(code));
                yes(&mut control, 1);
            }
            wait_until_full(&control);
            cancel.cancel();
            let mut commands = Vec::new();
            while let Some(code) = take(&mut control).unwrap() {
                commands.push(code);
                if code == ABANDON {
                    break;
                }
            }
            commands
        })
    };
    let progress = Arc::new(Progress::new(Side::Source));
    let failure = migrate(vm, &options, &progress, &cancel).map(drop).unwrap_err();
    match *failure {
        SendFailure::Resumed { error, .. } => {
            assert!(matches!(error.cause, Cause::Cancelled), "{error:?}");
        }
        other => panic!("{other:?}"),
    }
    let commands = peer.join().unwrap();
    let (last, messages) = commands.split_last().unwrap();
    assert!(*last == ABANDON && messages.iter().all(|code| *code == MEMORY), "{commands:?}");
}

/// Waits until the source cannot send more, as nothing is read.
fn wait_until_full(control: &TcpStream) {
    let mut sample = vec![0; 8 << 20];
    let (mut len, mut since) = (0, Instant::now());
    while len == 0 || since.elapsed() < Duration::from_millis(300) {
        let now = control.peek(&mut sample).unwrap();
        if now != len {
            (len, since) = (now, Instant::now());
        }
        std::thread::yield_now();
    }
}
