// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hosts that are larger than this one: how long what the kernel does for a chunk takes there.
//!
//! Owns the rates, each with its origin, and the clock of the model. A thread that is woken late makes up for it in its
//! next chunk, so that the few processors of this machine do not slow the model down unless they are overloaded.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use memory::RamRegion;
use parking_lot::Mutex;
use vfio::{DmaLimits, DmaTarget};

pub const GIB: u64 = 1 << 30;

/// What a thread populates a second of 2 MiB pages: 16 threads reached 178 GiB/s on a host with two sockets.
pub const HUGE_THREAD_BYTES_PER_SECOND: u64 = 178 * GIB / 16;
/// What the memory of that host allows, on any number of threads.
pub const POPULATE_BYTES_PER_SECOND: u64 = 400 * GIB;
/// What type 1 maps a second of memory in huge pages, one call at a time. There is no published rate of iommufd, which
/// takes several calls at a time: the same is assumed.
pub const HUGE_MAP_BYTES_PER_SECOND: u64 = 511_000_000_000;
/// What a thread populates a second of private pages of 4 KiB, as for type 1 (`docs/benchmarks.md`, prefault): two threads
/// reached 5.44 GiB/s with the lock of the address space spared, beside changes of it.
pub const SMALL_THREAD_BYTES_PER_SECOND: u64 = 544 * GIB / 100 / 2;
/// What type 1 maps a second of pages of 4 KiB, by the figures published with the kernel's change for large folios, for
/// memory that was populated before. It takes the lock of the address space for each run of pages that follow each other.
pub const SMALL_MAP_BYTES_PER_SECOND: u64 = 57_200_000_000;

thread_local! {
    /// When what the thread did last is over, in the time of the model.
    static FREE_AT: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Duration of so many bytes at a rate.
pub fn duration(bytes: u64, bytes_per_second: u64) -> Duration {
    let ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_second.max(1));
    Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
}

/// Sleeps until the moment, which becomes the one from which the thread goes on.
fn sleep_until(moment: Instant) {
    FREE_AT.set(Some(moment));
    thread::sleep(moment.saturating_duration_since(Instant::now()));
}

/// When the thread has done what it did last.
fn free_at() -> Instant {
    FREE_AT.get().unwrap_or_else(Instant::now)
}

/// Whether memory is in pages of 4 KiB.
fn is_small(region: &RamRegion) -> bool {
    !region.wants_huge_pages()
}

/// What the VMM does when a chunk of huge pages is populated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Maps it when all are populated, as with type 1 where page faults take the lock of the address space.
    Last,
    /// Maps it at once, as with iommufd, and with type 1 on kernels that let it (`memory::sparing`).
    Beside,
}

/// A host: its IOMMU, which maps one call at a time, and the memory of its nodes.
pub struct Host {
    plan: Plan,
    /// When the lock of the IOMMU is free again, in the time of the model. Held briefly: threads sleep without it.
    free_at: Mutex<Option<Instant>>,
    /// Nanoseconds for which the lock of the address space was held for writing. Threads that populate pages of 4 KiB
    /// take it as well: they stand still meanwhile. All of a call counts, the most that it can be.
    locked_ns: AtomicU64,
    pub calls: AtomicU64,
    pub chunks: AtomicU64,
    /// Threads of all nodes together.
    threads: usize,
    nodes: usize,
    /// How many times slower node 1 populates than the others.
    slow_node: u32,
}

impl Host {
    /// With so many threads on all of its nodes together.
    pub fn new(plan: Plan, threads: usize, nodes: usize, slow_node: u32) -> Self {
        let [locked_ns, calls, chunks] = [const { AtomicU64::new(0) }; 3];
        let (free_at, slow_node) = (Mutex::new(None), slow_node.max(1));
        Self { plan, free_at, locked_ns, calls, chunks, threads, nodes: nodes.max(1), slow_node }
    }

    /// What a thread populates a second: nodes share the bandwidth of all memory, and threads that of their node.
    pub fn thread_bytes_per_second(&self, is_small: bool) -> u64 {
        let of_thread =
            if is_small { SMALL_THREAD_BYTES_PER_SECOND } else { HUGE_THREAD_BYTES_PER_SECOND };
        of_thread.min(POPULATE_BYTES_PER_SECOND / self.threads.max(1) as u64)
    }

    /// Populates a chunk on a thread of a node.
    pub fn populate(&self, node: Option<u32>, region: &RamRegion, range: &Range<u64>) {
        self.chunks.fetch_add(1, Ordering::Relaxed);
        let is_small = is_small(region);
        let bytes = range.end.saturating_sub(range.start);
        let took = duration(bytes, self.thread_bytes_per_second(is_small));
        let slower = if node == Some(1) && self.nodes > 1 { self.slow_node } else { 1 };
        let mut seen_ns = self.locked_ns.load(Ordering::Relaxed);
        sleep_until(free_at() + took * slower);
        if !is_small {
            return;
        }
        loop {
            let now_ns = self.locked_ns.load(Ordering::Relaxed);
            if now_ns == seen_ns {
                return;
            }
            sleep_until(free_at() + Duration::from_nanos(now_ns.saturating_sub(seen_ns)));
            seen_ns = now_ns;
        }
    }
}

impl DmaTarget for Host {
    fn maps_last(&self, _region: &RamRegion) -> bool {
        self.plan == Plan::Last
    }

    fn map(&self, region: &RamRegion, range: &Range<u64>) -> io::Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let rate =
            if is_small(region) { SMALL_MAP_BYTES_PER_SECOND } else { HUGE_MAP_BYTES_PER_SECOND };
        let took = duration(range.end.saturating_sub(range.start), rate);
        let mut lock = self.free_at.lock();
        let end = lock.map_or_else(free_at, |free| free.max(free_at())) + took;
        *lock = Some(end);
        drop(lock);
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.locked_ns.fetch_add(ns, Ordering::Relaxed);
        sleep_until(end);
        Ok(())
    }

    fn unmap(&self, _gpa: &Range<u64>) -> io::Result<()> {
        Ok(())
    }

    fn unmap_all(&self) {}

    fn limits(&self) -> DmaLimits {
        DmaLimits { entries: Some(u64::from(u16::MAX)), ..DmaLimits::default() }
    }
}
