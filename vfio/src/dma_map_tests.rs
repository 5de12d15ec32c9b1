// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Concurrent kernel calls of the DMA map: on different ranges they run at once, on overlapping ones they exclude
//! each other.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use memory::{GuestRam, Pins, RamConfig, RamLayout, RamRegion, ZoneSpec};
use parking_lot::{Condvar, Mutex};

use super::dma::DmaTarget;
use super::fakes::FakeTarget;
use super::limits::DmaLimits;
use super::{DmaGate, DmaMap, GuestRamPopulator, OnLost, Pinning};

const MIB: u64 = 1 << 20;
const PIECE: u64 = 2 * MIB;
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

fn ram(len_bytes: u64) -> Arc<GuestRam> {
    let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", len_bytes) }];
    Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap())
}

fn dma_map(target: Arc<dyn DmaTarget>, ram: &Arc<GuestRam>) -> Arc<DmaMap> {
    let no_loss: OnLost = Box::new(|reason| panic!("{reason}"));
    DmaMap::plan(target, &GuestRamPopulator::new(Arc::clone(ram), None), true, no_loss)
}

/// Where threads meet.
#[derive(Default)]
struct Meeting {
    here: Mutex<usize>,
    arrived: Condvar,
}

impl Meeting {
    /// Waits until `count` threads have come; false if they do not all come.
    fn wait_for(&self, count: usize) -> bool {
        let mut here = self.here.lock();
        *here += 1;
        self.arrived.notify_all();
        self.arrived.wait_while_for(&mut here, |here| *here < count, PATIENCE);
        *here >= count
    }
}

/// A target whose calls wait until so many of them are in progress.
fn meeting_target(count: usize) -> Arc<FakeTarget> {
    let meeting = Meeting::default();
    let before = Box::new(move |_| {
        let all = meeting.wait_for(count);
        if all { Ok(()) } else { Err(io::Error::other("the other pieces were not mapped at once")) }
    });
    Arc::new(FakeTarget { before: Some(before), ..FakeTarget::default() })
}

#[test]
fn different_pieces_are_mapped_at_once() {
    const THREADS: u64 = 4;
    let ram = ram(THREADS * PIECE);
    let target = meeting_target(4);
    let dma_map = dma_map(target.clone(), &ram);
    let region = &ram.regions()[0];
    std::thread::scope(|scope| {
        let map = |at: u64| dma_map.map(region, &(at * PIECE..(at + 1) * PIECE));
        let calls: Vec<_> = (0..THREADS).map(|at| scope.spawn(move || map(at))).collect();
        for call in calls {
            call.join().unwrap().unwrap();
        }
    });
    assert_eq!(target.is_mapped(0..THREADS * PIECE), Some(4));
    assert_eq!(dma_map.mapped_bytes(), THREADS * PIECE);
}

#[test]
fn memory_is_pinned_on_all_threads_that_populate_it() {
    const THREADS: usize = 4;
    // A chunk for each.
    let ram = ram(THREADS as u64 * 64 * MIB);
    let target = meeting_target(THREADS);
    let threads = std::num::NonZeroUsize::new(THREADS);
    let populator = Arc::new(GuestRamPopulator::new(Arc::clone(&ram), threads));
    let no_loss: OnLost = Box::new(|reason| panic!("{reason}"));
    let dma_map = DmaMap::plan(target.clone(), populator.as_ref(), true, no_loss);
    let gate = Arc::new(DmaGate::default());
    let mut pinning =
        Pinning::start(dma_map, populator, Arc::clone(&gate), false, Box::new(|_| {})).unwrap();
    pinning.wait().unwrap();
    assert!(gate.is_open());
    assert_eq!(target.is_mapped(0..ram.total_bytes()), Some(4 * 32));
}

#[test]
fn what_is_unmapped_for_good_waits_for_every_call() {
    let ram = ram(2 * PIECE);
    let (meeting, hold) = (Arc::new(Meeting::default()), Arc::new(DmaGate::default()));
    let before = {
        let (meeting, hold) = (Arc::clone(&meeting), Arc::clone(&hold));
        Box::new(move |gpa| {
            meeting.wait_for(3);
            // One of the two returns at once.
            if gpa == 0 { Ok(()) } else { hold.wait().map_err(io::Error::other) }
        })
    };
    let target = Arc::new(FakeTarget { before: Some(before), ..FakeTarget::default() });
    let dma_map = dma_map(target.clone(), &ram);
    let region = &ram.regions()[0];
    std::thread::scope(|scope| {
        let dma_map = &dma_map;
        let [first, second] = [0, 1]
            .map(|at| scope.spawn(move || dma_map.map(region, &(at * PIECE..(at + 1) * PIECE))));
        meeting.wait_for(3);
        dma_map.lose(&"the device has failed".into());
        assert!(first.join().unwrap().is_ok());
        let unmaps = scope.spawn(|| dma_map.unmap_lost());
        for _ in 0..1000 {
            std::thread::yield_now();
            assert!(!unmaps.is_finished(), "a piece is still being mapped");
        }
        hold.open();
        unmaps.join().unwrap();
        assert!(second.join().unwrap().is_ok());
    });
    assert_eq!((target.mapped_bytes_in(&(0..u64::MAX)), dma_map.mapped_bytes()), (0, 0));
    assert!(dma_map.map(region, &(0..PIECE)).is_err(), "after that nothing is mapped");
}

/// A target that takes its time and checks that no call overlaps another, or what is mapped.
#[derive(Default)]
struct Exclusive {
    mapped: Mutex<BTreeMap<u64, u64>>,
    calls: Mutex<Vec<Range<u64>>>,
    violations: Mutex<Vec<String>>,
}

impl Exclusive {
    fn call(
        &self,
        what: &str,
        gpa: &Range<u64>,
        change: impl FnOnce(&mut BTreeMap<u64, u64>) -> bool,
    ) {
        let mut calls = self.calls.lock();
        let overlaps = calls.iter().any(|other| other.start < gpa.end && gpa.start < other.end);
        calls.push(gpa.clone());
        drop(calls);
        std::thread::yield_now();
        let is_fit = change(&mut self.mapped.lock());
        if overlaps || !is_fit {
            self.violations.lock().push(format!("{what} {gpa:x?}: overlaps {overlaps}"));
        }
        let mut calls = self.calls.lock();
        if let Some(at) = calls.iter().position(|own| own == gpa) {
            calls.swap_remove(at);
        }
    }
}

impl DmaTarget for Exclusive {
    fn map(&self, region: &RamRegion, range: &Range<u64>) -> io::Result<()> {
        let gpa = region.gpa() + range.start..region.gpa() + range.end;
        let len_bytes = gpa.end - gpa.start;
        self.call("map", &gpa, |mapped| mapped.insert(gpa.start, len_bytes).is_none());
        Ok(())
    }

    fn unmap(&self, gpa: &Range<u64>) -> io::Result<()> {
        self.call("unmap", gpa, |mapped| {
            let inside: Vec<_> = mapped.range(gpa.clone()).map(|(start, _)| *start).collect();
            inside.iter().filter_map(|start| mapped.remove(start)).sum::<u64>()
                == gpa.end - gpa.start
        });
        Ok(())
    }

    fn unmap_all(&self) {}

    fn limits(&self) -> DmaLimits {
        DmaLimits::default()
    }
}

#[test]
fn calls_on_overlapping_ranges_exclude_each_other() {
    const PIECES: u64 = 6;
    const STEPS: u64 = 300;
    let ram = ram(PIECES * PIECE);
    let target = Arc::new(Exclusive::default());
    let dma_map = dma_map(target.clone(), &ram);
    let region = &ram.regions()[0];
    dma_map.map(region, &(0..PIECES * PIECE)).unwrap();
    std::thread::scope(|scope| {
        for thread in 1..=4_u64 {
            let dma_map = &dma_map;
            scope.spawn(move || {
                // A sequence of its own for each thread.
                let mut random = thread;
                for _ in 0..STEPS {
                    random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(thread);
                    let start = (random >> 33) % PIECES;
                    let range = start * PIECE..PIECES.min(start + 1 + (random >> 50) % 3) * PIECE;
                    if (random >> 60) % 2 == 0 {
                        dma_map.unpin(region, &range);
                    } else {
                        // A page in the middle of pieces, so that more is mapped than was asked for.
                        dma_map.repin(region, &(range.start + MIB..range.end - MIB + 4096));
                    }
                }
            });
        }
    });
    dma_map.repin(region, &(0..PIECES * PIECE));
    assert_eq!(*target.violations.lock(), [] as [String; 0]);
    let all: Vec<_> = (0..PIECES).map(|at| (at * PIECE, PIECE)).collect();
    assert_eq!(target.mapped.lock().iter().map(|(at, len)| (*at, *len)).collect::<Vec<_>>(), all);
    assert_eq!(dma_map.mapped_bytes(), PIECES * PIECE);
}
