// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Units of guest memory whose contents at the destination are old, from the source's word that they are.
//!
//! Owns the maps of these units, and throws away what is here of them. Must never keep old contents where a guest
//! could read them.

use page_bitmap::PageBitmap;

use super::emptying::empty_units;
use crate::cancel::Cancel;
use crate::error::Cause;
use crate::layout::{PAGE_BYTES, PageRun};
use crate::protocol::runs;
use crate::ram::GuestMemoryMap;

/// Units with outdated contents, by region; they have been discarded.
pub(crate) struct Stale(Vec<PageBitmap>);

impl Stale {
    /// An empty set.
    pub(super) fn new<M: GuestMemoryMap>(memory: &M) -> Self {
        Self(maps(memory))
    }

    /// Adds the units of another set, which have been discarded as well.
    pub(super) fn add(&mut self, other: &Self) {
        self.0.iter().zip(&other.0).for_each(|(all, more)| all.add(more));
    }

    /// The units, one map a region.
    pub(super) fn into_maps(self) -> Vec<PageBitmap> {
        self.0
    }

    /// Discards a set of units that the source has sent, and adds them.
    pub(super) fn throw_away<M: GuestMemoryMap>(
        &mut self,
        memory: &M,
        units: &[u8],
        cancel: &Cancel,
    ) -> Result<(), Cause> {
        let more = maps(memory);
        runs::decode(units, &more)?;
        for (region, (units, all)) in more.iter().zip(&self.0).enumerate() {
            // Of ready memory nothing has arrived before.
            if !memory.is_ready(region) {
                empty_units(memory, region, units, cancel)?;
            }
            mark_absent(memory, region, units);
            all.add(units);
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
