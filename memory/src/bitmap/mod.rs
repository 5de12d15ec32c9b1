// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One bit per 4 KiB page, shared by threads without a lock.
//!
//! Ownership of a page is a bit: the thread that changes it from one to zero ([`PageBitmap::claim`]) owns
//! the page, and no other thread gets it. Owns nothing but its words. Must never panic on a page
//! number: pages past the end are never set, and writes to them are ignored, since page numbers
//! come from peers and guests.

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
mod words;

use std::io;
use std::ops::Range;

use crate::to_usize;
use words::{AtomicU64, Ordering, Words};

const WORD_BITS: u64 = u64::BITS as u64;

/// An atomic bitmap over pages `0..len_pages`, all clear at first.
///
/// Allocation costs the same for any size; memory is used as bits are set. Setting a bit
/// releases, testing and claiming acquire: who sees a bit changed sees what was written before.
#[derive(Debug)]
pub struct PageBitmap {
    words: Words,
    len_pages: u64,
}

/// The part of one word that a range of pages covers.
#[derive(Clone, Copy)]
struct Piece {
    word: usize,
    shift: u32,
    bits: u32,
}

impl Piece {
    /// The piece at `page` of at most `max_pages` pages.
    fn at(page: u64, max_pages: u64) -> Self {
        let shift = narrow(page % WORD_BITS);
        let bits = narrow(max_pages.min(WORD_BITS - u64::from(shift)));
        Self { word: to_usize(page / WORD_BITS), shift, bits }
    }

    fn mask(self) -> u64 {
        low_mask(self.bits) << self.shift
    }
}

/// A bit count or bit index, at most 64.
#[expect(clippy::cast_possible_truncation, reason = "callers pass 0..=64")]
const fn narrow(bits: u64) -> u32 {
    debug_assert!(bits <= WORD_BITS);
    bits as u32
}

const fn low_mask(bits: u32) -> u64 {
    if bits >= u64::BITS { u64::MAX } else { (1 << bits) - 1 }
}

impl PageBitmap {
    /// A bitmap of `len_pages` clear bits.
    ///
    /// # Errors
    /// The host has no address space left for it (32 MiB per tebibyte of guest memory).
    pub fn new(len_pages: u64) -> io::Result<Self> {
        let words = Words::new(to_usize(len_pages.div_ceil(WORD_BITS)))?;
        Ok(Self { words, len_pages })
    }

    /// Number of pages covered.
    pub const fn len_pages(&self) -> u64 {
        self.len_pages
    }

    /// Where the words are, for tests that look at their cost.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn storage(&self) -> *const u8 {
        self.words.as_ptr().cast()
    }

    fn single(&self, page: u64) -> Option<(&AtomicU64, u64)> {
        if page >= self.len_pages {
            return None;
        }
        let piece = Piece::at(page, 1);
        Some((self.words.get(piece.word)?, piece.mask()))
    }

    /// The word-sized pieces of `range`, cut at the end of the bitmap.
    fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = (&AtomicU64, Piece)> {
        let end = range.end.min(self.len_pages);
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

    /// Whether `page` is set.
    pub fn test(&self, page: u64) -> bool {
        self.single(page).is_some_and(|(word, mask)| word.load(Ordering::Acquire) & mask != 0)
    }

    /// Sets `page`; true when this call changed it.
    pub fn set(&self, page: u64) -> bool {
        self.single(page)
            .is_some_and(|(word, mask)| word.fetch_or(mask, Ordering::AcqRel) & mask == 0)
    }

    /// Clears `page`; true when this call changed it, in which case the caller now owns the page.
    pub fn claim(&self, page: u64) -> bool {
        self.single(page)
            .is_some_and(|(word, mask)| word.fetch_and(!mask, Ordering::AcqRel) & mask != 0)
    }

    /// Clears `page`. Same as [`claim`](Self::claim) for callers that do not ask who was first.
    pub fn clear(&self, page: u64) {
        self.claim(page);
    }

    /// Sets every page of `range`. Each word changes at once, the range as a whole does not.
    pub fn set_range(&self, range: Range<u64>) {
        for (word, piece) in self.pieces(range) {
            word.fetch_or(piece.mask(), Ordering::AcqRel);
        }
    }

    /// Clears every page of `range`; returns how many this call cleared (and so claimed).
    ///
    /// Words without a set bit are only read, so that clearing a large empty range uses no memory.
    pub fn clear_range(&self, range: Range<u64>) -> u64 {
        let mut cleared = 0;
        for (word, piece) in self.pieces(range) {
            let mask = piece.mask();
            if word.load(Ordering::Acquire) & mask != 0 {
                let before = word.fetch_and(!mask, Ordering::AcqRel);
                cleared += u64::from((before & mask).count_ones());
            }
        }
        cleared
    }

    /// Claims the first run of set pages at or after `from`, at most `max_pages` long.
    ///
    /// Every page of the returned run was claimed by this call and by no other. `None` means that
    /// no page from `from` on is set any more.
    pub fn claim_run(&self, from: u64, max_pages: u64) -> Option<Range<u64>> {
        self.claim_run_within(from..self.len_pages, max_pages)
    }

    /// As [`claim_run`](Self::claim_run), looking only inside `range`.
    pub fn claim_run_within(&self, range: Range<u64>, max_pages: u64) -> Option<Range<u64>> {
        let end = range.end.min(self.len_pages);
        let mut from = range.start;
        if max_pages == 0 {
            return None;
        }
        loop {
            let first = self.next_set(from..end)?;
            if let Some(run) = self.claim_run_at(first, max_pages.min(end - first)) {
                return Some(run);
            }
            // Another thread has claimed exactly this page.
            from = first;
        }
    }

    /// Claims the run of set pages that begins exactly at `first`, at most `max_pages` long;
    /// `None` when `first` itself is not to be had.
    pub fn claim_run_at(&self, first: u64, max_pages: u64) -> Option<Range<u64>> {
        let mut end = first;
        for (word, piece) in self.pieces(first..first.saturating_add(max_pages)) {
            let taken = claim_low_ones(word, piece);
            end += u64::from(taken);
            if taken < piece.bits {
                break;
            }
        }
        (end > first).then_some(first..end)
    }

    /// The first set page of `range`.
    pub fn next_set(&self, range: Range<u64>) -> Option<u64> {
        self.find(range, |word| word)
    }

    /// The first clear page of `range`, within the bitmap.
    pub fn next_clear(&self, range: Range<u64>) -> Option<u64> {
        self.find(range, |word| !word)
    }

    fn find(&self, range: Range<u64>, sense: impl Fn(u64) -> u64) -> Option<u64> {
        let mut page = range.start;
        for (word, piece) in self.pieces(range) {
            let found = sense(word.load(Ordering::Acquire)) & piece.mask();
            if found != 0 {
                return Some(page + u64::from(found.trailing_zeros() - piece.shift));
            }
            page += u64::from(piece.bits);
        }
        None
    }

    /// The runs of set pages in `range`, in order, as they are when the iterator gets there.
    pub fn runs(&self, range: Range<u64>) -> Runs<'_> {
        Runs { bitmap: self, next: range.start, end: range.end.min(self.len_pages) }
    }

    /// Number of set pages.
    pub fn count(&self) -> u64 {
        self.count_range(0..self.len_pages)
    }

    /// Number of set pages in `range`.
    pub fn count_range(&self, range: Range<u64>) -> u64 {
        self.pieces(range)
            .map(|(word, piece)| {
                u64::from((word.load(Ordering::Acquire) & piece.mask()).count_ones())
            })
            .sum()
    }

    /// Whether any page of `range` is set.
    pub fn any(&self, range: Range<u64>) -> bool {
        self.next_set(range).is_some()
    }

    /// `range` as words: bit i of word w is page `range.start + 64 * w + i`. Bits past the range
    /// are zero. `range` may begin anywhere.
    pub fn to_words(&self, range: Range<u64>) -> Vec<u64> {
        let mut out = words_for(&range);
        self.gather(range, &mut out, |word, mask| word.load(Ordering::Acquire) & mask);
        out
    }

    /// Takes the bits of `range` into `out` and clears them here, each word at once: a bit is in
    /// `out`, or it is still (or again) set here, never neither. Layout as in
    /// [`to_words`](Self::to_words). Pages for which `out` has no room are left alone.
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
        let room = u64::try_from(out.len()).unwrap_or(u64::MAX).saturating_mul(WORD_BITS);
        let end = range.end.min(start.saturating_add(room));
        let mut page = start;
        for (word, piece) in self.pieces(start..end) {
            let bits = take(word, piece.mask()) >> piece.shift;
            scatter(out, page - start, bits);
            page += u64::from(piece.bits);
        }
    }

    /// Sets the pages whose bits are set in `words` (layout of [`to_words`](Self::to_words));
    /// bits past `range` and words past its end are ignored, so that foreign words are harmless.
    pub fn or_words(&self, range: Range<u64>, words: &[u64]) {
        self.each_piece_with(range, words, |word, mask, bits| {
            if bits & mask != 0 {
                word.fetch_or(bits & mask, Ordering::AcqRel);
            }
        });
    }

    /// Makes `range` equal to `words` (layout of [`to_words`](Self::to_words)). Pages for which
    /// `words` has no bit are left alone. Not one atomic step: no other thread may change `range`.
    pub fn assign_words(&self, range: Range<u64>, words: &[u64]) {
        self.each_piece_with(range, words, |word, mask, bits| {
            let before = word.load(Ordering::Acquire);
            let wanted = (before & !mask) | (bits & mask);
            if before != wanted {
                word.fetch_and(!mask, Ordering::AcqRel);
                word.fetch_or(bits & mask, Ordering::AcqRel);
            }
        });
    }

    fn each_piece_with(
        &self,
        range: Range<u64>,
        words: &[u64],
        apply: impl Fn(&AtomicU64, u64, u64),
    ) {
        let start = range.start;
        let room = u64::try_from(words.len()).unwrap_or(u64::MAX).saturating_mul(WORD_BITS);
        let end = range.end.min(start.saturating_add(room));
        let mut page = start;
        for (word, piece) in self.pieces(start..end) {
            let bits = pick(words, page - start) << piece.shift;
            apply(word, piece.mask(), bits);
            page += u64::from(piece.bits);
        }
    }
}

/// Claims the run of ones at the low end of `piece`; returns its length in bits.
///
/// A compare-and-swap rather than a fetch-and: the run must stay one piece when another thread
/// takes a page out of its middle, because a page once claimed cannot be given back unseen.
fn claim_low_ones(word: &AtomicU64, piece: Piece) -> u32 {
    let mut seen = word.load(Ordering::Acquire);
    loop {
        let run = (seen >> piece.shift).trailing_ones().min(piece.bits);
        if run == 0 {
            return 0;
        }
        let mask = low_mask(run) << piece.shift;
        match word.compare_exchange_weak(seen, seen & !mask, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return run,
            Err(now) => seen = now,
        }
    }
}

fn words_for(range: &Range<u64>) -> Vec<u64> {
    let pages = range.end.saturating_sub(range.start);
    vec![0; to_usize(pages.div_ceil(WORD_BITS))]
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

/// Runs of set pages; made by [`PageBitmap::runs`].
#[derive(Debug)]
pub struct Runs<'a> {
    bitmap: &'a PageBitmap,
    next: u64,
    end: u64,
}

impl Iterator for Runs<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let first = self.bitmap.next_set(self.next..self.end)?;
        // The page was set a moment ago: a run has at least that page, whatever happened since.
        let after = first + 1;
        let end = self.bitmap.next_clear(after..self.end).unwrap_or(self.end.max(after));
        self.next = end;
        Some(first..end)
    }
}
