// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How many processors this process may use.
//!
//! Owns the rule: as many as the calling thread may run on, of any number that Linux can have, and no more than the time is
//! worth that the process's control groups and all above give it. The standard library counts no more than 1024 of those
//! that the thread was given, and all of a larger host. Must never decide how many threads follow from it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cgroups::{CGROUP_ROOT, Cgroups, groups_in};
use crate::cpu_set::CpuSet;

/// The controller of version 1 that limits processor time.
const CPU: &str = "cpu";

/// Processor time that a control group gives to all of its processes together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuQuota {
    /// In thousandths of a processor.
    pub milli: u64,
    /// The file that sets it.
    pub file: PathBuf,
}

/// Processors that the calling thread may use, at least one: those on which it may run, within the quota of its control
/// groups, of which a part of a processor does not count.
pub fn usable_processors() -> usize {
    let read = |path: &Path| fs::read_to_string(path).ok();
    let cpus = CpuSet::of_thread(0).map_or(1, |set| set.cpus().len());
    let text = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    within(cpus, cpu_quota(Cgroups::of(&text), &read).map(|quota| quota.milli))
}

fn within(cpus: usize, quota_milli: Option<u64>) -> usize {
    let worth =
        quota_milli.map_or(usize::MAX, |milli| usize::try_from(milli / 1000).unwrap_or(usize::MAX));
    cpus.min(worth).max(1)
}

/// The lowest quota of these groups and of all above, of either version; `None` without one. `read` gives the text of a file.
fn cpu_quota(cgroups: Cgroups<'_>, read: &dyn Fn(&Path) -> Option<String>) -> Option<CpuQuota> {
    let of_v1 = |folder: PathBuf| {
        let file = folder.join("cpu.cfs_quota_us");
        let period = read(&folder.join("cpu.cfs_period_us"))?;
        Some(CpuQuota { milli: milli(&read(&file)?, &period)?, file })
    };
    let v1 = cgroups.with_controller(CPU).into_iter().flat_map(|(controllers, path)| {
        // A hierarchy with several controllers has the names of all; a link has that of one.
        let roots = [CPU, controllers].map(|name| Path::new(CGROUP_ROOT).join(name));
        roots.into_iter().flat_map(|root| groups_in(&root, path).collect::<Vec<_>>())
    });
    let quotas = v1.filter_map(of_v1).chain(unified_cpu_quota(cgroups, read));
    quotas.min_by_key(|quota| quota.milli)
}

/// The lowest quota of the group of version 2 and of all above; `None` without one. `read` gives the text of a file.
pub fn unified_cpu_quota(
    cgroups: Cgroups<'_>,
    read: &dyn Fn(&Path) -> Option<String>,
) -> Option<CpuQuota> {
    let of_group = |folder: PathBuf| {
        let file = folder.join("cpu.max");
        let text = read(&file)?;
        let (quota, period) = text.trim().split_once(' ')?;
        Some(CpuQuota { milli: milli(quota, period)?, file })
    };
    let groups =
        cgroups.unified().into_iter().flat_map(|path| groups_in(Path::new(CGROUP_ROOT), path));
    groups.filter_map(of_group).min_by_key(|quota| quota.milli)
}

/// Thousandths of a processor; without a limit the quota is `max`, or -1 in version 1.
fn milli(quota_us: &str, period_us: &str) -> Option<u64> {
    let [quota_us, period_us] = [quota_us, period_us].map(|text| text.trim().parse::<u64>().ok());
    quota_us?.checked_mul(1000)?.checked_div(period_us?)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// The quota in a host with these files, and what is the last of its file's path.
    fn quota(cgroup: &str, files: &[(&str, &str)]) -> Option<(u64, String)> {
        let files: HashMap<_, _> = files
            .iter()
            .map(|(name, text)| (Path::new(CGROUP_ROOT).join(name), (*text).to_owned()))
            .collect();
        let found = cpu_quota(Cgroups::of(cgroup), &|path| files.get(path).cloned())?;
        let below = found.file.strip_prefix(CGROUP_ROOT).expect("below the root");
        Some((found.milli, below.display().to_string()))
    }

    #[test]
    fn the_lowest_quota_of_all_groups_above_counts() {
        let files = [
            ("cpu.max", "900000 100000\n"),
            ("vms/cpu.max", "150000 100000\n"),
            ("vms/one/cpu.max", "max 100000\n"),
            ("other/cpu.max", "1 100000\n"),
        ];
        assert_eq!(quota("0::/vms/one\n", &files), Some((1500, "vms/cpu.max".to_owned())));
        assert_eq!(
            quota("0::/gone\n", &files),
            Some((9000, "cpu.max".to_owned())),
            "of a container"
        );
        assert_eq!(quota("0::/../vms\n", &files), None, "not what is seen here");
        assert_eq!(quota("3:cpu:/vms\n", &files), None);
        assert_eq!(quota("", &files), None);
    }

    #[test]
    fn quotas_of_version_1_count_by_either_name_of_their_hierarchy() {
        for name in ["cpu", "cpu,cpuacct"] {
            let at = |rest: &str| format!("{name}/{rest}");
            let names = [
                "a/b/cpu.cfs_quota_us",
                "a/b/cpu.cfs_period_us",
                "a/cpu.cfs_quota_us",
                "a/cpu.cfs_period_us",
            ];
            let [own, own_period, above, above_period] = names.map(at);
            let files = |own_us| {
                [
                    (&*own, own_us),
                    (&*own_period, "100000\n"),
                    (&*above, "400000\n"),
                    (&*above_period, "50000\n"),
                ]
            };
            let cgroup = "4:cpu,cpuacct:/a/b\n1:name=systemd:/\n0::/\n";
            assert_eq!(quota(cgroup, &files("-1\n")), Some((8000, above.clone())));
            assert_eq!(quota(cgroup, &files("250000\n")), Some((2500, own.clone())));
            assert_eq!(quota("4:cpuset:/a/b\n", &files("250000\n")), None, "another controller");
        }
    }

    #[test]
    fn a_quota_is_a_share_of_a_period() {
        assert_eq!(milli("150000", "100000\n"), Some(1500));
        for (quota, period) in [
            ("max", "100000"),
            ("-1", "100000"),
            ("1", "0"),
            ("18446744073709551615", "1"),
            ("1", ""),
        ] {
            assert_eq!(milli(quota, period), None, "{quota} {period}");
        }
        for text in ["", "max", "1", "1 2 3"] {
            assert_eq!(quota("0::/\n", &[("cpu.max", text)]), None, "{text}");
        }
    }

    #[test]
    fn processors_are_those_of_the_thread_within_the_quota() {
        assert_eq!(within(4096, None), 4096, "more than 1024");
        assert_eq!(within(4096, Some(2_000_999)), 2000);
        assert_eq!(within(4, Some(64_000)), 4);
        assert_eq!(within(4, Some(999)), 1, "never none");
        assert_eq!(within(0, None), 1);
        assert_eq!(within(4, Some(u64::MAX)), 4);
    }

    #[test]
    fn a_thread_with_one_processor_may_use_one() {
        let checked = std::thread::spawn(|| {
            let all = CpuSet::of_thread(0).expect("a set").cpus();
            let before = usable_processors();
            CpuSet::of(&all[..1]).and_then(|set| set.bind(0)).expect("one of its own");
            (all.len(), before, usable_processors())
        });
        let (all, before, after) = checked.join().expect("no panic");
        assert!((1..=all).contains(&before), "{before} of {all}");
        assert_eq!(after, 1);
    }
}
