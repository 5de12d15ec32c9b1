// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Every interleaving of claimers, by loom. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p memory --lib loom`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::PageBitmap;

fn pages_of(run: Option<Range<u64>>) -> Vec<u64> {
    run.into_iter().flatten().collect()
}

#[test]
fn single_claims_have_one_winner() {
    loom::model(|| {
        let bitmap = Arc::new(PageBitmap::new(8).unwrap());
        bitmap.set(3);
        let other = Arc::clone(&bitmap);
        let theirs = thread::spawn(move || other.claim(3));
        let ours = bitmap.claim(3);
        assert!(ours ^ theirs.join().unwrap());
        assert!(!bitmap.test(3));
    });
}

#[test]
fn run_claim_and_single_claim_share_the_pages() {
    loom::model(|| {
        let bitmap = Arc::new(PageBitmap::new(128).unwrap());
        bitmap.set_range(62..66);
        let other = Arc::clone(&bitmap);
        let urgent = thread::spawn(move || other.claim(64));
        let mut got = Vec::new();
        let mut from = 0;
        while let Some(run) = bitmap.claim_run(from, 8) {
            from = run.end;
            got.extend(run);
        }
        if urgent.join().unwrap() {
            got.push(64);
        }
        got.sort_unstable();
        assert_eq!(got, [62, 63, 64, 65]);
    });
}

#[test]
fn two_run_claimers_never_share_a_page() {
    loom::model(|| {
        let bitmap = Arc::new(PageBitmap::new(64).unwrap());
        bitmap.set_range(1..4);
        let other = Arc::clone(&bitmap);
        let theirs = thread::spawn(move || {
            let mut got = pages_of(other.claim_run(0, 2));
            got.extend(pages_of(other.claim_run(0, 2)));
            got
        });
        let mut got = pages_of(bitmap.claim_run(0, 2));
        got.extend(pages_of(bitmap.claim_run(0, 2)));
        got.extend(theirs.join().unwrap());
        got.sort_unstable();
        assert_eq!(got, [1, 2, 3]);
    });
}

#[test]
fn what_was_written_before_setting_is_seen_by_the_claimer() {
    loom::model(|| {
        let bitmap = Arc::new(PageBitmap::new(8).unwrap());
        let page = Arc::new(UnsafeCell::new(0_u32));
        let (their_bitmap, their_page) = (Arc::clone(&bitmap), Arc::clone(&page));
        let writer = thread::spawn(move || {
            // SAFETY: the page belongs to this thread until its bit is set.
            their_page.with_mut(|content| unsafe { *content = 7 });
            their_bitmap.set(5);
        });
        if bitmap.claim(5) {
            // SAFETY: the claimed bit passed the page to this thread; loom checks exactly that.
            page.with(|content| assert_eq!(unsafe { *content }, 7));
        }
        writer.join().unwrap();
    });
}

#[test]
fn taking_words_loses_no_bit() {
    loom::model(|| {
        let bitmap = Arc::new(PageBitmap::new(64).unwrap());
        bitmap.set(1);
        let other = Arc::clone(&bitmap);
        let device = thread::spawn(move || {
            other.set(2);
            other.set(1);
        });
        let mut first = [0];
        bitmap.take_words(0..64, &mut first);
        device.join().unwrap();
        let mut second = [0];
        bitmap.take_words(0..64, &mut second);
        assert_eq!(first[0] | second[0], 0b110);
        assert!(!bitmap.any(0..64));
    });
}
