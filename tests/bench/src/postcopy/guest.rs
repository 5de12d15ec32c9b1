// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One postcopy, measured by the guest: how long its accesses took, and how long it was stopped in
//! total.
//!
//! Owns the order: fill, settle, speed before, migrate, read. The guest's records move with it, so
//! that those read at the source before can be subtracted from those read at the destination after.
//! Must never depend on the VMM.

use std::error::Error;
use std::time::{Duration, Instant};

use guest_reader::{Guest, Histogram, Status};

use crate::pair::{PATIENCE, Pair, Workload, float, ms, per_second, prepare};
use crate::raw;

/// Duration of the measurement of the speed before the migration.
const BEFORE: Duration = Duration::from_secs(1);
/// An access that takes this long was not resolved by this host alone.
pub const CUT_US: u64 = 40;

/// Result of a migration.
pub struct Moved {
    /// Accesses during the migration.
    pub accesses: Histogram,
    /// From the request until the source reports the last page, ms.
    pub total_ms: f64,
    /// Longest gap that a vCPU saw, ms.
    pub gap_ms: f64,
    /// All gaps of all vCPUs, ms.
    pub stalled_ms: f64,
    /// Work during the migration, relative to that in the same time before.
    pub speed: f64,
}

/// Migrates the guest of `pair`.
pub fn migration(pair: &mut dyn Pair, workload: Workload) -> Result<Moved, Box<dyn Error>> {
    let source = prepare(pair.source_pid(), workload)?.guest;
    raw::warm((2 * pair.memory_mib()) << 20)?;
    let (began, first) = (Instant::now(), workload.work(&source.status()?));
    std::thread::sleep(BEFORE);

    let accesses = source.histogram()?;
    let before = source.status()?;
    let start = Instant::now();
    let rate = per_second(workload.work(&before) - first, start - began);
    if rate <= 0.0 {
        return Err("the guest did nothing before the migration".into());
    }
    pair.migrate()?;
    let total = start.elapsed();

    let destination = Guest::attach_within(pair.destination_pid(), PATIENCE)?;
    let after = destination.status()?;
    if !after.complete() || after.errors() > 0 {
        return Err(format!("the guest arrived with errors: {after:?}").into());
    }
    let done = workload.work(&after).saturating_sub(workload.work(&before));
    if done == 0 {
        return Err("the guest does not run at the destination".into());
    }
    let window = start.elapsed();
    Ok(Moved {
        accesses: destination.histogram()?.since(&accesses),
        total_ms: ms(total),
        gap_ms: float(after.gap_max_ns()) / 1e6,
        stalled_ms: float(stalled_ns(&after).saturating_sub(stalled_ns(&before))) / 1e6,
        speed: per_second(done, window) / rate,
    })
}

fn stalled_ns(status: &Status) -> u64 {
    status.known().map(|vcpu| vcpu.stall_total_ns).sum()
}
