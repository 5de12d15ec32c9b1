// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Discards resident pages of memory whose contents will arrive (again).
//!
//! Owns the translation of a set of units into few system calls: residency is read for a stretch at once,
//! and resident pages are discarded in runs that span gaps without resident pages. It also owns the check:
//! residency of shared memory is read again, because punching a hole into a huge page that the kernel
//! cannot split at that moment leaves a page of zeros, and only absent pages fault. It must run before
//! the guest does, and not while contents arrive.

use std::io;
use std::ops::Range;
use std::time::Duration;

use page_bitmap::PageBitmap;

use crate::cancel::Cancel;
use crate::error::Cause;
use crate::layout::{Backing, PAGE_BYTES, PageRun};
use crate::ram::GuestMemoryMap;

/// Pages per look-up: 256 MiB, for which the kernel writes 64 KiB.
const STRETCH_PAGES: u64 = 64 << 10;

/// How often a page that is still present is discarded again. What keeps the kernel from splitting a huge
/// page, a reference to it, is usually gone within milliseconds.
const TRIES: u32 = 20;

/// Time between two of these attempts.
const PAUSE: Duration = Duration::from_millis(5);

/// Discards these units of a region, so that the host holds nothing of them.
///
/// # Errors
/// A cancel, what the host reports, and pages that stay although they were discarded: the guest would see
/// zeros there.
pub(super) fn empty_units<M: GuestMemoryMap>(
    memory: &M,
    region: usize,
    units: &PageBitmap,
    cancel: &Cancel,
) -> Result<(), Cause> {
    let info = &memory.layout().regions()[region];
    let unit_pages = info.host_page_bytes / PAGE_BYTES;
    // In private memory and large pages no part of a page can stay.
    let can_stay = info.backing == Backing::Shared && unit_pages == 1;
    let step = STRETCH_PAGES.next_multiple_of(unit_pages);
    let mut first = 0;
    while first < info.pages() {
        let pages = first..(first + step).min(info.pages());
        first = pages.end;
        if cancel.is_cancelled() {
            return Err(Cause::Cancelled);
        }
        let in_units = pages.start / unit_pages..pages.end / unit_pages;
        if !units.any(in_units) {
            continue;
        }
        for try_number in 0.. {
            let held = held_of(memory, region, &pages, units, unit_pages)?;
            if held.is_empty() {
                break;
            }
            if try_number >= TRIES {
                let first = held[0].first;
                return Err(Cause::Memory(io::Error::other(format!(
                    "page {first} of memory region {} stays in the host's page cache although it \
                     was discarded: the guest would find zeros there (are huge pages forced on \
                     shared memory, shmem_enabled?)",
                    info.name
                ))));
            }
            if try_number > 0 {
                std::thread::sleep(PAUSE);
            }
            for run in held {
                memory.discard(run).map_err(Cause::Memory)?;
            }
            if !can_stay {
                break;
            }
        }
    }
    Ok(())
}

/// The runs of whole units of which the host holds pages. A run may span pages of which it holds none.
fn held_of<M: GuestMemoryMap>(
    memory: &M,
    region: usize,
    pages: &Range<u64>,
    units: &PageBitmap,
    unit_pages: u64,
) -> Result<Vec<PageRun>, Cause> {
    let populated = memory.populated_runs(region, pages.clone()).map_err(Cause::Memory)?;
    let mut held: Vec<PageRun> = Vec::new();
    // True when the last run of `held` reaches the end of the populated range before this one.
    let mut to_the_end = false;
    for there in populated {
        let there_units = there.start / unit_pages..there.end.div_ceil(unit_pages);
        let mut end_of_last = None;
        for run in units.runs_in(there_units.clone()) {
            let joins = to_the_end && run.start == there_units.start;
            match held.last_mut() {
                Some(last) if joins => last.count = run.end * unit_pages - last.first,
                _ => held.push(PageRun {
                    region,
                    first: run.start * unit_pages,
                    count: (run.end - run.start) * unit_pages,
                }),
            }
            to_the_end = false;
            end_of_last = Some(run.end);
        }
        to_the_end = end_of_last == Some(there_units.end);
    }
    Ok(held)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::testing::FakeMemory;

    fn memory(populated: &[u64]) -> Arc<FakeMemory> {
        let memory = FakeMemory::new(&[(0, 600)], Backing::Shared, PAGE_BYTES).unwrap();
        for page in populated {
            memory.word(0, *page, 0).store(1, std::sync::atomic::Ordering::Relaxed);
        }
        memory
    }

    fn units(set: impl IntoIterator<Item = u64>) -> PageBitmap {
        let map = PageBitmap::new(600);
        for unit in set {
            map.set(unit);
        }
        map
    }

    fn empty(memory: &FakeMemory, units: &PageBitmap) -> Result<(), Cause> {
        empty_units(memory, 0, units, &Cancel::new().unwrap())
    }

    fn held(memory: &FakeMemory) -> Vec<u64> {
        memory.populated_runs(0, 0..600).unwrap().into_iter().flatten().collect()
    }

    #[test]
    fn runs_reach_over_gaps_in_which_nothing_is_and_no_further() {
        let memory = memory(&[1, 2, 5, 9, 10, 11, 300]);
        empty(&memory, &units([0, 1, 2, 3, 5, 7, 9, 11, 12, 299, 300])).unwrap();
        assert_eq!(held(&memory), [10]);
        // 1 to 9 in one call, 11 to 300 in another.
        assert_eq!(memory.discards(), (2, 9 + 290));
    }

    #[test]
    fn units_of_which_the_host_holds_nothing_cost_no_call() {
        let memory = memory(&[7]);
        empty(&memory, &units((0..600).filter(|unit| *unit != 7))).unwrap();
        assert_eq!(memory.discards(), (0, 0));
    }

    #[test]
    fn a_page_that_stays_is_found_before_the_guest_can_be() {
        let memory = memory(&[1, 2, 3]);
        memory.keep_discarded(2);
        let error = empty(&memory, &units([1, 2])).unwrap_err();
        let told = error_text::chain(&error);
        assert!(told.contains("page 2 ") && told.contains("page cache"), "{told}");
    }

    /// A huge page at the beginning of a region's file, and a reference to a part of it, as a page in a pipe
    /// has, that keeps the kernel from splitting it. `None` where the host makes no huge page.
    struct Unsplittable {
        start: *mut libc::c_void,
        pipe: [libc::c_int; 2],
    }

    impl Unsplittable {
        const LEN: usize = 2 << 20;

        fn new(memory: &FakeMemory) -> Option<Self> {
            use std::os::fd::AsRawFd;
            let file = memory.file(0).unwrap().as_raw_fd();
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: new mappings at addresses of the kernel's choice, the second over the first one,
            // which is ours; populating and collapsing change no contents.
            unsafe {
                let room =
                    libc::mmap(std::ptr::null_mut(), 2 * Self::LEN, protection, flags, -1, 0);
                assert_ne!(room, libc::MAP_FAILED);
                let start = room.byte_add(room.align_offset(Self::LEN));
                let fixed = libc::MAP_SHARED | libc::MAP_FIXED;
                let mapped = libc::mmap(start, Self::LEN, protection, fixed, file, 0);
                assert_eq!(mapped, start);
                assert_eq!(libc::madvise(start, Self::LEN, libc::MADV_POPULATE_WRITE), 0);
                if libc::madvise(start, Self::LEN, libc::MADV_COLLAPSE) != 0 {
                    return None;
                }
                let mut pipe = [0; 2];
                assert_eq!(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC), 0);
                let page = libc::iovec { iov_base: start, iov_len: 4096 };
                assert_eq!(libc::vmsplice(pipe[1], &raw const page, 1, 0), 4096);
                Some(Self { start, pipe })
            }
        }
    }

    impl Drop for Unsplittable {
        fn drop(&mut self) {
            for end in self.pipe {
                // SAFETY: our own descriptor, closed once.
                unsafe { libc::close(end) };
            }
            // SAFETY: our own mapping, which no code uses any more.
            unsafe { libc::munmap(self.start, Self::LEN) };
        }
    }

    #[test]
    fn a_hole_in_a_huge_page_that_cannot_be_split_is_found() {
        let memory = memory(&[]);
        let Some(huge) = Unsplittable::new(&memory) else {
            test_skip::skip!("this host makes no huge pages of shared memory");
            return;
        };
        let error = empty(&memory, &units([7])).unwrap_err();
        assert!(error_text::chain(&error).contains("page 7 "), "{error:?}");
        // It reads as zeros and is present: no access would fault.
        assert!(held(&memory).contains(&7));
        drop(huge);
        empty(&memory, &units([7])).unwrap();
        assert!(!held(&memory).contains(&7) && held(&memory).contains(&8));
    }

    proptest! {
        #[test]
        fn what_is_named_goes_and_nothing_else(
            there in prop::collection::btree_set(0u64..600, 0..80),
            named in prop::collection::btree_set(0u64..600, 0..300),
        ) {
            let memory = memory(&there.iter().copied().collect::<Vec<_>>());
            empty(&memory, &units(named.iter().copied())).unwrap();
            let left: Vec<u64> = there.difference(&named).copied().collect();
            prop_assert_eq!(held(&memory), left);
        }
    }
}
