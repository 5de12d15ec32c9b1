// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! CPUID compatibility: whether a VM that booted with one CPUID can run on a host with another.
//!
//! Owns the comparison. Both sides are tables made by [`super::common_cpuid`] from the same
//! configuration, so what they differ in is the hosts. Must never be silent about a bit it does
//! not know: an unnamed feature counts like a named one.

use std::fmt;

use kvm_bindings::kvm_cpuid_entry2;

use super::features::{
    FEATURES, FeatureBit, FeatureRegister, KVM_FEATURES, NO_TRANSIENT_SCHEDULER, VERW_CLEAR,
};
use super::table::{Register, find, register, vendor_bytes};
use super::{DEFAULT_PHYS_BITS, LEAF_AMD_ADDRESS};

/// Something the guest was promised at its start that the destination cannot keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MissingFeature {
    /// Another maker: instructions and MSRs differ beyond what bits say.
    Vendor {
        /// Vendor string where the guest runs.
        source: String,
        /// Vendor string at the destination.
        dest: String,
    },
    /// Fewer physical address bits.
    PhysBits {
        /// Bits where the guest runs.
        source: u8,
        /// Bits at the destination.
        dest: u8,
    },
    /// Less for performance monitoring, which has numbers in place of bits.
    Counters {
        /// Of what, with its place in CPUID.
        what: &'static str,
        /// How many, or which, where the guest runs.
        source: u32,
        /// At the destination.
        dest: u32,
    },
    /// A feature bit.
    Bit {
        /// CPUID leaf.
        function: u32,
        /// Its subleaf.
        index: u32,
        /// The register.
        register: Register,
        /// Number of the bit.
        bit: u8,
        /// As in /proc/cpuinfo, for the common ones.
        name: Option<&'static str>,
    },
}

impl MissingFeature {
    fn is_only(&self, one: FeatureBit) -> bool {
        matches!(self, Self::Bit { function, index: 0, register, bit, .. }
            if *function == one.function && *register == one.register && 1_u32 << bit == one.bits)
    }
}

impl fmt::Display for MissingFeature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vendor { source, dest } => write!(f, "CPU vendor {source}, there {dest}"),
            Self::PhysBits { source, dest } => {
                write!(f, "{source} physical address bits, there {dest}")
            }
            Self::Counters { what, source, dest } => {
                write!(f, "{what} {source:#x}, there {dest:#x}")
            }
            Self::Bit { function, index, register, bit, name } => {
                let name = name.unwrap_or("unnamed feature");
                write!(f, "{name} (CPUID {function:#x}.{index:#x} {register} bit {bit})")
            }
        }
    }
}

/// Compares two CPUID tables.
///
/// # Errors
///
/// Everything that `source` promises and `dest` does not.
pub fn cpuid_compat(
    source: &[kvm_cpuid_entry2],
    dest: &[kvm_cpuid_entry2],
) -> Result<(), Vec<MissingFeature>> {
    let mut missing = Vec::new();
    let (source_vendor, dest_vendor) = (vendor_bytes(source), vendor_bytes(dest));
    if source_vendor != dest_vendor {
        let text = |bytes: [u8; 12]| String::from_utf8_lossy(&bytes).into_owned();
        let (source, dest) = (text(source_vendor), text(dest_vendor));
        missing.push(MissingFeature::Vendor { source, dest });
    }
    let bits = |entries| {
        find(entries, LEAF_AMD_ADDRESS, 0).map_or(DEFAULT_PHYS_BITS, |e| e.eax.to_le_bytes()[0])
    };
    if bits(dest) < bits(source) {
        missing.push(MissingFeature::PhysBits { source: bits(source), dest: bits(dest) });
    }
    for set in FEATURES {
        compare(set, read(source, set, 0), read(dest, set, 0), &mut missing);
    }
    if let Some(source_base) = kvm_base(source) {
        let promised = read(source, &KVM_FEATURES, source_base);
        let kept = kvm_base(dest).map_or(0, |base| read(dest, &KVM_FEATURES, base));
        compare(&KVM_FEATURES, promised, kept, &mut missing);
    }
    compare_counters(source, dest, &mut missing);
    if NO_TRANSIENT_SCHEDULER.is_in(dest) {
        // What empties the buffers is not missed where nothing is left in them.
        missing.retain(|missing| !missing.is_only(VERW_CLEAR));
    }
    if missing.is_empty() { Ok(()) } else { Err(missing) }
}

/// Performance monitoring: a guest that was told of counters keeps using them. Intel SDM volume 2,
/// CPUID leaf 0xA; APM volume 3, leaf 0x8000_0022.
fn compare_counters(
    source: &[kvm_cpuid_entry2],
    dest: &[kvm_cpuid_entry2],
    missing: &mut Vec<MissingFeature>,
) {
    const INTEL: u32 = 0xa;
    const AMD: u32 = 0x8000_0022;
    let leaves = |function| {
        let read = |entries| find(entries, function, 0).copied().unwrap_or_default();
        (read(source), read(dest))
    };
    let mut check = |what, source: u32, dest: u32, fits: bool| {
        if !fits {
            missing.push(MissingFeature::Counters { what, source, dest });
        }
    };
    let (there, here) = leaves(INTEL);
    let ([version, counters, width, events], fixed) = (there.eax.to_le_bytes(), there.edx);
    if version != 0 {
        let [version_here, counters_here, width_here, events_here] = here.eax.to_le_bytes();
        let mut numbers =
            |what, there: u8, here: u8, fits| check(what, there.into(), here.into(), fits);
        numbers("PMU version (CPUID 0xa EAX)", version, version_here, version <= version_here);
        numbers("PMU counters (CPUID 0xa EAX)", counters, counters_here, counters <= counters_here);
        numbers("width of PMU counters (CPUID 0xa EAX)", width, width_here, width == width_here);
        let (many, many_here) = (fixed & 0x1f, here.edx & 0x1f);
        check("fixed PMU counters (CPUID 0xa EDX)", many, many_here, many <= many_here);
        let width_of_fixed = |edx: u32| edx >> 5 & 0xff;
        let (wide, wide_here) = (width_of_fixed(fixed), width_of_fixed(here.edx));
        let same = many == 0 || wide == wide_here;
        check("width of fixed PMU counters (CPUID 0xa EDX)", wide, wide_here, same);
        // A set bit says that an event is not there; so does a vector that is too short for its bit.
        let lacks = |ebx: u32, events: u8| ebx | u32::MAX.checked_shl(events.into()).unwrap_or(0);
        let (lacking, lacking_here) = (lacks(there.ebx, events), lacks(here.ebx, events_here));
        let all_there = lacking_here & !lacking == 0;
        check("missing PMU events (CPUID 0xa EBX)", lacking, lacking_here, all_there);
        let listed = there.ecx & !here.ecx == 0;
        check("set of fixed PMU counters (CPUID 0xa ECX)", there.ecx, here.ecx, listed);
    }
    let (there, here) = leaves(AMD);
    let promised = there.eax & !here.eax == 0;
    check("PMU features (CPUID 0x80000022 EAX)", there.eax, here.eax, promised);
    let (counters, counters_here) = (there.ebx & 0xf, here.ebx & 0xf);
    let fits = counters <= counters_here;
    check("PMU counters (CPUID 0x80000022 EBX)", counters, counters_here, fits);
}

fn read(entries: &[kvm_cpuid_entry2], set: &FeatureRegister, base: u32) -> u32 {
    find(entries, set.function + base, set.index).map_or(0, |entry| register(entry, set.register))
}

/// How far KVM's leaves are from their usual place: they move up when Hyper-V's take it.
fn kvm_base(entries: &[kvm_cpuid_entry2]) -> Option<u32> {
    let is_kvm = |base: &u32| {
        find(entries, 0x4000_0000 + base, 0)
            .is_some_and(|entry| entry.ebx == u32::from_le_bytes(*b"KVMK"))
    };
    (0..0x1_0000).step_by(0x100).find(is_kvm)
}

fn compare(set: &FeatureRegister, promised: u32, kept: u32, missing: &mut Vec<MissingFeature>) {
    let lost = promised & !kept & !set.ignored;
    for bit in (0..32).filter(|bit| lost >> bit & 1 == 1) {
        let name = set.names.iter().find(|(number, _)| *number == bit).map(|(_, name)| *name);
        let FeatureRegister { function, index, register, .. } = *set;
        missing.push(MissingFeature::Bit { function, index, register, bit, name });
    }
}
