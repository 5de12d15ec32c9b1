// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory that was populated before anything arrived, and in which outdated contents stay until newer ones come: none
//! of it is discarded, and no thread sees what is old.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use page_bitmap::PageBitmap;

use super::auto::out_of_reach;
use super::moves::Case;
use super::recovery::{Run, SLOW, wait_until};
use super::{FakeMemory, LIMITS, have_uffd, loopback, memory};
use crate::destination::{Engine, Stale, Via};
use crate::fault::{Fault, FaultSource, FaultSourceKind};
use crate::layout::{Backing, GpaRange, PAGE_BYTES, PageRun};
use crate::progress::{Phase, Progress};
use crate::protocol::runs;
use crate::ram::{GuestMemoryMap as _, slice};
use crate::uffd::Uffd;
use crate::{Cancel, DirtyClear, MemoryMode, SendOptions, Side};

/// Four windows of pages that are shown together.
const PAGES: u64 = 256;

/// What an earlier round has left.
const OLD: u8 = 0xa5;

fn ready() -> Arc<FakeMemory> {
    let memory = memory();
    memory.make_ready().unwrap();
    memory
}

#[test]
fn what_has_come_and_comes_again_stays_in_its_pages() {
    if !have_uffd() {
        return;
    }
    let mut followed = 0;
    for seed in 1..=20 {
        let to = ready();
        let case = Case::new(memory(), Arc::clone(&to), seed);
        let (case, source) = match seed % 4 {
            0 => (case.own_faults(), FaultSourceKind::Sigbus),
            _ => (case, FaultSourceKind::Uffd),
        };
        let (_, destination) = case.go(&loopback(), |options| {
            out_of_reach(options);
            options.connections = if seed % 2 == 0 { 1 } else { 4 };
            options.urgent_connections = Some(u16::try_from(seed % 3).unwrap());
        });
        let moved = &destination.faults;
        let pages = moved.bulk_pages + moved.urgent_pages + moved.prefetched_pages;
        // A guest that got no processor time during a round has converged.
        assert!(pages == 0 || moved.source == Some(source), "{moved:?}");
        assert!(pages < 3073, "{pages} of all pages");
        followed += pages;
        to.assert_ready();
    }
    assert!(followed > 0);
}

#[test]
fn the_clock_and_the_operator_end_a_round_in_its_middle() {
    if !have_uffd() {
        return;
    }
    for clear in [DirtyClear::Slice, DirtyClear::Round] {
        for after_us in [0, 300, 1000, 3000, 10_000] {
            let to = ready();
            Case::new(memory(), Arc::clone(&to), after_us + 1).go(&loopback(), |options| {
                out_of_reach(options);
                options.dirty_clear = clear;
                options.postcopy_after = Some(Duration::from_micros(after_us));
            });
            to.assert_ready();
        }
    }
}

#[test]
fn a_guest_that_converges_is_not_watched() {
    if !have_uffd() {
        return;
    }
    let to = ready();
    let (_, destination) = Case::new(memory(), Arc::clone(&to), 3).go(&loopback(), |options| {
        options.memory_mode = MemoryMode::Auto;
        options.downtime = Duration::from_secs(10);
    });
    assert_eq!((destination.faults.source, destination.faults.seen), (None, Some(0)));
    to.assert_ready();
    assert!(!to.wants_small_pages());
}

/// Precopy is a part of the way when it ends, so that pages are outdated and others have never come.
fn soon(options: &mut SendOptions) {
    out_of_reach(options);
    options.postcopy_after = Some(Duration::from_millis(700));
    options.bandwidth_bytes_per_s = SLOW / 2;
}

#[test]
fn what_was_cut_off_comes_again_in_its_pages() {
    if !have_uffd() {
        return;
    }
    for connections in [1, 4] {
        let to = ready();
        let with = |options: &mut SendOptions| {
            soon(options);
            options.connections = connections;
        };
        let run = Run::of(&memory(), Arc::clone(&to), 2, LIMITS, with, |vm| vm);
        let mut cuts = 0;
        while cuts < 5 && run.destination.phase() != Phase::Done {
            let before = run.losses();
            run.proxy.cut_all();
            cuts += 1;
            let over = || run.destination.phase() == Phase::Done;
            wait_until("the loss", || run.losses() > before || over());
            std::thread::sleep(Duration::from_millis(30 * cuts));
        }
        assert!(run.losses() > 0);
        run.finish();
        to.assert_ready();
    }
}

/// Ready memory with old contents in all of its pages, some of which are missing.
struct Bench {
    memory: Arc<FakeMemory>,
    uffd: Arc<Uffd<FakeMemory>>,
    engine: Arc<Engine<FakeMemory>>,
}

fn missing(pages: impl IntoIterator<Item = u64>) -> Vec<u8> {
    let map = PageBitmap::new(PAGES);
    for page in pages {
        map.set(page);
    }
    runs::encode(&[map])
}

fn with_old_contents() -> Arc<FakeMemory> {
    let memory = FakeMemory::new(&[(0, PAGES)], Backing::Shared, PAGE_BYTES).unwrap();
    memory.make_ready().unwrap();
    slice(&*memory, run(0, PAGES)).write(&vec![OLD; 4096 * 256]);
    memory.mark_resident(run(0, PAGES));
    // What was accessed before the memory is watched does not stay visible.
    assert_eq!(memory.word(0, 11, 0).load(Ordering::Relaxed), old());
    memory
}

impl Bench {
    fn new(pages: impl IntoIterator<Item = u64>) -> Option<Self> {
        have_uffd().then(|| Self::over(with_old_contents(), None, &missing(pages)))
    }

    fn over(memory: Arc<FakeMemory>, stale: Option<Stale>, pending: &[u8]) -> Self {
        let uffd = Arc::new(Uffd::register_missing(Arc::clone(&memory), 1).unwrap());
        let source: Arc<dyn FaultSource> = uffd.clone();
        let (progress, never) = (Arc::new(Progress::new(Side::Destination)), never());
        let engine = Engine::new(&memory, source, pending, stale, progress, &never).unwrap();
        Self { memory, uffd, engine: Arc::new(engine) }
    }

    /// Reads a page on a thread, and answers its fault; returns what the thread has read.
    fn touch(&self, page: u64, answer: impl FnOnce(&Engine<FakeMemory>)) -> u64 {
        let memory = Arc::clone(&self.memory);
        let reader = std::thread::spawn(move || memory.word(0, page, 7).load(Ordering::Relaxed));
        let mut faults = Vec::new();
        self.uffd.next_faults(0, &mut faults).unwrap();
        assert_eq!(faults.iter().map(|fault| fault.page).collect::<Vec<_>>(), [page]);
        let asked = self.engine.take_faults(&faults).unwrap();
        assert_eq!(asked.is_empty(), !self.engine.missing()[0].get(page));
        answer(&self.engine);
        reader.join().unwrap()
    }

    /// The pages that an access finds mapped.
    fn mapped(&self) -> Vec<u64> {
        (0..PAGES).filter(|page| self.memory.is_mapped(0, *page, false).unwrap()).collect()
    }

    /// What is in a page, visible or not.
    fn word(&self, page: u64) -> u64 {
        let mut word = [0; 8];
        slice(&*self.memory, run(page, 1)).first(8).read(&mut word);
        u64::from_ne_bytes(word)
    }
}

fn never() -> Cancel {
    Cancel::new().unwrap()
}

fn run(first: u64, count: u64) -> PageRun {
    PageRun { region: 0, first, count }
}

fn range(first: u64, count: u64) -> GpaRange {
    GpaRange { gpa: first * PAGE_BYTES, len_bytes: count * PAGE_BYTES }
}

fn old() -> u64 {
    u64::from_ne_bytes([OLD; 8])
}

#[test]
fn an_outdated_page_waits_and_gets_its_new_contents() {
    let Some(bench) = Bench::new(10..20) else { return };
    let new = [1; 4096];
    let read = bench.touch(11, |engine| {
        let come = engine.take_contents(&mut &new[..], &[range(11, 1)], Via::Urgent, &mut vec![]);
        come.unwrap();
    });
    assert_eq!(read, u64::from_ne_bytes([1; 8]));
    bench.memory.assert_ready();
}

#[test]
fn a_page_that_has_become_zero_is_zeroed_where_it_is() {
    let Some(bench) = Bench::new(10..20) else { return };
    bench.engine.take_zeros(&[range(10, 3)], Via::Bulk).unwrap();
    assert_eq!([9, 10, 12, 13].map(|page| bench.word(page)), [old(), 0, 0, old()]);
    assert_eq!(bench.touch(12, |_| ()), 0, "it is here, and not mapped yet");
    let read = bench.touch(15, |engine| engine.take_zeros(&[range(15, 1)], Via::Urgent).unwrap());
    assert_eq!(read, 0);
    bench.memory.assert_ready();
}

#[test]
fn what_came_in_part_is_zeroed_where_it_is() {
    let Some(bench) = Bench::new(10..20) else { return };
    let half = [1; 6000];
    let lost = bench.engine.take_contents(&mut &half[..], &[range(10, 3)], Via::Bulk, &mut vec![]);
    assert!(lost.is_err());
    bench.engine.begin_again().unwrap();
    assert_eq!(bench.engine.missing_pages(), 10);
    // Of the second page there was a part.
    assert_eq!(bench.word(11), 0);
    bench.engine.take_zeros(&[range(10, 10)], Via::Bulk).unwrap();
    assert!((10..20).all(|page| bench.word(page) == 0));
    bench.memory.assert_ready();
}

#[test]
fn a_fault_on_what_is_here_shows_its_neighbours_that_are_here() {
    let Some(bench) = Bench::new([3, 66, 100]) else { return };
    assert!(bench.mapped().is_empty(), "what was mapped does not fault");
    assert_eq!(bench.touch(70, |_| ()), old());
    assert_eq!(bench.mapped(), (67..100).collect::<Vec<_>>());
    assert_eq!(bench.touch(130, |_| ()), old());
    assert_eq!(bench.mapped(), (67..100).chain(128..192).collect::<Vec<_>>());
    assert_eq!(bench.touch(101, |_| ()), old());
    assert_eq!(bench.mapped(), (67..100).chain(101..192).collect::<Vec<_>>());
}

#[test]
fn what_the_guest_has_given_back_is_not_populated_for_a_neighbour() {
    let Some(bench) = Bench::new([]) else { return };
    bench.memory.discard(run(80, 2)).unwrap();
    assert_eq!(bench.touch(70, |_| ()), old());
    assert_eq!(bench.mapped(), (64..80).collect::<Vec<_>>());
    assert_eq!(bench.memory.populated_bytes(0).unwrap(), (PAGES - 2) * PAGE_BYTES);
}

/// Where a page could not be written in the meantime, so that it was replaced.
#[test]
fn what_stayed_is_discarded_if_the_memory_is_not_ready_any_more() {
    if !have_uffd() {
        return;
    }
    let memory = with_old_contents();
    let mut stale = Stale::new(&*memory);
    stale.throw_away(&*memory, &missing(10..20), |_| true, &never()).unwrap();
    memory.assert_ready();
    memory.make_unready();
    let bench = Bench::over(memory, Some(stale), &missing([15, 30]));
    assert_eq!(bench.engine.missing_pages(), 11);
    let left = bench.memory.populated_runs(0, 0..PAGES).unwrap();
    assert_eq!(left, [0..10, 20..30, 31..PAGES]);
    let fault = Fault { region: 0, page: 40, thread: None };
    assert_eq!(bench.engine.take_faults(&[fault]).unwrap(), [], "of what is here nothing is asked");
    assert!(!bench.memory.is_mapped(0, 41, false).unwrap(), "neighbours are not shown");
}
