// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Policy for discarding guest memory: bans, and pinned pages.
//!
//! Owns that decision for every caller: balloon, free page reporting, virtio-mem, migration, restore
//! and postcopy. A page that is pinned for a device has to stay where it is: after a discard the
//! guest gets a new page, while the IOMMU keeps the old one. So a discard takes a [`Permit`], which
//! only this module makes, and which no [`DiscardBan`] can overlap.
//!
//! One reader-writer lock holds the bans. A discard is a read section; a ban begins and ends in a
//! write section, and pinning comes after the beginning of its ban. So a page is discarded before it is
//! pinned, or not at all. Read sections do not exclude each other; each of them is at least one
//! system call, which takes a kernel lock on the file or the address space. One thread must never
//! enter it twice: a waiting write section keeps further readers out.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

#[cfg(loom)]
use loom::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(not(loom))]
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A ban on discarding pages. `P` can unpin some of them.
#[derive(Debug)]
struct Ban<P: ?Sized> {
    number: u64,
    reason: &'static str,
    /// Unpins memory if the guest announces its use of it.
    pins: Option<Arc<P>>,
}

/// The current bans, in the order of their start.
#[derive(Debug)]
pub(crate) struct Discards<P: ?Sized>(RwLock<Vec<Ban<P>>>);

impl<P: ?Sized> Default for Discards<P> {
    fn default() -> Self {
        Self(RwLock::new(Vec::new()))
    }
}

/// Proof that pages may be discarded as long as it is borrowed.
#[derive(Debug)]
pub(crate) struct Permit<'a>(PhantomData<&'a ()>);

impl<P: ?Sized> Discards<P> {
    fn read(&self) -> RwLockReadGuard<'_, Vec<Ban<P>>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Ban<P>>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a ban. Discards in progress have ended when this returns.
    pub(crate) fn ban(self: &Arc<Self>, reason: &'static str) -> DiscardBan<P> {
        let mut bans = self.write();
        // Numbers increase, so that the last ban has the greatest.
        let number = bans.last().map_or(0, |ban| ban.number.wrapping_add(1));
        bans.push(Ban { number, reason, pins: None });
        drop(bans);
        DiscardBan { discards: Arc::clone(self), number }
    }

    /// The reason of the first ban.
    pub(crate) fn banned(&self) -> Option<&'static str> {
        self.read().first().map(|ban| ban.reason)
    }

    /// What unpins memory, if there is exactly one ban and it has pins.
    pub(crate) fn pins(&self) -> Option<Arc<P>> {
        match &self.read()[..] {
            [ban] => ban.pins.clone(),
            _ => None,
        }
    }

    /// What pins memory again that was unpinned: that of any ban, as others may have begun since.
    pub(crate) fn pins_to_restore(&self) -> Option<Arc<P>> {
        self.read().iter().find_map(|ban| ban.pins.clone())
    }

    /// Calls `act` with a permit, or with the reason of a ban. Neither changes during the call.
    pub(crate) fn decide<R>(&self, act: impl FnOnce(Result<Permit<'_>, &'static str>) -> R) -> R {
        let bans = self.read();
        act(match bans.first() {
            None => Ok(Permit(PhantomData)),
            Some(ban) => Err(ban.reason),
        })
    }

    /// Calls `act` with the parts of `piece` that may be discarded. With `unpin` the guest announces its use
    /// of the memory, so pinned parts may be unpinned: `unpin` returns the parts that were.
    pub(crate) fn release<R>(
        &self,
        piece: &Range<u64>,
        unpin: Option<impl FnOnce(&P) -> Vec<Range<u64>>>,
        act: impl FnOnce(Vec<Range<u64>>, &Permit<'_>) -> R,
    ) -> R {
        let permit = Permit(PhantomData);
        let bans = self.read();
        if bans.is_empty() {
            return act(vec![piece.clone()], &permit);
        }
        let Some(unpin) = unpin else {
            return act(Vec::new(), &permit);
        };
        drop(bans);
        // Exclusive: between unpinning and discarding no other caller may find the memory unpinned, and have
        // it pinned again.
        let bans = self.write();
        let parts = match &bans[..] {
            [] => vec![piece.clone()],
            [Ban { pins: Some(pins), .. }] => unpin(pins),
            _ => Vec::new(),
        };
        act(parts, &permit)
    }

    /// Calls `change` while no ban can begin or end, if there is none, or (`pinned`) only one whose pins can
    /// unpin memory.
    ///
    /// # Errors
    /// The reason of the first ban.
    pub(crate) fn unless_banned<R>(
        &self,
        pinned: bool,
        change: impl FnOnce() -> R,
    ) -> Result<R, &'static str> {
        let bans = self.read();
        match &bans[..] {
            [] => Ok(change()),
            [Ban { pins: Some(_), .. }] if pinned => Ok(change()),
            [first, ..] => Err(first.reason),
        }
    }
}

/// Keeps pages of guest memory from being discarded, except those that its pins unpin first.
#[derive(Debug)]
pub struct DiscardBan<P: ?Sized> {
    discards: Arc<Discards<P>>,
    number: u64,
}

impl<P: ?Sized> DiscardBan<P> {
    /// Exempts memory that `pins` unpins from this ban.
    pub fn except_unpinned(&self, pins: Arc<P>) {
        let mut bans = self.discards.write();
        if let Some(ban) = bans.iter_mut().find(|ban| ban.number == self.number) {
            ban.pins = Some(pins);
        }
    }
}

impl<P: ?Sized> Drop for DiscardBan<P> {
    fn drop(&mut self) {
        let mut bans = self.discards.write();
        let at = bans.iter().position(|ban| ban.number == self.number);
        let ended = at.map(|at| bans.remove(at));
        drop(bans);
        // Dropped outside of the lock: it may hold the last reference to the pins.
        drop(ended);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! Every order in which memory is pinned and zeroed, by loom.

    use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::sync::{Arc as LoomArc, Mutex};
    use loom::thread;

    use super::*;

    /// Nothing unpins in this model.
    type Discards = super::Discards<()>;

    /// A page of guest memory: the host page that is mapped for the guest, and the contents of the host
    /// pages.
    struct Page {
        mapped: AtomicU32,
        contents: Mutex<[u8; 3]>,
        /// The host page that the device has pinned.
        pinned: AtomicU32,
    }

    impl Page {
        fn new() -> LoomArc<Self> {
            LoomArc::new(Self {
                mapped: AtomicU32::new(1),
                contents: Mutex::new([0, 7, 0]),
                pinned: AtomicU32::new(0),
            })
        }

        /// Zeroes the page as a migration does.
        fn zero(&self, discards: &Discards) {
            discards.decide(|decision| match decision {
                Ok(_permit) => self.mapped.store(2, Ordering::Relaxed),
                Err(_reason) => {
                    let page = self.mapped.load(Ordering::Relaxed);
                    if let Some(byte) = self
                        .contents
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .get_mut(page as usize)
                    {
                        *byte = 0;
                    }
                }
            });
        }

        fn pin(&self) {
            self.pinned.store(self.mapped.load(Ordering::Relaxed), Ordering::Relaxed);
        }

        /// Checks that the guest reads zeros, and the device as well, in the same page, if it has one.
        fn check(&self) {
            let (mapped, pinned) =
                (self.mapped.load(Ordering::Relaxed), self.pinned.load(Ordering::Relaxed));
            let contents = *self.contents.lock().unwrap_or_else(PoisonError::into_inner);
            assert_eq!(contents.get(mapped as usize), Some(&0));
            assert!(pinned == 0 || pinned == mapped, "the device has page {pinned} for {mapped}");
        }
    }

    #[test]
    fn loom_a_page_is_discarded_before_it_is_pinned_or_not_at_all() {
        loom::model(|| {
            let (discards, page) = (Arc::new(Discards::default()), Page::new());
            let zeroes = {
                let (discards, page) = (Arc::clone(&discards), LoomArc::clone(&page));
                thread::spawn(move || page.zero(&discards))
            };
            let ban = discards.ban("a device");
            page.pin();
            zeroes.join().unwrap_or_else(|_| panic!("a thread failed"));
            page.check();
            drop(ban);
        });
    }

    #[test]
    fn loom_the_end_of_one_ban_does_not_end_another() {
        loom::model(|| {
            let (discards, page) = (Arc::new(Discards::default()), Page::new());
            let first = discards.ban("a device");
            let ends = thread::spawn(move || drop(first));
            let second = discards.ban("another");
            page.pin();
            page.zero(&discards);
            ends.join().unwrap_or_else(|_| panic!("a thread failed"));
            page.check();
            drop(second);
        });
    }
}
