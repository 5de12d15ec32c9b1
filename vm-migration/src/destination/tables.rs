// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Range tables from a peer: each range is looked up in the machine's memory, then received or made zero.
//!
//! Owns the bound on the work of one message: at most the guest's memory, once, or as much as the peer sends.

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

/// Bytes that are received between two reports of progress: enough that what a piece costs does not matter.
const MEMORY_PIECE_PAGES: u64 = (16 << 20) / PAGE_BYTES;

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

/// Receives the contents that follow a table, which may name a page more than once, and memory across the border of two
/// neighbouring regions: version 0 peers join several lists. Every range is checked before any is received.
pub(super) fn take_memory<M: GuestMemoryMap>(
    memory: &M,
    fresh: &Unpopulated,
    from: &mut impl ByteSource,
    ranges: &[GpaRange],
    (progress, stops): (&Progress, &[&Cancel]),
) -> Result<(), Cause> {
    let layout = memory.layout();
    for range in ranges {
        layout.locate_all(*range).try_for_each(|run| run.map(drop)).map_err(ProtocolError::from)?;
    }
    let mut piece = Piece { memory, fresh, progress, stops, runs: Vec::new(), pages: 0 };
    for run in ranges.iter().flat_map(|range| layout.locate_all(*range)) {
        // Stretches are populated whole, so none may lie in two pieces.
        for part in run.map_err(ProtocolError::from)?.cut(MEMORY_PIECE_PAGES) {
            if piece.pages.saturating_add(part.count) > MEMORY_PIECE_PAGES {
                piece.take(from)?;
            }
            piece.pages = piece.pages.saturating_add(part.count);
            piece.runs.push(part);
        }
    }
    piece.take(from)
}

/// A part of a message's memory, at most [`MEMORY_PIECE_PAGES`].
struct Piece<'a, M> {
    memory: &'a M,
    fresh: &'a Unpopulated,
    progress: &'a Progress,
    stops: &'a [&'a Cancel],
    runs: Vec<PageRun>,
    pages: u64,
}

impl<M: GuestMemoryMap> Piece<'_, M> {
    /// Receives its contents, and begins the next one.
    fn take(&mut self, from: &mut impl ByteSource) -> Result<(), Cause> {
        if self.stops.iter().any(|stop| stop.is_cancelled()) {
            return Err(Cause::Cancelled);
        }
        for run in &self.runs {
            self.fresh.populate(self.memory, *run).map_err(Cause::Memory)?;
        }
        let slices: Vec<_> = self.runs.iter().map(|run| ram::slice(self.memory, *run)).collect();
        from.read_guest(&slices).map_err(Cause::from)?;
        for run in self.runs.drain(..) {
            self.memory.mark_resident(run);
        }
        let bytes = std::mem::take(&mut self.pages).saturating_mul(PAGE_BYTES);
        self.progress.counters.memory_bytes_received.fetch_add(bytes, Ordering::Relaxed);
        self.progress.note_sample(false);
        Ok(())
    }
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

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::sync::Arc;

    use super::*;
    use crate::Side;
    use crate::layout::{Backing, to_usize};
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

    /// A memory message's contents: each page has its number in the message in all bytes.
    fn contents(count: u64) -> Vec<u8> {
        let page = |number| vec![u8::try_from(number % 251).unwrap(); to_usize(PAGE_BYTES)];
        (0..count).flat_map(page).collect()
    }

    fn first_byte(memory: &FakeMemory, region: usize, page: u64) -> u64 {
        memory.word(region, page, 0).load(Ordering::Relaxed) & 0xff
    }

    #[test]
    fn a_page_may_come_twice_and_a_range_may_go_on_in_the_next_region() {
        let memory =
            FakeMemory::new(&[(0, 64), (64 * PAGE_BYTES, 64)], Backing::Shared, PAGE_BYTES)
                .unwrap();
        let fresh = Unpopulated::new(memory.layout());
        let progress = Progress::new(Side::Destination);
        let table = [pages(0, 128), pages(60, 8), pages(0, 128)];
        let bytes = contents(264);
        take_memory(&*memory, &fresh, &mut &bytes[..], &table, (&progress, &[])).unwrap();
        for (region, page, number) in [(0, 0, 136), (0, 63, 199), (1, 0, 200), (1, 63, 263)] {
            assert_eq!(first_byte(&memory, region, page), number % 251, "{region}: {page}");
        }
        let received = progress.counters.memory_bytes_received.load(Ordering::Relaxed);
        assert_eq!(received, 264 * PAGE_BYTES);
    }

    #[test]
    fn nothing_is_received_for_a_table_with_a_range_elsewhere() {
        let memory = memory();
        let fresh = Unpopulated::new(memory.layout());
        let progress = Progress::new(Side::Destination);
        for bad in
            [pages(63, 2), pages(64, 1), pages(1 << 40, 1), pages(0, 0), pages(0, u64::MAX >> 12)]
        {
            let bytes = contents(3);
            let mut from = &bytes[..];
            let taken =
                take_memory(&*memory, &fresh, &mut from, &[pages(0, 1), bad], (&progress, &[]));
            assert!(matches!(taken, Err(Cause::Protocol(ProtocolError::Layout(_)))), "{taken:?}");
            assert_eq!(from.len(), bytes.len(), "{bad:?}");
        }
    }

    #[test]
    fn a_large_message_is_received_in_pieces() {
        let memory = FakeMemory::new(&[(0, 9000)], Backing::Shared, PAGE_BYTES).unwrap();
        let fresh = Unpopulated::new(memory.layout());
        let progress = Progress::new(Side::Destination);
        let bytes = contents(8999);
        // It ends in the third piece.
        let mut from = &bytes[..bytes.len() - 1];
        take_memory(&*memory, &fresh, &mut from, &[pages(1, 8999)], (&progress, &[])).unwrap_err();
        let received = progress.counters.memory_bytes_received.load(Ordering::Relaxed);
        assert_eq!(received, (2 * MEMORY_PIECE_PAGES - 1) * PAGE_BYTES, "what has come is told");
        take_memory(&*memory, &fresh, &mut &bytes[..], &[pages(1, 8999)], (&progress, &[]))
            .unwrap();
        for page in [1, 4095, 4096, 8192, 8999] {
            assert_eq!(first_byte(&memory, 0, page), (page - 1) % 251);
        }
    }
}
