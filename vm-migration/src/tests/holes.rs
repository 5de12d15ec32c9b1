// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory that the guest discards in the middle of a migration stays discarded at the source.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::plain::{old_destination, tcp};
use super::{Builder, FakeMemory, FakeVm, Guest, LIMITS, Target, loopback, memory, options, send};
use crate::layout::{PAGE_BYTES, PageRun};
use crate::testing::Pace;
use crate::{Compression, DirtyClear};

const GIVEN: PageRun = PageRun { region: 0, first: 100, count: 24 };

/// Asserts that the guest's pages are as they were, except those that it has discarded, which are
/// empty.
fn assert_discarded(guest: &Guest, to: &FakeMemory) {
    let given: Vec<_> = (GIVEN.first..GIVEN.end()).map(|page| (GIVEN.region, page)).collect();
    assert_eq!(guest.wrong_pages(to), given);
    for (region, page) in given {
        let is_zero = |word| to.word(region, page, word).load(Ordering::Relaxed) == 0;
        assert!((0..512).all(is_zero), "page {page} holds something");
    }
}

/// Bytes of the source's memory that the host has freed.
fn left(from: &FakeMemory, before: i64) -> u64 {
    u64::try_from(before - from.blocks(GIVEN.region)).unwrap() * 512
}

/// A machine whose guest memory only the test writes.
fn idle(from: &Arc<FakeMemory>, guest: &Arc<Guest>) -> FakeVm {
    FakeVm::new(from, guest).load(0, 0, Pace::Full).running()
}

#[test]
fn pages_discarded_between_scan_and_sending_stay_discarded() {
    for (look, clear, connections, compression) in [
        (1, DirtyClear::Slice, 1, Compression::None),
        (2, DirtyClear::Slice, 1, Compression::None),
        (2, DirtyClear::Round, 3, Compression::None),
        (1, DirtyClear::Slice, 2, Compression::Zstd),
        (2, DirtyClear::Slice, 1, Compression::Zstd),
    ] {
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 94);
        guest.fill(&from, 100);
        let before = from.blocks(GIVEN.region);
        from.discard_at_scan(GIVEN, look);
        let builder = Builder::new(&to, &guest).load(0, 0, Pace::Full);
        let target = Target::start(&loopback(), builder, LIMITS);
        let mut options = options(&target.address);
        (options.dirty_clear, options.connections) = (clear, connections);
        options.compression = compression;
        send(idle(&from, &guest), &options).unwrap();
        target.join().unwrap().vm.stop();
        assert_eq!(
            left(&from, before),
            GIVEN.count * PAGE_BYTES,
            "{look} {clear:?} {compression:?}"
        );
        assert_discarded(&guest, &to);
    }
}

#[test]
fn what_an_old_destination_is_sent_of_holes_makes_no_pages() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 95);
    guest.fill(&from, 100);
    let before = from.blocks(GIVEN.region);
    from.discard_at_scan(GIVEN, 1);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = options(&tcp(&listener));
    let peer = {
        let to = Arc::clone(&to);
        std::thread::spawn(move || old_destination(&listener, &to))
    };
    send(idle(&from, &guest), &options).unwrap();
    peer.join().unwrap();
    assert_eq!(left(&from, before), GIVEN.count * PAGE_BYTES);
    assert_discarded(&guest, &to);
}
