// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Complete state of a vCPU, to be saved and restored.
//!
//! Owns the saved form and the two orders. Must never leave out a value in silence.
//!
//! Saving begins with what changes other state by being read: the multiprocessing state (it takes
//! pending INIT and SIPI) and the events (they may write CR2 and DR6). Restoring:
//!
//! | step | after | because |
//! | --- | --- | --- |
//! | CPUID | | decides which of the rest is legal |
//! | multiprocessing state | CPUID | |
//! | general, special registers | CPUID | special registers have the APIC's mode |
//! | XCR0, XSAVE area, debug registers | special registers | CR4 and EFER |
//! | local APIC | special registers | its layout depends on its mode |
//! | TSC | | the deadline timer is armed against it |
//! | model-specific registers | APIC, TSC, XSAVE area | among them the deadline and those of shadow stacks |
//! | shadow-stack pointer | CPUID | there is none without the feature |
//! | events | registers | KVM_SET_REGS drops pending exceptions |
//! | nested state | special registers, MSRs | it wants VMX or SVM enabled |

use std::collections::BTreeSet;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_SREGS2_FLAGS_PDPTRS_VALID, KVM_VCPUEVENT_VALID_TRIPLE_FAULT,
    Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs,
    kvm_sregs2, kvm_vcpu_events, kvm_xcrs,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::blob::{Blob, BlobError};
use crate::clock::TimeBase;
use crate::error::{KvmContext, KvmError};
use crate::ioctl::{self, NestedBuffer, XsaveArea};
use crate::msr::{self, MsrValue};
use crate::shadow_stack;
use crate::tsc::{self, Frequency, TscState, TscTarget};
use crate::vcpu::Vcpu;

/// Newest version of [`VcpuState`] that this program reads. Version 2 has `ssp` and a pending triple
/// fault. What is written has the lowest version that can say it.
pub const VCPU_STATE_VERSION: u32 = 2;
/// More registers than any kernel lists, with the unlisted ones.
const MSRS_MAX: usize = 1024;
/// A nested state that is only a header: the guest does not run guests.
const NESTED_HEADER_LEN_BYTES: usize = 128;

const PAGE_LEN_BYTES: u64 = 4096;
/// Structures that a guest shares with KVM: MSR, bits that are not part of the address, length.
const SHARED_STRUCTURES: [(u32, u64, u64); 7] = [
    // Wall clock and system time, by their old and new numbers.
    (0x11, 0, 12),
    (0x4b56_4d00, 0, 12),
    (0x12, 1, 32),
    (0x4b56_4d01, 1, 32),
    // Asynchronous page faults, steal time, end of interrupt.
    (0x4b56_4d02, 0x3f, 64),
    (0x4b56_4d03, 0x3f, 64),
    (0x4b56_4d04, 3, 4),
];

/// One CPUID leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuidEntry {
    /// Leaf.
    pub function: u32,
    /// Sub-leaf.
    pub index: u32,
    /// The kernel's flags: whether the sub-leaf counts.
    pub flags: u32,
    /// Answer in EAX, EBX, ECX and EDX.
    pub answer: [u32; 4],
}

/// Complete state of a vCPU; untrusted until [`Vcpu::set_state`] has taken it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    /// Version of this structure.
    pub version: u32,
    /// Features that the guest sees.
    pub cpuid: Vec<CpuidEntry>,
    /// Whether the vCPU runs, is halted, or waits for another to start it.
    pub mp_state: u32,
    /// General registers.
    pub regs: kvm_regs,
    /// Special registers.
    pub sregs: kvm_sregs,
    /// Page directory pointers of 32-bit PAE paging, where the host tells them.
    pub pdptrs: Option<[u64; 4]>,
    /// XSAVE area in the standard format.
    pub xsave: Blob,
    /// Extended control registers.
    pub xcrs: kvm_xcrs,
    /// Debug registers.
    pub debugregs: kvm_debugregs,
    /// Register page of the local APIC.
    pub lapic: Blob,
    /// Model-specific registers without the TSC.
    pub msrs: Vec<MsrValue>,
    /// Pending exceptions, interrupts, NMI and SMI.
    pub events: kvm_vcpu_events,
    /// Time-stamp counter.
    pub tsc: TscState,
    /// Nested virtualisation, where there is any.
    pub nested: Option<Blob>,
    /// Shadow-stack pointer of a vCPU that was shown shadow stacks. Since version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssp: Option<u64>,
}

/// Why a vCPU's state could not be read or set.
#[derive(Debug, Error)]
pub enum VcpuStateError {
    /// Another program wrote it.
    #[error("vCPU state has version {0}, and {VCPU_STATE_VERSION} is the newest known here")]
    Version(u32),
    /// It has what its version does not know.
    #[error("vCPU state of version {version} has {what}, which came with a later version")]
    NotInVersion {
        /// Its version.
        version: u32,
        /// What is in it.
        what: &'static str,
    },
    /// The guest uses shadow stacks, and this KVM cannot set their pointer.
    #[error(
        "the guest uses shadow stacks, whose pointer KVM of this host cannot set (Linux 6.18 can)"
    )]
    ShadowStack,
    /// A triple fault waits for the vCPU, and this KVM cannot be told.
    #[error("a triple fault waits for the vCPU, which KVM of this host cannot be told")]
    TripleFault,
    /// A list is longer than it can be.
    #[error("vCPU state has {count} {what}, and at most {limit} are possible")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        limit: usize,
    },
    /// A part does not fit.
    #[error("the {what} of the vCPU state cannot be used on this host")]
    Blob {
        /// Name of the part.
        what: &'static str,
        /// What is wrong with it.
        #[source]
        source: BlobError,
    },
    /// The nested state contradicts itself, or the host has no nested virtualisation.
    #[error("the guest runs guests of its own, which this host cannot take over")]
    Nested,
    /// The TSC cannot run at the guest's frequency.
    #[error(
        "the guest's TSC runs at {wanted_khz} kHz, this host's at {host_khz} kHz, and this host \
         cannot scale it: migrate between hosts of the same frequency"
    )]
    TscFrequency {
        /// What the guest is used to.
        wanted_khz: u32,
        /// What there is.
        host_khz: u32,
    },
    /// Registers that the guest relies on cannot have their values here.
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

/// Registers whose loss a guest survives: performance counters and machine check banks.
fn is_diagnostic(index: u32) -> bool {
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

impl VcpuState {
    /// Checks every length in the state. Values are checked by the kernel.
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

    /// What version 1 cannot say of this vCPU, if there is such a thing.
    fn beyond_version_1(&self) -> Option<&'static str> {
        if self.ssp.is_some() {
            Some("a shadow-stack pointer")
        } else if has_triple_fault(&self.events) {
            Some("a pending triple fault")
        } else {
            None
        }
    }

    /// Guest pages that KVM itself reads and writes for this vCPU, as guest physical addresses.
    ///
    /// KVM reaches them from [`Vcpu::set_state`] on, and cannot wait for them in every kind of
    /// postcopy: bring them in first.
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

    fn lapic_state(&self) -> Result<kvm_lapic_state, VcpuStateError> {
        let mut bytes = [0; size_of::<kvm_lapic_state>()];
        self.lapic
            .fill(&mut bytes)
            .map_err(|source| VcpuStateError::Blob { what: "local APIC", source })?;
        Ok(kvm_lapic_state::read_from_bytes(&bytes).unwrap_or_default())
    }

    /// The nested state in a buffer; `None` if there is nothing in it that matters.
    fn nested_buffer(&self) -> Result<Option<Box<NestedBuffer>>, VcpuStateError> {
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

    /// The CPUID leaves in the kernel's form.
    fn kernel_cpuid(&self) -> Result<CpuId, VcpuStateError> {
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

/// Whether a triple fault waits for the vCPU.
fn has_triple_fault(events: &kvm_vcpu_events) -> bool {
    events.flags & KVM_VCPUEVENT_VALID_TRIPLE_FAULT != 0 && events.triple_fault.pending != 0
}

/// Events without the word that no triple fault is pending, which a KVM that was not asked for such
/// events refuses; a vCPU that has never run has none.
fn plain_events(mut events: kvm_vcpu_events) -> kvm_vcpu_events {
    if !has_triple_fault(&events) {
        events.flags &= !KVM_VCPUEVENT_VALID_TRIPLE_FAULT;
        events.triple_fault.pending = 0;
    }
    events
}

/// Splits the newer form of the special registers into the older one and what is new.
fn split_sregs(new: &kvm_sregs2) -> (kvm_sregs, Option<[u64; 4]>) {
    let kvm_sregs2 { cs, ds, es, fs, gs, ss, tr, ldt, gdt, idt, .. } = *new;
    let kvm_sregs2 { cr0, cr2, cr3, cr4, cr8, efer, apic_base, .. } = *new;
    let sregs = kvm_sregs {
        cs,
        ds,
        es,
        fs,
        gs,
        ss,
        tr,
        ldt,
        gdt,
        idt,
        cr0,
        cr2,
        cr3,
        cr4,
        cr8,
        efer,
        apic_base,
        // A pending interrupt is among the events.
        interrupt_bitmap: [0; 4],
    };
    let valid = new.flags & u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID) != 0;
    (sregs, valid.then_some(new.pdptrs))
}

/// The reverse of [`split_sregs`].
fn join_sregs(old: &kvm_sregs, pdptrs: Option<[u64; 4]>) -> kvm_sregs2 {
    let kvm_sregs { cs, ds, es, fs, gs, ss, tr, ldt, gdt, idt, .. } = *old;
    let kvm_sregs { cr0, cr2, cr3, cr4, cr8, efer, apic_base, .. } = *old;
    kvm_sregs2 {
        cs,
        ds,
        es,
        fs,
        gs,
        ss,
        tr,
        ldt,
        gdt,
        idt,
        cr0,
        cr2,
        cr3,
        cr4,
        cr8,
        efer,
        apic_base,
        flags: if pdptrs.is_some() { u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID) } else { 0 },
        pdptrs: pdptrs.unwrap_or_default(),
    }
}

impl Vcpu {
    /// Reads the complete state. The vCPU must be parked; see the module's head for the order.
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
        // A pending interrupt is among the events already.
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

    /// Sets the complete state of a vCPU that has never run. On failure the vCPU is not usable.
    ///
    /// `time` is what [`crate::Vm::restore_clock`] answered. KVM writes guest memory here (the wall
    /// clock, for one): see [`VcpuState::pages_used_by_kvm`].
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
        self.restore_msrs(&state.msrs)?;
        if state.ssp.is_some() && !self.vm().capabilities.one_reg {
            return Err(VcpuStateError::ShadowStack);
        }
        shadow_stack::restore(&self.fd, state.ssp).context("set a vCPU's shadow-stack pointer")?;
        self.fd.set_vcpu_events(&events).context("set a vCPU's events")?;
        self.write_nested(state)?;
        // The source's note to the guest does not travel with the state.
        self.tell_paused();
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

    /// Reads what is there of the host's list. Machine check banks that are zero are left out: that
    /// is how a vCPU begins.
    fn read_msrs(&self) -> Result<Vec<MsrValue>, KvmError> {
        let get = |chunk: &mut Msrs| self.fd.get_msrs(chunk);
        let mut read = msr::read_all(&self.vm().msr_indices, get)
            .context("read a vCPU's model-specific registers")?;
        if !read.refused.is_empty() {
            log::debug!("vcpu{}: registers without a value: {:x?}", self.index(), read.refused);
        }
        read.values.retain(|msr| msr.value != 0 || !matches!(msr.index, 0x400..=0x47f));
        Ok(read.values)
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

    /// Guests that run without virtualisation hardware see the host's counter.
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
            // Some hosts announce nested state and have none.
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
#[path = "vcpu_state_tests.rs"]
mod tests;
