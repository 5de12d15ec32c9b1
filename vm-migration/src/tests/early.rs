// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The machine at the destination is built while memory is sent: not before, and not after the
//! guest was stopped.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::by_hand::{answer, message, negotiate};
use super::hostile::agree;
use super::{
    Builder, FakeVm, Guest, LIMITS, Target, assert_in_order, assert_whole, have_uffd, loopback,
    memory, migrate, options,
};
use crate::channel::Channel;
use crate::options::Limits;
use crate::progress::Phase;
use crate::protocol::capabilities::{FEATURE_MAPPING, features};
use crate::protocol::message::Message;
use crate::source::SendFailure;
use crate::testing::Inject;
use crate::transport::{Connection, TransportError};
use crate::{Cancel, Cause, Convergence, MemoryMode, Progress, Side};

/// Waits until a condition holds; fails the test after a time limit.
pub(super) fn wait_for(what: &str, condition: impl Fn() -> bool) {
    // As long as a busy machine may take.
    let deadline = Instant::now() + Duration::from_mins(1);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
pub(super) fn memory_travels_while_the_machine_is_built_and_the_guest_runs_until_it_is() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 51);
    guest.fill(&from, 60);
    let vm = FakeVm::new(&from, &guest).running();
    let calls = vm.calls();
    let (open, gate) = channel();
    let builder = Builder::new(&to, &guest).gate(gate).note_in(&calls);
    let target = Target::start(&loopback(), builder, LIMITS);
    let progress = Arc::new(Progress::new(Side::Source));
    let sender = {
        let (options, progress) = (options(&target.address), Arc::clone(&progress));
        std::thread::spawn(move || migrate(vm, &options, &progress, &Cancel::new().unwrap()))
    };
    // A whole round passes without the machine, and the guest continues.
    let received = Arc::clone(&target.progress);
    wait_for("the first round", || {
        let arrived = received.snapshot().memory_bytes_received;
        arrived >= Some(from.populated_bytes(0).unwrap())
            && progress.snapshot().remaining_bytes == Some(0)
    });
    let visits = guest.visits();
    wait_for("the guest to continue", || guest.visits() > visits + 1000);
    assert_eq!(progress.phase(), Phase::Precopy);
    open.send(()).unwrap();
    sender.join().unwrap().unwrap();
    target.join().unwrap().vm.stop();
    assert_whole(&guest, &to);
    assert_in_order(&calls, &["map", "prepare", "pause"]);
}

#[test]
pub(super) fn a_machine_that_cannot_be_built_ends_precopy_with_the_reason() {
    for connections in [1, 3] {
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 52);
        guest.fill(&from, 60);
        // The guest never converges, so only the failure can end the rounds.
        let vm = FakeVm::new(&from, &guest).inject(Inject::Busy).running();
        let (open, gate) = channel();
        let builder = Builder::new(&to, &guest).gate(gate).inject(Inject::Prepare);
        let target = Target::start(&loopback(), builder, LIMITS);
        let mut options = options(&target.address);
        (options.connections, options.downtime) = (connections, Duration::ZERO);
        options.convergence = Convergence::None;
        let progress = Arc::new(Progress::new(Side::Source));
        let sender = {
            let progress = Arc::clone(&progress);
            std::thread::spawn(move || migrate(vm, &options, &progress, &Cancel::new().unwrap()))
        };
        wait_for("some rounds", || progress.snapshot().round > Some(3));
        open.send(()).unwrap();
        let failure = *sender.join().unwrap().unwrap_err();
        let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
        assert_eq!(error.phase, Phase::Precopy);
        assert!(
            error_text::chain(&error).contains("injected failure in prepare"),
            "{}",
            error_text::chain(&error)
        );
        assert!(vm.runs());
        vm.stop();
        assert_whole(&guest, &from);
        let error = target.join().unwrap_err().error;
        assert!(
            error_text::chain(&error).contains("injected failure in prepare"),
            "{}",
            error_text::chain(&error)
        );
    }
}

#[test]
fn a_cancel_does_not_wait_for_a_machine_that_is_not_needed_any_more() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 53);
    let (open, gate) = channel();
    let target = Target::start(&loopback(), Builder::new(&to, &guest).gate(gate), LIMITS);
    let progress = Arc::new(Progress::new(Side::Source));
    let cancel = Cancel::new().unwrap();
    let sender = {
        let (options, progress) = (options(&target.address), Arc::clone(&progress));
        let (vm, cancel) = (FakeVm::new(&from, &guest), cancel.clone());
        std::thread::spawn(move || migrate(vm, &options, &progress, &cancel))
    };
    wait_for("the wait for the machine", || progress.snapshot().expected_downtime_us.is_some());
    cancel.cancel();
    let failure = *sender.join().unwrap().unwrap_err();
    assert!(matches!(failure.error().cause, crate::Cause::Cancelled), "{failure:?}");
    wait_for("the end at the destination", || target.is_over());
    let error = target.join().unwrap_err().error;
    assert!(matches!(error.cause, Cause::Abandoned(_)), "{error:?}");
    drop(open);
}

/// A source that sends nothing before it closes, and one that sends another message.
#[test]
fn a_machine_that_is_being_built_is_not_waited_for_when_the_source_is_gone() {
    let terms = [(MemoryMode::Precopy, false), (MemoryMode::Precopy, true)];
    for (mode, sends_more) in terms.into_iter().chain([(MemoryMode::Postcopy, false)]) {
        if mode.may_postcopy() && !have_uffd() {
            continue;
        }
        let to = memory();
        let guest = Guest::new(&to, 56);
        let (open, gate) = channel();
        let builder = Builder::new(&to, &guest).gate(gate);
        let calls = builder.calls();
        let target = Target::start(&loopback(), builder, LIMITS);
        let never = Cancel::new().unwrap();
        let limits = (LIMITS.connect, LIMITS.answer);
        let connection = Connection::connect(&target.address, &never, limits.0, limits.1);
        let mut source = Channel::new(connection.unwrap());
        agree(&mut source, &to, mode);
        source.tell(&Message::Config(b"{}".to_vec())).unwrap();
        if mode == MemoryMode::Precopy {
            source.answer(LIMITS.answer).unwrap();
            source.tell(&Message::AwaitMachine).unwrap();
        }
        wait_for("the machine's memory", || calls.lock().contains(&"map"));
        if sends_more {
            // This does not end anything by itself.
            source.tell(&Message::ZeroPages(Vec::new())).unwrap();
            let early = source.answer(Duration::from_millis(300)).unwrap_err();
            let waits = matches!(early, Cause::Transport(TransportError::Timeout { .. }));
            assert!(waits && !target.is_over(), "{early:?}");
        }
        drop(source);
        wait_for("the end at the destination", || target.is_over());
        let error = target.join().unwrap_err().error;
        let closed = matches!(error.cause, Cause::Transport(TransportError::Closed));
        assert!(closed, "{mode:?} {sends_more}: {error:?}");
        drop(open);
    }
}

/// Storage of the destination that does not respond, or not for long.
#[test]
fn a_cancel_does_not_wait_for_a_machine_that_cannot_be_built_to_its_end() {
    for mode in [MemoryMode::Precopy, MemoryMode::Postcopy] {
        if mode.may_postcopy() && !have_uffd() {
            continue;
        }
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 54);
        let (open, gate) = channel();
        let builder = Builder::new(&to, &guest).gate(gate);
        let calls = builder.calls();
        let target = Target::start(&loopback(), builder, LIMITS);
        let sender = {
            let mut options = options(&target.address);
            options.memory_mode = mode;
            let (vm, progress) = (FakeVm::new(&from, &guest), Progress::new(Side::Source));
            let progress = Arc::new(progress);
            std::thread::spawn(move || migrate(vm, &options, &progress, &Cancel::new().unwrap()))
        };
        let mapped = || calls.lock().contains(&"map");
        wait_for("the machine's memory", mapped);
        target.cancel.cancel();
        let failure = *sender.join().unwrap().unwrap_err();
        let told = error_text::chain(failure.error());
        assert!(matches!(failure.error().cause, Cause::Refused(_)), "{told}");
        assert!(told.contains("cancelled"), "{told}");
        wait_for("the end at the destination", || target.is_over());
        let error = target.join().unwrap_err().error;
        assert!(matches!(error.cause, Cause::Cancelled), "{error:?}");
        // What is being built is released when it is built.
        assert!(Arc::strong_count(&to) > 1, "{mode:?}");
        open.send(()).unwrap();
        wait_for("the end of the machine", || Arc::strong_count(&to) == 1);
        assert!(calls.lock().contains(&"prepare"));
    }
}

/// A source that sends to a destination which is ready when the returned gate is opened.
fn send_to_unready(
    inject: Inject,
    limits: crate::options::Limits,
) -> (Arc<Guest>, [Arc<crate::testing::FakeMemory>; 2], Started) {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 57);
    guest.fill(&from, 60);
    let (open, gate) = channel();
    let vm = FakeVm::new(&from, &guest).running();
    let calls = vm.calls();
    let builder = Builder::new(&to, &guest).ready_gate(gate).inject(inject).note_in(&calls);
    let target = Target::start(&loopback(), builder, limits);
    let progress = Arc::new(Progress::new(Side::Source));
    let cancel = Cancel::new().unwrap();
    let sender = {
        let mut options = options(&target.address);
        options.limits = limits;
        let (progress, cancel) = (Arc::clone(&progress), cancel.clone());
        std::thread::spawn(move || migrate(vm, &options, &progress, &cancel))
    };
    wait_for("the wait for the machine", || progress.snapshot().expected_downtime_us.is_some());
    (guest, [from, to], Started { open, calls, target, cancel, sender })
}

struct Started {
    open: std::sync::mpsc::Sender<()>,
    calls: crate::testing::Calls,
    target: Target,
    cancel: Cancel,
    sender: std::thread::JoinHandle<super::SendResult>,
}

#[test]
fn a_destination_that_says_that_it_prepares_is_waited_for_while_the_guest_runs() {
    // Far less than the destination takes, and more than there is between two keep-alives.
    let (answer, prepare) = (Duration::from_millis(2500), Duration::from_millis(1));
    let limits = crate::options::Limits { answer, prepare, ..LIMITS };
    let (guest, [_, to], started) = send_to_unready(Inject::Nothing, limits);
    let Started { open, calls, target, sender, .. } = started;
    std::thread::sleep(Duration::from_secs(4));
    let visits = guest.visits();
    wait_for("the guest to continue", || guest.visits() > visits + 1000);
    assert!(!calls.lock().contains(&"pause") && !sender.is_finished());
    open.send(()).unwrap();
    sender.join().unwrap().unwrap();
    target.join().unwrap().vm.stop();
    assert_whole(&guest, &to);
    assert_in_order(&calls, &["ready", "pause", "apply"]);
}

#[test]
fn a_destination_that_cannot_become_ready_says_why_and_the_guest_has_not_stopped() {
    let (guest, [from, _], started) = send_to_unready(Inject::Ready, LIMITS);
    let Started { open, calls, target, sender, .. } = started;
    open.send(()).unwrap();
    let failure = *sender.join().unwrap().unwrap_err();
    let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
    let told = error_text::chain(&error);
    assert!(told.contains("injected failure in ready"), "{told}");
    assert!(vm.runs() && !calls.lock().contains(&"pause"));
    vm.stop();
    assert_whole(&guest, &from);
    let told = error_text::chain(&target.join().unwrap_err().error);
    assert!(told.contains("injected failure in ready"), "{told}");
}

#[test]
fn a_cancel_on_either_side_ends_the_preparation() {
    for at_source in [true, false] {
        let (_, _, started) = send_to_unready(Inject::Nothing, LIMITS);
        let Started { open, calls, target, cancel, sender } = started;
        if at_source {
            cancel.cancel();
        } else {
            target.cancel.cancel();
        }
        let failure = *sender.join().unwrap().unwrap_err();
        let SendFailure::Resumed { mut vm, .. } = failure else { panic!("{failure:?}") };
        assert!(vm.runs());
        vm.stop();
        wait_for("the end at the destination", || target.is_over());
        assert!(target.join().is_err());
        let calls = calls.lock();
        assert!(calls.contains(&"not ready") && !calls.contains(&"pause"), "{calls:?}");
        drop(open);
    }
}

#[test]
fn a_destination_that_says_that_it_maps_memory_is_waited_for() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 58);
    let (open, gate) = channel();
    let target = Target::start(&loopback(), Builder::new(&to, &guest).map_gate(gate), LIMITS);
    let mut options = options(&target.address);
    // Far less than the destination takes, and more than there is between two keep-alives.
    options.limits.answer = Duration::from_millis(2500);
    let vm = FakeVm::new(&from, &guest).running();
    let progress = Arc::new(Progress::new(Side::Source));
    let sender =
        std::thread::spawn(move || migrate(vm, &options, &progress, &Cancel::new().unwrap()));
    std::thread::sleep(Duration::from_secs(4));
    assert!(!sender.is_finished());
    open.send(()).unwrap();
    sender.join().unwrap().unwrap();
    target.join().unwrap().vm.stop();
    assert_whole(&guest, &to);
}

/// How long a destination with these features is waited for that is silent after the configuration; without features,
/// one of plain version 0.
fn silence_after_the_configuration(features: Option<BTreeSet<String>>, limits: Limits) -> Duration {
    let from = memory();
    let guest = Guest::new(&from, 59);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let silent = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        if let Some(features) = features {
            negotiate(&mut stream, features);
        } else {
            message(&mut stream);
            answer(&mut stream, false, Vec::new());
        }
        // The configuration, and then its end.
        message(&mut stream);
        while stream.read(&mut [0; 64]).is_ok_and(|len| len > 0) {}
    });
    let mut options = options(&format!("tcp:{address}").parse().unwrap());
    options.limits = limits;
    let vm = FakeVm::new(&from, &guest).running();
    let progress = Arc::new(Progress::new(Side::Source));
    let began = Instant::now();
    let failure = *migrate(vm, &options, &progress, &Cancel::new().unwrap()).unwrap_err();
    let waited = began.elapsed();
    let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
    assert!(matches!(error.cause, Cause::Transport(TransportError::Timeout { .. })), "{error:?}");
    assert!(vm.runs());
    vm.stop();
    assert_whole(&guest, &from);
    silent.join().unwrap();
    waited
}

#[test]
fn a_destination_that_is_silent_after_the_configuration_is_given_up_soon() {
    let limits = Limits { answer: Duration::from_millis(500), ..LIMITS };
    assert!(silence_after_the_configuration(Some(features()), limits) < limits.prepare / 2);
}

#[test]
fn a_destination_that_cannot_say_that_it_maps_memory_has_some_time_and_not_all() {
    let limits = Limits { answer: Duration::from_millis(300), ..LIMITS };
    let least = limits.silent_preparation(0);
    let mut older = features();
    older.remove(FEATURE_MAPPING);
    for features in [Some(older), None] {
        let waited = silence_after_the_configuration(features, limits);
        assert!((least..limits.prepare / 2).contains(&waited), "{waited:?}");
    }
}

#[test]
fn what_is_silent_has_time_for_its_memory_and_never_more_than_what_tells() {
    let limits = Limits::default();
    assert_eq!(limits.silent_preparation(0), 4 * limits.answer);
    assert_eq!(limits.silent_preparation(64 << 30), 4 * limits.answer + Duration::from_secs(64));
    assert_eq!(limits.silent_preparation(4 << 40), limits.prepare);
    assert_eq!(limits.silent_preparation(u64::MAX), limits.prepare);
}
