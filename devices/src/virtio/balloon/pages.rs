// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The pages in the balloon, and discarding of inflated and reported pages.
//!
//! Owns the map of the balloon. A host page that is larger than 4 KiB is discarded when all
//! of it is in the balloon; with passed-through devices, a DMA mapping is discarded when all of it is.
//! Numbers come from a guest: what is not RAM is counted and ignored.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use memory::{Discarded, GuestRam, PageBitmap};

use super::counters::OperationCounters;
use super::shared::Shared;
use super::{PAGE_BYTES, hinting};
use crate::{LogLimit, log_limited};

/// The pages in the balloon; owned by the device's thread.
pub(super) struct BalloonPages {
    ram: Arc<GuestRam>,
    /// Inflated pages by region.
    inflated: Vec<PageBitmap>,
    /// Whether the guest notifies before it uses pages of the balloon again.
    must_tell_host: bool,
    /// Whether inflated pages could not be discarded.
    deferred: bool,
    log: Arc<LogLimit>,
}

/// Sorts ranges and merges adjacent and overlapping ones.
fn merge(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

fn runs_of(pfns: &[u32]) -> Vec<Range<u64>> {
    let page = |pfn: &u32| u64::from(*pfn) * PAGE_BYTES;
    merge(pfns.iter().map(|pfn| page(pfn)..page(pfn) + PAGE_BYTES).collect())
}

impl BalloonPages {
    pub(super) fn new(shared: &Shared, must_tell_host: bool) -> io::Result<Self> {
        let ram = &shared.ram;
        Ok(Self {
            ram: Arc::clone(ram),
            inflated: hinting::maps(ram)?,
            must_tell_host,
            deferred: false,
            log: Arc::clone(&shared.log),
        })
    }

    /// The parts of `range` in RAM: region, and pages in it.
    fn parts(&self, range: &Range<u64>) -> Vec<(usize, Range<u64>)> {
        let mut parts = Vec::new();
        for (index, region) in self.ram.regions().iter().enumerate() {
            let start = range.start.max(region.gpa());
            let end = range.end.min(region.gpa().saturating_add(region.len_bytes()));
            if start < end {
                let first = (start - region.gpa()) / PAGE_BYTES;
                parts.push((index, first..(end - region.gpa()) / PAGE_BYTES));
            }
        }
        parts
    }

    /// Adds pages to the balloon; returns the discarded ranges, in order.
    pub(super) fn inflate(&mut self, pfns: &[u32], counters: &OperationCounters) -> Discarded {
        let mut discarded = Discarded::default();
        let mut pages = 0;
        for run in runs_of(pfns) {
            for (index, part) in self.parts(&run) {
                pages += part.end - part.start;
                if let Some(map) = self.inflated.get(index) {
                    map.set_range(part.clone());
                }
                self.discard_whole_units(index, part, &mut discarded);
            }
        }
        let named = u64::try_from(pfns.len()).unwrap_or(u64::MAX);
        counters.inflated_pages.add(pages);
        counters.rejected_pages.add(named.saturating_sub(pages));
        counters.inflated_given_back_bytes.add(discarded.len_bytes());
        self.deferred |= discarded.deferred_bytes > 0;
        self.account(&discarded, counters);
        discarded
    }

    /// Discards the units of memory that overlap `pages` of the region and are entirely in the balloon.
    fn discard_whole_units(&self, index: usize, pages: Range<u64>, discarded: &mut Discarded) {
        let (Some(region), Some(map)) = (self.ram.regions().get(index), self.inflated.get(index))
        else {
            return;
        };
        let unit = (self.ram.discard_unit_bytes(region) / PAGE_BYTES).max(1);
        let mut at = pages.start / unit * unit;
        let behind = pages.end.next_multiple_of(unit).min(region.len_pages());
        while at < behind {
            let hole = map.next_clear(at..behind).unwrap_or(behind);
            let end = hole / unit * unit;
            if at < end {
                let gpa = |page: u64| region.gpa() + page * PAGE_BYTES;
                let range = gpa(at)..gpa(end);
                let ram = &self.ram;
                join(
                    discarded,
                    if self.must_tell_host {
                        ram.discard_unpinned(range)
                    } else {
                        ram.discard(range)
                    },
                );
            }
            // After the incomplete unit.
            at = (end + unit).max(at + unit);
        }
    }

    /// Removes pages from the balloon. They are zero on their next access; on return they are pinned again
    /// for devices.
    pub(super) fn deflate(&mut self, pfns: &[u32], counters: &OperationCounters) {
        for run in runs_of(pfns) {
            self.ram.repin(&run);
            for (index, part) in self.parts(&run) {
                counters.deflated_pages.add(part.end - part.start);
                if let Some(map) = self.inflated.get(index) {
                    map.claim_range(part);
                }
            }
        }
    }

    /// Discards pages in the balloon if some could not be discarded when inflated, or all memory was
    /// `populated` since, for devices or by a prefault. Not those of a driver that need not tell before it uses them
    /// (virtio 1.3, 5.5.6): they may have data again.
    pub(super) fn retry(&mut self, populated: bool, counters: &OperationCounters) {
        if !std::mem::take(&mut self.deferred) && !populated || !self.must_tell_host {
            return;
        }
        let mut discarded = Discarded::default();
        for (index, map) in self.inflated.iter().enumerate() {
            for run in map.runs() {
                self.discard_whole_units(index, run, &mut discarded);
            }
        }
        counters.inflated_given_back_bytes.add(discarded.len_bytes());
        self.deferred = discarded.deferred_bytes > 0;
        self.account(&discarded, counters);
    }

    /// Discards reported free memory, which the guest may reuse after the answer.
    pub(super) fn report(
        &mut self,
        ranges: Vec<Range<u64>>,
        counters: &OperationCounters,
    ) -> Discarded {
        let mut discarded = Discarded::default();
        for range in merge(ranges) {
            counters.reported_bytes.add(range.end.saturating_sub(range.start));
            join(&mut discarded, self.ram.discard(range));
        }
        counters.reported_given_back_bytes.add(discarded.len_bytes());
        self.account(&discarded, counters);
        discarded
    }

    fn account(&self, discarded: &Discarded, counters: &OperationCounters) {
        counters.runs.add(u64::try_from(discarded.ranges.len()).unwrap_or(u64::MAX));
        counters.deferred_bytes.add(discarded.deferred_bytes);
        if let Some(error) = &discarded.error {
            counters.failures.add(1);
            log_limited!(self.log, Warn, "memory that the guest released stays with it: {error}");
        }
    }
}

fn join(all: &mut Discarded, more: Discarded) {
    all.ranges.extend(more.ranges);
    all.deferred_bytes += more.deferred_bytes;
    all.error = all.error.take().or(more.error);
}
