// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Units of guest memory whose contents at the destination are old, from the source's word that they are.
//!
//! Owns the maps of these units, and throws away what is here of them, unless accesses to pages that are there are
//! caught: then old contents stay until new ones replace them. Must never keep old contents where a guest could read
//! them.

use page_bitmap::PageBitmap;

use super::emptying::empty_units;
use crate::cancel::Cancel;
use crate::error::Cause;
use crate::layout::{PAGE_BYTES, PageRun};
use crate::protocol::runs;
use crate::ram::GuestMemoryMap;

/// Units with outdated contents, by region.
pub(crate) struct Stale {
    units: Vec<PageBitmap>,
    /// By region: contents have stayed.
    stayed: Vec<bool>,
}

impl Stale {
    /// An empty set.
    pub(crate) fn new<M: GuestMemoryMap>(memory: &M) -> Self {
        let units = maps(memory);
        let stayed = vec![false; units.len()];
        Self { units, stayed }
    }

    /// Adds the units of another set. What has stayed of them is discarded where it may not any more.
    pub(super) fn add<M: GuestMemoryMap>(
        &mut self,
        memory: &M,
        other: &Self,
        stays: impl Fn(usize) -> bool,
        cancel: &Cancel,
    ) -> Result<(), Cause> {
        for (region, (more, stayed)) in other.units.iter().zip(&other.stayed).enumerate() {
            if *stayed && !stays(region) {
                empty_units(memory, region, more, cancel)?;
            }
            self.units[region].add(more);
        }
        Ok(())
    }

    /// The units, one map a region.
    pub(super) fn into_maps(self) -> Vec<PageBitmap> {
        self.units
    }

    /// Adds a set of units that the source has sent, and discards them in regions where their contents may not stay.
    pub(crate) fn throw_away<M: GuestMemoryMap>(
        &mut self,
        memory: &M,
        units: &[u8],
        stays: impl Fn(usize) -> bool,
        cancel: &Cancel,
    ) -> Result<(), Cause> {
        let more = maps(memory);
        runs::decode(units, &more)?;
        for (region, units) in more.iter().enumerate() {
            if stays(region) {
                self.stayed[region] = true;
            } else {
                empty_units(memory, region, units, cancel)?;
            }
            mark_absent(memory, region, units);
            self.units[region].add(units);
        }
        Ok(())
    }
}

/// Marks the units as missing in the memory.
pub(super) fn mark_absent<M: GuestMemoryMap>(memory: &M, region: usize, units: &PageBitmap) {
    let unit = memory.layout().regions()[region].host_page_bytes / PAGE_BYTES;
    for run in units.runs() {
        let count = (run.end - run.start) * unit;
        memory.mark_absent(PageRun { region, first: run.start * unit, count });
    }
}

/// Empty maps with a bit for every unit of every region.
fn maps<M: GuestMemoryMap>(memory: &M) -> Vec<PageBitmap> {
    let regions = memory.layout().regions().iter();
    regions.map(|region| PageBitmap::new(region.len_bytes / region.host_page_bytes)).collect()
}
