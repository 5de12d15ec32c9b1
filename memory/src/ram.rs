// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM: all regions and the operations on them.
//!
//! Owns the order in which memory is made: check, create backings, lay out, map, advise. Must do
//! nothing whose cost grows with the size of the guest, and must refuse before it creates.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap, mmap::MmapRegionBuilder};

use crate::backing::{InitialContents, ProvidedContent, ZoneBacking};
use crate::backing_error::BackingError;
use crate::config::{Backing, ConfigError, RamConfig, ZoneSpec};
use crate::discards::Discards;
use crate::host::{Host, HugePagePolicy};
use crate::layout::{LayoutError, RamLayout, ZoneExtent};
use crate::lease::Lease;
use crate::pins::Pins;
use crate::populate::THP_BYTES;
use crate::prefault::{Prefault, PrefaultError, PrefaultOptions};
use crate::region::{AccessError, RamRegion, Zone};
use crate::zone_file::LockedFile;
use crate::zone_kind::ZoneKind;
use crate::{GuestMemory, GuestMemoryHandle, to_usize};

/// Guest RAM that could not be made. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// No host could do it.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It does not fit the guest.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A zone has no pages available.
    #[error(transparent)]
    Backing(#[from] BackingError),
    /// More than the host has, with `reserve=on`.
    #[error(
        "the memory zones with reserve=on need {needed_bytes} bytes, and the host has \
         {available_bytes} of RAM and swap to promise: make the guest smaller or use reserve=off"
    )]
    HostTooSmall {
        /// Sum of the zones.
        needed_bytes: u64,
        /// What the host could promise.
        available_bytes: u64,
    },
    /// The hugetlb pool is too small.
    #[error(
        "the memory zones {zones} need {needed} huge pages of {} KiB, and {available} are \
         available{place}: write a larger number to {pool}",
        page_bytes >> 10
    )]
    HugetlbPool {
        /// Their names.
        zones: String,
        /// Pages needed.
        needed: u64,
        /// Pages free and not promised to others.
        available: u64,
        /// Their size.
        page_bytes: u64,
        /// Which node, if it matters.
        place: String,
        /// Where the pool is set.
        pool: String,
    },
    /// A node that the host does not have.
    #[error("memory zone '{zone}': this host has no NUMA node {node}")]
    NoSuchNode {
        /// The zone.
        zone: String,
        /// The node.
        node: u32,
    },
    /// Two zones in one file.
    #[error("memory zones '{first}' and '{second}' use the same file: each needs its own")]
    SameFile {
        /// One zone.
        first: String,
        /// The other.
        second: String,
    },
    /// A file for no zone.
    #[error("a file was handed over for memory zone '{zone}', which does not exist")]
    UnknownZone {
        /// The name.
        zone: String,
    },
    /// The kernel refuses the mapping.
    #[error(
        "memory zone '{zone}': could not map {len_bytes} bytes (out of address space, over the \
         host's overcommit limit with reserve=on, or not allowed on its NUMA node)"
    )]
    Map {
        /// The zone.
        zone: String,
        /// How much.
        len_bytes: u64,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Own mistake, surfaced by the library that keeps the regions.
    #[error("the memory regions could not be put together")]
    Assemble(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// A file that a zone is to consist of.
#[derive(Debug, Clone)]
pub struct ProvidedFile {
    /// Which zone.
    zone: String,
    file: Arc<File>,
    /// For memory of a pool: it is populated and zero, and goes back when this is dropped.
    lease: Option<Lease>,
}

impl ProvidedFile {
    /// A file of any content, such as memory that another VMM hands over.
    pub fn file(zone: &str, file: Arc<File>) -> Self {
        Self { zone: zone.to_owned(), file, lease: None }
    }

    /// Populated and zeroed memory of a pool; the lease is kept for as long as the zone exists.
    pub fn prezeroed(zone: &str, file: Arc<File>, lease: Lease) -> Self {
        Self { zone: zone.to_owned(), file, lease: Some(lease) }
    }

    /// The zone that it is for.
    pub fn zone(&self) -> &str {
        &self.zone
    }

    /// Whether it is memory of a pool.
    pub fn is_prezeroed(&self) -> bool {
        self.lease.is_some()
    }

    fn content(&self) -> ProvidedContent {
        if self.is_prezeroed() {
            ProvidedContent::PopulatedZeroes
        } else {
            ProvidedContent::Unknown
        }
    }
}

/// What guest RAM is made from, besides its configuration.
#[derive(Debug, Clone, Default)]
pub struct RamSources {
    /// Files that zones are to consist of, in place of their own.
    pub provided: Vec<ProvidedFile>,
    /// Locked files of a machine that the same VM had before: see [`GuestRam::locked_files`].
    pub locked: Vec<LockedFile>,
    /// What the memory holds at first.
    pub contents: InitialContents,
}

/// A guest's RAM: regions in order of guest address, and the view of them that devices use.
#[derive(Debug)]
pub struct GuestRam {
    regions: Vec<Arc<RamRegion>>,
    memory: GuestMemoryHandle,
    warnings: Vec<String>,
    locked: Vec<LockedFile>,
    starts_zero: bool,
    discards: Arc<Discards<dyn Pins>>,
}

impl GuestRam {
    /// Makes guest RAM. Nothing is populated, and the time it takes does not depend on the size.
    ///
    /// # Errors
    /// What is wrong with the configuration, or what the host lacks, by zone.
    pub fn new(config: &RamConfig, layout: RamLayout) -> Result<Self, RamError> {
        Self::with_files(config, layout, &[])
    }

    /// As [`new`](Self::new); zones that are named in `files` take that memfd or file instead of
    /// making their own: memory that another VMM or the pool hands over.
    ///
    /// # Errors
    /// As [`new`](Self::new); a file that is too short or not open for writing.
    pub fn with_files(
        config: &RamConfig,
        layout: RamLayout,
        files: &[(String, Arc<File>)],
    ) -> Result<Self, RamError> {
        let provided: Vec<_> =
            files.iter().map(|(zone, file)| ProvidedFile::file(zone, Arc::clone(file))).collect();
        Self::with_provided(config, layout, &provided)
    }

    /// As [`with_files`](Self::with_files), where some of the memory may come from a pool.
    ///
    /// # Errors
    /// As [`with_files`](Self::with_files).
    pub fn with_provided(
        config: &RamConfig,
        layout: RamLayout,
        provided: &[ProvidedFile],
    ) -> Result<Self, RamError> {
        let sources = RamSources { provided: provided.to_vec(), ..RamSources::default() };
        Self::with_sources(config, layout, &sources)
    }

    /// Makes guest RAM of what `sources` has for it. Where contents are to arrive, files are emptied, which
    /// takes time that grows with what they hold; nothing else does.
    ///
    /// # Errors
    /// As [`with_files`](Self::with_files); a file that another process uses, or that cannot be emptied.
    pub fn with_sources(
        config: &RamConfig,
        layout: RamLayout,
        sources: &RamSources,
    ) -> Result<Self, RamError> {
        Self::on_host(config, layout, sources, &Host::real())
    }

    fn on_host(
        config: &RamConfig,
        layout: RamLayout,
        sources: &RamSources,
        host: &Host,
    ) -> Result<Self, RamError> {
        let files = &sources.provided;
        config.validate()?;
        let known = |id: &String| config.zones.iter().any(|zone| zone.id == *id);
        if let Some(provided) = files.iter().find(|provided| !known(&provided.zone)) {
            return Err(RamError::UnknownZone { zone: provided.zone.clone() });
        }
        // Once before anything is created, so that a guest that is too large leaves no file.
        layout.place(&extents(&config.zones, |_| crate::PAGE_BYTES))?;
        check_nodes(&config.zones, host)?;
        // What is handed over exists already and is counted where it was made.
        let is_provided = |id: &str| files.iter().any(|provided| provided.zone == id);
        let made: Vec<_> =
            config.zones.iter().filter(|zone| !is_provided(&zone.id)).cloned().collect();
        check_reservation(&made, host)?;
        let policy = host.huge_page_policy();
        let mut backings: Vec<(&ZoneSpec, ZoneBacking)> = Vec::new();
        for spec in &config.zones {
            let provided = files.iter().find(|provided| provided.zone == spec.id);
            let backing = if let Some(provided) = provided {
                ZoneBacking::from_provided(spec, Arc::clone(&provided.file), provided.content())?
            } else {
                let locked = sources.locked.iter().find(|locked| locked.zone == spec.id);
                ZoneBacking::create(spec, host, policy, sources.contents, locked)
                    .map_err(|error| same_file(&backings, error))?
            };
            backings.push((spec, backing));
        }
        check_same_files(&backings)?;
        let mut zones = Vec::new();
        for (spec, mut backing) in backings {
            let provided = files.iter().find(|provided| provided.zone == spec.id);
            if provided.is_none() && sources.contents.is_to_arrive() {
                // Every file is known to be this VM's, and nothing of it is mapped yet.
                backing.empty(spec)?;
            }
            let shared = backing.kind == ZoneKind::Shared && !backing.hugetlb;
            let collapse = shared && spec.thp && !policy.shared;
            let lease = provided.and_then(|provided| provided.lease.clone());
            zones.push(Arc::new(Zone::new(spec.clone(), backing, collapse, lease)));
        }
        let made: Vec<_> =
            zones.iter().filter(|zone| !is_provided(&zone.spec.id)).cloned().collect();
        check_hugetlb(&made, host)?;
        let page_bytes =
            |index: usize| zones.get(index).map_or(crate::PAGE_BYTES, |z| z.backing.page_bytes);
        let placements = layout.place(&extents(&config.zones, page_bytes))?;
        // Opened here, once: a sandbox may close `/proc` later.
        let pagemap = File::open("/proc/self/pagemap").ok().map(Arc::new);
        let mut regions = Vec::new();
        for placement in placements {
            let Some(zone) = zones.get(placement.zone) else { continue };
            let region = RamRegion::new(zone, &placement, pagemap.clone()).map_err(|source| {
                let len_bytes = placement.bytes.end - placement.bytes.start;
                RamError::Map { zone: zone.spec.id.clone(), len_bytes, source }
            })?;
            regions.push(Arc::new(region));
        }
        let memory = GuestMemoryHandle::new(assemble(&regions)?);
        let mut warnings = warnings(&regions, policy);
        warnings.extend(merge_pages(&regions));
        let locked = zones.iter().filter_map(|zone| zone.locked_file()).collect();
        let starts_zero = zones.iter().all(|zone| !zone.backing.holds_data);
        Ok(Self { regions, memory, warnings, locked, starts_zero, discards: Arc::default() })
    }

    /// Guest memory as devices see it; clones of the handle stay current and keep it mapped.
    pub fn guest_memory(&self) -> GuestMemoryHandle {
        self.memory.clone()
    }

    /// The regions, by rising guest address.
    pub fn regions(&self) -> &[Arc<RamRegion>] {
        &self.regions
    }

    pub(crate) fn discards(&self) -> &Arc<Discards<dyn Pins>> {
        &self.discards
    }

    /// All RAM that the guest may use now, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.usable_bytes()).sum()
    }

    /// Whether all of it was zero when it was made. False where a file held data, of which a boot must not
    /// believe that it is gone.
    pub fn starts_zero(&self) -> bool {
        self.starts_zero
    }

    /// The locked files of its zones. As long as they are kept no other VM gets them; the next machine of
    /// the same VM takes them over with [`RamSources::locked`].
    pub fn locked_files(&self) -> Vec<LockedFile> {
        self.locked.clone()
    }

    /// What the user asked for and does not quite get, a sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The region that holds the guest physical address `gpa`, and the offset in it.
    pub fn region_at(&self, gpa: u64) -> Option<(&Arc<RamRegion>, u64)> {
        let after = self.regions.partition_point(|region| region.gpa() <= gpa);
        let region = self.regions.get(after.checked_sub(1)?)?;
        let offset = gpa - region.gpa();
        (offset < region.len_bytes()).then_some((region, offset))
    }

    /// Switches logging of device writes on (with an empty log) or off, for all regions.
    pub fn track_device_writes(&self, on: bool) {
        self.regions.iter().for_each(|region| region.device_dirty().set_tracking(on));
    }

    /// Takes and clears the device dirty bits of `len_bytes` at `gpa`, which must lie in one
    /// region: bit i of word w is the page at `gpa + 4096 * (64 * w + i)`. Words are taken one at
    /// a time; take before copying.
    ///
    /// # Errors
    /// There is no such RAM, or the range is not whole pages.
    pub fn take_device_dirty(&self, gpa: u64, len_bytes: u64) -> Result<Vec<u64>, AccessError> {
        let missing = || AccessError::NoSuchGpa { gpa, len_bytes };
        let (region, offset) = self.region_at(gpa).ok_or_else(missing)?;
        let end = offset.checked_add(len_bytes).ok_or_else(missing)?;
        let whole =
            offset.is_multiple_of(crate::PAGE_BYTES) && end.is_multiple_of(crate::PAGE_BYTES);
        if end > region.len_bytes() || !whole {
            return Err(missing());
        }
        let pages = RamRegion::pages_of(&(offset..end));
        let mut words = vec![0; to_usize((pages.end - pages.start).div_ceil(64))];
        region.device_dirty().take(pages, &mut words);
        Ok(words)
    }

    /// Begins to populate the zones that ask for `prefault` and are not populated already;
    /// finished at once if there are none.
    /// [`Prefault::start`] populates any regions.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn prefault(&self, options: &PrefaultOptions) -> Result<Prefault, PrefaultError> {
        let asked = |region: &&Arc<RamRegion>| region.spec().prefault && !region.is_prezeroed();
        let regions: Vec<_> = self.regions.iter().filter(asked).cloned().collect();
        Prefault::start(&regions, options)
    }
}

fn extents(zones: &[ZoneSpec], page_bytes: impl Fn(usize) -> u64) -> Vec<ZoneExtent<'_>> {
    let mut extents = Vec::new();
    for (index, zone) in zones.iter().enumerate() {
        let (size_bytes, page_bytes) = (zone.size_bytes, page_bytes(index));
        let comes_later = zone.block_bytes.is_some();
        extents.push(ZoneExtent { id: &zone.id, size_bytes, page_bytes, comes_later });
    }
    extents
}

fn check_nodes(zones: &[ZoneSpec], host: &Host) -> Result<(), RamError> {
    for zone in zones {
        if let Some(node) = zone.host_numa_node.filter(|node| !host.has_node(*node)) {
            return Err(RamError::NoSuchNode { zone: zone.id.clone(), node });
        }
    }
    Ok(())
}

/// The kernel's own accounting does not look at shared memory at all, and by default lets through
/// anything that is not obviously mad, so this sum is ours.
fn check_reservation(zones: &[ZoneSpec], host: &Host) -> Result<(), RamError> {
    let counts = |zone: &&ZoneSpec| {
        let elsewhere = matches!(zone.backing, Backing::Hugetlb { .. } | Backing::File(_));
        zone.reserve && !elsewhere && zone.block_bytes.is_none()
    };
    let sizes = zones.iter().filter(counts).map(|zone| zone.size_bytes);
    let needed_bytes = sizes.fold(0, u64::saturating_add);
    let Some(totals) = host.memory_totals().filter(|_| needed_bytes > 0) else { return Ok(()) };
    let available_bytes = totals.commit_left.unwrap_or(totals.total);
    if needed_bytes > available_bytes {
        return Err(RamError::HostTooSmall { needed_bytes, available_bytes });
    }
    Ok(())
}

/// A file that another zone of the same VM has locked is no matter of another process.
fn same_file(backings: &[(&ZoneSpec, ZoneBacking)], error: BackingError) -> RamError {
    let BackingError::InUse { zone: second, identity, .. } = &error else { return error.into() };
    let is_it = |backing: &ZoneBacking| {
        let data = backing.file.as_ref().and_then(|file| file.metadata().ok());
        data.is_some_and(|data| (data.dev(), data.ino()) == *identity)
    };
    match backings.iter().find(|(_, backing)| is_it(backing)) {
        Some((first, _)) => RamError::SameFile { first: first.id.clone(), second: second.clone() },
        None => error.into(),
    }
}

fn check_same_files(backings: &[(&ZoneSpec, ZoneBacking)]) -> Result<(), RamError> {
    let mut seen = BTreeMap::new();
    for (spec, backing) in backings {
        let Some(metadata) = backing.file.as_ref().and_then(|file| file.metadata().ok()) else {
            continue;
        };
        let second = spec.id.clone();
        // Two private mappings of one template do not meet.
        if backing.kind == ZoneKind::PrivateFile {
            continue;
        }
        if let Some(first) = seen.insert((metadata.dev(), metadata.ino()), second.clone()) {
            return Err(RamError::SameFile { first, second });
        }
    }
    Ok(())
}

/// Asks the pools before the kernel does, which would only say "out of memory", and for a bound
/// zone would say it to the guest, by SIGBUS.
fn check_hugetlb(zones: &[Arc<Zone>], host: &Host) -> Result<(), RamError> {
    /// Pages, and the zones that need them.
    type Need<'a> = (u64, Vec<&'a str>);
    let mut needs: BTreeMap<(u64, Option<u32>), Need<'_>> = BTreeMap::new();
    // A file that holds data has pages already, and how many more it takes is unknown; and what comes
    // later gets its pages when it comes.
    let now = |zone: &&Arc<Zone>| {
        zone.backing.hugetlb && !zone.backing.holds_data && zone.spec.block_bytes.is_none()
    };
    for zone in zones.iter().filter(now) {
        let page_bytes = zone.backing.page_bytes;
        let nodes = [None, zone.spec.host_numa_node];
        let distinct = if nodes[1].is_some() { 2 } else { 1 };
        for node in nodes.into_iter().take(distinct) {
            let (pages, ids) = needs.entry((page_bytes, node)).or_default();
            *pages += zone.spec.size_bytes / page_bytes;
            ids.push(&zone.spec.id);
        }
    }
    for ((page_bytes, node), (needed, ids)) in needs {
        // No pool: a file on hugetlbfs where `/sys` says nothing. The mapping will tell.
        let Some(pool) = host.hugetlb_pool(page_bytes) else { continue };
        let available = match node {
            None => pool.available,
            Some(_) if pool.can_grow => continue,
            Some(node) => match host.hugetlb_free_on_node(page_bytes, node) {
                Some(free) => free,
                None => continue,
            },
        };
        if needed > available {
            return Err(RamError::HugetlbPool {
                zones: format!("'{}'", ids.join("', '")),
                needed,
                available,
                page_bytes,
                place: node.map(|node| format!(" on NUMA node {node}")).unwrap_or_default(),
                pool: Host::hugetlb_path(page_bytes).display().to_string(),
            });
        }
    }
    Ok(())
}

/// The view for devices, over the very same mappings.
fn assemble(regions: &[Arc<RamRegion>]) -> Result<GuestMemory, RamError> {
    let mut views = Vec::new();
    for region in regions {
        let len = to_usize(region.len_bytes());
        let mut builder = MmapRegionBuilder::new_with_bitmap(len, region.device_dirty().clone())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(region.map_flags())
            .with_hugetlbfs(region.is_hugetlb());
        if let Some(file) = region.file() {
            let offset = FileOffset::from_arc(Arc::clone(file), region.file_offset());
            builder = builder.with_file_offset(offset);
        }
        // SAFETY: the mapping has exactly this length, and the dirty log inside the built region
        // holds it, so it stays mapped for as long as the built region lives.
        let builder = unsafe { builder.with_raw_mmap_pointer(region.as_ptr()) };
        let mapped = builder.build().map_err(|error| RamError::Assemble(error.into()))?;
        let view = GuestRegionMmap::new(mapped, GuestAddress(region.gpa()))
            .ok_or_else(|| RamError::Assemble("a region wraps around".into()))?;
        views.push(view);
    }
    GuestMemory::from_regions(views).map_err(|error| RamError::Assemble(error.into()))
}

/// KSM may be missing from the host's kernel: a pity, but no reason to fail.
fn merge_pages(regions: &[Arc<RamRegion>]) -> Vec<String> {
    let merged = |region: &&Arc<RamRegion>| {
        region.spec().mergeable && region.kind() == ZoneKind::PrivateAnonymous
    };
    let sentence = |region: &Arc<RamRegion>| {
        let error = region.make_mergeable().err()?;
        Some(format!("memory zone '{}': pages cannot be merged ({error})", region.zone_id()))
    };
    regions.iter().filter(merged).filter_map(sentence).collect()
}

fn warnings(regions: &[Arc<RamRegion>], policy: HugePagePolicy) -> Vec<String> {
    let mut warnings = Vec::new();
    let mut last_zone = None;
    for region in regions {
        let spec = region.spec();
        let id = &spec.id;
        let small_pages = region.kind() == ZoneKind::Shared && !region.is_hugetlb();
        // The maker of that memory has chosen its pages.
        let small_pages = small_pages && !region.is_prezeroed();
        if region.gpa() % THP_BYTES != region.file_offset() % THP_BYTES && small_pages && spec.thp {
            warnings.push(format!(
                "memory zone '{id}' begins at guest address {:#x}, in the middle of a huge page: \
                 give the zones before it sizes that are multiples of 2 MiB",
                region.gpa()
            ));
        }
        // The rest concerns zones, and the regions of a zone follow each other.
        let first_region = last_zone.replace(id) != Some(id);
        if first_region && spec.mergeable && region.kind() != ZoneKind::PrivateAnonymous {
            warnings.push(format!(
                "memory zone '{id}': mergeable=on has no effect, because it is not private \
                 anonymous memory"
            ));
        }
        if first_region && small_pages && spec.thp && !policy.shared {
            let meanwhile = if spec.prefault {
                "only what prefault populates may get them"
            } else {
                "the guest runs on 4 KiB pages"
            };
            warnings.push(format!(
                "memory zone '{id}' is shared memory, and this host gives that no transparent huge \
                 pages: {meanwhile}. Write 'advise' to \
                 /sys/kernel/mm/transparent_hugepage/shmem_enabled, or use hugepages=on, which is \
                 sure to have them"
            ));
        }
    }
    warnings
}

#[cfg(all(test, not(loom)))]
#[path = "ram_tests.rs"]
mod tests;
