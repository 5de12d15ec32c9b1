// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limiting the vCPUs of a machine to a CPU baseline.
//!
//! Owns when the host is compared with it. It must never show a guest a feature that its baseline lacks; what belongs to a
//! baseline is decided in `arch::cpuid`.

use std::borrow::Cow;

use arch::cpuid::{Baseline, BelowBaseline, VmCpuid};
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

/// Whether the configured baseline tells a guest that boots here of each weakness of the host. One that arrives booted
/// elsewhere, and goes on as it is.
///
/// # Errors
/// Names each weakness of the host that the baseline does not tell of, unless this `is_reboot`, and what the host lacks.
pub fn check_for_boot(
    host: &Host,
    config: &CpusConfig,
    is_reboot: bool,
) -> Result<(), MachineError> {
    let Some(baseline) = configured(config)? else { return Ok(()) };
    let ours = host.baseline().map_err(MachineError::Kvm)?;
    let untold = untold_at_boot(&baseline, &ours, config.nested, is_reboot)
        .map_err(MachineError::BelowBaseline)?;
    if let Some(untold) = untold {
        log::warn!(
            "this host has weaknesses of which the VM's CPU baseline does not tell: {untold}; the guest boots again all the \
             same, and does not mitigate them"
        );
    }
    Ok(())
}

/// What a guest is not told of, although it may boot again.
///
/// # Errors
/// What keeps it from booting.
fn untold_at_boot(
    baseline: &Baseline,
    ours: &Baseline,
    nested: bool,
    is_reboot: bool,
) -> Result<Option<BelowBaseline>, BelowBaseline> {
    match baseline.check(ours, nested) {
        Ok(()) => Ok(None),
        // It may have moved here since it booted for the first time, and would be lost. What the host lacks it cannot have.
        Err(below) if is_reboot && baseline.beyond(ours, nested).is_none() => Ok(Some(below)),
        Err(below) => Err(below),
    }
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

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::json;

    use super::*;
    use crate::config::cpu_baseline::CpuBaseline;

    const SHA: u64 = 1 << 29;
    const RDCL_NO: u64 = 1;
    /// A weakness.
    const RRSBA: u64 = 1 << 19;

    /// An Intel processor with these instructions, promises and weaknesses.
    fn processor(instructions: u64, capabilities: u64) -> Baseline {
        let hex = |number: u64| format!("{number:#x}");
        let written: CpuBaseline = serde_json::from_value(json!({
            "cpuid": [
                {"leaf": "0x0", "eax": "0x10", "ebx": "0x756e6547", "ecx": "0x6c65746e", "edx": "0x49656e69"},
                {"leaf": "0x7", "ebx": hex(instructions), "edx": "0x20000000"},
                {"leaf": "0x80000001", "edx": "0x20000000"},
                {"leaf": "0x80000008", "eax": "0x2e"},
            ],
            "msrs": [{"index": "0x10a", "value": hex(capabilities)}],
        }))
        .unwrap();
        written.to_baseline().unwrap()
    }

    #[test]
    fn a_guest_boots_again_where_it_is_not_told_of_a_weakness_and_not_for_the_first_time() {
        let pool = processor(0, RDCL_NO);
        let weaker = processor(0, RDCL_NO | RRSBA);
        let told = |ours, is_reboot| {
            let untold = untold_at_boot(&pool, ours, false, is_reboot);
            untold.map(|below| below.map(|below| below.to_string()))
        };
        let refused = told(&weaker, false).unwrap_err().to_string();
        assert!(refused.contains("RRSBA"), "{refused}");
        let warned = told(&weaker, true).unwrap().unwrap();
        assert!(warned.contains("RRSBA"), "{warned}");
        for is_reboot in [false, true] {
            assert_eq!(told(&pool, is_reboot).unwrap(), None);
        }
    }

    #[test]
    fn a_guest_does_not_boot_again_where_the_host_lacks_something() {
        let pool = processor(SHA, RDCL_NO);
        for (lacking, name) in
            [(processor(0, RDCL_NO | RRSBA), "sha_ni"), (processor(SHA, RRSBA), "RDCL_NO")]
        {
            for is_reboot in [false, true] {
                let error = untold_at_boot(&pool, &lacking, false, is_reboot).unwrap_err();
                assert!(error.to_string().contains(name), "{error}");
            }
        }
    }
}
