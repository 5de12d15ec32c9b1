// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Migrations of processes that lack descriptors for all connections: there are fewer, and the guest moves.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::{
    Builder, FakeVm, Guest, LIMITS, ReceiveResult, assert_whole, loopback, memory, migrate, options,
};
use crate::descriptors::TEST_ROOM;
use crate::destination::Listener;
use crate::testing::FakeMemory;
use crate::{Address, Cancel, MemoryMode, Progress, ReceiveOptions, Side};

/// A destination that finds room for so many connections.
fn target(builder: Builder, room: Option<u16>) -> (Address, JoinHandle<ReceiveResult>) {
    let listener = Listener::bind(&loopback()).unwrap().with_tls(None);
    let address = listener.address().clone();
    let receive = move || {
        TEST_ROOM.set(room);
        let options = ReceiveOptions { limits: LIMITS, ..ReceiveOptions::default() };
        let progress = Arc::new(Progress::new(Side::Destination));
        listener.receive(builder, &options, &progress, &Cancel::new().unwrap())
    };
    (address, std::thread::spawn(receive))
}

/// Moves a guest between two processes with room for so many connections; its pages are compared.
fn moves(mode: MemoryMode, there: Option<u16>, here: Option<u16>) {
    let (from, to): (Arc<FakeMemory>, _) = (memory(), memory());
    let guest = Guest::new(&from, 91);
    guest.fill(&from, 60);
    let (address, target) = target(Builder::new(&to, &guest), here);
    let mut options = options(&address);
    options.tls = None;
    options.memory_mode = mode;
    options.connections = 6;
    if mode.may_postcopy() {
        options.urgent_connections = Some(5);
    }
    let receiver = std::thread::spawn(move || {
        let mut received = target.join().unwrap().unwrap();
        if let Some(faults) = received.faults.take() {
            faults.wait().map(drop).unwrap();
        }
        received.vm.stop();
        received
    });
    TEST_ROOM.set(there);
    let progress = Arc::new(Progress::new(Side::Source));
    let vm = FakeVm::new(&from, &guest).running();
    migrate(vm, &options, &progress, &Cancel::new().unwrap()).unwrap();
    TEST_ROOM.set(None);
    receiver.join().unwrap();
    assert_whole(&guest, &to);
}

#[test]
fn a_guest_moves_on_as_many_connections_as_there_are_descriptors() {
    for (there, here) in [(Some(3), None), (None, Some(3)), (Some(4), Some(2)), (Some(0), Some(0))]
    {
        moves(MemoryMode::Precopy, there, here);
        if super::have_uffd() {
            moves(MemoryMode::Postcopy, there, here);
            moves(MemoryMode::Auto, there, here);
        }
    }
}
