// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Postcopy to machines whose vCPUs are refused missing pages, and resolve their own faults.

use std::io::Read as _;
use std::net::TcpListener;
use std::sync::Arc;

use super::by_hand::{answer, message, negotiate};
use super::moves::Case;
use super::recovery::{Run, SLOW, wait_until};
use super::{FakeVm, Guest, have_uffd, loopback, memory, migrate, options};
use crate::fault::FaultSourceKind;
use crate::progress::ProgressDocument;
use crate::protocol::capabilities::{FEATURE_MANY_URGENT, Prepared, TOKEN_BYTES, features};
use crate::source::SendFailure;
use crate::{Cancel, MemoryMode, Progress, Side};

fn postcopy(case: &Case, urgent_connections: u16) -> ProgressDocument {
    let (_, destination) = case.go(&loopback(), |options| {
        options.memory_mode = MemoryMode::Postcopy;
        options.urgent_connections = Some(urgent_connections);
        options.bandwidth_bytes_per_s = 32 << 20;
    });
    assert_eq!(destination.faults.source, Some(FaultSourceKind::Sigbus));
    assert_eq!(destination.remaining_bytes, Some(0));
    destination
}

#[test]
pub(super) fn a_guest_is_whole_that_brings_its_own_pages() {
    if !have_uffd() {
        return;
    }
    for (seed, urgent_connections) in [(1, 2), (2, 1), (3, 0), (4, 4)] {
        let case = Case::new(memory(), memory(), seed).own_faults();
        let faults = postcopy(&case, urgent_connections).faults;
        assert!(faults.requested > Some(0), "{faults:?}");
        let resolved = [faults.requested, faults.merged, faults.local].into_iter().flatten();
        assert!(faults.seen >= Some(resolved.sum()), "{faults:?}");
    }
}

#[test]
fn what_precopy_left_is_brought_by_who_needs_it() {
    if !have_uffd() {
        return;
    }
    let case = Case::new(memory(), memory(), 9).own_faults();
    let (_, destination) = case.go(&loopback(), |options| {
        options.memory_mode = MemoryMode::Auto;
        options.postcopy_after = Some(std::time::Duration::ZERO);
    });
    assert_eq!(destination.faults.source, Some(FaultSourceKind::Sigbus));
}

/// Connections of the vCPUs' own, fewer than vCPUs, and more.
#[test]
fn a_guest_with_many_vcpus_is_whole_however_few_connections_they_have() {
    if !have_uffd() {
        return;
    }
    for (vcpus, urgent_connections) in [(64, 64), (64, 3), (64, 70), (160, 160)] {
        let run = Run::own(vcpus, |options| {
            options.urgent_connections = Some(urgent_connections);
            options.bandwidth_bytes_per_s = 2 * SLOW;
        });
        let (_, destination) = run.finish();
        assert!(destination.faults.requested > Some(64), "{destination:?}");
        assert_eq!(destination.recovery.losses, 0, "{destination:?}");
    }
}

/// The set is lost again and again while vCPUs read their own connections.
#[test]
pub(super) fn cuts_heal_while_vcpus_read_their_own_answers() {
    const SET: usize = 2 + 4;
    if !have_uffd() {
        return;
    }
    let run = Run::own(4, |options| options.bandwidth_bytes_per_s = SLOW / 4);
    let mut cuts = 0;
    for number in 0..12 {
        let before = run.losses();
        if number % 4 == 3 {
            run.proxy.cut_all();
        } else {
            run.proxy.cut_one(number + 2, SET);
        }
        wait_until("the loss", || run.losses() > before || run.is_over());
        wait_until("the recovery", || {
            let now = run.destination.snapshot();
            now.recovery.recoveries >= now.recovery.losses || run.is_over()
        });
        cuts += u32::from(run.losses() > before);
    }
    let (_, destination) = run.finish();
    assert!(cuts > 3 && destination.recovery.recoveries >= cuts, "{destination:?}");
}

/// An older source has a connection for each of eight vCPUs at most.
#[test]
fn a_source_may_connect_for_fewer_vcpus_after_a_loss() {
    if !have_uffd() {
        return;
    }
    let run = Run::own(4, |options| {
        options.recover_timeout = std::time::Duration::ZERO;
        options.bandwidth_bytes_per_s = SLOW / 2;
    });
    run.proxy.cut_all();
    run.recover_over(2);
    let (_, destination) = run.finish();
    assert_eq!(destination.recovery.recoveries, 1);
}

/// A destination that knows of no more than 128 connections is offered those that 160 vCPUs share, and gets as many.
#[test]
fn a_destination_of_an_older_version_gets_connections_that_are_shared() {
    let from = memory();
    let guest = Guest::new(&from, 60);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let older = std::thread::spawn(move || {
        let (mut control, _) = listener.accept().unwrap();
        let mut features = features();
        assert!(features.remove(FEATURE_MANY_URGENT));
        let offer = negotiate(&mut control, features);
        // The configuration.
        message(&mut control);
        answer(&mut control, false, Prepared { regions: offer.regions.clone() }.to_json());
        let promised = usize::from(offer.bulk_connections + offer.urgent_connections);
        let mut extra: Vec<_> = (0..promised).map(|_| listener.accept().unwrap().0).collect();
        for stream in &mut extra {
            let mut hello = [0; size_of::<u16>() + TOKEN_BYTES];
            stream.read_exact(&mut hello).unwrap();
            answer(stream, false, Vec::new());
        }
        // With all its connections the source goes on.
        let next = message(&mut control);
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "a further connection");
        drop((control, extra, next));
        offer
    });
    let mut options = options(&format!("tcp:{address}").parse().unwrap());
    options.memory_mode = MemoryMode::Postcopy;
    options.vcpus = Some(160);
    let vm = FakeVm::new(&from, &guest).running();
    let progress = Arc::new(Progress::new(Side::Source));
    let failure = *migrate(vm, &options, &progress, &Cancel::new().unwrap()).unwrap_err();
    let SendFailure::Resumed { mut vm, .. } = failure else { panic!("{failure:?}") };
    vm.stop();
    let offer = older.join().unwrap();
    assert_eq!((offer.urgent_connections, offer.many_urgent_connections), (64, Some(160)));
}
