// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Resource limits that apply to pinning guest memory, checked in advance.
//!
//! Owns where they are found and how they are compared. A limit that cannot be read is ignored: then the
//! kernel reports it, only later.

use std::fs;
use std::path::{Path, PathBuf};

use process_facts::{CGROUP_ROOT, Cgroups, Status, groups_in};
use rustix::process::{Resource, getrlimit};

use super::error::PinError;

const TYPE1_ENTRIES: &str = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
/// Bit of CAP_IPC_LOCK in a capability set, which lifts RLIMIT_MEMLOCK.
const CAP_IPC_LOCK: u32 = 14;

/// The limit of locked memory for this process, and its use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockedMemory {
    /// The limit in bytes; `None` if unlimited.
    pub limit_bytes: Option<u64>,
    /// Bytes counted against it already.
    pub used_bytes: u64,
}

impl LockedMemory {
    /// The current values for type 1, which counts per process.
    pub fn of_this_process() -> Self {
        Self::counted_by("VmLck")
    }

    /// The current values for iommufd. It counts all processes of the user together, which cannot be read:
    /// the memory pinned by this process is a lower bound.
    pub fn for_iommufd() -> Self {
        Self::counted_by("VmPin")
    }

    fn counted_by(counter: &str) -> Self {
        let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let status = Status::of(&text);
        let limit_bytes = getrlimit(Resource::Memlock).current;
        Self {
            limit_bytes: limit_bytes.filter(|_| !status.has_capability(CAP_IPC_LOCK)),
            used_bytes: status.bytes(counter).unwrap_or(0),
        }
    }
}

/// All limits on DMA mappings; `None` means none known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DmaLimits {
    /// Maximum number of mappings of the IOMMU driver.
    pub entries: Option<u64>,
    /// Locked memory.
    pub locked: LockedMemory,
    /// The lowest memory limit of the process's cgroups, with its file.
    pub cgroup: Option<(u64, PathBuf)>,
}

impl DmaLimits {
    /// The limits of this process on mappings of a type 1 container.
    pub fn of_type1() -> Self {
        Self {
            entries: Self::type1_entries(),
            locked: LockedMemory::of_this_process(),
            cgroup: Self::cgroup_memory(),
        }
    }

    /// The same on mappings of an iommufd.
    pub fn of_iommufd() -> Self {
        Self { entries: None, locked: LockedMemory::for_iommufd(), cgroup: Self::cgroup_memory() }
    }

    /// The type 1 limit on mappings of a container.
    pub fn type1_entries() -> Option<u64> {
        fs::read_to_string(TYPE1_ENTRIES).ok()?.trim().parse().ok()
    }

    /// The memory limit of this process's cgroups (version 2).
    pub fn cgroup_memory() -> Option<(u64, PathBuf)> {
        let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
        lowest_cgroup_limit(Path::new(CGROUP_ROOT), &membership)
    }

    /// Checks the required mappings, total bytes, and bytes that a cgroup counts.
    ///
    /// # Errors
    /// The first limit that is too low.
    pub fn check(&self, entries: u64, bytes: u64, counted_bytes: u64) -> Result<(), PinError> {
        if let Some(limit) = self.entries.filter(|limit| entries > *limit) {
            return Err(PinError::Entries { needed: entries, limit });
        }
        let LockedMemory { limit_bytes, used_bytes } = self.locked;
        if let Some(limit_bytes) =
            limit_bytes.filter(|limit| bytes > limit.saturating_sub(used_bytes))
        {
            return Err(PinError::LockedMemory { needed_bytes: bytes, limit_bytes, used_bytes });
        }
        if let Some((limit_bytes, path)) = &self.cgroup
            && counted_bytes > *limit_bytes
        {
            let (limit_bytes, path) = (*limit_bytes, path.clone());
            return Err(PinError::Cgroup { needed_bytes: counted_bytes, limit_bytes, path });
        }
        Ok(())
    }
}

fn lowest_cgroup_limit(root: &Path, membership: &str) -> Option<(u64, PathBuf)> {
    let own = Cgroups::of(membership).unified()?;
    let mut lowest: Option<(u64, PathBuf)> = None;
    for group in groups_in(root, own) {
        let path = group.join("memory.max");
        let limit = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse::<u64>().ok());
        if let Some(limit) =
            limit.filter(|limit| lowest.as_ref().is_none_or(|(low, _)| limit < low))
        {
            lowest = Some((limit, path));
        }
    }
    lowest
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn each_limit_is_named_with_its_remedy() {
        let limits = DmaLimits {
            entries: Some(10),
            locked: LockedMemory { limit_bytes: Some(8 * GIB), used_bytes: GIB },
            cgroup: Some((6 * GIB, "/sys/fs/cgroup/a/memory.max".into())),
        };
        assert!(limits.check(10, 7 * GIB, 6 * GIB).is_ok());
        let text = |entries, bytes, counted| {
            limits.check(entries, bytes, counted).unwrap_err().to_string()
        };
        assert!(text(11, GIB, GIB).contains("dma_entry_limit"));
        assert!(text(10, 7 * GIB + 1, 0).contains("LimitMEMLOCK"));
        assert!(text(10, 7 * GIB, 6 * GIB + 1).contains("/sys/fs/cgroup/a/memory.max"));
        assert!(DmaLimits::default().check(u64::MAX, u64::MAX, u64::MAX).is_ok());
    }

    #[test]
    fn the_lowest_limit_above_counts() {
        let root = vmm_sys_util::tempdir::TempDir::new().unwrap();
        let root = root.as_path();
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/memory.max"), "4096\n").unwrap();
        fs::write(root.join("a/b/memory.max"), "max\n").unwrap();
        let found = lowest_cgroup_limit(root, "1:cpu:/x\n0::/a/b\n");
        assert_eq!(found, Some((4096, root.join("a/memory.max"))));
        assert_eq!(lowest_cgroup_limit(root, "0::/c\n"), None);
    }
}
