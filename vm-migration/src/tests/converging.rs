// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guests that write faster than the link can copy, and the measures against that.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::early::wait_for;
use super::{
    Builder, FakeVm, Guest, LIMITS, Target, assert_whole, loopback, memory, migrate, options,
};
use crate::progress::{Event, Observer, ProgressDocument};
use crate::source::SendFailure;
use crate::testing::{Inject, Pace};
use crate::{Cancel, Cause, Convergence, DirtyClear, Progress, SendOptions, Side, TimeoutStrategy};

/// Decides after each event whether to cancel, from all events so far.
type Enough = fn(&[Event]) -> bool;

/// Records the events of a migration in order; cancels it when that is decided.
#[derive(Clone)]
struct Record {
    events: Arc<Mutex<Vec<Event>>>,
    cancel: Cancel,
    enough: Enough,
}

impl Observer for Record {
    fn event(&self, _: Side, event: Event) {
        let mut events = self.events.lock();
        events.push(event);
        if (self.enough)(&events) {
            self.cancel.cancel();
        }
    }
}

fn throttled_to(events: &[Event]) -> Vec<u8> {
    let percent = |event: &Event| match event {
        Event::Throttled { percent } => Some(*percent),
        _ => None,
    };
    events.iter().filter_map(percent).collect()
}

fn allowed_us(events: &[Event]) -> Vec<u64> {
    let allowed = |event: &Event| match event {
        Event::DowntimeAllowed { allowed_us } => Some(*allowed_us),
        _ => None,
    };
    events.iter().filter_map(allowed).collect()
}

/// Migrates a guest that dirties everything all the time; returns the outcome and all events.
fn busy(
    adjust: impl FnOnce(&mut SendOptions),
    vm_of: impl FnOnce(FakeVm) -> FakeVm,
    enough: Enough,
) -> (Result<ProgressDocument, Cause>, Vec<Event>, Vec<u8>) {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 71);
    guest.fill(&from, 60);
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let mut options = options(&target.address);
    options.convergence = Convergence::None;
    adjust(&mut options);
    let cancel = Cancel::new().unwrap();
    let record = Record { events: Arc::default(), cancel: cancel.clone(), enough };
    let progress = Arc::new(Progress::observed(Side::Source, Box::new(record.clone())));
    // It writes almost nothing in addition to what the log makes up.
    let pace = Pace::Paced(1, Duration::from_millis(1));
    let vm = FakeVm::new(&from, &guest).load(1, 1, pace).inject(Inject::Busy);
    let vm = vm_of(vm).running();
    let throttled = vm.throttled();
    let sent = migrate(vm, &options, &progress, &cancel);
    let received = target.join();
    let end = match sent {
        Ok(finished) => {
            received.unwrap().vm.stop();
            assert_whole(&guest, &to);
            Ok(finished.report)
        }
        Err(failure) => match *failure {
            SendFailure::Resumed { mut vm, error } => {
                vm.stop();
                assert_whole(&guest, &from);
                Err(error.cause)
            }
            other => panic!("{other:?}"),
        },
    };
    let events = record.events.lock().clone();
    let throttled = throttled.lock().clone();
    (end, events, throttled)
}

#[test]
fn a_guest_that_is_too_fast_is_slowed_down_until_it_fits_and_then_runs_freely() {
    let (end, events, throttled) = busy(
        |options| {
            options.convergence = Convergence::Throttle;
            options.downtime = Duration::from_millis(1);
        },
        // From 60 percent on it dirties nothing.
        |vm| vm.calms_at(60),
        |_| false,
    );
    let report = end.unwrap();
    assert_eq!(report.convergence, Some(Convergence::Throttle));
    assert_eq!(report.throttle_percent, Some(60));
    assert_eq!(throttled, [20, 30, 40, 50, 60, 0], "in steps, and off at the end");
    assert_eq!(throttled_to(&events), [20, 30, 40, 50, 60]);
}

#[test]
fn a_throttle_ends_with_a_migration_that_fails() {
    let (end, _, throttled) = busy(
        |options| {
            options.convergence = Convergence::Throttle;
            options.downtime = Duration::ZERO;
        },
        |vm| vm.calms_at(100),
        |events| throttled_to(events).contains(&40),
    );
    assert!(matches!(end, Err(Cause::Cancelled)));
    assert_eq!(throttled, [20, 30, 40, 0]);
}

#[test]
fn a_machine_that_cannot_be_slowed_down_says_so_before_memory_travels() {
    let (end, events, _) =
        busy(|options| options.convergence = Convergence::Throttle, |vm| vm, |_| false);
    let cause = end.unwrap_err();
    assert!(
        error_text::chain(&cause).contains("slow down its vCPUs"),
        "{}",
        error_text::chain(&cause)
    );
    assert!(!events.iter().any(|event| matches!(event, Event::Round { .. })));
}

#[test]
fn the_allowed_downtime_is_raised_in_steps_and_the_guest_moves() {
    let (end, events, _) = busy(
        |options| {
            options.convergence = Convergence::RaiseDowntime;
            options.downtime = Duration::from_micros(10);
            options.downtime_max = Some(Duration::from_mins(1));
        },
        |vm| vm,
        |_| false,
    );
    let report = end.unwrap();
    let steps = allowed_us(&events);
    assert!(steps.len() > 1 && steps[0] == 2000, "{steps:?}");
    assert!(steps.windows(2).all(|two| two[1] == 2 * two[0]), "{steps:?}");
    assert_eq!(steps.last().copied(), report.allowed_downtime_us);
    assert!(report.expected_downtime_us <= report.allowed_downtime_us, "{report:?}");
}

#[test]
fn no_downtime_beyond_the_cap_is_allowed() {
    let (end, events, _) = busy(
        |options| {
            options.convergence = Convergence::RaiseDowntime;
            options.downtime = Duration::ZERO;
            options.downtime_max = Some(Duration::from_micros(1500));
        },
        |vm| vm,
        |events| {
            let stalled = |event: &&Event| matches!(event, Event::Stalled { .. });
            events.iter().filter(stalled).count() > 10
        },
    );
    assert!(matches!(end, Err(Cause::Cancelled)));
    assert_eq!(allowed_us(&events), [1500]);
}

#[test]
fn what_happened_instead_of_converging_is_told_in_numbers() {
    let (end, _, _) = busy(
        |options| {
            options.downtime = Duration::from_millis(1);
            options.timeout = Duration::from_millis(300);
        },
        |vm| vm,
        |_| false,
    );
    let cause = end.unwrap_err();
    let Cause::NotConverging { downtime_ms, expected_ms, .. } = cause else { panic!("{cause:?}") };
    assert!(downtime_ms == 1 && expected_ms > 1, "{cause:?}");
    assert!(
        error_text::chain(&cause).contains("convergence=throttle"),
        "{}",
        error_text::chain(&cause)
    );
}

/// A guest at rest, of which two devices write what no log has.
fn unlogged(adjust: impl FnOnce(&mut SendOptions)) -> (Result<ProgressDocument, Cause>, usize) {
    let (end, events, _) = busy(adjust, |vm| vm.inject(Inject::Unlogged), |_| false);
    (end, events.iter().filter(|event| matches!(event, Event::Round { .. })).count())
}

#[test]
fn memory_that_has_to_be_sent_again_whole_is_refused_by_name_after_one_round() {
    let (end, rounds) = unlogged(|options| {
        // All of memory takes longer.
        options.bandwidth_bytes_per_s = 64 << 20;
        options.downtime = Duration::from_millis(1);
    });
    let cause = end.unwrap_err();
    let Cause::Unlogged { devices, downtime_ms: 1, .. } = &cause else { panic!("{cause:?}") };
    assert_eq!((devices.as_str(), rounds), ("gpu0, gpu1", 1));
    let told = error_text::chain(&cause);
    assert!(told.contains("timeout_strategy=ignore"), "{told}");
}

#[test]
fn memory_that_has_to_be_sent_again_whole_is_sent_where_that_is_allowed() {
    let (end, rounds) = unlogged(|options| {
        options.bandwidth_bytes_per_s = 64 << 20;
        options.downtime = Duration::from_millis(1);
        options.timeout_strategy = TimeoutStrategy::Ignore;
    });
    let report = end.unwrap();
    assert!(report.expected_downtime_us > Some(10_000), "{report:?}");
    assert!(rounds <= 2, "one while it runs, and one when it has stopped: {rounds}");
    let (end, rounds) = unlogged(|options| options.downtime = Duration::from_mins(1));
    let report = end.unwrap();
    assert!(report.expected_downtime_us < report.allowed_downtime_us, "{report:?}");
    assert!(rounds <= 2, "one while it runs, and one when it has stopped: {rounds}");
}

/// The guest is as slow as it has to be while memory is sent, and runs freely while the destination takes long.
#[test]
fn a_guest_is_not_slowed_down_while_its_destination_prepares() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 73);
    guest.fill(&from, 60);
    let (open, gate) = std::sync::mpsc::channel();
    let builder = Builder::new(&to, &guest).ready_gate(gate);
    let target = Target::start(&loopback(), builder, LIMITS);
    let mut options = options(&target.address);
    options.convergence = Convergence::Throttle;
    options.downtime = Duration::from_millis(1);
    let pace = Pace::Paced(1, Duration::from_millis(1));
    let vm = FakeVm::new(&from, &guest).load(1, 1, pace).inject(Inject::Busy).calms_at(40);
    let vm = vm.running();
    let throttled = vm.throttled();
    let progress = Arc::new(Progress::new(Side::Source));
    let sender = {
        let progress = Arc::clone(&progress);
        std::thread::spawn(move || migrate(vm, &options, &progress, &Cancel::new().unwrap()))
    };
    wait_for("the guest to run freely", || *throttled.lock() == [20, 30, 40, 0]);
    assert_eq!(progress.snapshot().throttle_percent, Some(0));
    open.send(()).unwrap();
    let report = sender.join().unwrap().unwrap().report;
    target.join().unwrap().vm.stop();
    assert_whole(&guest, &to);
    assert_eq!(*throttled.lock(), [20, 30, 40, 0, 40, 0]);
    assert_eq!(report.throttle_percent, Some(40));
}

#[test]
fn clearing_once_a_round_is_as_right_as_clearing_by_slices() {
    for connections in [1, 3] {
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 72);
        guest.fill(&from, 60);
        let pace = Pace::Paced(64, Duration::from_micros(300));
        let target =
            Target::start(&loopback(), Builder::new(&to, &guest).load(2, 90, pace), LIMITS);
        let mut options = options(&target.address);
        (options.dirty_clear, options.connections) = (DirtyClear::Round, connections);
        options.downtime = Duration::from_millis(50);
        let vm = FakeVm::new(&from, &guest).load(2, 90, pace).running();
        let finished = super::send(vm, &options).unwrap();
        assert!(finished.report.downtime_us > Some(0));
        target.join().unwrap().vm.stop();
        assert_whole(&guest, &to);
    }
}
