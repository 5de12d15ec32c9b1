// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The commit: connections that are lost around it, requests, outages, acknowledgements that are too
//! old, and a machine that does not start.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::recovery::wait_until;
use super::relay::{Act, Cut, Point, Relay, Rule};
use super::{
    Builder, FakeVm, Guest, LIMITS, SendResult, Target, assert_whole, have_uffd, loopback, memory,
    migrate, options,
};
use crate::channel::Channel;
use crate::commit::Verdict;
use crate::commit::destination::Decision;
use crate::destination::Listener;
use crate::progress::{Event, Observer, Phase};
use crate::protocol::message::{Command, Message, Recover};
use crate::source::SendFailure;
use crate::steering::Steering;
use crate::testing::{Calls, FakeDestination, FakeMemory, Inject};
use crate::transport::Connection;
use crate::vm::DestinationVm as _;
use crate::{
    Address, Cancel, Cause, GuestLocation, Limits, MemoryMode, Progress, ReceiveOptions,
    SendOptions, Side, steering,
};

#[test]
fn a_guest_that_starts_late_is_known_to_run() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 43);
    guest.fill(&from, 30);
    let (start, starts) = channel();
    let builder = Builder::new(&to, &guest).start_gate(starts);
    let target = Target::start(&loopback(), builder, LIMITS);
    let mut options = options(&target.address);
    options.limits.answer = Duration::from_secs(4);
    let progress = Arc::new(Progress::new(Side::Source));
    let sender = {
        let (vm, progress) = (FakeVm::new(&from, &guest).running(), Arc::clone(&progress));
        std::thread::spawn(move || migrate(vm, &options, &progress, &Cancel::new().unwrap()))
    };
    wait_until("the source's doubt", || progress.phase() == Phase::InDoubt);
    drop(start);
    let mut vm = target.join().unwrap().vm;
    assert!(vm.runs());
    let sent = sender.join().unwrap().unwrap();
    assert_eq!(sent.report.phase, Phase::Done);
    vm.stop();
    assert_whole(&guest, &to);
}

/// What the destination has at the end.
enum Arrived {
    /// The guest, with all its pages.
    Whole(FakeVm),
    /// The guest, which did not start, with all its pages.
    NotStarted(FakeDestination, GuestLocation),
    /// Nothing.
    Failed(GuestLocation, String),
}

/// Cancels when a phase begins.
struct CancelAt(Phase, Cancel);

impl Observer for CancelAt {
    fn event(&self, _: Side, event: Event) {
        if event == Event::Begin(self.0) {
            self.1.cancel();
        }
    }
}

/// Both sides of a migration through a relay that acts at the commit.
struct Run {
    from: Arc<FakeMemory>,
    to: Arc<FakeMemory>,
    guest: Arc<Guest>,
    relay: Relay,
    source: Arc<Progress>,
    destination: Arc<Progress>,
    send_steering: Steering,
    receive_steering: Steering,
    calls: Calls,
    sender: JoinHandle<SendResult>,
    receiver: JoinHandle<()>,
    arrived: Receiver<Arrived>,
}

/// Parameters of a run.
#[derive(Clone, Copy)]
struct Special {
    mode: MemoryMode,
    rule: Rule,
    limits: Limits,
    at_source: Inject,
    at_destination: Inject,
    /// The destination is cancelled when this phase begins.
    cancel_at: Option<Phase>,
    recover_timeout: Duration,
}

impl Special {
    fn new(mode: MemoryMode, rule: Rule) -> Self {
        Self {
            mode,
            rule,
            limits: LIMITS,
            at_source: Inject::Nothing,
            at_destination: Inject::Nothing,
            cancel_at: None,
            recover_timeout: Duration::from_secs(30),
        }
    }
}

fn cut(at: Command, point: Point) -> Rule {
    Rule::Cut(Cut { at, point, act: Act::Close })
}

/// The source has handed the guest over, and the destination does not receive that.
const CONFIRM: fn() -> Rule = || cut(Command::Confirm, Point::Message);

/// The destination has acknowledged, and the source does not receive that.
const ACKNOWLEDGED: fn() -> Rule = || cut(Command::Complete, Point::Answer);

impl Run {
    fn start(special: Special) -> Self {
        let Special { mode, rule, limits, at_source, at_destination, cancel_at, recover_timeout } =
            special;
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 41);
        guest.fill(&from, 30);
        let listener = Listener::bind(&loopback()).unwrap();
        let relay = Relay::start(listener.address(), rule);
        let cancel = Cancel::new().unwrap();
        let progress = match cancel_at {
            Some(phase) => {
                let observer = Box::new(CancelAt(phase, cancel.clone()));
                Progress::observed(Side::Destination, observer)
            }
            None => Progress::new(Side::Destination),
        };
        let (destination, source) = (Arc::new(progress), Arc::new(Progress::new(Side::Source)));
        let receive_steering = Steering::new();
        let builder = Builder::new(&to, &guest).inject(at_destination);
        let calls = builder.calls();
        let (arrives, arrived) = channel();
        let receiver = {
            let progress = Arc::clone(&destination);
            let steering = receive_steering.clone();
            std::thread::spawn(move || {
                let options = ReceiveOptions { limits, steering, ..Default::default() };
                let (vm, faults) = match listener.receive(builder, &options, &progress, &cancel) {
                    Ok(received) => (Arrived::Whole(received.vm), received.faults),
                    Err(failure) => {
                        let guest = failure.error.guest;
                        let text = error_text::chain(&failure.error);
                        match failure.vm {
                            Some(vm) => (Arrived::NotStarted(vm, guest), failure.faults),
                            None => (Arrived::Failed(guest, text), failure.faults),
                        }
                    }
                };
                if let Some(faults) = faults {
                    faults.wait().map_err(|paused| error_text::chain(&paused.error)).unwrap();
                }
                arrives.send(vm).unwrap_or_else(|_| panic!("the test has ended"));
            })
        };
        let mut options = SendOptions { memory_mode: mode, limits, ..options(&relay.address) };
        options.recover_timeout = recover_timeout;
        let send_steering = options.steering.clone();
        let sender = {
            let progress = Arc::clone(&source);
            let vm = FakeVm::new(&from, &guest).inject(at_source).running();
            std::thread::spawn(move || migrate(vm, &options, &progress, &Cancel::new().unwrap()))
        };
        Self {
            from,
            to,
            guest,
            relay,
            source,
            destination,
            send_steering,
            receive_steering,
            calls,
            sender,
            receiver,
            arrived,
        }
    }

    fn wait_for_doubt(&self) {
        wait_until("the doubt", || self.destination.phase() == Phase::InDoubt);
    }

    fn noted(&self, what: &str) -> bool {
        self.calls.lock().contains(&what)
    }

    /// What the destination has when everything has arrived.
    fn arrives(self) -> (SendResult, Arrived, Arc<Guest>, Arc<FakeMemory>) {
        let sent = self.sender.join().unwrap();
        let arrived = self.arrived.recv_timeout(Duration::from_mins(1)).unwrap();
        self.receiver.join().unwrap();
        (sent, arrived, self.guest, self.to)
    }

    /// Asserts that one guest runs, whole, at the destination, and that the source knows it.
    fn moves(self) {
        let (sent, arrived, guest, to) = self.arrives();
        sent.unwrap();
        let Arrived::Whole(mut vm) = arrived else { panic!("it does not run there") };
        assert!(vm.runs());
        vm.stop();
        assert_whole(&guest, &to);
    }

    /// Asserts that one guest runs, whole, at the source, and that the destination knows it without
    /// an operator.
    fn stays(self) -> String {
        let from = Arc::clone(&self.from);
        let (sent, arrived, guest, _) = self.arrives();
        let SendFailure::Resumed { mut vm, error } = *sent.unwrap_err() else { panic!() };
        assert!(vm.runs());
        assert_eq!(error.guest, GuestLocation::OnSource);
        let Arrived::Failed(at, why) = arrived else { panic!("it is at the destination, too") };
        assert_eq!(at, GuestLocation::NotHere, "{why}");
        vm.stop();
        assert_whole(&guest, &from);
        error_text::chain(&error)
    }
}

fn modes() -> Vec<MemoryMode> {
    let mut modes = vec![MemoryMode::Precopy];
    if have_uffd() {
        modes.push(MemoryMode::Postcopy);
    }
    modes
}

#[test]
fn a_cancel_after_the_acknowledgement_and_a_cut_do_not_lose_the_guest() {
    for mode in modes() {
        let cancel_at = Some(Phase::Run);
        Run::start(Special { cancel_at, ..Special::new(mode, CONFIRM()) }).moves();
    }
}

#[test]
fn a_destination_learns_that_the_source_went_on() {
    for mode in modes() {
        Run::start(Special::new(mode, ACKNOWLEDGED())).stays();
    }
}

/// A device may wait for a page that never comes.
#[test]
fn a_machine_that_is_not_to_run_ends_although_something_of_it_waits() {
    if !have_uffd() {
        return;
    }
    for decision in [None, Some(Decision::Discarded)] {
        let special = Special::new(MemoryMode::Postcopy, ACKNOWLEDGED());
        let recover_timeout = decision.map_or(special.recover_timeout, |_| Duration::ZERO);
        let at_destination = Inject::TouchInDoubt;
        let run = Run::start(Special { at_destination, recover_timeout, ..special });
        if let Some(decision) = decision {
            run.wait_for_doubt();
            run.receive_steering.decide(decision);
        }
        run.stays();
    }
}

/// Longer than anything for which the destination waits by itself.
fn wait_out(run: &Run, limits: &Limits) {
    run.wait_for_doubt();
    let began = Instant::now();
    wait_until("the end of the promise", || run.noted("still in doubt"));
    wait_until("some time more", || began.elapsed() > limits.rejoin + limits.rejoin / 4);
    assert_eq!(run.destination.phase(), Phase::InDoubt);
    assert_eq!(run.calls.lock().iter().filter(|name| **name == "run").count(), 0);
}

/// As short as a busy machine allows: half of it is the greatest age of an acknowledgement.
const BRIEF: Limits = Limits { rejoin: Duration::from_secs(4), ..LIMITS };

#[test]
fn an_outage_longer_than_the_promise_is_waited_out() {
    if !have_uffd() {
        return;
    }
    let special = Special::new(MemoryMode::Postcopy, CONFIRM());
    // The source does not reconnect without a request.
    let recover_timeout = Duration::ZERO;
    let run = Run::start(Special { limits: BRIEF, recover_timeout, ..special });
    wait_out(&run, &BRIEF);
    assert_eq!(run.source.phase(), Phase::PostcopyPaused);
    run.send_steering.recover(steering::Recover::There);
    run.moves();
}

#[test]
fn the_operator_decides_when_the_source_does_not_reconnect() {
    for mode in modes() {
        for decision in [Decision::RunsHere, Decision::Discarded] {
            let special = Special::new(mode, CONFIRM());
            let recover_timeout = Duration::ZERO;
            let run = Run::start(Special { limits: BRIEF, recover_timeout, ..special });
            wait_out(&run, &BRIEF);
            run.receive_steering.decide(decision);
            if mode == MemoryMode::Postcopy && decision == Decision::RunsHere {
                // Its pages are at the source, which reconnects now.
                wait_until("the guest", || run.destination.phase() == Phase::PostcopyPaused);
                assert!(run.noted("run"));
                run.send_steering.recover(steering::Recover::There);
                run.moves();
                continue;
            }
            run.send_steering.abandon();
            let (sent, arrived, guest, to) = run.arrives();
            assert!(matches!(*sent.unwrap_err(), SendFailure::HandedOver { .. }));
            match (decision, arrived) {
                (Decision::RunsHere, Arrived::Whole(mut vm)) => {
                    vm.stop();
                    assert_whole(&guest, &to);
                }
                (Decision::Discarded, Arrived::Failed(guest, _)) => {
                    assert_eq!(guest, GuestLocation::NotHere);
                }
                _ => panic!("{mode:?} {decision:?}"),
            }
        }
    }
}

/// Sends this message to a destination in doubt; returns its refusal.
pub(super) fn turned_away(to: &Address, message: &Message) -> String {
    let (cancel, limit) = (Cancel::new().unwrap(), Duration::from_secs(5));
    let connection = Connection::connect(to, &cancel, limit, limit).unwrap();
    match Channel::new(connection).ask(message, limit).unwrap_err() {
        Cause::Refused(reason) => reason,
        other => panic!("{other:?}"),
    }
}

/// Silent connections. One after the other they would take far longer than a source waits.
pub(super) fn silent(to: &Address) -> Vec<Connection> {
    let (never, limit) = (Cancel::new().unwrap(), Duration::from_secs(5));
    let connect = || Connection::connect(to, &never, limit, limit).unwrap();
    (0..20).map(|_| connect()).collect()
}

#[test]
fn strangers_end_no_doubt() {
    let special = Special::new(MemoryMode::Precopy, CONFIRM());
    let run = Run::start(Special { recover_timeout: Duration::ZERO, ..special });
    run.wait_for_doubt();
    let at = run.relay.address.clone();
    let _silent = silent(&at);
    for verdict in [Verdict::Withheld, Verdict::Committed] {
        let told = turned_away(&at, &Message::Verdict { id: [3; 16], verdict });
        assert!(told.contains("not known yet"), "{told}");
    }
    let recover = Recover { id: [3; 16], attempt: 1, bulk: 1, urgent: 1, alive: false };
    assert!(turned_away(&at, &Message::Recover(recover)).contains("no pages to come"));
    // A client that sends a byte now and then delays nothing.
    let (cancel, limit) = (Cancel::new().unwrap(), Duration::from_secs(5));
    let slow = Connection::connect(&at, &cancel, limit, limit).unwrap();
    slow.send(&Message::Config(vec![0; 4096]).encode()[..20]).unwrap();
    let start = Message::Start { version: 0, offer: true };
    assert!(turned_away(&at, &start).contains("not known yet"));
    assert_eq!(run.destination.phase(), Phase::InDoubt);
    run.receive_steering.decide(Decision::RunsHere);
    let (_, arrived, ..) = run.arrives();
    assert!(matches!(arrived, Arrived::Whole(_)));
}

#[test]
fn a_guest_that_does_not_start_in_postcopy_stays_and_gets_its_pages() {
    if !have_uffd() {
        return;
    }
    for rule in [Rule::Nothing, CONFIRM()] {
        let special = Special::new(MemoryMode::Postcopy, rule);
        let run = Run::start(Special { at_destination: Inject::RunOnce, ..special });
        let (sent, arrived, guest, to) = run.arrives();
        // The source has served every page, and is free.
        sent.unwrap();
        let Arrived::NotStarted(vm, at) = arrived else { panic!("it was dropped") };
        assert_eq!(at, GuestLocation::OnDestination);
        let mut vm = vm.run(true).map_err(|(_, error)| error).unwrap();
        vm.stop();
        assert_whole(&guest, &to);
    }
}

#[test]
fn an_acknowledgement_that_comes_late_is_asked_for_again() {
    // Older than half of the promise when it arrives.
    let late = Rule::Late(Command::Complete, BRIEF.rejoin / 2 + Duration::from_millis(200));
    for mode in modes() {
        let run = Run::start(Special { limits: BRIEF, ..Special::new(mode, late) });
        let seen = Arc::clone(&run.relay.seen);
        run.moves();
        assert!(seen.lock().contains(&Command::Renew));
    }
}

#[test]
fn an_acknowledgement_that_became_too_old_is_not_used() {
    const SHORT: Limits = Limits { rejoin: Duration::from_secs(1), ..LIMITS };
    for mode in modes() {
        let special = Special::new(mode, Rule::Nothing);
        let at_source = Inject::ReleaseLate;
        let why = Run::start(Special { limits: SHORT, at_source, ..special }).stays();
        assert!(why.contains("acknowledgement is up to"), "{why}");
    }
}

#[test]
fn a_precopy_that_is_told_to_stop_telling_says_where_the_guest_is() {
    let special = Special::new(MemoryMode::Precopy, CONFIRM());
    let run = Run::start(Special { recover_timeout: Duration::ZERO, ..special });
    wait_until("the end at the source", || run.source.phase() == Phase::Failed);
    run.wait_for_doubt();
    run.receive_steering.decide(Decision::RunsHere);
    let (sent, ..) = run.arrives();
    let failure = *sent.unwrap_err();
    assert!(matches!(&failure, SendFailure::HandedOver { held: None, .. }), "{failure:?}");
    assert_eq!(failure.error().guest, GuestLocation::OnDestination);
}
