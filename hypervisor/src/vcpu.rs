// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A virtual processor.
//!
//! Owns the vCPU's file descriptor and its boot state. Saved state is in `vcpu_state`, running in
//! `exits` and `threads`. Must never know what the guest boots.

use std::sync::Arc;

use kvm_bindings::{
    CpuId, KVM_MP_STATE_RUNNABLE, KVM_MP_STATE_UNINITIALIZED, Msrs, kvm_fpu, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
};
use kvm_ioctls::VcpuFd;

use crate::error::{KvmContext, KvmError};
use crate::fault_trace::FaultedAt;
use crate::ioctl;
use crate::msr::{self, MsrValue};
use crate::run_page::RunPage;
use crate::vcpu_state::VcpuStateError;
use crate::vm::{Vm, VmShared};

/// Offsets of the LVT entries of the two local interrupt pins.
const APIC_LVT_LINT0: usize = 0x350;
const APIC_LVT_LINT1: usize = 0x360;
/// Delivery modes of an LVT entry (Intel SDM volume 3, 13.5.1).
const APIC_MODE_NMI: u32 = 0b100 << 8;
const APIC_MODE_EXT_INT: u32 = 0b111 << 8;

/// Registers of the boot vCPU.
#[derive(Clone, Debug)]
pub struct BootRegisters {
    /// General registers.
    pub regs: kvm_regs,
    /// Special registers. Start from [`Vcpu::sregs`]: the APIC base must be kept.
    pub sregs: kvm_sregs,
    /// Floating point registers.
    pub fpu: kvm_fpu,
}

/// State of a vCPU before its first instruction.
#[derive(Clone, Debug)]
pub struct VcpuInit {
    /// CPUID of the guest.
    pub cpuid: CpuId,
    /// Registers; without them the vCPU waits for INIT and SIPI.
    pub registers: Option<BootRegisters>,
    /// MSRs of each vCPU.
    pub msrs: Vec<kvm_msr_entry>,
    /// Indices of MSRs, and bits to set in addition to their current value.
    pub msr_bits: Vec<(u32, u64)>,
}

/// Consecutive exits because an event could not be delivered.
///
/// KVM keeps the event and delivers it with the next entry. Up to Linux 6.13 KVM re-entered by itself, as often as it took;
/// later versions leave that to user space. A processor that falsely reports an event in delivery, as QEMU's SVM emulation
/// does at accesses to a device, some of them several times in a row, succeeds in the end; a guest whose interrupt stack is
/// not in memory never does.
#[derive(Debug, Default)]
pub(crate) struct LostDeliveries(u8);

impl LostDeliveries {
    const IN_A_ROW_MAX: u8 = 100;

    /// Counts one more; returns whether to re-enter the guest.
    pub(crate) fn again(&mut self) -> bool {
        self.0 = self.0.saturating_add(1);
        self.0 <= Self::IN_A_ROW_MAX
    }

    /// Resets the count, after an exit for another reason.
    pub(crate) fn none(&mut self) {
        self.0 = 0;
    }
}

/// A vCPU.
pub struct Vcpu {
    pub(crate) fd: VcpuFd,
    pub(crate) run_page: Arc<RunPage>,
    index: u32,
    xsave_len_bytes: usize,
    pub(crate) lost_deliveries: LostDeliveries,
    /// Whether it has the registers of Hyper-V.
    pub(crate) has_hyperv: bool,
    /// Keeps guest memory mapped; declared last, so that it outlives the descriptor.
    vm: Arc<VmShared>,
}

impl Vm {
    /// Creates the vCPU with this index, which is also its APIC id.
    pub fn create_vcpu(&self, index: u32) -> Result<Vcpu, KvmError> {
        let vm = Arc::clone(self.shared());
        let fd = vm.fd.create_vcpu(u64::from(index)).context("create a vCPU")?;
        let run_page = Arc::new(RunPage::map(&fd).context("map a vCPU's run page")?);
        if let Ok(khz) = fd.get_tsc_khz() {
            vm.host_tsc_khz.get_or_init(|| khz);
        }
        // After the vCPU exists, as the kernel fixes the length then.
        let xsave_len_bytes = vm.xsave_len_bytes();
        let lost_deliveries = LostDeliveries::default();
        Ok(Vcpu { fd, run_page, index, xsave_len_bytes, lost_deliveries, has_hyperv: false, vm })
    }
}

impl Vcpu {
    /// Index of the vCPU, which is also its APIC id.
    pub fn index(&self) -> u32 {
        self.index
    }

    pub(crate) fn vm(&self) -> &VmShared {
        &self.vm
    }

    pub(crate) fn xsave_len_bytes(&self) -> usize {
        self.xsave_len_bytes
    }

    /// Frequency of the TSC in kHz, if known.
    pub fn tsc_khz(&self) -> Option<u32> {
        self.fd.get_tsc_khz().ok().filter(|khz| *khz != 0)
    }

    /// General registers.
    pub fn regs(&self) -> Result<kvm_regs, KvmError> {
        self.fd.get_regs().context("read a vCPU's general registers")
    }

    /// Special registers.
    pub fn sregs(&self) -> Result<kvm_sregs, KvmError> {
        self.fd.get_sregs().context("read a vCPU's special registers")
    }

    /// Sets the state in which the vCPU boots.
    pub fn init(&self, init: &VcpuInit) -> Result<(), VcpuStateError> {
        let kernel = VcpuStateError::Kernel;
        self.fd.set_cpuid2(&init.cpuid).context("set a vCPU's features").map_err(kernel)?;
        self.connect_local_pins().map_err(kernel)?;
        self.init_msrs(init)?;
        let mp_state = if let Some(registers) = &init.registers {
            self.fd.set_regs(&registers.regs).context("set a vCPU's registers").map_err(kernel)?;
            self.fd
                .set_sregs(&registers.sregs)
                .context("set a vCPU's special registers")
                .map_err(kernel)?;
            self.fd
                .set_fpu(&registers.fpu)
                .context("set a vCPU's floating point registers")
                .map_err(kernel)?;
            KVM_MP_STATE_RUNNABLE
        } else {
            KVM_MP_STATE_UNINITIALIZED
        };
        self.fd
            .set_mp_state(kvm_mp_state { mp_state })
            .context("set whether a vCPU runs")
            .map_err(kernel)
    }

    /// Puts a vCPU that has run into the state in which it waits for INIT and SIPI, which reset it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn wait_for_start(&self) -> Result<(), VcpuStateError> {
        self.fd
            .set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_UNINITIALIZED })
            .context("make a vCPU wait for its start")
            .map_err(VcpuStateError::Kernel)
    }

    fn init_msrs(&self, init: &VcpuInit) -> Result<(), VcpuStateError> {
        let kernel = VcpuStateError::Kernel;
        let mut msrs: Vec<_> = init.msrs.iter().copied().map(MsrValue::from).collect();
        for (index, bits) in &init.msr_bits {
            let now = self.read_registers(&[*index]).map_err(kernel)?;
            let now = now.first().map_or(0, |msr| msr.value);
            msrs.push(MsrValue { index: *index, value: now | bits });
        }
        let refused = self.write_msrs(&msrs).map_err(kernel)?;
        if refused.is_empty() { Ok(()) } else { Err(VcpuStateError::MsrsRefused(refused)) }
    }

    /// Connects the local APIC pins as on a PC: LINT0 to the PIC, LINT1 to NMI.
    fn connect_local_pins(&self) -> Result<(), KvmError> {
        let mut apic = self.fd.get_lapic().context("read a local APIC")?;
        set_apic_register(&mut apic, APIC_LVT_LINT0, APIC_MODE_EXT_INT);
        set_apic_register(&mut apic, APIC_LVT_LINT1, APIC_MODE_NMI);
        self.fd.set_lapic(&apic).context("set a local APIC")
    }

    /// Writes MSRs; returns those that the kernel refused.
    pub(crate) fn write_msrs(&self, values: &[MsrValue]) -> Result<Vec<MsrValue>, KvmError> {
        msr::write_all(values, |chunk: &Msrs| self.fd.set_msrs(chunk))
            .context("set a vCPU's model-specific registers")
    }

    /// Reads MSRs, without those that the kernel refuses.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read_registers(&self, indices: &[u32]) -> Result<Vec<MsrValue>, KvmError> {
        let read = msr::read_all(indices, |chunk: &mut Msrs| self.fd.get_msrs(chunk))
            .context("read a vCPU's model-specific registers")?;
        Ok(read.values)
    }

    /// Sets an MSR that was left out of the vCPU state except for its lowest bit, unless the guest has
    /// written it in the meantime.
    ///
    /// # Errors
    /// The kernel refuses the MSR.
    pub fn restore_msr(&self, msr: MsrValue) -> Result<(), KvmError> {
        let read = msr::read_all(&[msr.index], |chunk: &mut Msrs| self.fd.get_msrs(chunk))
            .context("read a vCPU's model-specific registers")?;
        if read.values.iter().any(|now| now.value == msr.value & !1) {
            let refused = self.write_msrs(&[msr])?;
            if !refused.is_empty() {
                log::warn!("vcpu{}: KVM does not take MSR {:#x} again", self.index, msr.index);
            }
        }
        Ok(())
    }

    /// Informs the guest's watchdogs that it was paused. Best effort, as few guests support it.
    pub(crate) fn notify_clock_paused(&self) {
        if self.vm.capabilities.kvmclock_ctrl
            && let Err(error) = self.fd.kvmclock_ctrl()
        {
            // EINVAL: the guest does not use kvmclock.
            log::trace!("vcpu{}: the guest cannot be told of the pause: {error}", self.index);
        }
    }

    /// The guest physical address of a fault; `None` if the guest's page tables do not map it.
    pub(crate) fn gpa_of(&self, at: FaultedAt) -> Option<u64> {
        match at {
            FaultedAt::Gpa(gpa) => Some(gpa),
            FaultedAt::Gva(gva) => {
                let translated = self.fd.translate_gva(gva).ok()?;
                (translated.valid != 0).then_some(translated.physical_address)
            }
        }
    }

    /// Makes a non-maskable interrupt pending (`KVM_NMI`).
    pub(crate) fn send_nmi(&self) -> Result<(), KvmError> {
        self.fd.nmi().context("send a non-maskable interrupt")
    }

    /// Fills stage-2 for guest memory that is populated; returns the number of bytes done.
    ///
    /// Fails with ENOTTY or EOPNOTSUPP if [`crate::Capabilities::pre_fault_memory`] is false.
    pub fn pre_fault_memory(&self, gpa: u64, len_bytes: u64) -> Result<u64, KvmError> {
        ioctl::pre_fault_memory(&self.fd, gpa, len_bytes).context("fill second-stage tables")
    }
}

fn set_apic_register(apic: &mut kvm_lapic_state, offset: usize, value: u32) {
    for (target, byte) in apic.regs.iter_mut().skip(offset).zip(value.to_le_bytes()) {
        *target = byte.cast_signed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_apic_register_is_little_endian_at_its_offset() {
        let mut apic = kvm_lapic_state::default();
        set_apic_register(&mut apic, APIC_LVT_LINT0, 0x0102_0384);
        assert_eq!(apic.regs[0x350..0x354], [-0x7c, 3, 2, 1]);
        assert!(apic.regs[..0x350].iter().chain(&apic.regs[0x354..]).all(|byte| *byte == 0));
    }
}
