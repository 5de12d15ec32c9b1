// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A destination of plain version 0 that is another program, as hand-written bytes: which side has the guest, whatever
//! fails.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::plain::{header, tcp};
use super::{FakeMemory, FakeVm, Guest, memory, options, send};
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

/// What the destination does at a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Ok,
    Refused,
    /// The connection ends without an answer.
    None,
    /// The connection ends after the answer.
    Last,
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

/// Takes a message; its command and the length of its payload.
fn take(control: &mut TcpStream) -> Option<(u16, u64)> {
    let mut head = [0; 16];
    control.read_exact(&mut head).ok()?;
    let code = u16::from_le_bytes([head[0], head[1]]);
    let len = u64::from_le_bytes(head[8..].try_into().unwrap());
    let mut payload = vec![0; usize::try_from(len).unwrap()];
    control.read_exact(&mut payload).ok()?;
    if code == MEMORY {
        let mut contents = vec![0; usize::try_from(check_ranges(&payload)).unwrap()];
        control.read_exact(&mut contents).ok()?;
    }
    Some((code, len))
}

/// Calls of the machine at the source.
type Called = Vec<&'static str>;

/// Commands with the lengths of their payloads, and the calls that there had been by the state and by an Abandon.
type Taken = (Vec<(u16, u64)>, Vec<Called>);

/// A destination that answers one message otherwise than with Ok.
fn destination(listener: TcpListener, at: u16, answer: Answer, calls: Calls) -> JoinHandle<Taken> {
    std::thread::spawn(move || {
        let (mut control, _) = listener.accept().unwrap();
        let (mut commands, mut seen) = (Vec::new(), Vec::new());
        while let Some((code, len)) = take(&mut control) {
            if commands.last() != Some(&(code, len)) && code != MEMORY {
                commands.push((code, len));
            }
            if code == STATE || code == ABANDON {
                seen.push(calls.lock().clone());
            }
            let now = if code == at { answer } else { Answer::Ok };
            match now {
                Answer::Ok | Answer::Last => control.write_all(&header(OK, 0)).unwrap(),
                Answer::Refused => control.write_all(&header(REFUSED, 0)).unwrap(),
                Answer::None => {}
            }
            if now != Answer::Ok || code == ABANDON {
                break;
            }
        }
        (commands, seen)
    })
}

type Ended = Result<(), Box<SendFailure<FakeVm>>>;

/// Sends a guest to a destination that answers one message otherwise.
fn sent(at: u16, answer: Answer, inject: Inject) -> (Ended, Vec<u16>, Vec<Called>, Calls) {
    let from: Arc<FakeMemory> = memory();
    let guest = Guest::new(&from, 31);
    guest.fill(&from, 100);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = options(&tcp(&listener));
    let vm = FakeVm::new(&from, &guest).inject(inject).for_other(mappings()).running();
    let calls = vm.calls();
    let peer = destination(listener, at, answer, Arc::clone(&calls));
    let ended = send(vm, &options).map(drop);
    let (commands, seen) = peer.join().unwrap();
    let is_without_reason = |(code, len): &(u16, u64)| *code != ABANDON || *len == 0;
    assert!(commands.iter().all(is_without_reason), "{commands:?}");
    (ended, commands.into_iter().map(|(code, _)| code).collect(), seen, calls)
}

fn has(calls: &[&str], call: &str) -> bool {
    calls.contains(&call)
}

#[test]
fn what_only_one_side_may_hold_is_released_before_the_state() {
    let (ended, commands, seen, calls) = sent(0, Answer::Ok, Inject::Nothing);
    ended.unwrap();
    assert_eq!(commands, [1, 2, STATE, COMPLETE]);
    assert!(has(&seen[0], "release"), "{seen:?}");
    assert!(has(&calls.lock(), "handed over"));
}

#[test]
fn without_an_answer_to_the_last_message_nothing_is_done() {
    let (ended, commands, _, calls) = sent(COMPLETE, Answer::None, Inject::Nothing);
    match *ended.unwrap_err() {
        SendFailure::StillPaused { error, .. } => assert_eq!(error.guest, GuestLocation::InDoubt),
        other => panic!("{other:?}"),
    }
    assert_eq!(commands, [1, 2, STATE, COMPLETE], "it is not told to drop the machine");
    assert!(!has(&calls.lock(), "resume") && !has(&calls.lock(), "handed over"));
}

#[test]
fn whatever_fails_before_leaves_the_guest_here() {
    for (at, answer) in [
        (2, Answer::Refused),
        (2, Answer::None),
        (MEMORY, Answer::Refused),
        (STATE, Answer::Refused),
        (STATE, Answer::None),
        (STATE, Answer::Last),
        (COMPLETE, Answer::Refused),
    ] {
        let (ended, commands, ..) = sent(at, answer, Inject::Nothing);
        match *ended.unwrap_err() {
            SendFailure::Resumed { vm, error } => {
                assert!(vm.runs(), "{at} {answer:?}");
                assert_eq!(error.guest, GuestLocation::OnSource, "{at} {answer:?}");
            }
            // The last message may be under way by then.
            SendFailure::StillPaused { error, .. } if (at, answer) == (STATE, Answer::Last) => {
                assert_eq!(error.guest, GuestLocation::InDoubt);
            }
            other => panic!("{at} {answer:?}: {other:?}"),
        }
        let told = commands.contains(&COMPLETE);
        assert_eq!(told, at == COMPLETE, "{at} {answer:?}: {commands:?}");
    }
}

/// It holds the disks from the state on.
#[test]
fn the_destination_drops_its_machine_before_the_guest_goes_on_here() {
    let (ended, commands, seen, calls) = sent(0, Answer::Ok, Inject::Release);
    assert!(matches!(*ended.unwrap_err(), SendFailure::Resumed { .. }));
    assert_eq!(commands, [1, 2, ABANDON]);
    assert!(!has(&seen[0], "resume"), "{seen:?}");
    assert!(has(&calls.lock(), "resume"));
}
