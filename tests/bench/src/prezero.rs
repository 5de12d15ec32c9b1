// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench prezero-pool`: how long the pool takes to hand over memory, whatever its size; how fast it
//! clears returned memory, compared with non-temporal zeroing of warm memory; how much sooner a VM starts
//! than with `prefault=on`; and what a busy neighbour loses while the pool works.
//!
//! Owns the measured daemon. The neighbour repeatedly writes and sums up 256 KiB, half cache accesses and
//! half arithmetic, like most programs; its units of work are counted.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memory::{GuestRam, Lease, ProvidedFile, RamConfig, RamLayout, ZoneSpec};

use crate::pool::{Pool, UNLIMITED};
use crate::report::{Figure, Report, Target};
use crate::snapshot::{Vmm, first_instruction_ms};
use crate::{machine, prefault};

/// Slot sizes in MiB that fit a machine of 24 GiB together with everything else.
const SIZES_MIB: [u64; 2] = [4096, 8192];
/// How long a neighbour is measured, with the pool at work and without.
const WATCH: Duration = Duration::from_secs(2);
/// Counters of the pool: what it has cleared in place, and made anew.
const CLEARED: &str = "scrubbed_bytes_total ";
const MADE_ANEW: &str = "built_bytes_total ";

fn ms(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

#[derive(Default)]
struct Samples {
    /// By size: hand-over alone, and hand-over with mapping as guest RAM.
    handed: [Vec<f64>; SIZES_MIB.len()],
    mapped: [Vec<f64>; SIZES_MIB.len()],
    scrub: Vec<f64>,
    renew: Vec<f64>,
    floor: Vec<f64>,
    /// Time to the first instruction: with the pool, without prefault, with prefault.
    start: [Vec<f64>; 3],
    /// Percentage of work that a neighbour loses: on every processor, and on all but one.
    busy: Vec<f64>,
    beside: Vec<f64>,
}

/// Runs the benchmark.
pub fn run(vmm: &Path, guest: &Path, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut samples = Samples::default();
    {
        let pool = Pool::start(vmm, &SIZES_MIB, &format!("{UNLIMITED}\nreuse = 'same-user'"))?;
        // One round more than counted.
        for round in 0..=runs {
            let one = hand_over(&pool, CLEARED)?;
            let starts = starts(vmm, guest, &pool)?;
            if round > 0 {
                samples.add(one);
                for (all, value) in samples.start.iter_mut().zip(starts) {
                    all.push(value);
                }
            }
        }
    }
    {
        // What is the default: other pages.
        let pool = Pool::start(vmm, &SIZES_MIB, UNLIMITED)?;
        for round in 0..=runs {
            let one = hand_over(&pool, MADE_ANEW)?;
            if round > 0 {
                samples.renew.extend(one.scrub);
            }
        }
    }
    // If other processes keep the processors busy, the pool waits for them and there is nothing to
    // measure.
    let note = neighbours(vmm, runs, &mut samples).err();
    let notes = note.map(|error| format!("the neighbour was not measured: {error}"));
    Ok(report(samples, notes.into_iter().collect()))
}

/// Measures with the pace that the pool has by default while the host is busy.
fn neighbours(vmm: &Path, runs: usize, samples: &mut Samples) -> Result<(), Box<dyn Error>> {
    let pool = Pool::start(vmm, &[8192], "bandwidth = '2G'\nreuse = 'same-user'")?;
    let cpus = process_facts::usable_processors();
    for _ in 0..runs {
        samples.busy.push(loss(&pool, cpus)?);
        samples.beside.push(loss(&pool, (cpus - 1).max(1))?);
    }
    Ok(())
}

impl Samples {
    fn add(&mut self, other: Self) {
        for (all, one) in self.handed.iter_mut().zip(other.handed) {
            all.extend(one);
        }
        for (all, one) in self.mapped.iter_mut().zip(other.mapped) {
            all.extend(one);
        }
        self.scrub.extend(other.scrub);
        self.floor.extend(other.floor);
    }
}

/// Takes and returns slots; `returned` counts what has come back and is ready for the next.
fn hand_over(pool: &Pool, returned: &str) -> Result<Samples, Box<dyn Error>> {
    let mut samples = Samples::default();
    for (index, mib) in SIZES_MIB.into_iter().enumerate() {
        let start = Instant::now();
        let (connection, memory) = pool.take(mib)?;
        let handed = ms(start);
        let zone = ZoneSpec { shared: true, ..ZoneSpec::new("bench", mib << 20) };
        let given =
            [ProvidedFile::prezeroed("bench", Arc::new(memory.file), Lease::new(connection))];
        let config = RamConfig { zones: vec![zone] };
        let ram = GuestRam::with_provided(&config, RamLayout::default(), &given)?;
        let mapped = ms(start);
        drop(given);
        if let (Some(all), Some(with)) =
            (samples.handed.get_mut(index), samples.mapped.get_mut(index))
        {
            all.push(handed);
            with.push(mapped);
        }
        if index == 0 {
            // The same pages, warm: the rate of clearing alone.
            let region = ram.regions().first().ok_or("memory has no region")?;
            region.fill(&(0..region.len_bytes()))?;
            samples.floor.push(prefault::clear(region, 1)?);
        }
        let before = pool.sum(returned);
        let start = Instant::now();
        drop(ram);
        pool.wait_until(|pool| pool.sum(returned) > before)?;
        if index == 0 {
            samples.scrub.push(prefault::gib_per_s(mib << 20, start));
        }
    }
    Ok(samples)
}

/// Time from exec to the first guest instruction, 4 GiB: with the pool, without prefault, with
/// prefault=on.
fn starts(vmm: &Path, guest: &Path, pool: &Pool) -> Result<[f64; 3], Box<dyn Error>> {
    let guest = guest.to_str().ok_or("the guest's path is not UTF-8")?;
    let size = format!("size={}M,shared=on", SIZES_MIB[0]);
    let wishes = [format!("{size}{}", pool.option()), size.clone(), format!("{size},prefault=on")];
    let mut times = [0.0; 3];
    for (time, memory) in times.iter_mut().zip(wishes) {
        let mut words = vec!["--serial", "off", "--console", "off", "--kernel", guest];
        words.extend(["--cmdline", "workload=idle prefill=0", "--memory", &memory]);
        *time = first_instruction_ms(&Vmm::start(vmm, &words)?)?;
        pool.wait_until(|pool| pool.slots("ready") == Some(SIZES_MIB.len() as u64))?;
    }
    Ok(times)
}

/// Units of work that `threads` neighbours complete.
fn work_done(threads: usize) -> u64 {
    let (stop, pieces) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut numbers = vec![1_u64; 32 << 10];
                while !stop.load(Ordering::Relaxed) {
                    let mut sum = 0_u64;
                    for number in &mut numbers {
                        sum = sum.wrapping_mul(31).wrapping_add(*number);
                        *number = sum;
                    }
                    std::hint::black_box(sum);
                    pieces.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        std::thread::sleep(WATCH);
        stop.store(true, Ordering::Relaxed);
    });
    pieces.into_inner()
}

/// Percentage of its work that a neighbour loses because the pool clears memory.
fn loss(pool: &Pool, threads: usize) -> Result<f64, Box<dyn Error>> {
    pool.wait_until(|pool| pool.slots("ready") == Some(1))?;
    let before = work_done(threads);
    drop(pool.take(8192)?);
    pool.wait_until(|pool| pool.slots("in_work") == Some(1))?;
    let with = work_done(threads);
    if pool.slots("in_work") != Some(1) {
        return Err("the pool was done before the neighbour was".into());
    }
    pool.wait_until(|pool| pool.slots("ready") == Some(1))?;
    let after = work_done(threads);
    #[expect(clippy::cast_precision_loss, reason = "pieces of work are below 2^52")]
    let percent = 100.0 * (1.0 - with as f64 / f64::midpoint(before as f64, after as f64));
    Ok(percent)
}

fn report(samples: Samples, mut notes: Vec<String>) -> Report {
    let (mut figures, mut targets) = (Vec::new(), Vec::new());
    let mut put = |name: String, unit, values| {
        let figure = Figure::of(name, unit, values);
        let value = figure.as_ref().map(|figure| figure.value);
        figures.extend(figure);
        value
    };
    let mut handed = Vec::new();
    for (mib, values) in SIZES_MIB.into_iter().zip(samples.handed) {
        handed.extend(put(format!("{mib} MiB: asked until handed over"), "ms", values));
    }
    for (mib, values) in SIZES_MIB.into_iter().zip(samples.mapped) {
        put(format!("{mib} MiB: asked until mapped as guest RAM"), "ms", values);
    }
    let names = ["from the pool", "not populated", "prefault=on"];
    for (name, values) in names.into_iter().zip(samples.start) {
        put(format!("{} MiB {name}: exec to first instruction", SIZES_MIB[0]), "ms", values);
    }
    let floor = put("zeroing of warm memory, 1 thread".to_owned(), "GiB/s", samples.floor);
    let scrub = "clearing and verifying what came back, 1 thread".to_owned();
    let scrub = put(scrub, "GiB/s", samples.scrub);
    let renew = "making anew and verifying what came back, 1 thread".to_owned();
    let renew = put(renew, "GiB/s", samples.renew);
    let busy = "neighbour on every processor, work lost".to_owned();
    let busy = put(busy, "%", samples.busy);
    let beside = "neighbour that leaves one processor, work lost".to_owned();
    let beside = put(beside, "%", samples.beside);
    if let &[small, large] = handed.as_slice() {
        targets.push(Target::at_most("8 GiB: handed over (ms)", large, 20.0));
        targets.push(Target::at_most("handing over: 8 GiB by 4 GiB", large / small, 1.5));
    }
    let limits = [("on every processor", busy), ("that leaves one", beside)];
    for (name, value) in limits {
        let name = format!("neighbour {name}: work lost (%)");
        targets.extend(value.map(|value| Target::at_most(&name, value, 2.0)));
    }
    let share = floor.zip(scrub).map(|(floor, scrub)| 100.0 * scrub / floor);
    notes.extend(share.map(|percent| format!("clearing runs at {percent:.0} % of zeroing")));
    let times = scrub.zip(renew).map(|(scrub, renew)| scrub / renew);
    notes.extend(
        times.map(|times| format!("clearing in place is {times:.1} times as fast as making anew")),
    );
    Report { name: "prezero-pool", machine: machine::name(), figures, targets, notes }
}
