// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Capabilities of this host: KVM and processor.
//!
//! Owns the handle from which VMs are made, and the devices that it has not given back yet. It must never know a VM.

use std::borrow::Cow;
use std::path::Path;

use hypervisor::{Capabilities, CpuidEntry, Hypervisor, KvmError, MsrValue, NoHyperv, OpenError};
use kvm_bindings::CpuId;
use thiserror::Error;

use super::passthrough::LeftOpenings;
use super::{MachineError, boot, features};
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

    /// The supported CPUID, from which that of a machine is chosen. For AMX this requests permission from
    /// the kernel, which has to happen before the first vCPU of the process is created.
    ///
    /// # Errors
    /// AMX or Hyper-V is configured and not available.
    pub(super) fn supported(&self, config: &CpusConfig) -> Result<Cow<'_, CpuId>, MachineError> {
        if config.kvm_hyperv && !self.capabilities().hyperv {
            return Err(NoHyperv.into());
        }
        if config.features.amx {
            return Ok(Cow::Owned(self.hypervisor.supported_cpuid_with_amx()?));
        }
        Ok(Cow::Borrowed(&self.cpuid))
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
