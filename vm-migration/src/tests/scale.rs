// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The computations of a recovery at the size of large guests: by words, never with a step or a
//! system call for each run. Calls are asserted; times are printed.

use std::sync::Arc;
use std::time::Instant;

use page_bitmap::PageBitmap;

use super::waits::NoFaults;
use crate::destination::{Engine, Via};
use crate::fault::Fault;
use crate::layout::{Backing, GpaRange, PAGE_BYTES};
use crate::protocol::runs;
use crate::ram::GuestMemoryMap;
use crate::testing::FakeMemory;
use crate::{Progress, Side};

/// Pages of 1 TiB.
const PAGES: u64 = 1 << 28;

fn timed<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let done = work();
    println!("{what}: {:?}", began.elapsed());
    done
}

/// Every second page is missing: the maximum number of runs.
fn alternating() -> PageBitmap {
    let map = PageBitmap::new(PAGES);
    for word in 0..PAGES / 64 {
        map.set_word(word, 0x5555_5555_5555_5555);
    }
    map
}

#[test]
fn a_recovery_of_a_tebibyte_looks_at_words_and_discards_only_what_came_in_part() {
    let memory = match FakeMemory::new(&[(0, PAGES)], Backing::Shared, PAGE_BYTES) {
        Ok(memory) => memory,
        Err(error) => {
            test_skip::skip!("this host maps no sparse TiB: {error}");
            return;
        }
    };
    let progress = Arc::new(Progress::new(Side::Destination));
    let map = alternating();
    let engine = Engine::with_emptied(&memory, Arc::new(NoFaults), vec![map], progress).unwrap();
    // One connection is lost in the middle of three pages, another in a page that has arrived
    // since.
    let range = |page| GpaRange { gpa: page * PAGE_BYTES, len_bytes: PAGE_BYTES };
    for pages in [[0, 2, 4], [6, 8, 10]] {
        let bytes = vec![1; 6000];
        let lost = engine.take_contents(&mut &bytes[..], &pages.map(range), Via::Bulk, &mut vec![]);
        assert!(lost.is_err());
    }
    let whole = vec![2; 4096];
    engine.take_contents(&mut &whole[..], &[range(8)], Via::Urgent, &mut vec![]).unwrap();
    engine.take_faults(&[Fault { region: 0, page: 1 << 27, thread: None }]).unwrap();
    timed("begin_again", || engine.begin_again().unwrap());
    assert_eq!((memory.discards(), memory.looks()), ((5, 5), 0), "pages that came in part");
    assert_eq!(
        memory.word(0, 8, 0).load(std::sync::atomic::Ordering::Relaxed),
        0x0202_0202_0202_0202
    );
    let held: Vec<u64> = memory.populated_runs(0, 0..64).unwrap().into_iter().flatten().collect();
    assert_eq!(held, [8]);
    timed("begin_again, once more", || engine.begin_again().unwrap());
    assert_eq!(memory.discards(), (5, 5));
    let wishes = timed("wishes", || engine.wishes());
    assert_eq!(wishes, [range(1 << 27)]);
    let bytes = timed("encode", || runs::encode(engine.missing()));
    assert_eq!(bytes.len() as u64, 1 + PAGES / 8);
    let pending = [PageBitmap::new(PAGES)];
    pending[0].set_range(0..PAGES);
    timed("pend", || {
        pending[0].clear();
        runs::decode(&bytes, &pending).unwrap();
    });
    assert_eq!(timed("count", || pending[0].count()), PAGES / 2 - 1);
    assert!(pending[0].words().eq(engine.missing()[0].words()));
}
