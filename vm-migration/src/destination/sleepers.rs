// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that fetch their own pages, and sleep until they are here.
//!
//! Owns a bed for each such thread: the page that it needs, and the thread. A thread first writes
//! the page into its bed, then notes its wish and looks whether the page is missing; an arrival
//! clears `missing`, then looks for wishes and goes through the beds. Each has a fence between its
//! two steps, so that one of the two sees the other. A sleeper may also be woken by whoever wants
//! something else of its thread (a kick of a vCPU): waking is an unpark, which is never lost, and
//! who wakes looks again. It must never decide what is missing.

#[cfg(loom)]
use loom::{
    sync::Mutex,
    sync::atomic::{AtomicU64, Ordering},
    thread::{self, Thread},
};
use std::sync::PoisonError;
#[cfg(not(loom))]
use std::{
    sync::Mutex,
    sync::atomic::{AtomicU64, Ordering},
    thread::{self, Thread},
};

/// Bits of a key that hold the unit; the region is above them.
const UNIT_BITS: u32 = 48;

/// No page.
const EMPTY: u64 = 0;

fn key(region: usize, unit: u64) -> u64 {
    ((region as u64) << UNIT_BITS | unit) + 1
}

struct Bed {
    /// [`EMPTY`], or the key of the page.
    page: AtomicU64,
    /// Who lies in it. Held for one look, by its thread and by whoever brings its page.
    thread: Mutex<Option<Thread>>,
}

/// The beds.
pub(crate) struct Sleepers(Box<[Bed]>);

/// A thread that lies in its bed; it gets up when this is dropped.
pub(crate) struct Lying<'a>(&'a Bed);

impl Sleepers {
    pub(crate) fn new(beds: usize) -> Self {
        let bed = || Bed { page: AtomicU64::new(EMPTY), thread: Mutex::new(None) };
        Self((0..beds).map(|_| bed()).collect())
    }

    /// The calling thread needs this page; to be called before it looks whether that is missing.
    /// `None` when there is no such bed.
    pub(crate) fn lie_down(&self, bed: usize, region: usize, unit: u64) -> Option<Lying<'_>> {
        let bed = self.0.get(bed)?;
        *bed.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
        bed.page.store(key(region, unit), Ordering::SeqCst);
        Some(Lying(bed))
    }

    /// A page is here, and visible: to be called after it was found that somebody wants it.
    pub(crate) fn wake(&self, region: usize, unit: u64) {
        let page = key(region, unit);
        for bed in self.0.iter().filter(|bed| bed.page.load(Ordering::SeqCst) == page) {
            if let Some(thread) = &*bed.thread.lock().unwrap_or_else(PoisonError::into_inner) {
                thread.unpark();
            }
        }
    }
}

impl Lying<'_> {
    /// Sleeps until the page has come, or somebody wants something else of this thread.
    pub(crate) fn sleep(&self) {
        debug_assert_ne!(self.0.page.load(Ordering::Relaxed), EMPTY);
        thread::park();
    }
}

impl Drop for Lying<'_> {
    fn drop(&mut self) {
        self.0.page.store(EMPTY, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

    use std::sync::Arc;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn who_sleeps_for_another_page_is_left_alone() {
        let sleepers = Arc::new(Sleepers::new(2));
        let (lies, told) = mpsc::channel();
        let (up, got_up) = mpsc::channel();
        let mut threads = Vec::new();
        for (bed, unit) in [(0, 7), (1, 8)] {
            let (sleepers, lies, up) = (Arc::clone(&sleepers), lies.clone(), up.clone());
            threads.push(std::thread::spawn(move || {
                let lying = sleepers.lie_down(bed, 1, unit).unwrap();
                lies.send(()).unwrap();
                lying.sleep();
                up.send(bed).unwrap();
            }));
        }
        let _ = (told.recv().unwrap(), told.recv().unwrap());
        sleepers.wake(0, 7);
        sleepers.wake(1, 8);
        assert_eq!(got_up.recv().unwrap(), 1);
        assert!(got_up.try_recv().is_err());
        sleepers.wake(1, 7);
        assert_eq!(got_up.recv().unwrap(), 0);
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(sleepers.0.iter().all(|bed| bed.page.load(Ordering::SeqCst) == EMPTY));
        assert!(sleepers.lie_down(2, 0, 0).is_none());
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;

    use super::*;
    use crate::bitmap::{ClaimMap, change_then_look};

    struct Page {
        missing: ClaimMap,
        wanted: ClaimMap,
        sleepers: Sleepers,
    }

    impl Page {
        fn new(beds: usize) -> Arc<Self> {
            let (missing, wanted) = (ClaimMap::new(1), ClaimMap::new(1));
            missing.set(0);
            Arc::new(Self { missing, wanted, sleepers: Sleepers::new(beds) })
        }

        /// As the engine does; true for the one that asks. Enters the guest again and again until
        /// the page is there, or `leave` says that the vCPU is to stop.
        fn fault(&self, bed: usize, leave: Option<&AtomicBool>) -> bool {
            let mut asked = false;
            loop {
                if leave.is_some_and(|leave| leave.load(Ordering::SeqCst)) {
                    return asked;
                }
                let lying = self.sleepers.lie_down(bed, 0, 0).unwrap();
                let first = self.wanted.set(0);
                change_then_look();
                if !self.missing.get(0) {
                    return asked;
                }
                asked |= first;
                lying.sleep();
            }
        }

        fn arrive(&self) {
            self.missing.claim(0);
            change_then_look();
            if self.wanted.get(0) {
                self.sleepers.wake(0, 0);
            }
        }
    }

    /// A vCPU sleeps for its page while that arrives: it always gets up (a model in which it does
    /// not ends in a deadlock).
    #[test]
    fn a_sleeper_and_the_arrival_of_its_page_never_miss_each_other() {
        loom::model(|| {
            let page = Page::new(1);
            let vcpu = {
                let page = Arc::clone(&page);
                thread::spawn(move || page.fault(0, None))
            };
            page.arrive();
            vcpu.join().unwrap();
        });
    }

    /// Two vCPUs need one page: at most one asks, and both get up.
    #[test]
    fn two_sleepers_for_one_page_ask_once_and_both_get_up() {
        let mut bounded = loom::model::Builder::new();
        bounded.preemption_bound = Some(3);
        bounded.check(|| {
            let page = Page::new(2);
            let vcpus = [0, 1].map(|bed| {
                let page = Arc::clone(&page);
                thread::spawn(move || page.fault(bed, None))
            });
            page.arrive();
            let asked = vcpus.map(|vcpu| vcpu.join().unwrap());
            assert!(!(asked[0] && asked[1]));
        });
    }

    /// A kick gets a vCPU out of its sleep although its page never comes.
    #[test]
    fn a_kick_ends_a_sleep() {
        loom::model(|| {
            let page = Page::new(1);
            let leave = Arc::new(AtomicBool::new(false));
            let vcpu = {
                let (page, leave) = (Arc::clone(&page), Arc::clone(&leave));
                thread::spawn(move || page.fault(0, Some(&leave)))
            };
            leave.store(true, Ordering::SeqCst);
            vcpu.thread().unpark();
            vcpu.join().unwrap();
            assert!(page.missing.get(0));
        });
    }
}
