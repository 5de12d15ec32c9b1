// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Control-flow enforcement (CET) of guests: shadow stacks and indirect branch tracking.
//!
//! Owns access to the shadow-stack pointer, which is not a model-specific register (Linux 6.18: a register
//! of KVM, by KVM_GET_ONE_REG and KVM_SET_ONE_REG), and the rule that a guest is not shown features whose
//! state could not be saved. The other registers are on KVM's list of model-specific ones.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use kvm_ioctls::{Error, VcpuFd};

/// Id of the shadow stack pointer: x86, 64 bits, KVM register 0 (KVM_REG_GUEST_SSP).
const GUEST_SSP: u64 = 0x2030_0003_0000_0000;
/// MSR_IA32_U_CET, MSR_IA32_S_CET, MSR_IA32_PL0_SSP to PL3_SSP, MSR_IA32_INT_SSP_TAB.
pub const CET_MSRS: [u32; 7] = [0x6a0, 0x6a2, 0x6a4, 0x6a5, 0x6a6, 0x6a7, 0x6a8];

const LEAF_FEATURES: u32 = 7;
const LEAF_XSAVE: u32 = 0xd;
/// Bit in ECX of leaf 7.
const SHSTK: u32 = 1 << 7;
/// Bit in EDX of leaf 7.
const IBT: u32 = 1 << 20;
/// XSAVE components of both features, in ECX of leaf 0xD, subleaf 1.
const XSS_CET: u32 = 3 << 11;

/// Whether CPUID entries show shadow stacks; only then does the pointer exist.
pub fn is_shown(cpuid: &[kvm_cpuid_entry2]) -> bool {
    cpuid
        .iter()
        .any(|leaf| (leaf.function, leaf.index) == (LEAF_FEATURES, 0) && leaf.ecx & SHSTK != 0)
}

/// Hides features that this host cannot save: shadow stacks without access to their pointer, and both
/// features if KVM does not list their MSRs.
pub fn hide_unsaved(cpuid: &mut CpuId, one_reg: bool, msr_indices: &[u32]) {
    let listed = CET_MSRS.iter().all(|msr| msr_indices.contains(msr));
    let (shadow_stacks, branches) = (one_reg && listed, listed);
    for leaf in cpuid.as_mut_slice() {
        match (leaf.function, leaf.index) {
            (LEAF_FEATURES, 0) => {
                leaf.ecx &= if shadow_stacks { u32::MAX } else { !SHSTK };
                leaf.edx &= if branches { u32::MAX } else { !IBT };
            }
            (LEAF_XSAVE, 1) if !shadow_stacks && !branches => leaf.ecx &= !XSS_CET,
            _ => {}
        }
    }
}

/// vCPU registers with KVM's register ids.
pub trait OneRegs {
    /// Reads register `number` into `bytes`.
    fn get(&self, number: u64, bytes: &mut [u8]) -> Result<(), Error>;
    /// Writes register `number`.
    fn set(&self, number: u64, bytes: &[u8]) -> Result<(), Error>;
}

impl OneRegs for VcpuFd {
    fn get(&self, number: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.get_one_reg(number, bytes).map(drop)
    }

    fn set(&self, number: u64, bytes: &[u8]) -> Result<(), Error> {
        self.set_one_reg(number, bytes).map(drop)
    }
}

/// The shadow stack pointer of a vCPU, if it was shown shadow stacks.
pub fn save(vcpu: &impl OneRegs, cpuid: &[kvm_cpuid_entry2]) -> Result<Option<u64>, Error> {
    if !is_shown(cpuid) {
        return Ok(None);
    }
    let mut bytes = [0; 8];
    vcpu.get(GUEST_SSP, &mut bytes)?;
    Ok(Some(u64::from_ne_bytes(bytes)))
}

/// Sets the saved pointer, if there is one; the vCPU's CPUID must be set first.
pub fn restore(vcpu: &impl OneRegs, pointer: Option<u64>) -> Result<(), Error> {
    pointer.map_or(Ok(()), |pointer| vcpu.set(GUEST_SSP, &pointer.to_ne_bytes()))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    fn shown(one_reg: bool, msrs: &[u32]) -> [u32; 3] {
        let leaf = |function, index| kvm_cpuid_entry2 {
            function,
            index,
            ecx: u32::MAX,
            edx: u32::MAX,
            ..Default::default()
        };
        let mut cpuid = CpuId::from_entries(&[leaf(7, 0), leaf(7, 1), leaf(0xd, 1)]).unwrap();
        hide_unsaved(&mut cpuid, one_reg, msrs);
        let [features, others, xsave] = cpuid.as_slice() else { panic!("three leaves") };
        assert_eq!([others.ecx, others.edx, features.edx | IBT], [u32::MAX; 3]);
        assert_eq!(is_shown(cpuid.as_slice()), features.ecx & SHSTK != 0);
        [features.ecx, features.edx, xsave.ecx]
    }

    #[test]
    fn a_guest_is_shown_what_can_be_saved() {
        assert_eq!(shown(true, &CET_MSRS), [u32::MAX; 3]);
        assert_eq!(shown(false, &CET_MSRS), [!SHSTK, u32::MAX, u32::MAX]);
        // MSRs that cannot be saved: neither feature is shown.
        for one_reg in [false, true] {
            assert_eq!(shown(one_reg, &CET_MSRS[1..]), [!SHSTK, !IBT, !XSS_CET]);
            assert_eq!(shown(one_reg, &[]), [!SHSTK, !IBT, !XSS_CET]);
        }
    }
}
