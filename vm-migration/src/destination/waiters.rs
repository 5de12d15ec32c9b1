// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vCPU threads that wait for a page.
//!
//! Owns a slot for each such thread, with the page that it waits for, and a table by which an arrival finds those
//! that wait for its page without looking at all of them. A thread stores the page in its slot, enters itself in the
//! page's bucket, then marks the page as wanted and checks whether it is missing. An arrival clears `missing`, then
//! checks `wanted` and looks at the bucket. A fence between the two steps of each side guarantees that at least one
//! of them sees the other. A kick of the vCPU rings the same bell: a ring is never lost, and the thread checks again.
//! Must never decide what is missing, nor on what else a thread waits.

use std::sync::Arc;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bell::Bell;

/// Bits of a key that hold the unit; the bits above hold the region.
const UNIT_BITS: u32 = 48;

/// The key of no page.
const EMPTY: u64 = 0;

/// Buckets of the table; a power of two.
const BUCKETS: usize = if cfg!(loom) { 1 } else { 256 };

/// Words of two cache lines: buckets are that far apart, so that vCPUs that wait for different pages seldom write to
/// the same line.
const LINE_WORDS: usize = if cfg!(loom) { 1 } else { 16 };

/// vCPUs in a word of a bucket.
const WORD_BITS: usize = 64;

fn key(region: usize, unit: u64) -> u64 {
    ((region as u64) << UNIT_BITS | unit) + 1
}

#[repr(align(128))]
struct Waiter {
    /// [`EMPTY`], or the key of the page that the thread waits for.
    page: AtomicU64,
    bell: Option<Arc<Bell>>,
}

/// One slot for each number of a vCPU.
pub(crate) struct Waiters {
    slots: Box<[Waiter]>,
    /// The buckets: a bit for each slot whose page falls into it.
    table: Box<[AtomicU64]>,
    /// Words of a bucket that are used.
    words: usize,
    /// Words from one bucket to the next.
    stride: usize,
}

/// The registration of the calling thread; dropping it ends the registration.
pub(crate) struct Waiting<'a> {
    waiters: &'a Waiters,
    slot: usize,
    waiter: &'a Waiter,
    bell: &'a Bell,
    key: u64,
}

impl Waiters {
    /// With the bells of the vCPUs by number, where there is such a vCPU.
    pub(crate) fn new(bells: &[Option<Arc<Bell>>]) -> Self {
        let waiter = |bell: &Option<Arc<Bell>>| Waiter {
            page: AtomicU64::new(EMPTY),
            bell: bell.as_ref().map(Arc::clone),
        };
        let words = bells.len().div_ceil(WORD_BITS);
        let stride = words.next_multiple_of(LINE_WORDS);
        Self {
            slots: bells.iter().map(waiter).collect(),
            table: (0..stride * BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            words,
            stride,
        }
    }

    /// The words of the bucket of a page.
    fn bucket(&self, key: u64) -> &[AtomicU64] {
        let hash = usize::try_from(key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40).unwrap_or(0);
        let start = hash % BUCKETS * self.stride;
        self.table.get(start..start + self.words).unwrap_or_default()
    }

    /// Registers that the calling thread, that of vCPU `slot`, needs a page; to be called before it checks whether
    /// the page is missing. `None` when there is no such vCPU.
    pub(crate) fn register(&self, slot: usize, region: usize, unit: u64) -> Option<Waiting<'_>> {
        let waiter = self.slots.get(slot)?;
        let bell = waiter.bell.as_deref()?;
        let key = key(region, unit);
        waiter.page.store(key, Ordering::SeqCst);
        let word = self.bucket(key).get(slot / WORD_BITS)?;
        word.fetch_or(1 << (slot % WORD_BITS), Ordering::SeqCst);
        Some(Waiting { waiters: self, slot, waiter, bell, key })
    }

    /// Rings for the threads that wait for a page, which is in place, but for that of vCPU `but`, which has placed it
    /// itself. Called for requested pages.
    pub(crate) fn wake(&self, region: usize, unit: u64, but: Option<usize>) {
        let page = key(region, unit);
        for (word, bits) in self.bucket(page).iter().enumerate() {
            let mut bits = bits.load(Ordering::SeqCst);
            while bits != 0 {
                let slot = word * WORD_BITS + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let waiter = self.slots.get(slot).filter(|_| Some(slot) != but);
                let waiter = waiter.filter(|one| one.page.load(Ordering::SeqCst) == page);
                if let Some(bell) = waiter.and_then(|waiter| waiter.bell.as_ref()) {
                    bell.ring();
                }
            }
        }
    }

    /// Rings for all that wait, whatever for: what they wait on ends.
    pub(crate) fn wake_all(&self) {
        for waiter in self.slots.iter().filter(|one| one.page.load(Ordering::SeqCst) != EMPTY) {
            if let Some(bell) = &waiter.bell {
                bell.ring();
            }
        }
    }
}

impl Waiting<'_> {
    /// What rings when the page is in place or the vCPU is kicked; may also ring for nothing.
    pub(crate) fn bell(&self) -> &Bell {
        self.bell
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(word) = self.waiters.bucket(self.key).get(self.slot / WORD_BITS) {
            word.fetch_and(!(1 << (self.slot % WORD_BITS)), Ordering::SeqCst);
        }
        self.waiter.page.store(EMPTY, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::time::Duration;

    use super::*;
    use crate::bell::Heard;

    fn waiters(count: usize) -> Waiters {
        let bells: Vec<_> = (0..count).map(|_| Some(Arc::new(Bell::new().unwrap()))).collect();
        Waiters::new(&bells)
    }

    fn has_rung(waiters: &Waiters, slot: usize) -> bool {
        let bell = waiters.slots[slot].bell.as_ref().unwrap();
        let heard = bell.wait_with(&mut [bell.entry()], Some(Duration::ZERO)).unwrap();
        heard == Heard::Ring
    }

    #[test]
    fn who_waits_for_another_page_is_left_alone() {
        let waiters = waiters(200);
        // More than there are buckets, so that some share one.
        let pages = |slot: usize| (slot % 2, (slot / 2 % 90) as u64);
        let waiting: Vec<_> = (0..200)
            .map(|slot| waiters.register(slot, pages(slot).0, pages(slot).1).unwrap())
            .collect();
        waiters.wake(1, 7, None);
        waiters.wake(0, 3, Some(6));
        let rung: Vec<_> = (0..200).filter(|slot| has_rung(&waiters, *slot)).collect();
        assert_eq!(rung, [15, 186, 195]);
        drop(waiting);
        waiters.wake(1, 7, None);
        assert!((0..200).all(|slot| !has_rung(&waiters, slot)), "none waits any more");
        assert!(waiters.table.iter().all(|word| word.load(Ordering::SeqCst) == 0));
    }

    #[test]
    fn all_that_wait_hear_the_end_and_no_other() {
        let waiters = waiters(3);
        let waiting = (waiters.register(0, 0, 1), waiters.register(2, 5, 1));
        waiters.wake_all();
        assert_eq!([0, 1, 2].map(|slot| has_rung(&waiters, slot)), [true, false, true]);
        drop(waiting);
    }

    #[test]
    fn a_number_without_a_vcpu_waits_for_nothing() {
        let waiters = Waiters::new(&[None, Some(Arc::new(Bell::new().unwrap()))]);
        assert!(waiters.register(0, 0, 0).is_none());
        assert!(waiters.register(1, 0, 0).is_some());
        assert!(waiters.register(2, 0, 0).is_none());
        waiters.wake(0, 0, None);
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
            let bell = |_| Some(std::sync::Arc::new(Bell::new().unwrap()));
            let bells: Vec<_> = (0..count).map(bell).collect();
            Arc::new(Self { missing, wanted, waiters: Waiters::new(&bells) })
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
                waiter.bell().wait();
            }
        }

        fn arrive(&self) {
            self.missing.claim(0);
            change_then_look();
            if self.wanted.get(0) {
                self.waiters.wake(0, 0, None);
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
        bounded.preemption_bound = Some(2);
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
    fn a_kick_ends_a_wait() {
        loom::model(|| {
            let page = Page::new(1);
            let leave = Arc::new(AtomicBool::new(false));
            let vcpu = {
                let (page, leave) = (Arc::clone(&page), Arc::clone(&leave));
                thread::spawn(move || page.fault(0, Some(&leave)))
            };
            leave.store(true, Ordering::SeqCst);
            page.waiters.slots[0].bell.as_ref().unwrap().ring();
            vcpu.join().unwrap();
            assert!(page.missing.get(0));
        });
    }
}
