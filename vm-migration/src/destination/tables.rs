// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Range tables from a peer: each range is looked up in the machine's memory, then received or made zero.
//!
//! Owns the bound on the work of one message: at most the guest's memory, once.

use std::sync::atomic::Ordering;

use super::unpopulated::Unpopulated;
use crate::cancel::Cancel;
use crate::error::Cause;
use crate::layout::{GpaRange, Layout, PAGE_BYTES, PageRun};
use crate::progress::Progress;
use crate::protocol::ProtocolError;
use crate::protocol::inflate::Inflater;
use crate::ram::{self, GuestMemoryMap};
use crate::transport::ByteSource;

/// Pages that are zeroed between two checks for a cancel: no less than the largest host page.
const ZERO_PIECE_PAGES: u64 = (1 << 30) / PAGE_BYTES;

/// Finds the pages of a table. A table that names more memory than the guest has is refused, so that the
/// work for a message is bounded by the guest's size and not by the peer.
pub(super) fn locate(layout: &Layout, ranges: &[GpaRange]) -> Result<Vec<PageRun>, ProtocolError> {
    let all: u64 = layout.regions().iter().map(|region| region.len_bytes).sum();
    let named = ranges.iter().fold(0, |sum: u64, range| sum.saturating_add(range.len_bytes));
    let runs = ranges.iter().map(|range| layout.locate(*range)).collect::<Result<Vec<_>, _>>()?;
    if named > all {
        let why = "it names more memory than the guest has";
        return Err(ProtocolError::Malformed { what: "table of ranges", why });
    }
    Ok(runs)
}

/// Zeroes ranges, until cancelled.
pub(super) fn take_zeros<M: GuestMemoryMap>(
    memory: &M,
    ranges: &[GpaRange],
    progress: &Progress,
    stops: &[&Cancel],
) -> Result<(), Cause> {
    for run in locate(memory.layout(), ranges)? {
        for piece in run.cut(ZERO_PIECE_PAGES) {
            if stops.iter().any(|stop| stop.is_cancelled()) {
                return Err(Cause::Cancelled);
            }
            ram::clear(memory, piece).map_err(Cause::Memory)?;
            progress.counters.zero_pages.fetch_add(piece.count, Ordering::Relaxed);
        }
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::sync::Arc;

    use super::*;
    use crate::Side;
    use crate::layout::Backing;
    use crate::testing::FakeMemory;

    fn memory() -> Arc<FakeMemory> {
        FakeMemory::new(&[(0, 64), (1 << 32, 64)], Backing::Shared, PAGE_BYTES).unwrap()
    }

    fn pages(first: u64, count: u64) -> GpaRange {
        GpaRange { gpa: first * PAGE_BYTES, len_bytes: count * PAGE_BYTES }
    }

    #[test]
    fn a_table_names_no_more_than_there_is() {
        let memory = memory();
        let all = [pages(0, 64), GpaRange { gpa: 1 << 32, len_bytes: 64 * PAGE_BYTES }];
        assert_eq!(locate(memory.layout(), &all).unwrap().len(), 2);
        let more = [&all[..], &[pages(3, 1)]].concat();
        for table in [more, vec![pages(0, 64); 1 << 20]] {
            let refused = locate(memory.layout(), &table);
            assert!(matches!(refused, Err(ProtocolError::Malformed { .. })), "{refused:?}");
        }
    }

    #[test]
    fn zeros_are_made_until_cancelled() {
        let memory = memory();
        let progress = Progress::new(Side::Destination);
        let (never, cancelled) = (Cancel::new().unwrap(), Cancel::new().unwrap());
        cancelled.cancel();
        let made = || progress.counters.zero_pages.load(Ordering::Relaxed);
        for stops in [&[&cancelled][..], &[&never, &cancelled]] {
            let ended = take_zeros(&*memory, &[pages(0, 64)], &progress, stops);
            assert!(matches!(ended, Err(Cause::Cancelled)), "{ended:?}");
            assert_eq!(made(), 0);
        }
        take_zeros(&*memory, &[pages(0, 64)], &progress, &[&never]).unwrap();
        assert_eq!(made(), 64);
    }
}

/// Receives the contents that follow a table.
pub(super) fn take_memory<M: GuestMemoryMap>(
    memory: &M,
    fresh: &Unpopulated,
    from: &mut impl ByteSource,
    ranges: &[GpaRange],
    progress: &Progress,
) -> Result<(), Cause> {
    let runs = locate(memory.layout(), ranges)?;
    for run in &runs {
        fresh.populate(memory, *run).map_err(Cause::Memory)?;
    }
    let slices: Vec<_> = runs.iter().map(|run| ram::slice(memory, *run)).collect();
    from.read_guest(&slices).map_err(Cause::from)?;
    let mut bytes = 0;
    for run in runs {
        memory.mark_resident(run);
        bytes += run.len_bytes();
    }
    progress.counters.memory_bytes_received.fetch_add(bytes, Ordering::Relaxed);
    progress.note_sample(false);
    Ok(())
}

/// Receives the compressed contents that follow a table.
pub(super) fn take_frame<M: GuestMemoryMap>(
    memory: &M,
    (from, inflater): (&mut impl ByteSource, &mut Inflater),
    ranges: &[GpaRange],
    frame_bytes: u32,
    progress: &Progress,
) -> Result<(), Cause> {
    let runs = locate(memory.layout(), ranges)?;
    let raw_bytes =
        runs.iter().fold(0, |all: u64, run: &PageRun| all.saturating_add(run.len_bytes()));
    let mut raw = inflater.read(from, frame_bytes, raw_bytes)?;
    let slices: Vec<_> = runs.iter().map(|run| ram::slice(memory, *run)).collect();
    raw.read_guest(&slices)?;
    for run in runs {
        memory.mark_resident(run);
    }
    progress.counters.memory_bytes_received.fetch_add(raw_bytes, Ordering::Relaxed);
    progress.note_sample(false);
    Ok(())
}
