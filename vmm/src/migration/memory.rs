// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM in the form that the migration works on.
//!
//! Owns the adaption of regions to a layout; region indexes are the same as in [`GuestRam`].

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use memory::{AccessError, GuestRam, RamRegion, ZoneKind};
use vm_migration::layout::{Backing, Layout, LayoutError, PAGE_BYTES, PageRun, RegionInfo};
use vm_migration::ram::{GuestMemoryMap, Hold};

/// Guest RAM with its layout, for migration.
pub struct MigratingRam {
    ram: Arc<GuestRam>,
    layout: Layout,
}

fn to_io(error: AccessError) -> io::Error {
    io::Error::other(error)
}

fn bytes(pages: &Range<u64>) -> Range<u64> {
    pages.start * PAGE_BYTES..pages.end * PAGE_BYTES
}

impl MigratingRam {
    /// Describes `ram` to be filled behind the guest, which waits for pages that are missing: makes the second mappings, which
    /// userfaultfd does not watch.
    ///
    /// # Errors
    /// The layout is invalid, or a second mapping cannot be made.
    pub fn with_aliases(ram: Arc<GuestRam>) -> Result<Self, MigratingRamError> {
        for region in ram.regions().iter().filter(|region| region.has_alias()) {
            region.alias_slice(&(0..region.len_bytes())).map_err(MigratingRamError::Alias)?;
        }
        Self::as_mapped(ram)
    }

    /// Describes `ram` to be read, or to be filled before the guest runs. That is done as the guest has it mapped, which costs
    /// no second set of page tables: for reading no page faults, and what is filled is there for the guest without one. Only
    /// memory that has a second mapping came through that, and what userfaultfd watches may not be read otherwise.
    ///
    /// # Errors
    /// The layout is invalid.
    pub fn as_mapped(ram: Arc<GuestRam>) -> Result<Self, MigratingRamError> {
        let mut regions = Vec::new();
        for region in ram.regions() {
            let backing = match region.kind() {
                ZoneKind::Shared => Backing::Shared,
                ZoneKind::PrivateAnonymous | ZoneKind::PrivateFile => Backing::Anonymous,
            };
            regions.push(RegionInfo {
                name: region.zone_id().to_owned(),
                gpa: region.gpa(),
                len_bytes: region.len_bytes(),
                host_page_bytes: region.page_bytes(),
                backing,
            });
        }
        let layout = Layout::new(regions).map_err(MigratingRamError::Layout)?;
        Ok(Self { ram, layout })
    }

    /// The guest RAM.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    fn region(&self, index: usize) -> &RamRegion {
        &self.ram.regions()[index]
    }
}

/// Why RAM cannot be migrated.
#[derive(Debug, thiserror::Error)]
pub enum MigratingRamError {
    /// A second mapping cannot be made.
    #[error("guest memory cannot be mapped a second time")]
    Alias(#[source] AccessError),
    /// The layout is invalid.
    #[error("the layout of guest memory is not one that can migrate")]
    Layout(#[source] LayoutError),
}

// SAFETY: all mappings of a region are as long as their region, which `ram` keeps mapped readable
// and writable; regions never change once RAM is made.
unsafe impl GuestMemoryMap for MigratingRam {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn main(&self, region: usize) -> *mut u8 {
        self.region(region).as_ptr()
    }

    fn alias(&self, region: usize) -> Option<*mut u8> {
        Some(self.region(region).made_alias()?.ptr_guard_mut().as_ptr())
    }

    fn vcpus(&self, region: usize) -> Option<*mut u8> {
        self.region(region).vcpus_ptr()
    }

    fn file(&self, region: usize) -> Option<BorrowedFd<'_>> {
        self.region(region).file().map(|file| file.as_fd())
    }

    fn file_offset(&self, region: usize) -> u64 {
        self.region(region).file_offset()
    }

    fn populated_runs(&self, region: usize, pages: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let runs = self.region(region).populated_runs(&bytes(&pages)).map_err(to_io)?;
        Ok(runs
            .into_iter()
            .map(|run| run.start / PAGE_BYTES..run.end.div_ceil(PAGE_BYTES))
            .collect())
    }

    fn hold(&self, region: usize, pages: Range<u64>) -> Hold<'_> {
        self.region(region).hold(bytes(&pages)).map(Hold::until_dropped).unwrap_or_default()
    }

    fn mark_zero(&self, run: PageRun) {
        self.region(run.region).zero().set_zero(run.first..run.end());
    }

    fn mark_resident(&self, run: PageRun) {
        let region = self.region(run.region);
        region.zero().set_data(run.first..run.end());
        region.resident().set_resident(run.first..run.end());
    }

    fn mark_absent(&self, run: PageRun) {
        self.region(run.region).resident().set_absent(run.first..run.end());
    }

    fn populate(&self, run: PageRun) -> io::Result<()> {
        let range = bytes(&(run.first..run.end()));
        self.region(run.region).populate_for_io(&range).map_err(to_io)
    }

    fn prepare(&self, run: PageRun) -> io::Result<()> {
        let range = bytes(&(run.first..run.end()));
        self.region(run.region).prepare_for_io(&range).map_err(to_io)
    }

    fn use_small_pages(&self, small: bool) {
        for region in self.ram.regions() {
            region.use_small_pages(small);
        }
    }

    fn is_ready(&self, region: usize) -> bool {
        let region = self.region(region);
        region.is_prezeroed() && region.kind() == ZoneKind::Shared
    }

    fn data_runs(&self, run: PageRun) -> Vec<PageRun> {
        let runs = self.region(run.region).zero().data_runs(run.first..run.end());
        let in_region = |Range { start, end }| PageRun { first: start, count: end - start, ..run };
        runs.map(in_region).collect()
    }

    fn discard(&self, run: PageRun) -> io::Result<()> {
        self.ram.discard_in_region(run.region, &bytes(&(run.first..run.end()))).map_err(to_io)
    }

    fn make_zero(&self, run: PageRun) -> io::Result<()> {
        self.ram.make_zero(run.region, &bytes(&(run.first..run.end()))).map_err(to_io)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use memory::{RamConfig, RamLayout, ZoneSpec};

    use super::*;

    #[test]
    fn memory_that_is_only_read_gets_no_second_mapping() {
        let shared = ZoneSpec { shared: true, ..ZoneSpec::new("s", 4 << 20) };
        let zones = vec![shared, ZoneSpec::new("p", 4 << 20)];
        let ram = GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap();
        let ram = Arc::new(ram);
        let aliases = |memory: &MigratingRam| [0, 1].map(|index| memory.alias(index).is_some());
        let source = MigratingRam::as_mapped(Arc::clone(&ram)).unwrap();
        assert_eq!(aliases(&source), [false, false]);
        let destination = MigratingRam::with_aliases(Arc::clone(&ram)).unwrap();
        assert_eq!(aliases(&destination), [true, false]);
        // What came through it is read through it.
        let onward = MigratingRam::as_mapped(ram).unwrap();
        assert_eq!(onward.alias(0), destination.alias(0));
        assert_ne!(onward.alias(0), Some(onward.main(0)));
    }
}
