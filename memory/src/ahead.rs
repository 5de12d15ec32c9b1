// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a host has for guest memory, asked before any is made.
//!
//! Owns the order in which the rules of [`GuestRam`](crate::GuestRam) are asked without it. Must never have a rule of its
//! own: what is refused here is refused there, by the same function. Nothing on the host changes.

use std::fs;
use std::path::Path;

use crate::available::{self, InsufficientMemory, MemoryDemand};
use crate::backing::{check_huge_pages, huge_page_bytes, prefers_private};
use crate::backing_error::BackingError;
use crate::config::{Backing, RamConfig, ZoneSpec};
use crate::host::{Host, HugePagePolicy};
use crate::layout::{RamLayout, extents};
use crate::ram::{RamError, check_hugetlb, check_nodes, check_reservation};
use crate::zone_file;
use crate::{PAGE_BYTES, ZoneKind};

/// The memory of a host, as its `/proc` and `/sys` tell of it.
#[derive(Debug, Clone)]
pub struct HostMemory(Host);

/// The hugetlb pages of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HugePagePool {
    /// Size of a page.
    pub page_bytes: u64,
    /// All pages.
    pub total: u64,
    /// Those that a new mapping can get now.
    pub available: u64,
    /// Free pages of each NUMA node.
    pub free_on_nodes: Vec<(u32, u64)>,
}

impl HostMemory {
    /// That of this host.
    pub fn real() -> Self {
        Self(Host::real())
    }

    /// That of a host whose `proc` and `sys` are in the folder `root`.
    pub fn at(root: &Path) -> Self {
        Self(Host { sys: root.join("sys"), proc: root.join("proc") })
    }

    /// Whether guest RAM of this configuration could be made. `is_provided` says of the name of a zone whether its
    /// memory is handed over, by a pool for example, and exists already.
    ///
    /// # Errors
    /// As [`GuestRam::new`](crate::GuestRam::new), as far as that is known before.
    pub fn check(
        &self,
        config: &RamConfig,
        layout: RamLayout,
        is_provided: impl Fn(&str) -> bool,
    ) -> Result<(), RamError> {
        config.validate()?;
        let zones = &config.zones;
        layout.place(&extents(zones, |_| PAGE_BYTES))?;
        check_nodes(zones, &self.0)?;
        let made: Vec<_> = zones.iter().filter(|zone| !is_provided(&zone.id)).cloned().collect();
        check_reservation(&made, &self.0)?;
        let mut of_huge = Vec::new();
        for zone in &made {
            self.check_backing(zone)?;
            if let Backing::Hugetlb { page_size } = zone.backing {
                of_huge.push((zone, huge_page_bytes(page_size, &self.0)));
            }
        }
        check_hugetlb(&of_huge, &self.0)?;
        layout.place(&extents(zones, |index| {
            zones.get(index).map_or(PAGE_BYTES, |zone| self.page_bytes(zone))
        }))?;
        Ok(())
    }

    fn check_backing(&self, zone: &ZoneSpec) -> Result<(), BackingError> {
        match &zone.backing {
            Backing::Hugetlb { page_size } => {
                check_huge_pages(zone, huge_page_bytes(*page_size, &self.0), &self.0)
            }
            Backing::File(path) => zone_file::look(zone, path),
            Backing::Auto | Backing::Anonymous | Backing::Memfd => Ok(()),
        }
    }

    /// Size of the host pages that a zone gets for certain.
    pub fn page_bytes(&self, zone: &ZoneSpec) -> u64 {
        match zone.backing {
            Backing::Hugetlb { page_size } => huge_page_bytes(page_size, &self.0),
            _ => PAGE_BYTES,
        }
    }

    /// What kind of memory a zone gets.
    pub fn kind(&self, zone: &ZoneSpec) -> ZoneKind {
        match zone.backing {
            Backing::Anonymous => ZoneKind::PrivateAnonymous,
            Backing::Auto if prefers_private(zone, self.policy()) => ZoneKind::PrivateAnonymous,
            _ => ZoneKind::Shared,
        }
    }

    /// Whether a zone asks for transparent huge pages that the host does not give.
    pub fn lacks_huge_pages(&self, zone: &ZoneSpec) -> bool {
        let is_given = match (&zone.backing, self.kind(zone)) {
            (Backing::Hugetlb { .. } | Backing::File(_), _) => true,
            (_, ZoneKind::PrivateAnonymous) => self.policy().private,
            _ => self.policy().shared,
        };
        zone.thp && !is_given
    }

    fn policy(&self) -> HugePagePolicy {
        self.0.huge_page_policy()
    }

    /// Whether there is that much memory, as populating it asks.
    ///
    /// # Errors
    /// The limit that is too low.
    pub fn check_room(&self, needs: &[MemoryDemand]) -> Result<(), InsufficientMemory> {
        available::check_at(needs, &self.0)
    }

    /// RAM and swap that the host has, and RAM that is available, in bytes; `None` if it does not say.
    pub fn totals(&self) -> Option<(u64, u64)> {
        let text = Host::read(&self.0.proc.join("meminfo"))?;
        let bytes = |name| crate::host::meminfo_bytes(&text, name);
        Some((self.0.memory_totals()?.total, bytes("MemAvailable")?))
    }

    /// The file that sets the number of hugetlb pages, and how many there are.
    pub fn hugetlb_setting(&self, page_bytes: u64) -> (String, u64) {
        let path = Host::hugetlb_path(page_bytes);
        let own = path.strip_prefix("/sys").map(|inside| self.0.sys.join(inside));
        let pages = own.ok().and_then(|own| Host::number(&own)).unwrap_or(0);
        (path.display().to_string(), pages)
    }

    /// The hugetlb pages of the host, by their size.
    pub fn huge_pages(&self) -> Vec<HugePagePool> {
        let sizes = entries(&self.0.sys.join("kernel/mm/hugepages"));
        let sizes = sizes.iter().filter_map(|name| {
            let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()?;
            kib.checked_mul(1024)
        });
        let mut pools: Vec<_> = sizes.filter_map(|page_bytes| self.pool(page_bytes)).collect();
        pools.sort_unstable_by_key(|pool| pool.page_bytes);
        pools
    }

    fn pool(&self, page_bytes: u64) -> Option<HugePagePool> {
        let pool = self.0.hugetlb_pool(page_bytes)?;
        let nodes = entries(&self.0.sys.join("devices/system/node"));
        let nodes = nodes.iter().filter_map(|name| name.strip_prefix("node")?.parse::<u32>().ok());
        let free = |node| Some((node, self.0.hugetlb_free_on_node(page_bytes, node)?));
        let mut free_on_nodes: Vec<_> = nodes.filter_map(free).collect();
        free_on_nodes.sort_unstable();
        let (_, total) = self.hugetlb_setting(page_bytes);
        Some(HugePagePool { page_bytes, total, available: pool.available, free_on_nodes })
    }
}

/// Names in a folder; none if it cannot be read.
fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::GuestRam;
    use crate::config::HugePageSize;
    use crate::host::testing::BorrowedHugePages;

    const MIB: u64 = 1 << 20;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn huge(id: &str, size_bytes: u64, node: Option<u32>) -> ZoneSpec {
        let backing = Backing::Hugetlb { page_size: HugePageSize::Mib2 };
        ZoneSpec { backing, host_numa_node: node, ..ZoneSpec::new(id, size_bytes) }
    }

    fn check(host: &HostMemory, zones: &[ZoneSpec]) -> Result<(), RamError> {
        host.check(&RamConfig { zones: zones.to_vec() }, RamLayout::default(), |_| false)
    }

    #[test]
    fn huge_pages_on_another_node_are_none_for_a_zone_that_is_bound() {
        let root = tempfile::tempdir().unwrap();
        let host = HostMemory::at(root.path());
        let none = check(&host, &[huge("a", 2 * MIB, None)]).unwrap_err();
        assert!(none.to_string().contains("has no huge pages of 2048 KiB"), "{none}");
        let pool = "kernel/mm/hugepages/hugepages-2048kB";
        write(root.path(), &format!("sys/{pool}/nr_hugepages"), "9\n");
        write(root.path(), &format!("sys/{pool}/free_hugepages"), "8\n");
        for (node, free) in [(0, 0), (1, 8)] {
            let file = format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB");
            write(root.path(), &format!("{file}/free_hugepages"), &free.to_string());
        }
        check(&host, &[huge("a", 16 * MIB, Some(1))]).unwrap();
        check(&host, &[huge("a", 16 * MIB, None)]).unwrap();
        let refused = check(&host, &[huge("a", 2 * MIB, Some(0))]).unwrap_err();
        assert!(refused.to_string().contains("on NUMA node 0"), "{refused}");
        let refused = check(&host, &[huge("a", 18 * MIB, None)]).unwrap_err();
        assert!(matches!(refused, RamError::HugetlbPool { needed: 9, available: 8, .. }));
        let refused = check(&host, &[huge("a", 2 * MIB, Some(2))]).unwrap_err();
        assert!(matches!(refused, RamError::NoSuchNode { node: 2, .. }));
        let free_on_nodes = vec![(0, 0), (1, 8)];
        let pool = HugePagePool { page_bytes: 2 * MIB, total: 9, available: 8, free_on_nodes };
        assert_eq!(host.huge_pages(), [pool]);
    }

    #[test]
    fn a_file_zone_is_looked_at_and_not_made() {
        let root = tempfile::tempdir().unwrap();
        let host = HostMemory::real();
        let zone = |path: &Path| ZoneSpec {
            backing: Backing::File(path.to_owned()),
            shared: true,
            ..ZoneSpec::new("a", MIB)
        };
        let path = root.path().join("memory");
        check(&host, &[zone(&path)]).unwrap();
        assert!(!path.exists());
        check(&host, &[zone(root.path())]).unwrap();
        check(&host, &[zone(&path.join("below"))]).unwrap_err();
        let used = GuestRam::new(&RamConfig { zones: vec![zone(&path)] }, RamLayout::default());
        let used = used.unwrap();
        let refused = check(&host, &[zone(&path)]).unwrap_err();
        assert!(matches!(refused, RamError::Backing(BackingError::InUse { .. })), "{refused}");
        drop(used);
        check(&host, &[zone(&path)]).unwrap();
    }

    #[test]
    fn what_is_refused_ahead_is_refused_later_and_the_other_way_round() {
        let Some(borrowed) = BorrowedHugePages::new(4) else { return };
        let host = HostMemory::real();
        let available = host.pool(2 * MIB).unwrap().available;
        for zones in [
            vec![huge("a", 2 * MIB * available, None)],
            vec![huge("a", 2 * MIB * (available + 1), None)],
            vec![huge("a", 2 * MIB, None), huge("b", 2 * MIB * available, None)],
            vec![ZoneSpec { reserve: true, ..ZoneSpec::new("a", 1 << 45) }],
            vec![ZoneSpec::new("a", 64 * MIB)],
            vec![ZoneSpec::new("a", 1 << 52)],
            vec![ZoneSpec { host_numa_node: Some(1000), ..ZoneSpec::new("a", MIB) }],
        ] {
            let config = RamConfig { zones };
            let ahead =
                host.check(&config, RamLayout::default(), |_| false).map_err(|e| e.to_string());
            let made = GuestRam::new(&config, RamLayout::default()).map(drop);
            assert_eq!(ahead, made.map_err(|e| e.to_string()), "{config:?}");
        }
        drop(borrowed);
    }

    #[test]
    fn shared_memory_lacks_huge_pages_where_shmem_has_none() {
        let root = tempfile::tempdir().unwrap();
        let host = HostMemory::at(root.path());
        let thp = "sys/kernel/mm/transparent_hugepage";
        write(root.path(), &format!("{thp}/enabled"), "always [madvise] never");
        write(root.path(), &format!("{thp}/shmem_enabled"), "always within_size advise [never]");
        let private = ZoneSpec::new("a", MIB);
        let shared = ZoneSpec { shared: true, backing: Backing::Memfd, ..private.clone() };
        assert_eq!(host.kind(&private), ZoneKind::PrivateAnonymous);
        assert!(!host.lacks_huge_pages(&private) && host.lacks_huge_pages(&shared));
        assert!(!host.lacks_huge_pages(&ZoneSpec { thp: false, ..shared.clone() }));
        write(root.path(), &format!("{thp}/shmem_enabled"), "always within_size [advise] never");
        assert_eq!(host.kind(&private), ZoneKind::Shared);
        assert!(!host.lacks_huge_pages(&shared));
    }
}
