// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the guest has of its memory and writes of it, for a check.
//!
//! Owns the dirty log for as long as it watches. Must never read guest memory.

use std::time::{Duration, Instant};

use super::super::check_cancel;
use super::super::round::clear_all;
use super::super::unit_space::{Slice, UnitSpace};
use crate::cancel::Cancel;
use crate::error::{Cause, Failure, Step};
use crate::figures::rate;
use crate::layout::PAGE_BYTES;
use crate::ram::GuestMemoryMap;
use crate::transport::{WaitEnd, wait_readable};
use crate::vm::{DirtyLog as _, SourceVm};

/// How long the guest's writes are watched.
const WATCHED_FOR: Duration = Duration::from_secs(1);

/// What was seen of the guest's writes.
#[derive(Debug)]
pub(super) struct Writes {
    /// Memory that it writes in a second, each page counted once.
    pub bytes_per_s: u64,
    /// How long reading the dirty log takes.
    pub scan: Duration,
    /// Devices whose writes nothing logs.
    pub unlogged: Vec<String>,
}

impl Writes {
    /// What devices without a log cost.
    pub(super) fn warning(&self) -> Option<String> {
        (!self.unlogged.is_empty()).then(|| {
            format!(
                "nothing logs what devices outside of the VMM write to guest memory ({}), so all of it is sent again when \
                 the guest has stopped",
                self.unlogged.join(", ")
            )
        })
    }
}

/// Bytes of memory that are populated. Which of these pages are zeros is found out by reading them.
pub(super) fn memory_to_move<M: GuestMemoryMap>(
    memory: &M,
    cancel: &Cancel,
) -> Result<u64, Failure> {
    const STEP: &str = "finding populated memory";
    let mut pages: u64 = 0;
    for Slice { region, first, pages: count } in UnitSpace::new(memory.layout()).slices() {
        check_cancel(cancel, STEP)?;
        let runs = memory.populated_runs(region, first..first + count);
        for run in runs.map_err(Cause::Memory).step(STEP)? {
            // Whole host pages may reach beyond the slice.
            let (start, end) = (run.start.max(first), run.end.min(first + count));
            pages += end.saturating_sub(start);
        }
    }
    Ok(pages * PAGE_BYTES)
}

/// Watches the guest's writes for a second.
pub(super) fn watch<V: SourceVm>(
    vm: &mut V,
    memory: &V::Memory,
    cancel: &Cancel,
) -> Result<Writes, Failure> {
    const STEP: &str = "watching what the guest writes";
    let log = vm.start_dirty_log().map_err(Cause::Vm).step("starting the dirty log")?;
    let count = || log.begin_round().map_err(Cause::Vm).step("reading the dirty log");
    // At its start a log may say that every page was written.
    count()?;
    let began = Instant::now();
    clear_all(&log, memory.layout())?;
    // A page is watched from when its bit was cleared: on average, from the middle of that.
    let since = began + began.elapsed() / 2;
    match wait_readable(&[], cancel, Some(WATCHED_FOR)) {
        Ok(WaitEnd::Cancelled) => return Err(Cause::Cancelled).step(STEP),
        Ok(WaitEnd::Ready(_) | WaitEnd::TimedOut) => {}
        Err(error) => return Err(Cause::Resource(error)).step(STEP),
    }
    let scan = Instant::now();
    let watched = since.elapsed();
    let pages = count()?;
    let scan = scan.elapsed();
    let unlogged = log.devices_without_log();
    Ok(Writes { bytes_per_s: rate(pages.saturating_mul(PAGE_BYTES), watched), scan, unlogged })
}
