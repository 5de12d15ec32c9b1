// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench passthrough-scale`: how long a VM with a passed-through device takes to be usable on hosts that are larger
//! than this one, from 4 GiB to 4 TiB, on 8 to 160 threads, in pages of 4 KiB and of 2 MiB, on one node and on two.
//!
//! Everything that the VMM does itself is real: guest memory is reserved, cut into chunks, dealt out to nodes, claimed by
//! threads, put into the record of mappings, forecast, and waited for at the gate. Only what the kernel does for a chunk is
//! modelled ([`model`]): its duration follows from published rates, and the thread sleeps so long. What the model cannot
//! keep up with, the report says.
//!
//! Owns what is looked at, and the targets. Must never sleep in place of what the VMM does itself.

mod model;
mod slots;

use std::error::Error;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memory::{
    Backing, GuestRam, Homes, Prefault, PrefaultError, PrefaultOptions, RamConfig, RamLayout,
    RamRegion, ZoneSpec,
};
use vfio::{
    DmaGate, DmaMap, DmaTarget, PinState, Pinning, PopulateBegun, Populating, Populator, pin_time,
};

use crate::machine;
use crate::report::{Figure, Report, Target};
use model::{GIB, Host, Plan, duration};
use slots::Slots;

/// Threads that the targets are for: the rate of huge pages needs 36.
const TARGET_THREADS: usize = 64;
/// The largest host that is looked at: two sockets of 80 processors each.
const MANY_THREADS: usize = 160;
/// Memory in GiB, and seconds until the device is usable.
const TARGETS: [(u64, f64); 2] = [(512, 1.5), (4096, 12.0)];
/// What the VMM's own work may add to the model's time, as a ratio.
const OVERHEAD_MAX: f64 = 1.1;
/// Time until the guest may run, at any size: nothing in it may depend on memory.
const FIRST_INSTRUCTION_MAX_MS: f64 = 100.0;
/// What memory that a pool has mapped may add to opening the device.
const MAPPED_SLOTS_MAX_MS: f64 = 100.0;
/// Slots that a VM of 4 TiB takes.
const SLOT_COUNTS: [u64; 3] = [1, 2, 8];

/// What a wait that was forecast may last, by the forecast's limit.
const FORECAST_ERROR_MAX: f64 = 1.2;

/// Pages of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pages {
    /// Of 2 MiB.
    Huge,
    /// Of 4 KiB.
    Small,
    /// Of 2 MiB, and of 4 KiB in a zone of an eighth behind them.
    Mixed,
}

/// What is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Setup {
    size_gib: u64,
    threads: usize,
    plan: Plan,
    pages: Pages,
    /// NUMA nodes that share threads and memory.
    nodes: u32,
    /// How many times slower node 1 populates.
    slow_node: u32,
}

impl Setup {
    const fn new(size_gib: u64, threads: usize) -> Self {
        let (plan, pages) = (Plan::Beside, Pages::Huge);
        Self { size_gib, threads, plan, pages, nodes: 1, slow_node: 1 }
    }

    fn zones(&self) -> Vec<ZoneSpec> {
        let bytes = self.size_gib * GIB;
        let huge = |bytes| ZoneSpec { shared: true, ..ZoneSpec::new("huge", bytes) };
        let small = |bytes| ZoneSpec {
            backing: Backing::Anonymous,
            thp: false,
            ..ZoneSpec::new("small", bytes)
        };
        match self.pages {
            Pages::Huge => vec![huge(bytes)],
            Pages::Small => vec![small(bytes)],
            Pages::Mixed => vec![huge(bytes / 8 * 7), small(bytes / 8)],
        }
    }

    /// Bytes in huge pages, and in small ones.
    fn bytes(&self) -> [u64; 2] {
        let bytes = self.size_gib * GIB;
        match self.pages {
            Pages::Huge => [bytes, 0],
            Pages::Small => [0, bytes],
            Pages::Mixed => [bytes / 8 * 7, bytes / 8],
        }
    }

    fn homes(&self) -> Homes {
        let nodes: Vec<u32> = (0..self.nodes).collect();
        if nodes.len() > 1 { Homes::pretended(&nodes) } else { Homes::default() }
    }

    fn host(&self) -> Host {
        Host::new(self.plan, self.threads, self.nodes as usize, self.slow_node)
    }

    fn name(&self) -> String {
        let pages = match self.pages {
            Pages::Huge => "",
            Pages::Small => ", 4 KiB pages",
            Pages::Mixed => ", an eighth of it 4 KiB pages",
        };
        let nodes = match (self.nodes, self.slow_node) {
            (1, _) => String::new(),
            (nodes, 1) => format!(", {nodes} nodes"),
            (nodes, times) => format!(", {nodes} nodes, one {times} times slower"),
        };
        let plan = match self.plan {
            Plan::Last => "mapped last",
            Plan::Beside => "mapped beside",
        };
        format!("{} GiB, {} threads, {plan}{pages}{nodes}", self.size_gib, self.threads)
    }

    /// The time that populating and mapping need at the model's rates, one after the other or in complete overlap.
    fn floor_ms(&self) -> f64 {
        let host = self.host();
        let rate = |is_small| host.thread_bytes_per_second(is_small) * self.threads as u64;
        let [huge, small] = self.bytes();
        let populating = duration(huge, rate(false)) + duration(small, rate(true));
        let populating = populating * self.slow_node;
        let mapping = [
            duration(huge, model::HUGE_MAP_BYTES_PER_SECOND),
            duration(small, model::SMALL_MAP_BYTES_PER_SECOND),
        ];
        let mapping = mapping[0] + mapping[1];
        millis(match (self.plan, self.pages) {
            // Pages of 4 KiB are not populated while some are mapped.
            (Plan::Last, _) | (_, Pages::Small) => populating + mapping,
            (Plan::Beside, _) => populating.max(mapping),
        })
    }
}

/// What is looked at: all numbers of threads with the plan of today's kernels, and that of the targets with the other one too.
fn setups() -> Vec<Setup> {
    let mut setups = Vec::new();
    for (size_gib, threads) in [
        (4, &[8, 64, MANY_THREADS][..]),
        (64, &[8, 16, 32, 64, MANY_THREADS]),
        (512, &[8, 16, 32, 64, MANY_THREADS]),
        (1024, &[64, MANY_THREADS]),
        (4096, &[64, MANY_THREADS]),
    ] {
        setups.extend(threads.iter().map(|threads| Setup::new(size_gib, *threads)));
    }
    let of = Setup::new;
    for size_gib in [64, 512, 4096] {
        setups.push(Setup { plan: Plan::Last, ..of(size_gib, TARGET_THREADS) });
    }
    for size_gib in [4, 64, 512] {
        setups.push(Setup { pages: Pages::Small, ..of(size_gib, TARGET_THREADS) });
    }
    setups.push(Setup { pages: Pages::Mixed, ..of(512, TARGET_THREADS) });
    setups.push(Setup { nodes: 2, ..of(4096, MANY_THREADS) });
    setups.push(Setup { nodes: 2, slow_node: 4, ..of(512, MANY_THREADS) });
    setups
}

/// Guest memory, populated by the VMM's engine on a host of the model.
struct Memory {
    ram: Arc<GuestRam>,
    setup: Setup,
    host: Arc<Host>,
}

impl Populator for Memory {
    fn total_bytes(&self) -> (u64, u64) {
        (self.ram.total_bytes(), 0)
    }

    fn regions(&self) -> &[Arc<RamRegion>] {
        self.ram.regions()
    }

    fn populate(&self, how: Populating<'_>) -> Result<(), PrefaultError> {
        let host = Arc::clone(&self.host);
        let options = PrefaultOptions {
            chunk_bytes: how.chunk_bytes,
            on_chunk: Some(how.on_chunk),
            // The model's threads sleep: they take nothing from a guest.
            yields_to_guest: false,
            spares_mmap_lock: how.spares_mmap_lock,
            threads: NonZeroUsize::new(self.setup.threads),
            homes: Some(self.setup.homes()),
            model: Some(Arc::new(move |node, region, range| host.populate(node, region, range))),
            ..PrefaultOptions::default()
        };
        let prefault = Prefault::start(self.ram.regions(), &options)?;
        let meter = prefault.meter();
        // Not helped by the thread that waits for the end: the number of threads is what is compared.
        let begun = PopulateBegun { help: Arc::new(|| {}), lanes: Box::new(move || meter.lanes()) };
        (how.begun)(begun);
        prefault.wait_unless(&|| {
            (how.meanwhile)();
            false
        })
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

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn start(setup: Setup) -> Result<Outcome, Box<dyn Error>> {
    let begin = Instant::now();
    let config = RamConfig { zones: setup.zones() };
    let ram = Arc::new(GuestRam::new(&config, RamLayout::default())?);
    let host = Arc::new(setup.host());
    let memory = Arc::new(Memory { ram, setup, host: Arc::clone(&host) });
    let target: Arc<dyn DmaTarget> = host.clone();
    let dma_map = DmaMap::plan(target, memory.as_ref(), false, Box::new(|_| {}));
    let gate = Arc::new(DmaGate::default());
    let mut pinning = Pinning::start(dma_map, memory, Arc::clone(&gate), true, Box::new(|_| {}))?;
    let started_ms = millis(begin.elapsed());
    let is_withheld = pinning.is_too_long(Duration::ZERO, || false);
    let visible_ms = millis(begin.elapsed());
    gate.wait()?;
    let usable_ms = millis(begin.elapsed());
    pinning.wait()?;
    let PinState::Pinned { .. } = pinning.progress().state else { return Err("not mapped".into()) };
    let gate_wait_ms = if is_withheld { 0.0 } else { usable_ms - visible_ms };
    let count = |of: &std::sync::atomic::AtomicU64| of.load(Ordering::Relaxed);
    let (chunks, calls) = (count(&host.chunks), count(&host.calls));
    Ok(Outcome { started_ms, usable_ms, gate_wait_ms, chunks, calls })
}

/// Measures.
pub fn run(runs: usize) -> Result<Report, Box<dyn Error>> {
    let (mut figures, mut targets, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut slowest_start_ms, mut longest_wait_ms) = (0_f64, 0_f64);
    for setup in setups() {
        let host = setup.name();
        eprintln!("{host}");
        let outcomes = (0..runs).map(|_| start(setup)).collect::<Result<Vec<_>, _>>()?;
        let name = |what: &str| format!("{host}: {what}");
        let floor = setup.floor_ms();
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
        let is_target = |gib: u64| {
            let of = Setup::new(gib, TARGET_THREADS);
            setup == of || setup == Setup { plan: Plan::Last, ..of }
        };
        let limit = TARGETS.iter().find(|(gib, _)| is_target(*gib));
        if let (Some((_, limit_s)), Some(usable)) = (limit, &usable) {
            let name = format!("{}, s", usable.name);
            targets.push(Target::at_most(&name, usable.value / 1e3, *limit_s));
        }
        figures.extend([started, usable, ratio, wait, chunks, calls].into_iter().flatten());
    }
    for count in SLOT_COUNTS {
        let name = format!("4096 GiB in {count} mapped slots: beside opening the device");
        eprintln!("{name}");
        let slots = Slots::new(4096, count)?;
        let taken = (0..runs).map(|_| slots.take()).collect::<Result<Vec<_>, _>>()?;
        if let Some(taken) = Figure::of(name, "ms", taken) {
            let target = format!("{}, ms", taken.name);
            targets.push(Target::at_most(&target, taken.value, MAPPED_SLOTS_MAX_MS));
            figures.push(taken);
        }
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

    fn floor_ms(size_gib: u64, threads: usize, plan: Plan) -> f64 {
        Setup { plan, ..Setup::new(size_gib, threads) }.floor_ms()
    }

    #[test]
    fn the_slower_of_two_rates_is_the_floor() {
        // 8 threads populate 89 GiB a second, less than can be mapped.
        assert!((floor_ms(89, 8, Plan::Beside) - 1000.0).abs() < 1.0);
        assert!((floor_ms(400, 64, Plan::Beside) - 1000.0).abs() < 1.0);
        assert!((floor_ms(400, 256, Plan::Beside) - 1000.0).abs() < 1.0, "memory is the limit");
        assert!((floor_ms(400, 256, Plan::Last) - 1840.5).abs() < 1.0, "one after the other");
        let small = Setup { pages: Pages::Small, ..Setup::new(64, 64) };
        assert!((small.floor_ms() - 1569.0).abs() < 1.0, "not at the same time");
        let slow = Setup { nodes: 2, slow_node: 4, ..Setup::new(400, 160) };
        assert!((slow.floor_ms() - 4000.0).abs() < 1.0, "the slower node is");
    }

    #[test]
    fn a_vm_maps_each_piece_once_and_takes_no_less_than_the_rates_say() {
        let of = Setup::new(4, 16);
        for setup in [
            of,
            Setup { plan: Plan::Last, ..of },
            Setup { pages: Pages::Small, ..of },
            Setup { pages: Pages::Mixed, ..of },
            Setup { nodes: 2, slow_node: 2, ..of },
        ] {
            let outcome = start(setup).expect("a VM");
            assert_eq!((outcome.calls, outcome.chunks), (64, 64), "{setup:?}");
            assert!(outcome.usable_ms >= setup.floor_ms(), "{setup:?} {}", outcome.usable_ms);
            assert!(outcome.gate_wait_ms > 0.0 && outcome.gate_wait_ms < outcome.usable_ms);
        }
    }

    #[test]
    fn a_run_takes_less_than_two_minutes() {
        let all: f64 = setups().iter().map(Setup::floor_ms).sum();
        assert!(all < 100_000.0, "{all} ms at the rates alone");
    }
}
