// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The root of the document: clock and CPUID.

use serde::{Deserialize, Serialize};

use crate::lists::{List, Structure};

/// Maximum number of CPUID entries; KVM has at most 256.
pub(crate) const CPUID_ENTRIES_MAX: usize = 256;

/// A CPUID entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "registers")]
pub struct CpuidEntry {
    pub function: u32,
    pub index: u32,
    /// Bit 0: the index counts.
    pub flags: u32,
    pub eax: u32,
    pub ebx: u32,
    pub ecx: u32,
    pub edx: u32,
}

/// The guest's clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Clock {
    /// `struct kvm_clock_data`.
    Kvm(Structure<48>),
}

/// State of the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmData {
    /// Absent if the VM never ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<Clock>,
    /// CPUID before changes for a vCPU.
    pub common_cpuid: List<CpuidEntry, CPUID_ENTRIES_MAX>,
}
