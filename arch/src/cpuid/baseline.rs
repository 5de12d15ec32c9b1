// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A CPU baseline: what several hosts have in common, so that a guest that is shown no more can run on each.
//!
//! Owns which parts of CPUID a baseline consists of, how those of two hosts become one, and how the CPUID that KVM
//! supports is limited to it. What describes a host without promising anything (caches, name) is not in it, but the model is. Must
//! never pass on a feature that it does not know: a register that a baseline lacks has no features.

mod error;

use std::ops::RangeInclusive;

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

pub use error::{BelowBaseline, NoBaseline, UnknownPart};

use super::compat::cpuid_compat;
use super::features::{
    FEATURES, FeatureRegister, KVM_FEATURES, NO_TRANSIENT_SCHEDULER, VERW_CLEAR,
};
use super::table::{Register, Table, Vendor, find, register, vendor_bytes};
use super::{
    CpuidTooLong, HYPERVISOR, LEAF_AMD_ADDRESS, LEAF_AMD_CACHE, LEAF_AMD_TOPOLOGY, LEAF_KVM,
    LEAF_SVM, LEAF_TOPOLOGY, LEAF_TOPOLOGY_V2, LEAF_XSAVE, MONITOR, SVM, TSC_DEADLINE, VMX, X2APIC,
    XCR0_AMX, fit_xsave_area, phys_bits,
};
use crate::feature_msrs::{common_feature_msrs, feature_msrs_compat, indices, untold_weaknesses};

const LEAF_PMU: u32 = 0xa;
const LEAF_EXTENDED: u32 = 0x8000_0000;
const LEAF_AMD_PMU: u32 = 0x8000_0022;
/// Leaf 1 ECX.
const XSAVE: u32 = 1 << 26;
/// Leaf 1 ECX: the MSR of performance capabilities is there.
const PDCM: u32 = 1 << 15;
/// Leaf 7 EBX and ECX.
const SGX: u32 = 1 << 2;
const INTEL_PT: u32 = 1 << 25;
const SGX_LC: u32 = 1 << 30;
/// Leaf 7 EDX.
const AMX: u32 = 1 << 22 | 1 << 24 | 1 << 25;
/// Leaf 7.1 EAX and EDX.
const AMX_FP16: u32 = 1 << 21;
const AMX_COMPLEX: u32 = 1 << 8;
/// Leaf 7 ECX: addresses of 57 bits.
const LA57: u32 = 1 << 16;
/// Leaf 0x80000001 EDX: 64-bit mode.
const LONG_MODE: u32 = 1 << 29;
/// Leaf 1 ECX and EDX: debug store.
const DTES64: u32 = 1 << 2;
const DS: u32 = 1 << 21;
/// Leaf 7 EDX: the MSR of architectural capabilities is there.
const ARCH_CAPABILITIES: u32 = 1 << 29;
/// Leaf 7.1 EDX. Its version is a number in a leaf of its own, which is not compared.
const AVX10: u32 = 1 << 19;
const ARCH_CAPABILITIES_MSR: u32 = 0x10a;
const PERF_CAPABILITIES_MSR: u32 = 0x345;
const VMX_EPT_VPID: u32 = 0x48c;
const VMX_FUNCTIONS: u32 = 0x491;
const VMX_MSRS: RangeInclusive<u32> = 0x480..=0x491;
/// Numbers that are the same or nothing.
const PMU_LEAVES: [u32; 2] = [LEAF_PMU, LEAF_AMD_PMU];
/// Registers with the number of the last leaf.
const LAST_LEAVES: [u32; 2] = [0, LEAF_EXTENDED];

/// What the hosts of a pool have in common, or one host has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Baseline {
    entries: Vec<kvm_cpuid_entry2>,
    msrs: Vec<(u32, u64)>,
}

/// Where a register is, in the order of a baseline.
type Place = (u32, u32, Register);

/// Bits that the VMM decides whatever the host has, that a process has to be granted (AMX), or that belong to numbers which are
/// not compared (SGX, AVX10) or are those of one model (the debug store).
const NOT_COUNTED: [(Place, u32); 8] = [
    ((1, 0, Register::Ecx), MONITOR | X2APIC | TSC_DEADLINE | HYPERVISOR | DTES64),
    ((1, 0, Register::Edx), DS),
    ((7, 0, Register::Ebx), SGX | INTEL_PT),
    ((7, 0, Register::Ecx), SGX_LC),
    ((7, 0, Register::Edx), AMX),
    ((7, 1, Register::Eax), AMX_FP16),
    ((7, 1, Register::Edx), AMX_COMPLEX | AVX10),
    ((LEAF_XSAVE, 0, Register::Eax), XCR0_AMX),
];

/// All registers of features, with the bits that count.
fn feature_registers() -> impl Iterator<Item = (&'static FeatureRegister, u32)> {
    FEATURES.iter().chain([&KVM_FEATURES]).map(|set| {
        let place = (set.function, set.index, set.register);
        let not_counted =
            NOT_COUNTED.iter().find(|(other, _)| *other == place).map_or(0, |(_, bits)| *bits);
        (set, !set.ignored & !not_counted)
    })
}

/// Leaves that say what the host is, and promise nothing: model, caches, topology, address bits, names. All others go, but for
/// the registers of features and what the VMM writes itself.
const DESCRIPTIVE: [u32; 20] = [
    0,
    1,
    2,
    4,
    LEAF_TOPOLOGY,
    LEAF_XSAVE,
    LEAF_TOPOLOGY_V2,
    LEAF_KVM,
    LEAF_EXTENDED,
    0x8000_0001,
    0x8000_0002,
    0x8000_0003,
    0x8000_0004,
    0x8000_0005,
    0x8000_0006,
    LEAF_AMD_ADDRESS,
    LEAF_SVM,
    0x8000_0019,
    LEAF_AMD_CACHE,
    LEAF_AMD_TOPOLOGY,
];

/// Registers of descriptive leaves that are features, which are kept by their own list alone.
fn is_descriptive(function: u32, index: u32, place: Register) -> bool {
    DESCRIPTIVE.contains(&function) && bits_of((function, index, place)) == 0
        || matches!((function, index, place), (0 | LEAF_KVM, 0, _) | (1 | LEAF_EXTENDED | LEAF_AMD_ADDRESS, 0, Register::Eax))
        // The number of the last subleaf.
        || (function, index, place) == (7, 0, Register::Eax)
}

/// The bits of a register that a baseline may have.
fn bits_of((function, index, place): Place) -> u32 {
    let features = feature_registers()
        .find(|(set, _)| (set.function, set.index, set.register) == (function, index, place))
        .map_or(0, |(_, counted)| counted);
    match (function, index, place) {
        (0 | LEAF_KVM | LEAF_PMU | LEAF_AMD_PMU, 0, _) | (1 | LEAF_EXTENDED, 0, Register::Eax) => {
            u32::MAX
        }
        (LEAF_AMD_ADDRESS, 0, Register::Eax) => 0xff,
        _ => features,
    }
}

/// Those of KVM for a leaf with features.
fn flags_of(function: u32) -> u32 {
    if matches!(function, 7 | LEAF_XSAVE) { KVM_CPUID_FLAG_SIGNIFCANT_INDEX } else { 0 }
}

fn set(entry: &mut kvm_cpuid_entry2, place: Register, value: u32) {
    let target = match place {
        Register::Eax => &mut entry.eax,
        Register::Ebx => &mut entry.ebx,
        Register::Ecx => &mut entry.ecx,
        Register::Edx => &mut entry.edx,
    };
    *target = value;
}

fn read(entries: &[kvm_cpuid_entry2], (function, index, place): Place) -> u32 {
    find(entries, function, index).map_or(0, |entry| register(entry, place))
}

/// Which feature MSRs a guest may read, by the CPUID that it is shown.
struct ReadableMsrs {
    arch_capabilities: bool,
    perf_capabilities: bool,
    vmx: bool,
}

impl ReadableMsrs {
    fn of(shown: &[kvm_cpuid_entry2]) -> Self {
        let shows = |place: Place, bit: u32| read(shown, place) & bit != 0;
        Self {
            arch_capabilities: shows((7, 0, Register::Edx), ARCH_CAPABILITIES),
            perf_capabilities: shows((1, 0, Register::Ecx), PDCM),
            vmx: shows((1, 0, Register::Ecx), VMX),
        }
    }
}

/// A table that grows by registers. Those that are zero are left out.
#[derive(Default)]
struct Builder(Vec<kvm_cpuid_entry2>);

impl Builder {
    fn put(&mut self, (function, index, place): Place, value: u32) {
        if value == 0 {
            return;
        }
        let known = |entry: &kvm_cpuid_entry2| (entry.function, entry.index) == (function, index);
        if let Some(entry) = self.0.iter_mut().find(|entry| known(entry)) {
            set(entry, place, value);
            return;
        }
        let flags = flags_of(function);
        let mut entry = kvm_cpuid_entry2 { function, index, flags, ..Default::default() };
        set(&mut entry, place, value);
        self.0.push(entry);
    }

    fn put_all(&mut self, function: u32, of: &kvm_cpuid_entry2) {
        for place in [Register::Eax, Register::Ebx, Register::Ecx, Register::Edx] {
            self.put((function, 0, place), register(of, place));
        }
    }

    fn finish(mut self) -> Vec<kvm_cpuid_entry2> {
        self.0.sort_by_key(|entry| (entry.function, entry.index));
        self.0
    }
}

impl Baseline {
    /// What a host has: the CPUID that KVM supports, and the feature MSRs that it has for vCPUs.
    pub fn of_host(host: &CpuId, msrs: &[(u32, u64)]) -> Self {
        let entries = host.as_slice();
        let mut builder = Builder::default();
        for function in [0, LEAF_KVM] {
            // The names of maker and hypervisor, and the last leaf.
            if let Some(leaf) = find(entries, function, 0) {
                builder.put_all(function, leaf);
            }
        }
        builder.put(
            (LEAF_EXTENDED, 0, Register::Eax),
            read(entries, (LEAF_EXTENDED, 0, Register::Eax)),
        );
        let model = (1, 0, Register::Eax);
        builder.put(model, read(entries, model));
        let bits = u32::from(phys_bits(host, u8::MAX));
        builder.put((LEAF_AMD_ADDRESS, 0, Register::Eax), bits);
        for (set, counted) in feature_registers() {
            let place = (set.function, set.index, set.register);
            builder.put(place, read(entries, place) & counted);
        }
        for function in PMU_LEAVES {
            if let Some(leaf) = find(entries, function, 0) {
                builder.put_all(function, leaf);
            }
        }
        let is_amd = Table::from_host(host).vendor() == Vendor::Amd;
        let (others, vmx) = common_feature_msrs(msrs, msrs);
        let mut of_host = Self { entries: builder.finish(), msrs: others };
        of_host.msrs.extend(vmx.iter().flatten());
        if is_amd {
            // KVM makes it up on these processors, in some versions alone.
            of_host.hide(7, |leaf| leaf.edx &= !ARCH_CAPABILITIES);
        }
        if vmx.is_none() {
            of_host.hide(1, |leaf| leaf.ecx &= !VMX);
        }
        of_host.forget_what_is_not_shown();
        of_host
    }

    fn hide(&mut self, function: u32, change: impl Fn(&mut kvm_cpuid_entry2)) {
        let entries = self.entries.iter_mut();
        entries.filter(|entry| (entry.function, entry.index) == (function, 0)).for_each(change);
    }

    /// A baseline that was written down.
    ///
    /// # Errors
    /// It has a register that means no feature, or one that this version does not know and could not keep.
    pub fn from_parts(
        mut entries: Vec<kvm_cpuid_entry2>,
        mut msrs: Vec<(u32, u64)>,
    ) -> Result<Self, UnknownPart> {
        for (number, entry) in entries.iter().enumerate() {
            let (function, index) = (entry.function, entry.index);
            let places = [Register::Eax, Register::Ebx, Register::Ecx, Register::Edx];
            let unknown = places
                .into_iter()
                .any(|place| register(entry, place) & !bits_of((function, index, place)) != 0);
            if unknown {
                return Err(UnknownPart::Leaf { function, index });
            }
            let earlier = entries.iter().take(number);
            if earlier.into_iter().any(|other| (other.function, other.index) == (function, index)) {
                return Err(UnknownPart::LeafTwice { function, index });
            }
        }
        let known = indices();
        msrs.sort_unstable();
        for (number, (index, _)) in msrs.iter().enumerate() {
            if !known.contains(index) {
                return Err(UnknownPart::Msr { index: *index });
            }
            if number
                .checked_sub(1)
                .and_then(|before| msrs.get(before))
                .is_some_and(|(i, _)| i == index)
            {
                return Err(UnknownPart::MsrTwice { index: *index });
            }
        }
        entries.sort_by_key(|entry| (entry.function, entry.index));
        for entry in &mut entries {
            entry.flags = flags_of(entry.function);
        }
        let read = Self { entries, msrs };
        if vendor_bytes(&read.entries) == [0; 12] {
            return Err(UnknownPart::Missing { what: "the maker of the processor (leaf 0x0)" });
        }
        if !(32..=52).contains(&read.phys_bits()) {
            return Err(UnknownPart::Missing {
                what: "32 to 52 physical address bits (leaf 0x80000008, EAX)",
            });
        }
        if self::read(&read.entries, (0x8000_0001, 0, Register::Edx)) & LONG_MODE == 0 {
            return Err(UnknownPart::Missing { what: "64-bit mode (leaf 0x80000001, EDX bit 29)" });
        }
        Ok(read)
    }

    /// The registers of CPUID, of which all others are zero.
    pub fn entries(&self) -> &[kvm_cpuid_entry2] {
        &self.entries
    }

    /// The feature MSRs, by number.
    pub fn msrs(&self) -> &[(u32, u64)] {
        &self.msrs
    }

    /// Family, model and stepping, as CPUID says them.
    pub fn model(&self) -> u32 {
        read(&self.entries, (1, 0, Register::Eax))
    }

    /// Physical address bits.
    pub fn phys_bits(&self) -> u8 {
        read(&self.entries, (LEAF_AMD_ADDRESS, 0, Register::Eax)).to_le_bytes()[0]
    }

    /// The feature MSRs of a guest that is shown this CPUID, as far as they may differ from those of its host.
    pub fn msrs_of_guest(&self, shown: &[kvm_cpuid_entry2]) -> Vec<(u32, u64)> {
        let readable = ReadableMsrs::of(shown);
        let value = |wanted: u32| {
            self.msrs.iter().find(|(index, _)| *index == wanted).map(|(_, value)| *value)
        };
        // Zero where it is not shown: some kernels have a value for it then as well, and others take no other.
        let capabilities = value(ARCH_CAPABILITIES_MSR).filter(|_| readable.arch_capabilities);
        let mut msrs = vec![(ARCH_CAPABILITIES_MSR, capabilities.unwrap_or(0))];
        if readable.perf_capabilities {
            msrs.push((PERF_CAPABILITIES_MSR, value(PERF_CAPABILITIES_MSR).unwrap_or(0)));
        }
        // Of the others a host requires something; these may be had or not.
        const OPTIONAL: [u32; 2] = [VMX_EPT_VPID, VMX_FUNCTIONS];
        let vmx = self.msrs.iter().copied().filter(|(index, _)| VMX_MSRS.contains(index));
        let absent =
            OPTIONAL.into_iter().filter(|index| value(*index).is_none()).map(|index| (index, 0));
        if readable.vmx {
            msrs.extend(vmx.chain(absent));
        }
        msrs
    }

    /// The maker of the processor, as CPUID says it.
    pub fn maker(&self) -> String {
        String::from_utf8_lossy(&vendor_bytes(&self.entries)).into_owned()
    }

    /// What two have in common.
    ///
    /// # Errors
    /// They are of different makers.
    pub fn common(&self, other: &Self) -> Result<Self, NoBaseline> {
        if vendor_bytes(&self.entries) != vendor_bytes(&other.entries) {
            return Err(NoBaseline { first: self.maker(), second: other.maker() });
        }
        let of_both = |place: Place| (read(&self.entries, place), read(&other.entries, place));
        let least = |place: Place| {
            let (here, there) = of_both(place);
            here.min(there)
        };
        let mut builder = Builder::default();
        if let Some(maker) = find(&self.entries, 0, 0) {
            builder.put_all(0, maker);
        }
        for function in LAST_LEAVES.into_iter().chain([LEAF_AMD_ADDRESS]) {
            builder.put((function, 0, Register::Eax), least((function, 0, Register::Eax)));
        }
        let kvm = [&self.entries, &other.entries].map(|entries| find(entries, LEAF_KVM, 0));
        if let [Some(name), Some(_)] = kvm {
            builder.put_all(LEAF_KVM, name);
        }
        // That of the first, which by the documents is the oldest.
        builder.put((1, 0, Register::Eax), read(&self.entries, (1, 0, Register::Eax)));
        let (others, vmx) = common_feature_msrs(&self.msrs, &other.msrs);
        for (set, _) in feature_registers() {
            let place = (set.function, set.index, set.register);
            let (here, there) = of_both(place);
            let mut both = here & there;
            if place == (1, 0, Register::Ecx) && vmx.is_none() {
                both &= !VMX;
            }
            if place == (VERW_CLEAR.function, 0, VERW_CLEAR.register) {
                // Told where one of the two has it, and the other does not need it.
                let fits = |entries: &[kvm_cpuid_entry2]| {
                    VERW_CLEAR.is_in(entries) || NO_TRANSIENT_SCHEDULER.is_in(entries)
                };
                if (here | there) & VERW_CLEAR.bits != 0
                    && fits(&self.entries)
                    && fits(&other.entries)
                {
                    both |= VERW_CLEAR.bits;
                }
            }
            builder.put(place, both);
        }
        for function in PMU_LEAVES {
            let leaves = [&self.entries, &other.entries].map(|entries| find(entries, function, 0));
            if let [Some(here), Some(there)] = leaves
                && (here.eax, here.ebx, here.ecx, here.edx)
                    == (there.eax, there.ebx, there.ecx, there.edx)
            {
                builder.put_all(function, here);
            }
        }
        let mut common = Self { entries: builder.finish(), msrs: others };
        common.msrs.extend(vmx.iter().flatten());
        common.forget_what_is_not_shown();
        Ok(common)
    }

    /// Drops what goes with a feature that is not in common.
    fn forget_what_is_not_shown(&mut self) {
        if read(&self.entries, (LEAF_PMU, 0, Register::Eax)) == 0 {
            for entry in self.entries.iter_mut().filter(|entry| entry.function == 1) {
                entry.ecx &= !PDCM;
            }
        }
        let readable = ReadableMsrs::of(&self.entries);
        self.msrs.retain(|(index, _)| match index {
            &ARCH_CAPABILITIES_MSR => readable.arch_capabilities,
            &PERF_CAPABILITIES_MSR => readable.perf_capabilities,
            index => readable.vmx || !VMX_MSRS.contains(index),
        });
    }

    /// What this host lacks of it for a guest that boots; `nested` says whether guests are shown VMX and SVM at all. One that
    /// has booted elsewhere does what it does, and is only compared with what it was shown.
    ///
    /// # Errors
    /// Names each lack, and each weakness of the host of which the guest would not be told.
    pub fn check(&self, host: &Self, nested: bool) -> Result<(), BelowBaseline> {
        let mut below = self.beyond(host, nested).unwrap_or_default();
        if ReadableMsrs::of(&self.entries).arch_capabilities
            && let Some(names) = untold_weaknesses(&self.msrs, &host.msrs)
        {
            below.msrs.push(format!(
                "the host has {names}, which the baseline does not tell of: make it anew"
            ));
        }
        if below == BelowBaseline::default() { Ok(()) } else { Err(below) }
    }

    /// What it has beyond another one; `None` if it has nothing.
    pub fn beyond(&self, other: &Self, nested: bool) -> Option<BelowBaseline> {
        let mut wanted = self.clone();
        if !nested {
            wanted.hide(1, |leaf| leaf.ecx &= !VMX);
            wanted.hide(0x8000_0001, |leaf| leaf.ecx &= !SVM);
            wanted.hide(LEAF_SVM, |leaf| leaf.edx = 0);
        }
        let features = cpuid_compat(&wanted.entries, &other.entries).err().unwrap_or_default();
        let has_vmx = ReadableMsrs::of(&wanted.entries).vmx;
        let msrs = feature_msrs_compat(&self.msrs, &other.msrs, has_vmx).err().unwrap_or_default();
        (!features.is_empty() || !msrs.is_empty()).then_some(BelowBaseline { features, msrs })
    }

    /// The CPUID that KVM supports, without what is not in this baseline. [`Self::check`] has found all of it in `host`.
    ///
    /// # Errors
    /// The table is too long, which that of a host is not.
    pub fn limit(&self, host: &CpuId) -> Result<CpuId, CpuidTooLong> {
        let mut table = Table::from_host(host);
        for (set, counted) in feature_registers() {
            let place = (set.function, set.index, set.register);
            let kept = read(&self.entries, place) & counted | set.ignored;
            table.edit(set.function, set.index, |entry| {
                let value = register(entry, set.register) & kept;
                self::set(entry, set.register, value);
            });
        }
        for entry in &mut table.0 {
            for place in [Register::Eax, Register::Ebx, Register::Ecx, Register::Edx] {
                let (function, index) = (entry.function, entry.index);
                let is_feature = feature_registers().any(|(set, _)| {
                    (set.function, set.index, set.register) == (function, index, place)
                });
                if !is_feature
                    && !PMU_LEAVES.contains(&function)
                    && !is_descriptive(function, index, place)
                {
                    self::set(entry, place, 0);
                }
            }
        }
        // Also on a host that does not need it: its guests may come to one that does.
        if VERW_CLEAR.is_in(&self.entries) {
            table.edit(VERW_CLEAR.function, 0, |leaf| leaf.eax |= VERW_CLEAR.bits);
        }
        // The model of the baseline: guests choose what they do against its weaknesses by it.
        let model = read(&self.entries, (1, 0, Register::Eax));
        for function in [1, 0x8000_0001] {
            table.edit(function, 0, |leaf| {
                if leaf.eax != 0 && model != 0 {
                    leaf.eax = model;
                }
            });
        }
        if read(&self.entries, (0x8000_0001, 0, Register::Ecx)) & SVM == 0 {
            table.remove(LEAF_SVM);
        }
        for function in PMU_LEAVES {
            match find(&self.entries, function, 0) {
                Some(ours) => table.edit(function, 0, |leaf| {
                    (leaf.eax, leaf.ebx, leaf.ecx, leaf.edx) =
                        (ours.eax, ours.ebx, ours.ecx, ours.edx);
                }),
                None => table.remove(function),
            }
        }
        for first in LAST_LEAVES {
            let last = read(&self.entries, (first, 0, Register::Eax));
            if last == 0 {
                // A host that does not say it.
                continue;
            }
            table.edit(first, 0, |leaf| leaf.eax = leaf.eax.min(last));
            let range = first..=first | 0xffff;
            table.0.retain(|entry| !range.contains(&entry.function) || entry.function <= last);
        }
        let has_la57 = read(&self.entries, (7, 0, Register::Ecx)) & LA57 != 0;
        let [bits, ..] = read(&self.entries, (LEAF_AMD_ADDRESS, 0, Register::Eax)).to_le_bytes();
        table.edit(LEAF_AMD_ADDRESS, 0, |leaf| {
            let [_, linear, _, rest] = leaf.eax.to_le_bytes();
            let linear = if has_la57 { linear } else { linear.min(48) };
            leaf.eax = u32::from_le_bytes([bits, linear, 0, rest]);
        });
        if read(&self.entries, (1, 0, Register::Ecx)) & XSAVE == 0 {
            table.remove(LEAF_XSAVE);
        }
        // Components above 31, of which there are none yet.
        for index in [0, 1] {
            table.edit(LEAF_XSAVE, index, |leaf| leaf.edx = 0);
        }
        fit_xsave_area(&mut table);
        CpuId::from_entries(&table.0).map_err(|_| CpuidTooLong {
            entries: table.0.len(),
            max: kvm_bindings::KVM_MAX_CPUID_ENTRIES,
        })
    }
}

#[cfg(test)]
mod tests;
