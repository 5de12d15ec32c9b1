// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which functions of a bus respond, and which the guest has seen.
//!
//! Owns one word, in which both are decided at once. It must never hide a function that the guest has seen as one that it has
//! not, nor count as seen what the guest sees as missing.

use std::sync::atomic::{AtomicU64, Ordering};

use pci_address::DeviceNumber;

/// A bit for each device number whose function does not respond, and above them one for each that the guest has seen.
#[derive(Debug, Default)]
pub(super) struct Visibility(AtomicU64);

const SEEN_SHIFT: u32 = u32::BITS;

fn hidden(number: DeviceNumber) -> u64 {
    1 << number.get()
}

fn seen(number: DeviceNumber) -> u64 {
    hidden(number) << SEEN_SHIFT
}

impl Visibility {
    pub fn is_hidden(&self, number: DeviceNumber) -> bool {
        self.0.load(Ordering::Acquire) & hidden(number) != 0
    }

    pub fn hide(&self, number: DeviceNumber) {
        self.0.fetch_or(hidden(number), Ordering::AcqRel);
    }

    pub fn show(&self, number: DeviceNumber) {
        self.0.fetch_and(!hidden(number), Ordering::AcqRel);
    }

    /// For the next function with that number.
    pub fn forget(&self, number: DeviceNumber) {
        self.0.fetch_and(!(hidden(number) | seen(number)), Ordering::AcqRel);
    }

    /// Hides a function that the guest has not seen; false if it has.
    pub fn hide_unseen(&self, number: DeviceNumber) -> bool {
        self.set_unless(hidden(number), seen(number))
    }

    /// The guest is about to see a function; false if it is hidden.
    pub fn see(&self, number: DeviceNumber) -> bool {
        // Most accesses are of functions that it has seen: they write nothing that other processors read.
        let now = self.0.load(Ordering::Acquire) & (hidden(number) | seen(number));
        now == seen(number) || self.set_unless(seen(number), hidden(number))
    }

    fn set_unless(&self, bit: u64, other: u64) -> bool {
        let next = |word: u64| (word & other == 0).then_some(word | bit);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).is_ok()
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::Barrier;

    use super::*;

    fn number(number: u8) -> DeviceNumber {
        DeviceNumber::new(number).unwrap()
    }

    #[test]
    fn what_was_seen_is_hidden_only_as_such() {
        let visibility = Visibility::default();
        assert!(visibility.see(number(3)) && visibility.see(number(3)));
        assert!(!visibility.hide_unseen(number(3)) && !visibility.is_hidden(number(3)));
        assert!(visibility.hide_unseen(number(31)) && visibility.is_hidden(number(31)));
        assert!(!visibility.see(number(31)));
        visibility.show(number(31));
        assert!(visibility.see(number(31)));
        visibility.hide(number(3));
        assert!(!visibility.see(number(3)), "as if unplugged");
        visibility.forget(number(3));
        assert!(visibility.hide_unseen(number(3)), "another function");
    }

    #[test]
    fn of_two_at_once_one_is_right() {
        for _ in 0..500 {
            let (visibility, start) = (Visibility::default(), Barrier::new(2));
            let (is_seen, is_hidden) = std::thread::scope(|scope| {
                let guest = scope.spawn(|| {
                    start.wait();
                    visibility.see(number(7))
                });
                start.wait();
                let is_hidden = visibility.hide_unseen(number(7));
                (guest.join().unwrap(), is_hidden)
            });
            assert_ne!(is_seen, is_hidden);
            assert_eq!(visibility.is_hidden(number(7)), is_hidden);
        }
    }
}
