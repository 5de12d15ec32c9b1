// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Populates a region in advance.
//!
//! Owns which part of a range may be populated, and through which mapping. Must never populate what
//! is still to arrive. How it is done is in `populate`.

use std::io;
use std::ops::Range;

use super::{AccessError, RamRegion};
use crate::PAGE_BYTES;
use crate::holds::{DiscardGuard, PageHold};
use crate::mapping::{Advice, Mapping};
use crate::populate::{PopulateError, PopulateTarget};
use crate::sparing::Sparing;
use crate::zone_kind::ZoneKind;

/// Populated in one step, which nothing can stop: a few milliseconds, also for a thread that has a
/// twentieth of a processor.
const POPULATE_STEP_BYTES: u64 = 8 << 20;

impl RamRegion {
    /// Populates a `range` that is about to be filled through the `alias` mapping if it has been made, else `main`, in one
    /// call instead of a fault for each page. Where the kernel does not support it (before 5.14) or fails now,
    /// faults do it later. Nothing is collapsed, because each such call waits for every processor of the
    /// host; see [`Collapse`](crate::Collapse).
    ///
    /// # Errors
    /// When the range is not whole pages of the region, or the host has no memory left.
    pub fn populate_for_io(&self, range: &Range<u64>) -> Result<(), AccessError> {
        self.get_pages(range, |mapping| PopulateTarget::populate_small(mapping, range))
    }

    /// The same for a longer range, some time before it is filled: with huge pages if they are wanted. For
    /// tens of megabytes at a time, so that the wait for every processor matters little.
    ///
    /// # Errors
    /// As [`populate_for_io`](Self::populate_for_io).
    pub fn prepare_for_io(&self, range: &Range<u64>) -> Result<(), AccessError> {
        self.get_pages(range, |mapping| self.target(mapping).advise(range))
    }

    /// Maps pages that the memory's file has already into this process, several per fault; missing pages of
    /// the file may be populated as well, with zeros. For memory that was populated before.
    ///
    /// # Errors
    /// When the range is not whole pages of the region, and the kernel's error (`EINVAL` before Linux
    /// 5.14).
    pub fn map_present(&self, range: &Range<u64>) -> io::Result<()> {
        self.check_pages(range).map_err(io::Error::other)?;
        self.main.advise(range, Advice::PopulateRead)
    }

    /// Keeps `range` from being discarded until the result is dropped, for a second at most, so that
    /// populated pages can be read: reading a hole of shared memory populates it. `None` where that costs
    /// nothing: reading private memory without a page maps the zero page.
    pub fn hold(&self, range: Range<u64>) -> Option<PageHold<'_>> {
        (self.kind() == ZoneKind::Shared).then(|| self.holds.hold(range))
    }

    /// Registers that `range` is being discarded until the result is dropped; waits while it is held.
    pub(crate) fn begin_discard(&self, range: &Range<u64>) -> Option<DiscardGuard<'_>> {
        (self.kind() == ZoneKind::Shared).then(|| self.holds.begin_discard(range.clone()))
    }

    fn get_pages(
        &self,
        range: &Range<u64>,
        get: impl FnOnce(&Mapping) -> io::Result<()>,
    ) -> Result<(), AccessError> {
        self.check_pages(range)?;
        match get(self.alias.get().unwrap_or(&self.main)) {
            Err(source)
                if matches!(
                    source.raw_os_error(),
                    Some(libc::ENOMEM | libc::ENOSPC | libc::EFAULT | libc::EHWPOISON)
                ) =>
            {
                let (zone, start, end) = (self.zone_id().to_owned(), range.start, range.end);
                Err(AccessError::Populate { zone, start, end, source })
            }
            _ => Ok(()),
        }
    }

    fn target<'a>(&'a self, mapping: &'a Mapping) -> PopulateTarget<'a> {
        PopulateTarget {
            zone: self.zone_id(),
            mapping,
            file: self.file().map(|file| (&**file, self.file_offset)),
            page_bytes: self.page_bytes(),
            hugetlb: self.is_hugetlb(),
            collapse: self.zone.collapse,
            thp: self.spec().thp,
            faults_spare_mmap_lock: self.zone.sparing == Sparing::Faults,
        }
    }

    /// Whether memory of this kind can be populated such that others who change the address space meanwhile hardly
    /// wait for its lock, nor it for them: by faults that do without that lock, or by collapsing.
    pub fn can_spare_mmap_lock(&self) -> bool {
        self.zone.sparing != Sparing::None
    }

    /// The parts of `range` of which nothing was discarded, in whole pages of the backing: what the guest has
    /// given back it takes by its own accesses.
    pub(crate) fn never_discarded(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let page = self.page_bytes();
        let mut parts = Vec::new();
        let mut at = range.start;
        for run in self.discarded.runs_in(Self::pages_of(range)) {
            let start = (run.start * PAGE_BYTES).next_multiple_of(page).max(at);
            let end = (run.end * PAGE_BYTES / page * page).min(range.end);
            if start < end {
                parts.push(at..start);
                at = end;
            }
        }
        parts.push(at..range.end);
        parts.retain(|part| !part.is_empty());
        parts
    }

    /// Populates the parts of `range` whose contents are here, and calls `done` for each. Parts that are
    /// still to arrive are skipped, in whole pages of the backing. Stops, and returns false, when `go_on` says no: it
    /// is asked before each step. `spare`: as [`PrefaultOptions::spares_mmap_lock`](crate::PrefaultOptions).
    pub(crate) fn populate<E: From<PopulateError>>(
        &self,
        range: &Range<u64>,
        spare: bool,
        go_on: &dyn Fn() -> bool,
        mut done: impl FnMut(Range<u64>) -> Result<(), E>,
    ) -> Result<bool, E> {
        let target = self.target(&self.main);
        let page = self.page_bytes();
        let mut at = range.start;
        while at < range.end {
            let absent = self.resident.absent_runs(Self::pages_of(&(at..range.end))).next();
            let absent = absent.map_or(range.end..range.end, |run| {
                let start = run.start * PAGE_BYTES;
                start - start % page..(run.end * PAGE_BYTES).next_multiple_of(page)
            });
            let here = at..absent.start.min(range.end);
            if !here.is_empty() {
                if !self.is_prezeroed() {
                    for step in self.steps(&here) {
                        if !go_on() {
                            return Ok(false);
                        }
                        target.populate(step, spare)?;
                    }
                }
                done(here)?;
            }
            at = absent.end.max(at + page);
        }
        Ok(true)
    }

    /// What is populated in one step. Collapsing waits for every processor at each call, whatever its
    /// length.
    fn steps(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let step_bytes =
            if self.zone.collapse { u64::MAX } else { POPULATE_STEP_BYTES.max(self.page_bytes()) };
        let (mut at, end) = (range.start, range.end);
        std::iter::from_fn(move || {
            let start = at;
            at = start.saturating_add(step_bytes).min(end);
            (start < end).then_some(start..at)
        })
    }
}
