// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads of a postcopy: they are started before the guest is stopped, and where a process may start few, there are fewer
//! connections, or the guest stays.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::auto::out_of_reach;
use super::{
    Builder, FakeVm, Guest, LIMITS, ReceiveResult, SendResult, assert_whole, have_uffd, loopback,
    memory, migrate, options,
};
use crate::destination::Listener;
use crate::source::SendFailure;
use crate::testing::{Calls, FakeMemory};
use crate::threads::ThreadLimit;
use crate::{
    Address, Cancel, Cause, GuestLocation, MemoryMode, Progress, ReceiveOptions, SendOptions, Side,
};

/// Far more than any of these migrations starts.
const MANY: usize = 1000;

/// A destination that may start so many threads, and the bound.
fn target(
    builder: Builder,
    most: usize,
    calls: &Calls,
    cancel: &Cancel,
) -> (Address, JoinHandle<(ReceiveResult, ThreadLimit)>) {
    let listener = Listener::bind(&loopback()).unwrap().with_tls(None);
    let address = listener.address().clone();
    let (calls, cancel) = (Arc::clone(calls), cancel.clone());
    let receive = move || {
        let limit = ThreadLimit::set(most, &calls);
        let options = ReceiveOptions { limits: LIMITS, ..ReceiveOptions::default() };
        let progress = Arc::new(Progress::new(Side::Destination));
        let mut result = listener.receive(builder, &options, &progress, &cancel);
        if let Ok(received) = &mut result {
            if let Some(faults) = received.faults.take() {
                faults.wait().map(drop).unwrap();
            }
            received.vm.stop();
        }
        (result, limit)
    };
    (address, std::thread::spawn(receive))
}

/// What a migration between two processes came to, each of which may start so many threads.
struct Outcome {
    source: SendResult,
    destination: ReceiveResult,
    /// What was called on both sides, and each thread that was started.
    calls: Vec<&'static str>,
}

fn run(
    (there, here): (usize, usize),
    own_faults: bool,
    set: impl FnOnce(&mut SendOptions),
) -> Outcome {
    let (from, to): (Arc<FakeMemory>, _) = (memory(), memory());
    let guest = Guest::new(&from, 92);
    guest.fill(&from, 60);
    let vm = FakeVm::new(&from, &guest).running();
    let calls = vm.calls();
    let builder = Builder::new(&to, &guest).note_in(&calls);
    let builder = if own_faults { builder.own_faults() } else { builder };
    let cancel = Cancel::new().unwrap();
    let (address, target) = target(builder, here, &calls, &cancel);
    let mut options = options(&address);
    options.tls = None;
    options.memory_mode = MemoryMode::Postcopy;
    options.connections = 6;
    options.urgent_connections = Some(5);
    set(&mut options);
    let limit = ThreadLimit::set(there, &calls);
    let progress = Arc::new(Progress::new(Side::Source));
    let source = migrate(vm, &options, &progress, &Cancel::new().unwrap());
    ThreadLimit::lift();
    if source.is_err() {
        // One that was asked for nothing goes on listening.
        cancel.cancel();
    }
    let (destination, other_limit) = target.join().unwrap();
    if source.is_ok() {
        assert_whole(&guest, &to);
    }
    assert_eq!((limit.there(), other_limit.there()), (0, 0), "all have ended");
    let calls = calls.lock().clone();
    Outcome { source, destination, calls }
}

fn threads(calls: &[&'static str]) -> usize {
    calls.iter().filter(|call| call.starts_with("mig-")).count()
}

#[test]
fn threads_are_there_before_the_guest_is_stopped_and_none_is_started_after_that() {
    if !have_uffd() {
        return;
    }
    for own_faults in [false, true] {
        for mode in [MemoryMode::Postcopy, MemoryMode::Auto] {
            let Outcome { source, destination, calls } = run((MANY, MANY), own_faults, |options| {
                if mode == MemoryMode::Auto {
                    out_of_reach(options);
                    options.postcopy_after = Some(std::time::Duration::ZERO);
                }
            });
            source.unwrap();
            destination.unwrap();
            let pause = calls.iter().position(|call| *call == "pause").unwrap();
            assert!(calls.contains(&"run"), "{calls:?}");
            // One for each connection on either side, and readers of faults.
            assert!(threads(&calls[..pause]) > 2 * 11, "{mode:?}: {calls:?}");
            assert_eq!(threads(&calls[pause..]), 0, "{mode:?}: {calls:?}");
        }
    }
}

#[test]
fn a_guest_moves_on_as_many_connections_as_there_are_threads_for() {
    if !have_uffd() {
        return;
    }
    for mode in [MemoryMode::Postcopy, MemoryMode::Auto] {
        for own_faults in [false, true] {
            // For all but these a process has 128 that are left for others, the destination one for each vCPU besides.
            for (there, here) in [(131, MANY), (MANY, 142), (132, 143), (1, 7)] {
                let outcome = run((there, here), own_faults, |options| options.memory_mode = mode);
                outcome.source.unwrap();
                outcome.destination.unwrap();
            }
        }
    }
}

#[test]
fn a_process_that_may_start_no_thread_refuses_while_the_guest_runs() {
    if !have_uffd() {
        return;
    }
    for mode in [MemoryMode::Postcopy, MemoryMode::Auto] {
        for (there, here) in [(0, MANY), (MANY, 6), (MANY, 0)] {
            let outcome = run((there, here), false, |options| options.memory_mode = mode);
            let failure = *outcome.source.unwrap_err();
            let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
            assert!(vm.runs() && !outcome.calls.contains(&"pause"), "{:?}", outcome.calls);
            vm.stop();
            assert_eq!(error.guest, GuestLocation::OnSource);
            let text = error_text::chain(&error);
            assert!(text.contains("RLIMIT_NPROC") && text.contains("pids.max"), "{text}");
            let error = outcome.destination.unwrap_err().error;
            assert!(
                matches!(error.cause, Cause::Threads(_) | Cause::Abandoned(_) | Cause::Cancelled),
                "{error:?}"
            );
        }
    }
}

#[test]
fn the_threads_that_stay_at_the_destination_start_after_it_has_mapped_memory() {
    if !have_uffd() {
        return;
    }
    for mode in [MemoryMode::Postcopy, MemoryMode::Auto] {
        let Outcome { source, destination, calls } = run((MANY, MANY), false, |options| {
            options.memory_mode = mode;
        });
        source.unwrap();
        destination.unwrap();
        let map = calls.iter().position(|call| *call == "map").unwrap();
        let after = |name| calls[map..].iter().filter(|call| **call == name).count();
        // None of the source is of these kinds, but for those of requests, which it started before.
        let names = ["mig-faults", "mig-look", "mig-pages", "mig-urgent"];
        assert_eq!(names.map(after), [5, 1, 6, 5], "{mode:?}: {calls:?}");
        assert!(calls[..map].contains(&"mig-pages"), "they are tried before: {calls:?}");
    }
}

#[test]
fn a_precopy_that_never_switches_ends_the_threads_that_waited() {
    if !have_uffd() {
        return;
    }
    let outcome = run((MANY, MANY), false, |options| {
        options.memory_mode = MemoryMode::Auto;
        options.downtime = std::time::Duration::from_secs(10);
    });
    outcome.source.unwrap();
    assert!(outcome.destination.unwrap().faults.is_none());
    assert!(threads(&outcome.calls) > 2 * 11, "{:?}", outcome.calls);
}
