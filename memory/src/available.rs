// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Available memory of the host, of this process's cgroups and of a NUMA node, checked before guest memory
//! is populated.
//!
//! Owns the comparison and its margins. When memory runs out, the OOM killer ends any process of the
//! host, or one of the cgroup, so this is checked before memory is populated. A value that cannot be
//! read does not count as a limit: then the kernel decides.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use process_facts::{Cgroups, groups_in};

use crate::host::Host;
use crate::region::RamRegion;

/// Share of the host's memory that is left free, within bounds: the kernel and other processes continue to
/// need some, and begin to stall before the last page is gone.
const HOST_MARGIN_DIVISOR: u64 = 32;
const HOST_MARGIN_MAX_BYTES: u64 = 2 << 30;
/// Share of a node's memory that is left free. It is smaller, because a node can get kernel memory from
/// elsewhere.
const NODE_MARGIN_DIVISOR: u64 = 64;
const NODE_MARGIN_MAX_BYTES: u64 = 512 << 20;
/// Memory that is left free in a cgroup, whose size its administrator has chosen. The page tables and this
/// process must fit in it meanwhile.
const CGROUP_MARGIN_BYTES: u64 = 32 << 20;

/// What limits the available memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The whole host.
    Host,
    /// A NUMA node, by its number.
    Node(u32),
    /// A cgroup, by the file that limits it.
    Cgroup(PathBuf),
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("the host"),
            Self::Node(node) => write!(f, "the host's NUMA node {node}"),
            Self::Cgroup(file) => write!(f, "the cgroup limited by {}", file.display()),
        }
    }
}

/// The error when memory is insufficient.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "guest memory needs {} MiB more, but {limit} has {} MiB available, of which {} MiB are kept free for \
     others: make the guest smaller, free memory, or let the guest's accesses allocate it \
     (prefault=off)",
    needed_bytes >> 20, available_bytes >> 20, margin_bytes >> 20
)]
pub struct InsufficientMemory {
    /// Bytes that are needed.
    pub needed_bytes: u64,
    /// The limit that is too low.
    pub limit: MemoryLimit,
    /// Bytes available under it.
    pub available_bytes: u64,
    /// Bytes of those that must stay free.
    pub margin_bytes: u64,
}

/// Memory that is about to be populated: bytes, and the NUMA node that they must come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryDemand {
    /// Bytes, without hugetlb pages, which were set aside before.
    pub bytes: u64,
    /// The node, if the memory must come from one.
    pub node: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct MemoryBudget {
    limit: MemoryLimit,
    available_bytes: u64,
    margin_bytes: u64,
}

/// Checks that the host, the cgroups and the nodes have that much memory.
///
/// # Errors
/// The first limit that is too low.
pub fn check(needs: &[MemoryDemand]) -> Result<(), InsufficientMemory> {
    check_at(needs, &Host::real())
}

pub(crate) fn check_at(needs: &[MemoryDemand], host: &Host) -> Result<(), InsufficientMemory> {
    let sum = |of: &dyn Fn(&MemoryDemand) -> bool| {
        let counted = needs.iter().filter(|need| of(need));
        counted.fold(0_u64, |sum, need| sum.saturating_add(need.bytes))
    };
    for budget in available(host, needs) {
        let needed_bytes = match budget.limit {
            MemoryLimit::Node(node) => sum(&|need| need.node == Some(node)),
            MemoryLimit::Host | MemoryLimit::Cgroup(_) => sum(&|_| true),
        };
        let MemoryBudget { limit, available_bytes, margin_bytes } = budget;
        if needed_bytes > available_bytes.saturating_sub(margin_bytes) && needed_bytes > 0 {
            return Err(InsufficientMemory { needed_bytes, limit, available_bytes, margin_bytes });
        }
    }
    Ok(())
}

/// Checks that the host has memory for what is not populated. Populated memory is looked up only if that
/// matters, because it takes time on a large guest.
///
/// # Errors
/// The limit that is too low.
pub fn check_available(regions: &[Arc<RamRegion>]) -> Result<(), InsufficientMemory> {
    let needs = |missing: &dyn Fn(&RamRegion, Range<u64>) -> u64| -> Vec<MemoryDemand> {
        let counted = regions.iter().filter(|region| region.takes_host_memory());
        let need = |region: &Arc<RamRegion>| MemoryDemand {
            bytes: region.usable_runs().into_iter().map(|run| missing(region, run)).sum(),
            node: region.spec().host_numa_node,
        };
        counted.map(need).collect()
    };
    if check(&needs(&|_, run| run.end - run.start)).is_ok() {
        return Ok(());
    }
    let missing = |region: &RamRegion, run: Range<u64>| {
        let there = region.own_runs(&run);
        let there_bytes: u64 = there.iter().map(|run| run.end - run.start).sum();
        (run.end - run.start).saturating_sub(there_bytes)
    };
    check(&needs(&missing))
}

/// The least that any limit has available, without a margin; `u64::MAX` where there is no limit.
pub fn available_bytes(node: Option<u32>) -> u64 {
    let available = available(&Host::real(), &[MemoryDemand { bytes: 0, node }]);
    available.iter().map(|budget| budget.available_bytes).min().unwrap_or(u64::MAX)
}

fn available(host: &Host, needs: &[MemoryDemand]) -> Vec<MemoryBudget> {
    let mut available = Vec::new();
    if let Some((available_bytes, total_bytes)) = host.available_bytes() {
        let margin_bytes = (total_bytes / HOST_MARGIN_DIVISOR).min(HOST_MARGIN_MAX_BYTES);
        available.push(MemoryBudget { limit: MemoryLimit::Host, available_bytes, margin_bytes });
    }
    let groups = host.cgroup_available().into_iter().map(|(file, available_bytes)| {
        let (limit, margin_bytes) = (MemoryLimit::Cgroup(file), CGROUP_MARGIN_BYTES);
        MemoryBudget { limit, available_bytes, margin_bytes }
    });
    available.extend(groups);
    let mut nodes: Vec<u32> = needs.iter().filter_map(|need| need.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    for node in nodes {
        if let Some((available_bytes, total_bytes)) = host.available_on_node(node) {
            let margin_bytes = (total_bytes / NODE_MARGIN_DIVISOR).min(NODE_MARGIN_MAX_BYTES);
            available.push(MemoryBudget {
                limit: MemoryLimit::Node(node),
                available_bytes,
                margin_bytes,
            });
        }
    }
    available
}

impl Host {
    /// Memory that is available without swapping, and all RAM, in bytes.
    fn available_bytes(&self) -> Option<(u64, u64)> {
        let text = Self::read(&self.proc.join("meminfo"))?;
        let bytes = |name| super::host::meminfo_bytes(&text, name);
        Some((bytes("MemAvailable")?, bytes("MemTotal")?))
    }

    /// The same for a node: free memory, and the page cache that can be read again.
    pub(crate) fn available_on_node(&self, node: u32) -> Option<(u64, u64)> {
        let text = Self::read(&self.node(node).join("meminfo"))?;
        let prefix = format!("Node {node} ");
        let text: String = text
            .lines()
            .filter_map(|line| line.strip_prefix(&prefix))
            .flat_map(|line| [line, "\n"])
            .collect();
        let bytes = |name| super::host::meminfo_bytes(&text, name);
        let files = ["Active(file)", "Inactive(file)"].map(|name| bytes(name).unwrap_or(0));
        let left = files.iter().fold(bytes("MemFree")?, |sum, part| sum.saturating_add(*part));
        Some((left, bytes("MemTotal")?))
    }

    /// The limits of this process's cgroups (version 2) and what each has left. A parent group counts the
    /// memory of its children.
    fn cgroup_available(&self) -> Vec<(PathBuf, u64)> {
        let root = self.sys.join("fs/cgroup");
        let membership = Self::read(&self.proc.join("self/cgroup")).unwrap_or_default();
        let Some(own) = Cgroups::of(&membership).unified() else {
            return Vec::new();
        };
        let of_group = |group: PathBuf| {
            let file = group.join("memory.max");
            // "max" is not a number, and means no limit.
            let limit = Self::number(&file)?;
            let used = Self::number(&group.join("memory.current"))?;
            let stat = Self::read(&group.join("memory.stat")).unwrap_or_default();
            let files = stat.lines().filter_map(|line| {
                let (name, bytes) = line.split_once(' ')?;
                let counts = ["active_file", "inactive_file", "slab_reclaimable"].contains(&name);
                counts.then(|| bytes.trim().parse::<u64>().ok()).flatten()
            });
            let files = files.fold(0, u64::saturating_add);
            Some((file, limit.saturating_sub(used.saturating_sub(files))))
        };
        groups_in(&root, own).filter_map(of_group).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::fs;
    use std::path::Path;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A host with 64 GiB, of which 40 GiB are available.
    fn host(root: &Path) -> Host {
        let kib = |gib: u64| gib << 20;
        let text = format!("MemTotal: {} kB\nMemAvailable: {} kB\n", kib(64), kib(40));
        write(root, "proc/meminfo", &text);
        Host::pretended(root)
    }

    fn need(gib: u64) -> MemoryDemand {
        MemoryDemand { bytes: gib * GIB, node: None }
    }

    #[test]
    fn what_the_host_has_is_given_but_for_a_margin() {
        let root = tempfile::tempdir().unwrap();
        let host = host(root.path());
        check_at(&[need(38)], &host).unwrap();
        check_at(&[need(19), need(19)], &host).unwrap();
        let refused = check_at(&[need(20), need(19)], &host).unwrap_err();
        assert_eq!(refused.limit, MemoryLimit::Host);
        assert_eq!((refused.needed_bytes, refused.margin_bytes), (39 * GIB, 2 * GIB));
        let text = refused.to_string();
        assert!(text.contains("39936 MiB") && text.contains("the host has 40960 MiB"), "{text}");
        check_at(&[], &host).unwrap();
    }

    #[test]
    fn every_cgroup_above_counts_and_files_can_be_dropped() {
        let root = tempfile::tempdir().unwrap();
        let host = host(root.path());
        write(root.path(), "proc/self/cgroup", "0::/vms/one\n");
        let group = |path: &str, max: &str, current: u64, stat: &str| {
            let base = format!("sys/fs/cgroup/{path}");
            write(root.path(), &format!("{base}/memory.max"), max);
            write(root.path(), &format!("{base}/memory.current"), &current.to_string());
            write(root.path(), &format!("{base}/memory.stat"), stat);
        };
        group("vms/one", "max\n", 0, "");
        group("vms", &(8 * GIB).to_string(), 6 * GIB, "anon 1\ninactive_file 3221225472\n");
        check_at(&[need(4)], &host).unwrap();
        let refused = check_at(&[need(5)], &host).unwrap_err();
        assert_eq!(refused.available_bytes, 5 * GIB);
        let text = refused.to_string();
        assert!(text.contains("sys/fs/cgroup/vms/memory.max"), "{text}");
    }

    #[test]
    fn a_zone_that_is_bound_asks_its_node() {
        let root = tempfile::tempdir().unwrap();
        let host = host(root.path());
        let text = "Node 1 MemTotal:  16777216 kB\nNode 1 MemFree: 4194304 kB\n\
                    Node 1 Active(file): 1048576 kB\nNode 1 Inactive(file): 1048576 kB\n";
        write(root.path(), "sys/devices/system/node/node1/meminfo", text);
        let on = |gib: u64| MemoryDemand { node: Some(1), ..need(gib) };
        check_at(&[on(5), need(20)], &host).unwrap();
        let refused = check_at(&[on(6), need(20)], &host).unwrap_err();
        assert_eq!(refused.limit, MemoryLimit::Node(1));
        assert_eq!((refused.needed_bytes, refused.available_bytes), (6 * GIB, 6 * GIB));
        // A node without information is no limit.
        check_at(&[MemoryDemand { node: Some(7), ..need(20) }], &host).unwrap();
    }

    #[test]
    fn a_host_that_says_nothing_limits_nothing() {
        let root = tempfile::tempdir().unwrap();
        check_at(&[need(1 << 20)], &Host::pretended(root.path())).unwrap();
        write(root.path(), "proc/self/cgroup", "0::/\n");
        write(root.path(), "sys/fs/cgroup/memory.max", "rubbish");
        check_at(&[need(1 << 20)], &Host::pretended(root.path())).unwrap();
    }
}
