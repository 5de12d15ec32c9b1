// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Pages that a guest discards at the worst moment: right after they were found to be populated.
//!
//! Owns which pages those are, and which are held. As in a VMM, what is held leaves when it is not.

use std::ops::Range;
use std::os::fd::AsRawFd as _;

use parking_lot::{Mutex, MutexGuard};

use super::memory::FakeMemory;
use crate::layout::PageRun;
use crate::ram::{GuestMemoryMap as _, Hold};

#[derive(Debug)]
struct PendingDiscard {
    run: PageRun,
    /// Number of scans until the discard.
    looks_left: u32,
}

#[derive(Debug, Default)]
struct State {
    leavers: Vec<PendingDiscard>,
    /// Discards that are due.
    due: Vec<PageRun>,
    held: Vec<(usize, Range<u64>)>,
}

/// Pending discards of the guest, and held ranges.
#[derive(Debug, Default)]
pub(super) struct Leaving(Mutex<State>);

impl Leaving {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

fn overlaps(run: &PageRun, region: usize, pages: &Range<u64>) -> bool {
    run.region == region && run.first < pages.end && pages.start < run.end()
}

/// Holds pages until it is dropped.
struct Held<'m> {
    memory: &'m FakeMemory,
    region: usize,
    pages: Range<u64>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut state = self.memory.leaving().state();
        let is_this =
            |(region, pages): &(usize, Range<u64>)| (*region, pages) == (self.region, &self.pages);
        if let Some(at) = state.held.iter().position(is_this) {
            state.held.swap_remove(at);
        }
        self.memory.leave(state);
    }
}

impl FakeMemory {
    /// Makes the guest discard these pages right after scan number `look` (from 1) that finds them
    /// populated; before that it writes them after each scan, so that there is a next one.
    pub fn discard_at_scan(&self, run: PageRun, look: u32) {
        self.leaving().state().leavers.push(PendingDiscard { run, looks_left: look });
    }

    /// Number of 512-byte blocks that the host has for the file of a region.
    ///
    /// # Panics
    /// If the memory has no file.
    pub fn blocks(&self, region: usize) -> i64 {
        let file = self.file(region).expect("shared memory");
        // SAFETY: all-zero bytes are a valid value of this plain C structure.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open, and `stat` outlives the call.
        let asked = unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) };
        assert_eq!(asked, 0);
        stat.st_blocks
    }

    pub(super) fn hold_pages(&self, region: usize, pages: Range<u64>) -> Hold<'_> {
        self.leaving().state().held.push((region, pages.clone()));
        Hold::until_dropped(Held { memory: self, region, pages })
    }

    /// Notes that a scan found these ranges populated.
    pub(super) fn looked_at(&self, region: usize, populated: &[Range<u64>]) {
        let mut state = self.leaving().state();
        let State { leavers, due, .. } = &mut *state;
        leavers.retain_mut(|PendingDiscard { run, looks_left }| {
            if !populated.iter().any(|pages| overlaps(run, region, pages)) {
                return true;
            }
            *looks_left -= 1;
            if *looks_left > 0 {
                (run.first..run.end()).for_each(|page| self.mark_dirty(region, page));
                return true;
            }
            due.push(*run);
            false
        });
        self.leave(state);
    }

    /// Discards the due ranges that are not held.
    fn leave(&self, mut state: MutexGuard<'_, State>) {
        let State { due, held, .. } = &mut *state;
        due.retain(|run| {
            let is_held = held.iter().any(|(region, pages)| overlaps(run, *region, pages));
            if !is_held {
                self.discard(*run).expect("the host takes pages back");
                (run.first..run.end()).for_each(|page| self.mark_dirty(run.region, page));
            }
            is_held
        });
    }
}
