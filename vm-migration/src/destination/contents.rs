// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Contents of missing pages, off a connection and into the guest's memory.
//!
//! Owns the ways in which contents of whole units get to their place: through a buffer, or received there. Must never
//! show the guest a page of which a part is missing.

use std::sync::atomic::Ordering;

use super::engine::{Engine, Via};
use crate::error::Cause;
use crate::layout::{GpaRange, PageRun, to_usize};
use crate::ram::{self, GuestMemoryMap};
use crate::transport::ByteSource;

/// Contents up to this length are copied in through a buffer, which is faster than receiving them in place:
/// pages are neither cleared first nor mapped twice, and one system call per run replaces a fault per page. A
/// chunk of the background pages fits, and the buffer stays in the processor's cache.
const SMALL_BYTES: u64 = 128 << 10;

/// Pages that the copying path buffers at once, rounded up to a whole unit.
const COPY_PAGES: u64 = 256;

impl<M: GuestMemoryMap> Engine<M> {
    /// Receives contents and makes them visible to the guest. `scratch` is a buffer of the receiving thread
    /// that nothing else uses.
    pub(crate) fn take_contents(
        &self,
        from: &mut impl ByteSource,
        ranges: &[GpaRange],
        via: Via,
        scratch: &mut Vec<u8>,
    ) -> Result<(), Cause> {
        let runs = self.check(ranges)?;
        // A region has one way for all of its units.
        let way = |run: &PageRun| {
            (self.in_pieces(run), self.copies_small(run), self.source.receives_in_place(run.region))
        };
        for alike in runs.chunk_by(|one, next| way(one) == way(next)) {
            if alike.first().is_some_and(|run| self.in_pieces(run)) {
                self.take_pieces(from, alike, via)?;
            } else {
                self.take_units(from, alike, via, scratch)?;
            }
        }
        Ok(())
    }

    fn copies_small(&self, run: &PageRun) -> bool {
        self.source.prefers_copies_of_small_runs(run.region)
    }

    /// Receives the contents of whole units of regions that have one way for them.
    fn take_units(
        &self,
        from: &mut impl ByteSource,
        runs: &[PageRun],
        via: Via,
        scratch: &mut Vec<u8>,
    ) -> Result<(), Cause> {
        let bytes = runs.iter().map(PageRun::len_bytes).fold(0, u64::saturating_add);
        let in_place = runs.iter().all(|run| self.source.receives_in_place(run.region));
        if bytes <= SMALL_BYTES && runs.iter().all(|run| self.copies_small(run)) {
            let len = to_usize(bytes);
            if scratch.len() < len {
                scratch.resize(len, 0);
            }
            let mut left = &mut scratch[..len];
            from.read_exact(left)?;
            for run in runs {
                let (piece, rest) = left.split_at_mut(to_usize(run.len_bytes()));
                self.source.copy_in(*run, piece)?;
                self.has_come(*run, via)?;
                left = rest;
            }
        } else if in_place {
            let slices: Vec<_> = runs.iter().map(|run| ram::slice(&*self.memory, *run)).collect();
            if let Err(error) = from.read_guest(&slices) {
                // Any part of the units may be in place, and the guest sees none of it.
                let mut torn = self.torn.lock();
                torn.extend(runs);
                return Err(error.into());
            }
            for run in runs {
                self.source.make_present(*run)?;
                self.has_come(*run, via)?;
            }
        } else {
            for run in runs {
                self.copy_in(from, *run, via)?;
            }
        }
        Ok(())
    }

    /// Marks a run as resident. The guest sees the contents and has been woken, so it may write them from now
    /// on: they are not missing any more, whatever happens to the rest of the message.
    fn has_come(&self, run: PageRun, via: Via) -> Result<(), Cause> {
        self.progress.counters.memory_bytes_received.fetch_add(run.len_bytes(), Ordering::Relaxed);
        self.memory.mark_resident(run);
        self.arrived(run, via, |_, _| Ok(()))
    }

    /// Receives contents through a buffer: memory with a single mapping is filled and made visible in one
    /// call per piece.
    fn copy_in(&self, from: &mut impl ByteSource, run: PageRun, via: Via) -> Result<(), Cause> {
        let step = COPY_PAGES.next_multiple_of(self.unit_pages[run.region]);
        let mut buffer = Vec::new();
        let mut first = run.first;
        while first < run.end() {
            let piece = PageRun { region: run.region, first, count: step.min(run.end() - first) };
            buffer.resize(to_usize(piece.len_bytes()), 0);
            from.read_exact(&mut buffer)?;
            self.source.copy_in(piece, &buffer)?;
            self.has_come(piece, via)?;
            first = piece.end();
        }
        Ok(())
    }

    /// Zeroes what an earlier round has left in missing pages, which are zero at the source by now. Where not all pages
    /// stay in memory, old contents have been discarded.
    pub(super) fn clear_old(&self, run: PageRun) -> Result<(), Cause> {
        if self.source.holds_all_pages(run.region) {
            for old in self.memory.data_runs(run) {
                ram::clear(&*self.memory, old).map_err(Cause::Memory)?;
            }
        }
        Ok(())
    }

    /// Takes pages of zeros. They stay holes unless a thread waits for them.
    pub(crate) fn take_zeros(&self, ranges: &[GpaRange], via: Via) -> Result<(), Cause> {
        for run in self.check(ranges)? {
            self.progress.counters.zero_pages.fetch_add(run.count, Ordering::Relaxed);
            if self.in_pieces(&run) {
                self.take_zero_pieces(run, via)?;
                continue;
            }
            self.clear_old(run)?;
            self.memory.mark_resident(run);
            self.memory.mark_zero(run);
            self.arrived(run, via, |region, index| self.show(region, index))?;
        }
        Ok(())
    }
}
