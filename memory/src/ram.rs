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
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap, mmap::MmapRegionBuilder};

use crate::backing::{InitialContents, ZoneBacking};
use crate::backing_error::BackingError;
use crate::config::{Backing, ConfigError, RamConfig, ZoneSpec};
use crate::discards::Discards;
use crate::host::{Host, HugePagePolicy};
use crate::image::{ImageError, RamImage};
use crate::layout::{LayoutError, RamLayout, extents};
use crate::pins::Pins;
use crate::populate::THP_BYTES;
use crate::prefault::{Prefault, PrefaultError, PrefaultOptions};
use crate::provided::ProvidedFile;
use crate::region::{AccessError, RamRegion, Zone};
use crate::zone_file::LockedFile;
use crate::zone_kind::ZoneKind;
use crate::{GuestMemory, GuestMemoryHandle, to_usize};

/// Why guest RAM could not be created. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The configuration is invalid on any host.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It does not fit the guest's address space.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The backing of a zone could not be created.
    #[error(transparent)]
    Backing(#[from] BackingError),
    /// It cannot be a mapping of a file.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// With `reserve=on`, more than the host has.
    #[error(
        "the memory zones with reserve=on need {needed_bytes} bytes, and the host has \
         {available_bytes} of RAM and swap to promise: make the guest smaller or use reserve=off"
    )]
    HostTooSmall {
        /// Sum of the zones.
        needed_bytes: u64,
        /// What the host can commit.
        available_bytes: u64,
    },
    /// The hugetlb pool is too small.
    #[error(
        "the memory zones {zones} need {needed} huge pages of {} KiB, and {available} are \
         available{place}: write a larger number to {pool}",
        page_bytes >> 10
    )]
    HugetlbPool {
        /// IDs of the zones.
        zones: String,
        /// Pages needed.
        needed: u64,
        /// Pages that are free and not reserved.
        available: u64,
        /// Size of the pages.
        page_bytes: u64,
        /// The node, for memory that is bound to one.
        place: String,
        /// File that sets the pool's size.
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
    /// Two zones with the same file.
    #[error("memory zones '{first}' and '{second}' use the same file: each needs its own")]
    SameFile {
        /// One zone.
        first: String,
        /// The other.
        second: String,
    },
    /// A file for a zone that does not exist.
    #[error("a file was handed over for memory zone '{zone}', which does not exist")]
    UnknownZone {
        /// The zone's ID.
        zone: String,
    },
    /// The kernel refused the mapping.
    #[error(
        "memory zone '{zone}': could not map {len_bytes} bytes (out of address space, over the \
         host's overcommit limit with reserve=on, or not allowed on its NUMA node)"
    )]
    Map {
        /// The zone.
        zone: String,
        /// Length of the mapping.
        len_bytes: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// An internal error, reported by the library that manages the regions.
    #[error("the memory regions could not be put together")]
    Assemble(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Sources of guest RAM, in addition to its configuration.
#[derive(Debug, Clone, Default)]
pub struct RamSources {
    /// Files that back zones instead of new ones.
    pub provided: Vec<ProvidedFile>,
    /// Locked files of an earlier machine of the same VM: see [`GuestRam::locked_files`].
    pub locked: Vec<LockedFile>,
    /// The initial contents.
    pub contents: InitialContents,
    /// A file that all RAM begins as a private mapping of; nothing is provided then.
    pub image: Option<RamImage>,
}

/// The RAM of a guest: regions by guest address, and the view of them that devices use.
#[derive(Debug)]
pub struct GuestRam {
    regions: Vec<Arc<RamRegion>>,
    memory: GuestMemoryHandle,
    warnings: Vec<String>,
    locked: Vec<LockedFile>,
    /// Cleared when a guest has run.
    starts_zero: AtomicBool,
    /// Set when another process that maps the memory is out of reach.
    pub(crate) foreign_writers: AtomicUsize,
    config: RamConfig,
    layout: RamLayout,
    discards: Arc<Discards<dyn Pins>>,
}

impl GuestRam {
    /// Creates guest RAM. Nothing is populated, and the time does not depend on the size.
    ///
    /// # Errors
    /// What is wrong with the configuration, or what the host lacks, with the zone.
    pub fn new(config: &RamConfig, layout: RamLayout) -> Result<Self, RamError> {
        Self::with_files(config, layout, &[])
    }

    /// Like [`new`](Self::new); zones that are named in `files` use that memfd or file instead of a new
    /// one, for memory that another VMM or the pool hands over.
    ///
    /// # Errors
    /// As [`new`](Self::new), and when a file is too short or not open for writing.
    pub fn with_files(
        config: &RamConfig,
        layout: RamLayout,
        files: &[(String, Arc<File>)],
    ) -> Result<Self, RamError> {
        let provided: Vec<_> =
            files.iter().map(|(zone, file)| ProvidedFile::file(zone, Arc::clone(file))).collect();
        Self::with_provided(config, layout, &provided)
    }

    /// Like [`with_files`](Self::with_files); some of the memory may come from the pool.
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

    /// Creates guest RAM from `sources`. Where contents are to arrive, files are emptied, which takes time
    /// that grows with their data; nothing else does.
    ///
    /// # Errors
    /// As [`with_files`](Self::with_files), and when another process uses a file, or it cannot be emptied.
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
        let known = |id: &str| config.zones.iter().any(|zone| zone.id == id);
        if let Some(provided) = files.iter().find(|provided| !known(provided.zone())) {
            return Err(RamError::UnknownZone { zone: provided.zone().to_owned() });
        }
        // Checked before anything is created, so that a guest that is too large leaves no file.
        layout.place(&extents(&config.zones, |_| crate::PAGE_BYTES))?;
        check_nodes(&config.zones, host)?;
        // Files that are handed over exist already, and were counted where they were created.
        let is_provided = |id: &str| files.iter().any(|provided| provided.zone() == id);
        let made: Vec<_> =
            config.zones.iter().filter(|zone| !is_provided(&zone.id)).cloned().collect();
        check_reservation(&made, host)?;
        let policy = host.huge_page_policy();
        let mut backings: Vec<(&ZoneSpec, ZoneBacking)> = Vec::new();
        for spec in &config.zones {
            let provided = files.iter().find(|provided| provided.zone() == spec.id);
            let backing = if let Some(image) = &sources.image {
                image.backing(spec)?
            } else if let Some(provided) = provided {
                ZoneBacking::from_provided(spec, provided.shared_file(), provided.content())?
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
            let provided = files.iter().find(|provided| provided.zone() == spec.id);
            if provided.is_none() && sources.image.is_none() && sources.contents.is_to_arrive() {
                // Every file is known to be this VM's by now, and nothing of it is mapped yet.
                backing.empty(spec)?;
            }
            let shared = backing.kind == ZoneKind::Shared && !backing.hugetlb;
            // The pages of prezeroed memory are as large as the zone wants them, and mapped one by one where contents
            // arrive behind the guest.
            let collapse = shared && spec.thp && (!policy.shared || backing.prezeroed);
            let lease = provided.and_then(ProvidedFile::lease);
            zones.push(Arc::new(Zone::new(spec.clone(), backing, collapse, host, lease)));
        }
        // The pages that a file with data still needs are unknown.
        let of_huge = |zone: &&Arc<Zone>| zone.backing.hugetlb && !zone.backing.holds_data;
        let made = zones.iter().filter(|zone| !is_provided(&zone.spec.id)).filter(of_huge);
        let made: Vec<_> = made.map(|zone| (&zone.spec, zone.backing.page_bytes)).collect();
        check_hugetlb(&made, host)?;
        let page_bytes =
            |index: usize| zones.get(index).map_or(crate::PAGE_BYTES, |z| z.backing.page_bytes);
        let placements = layout.place(&extents(&config.zones, page_bytes))?;
        // Opened once here, because a sandbox may close `/proc` later.
        let pagemap = File::open("/proc/self/pagemap").ok().map(Arc::new);
        let mut regions = Vec::new();
        for placement in placements {
            let Some(zone) = zones.get(placement.zone) else { continue };
            let image = sources.image.as_ref();
            let file_offset = match image.map(|image| image.offset_of(&placement)).transpose()? {
                None if zone.backing.file.is_none() => 0,
                None => placement.bytes.start,
                Some(offset) => offset,
            };
            let made = RamRegion::new(zone, &placement, file_offset, pagemap.clone());
            let region = made.map_err(|source| {
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
        Ok(Self {
            regions,
            memory,
            warnings,
            locked,
            starts_zero: AtomicBool::new(starts_zero),
            foreign_writers: AtomicUsize::new(0),
            config: config.clone(),
            layout,
            discards: Arc::default(),
        })
    }

    /// Guest memory as devices see it; clones of the handle stay current and keep it mapped.
    pub fn guest_memory(&self) -> GuestMemoryHandle {
        self.memory.clone()
    }

    /// The regions, by ascending guest address.
    pub fn regions(&self) -> &[Arc<RamRegion>] {
        &self.regions
    }

    pub(crate) fn discards(&self) -> &Arc<Discards<dyn Pins>> {
        &self.discards
    }

    /// Bytes of RAM that the guest may use now.
    pub fn total_bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.usable_bytes()).sum()
    }

    /// True when all of it is zero before the guest starts. False where a file held data, and after a
    /// [`restart`](Self::restart): a boot must not take either for cleared.
    pub fn starts_zero(&self) -> bool {
        self.starts_zero.load(Ordering::Relaxed)
    }

    pub(crate) fn note_used(&self) {
        self.starts_zero.store(false, Ordering::Relaxed);
    }

    /// True when it is what this configuration asks for.
    pub(crate) fn is_of(&self, config: &RamConfig, layout: RamLayout) -> bool {
        (&self.config, self.layout) == (config, layout)
    }

    /// The locked files of the zones. While they are kept no other VM can use them; the next machine of the
    /// same VM takes them over with [`RamSources::locked`].
    pub fn locked_files(&self) -> Vec<LockedFile> {
        self.locked.clone()
    }

    /// Requests of the user that are met only in part, a sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The region that contains the guest physical address `gpa`, and the offset in it.
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

    /// Takes and clears the device dirty bits of `len_bytes` at `gpa`, which must lie in one region: bit i
    /// of word w is the page at `gpa + 4096 * (64 * w + i)`. Words are taken one at a time; take them
    /// before copying the pages.
    ///
    /// # Errors
    /// When there is no such RAM, or the range is not whole pages.
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

    /// Starts to populate the zones with `prefault` that are not populated already; has finished at once if
    /// there are none. [`Prefault::start`] populates any regions.
    ///
    /// # Errors
    /// When no thread could be started.
    pub fn prefault(&self, options: &PrefaultOptions) -> Result<Prefault, PrefaultError> {
        let asked = |region: &&Arc<RamRegion>| region.spec().prefault && !region.is_prezeroed();
        let regions: Vec<_> = self.regions.iter().filter(asked).cloned().collect();
        Prefault::start(&regions, options)
    }
}

pub(crate) fn check_nodes(zones: &[ZoneSpec], host: &Host) -> Result<(), RamError> {
    for zone in zones {
        if let Some(node) = zone.host_numa_node.filter(|node| !host.has_node(*node)) {
            return Err(RamError::NoSuchNode { zone: zone.id.clone(), node });
        }
    }
    Ok(())
}

/// Checks that the host can commit what `reserve=on` asks for. The kernel's own accounting ignores shared
/// memory, and by default accepts anything that is not obviously too large.
pub(crate) fn check_reservation(zones: &[ZoneSpec], host: &Host) -> Result<(), RamError> {
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

/// Reports a file that another zone of the same VM has locked as such, not as in use by another process.
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
        // Two private mappings of one file do not conflict.
        if backing.kind == ZoneKind::PrivateFile {
            continue;
        }
        if let Some(first) = seen.insert((metadata.dev(), metadata.ino()), second.clone()) {
            return Err(RamError::SameFile { first, second });
        }
    }
    Ok(())
}

/// Checks the hugetlb pools before the kernel does, which would only report "out of memory", and for a bound zone by a
/// SIGBUS in the guest. Each zone comes with the size of its pages.
pub(crate) fn check_hugetlb(zones: &[(&ZoneSpec, u64)], host: &Host) -> Result<(), RamError> {
    /// Pages, and the zones that need them.
    type Need<'a> = (u64, Vec<&'a str>);
    let mut needs: BTreeMap<(u64, Option<u32>), Need<'_>> = BTreeMap::new();
    // Memory that is plugged later gets its pages then.
    for (spec, page_bytes) in zones.iter().filter(|(spec, _)| spec.block_bytes.is_none()) {
        let nodes = [None, spec.host_numa_node];
        let distinct = if nodes[1].is_some() { 2 } else { 1 };
        for node in nodes.into_iter().take(distinct) {
            let (pages, ids) = needs.entry((*page_bytes, node)).or_default();
            *pages += spec.size_bytes / page_bytes;
            ids.push(&spec.id);
        }
    }
    for ((page_bytes, node), (needed, ids)) in needs {
        // No pool: a file on hugetlbfs where `/sys` shows none. The mapping will fail if there is no
        // memory.
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

/// The view for devices, over the same mappings.
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

/// Enables KSM. A host kernel without KSM leads to a warning, not to a failure.
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
        // The creator of prezeroed memory has chosen its pages.
        let small_pages = small_pages && !region.is_prezeroed();
        if region.gpa() % THP_BYTES != region.file_offset() % THP_BYTES && small_pages && spec.thp {
            warnings.push(format!(
                "memory zone '{id}' begins at guest address {:#x}, in the middle of a huge page: \
                 give the zones before it sizes that are multiples of 2 MiB",
                region.gpa()
            ));
        }
        // The other warnings concern zones; the regions of a zone are adjacent.
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
