// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A vCPU's Hyper-V registers: KVM is asked for them, and they are part of the vCPU's state.
//!
//! Owns the request, the list of registers that KVM has but does not list, and the answer to
//! hypercalls that KVM leaves to its user. Which of them the guest is told of is in the CPUID, which is not decided here.
//!
//! Behaviour: Documentation/virt/kvm/api.rst, `KVM_CAP_HYPERV_SYNIC`, `KVM_CAP_HYPERV_ENFORCE_CPUID`
//! and `KVM_EXIT_HYPERV`; numbers and results: Hypervisor Top Level Functional Specification,
//! sections 11 and 12.

use kvm_bindings::{KVM_CAP_HYPERV_ENFORCE_CPUID, KVM_CAP_HYPERV_SYNIC, kvm_enable_cap};

use crate::error::{KvmContext, KvmError};
use crate::vcpu::Vcpu;

/// `HV_STATUS_INVALID_HYPERCALL_CODE`: there is no such hypercall.
const INVALID_HYPERCALL_CODE: u64 = 2;

/// Registers of the synthetic interrupt controller and of its four timers that
/// `KVM_GET_MSR_INDEX_LIST` leaves out: pages of events and messages, 16 sources, and the timers'
/// configuration and count.
pub(crate) const UNLISTED_MSRS: [std::ops::RangeInclusive<u32>; 3] =
    [0x4000_0082..=0x4000_0083, 0x4000_0090..=0x4000_009f, 0x4000_00b0..=0x4000_00b7];

/// Configuration and count of each timer, in turn.
const TIMERS: std::ops::RangeInclusive<u32> = 0x4000_00b0..=0x4000_00b7;

/// The order in which a register of a saved state is written. That is ascending, so that the guest's identity is before its
/// hypercalls; but for timers: a count enables one that enables itself and has expired, unless its configuration follows.
pub(crate) fn order(msr: u32) -> u32 {
    if TIMERS.contains(&msr) { msr ^ 1 } else { msr }
}

/// This KVM cannot present itself as Hyper-V.
#[derive(Debug, thiserror::Error)]
#[error(
    "KVM of this kernel cannot present itself as Hyper-V (it is built without CONFIG_KVM_HYPERV): \
     leave kvm_hyperv=on out"
)]
pub struct NoHyperv;

impl Vcpu {
    /// Gives the vCPU the registers of Hyper-V, before its CPUID or state is set. Where KVM can, it refuses those that the
    /// CPUID does not promise.
    ///
    /// # Errors
    /// The kernel's error, also where [`crate::Capabilities::hyperv`] is false.
    pub fn enable_hyperv(&mut self) -> Result<(), KvmError> {
        let enable = |cap: u32, args: [u64; 4]| {
            self.fd.enable_cap(&kvm_enable_cap { cap, args, ..Default::default() })
        };
        enable(KVM_CAP_HYPERV_SYNIC, [0; 4]).context("give a vCPU the registers of Hyper-V")?;
        if self.vm().capabilities.hyperv_enforces_cpuid {
            enable(KVM_CAP_HYPERV_ENFORCE_CPUID, [1, 0, 0, 0])
                .context("limit a vCPU's registers of Hyper-V to those of its CPUID")?;
        }
        self.has_hyperv = true;
        Ok(())
    }

    /// Answers an exit of Hyper-V. Register accesses have been completed by KVM, which only reports them and takes no answer
    /// to them; a hypercall that it forwards needs a device that no guest here has.
    pub(crate) fn answer_hyperv(&mut self) {
        let exit = &mut self.fd.get_kvm_run().__bindgen_anon_1;
        exit.hyperv.u.hcall.result = INVALID_HYPERCALL_CODE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_has_its_count_before_its_configuration() {
        let mut msrs = vec![0x4000_0000, 0x4000_0001, 0x4000_0080, 0x4000_00b0, 0x4000_00b1];
        msrs.extend([0x4000_00b6, 0x4000_00b7, 0xc000_0080]);
        msrs.sort_by_key(|msr| order(*msr));
        let timers = [0x4000_00b1, 0x4000_00b0, 0x4000_00b7, 0x4000_00b6];
        assert_eq!(msrs[..3], [0x4000_0000, 0x4000_0001, 0x4000_0080]);
        assert_eq!(msrs[3..7], timers);
    }
}
