// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A lock-free bitmap over pages, in which the thread that clears a bit owns its page.
//!
//! The thread that changes a bit from one to zero ([`PageBitmap::claim`]) owns the page, and no other
//! thread gets it: senders of background and of requested pages share no lock and no queue. The user
//! defines the meaning of a bit: a page of 4 KiB, a host page, a block of plugged memory; dirty, absent,
//! still to be sent.
//!
//! Owns nothing but its words. Must never use a lock, and must never panic on a page number, because page
//! numbers come from peers and guests: pages past the end are never set, and writes to them are ignored.
//! Checked by loom models (`--cfg loom`).

#[cfg(all(test, loom))]
mod loom_tests;
mod runs;
#[cfg(all(test, not(loom)))]
mod tests;
mod words;

use std::io;
use std::ops::Range;

pub use runs::{Claimed, runs_in_words};
use runs::{low_mask, runs_of, span};
use words::{AtomicU64, Ordering, Words, fence};

/// Bits in a word, the most that one claim takes.
pub const WORD_BITS: u64 = u64::BITS as u64;

// Lengths and indices are u64 in the protocol, and usize in memory.
const _: () = assert!(usize::BITS == u64::BITS, "page numbers have 64 bits");

/// Orders this thread's changes to one bitmap before its reads of another.
///
/// If each of two threads changes its own bitmap, calls this, and reads the other's, at least one of them
/// sees the other's change.
pub fn change_then_look() {
    fence(Ordering::SeqCst);
}

/// An atomic bitmap over pages `0..len`, all clear initially.
///
/// Setting a bit releases; testing and claiming acquire: a thread that sees a changed bit sees what was
/// written before the change.
#[derive(Debug)]
pub struct PageBitmap {
    words: Words,
    len: u64,
}

/// The part of a word that a range of pages covers.
#[derive(Clone, Copy)]
struct Piece {
    word: usize,
    shift: u32,
    bits: u32,
}

impl Piece {
    /// The piece of at most `max_pages` pages that begins at `page`.
    fn at(page: u64, max_pages: u64) -> Self {
        let shift = narrow(page % WORD_BITS);
        let bits = narrow(max_pages.min(WORD_BITS - u64::from(shift)));
        Self { word: to_usize(page / WORD_BITS), shift, bits }
    }

    fn mask(self) -> u64 {
        span(self.shift, self.bits)
    }
}

/// Converts a bit count or bit index of at most 64.
#[expect(clippy::cast_possible_truncation, reason = "callers pass 0..=64")]
const fn narrow(bits: u64) -> u32 {
    debug_assert!(bits <= WORD_BITS);
    bits as u32
}

#[expect(clippy::cast_possible_truncation, reason = "asserted above: both have 64 bits")]
const fn to_usize(value: u64) -> usize {
    value as usize
}

impl PageBitmap {
    /// A bitmap of `len` clear bits from the allocator. For short-lived bitmaps that are filled.
    pub fn new(len: u64) -> Self {
        Self { words: Words::new(to_usize(len.div_ceil(WORD_BITS))), len }
    }

    /// A bitmap of `len` clear bits in a mapping of its own, without huge pages: it uses memory as bits
    /// are set. For bitmaps that live as long as a guest and may stay empty.
    ///
    /// # Errors
    /// When the host has no address space left for it (32 MiB per tebibyte of guest memory).
    pub fn sparse(len: u64) -> io::Result<Self> {
        Ok(Self { words: Words::sparse(to_usize(len.div_ceil(WORD_BITS)))?, len })
    }

    /// Number of pages covered.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// True when the bitmap covers no pages.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the words, for tests that measure their memory.
    #[cfg(all(feature = "testing", not(loom)))]
    pub fn storage(&self) -> *const u8 {
        self.words.as_ptr().cast()
    }

    fn single(&self, page: u64) -> Option<(&AtomicU64, u64)> {
        if page >= self.len {
            return None;
        }
        let word = self.words.get(to_usize(page / WORD_BITS))?;
        Some((word, 1 << (page % WORD_BITS)))
    }

    /// The word-sized pieces of `range`, cut at the end of the bitmap.
    fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = (&AtomicU64, Piece)> {
        let end = range.end.min(self.len);
        let mut page = range.start;
        std::iter::from_fn(move || {
            if page >= end {
                return None;
            }
            let piece = Piece::at(page, end - page);
            page += u64::from(piece.bits);
            self.words.get(piece.word).map(|word| (word, piece))
        })
    }

    /// Number of bits in the results of `each`, which is called for the words of `range` with the mask of
    /// its bits in them.
    fn count_each(&self, range: Range<u64>, each: impl Fn(&AtomicU64, u64) -> u64) -> u64 {
        let end = range.end.min(self.len);
        let mut count = 0;
        let mut page = range.start;
        while page < end {
            let piece = Piece::at(page, end - page);
            let Some(word) = self.words.get(piece.word) else { break };
            count += u64::from(each(word, piece.mask()).count_ones());
            page += u64::from(piece.bits);
        }
        count
    }

    /// True when `page` is set.
    pub fn get(&self, page: u64) -> bool {
        self.single(page).is_some_and(|(word, mask)| word.load(Ordering::Acquire) & mask != 0)
    }

    /// Sets `page`; true when this call changed it.
    pub fn set(&self, page: u64) -> bool {
        self.single(page)
            .is_some_and(|(word, mask)| word.fetch_or(mask, Ordering::AcqRel) & mask == 0)
    }

    /// Clears `page`; true when this call changed it, in which case the caller owns the page.
    pub fn claim(&self, page: u64) -> bool {
        self.single(page)
            .is_some_and(|(word, mask)| word.fetch_and(!mask, Ordering::AcqRel) & mask != 0)
    }

    /// Sets every page of `range`; returns how many this call set. Each word changes atomically, the range
    /// as a whole does not.
    pub fn set_range(&self, range: Range<u64>) -> u64 {
        self.count_each(range, |word, mask| mask & !word.fetch_or(mask, Ordering::AcqRel))
    }

    /// Clears every page of `range`; returns how many this call cleared, which the caller now owns.
    ///
    /// Words without a set bit are only read, so that clearing a large empty range uses no memory.
    pub fn claim_range(&self, range: Range<u64>) -> u64 {
        self.count_each(range, |word, mask| match word.load(Ordering::Acquire) & mask {
            0 => 0,
            _ => word.fetch_and(!mask, Ordering::AcqRel) & mask,
        })
    }

    /// Claims up to `max` (1 to 64) neighbouring pages: in the first word with a set page at or after
    /// `from`, the set pages within `max` of the first one. `None` when no page at or after `from` is set.
    pub fn claim_next(&self, from: u64, max: u32) -> Option<Claimed> {
        let max = max.clamp(1, u64::BITS);
        let mut base = from - from % WORD_BITS;
        let mut here = u64::MAX << (from % WORD_BITS);
        for word in self.words.get(to_usize(from / WORD_BITS)..)? {
            let mut seen = word.load(Ordering::Acquire) & here;
            while seen != 0 {
                let first = seen.trailing_zeros();
                let wanted = seen & span(first, max.min(u64::BITS - first));
                let mask = word.fetch_and(!wanted, Ordering::AcqRel) & wanted;
                if mask != 0 {
                    return Some(Claimed { base, mask });
                }
                // Other threads claimed all of these between the load and the claim; load again.
                seen = word.load(Ordering::Acquire) & here;
            }
            base += WORD_BITS;
            here = u64::MAX;
        }
        None
    }

    /// Clears every page. Not for a bitmap that other threads set meanwhile. Clear words are only read.
    pub fn clear(&self) {
        for word in &*self.words {
            if word.load(Ordering::Acquire) != 0 {
                word.store(0, Ordering::Release);
            }
        }
    }

    /// The first clear page of `range` that lies within the bitmap.
    pub fn next_clear(&self, range: Range<u64>) -> Option<u64> {
        let mut page = range.start;
        for (word, piece) in self.pieces(range) {
            let found = !word.load(Ordering::Acquire) & piece.mask();
            if found != 0 {
                return Some(page + u64::from(found.trailing_zeros() - piece.shift));
            }
            page += u64::from(piece.bits);
        }
        None
    }

    /// True when any page of `range` is set.
    pub fn any(&self, range: Range<u64>) -> bool {
        self.pieces(range).any(|(word, piece)| word.load(Ordering::Acquire) & piece.mask() != 0)
    }

    /// Number of set pages (each word a snapshot, when other threads change it meanwhile).
    pub fn count(&self) -> u64 {
        self.words().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Number of set pages in `range`.
    pub fn count_range(&self, range: Range<u64>) -> u64 {
        self.count_each(range, |word, mask| word.load(Ordering::Acquire) & mask)
    }

    /// The runs of set pages, in order (each word a snapshot). Reads whole words and stores nothing,
    /// because a bitmap may have as many runs as half of its pages.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        runs_of(0, self.words())
    }

    /// The runs of set pages in `range`, like [`runs`](Self::runs).
    pub fn runs_in(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let base = range.start - range.start % WORD_BITS;
        let pieces = self.pieces(range);
        runs_of(base, pieces.map(|(word, piece)| word.load(Ordering::Acquire) & piece.mask()))
    }

    /// The runs of pages that are set in both this bitmap and `other`, of the same length.
    pub fn common_runs(&self, other: &Self) -> impl Iterator<Item = Range<u64>> {
        debug_assert_eq!(self.len, other.len);
        let words = self.words.iter().zip(&*other.words);
        let common = words.map(|(one, other)| match one.load(Ordering::Acquire) {
            // Most bitmaps that are compared are almost empty.
            0 => 0,
            one => one & other.load(Ordering::Acquire),
        });
        runs_of(0, common)
    }

    /// A separate bitmap with the same bits (each word a snapshot).
    #[must_use]
    pub fn copy(&self) -> Self {
        self.copy_of(self.words())
    }

    /// A bitmap of the bits that are set here and not in `other`, of the same length (each word a
    /// snapshot).
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        debug_assert_eq!(self.len, other.len);
        self.copy_of(self.words().zip(other.words()).map(|(one, other)| one & !other))
    }

    fn copy_of(&self, words: impl Iterator<Item = u64>) -> Self {
        let copy = Self::new(self.len);
        for (to, word) in copy.words.iter().zip(words) {
            // Clear words of the copy use no memory.
            if word != 0 {
                to.store(word, Ordering::Release);
            }
        }
        copy
    }

    /// Sets the bits that are set in `other`, a bitmap of the same length.
    pub fn add(&self, other: &Self) {
        debug_assert_eq!(self.len, other.len);
        for (to, word) in self.words.iter().zip(other.words()) {
            if word != 0 {
                to.fetch_or(word, Ordering::AcqRel);
            }
        }
    }

    /// All words in order, bit 0 of word 0 being page 0 (each word a snapshot).
    pub fn words(&self) -> impl ExactSizeIterator<Item = u64> {
        self.words.iter().map(|word| word.load(Ordering::Acquire))
    }

    /// Sets the bits of a word; false when there are bits beyond the bitmap, which are not set.
    pub fn set_word(&self, index: u64, bits: u64) -> bool {
        let Some(word) = usize::try_from(index).ok().and_then(|index| self.words.get(index)) else {
            return bits == 0;
        };
        let valid = low_mask(narrow((self.len - index * WORD_BITS).min(WORD_BITS)));
        if bits & valid != 0 {
            word.fetch_or(bits & valid, Ordering::AcqRel);
        }
        bits & !valid == 0
    }

    /// The bits of `range` as words: bit i of word w is page `range.start + 64 * w + i`. Bits past the
    /// range are zero. `range` may begin anywhere.
    pub fn to_words(&self, range: Range<u64>) -> Vec<u64> {
        let pages = range.end.saturating_sub(range.start);
        let mut out = vec![0; to_usize(pages.div_ceil(WORD_BITS))];
        self.gather(range, &mut out, |word, mask| word.load(Ordering::Acquire) & mask);
        out
    }

    /// Moves the bits of `range` to `out` and clears them here, each word atomically: a bit is in `out`,
    /// or it is still (or again) set here, never neither. Layout as in [`to_words`](Self::to_words). Pages
    /// for which `out` has no room are not changed.
    pub fn take_words(&self, range: Range<u64>, out: &mut [u64]) {
        out.fill(0);
        self.gather(range, out, |word, mask| {
            if word.load(Ordering::Acquire) & mask == 0 {
                return 0;
            }
            word.fetch_and(!mask, Ordering::AcqRel) & mask
        });
    }

    fn gather(&self, range: Range<u64>, out: &mut [u64], take: impl Fn(&AtomicU64, u64) -> u64) {
        let start = range.start;
        let mut page = start;
        for (word, piece) in self.pieces(start..end_within(&range, out)) {
            let bits = take(word, piece.mask()) >> piece.shift;
            scatter(out, page - start, bits);
            page += u64::from(piece.bits);
        }
    }

    /// Sets the pages whose bits are set in `words` (layout of [`to_words`](Self::to_words)); bits past
    /// `range` and words past its end are ignored, so that untrusted words are harmless.
    pub fn or_words(&self, range: Range<u64>, words: &[u64]) {
        let start = range.start;
        let mut page = start;
        for (word, piece) in self.pieces(start..end_within(&range, words)) {
            let bits = pick(words, page - start) << piece.shift & piece.mask();
            if bits != 0 {
                word.fetch_or(bits, Ordering::AcqRel);
            }
            page += u64::from(piece.bits);
        }
    }
}

/// The end of `range`, or of the pages that `words` have bits for, whichever is first.
fn end_within(range: &Range<u64>, words: &[u64]) -> u64 {
    let room = u64::try_from(words.len()).unwrap_or(u64::MAX).saturating_mul(WORD_BITS);
    range.end.min(range.start.saturating_add(room))
}

/// ORs the low bits of `bits` into `out` from bit `at` on; bits past the end are dropped.
fn scatter(out: &mut [u64], at: u64, bits: u64) {
    let word = to_usize(at / WORD_BITS);
    let shift = narrow(at % WORD_BITS);
    if let Some(low) = out.get_mut(word) {
        *low |= bits << shift;
    }
    if shift > 0
        && let Some(high) = out.get_mut(word + 1)
    {
        *high |= bits >> (u64::BITS - shift);
    }
}

/// 64 bits of `words` from bit `at` on; missing bits are zero.
fn pick(words: &[u64], at: u64) -> u64 {
    let word = to_usize(at / WORD_BITS);
    let shift = narrow(at % WORD_BITS);
    let low = words.get(word).map_or(0, |low| low >> shift);
    if shift == 0 {
        return low;
    }
    low | words.get(word + 1).map_or(0, |high| high << (u64::BITS - shift))
}
