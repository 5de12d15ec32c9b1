// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Precopy that becomes postcopy: by itself, by the clock and on command, in the middle of a round
//! and between two; pages that have been sent and written since never show their old contents.

use std::sync::Arc;
use std::time::Duration;

use super::moves::Case;
use super::{have_uffd, loopback, memory};
use crate::layout::{Backing, PAGE_BYTES};
use crate::progress::Phase;
use crate::testing::FakeMemory;
use crate::{Convergence, DirtyClear, MemoryMode, SendOptions};

/// No guest can be moved with so little downtime.
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
    assert_eq!((destination.faults.seen, destination.faults.bulk_pages), (0, 0));
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
            options.urgent_connections = u16::try_from(seed % 3).unwrap();
        });
        assert_eq!((source.phase, destination.phase), (Phase::Done, Phase::Done));
        let moved = &destination.faults;
        let pages = moved.bulk_pages + moved.urgent_pages + moved.prefetched_pages;
        // A guest that got no processor during a round needed no further one.
        assert!(source.round >= 3 || pages == 0, "{source:?}");
        assert!(pages < 3073, "{pages} of all pages");
        followed += pages;
    }
    assert!(followed > 0);
}

#[test]
fn anonymous_memory_is_discarded_where_it_is_stale() {
    if !have_uffd() {
        return;
    }
    for seed in 1..=5 {
        Case::new(anonymous(), anonymous(), seed).go(&loopback(), out_of_reach);
        Case::new(memory(), anonymous(), seed).go(&loopback(), out_of_reach);
    }
}

#[test]
fn the_clock_and_a_person_end_a_round_in_its_middle() {
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
        assert_eq!(source.round, 1);
    }
}

#[test]
fn convergence_by_postcopy_is_the_same() {
    if !have_uffd() {
        return;
    }
    // A guest that gets no processor during a round has converged.
    let postcopied = (1..=20).any(|seed| {
        let (_, destination) = Case::new(memory(), memory(), seed).go(&loopback(), |options| {
            options.convergence = Convergence::Postcopy;
            options.downtime = Duration::from_micros(1);
        });
        destination.faults.source.is_some()
    });
    assert!(postcopied);
}
