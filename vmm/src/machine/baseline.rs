// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limiting the vCPUs of a machine to a CPU baseline.
//!
//! Owns when the host is compared with it. It must never show a guest a feature that its baseline lacks; what belongs to a
//! baseline is decided in `arch::cpuid`.

use std::borrow::Cow;

use arch::cpuid::{Baseline, VmCpuid};
use hypervisor::{KvmError, MsrValue, Vcpu};
use kvm_bindings::CpuId;

use super::{Host, MachineError};
use crate::config::cpu_baseline::BaselineError;
use crate::config::cpus::CpusConfig;

/// The configured baseline.
///
/// # Errors
/// It is in a file that cannot be read, or is none.
pub fn configured(config: &CpusConfig) -> Result<Option<Baseline>, BaselineError> {
    let Some(written) = &config.baseline else { return Ok(None) };
    let mut written = written.clone();
    written.load()?;
    Ok(Some(written.to_baseline()?))
}

/// Physical address bits that a guest has at most. A baseline that cannot be read is reported where the vCPUs are made.
pub fn phys_bits_max(config: &CpusConfig) -> u8 {
    let baseline = configured(config).ok().flatten();
    baseline.map_or(config.max_phys_bits, |baseline| config.max_phys_bits.min(baseline.phys_bits()))
}

/// What this host has, as a baseline.
///
/// # Errors
/// KVM does not say it.
pub fn of_host(host: &Host, supported: &CpuId) -> Result<Baseline, KvmError> {
    let msrs = host.hypervisor.feature_msrs()?;
    let msrs: Vec<_> = msrs.iter().map(|msr| (msr.index, msr.value)).collect();
    Ok(Baseline::of_host(supported, &msrs))
}

/// The CPUID that KVM supports, without what the configured baseline lacks.
///
/// # Errors
/// Names each feature of the baseline that the host lacks.
pub fn limited<'a>(
    host: &Host,
    supported: Cow<'a, CpuId>,
    config: &CpusConfig,
) -> Result<Cow<'a, CpuId>, MachineError> {
    let Some(baseline) = configured(config)? else { return Ok(supported) };
    let ours = of_host(host, &supported).map_err(MachineError::Kvm)?;
    if let Some(below) = baseline.beyond(&ours, config.nested) {
        return Err(MachineError::BelowBaseline(below));
    }
    Ok(Cow::Owned(baseline.limit(&supported)?))
}

/// Whether a guest that boots here is told of each weakness that the configured baseline tells of. One that arrives booted
/// elsewhere, and goes on as it is.
///
/// # Errors
/// Names each weakness of the host that the baseline does not tell of.
pub fn check_for_boot(host: &Host, config: &CpusConfig) -> Result<(), MachineError> {
    let Some(baseline) = configured(config)? else { return Ok(()) };
    let ours = host.baseline().map_err(MachineError::Kvm)?;
    baseline.check(&ours, config.nested).map_err(MachineError::BelowBaseline)
}

/// Gives the vCPUs, which have their CPUID, the feature MSRs of the configured baseline.
///
/// # Errors
/// KVM refuses one.
pub fn set_msrs(vcpus: &[Vcpu], cpuid: &VmCpuid, config: &CpusConfig) -> Result<(), MachineError> {
    let Some(baseline) = configured(config)? else { return Ok(()) };
    let msrs = baseline.msrs_of_guest(cpuid.entries());
    let msrs: Vec<_> = msrs.into_iter().map(|(index, value)| MsrValue { index, value }).collect();
    let indices: Vec<_> = msrs.iter().map(|msr| msr.index).collect();
    for (index, vcpu) in (0..).zip(vcpus) {
        // One that is zero promises nothing. Not every KVM gives its vCPUs each register that it lists for them.
        let here = vcpu.read_registers(&indices).map_err(MachineError::Kvm)?;
        let differs = |msr: &&MsrValue| {
            let has = |value: u64| value != 0 && value != msr.value;
            here.iter().any(|here| here.index == msr.index && has(here.value))
        };
        let msrs: Vec<_> = msrs.iter().filter(differs).copied().collect();
        vcpu.adopt_msrs(&msrs).map_err(|source| MachineError::Vcpu { index, source })?;
    }
    Ok(())
}
