// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Capabilities of this host: KVM and processor.
//!
//! Owns the handle from which VMs are made, and the devices that it has not given back yet. It must never know a VM.

use std::borrow::Cow;
use std::path::Path;

use arch::cpuid::{Baseline, phys_bits};
use hypervisor::{
    Capabilities, CpuidEntry, FaultTracer, FaultTrialError, Hypervisor, KvmError, MsrValue,
    NoHyperv, OpenError,
};
use kvm_bindings::CpuId;
use thiserror::Error;

use super::passthrough::LeftOpenings;
use super::{MachineError, baseline, boot, features};
use crate::config::VmConfig;
use crate::config::cpus::CpusConfig;

/// The host's KVM and its capabilities, from which machines are created.
pub struct Host {
    pub(super) hypervisor: Hypervisor,
    pub(super) cpuid: CpuId,
    /// What it is still opening for machines that have ended.
    pub(super) left: LeftOpenings,
}

/// Why this host cannot run machines.
#[derive(Debug, Error)]
pub enum HostError {
    /// KVM cannot be opened.
    #[error("cannot use KVM")]
    Open(#[from] OpenError),
    /// KVM does not report its CPUID.
    #[error("cannot ask KVM for the features of its vCPUs")]
    Cpuid(#[from] KvmError),
}

impl Host {
    /// Opens KVM.
    ///
    /// # Errors
    /// Names what is missing, and how to provide it.
    pub fn open() -> Result<Self, HostError> {
        let hypervisor = Hypervisor::open(Path::new("/dev/kvm"))?;
        let cpuid = hypervisor.supported_cpuid()?;
        Ok(Self { hypervisor, cpuid, left: LeftOpenings::default() })
    }

    /// The capabilities of this host's KVM.
    pub fn capabilities(&self) -> &Capabilities {
        self.hypervisor.capabilities()
    }

    /// Tries in a VM of its own whether an access that the host refuses a vCPU is reported with its address.
    ///
    /// # Errors
    /// It is not, or it cannot be tried.
    pub fn try_refused_access(&self, tracer: Option<&FaultTracer>) -> Result<(), FaultTrialError> {
        hypervisor::try_refused_access(&self.hypervisor, tracer)
    }

    /// The CPUID that the vCPUs of a machine would be shown, had they a TSC of the host's frequency.
    ///
    /// # Errors
    /// The host has no such vCPUs.
    pub fn would_show(&self, config: &VmConfig) -> Result<Vec<CpuidEntry>, MachineError> {
        let topology = boot::topology(&config.cpus)?;
        let supported = self.supported(&config.cpus)?;
        baseline::check_for_boot(self, &config.cpus, false)?;
        Ok(features::shown(&boot::vm_cpuid(&supported, config, topology, None)))
    }

    /// Address bits of a machine's processors.
    pub(super) fn phys_bits(&self, config: &CpusConfig) -> u8 {
        phys_bits(&self.cpuid, baseline::phys_bits_max(config))
    }

    /// The supported CPUID, from which that of a machine is chosen, without what its CPU baseline lacks. For AMX this requests permission from
    /// the kernel, which has to happen before the first vCPU of the process is created.
    ///
    /// # Errors
    /// AMX or Hyper-V is configured and not available, or the baseline has what this host lacks.
    pub(super) fn supported(&self, config: &CpusConfig) -> Result<Cow<'_, CpuId>, MachineError> {
        if config.kvm_hyperv && !self.capabilities().hyperv {
            return Err(NoHyperv.into());
        }
        let all = if config.features.amx {
            Cow::Owned(self.hypervisor.supported_cpuid_with_amx()?)
        } else {
            Cow::Borrowed(&self.cpuid)
        };
        baseline::limited(self, all, config)
    }

    /// What this host has, as a baseline of CPUs.
    ///
    /// # Errors
    /// KVM does not say it.
    pub fn baseline(&self) -> Result<Baseline, KvmError> {
        baseline::of_host(self, &self.cpuid)
    }

    /// Whether a guest with this configuration that was shown this CPUID can continue on this host.
    ///
    /// # Errors
    /// Names each feature that is missing here.
    pub fn check_shown(
        &self,
        config: &VmConfig,
        shown: &[CpuidEntry],
        feature_msrs: &[MsrValue],
    ) -> Result<(), MachineError> {
        self.check_msrs(shown, feature_msrs)?;
        if shown.is_empty() {
            return Ok(());
        }
        let topology = boot::topology(&config.cpus)?;
        let ours = boot::vm_cpuid(&*self.supported(&config.cpus)?, config, topology, None);
        features::check(shown, &ours).map_err(MachineError::Features)
    }

    /// The same for the feature MSRs.
    ///
    /// # Errors
    /// Names each mismatch.
    pub fn check_msrs(
        &self,
        shown: &[CpuidEntry],
        feature_msrs: &[MsrValue],
    ) -> Result<(), MachineError> {
        if feature_msrs.is_empty() {
            return Ok(());
        }
        let ours = self.hypervisor.feature_msrs().map_err(MachineError::Kvm)?;
        features::check_msrs(feature_msrs, &ours, shown).map_err(MachineError::Features)
    }
}
