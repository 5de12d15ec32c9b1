// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved form of a vCPU: every register and pending event, for migrations and snapshots.
//!
//! Owns the form, its versions and its limits; `vcpu_save` reads and sets it. Must never omit a
//! value silently.

use std::collections::BTreeSet;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_VCPUEVENT_VALID_TRIPLE_FAULT, kvm_cpuid_entry2,
    kvm_debugregs, kvm_lapic_state, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use zerocopy::FromBytes;

use crate::blob::{Blob, BlobError};
use crate::error::KvmError;
use crate::ioctl::{self, NestedBuffer};
use crate::msr::MsrValue;
use crate::tsc::TscState;

/// Newest version of [`VcpuState`] that is read. Version 2 adds `ssp` and a pending triple fault. The
/// lowest version that can represent a state is written.
pub const VCPU_STATE_VERSION: u32 = 2;
/// Maximum number of MSRs: more than any kernel supports.
const MSRS_MAX: usize = 1024;
/// Length of a nested state with only a header, of a guest without nested guests.
pub(crate) const NESTED_HEADER_LEN_BYTES: usize = 128;

const PAGE_LEN_BYTES: u64 = 4096;
/// Structures shared between guest and KVM: MSR, bits of it that are not address bits, length.
const SHARED_STRUCTURES: [(u32, u64, u64); 12] = [
    // Wall clock and system time, with old and new MSR numbers.
    (0x11, 0, 12),
    (0x4b56_4d00, 0, 12),
    (0x12, 1, 32),
    (0x4b56_4d01, 1, 32),
    // Asynchronous page faults, steal time, end of interrupt.
    (0x4b56_4d02, 0x3f, 64),
    (0x4b56_4d03, 0x3f, 64),
    (0x4b56_4d04, 3, 4),
    // Of Hyper-V: hypercalls, clock, assistance of a vCPU, events, messages; a page each.
    (0x4000_0001, 0xfff, PAGE_LEN_BYTES),
    (0x4000_0021, 0xfff, PAGE_LEN_BYTES),
    (0x4000_0073, 0xfff, PAGE_LEN_BYTES),
    (0x4000_0082, 0xfff, PAGE_LEN_BYTES),
    (0x4000_0083, 0xfff, PAGE_LEN_BYTES),
];

/// A CPUID entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuidEntry {
    /// Leaf.
    pub function: u32,
    /// Sub-leaf.
    pub index: u32,
    /// The kernel's flags, such as whether the sub-leaf is significant.
    pub flags: u32,
    /// EAX, EBX, ECX and EDX.
    pub answer: [u32; 4],
}

/// Complete state of a vCPU; untrusted until accepted by [`crate::Vcpu::set_state`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    /// Version of this structure.
    pub version: u32,
    /// CPUID of the guest.
    pub cpuid: Vec<CpuidEntry>,
    /// Whether the vCPU runs, is halted, or waits for its start by another vCPU.
    pub mp_state: u32,
    /// General registers.
    pub regs: kvm_regs,
    /// Special registers.
    pub sregs: kvm_sregs,
    /// Page directory pointers of PAE paging, if the host reports them.
    pub pdptrs: Option<[u64; 4]>,
    /// XSAVE area in the standard format.
    pub xsave: Blob,
    /// Extended control registers.
    pub xcrs: kvm_xcrs,
    /// Debug registers.
    pub debugregs: kvm_debugregs,
    /// Register page of the local APIC.
    pub lapic: Blob,
    /// MSRs without the TSC.
    pub msrs: Vec<MsrValue>,
    /// Pending exceptions, interrupts, NMI and SMI.
    pub events: kvm_vcpu_events,
    /// Time-stamp counter.
    pub tsc: TscState,
    /// Nested state, if any.
    pub nested: Option<Blob>,
    /// Shadow stack pointer, if the vCPU was shown shadow stacks. Since version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssp: Option<u64>,
}

/// Why a vCPU state cannot be read or set.
#[derive(Debug, Error)]
pub enum VcpuStateError {
    /// The version is unknown.
    #[error("vCPU state has version {0}, and {VCPU_STATE_VERSION} is the newest known here")]
    Version(u32),
    /// The state has a part that its version does not include.
    #[error("vCPU state of version {version} has {what}, which came with a later version")]
    NotInVersion {
        /// Version of the state.
        version: u32,
        /// Name of the part.
        what: &'static str,
    },
    /// The guest uses shadow stacks, and this KVM cannot set the pointer.
    #[error(
        "the guest uses shadow stacks, whose pointer KVM of this host cannot set (Linux 6.18 can)"
    )]
    ShadowStack,
    /// A triple fault is pending, which this KVM cannot represent.
    #[error("a triple fault waits for the vCPU, which KVM of this host cannot be told")]
    TripleFault,
    /// A list is too long.
    #[error("vCPU state has {count} {what}, and at most {limit} are possible")]
    TooMany {
        /// Name of the list.
        what: &'static str,
        /// Its length.
        count: usize,
        /// The maximum.
        limit: usize,
    },
    /// A part is too long.
    #[error("the {what} of the vCPU state cannot be used on this host")]
    Blob {
        /// Name of the part.
        what: &'static str,
        /// The cause.
        #[source]
        source: BlobError,
    },
    /// The nested state is inconsistent, or the host has no nested virtualisation.
    #[error("the guest runs guests of its own, which this host cannot take over")]
    Nested,
    /// The TSC cannot run at the guest's frequency.
    #[error(
        "the guest's TSC runs at {wanted_khz} kHz, this host's at {host_khz} kHz, and this host \
         cannot scale it: migrate between hosts of the same frequency"
    )]
    TscFrequency {
        /// Frequency of the guest's TSC.
        wanted_khz: u32,
        /// Frequency of the host's TSC.
        host_khz: u32,
    },
    /// MSRs that the guest relies on cannot have their values on this host.
    #[error("this host does not take {}", list(.0))]
    MsrsRefused(Vec<MsrValue>),
    /// The kernel refused a part.
    #[error("a part of a vCPU's state could not be read or set")]
    Kernel(#[source] KvmError),
}

impl From<KvmError> for VcpuStateError {
    fn from(error: KvmError) -> Self {
        Self::Kernel(error)
    }
}

fn list(msrs: &[MsrValue]) -> String {
    let names: Vec<String> =
        msrs.iter().map(|msr| format!("MSR {:#x} = {:#x}", msr.index, msr.value)).collect();
    names.join(", ")
}

impl VcpuState {
    /// Checks all lengths in the state. Values are checked by the kernel.
    pub fn check(&self) -> Result<(), VcpuStateError> {
        let at_most = |what, count, limit| {
            if count > limit { Err(VcpuStateError::TooMany { what, count, limit }) } else { Ok(()) }
        };
        if !(1..=VCPU_STATE_VERSION).contains(&self.version) {
            return Err(VcpuStateError::Version(self.version));
        }
        if let (Some(what), version @ 1) = (self.beyond_version_1(), self.version) {
            return Err(VcpuStateError::NotInVersion { version, what });
        }
        at_most("CPUID leaves", self.cpuid.len(), KVM_MAX_CPUID_ENTRIES)?;
        at_most("model-specific registers", self.msrs.len(), MSRS_MAX)?;
        self.lapic_state()?;
        self.nested_buffer()?;
        Ok(())
    }

    /// The part of this state that version 1 cannot represent, if any.
    pub(crate) fn beyond_version_1(&self) -> Option<&'static str> {
        if self.ssp.is_some() {
            Some("a shadow-stack pointer")
        } else if has_triple_fault(&self.events) {
            Some("a pending triple fault")
        } else {
            None
        }
    }

    /// Guest physical addresses of pages that KVM itself accesses for this vCPU.
    ///
    /// KVM accesses them from [`crate::Vcpu::set_state`] on, and cannot wait for them with every fault
    /// source of postcopy, so they must be fetched first.
    pub fn pages_used_by_kvm(&self) -> BTreeSet<u64> {
        let mut pages = BTreeSet::new();
        for (index, flag_bits, len_bytes) in SHARED_STRUCTURES {
            let values = self.msrs.iter().filter(|msr| msr.index == index && msr.value != 0);
            for msr in values {
                let first = msr.value & !flag_bits;
                let last = first.saturating_add(len_bytes - 1);
                pages.extend([first & !(PAGE_LEN_BYTES - 1), last & !(PAGE_LEN_BYTES - 1)]);
            }
        }
        pages
    }

    pub(crate) fn lapic_state(&self) -> Result<kvm_lapic_state, VcpuStateError> {
        let mut bytes = [0; size_of::<kvm_lapic_state>()];
        self.lapic
            .fill(&mut bytes)
            .map_err(|source| VcpuStateError::Blob { what: "local APIC", source })?;
        Ok(kvm_lapic_state::read_from_bytes(&bytes).unwrap_or_default())
    }

    /// The nested state in a buffer; `None` if there is no relevant one.
    pub(crate) fn nested_buffer(&self) -> Result<Option<Box<NestedBuffer>>, VcpuStateError> {
        let Some(blob) = &self.nested else { return Ok(None) };
        let mut buffer = NestedBuffer::new();
        blob.fill(buffer.bytes_mut())
            .map_err(|source| VcpuStateError::Blob { what: "nested state", source })?;
        let size_bytes = buffer.size_bytes();
        if (NESTED_HEADER_LEN_BYTES..=ioctl::NESTED_STATE_LEN_BYTES).contains(&size_bytes) {
            Ok(Some(buffer))
        } else {
            Err(VcpuStateError::Nested)
        }
    }

    /// The CPUID as the kernel's structure.
    pub(crate) fn kernel_cpuid(&self) -> Result<CpuId, VcpuStateError> {
        let entries: Vec<_> = self
            .cpuid
            .iter()
            .map(|entry| {
                let [eax, ebx, ecx, edx] = entry.answer;
                let CpuidEntry { function, index, flags, .. } = *entry;
                kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, padding: [0; 3] }
            })
            .collect();
        CpuId::from_entries(&entries).map_err(|_| VcpuStateError::TooMany {
            what: "CPUID leaves",
            count: entries.len(),
            limit: KVM_MAX_CPUID_ENTRIES,
        })
    }
}

/// Whether a triple fault is pending.
pub(crate) fn has_triple_fault(events: &kvm_vcpu_events) -> bool {
    events.flags & KVM_VCPUEVENT_VALID_TRIPLE_FAULT != 0 && events.triple_fault.pending != 0
}

#[cfg(test)]
#[path = "vcpu_state_tests.rs"]
mod tests;
