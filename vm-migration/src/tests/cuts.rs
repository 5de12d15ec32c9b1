// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A peer that closes, sends garbage or stalls at every message.
//!
//! A relay between a real source and a real destination forwards a clean migration and records its
//! messages. That list, times before and after the message, times what the relay does there, is the
//! table of cases. After each case exactly one side has the guest, as the state machine defines,
//! and it is whole.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::auto::out_of_reach;
use super::relay::{Act, Cut, Point, Relay, Rule};
use super::{
    Builder, FakeVm, Guest, LIMITS, ReceiveResult, SendResult, Target, assert_whole, have_uffd,
    loopback, memory, options, send,
};
use crate::protocol::capabilities::{
    FEATURE_BLOBS, FEATURE_COMING, FEATURE_EARLY_MEMORY, FEATURE_LOCAL, FEATURE_MAPPING,
    FEATURE_PIECES, FEATURE_POSTCOPY, FEATURE_PREPARING, FEATURE_ZERO_PAGES, FEATURE_ZSTD,
};
use crate::protocol::message::Command;
use crate::source::SendFailure;
use crate::testing::{FakeBlobs, FakeMemory, Inject};
use crate::{Address, Compression, GuestLocation, Limits, MemoryMode};

/// Limits of the cases in which a peer stalls; each case takes that long.
const SHORT: Limits =
    Limits { answer: Duration::from_millis(1500), prepare: Duration::from_millis(1500), ..LIMITS };

/// How memory is sent, in addition to the mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    Compressed,
    /// Over TLS.
    Secured,
    /// As file descriptors, over a Unix socket.
    Local,
    /// Into memory that is populated.
    Ready,
    /// With the state of devices.
    Devices,
}

/// Both sides of one migration through a relay.
struct Run {
    from: Arc<FakeMemory>,
    guest: Arc<Guest>,
    blobs: FakeBlobs,
    sent: SendResult,
    /// The destination's result, and that of its Fault phase.
    received: ReceiveResult,
    faults_well: Option<bool>,
    commands: Vec<Command>,
}

/// Repeats a case until it reaches its cut: on a loaded machine a short limit can expire before,
/// and a round in which no page became zero has no ZeroPages.
fn run(mode: MemoryMode, kind: Kind, cut: Cut) -> Run {
    const TRIES: usize = 20;
    let mut limits = if cut.act == Act::Stall { SHORT } else { LIMITS };
    for _ in 0..TRIES {
        let run = run_within(limits, mode, kind, Rule::Cut(cut));
        if run.commands.contains(&cut.at) {
            return run;
        }
        limits = LIMITS;
    }
    panic!("{cut:?} was not reached in {TRIES} migrations");
}

fn run_within(limits: Limits, mode: MemoryMode, kind: Kind, rule: Rule) -> Run {
    match kind {
        Kind::Secured => super::tls::secured(|| run_here(limits, mode, kind, rule)),
        _ => run_here(limits, mode, kind, rule),
    }
}

fn run_here(limits: Limits, mode: MemoryMode, kind: Kind, rule: Rule) -> Run {
    let (from, to) = (memory(), memory());
    if kind == Kind::Ready {
        to.make_ready().unwrap();
    }
    let guest = Guest::new(&from, 41);
    guest.fill(&from, 30);
    // A block with enough data for an announcement.
    guest.fill_all(&from, 0, 512..1024);
    let dir = tempfile::tempdir().unwrap();
    let at = match kind {
        Kind::Local => Address::Unix(dir.path().join("mig")),
        _ => loopback(),
    };
    let blobs = match kind {
        Kind::Devices => FakeBlobs::new(&[3_000_000, 11]),
        _ => FakeBlobs::default(),
    };
    let target = Target::start(&at, Builder::new(&to, &guest).blobs(&blobs), limits);
    let relay = Relay::start(&target.address, rule);
    let mut options = options(&relay.address);
    (options.memory_mode, options.limits, options.local) = (mode, limits, kind == Kind::Local);
    if kind == Kind::Compressed {
        options.compression = Compression::Zstd;
    }
    if mode == MemoryMode::Auto {
        out_of_reach(&mut options);
    }
    let cancel = target.cancel.clone();
    let receiver = std::thread::spawn(move || {
        let mut received = target.join();
        let faults = received.as_mut().ok().and_then(|received| received.faults.take());
        let well = faults.map(|faults| match faults.wait() {
            Ok(_) => true,
            Err(paused) => {
                // The guest must end before its missing pages are released; its writers would wait
                // forever, so they are released and stopped, and nothing is checked.
                assert_eq!(paused.error.guest, GuestLocation::PostcopyPaused);
                false
            }
        });
        (received, well)
    });
    let vm = FakeVm::new(&from, &guest).blobs(&blobs);
    // Precopy that may switch always does.
    let vm = if mode == MemoryMode::Auto { vm.inject(Inject::Busy) } else { vm };
    let sent = send(vm.running(), &options);
    if sent.is_err() {
        cancel.cancel();
    }
    let commands = relay.seen.lock().clone();
    let (received, faults_well) = receiver.join().unwrap();
    drop(relay);
    Run { from, guest, blobs, sent, received, faults_well, commands }
}

/// Checks a case against the state machine; returns its line of the table.
fn check(mode: MemoryMode, kind: Kind, cut: Cut, run: Run) -> String {
    let Run { from, guest, blobs, sent, received, faults_well, .. } = run;
    let case = format!("{mode:?} {kind:?} {:?} {:?} {:?}", cut.at, cut.point, cut.act);
    let confirm = cut.at == Command::Confirm;
    // Once the guest belongs to the destination and pages are missing, lost connections are
    // re-established, as if nothing had happened. In precopy a destination in doubt is told; one
    // that runs the guest is not in doubt, and does not listen any more.
    let postcopy = mode.may_postcopy();
    let heals = (postcopy && (confirm || cut.at == Command::PostcopyDone))
        || (confirm && cut.point == Point::Message);
    let outcome = match sent {
        Ok(_) => {
            assert!(heals, "{case}");
            "healed".to_string()
        }
        Err(failure) => match *failure {
            SendFailure::Resumed { mut vm, error } => {
                assert!(
                    !confirm && cut.at != Command::PostcopyDone,
                    "{case}: {}",
                    error_text::chain(&error)
                );
                assert!(vm.runs(), "{case}");
                let failure = received.as_ref().map(drop).unwrap_err();
                assert_eq!(failure.error.guest, GuestLocation::NotHere, "{case}: {failure:?}");
                assert!(failure.vm.is_none(), "{case}");
                vm.stop();
                assert_whole(&guest, &from);
                error_text::chain(&error)
            }
            SendFailure::HandedOver { error, held, .. } => {
                assert!(
                    confirm && !heals && held.is_none(),
                    "{case}: {}",
                    error_text::chain(&error)
                );
                error_text::chain(&error)
            }
            SendFailure::StillPaused { error, .. } => panic!("{case}: {error:?}"),
        },
    };
    match received {
        Ok(mut received) => {
            assert!(received.vm.runs(), "{case}");
            received.vm.stop();
            assert_eq!(faults_well.is_some(), postcopy, "{case}");
            assert_ne!(faults_well, Some(false), "{case}");
            assert_whole(&guest, received.vm.memory());
            assert!(kind != Kind::Devices || blobs.have_arrived(true), "{case}");
        }
        Err(failure) => assert!(!confirm, "{case}: {failure:?}"),
    }
    assert_eq!(blobs.open_sources(), 0, "{case}");
    format!("{case}: {outcome}")
}

/// What the relay does at each message, before and after it. That is three cases a place, and more
/// than a hundred seconds for all tables: without `GODWIT_CUT_TABLES` one of the three is drawn for
/// each place, by a seed that is printed and that `GODWIT_CUT_SEED` repeats.
fn cases(steps: &[Command]) -> Vec<Cut> {
    const ACTS: [Act; 3] = [Act::Close, Act::Rubbish, Act::Stall];
    let places = steps.iter().flat_map(|at| [(*at, Point::Message), (*at, Point::Answer)]);
    if std::env::var_os("GODWIT_CUT_TABLES").is_some() {
        return places.flat_map(|(at, point)| ACTS.map(|act| Cut { at, point, act })).collect();
    }
    let given = std::env::var("GODWIT_CUT_SEED").ok();
    let seed: u64 = given.map_or_else(
        || std::time::UNIX_EPOCH.elapsed().unwrap().as_secs(),
        |seed| seed.parse().expect("GODWIT_CUT_SEED is a number"),
    );
    println!("GODWIT_CUT_SEED={seed}");
    let drawn = |at: Command, point: Point| {
        let mut hash = DefaultHasher::new();
        (seed, at.code(), point == Point::Answer).hash(&mut hash);
        usize::try_from(hash.finish() % 3).unwrap()
    };
    places.map(|(at, point)| Cut { at, point, act: ACTS[drawn(at, point)] }).collect()
}

/// Runs the cases; `must` is a message that only this kind has.
fn table(mode: MemoryMode, kind: Kind, must: &[Command]) {
    const AT_ONCE: usize = 6;
    let clean = run_within(LIMITS, mode, kind, Rule::Nothing);
    clean.sent.unwrap();
    let mut received = clean.received.unwrap();
    received.vm.stop();
    assert_whole(&clean.guest, received.vm.memory());
    let mut steps = clean.commands;
    // Its occurrence depends on timing; a loss there is tested in `recovery`.
    steps.retain(|command| *command != Command::Alive);
    steps.sort_by_key(|command| command.code());
    steps.dedup();
    assert!(steps.len() >= 7, "{steps:?}");
    assert!(must.iter().all(|command| steps.contains(command)), "{steps:?}");
    let cases = Mutex::new(cases(&steps));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some(cut) = cases.lock().pop() else { return };
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
fn a_cut_at_any_message_with_the_state_of_devices() {
    table(MemoryMode::Precopy, Kind::Devices, &[Command::Blobs, Command::BlobChunk]);
}

#[test]
fn a_cut_at_any_message_of_compressed_precopy() {
    table(MemoryMode::Precopy, Kind::Compressed, &[Command::MemoryZstd]);
}

#[test]
fn a_cut_at_any_message_of_precopy_over_tls() {
    table(MemoryMode::Precopy, Kind::Secured, &[Command::Coming, Command::Memory]);
}

#[test]
fn a_cut_at_any_message_of_postcopy_over_tls() {
    if have_uffd() {
        table(MemoryMode::Postcopy, Kind::Secured, &[Command::Pending, Command::PostcopyDone]);
    }
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

#[test]
fn a_cut_at_any_message_of_postcopy_into_ready_memory() {
    if have_uffd() {
        table(MemoryMode::Postcopy, Kind::Ready, &[Command::Pending, Command::PostcopyDone]);
    }
}

#[test]
fn a_cut_at_any_message_of_a_switch_in_ready_memory() {
    if have_uffd() {
        let must = [Command::Memory, Command::Stale, Command::Pending, Command::PostcopyDone];
        table(MemoryMode::Auto, Kind::Ready, &must);
    }
}

/// A peer of an older version lacks some of the features.
#[test]
fn peers_without_a_feature_continue_without_it_or_say_what_is_missing() {
    let optional = |feature, mode, kind| {
        let run = run_within(LIMITS, mode, kind, Rule::Without(feature));
        run.sent.unwrap_or_else(|failure| panic!("{feature}: {failure:?}"));
        let mut received = run.received.unwrap();
        received.vm.stop();
        assert_ne!(run.faults_well, Some(false), "{feature}");
        assert_whole(&run.guest, received.vm.memory());
        assert!(kind != Kind::Devices || run.blobs.have_arrived(feature != FEATURE_BLOBS));
        run.commands
    };
    let (precopy, postcopy) = (MemoryMode::Precopy, MemoryMode::Postcopy);
    let unused = |feature, kind, command| {
        let commands = optional(feature, precopy, kind);
        assert!(!commands.contains(&command), "{feature}: {commands:?}");
    };
    unused(FEATURE_COMING, Kind::Plain, Command::Coming);
    unused(FEATURE_EARLY_MEMORY, Kind::Plain, Command::AwaitMachine);
    unused(FEATURE_ZERO_PAGES, Kind::Plain, Command::ZeroPages);
    unused(FEATURE_BLOBS, Kind::Devices, Command::Blobs);
    unused(FEATURE_BLOBS, Kind::Devices, Command::BlobChunk);
    optional(FEATURE_PREPARING, precopy, Kind::Plain);
    optional(FEATURE_MAPPING, precopy, Kind::Plain);
    optional(FEATURE_EARLY_MEMORY, precopy, Kind::Devices);
    let refused = |feature, mode, kind| {
        let run = run_within(LIMITS, mode, kind, Rule::Without(feature));
        let SendFailure::Resumed { mut vm, error } = *run.sent.unwrap_err() else { panic!() };
        assert!(vm.runs() && run.received.is_err(), "{feature}");
        vm.stop();
        assert_whole(&run.guest, &run.from);
        error_text::chain(&error)
    };
    for (feature, kind) in [(FEATURE_ZSTD, Kind::Compressed), (FEATURE_LOCAL, Kind::Local)] {
        let told = refused(feature, precopy, kind);
        assert!(told.contains(feature), "{feature}: {told}");
    }
    if have_uffd() {
        let told = refused(FEATURE_POSTCOPY, postcopy, Kind::Plain);
        assert!(told.contains(FEATURE_POSTCOPY), "{told}");
        optional(FEATURE_PIECES, postcopy, Kind::Plain);
        optional(FEATURE_ZERO_PAGES, postcopy, Kind::Plain);
        optional(FEATURE_EARLY_MEMORY, postcopy, Kind::Plain);
    }
}
