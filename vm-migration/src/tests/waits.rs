// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Faults and the arrivals of their pages at the same moment, many times: no wait is left over,
//! which would end a healthy set of connections 10 s later.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use page_bitmap::PageBitmap;

use crate::destination::{Engine, Via};
use crate::fault::{Fault, FaultSource, FaultSourceKind, FaultWait};
use crate::layout::{Backing, GpaRange, PAGE_BYTES, PageRun};
use crate::testing::FakeMemory;
use crate::uffd::UffdError;
use crate::{Progress, Side};

/// A fault source without faults.
pub(super) struct NoFaults;

impl FaultSource for NoFaults {
    fn kind(&self) -> FaultSourceKind {
        FaultSourceKind::Uffd
    }

    fn readers(&self) -> usize {
        1
    }

    fn next_faults(&self, _: usize, _: &mut Vec<Fault>) -> Result<FaultWait, UffdError> {
        Ok(FaultWait::Stopped)
    }

    fn stop_readers(&self) {}

    fn receives_in_place(&self, _: usize) -> bool {
        true
    }

    fn make_present(&self, _: PageRun) -> Result<(), UffdError> {
        Ok(())
    }

    fn copy_in(&self, _: PageRun, _: &[u8]) -> Result<(), UffdError> {
        Ok(())
    }

    fn make_zero(&self, _: PageRun) -> Result<(), UffdError> {
        Ok(())
    }

    fn wake(&self, _: PageRun) -> Result<(), UffdError> {
        Ok(())
    }

    fn release(&self) -> Result<(), UffdError> {
        Ok(())
    }
}

/// Announces that this thread has reached a step, and waits for the other one to reach it.
fn meet(mine: &AtomicU64, other: &AtomicU64, step: u64) {
    mine.store(step, Ordering::SeqCst);
    let mut looks = 0_u32;
    while other.load(Ordering::SeqCst) < step {
        looks += 1;
        // With fewer processors than threads the other thread needs this one.
        if looks > 2000 { std::thread::yield_now() } else { std::hint::spin_loop() }
    }
}

#[test]
fn every_wait_ends_with_the_arrival_of_its_page() {
    const PAGES: u64 = 1 << 15;
    let memory = FakeMemory::new(&[(0, PAGES)], Backing::Shared, PAGE_BYTES).unwrap();
    let map = PageBitmap::new(PAGES);
    map.set_range(0..PAGES);
    let progress = Arc::new(Progress::new(Side::Destination));
    let engine = Engine::with_missing(&memory, Arc::new(NoFaults), vec![map], progress).unwrap();
    let (reader, receiver) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for page in 0..PAGES {
                meet(&reader, &receiver, page + 1);
                (0..page % 13).for_each(|_| std::hint::spin_loop());
                engine.take_faults(&[Fault { region: 0, page, thread: None }]).unwrap();
            }
        });
        for page in 0..PAGES {
            meet(&receiver, &reader, page + 1);
            (0..page % 7).for_each(|_| std::hint::spin_loop());
            let range = GpaRange { gpa: page * PAGE_BYTES, len_bytes: PAGE_BYTES };
            engine.take_zeros(&[range], Via::Bulk).unwrap();
        }
    });
    assert!(engine.complete().is_cancelled());
    assert_eq!(engine.longest_wait(), Duration::ZERO, "a wait lasts for a page that is here");
}
