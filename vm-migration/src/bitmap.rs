// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Page ownership as atomic bits.
//!
//! Owns [`ClaimMap`]: a set bit means "still to be sent" on the source and "still to arrive" on the
//! destination. The thread that clears a bit with an atomic fetch-and owns the page from then on: bulk
//! pushers and urgent servers share no lock and no queue. It must never grow a lock. Checked by a loom
//! model (`--cfg loom`).

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::layout::to_usize;

/// Bits in one word: the most that one claim takes.
pub const WORD_BITS: u64 = 64;

/// A fixed number of bits that are set once and then claimed.
#[derive(Debug)]
pub struct ClaimMap {
    words: Box<[AtomicU64]>,
    bits: u64,
}

/// Orders what this thread has set or claimed in one map before what it looks at in another.
///
/// Two threads that each change their own map, call this, and look at the other's: at least one of
/// the two sees the other's change.
pub fn change_then_look() {
    fence(Ordering::SeqCst);
}

/// What one claim got: bits of one word, all of them ours now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// Number of the word's first bit.
    pub base: u64,
    /// The claimed bits, bit 0 being `base`.
    pub mask: u64,
}

impl Claimed {
    /// The claimed bits as ascending runs of (first, count).
    pub fn runs(self) -> impl Iterator<Item = (u64, u64)> {
        let mut mask = self.mask;
        std::iter::from_fn(move || {
            if mask == 0 {
                return None;
            }
            let first = mask.trailing_zeros();
            let count = (mask >> first).trailing_ones();
            mask &= !span(first, count);
            Some((self.base + u64::from(first), u64::from(count)))
        })
    }

    /// Number of bits claimed.
    pub fn count(self) -> u64 {
        u64::from(self.mask.count_ones())
    }
}

/// `count` ones from bit `first` on; `first + count` is at most 64.
const fn span(first: u32, count: u32) -> u64 {
    if count == 0 {
        return 0;
    }
    (u64::MAX >> (64 - count)) << first
}

const fn bit_in_word(bit: u64) -> u32 {
    (bit % WORD_BITS) as u32
}

impl ClaimMap {
    /// All bits clear.
    pub fn new(bits: u64) -> Self {
        let words = (0..bits.div_ceil(WORD_BITS)).map(|_| AtomicU64::new(0)).collect();
        Self { words, bits }
    }

    /// Number of bits.
    pub fn len(&self) -> u64 {
        self.bits
    }

    /// True when the map has no bits at all.
    pub fn is_empty(&self) -> bool {
        self.bits == 0
    }

    fn word(&self, bit: u64) -> &AtomicU64 {
        assert!(bit < self.bits);
        &self.words[to_usize(bit / WORD_BITS)]
    }

    /// True when the bit is set.
    pub fn get(&self, bit: u64) -> bool {
        self.word(bit).load(Ordering::Acquire) & (1 << bit_in_word(bit)) != 0
    }

    /// Sets a bit; true when this call did it.
    pub fn set(&self, bit: u64) -> bool {
        let mask = 1 << bit_in_word(bit);
        self.word(bit).fetch_or(mask, Ordering::AcqRel) & mask == 0
    }

    /// Clears a bit; true when this call did it, and the page is then the caller's.
    pub fn claim(&self, bit: u64) -> bool {
        let mask = 1u64 << bit_in_word(bit);
        self.word(bit).fetch_and(!mask, Ordering::AcqRel) & mask != 0
    }

    /// Sets a run of bits; returns how many were clear.
    pub fn set_run(&self, first: u64, count: u64) -> u64 {
        self.for_words(first, count, |word, mask| {
            mask & !self.words[word].fetch_or(mask, Ordering::AcqRel)
        })
    }

    /// Claims what is left of a run; returns how many bits this call cleared.
    pub fn claim_run(&self, first: u64, count: u64) -> u64 {
        self.for_words(first, count, |word, mask| {
            mask & self.words[word].fetch_and(!mask, Ordering::AcqRel)
        })
    }

    /// How many bits of a run are set (a snapshot, when others claim meanwhile).
    pub fn count_run(&self, first: u64, count: u64) -> u64 {
        self.for_words(first, count, |word, mask| mask & self.words[word].load(Ordering::Acquire))
    }

    fn for_words(&self, first: u64, count: u64, mut each: impl FnMut(usize, u64) -> u64) -> u64 {
        let end = first.checked_add(count).filter(|end| *end <= self.bits);
        let end = end.expect("a run of this map's own bits");
        let mut bit = first;
        let mut changed = 0;
        while bit < end {
            let in_word = (WORD_BITS - bit % WORD_BITS).min(end - bit);
            let mask = span(bit_in_word(bit), u32::try_from(in_word).unwrap_or(64));
            changed += u64::from(each(to_usize(bit / WORD_BITS), mask).count_ones());
            bit += in_word;
        }
        changed
    }

    /// Claims up to `max` (1 to 64) neighbouring bits: of the first word that has any at or after
    /// `from`, the set bits within `max` of the first. `None` when no bit at or after `from` is
    /// set.
    pub fn claim_next(&self, from: u64, max: u32) -> Option<Claimed> {
        let max = max.clamp(1, 64);
        let mut bit = from;
        while bit < self.bits {
            let word = &self.words[to_usize(bit / WORD_BITS)];
            let here = u64::MAX << bit_in_word(bit);
            let mut seen = word.load(Ordering::Acquire) & here;
            while seen != 0 {
                let first = seen.trailing_zeros();
                let wanted = seen & span(first, max.min(64 - first));
                let mask = word.fetch_and(!wanted, Ordering::AcqRel) & wanted;
                if mask != 0 {
                    return Some(Claimed { base: bit - bit % WORD_BITS, mask });
                }
                // Others took all of these between the look and the claim; look again.
                seen = word.load(Ordering::Acquire) & here;
            }
            bit = bit - bit % WORD_BITS + WORD_BITS;
        }
        None
    }

    /// Number of set bits (a snapshot, when others claim meanwhile).
    pub fn count(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.load(Ordering::Acquire).count_ones())).sum()
    }

    /// The set bits as ascending runs of (first, count) (each word a snapshot). Looks at whole words
    /// and stores nothing: a map may have as many runs as half of its bits.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64)> {
        runs_of(0, self.words())
    }

    /// The same for the bits of a range of this map.
    pub fn runs_in(&self, range: std::ops::Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let end = range.end.min(self.bits);
        let first_word = range.start / WORD_BITS;
        let words = to_usize(first_word)..to_usize(end.div_ceil(WORD_BITS).max(first_word));
        let words = self.words.get(words).unwrap_or_default();
        let masked = (first_word..).zip(words).map(move |(index, word)| {
            let base = index * WORD_BITS;
            let from = u32::try_from(range.start.saturating_sub(base)).unwrap_or(0);
            let until = u32::try_from((end - base).min(WORD_BITS)).unwrap_or(0);
            word.load(Ordering::Acquire) & span(from, until.saturating_sub(from))
        });
        runs_of(first_word * WORD_BITS, masked)
    }

    /// A map of its own with the same bits (each word a snapshot).
    #[must_use]
    pub fn copy(&self) -> Self {
        Self { words: self.words().map(AtomicU64::new).collect(), bits: self.bits }
    }

    /// Sets the bits that are set in another map of the same length.
    pub fn add(&self, other: &Self) {
        for (index, bits) in (0..).zip(other.words()) {
            self.set_word(index, bits);
        }
    }

    /// The bits that are set here and not in another map of the same length (each word a snapshot).
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let words =
            self.words().zip(other.words()).map(|(one, other)| AtomicU64::new(one & !other));
        Self { words: words.collect(), bits: self.bits }
    }

    /// The same for bits that are set in another map of the same length, too.
    pub fn common_runs(&self, other: &Self) -> impl Iterator<Item = (u64, u64)> {
        debug_assert_eq!(self.bits, other.bits);
        let words = self.words.iter().zip(&other.words);
        runs_of(
            0,
            words.map(|(one, other)| {
                // Most maps that are compared are nearly empty.
                match one.load(Ordering::Acquire) {
                    0 => 0,
                    one => one & other.load(Ordering::Acquire),
                }
            }),
        )
    }

    /// All words in order, bit 0 of word 0 being number 0 (each word a snapshot).
    pub fn words(&self) -> impl ExactSizeIterator<Item = u64> {
        self.words.iter().map(|word| word.load(Ordering::Acquire))
    }

    /// Sets bits of a word; bits beyond the map are not set, and make the answer false.
    pub fn set_word(&self, index: u64, bits: u64) -> bool {
        let Some(word) = usize::try_from(index).ok().and_then(|index| self.words.get(index)) else {
            return bits == 0;
        };
        let tail = self.bits - index * WORD_BITS;
        let valid = if tail < WORD_BITS { span(0, bit_in_word(tail)) } else { u64::MAX };
        if bits & valid != 0 {
            word.fetch_or(bits & valid, Ordering::AcqRel);
        }
        bits & !valid == 0
    }

    /// Clears all bits.
    pub fn clear(&self) {
        for word in &self.words {
            word.store(0, Ordering::Release);
        }
    }
}

/// The set bits of words as ascending runs of (first, count), bit 0 of the first being `base`.
fn runs_of(
    mut base: u64,
    mut words: impl Iterator<Item = u64>,
) -> impl Iterator<Item = (u64, u64)> {
    // What is left of the word that is looked at, and a run that may go on.
    let mut left = words.next();
    let mut open: Option<(u64, u64)> = None;
    std::iter::from_fn(move || {
        loop {
            let Some(mask) = &mut left else { return open.take() };
            if *mask == 0 {
                base += WORD_BITS;
                left = words.next();
                // A run goes on only where the next word begins with a bit of it.
                let ends = open.is_some_and(|(first, count)| first + count != base)
                    || left.is_none_or(|next| next & 1 == 0);
                if ends && let Some(run) = open.take() {
                    return Some(run);
                }
                continue;
            }
            let first = mask.trailing_zeros();
            let count = (*mask >> first).trailing_ones();
            *mask &= !span(first, count);
            let run = (base + u64::from(first), u64::from(count));
            match &mut open {
                Some(before) if before.0 + before.1 == run.0 => before.1 += run.1,
                _ => {
                    if let Some(before) = open.replace(run) {
                        return Some(before);
                    }
                }
            }
        }
    })
}

/// The set bits of plain words as ascending runs, word 0 bit 0 being number `base`.
pub(crate) fn word_runs(words: &[u64], base: u64) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = Vec::new();
    for (index, mask) in (0u64..).zip(words) {
        for (first, count) in (Claimed { base: base + index * WORD_BITS, mask: *mask }).runs() {
            match all.last_mut() {
                Some(last) if last.0 + last.1 == first => last.1 += count,
                _ => all.push((first, count)),
            }
        }
    }
    all
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_claim_takes_a_bit_once() {
        let map = ClaimMap::new(130);
        assert!(map.set(129));
        assert!(!map.set(129));
        assert!(map.claim(129));
        assert!(!map.claim(129));
        assert_eq!(map.count(), 0);
    }

    #[test]
    fn claims_stay_within_max_of_the_first_bit() {
        let map = ClaimMap::new(200);
        map.set_run(3, 10);
        map.set(70);
        assert_eq!(map.claim_next(0, 4).unwrap().runs().collect::<Vec<_>>(), [(3, 4)]);
        assert_eq!(map.claim_next(12, 4).unwrap().runs().collect::<Vec<_>>(), [(12, 1)]);
        assert_eq!(map.claim_next(13, 64).unwrap(), Claimed { base: 64, mask: 1 << 6 });
        assert_eq!(map.claim_next(13, 64), None);
        assert_eq!(map.count(), 5);
    }

    proptest! {
        #[test]
        fn claiming_all_gives_each_bit_once(
            bits in prop::collection::btree_set(0u64..500, 0..200), max in 1u32..65, from in 0u64..500,
        ) {
            let map = ClaimMap::new(500);
            for bit in &bits {
                map.set(*bit);
            }
            let part: BTreeSet<u64> =
                map.runs_in(from..450).flat_map(|(first, count)| first..first + count).collect();
            prop_assert!(part.iter().eq(bits.iter().filter(|bit| (from..450).contains(bit))));
            let listed: BTreeSet<u64> =
                map.runs().flat_map(|(first, count)| first..first + count).collect();
            prop_assert_eq!(&listed, &bits);
            let mut got = BTreeSet::new();
            for start in [from, 0] {
                while let Some(claimed) = map.claim_next(start, max) {
                    prop_assert!(claimed.count() <= u64::from(max));
                    for (first, count) in claimed.runs() {
                        for bit in first..first + count {
                            prop_assert!(got.insert(bit));
                        }
                    }
                }
            }
            prop_assert_eq!(got, bits);
        }

        #[test]
        fn runs_are_set_and_claimed_exactly(first in 0u64..300, count in 0u64..200) {
            let map = ClaimMap::new(500);
            map.set(first);
            prop_assert_eq!(map.set_run(first, count), count.saturating_sub(1));
            prop_assert_eq!(map.count_run(0, 500), map.count());
            prop_assert_eq!(map.count_run(first, count), count);
            prop_assert_eq!(map.claim_run(first, count), count);
            prop_assert_eq!(map.count(), u64::from(count == 0));
        }
    }

    #[test]
    fn threads_never_share_a_page() {
        let map = ClaimMap::new(4096);
        map.set_run(0, 4096);
        let got: Vec<u64> = std::thread::scope(|scope| {
            let bulk = scope.spawn(|| {
                let mut mine = Vec::new();
                while let Some(claimed) = map.claim_next(0, 7) {
                    mine.extend(claimed.runs().flat_map(|(first, count)| first..first + count));
                }
                mine
            });
            let urgent =
                scope.spawn(|| (0..4096).rev().filter(|bit| map.claim(*bit)).collect::<Vec<u64>>());
            let mut all = bulk.join().unwrap();
            all.extend(urgent.join().unwrap());
            all
        });
        assert_eq!(got.len(), 4096);
        assert_eq!(got.iter().collect::<BTreeSet<_>>().len(), 4096);
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Bulk claims runs while an urgent server claims single pages: every page goes out once.
    #[test]
    fn bulk_and_urgent_claim_each_page_once() {
        loom::model(|| {
            let map = Arc::new(ClaimMap::new(4));
            map.set_run(0, 4);
            let bulk = {
                let map = Arc::clone(&map);
                thread::spawn(move || {
                    let mut sent = 0;
                    while let Some(claimed) = map.claim_next(0, 2) {
                        assert_eq!(sent & claimed.mask, 0);
                        sent |= claimed.mask;
                    }
                    sent
                })
            };
            let urgent = u64::from(map.claim(1)) << 1 | u64::from(map.claim(3)) << 3;
            let bulk = bulk.join().unwrap();
            assert_eq!(bulk & urgent, 0);
            assert_eq!(bulk | urgent, 0b1111);
        });
    }

    /// A faulting reader notes its wish and then looks whether the page is still to come; the
    /// receiver marks it as come and then looks for wishes. One of the two must wake the waiter.
    #[test]
    fn a_fault_and_the_arrival_of_its_page_never_miss_each_other() {
        loom::model(|| {
            let pending = Arc::new(ClaimMap::new(1));
            let wanted = Arc::new(ClaimMap::new(1));
            pending.set(0);
            let receiver = {
                let (pending, wanted) = (Arc::clone(&pending), Arc::clone(&wanted));
                thread::spawn(move || {
                    pending.claim(0);
                    change_then_look();
                    wanted.get(0)
                })
            };
            wanted.set(0);
            change_then_look();
            let reader_wakes = !pending.get(0);
            let receiver_wakes = receiver.join().unwrap();
            assert!(reader_wakes || receiver_wakes);
        });
    }

    /// Two readers report faults of one page (two vCPUs): one of them asks for it.
    #[test]
    fn a_duplicate_fault_asks_once() {
        loom::model(|| {
            let wanted = Arc::new(ClaimMap::new(2));
            let other = {
                let wanted = Arc::clone(&wanted);
                thread::spawn(move || wanted.set(1))
            };
            let here = wanted.set(1);
            assert!(here ^ other.join().unwrap());
        });
    }

    /// A reader notes its wish and then looks for a connection; a recovery installs one and then
    /// looks for wishes. One of the two must ask, or the page is never sent.
    #[test]
    fn a_fault_and_a_recovery_never_miss_each_other() {
        loom::model(|| {
            let wanted = Arc::new(ClaimMap::new(1));
            let connected = Arc::new(ClaimMap::new(1));
            let recovery = {
                let (wanted, connected) = (Arc::clone(&wanted), Arc::clone(&connected));
                thread::spawn(move || {
                    connected.set(0);
                    change_then_look();
                    wanted.get(0)
                })
            };
            wanted.set(0);
            change_then_look();
            let reader_asks = connected.get(0);
            let recovery_asks = recovery.join().unwrap();
            assert!(reader_asks || recovery_asks);
        });
    }

    /// A page that a lost set of connections had claimed becomes pending again with what the
    /// destination still lacks; of all who claim it then, one sends it.
    #[test]
    fn after_a_recovery_each_missing_page_is_sent_once() {
        loom::model(|| {
            let pending = Arc::new(ClaimMap::new(2));
            pending.set_run(0, 2);
            assert!(pending.claim(0));
            // The set is lost with page 0; no thread serves while pending is made anew.
            pending.claim_run(0, 2);
            pending.set_run(0, 2);
            let urgent = {
                let pending = Arc::clone(&pending);
                thread::spawn(move || u64::from(pending.claim(0)))
            };
            let mut bulk = 0;
            while let Some(claimed) = pending.claim_next(0, 1) {
                bulk += claimed.count();
            }
            assert_eq!(bulk + urgent.join().unwrap(), 2);
        });
    }
}
