// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The bitmap against a plain model, and claims from many threads.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Barrier;

use proptest::prelude::*;

use super::{Claimed, PageBitmap, runs_in_words};

const PAGES: u64 = 300;

#[derive(Debug, Clone)]
enum Step {
    Set(u64),
    Claim(u64),
    SetRange(Range<u64>),
    ClaimRange(Range<u64>),
    ClaimNext(u64, u32),
    Clear,
    Add(Vec<u64>),
    SetWord(u64, u64),
    Take(Range<u64>),
    Or(Range<u64>, Vec<u64>),
}

/// Numbers inside, at and past the end, all of which the bitmap must accept.
fn page() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0..PAGES + 70, 1 => Just(u64::MAX), 1 => Just(PAGES - 1)]
}

fn range() -> impl Strategy<Value = Range<u64>> {
    (page(), page()).prop_map(|(a, b)| a..b)
}

fn step() -> impl Strategy<Value = Step> {
    // Words are handed over for at most a few hundred pages, so ranges there stay finite.
    let finite = || (0..PAGES + 70, 0..PAGES + 70).prop_map(|(a, b)| a..b);
    let words = || prop::collection::vec(any::<u64>(), 0..8);
    prop_oneof![
        page().prop_map(Step::Set),
        page().prop_map(Step::Claim),
        range().prop_map(Step::SetRange),
        range().prop_map(Step::ClaimRange),
        (page(), 0..70_u32).prop_map(|(from, max)| Step::ClaimNext(from, max)),
        Just(Step::Clear),
        prop::collection::vec(0..PAGES, 0..40).prop_map(Step::Add),
        (0..8_u64, any::<u64>()).prop_map(|(index, bits)| Step::SetWord(index, bits)),
        finite().prop_map(Step::Take),
        (finite(), words()).prop_map(|(at, words)| Step::Or(at, words)),
    ]
}

fn clip(range: &Range<u64>) -> Range<u64> {
    range.start..range.end.min(PAGES)
}

fn bit(words: &[u64], index: u64) -> Option<bool> {
    let word = words.get(usize::try_from(index / 64).unwrap())?;
    Some(word >> (index % 64) & 1 == 1)
}

/// The pages of `model` in the first word with any from `from` on, within `max` of the first.
fn next_of(model: &BTreeSet<u64>, from: u64, max: u32) -> Vec<u64> {
    let Some(first) = model.range(from..).next().copied() else { return Vec::new() };
    let end = (first / 64 * 64 + 64).min(first + u64::from(max.clamp(1, 64)));
    model.range(first..end).copied().collect()
}

fn bitmap_of(pages: &BTreeSet<u64>) -> PageBitmap {
    let bitmap = PageBitmap::new(PAGES);
    for page in pages {
        assert!(bitmap.set(*page));
    }
    bitmap
}

fn pages_of(runs: impl Iterator<Item = Range<u64>>) -> Vec<u64> {
    let runs: Vec<_> = runs.collect();
    assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start), "not maximal: {runs:?}");
    runs.into_iter().flatten().collect()
}

fn apply(bitmap: &PageBitmap, model: &mut BTreeSet<u64>, step: Step) {
    match step {
        Step::Set(page) => {
            let changed = page < PAGES && model.insert(page);
            assert_eq!(bitmap.set(page), changed);
        }
        Step::Claim(page) => assert_eq!(bitmap.claim(page), model.remove(&page)),
        Step::SetRange(range) => {
            let before = model.len();
            model.extend(clip(&range));
            assert_eq!(bitmap.set_range(range), (model.len() - before) as u64);
        }
        Step::ClaimRange(range) => {
            let before = model.len();
            model.retain(|page| !range.contains(page));
            assert_eq!(bitmap.claim_range(range), (before - model.len()) as u64);
        }
        Step::ClaimNext(from, max) => {
            let want = next_of(model, from, max);
            let got = bitmap.claim_next(from, max);
            assert_eq!(got.map_or(Vec::new(), |claimed| pages_of(claimed.runs())), want);
            assert_eq!(got.map_or(0, Claimed::count), want.len() as u64);
            assert_eq!(got.map(Claimed::end), want.last().map(|page| page + 1));
            for page in want {
                assert!(model.remove(&page));
            }
        }
        Step::Clear => {
            bitmap.clear();
            model.clear();
        }
        Step::Add(pages) => {
            let pages = BTreeSet::from_iter(pages);
            bitmap.add(&bitmap_of(&pages));
            model.extend(pages);
        }
        Step::SetWord(index, bits) => {
            let pages = (0..64).filter(|bit| bits >> bit & 1 == 1).map(|bit| index * 64 + bit);
            let inside: Vec<u64> = pages.clone().filter(|page| *page < PAGES).collect();
            assert_eq!(bitmap.set_word(index, bits), inside.len() == pages.count());
            model.extend(inside);
        }
        Step::Take(range) => {
            let mut out = bitmap.to_words(range.clone());
            let copy = out.clone();
            bitmap.take_words(range.clone(), &mut out);
            assert_eq!(out, copy);
            for page in range.clone() {
                assert_eq!(bit(&out, page - range.start), Some(model.remove(&page)));
            }
        }
        Step::Or(range, words) => {
            bitmap.or_words(range.clone(), &words);
            let set = |page: &u64| bit(&words, page - range.start) == Some(true);
            model.extend(clip(&range).filter(set));
        }
    }
}

proptest! {
    #[test]
    fn behaves_like_a_set(
        steps in prop::collection::vec(step(), 0..60), window in range(),
        other in prop::collection::btree_set(0..PAGES, 0..100), is_sparse: bool,
    ) {
        let bitmap =
            if is_sparse { PageBitmap::sparse(PAGES).unwrap() } else { PageBitmap::new(PAGES) };
        let mut model = BTreeSet::new();
        for step in steps {
            apply(&bitmap, &mut model, step);
        }
        prop_assert_eq!(bitmap.count(), model.len() as u64);
        let inside = |page: &u64| window.contains(page);
        let expected: Vec<u64> = model.iter().copied().filter(inside).collect();
        prop_assert_eq!(bitmap.count_range(window.clone()), expected.len() as u64);
        prop_assert_eq!(bitmap.any(window.clone()), !expected.is_empty());
        let clear = clip(&window).find(|page| !model.contains(page));
        prop_assert_eq!(bitmap.next_clear(window.clone()), clear);
        prop_assert_eq!(pages_of(bitmap.runs_in(window)), expected);
        let all: Vec<u64> = model.iter().copied().collect();
        prop_assert_eq!(pages_of(bitmap.runs()), all.clone());
        prop_assert_eq!(pages_of(bitmap.copy().runs()), all);
        let words: Vec<u64> = bitmap.words().collect();
        let shifted = pages_of(runs_in_words(&words, 7));
        prop_assert!(shifted.iter().map(|page| page - 7).eq(model.iter().copied()));
        let with = bitmap_of(&other);
        let common: Vec<u64> = model.intersection(&other).copied().collect();
        prop_assert_eq!(pages_of(bitmap.common_runs(&with)), common);
        let without: Vec<u64> = model.difference(&other).copied().collect();
        prop_assert_eq!(pages_of(bitmap.without(&with).runs()), without);
        prop_assert!((0..PAGES).all(|page| bitmap.get(page) == model.contains(&page)));
        prop_assert!(!bitmap.get(PAGES) && !bitmap.get(u64::MAX));
    }
}

#[test]
fn each_page_is_claimed_exactly_once_by_many_threads() {
    const THREADS: u64 = 8;
    const MANY: u64 = 100_000;
    let bitmap = PageBitmap::new(MANY);
    bitmap.set_range(0..MANY);
    let start = Barrier::new(usize::try_from(THREADS).unwrap());
    let claimer = |thread: u64| {
        let mut mine = Vec::new();
        start.wait();
        if thread.is_multiple_of(2) {
            // A bulk sender claims runs, from its own starting point around the end.
            for from in [thread * MANY / THREADS, 0] {
                let mut at = from;
                while let Some(claimed) = bitmap.claim_next(at, 37) {
                    at = claimed.end();
                    mine.extend(claimed.runs().flatten());
                }
            }
        } else {
            // An urgent sender claims single pages at scattered places.
            mine.extend((0..MANY).map(|n| n * 7919 % MANY).filter(|page| bitmap.claim(*page)));
        }
        mine
    };
    let mut all: Vec<u64> = std::thread::scope(|scope| {
        let claimers: Vec<_> =
            (0..THREADS).map(|thread| scope.spawn(move || claimer(thread))).collect();
        claimers.into_iter().flat_map(|claimer| claimer.join().unwrap()).collect()
    });
    assert_eq!(all.len() as u64, MANY);
    all.sort_unstable();
    assert!(all.into_iter().eq(0..MANY));
    assert_eq!(bitmap.count(), 0);
}

#[test]
fn an_empty_bitmap_has_no_pages() {
    let bitmap = PageBitmap::new(0);
    assert!(!bitmap.set(0));
    assert_eq!(bitmap.claim_next(0, 10), None);
    assert_eq!(bitmap.runs().chain(bitmap.runs_in(0..10)).count(), 0);
}
