// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which of two threads reads a connection: its vCPU while that waits for a page, or else the thread that reads what
//! is left (`mig-urgent`).
//!
//! Owns the lock on the reading end, and a mark that pages are still to come on a connection that neither reads. The
//! lock is only ever tried: the thread that does not get it knows that the other one reads. A page that was asked for on a
//! connection comes only if one of the two reads there, so one of these holds at any time for each such page:
//!
//! - a thread has the lock, and looks for missing pages that were asked for here after it has let go; or
//! - the connection is marked, and the bell of the thread for what is left has rung since.
//!
//! | thread | does, in this order |
//! | --- | --- |
//! | vCPU | notes the page as asked for and asks; tries the lock. With it: unmarks, reads until the page is here or its own bell rings, unlocks; if a page that was asked for is missing: marks, rings. Without it: marks, rings, and waits for its own bell |
//! | vCPU that asks for others and has its page | notes them, asks; marks, rings |
//! | another that asks here | notes the page, asks; marks, rings |
//! | the one for what is left | unmarks what is marked; tries the lock. With it: reads what is there, unlocks; if a page that was asked for is missing: marks. Without it: the vCPU reads, and marks after that if need be. Polls the marked ones and its bell |
//!
//! What was asked for is noted under another lock, before it is asked for, so a look at it after unlocking sees every
//! request of a thread that did not get the lock. A page is sent once: when none of those asked for is missing,
//! nothing but a notice without contents can still come, and it need not be read. Checked by a loom model. Must never
//! know what is read.

#[cfg(loom)]
use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};
#[cfg(not(loom))]
use std::sync::{
    Mutex, MutexGuard, TryLockError,
    atomic::{AtomicBool, Ordering},
};

use std::sync::PoisonError;

use crate::bell::Bell;

/// The reading end of a connection, and who reads it.
pub(super) struct Claim<T> {
    end: Mutex<T>,
    /// Pages may come here for which no thread waits at it.
    left: AtomicBool,
}

impl<T> Claim<T> {
    pub(super) fn new(end: T) -> Self {
        Self { end: Mutex::new(end), left: AtomicBool::new(false) }
    }

    #[cfg(not(loom))]
    fn try_end(&self) -> Option<MutexGuard<'_, T>> {
        match self.end.try_lock() {
            Ok(end) => Some(end),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    #[cfg(loom)]
    fn try_end(&self) -> Option<MutexGuard<'_, T>> {
        self.end.try_lock().ok()
    }

    /// Marks or unmarks; returns what it was. Always a swap: of two threads that change it the later one sees the other.
    fn mark(&self, left: bool) -> bool {
        self.left.swap(left, Ordering::SeqCst)
    }

    /// Takes the reading end for the vCPU. `None` while the other thread reads; it is then told that pages are to
    /// come here.
    pub(super) fn take(&self, others: &Bell) -> Option<MutexGuard<'_, T>> {
        let end = self.try_end();
        match end {
            Some(_) => {
                self.mark(false);
            }
            None => self.leave(others),
        }
        end
    }

    /// Releases it, if the vCPU had it. `is_owed` says whether a page that was asked for here is missing.
    pub(super) fn release(
        &self,
        end: MutexGuard<'_, T>,
        others: &Bell,
        is_owed: impl FnOnce() -> bool,
    ) {
        drop(end);
        if is_owed() {
            self.leave(others);
        }
    }

    /// Leaves what comes here to the other thread, after something was asked for here.
    pub(super) fn leave(&self, others: &Bell) {
        self.mark(true);
        others.ring();
    }

    /// Takes the reading end from the thread that has it, which releases it soon.
    pub(super) fn wait(&self) -> MutexGuard<'_, T> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True when the other thread is to read here.
    pub(super) fn is_left(&self) -> bool {
        self.left.load(Ordering::SeqCst)
    }

    /// Takes the reading end for the other thread, if it was left; with `any` also if not.
    pub(super) fn take_left(&self, any: bool) -> Option<MutexGuard<'_, T>> {
        // Unmarked first: the vCPU may have the lock, and mark it as soon as it has let go.
        let left = self.mark(false);
        if left || any { self.try_end() } else { None }
    }

    /// Releases it, if the other thread had it. See [`release`](Self::release).
    pub(super) fn release_left(&self, end: MutexGuard<'_, T>, is_owed: impl FnOnce() -> bool) {
        drop(end);
        if is_owed() {
            self.mark(true);
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use std::collections::VecDeque;

    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::bell::Heard;

    /// A connection to a source that answers at once, in order; pages that are missing, and those asked for here.
    struct World {
        claim: Claim<()>,
        /// Answers that have come and were not read.
        socket: Mutex<VecDeque<usize>>,
        missing: Mutex<Vec<bool>>,
        asked: Mutex<Vec<usize>>,
        vcpu: Bell,
        others: Bell,
    }

    impl World {
        fn new(pages: usize) -> Arc<Self> {
            Arc::new(Self {
                claim: Claim::new(()),
                socket: Mutex::new(VecDeque::new()),
                missing: Mutex::new(vec![true; pages]),
                asked: Mutex::new(Vec::new()),
                vcpu: Bell::new().unwrap(),
                others: Bell::new().unwrap(),
            })
        }

        fn is_missing(&self, page: usize) -> bool {
            self.missing.lock().unwrap()[page]
        }

        fn is_complete(&self) -> bool {
            !self.missing.lock().unwrap().contains(&true)
        }

        fn is_owed(&self) -> bool {
            let mut asked = self.asked.lock().unwrap();
            asked.retain(|page| self.is_missing(*page));
            !asked.is_empty()
        }

        /// Notes pages and asks for them; the answers are there.
        fn ask(&self, pages: &[usize]) {
            self.asked.lock().unwrap().extend(pages);
            self.socket.lock().unwrap().extend(pages);
            self.vcpu.readable();
            self.others.readable();
        }

        /// Reads one answer, and rings for the vCPU if that is another thread; false if there is none.
        fn read(&self, is_vcpu: bool) -> bool {
            let Some(page) = self.socket.lock().unwrap().pop_front() else { return false };
            self.missing.lock().unwrap()[page] = false;
            if !is_vcpu {
                self.vcpu.ring();
            }
            if self.is_complete() {
                self.others.ring();
            }
            true
        }

        /// As `OwnConnection::wait_for` does.
        fn fault(&self, page: usize, more: &[usize], times: usize) {
            if !self.is_missing(page) {
                self.ask(more);
                self.claim.leave(&self.others);
                return;
            }
            self.ask(&[&[page], more].concat());
            for _ in 0..times {
                if !self.is_missing(page) {
                    return;
                }
                let Some(end) = self.claim.take(&self.others) else {
                    self.vcpu.wait();
                    continue;
                };
                while self.is_missing(page) && {
                    self.read(true) || {
                        let there = || !self.socket.lock().unwrap().is_empty();
                        self.vcpu.wait_until(there) == Heard::Ready
                    }
                } {}
                self.claim.release(end, &self.others, || self.is_owed());
            }
        }

        /// As the thread does that reads what is left, until all pages are here.
        fn read_left(&self) {
            loop {
                if let Some(end) = self.claim.take_left(false) {
                    while self.read(false) {}
                    self.claim.release_left(end, || self.is_owed());
                }
                if self.is_complete() {
                    return;
                }
                let there = || self.claim.is_left() && !self.socket.lock().unwrap().is_empty();
                self.others.wait_until(there);
            }
        }
    }

    fn run(world: &Arc<World>, vcpu: impl FnOnce(&World) + 'static) {
        let reader = {
            let world = Arc::clone(world);
            thread::spawn(move || world.read_left())
        };
        let faulting = {
            let world = Arc::clone(world);
            thread::spawn(move || vcpu(&world))
        };
        faulting.join().unwrap();
        // All that was asked for comes without another fault; or else this is a deadlock.
        reader.join().unwrap();
    }

    fn bounded(check: impl Fn() + Sync + Send + 'static) {
        let mut bounded = loom::model::Builder::new();
        bounded.preemption_bound = Some(2);
        bounded.check(check);
    }

    /// A page that comes behind the one that the vCPU waits for is read by the other thread.
    #[test]
    fn what_is_left_comes_without_a_fault() {
        bounded(|| run(&World::new(2), |world| world.fault(0, &[1], usize::MAX)));
    }

    /// The page is here, and what is predicted from it is asked for.
    #[test]
    fn what_is_asked_for_without_a_wait_comes() {
        bounded(|| {
            let world = World::new(2);
            world.missing.lock().unwrap()[0] = false;
            run(&world, |world| world.fault(0, &[1], usize::MAX));
        });
    }

    /// The vCPU is kicked at any moment, and does not come back: its page comes all the same.
    #[test]
    fn what_a_kicked_vcpu_has_asked_for_comes() {
        bounded(|| {
            let world = World::new(1);
            world.vcpu.ring();
            run(&world, |world| world.fault(0, &[], 1));
        });
    }

    /// Another thread asks here while the vCPU waits for its own page.
    #[test]
    fn what_another_thread_asks_for_here_comes() {
        bounded(|| {
            let world = World::new(2);
            let other = {
                let world = Arc::clone(&world);
                thread::spawn(move || {
                    world.ask(&[1]);
                    world.claim.leave(&world.others);
                })
            };
            run(&world, |world| world.fault(0, &[], usize::MAX));
            other.join().unwrap();
        });
    }
}
