// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guests that report unused pages, and use some of them again.

use std::time::Duration;

use super::{
    Builder, FakeVm, Guest, LIMITS, REGIONS, Target, assert_in_order, loopback, memory, options,
    send,
};
use crate::layout::PAGE_BYTES;
use crate::testing::Pace;
use crate::{DirtyClear, MemoryMode};

/// No page from this one on is in use.
const FREE_FROM: u64 = 512;

#[test]
fn free_pages_do_not_travel_and_those_that_are_used_again_do() {
    for (clear, connections) in
        [(DirtyClear::Slice, 1), (DirtyClear::Round, 1), (DirtyClear::Slice, 3)]
    {
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 91);
        guest.fill(&from, 100);
        // The vCPUs only write pages that are in use.
        let pace = Pace::Paced(64, Duration::from_micros(200));
        let builder = Builder::new(&to, &guest).load(2, 20, pace);
        let target = Target::start(&loopback(), builder, LIMITS);
        let mut options = options(&target.address);
        (options.dirty_clear, options.connections) = (clear, connections);
        let vm = FakeVm::new(&from, &guest).load(2, 20, pace).free_from(FREE_FROM).running();
        let calls = vm.calls();
        let finished = send(vm, &options).unwrap();
        target.join().unwrap().vm.stop();
        assert_eq!(guest.errors(), 0);
        let mut free = Vec::new();
        for (region, (_, pages)) in REGIONS.iter().enumerate() {
            free.extend((FREE_FROM + 1..*pages).step_by(2).map(|page| (region, page)));
        }
        assert_eq!(guest.wrong_pages(&to), free, "just the pages that were not used again");
        for (region, page) in free {
            let empty = (0..512).all(|word| {
                to.word(region, page, word).load(std::sync::atomic::Ordering::Relaxed) == 0
            });
            assert!(empty, "page {page} of region {region} holds something");
        }
        let named: u64 = REGIONS.iter().map(|(_, pages)| pages - FREE_FROM).sum();
        assert_eq!(finished.report.free_pages, Some(named), "in the first round all were left out");
        let total: u64 = REGIONS.iter().map(|(_, pages)| pages).sum();
        let in_use = (total - named / 2) * PAGE_BYTES;
        assert!(finished.report.memory_bytes_sent >= Some(in_use / 2));
        assert_in_order(&calls, &["hints done", "pause"]);
    }
}

#[test]
fn a_guest_that_takes_long_is_waited_for_while_it_names_more() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 93);
    guest.fill(&from, 100);
    let pace = Pace::Paced(64, Duration::from_micros(200));
    let builder = Builder::new(&to, &guest).load(1, 20, pace);
    let target = Target::start(&loopback(), builder, LIMITS);
    // Far longer than the wait for a guest that reports nothing.
    let vm = FakeVm::new(&from, &guest).load(1, 20, pace).free_from(FREE_FROM).slow_hints(60);
    let finished = send(vm.running(), &options(&target.address)).unwrap();
    target.join().unwrap().vm.stop();
    let named: u64 = REGIONS.iter().map(|(_, pages)| pages - FREE_FROM).sum();
    assert_eq!(finished.report.free_pages, Some(named));
}

#[test]
fn a_guest_without_hints_and_one_in_postcopy_are_not_asked() {
    if !super::have_uffd() {
        return;
    }
    for (mode, free_from) in [(MemoryMode::Precopy, None), (MemoryMode::Postcopy, Some(FREE_FROM))]
    {
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 92);
        guest.fill(&from, 60);
        let pace = Pace::Paced(64, Duration::from_micros(200));
        let builder = Builder::new(&to, &guest).load(2, 50, pace);
        let target = Target::start(&loopback(), builder, LIMITS);
        let mut options = options(&target.address);
        options.memory_mode = mode;
        let receiver = std::thread::spawn(move || {
            let received = target.join().unwrap();
            if let Some(faults) = received.faults {
                faults.wait().unwrap();
            }
            received.vm
        });
        let mut vm = FakeVm::new(&from, &guest).load(2, 50, pace);
        if let Some(page) = free_from {
            vm = vm.free_from(page);
        }
        let finished = send(vm.running(), &options).unwrap();
        receiver.join().unwrap().stop();
        super::assert_whole(&guest, &to);
        assert_eq!(finished.report.free_pages, Some(0));
    }
}
