// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! userfaultfd on fake memory: which threads wait, which are woken, what they see.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Mapping, Receipt, Uffd, UffdError, check, split};
use crate::fault::{Fault, FaultSource, FaultWait};
use crate::layout::{Backing, PAGE_BYTES, PageRun, RegionInfo};
use crate::ram::{GuestMemoryMap, slice};
use crate::testing::FakeMemory;

const PAGES: u64 = 64;

fn run(first: u64, count: u64) -> PageRun {
    PageRun { region: 0, first, count }
}

/// Watched memory, or `None` where that is not permitted.
fn watched(backing: Backing) -> Option<(Arc<FakeMemory>, Arc<Uffd<FakeMemory>>)> {
    let memory = FakeMemory::new(&[(0, PAGES)], backing, PAGE_BYTES).unwrap();
    if let Err(error) = check(memory.layout().regions()) {
        test_skip::skip!("{error}");
        return None;
    }
    let uffd = Arc::new(Uffd::register(Arc::clone(&memory), 1).unwrap());
    Some((memory, uffd))
}

/// Touches a page on another thread, has `resolve` handle the fault, and returns what was read.
fn touch(
    memory: &Arc<FakeMemory>,
    uffd: &Uffd<FakeMemory>,
    page: u64,
    resolve: impl FnOnce(Fault),
) -> u64 {
    let reader = {
        let memory = Arc::clone(memory);
        std::thread::spawn(move || memory.word(0, page, 5).load(Ordering::Relaxed))
    };
    let mut faults = Vec::new();
    assert_eq!(uffd.next_faults(0, &mut faults).unwrap(), FaultWait::Faults);
    assert_eq!((faults.len(), faults[0].region, faults[0].page), (1, 0, page));
    assert!(faults[0].thread.is_some_and(|thread| thread > 0));
    resolve(faults[0]);
    reader.join().unwrap()
}

#[test]
fn a_received_page_is_invisible_until_it_is_shown() {
    let Some((memory, uffd)) = watched(Backing::Shared) else { return };
    slice(&*memory, run(7, 1)).write(&[3; 4096]);
    let read = touch(&memory, &uffd, 7, |_| uffd.make_present(run(7, 1)).unwrap());
    assert_eq!(read, u64::from_le_bytes([3; 8]));
}

#[test]
fn a_hole_becomes_zeros_and_a_page_with_contents_keeps_them() {
    let Some((memory, uffd)) = watched(Backing::Shared) else { return };
    assert_eq!(touch(&memory, &uffd, 9, |_| uffd.make_zero(run(9, 1)).unwrap()), 0);
    slice(&*memory, run(10, 1)).write(&[4; 4096]);
    let read = touch(&memory, &uffd, 10, |_| uffd.make_zero(run(10, 1)).unwrap());
    assert_eq!(read, u64::from_le_bytes([4; 8]));
}

#[test]
fn whole_runs_are_shown_past_pages_that_are_there_already() {
    let Some((memory, uffd)) = watched(Backing::Shared) else { return };
    slice(&*memory, run(0, PAGES)).write(&vec![5; 4096 * 64]);
    uffd.make_present(run(3, 2)).unwrap();
    uffd.make_present(run(0, PAGES)).unwrap();
    uffd.make_present(run(0, PAGES)).unwrap();
    for page in 0..PAGES {
        assert_eq!(memory.word(0, page, 1).load(Ordering::Relaxed), u64::from_le_bytes([5; 8]));
    }
}

#[test]
fn showing_a_page_that_never_came_is_an_error_and_not_zeros() {
    let Some((_memory, uffd)) = watched(Backing::Shared) else { return };
    let shown = uffd.make_present(run(20, 1));
    assert!(matches!(shown, Err(UffdError::Pages { .. })), "{shown:?}");
}

#[test]
fn anonymous_memory_is_filled_by_copy_and_never_twice() {
    let Some((memory, uffd)) = watched(Backing::Anonymous) else { return };
    assert!(!uffd.receives_in_place(0));
    uffd.copy_in(run(2, 1), &[6; 4096]).unwrap();
    let bytes = vec![7; 4096 * 4];
    let read = touch(&memory, &uffd, 3, |_| uffd.copy_in(run(1, 4), &bytes).unwrap());
    assert_eq!(read, u64::from_le_bytes([7; 8]));
    let kept = memory.word(0, 2, 0).load(Ordering::Relaxed);
    assert_eq!(kept, u64::from_le_bytes([6; 8]), "a page that was there was overwritten");
    assert_eq!(touch(&memory, &uffd, 30, |_| uffd.make_zero(run(30, 1)).unwrap()), 0);
}

/// Ready memory, of which only missing pages would be watched if it were not.
fn ready() -> Option<(Arc<FakeMemory>, Arc<Uffd<FakeMemory>>)> {
    let memory = FakeMemory::new(&[(0, PAGES)], Backing::Shared, PAGE_BYTES).unwrap();
    if let Err(error) = check(memory.layout().regions()) {
        test_skip::skip!("{error}");
        return None;
    }
    memory.make_ready().unwrap();
    let uffd = Arc::new(Uffd::register_missing(Arc::clone(&memory), 1).unwrap());
    Some((memory, uffd))
}

#[test]
fn a_page_of_ready_memory_waits_for_its_contents() {
    let Some((memory, uffd)) = ready() else { return };
    assert!(uffd.receives_in_place(0) && !uffd.prefers_copies_of_small_runs(0));
    let read = touch(&memory, &uffd, 7, |_| {
        slice(&*memory, run(7, 1)).write(&[3; 4096]);
        uffd.make_present(run(7, 1)).unwrap();
    });
    assert_eq!(read, u64::from_le_bytes([3; 8]));
    assert!(uffd.copy_in(run(8, 1), &[4; 4096]).is_err(), "there is no page to copy into");
}

#[test]
fn zeros_of_ready_memory_are_the_pages_that_are_there() {
    let Some((memory, uffd)) = ready() else { return };
    assert_eq!(touch(&memory, &uffd, 9, |_| uffd.make_zero(run(9, 1)).unwrap()), 0);
    // The guest gives pages back meanwhile: some that it sees, and others.
    memory.discard(run(9, 3)).unwrap();
    let read = touch(&memory, &uffd, 9, |_| uffd.make_zero(run(8, 5)).unwrap());
    assert_eq!(read, 0);
    for page in 8..13 {
        assert_eq!(memory.word(0, page, 0).load(Ordering::Relaxed), 0, "page {page} waits");
    }
    assert_eq!(memory.populated_bytes(0).unwrap(), PAGES * PAGE_BYTES);
    slice(&*memory, run(20, 1)).write(&[4; 4096]);
    let read = touch(&memory, &uffd, 20, |_| uffd.make_zero(run(20, 1)).unwrap());
    assert_eq!(read, u64::from_le_bytes([4; 8]), "what is there is kept");
}

#[test]
fn pages_that_are_there_are_shown_up_to_the_first_that_is_not() {
    let Some((memory, uffd)) = ready() else { return };
    assert!(uffd.holds_all_pages(0));
    memory.discard(run(30, 1)).unwrap();
    uffd.make_present(run(8, 1)).unwrap();
    uffd.show_more(run(5, 40));
    let mapped = (0..PAGES).filter(|page| memory.is_mapped(0, *page, false).unwrap());
    assert_eq!(mapped.collect::<Vec<_>>(), (5..30).collect::<Vec<_>>());
    assert_eq!(memory.populated_bytes(0).unwrap(), (PAGES - 1) * PAGE_BYTES);
}

#[test]
fn pages_behind_a_few_that_are_mapped_are_shown_and_behind_many_are_not() {
    let Some((memory, uffd)) = ready() else { return };
    let mapped = || (0..PAGES).filter(|page| memory.is_mapped(0, *page, false).unwrap());
    uffd.make_present(run(8, 7)).unwrap();
    uffd.show_more(run(5, 15));
    assert_eq!(mapped().collect::<Vec<_>>(), (5..20).collect::<Vec<_>>());
    uffd.show_more(run(10, 20));
    assert_eq!(mapped().collect::<Vec<_>>(), (5..20).collect::<Vec<_>>());
}

#[test]
fn release_wakes_every_waiter_and_later_operations_do_nothing() {
    let Some((memory, uffd)) = watched(Backing::Shared) else { return };
    assert_eq!(touch(&memory, &uffd, 1, |_| uffd.release().unwrap()), 0);
    uffd.make_zero(run(40, 2)).unwrap();
    uffd.make_present(run(1, 1)).unwrap();
    assert_eq!(memory.word(0, 50, 0).load(Ordering::Relaxed), 0);
}

#[test]
fn a_failed_unregister_keeps_nothing_else_and_is_retried() {
    let memory =
        FakeMemory::new(&[(0, PAGES), (1 << 32, PAGES)], Backing::Shared, PAGE_BYTES).unwrap();
    if check(memory.layout().regions()).is_err() {
        return;
    }
    let mut uffd = Uffd::register(Arc::clone(&memory), 1).unwrap();
    let reads = |region| {
        let (memory, (done, read)) = (Arc::clone(&memory), std::sync::mpsc::channel());
        std::thread::spawn(move || done.send(memory.word(region, 1, 0).load(Ordering::Relaxed)));
        read
    };
    let patience = std::time::Duration::from_mins(1);
    // Not a page-aligned range, so it is refused.
    let first = uffd.watched.get_mut().first_mut().unwrap();
    first.address += 1;
    let refused = uffd.release();
    assert!(matches!(refused, Err(UffdError::Pages { region: 0, .. })), "{refused:?}");
    assert_eq!(reads(1).recv_timeout(patience), Ok(0), "it is watched still");
    let waits = reads(0);
    let mut faults = Vec::new();
    assert_eq!(uffd.next_faults(0, &mut faults).unwrap(), FaultWait::Faults);
    uffd.watched.get_mut()[0].address -= 1;
    uffd.release().unwrap();
    assert_eq!(waits.recv_timeout(patience), Ok(0), "it was not tried again");
}

#[test]
fn readers_stop_when_asked() {
    let Some((_memory, uffd)) = watched(Backing::Shared) else { return };
    let reader = {
        let uffd = Arc::clone(&uffd);
        std::thread::spawn(move || uffd.next_faults(0, &mut Vec::new()).unwrap())
    };
    uffd.stop_readers();
    assert_eq!(reader.join().unwrap(), FaultWait::Stopped);
}

#[test]
fn memory_is_dealt_out_without_gaps_and_never_inside_a_huge_page() {
    let mib = 256;
    let regions = [(0, 100 * mib), (1 << 32, 300 * mib + 7), (1 << 33, 1)];
    let memory = FakeMemory::new(&regions, Backing::Shared, PAGE_BYTES).unwrap();
    let receipts = [Receipt::InPlace; 3];
    let parts = split(&*memory, 64 << 20, Mapping::Main, &receipts).unwrap();
    for (region, info) in memory.layout().regions().iter().enumerate() {
        let mut next = 0;
        for part in parts.iter().filter(|part| part.region == region) {
            assert_eq!(part.first, next);
            next += part.pages;
        }
        assert_eq!(next, info.pages());
    }
    let descriptors = parts.iter().map(|part| part.descriptor).max().unwrap() + 1;
    assert_eq!(descriptors, 7);
}

#[test]
fn gigabyte_pages_are_refused_with_what_to_do() {
    let region = RegionInfo {
        name: "huge".into(),
        gpa: 0,
        len_bytes: 1 << 30,
        host_page_bytes: 1 << 30,
        backing: Backing::Shared,
    };
    let error = check(&[region]).unwrap_err().to_string();
    assert!(error.contains("huge") && error.contains("memory_mode=precopy"), "{error}");
}

#[test]
fn the_lack_of_permission_says_what_to_change() {
    let error = UffdError::NotPermitted(std::io::Error::from_raw_os_error(libc::EPERM));
    let text = error.to_string();
    assert!(text.contains("vm.unprivileged_userfaultfd") && text.contains("/dev/userfaultfd"));
}
