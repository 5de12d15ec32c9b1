// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A virtual machine: memory slots, interrupt controllers, vCPUs.
//!
//! Owns the VM's file descriptor and what must live as long as the VM. What it holds itself is in its submodules
//! `memslots` and `msi`; `dirty`, `irqchip`, `clock` and `vcpu` build on it. Must never know what the guest is.

mod memslots;
mod msi;

use std::io;
use std::sync::{Arc, OnceLock};

use kvm_bindings as kvm;
use kvm_bindings::kvm_enable_cap;
use kvm_ioctls::{Cap, VmFd};

use crate::caps::{Capabilities, Hypervisor, ManualDirtyLog};
use crate::error::{KvmContext, KvmError};
use crate::routing::{GODWIT_INTERRUPTS, InterruptRules};
use memslots::Memslots;
pub use memslots::{MemslotConfig, MemslotError};
pub use msi::InterruptLine;
use msi::Routes;
pub(crate) use msi::{kernel, new_event};

/// Addresses below 4 GiB that a VM needs on processors that cannot run real mode directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmConfig {
    /// Guest physical address of three pages that the guest never uses.
    pub tss_gpa: u64,
    /// Guest physical address of one page that the guest never uses.
    pub identity_map_gpa: u64,
    /// What the platform decides about interrupts.
    pub interrupts: InterruptRules,
}

impl Default for VmConfig {
    /// The identity map at 0xfffb_c000, followed by the three pages at 0xfffb_d000.
    fn default() -> Self {
        Self { tss_gpa: 0xfffb_d000, identity_map_gpa: 0xfffb_c000, interrupts: GODWIT_INTERRUPTS }
    }
}

/// State shared by a VM, its vCPUs and its interrupt vectors.
pub(crate) struct VmShared {
    pub(crate) fd: VmFd,
    pub(crate) capabilities: Capabilities,
    pub(crate) msr_indices: Arc<[u32]>,
    pub(crate) routes: Routes,
    /// Default TSC frequency of vCPUs in kHz; unknown until there is a vCPU.
    pub(crate) host_tsc_khz: OnceLock<u32>,
    /// Declared last, so that the mappings outlive the VM's descriptor.
    pub(crate) slots: Memslots,
}

/// A virtual machine; clones refer to the same one.
#[derive(Clone)]
pub struct Vm(Arc<VmShared>);

impl Vm {
    /// Creates a VM with in-kernel PIC, IOAPIC and local APICs, and no PIT.
    pub fn create(hypervisor: &Hypervisor, config: &VmConfig) -> Result<Self, KvmError> {
        Self::create_with_memory(hypervisor, config, |_| Ok(()))
    }

    /// Creates a VM like [`Vm::create`], with the memory slots that `add_memory` adds before the interrupt
    /// controllers: KVM registers those with a deferred grace period, for which the first slot would have
    /// to wait (5 to 8 ms on Linux 6.18).
    ///
    /// # Errors
    /// Those of KVM and of `add_memory`.
    pub fn create_with_memory<E: From<KvmError>>(
        hypervisor: &Hypervisor,
        config: &VmConfig,
        add_memory: impl FnOnce(&Self) -> Result<(), E>,
    ) -> Result<Self, E> {
        let vm = Self::create_bare(hypervisor, config)?;
        add_memory(&vm)?;
        vm.0.fd.create_irq_chip().context("create the interrupt controllers")?;
        if config.interrupts.hides_pics {
            vm.mask_pics()?;
            vm.0.routes.apply(&vm.0.fd).context("set the interrupt routes")?;
        }
        Ok(vm)
    }

    fn create_bare(hypervisor: &Hypervisor, config: &VmConfig) -> Result<Self, KvmError> {
        let fd = create_fd(hypervisor).context("create a virtual machine")?;
        let tss = usize::try_from(config.tss_gpa)
            .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
            .context("set the TSS address")?;
        fd.set_identity_map_address(config.identity_map_gpa)
            .context("set the identity map address")?;
        fd.set_tss_address(tss).context("set the TSS address")?;
        let x2apic =
            kvm::KVM_X2APIC_API_USE_32BIT_IDS | kvm::KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK;
        enable(&fd, kvm::KVM_CAP_X2APIC_API, x2apic).context("use 32-bit APIC numbers")?;
        let capabilities = hypervisor.capabilities().clone();
        let manual = match capabilities.manual_dirty_log {
            ManualDirtyLog::None => 0,
            ManualDirtyLog::Protect => kvm::KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
            ManualDirtyLog::InitiallySet => {
                kvm::KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | kvm::KVM_DIRTY_LOG_INITIALLY_SET
            }
        };
        if manual != 0 {
            enable(&fd, kvm::KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, manual)
                .context("separate reading and clearing of the dirty log")?;
        }
        if capabilities.triple_fault_event {
            enable(&fd, kvm::KVM_CAP_X86_TRIPLE_FAULT_EVENT, 1)
                .context("have pending triple faults among the events")?;
        }
        let routes = Routes::new(capabilities.irq_routes_max, config.interrupts);
        Ok(Self(Arc::new(VmShared {
            fd,
            capabilities,
            msr_indices: hypervisor.shared_msr_indices(),
            routes,
            host_tsc_khz: OnceLock::new(),
            slots: Memslots::default(),
        })))
    }

    /// The optional capabilities of KVM.
    pub fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    /// Keeps halted vCPUs in the guest, where they occupy their processor; must be called before vCPUs are
    /// created. KVM then makes no asynchronous page faults for a guest that has not enabled them.
    ///
    /// # Errors
    /// KVM does not support it, or there are vCPUs.
    pub fn keep_halted_vcpus_in_guest(&self) -> Result<(), KvmError> {
        enable(&self.0.fd, kvm::KVM_CAP_X86_DISABLE_EXITS, kvm::KVM_X86_DISABLE_EXITS_HLT)
            .context("keep halted vCPUs in the guest")
    }

    /// Sets the level of an interrupt line.
    pub fn set_interrupt_level(&self, gsi: u32, high: bool) -> Result<(), KvmError> {
        self.0.fd.set_irq_line(gsi, high).context("set the level of an interrupt line")
    }

    pub(crate) fn shared(&self) -> &Arc<VmShared> {
        &self.0
    }
}

impl VmShared {
    /// Length of the XSAVE area of this VM's vCPUs in bytes. Fixed once there is a vCPU.
    pub(crate) fn xsave_len_bytes(&self) -> usize {
        usize::try_from(self.fd.check_extension_int(Cap::Xsave2)).unwrap_or(0)
    }
}

/// Creates a VM; retries when interrupted by a signal.
fn create_fd(hypervisor: &Hypervisor) -> Result<VmFd, kvm_ioctls::Error> {
    loop {
        match hypervisor.kvm().create_vm() {
            Err(error) if error.errno() == libc::EINTR => {}
            result => return result,
        }
    }
}

fn enable(fd: &VmFd, cap: u32, bits: u32) -> Result<(), kvm_ioctls::Error> {
    let mut request = kvm_enable_cap { cap, ..Default::default() };
    request.args[0] = u64::from(bits);
    fd.enable_cap(&request)
}
