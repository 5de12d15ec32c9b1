// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Successful migrations: contents are checked page by page while the guest writes.

use std::sync::Arc;
use std::time::Duration;

use super::{
    Builder, FakeMemory, FakeVm, Guest, LIMITS, REGIONS, Target, assert_whole, have_uffd, loopback,
    memory, options, send,
};
use crate::MemoryMode;
use crate::layout::{Backing, PAGE_BYTES};
use crate::progress::{Phase, ProgressDocument};
use crate::testing::{Inject, Pace};
use crate::transport::Address;

/// Memory and guest of a case.
pub(super) struct Case {
    from: Arc<FakeMemory>,
    to: Arc<FakeMemory>,
    guest: Arc<Guest>,
    pub(super) pace: Pace,
    own_faults: bool,
}

impl Case {
    pub(super) fn new(from: Arc<FakeMemory>, to: Arc<FakeMemory>, seed: u64) -> Self {
        let guest = Guest::new(&from, seed);
        guest.fill(&from, 60);
        let pace = Pace::Paced(64, Duration::from_micros(300));
        Self { from, to, guest, pace, own_faults: false }
    }

    /// Makes vCPUs resolve their own faults at the destination.
    pub(super) fn own_faults(mut self) -> Self {
        self.own_faults = true;
        self
    }

    fn vm(&self) -> FakeVm {
        FakeVm::new(&self.from, &self.guest).load(2, 90, self.pace).running()
    }

    fn builder(&self) -> Builder {
        let builder = Builder::new(&self.to, &self.guest).load(2, 90, self.pace);
        if self.own_faults { builder.own_faults() } else { builder }
    }

    /// Migrates; returns the reports of both sides.
    pub(super) fn go(
        &self,
        at: &Address,
        adjust: impl FnOnce(&mut crate::SendOptions),
    ) -> (ProgressDocument, ProgressDocument) {
        let target = Target::start(at, self.builder(), LIMITS);
        let mut options = options(&target.address);
        adjust(&mut options);
        let progress = Arc::clone(&target.progress);
        let receiver = std::thread::spawn(move || {
            let received = target.join().unwrap();
            let visits = received.vm.guest().visits();
            let report = received.faults.map(|faults| faults.wait().unwrap());
            (received.vm, report, visits)
        });
        let finished = send(self.vm(), &options).unwrap();
        let (mut vm, report, visits_before) = receiver.join().unwrap();
        while vm.guest().visits() < visits_before + 5000 {
            std::thread::yield_now();
        }
        vm.stop();
        assert_whole(&self.guest, &self.to);
        (finished.report, report.unwrap_or_else(|| progress.snapshot()))
    }
}

pub(super) fn postcopy(options: &mut crate::SendOptions) {
    options.memory_mode = MemoryMode::Postcopy;
}

#[test]
fn precopy_over_tcp_twenty_times() {
    for seed in 1..=20 {
        let case = Case::new(memory(), memory(), seed);
        let (source, destination) = case.go(&loopback(), |o| o.downtime = Duration::from_millis(5));
        assert_eq!((source.phase, destination.phase), (Phase::Done, Phase::Done));
        assert_eq!(source.memory_bytes_sent, destination.memory_bytes_received);
        assert!(source.downtime_us > Some(0));
    }
}

#[test]
pub(super) fn a_limit_on_bytes_per_second_holds_in_precopy() {
    const LIMIT: u64 = 16 << 20;
    /// Bytes that a connection may send ahead.
    const AHEAD_BYTES: u64 = 1 << 20;
    for connections in [1, 3] {
        let case = Case::new(memory(), memory(), 31);
        let (source, _) = case.go(&loopback(), |o| {
            o.connections = connections;
            o.bandwidth_bytes_per_s = LIMIT;
            // The guest stops as soon as only what it writes in almost no time is left.
            o.downtime = Duration::from_secs(1);
        });
        let sent = source.memory_bytes_sent.unwrap();
        let least_ms = sent.saturating_sub(u64::from(connections) * AHEAD_BYTES) * 1000 / LIMIT;
        assert!(least_ms > 100, "too little to tell: {sent} bytes");
        assert!(source.elapsed_ms >= least_ms, "{sent} bytes in {} ms", source.elapsed_ms);
    }
}

#[test]
fn pages_that_devices_have_mapped_stay_where_they_are() {
    for backing in [Backing::Shared, Backing::Anonymous] {
        let memory = || FakeMemory::new(super::REGIONS, backing, PAGE_BYTES).unwrap();
        let case = Case::new(memory(), memory(), 11);
        // No page can be discarded from here on.
        case.to.pin().unwrap();
        let (source, _) = case.go(&loopback(), |o| o.downtime = Duration::from_millis(5));
        assert!(source.zero_pages > 0, "no page became zero on the way");
    }
}

#[test]
fn precopy_over_a_unix_socket() {
    let dir = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", dir.path().join("mig").display()).parse().unwrap();
    let case = Case::new(memory(), memory(), 7);
    case.go(&address, |_| ());
    assert!(!dir.path().join("mig").exists(), "the socket file outlived its listener");
}

#[test]
pub(super) fn precopy_over_four_connections() {
    for seed in 1..=5 {
        let case = Case::new(memory(), memory(), seed);
        case.go(&loopback(), |o| {
            o.connections = 4;
            o.downtime = Duration::from_millis(2);
        });
    }
}

#[test]
pub(super) fn precopy_of_anonymous_memory() {
    let anonymous = || FakeMemory::new(super::REGIONS, Backing::Anonymous, PAGE_BYTES).unwrap();
    Case::new(anonymous(), anonymous(), 3).go(&loopback(), |_| ());
}

#[test]
fn an_idle_guest_is_sent_once_and_holes_stay_holes() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 5);
    for page in [3, 4, 500, 1024] {
        guest.visit(&from, 1, page, false);
    }
    // A populated page of zeros.
    guest.visit(&from, 1, 700, true);
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let finished = send(FakeVm::new(&from, &guest), &options(&target.address)).unwrap();
    let received = target.join().unwrap();
    assert!(!received.vm.runs(), "a guest that was paused must stay paused");
    assert_eq!(finished.report.memory_bytes_sent, Some(4 * PAGE_BYTES));
    assert_eq!(finished.report.zero_pages, 1);
    assert_eq!(from.populated_bytes(0).unwrap(), 0, "reading populated holes at the source");
    assert_eq!(to.populated_bytes(1).unwrap(), 4 * PAGE_BYTES);
    assert_whole(&guest, &to);
}

#[test]
fn postcopy_over_tcp_twenty_times() {
    if !have_uffd() {
        return;
    }
    for seed in 1..=20 {
        let mut case = Case::new(memory(), memory(), seed);
        case.pace = Pace::Full;
        let (source, destination) = case.go(&loopback(), postcopy);
        assert_eq!((source.phase, destination.phase), (Phase::Done, Phase::Done));
        assert_eq!(source.memory_bytes_sent, destination.memory_bytes_received);
        let (sent, got) = (&source.faults, &destination.faults);
        assert_eq!(sent.bulk_pages + sent.urgent_pages, got.bulk_pages + got.urgent_pages);
        assert_eq!(destination.remaining_bytes, Some(0));
    }
}

#[test]
fn postcopy_over_a_unix_socket() {
    if !have_uffd() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", dir.path().join("mig").display()).parse().unwrap();
    Case::new(memory(), memory(), 11).go(&address, postcopy);
}

#[test]
pub(super) fn postcopy_with_several_channels_of_each_kind() {
    if !have_uffd() {
        return;
    }
    for seed in 1..=5 {
        Case::new(memory(), memory(), seed).go(&loopback(), |options| {
            postcopy(options);
            (options.connections, options.urgent_connections) = (3, Some(2));
        });
    }
}

#[test]
pub(super) fn postcopy_of_anonymous_memory() {
    if !have_uffd() {
        return;
    }
    let anonymous = || FakeMemory::new(super::REGIONS, Backing::Anonymous, PAGE_BYTES).unwrap();
    for seed in 1..=3 {
        Case::new(anonymous(), anonymous(), seed).go(&loopback(), postcopy);
        Case::new(memory(), anonymous(), seed).go(&loopback(), postcopy);
    }
}

#[test]
fn postcopy_discards_what_the_destination_had_populated() {
    if !have_uffd() {
        return;
    }
    let case = Case::new(memory(), memory(), 9);
    let junk = Guest::new(&case.to, 99);
    junk.fill(&case.to, 100);
    // Pages that are holes at the source are not announced: the destination must begin with zeros
    // there.
    for (region, pages) in [(0usize, 2048u64), (1, 1025)] {
        for page in 0..pages {
            if case.from.word(region, page, 1).load(std::sync::atomic::Ordering::Relaxed) == 0 {
                junk.visit(&case.to, region, page, true);
            }
        }
    }
    case.go(&loopback(), postcopy);
}

#[test]
pub(super) fn restoring_state_may_touch_memory_that_has_not_arrived() {
    if !have_uffd() {
        return;
    }
    let case = Case::new(memory(), memory(), 13);
    let builder = case.builder().touch(vec![(0, 1), (0, 2047), (1, 1024), (1, 0)]);
    let target = Target::start(&loopback(), builder, LIMITS);
    let mut options = options(&target.address);
    postcopy(&mut options);
    let receiver = std::thread::spawn(move || {
        let received = target.join().unwrap();
        received.faults.unwrap().wait().unwrap();
        received.vm
    });
    send(case.vm(), &options).unwrap();
    receiver.join().unwrap().stop();
    assert_whole(&case.guest, &case.to);
}

#[test]
fn holes_that_count_as_dirty_stay_holes_at_both_sides() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 12);
    guest.fill_all(&from, 0, 0..64);
    let pages = |memory: &FakeMemory| -> u64 {
        (0..REGIONS.len()).map(|region| memory.populated_bytes(region).unwrap() / PAGE_BYTES).sum()
    };
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    // Every page is dirty in each round, as if a balloon deflated all of them repeatedly. The guest
    // writes little meanwhile, however long that takes on a busy host.
    let pace = Pace::Paced(1, Duration::from_millis(20));
    let vm = FakeVm::new(&from, &guest).load(1, 1, pace).inject(Inject::Busy).running();
    let finished = send(vm, &options(&target.address)).unwrap();
    let here = pages(&from);
    target.join().unwrap().vm.stop();
    let there = pages(&to);
    assert!(finished.report.zero_pages > 2000, "{:?}", finished.report);
    // If the holes were populated, these would be all pages.
    assert!(here < 1000, "{here} pages at the source");
    assert!(there < 1000, "{there} pages at the destination");
    assert_whole(&guest, &to);
}
