// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM: whether it can be used, and whether it has the vCPUs of a VM.
//!
//! Owns which error of opening it is which lack. Must never make a VM.

use hypervisor::{CpuidEntry, FaultTraceError, FaultTracer, ManualDirtyLog, OpenError};

use super::definitions as of;
use super::finding::{Finding, Lack};
use super::host_files::HostFiles;
use super::limits::LimitFacts;
use crate::config::VmConfig;
use crate::config::cpu_baseline::CpuBaseline;
use crate::machine::{Host, HostError};
use crate::migration::fault_choice::HostAndGuest;

/// A lack, and what was found.
pub type Lacking = (&'static Lack, String);

/// What is known of KVM.
#[derive(Clone, Debug)]
pub struct KvmFacts {
    pub support: Result<KvmSupport, Lacking>,
}

/// A KVM that can be used.
#[derive(Clone, Debug)]
pub struct KvmSupport {
    /// The most vCPUs of a VM.
    pub vcpus_max: u32,
    /// What of KVM decides about fault sources, with the best guest.
    pub known: HostAndGuest,
    pub has_manual_dirty_log: bool,
    /// What the vCPUs would be shown, or why there are none.
    pub shown: Result<Vec<CpuidEntry>, String>,
    /// The features that vCPUs can have.
    pub baseline: Option<CpuBaseline>,
    /// Why faults cannot be traced.
    pub trace: Result<(), Lacking>,
    /// The option that turns two-dimensional paging on.
    pub paging_option: Option<&'static str>,
}

impl KvmFacts {
    pub fn read(opened: Result<&Host, &HostError>, files: &HostFiles, config: &VmConfig) -> Self {
        let support = match opened {
            Ok(host) => Ok(KvmSupport::read(host, files, config)),
            Err(error) => Err((lack_of(error), error_text::chain(error))),
        };
        Self { support }
    }

    /// The features that vCPUs can have, if KVM can be used.
    pub fn baseline(&self) -> Option<CpuBaseline> {
        self.support.as_ref().ok().and_then(|support| support.baseline.clone())
    }
}

impl KvmSupport {
    fn read(host: &Host, files: &HostFiles, config: &VmConfig) -> Self {
        let capabilities = host.capabilities();
        let shadow_paging = capabilities.uses_shadow_paging();
        let module = |name: &str| files.exists(&format!("/sys/module/{name}"));
        Self {
            vcpus_max: capabilities.vcpus_max,
            known: HostAndGuest::of_host(capabilities.userfault, shadow_paging, true),
            has_manual_dirty_log: capabilities.manual_dirty_log != ManualDirtyLog::None,
            shown: host.would_show(config).map_err(|error| error_text::chain(&error)),
            baseline: host.baseline().ok().map(|baseline| CpuBaseline::of(&baseline)),
            trace: FaultTracer::check(capabilities).map_err(|error| {
                let lack = match &error {
                    FaultTraceError::NotPermitted { .. } => &of::TRACE_DENIED,
                    FaultTraceError::NotReadable(_) => &of::TRACE_UNREADABLE,
                    _ => &of::TRACE_FAILED,
                };
                (lack, error_text::chain(&error))
            }),
            paging_option: if module("kvm_intel") {
                Some("kvm_intel ept=1")
            } else if module("kvm_amd") {
                Some("kvm_amd npt=1")
            } else {
                None
            },
        }
    }
}

fn lack_of(error: &HostError) -> &'static Lack {
    match error {
        HostError::Open(OpenError::Missing { .. }) => &of::KVM_MISSING,
        HostError::Open(OpenError::NoPermission { .. }) => &of::KVM_DENIED,
        HostError::Open(OpenError::WrongVersion { .. }) => &of::KVM_VERSION,
        HostError::Open(OpenError::Incapable { .. }) => &of::KVM_INCAPABLE,
        HostError::Open(OpenError::Open { .. } | OpenError::Probe(_)) | HostError::Cpuid(_) => {
            &of::KVM_FAILED
        }
    }
}

/// What KVM lacks.
pub fn findings(facts: &KvmFacts, limits: &LimitFacts, config: &VmConfig) -> Vec<Finding> {
    let support = match &facts.support {
        Ok(support) => support,
        Err((lack, found)) => return vec![Finding::lack(lack, found)],
    };
    let patched = if support.known.has_bitmap { ", and the bundled patches" } else { "" };
    let found = format!("/dev/kvm has all required capabilities{patched}");
    let mut findings = vec![Finding::ok(&of::KVM, found)];
    findings.push(match (support.known.shadow_paging, support.paging_option) {
        (false, _) => Finding::ok(&of::PAGING, "KVM uses two-dimensional paging"),
        (true, Some(option)) => {
            let mut finding = Finding::lack(&of::SHADOW_PAGING, "KVM uses shadow paging");
            for command in &mut finding.mend {
                *command = command.replace("MODULE", option);
            }
            finding
        }
        (true, None) => {
            let found = "KVM uses shadow paging, and has no module for VMX or SVM here";
            Finding::lack(&of::SHADOW_PAGING, found).unmended()
        }
    });
    findings.extend(vcpus(support, limits, config));
    findings.push(if support.has_manual_dirty_log {
        Finding::ok(&of::DIRTY_LOG, "reading and clearing the log are separate")
    } else {
        Finding::lack(&of::PLAIN_DIRTY_LOG, "reading the log also clears it")
    });
    findings
}

/// What a VM lacks for its number of vCPUs, where KVM makes `most` and the process may run on `cpus` CPUs.
pub fn vcpu_numbers(config: &VmConfig, most: u32, cpus: u32) -> Vec<Finding> {
    let (boot, max) = (config.cpus.boot_vcpus, config.cpus.max_vcpus);
    let mut findings = Vec::new();
    if boot > most {
        let found = format!("boot={boot}, and KVM makes {most} at most");
        findings.push(Finding::lack(&of::VCPUS_TOO_MANY, found));
    } else if max > most {
        let found = format!("max={max}, and KVM makes {most} at most");
        findings.push(Finding::lack(&of::VCPUS_LATER, found));
    }
    if boot > cpus {
        let found = format!("{boot} vCPUs, and this process may run on {cpus} CPUs");
        findings.push(Finding::lack(&of::VCPUS_SHARED, found));
    }
    findings
}

fn vcpus(support: &KvmSupport, limits: &LimitFacts, config: &VmConfig) -> Vec<Finding> {
    let (boot, most, cpus) = (config.cpus.boot_vcpus, support.vcpus_max, limits.cpus);
    let mut findings = vcpu_numbers(config, most, cpus);
    if let Err(why) = &support.shown {
        findings.push(Finding::lack(&of::VCPUS_FEATURES, why));
    }
    if findings.is_empty() {
        let found = format!("{boot} of at most {most}, and {cpus} CPUs for this process");
        findings.push(Finding::ok(&of::VCPUS, found));
    }
    findings
}
