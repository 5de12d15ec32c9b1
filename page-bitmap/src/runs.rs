// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Runs of set bits: words in, ascending ranges of pages out, joined across words.
//!
//! Owns the arithmetic on one word and on a sequence of them. Must never collect what it can hand out
//! one by one, and touches no atomic.

use std::ops::Range;

use crate::WORD_BITS;

/// The result of a claim: bits of one word that the caller owns now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// Page number of the word's first bit.
    pub base: u64,
    /// The claimed bits, bit 0 being `base`.
    pub mask: u64,
}

impl Claimed {
    /// The claimed pages as ascending runs.
    pub fn runs(self) -> impl Iterator<Item = Range<u64>> {
        runs_of(self.base, std::iter::once(self.mask))
    }

    /// Number of pages claimed.
    pub fn count(self) -> u64 {
        u64::from(self.mask.count_ones())
    }

    /// The page after the last claimed one.
    pub fn end(self) -> u64 {
        self.base + WORD_BITS - u64::from(self.mask.leading_zeros())
    }
}

/// The set bits of words as ascending runs; bit 0 of the first word is page `base`.
pub fn runs_in_words(words: &[u64], base: u64) -> impl Iterator<Item = Range<u64>> {
    runs_of(base, words.iter().copied())
}

pub(crate) const fn low_mask(bits: u32) -> u64 {
    if bits >= u64::BITS { u64::MAX } else { (1 << bits) - 1 }
}

/// A mask of `count` ones from bit `first` on; `first + count` is at most 64.
pub(crate) const fn span(first: u32, count: u32) -> u64 {
    if count == 0 {
        return 0;
    }
    (u64::MAX >> (u64::BITS - count)) << first
}

/// The set bits of words as ascending runs; bit 0 of the first word is page `base`.
pub(crate) fn runs_of(
    mut base: u64,
    mut words: impl Iterator<Item = u64>,
) -> impl Iterator<Item = Range<u64>> {
    // The rest of the current word, and a run that may continue.
    let mut left = words.next();
    let mut open: Option<Range<u64>> = None;
    std::iter::from_fn(move || {
        loop {
            // Most words of most bitmaps are clear.
            while left == Some(0) && open.is_none() {
                base += WORD_BITS;
                left = words.next();
            }
            let Some(mask) = &mut left else { return open.take() };
            if *mask == 0 {
                base += WORD_BITS;
                left = words.next();
                // A run continues only if the next word begins with a set bit.
                let ends = open.as_ref().is_some_and(|run| run.end != base)
                    || left.is_none_or(|next| next & 1 == 0);
                if ends && let Some(run) = open.take() {
                    return Some(run);
                }
                continue;
            }
            let first = mask.trailing_zeros();
            let count = (*mask >> first).trailing_ones();
            *mask &= !span(first, count);
            let start = base + u64::from(first);
            let end = start + u64::from(count);
            match &mut open {
                Some(before) if before.end == start => before.end = end,
                _ => {
                    if let Some(before) = open.replace(start..end) {
                        return Some(before);
                    }
                }
            }
        }
    })
}
