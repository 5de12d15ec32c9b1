// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest memory: huge pages, room, transparent huge pages, the pool.
//!
//! Owns which memory counts for which limit. It must never have a limit of its own: the limits and their rules are those of
//! the crate `memory`.

use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use ::memory::available::{InsufficientMemory, MemoryDemand};
use ::memory::{
    Backing, BackingError, HostMemory, HugePagePool, RamConfig, RamError, RamLayout, ZoneKind,
    ZoneSpec,
};
use rustix::fs::Access;

use super::definitions as of;
use super::finding::{Finding, Lack};
use crate::config::{Prefault, VmConfig};
use crate::machine::ahead;
use crate::machine::prefault_modes;

/// A zone of guest memory on this host.
#[derive(Clone, Debug)]
pub struct ZoneOnHost {
    pub id: String,
    pub size_bytes: u64,
    pub kind: ZoneKind,
    pub page_bytes: u64,
    /// It asks for transparent huge pages that the host does not give.
    pub lacks_huge_pages: bool,
}

/// Which limits are too low for which memory.
#[derive(Clone, Debug)]
pub struct Room {
    /// Memory that is populated before the guest runs.
    pub at_boot: Result<(), InsufficientMemory>,
    /// All memory.
    pub for_all: Result<(), InsufficientMemory>,
}

/// What is known of memory.
#[derive(Debug)]
pub struct MemoryFacts {
    /// The zones, or why there are none.
    pub zones: Result<RamConfig, String>,
    /// The same on this host.
    pub kinds: Vec<ZoneOnHost>,
    /// Why they cannot be made.
    pub checked: Result<(), RamError>,
    pub room: Room,
    pub huge_pages: Vec<HugePagePool>,
    /// RAM and swap, and available memory, in bytes.
    pub totals: Option<(u64, u64)>,
    /// Pools of prezeroed memory, and why they cannot be used.
    pub pools: Vec<(PathBuf, Option<&'static Lack>)>,
}

impl MemoryFacts {
    pub fn read(host: &HostMemory, config: &VmConfig, layout: RamLayout) -> Self {
        let zones = ahead::zones(&config.memory).map_err(|error| error_text::chain(&error));
        let specs = zones.as_ref().map(|zones| zones.zones.as_slice()).unwrap_or_default();
        let modes: BTreeMap<_, _> = prefault_modes(&config.memory).into_iter().collect();
        let of_pool = of_pools(config);
        let is_provided = |id: &str| of_pool.get(id).is_some_and(|pool| at_pool(pool).is_none());
        // What a pool has is populated already, and hugetlb pages have been set aside.
        let takes_room = |zone: &&ZoneSpec| {
            let is_apart = matches!(zone.backing, Backing::Hugetlb { .. } | Backing::File(_));
            !is_apart && !is_provided(&zone.id) && zone.block_bytes.is_none()
        };
        let demand =
            |zone: &ZoneSpec| MemoryDemand { bytes: zone.size_bytes, node: zone.host_numa_node };
        let all: Vec<_> = specs.iter().filter(takes_room).map(demand).collect();
        let is_of_boot = |zone: &&ZoneSpec| modes.get(&zone.id) == Some(&Prefault::Boot);
        let boot: Vec<_> = specs.iter().filter(takes_room).filter(is_of_boot).map(demand).collect();
        let room = Room { at_boot: host.check_room(&boot), for_all: host.check_room(&all) };
        let kind = |zone: &ZoneSpec| ZoneOnHost {
            id: zone.id.clone(),
            size_bytes: zone.size_bytes,
            kind: host.kind(zone),
            page_bytes: host.page_bytes(zone),
            lacks_huge_pages: host.lacks_huge_pages(zone) && !of_pool.contains_key(&zone.id),
        };
        let mut pools: Vec<_> =
            of_pool.values().map(|path| (path.clone(), at_pool(path))).collect();
        pools.dedup_by(|one, other| one.0 == other.0);
        Self {
            kinds: specs.iter().map(kind).collect(),
            checked: zones.as_ref().map_or(Ok(()), |zones| host.check(zones, layout, is_provided)),
            room,
            huge_pages: host.huge_pages(),
            totals: host.totals(),
            pools,
            zones,
        }
    }

    /// Bytes of guest memory at boot, and those of them that are not hugetlb pages.
    pub fn bytes(&self) -> (u64, u64) {
        let zones = self.zones.as_ref().map(|zones| zones.zones.as_slice()).unwrap_or_default();
        let now = zones.iter().filter(|zone| zone.block_bytes.is_none());
        now.fold((0, 0), |(all, counted): (u64, u64), zone| {
            let is_huge = matches!(zone.backing, Backing::Hugetlb { .. });
            let bytes = zone.size_bytes;
            (all.saturating_add(bytes), counted.saturating_add(if is_huge { 0 } else { bytes }))
        })
    }
}

/// The pools of zones that have one.
fn of_pools(config: &VmConfig) -> BTreeMap<String, PathBuf> {
    let memory = &config.memory;
    let zones = memory.zones.iter().flatten();
    let of_zones = zones.filter_map(|zone| Some((zone.id.clone(), zone.prezeroed.clone()?)));
    let ids = memory.zone_ids();
    let whole = memory.prezeroed.iter().flat_map(|pool| ids.iter().map(move |id| (*id, pool)));
    let whole = whole.map(|(id, pool)| (id.to_owned(), pool.clone()));
    of_zones.chain(whole).collect()
}

fn at_pool(socket: &Path) -> Option<&'static Lack> {
    if !socket.metadata().is_ok_and(|there| there.file_type().is_socket()) {
        return Some(&of::NO_POOL);
    }
    ahead::refusal(socket, Access::READ_OK | Access::WRITE_OK).map(|_| &of::POOL_DENIED)
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

/// What is lacking for guest memory.
pub fn findings(facts: &MemoryFacts, config: &VmConfig) -> Vec<Finding> {
    let mut findings = vec![zones(facts)];
    findings.extend(huge_pages(&facts.huge_pages, &facts.checked));
    let has_devices = config.devices.as_ref().is_some_and(|devices| !devices.is_empty());
    findings.push(room(facts, has_devices));
    let lacking: Vec<_> = facts.kinds.iter().filter(|zone| zone.lacks_huge_pages).collect();
    for zone in &lacking {
        let (lack, what) = match zone.kind {
            ZoneKind::Shared => (&of::THP_SHARED, "shared"),
            ZoneKind::PrivateAnonymous | ZoneKind::PrivateFile => (&of::THP_PRIVATE, "private"),
        };
        let found = format!("the host gives {what} memory no transparent huge pages");
        findings.push(Finding::lack(lack, found).about(&zone.id));
    }
    if lacking.is_empty() {
        findings.push(Finding::ok(&of::THP, "guest memory can have huge pages, or asks for none"));
    }
    for (socket, lack) in &facts.pools {
        let path = socket.display().to_string();
        let finding = match lack {
            None => Finding::ok(&of::POOL, "the socket is there"),
            Some(lack) => Finding::lack(lack, "its socket cannot be used"),
        };
        findings.push(finding.about(&path));
    }
    findings
}

/// Whether the zones can be made; hugetlb pages have a finding of their own.
fn zones(facts: &MemoryFacts) -> Finding {
    let lack = |lack, found| Finding::lack(lack, found);
    if let Err(why) = &facts.zones {
        return lack(&of::ZONE_OTHER, why.clone());
    }
    let Err(error) = &facts.checked else {
        let (bytes, _) = facts.bytes();
        return Finding::ok(&of::MEMORY_ZONES, format!("{} MiB can be made", mib(bytes)));
    };
    let found = error_text::chain(error);
    match error {
        RamError::HugetlbPool { .. } | RamError::Backing(BackingError::NoSuchHugePages { .. }) => {
            Finding::ok(&of::MEMORY_ZONES, "but for huge pages they can be made")
        }
        RamError::NoSuchNode { zone, .. } => lack(&of::ZONE_NODE, found).about(zone),
        RamError::HostTooSmall { .. } => lack(&of::ZONE_RESERVE, found),
        RamError::Backing(
            BackingError::OpenFile { zone, .. }
            | BackingError::NotAFile { zone, .. }
            | BackingError::InUse { zone, .. },
        ) => lack(&of::ZONE_FILE, found).about(zone),
        _ => lack(&of::ZONE_OTHER, found),
    }
}

fn huge_pages(pools: &[HugePagePool], checked: &Result<(), RamError>) -> Vec<Finding> {
    let mut findings: Vec<_> = pools
        .iter()
        .map(|pool| {
            let HugePagePool { page_bytes, total, available, free_on_nodes } = pool;
            let nodes = free_on_nodes.iter().map(|(node, free)| format!("{free} on node {node}"));
            let nodes = nodes.collect::<Vec<_>>().join(", ");
            let nodes = if nodes.is_empty() { nodes } else { format!(" (free: {nodes})") };
            let found = format!("{available} of {total} are available{nodes}");
            let size = format!("{} MiB", mib(*page_bytes));
            let size =
                if *page_bytes < 1 << 20 { format!("{} KiB", page_bytes >> 10) } else { size };
            Finding::ok(&of::HUGE_PAGES, found).about(&size)
        })
        .collect();
    if pools.is_empty() {
        findings.push(Finding::ok(&of::HUGE_PAGES, "the host has none"));
    }
    match checked {
        Err(RamError::HugetlbPool { needed, available, page_bytes, place, pool, .. }) => {
            let found = checked.as_ref().err().map(|error| error_text::chain(error));
            let found = found.unwrap_or_default();
            let missing = needed.saturating_sub(*available).to_string();
            // " on NUMA node 1"
            let node: Option<u32> = place.rsplit(' ').next().and_then(|node| node.parse().ok());
            let (lack, file) = match node {
                None => (&of::HUGE_PAGES_FEW, pool.clone()),
                Some(node) => {
                    let size = format!("hugepages-{}kB", page_bytes >> 10);
                    let folder = format!("/sys/devices/system/node/node{node}/hugepages/{size}");
                    (&of::HUGE_PAGES_FEW_ON_NODE, format!("{folder}/nr_hugepages"))
                }
            };
            findings.push(Finding::lack(lack, found).with("NUMBER", &missing).with("FILE", &file));
        }
        Err(error @ RamError::Backing(BackingError::NoSuchHugePages { zone, page_bytes })) => {
            let number = (page_bytes >> 10).to_string();
            let finding = Finding::lack(&of::HUGE_PAGES_SIZE, error_text::chain(error));
            findings.push(finding.with("NUMBER", &number).about(zone));
        }
        _ => {}
    }
    findings
}

fn room(facts: &MemoryFacts, has_devices: bool) -> Finding {
    let Room { at_boot, for_all } = &facts.room;
    match (at_boot, for_all) {
        (Err(why), _) => Finding::lack(&of::ROOM_BOOT, why.to_string()),
        (Ok(()), Err(why)) if has_devices => Finding::lack(&of::ROOM_PINNED, why.to_string()),
        (Ok(()), Err(why)) => {
            let InsufficientMemory { needed_bytes, limit, available_bytes, .. } = why;
            let (needed, available) = (mib(*needed_bytes), mib(*available_bytes));
            let found = format!(
                "the guest may use {needed} MiB, and {limit} has {available} MiB available"
            );
            Finding::lack(&of::ROOM_LATER, found)
        }
        (Ok(()), Ok(())) => {
            let found = match facts.totals {
                Some((total, available)) => {
                    let (total, available) = (mib(total), mib(available));
                    format!("{available} MiB are available of {total} MiB of RAM and swap")
                }
                None => "the host does not say what it has".to_owned(),
            };
            Finding::ok(&of::MEMORY_ROOM, found)
        }
    }
}
