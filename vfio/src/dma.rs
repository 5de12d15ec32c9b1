// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The two ends of the pipeline that maps guest memory for DMA: the one that populates pages, and the one that maps
//! them in the IOMMU.
//!
//! Owns the traits, so that pinning can be tested without an IOMMU and without a particular
//! populate engine.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use memory::{ChunkHook, GuestRam, Prefault, PrefaultError, PrefaultOptions, RamRegion};

use super::limits::DmaLimits;

/// An IOMMU's mappings of one VM: guest physical addresses become addresses for DMA.
pub trait DmaTarget: Send + Sync {
    /// What can be done before a part of guest memory is mapped, on several threads at once. It may be
    /// mapped without.
    fn prepare(&self, _region: &RamRegion, _range: &Range<u64>) {}
    /// Whether a region is better mapped when all memory is populated than while other parts still are.
    fn maps_last(&self, _region: &RamRegion) -> bool {
        false
    }
    /// Maps a part of guest memory, given in bytes of the region, at its guest physical address, and
    /// pins it. It stays mapped, in this one piece, until it is unmapped or the target is gone, and so
    /// does the memory.
    ///
    /// # Errors
    /// The kernel's answer.
    fn map(&self, region: &RamRegion, range: &Range<u64>) -> io::Result<()>;
    /// Unmaps and unpins guest physical addresses: one piece that was mapped, or several that follow
    /// each other without a gap. No function may be using them.
    ///
    /// # Errors
    /// The kernel's answer.
    fn unmap(&self, gpa: &Range<u64>) -> io::Result<()>;
    /// Unmaps and unpins everything; no function may use it any more.
    fn unmap_all(&self);
    /// The limits that hold for this process here and now.
    fn limits(&self) -> DmaLimits;
}

/// Gives guest memory its pages, chunk by chunk.
pub trait Populator: Send + Sync {
    /// Bytes in all, and how many of them are on pages that a cgroup counts.
    fn total_bytes(&self) -> (u64, u64);
    /// All of the memory.
    fn regions(&self) -> &[Arc<RamRegion>];
    /// In how many pieces of at most `chunk_bytes` it calls its hook, at most.
    fn chunks(&self, chunk_bytes: u64) -> u64;
    /// Populates everything and returns when that is done. Ends soon after an error of the hook.
    ///
    /// # Errors
    /// Memory cannot be had, or the first error of the hook.
    fn populate(&self, how: Populating<'_>) -> Result<(), PrefaultError>;
}

/// How memory is populated.
pub struct Populating<'a> {
    /// What is populated at once, in bytes.
    pub chunk_bytes: u64,
    /// Called, on several threads, for each piece as soon as its pages are there.
    pub on_chunk: ChunkHook,
    /// The guest runs meanwhile and goes first.
    pub yields_to_guest: bool,
    /// Told at the beginning what a thread can do that would only wait.
    pub begun: &'a dyn Fn(PopulateHelper),
}

/// Called by a thread that would otherwise only wait; returns when there is nothing left to do.
pub type PopulateHelper = Arc<dyn Fn() + Send + Sync>;

/// The engine of the memory room, on all of a guest's RAM.
pub struct GuestRamPopulator(pub Arc<GuestRam>);

impl Populator for GuestRamPopulator {
    fn total_bytes(&self) -> (u64, u64) {
        let counted = self.0.regions().iter().filter(|region| !region.is_hugetlb());
        (self.0.total_bytes(), counted.map(|region| region.usable_bytes()).sum())
    }

    fn regions(&self) -> &[Arc<RamRegion>] {
        self.0.regions()
    }

    fn chunks(&self, chunk_bytes: u64) -> u64 {
        // A chunk ends at a huge page of the host, so that a region may begin or end with a short one.
        let of_region = |len_bytes: u64| len_bytes.div_ceil(chunk_bytes.max(1)) + 1;
        self.0.regions().iter().map(|region| of_region(region.len_bytes())).sum()
    }

    fn populate(&self, how: Populating<'_>) -> Result<(), PrefaultError> {
        let options = PrefaultOptions {
            chunk_bytes: how.chunk_bytes,
            on_chunk: Some(how.on_chunk),
            yields_to_guest: how.yields_to_guest,
            ..PrefaultOptions::default()
        };
        let prefault = Prefault::start(self.0.regions(), &options)?;
        let helper = prefault.helper();
        (how.begun)(Arc::new(move || helper.help()));
        prefault.wait()
    }
}
