// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench prefault`: how fast guest memory is populated, for each kind of page, with one and two threads;
//! compared with touching the same kind of memory page by page on one thread, and with clearing populated
//! memory by non-temporal stores, the least that zeroing can cost.
//!
//! Owns the huge pages that it reserves, which it returns at the end. Memory is created anew each time, of
//! pages that this machine has used before (the first round is not counted).

use std::error::Error;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

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
    Ok(report(&kinds, samples, floor, notes))
}

fn report(
    kinds: &[Kind],
    samples: Vec<[Vec<f64>; 3]>,
    floor: [Vec<f64>; 2],
    notes: Vec<String>,
) -> Report {
    let (mut figures, mut targets) = (Vec::new(), Vec::new());
    let mut put = |name: String, values| {
        let figure = Figure::of(name, "GiB/s", values);
        let value = figure.as_ref().map(|figure| figure.value);
        figures.extend(figure);
        value
    };
    for (kind, [touched, one, two]) in kinds.iter().zip(samples) {
        let name = kind.name;
        let touched = put(format!("{name}: plain touch, 1 thread"), touched);
        let one = put(format!("{name}: prefault, 1 thread"), one);
        let two = put(format!("{name}: prefault, 2 threads"), two);
        if let (Some(touched), Some(one), Some(two)) = (touched, one, two) {
            let ratio = one.max(two) / touched;
            targets.push(Target::at_least(&format!("{name}: over plain touch"), ratio, 1.0));
        }
    }
    for (threads, values) in THREADS.into_iter().zip(floor) {
        let s = if threads == 1 { "" } else { "s" };
        put(format!("non-temporal zeroing of warm memory, {threads} thread{s}"), values);
    }
    Report { name: "prefault", machine: machine::name(), figures, targets, notes }
}
