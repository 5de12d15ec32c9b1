// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host's kernel: its release, what confines processes, io_uring.
//!
//! Owns what is asked of each. Must never confine this process.

use std::path::PathBuf;

use devices::virtio::block::has_io_uring;

use super::definitions as of;
use super::finding::Finding;
use super::host_files::HostFiles;
use crate::config::VmConfig;
use crate::options::SeccompMode;
use crate::sandbox::landlock;

/// The kernel of Debian 12.
const TESTED_FROM: (u32, u32) = (6, 1);

/// What is known of the kernel.
#[derive(Clone, Debug)]
pub struct KernelFacts {
    pub release: String,
    /// Actions of filters of system calls; `None` without them.
    pub seccomp_actions: Option<String>,
    /// Why there is no Landlock.
    pub landlock: Result<(), String>,
    pub has_io_uring: bool,
    /// Whether it has a switch for io_uring (Linux 6.6).
    pub has_io_uring_switch: bool,
    /// Paths of Landlock rules that are not there.
    pub rules_without_path: Vec<PathBuf>,
}

impl KernelFacts {
    pub fn read(files: &HostFiles, config: &VmConfig) -> Self {
        let rules = config.landlock_rules.iter().flatten();
        Self {
            release: files.text("/proc/sys/kernel/osrelease").unwrap_or_default(),
            seccomp_actions: files.text("/proc/sys/kernel/seccomp/actions_avail"),
            landlock: landlock::check_kernel().map_err(|error| error_text::chain(&error)),
            has_io_uring: has_io_uring(),
            has_io_uring_switch: files.exists("/proc/sys/kernel/io_uring_disabled"),
            rules_without_path: rules
                .map(|rule| rule.path.clone())
                .filter(|path| !path.exists())
                .collect(),
        }
    }
}

/// What the kernel lacks.
pub fn findings(facts: &KernelFacts, config: &VmConfig, seccomp: SeccompMode) -> Vec<Finding> {
    let mut findings = vec![version(&facts.release)];
    let has_filters = facts
        .seccomp_actions
        .as_deref()
        .is_some_and(|actions| actions.split_whitespace().any(|action| action == "trap"));
    findings.push(match (has_filters, seccomp) {
        (true, _) => Finding::ok(&of::SECCOMP, "system calls can be filtered"),
        (false, SeccompMode::Off) => {
            Finding::ok(&of::SECCOMP, "none, and --seccomp false needs none")
        }
        (false, _) => Finding::lack(&of::NO_SECCOMP, "this kernel cannot filter system calls"),
    });
    findings.push(match (&facts.landlock, config.landlock_enable) {
        (Ok(()), _) => Finding::ok(&of::LANDLOCK, "the kernel has Landlock"),
        (Err(why), true) => Finding::lack(&of::LANDLOCK_WANTED, why),
        (Err(why), false) => Finding::lack(&of::NO_LANDLOCK, why),
    });
    if config.landlock_enable {
        for path in &facts.rules_without_path {
            let path = path.display().to_string();
            let found = format!("{path} is not there");
            findings.push(Finding::lack(&of::LANDLOCK_PATH, found).about(&path));
        }
    }
    findings.push(if facts.has_io_uring {
        Finding::ok(&of::IO_URING, "disks can use io_uring")
    } else {
        let found = "io_uring cannot be used, or lacks what disks need of it";
        let finding = Finding::lack(&of::NO_IO_URING, found);
        if facts.has_io_uring_switch { finding } else { finding.unmended() }
    });
    findings
}

fn version(release: &str) -> Finding {
    match memory::parse_release(release) {
        Some(version) if version < TESTED_FROM => {
            Finding::lack(&of::OLD_KERNEL, format!("Linux {release}"))
        }
        Some(_) => Finding::ok(&of::KERNEL, format!("Linux {release}")),
        None => Finding::ok(&of::KERNEL, "the kernel does not say its release"),
    }
}
