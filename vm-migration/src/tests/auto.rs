// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Precopy that switches to postcopy: by itself, after a time and on request, in the middle of a
//! round and between two. Pages that were sent and have been written since never show their old
//! contents.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::moves::Case;
use super::relay::{Relay, Rule};
use super::{LIMITS, Target, assert_whole, have_uffd, loopback, memory, migrate, options, send};
use crate::layout::{Backing, PAGE_BYTES};
use crate::progress::{Event, Observer, Phase};
use crate::protocol::capabilities::FEATURE_STALE;
use crate::testing::{Builder, FakeMemory, FakeVm, Guest, Inject, Pace};
use crate::{Cancel, Convergence, DirtyClear, MemoryMode, Progress, SendOptions, Side, Steering};

/// Sets options with a downtime that no guest reaches.
pub(super) fn out_of_reach(options: &mut SendOptions) {
    options.memory_mode = MemoryMode::Auto;
    options.convergence = Convergence::None;
    options.downtime = Duration::from_micros(1);
}

fn anonymous() -> Arc<FakeMemory> {
    FakeMemory::new(super::REGIONS, Backing::Anonymous, PAGE_BYTES).unwrap()
}

#[test]
fn a_guest_that_converges_never_needs_postcopy() {
    if !have_uffd() {
        return;
    }
    let (source, destination) = Case::new(memory(), memory(), 3).go(&loopback(), |options| {
        options.memory_mode = MemoryMode::Auto;
        options.downtime = Duration::from_secs(10);
    });
    assert_eq!((source.phase, destination.phase), (Phase::Done, Phase::Done));
    assert_eq!((destination.faults.seen, destination.faults.bulk_pages), (Some(0), 0));
}

#[test]
fn a_guest_that_does_not_converge_is_moved_twenty_times() {
    if !have_uffd() {
        return;
    }
    let mut followed = 0;
    for seed in 1..=20 {
        let case = Case::new(memory(), memory(), seed);
        let (source, destination) = case.go(&loopback(), |options| {
            out_of_reach(options);
            options.connections = if seed % 2 == 0 { 1 } else { 3 };
            options.urgent_connections = Some(u16::try_from(seed % 3).unwrap());
        });
        assert_eq!((source.phase, destination.phase), (Phase::Done, Phase::Done));
        let moved = &destination.faults;
        let pages = moved.bulk_pages + moved.urgent_pages + moved.prefetched_pages;
        // A guest that got no processor time during a round needed no further one.
        assert!(source.round >= Some(3) || pages == 0, "{source:?}");
        assert!(pages < 3073, "{pages} of all pages");
        followed += pages;
    }
    assert!(followed > 0);
}

#[test]
pub(super) fn anonymous_memory_is_discarded_where_it_is_stale() {
    if !have_uffd() {
        return;
    }
    for seed in 1..=5 {
        Case::new(anonymous(), anonymous(), seed).go(&loopback(), out_of_reach);
        Case::new(memory(), anonymous(), seed).go(&loopback(), out_of_reach);
    }
}

#[test]
pub(super) fn the_clock_and_the_operator_end_a_round_in_its_middle() {
    if !have_uffd() {
        return;
    }
    for clear in [DirtyClear::Slice, DirtyClear::Round] {
        for after_us in [0, 300, 1000, 3000, 10_000] {
            Case::new(memory(), memory(), after_us + 1).go(&loopback(), |options| {
                out_of_reach(options);
                options.dirty_clear = clear;
                options.postcopy_after = Some(Duration::from_micros(after_us));
            });
        }
        let (source, _) = Case::new(memory(), memory(), 5).go(&loopback(), |options| {
            out_of_reach(options);
            options.dirty_clear = clear;
            options.steering.start_postcopy();
        });
        assert_eq!(source.round, Some(1));
    }
}

#[test]
fn holes_that_no_round_has_come_to_stay_holes() {
    if !have_uffd() {
        return;
    }
    for (clear, filled) in [(DirtyClear::Slice, 0..100), (DirtyClear::Round, 50..60)] {
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 3);
        guest.fill_all(&from, 0, filled);
        let populated = |memory: &FakeMemory| {
            memory.populated_bytes(0).unwrap() + memory.populated_bytes(1).unwrap()
        };
        let before = populated(&from);
        let idle = Pace::Full;
        let builder = Builder::new(&to, &guest).load(0, 0, idle);
        let target = Target::start(&loopback(), builder, LIMITS);
        let mut options = options(&target.address);
        out_of_reach(&mut options);
        options.dirty_clear = clear;
        options.steering.start_postcopy();
        let progress = Arc::clone(&target.progress);
        let receiver = std::thread::spawn(move || {
            let received = target.join().unwrap();
            received.faults.unwrap().wait().unwrap();
            received.vm
        });
        send(FakeVm::new(&from, &guest).load(0, 0, idle).running(), &options).unwrap();
        receiver.join().unwrap().stop();
        assert_eq!(populated(&from), before, "{clear:?}: holes at the source have become pages");
        let moved = progress.snapshot().faults;
        let pages = moved.bulk_pages + moved.urgent_pages + moved.prefetched_pages;
        assert_eq!(pages * PAGE_BYTES, before, "{clear:?}: more is sent than there was");
        assert_whole(&guest, &to);
    }
}

/// Stops the guest's writes in the second round, requests postcopy, and records what the
/// destination has discarded when the guest stops.
struct AtStop {
    from: Arc<FakeMemory>,
    to: Arc<FakeMemory>,
    steering: Steering,
    discarded: Arc<Mutex<Option<(u64, u64)>>>,
}

impl Observer for AtStop {
    fn event(&self, _: Side, event: Event) {
        match event {
            Event::Round { round: 2, .. } => {
                self.from.set_calm(true);
                self.steering.start_postcopy();
            }
            Event::Begin(Phase::Stop) => {
                *self.discarded.lock() = Some(self.to.discards());
            }
            _ => {}
        }
    }
}

/// Pages that are discarded before and after the stop.
fn discarded(rule: Rule) -> (u64, u64) {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 11);
    guest.fill(&from, 60);
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let relay = Relay::start(&target.address, rule);
    let mut options = options(&relay.address);
    out_of_reach(&mut options);
    let discarded = Arc::default();
    let observer = AtStop {
        from: Arc::clone(&from),
        to: Arc::clone(&to),
        steering: options.steering.clone(),
        discarded: Arc::clone(&discarded),
    };
    let progress = Arc::new(Progress::observed(Side::Source, Box::new(observer)));
    let receiver = std::thread::spawn(move || {
        let received = target.join().unwrap();
        received.faults.unwrap().wait().unwrap();
        received.vm
    });
    let vm = FakeVm::new(&from, &guest).inject(Inject::Busy).running();
    migrate(vm, &options, &progress, &Cancel::new().unwrap()).unwrap();
    receiver.join().unwrap().stop();
    assert_whole(&guest, &to);
    let before = discarded.lock().unwrap().1;
    (before, to.discards().1 - before)
}

#[test]
fn what_is_old_is_thrown_away_before_the_guest_stops() {
    if !have_uffd() {
        return;
    }
    let (before, after) = discarded(Rule::Nothing);
    assert!(before > 1000, "{before} pages");
    assert_eq!(after, 0, "nothing was written since");
    let (before, after) = discarded(Rule::Without(FEATURE_STALE));
    assert_eq!(before, 0, "an older peer knows nothing of it");
    assert!(after > 1000, "{after} pages");
}

#[test]
fn convergence_by_postcopy_is_the_same() {
    if !have_uffd() {
        return;
    }
    // A guest that gets no processor time during a round has converged.
    let postcopied = (1..=20).any(|seed| {
        let (_, destination) = Case::new(memory(), memory(), seed).go(&loopback(), |options| {
            options.convergence = Convergence::Postcopy;
            options.downtime = Duration::from_micros(1);
        });
        destination.faults.source.is_some()
    });
    assert!(postcopied);
}
