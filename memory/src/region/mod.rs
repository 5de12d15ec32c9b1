// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One contiguous piece of guest RAM: its mappings, its maps, and access to its bytes.
//!
//! Owns the mappings and the per-page maps. Must never make a reference to guest memory (the guest
//! writes it at any time), and must never touch a byte outside the requested range.
//!
//! Offsets are bytes from the start of the region; pages are 4 KiB, counted from there.

mod discard;
mod guest;
mod huge;
mod pages;
mod populated;
mod scrub;
#[cfg(all(test, not(loom)))]
mod tests;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use page_bitmap::PageBitmap;
use parking_lot::{Mutex, MutexGuard};
use vm_memory::VolatileSlice;

use crate::backing::ZoneBacking;
use crate::config::{Backing, ZoneSpec};
use crate::dirty::DeviceDirtyLog;
use crate::holds::Holds;
use crate::host::Host;
use crate::layout::Placement;
use crate::lease::Lease;
use crate::mapping::{Advice, MapRequest, Mapping};
use crate::maps::{ResidentMap, ZeroMap};
use crate::plugged::Plugged;
use crate::populate::THP_BYTES;
use crate::populated::{HugetlbMapping, mincore_tells};
use crate::sparing::Sparing;
use crate::zero::is_zero_volatile;
use crate::zone_file::LockedFile;
use crate::zone_kind::ZoneKind;
use crate::{PAGE_BYTES, to_usize};

pub use self::huge::Collapsing;

/// Why an access failed.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// Beyond the region, or not whole pages where those are required.
    #[error(
        "bytes {start:#x}..{end:#x} are not a range of memory zone '{zone}' at guest address \
         {gpa:#x} ({len_bytes:#x} bytes long)"
    )]
    BadRange {
        /// The zone.
        zone: String,
        /// Guest address of the region.
        gpa: u64,
        /// Length of the region.
        len_bytes: u64,
        /// Start of the range.
        start: u64,
        /// End of the range.
        end: u64,
    },
    /// Private memory has one mapping only.
    #[error("memory zone '{zone}' is private and has no second mapping")]
    NoAlias {
        /// The zone.
        zone: String,
    },
    /// The second mapping could not be made.
    #[error("memory zone '{zone}' could not be mapped a second time")]
    MapAlias {
        /// The zone.
        zone: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Memory could not be discarded.
    #[error("memory zone '{zone}' could not return bytes {start:#x}..{end:#x}")]
    Discard {
        /// The zone.
        zone: String,
        /// Start of the range.
        start: u64,
        /// End of the range.
        end: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Memory that devices have mapped must keep its pages.
    #[error("memory zone '{zone}' has to keep the pages of bytes {start:#x}..{end:#x}: {reason}")]
    Banned {
        /// The zone.
        zone: String,
        /// Start of the range.
        start: u64,
        /// End of the range.
        end: u64,
        /// The reason of the ban.
        reason: &'static str,
    },
    /// A region index that does not exist.
    #[error("guest memory has {regions} regions, and none with index {index}")]
    NoRegion {
        /// The index.
        index: usize,
        /// Number of regions.
        regions: usize,
    },
    /// The host has no pages.
    #[error("the host has no pages for bytes {start:#x}..{end:#x} of memory zone '{zone}'")]
    Populate {
        /// The zone.
        zone: String,
        /// Start of the range.
        start: u64,
        /// End of the range.
        end: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Addresses without RAM.
    #[error("guest address {gpa:#x} with {len_bytes:#x} bytes behind it is not within one region")]
    NoSuchGpa {
        /// Guest physical address.
        gpa: u64,
        /// Length.
        len_bytes: u64,
    },
}

/// State that the regions of a zone share.
#[derive(Debug)]
pub(crate) struct Zone {
    pub spec: ZoneSpec,
    pub backing: ZoneBacking,
    /// Huge pages of this zone must be made by collapsing when it is populated.
    pub collapse: bool,
    /// Every mapping of a hugetlb file, because a page shows only where it was touched. Locked for a push
    /// or a copy, never during a system call.
    views: Mutex<Vec<(Weak<Mapping>, u64)>>,
    /// Whether `mincore` can be asked about the file.
    mincore_tells: bool,
    /// What populates it without holding the lock of the address space for long.
    sparing: Sparing,
    /// The lease of pool memory, kept for as long as the zone exists.
    _lease: Option<Lease>,
}

impl Zone {
    pub fn new(
        mut spec: ZoneSpec,
        backing: ZoneBacking,
        collapse: bool,
        host: &Host,
        lease: Option<Lease>,
    ) -> Self {
        // The host's default for huge pages may be larger than the blocks were chosen for. A part of a page
        // is never returned.
        spec.block_bytes = spec.block_bytes.map(|bytes| bytes.max(backing.page_bytes));
        let mincore_tells = backing.file.as_deref().is_none_or(mincore_tells);
        let sparing = Sparing::of(host, backing.hugetlb, collapse);
        let views = Mutex::default();
        Self { spec, backing, collapse, views, mincore_tells, sparing, _lease: lease }
    }

    /// Whether small pages of it may be joined into huge ones.
    fn may_collapse(&self) -> bool {
        self.backing.kind == ZoneKind::Shared && !self.backing.hugetlb && self.spec.thp
    }

    /// The zone's file, if it has a lock to be kept.
    pub fn locked_file(&self) -> Option<LockedFile> {
        let file = self.backing.file.as_ref().filter(|_| self.backing.locked)?;
        let (zone, kind) = (self.spec.id.clone(), self.backing.kind);
        Some(LockedFile { zone, file: Arc::clone(file), kind })
    }

    fn add_view(&self, mapping: &Arc<Mapping>, file_offset: u64) {
        if self.backing.hugetlb {
            let mut views = self.views.lock();
            views.push((Arc::downgrade(mapping), file_offset));
        }
    }

    /// The mappings of a hugetlb file that show which of its pages are there.
    fn hugetlb_mappings(&self) -> Vec<HugetlbMapping> {
        if !self.mincore_tells {
            return Vec::new();
        }
        let views = self.views.lock();
        let live = |(mapping, at): &(Weak<Mapping>, u64)| {
            mapping.upgrade().map(|mapping| HugetlbMapping { mapping, file_offset: *at })
        };
        views.iter().filter_map(live).collect()
    }
}

/// A region of guest RAM. Threads share it without a lock; each map states the threads that write it.
#[derive(Debug)]
pub struct RamRegion {
    zone: Arc<Zone>,
    gpa: u64,
    len_bytes: u64,
    file_offset: u64,
    main: Arc<Mapping>,
    alias: OnceLock<Arc<Mapping>>,
    /// The mapping that vCPUs use instead of `main`, if they have their own.
    vcpus: OnceLock<Arc<Mapping>>,
    /// Whether vCPUs use `main` again.
    vcpus_in_main: AtomicBool,
    /// Locked while another mapping is made, so that it is made once.
    making_mapping: Mutex<()>,
    /// This process's pagemap, for private memory; opened early, because a sandbox closes `/proc`.
    pagemap: Option<Arc<File>>,
    resident: ResidentMap,
    zero: ZeroMap,
    /// Pages that were discarded at any time: a prefault leaves them to the guest's accesses.
    discarded: PageBitmap,
    /// Blocks of which engines have populated every page, and nothing was discarded since.
    ahead: PageBitmap,
    /// Whether any page was discarded, also by an earlier guest, since all were populated.
    has_holes: AtomicBool,
    /// Whether pages are, or were, mapped one by one, whatever their size in the file.
    small_pages: AtomicBool,
    device_dirty: DeviceDirtyLog,
    /// Ranges that are read or discarded, where reading a hole would populate it.
    holds: Holds,
    /// The plugged blocks, if the region is plugged in blocks.
    plugged: Option<Plugged>,
}

impl RamRegion {
    /// Maps the region without populating it. `file_offset`: where it begins in the zone's file, 0 without one.
    pub(crate) fn new(
        zone: &Arc<Zone>,
        placement: &Placement,
        file_offset: u64,
        pagemap: Option<Arc<File>>,
    ) -> io::Result<Self> {
        let zone = Arc::clone(zone);
        let len_bytes = placement.bytes.end - placement.bytes.start;
        let main = Arc::new(map(&zone, placement.gpa, len_bytes, file_offset)?);
        zone.add_view(&main, file_offset);
        let pages = len_bytes / PAGE_BYTES;
        let region = Self {
            gpa: placement.gpa,
            len_bytes,
            file_offset,
            alias: OnceLock::new(),
            vcpus: OnceLock::new(),
            vcpus_in_main: AtomicBool::new(false),
            making_mapping: Mutex::new(()),
            pagemap,
            resident: ResidentMap::new(pages)?,
            zero: ZeroMap::new(pages)?,
            discarded: PageBitmap::sparse(pages)?,
            ahead: PageBitmap::sparse(len_bytes.div_ceil(populated::BLOCK_BYTES))?,
            has_holes: AtomicBool::new(false),
            small_pages: AtomicBool::new(false),
            plugged: zone
                .spec
                .block_bytes
                .map(|bytes| Plugged::new(bytes, len_bytes))
                .transpose()?,
            device_dirty: DeviceDirtyLog::keeping_mapped(len_bytes, Arc::clone(&main))?,
            holds: Holds::default(),
            main,
            zone,
        };
        if let Some(node) = region.zone.spec.host_numa_node {
            region.main.bind_to_node(node)?;
        }
        region.advise_huge_pages(&region.main);
        if region.zone.backing.holds_data {
            region.note_populated(0..len_bytes);
        }
        Ok(region)
    }

    /// Huge pages only affect speed: a kernel without them is not an error.
    fn advise_huge_pages(&self, mapping: &Mapping) {
        if self.is_hugetlb() || self.kind() == ZoneKind::PrivateFile {
            return;
        }
        let thp = self.zone.spec.thp;
        let advice = if thp { Advice::HugePage } else { Advice::NoHugePage };
        if let Err(error) = mapping.advise(&(0..self.len_bytes), advice) {
            log::debug!("memory zone '{}': {advice:?} not taken: {error}", self.zone_id());
        }
    }

    /// Allows the host to merge identical pages.
    pub(crate) fn make_mergeable(&self) -> io::Result<()> {
        self.main.advise(&(0..self.len_bytes), Advice::Mergeable)
    }

    /// Guest physical address of the first byte.
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Length in bytes, a multiple of 4 KiB and of [`page_bytes`](Self::page_bytes).
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Length in pages of 4 KiB.
    pub fn len_pages(&self) -> u64 {
        self.len_bytes / PAGE_BYTES
    }

    /// ID of the region's zone.
    pub fn zone_id(&self) -> &str {
        &self.zone.spec.id
    }

    /// The zone's configuration, as requested.
    pub fn spec(&self) -> &ZoneSpec {
        &self.zone.spec
    }

    /// The kind of memory.
    pub fn kind(&self) -> ZoneKind {
        self.zone.backing.kind
    }

    /// True for hugetlb pages.
    pub fn is_hugetlb(&self) -> bool {
        self.zone.backing.hugetlb
    }

    /// True when its pages come from the host's free memory. hugetlb pages were set aside before, and
    /// pages of a file on a disk can be written back.
    pub fn takes_host_memory(&self) -> bool {
        match (&self.spec().backing, &self.zone.backing.file) {
            _ if self.is_hugetlb() => false,
            (Backing::File(_), Some(file)) => crate::zone_file::is_in_memory(file),
            _ => true,
        }
    }

    /// The smallest page that the backing populates or discards: 4 KiB, or the size of a hugetlb page.
    /// Transparent huge pages do not count, because they can be split.
    pub fn page_bytes(&self) -> u64 {
        self.zone.backing.page_bytes
    }

    /// Host address of the first byte in the `main` mapping, for devices and userfaultfd.
    pub fn host_addr(&self) -> u64 {
        self.main.start().addr() as u64
    }

    /// The same as a pointer. Valid for `len_bytes` as long as the region lives; the memory is written by
    /// others at any time: no references, only volatile or atomic accesses.
    pub fn as_ptr(&self) -> *mut u8 {
        self.main.start()
    }

    /// The `mmap` flags of the `main` mapping.
    pub(crate) fn map_flags(&self) -> i32 {
        self.main.flags()
    }

    /// The file that other processes may map to share this memory; `None` for private memory.
    pub fn file(&self) -> Option<&Arc<File>> {
        self.zone.backing.file.as_ref().filter(|_| self.kind() == ZoneKind::Shared)
    }

    /// True when the memory was populated and zeroed before the zone was created, and nothing of it was
    /// discarded since, so that there is nothing to prefault.
    pub fn is_prezeroed(&self) -> bool {
        self.was_prezeroed() && !self.has_holes()
    }

    /// True when the memory was populated and zeroed before the zone was created, whatever has become of it.
    pub(crate) fn was_prezeroed(&self) -> bool {
        self.zone.backing.prezeroed
    }

    /// True when pages were discarded since all were populated.
    pub(crate) fn has_holes(&self) -> bool {
        self.has_holes.load(Ordering::Acquire)
    }

    /// Notes that all of it is populated again.
    pub(crate) fn forget_holes(&self) {
        self.has_holes.store(false, Ordering::Release);
    }

    /// Offset of the region in [`file`](Self::file).
    pub fn file_offset(&self) -> u64 {
        self.file_offset
    }

    /// Which pages have their contents.
    pub fn resident(&self) -> &ResidentMap {
        &self.resident
    }

    /// Which pages are known to be zero.
    pub fn zero(&self) -> &ZeroMap {
        &self.zero
    }

    /// Which pages devices of this process have written.
    pub fn device_dirty(&self) -> &DeviceDirtyLog {
        &self.device_dirty
    }

    pub(crate) fn plugged(&self) -> Option<&Plugged> {
        self.plugged.as_ref()
    }

    /// The pages that `range` overlaps.
    pub fn pages_of(range: &Range<u64>) -> Range<u64> {
        range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES)
    }

    fn bad_range(&self, range: &Range<u64>) -> AccessError {
        AccessError::BadRange {
            zone: self.zone_id().to_owned(),
            gpa: self.gpa,
            len_bytes: self.len_bytes,
            start: range.start,
            end: range.end,
        }
    }

    fn check(&self, range: &Range<u64>) -> Result<(), AccessError> {
        if range.start <= range.end && range.end <= self.len_bytes {
            Ok(())
        } else {
            Err(self.bad_range(range))
        }
    }

    pub(crate) fn check_pages(&self, range: &Range<u64>) -> Result<(), AccessError> {
        self.check(range)?;
        if range.start.is_multiple_of(PAGE_BYTES) && range.end.is_multiple_of(PAGE_BYTES) {
            Ok(())
        } else {
            Err(self.bad_range(range))
        }
    }

    fn lock_mappings(&self) -> MutexGuard<'_, ()> {
        self.making_mapping.lock()
    }

    fn alias(&self) -> Result<&Arc<Mapping>, AccessError> {
        if let Some(alias) = self.alias.get() {
            return Ok(alias);
        }
        if self.kind() != ZoneKind::Shared {
            return Err(AccessError::NoAlias { zone: self.zone_id().to_owned() });
        }
        let _making = self.lock_mappings();
        if let Some(alias) = self.alias.get() {
            return Ok(alias);
        }
        let made = map(&self.zone, self.gpa, self.len_bytes, self.file_offset);
        let made = made
            .map_err(|source| AccessError::MapAlias { zone: self.zone_id().to_owned(), source })?;
        self.advise_huge_pages(&made);
        let made = Arc::new(made);
        self.zone.add_view(&made, self.file_offset);
        Ok(self.alias.get_or_init(|| made))
    }

    /// The `alias` mapping of the whole region, if it has been made.
    pub fn made_alias(&self) -> Option<VolatileSlice<'_>> {
        let alias = self.alias.get()?;
        self.slice(alias, &(0..self.len_bytes())).ok()
    }

    /// True when there is, or can be, a second mapping that userfaultfd does not watch.
    pub fn has_alias(&self) -> bool {
        self.kind() == ZoneKind::Shared
    }

    fn slice<'a>(
        &self,
        mapping: &'a Mapping,
        range: &Range<u64>,
    ) -> Result<VolatileSlice<'a>, AccessError> {
        self.check(range)?;
        // SAFETY: the range was checked against the region, and a mapping is as long as its
        // region; the mapping lives for 'a, and only volatile accesses are made through it.
        Ok(unsafe {
            VolatileSlice::new(
                mapping.start().add(to_usize(range.start)),
                to_usize(range.end - range.start),
            )
        })
    }

    /// `range` in the `main` mapping. An access may fault into userfaultfd.
    ///
    /// Writes through it appear in no dirty log.
    ///
    /// # Errors
    /// When the range lies outside the region.
    pub fn main_slice(&self, range: &Range<u64>) -> Result<VolatileSlice<'_>, AccessError> {
        self.slice(&self.main, range)
    }

    /// `range` in the `alias` mapping, which is made on first use: accesses never fault into userfaultfd.
    ///
    /// For vectored sends and receives, take [`VolatileSlice::ptr_guard_mut`]: the pointer stays
    /// valid while the region lives. Code that writes through it updates [`zero`](Self::zero) (data), and
    /// [`resident`](Self::resident) once the content is complete. Reading a part that was never
    /// populated populates it: ask [`populated_runs`](Self::populated_runs) first.
    ///
    /// # Errors
    /// When the range lies outside the region, the memory is private, or the mapping cannot be made.
    pub fn alias_slice(&self, range: &Range<u64>) -> Result<VolatileSlice<'_>, AccessError> {
        self.slice(self.alias()?, range)
    }

    /// `range` in the best mapping for migration: `alias` if it has been made, else `main`.
    ///
    /// # Errors
    /// When the range lies outside the region.
    pub fn io_slice(&self, range: &Range<u64>) -> Result<VolatileSlice<'_>, AccessError> {
        self.slice(self.alias.get().unwrap_or(&self.main), range)
    }

    /// Copies guest memory at `offset` to `into`, through the mapping of [`io_slice`].
    ///
    /// A running guest may change it meanwhile; the dirty log then has the page.
    ///
    /// # Errors
    /// As [`io_slice`].
    ///
    /// [`io_slice`]: Self::io_slice
    pub fn read_page_range(&self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        let end = offset.saturating_add(into.len() as u64);
        self.io_slice(&(offset..end))?.copy_to(into);
        Ok(())
    }

    /// Copies `from` to guest memory at `offset`, through the mapping of [`io_slice`], and marks the
    /// pages as data. The caller marks them as resident.
    ///
    /// # Errors
    /// As [`io_slice`].
    ///
    /// [`io_slice`]: Self::io_slice
    pub fn write_range(&self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        let end = offset.saturating_add(from.len() as u64);
        let slice = self.io_slice(&(offset..end))?;
        // Before the bytes are written: a page marked as zero must never hold data.
        self.zero.set_data(Self::pages_of(&(offset..end)));
        slice.copy_from(from);
        Ok(())
    }

    /// True when the bytes of `page` are all zero now. Reading populates a page of shared memory that was
    /// not populated.
    ///
    /// # Errors
    /// As [`io_slice`](Self::io_slice).
    pub fn page_is_zero(&self, page: u64) -> Result<bool, AccessError> {
        let start = page.saturating_mul(PAGE_BYTES);
        let slice = self.io_slice(&(start..start.saturating_add(PAGE_BYTES)))?;
        let guard = slice.ptr_guard();
        // SAFETY: a whole page inside a mapping that `slice` borrows.
        Ok(unsafe { is_zero_volatile(guard.as_ptr().cast(), guard.len()) })
    }
}

/// Maps a part of `zone` so that huge pages are aligned in the guest, in this process and in the file.
fn map(zone: &Zone, gpa: u64, len_bytes: u64, file_offset: u64) -> io::Result<Mapping> {
    let backing = &zone.backing;
    let huge = if len_bytes >= THP_BYTES { THP_BYTES } else { PAGE_BYTES };
    let file = backing.file.as_deref().map(|file| (file, file_offset));
    Mapping::new(&MapRequest {
        len_bytes,
        align_bytes: backing.page_bytes.max(huge),
        congruent_to: if file.is_some() { file_offset } else { gpa },
        file,
        shared: backing.kind == ZoneKind::Shared,
        // Without a reservation, an exhausted hugetlb pool would cause a SIGBUS in the guest. Memory that
        // is plugged later gets its pages block by block.
        reserve: zone.spec.block_bytes.is_none() && (zone.spec.reserve || backing.hugetlb),
    })
}
