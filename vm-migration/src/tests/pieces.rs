// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Large host pages that are assembled from pieces: when the engine makes them visible, what it
//! refuses, and whole migrations to real huge pages where the host has some.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::{Mutex, MutexGuard};

use page_bitmap::PageBitmap;

use super::auto::out_of_reach;
use super::moves::{Case, postcopy};
use super::relay::{Relay, Rule};
use super::{FakeMemory, have_uffd, loopback};
use crate::Side;
use crate::destination::{Engine, Via};
use crate::error::Cause;
use crate::fault::{Fault, FaultSource, FaultSourceKind, FaultWait};
use crate::layout::{Backing, GpaRange, PAGE_BYTES, PageRun, to_usize};
use crate::progress::Progress;
use crate::protocol::ProtocolError;
use crate::protocol::capabilities::FEATURE_PIECES;
use crate::ram::{GuestMemoryMap as _, slice};
use crate::testing::Pace;
use crate::uffd::UffdError;

const LARGE_BYTES: u64 = 2 << 20;
const UNIT: u64 = LARGE_BYTES / PAGE_BYTES;

/// Records what is made visible to the guest, and how.
#[derive(Default)]
struct Shown {
    shown: Mutex<Vec<(&'static str, PageRun)>>,
    /// All pages of the memory are there.
    all_there: bool,
}

impl Shown {
    fn note(&self, how: &'static str, run: PageRun) {
        self.shown.lock().push((how, run));
    }

    fn take(&self) -> Vec<(&'static str, u64, u64)> {
        let shown = std::mem::take(&mut *self.shown.lock());
        shown.into_iter().map(|(how, run)| (how, run.first, run.count)).collect()
    }
}

impl FaultSource for Shown {
    fn kind(&self) -> FaultSourceKind {
        FaultSourceKind::Uffd
    }

    fn readers(&self) -> usize {
        1
    }

    fn next_faults(&self, _: usize, _: &mut Vec<Fault>) -> Result<FaultWait, UffdError> {
        Ok(FaultWait::Stopped)
    }

    fn stop_readers(&self) {}

    fn receives_in_place(&self, _: usize) -> bool {
        true
    }

    fn prefers_copies_of_small_runs(&self, _: usize) -> bool {
        true
    }

    fn holds_all_pages(&self, _: usize) -> bool {
        self.all_there
    }

    fn make_present(&self, run: PageRun) -> Result<(), UffdError> {
        self.note("contents", run);
        Ok(())
    }

    fn copy_in(&self, run: PageRun, _: &[u8]) -> Result<(), UffdError> {
        self.note("copy", run);
        Ok(())
    }

    fn make_zero(&self, run: PageRun) -> Result<(), UffdError> {
        self.note("zeros", run);
        Ok(())
    }

    fn wake(&self, _: PageRun) -> Result<(), UffdError> {
        Ok(())
    }

    fn release(&self) -> Result<(), UffdError> {
        Ok(())
    }
}

/// An engine in which large pages 0 and 2 of three are missing.
struct Bench {
    engine: Engine<FakeMemory>,
    memory: Arc<FakeMemory>,
    shown: Arc<Shown>,
}

impl Bench {
    fn new() -> Self {
        let memory = FakeMemory::pretending(&[(0, 3 * UNIT)], LARGE_BYTES).unwrap();
        Self::over(memory, Shown::default())
    }

    /// In memory that is populated, and in which an earlier round has left contents in all pages but 5.
    fn with_old_contents() -> Self {
        let memory = FakeMemory::pretending(&[(0, 3 * UNIT)], LARGE_BYTES).unwrap();
        memory.make_ready().unwrap();
        for page in (0..3 * UNIT).filter(|page| *page != 5) {
            let run = PageRun { region: 0, first: page, count: 1 };
            slice(&*memory, run).write(&[0xa5; 4096]);
            memory.mark_resident(run);
        }
        Self::over(memory, Shown { all_there: true, ..Shown::default() })
    }

    fn over(memory: Arc<FakeMemory>, shown: Shown) -> Self {
        let shown = Arc::new(shown);
        let missing = PageBitmap::new(3);
        missing.set(0);
        missing.set(2);
        let progress = Arc::new(Progress::new(Side::Destination));
        let source = Arc::clone(&shown);
        let engine = Engine::with_missing(&memory, source, vec![missing], progress).unwrap();
        Self { engine, memory, shown }
    }

    /// Receives contents for some pages; all bytes of a page are its number.
    fn contents(&self, first: u64, count: u64) -> Result<(), Cause> {
        let bytes: Vec<u8> = (first..first + count).flat_map(|page| [mark(page); 4096]).collect();
        self.engine.take_contents(&mut &bytes[..], &[range(first, count)], Via::Bulk, &mut vec![])
    }

    fn zeros(&self, first: u64, count: u64) -> Result<(), Cause> {
        self.engine.take_zeros(&[range(first, count)], Via::Urgent)
    }

    fn asks_for(&self, page: u64) -> Vec<GpaRange> {
        self.engine.take_faults(&[Fault { region: 0, page, thread: None }]).unwrap()
    }

    fn word(&self, page: u64) -> u64 {
        self.memory.word(0, page, 100).load(Ordering::SeqCst)
    }
}

fn mark(page: u64) -> u8 {
    u8::try_from(page % 251 + 1).unwrap()
}

fn range(first: u64, count: u64) -> GpaRange {
    GpaRange { gpa: first * PAGE_BYTES, len_bytes: count * PAGE_BYTES }
}

fn is_refused(result: &Result<(), Cause>) -> bool {
    matches!(result, Err(Cause::Protocol(ProtocolError::Malformed { .. })))
}

#[test]
fn a_large_page_is_shown_once_with_its_last_piece() {
    let bench = Bench::new();
    assert_eq!(bench.asks_for(7), [range(0, UNIT)], "all of it is asked for");
    assert_eq!(bench.asks_for(8), [], "once");
    bench.contents(100, UNIT - 100).unwrap();
    bench.contents(16, 84).unwrap();
    bench.zeros(8, 8).unwrap();
    assert_eq!((bench.shown.take(), bench.engine.missing_pages()), (vec![], 2 * UNIT));
    bench.contents(0, 8).unwrap();
    assert_eq!(bench.shown.take(), [("contents", 0, UNIT)]);
    assert_eq!(bench.engine.missing_pages(), UNIT);
    for page in 0..UNIT {
        let byte = if (8..16).contains(&page) { 0 } else { mark(page) };
        assert_eq!(bench.word(page), u64::from_le_bytes([byte; 8]), "page {page}");
    }
    assert!(!bench.engine.complete().is_cancelled());
    bench.contents(2 * UNIT, UNIT).unwrap();
    assert_eq!(bench.shown.take(), [("contents", 2 * UNIT, UNIT)]);
    assert!(bench.engine.complete().is_cancelled());
}

#[test]
fn a_large_page_of_zeros_stays_a_hole_unless_a_thread_waits() {
    let bench = Bench::new();
    bench.zeros(0, 200).unwrap();
    bench.zeros(200, UNIT - 200).unwrap();
    assert_eq!(bench.shown.take(), []);
    assert_eq!(bench.engine.missing_pages(), UNIT);
    assert_eq!(bench.asks_for(2 * UNIT + 5), [range(2 * UNIT, UNIT)]);
    bench.zeros(2 * UNIT, UNIT).unwrap();
    assert_eq!(bench.shown.take(), [("zeros", 2 * UNIT, UNIT)]);
    assert!(bench.engine.complete().is_cancelled());
    assert_eq!(bench.memory.populated_bytes(0).unwrap(), 0);
}

#[test]
fn pieces_that_are_not_missing_are_refused_and_write_nothing() {
    let bench = Bench::new();
    bench.contents(0, 10).unwrap();
    let before = bench.word(9);
    assert!(is_refused(&bench.contents(9, 2)), "it has come already");
    assert!(is_refused(&bench.zeros(9, 1)), "it has come already");
    assert!(is_refused(&bench.contents(UNIT - 1, 2)), "the second is of a page that is here");
    assert_eq!((bench.word(9), bench.word(10), bench.word(UNIT)), (before, 0, 0));
    let twice = bench.engine.take_zeros(&[range(20, 2), range(21, 1)], Via::Bulk);
    assert!(is_refused(&twice), "one message names it twice");
}

#[test]
fn after_a_loss_a_large_page_comes_again_from_its_first_piece() {
    let bench = Bench::new();
    bench.asks_for(3);
    bench.contents(0, UNIT - 1).unwrap();
    // The connection is lost in the middle of the last piece.
    let half = vec![9; to_usize(PAGE_BYTES / 2)];
    let last = [range(UNIT - 1, 1)];
    let lost = bench.engine.take_contents(&mut &half[..], &last, Via::Bulk, &mut vec![]);
    assert!(lost.is_err());
    bench.engine.begin_again().unwrap();
    assert_eq!(bench.engine.missing_pages(), 2 * UNIT);
    assert_eq!(bench.engine.wishes(), [range(0, UNIT)]);
    assert_eq!((bench.word(0), bench.word(UNIT - 1)), (0, 0), "what came is thrown away");
    bench.contents(1, UNIT - 1).unwrap();
    assert_eq!(bench.shown.take(), []);
    bench.contents(0, 1).unwrap();
    assert_eq!(bench.shown.take(), [("contents", 0, UNIT)]);
}

#[test]
fn pieces_of_zeros_replace_what_was_there() {
    let bench = Bench::with_old_contents();
    bench.zeros(0, 300).unwrap();
    let word = |page| bench.word(page);
    let old = u64::from_le_bytes([0xa5; 8]);
    assert_eq!((word(0), word(4), word(5), word(299), word(300)), (0, 0, 0, 0, old));
    bench.contents(300, 10).unwrap();
    bench.zeros(310, UNIT - 310).unwrap();
    assert_eq!(bench.shown.take(), [("contents", 0, UNIT)]);
    assert_eq!((word(300), word(310), word(UNIT - 1)), (u64::from_le_bytes([mark(300); 8]), 0, 0));
    assert_eq!(word(UNIT), old, "a page that is here has changed");
    bench.zeros(2 * UNIT, UNIT).unwrap();
    assert_eq!((word(2 * UNIT), word(3 * UNIT - 1)), (0, 0));
    bench.memory.assert_ready();
}

#[test]
fn a_page_that_was_there_stays_when_its_pieces_come_again() {
    let bench = Bench::with_old_contents();
    bench.contents(0, 7).unwrap();
    let half = vec![9; to_usize(PAGE_BYTES / 2)];
    assert!(
        bench.engine.take_contents(&mut &half[..], &[range(7, 1)], Via::Bulk, &mut vec![]).is_err()
    );
    bench.engine.begin_again().unwrap();
    bench.zeros(0, UNIT).unwrap();
    for page in 0..UNIT {
        assert_eq!(bench.word(page), 0, "page {page}");
    }
    bench.memory.assert_ready();
}

/// Small pages, and 2 MiB pages of the host to move them to; reports why there are none.
pub(super) fn onto_large_pages() -> Option<(Arc<FakeMemory>, Arc<FakeMemory>, HugePool)> {
    const COUNT: u64 = 4;
    if !have_uffd() {
        return None;
    }
    let regions = &[(0, COUNT * UNIT)];
    let pool = HugePool::ask(2 * COUNT);
    if !HugePool::has(COUNT) {
        test_skip::skip!("the host gives no 2 MiB pages");
        return None;
    }
    let Ok(to) = FakeMemory::new(regions, Backing::Shared, LARGE_BYTES) else {
        test_skip::skip!("no memfd of 2 MiB pages");
        return None;
    };
    let from = FakeMemory::new(regions, Backing::Shared, PAGE_BYTES).unwrap();
    Some((from, to, pool))
}

#[test]
pub(super) fn postcopy_onto_large_pages_puts_them_together() {
    for seed in 1..=8 {
        let Some((from, to, _pool)) = onto_large_pages() else { return };
        let mut case = Case::new(from, to, seed);
        case.pace = Pace::Full;
        let (source, destination) = case.go(&loopback(), |options| {
            postcopy(options);
            options.connections = 1 + u16::try_from(seed % 3).unwrap();
            options.urgent_connections = Some(u16::try_from(seed % 4).unwrap());
        });
        assert_eq!(source.memory_bytes_sent, destination.memory_bytes_received);
        assert_eq!(destination.remaining_bytes, Some(0));
    }
}

/// Without the feature `pieces` on both sides large pages are sent as a whole.
#[test]
fn without_pieces_large_pages_come_whole() {
    for seed in 1..=4 {
        let Some((from, to, _pool)) = onto_large_pages() else { return };
        let mut case = Case::new(from, to, seed);
        case.pace = Pace::Full;
        let mut relay = None;
        case.go(&loopback(), |options| {
            postcopy(options);
            options.connections = 1 + u16::try_from(seed % 3).unwrap();
            options.urgent_connections = Some(u16::try_from(seed % 3).unwrap());
            let between = Relay::start(&options.to, Rule::Without(FEATURE_PIECES));
            options.to = relay.insert(between).address.clone();
        });
        let shortest_bytes = &relay.unwrap().shortest_bytes;
        assert_eq!(shortest_bytes.load(Ordering::Relaxed), LARGE_BYTES);
    }
}

#[test]
fn auto_onto_large_pages_puts_stale_ones_together() {
    for seed in 1..=8 {
        let Some((from, to, _pool)) = onto_large_pages() else { return };
        let mut case = Case::new(from, to, seed);
        case.pace = Pace::Full;
        case.go(&loopback(), |options| {
            out_of_reach(options);
            options.urgent_connections = Some(u16::try_from(seed % 3).unwrap());
        });
    }
}

#[test]
fn auto_onto_large_pages_that_are_there_gives_none_back() {
    for seed in 1..=8 {
        let Some((from, to, _pool)) = onto_large_pages() else { return };
        to.make_ready().unwrap();
        let mut case = Case::new(from, Arc::clone(&to), seed);
        case.pace = Pace::Full;
        case.go(&loopback(), |options| {
            out_of_reach(options);
            options.urgent_connections = Some(u16::try_from(seed % 3).unwrap());
        });
        to.assert_ready();
    }
}

/// Adds 2 MiB pages to the host's pool, and removes them again; one test at a time does so.
pub(super) struct HugePool {
    before: u64,
    _alone: MutexGuard<'static, ()>,
}

static ONE_ASKS: Mutex<()> = Mutex::new(());

impl HugePool {
    const FILE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/";

    fn read(name: &str) -> u64 {
        let text = std::fs::read_to_string(format!("{}{name}", Self::FILE)).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }

    fn has(pages: u64) -> bool {
        Self::read("free_hugepages") >= pages
    }

    fn ask(pages: u64) -> Self {
        let alone = ONE_ASKS.lock();
        let before = Self::read("nr_hugepages");
        let _ = std::fs::write(format!("{}nr_hugepages", Self::FILE), (before + pages).to_string());
        Self { before, _alone: alone }
    }
}

impl Drop for HugePool {
    fn drop(&mut self) {
        let _ = std::fs::write(format!("{}nr_hugepages", Self::FILE), self.before.to_string());
    }
}
