// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Opening KVM and querying its capabilities.
//!
//! Owns the handle to /dev/kvm, the list of required capabilities, and the record of optional ones that
//! are present. Must never guess: a capability counts only if the kernel reports it.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvm_bindings as kvm;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, Msrs};
use kvm_ioctls::Kvm;
use serde::Serialize;
use thiserror::Error;

use crate::amx::{self, AmxError};
use crate::error::{KvmContext, KvmError};
use crate::msr;
use crate::shadow_stack;
use crate::userfault::UserfaultSupport;

/// The only API version that was ever released for general use.
const API_VERSION: i32 = 12;

/// Required capabilities, with what they are needed for.
const REQUIRED: [(u32, &str); 19] = [
    (kvm::KVM_CAP_USER_MEMORY, "KVM_CAP_USER_MEMORY (memory slots)"),
    (kvm::KVM_CAP_READONLY_MEM, "KVM_CAP_READONLY_MEM (read-only memory slots)"),
    (kvm::KVM_CAP_SET_TSS_ADDR, "KVM_CAP_SET_TSS_ADDR (real mode on Intel)"),
    (kvm::KVM_CAP_SET_IDENTITY_MAP_ADDR, "KVM_CAP_SET_IDENTITY_MAP_ADDR (real mode on Intel)"),
    (kvm::KVM_CAP_IRQCHIP, "KVM_CAP_IRQCHIP (interrupt controllers in the kernel)"),
    (kvm::KVM_CAP_IRQ_ROUTING, "KVM_CAP_IRQ_ROUTING (message-signalled interrupts)"),
    (kvm::KVM_CAP_IRQFD, "KVM_CAP_IRQFD (interrupts from eventfds)"),
    (kvm::KVM_CAP_IOEVENTFD, "KVM_CAP_IOEVENTFD (notifications by eventfd)"),
    (kvm::KVM_CAP_IOEVENTFD_ANY_LENGTH, "KVM_CAP_IOEVENTFD_ANY_LENGTH (notifications by eventfd)"),
    (kvm::KVM_CAP_X2APIC_API, "KVM_CAP_X2APIC_API (more than 255 vCPUs)"),
    (kvm::KVM_CAP_IMMEDIATE_EXIT, "KVM_CAP_IMMEDIATE_EXIT (pausing vCPUs)"),
    (kvm::KVM_CAP_EXT_CPUID, "KVM_CAP_EXT_CPUID (vCPU features)"),
    (kvm::KVM_CAP_MP_STATE, "KVM_CAP_MP_STATE (vCPU state)"),
    (kvm::KVM_CAP_VCPU_EVENTS, "KVM_CAP_VCPU_EVENTS (vCPU state)"),
    (kvm::KVM_CAP_DEBUGREGS, "KVM_CAP_DEBUGREGS (vCPU state)"),
    (kvm::KVM_CAP_XSAVE, "KVM_CAP_XSAVE (vCPU state)"),
    (kvm::KVM_CAP_XCRS, "KVM_CAP_XCRS (vCPU state)"),
    (kvm::KVM_CAP_ADJUST_CLOCK, "KVM_CAP_ADJUST_CLOCK (the guest's clock)"),
    (kvm::KVM_CAP_GET_TSC_KHZ, "KVM_CAP_GET_TSC_KHZ (the guest's TSC)"),
];

/// Module parameters that say whether KVM uses two-dimensional paging.
const TWO_DIMENSIONAL_PAGING: [&str; 2] =
    ["/sys/module/kvm_intel/parameters/ept", "/sys/module/kvm_amd/parameters/npt"];

/// Why KVM cannot be used.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The device does not exist.
    #[error(
        "{path} does not exist: load the module kvm_intel or kvm_amd, and switch virtualisation \
         on in the firmware or, in a virtual machine, on its host"
    )]
    Missing {
        /// Path of the device.
        path: PathBuf,
    },
    /// The process lacks the permission.
    #[error("no permission to open {path}: add the user to the group that owns it, or run as root")]
    NoPermission {
        /// Path of the device.
        path: PathBuf,
    },
    /// The device cannot be opened for another reason, or the path contains a NUL.
    #[error("cannot open {path}")]
    Open {
        /// Path of the device.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The KVM API has an unknown version.
    #[error("{path} answers with API version {version} where KVM has {API_VERSION}")]
    WrongVersion {
        /// Path of the device.
        path: PathBuf,
        /// The version; -1 if it is not a KVM device.
        version: i32,
    },
    /// Required capabilities are missing.
    #[error("KVM of this kernel lacks {}: use a newer kernel", missing.join(", "))]
    Incapable {
        /// Names of the missing capabilities, with what they are for.
        missing: Vec<&'static str>,
    },
    /// A probe failed.
    #[error("cannot find out what KVM can do")]
    Probe(#[source] KvmError),
}

/// Support for a manual dirty log (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum ManualDirtyLog {
    /// Not supported: reading the log also clears it, and write-protects everything at once.
    None,
    /// Reading and clearing are separate.
    Protect,
    /// As `Protect`, and all pages start dirty, and are write-protected only when their bit is cleared.
    InitiallySet,
}

/// Optional capabilities of KVM. Numbers are zero if the capability is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// Support for a manual dirty log.
    pub manual_dirty_log: ManualDirtyLog,
    /// Maximum size of the dirty ring of a vCPU in bytes.
    pub dirty_ring_len_bytes_max: u32,
    /// Whether a vCPU's TSC can have another frequency than the host's.
    pub tsc_control: bool,
    /// Whether the TSC frequency of a VM can be set, before it has vCPUs.
    pub vm_tsc_control: bool,
    /// Whether vCPUs have attributes, such as the TSC offset.
    pub vcpu_attributes: bool,
    /// Whether XSAVE areas can exceed 4 KiB.
    pub xsave2: bool,
    /// Whether the special registers include page directory pointers.
    pub sregs2: bool,
    /// Maximum size of the nested state in bytes. Some hosts report it and have no nested state.
    pub nested_state_len_bytes: u32,
    /// Whether stage-2 can be filled in advance.
    pub pre_fault_memory: bool,
    /// Whether memory fault exits carry an address. Even so, some do not.
    pub memory_fault_info: bool,
    /// Userfault exits for missing pages, which no released kernel has.
    pub userfault: Option<UserfaultSupport>,
    /// Whether the guest can be told that it was paused.
    pub kvmclock_ctrl: bool,
    /// Whether the clock can be set relative to real time.
    pub clock_realtime: bool,
    /// Whether the clock is read together with the host's TSC.
    pub clock_host_tsc: bool,
    /// Maximum number of memory slots of a VM.
    pub memory_slots_max: u32,
    /// Maximum number of interrupt routes of a VM.
    pub irq_routes_max: u32,
    /// Maximum number of vCPUs of a VM.
    pub vcpus_max: u32,
    /// Number of vCPUs that KVM recommends as a maximum.
    pub vcpus_recommended: u32,
    /// Whether a guest can have memory that the host cannot access.
    pub guest_memfd: bool,
    /// Whether vCPU registers other than MSRs can be accessed one at a time.
    pub one_reg: bool,
    /// Whether the events of a vCPU include a pending triple fault.
    pub triple_fault_event: bool,
    /// Whether KVM can present itself as Hyper-V: clock, interrupt controller and timers.
    pub hyperv: bool,
    /// Whether KVM refuses registers of Hyper-V that the CPUID does not promise.
    pub hyperv_enforces_cpuid: bool,
}

impl Capabilities {
    fn probe(ask: impl Fn(u32) -> i32) -> Self {
        let number = |cap| u32::try_from(ask(cap)).unwrap_or(0);
        let is = |cap| number(cap) != 0;
        let has_all = |cap, bits| number(cap) & bits == bits;
        let enable = kvm::KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE;
        let manual = number(kvm::KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2);
        Self {
            manual_dirty_log: if manual & enable == 0 {
                ManualDirtyLog::None
            } else if manual & kvm::KVM_DIRTY_LOG_INITIALLY_SET == 0 {
                ManualDirtyLog::Protect
            } else {
                ManualDirtyLog::InitiallySet
            },
            dirty_ring_len_bytes_max: number(kvm::KVM_CAP_DIRTY_LOG_RING_ACQ_REL)
                .max(number(kvm::KVM_CAP_DIRTY_LOG_RING)),
            tsc_control: is(kvm::KVM_CAP_TSC_CONTROL),
            vm_tsc_control: is(kvm::KVM_CAP_VM_TSC_CONTROL),
            vcpu_attributes: is(kvm::KVM_CAP_VCPU_ATTRIBUTES),
            xsave2: is(kvm::KVM_CAP_XSAVE2),
            sregs2: is(kvm::KVM_CAP_SREGS2),
            nested_state_len_bytes: number(kvm::KVM_CAP_NESTED_STATE),
            pre_fault_memory: is(kvm::KVM_CAP_PRE_FAULT_MEMORY),
            memory_fault_info: is(kvm::KVM_CAP_MEMORY_FAULT_INFO),
            // Not known by a capability number: see the module.
            userfault: None,
            kvmclock_ctrl: is(kvm::KVM_CAP_KVMCLOCK_CTRL),
            clock_realtime: has_all(kvm::KVM_CAP_ADJUST_CLOCK, kvm::KVM_CLOCK_REALTIME),
            clock_host_tsc: has_all(kvm::KVM_CAP_ADJUST_CLOCK, kvm::KVM_CLOCK_HOST_TSC),
            memory_slots_max: number(kvm::KVM_CAP_NR_MEMSLOTS),
            irq_routes_max: number(kvm::KVM_CAP_IRQ_ROUTING),
            vcpus_max: number(kvm::KVM_CAP_MAX_VCPUS),
            vcpus_recommended: number(kvm::KVM_CAP_NR_VCPUS),
            guest_memfd: is(kvm::KVM_CAP_GUEST_MEMFD),
            one_reg: is(kvm::KVM_CAP_ONE_REG),
            triple_fault_event: is(kvm::KVM_CAP_X86_TRIPLE_FAULT_EVENT),
            hyperv: is(kvm::KVM_CAP_HYPERV_SYNIC)
                && is(kvm::KVM_CAP_HYPERV_TIME)
                && is(kvm::KVM_CAP_HYPERV_VP_INDEX),
            hyperv_enforces_cpuid: is(kvm::KVM_CAP_HYPERV_ENFORCE_CPUID),
        }
    }
}

impl Capabilities {
    /// Whether KVM uses shadow paging, as two-dimensional paging is not available or not in use.
    pub fn uses_shadow_paging(&self) -> bool {
        let says_yes = |path: &&str| {
            std::fs::read_to_string(path).is_ok_and(|text| text.starts_with(['Y', '1']))
        };
        // The capability exists with two-dimensional paging only, and is newer than the parameters.
        !self.pre_fault_memory && !TWO_DIMENSIONAL_PAGING.iter().any(says_yes)
    }
}

/// An open KVM that has all required capabilities.
#[derive(Debug)]
pub struct Hypervisor {
    kvm: Kvm,
    capabilities: Capabilities,
    msr_indices: Arc<[u32]>,
}

impl Hypervisor {
    /// Opens the KVM device at `path`, which is /dev/kvm except in tests.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let open_error = |source| OpenError::Open { path: path.to_owned(), source };
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|error| open_error(io::Error::from(error)))?;
        let kvm = Kvm::new_with_path(name).map_err(|error| match error.errno() {
            libc::ENOENT | libc::ENODEV | libc::ENXIO => {
                OpenError::Missing { path: path.to_owned() }
            }
            libc::EACCES | libc::EPERM => OpenError::NoPermission { path: path.to_owned() },
            _ => open_error(error.into()),
        })?;
        let version = kvm.get_api_version();
        if version != API_VERSION {
            return Err(OpenError::WrongVersion { path: path.to_owned(), version });
        }
        let ask = |cap: u32| kvm.check_extension_raw(cap.into());
        let missing = missing(ask);
        if !missing.is_empty() {
            return Err(OpenError::Incapable { missing });
        }
        let capabilities =
            Capabilities { userfault: UserfaultSupport::probe(&kvm), ..Capabilities::probe(ask) };
        let list = kvm
            .get_msr_index_list()
            .context("list the model-specific registers")
            .map_err(OpenError::Probe)?;
        let msr_indices = msr::indices_to_save(list.as_slice()).into();
        Ok(Self { kvm, capabilities, msr_indices })
    }

    /// The optional capabilities.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// The same KVM as if it had no manual dirty log: reading the log of its VMs clears it.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn without_manual_dirty_log(mut self) -> Self {
        self.capabilities.manual_dirty_log = ManualDirtyLog::None;
        self
    }

    /// The CPUID that KVM supports for guests, without features whose state cannot be saved.
    pub fn supported_cpuid(&self) -> Result<CpuId, KvmError> {
        let mut cpuid = self
            .kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .context("list the supported CPUID leaves")?;
        shadow_stack::hide_unsaved(&mut cpuid, self.capabilities.one_reg, &self.msr_indices);
        Ok(cpuid)
    }

    /// The same with AMX, for which it requests permission from the kernel.
    ///
    /// # Errors
    /// The host has no AMX, or a VM without it has run in this process.
    pub fn supported_cpuid_with_amx(&self) -> Result<CpuId, AmxError> {
        amx::request_permission()?;
        Ok(self.supported_cpuid()?)
    }

    /// Indices of the MSRs in the state of a vCPU.
    pub fn msr_indices(&self) -> &[u32] {
        &self.msr_indices
    }

    /// Values of the feature MSRs that KVM supports, without those that the host lacks.
    pub fn feature_msrs(&self) -> Result<Vec<msr::MsrValue>, KvmError> {
        let list = self.kvm.get_msr_feature_index_list().context("list the feature registers")?;
        Ok(msr::read_all(list.as_slice(), |chunk: &mut Msrs| self.kvm.get_msrs(chunk))
            .context("read the feature registers")?
            .values)
    }

    pub(crate) fn kvm(&self) -> &Kvm {
        &self.kvm
    }

    pub(crate) fn shared_msr_indices(&self) -> Arc<[u32]> {
        Arc::clone(&self.msr_indices)
    }
}

/// Names of the required capabilities for which `ask` reports no support.
fn missing(ask: impl Fn(u32) -> i32) -> Vec<&'static str> {
    REQUIRED.iter().filter(|(cap, _)| ask(*cap) <= 0).map(|(_, name)| *name).collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    #[test]
    fn a_path_that_is_not_there_is_named_with_what_to_do() {
        let error = Hypervisor::open(Path::new("/nowhere/kvm")).unwrap_err();
        assert!(matches!(&error, OpenError::Missing { .. }), "{error:?}");
        assert!(error.to_string().contains("/nowhere/kvm"));
        assert!(error.to_string().contains("kvm_intel"));
    }

    #[test]
    fn a_device_that_is_not_kvm_is_refused() {
        let error = Hypervisor::open(Path::new("/dev/null")).unwrap_err();
        assert!(matches!(error, OpenError::WrongVersion { version: -1, .. }), "{error:?}");
    }

    #[test]
    fn a_directory_cannot_be_opened_and_the_cause_is_kept() {
        let error = Hypervisor::open(Path::new("/")).unwrap_err();
        assert!(matches!(&error, OpenError::Open { .. }), "{error:?}");
        assert!(std::error::Error::source(&error).is_some());
    }

    #[test]
    fn every_missing_capability_is_named() {
        let lacking = [kvm::KVM_CAP_IRQFD, kvm::KVM_CAP_XCRS];
        let names = missing(|cap| i32::from(!lacking.contains(&cap)));
        let text = OpenError::Incapable { missing: names }.to_string();
        assert!(text.contains("KVM_CAP_IRQFD (") && text.contains("KVM_CAP_XCRS ("), "{text}");
        assert!(!text.contains("KVM_CAP_IRQCHIP"), "{text}");
    }

    #[test]
    fn the_manual_dirty_log_has_three_levels() {
        let level = |answer: i32| {
            Capabilities::probe(|cap| {
                if cap == kvm::KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 { answer } else { 0 }
            })
            .manual_dirty_log
        };
        assert_eq!(level(0), ManualDirtyLog::None);
        assert_eq!(level(-1), ManualDirtyLog::None);
        assert_eq!(level(1), ManualDirtyLog::Protect);
        assert_eq!(level(3), ManualDirtyLog::InitiallySet);
    }
}
