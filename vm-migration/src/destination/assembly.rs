// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Assembly of large host pages: the pieces of each are received in place, on any connections, and the page is
//! mapped for the guest with its last piece.
//!
//! Owns that order: a piece is claimed before a byte of it is written, so that no thread writes into a page
//! that the guest can already access. `partial_pages` tracks the pieces, and `destination::engine` decides
//! what an arrival means.

use super::engine::{Engine, NOT_MISSING, Via};
use crate::error::Cause;
use crate::layout::PageRun;
use crate::own_figures::Count;
use crate::partial_pages::PartialPages;
use crate::ram::{self, GuestMemoryMap};
use crate::transport::ByteSource;

impl<M: GuestMemoryMap> Engine<M> {
    fn pieces_of(&self, run: &PageRun) -> Option<&PartialPages> {
        self.pieces.get(run.region)?.as_ref()
    }

    /// True for memory whose host pages are assembled from pieces.
    pub(super) fn in_pieces(&self, run: &PageRun) -> bool {
        self.pieces_of(run).is_some()
    }

    /// Receives the contents of pieces in place. Pieces that are claimed and then do not come, because the
    /// connection is lost, are requested again with all of their host page.
    pub(super) fn take_pieces(
        &self,
        from: &mut impl ByteSource,
        runs: &[PageRun],
        via: Via,
    ) -> Result<(), Cause> {
        for run in runs {
            self.claim(run)?;
        }
        let slices: Vec<_> = runs.iter().map(|run| ram::slice(&*self.memory, *run)).collect();
        from.read_guest(&slices)?;
        for run in runs {
            self.progress.count(via.vcpu(), Count::ReceivedBytes, run.len_bytes());
            self.put(*run, via, true)?;
        }
        Ok(())
    }

    /// Takes pieces of zeros. The parts of a host page that was discarded or never written are zeros already.
    pub(super) fn take_zero_pieces(&self, run: PageRun, via: Via) -> Result<(), Cause> {
        self.claim(&run)?;
        self.clear_old(run)?;
        self.put(run, via, false)
    }

    fn claim(&self, run: &PageRun) -> Result<(), Cause> {
        match self.pieces_of(run) {
            Some(pieces) if pieces.claim(run.first, run.count) => Ok(()),
            _ => Err(NOT_MISSING.into()),
        }
    }

    /// Marks claimed pieces as in place and makes the host pages that they complete visible to the guest. A
    /// host page of zeros alone stays a hole unless a thread waits for it.
    fn put(&self, run: PageRun, via: Via, contents: bool) -> Result<(), Cause> {
        let Some(pieces) = self.pieces_of(&run) else { return Ok(()) };
        pieces.put(run.first, run.count, contents, |unit, filled| {
            let whole = self.pages_of(run.region, unit);
            if filled {
                self.source.make_present(whole)?;
                self.memory.mark_resident(whole);
                self.arrived(whole, via, |_, _| Ok(()))
            } else {
                self.memory.mark_resident(whole);
                self.memory.mark_zero(whole);
                self.arrived(whole, via, |region, index| self.show(region, index))
            }
        })
    }
}
