// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vCPU threads that wait for a page which they have requested themselves.
//!
//! Owns a slot for each such thread: the page that it waits for, and the thread. A thread stores the
//! page in its slot, then marks the page as wanted and checks whether it is missing. An arrival
//! clears `missing`, then checks `wanted` and scans the slots. A fence between the two steps of each
//! side guarantees that at least one of them sees the other. A kick of the vCPU also unparks the thread: an
//! unpark is never lost, and the thread checks again. Must never decide what is missing.

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

/// Bits of a key that hold the unit; the bits above hold the region.
const UNIT_BITS: u32 = 48;

/// The key of no page.
const EMPTY: u64 = 0;

fn key(region: usize, unit: u64) -> u64 {
    ((region as u64) << UNIT_BITS | unit) + 1
}

struct Waiter {
    /// [`EMPTY`], or the key of the page that the thread waits for.
    page: AtomicU64,
    /// The waiting thread. Locked for one access, by that thread and by the one that places the page.
    thread: Mutex<Option<Thread>>,
}

/// One slot for each vCPU.
pub(crate) struct Waiters(Box<[Waiter]>);

/// The registration of the calling thread; dropping it ends the registration.
pub(crate) struct ParkedWaiter<'a>(&'a Waiter);

impl Waiters {
    pub(crate) fn new(count: usize) -> Self {
        let waiter = || Waiter { page: AtomicU64::new(EMPTY), thread: Mutex::new(None) };
        Self((0..count).map(|_| waiter()).collect())
    }

    /// Registers that the calling thread needs a page; to be called before it checks whether the page is
    /// missing. `None` when there is no such slot.
    pub(crate) fn register(
        &self,
        slot: usize,
        region: usize,
        unit: u64,
    ) -> Option<ParkedWaiter<'_>> {
        let waiter = self.0.get(slot)?;
        *waiter.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
        waiter.page.store(key(region, unit), Ordering::SeqCst);
        Some(ParkedWaiter(waiter))
    }

    /// Unparks the threads that wait for a page, which is in place; called for requested pages.
    pub(crate) fn wake(&self, region: usize, unit: u64) {
        let page = key(region, unit);
        for waiter in self.0.iter().filter(|waiter| waiter.page.load(Ordering::SeqCst) == page) {
            if let Some(thread) = &*waiter.thread.lock().unwrap_or_else(PoisonError::into_inner) {
                thread.unpark();
            }
        }
    }
}

impl ParkedWaiter<'_> {
    /// Parks until the page is in place or the vCPU is kicked; may also return spuriously.
    pub(crate) fn park(&self) {
        debug_assert_ne!(self.0.page.load(Ordering::Relaxed), EMPTY);
        thread::park();
    }
}

impl Drop for ParkedWaiter<'_> {
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
        let waiters = Arc::new(Waiters::new(2));
        let (lies, told) = mpsc::channel();
        let (up, got_up) = mpsc::channel();
        let mut threads = Vec::new();
        for (slot, unit) in [(0, 7), (1, 8)] {
            let (waiters, lies, up) = (Arc::clone(&waiters), lies.clone(), up.clone());
            threads.push(std::thread::spawn(move || {
                let waiter = waiters.register(slot, 1, unit).unwrap();
                lies.send(()).unwrap();
                waiter.park();
                up.send(slot).unwrap();
            }));
        }
        let _ = (told.recv().unwrap(), told.recv().unwrap());
        waiters.wake(0, 7);
        waiters.wake(1, 8);
        assert_eq!(got_up.recv().unwrap(), 1);
        assert!(got_up.try_recv().is_err());
        waiters.wake(1, 7);
        assert_eq!(got_up.recv().unwrap(), 0);
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(waiters.0.iter().all(|waiter| waiter.page.load(Ordering::SeqCst) == EMPTY));
        assert!(waiters.register(2, 0, 0).is_none());
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;
    use page_bitmap::{PageBitmap, change_then_look};

    use super::*;

    struct Page {
        missing: PageBitmap,
        wanted: PageBitmap,
        waiters: Waiters,
    }

    impl Page {
        fn new(count: usize) -> Arc<Self> {
            let (missing, wanted) = (PageBitmap::new(1), PageBitmap::new(1));
            missing.set(0);
            Arc::new(Self { missing, wanted, waiters: Waiters::new(count) })
        }

        /// Acts as the engine does; true for the caller that sends the request. Enters the guest again and
        /// again until the page is there, or `leave` says that the vCPU is to stop.
        fn fault(&self, slot: usize, leave: Option<&AtomicBool>) -> bool {
            let mut asked = false;
            loop {
                if leave.is_some_and(|leave| leave.load(Ordering::SeqCst)) {
                    return asked;
                }
                let waiter = self.waiters.register(slot, 0, 0).unwrap();
                let first = self.wanted.set(0);
                change_then_look();
                if !self.missing.get(0) {
                    return asked;
                }
                asked |= first;
                waiter.park();
            }
        }

        fn arrive(&self) {
            self.missing.claim(0);
            change_then_look();
            if self.wanted.get(0) {
                self.waiters.wake(0, 0);
            }
        }
    }

    /// A vCPU waits for its page while that arrives: it always wakes (a model in which it does not ends in
    /// a deadlock).
    #[test]
    fn a_waiter_and_the_arrival_of_its_page_never_miss_each_other() {
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

    /// Two vCPUs need one page: at most one requests it, and both wake.
    #[test]
    fn two_waiters_for_one_page_ask_once_and_both_wake() {
        let mut bounded = loom::model::Builder::new();
        bounded.preemption_bound = Some(3);
        bounded.check(|| {
            let page = Page::new(2);
            let vcpus = [0, 1].map(|slot| {
                let page = Arc::clone(&page);
                thread::spawn(move || page.fault(slot, None))
            });
            page.arrive();
            let asked = vcpus.map(|vcpu| vcpu.join().unwrap());
            assert!(!(asked[0] && asked[1]));
        });
    }

    /// A kick wakes a vCPU although its page never comes.
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
