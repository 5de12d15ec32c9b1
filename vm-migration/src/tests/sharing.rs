// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections of different speed: what a slow one does not carry, the others do.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::early::wait_for;
use super::{Builder, FakeVm, Guest, LIMITS, Target, assert_whole, loopback, migrate, options};
use crate::layout::{Backing, PAGE_BYTES};
use crate::testing::FakeMemory;
use crate::{Address, Cancel, Progress, Side};

/// Length of the role and token of an extra connection.
const HELLO_BYTES: usize = 18;

/// Forwards connections; what the source sends on the last of `count`, except the role and token,
/// is held back until the gate opens.
fn relay(to: &Address, count: usize, gate: Receiver<()>) -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap();
    let Address::Tcp { host, port } = to.clone() else { panic!() };
    std::thread::spawn(move || {
        let mut gate = Some(gate);
        for number in 1..=count {
            let (mut source, _) = listener.accept().unwrap();
            let mut destination = TcpStream::connect((host.as_str(), port)).unwrap();
            let (mut back_from, mut back_to) =
                (destination.try_clone().unwrap(), source.try_clone().unwrap());
            for stream in [&source, &destination] {
                stream.set_nodelay(true).unwrap();
            }
            let gate = gate.take_if(|_| number == count);
            std::thread::spawn(move || {
                if let Some(gate) = gate {
                    let mut hello = [0; HELLO_BYTES];
                    source.read_exact(&mut hello).unwrap();
                    destination.write_all(&hello).unwrap();
                    let _ = gate.recv();
                }
                let _ = std::io::copy(&mut source, &mut destination);
                let _ = destination.shutdown(std::net::Shutdown::Write);
            });
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut back_from, &mut back_to);
                let _ = back_to.shutdown(std::net::Shutdown::Write);
            });
        }
    });
    address
}

#[test]
fn a_connection_that_stands_still_keeps_next_to_nothing_from_arriving() {
    const PAGES: u64 = 16 << 10;
    /// One claim of the least size, and a message that was begun.
    const KEPT_BYTES_MAX: u64 = 512 << 10;
    let new = || FakeMemory::new(&[(0, PAGES)], Backing::Shared, PAGE_BYTES).unwrap();
    let (from, to) = (new(), new());
    let guest = Guest::new(&from, 61);
    guest.fill(&from, 100);
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let (open, gate) = channel();
    let mut options = options(&relay(&target.address, 3, gate));
    options.connections = 3;
    let progress = Arc::new(Progress::new(Side::Source));
    let sender = {
        let (vm, progress) = (FakeVm::new(&from, &guest), Arc::clone(&progress));
        std::thread::spawn(move || migrate(vm, &options, &progress, &Cancel::new().unwrap()))
    };
    let arrived = Arc::clone(&target.progress);
    wait_for("all that the slow connection does not hold", || {
        arrived.snapshot().memory_bytes_received >= Some(PAGES * PAGE_BYTES - KEPT_BYTES_MAX)
    });
    assert_eq!(progress.snapshot().round, Some(1));
    open.send(()).unwrap();
    let finished = sender.join().unwrap().unwrap();
    assert_eq!(finished.report.memory_bytes_sent, Some(PAGES * PAGE_BYTES), "nothing went twice");
    target.join().unwrap();
    assert_whole(&guest, &to);
}

#[test]
fn many_connections_over_a_unix_socket() {
    let dir = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", dir.path().join("mig").display()).parse().unwrap();
    for connections in [2, 128] {
        let (from, to) = (super::memory(), super::memory());
        let guest = Guest::new(&from, 62);
        guest.fill(&from, 60);
        let target = Target::start(&address, Builder::new(&to, &guest), LIMITS);
        let mut options = options(&target.address);
        (options.connections, options.downtime) = (connections, Duration::from_millis(500));
        super::send(FakeVm::new(&from, &guest).running(), &options).unwrap();
        target.join().unwrap().vm.stop();
        assert_whole(&guest, &to);
    }
}
