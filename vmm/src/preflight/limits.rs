// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limits of this process and of its cgroups.
//!
//! Owns how many threads and descriptors a VM takes at least, and with some room. Both are estimates: what is refused for
//! certain is below the lower one.

use std::path::Path;

use memory::CpuSet;
use process_facts::{CGROUP_ROOT, Cgroups, groups_in, unified_cpu_quota};
use rustix::process::{Resource, getrlimit};

use super::definitions as of;
use super::finding::Finding;
use super::host_files::HostFiles;
use super::rights::Rights;
use crate::config::VmConfig;

/// What cgroups of version 1 have for no limit, rounded down to a page.
const UNLIMITED_FROM: u64 = i64::MAX as u64 / 4096 * 4096;

/// A value, and the file that sets it.
pub type Limited = (u64, String);

/// What is known of limits; none where there is no value.
#[derive(Clone, Debug, Default)]
pub struct LimitFacts {
    /// CPUs that the process may run on.
    pub cpus: u32,
    pub open_files: Option<u64>,
    /// Threads of the user, if that limit applies to this process.
    pub user_threads: Option<u64>,
    /// Threads that its cgroups still allow.
    pub threads: Option<Limited>,
    /// CPUs that its cgroups allow, in thousandths.
    pub cpu_milli: Option<Limited>,
    /// Memory that its cgroups of version 1 allow, in bytes.
    pub memory_v1: Option<Limited>,
}

impl LimitFacts {
    pub fn read(files: &HostFiles, rights: &Rights) -> Self {
        let text = files.text("/proc/self/cgroup").unwrap_or_default();
        let cgroups = Cgroups::of(&text);
        let folders = |root: &str, path: &str| -> Vec<String> {
            let folders = groups_in(Path::new(root), path);
            folders.map(|folder| folder.display().to_string()).collect()
        };
        let threads = |group: String| {
            let file = format!("{group}/pids.max");
            let used = files.number(&format!("{group}/pids.current")).unwrap_or(0);
            Some((files.number(&file)?.saturating_sub(used), file))
        };
        let unified = cgroups.unified().map(|path| folders(CGROUP_ROOT, path));
        let threads = unified.into_iter().flatten().filter_map(threads);
        let read = |file: &Path| files.text(file.to_str()?);
        let quota = unified_cpu_quota(cgroups, &read);
        let memory_v1 = cgroups.with_controller("memory").and_then(|(_, path)| {
            let of_group = |group: String| {
                let file = format!("{group}/memory.limit_in_bytes");
                let bytes = files.number(&file).filter(|bytes| *bytes < UNLIMITED_FROM)?;
                Some((bytes, file))
            };
            let groups = folders(&format!("{CGROUP_ROOT}/memory"), path);
            groups.into_iter().filter_map(of_group).min_by_key(|(bytes, _)| *bytes)
        });
        let cpus = CpuSet::of_thread(0)
            .map_or(1, |set| u32::try_from(set.cpus().len()).unwrap_or(u32::MAX));
        Self {
            cpus,
            // The VMM raises its limit to the hard one.
            open_files: getrlimit(Resource::Nofile).maximum,
            // The kernel does not count those of root.
            user_threads: getrlimit(Resource::Nproc).current.filter(|_| rights.user != 0),
            threads: threads.min_by_key(|(left, _)| *left),
            cpu_milli: quota.map(|quota| (quota.milli, quota.file.display().to_string())),
            memory_v1,
        }
    }
}

/// Numbers of what a VM takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Needs {
    /// At least.
    least: u64,
    /// With room for what is added later.
    with_room: u64,
}

/// Queues that are served here, and devices.
fn queues_and_devices(config: &VmConfig) -> (u64, u64) {
    let disks = config.disks.iter().flatten().map(|disk| u64::from(disk.num_queues));
    let nets = config.net.iter().flatten().map(|net| u64::from(net.num_queues / 2));
    let fs = config.fs.iter().flatten().map(|fs| u64::from(fs.num_queues));
    let queues: Vec<u64> = disks.chain(nets).chain(fs).collect();
    let others = config.devices.as_ref().map_or(0, Vec::len)
        + config.user_devices.as_ref().map_or(0, Vec::len)
        + config.pmem.as_ref().map_or(0, Vec::len)
        + config.vdpa.as_ref().map_or(0, Vec::len);
    (queues.iter().sum(), queues.len() as u64 + others as u64)
}

fn files_needed(config: &VmConfig) -> Needs {
    let (queues, devices) = queues_and_devices(config);
    let vcpus = u64::from(config.cpus.boot_vcpus);
    // A queue has an eventfd for each direction.
    let least = vcpus + 2 * queues + devices;
    Needs {
        least,
        with_room: 128 + 2 * u64::from(config.cpus.max_vcpus) + 6 * queues + 16 * devices,
    }
}

fn threads_needed(config: &VmConfig) -> Needs {
    let (queues, devices) = queues_and_devices(config);
    let vcpus = u64::from(config.cpus.boot_vcpus);
    let least = vcpus + queues + 1;
    Needs { least, with_room: 64 + u64::from(config.cpus.max_vcpus) + 2 * queues + devices }
}

/// Which limits are too low.
pub fn findings(facts: &LimitFacts, config: &VmConfig) -> Vec<Finding> {
    let mut findings = vec![open_files(facts, config)];
    findings.extend(threads(facts, config));
    let vcpus = u64::from(config.cpus.boot_vcpus);
    findings.push(match &facts.cpu_milli {
        Some((milli, file)) if *milli < vcpus.saturating_mul(1000) => {
            let found = format!("{file} allows {}, for {vcpus} vCPUs", cpus(*milli));
            Finding::lack(&of::CPU_QUOTA_LOW, found).with("FILE", file)
        }
        Some((milli, _)) => Finding::ok(&of::CPU_QUOTA, format!("{} are allowed", cpus(*milli))),
        None => Finding::ok(&of::CPU_QUOTA, "none"),
    });
    let bytes = config.memory.total_bytes().unwrap_or(u64::MAX);
    findings.push(match &facts.memory_v1 {
        Some((limit, file)) if *limit < bytes => {
            let found = format!("{file} is {limit}, and the guest may use {bytes} bytes");
            Finding::lack(&of::CGROUP_MEMORY_LOW, found).with("FILE", file)
        }
        Some((limit, _)) => Finding::ok(&of::CGROUP_MEMORY, format!("{limit} bytes are allowed")),
        None => Finding::ok(&of::CGROUP_MEMORY, "none"),
    });
    findings
}

fn cpus(milli: u64) -> String {
    format!("{}.{:02} CPUs", milli / 1000, milli % 1000 / 10)
}

fn open_files(facts: &LimitFacts, config: &VmConfig) -> Finding {
    let Needs { least, with_room } = files_needed(config);
    let Some(limit) = facts.open_files else {
        return Finding::ok(&of::OPEN_FILES, "no limit");
    };
    let lack = if limit < least {
        &of::FILES_FEW
    } else if limit < with_room {
        &of::FILES_SCARCE
    } else {
        return Finding::ok(&of::OPEN_FILES, format!("{limit} are allowed"));
    };
    let found = format!("{limit} are allowed, and about {with_room} are needed");
    Finding::lack(lack, found).with("NUMBER", &with_room.to_string())
}

fn threads(facts: &LimitFacts, config: &VmConfig) -> Vec<Finding> {
    let Needs { least, with_room } = threads_needed(config);
    let mut findings = Vec::new();
    if let Some(limit) = facts.user_threads.filter(|limit| *limit < least) {
        let found = format!("RLIMIT_NPROC is {limit}, and at least {least} threads are needed");
        let finding = Finding::lack(&of::USER_THREADS_FEW, found);
        findings.push(finding.with("NUMBER", &with_room.to_string()));
    }
    match &facts.threads {
        Some((left, file)) if *left < with_room => {
            let lack = if *left < least { &of::THREADS_FEW } else { &of::THREADS_SCARCE };
            let found = format!("{file} leaves {left}, and about {with_room} threads are needed");
            findings.push(Finding::lack(lack, found).with("FILE", file));
        }
        Some((left, _)) if findings.is_empty() => {
            findings.push(Finding::ok(&of::THREADS, format!("{left} more are allowed")));
        }
        None if findings.is_empty() => findings.push(Finding::ok(&of::THREADS, "no limit")),
        _ => {}
    }
    findings
}
