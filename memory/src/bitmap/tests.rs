// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The bitmap against a plain model, and claims from many threads.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Barrier;

use proptest::prelude::*;

use super::PageBitmap;

const PAGES: u64 = 300;

#[derive(Debug, Clone)]
enum Step {
    Set(u64),
    Claim(u64),
    SetRange(Range<u64>),
    ClearRange(Range<u64>),
    ClaimRun(u64, u64),
    ClaimRunAt(u64, u64),
    Take(Range<u64>),
    Or(Range<u64>, Vec<u64>),
    Assign(Range<u64>, Vec<u64>),
}

/// Numbers inside, at and past the end: the bitmap must take them all.
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
        range().prop_map(Step::ClearRange),
        (page(), 0..150_u64).prop_map(|(from, max)| Step::ClaimRun(from, max)),
        (page(), page()).prop_map(|(from, max)| Step::ClaimRunAt(from, max)),
        finite().prop_map(Step::Take),
        (finite(), words()).prop_map(|(at, words)| Step::Or(at, words)),
        (finite(), words()).prop_map(|(at, words)| Step::Assign(at, words)),
    ]
}

fn clip(range: &Range<u64>) -> Range<u64> {
    range.start..range.end.min(PAGES)
}

fn bit(words: &[u64], index: u64) -> Option<bool> {
    let word = words.get(usize::try_from(index / 64).unwrap())?;
    Some(word >> (index % 64) & 1 == 1)
}

fn run_at(model: &BTreeSet<u64>, first: u64, max: u64) -> Option<Range<u64>> {
    let mut end = first;
    while model.contains(&end) && end - first < max {
        end += 1;
    }
    (end > first).then_some(first..end)
}

fn apply(bitmap: &PageBitmap, model: &mut BTreeSet<u64>, step: Step) {
    match step {
        Step::Set(page) => {
            let changed = page < PAGES && model.insert(page);
            assert_eq!(bitmap.set(page), changed);
        }
        Step::Claim(page) => assert_eq!(bitmap.claim(page), model.remove(&page)),
        Step::SetRange(range) => {
            bitmap.set_range(range.clone());
            model.extend(clip(&range));
        }
        Step::ClearRange(range) => {
            let before = model.len();
            model.retain(|page| !range.contains(page));
            assert_eq!(bitmap.clear_range(range), (before - model.len()) as u64);
        }
        Step::ClaimRun(from, max) => {
            let first = model.range(from..).next().copied();
            let want = first.and_then(|first| run_at(model, first, max));
            assert_eq!(bitmap.claim_run(from, max), want);
            want.into_iter().flatten().for_each(|page| assert!(model.remove(&page)));
        }
        Step::ClaimRunAt(from, max) => {
            let want = run_at(model, from, max);
            assert_eq!(bitmap.claim_run_at(from, max), want);
            want.into_iter().flatten().for_each(|page| assert!(model.remove(&page)));
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
        Step::Assign(range, words) => {
            bitmap.assign_words(range.clone(), &words);
            for page in clip(&range) {
                match bit(&words, page - range.start) {
                    Some(true) => drop(model.insert(page)),
                    Some(false) => drop(model.remove(&page)),
                    None => {}
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn behaves_like_a_set(steps in prop::collection::vec(step(), 0..60), window in range()) {
        let bitmap = PageBitmap::new(PAGES).unwrap();
        let mut model = BTreeSet::new();
        for step in steps {
            apply(&bitmap, &mut model, step);
        }
        prop_assert_eq!(bitmap.count(), model.len() as u64);
        let inside = |page: &u64| window.contains(page);
        let expected: Vec<u64> = model.iter().copied().filter(inside).collect();
        prop_assert_eq!(bitmap.count_range(window.clone()), expected.len() as u64);
        prop_assert_eq!(bitmap.next_set(window.clone()), expected.first().copied());
        prop_assert_eq!(bitmap.any(window.clone()), !expected.is_empty());
        let clear = clip(&window).find(|page| !model.contains(page));
        prop_assert_eq!(bitmap.next_clear(window.clone()), clear);
        let runs: Vec<_> = bitmap.runs(window.clone()).collect();
        prop_assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start), "not maximal");
        let listed: Vec<u64> = runs.into_iter().flatten().collect();
        prop_assert_eq!(listed, expected);
        prop_assert!((0..PAGES).all(|page| bitmap.test(page) == model.contains(&page)));
        prop_assert!(!bitmap.test(PAGES) && !bitmap.test(u64::MAX));
    }
}

#[test]
fn each_page_is_claimed_exactly_once_by_many_threads() {
    const THREADS: u64 = 8;
    const MANY: u64 = 100_000;
    let bitmap = PageBitmap::new(MANY).unwrap();
    bitmap.set_range(0..MANY);
    let start = Barrier::new(usize::try_from(THREADS).unwrap());
    let claimer = |thread: u64| {
        let mut mine = Vec::new();
        start.wait();
        if thread.is_multiple_of(2) {
            // A bulk pusher: runs, from its own starting point round the end.
            for from in [thread * MANY / THREADS, 0] {
                let mut at = from;
                while let Some(run) = bitmap.claim_run(at, 37) {
                    at = run.end;
                    mine.extend(run);
                }
            }
        } else {
            // An urgent server: single pages, all over the place.
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
fn a_terabyte_bitmap_uses_no_memory_until_written() {
    let pages = (1 << 40) / 4096;
    let bitmap = PageBitmap::new(pages).unwrap();
    let bytes = || crate::host::testing::resident_bytes(bitmap.storage(), pages / 8);
    assert_eq!(bytes(), 0);
    bitmap.set(pages / 2);
    assert_eq!(bytes(), 4096);
    // Clearing what is clear reads only; reads map the shared zero page and allocate nothing.
    assert_eq!(bitmap.clear_range(0..pages), 1);
    assert_eq!(bitmap.count(), 0);
}

#[test]
fn an_empty_bitmap_has_no_pages() {
    let bitmap = PageBitmap::new(0).unwrap();
    assert!(!bitmap.set(0));
    assert_eq!(bitmap.claim_run(0, 10), None);
    assert_eq!(bitmap.runs(0..10).count(), 0);
}
