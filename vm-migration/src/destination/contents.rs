// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Contents of missing pages, off a connection and into the guest's memory.
//!
//! Owns the ways in which contents of whole units get to their place: through a buffer, or received there. Must never
//! show the guest a page of which a part is missing.

use std::collections::VecDeque;

use super::engine::{Engine, Via};
use super::tables::locate;
use crate::error::Cause;
use crate::layout::{GpaRange, PageRun, to_usize};
use crate::own_figures::Count;
use crate::ram::{self, GuestMemoryMap};
use crate::transport::ByteSource;

/// Contents up to this length are copied in through a buffer, which is faster than receiving them in place:
/// pages are neither cleared first nor mapped twice, and one system call per run replaces a fault per page. A
/// chunk of the background pages fits, and the buffer stays in the processor's cache.
const SMALL_BYTES: u64 = 128 << 10;

/// Pages that the copying path buffers at once, rounded up to a whole unit.
const COPY_PAGES: u64 = 256;

/// Pages of an answer that are placed together, like those that a source sends together.
const CONTENTS_PAGES_MAX: u64 = 16;

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
            if let Some(lent) = from.lend(len) {
                return self.put_units(runs, lent, via);
            }
            if scratch.len() < len {
                scratch.resize(len, 0);
            }
            from.read_exact(&mut scratch[..len])?;
            self.put_units(runs, &scratch[..len], via)?;
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

    /// Copies the contents of whole units to their places.
    fn put_units(&self, runs: &[PageRun], bytes: &[u8], via: Via) -> Result<(), Cause> {
        let mut left = bytes;
        for run in runs {
            let (piece, rest) = left.split_at(to_usize(run.len_bytes()));
            self.place(*run, piece, via)?;
            left = rest;
        }
        Ok(())
    }

    /// Copies contents to their place. A vCPU's thread does not wait for memory of the host.
    fn place(&self, run: PageRun, bytes: &[u8], via: Via) -> Result<(), Cause> {
        match via {
            Via::Own(_) => self.source.copy_in_now(run, bytes)?,
            Via::Bulk | Via::Urgent => self.source.copy_in(run, bytes)?,
        }
        self.has_come(run, via)
    }

    /// The first of the contents that `ranges` still bring which are taken together, and their length: at most
    /// [`CONTENTS_PAGES_MAX`], and at least one unit. On the thread of a vCPU it is one, so that nothing of it has
    /// changed if the host has no memory for it.
    pub(super) fn next_contents(
        &self,
        ranges: &VecDeque<GpaRange>,
        via: Via,
    ) -> Result<(Vec<GpaRange>, usize), Cause> {
        let mut room = if via.vcpu().is_some() { 1 } else { CONTENTS_PAGES_MAX };
        let (mut taken, mut bytes) = (Vec::new(), 0_u64);
        for range in ranges {
            let [run] = locate(self.memory.layout(), std::slice::from_ref(range))?[..] else {
                break;
            };
            let step = if self.in_pieces(&run) { 1 } else { self.unit_pages[run.region] };
            let count = run.count.min(room.max(step) / step * step);
            if count > room && !taken.is_empty() {
                break;
            }
            let piece = PageRun { count, ..run };
            taken.push(self.memory.layout().range_of(piece));
            bytes = bytes.saturating_add(piece.len_bytes());
            room = room.saturating_sub(count);
            if room == 0 || count < run.count {
                break;
            }
        }
        Ok((taken, to_usize(bytes)))
    }

    /// Marks a run as resident. The guest sees the contents and has been woken, so it may write them from now
    /// on: they are not missing any more, whatever happens to the rest of the message.
    fn has_come(&self, run: PageRun, via: Via) -> Result<(), Cause> {
        self.progress.count(via.vcpu(), Count::ReceivedBytes, run.len_bytes());
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
            self.place(piece, &buffer, via)?;
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
            self.progress.count(via.vcpu(), Count::ZeroPages, run.count);
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
