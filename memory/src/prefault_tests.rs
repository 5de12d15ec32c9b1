// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Prefault really populates, with huge pages where they are wanted, and stops when told to.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::*;
use crate::host::Host;
use crate::host::testing::{BorrowedHugePages, HugePagesTurn, is_mapped, smaps_bytes};
use crate::plan::cut;
use crate::{Backing, GuestRam, HugePageSize, RamConfig, RamLayout, ZoneSpec};

const MIB: u64 = 1 << 20;

fn ram(id: &str, size_bytes: u64, backing: Backing, thp: bool) -> GuestRam {
    let zone = ZoneSpec { backing, thp, prefault: true, ..ZoneSpec::new(id, size_bytes) };
    GuestRam::new(&RamConfig { zones: vec![zone] }, RamLayout::default()).unwrap()
}

fn small_chunks() -> PrefaultOptions {
    let threads = NonZeroUsize::new(3);
    PrefaultOptions { threads, chunk_bytes: 4 * MIB, ..PrefaultOptions::default() }
}

fn all_mapped(region: &RamRegion) -> bool {
    (0..region.len_pages())
        .all(|page| is_mapped(region.as_ptr().wrapping_add(usize::try_from(page * 4096).unwrap())))
}

#[test]
fn everything_is_resident_afterwards_and_nothing_changed() {
    let borrowed = BorrowedHugePages::new(8);
    let huge = Backing::Hugetlb { page_size: HugePageSize::Mib2 };
    let dir = tempfile::tempdir().unwrap();
    let file = Backing::File(dir.path().to_owned());
    let backings = [Backing::Anonymous, Backing::Memfd, file, huge];
    let available = if borrowed.is_some() { 4 } else { 3 };
    for backing in backings.into_iter().take(available) {
        for thp in [false, true] {
            let ram = ram("p", 16 * MIB, backing.clone(), thp);
            let region = &ram.regions()[0];
            let memory = ram.guest_memory().memory().clone();
            memory.write_slice(&[1, 2, 3], GuestAddress(5 * MIB)).unwrap();
            let prefault = ram.prefault(&small_chunks()).unwrap();
            let engine = Arc::clone(&prefault.engine);
            prefault.wait().unwrap();
            assert_eq!(engine.done_bytes.load(Ordering::Relaxed), 16 * MIB);
            assert!(all_mapped(region), "{backing:?} thp={thp}");
            let mut bytes = [0; 4];
            memory.read_slice(&mut bytes, GuestAddress(5 * MIB)).unwrap();
            assert_eq!(bytes, [1, 2, 3, 0]);
        }
    }
}

#[test]
fn private_huge_pages_come_where_the_host_has_them() {
    if !Host::real().huge_page_policy().private {
        return test_skip::skip!("huge pages for private memory: the host's setting is 'never'");
    }
    let Some(turn) = HugePagesTurn::new(16 * MIB) else { return };
    let ram = ram("private", 16 * MIB, Backing::Anonymous, true);
    ram.prefault(&small_chunks()).unwrap().wait().unwrap();
    let _ = turn.has_given(smaps_bytes(ram.regions()[0].as_ptr(), "AnonHugePages"), 16 * MIB);
}

#[test]
fn shared_huge_pages_come_by_advice_or_by_collapse() {
    let Some(turn) = HugePagesTurn::new(16 * MIB) else { return };
    let ram = ram("shared", 16 * MIB, Backing::Memfd, true);
    ram.prefault(&small_chunks()).unwrap().wait().unwrap();
    let _ = turn.has_given(smaps_bytes(ram.regions()[0].as_ptr(), "ShmemPmdMapped"), 16 * MIB);
}

#[test]
fn no_huge_pages_come_unasked() {
    let small = ram("small", 16 * MIB, Backing::Anonymous, false);
    small.prefault(&small_chunks()).unwrap().wait().unwrap();
    assert_eq!(smaps_bytes(small.regions()[0].as_ptr(), "AnonHugePages"), 0);
}

#[test]
fn only_zones_that_ask_are_prefaulted() {
    let mut zones = vec![ZoneSpec::new("lazy", 4 * MIB), ZoneSpec::new("eager", 4 * MIB)];
    zones[1].prefault = true;
    let ram = GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap();
    ram.prefault(&PrefaultOptions::default()).unwrap().wait().unwrap();
    assert_eq!(smaps_bytes(ram.regions()[0].as_ptr(), "Rss"), 0);
    assert_eq!(smaps_bytes(ram.regions()[1].as_ptr(), "Rss"), 4 * MIB);
    ram.prefault(&PrefaultOptions::default()).unwrap();
    let nothing = Prefault::start(&[], &PrefaultOptions::default()).unwrap();
    nothing.wait().unwrap();
}

#[test]
fn what_is_still_to_arrive_is_left_alone() {
    let ram = ram("p", 16 * MIB, Backing::Memfd, false);
    let region = &ram.regions()[0];
    region.resident().set_absent(5..9);
    region.resident().set_absent(2000..3000);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let hook_seen = Arc::clone(&seen);
    let on_chunk: ChunkHook = Arc::new(move |_, range| {
        hook_seen.lock().push(range);
        Ok(())
    });
    let options = PrefaultOptions { on_chunk: Some(on_chunk), ..small_chunks() };
    ram.prefault(&options).unwrap().wait().unwrap();
    let seen = seen.lock();
    for page in 0..region.len_pages() {
        let resident = region.resident().is_resident(page);
        let address = region.as_ptr().wrapping_add(usize::try_from(page * 4096).unwrap());
        assert_eq!(is_mapped(address), resident, "page {page}");
        let told = seen.iter().filter(|range| range.contains(&(page * 4096))).count();
        assert_eq!(told, usize::from(resident), "page {page}");
    }
}

#[test]
fn what_the_guest_has_given_back_stays_with_the_host() {
    let populated = |spares_discarded, spares_mmap_lock| {
        let ram = ram("p", 16 * MIB, Backing::Memfd, false);
        for given in [0..MIB, 5 * MIB..9 * MIB, 16 * MIB - 4096..16 * MIB] {
            assert_eq!(ram.discard(given.clone()).ranges, [given]);
        }
        let options = PrefaultOptions { spares_discarded, spares_mmap_lock, ..small_chunks() };
        let prefault = ram.prefault(&options).unwrap();
        let engine = Arc::clone(&prefault.engine);
        prefault.wait().unwrap();
        assert_eq!(engine.done_bytes.load(Ordering::Relaxed), 16 * MIB);
        ram.regions()[0].populated_runs(&(0..16 * MIB)).unwrap()
    };
    for spares_mmap_lock in [false, true] {
        let kept = populated(true, spares_mmap_lock);
        assert_eq!(kept, [MIB..5 * MIB, 9 * MIB..16 * MIB - 4096]);
        let all = populated(false, spares_mmap_lock);
        assert!(all.iter().eq([&(0..16 * MIB)]), "for devices all of it is populated");
    }
}

#[test]
fn a_cancelled_run_says_how_far_it_came() {
    let ram = ram("p", 16 * MIB, Backing::Memfd, false);
    // The only thread stops in its first chunk until it has been cancelled.
    let gate = Arc::new(Barrier::new(2));
    let inside = Arc::clone(&gate);
    let on_chunk: ChunkHook = Arc::new(move |_, _| {
        inside.wait();
        inside.wait();
        Ok(())
    });
    let threads = NonZeroUsize::new(1);
    let options = PrefaultOptions {
        threads,
        chunk_bytes: 4 * MIB,
        on_chunk: Some(on_chunk),
        ..PrefaultOptions::default()
    };
    let prefault = ram.prefault(&options).unwrap();
    gate.wait();
    assert_eq!(prefault.progress(), PrefaultProgress { done_bytes: 0, total_bytes: 16 * MIB });
    assert!(!prefault.is_finished());
    prefault.cancel();
    gate.wait();
    let error = prefault.wait().unwrap_err();
    let PrefaultError::Cancelled { done_bytes, total_bytes } = error else { panic!("{error}") };
    assert_eq!((done_bytes, total_bytes), (4 * MIB, 16 * MIB));
}

#[test]
fn a_run_stops_in_the_middle_of_a_chunk() {
    let ram = ram("p", 64 * MIB, Backing::Memfd, false);
    let looks = AtomicUsize::new(0);
    // Once before the chunk, once before each step.
    let is_stopped: StopQuery = Arc::new(move || looks.fetch_add(1, Ordering::Relaxed) >= 3);
    let options = PrefaultOptions {
        threads: NonZeroUsize::new(1),
        chunk_bytes: 64 * MIB,
        on_chunk: Some(Arc::new(|_, range| panic!("{range:?} is not populated"))),
        is_stopped: Some(is_stopped),
        ..PrefaultOptions::default()
    };
    let error = ram.prefault(&options).unwrap().wait().unwrap_err();
    let PrefaultError::Cancelled { done_bytes, .. } = error else { panic!("{error}") };
    assert_eq!(done_bytes, 0);
    let populated = ram.regions()[0].populated_runs(&(0..64 * MIB)).unwrap();
    assert!(populated.iter().eq([&(0..16 * MIB)]), "two steps: {populated:?}");
}

#[test]
fn more_than_the_host_has_is_refused_before_a_page_is_touched() {
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let ram = ram("p", 1 << 44, backing, false);
        let error = ram.prefault(&small_chunks()).unwrap_err();
        let PrefaultError::InsufficientMemory(refused) = error else { panic!("{error}") };
        assert_eq!(refused.needed_bytes, 1 << 44);
        let region = &ram.regions()[0];
        assert!(!is_mapped(region.as_ptr()), "the first page is there");
        check_available(&[]).unwrap();
        // Stopped before a page, as the host has no room in fact.
        let is_stopped: Option<StopQuery> = Some(Arc::new(|| true));
        let options = PrefaultOptions { is_checked: true, is_stopped, ..small_chunks() };
        let error = ram.prefault(&options).unwrap().wait().unwrap_err();
        assert!(matches!(error, PrefaultError::Cancelled { done_bytes: 0, .. }), "{error}");
    }
}

#[test]
fn a_failing_hook_stops_the_engine_and_is_reported() {
    let ram = ram("p", 16 * MIB, Backing::Memfd, false);
    let on_chunk: ChunkHook = Arc::new(|_, range| match range.start {
        0 => Ok(()),
        _ => Err("no IOMMU".into()),
    });
    let options = PrefaultOptions { on_chunk: Some(on_chunk), ..small_chunks() };
    let error = ram.prefault(&options).unwrap().wait().unwrap_err();
    let PrefaultError::Hook { zone, source, .. } = error else { panic!("{error}") };
    assert_eq!((zone.as_str(), source.to_string().as_str()), ("p", "no IOMMU"));
}

#[test]
fn a_bound_zone_is_populated_on_its_node() {
    if !Host::real().has_node(0) {
        test_skip::skip!("no NUMA in this kernel");
        return;
    }
    let zone = ZoneSpec { host_numa_node: Some(0), prefault: true, ..ZoneSpec::new("n", 4 * MIB) };
    let ram = GuestRam::new(&RamConfig { zones: vec![zone] }, RamLayout::default()).unwrap();
    let prefault = ram.prefault(&small_chunks()).unwrap();
    assert_eq!(prefault.engine.queues[0].node, Some(0));
    prefault.wait().unwrap();
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
    let address = format!("{:x} ", ram.regions()[0].host_addr());
    let line = maps.lines().find(|line| line.starts_with(&address)).unwrap();
    assert!(line.contains("bind:0"), "{line}");
}

proptest! {
    #[test]
    fn chunks_cover_everything_once(chunk_bytes in 0..9 * MIB, pages in 1..4000_u64) {
        let ram = ram("p", pages * 4096, Backing::Memfd, false);
        let queues = cut(ram.regions(), chunk_bytes, Homes::default());
        let mut ends = BTreeMap::new();
        for chunk in queues.iter().flat_map(|queue| &queue.chunks) {
            ends.insert(chunk.bytes.start, chunk.bytes.end);
            let host_end = ram.regions()[0].host_addr() + chunk.bytes.end;
            prop_assert!(host_end.is_multiple_of(THP_BYTES) || chunk.bytes.end == pages * 4096);
        }
        let mut at = 0;
        while let Some(end) = ends.remove(&at) {
            at = end;
        }
        prop_assert_eq!(at, pages * 4096);
        prop_assert!(ends.is_empty());
    }
}

#[test]
fn the_watcher_hears_of_every_chunk_and_once_of_the_end() {
    let ram = ram("w", 16 * MIB, Backing::Memfd, false);
    let heard = Arc::new(Mutex::new(Vec::new()));
    let listener = Arc::clone(&heard);
    let observer: PrefaultObserver = Arc::new(move |notice| {
        let word = match notice {
            PrefaultEvent::Progress(_) => "progress",
            PrefaultEvent::Completed(_) => "completed",
            PrefaultEvent::Cancelled(_) => "cancelled",
            PrefaultEvent::Failed(_) => "failed",
        };
        listener.lock().push(word);
    });
    let with = |on_chunk| PrefaultOptions {
        on_chunk,
        observer: Some(Arc::clone(&observer)),
        ..small_chunks()
    };
    ram.prefault(&with(None)).unwrap().wait().unwrap();
    let words = std::mem::take(&mut *heard.lock());
    assert_eq!(words, ["progress", "progress", "progress", "progress", "completed"]);
    let refuse: ChunkHook = Arc::new(|_, _| Err("no".into()));
    ram.prefault(&with(Some(refuse))).unwrap().wait().unwrap_err();
    assert_eq!(heard.lock().last(), Some(&"failed"));
    heard.lock().clear();
    let prefault = ram.prefault(&with(None)).unwrap();
    prefault.cancel();
    let _ = prefault.wait();
    let words = heard.lock().clone();
    let ends = words.iter().filter(|word| **word != "progress").count();
    assert!(ends == 1 && matches!(words.last(), Some(&("cancelled" | "completed"))), "{words:?}");
}

#[test]
fn each_chunk_is_timed_on_the_lane_of_its_pages() {
    let small = ZoneSpec { backing: Backing::Memfd, thp: false, ..ZoneSpec::new("s", 8 * MIB) };
    let large = ZoneSpec { backing: Backing::Memfd, thp: true, ..ZoneSpec::new("l", 16 * MIB) };
    let zones = vec![small, large];
    let ram = GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap();
    let (model, slow) = (Duration::from_micros(50), Duration::from_millis(10));
    let model: PopulateModel = Arc::new(move |node, region, _| {
        assert_eq!(node, Some(0));
        std::thread::sleep(if region.zone_id() == "s" { slow } else { model });
    });
    let homes = Some(Homes::pretended(&[0]));
    let options = PrefaultOptions { model: Some(model), homes, ..small_chunks() };
    let prefault = Prefault::start(ram.regions(), &options).unwrap();
    let meter = prefault.meter();
    prefault.wait().unwrap();
    let lanes = meter.lanes();
    let shown: Vec<_> = lanes.iter().map(|it| (it.kind.page_bytes, it.done_chunks)).collect();
    assert_eq!(shown, [(4096, 2), (THP_BYTES, 4)]);
    assert!(lanes.iter().all(|it| it.left_bytes() == 0 && it.threads == 3 && it.node == Some(0)));
    assert!(lanes[0].busy >= 2 * slow && lanes[1].busy < lanes[0].busy, "{lanes:?}");
}

#[test]
fn what_an_engine_has_populated_is_known_to_the_next() {
    let ram = ram("p", 16 * MIB, Backing::Memfd, false);
    let there = || {
        let queues = cut(ram.regions(), 4 * MIB, Homes::default());
        let lanes = PrefaultMeter(queues.iter().map(|it| Arc::clone(&it.meter)).collect()).lanes();
        lanes.iter().filter(|it| it.kind.is_there).map(|it| it.total_bytes).sum::<u64>()
    };
    assert_eq!(there(), 0);
    ram.prefault(&small_chunks()).unwrap().wait().unwrap();
    assert_eq!(there(), 16 * MIB);
}

#[test]
fn a_pipeline_gets_populated_pieces_in_order() {
    let ram = ram("c", 16 * MIB, Backing::Memfd, false);
    let region = &ram.regions()[0];
    // Pages that are still to arrive must not be populated.
    region.resident().set_absent(1024..1025);
    let mut pieces = Vec::new();
    region
        .populate_chunks(&(4096..12 * MIB), 4 * MIB, &mut |piece| {
            assert!(is_mapped(region.as_ptr().wrapping_add(piece.start.try_into().unwrap())));
            pieces.push(piece);
            Ok(())
        })
        .unwrap();
    let mut expected = vec![4096..4 * MIB, 4 * MIB + 4096..8 * MIB, 8 * MIB..12 * MIB];
    assert_eq!(pieces, expected);
    assert!(!is_mapped(region.as_ptr().wrapping_add(usize::try_from(12 * MIB).unwrap())));
    let refused = region.populate_chunks(&(0..16 * MIB), 4 * MIB, &mut |piece| {
        expected.push(piece);
        Err("full".into())
    });
    assert!(matches!(refused, Err(PrefaultError::Hook { at: 0, .. })), "{refused:?}");
    let outside = region.populate_chunks(&(0..17 * MIB), 4 * MIB, &mut |_| Ok(()));
    assert!(matches!(outside, Err(PrefaultError::Range(_))));
}

#[test]
fn pages_of_a_file_are_put_into_the_page_tables() {
    let first = ram("p", 4 * MIB, Backing::Memfd, false);
    let file = Arc::clone(first.regions()[0].file().unwrap());
    first.regions()[0].write_range(5 * 4096, &[0xa5; 4096]).unwrap();
    first.regions()[0].fill(&(0..2 * MIB)).unwrap();
    let config =
        RamConfig { zones: vec![ZoneSpec { shared: true, ..ZoneSpec::new("p", 4 * MIB) }] };
    let provided = [crate::ProvidedFile::file("p", file)];
    let second = GuestRam::with_provided(&config, RamLayout::default(), &provided).unwrap();
    let region = &second.regions()[0];
    let page = |number: usize| region.as_ptr().wrapping_add(number * 4096);
    assert!(!is_mapped(page(5)));
    region.map_present(&(0..2 * MIB)).unwrap();
    assert!((0..512).all(|number| is_mapped(page(number))));
    let mut bytes = [0; 4096];
    region.read_page_range(5 * 4096, &mut bytes).unwrap();
    assert_eq!(bytes, [0xa5; 4096]);
    assert!(region.map_present(&(0..5 * MIB)).is_err() && region.map_present(&(1..4096)).is_err());
}

#[test]
fn who_waits_does_what_is_left() {
    let ram = ram("p", 16 * MIB, Backing::Memfd, false);
    // The only thread stops in its first chunk until all others are done.
    let others = Arc::new(AtomicUsize::new(0));
    let (told, begun) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel();
    let (seen, released) = (Arc::clone(&others), Mutex::new(released));
    let own = niceness();
    let on_chunk: ChunkHook = Arc::new(move |_, _| {
        if std::thread::current().name().is_some_and(|name| name.starts_with("prefault0.")) {
            told.send(niceness()).unwrap();
            // With a time limit: a failed assertion would not release the other thread.
            released.lock().recv_timeout(Duration::from_secs(20)).unwrap();
        } else {
            assert_eq!(niceness(), own, "a helper gives way, too");
            seen.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    });
    let options = PrefaultOptions {
        threads: NonZeroUsize::new(1),
        chunk_bytes: 4 * MIB,
        on_chunk: Some(on_chunk),
        yields_to_guest: true,
        ..PrefaultOptions::default()
    };
    let prefault = Prefault::start(ram.regions(), &options).unwrap();
    assert_eq!(begun.recv().unwrap(), (own + 10).min(19));
    let helper = prefault.helper();
    helper.help();
    assert_eq!(others.load(Ordering::SeqCst), 3, "three of four chunks are left");
    release.send(()).unwrap();
    prefault.wait().unwrap();
    assert!(all_mapped(&ram.regions()[0]));
    // Too late, which does no harm.
    helper.help();
}

/// Niceness of the calling thread.
fn niceness() -> i32 {
    // SAFETY: takes numbers only; 0 is the calling thread.
    unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
}
