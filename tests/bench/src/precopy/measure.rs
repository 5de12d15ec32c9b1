// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One migration, measured from outside in the same way for every VMM.
//!
//! Owns the order: fill, settle, rate before, migrate, rate after. Everything is read from guest
//! RAM and from the kernel's counters. Must never depend on the VMM.

use std::error::Error;
use std::time::{Duration, Instant};

use guest_reader::Guest;

use super::watch::Watch;
use crate::loopback::Loopback;
use crate::pair::{PATIENCE, Pair, Workload, float, ms, per_second, prepare};
use crate::raw;

/// Duration of the measurement of the rate before the migration.
const BEFORE: Duration = Duration::from_secs(1);
/// Time after the end of the migration in which the guest's losses still count.
const AFTER: Duration = Duration::from_millis(500);

/// Result of a migration. A raw copy has only a time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// From the request to the end, ms.
    pub total_ms: f64,
    /// Figures that only a migration has.
    pub moved: Option<Moved>,
}

/// Figures of a migration.
#[derive(Clone, Copy, Debug)]
pub struct Moved {
    /// Longest gap that a vCPU saw, ms.
    pub gap_ms: f64,
    /// Longest time without a heartbeat of any vCPU, seen from outside, ms.
    pub silence_ms: f64,
    /// Work that the guest lost, as time at its rate before, ms.
    pub lost_ms: f64,
    /// Bytes over loopback, relative to the size of guest RAM.
    pub sent_ratio: f64,
}

impl Sample {
    /// The sample of a raw copy.
    pub fn raw(took: Duration) -> Self {
        Self { total_ms: ms(took), moved: None }
    }
}

/// Migrates the guest of `pair`.
pub fn migration(pair: &mut dyn Pair, workload: Workload) -> Result<Sample, Box<dyn Error>> {
    let source = prepare(pair.source_pid(), workload)?.guest;
    let destination_pid = pair.destination_pid();
    let memory_bytes = pair.memory_mib() << 20;
    raw::warm(2 * memory_bytes)?;
    let (rate_from, first) = (Instant::now(), workload.work(&source.status()?));
    std::thread::sleep(BEFORE);

    let status = source.status()?;
    let (start, at_start) = (Instant::now(), workload.work(&status));
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
    let (window, at_end) = (start.elapsed(), workload.work(&status));
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
        sent_ratio: sent_bytes as f64 / memory_bytes as f64,
    };
    Ok(Sample { total_ms: ms(total), moved: Some(moved) })
}
