// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The two ends of the pipeline that maps guest memory for DMA: the one that populates pages, and the one that maps
//! them in the IOMMU.
//!
//! Owns the traits, so that pinning can be tested without an IOMMU and without a particular
//! populate engine.

use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use memory::{
    ChunkHook, GuestRam, LaneProgress, Prefault, PrefaultError, PrefaultOptions, RamRegion,
    StopQuery,
};

use super::limits::DmaLimits;

/// The DMA mappings of one VM in an IOMMU, from guest physical addresses to memory.
pub trait DmaTarget: Send + Sync {
    /// Optional preparation before a part of guest memory is mapped; called on several threads
    /// concurrently.
    fn prepare(&self, _region: &RamRegion, _range: &Range<u64>) {}
    /// Whether mapping a region is best deferred until all memory is populated.
    fn maps_last(&self, _region: &RamRegion) -> bool {
        false
    }
    /// Whether mapping takes the lock of the process's address space for writing, so that memory which is populated
    /// meanwhile is to hold it for short times only.
    fn takes_mmap_lock(&self) -> bool {
        false
    }
    /// Maps a part of guest memory, given as a byte range of the region, at its guest physical address, and
    /// pins it. It stays mapped, in one piece, until it is unmapped or the target is dropped; the memory is
    /// kept as long. Called on several threads concurrently, as `unmap` is, for ranges that do not overlap.
    ///
    /// # Errors
    /// The kernel's error.
    fn map(&self, region: &RamRegion, range: &Range<u64>) -> io::Result<()>;
    /// Unmaps and unpins a range of guest physical addresses: one mapped piece, or several adjacent ones.
    /// No function may be using it.
    ///
    /// # Errors
    /// The kernel's error.
    fn unmap(&self, gpa: &Range<u64>) -> io::Result<()>;
    /// Unmaps and unpins everything; no function may use it any more.
    fn unmap_all(&self);
    /// The current limits of this process.
    fn limits(&self) -> DmaLimits;
}

/// Populates guest memory chunk by chunk.
pub trait Populator: Send + Sync {
    /// Total bytes, and how many of them a cgroup counts.
    fn total_bytes(&self) -> (u64, u64);
    /// All regions of the memory.
    fn regions(&self) -> &[Arc<RamRegion>];
    /// Populates everything, and returns when done; stops soon after an error of the hook.
    ///
    /// # Errors
    /// Memory cannot be populated, or the first error of the hook.
    fn populate(&self, how: Populating<'_>) -> Result<(), PrefaultError>;
    /// Called before [`Self::populate`], which is timed: has others end who populate the memory.
    fn prepare(&self) {}
    /// Ends threads that it has already, as the host gives no other.
    fn make_room(&self) {}
}

/// How memory is populated.
pub struct Populating<'a> {
    /// Bytes populated at a time.
    pub chunk_bytes: u64,
    /// Called on several threads, with each chunk as soon as it is populated.
    pub on_chunk: ChunkHook,
    /// Looked at now and then: whether to stop, in the middle of a chunk as well.
    pub is_stopped: StopQuery,
    /// Whether populating yields to the running guest.
    pub yields_to_guest: bool,
    /// Whether populating takes the lock of the address space for short times only, where it can.
    pub spares_mmap_lock: bool,
    /// Whether the host was found to have memory for all of it.
    pub is_checked: bool,
    /// Called at the start.
    pub begun: &'a dyn Fn(PopulateBegun),
    /// Called now and then until the end, on the thread that has called [`Populator::populate`].
    pub meanwhile: &'a dyn Fn(),
}

/// What there is of memory that is being populated.
pub struct PopulateBegun {
    /// A helper for threads that would otherwise only wait.
    pub help: PopulateHelper,
    /// How far each kind of page of each node is.
    pub lanes: LanesQuery,
}

/// Says how far each kind of page of each node is, in an order that stays; does not block.
pub type LanesQuery = Box<dyn Fn() -> Vec<LaneProgress> + Send + Sync>;

/// Work for a thread that would otherwise only wait; returns when nothing is left to do.
pub type PopulateHelper = Arc<dyn Fn() + Send + Sync>;

/// Populates all of a guest's RAM with the `memory` crate's prefault engine.
pub struct GuestRamPopulator {
    ram: Arc<GuestRam>,
    threads: Option<NonZeroUsize>,
}

impl GuestRamPopulator {
    /// On so many threads, or as many as the engine takes by default. They map what they have populated.
    pub fn new(ram: Arc<GuestRam>, threads: Option<NonZeroUsize>) -> Self {
        Self { ram, threads }
    }
}

impl Populator for GuestRamPopulator {
    fn total_bytes(&self) -> (u64, u64) {
        let counted = self.ram.regions().iter().filter(|region| !region.is_hugetlb());
        (self.ram.total_bytes(), counted.map(|region| region.usable_bytes()).sum())
    }

    fn regions(&self) -> &[Arc<RamRegion>] {
        self.ram.regions()
    }

    fn populate(&self, how: Populating<'_>) -> Result<(), PrefaultError> {
        let options = PrefaultOptions {
            chunk_bytes: how.chunk_bytes,
            on_chunk: Some(how.on_chunk),
            is_stopped: Some(how.is_stopped),
            yields_to_guest: how.yields_to_guest,
            spares_mmap_lock: how.spares_mmap_lock,
            is_checked: how.is_checked,
            threads: self.threads,
            ..PrefaultOptions::default()
        };
        let prefault = Prefault::start(self.ram.regions(), &options)?;
        let (helper, meter) = (prefault.helper(), prefault.meter());
        let help = Arc::new(move || helper.help());
        (how.begun)(PopulateBegun { help, lanes: Box::new(move || meter.lanes()) });
        prefault.wait_unless(&|| {
            (how.meanwhile)();
            false
        })
    }
}
