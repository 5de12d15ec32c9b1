// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Postcopy whose last pages a page server sends, over another mapping of the same memory and its
//! own connections.

use std::sync::Arc;

use super::recovery::{Run, SLOW, wait_until};
use super::{Builder, FakeVm, Guest, LIMITS, Target, have_uffd, loopback, memory, options, send};
use crate::Limits;
use crate::error::GuestLocation;
use crate::layout::Backing;
use crate::page_server::PageServerState;
use crate::progress::{Phase, ProgressDocument};
use crate::source::SendFailure;
use crate::testing::{Behaviour, FakeMemory, FakePageServer};
use crate::{MemoryMode, SendOptions};

/// A migration with a page server.
fn run(
    behaviour: Behaviour,
    limits: Limits,
    adjust: impl FnOnce(&mut SendOptions),
) -> (Run, Arc<FakePageServer>) {
    let page_server = FakePageServer::new(behaviour, limits);
    let equip = |vm: FakeVm| vm.page_server(&page_server);
    let run = Run::of(&memory(), memory(), 2, limits, adjust, equip);
    (run, page_server)
}

fn state(snapshot: &ProgressDocument) -> Option<PageServerState> {
    snapshot.page_server.as_ref().map(|server| server.state)
}

#[test]
pub(super) fn the_source_is_done_when_the_page_server_serves() {
    if !have_uffd() {
        return;
    }
    let (run, page_server) =
        run(Behaviour::Serves, LIMITS, |options| options.bandwidth_bytes_per_s = SLOW / 2);
    wait_until("the end of the source", || run.source_is_over());
    let now = run.destination.snapshot();
    assert!(now.remaining_bytes > Some(0), "pages are still to come: {now:?}");
    let (source, destination) = run.finish();
    assert_eq!((source.phase, state(&source)), (Phase::HandedOn, Some(PageServerState::Serving)));
    assert!(source.page_server.unwrap().took_over_us.is_some());
    assert_eq!((source.recovery.losses, destination.recovery.recoveries), (0, 1));
    let served = page_server.join().unwrap().unwrap();
    assert_eq!((served.phase, served.remaining_bytes), (Phase::Done, Some(0)));
    assert!(served.faults.bulk_pages > 0, "{served:?}");
}

#[test]
pub(super) fn what_a_page_server_loses_heals() {
    if !have_uffd() {
        return;
    }
    let (run, page_server) =
        run(Behaviour::Serves, LIMITS, |options| options.bandwidth_bytes_per_s = SLOW / 4);
    wait_until("the end of the source", || run.source_is_over());
    for cuts in 1..=3 {
        run.proxy.cut_all();
        wait_until("the recovery", || run.destination.snapshot().recovery.recoveries > cuts);
        wait_until("the page server", || {
            page_server.progress.snapshot().recovery.recoveries >= cuts
        });
    }
    let (_, destination) = run.finish();
    assert_eq!((destination.recovery.losses, destination.recovery.recoveries), (4, 4));
    assert_eq!(page_server.join().unwrap().unwrap().recovery.losses, 3);
}

#[test]
fn large_host_pages_that_came_in_part_come_again_from_the_page_server() {
    let Some((from, to, _pool)) = super::pieces::onto_large_pages() else { return };
    let page_server = FakePageServer::new(Behaviour::Serves, LIMITS);
    let equip = |vm: FakeVm| vm.page_server(&page_server);
    let slow = |options: &mut SendOptions| options.bandwidth_bytes_per_s = SLOW / 2;
    let run = Run::of(&from, to, 0, LIMITS, slow, equip);
    wait_until("the end of the source", || run.source_is_over());
    run.finish();
    assert!(page_server.join().unwrap().is_some());
}

#[test]
fn without_connections_of_their_own_requests_are_served_too() {
    if !have_uffd() {
        return;
    }
    let (run, page_server) =
        run(Behaviour::Serves, LIMITS, |options| options.urgent_connections = Some(0));
    run.finish();
    assert!(page_server.join().unwrap().is_some());
}

#[test]
pub(super) fn a_source_whose_page_server_vanishes_serves_by_itself() {
    if !have_uffd() {
        return;
    }
    let (run, page_server) = run(Behaviour::Vanishes, LIMITS, |_| {});
    let (source, destination) = run.finish();
    assert_eq!((source.phase, state(&source)), (Phase::Done, Some(PageServerState::Failed)));
    assert!(source.page_server.unwrap().reason.is_some());
    assert_eq!(destination.recovery.losses, 0, "nothing was disturbed");
    assert!(page_server.join().unwrap().is_none());
}

#[test]
fn a_source_whose_page_server_cannot_connect_serves_by_itself() {
    if !have_uffd() {
        return;
    }
    let (run, page_server) = run(Behaviour::NoDestination, LIMITS, |_| {});
    let (source, destination) = run.finish();
    assert_eq!((source.phase, state(&source)), (Phase::Done, Some(PageServerState::Failed)));
    let reason = source.page_server.unwrap().reason.unwrap();
    assert!(reason.contains("cannot connect"), "{reason}");
    assert_eq!(destination.recovery.losses, 0, "nothing was disturbed");
    assert!(page_server.join().is_err());
}

#[test]
fn a_page_server_that_comes_after_the_last_page_has_not_failed() {
    if !have_uffd() {
        return;
    }
    let (run, page_server) = run(Behaviour::ComesLate, LIMITS, |_| {});
    wait_until("the last page", || run.destination.phase() == Phase::Done);
    page_server.steering.recover(crate::steering::Recover::There);
    let (source, _) = run.finish();
    assert_eq!((source.phase, state(&source)), (Phase::Done, Some(PageServerState::Ready)));
    assert!(source.page_server.unwrap().reason.is_none());
    page_server.join().unwrap_err();
}

#[test]
pub(super) fn a_page_server_that_ends_half_way_leaves_the_source_serving() {
    if !have_uffd() {
        return;
    }
    let (run, page_server) = run(Behaviour::EndsHalfWay, LIMITS, |_| {});
    let (source, destination) = run.finish();
    assert_eq!((source.phase, state(&source)), (Phase::Done, Some(PageServerState::Failed)));
    assert_eq!((source.recovery.losses, source.recovery.recoveries), (1, 1));
    assert_eq!((destination.recovery.losses, destination.recovery.recoveries), (1, 1));
    assert!(page_server.join().unwrap().is_none());
}

#[test]
fn without_a_page_server_that_was_asked_for_the_guest_stays() {
    if !have_uffd() {
        return;
    }
    let from = memory();
    let guest = Guest::new(&from, 5);
    let to = memory();
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let page_server = FakePageServer::new(Behaviour::RefusesMemory, LIMITS);
    let mut options = options(&target.address);
    options.memory_mode = MemoryMode::Postcopy;
    let vm = FakeVm::new(&from, &guest).page_server(&page_server).running();
    match *send(vm, &options).unwrap_err() {
        SendFailure::Resumed { vm, error } => {
            assert_eq!(
                (error.step, error.guest),
                ("starting the page server", GuestLocation::OnSource)
            );
            assert!(error_text::chain(&error).contains("there is no room"), "{error}");
            assert!(vm.runs());
        }
        other => panic!("{other:?}"),
    }
    target.join().unwrap_err();
}

#[test]
fn private_memory_has_no_page_server() {
    if !have_uffd() {
        return;
    }
    let from = FakeMemory::new(super::REGIONS, Backing::Anonymous, 4096).unwrap();
    let guest = Guest::new(&from, 5);
    let to = memory();
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let page_server = FakePageServer::new(Behaviour::Serves, LIMITS);
    let mut options = options(&target.address);
    options.memory_mode = MemoryMode::Postcopy;
    let failure = send(FakeVm::new(&from, &guest).page_server(&page_server), &options).unwrap_err();
    let text = error_text::chain(failure.error());
    assert!(text.contains("'ram0', which is private memory"), "{text}");
    target.join().unwrap_err();
}

#[test]
fn a_migration_that_ends_in_precopy_needs_no_page_server() {
    if !have_uffd() {
        return;
    }
    let from = memory();
    let guest = Guest::new(&from, 5);
    guest.fill(&from, 60);
    let to = memory();
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let page_server = FakePageServer::new(Behaviour::Serves, LIMITS);
    let mut options = options(&target.address);
    options.memory_mode = MemoryMode::Auto;
    let vm = FakeVm::new(&from, &guest).page_server(&page_server);
    let report = send(vm, &options).unwrap().report;
    assert_eq!(report.phase, Phase::Done);
    target.join().unwrap();
    assert!(page_server.join().unwrap().is_none(), "it was never told to take over");
    super::assert_whole(&guest, &to);
}
