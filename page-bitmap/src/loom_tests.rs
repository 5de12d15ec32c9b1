// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Every interleaving of claimers, by loom. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p page-bitmap --lib`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::{PageBitmap, change_then_look};

#[test]
fn single_claims_have_one_winner() {
    loom::model(|| {
        let bitmap = Arc::new(PageBitmap::new(8));
        bitmap.set(3);
        let other = Arc::clone(&bitmap);
        let theirs = thread::spawn(move || other.claim(3));
        let ours = bitmap.claim(3);
        assert!(ours ^ theirs.join().unwrap());
        assert!(!bitmap.get(3));
    });
}

#[test]
fn what_was_written_before_setting_is_seen_by_the_claimer() {
    loom::model(|| {
        let bitmap = Arc::new(PageBitmap::new(8));
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
        let bitmap = Arc::new(PageBitmap::new(64));
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

/// One thread claims runs while another claims single pages: every page is sent once.
#[test]
fn bulk_and_urgent_claim_each_page_once() {
    loom::model(|| {
        let map = Arc::new(PageBitmap::new(4));
        map.set_range(0..4);
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

/// A faulting reader notes its request and then checks whether the page is still to come; the
/// receiver marks it as arrived and then checks for requests. One of the two must wake the waiter.
#[test]
fn a_fault_and_the_arrival_of_its_page_never_miss_each_other() {
    loom::model(|| {
        let pending = Arc::new(PageBitmap::new(1));
        let wanted = Arc::new(PageBitmap::new(1));
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

/// Two readers report faults of one page (two vCPUs): one of them requests it.
#[test]
fn a_duplicate_fault_asks_once() {
    loom::model(|| {
        let wanted = Arc::new(PageBitmap::new(2));
        let other = {
            let wanted = Arc::clone(&wanted);
            thread::spawn(move || wanted.set(1))
        };
        let here = wanted.set(1);
        assert!(here ^ other.join().unwrap());
    });
}

/// A reader notes its request and then checks for a connection; a recovery installs one and then
/// checks for requests. One of the two must send the request, or the page is never sent.
#[test]
fn a_fault_and_a_recovery_never_miss_each_other() {
    loom::model(|| {
        let wanted = Arc::new(PageBitmap::new(1));
        let connected = Arc::new(PageBitmap::new(1));
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

/// A page that a lost set of connections had claimed becomes pending again with the missing pages
/// of the destination; of all threads that claim it then, one sends it.
#[test]
fn after_a_recovery_each_missing_page_is_sent_once() {
    loom::model(|| {
        let pending = Arc::new(PageBitmap::new(2));
        pending.set_range(0..2);
        assert!(pending.claim(0));
        // The set is lost with page 0; no thread serves while the pending set is rebuilt.
        pending.claim_range(0..2);
        pending.set_range(0..2);
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
