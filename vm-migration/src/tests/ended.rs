// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Migrations that have ended at the destination, and whose source has not received the last
//! message.

use std::sync::Arc;
use std::time::Duration;

use super::commit::{silent, turned_away};
use super::recovery::wait_until;
use super::{Builder, FakeVm, Guest, LIMITS, assert_whole, have_uffd, loopback, memory, options};
use crate::channel::Channel;
use crate::commit::Verdict;
use crate::destination::{LateReconnects, Listener};
use crate::progress::Phase;
use crate::protocol::message::{Message, Recover};
use crate::steering::Steering;
use crate::testing::Inject;
use crate::transport::Connection;
use crate::{
    Address, Cancel, Convergence, MemoryMode, Progress, ReceiveOptions, SendOptions, Side,
};

/// A postcopy whose last message is lost, and the state that remains at the destination.
fn ended_without_a_word() -> (Address, LateReconnects, [u8; 16]) {
    let late_reconnects = LateReconnects::default();
    let (address, id) =
        crate::destination::late_reconnects_for_tests(&loopback(), None, &late_reconnects);
    (address, late_reconnects, id)
}

#[test]
fn the_last_message_is_said_as_often_as_it_is_asked_for() {
    let (address, _lingering, id) = ended_without_a_word();
    let _silent = silent(&address);
    let (never, limit) = (Cancel::new().unwrap(), Duration::from_secs(5));
    for attempt in 1..=5 {
        let connection = Connection::connect(&address, &never, limit, limit).unwrap();
        let mut control = Channel::new(connection);
        let recover = Message::Recover(Recover { id, attempt, bulk: 1, urgent: 1, alive: false });
        if attempt < 4 {
            // The answer is lost.
            control.tell(&recover).unwrap();
            control.connection.wait_for_data(Some(limit)).unwrap();
        } else {
            assert!(control.ask(&recover, limit).unwrap().payload.is_empty());
        }
    }
    let stranger =
        Message::Recover(Recover { id: [0; 16], attempt: 1, bulk: 1, urgent: 1, alive: false });
    assert!(turned_away(&address, &stranger).contains("recover where the VM runs"));
}

/// Asserts that the source of an ended migration is told that it has ended.
fn hears_the_end(address: &Address, id: [u8; 16]) {
    let (never, limit) = (Cancel::new().unwrap(), Duration::from_secs(5));
    let connection = Connection::connect(address, &never, limit, limit).unwrap();
    let recover = Message::Recover(Recover { id, attempt: 7, bulk: 1, urgent: 1, alive: false });
    assert!(Channel::new(connection).ask(&recover, limit).unwrap().payload.is_empty());
}

#[test]
fn whatever_becomes_of_the_next_migration_the_last_one_is_answered_for() {
    let never = Cancel::new().unwrap();
    let (address, late_reconnects, id) = ended_without_a_word();
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 6);
    guest.fill(&from, 20);
    // A port that is taken over for an address that cannot be used.
    let Address::Tcp { port, .. } = address else { panic!() };
    let elsewhere: Address = format!("tcp:192.0.2.1:{port}").parse().unwrap();
    Listener::bind_over(&elsewhere, None, &late_reconnects, &never).unwrap_err();
    hears_the_end(&address, id);
    // No reception begins.
    drop(Listener::bind_over(&address, None, &late_reconnects, &never).unwrap());
    hears_the_end(&address, id);
    for fails in [true, false] {
        let listener = Listener::bind_over(&address, None, &late_reconnects, &never).unwrap();
        let builder = Builder::new(&to, &guest);
        let (cancel, progress) = (Cancel::new().unwrap(), Progress::new(Side::Destination));
        let progress = Arc::new(progress);
        let receiver = {
            let (cancel, progress) = (cancel.clone(), Arc::clone(&progress));
            std::thread::spawn(move || {
                let options = ReceiveOptions { limits: LIMITS, ..Default::default() };
                listener.receive(builder, &options, &progress, &cancel)
            })
        };
        let mut options = options(&address);
        let mut vm = FakeVm::new(&from, &guest);
        if fails {
            // It never converges.
            (options.convergence, options.downtime) = (Convergence::None, Duration::ZERO);
            vm = vm.inject(Inject::Busy).running();
        }
        let sender = std::thread::spawn(move || super::send(vm, &options));
        if fails {
            wait_until("memory travels", || progress.phase() == Phase::Receive);
            hears_the_end(&address, id);
            cancel.cancel();
        }
        assert_eq!(receiver.join().unwrap().is_err(), fails);
        assert_eq!(sender.join().unwrap().is_err(), fails);
        hears_the_end(&address, id);
    }
}

#[test]
fn whatever_becomes_of_a_next_postcopy_the_last_one_is_answered_for() {
    let never = Cancel::new().unwrap();
    if !have_uffd() {
        return;
    }
    let (address, late_reconnects, id) = ended_without_a_word();
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 6);
    guest.fill(&from, 60);
    let listener = Listener::bind_over(&address, None, &late_reconnects, &never).unwrap();
    let steering = Steering::new();
    let receiver = {
        let (builder, steering) = (Builder::new(&to, &guest), steering.clone());
        std::thread::spawn(move || {
            let options = ReceiveOptions { limits: LIMITS, steering, ..Default::default() };
            let progress = Arc::new(Progress::new(Side::Destination));
            listener.receive(builder, &options, &progress, &Cancel::new().unwrap())
        })
    };
    let options = SendOptions {
        memory_mode: MemoryMode::Postcopy,
        bandwidth_bytes_per_s: 1 << 16,
        recover_timeout: Duration::ZERO,
        ..options(&address)
    };
    let send_steering = options.steering.clone();
    let vm = FakeVm::new(&from, &guest);
    let sender = std::thread::spawn(move || super::send(vm, &options));
    // Its guest is paused, so nothing waits for a page.
    let received = receiver.join().unwrap().unwrap();
    let waiting = std::thread::spawn(|| received.faults.unwrap().wait());
    hears_the_end(&address, id);
    steering.abandon();
    let paused = waiting.join().unwrap().unwrap_err();
    assert!(paused.missing_pages() > 0);
    hears_the_end(&address, id);
    drop(paused);
    hears_the_end(&address, id);
    send_steering.abandon();
    sender.join().unwrap().unwrap_err();
}

#[test]
fn a_new_migration_takes_the_place_of_one_that_is_answered_for() {
    let never = Cancel::new().unwrap();
    let (address, late_reconnects, id) = ended_without_a_word();
    assert!(Listener::bind(&address).is_err(), "it listens there");
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 5);
    guest.fill(&from, 20);
    let listener = Listener::bind_over(&address, None, &late_reconnects, &never).unwrap();
    assert_eq!(*listener.address(), address);
    let builder = Builder::new(&to, &guest);
    let progress = Arc::new(Progress::new(Side::Destination));
    let receiver = {
        let progress = Arc::clone(&progress);
        std::thread::spawn(move || {
            let options = ReceiveOptions { limits: LIMITS, ..Default::default() };
            listener.receive(builder, &options, &progress, &Cancel::new().unwrap())
        })
    };
    // The source of the old migration is still told, and ends nothing.
    let (never, limit) = (Cancel::new().unwrap(), Duration::from_secs(5));
    let connection = Connection::connect(&address, &never, limit, limit).unwrap();
    let recover = Message::Recover(Recover { id, attempt: 7, bulk: 1, urgent: 1, alive: false });
    assert!(Channel::new(connection).ask(&recover, limit).unwrap().payload.is_empty());
    let verdict = Message::Verdict { id, verdict: Verdict::Withheld };
    assert!(turned_away(&address, &verdict).contains("no VM here is in doubt"));
    super::send(FakeVm::new(&from, &guest).running(), &options(&address)).unwrap();
    let mut received = receiver.join().unwrap().unwrap();
    received.vm.stop();
    assert_whole(&guest, &to);
}
