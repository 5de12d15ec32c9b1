// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host memory information: huge page settings and pools, totals, NUMA nodes.
//!
//! Owns the paths under `/sys` and `/proc` and their reading. Must never write there, and must
//! treat a missing or malformed file as "not available".

use std::fs;
use std::path::{Path, PathBuf};

use process_facts::CPUS_MAX;

/// The host's `/sys` and `/proc`; other directories in tests only.
#[derive(Debug, Clone)]
pub struct Host {
    pub(crate) sys: PathBuf,
    pub(crate) proc: PathBuf,
}

/// Whether memory gets huge pages when it is advised to use them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HugePagePolicy {
    /// Private anonymous memory.
    pub private: bool,
    /// memfds.
    pub shared: bool,
}

/// Pages of one size in the hugetlb pool, on the whole host or on one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HugetlbPool {
    /// Pages that a new mapping can get now.
    pub available: u64,
    /// True when the pool may grow on demand.
    pub can_grow: bool,
}

/// Totals from `/proc/meminfo`, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryTotals {
    /// RAM and swap together.
    pub total: u64,
    /// What may still be committed, if the host accounts strictly (`vm.overcommit_memory=2`).
    pub commit_left: Option<u64>,
}

impl Host {
    pub fn real() -> Self {
        Self { sys: "/sys".into(), proc: "/proc".into() }
    }

    pub(crate) fn read(path: &Path) -> Option<String> {
        fs::read_to_string(path).ok()
    }

    pub(crate) fn number(path: &Path) -> Option<u64> {
        Self::read(path)?.trim().parse().ok()
    }

    /// The effective setting for 2 MiB pages: the per-size file counts, unless it inherits.
    pub fn huge_page_policy(&self) -> HugePagePolicy {
        let base = self.sys.join("kernel/mm/transparent_hugepage");
        let setting = |file: &str| {
            let global = Self::read(&base.join(file)).and_then(|text| selected(&text));
            // These two values override any per-size setting.
            if matches!(global.as_deref(), Some("force" | "deny")) {
                return global;
            }
            let sized = Self::read(&base.join("hugepages-2048kB").join(file));
            match sized.and_then(|text| selected(&text)) {
                Some(own) if own != "inherit" => Some(own),
                _ => global,
            }
        };
        HugePagePolicy {
            private: matches!(setting("enabled").as_deref(), Some("always" | "madvise")),
            shared: matches!(
                setting("shmem_enabled").as_deref(),
                Some("always" | "within_size" | "advise" | "force")
            ),
        }
    }

    /// File that sets the number of hugetlb pages of this size.
    pub fn hugetlb_path(page_size_bytes: u64) -> PathBuf {
        let dir = format!("hugepages-{}kB", page_size_bytes >> 10);
        Path::new("/sys/kernel/mm/hugepages").join(dir).join("nr_hugepages")
    }

    /// The host's pool of this size; `None` when the host has no such pages.
    pub fn hugetlb_pool(&self, page_size_bytes: u64) -> Option<HugetlbPool> {
        let dir = format!("kernel/mm/hugepages/hugepages-{}kB", page_size_bytes >> 10);
        let number = |file: &str| Self::number(&self.sys.join(&dir).join(file));
        let free = number("free_hugepages")?;
        let reserved = number("resv_hugepages").unwrap_or(0);
        let growth = number("nr_overcommit_hugepages")
            .unwrap_or(0)
            .saturating_sub(number("surplus_hugepages").unwrap_or(0));
        let available = free.saturating_sub(reserved).saturating_add(growth);
        Some(HugetlbPool { available, can_grow: growth > 0 })
    }

    /// Free hugetlb pages of this size on one node; `None` when unknown.
    pub fn hugetlb_free_on_node(&self, page_size_bytes: u64, node: u32) -> Option<u64> {
        let dir = format!("hugepages/hugepages-{}kB", page_size_bytes >> 10);
        Self::number(&self.node(node).join(dir).join("free_hugepages"))
    }

    /// The default size of a hugetlb page in bytes.
    pub fn default_huge_page_bytes(&self) -> Option<u64> {
        let text = Self::read(&self.proc.join("meminfo"))?;
        meminfo_bytes(&text, "Hugepagesize").filter(|size| size.is_power_of_two())
    }

    /// Totals for the check of `reserve=on`; `None` without `/proc`.
    pub fn memory_totals(&self) -> Option<MemoryTotals> {
        let text = Self::read(&self.proc.join("meminfo"))?;
        let ram = meminfo_bytes(&text, "MemTotal")?;
        let swap = meminfo_bytes(&text, "SwapTotal").unwrap_or(0);
        let strict = Self::number(&self.proc.join("sys/vm/overcommit_memory")) == Some(2);
        let commit_left = if strict {
            let limit = meminfo_bytes(&text, "CommitLimit");
            let used = meminfo_bytes(&text, "Committed_AS");
            limit.zip(used).map(|(limit, used)| limit.saturating_sub(used))
        } else {
            None
        };
        Some(MemoryTotals { total: ram.saturating_add(swap), commit_left })
    }

    pub(crate) fn node(&self, node: u32) -> PathBuf {
        self.sys.join(format!("devices/system/node/node{node}"))
    }

    pub fn has_node(&self, node: u32) -> bool {
        self.node(node).is_dir()
    }

    /// The CPUs of a node; empty when unknown.
    pub fn node_cpus(&self, node: u32) -> Vec<usize> {
        Self::read(&self.node(node).join("cpulist")).map(|text| cpu_list(&text)).unwrap_or_default()
    }
}

/// The word in brackets, as in `always [madvise] never`.
fn selected(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_owned())
}

pub(crate) fn meminfo_bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Parses a list like `0-3,8`. Invalid parts are skipped, as are CPUs that no host has.
pub(crate) fn cpu_list(text: &str) -> Vec<usize> {
    let part = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: usize = first.parse().ok()?;
        let last: usize = last.parse().ok()?;
        (first <= last && last < CPUS_MAX).then_some(first..=last)
    };
    text.trim().split(',').filter_map(part).flatten().collect()
}

#[cfg(all(test, not(loom)))]
#[path = "host_testing.rs"]
pub mod testing;

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::prelude::*;

    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn the_per_size_setting_wins_unless_it_inherits() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::pretended(root.path());
        let thp = "sys/kernel/mm/transparent_hugepage";
        let policy = |enabled: &str, shmem: &str, sized: &str| {
            write(root.path(), &format!("{thp}/enabled"), enabled);
            write(root.path(), &format!("{thp}/shmem_enabled"), shmem);
            write(root.path(), &format!("{thp}/hugepages-2048kB/shmem_enabled"), sized);
            let policy = host.huge_page_policy();
            (policy.private, policy.shared)
        };
        let never = "always within_size advise [never] deny force";
        let inherit = "always [inherit] within_size advise never";
        assert_eq!(policy("always [madvise] never", never, inherit), (true, false));
        assert_eq!(policy("always madvise [never]", "[advise] never", inherit), (false, true));
        assert_eq!(policy("[always]", never, "inherit [advise] never"), (true, true));
        assert_eq!(policy("[always]", "[deny]", "[always]"), (true, false));
        assert_eq!(policy("rubbish", "", "["), (false, false));
    }

    #[test]
    fn meminfo_is_read_in_bytes() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::pretended(root.path());
        assert_eq!(host.memory_totals(), None);
        let text = "MemTotal:   1000 kB\nMemTotalX: 7 kB\nSwapTotal: 24 kB\nHugepagesize: 2048 kB\n\
                    CommitLimit: 900 kB\nCommitted_AS: 1 kB\n";
        write(root.path(), "proc/meminfo", text);
        write(root.path(), "proc/sys/vm/overcommit_memory", "0\n");
        let total = 1024 * 1024;
        assert_eq!(host.memory_totals(), Some(MemoryTotals { total, commit_left: None }));
        write(root.path(), "proc/sys/vm/overcommit_memory", "2\n");
        let commit_left = Some(899 * 1024);
        assert_eq!(host.memory_totals(), Some(MemoryTotals { total, commit_left }));
        assert_eq!(host.default_huge_page_bytes(), Some(2 << 20));
    }

    #[test]
    fn a_pool_counts_what_is_free_and_not_promised() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::pretended(root.path());
        assert_eq!(host.hugetlb_pool(2 << 20), None);
        let dir = "sys/kernel/mm/hugepages/hugepages-2048kB";
        write(root.path(), &format!("{dir}/free_hugepages"), "10\n");
        write(root.path(), &format!("{dir}/resv_hugepages"), "4\n");
        let pool = host.hugetlb_pool(2 << 20).unwrap();
        assert_eq!(pool, HugetlbPool { available: 6, can_grow: false });
        write(root.path(), &format!("{dir}/nr_overcommit_hugepages"), "5\n");
        write(root.path(), &format!("{dir}/surplus_hugepages"), "2\n");
        let pool = host.hugetlb_pool(2 << 20).unwrap();
        assert_eq!(pool, HugetlbPool { available: 9, can_grow: true });
    }

    proptest! {
        #[test]
        fn odd_texts_are_harmless(text in "[0-9,\\-\\[\\] a-z:kB\n]{0,60}") {
            let _ = selected(&text);
            let _ = meminfo_bytes(&text, "a");
            prop_assert!(cpu_list(&text).into_iter().all(|cpu| cpu < CPUS_MAX));
        }
    }

    #[test]
    fn cpu_lists_are_ranges_and_numbers() {
        assert_eq!(cpu_list("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(cpu_list("\n"), Vec::<usize>::new());
        assert_eq!(cpu_list("1023-1025,8191\n"), [1023, 1024, 1025, 8191]);
        assert_eq!(cpu_list("0-8191").len(), 8192);
        assert_eq!(cpu_list(&format!("3,{}", CPUS_MAX - 1)), [3, CPUS_MAX - 1]);
        assert_eq!(cpu_list(&format!("3,{CPUS_MAX}")), [3]);
        assert_eq!(cpu_list("0-99999999999"), Vec::<usize>::new());
    }
}
