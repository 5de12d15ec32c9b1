// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Faults on memory that is still to arrive: userfaultfd, and what vCPUs can do instead.
//!
//! Owns what is asked of userfaultfd. It must never choose between fault sources itself: `migration::fault_choice` does.

use ::memory::ZoneKind;
use vm_migration::layout::{Backing, RegionInfo};
use vm_migration::uffd::{self, Features, UffdError};

use super::definitions as of;
use super::finding::Finding;
use super::host_files::HostFiles;
use super::kvm::{KvmFacts, Lacking};
use super::memory::MemoryFacts;
use crate::migration::fault_choice::{Choice, HostAndGuest, choose, has_hyperv, may_nest};

/// What is known of userfaultfd.
#[derive(Clone, Debug)]
pub struct FaultFacts {
    /// Its features.
    pub features: Result<Features, Lacking>,
    /// Whether the process may use /dev/userfaultfd.
    pub has_node: bool,
    /// The value of `vm.unprivileged_userfaultfd`.
    pub unprivileged: Option<u64>,
}

impl FaultFacts {
    pub fn read(files: &HostFiles) -> Self {
        let features = uffd::survey().map_err(|error| {
            let lack = match &error {
                UffdError::NotPermitted(_) => &of::UFFD_DENIED,
                _ => &of::UFFD_MISSING,
            };
            (lack, error_text::chain(&error))
        });
        Self {
            features,
            has_node: files.refusal("/dev/userfaultfd").is_none(),
            unprivileged: files.number("/proc/sys/vm/unprivileged_userfaultfd"),
        }
    }
}

/// What is lacking for postcopy.
pub fn findings(faults: &FaultFacts, kvm: &KvmFacts, memory: &MemoryFacts) -> Vec<Finding> {
    let mut findings = vec![userfaultfd(faults, memory)];
    let Ok(support) = &kvm.support else { return findings };
    // Without a CPUID the vCPUs are lacking, which has been said.
    let shown = support.shown.as_deref().unwrap_or_default();
    let known = HostAndGuest {
        shared_memory: memory.kinds.iter().all(|zone| zone.kind == ZoneKind::Shared),
        may_nest: may_nest(shown),
        has_hyperv: has_hyperv(shown),
        ..support.known
    };
    findings.push(match choose(known) {
        Choice::Exit => {
            let found = "auto takes exit: this KVM lets a vCPU leave the guest at a missing page";
            Finding::ok(&of::FAULT_SOURCE, found)
        }
        Choice::Sigbus => {
            let found = "auto takes sigbus: this KVM reports the address of a refused access";
            Finding::ok(&of::FAULT_SOURCE, found)
        }
        Choice::Uffd(why) => Finding::lack(&of::FAULTS_BY_UFFD, format!("auto takes uffd: {why}")),
    });
    findings.push(match &support.trace {
        _ if known.says_where => Finding::ok(
            &of::FAULT_TRACE,
            "not needed, as KVM reports the address of a refused access",
        ),
        Ok(()) => Finding::ok(&of::FAULT_TRACE, "faults can be traced by BPF"),
        Err((lack, found)) => {
            let program = std::env::current_exe().unwrap_or_else(|_| "cloud-hypervisor".into());
            Finding::lack(lack, found).with("PROGRAM", &program.display().to_string())
        }
    });
    findings
}

fn userfaultfd(faults: &FaultFacts, memory: &MemoryFacts) -> Finding {
    let features = match &faults.features {
        Ok(features) => features,
        Err((lack, found)) => return Finding::lack(lack, found),
    };
    let regions = memory.kinds.iter().map(|zone| RegionInfo {
        name: zone.id.clone(),
        gpa: 0,
        len_bytes: zone.size_bytes,
        host_page_bytes: zone.page_bytes,
        backing: match zone.kind {
            ZoneKind::Shared => Backing::Shared,
            ZoneKind::PrivateAnonymous | ZoneKind::PrivateFile => Backing::Anonymous,
        },
    });
    let regions: Vec<_> = regions.collect();
    if let Err(error) = features.check(&regions) {
        return Finding::lack(&of::UFFD_FEATURES, error_text::chain(&error));
    }
    let way = match (faults.has_node, faults.unprivileged) {
        (true, _) => "by /dev/userfaultfd",
        (false, Some(1)) => "by the system call, which vm.unprivileged_userfaultfd=1 allows",
        (false, _) => "by the system call, with CAP_SYS_PTRACE",
    };
    let (has, lacks): (Vec<_>, Vec<_>) = features.each().into_iter().partition(|(_, is)| *is);
    let names = |list: Vec<(&'static str, bool)>| {
        list.into_iter().map(|(name, _)| name).collect::<Vec<_>>().join(", ")
    };
    let without =
        if lacks.is_empty() { String::new() } else { format!("; without {}", names(lacks)) };
    Finding::ok(&of::USERFAULTFD, format!("{way}, with {}{without}", names(has)))
}
