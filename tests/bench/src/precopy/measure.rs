// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One migration, measured from outside: the same for every VMM.
//!
//! Owns the order: fill, settle, rate before, migrate, rate after. Everything is read from guest
//! RAM and from the kernel's counters. Must never know whose migration it is.

use std::error::Error;
use std::time::{Duration, Instant};

use guest_reader::{Guest, Patience, Status};

use super::watch::Watch;
use super::{Workload, ms};
use crate::loopback::Loopback;
use crate::process;

/// For the guest to come up and fill its memory.
const PATIENCE: Patience = Patience::millis(60_000);
/// Time in which the guest's rate becomes steady.
const SETTLE: Duration = Duration::from_millis(300);
/// Time in which the rate before the migration is measured.
const BEFORE: Duration = Duration::from_secs(1);
/// So long after the end of the migration the guest's losses still count.
const AFTER: Duration = Duration::from_millis(500);

/// Two VMMs, the first with the guest.
pub trait Pair {
    /// Process that has the guest.
    fn source_pid(&self) -> u32;
    /// Process that will have it.
    fn destination_pid(&self) -> u32;
    /// Migrates; returns when the source says that it is over.
    fn migrate(&mut self) -> Result<(), Box<dyn Error>>;
}

/// What came of one migration. A raw copy has a time only.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// From the request to the end, ms.
    pub total_ms: f64,
    /// What only a migration has.
    pub moved: Option<Moved>,
}

/// Figures of a migration.
#[derive(Clone, Copy, Debug)]
pub struct Moved {
    /// Longest gap that a vCPU saw, ms.
    pub gap_ms: f64,
    /// Longest time without any vCPU's heartbeat, seen from outside, ms.
    pub silence_ms: f64,
    /// Work that the guest did not do, in time at its rate before, ms.
    pub lost_ms: f64,
    /// Bytes over loopback by the size of guest RAM.
    pub sent_ratio: f64,
}

impl Sample {
    /// That of a raw copy.
    pub fn raw(took: Duration) -> Self {
        Self { total_ms: ms(took), moved: None }
    }
}

/// A guest that is ready to be measured.
pub struct Prepared {
    guest: Guest,
    /// Memory that it has, without holes.
    pub populated_bytes: u64,
}

/// Waits until the guest of `pid` has filled its memory and does its work.
pub fn prepare(pid: u32, workload: Workload) -> Result<Prepared, Box<dyn Error>> {
    let guest = Guest::attach_within(pid, PATIENCE)?;
    let state = if workload.visits { "work" } else { "done" };
    guest.wait_until("the guest's memory being filled", PATIENCE, |status| {
        status.stage == "running" && status.all_in(state)
    })?;
    let generation = guest.set(workload.then)?;
    guest.wait_for_generation(generation, PATIENCE)?;
    let ram = process::guest_ram(pid).ok_or("guest RAM is not a memfd")?;
    let populated_bytes = std::os::unix::fs::MetadataExt::blocks(&ram.metadata()?) * 512;
    std::thread::sleep(SETTLE);
    Ok(Prepared { guest, populated_bytes })
}

/// Moves the guest of `pair`.
pub fn migration(pair: &mut dyn Pair, workload: Workload) -> Result<Sample, Box<dyn Error>> {
    let source = prepare(pair.source_pid(), workload)?.guest;
    let destination_pid = pair.destination_pid();
    let (rate_from, first) = (Instant::now(), work(&source.status()?, workload));
    std::thread::sleep(BEFORE);

    let status = source.status()?;
    let (start, at_start) = (Instant::now(), work(&status, workload));
    let rate = per_second(at_start - first, start - rate_from);
    if rate <= 0.0 {
        return Err("the guest did nothing before the migration".into());
    }
    let bytes_before = Loopback::bytes()?;
    let watch = Watch::start(source, destination_pid);
    pair.migrate()?;
    let total = start.elapsed();
    let sent_bytes = Loopback::bytes()? - bytes_before;
    std::thread::sleep(AFTER);
    let silence = watch.longest_silence();

    let status = Guest::attach_within(destination_pid, PATIENCE)?.status()?;
    let (window, at_end) = (start.elapsed(), work(&status, workload));
    if !status.complete() || status.errors() > 0 {
        return Err(format!("the guest arrived with errors: {status:?}").into());
    }
    if at_end <= at_start {
        return Err("the guest does not run at the destination".into());
    }
    let done = Duration::from_secs_f64(float(at_end - at_start) / rate);
    #[expect(clippy::cast_precision_loss, reason = "nanoseconds and bytes are below 2^52")]
    let moved = Moved {
        gap_ms: status.gap_max_ns() as f64 / 1e6,
        silence_ms: ms(silence),
        lost_ms: (ms(window) - ms(done)).max(0.0),
        sent_ratio: sent_bytes as f64 / (super::MEMORY_MIB << 20) as f64,
    };
    Ok(Sample { total_ms: ms(total), moved: Some(moved) })
}

/// What the guest has done so far.
fn work(status: &Status, workload: Workload) -> u64 {
    if workload.visits {
        status.iterations()
    } else {
        status.known().map(|vcpu| vcpu.heartbeat).sum()
    }
}

fn per_second(count: u64, time: Duration) -> f64 {
    float(count) / time.as_secs_f64()
}

#[expect(clippy::cast_precision_loss, reason = "counts of some seconds are below 2^52")]
fn float(count: u64) -> f64 {
    count as f64
}
