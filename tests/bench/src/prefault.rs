// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench prefault`: how fast guest memory is populated, for each kind of page, with one and two threads;
//! compared with touching the same kind of memory page by page on one thread, and with clearing populated
//! memory by non-temporal stores, the least that zeroing can cost. Then the same on two threads beside one that changes
//! the address space every 2 ms, as type 1 does when it accounts for what it pins.
//!
//! Owns the huge pages that it reserves, which it returns at the end. Memory is created anew each time, of
//! pages that this machine has used before (the first round is not counted).

use std::error::Error;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memory::{
    Backing, GuestRam, HugePageSize, PrefaultOptions, RamConfig, RamLayout, RamRegion, ZoneSpec,
};

use crate::hugepages::HugePages;
use crate::machine;
use crate::report::{Figure, Report, Target};

/// Size of the memory in each measurement.
const SIZE_BYTES: u64 = 2 << 30;
const CHUNK_BYTES: u64 = 64 << 20;
const THREADS: [usize; 2] = [1, 2];

/// How often the address space is changed beside.
const CHANGE_PERIOD: Duration = Duration::from_millis(2);
/// What is left of the rate beside such changes, at least.
const BESIDE_RATIO_MIN: f64 = 0.8;

struct Kind {
    name: &'static str,
    backing: Backing,
    thp: bool,
    page_bytes: u64,
}

fn kinds(has_huge_pages: bool) -> Vec<Kind> {
    let kind = |name, backing, thp, page_bytes| Kind { name, backing, thp, page_bytes };
    let mut kinds = vec![
        kind("anonymous 4 KiB", Backing::Anonymous, false, 4096),
        kind("anonymous THP", Backing::Anonymous, true, 4096),
        kind("memfd 4 KiB", Backing::Memfd, false, 4096),
        kind("memfd THP", Backing::Memfd, true, 4096),
    ];
    if has_huge_pages {
        let backing = Backing::Hugetlb { page_size: HugePageSize::Mib2 };
        kinds.push(kind("hugetlb 2 MiB", backing, false, 2 << 20));
    }
    kinds
}

fn make(kind: &Kind) -> Result<GuestRam, Box<dyn Error>> {
    let (backing, thp) = (kind.backing.clone(), kind.thp);
    let zone = ZoneSpec { backing, thp, prefault: true, ..ZoneSpec::new("bench", SIZE_BYTES) };
    Ok(GuestRam::new(&RamConfig { zones: vec![zone] }, RamLayout::default())?)
}

fn region(ram: &GuestRam) -> Result<&Arc<RamRegion>, Box<dyn Error>> {
    Ok(ram.regions().first().ok_or("memory has no region")?)
}

/// Rate in GiB/s for `bytes` since `start`.
pub fn gib_per_s(bytes: u64, start: Instant) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "bytes of a benchmark are below 2^52")]
    let gib = bytes as f64 / f64::from(1 << 30);
    gib / start.elapsed().as_secs_f64()
}

fn populate(kind: &Kind, threads: usize) -> Result<f64, Box<dyn Error>> {
    let ram = make(kind)?;
    let threads = NonZeroUsize::new(threads);
    let options = PrefaultOptions { threads, ..PrefaultOptions::default() };
    let start = Instant::now();
    ram.prefault(&options)?.wait()?;
    Ok(gib_per_s(SIZE_BYTES, start))
}

/// What populating on two threads and a thread that changes the address space meanwhile do to each other.
struct Beside {
    gib_per_s: f64,
    /// How long a change took, on average.
    change_ms: f64,
}

fn beside(kind: &Kind, spares_mmap_lock: bool) -> Result<Beside, Box<dyn Error>> {
    let ram = make(kind)?;
    let options = PrefaultOptions {
        threads: NonZeroUsize::new(2),
        spares_mmap_lock,
        ..PrefaultOptions::default()
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changer = scope.spawn(|| {
            let mut took = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                let begin = Instant::now();
                // Reserved, and given back at once.
                drop(memory::ReservedRange::new(4096));
                took.push(begin.elapsed().as_secs_f64() * 1e3);
                std::thread::sleep(CHANGE_PERIOD);
            }
            took
        });
        let start = Instant::now();
        let populated = ram.prefault(&options).and_then(memory::Prefault::wait);
        let gib_per_s = gib_per_s(SIZE_BYTES, start);
        is_over.store(true, Ordering::Relaxed);
        let took = changer.join().map_err(|_| "panic")?;
        populated?;
        #[expect(clippy::cast_precision_loss, reason = "counts of a benchmark are small")]
        let change_ms = took.iter().sum::<f64>() / took.len() as f64;
        Ok(Beside { gib_per_s, change_ms })
    })
}

fn touch(kind: &Kind) -> Result<f64, Box<dyn Error>> {
    let ram = make(kind)?;
    let region = region(&ram)?;
    let start = Instant::now();
    for at in (0..SIZE_BYTES).step_by(usize::try_from(kind.page_bytes)?) {
        region.main_slice(&(at..at + 1))?.copy_from(&[0_u8]);
    }
    Ok(gib_per_s(SIZE_BYTES, start))
}

/// Clears all of a populated region; returns the rate.
pub fn clear(region: &RamRegion, threads: usize) -> Result<f64, Box<dyn Error>> {
    let next = AtomicU64::new(0);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let work = || -> Result<(), memory::AccessError> {
            loop {
                let at = next.fetch_add(CHUNK_BYTES, Ordering::Relaxed);
                if at >= region.len_bytes() {
                    return Ok(());
                }
                region.clear(&(at..region.len_bytes().min(at + CHUNK_BYTES)))?;
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| {
            worker.join().map_err(|_| "panic")?.map_err(|_| "memory cannot be reached")
        })
    })?;
    Ok(gib_per_s(region.len_bytes(), start))
}

/// Runs the benchmark.
pub fn run(runs: usize) -> Result<Report, Box<dyn Error>> {
    let pages = SIZE_BYTES >> 21;
    let mut notes = Vec::new();
    let borrowed = HugePages::set_aside(pages);
    if let Err(error) = &borrowed {
        notes.push(format!("without 2 MiB pages: {error}"));
    }
    let kinds = kinds(borrowed.is_ok());
    let mut samples: Vec<[Vec<f64>; 3]> = kinds.iter().map(|_| Default::default()).collect();
    let mut besides: Vec<[Vec<Beside>; 2]> = kinds.iter().map(|_| Default::default()).collect();
    let mut floor: [Vec<f64>; 2] = Default::default();
    for round in 0..=runs {
        for (kind, [touched, one, two]) in kinds.iter().zip(&mut samples) {
            let figures = (touch(kind)?, populate(kind, 1)?, populate(kind, 2)?);
            if round > 0 {
                touched.push(figures.0);
                one.push(figures.1);
                two.push(figures.2);
            }
        }
        for (kind, both) in kinds.iter().zip(&mut besides) {
            for (spares_mmap_lock, values) in [false, true].into_iter().zip(both) {
                let value = beside(kind, spares_mmap_lock)?;
                if round > 0 {
                    values.push(value);
                }
            }
        }
        // Warm: every page is populated.
        let warm = kinds.last().ok_or("nothing to measure")?;
        let ram = make(warm)?;
        ram.prefault(&PrefaultOptions::default())?.wait()?;
        for (threads, values) in THREADS.into_iter().zip(&mut floor) {
            let value = clear(region(&ram)?, threads)?;
            if round > 0 {
                values.push(value);
            }
        }
    }
    Ok(report(&kinds, samples, &besides, floor, notes))
}

fn report(
    kinds: &[Kind],
    samples: Vec<[Vec<f64>; 3]>,
    besides: &[[Vec<Beside>; 2]],
    floor: [Vec<f64>; 2],
    notes: Vec<String>,
) -> Report {
    let (mut figures, mut targets) = (Vec::new(), Vec::new());
    let mut put = |name: String, unit, values| {
        let figure = Figure::of(name, unit, values);
        let value = figure.as_ref().map(|figure| figure.value);
        figures.extend(figure);
        value
    };
    for ((kind, [touched, one, two]), [plain, sparing]) in kinds.iter().zip(samples).zip(besides) {
        let name = kind.name;
        let touched = put(format!("{name}: plain touch, 1 thread"), "GiB/s", touched);
        let one = put(format!("{name}: prefault, 1 thread"), "GiB/s", one);
        let two = put(format!("{name}: prefault, 2 threads"), "GiB/s", two);
        let rates = |all: &[Beside]| all.iter().map(|one| one.gib_per_s).collect::<Vec<_>>();
        let waits = |all: &[Beside]| all.iter().map(|one| one.change_ms).collect::<Vec<_>>();
        let what = "2 threads beside changes of the address space";
        put(format!("{name}: {what}"), "GiB/s", rates(plain));
        put(format!("{name}: {what}, one change"), "ms", waits(plain));
        let spared = put(format!("{name}: {what}, lock spared"), "GiB/s", rates(sparing));
        put(format!("{name}: {what}, lock spared, one change"), "ms", waits(sparing));
        if let (Some(spared), Some(two)) = (spared, two) {
            let name = format!("{name}: beside changes, lock spared, over none");
            targets.push(Target::at_least(&name, spared / two, BESIDE_RATIO_MIN));
        }
        if let (Some(touched), Some(one), Some(two)) = (touched, one, two) {
            let ratio = one.max(two) / touched;
            targets.push(Target::at_least(&format!("{name}: over plain touch"), ratio, 1.0));
        }
    }
    for (threads, values) in THREADS.into_iter().zip(floor) {
        let s = if threads == 1 { "" } else { "s" };
        put(format!("non-temporal zeroing of warm memory, {threads} thread{s}"), "GiB/s", values);
    }
    Report { name: "prefault", machine: machine::name(), figures, targets, notes }
}
