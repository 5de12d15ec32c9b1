// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The state of a vCPU.

use serde::{Deserialize, Serialize};

use crate::lists::{Fixed, List, Structure, present};
use crate::vm::{CPUID_ENTRIES_MAX, CpuidEntry};

/// Maximum number of MSRs; a kernel knows some 150.
const MSRS_MAX: usize = 1024;
/// Maximum number of words of an XSAVE area beyond the first 4096 bytes: 60 KiB. The largest of today is 11 KiB long.
const XSAVE_EXTRA_WORDS_MAX: usize = 15 << 10;

/// A model-specific register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Msr {
    /// Its number.
    pub index: u32,
    /// Its value.
    pub data: u64,
}

/// Floating-point registers, a second copy of what is in the XSAVE area.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "registers")]
pub struct Fpu {
    pub fpr: Fixed<Fixed<u8, 16>, 8>,
    pub fcw: u16,
    pub fsw: u16,
    pub ftwx: u8,
    pub last_opcode: u16,
    pub last_ip: u64,
    pub last_dp: u64,
    pub xmm: Fixed<Fixed<u8, 16>, 16>,
    pub mxcsr: u32,
}

/// The register page of the local APIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lapic {
    /// Its bytes, as signed numbers.
    pub regs: Fixed<i8, 1024>,
}

/// The XSAVE area.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Xsave {
    /// The first 4096 bytes.
    pub region: Fixed<u32, 1024>,
    /// What follows.
    #[serde(default, skip_serializing_if = "List::has_none")]
    pub extra: List<u32, XSAVE_EXTRA_WORDS_MAX>,
}

/// State of a vCPU of KVM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvmVcpu {
    /// What the vCPU was shown.
    pub cpuid: List<CpuidEntry, CPUID_ENTRIES_MAX>,
    /// Among them the TSC.
    pub msrs: List<Msr, MSRS_MAX>,
    /// `struct kvm_vcpu_events`.
    pub vcpu_events: Structure<64>,
    /// `struct kvm_regs`.
    pub regs: Structure<144>,
    /// `struct kvm_sregs`.
    pub sregs: Structure<312>,
    /// Floating-point registers.
    pub fpu: Fpu,
    /// The local APIC.
    pub lapic_state: Lapic,
    /// The XSAVE area.
    pub xsave: Xsave,
    /// `struct kvm_xcrs`.
    pub xcrs: Structure<392>,
    /// `struct kvm_mp_state`.
    pub mp_state: Structure<4>,
    /// Frequency of the TSC, if the host's KVM knows it.
    #[serde(deserialize_with = "present")]
    pub tsc_khz: Option<u32>,
    /// `struct kvm_nested_state` with its data, if there is more than a header.
    #[serde(deserialize_with = "present")]
    pub nested_state: Option<Structure<8320>>,
    /// Whether MSRs of Hyper-V's interrupt controller are at the end of `msrs`.
    #[serde(default)]
    pub hyperv_synic: bool,
}

/// State of a vCPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Vcpu {
    /// Of KVM.
    Kvm(Box<KvmVcpu>),
}
