// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vCPUs: registers as the kernel's structures, MSRs without the TSC, the local APIC in the format that is set here.
//!
//! Owns what is not saved there: debug registers, which have a default, and VMX operation, which has none. Whether a
//! processor can run them is decided later.

use std::collections::BTreeMap;

use cloud_hypervisor_state::{CpuidEntry as TheirEntry, Document, KvmVcpu, Vcpu};
use hypervisor::{Blob, ClockState, CpuidEntry, MsrValue, TscState, VcpuState};
use kvm_bindings::{KVM_VCPUEVENT_VALID_TRIPLE_FAULT, kvm_debugregs, kvm_vcpu_events};
use serde::de::DeserializeOwned;
use serde::de::value::{Error as BytesError, SeqDeserializer};

use super::error::{AdoptError, ensure};
use super::{ReadGuest, clock};
use crate::config::CpusConfig;

const IA32_TSC: u32 = 0x10;
/// The place of the guest's paravirtual clock, and the bit of it that says that there is one.
const KVM_SYSTEM_TIME: u32 = 0x4b56_4d01;
const SYSTEM_TIME_ENABLED: u64 = 1;
/// States of a vCPU that waits to be started, and of one that has executed HLT.
const MP_STATES_NOT_STARTED: [u32; 2] = [1, 2];
const MP_STATE_HALTED: u32 = 3;
/// Where RFLAGS is in the kernel's structure, and its bit by which interrupts are taken.
const RFLAGS: usize = 136;
const RFLAGS_IF: u64 = 1 << 9;
/// Bit of CR4 without which there is no VMX operation, and of CPUID that offers it.
const CR4_VMXE: u64 = 1 << 13;
const VMX: u32 = 1 << 5;
/// Mode bit of the local APIC's base address.
const X2APIC: u64 = 1 << 10;
/// Register of the local APIC with its id.
const APIC_ID: usize = 0x20;
/// Debug registers at reset.
const DR6: u64 = 0xffff_0ff0;
const DR7: u64 = 0x400;
/// The last state of a vCPU that the kernel knows on x86.
const MP_STATE_MAX: u32 = 4;
/// Components of the XSAVE area that are in the header, and where the header is.
const XSAVE_LEGACY_COMPONENTS: u64 = 0b11;
const XSAVE_HEADER: usize = 512;
const XSAVE_COMPACTED: u64 = 1 << 63;
const XSAVE_MIN_BYTES: u64 = 576;
const NESTED_HEADER_BYTES: usize = 128;
const LEAF_XSAVE: u32 = 0xd;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_ADDRESS_BITS: u32 = 0x8000_0008;
const LEAF_FEATURES: u32 = 1;
const LEAF_AMD_FEATURES: u32 = 0x8000_0001;
/// Leaves that v53 makes for vCPUs: caches and topology, the end of KVM's leaves and the timing leaf; AMD's topology.
const LEAVES_OF_VCPUS: [u32; 6] = [4, LEAF_TOPOLOGY, 0x1f, 0x4000_0000, 0x4000_0010, 0x8000_001e];
const ALL: u32 = u32::MAX;
const LEAF_SVM: u32 = 0x8000_000a;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;
/// Bits that it changes in others, by leaf and register: number of logical processors, HTT; compatibility bits of AMD, number
/// of cores and width of their ids.
const BITS_OF_VCPUS: [(u32, usize, u32); 4] = [
    (LEAF_FEATURES, EBX, 0xff << 16),
    (LEAF_FEATURES, EDX, 1 << 28),
    (LEAF_AMD_FEATURES, ECX, 1 << 1 | 1 << 22),
    (LEAF_ADDRESS_BITS, ECX, ALL),
];
/// What it clears without `nested`: VMX, SVM and all that SVM can do.
const NESTED_BITS: [(u32, usize, u32); 6] = [
    (LEAF_FEATURES, ECX, 1 << 5),
    (LEAF_AMD_FEATURES, ECX, 1 << 2),
    (LEAF_SVM, 0, ALL),
    (LEAF_SVM, EBX, ALL),
    (LEAF_SVM, ECX, ALL),
    (LEAF_SVM, EDX, ALL),
];

/// The vCPUs of a guest.
#[derive(Debug)]
pub struct Vcpus {
    /// By index.
    pub states: Vec<VcpuState>,
    /// The address bits that they were shown.
    pub address_bits: u8,
    /// Whether their TSC is that of the clock's moment, and not of a later one.
    pub is_tsc_of_clock: bool,
}

/// All vCPUs that are present, with one TSC. Those beyond `boot_vcpus` were ejected by the guest and are left out.
///
/// # Errors
/// Names the vCPU and the register.
pub fn convert(
    document: &Document,
    cpus: &CpusConfig,
    clock: &ClockState,
    guest: &dyn ReadGuest,
) -> Result<Vcpus, AdoptError> {
    check_ejected(document, cpus.boot_vcpus)?;
    let mut sources = Vec::new();
    for index in 0..cpus.boot_vcpus {
        let missing = || AdoptError::refused(path(index), "the node is missing");
        let Vcpu::Kvm(vcpu) = document.vcpus.get(&index).ok_or_else(missing)?;
        sources.push(vcpu);
    }
    let first = sources.first().ok_or_else(|| AdoptError::refused(path(0), "no vCPU"))?;
    let tsc = tsc_of(first).ok_or_else(|| AdoptError::refused(path(0), "msrs: no TSC"))?;
    let address_bits = address_bits(&format!("{}: cpuid", path(0)), &first.cpuid)?;
    let places = sources.iter().filter_map(|vcpu| clock_page_gpa(vcpu));
    let of_clock = clock::tsc_at(clock.clock_ns, tsc, places, guest);
    let tsc = of_clock.unwrap_or(tsc);
    let states = (0_u32..).zip(sources).map(|(index, vcpu)| Source { index, vcpu }.convert(tsc));
    let states = states.collect::<Result<_, _>>()?;
    Ok(Vcpus { states, address_bits, is_tsc_of_clock: of_clock.is_some() })
}

/// Refuses a vCPU that the guest uses and the configuration does not count: v53 changes `boot_vcpus` when it asks the guest
/// to eject vCPUs, which that does later or never. One that was ejected is in the document all the same.
fn check_ejected(document: &Document, boot_vcpus: u32) -> Result<(), AdoptError> {
    let beyond = document.vcpus.iter().filter(|(index, _)| **index >= boot_vcpus);
    let in_use: Vec<u32> =
        beyond.filter(|(_, Vcpu::Kvm(vcpu))| !is_offline(vcpu)).map(|(index, _)| *index).collect();
    let Some(first) = in_use.first() else { return Ok(()) };
    let count = u64::try_from(in_use.len()).unwrap_or(u64::MAX).saturating_add(boot_vcpus.into());
    let problem = format!(
        "the guest was asked to eject it and still uses it: wait until it has, or resize the VM to {count} vCPUs at its \
         source, and try again"
    );
    Err(AdoptError::refused(path(*first), problem))
}

/// Whether the guest does not use a vCPU: it has never started it, or has stopped it where nothing wakes it.
fn is_offline(vcpu: &KvmVcpu) -> bool {
    let mp_state = u32::from_le_bytes(*vcpu.mp_state);
    let takes_interrupts = u64_at(vcpu.regs.as_slice(), RFLAGS) & RFLAGS_IF != 0;
    let is_stopped = mp_state == MP_STATE_HALTED && !takes_interrupts;
    is_stopped || MP_STATES_NOT_STARTED.contains(&mp_state)
}

/// Where a vCPU has its page of the paravirtual clock, if it has one.
fn clock_page_gpa(vcpu: &KvmVcpu) -> Option<u64> {
    let place = vcpu.msrs.iter().find(|msr| msr.index == KVM_SYSTEM_TIME)?.data;
    (place & SYSTEM_TIME_ENABLED != 0).then_some(place & !SYSTEM_TIME_ENABLED)
}

fn path(index: u32) -> String {
    format!("cpu-manager/{index}")
}

fn tsc_of(vcpu: &KvmVcpu) -> Option<u64> {
    vcpu.msrs.iter().find(|msr| msr.index == IA32_TSC).map(|msr| msr.data)
}

fn leaf(vcpu: &KvmVcpu, function: u32, index: u32) -> Option<&TheirEntry> {
    vcpu.cpuid.iter().find(|entry| (entry.function, entry.index) == (function, index))
}

/// The address bits that vCPUs with this CPUID are shown; `path` is where it is.
///
/// # Errors
/// No processor has so many.
pub fn address_bits(path: &str, cpuid: &[TheirEntry]) -> Result<u8, AdoptError> {
    let leaf = cpuid.iter().find(|entry| entry.function == LEAF_ADDRESS_BITS);
    let bits = leaf.map_or(0, |entry| entry.eax & 0xff);
    ensure(
        (32..=52).contains(&bits),
        || path.to_owned(),
        || format!("leaf 0x80000008 says {bits} address bits"),
    )?;
    Ok(u8::try_from(bits).unwrap_or(0))
}

/// What all vCPUs were shown, by which a host is compared and new vCPUs are made. Features are those before changes for a
/// vCPU, as not every KVM returns of a vCPU what it was told; what v53 has changed for all of them, vCPU 0 has. `first` is
/// that one, once its state has come; before that, leaves and bits of vCPUs are those of `common`.
pub fn shown(
    common: &[TheirEntry],
    first: Option<&VcpuState>,
    cpus: &CpusConfig,
) -> Vec<CpuidEntry> {
    let theirs = |function: u32| {
        let first = first.into_iter().flat_map(|first| &first.cpuid);
        first.filter(move |it| it.function == function)
    };
    let is_changed =
        |entry: &CpuidEntry| first.is_some() && LEAVES_OF_VCPUS.contains(&entry.function);
    let common = common.iter().map(entry).filter(|entry| !is_changed(entry));
    let mut shown: Vec<CpuidEntry> = common.collect();
    shown.extend(LEAVES_OF_VCPUS.into_iter().flat_map(theirs).copied());
    for entry in &mut shown {
        for (_, register, bits) in BITS_OF_VCPUS.iter().filter(|it| it.0 == entry.function) {
            let of_first = theirs(entry.function).next().map(|first| first.answer);
            let of_first = of_first.and_then(|answer| answer.get(*register).copied());
            if let (Some(value), Some(of_first)) = (entry.answer.get_mut(*register), of_first) {
                *value = *value & !bits | of_first & bits;
            }
        }
        if cpus.nested {
            continue;
        }
        for (_, register, bits) in NESTED_BITS.iter().filter(|it| it.0 == entry.function) {
            if let Some(value) = entry.answer.get_mut(*register) {
                *value &= !bits;
            }
        }
    }
    shown.sort_by_key(|entry| (entry.function, entry.index));
    shown
}

/// A vCPU that is converted.
struct Source<'a> {
    index: u32,
    vcpu: &'a KvmVcpu,
}

impl Source<'_> {
    fn at(&self, field: &str) -> String {
        format!("{}: {field}", path(self.index))
    }

    fn convert(&self, tsc: u64) -> Result<VcpuState, AdoptError> {
        let vcpu = self.vcpu;
        let mp_state = u32::from_le_bytes(*vcpu.mp_state);
        ensure(mp_state <= MP_STATE_MAX, || self.at("mp_state"), || format!("{mp_state}"))?;
        let events: kvm_vcpu_events = self.structure("vcpu_events", vcpu.vcpu_events.as_slice())?;
        let is_lost = events.flags & KVM_VCPUEVENT_VALID_TRIPLE_FAULT != 0;
        ensure(!is_lost, || self.at("vcpu_events"), || "a triple fault".to_owned())?;
        let mut sregs: kvm_bindings::kvm_sregs = self.structure("sregs", vcpu.sregs.as_slice())?;
        // An interrupt that is being delivered is in the events; this would raise it a second time.
        sregs.interrupt_bitmap = [0; 4];
        let nested = self.nested(sregs.cr4)?;
        Ok(VcpuState {
            version: 1,
            cpuid: vcpu.cpuid.iter().map(entry).collect(),
            mp_state,
            regs: self.structure("regs", vcpu.regs.as_slice())?,
            pdptrs: None,
            xsave: self.xsave()?,
            xcrs: self.structure("xcrs", vcpu.xcrs.as_slice())?,
            debugregs: kvm_debugregs { dr6: DR6, dr7: DR7, ..Default::default() },
            lapic: self.lapic(sregs.apic_base)?,
            sregs,
            msrs: self.msrs()?,
            events,
            tsc: TscState { khz: vcpu.tsc_khz, value: tsc, offset: None },
            nested,
            ssp: None,
        })
    }

    /// A structure of the kernel from its bytes.
    fn structure<T: DeserializeOwned>(&self, field: &str, bytes: &[u8]) -> Result<T, AdoptError> {
        T::deserialize(SeqDeserializer::<_, BytesError>::new(bytes.iter().copied()))
            .map_err(|error| AdoptError::refused(self.at(field), error.to_string()))
    }

    /// The XSAVE area, if all components that it says it has are in it.
    fn xsave(&self) -> Result<Blob, AdoptError> {
        let xsave = &self.vcpu.xsave;
        let words = xsave.region.iter().chain(xsave.extra.iter());
        let bytes: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
        let (present, compacted) = (u64_at(&bytes, XSAVE_HEADER), u64_at(&bytes, XSAVE_HEADER + 8));
        ensure(
            compacted & XSAVE_COMPACTED == 0,
            || self.at("xsave.region"),
            || "it is in the compacted format".to_owned(),
        )?;
        let others = (0_u32..63).filter(|bit| (present & !XSAVE_LEGACY_COMPONENTS) >> bit & 1 == 1);
        for component in others {
            let place = leaf(self.vcpu, LEAF_XSAVE, component);
            let end = place.map(|entry| u64::from(entry.ebx).saturating_add(entry.eax.into()));
            let has = u64::try_from(bytes.len()).unwrap_or(0);
            ensure(
                end.is_some_and(|end| end > XSAVE_MIN_BYTES && end <= has),
                || self.at("xsave"),
                || format!("component {component} is not in its {has} bytes"),
            )?;
        }
        Ok(Blob::new(&bytes))
    }

    /// The register page, with the id in all bits of its register if the vCPU is in x2APIC mode.
    fn lapic(&self, apic_base: u64) -> Result<Blob, AdoptError> {
        let regs = self.vcpu.lapic_state.regs.iter();
        let mut bytes: Vec<u8> = regs.map(|byte| byte.cast_unsigned()).collect();
        if apic_base & X2APIC != 0 {
            let Some(register) = bytes.get_mut(APIC_ID..).and_then(<[u8]>::first_chunk_mut) else {
                return Err(AdoptError::refused(self.at("lapic_state"), "too short"));
            };
            // In the upper byte, unless an id of the guest needs more bits.
            let found = u32::from_le_bytes(*register);
            let id = self.apic_id();
            ensure(
                found == id || id <= 0xff && found == id << 24,
                || self.at("lapic_state.regs[32]"),
                || format!("the APIC id {found:#x} is not that of CPUID, {id:#x}"),
            )?;
            *register = id.to_le_bytes();
        }
        Ok(Blob::new(&bytes))
    }

    /// The APIC id that CPUID says.
    fn apic_id(&self) -> u32 {
        let wide = leaf(self.vcpu, LEAF_TOPOLOGY, 0).filter(|entry| entry.ebx != 0);
        let narrow = || leaf(self.vcpu, LEAF_FEATURES, 0).map(|entry| entry.ebx >> 24);
        wide.map(|entry| entry.edx).or_else(narrow).unwrap_or(self.index)
    }

    /// All MSRs but the TSC, by their index.
    fn msrs(&self) -> Result<Vec<MsrValue>, AdoptError> {
        let mut values = BTreeMap::new();
        for msr in self.vcpu.msrs.iter().filter(|msr| msr.index != IA32_TSC) {
            let before = values.insert(msr.index, msr.data);
            ensure(
                before.is_none_or(|before| before == msr.data),
                || self.at("msrs"),
                || format!("MSR {:#x} has two values", msr.index),
            )?;
        }
        Ok(values.into_iter().map(|(index, value)| MsrValue { index, value }).collect())
    }

    /// The state of nested guests: as much of the buffer as its own length says. v53 writes none of a vCPU in VMX operation
    /// that has loaded no nested guest, of which KVM has a header alone: it would leave that operation unnoticed.
    fn nested(&self, cr4: u64) -> Result<Option<Blob>, AdoptError> {
        const LENGTH: usize = 4;
        let Some(buffer) = &self.vcpu.nested_state else {
            let has_vmx = leaf(self.vcpu, LEAF_FEATURES, 0).is_some_and(|it| it.ecx & VMX != 0);
            ensure(
                cr4 & CR4_VMXE == 0 || !has_vmx,
                || self.at("nested_state"),
                || {
                    "null, and a hypervisor is loaded in the guest (CR4.VMXE is set), of which cloud-hypervisor has saved \
                     nothing: unload it (in Linux kvm_intel) and try again"
                        .to_owned()
                },
            )?;
            return Ok(None);
        };
        let bytes = buffer.as_slice();
        let len =
            bytes.get(LENGTH..).and_then(<[u8]>::first_chunk).copied().map(u32::from_le_bytes);
        let len = len.and_then(|len| usize::try_from(len).ok()).unwrap_or(0);
        let used = bytes.get(..len).filter(|used| used.len() >= NESTED_HEADER_BYTES);
        let wrong = || AdoptError::refused(self.at("nested_state"), format!("{len} bytes of it"));
        Ok(Some(Blob::new(used.ok_or_else(wrong)?)))
    }
}

fn entry(entry: &TheirEntry) -> CpuidEntry {
    let TheirEntry { function, index, flags, eax, ebx, ecx, edx } = *entry;
    CpuidEntry { function, index, flags, answer: [eax, ebx, ecx, edx] }
}

/// The number at an offset; zero beyond the end.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let chunk = bytes.get(at..).and_then(<[u8]>::first_chunk).copied();
    chunk.map_or(0, u64::from_le_bytes)
}
