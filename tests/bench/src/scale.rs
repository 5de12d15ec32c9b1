// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench passthrough-scale`: how long a VM with a passed-through device takes to be usable on hosts that are larger
//! than this one, from 4 GiB to 4 TiB and on 8 to 256 threads.
//!
//! Everything that the VMM does itself is real: guest memory is reserved, cut into chunks, claimed by threads, put
//! into the record of mappings, and waited for at the gate. Only what the kernel does for a chunk is modelled: its
//! duration follows from published rates, and the thread sleeps so long. A thread that is woken late makes up for it in
//! its next chunk, so that the few processors of this machine do not slow the model down unless they are overloaded,
//! which the report then says.
//!
//! Owns the rates and the clock of the model. Must never sleep in place of what the VMM does itself.

use std::cell::Cell;
use std::error::Error;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use memory::{
    GuestRam, Prefault, PrefaultError, PrefaultOptions, RamConfig, RamLayout, RamRegion, ZoneSpec,
};
use parking_lot::Mutex;
use vfio::{
    DmaGate, DmaLimits, DmaMap, DmaTarget, PinState, Pinning, Populating, Populator, pin_time,
};

use crate::machine;
use crate::report::{Figure, Report, Target};

const GIB: u64 = 1 << 30;
const SIZES_GIB: [u64; 5] = [4, 64, 512, 1024, 4096];
const THREADS: [usize; 6] = [8, 16, 32, 64, 128, 256];

/// What a thread populates a second: 16 threads reached 178 GiB/s on a host with two sockets and 2 MiB pages.
const THREAD_BYTES_PER_SECOND: u64 = 178 * GIB / 16;
/// What the memory of that host allows, on any number of threads.
const POPULATE_BYTES_PER_SECOND: u64 = 400 * GIB;
/// What type 1 maps a second of memory in huge pages, one call at a time. There is no published rate of iommufd, which
/// takes several calls at a time: the same is assumed.
const MAP_BYTES_PER_SECOND: u64 = 511_000_000_000;

/// Threads that the targets are for: the rate above needs 36.
const TARGET_THREADS: usize = 64;
/// Memory in GiB, and seconds until the device is usable.
const TARGETS: [(u64, f64); 2] = [(512, 1.5), (4096, 12.0)];
/// What the VMM's own work may add to the model's time, as a ratio.
const OVERHEAD_MAX: f64 = 1.1;
/// Time until the guest may run, at any size: nothing in it may depend on memory.
const FIRST_INSTRUCTION_MAX_MS: f64 = 100.0;

/// What a wait that was forecast may last, by the forecast's limit.
const FORECAST_ERROR_MAX: f64 = 1.2;

thread_local! {
    /// When what the thread did last is over, in the time of the model.
    static FREE_AT: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Duration of so many bytes at a rate.
fn duration(bytes: u64, bytes_per_second: u64) -> Duration {
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

/// What the memory of a host populates, shared by threads.
#[derive(Clone, Copy)]
struct Populate {
    thread_bytes_per_second: u64,
}

impl Populate {
    fn with(threads: usize) -> Self {
        let share = POPULATE_BYTES_PER_SECOND / threads.max(1) as u64;
        Self { thread_bytes_per_second: share.min(THREAD_BYTES_PER_SECOND) }
    }

    fn run(self, range: &Range<u64>) {
        let took = duration(range.end.saturating_sub(range.start), self.thread_bytes_per_second);
        sleep_until(free_at() + took);
    }
}

/// What the VMM does when a chunk of huge pages is populated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    /// Maps it when all are populated, as with type 1 where page faults take the lock of the address space.
    Last,
    /// Maps it at once, as with iommufd, and with type 1 on kernels that let it (`memory::sparing`).
    Beside,
}

impl Plan {
    fn name(self) -> &'static str {
        match self {
            Self::Last => "mapped last",
            Self::Beside => "mapped beside",
        }
    }
}

/// An IOMMU that maps at a rate, one call at a time.
struct Iommu {
    plan: Plan,
    /// When its lock is free again, in the time of the model. Held briefly: threads sleep without it.
    free_at: Mutex<Option<Instant>>,
    calls: AtomicU64,
}

impl DmaTarget for Iommu {
    fn maps_last(&self, _region: &RamRegion) -> bool {
        self.plan == Plan::Last
    }

    fn map(&self, _region: &RamRegion, range: &Range<u64>) -> io::Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let took = duration(range.end.saturating_sub(range.start), MAP_BYTES_PER_SECOND);
        let mut lock = self.free_at.lock();
        let end = lock.map_or_else(free_at, |free| free.max(free_at())) + took;
        *lock = Some(end);
        drop(lock);
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

/// Guest memory, populated by the VMM's engine on a host of the model.
struct Memory {
    ram: Arc<GuestRam>,
    threads: usize,
    chunks: Arc<AtomicU64>,
}

impl Populator for Memory {
    fn total_bytes(&self) -> (u64, u64) {
        (self.ram.total_bytes(), 0)
    }

    fn regions(&self) -> &[Arc<RamRegion>] {
        self.ram.regions()
    }

    fn populate(&self, how: Populating<'_>) -> Result<(), PrefaultError> {
        let (host, chunks) = (Populate::with(self.threads), Arc::clone(&self.chunks));
        let options = PrefaultOptions {
            chunk_bytes: how.chunk_bytes,
            on_chunk: Some(how.on_chunk),
            yields_to_guest: how.yields_to_guest,
            spares_mmap_lock: how.spares_mmap_lock,
            threads: NonZeroUsize::new(self.threads),
            model: Some(Arc::new(move |_region, range| {
                chunks.fetch_add(1, Ordering::Relaxed);
                host.run(range);
            })),
            ..PrefaultOptions::default()
        };
        // Not helped by the thread that waits for the end: the number of threads is what is compared.
        Prefault::start(self.ram.regions(), &options)?.wait()
    }
}

/// One VM.
struct Outcome {
    /// Until the guest may run.
    started_ms: f64,
    /// Until all memory is mapped, and the gate is open.
    usable_ms: f64,
    /// The longest that a vCPU waits at the gate: none does if the guest finds the device afterwards.
    gate_wait_ms: f64,
    chunks: u64,
    calls: u64,
}

/// The time that populating and mapping need at these rates, one after the other or in complete overlap.
fn floor_ms(size_gib: u64, threads: usize, plan: Plan) -> f64 {
    let bytes = size_gib * GIB;
    let rate = (THREAD_BYTES_PER_SECOND * threads as u64).min(POPULATE_BYTES_PER_SECOND);
    let (populating, mapping) = (duration(bytes, rate), duration(bytes, MAP_BYTES_PER_SECOND));
    millis(match plan {
        Plan::Last => populating + mapping,
        Plan::Beside => populating.max(mapping),
    })
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn start(size_gib: u64, threads: usize, plan: Plan) -> Result<Outcome, Box<dyn Error>> {
    let begin = Instant::now();
    let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", size_gib * GIB) }];
    let ram = Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default())?);
    let iommu = Arc::new(Iommu { plan, free_at: Mutex::new(None), calls: AtomicU64::new(0) });
    let chunks = Arc::new(AtomicU64::new(0));
    let memory = Arc::new(Memory { ram, threads, chunks: Arc::clone(&chunks) });
    let dma_map =
        DmaMap::plan(Arc::<Iommu>::clone(&iommu), memory.as_ref(), false, Box::new(|_| {}));
    let gate = Arc::new(DmaGate::default());
    let mut pinning = Pinning::start(dma_map, memory, Arc::clone(&gate), false, Box::new(|_| {}))?;
    let started_ms = millis(begin.elapsed());
    let is_withheld = pin_time::is_too_long(&pinning, None, || false);
    let visible_ms = millis(begin.elapsed());
    gate.wait()?;
    let usable_ms = millis(begin.elapsed());
    pinning.wait()?;
    let PinState::Pinned { .. } = pinning.progress().state else { return Err("not mapped".into()) };
    let calls = iommu.calls.load(Ordering::Relaxed);
    let gate_wait_ms = if is_withheld { 0.0 } else { usable_ms - visible_ms };
    let chunks = chunks.load(Ordering::Relaxed);
    Ok(Outcome { started_ms, usable_ms, gate_wait_ms, chunks, calls })
}

/// What is looked at: all numbers of threads with the plan of today's kernels, and that of the targets with the other one too.
fn hosts() -> impl Iterator<Item = (u64, usize, Plan)> {
    SIZES_GIB.into_iter().flat_map(|size_gib| {
        let beside = THREADS.into_iter().map(move |threads| (size_gib, threads, Plan::Beside));
        beside.chain([(size_gib, TARGET_THREADS, Plan::Last)])
    })
}

/// Measures.
pub fn run(runs: usize) -> Result<Report, Box<dyn Error>> {
    let (mut figures, mut targets, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut slowest_start_ms, mut longest_wait_ms) = (0_f64, 0_f64);
    for (size_gib, threads, plan) in hosts() {
        let host = format!("{size_gib} GiB, {threads} threads, {}", plan.name());
        eprintln!("{host}");
        let outcomes =
            (0..runs).map(|_| start(size_gib, threads, plan)).collect::<Result<Vec<_>, _>>()?;
        let name = |what: &str| format!("{host}: {what}");
        let floor = floor_ms(size_gib, threads, plan);
        let values = |value: fn(&Outcome) -> f64| outcomes.iter().map(value).collect::<Vec<_>>();
        let started = Figure::of(name("guest may run"), "ms", values(|one| one.started_ms));
        let usable = Figure::of(name("device usable"), "ms", values(|one| one.usable_ms));
        let ratio = values(|one| one.usable_ms).into_iter().map(|value| value / floor).collect();
        let ratio = Figure::of(name("device usable, by the rates alone"), "", ratio);
        let counted = |value: fn(&Outcome) -> u64| -> Vec<f64> {
            #[expect(clippy::cast_precision_loss, reason = "counts of a benchmark are small")]
            outcomes.iter().map(|one| value(one) as f64).collect()
        };
        let chunks = Figure::of(name("chunks populated"), "", counted(|one| one.chunks));
        let calls = Figure::of(name("mapping calls"), "", counted(|one| one.calls));
        let wait =
            Figure::of(name("longest wait at the gate"), "ms", values(|one| one.gate_wait_ms));
        longest_wait_ms =
            outcomes.iter().map(|one| one.gate_wait_ms).fold(longest_wait_ms, f64::max);
        if let Some(started) = &started {
            slowest_start_ms = slowest_start_ms.max(started.value);
        }
        if let Some(ratio) = ratio.as_ref().filter(|ratio| ratio.value > OVERHEAD_MAX) {
            notes.push(format!(
                "{}: {:.2}, as each thread has few chunks, or this machine is too slow for the model",
                ratio.name, ratio.value
            ));
        }
        let limit = TARGETS.iter().find(|(gib, _)| (*gib, TARGET_THREADS) == (size_gib, threads));
        if let (Some((_, limit_s)), Some(usable)) = (limit, &usable) {
            let name = format!("{}, s", usable.name);
            targets.push(Target::at_most(&name, usable.value / 1e3, *limit_s));
        }
        figures.extend([started, usable, ratio, wait, chunks, calls].into_iter().flatten());
    }
    targets.push(Target::at_most(
        "guest may run, slowest, ms",
        slowest_start_ms,
        FIRST_INSTRUCTION_MAX_MS,
    ));
    targets.push(Target::at_most(
        "wait at the gate, longest of all runs, ms",
        longest_wait_ms,
        millis(pin_time::GATE_WAIT_MAX) * FORECAST_ERROR_MAX,
    ));
    Ok(Report { name: "passthrough-scale", machine: machine::name(), figures, targets, notes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_two_rates_is_the_floor() {
        // 8 threads populate 89 GiB a second, less than can be mapped.
        assert!((floor_ms(89, 8, Plan::Beside) - 1000.0).abs() < 1.0);
        assert!((floor_ms(400, 64, Plan::Beside) - 1000.0).abs() < 1.0);
        assert!((floor_ms(400, 256, Plan::Beside) - 1000.0).abs() < 1.0, "memory is the limit");
        assert!((floor_ms(400, 256, Plan::Last) - 1840.5).abs() < 1.0, "one after the other");
    }

    #[test]
    fn a_vm_maps_each_piece_once_and_takes_no_less_than_the_rates_say() {
        for plan in [Plan::Last, Plan::Beside] {
            let outcome = start(4, 16, plan).expect("a VM");
            assert_eq!((outcome.calls, outcome.chunks), (64, 64), "{plan:?}");
            assert!(outcome.usable_ms >= floor_ms(4, 16, plan), "{plan:?} {}", outcome.usable_ms);
            assert!(outcome.gate_wait_ms > 0.0 && outcome.gate_wait_ms < outcome.usable_ms);
        }
    }
}
