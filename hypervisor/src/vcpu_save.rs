// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Save and restore of a vCPU: its complete state is read and set in the order that KVM requires.
//!
//! Owns the two orders. Must never lose a register silently.
//!
//! Saving begins with what changes other state when it is read: the multiprocessing state (which consumes
//! pending INIT and SIPI) and the events (which may write CR2 and DR6). Restoring:
//!
//! | step | after | because |
//! | --- | --- | --- |
//! | CPUID | | decides which of the rest is legal |
//! | multiprocessing state | CPUID | |
//! | general, special registers | CPUID | special registers have the APIC's mode |
//! | XCR0, XSAVE area, debug registers | special registers | CR4 and EFER |
//! | local APIC | special registers | its layout depends on its mode |
//! | TSC | | the deadline timer is armed against it |
//! | model-specific registers, in the order of `hyperv` | APIC, TSC, XSAVE area | among them the deadline and those of shadow stacks |
//! | shadow-stack pointer | CPUID | there is none without the feature |
//! | events | registers | KVM_SET_REGS drops pending exceptions |
//! | nested state | special registers, MSRs | it requires VMX or SVM to be enabled |

use std::collections::BTreeSet;

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, KVM_SREGS2_FLAGS_PDPTRS_VALID, KVM_VCPUEVENT_VALID_TRIPLE_FAULT, Msrs,
    kvm_mp_state, kvm_sregs, kvm_sregs2, kvm_vcpu_events,
};
use zerocopy::IntoBytes;

use crate::blob::Blob;
use crate::clock::TimeBase;
use crate::error::{KvmContext, KvmError};
use crate::hyperv;
use crate::ioctl::{self, NestedBuffer, XsaveArea};
use crate::msr::{self, MsrValue};
use crate::shadow_stack;
use crate::tsc::{self, Frequency, SharedTsc, TscState, TscTarget};
use crate::vcpu::Vcpu;
use crate::vcpu_state::{
    CpuidEntry, NESTED_HEADER_LEN_BYTES, VCPU_STATE_VERSION, VcpuState, VcpuStateError,
    has_triple_fault,
};

/// Whether a guest survives the loss of an MSR: performance counters and machine check banks.
pub(crate) fn is_diagnostic(index: u32) -> bool {
    matches!(
        index,
        0xc1..=0xc8
            | 0x186..=0x18d
            | 0x309..=0x30c
            | 0x345
            | 0x38d..=0x392
            | 0x3f1
            | 0x400..=0x47f
            | 0x4c1..=0x4c8
            | 0xc001_0000..=0xc001_0007
            | 0xc001_0200..=0xc001_020b
            | 0xc000_0300..=0xc000_0303
    )
}

/// The events without the flag that no triple fault is pending, which a KVM without that capability
/// refuses; a vCPU that has never run has none.
pub(crate) fn plain_events(mut events: kvm_vcpu_events) -> kvm_vcpu_events {
    if !has_triple_fault(&events) {
        events.flags &= !KVM_VCPUEVENT_VALID_TRIPLE_FAULT;
        events.triple_fault.pending = 0;
    }
    events
}

/// Converts between KVM's two forms of the special registers: the common fields, and those of the target
/// form only.
macro_rules! special_registers {
    ($from:expr => $to:ident { $($rest:tt)* }) => {
        special_registers!(
            $from => $to { $($rest)* }
            cs ds es fs gs ss tr ldt gdt idt cr0 cr2 cr3 cr4 cr8 efer apic_base
        )
    };
    ($from:expr => $to:ident { $($rest:tt)* } $($field:ident)+) => {
        $to { $($field: $from.$field,)+ $($rest)* }
    };
}

/// Splits the newer form of the special registers into the older one and the additional fields.
fn split_sregs(new: &kvm_sregs2) -> (kvm_sregs, Option<[u64; 4]>) {
    // The events include a pending interrupt.
    let sregs = special_registers!(new => kvm_sregs { interrupt_bitmap: [0; 4] });
    let valid = new.flags & u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID) != 0;
    (sregs, valid.then_some(new.pdptrs))
}

/// The reverse of [`split_sregs`].
fn join_sregs(old: &kvm_sregs, pdptrs: Option<[u64; 4]>) -> kvm_sregs2 {
    let valid = if pdptrs.is_some() { u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID) } else { 0 };
    special_registers!(old => kvm_sregs2 { flags: valid, pdptrs: pdptrs.unwrap_or_default() })
}

impl Vcpu {
    /// Reads the complete state. The vCPU must be parked; see the module for the order.
    pub fn state(&self) -> Result<VcpuState, VcpuStateError> {
        let mp_state = self.fd.get_mp_state().context("read whether a vCPU runs")?.mp_state;
        let events = plain_events(self.fd.get_vcpu_events().context("read a vCPU's events")?);
        let regs = self.regs()?;
        let (mut sregs, pdptrs) = if self.vm().capabilities.sregs2 {
            let new = ioctl::get_sregs2(&self.fd).context("read a vCPU's special registers")?;
            split_sregs(&new)
        } else {
            (self.sregs()?, None)
        };
        // The events already include a pending interrupt.
        sregs.interrupt_bitmap = [0; 4];
        let xsave = self.read_xsave()?;
        let xcrs = self.fd.get_xcrs().context("read a vCPU's extended control registers")?;
        let debugregs = self.fd.get_debug_regs().context("read a vCPU's debug registers")?;
        let lapic = self.fd.get_lapic().context("read a local APIC")?;
        let nested = self.read_nested()?;
        let msrs = self.read_msrs()?;
        let tsc = self.read_tsc()?;
        let cpuid = self.fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES).context("read a vCPU's features")?;
        let ssp = shadow_stack::save(&self.fd, cpuid.as_slice())
            .context("read a vCPU's shadow-stack pointer")?;
        let cpuid = cpuid
            .as_slice()
            .iter()
            .map(|entry| CpuidEntry {
                function: entry.function,
                index: entry.index,
                flags: entry.flags,
                answer: [entry.eax, entry.ebx, entry.ecx, entry.edx],
            })
            .collect();
        let mut state = VcpuState {
            version: 1,
            cpuid,
            mp_state,
            regs,
            sregs,
            pdptrs,
            xsave,
            xcrs,
            debugregs,
            lapic: Blob::new(lapic.as_bytes()),
            msrs,
            events,
            tsc,
            nested,
            ssp,
        };
        if state.beyond_version_1().is_some() {
            state.version = VCPU_STATE_VERSION;
        }
        Ok(state)
    }

    /// Sets the complete state of a vCPU that has never run. On failure the vCPU is unusable.
    ///
    /// `time` is the result of [`crate::Vm::restore_clock`]. KVM writes guest memory here, such as the wall
    /// clock: see [`VcpuState::pages_used_by_kvm`].
    pub fn set_state(&self, state: &VcpuState, time: &TimeBase) -> Result<(), VcpuStateError> {
        state.check()?;
        let events = plain_events(state.events);
        if has_triple_fault(&events) && !self.vm().capabilities.triple_fault_event {
            return Err(VcpuStateError::TripleFault);
        }
        self.fd.set_cpuid2(&state.kernel_cpuid()?).context("set a vCPU's features")?;
        let mp_state = kvm_mp_state { mp_state: state.mp_state };
        self.fd.set_mp_state(mp_state).context("set whether a vCPU runs")?;
        self.fd.set_regs(&state.regs).context("set a vCPU's general registers")?;
        if self.vm().capabilities.sregs2 {
            ioctl::set_sregs2(&self.fd, &join_sregs(&state.sregs, state.pdptrs))
                .context("set a vCPU's special registers")?;
        } else {
            self.fd.set_sregs(&state.sregs).context("set a vCPU's special registers")?;
        }
        self.fd.set_xcrs(&state.xcrs).context("set a vCPU's extended control registers")?;
        self.write_xsave(&state.xsave)?;
        self.fd.set_debug_regs(&state.debugregs).context("set a vCPU's debug registers")?;
        self.fd.set_lapic(&state.lapic_state()?).context("set a local APIC")?;
        self.write_tsc(&state.tsc, time)?;
        let mut msrs = state.msrs.clone();
        msrs.sort_by_key(|msr| hyperv::order(msr.index));
        self.restore_msrs(&msrs)?;
        if state.ssp.is_some() && !self.vm().capabilities.one_reg {
            return Err(VcpuStateError::ShadowStack);
        }
        shadow_stack::restore(&self.fd, state.ssp).context("set a vCPU's shadow-stack pointer")?;
        self.fd.set_vcpu_events(&events).context("set a vCPU's events")?;
        self.write_nested(state)?;
        // The source's notification of the guest is not part of the state.
        self.notify_clock_paused();
        Ok(())
    }

    fn read_xsave(&self) -> Result<Blob, KvmError> {
        let mut area = XsaveArea::new(self.xsave_len_bytes());
        // SAFETY: the area has the length that KVM_CAP_XSAVE2 reports for this vCPU's VM.
        unsafe { ioctl::get_xsave(&self.fd, &mut area, self.vm().capabilities.xsave2) }
            .context("read a vCPU's XSAVE area")?;
        Ok(Blob::new(area.bytes()))
    }

    fn write_xsave(&self, blob: &Blob) -> Result<(), VcpuStateError> {
        let mut area = XsaveArea::new(self.xsave_len_bytes());
        blob.fill(area.bytes_mut())
            .map_err(|source| VcpuStateError::Blob { what: "XSAVE area", source })?;
        // SAFETY: the area has the length that KVM_CAP_XSAVE2 reports for this vCPU's VM.
        Ok(unsafe { ioctl::set_xsave(&self.fd, &area) }.context("set a vCPU's XSAVE area")?)
    }

    /// Reads the host's MSRs that exist. Machine check banks of zero are left out, as that is their initial
    /// value.
    fn read_msrs(&self) -> Result<Vec<MsrValue>, KvmError> {
        let get = |chunk: &mut Msrs| self.fd.get_msrs(chunk);
        let mut read = if self.has_hyperv {
            let unlisted = hyperv::UNLISTED_MSRS.into_iter().flatten();
            let all: BTreeSet<u32> =
                self.vm().msr_indices.iter().copied().chain(unlisted).collect();
            msr::read_all(&all.into_iter().collect::<Vec<_>>(), get)
        } else {
            msr::read_all(&self.vm().msr_indices, get)
        }
        .context("read a vCPU's model-specific registers")?;
        if !read.refused.is_empty() {
            log::debug!("vcpu{}: registers without a value: {:x?}", self.index(), read.refused);
        }
        read.values.retain(|msr| msr.value != 0 || !matches!(msr.index, 0x400..=0x47f));
        Ok(read.values)
    }

    /// Sets MSRs that other vCPUs of the VM have, as far as they differ from what KVM has given this one.
    ///
    /// # Errors
    /// Lists those that the kernel refuses.
    pub fn adopt_msrs(&self, values: &[MsrValue]) -> Result<(), VcpuStateError> {
        self.restore_msrs(values)
    }

    fn restore_msrs(&self, values: &[MsrValue]) -> Result<(), VcpuStateError> {
        let refused = self.write_msrs(values)?;
        let mut lost = Vec::new();
        for msr in refused {
            let get = |chunk: &mut Msrs| self.fd.get_msrs(chunk);
            let read = msr::read_all(&[msr.index], get)
                .context("read a vCPU's model-specific registers")?;
            let here = read.values.first().map(|here| here.value);
            let vcpu = self.index();
            if here.unwrap_or(0) == msr.value {
                log::debug!("vcpu{vcpu}: MSR {:#x} cannot be set, and need not be", msr.index);
            } else if is_diagnostic(msr.index) {
                log::warn!("vcpu{vcpu}: MSR {:#x} = {:#x} is lost", msr.index, msr.value);
            } else {
                lost.push(msr);
            }
        }
        if lost.is_empty() { Ok(()) } else { Err(VcpuStateError::MsrsRefused(lost)) }
    }

    fn read_tsc(&self) -> Result<TscState, KvmError> {
        let get = |chunk: &mut Msrs| self.fd.get_msrs(chunk);
        let before = tsc::of_host();
        let value = msr::read_all(&[msr::IA32_TSC], get).context("read a vCPU's TSC")?;
        let host = (before, tsc::of_host());
        let (group, attribute) = tsc::OFFSET_ATTRIBUTE;
        let offset = if self.vm().capabilities.vcpu_attributes {
            ioctl::get_vcpu_attribute(&self.fd, group, attribute).ok()
        } else {
            None
        };
        let value = value.values.first().map_or(0, |tsc| tsc.value);
        let offset = offset.filter(|offset| tsc::is_unscaled(value, *offset, host));
        Ok(TscState { khz: self.tsc_khz(), value, offset })
    }

    /// Frequency and offset of the TSC, for vCPUs that are added later.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn shared_tsc(&self) -> Result<SharedTsc, KvmError> {
        let (group, attribute) = tsc::OFFSET_ATTRIBUTE;
        let has_offset = self.vm().capabilities.vcpu_attributes;
        let offset = has_offset.then(|| ioctl::get_vcpu_attribute(&self.fd, group, attribute));
        let offset = offset.transpose().context("read a vCPU's TSC offset")?;
        Ok(SharedTsc { khz: self.tsc_khz(), offset })
    }

    /// Makes the TSC the same as that of another vCPU of the VM. A kernel without the attribute of the offset
    /// synchronises a new vCPU by itself. Returns whether the frequency was another one.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn follow_tsc(&self, other: &SharedTsc) -> Result<bool, VcpuStateError> {
        let khz = other.khz.filter(|khz| self.tsc_khz() != Some(*khz));
        if let Some(khz) = khz {
            self.fd.set_tsc_khz(khz).context("set a vCPU's TSC frequency")?;
        }
        if let Some(offset) = other.offset {
            let (group, attribute) = tsc::OFFSET_ATTRIBUTE;
            ioctl::set_vcpu_attribute(&self.fd, group, attribute, offset)
                .context("set a vCPU's TSC offset")?;
        }
        Ok(khz.is_some())
    }

    fn write_tsc(&self, state: &TscState, time: &TimeBase) -> Result<(), VcpuStateError> {
        let tolerance_ppm = tsc::tolerance_ppm();
        if let (Some(wanted_khz), Some(host_khz)) = (state.khz, self.tsc_khz()) {
            let scales = self.vm().capabilities.tsc_control;
            match tsc::frequency(wanted_khz, host_khz, scales, tolerance_ppm) {
                Frequency::Keep => {}
                Frequency::Set(khz) => {
                    self.fd.set_tsc_khz(khz).context("set a vCPU's TSC frequency")?;
                }
                Frequency::Refuse => {
                    return Err(VcpuStateError::TscFrequency { wanted_khz, host_khz });
                }
            }
        }
        match tsc::target(state, time, self.tsc_khz(), tolerance_ppm) {
            TscTarget::Offset(offset) if self.vm().capabilities.vcpu_attributes => {
                let (group, attribute) = tsc::OFFSET_ATTRIBUTE;
                ioctl::set_vcpu_attribute(&self.fd, group, attribute, offset)
                    .context("set a vCPU's TSC offset")?;
                if self.read_tsc()?.offset != Some(offset) {
                    self.say_that_the_tsc_stays();
                }
            }
            TscTarget::Offset(offset) => {
                self.write_tsc_value(offset.wrapping_add(time.here.host_tsc.unwrap_or(0)))?;
            }
            TscTarget::Value(value) => self.write_tsc_value(value)?,
        }
        Ok(())
    }

    fn write_tsc_value(&self, value: u64) -> Result<(), VcpuStateError> {
        let refused = self.write_msrs(&[MsrValue { index: msr::IA32_TSC, value }])?;
        if !refused.is_empty() {
            return Err(VcpuStateError::MsrsRefused(refused));
        }
        if self.read_tsc()?.value < value {
            self.say_that_the_tsc_stays();
        }
        Ok(())
    }

    /// Guests without hardware virtualisation see the host's TSC.
    fn say_that_the_tsc_stays(&self) {
        log::info!("vcpu{}: this host cannot move a guest's TSC", self.index());
    }

    fn read_nested(&self) -> Result<Option<Blob>, KvmError> {
        if self.vm().capabilities.nested_state_len_bytes == 0 {
            return Ok(None);
        }
        let mut buffer = NestedBuffer::new();
        match ioctl::get_nested_state(&self.fd, &mut buffer) {
            Ok(()) => {
                let size_bytes = buffer.size_bytes().min(ioctl::NESTED_STATE_LEN_BYTES);
                Ok(Some(Blob::new(&buffer.bytes()[..size_bytes])))
            }
            // Some hosts report nested state and have none.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(None),
            Err(error) => Err(error).context("read a vCPU's nested state"),
        }
    }

    fn write_nested(&self, state: &VcpuState) -> Result<(), VcpuStateError> {
        let Some(buffer) = state.nested_buffer()? else { return Ok(()) };
        let idle = buffer.size_bytes() == NESTED_HEADER_LEN_BYTES;
        if self.vm().capabilities.nested_state_len_bytes == 0 {
            return if idle { Ok(()) } else { Err(VcpuStateError::Nested) };
        }
        match ioctl::set_nested_state(&self.fd, &buffer) {
            Err(error) if idle && error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            answer => Ok(answer.context("set a vCPU's nested state")?),
        }
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_segment;

    use super::*;

    #[test]
    fn special_registers_survive_both_forms() {
        let old = kvm_sregs {
            cs: kvm_segment { base: 0xffff_0000, selector: 0xf000, ..Default::default() },
            cr3: 0x1000,
            apic_base: 0xfee0_0900,
            ..Default::default()
        };
        for pdptrs in [None, Some([1, 2, 3, 4])] {
            assert_eq!(split_sregs(&join_sregs(&old, pdptrs)), (old, pdptrs));
        }
    }
}
