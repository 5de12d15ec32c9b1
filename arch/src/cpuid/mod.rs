// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! CPUID of each vCPU.
//!
//! Owns the way from the CPUID that KVM supports on a host to the one a vCPU gets: [`common_cpuid`]
//! decides once for a VM which features it has, [`VmCpuid::for_vcpu`] adds what differs between
//! vCPUs, [`cpuid_compat`] says whether a VM can continue elsewhere, [`Baseline`] is what several hosts have. Must never ask the host anything:
//! what it supports is an argument, so that a migration can compare two hosts.

mod baseline;
mod compat;
mod features;
mod hyperv;
mod rules;
mod table;
#[cfg(test)]
mod tests;
mod topology;

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

pub use baseline::{Baseline, BelowBaseline, NoBaseline, UnknownPart};
pub use compat::{MissingFeature, cpuid_compat};
pub use rules::{CpuidRules, FlatCount, GODWIT_CPUID, TimingLeaf};
pub use table::Register;
use table::{Table, Vendor};
pub use topology::{CpuTopology, CpuTopologyIds, TopologyError};

// Leaf 1 ECX.
const MONITOR: u32 = 1 << 3;
const VMX: u32 = 1 << 5;
const X2APIC: u32 = 1 << 21;
const TSC_DEADLINE: u32 = 1 << 24;
const OSXSAVE: u32 = 1 << 27;
const HYPERVISOR: u32 = 1 << 31;
// Leaf 1 EDX.
const HTT: u32 = 1 << 28;
// Leaf 7 ECX.
const OSPKE: u32 = 1 << 4;
// Leaf 0x8000_0001 ECX.
const CMP_LEGACY: u32 = 1 << 1;
const SVM: u32 = 1 << 2;
// Leaf 0x8000_0007 EDX.
const INVARIANT_TSC: u32 = 1 << 8;

const LEAF_MONITOR: u32 = 5;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_XSAVE: u32 = 0xd;
const LEAF_TSC: u32 = 0x15;
const LEAF_TILE: u32 = 0x1d;
const LEAF_TMUL: u32 = 0x1e;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_KVM: u32 = 0x4000_0000;
const LEAF_TIMING: u32 = 0x4000_0010;
const LEAF_POWER: u32 = 0x8000_0007;
const LEAF_AMD_ADDRESS: u32 = 0x8000_0008;
const LEAF_SVM: u32 = 0x8000_000a;
const LEAF_AMD_CACHE: u32 = 0x8000_001d;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;
const LEAF_AMD_TOPOLOGY_V2: u32 = 0x8000_0026;

/// `KVM_FEATURE_MSI_EXT_DEST_ID` in EAX of the KVM feature leaf.
const KVM_MSI_EXT_DEST_ID: u32 = 1 << 15;
/// XSAVE components of AMX: tile configuration and tile data.
const XCR0_AMX: u32 = 3 << 17;
/// KVM clocks the local APIC's timer at 1 GHz.
const APIC_BUS_KHZ: u32 = 1_000_000;
/// What x86 had before a CPU could say: 36 bits.
const DEFAULT_PHYS_BITS: u8 = 36;

/// What the configuration decides about a VM's CPUs.
#[derive(Clone, Copy, Debug)]
pub struct CpuidConfig {
    /// Arrangement of the vCPUs.
    pub topology: CpuTopology,
    /// Arrangement that the leaves about packages tell of; APIC ids are those of the other.
    pub counted: CpuTopology,
    /// What the platform decides.
    pub rules: CpuidRules,
    /// Guest physical address bits are at most this many (option `max_phys_bits`).
    pub max_phys_bits: u8,
    /// Frequency of the guest's TSC if known, told to guests that ask the hypervisor's leaves for it.
    pub tsc_khz: Option<u32>,
    /// KVM emulates the local APIC and its TSC deadline timer (`KVM_CAP_TSC_DEADLINE_TIMER`).
    pub tsc_deadline: bool,
    /// VMX or SVM for the guest (option `nested`).
    pub nested: bool,
    /// AMX for the guest (feature `amx`); the host must have granted the process its use.
    pub amx: bool,
    /// MSI routes translate the extended destination id (address bits 11 to 5), so that
    /// interrupts reach APIC ids above 254.
    pub msi_ext_dest_id: bool,
    /// Hyper-V enlightenments (option `kvm_hyperv`). The caller has to enable
    /// `KVM_CAP_HYPERV_SYNIC` on every vCPU.
    pub hyperv: bool,
}

impl CpuidConfig {
    /// Upstream's defaults for a VM with this topology.
    pub fn new(topology: CpuTopology) -> Self {
        Self {
            topology,
            counted: topology,
            rules: GODWIT_CPUID,
            max_phys_bits: 46,
            tsc_khz: None,
            tsc_deadline: true,
            nested: true,
            amx: false,
            msi_ext_dest_id: false,
            hyperv: false,
        }
    }
}

/// The CPUID table became larger than KVM takes.
#[derive(Debug, thiserror::Error)]
#[error("the CPUID table has {entries} entries, KVM takes at most {max}")]
pub struct CpuidTooLong {
    /// How many there are.
    pub entries: usize,
    /// How many there may be.
    pub max: usize,
}

/// The CPUID of a VM, but for what differs between its vCPUs.
#[derive(Clone, Debug)]
pub struct VmCpuid {
    table: Table,
    vendor: Vendor,
    topology: CpuTopology,
    /// See [`CpuidConfig::counted`].
    counted: CpuTopology,
}

/// Physical address bits a guest can have: the host's, limited by what the second-stage tables
/// map and by `max_phys_bits`.
pub fn phys_bits(host: &CpuId, max_phys_bits: u8) -> u8 {
    let bits = table::find(host.as_slice(), LEAF_AMD_ADDRESS, 0).map(|leaf| leaf.eax.to_le_bytes());
    let host_bits = match bits {
        // Byte 2 is KVM's answer to how much its second-stage tables map, zero for "all".
        Some([bits, _, 0, _]) => bits,
        Some([bits, _, mapped, _]) => bits.min(mapped),
        None => DEFAULT_PHYS_BITS,
    };
    host_bits.min(max_phys_bits)
}

/// Decides which features a VM on this host has. `host` is what `KVM_GET_SUPPORTED_CPUID` says.
pub fn common_cpuid(host: &CpuId, config: &CpuidConfig) -> VmCpuid {
    let mut table = Table::from_host(host);
    let vendor = table.vendor();
    edit_features(&mut table, config);
    if !config.amx {
        remove_amx(&mut table);
    }
    let bits = phys_bits(host, config.max_phys_bits);
    table.edit(LEAF_AMD_ADDRESS, 0, |leaf| {
        let [_, linear, _, rest] = leaf.eax.to_le_bytes();
        let guest_bits = if config.rules.guest_address_bits { bits } else { 0 };
        leaf.eax = u32::from_le_bytes([bits, linear, guest_bits, rest]);
    });
    set_caches(&mut table, &config.counted);
    set_packages(&mut table, vendor, &config.counted);
    let is_timing_shown = match config.rules.timing_leaf {
        TimingLeaf::Always => true,
        TimingLeaf::InvariantTsc => has_invariant_tsc(&table) && !config.hyperv,
    };
    set_tsc_frequency(&mut table, config.tsc_khz.filter(|_| is_timing_shown));
    if config.msi_ext_dest_id || config.rules.msi_ext_dest_id {
        table.edit(LEAF_KVM + 1, 0, |leaf| leaf.eax |= KVM_MSI_EXT_DEST_ID);
    }
    if config.hyperv {
        hyperv::present(&mut table, config.topology.vcpus());
    }
    VmCpuid { table, vendor, topology: config.topology, counted: config.counted }
}

impl VmCpuid {
    /// What [`Self::entries`] returned, here or on another host.
    pub fn from_entries(entries: Vec<kvm_cpuid_entry2>, topology: CpuTopology) -> Self {
        let table = Table(entries);
        let vendor = table.vendor();
        Self { table, vendor, topology, counted: topology }
    }

    /// The entries all vCPUs share, to be compared by [`cpuid_compat`] or sent to a peer.
    pub fn entries(&self) -> &[kvm_cpuid_entry2] {
        &self.table.0
    }

    /// The table for the vCPU with this index.
    pub fn for_vcpu(&self, vcpu_index: u32) -> Result<CpuId, CpuidTooLong> {
        let mut table = self.table.clone();
        let apic_id = self.topology.apic_id(vcpu_index);
        let low_id = apic_id.to_le_bytes()[0];
        table.edit(1, 0, |leaf| leaf.ebx = (leaf.ebx & 0x00ff_ffff) | u32::from(low_id) << 24);
        for function in [LEAF_TOPOLOGY, LEAF_TOPOLOGY_V2] {
            table.edit_all(function, |leaf| leaf.edx = apic_id);
        }
        if self.vendor == Vendor::Amd {
            self.set_amd_topology(&mut table, vcpu_index, apic_id);
        }
        CpuId::from_entries(&table.0).map_err(|_| CpuidTooLong {
            entries: table.0.len(),
            max: kvm_bindings::KVM_MAX_CPUID_ENTRIES,
        })
    }

    /// AMD's own topology leaf (APM volume 3, E.4.18).
    fn set_amd_topology(&self, table: &mut Table, vcpu_index: u32, apic_id: u32) {
        let topology = &self.counted;
        let ids = topology.topology_ids(vcpu_index);
        let core_id = (apic_id >> topology.core_shift())
            & ((1 << (topology.package_shift() - topology.core_shift())) - 1);
        let dies = topology.dies_per_package();
        let node = ids.package * dies + ids.die;
        table.edit(LEAF_AMD_TOPOLOGY, 0, |leaf| {
            leaf.eax = apic_id;
            leaf.ebx = (core_id & 0xff) | ((topology.threads_per_core() - 1) & 0xff) << 8;
            leaf.ecx = (node & 0xff) | ((dies - 1) & 7) << 8;
        });
    }
}

/// Whether the TSC of the guest's processor never changes its frequency.
fn has_invariant_tsc(table: &Table) -> bool {
    table.get(LEAF_POWER, 0).is_some_and(|leaf| leaf.edx & INVARIANT_TSC != 0)
}

fn edit_features(table: &mut Table, config: &CpuidConfig) {
    table.edit(1, 0, |leaf| {
        leaf.ecx |= HYPERVISOR | X2APIC;
        // The guest's own settings, which KVM reflects when they change, and MWAIT, which would
        // keep the host's CPU.
        leaf.ecx &= !(OSXSAVE | MONITOR);
        if config.tsc_deadline {
            leaf.ecx |= TSC_DEADLINE;
        } else {
            leaf.ecx &= !TSC_DEADLINE;
        }
        if !config.nested {
            leaf.ecx &= !VMX;
        }
    });
    table.remove(LEAF_MONITOR);
    table.edit(7, 0, |leaf| leaf.ecx &= !OSPKE);
    if !config.nested {
        table.edit(0x8000_0001, 0, |leaf| leaf.ecx &= !SVM);
        table.remove(LEAF_SVM);
    }
}

/// AMX is in feature bits, in two leaves of its own and in the XSAVE area.
fn remove_amx(table: &mut Table) {
    const BF16_TILE_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    const FP16: u32 = 1 << 21;
    const COMPLEX: u32 = 1 << 8;
    table.edit(7, 0, |leaf| leaf.edx &= !BF16_TILE_INT8);
    table.edit(7, 1, |leaf| {
        leaf.eax &= !FP16;
        leaf.edx &= !COMPLEX;
    });
    table.remove(LEAF_TILE);
    table.remove(LEAF_TMUL);
    let has_tiles = table.get(LEAF_XSAVE, 0).is_some_and(|leaf| leaf.eax & XCR0_AMX != 0);
    if !has_tiles {
        return;
    }
    table.edit(LEAF_XSAVE, 0, |leaf| leaf.eax &= !XCR0_AMX);
    fit_xsave_area(table);
}

/// Makes the description of the XSAVE area that of the components which the guest has. Intel SDM volume 1, 13.2.
fn fit_xsave_area(table: &mut Table) {
    let user = table.get(LEAF_XSAVE, 0).map_or(0, |leaf| leaf.eax);
    let supervisor = table.get(LEAF_XSAVE, 1).map_or(0, |leaf| leaf.ecx);
    table.0.retain(|e| {
        // Bit 0 of ECX says which of the two registers has the component.
        let components = if e.ecx & 1 == 0 { user } else { supervisor };
        e.function != LEAF_XSAVE
            || e.index < 2
            || components.checked_shr(e.index).is_some_and(|c| c & 1 == 1)
    });
    // The area ends with the last of the guest's components: offset in EBX, size in EAX.
    let end = table
        .0
        .iter()
        .filter(|e| e.function == LEAF_XSAVE && e.index >= 2 && e.ecx & 1 == 0)
        .map(|e| e.ebx.saturating_add(e.eax))
        .max();
    // Legacy area and header are always there.
    table.edit(LEAF_XSAVE, 0, |leaf| leaf.ecx = end.unwrap_or(0).max(576));
}

/// Whether a cache subleaf describes a cache: the type field is not "no more caches".
fn is_cache(leaf: &kvm_cpuid_entry2) -> bool {
    const TYPE: u32 = 0x1f;
    leaf.eax & TYPE != 0
}

/// Which CPUs share a cache: the threads of a core up to level 2, the die from level 3.
fn set_caches(table: &mut Table, topology: &CpuTopology) {
    let core_ids = 1_u32 << (topology.package_shift() - topology.core_shift());
    let share = |leaf: &mut kvm_cpuid_entry2| {
        if !is_cache(leaf) {
            return;
        }
        let level = (leaf.eax >> 5) & 7;
        let shift = if level <= 2 { topology.core_shift() } else { topology.die_shift() };
        let sharing = ((1_u32 << shift) - 1).min(0xfff);
        leaf.eax = (leaf.eax & !(0xfff << 14)) | sharing << 14;
    };
    table.edit_all(4, |leaf| {
        share(leaf);
        if is_cache(leaf) {
            leaf.eax = (leaf.eax & 0x03ff_ffff) | (core_ids - 1).min(0x3f) << 26;
        }
    });
    table.edit_all(LEAF_AMD_CACHE, share);
}

/// Everything about packages that is the same for all vCPUs.
fn set_packages(table: &mut Table, vendor: Vendor, topology: &CpuTopology) {
    let logical = topology.logical_per_package();
    let package_ids = 1_u32 << topology.package_shift();
    let many = logical > 1;
    table.edit(1, 0, |leaf| {
        // Intel counts ids, AMD counts vCPUs.
        let count = if vendor == Vendor::Amd { logical } else { package_ids };
        leaf.ebx = (leaf.ebx & 0xff00_ffff) | count.min(0xff) << 16;
        leaf.edx = if many { leaf.edx | HTT } else { leaf.edx & !HTT };
    });
    let (core_shift, die_shift) = (topology.core_shift(), topology.die_shift());
    let package_shift = topology.package_shift();
    let threads = topology.threads_per_core();
    const SMT: u32 = 1 << 8;
    const CORE: u32 = 2 << 8;
    const DIE: u32 = 5 << 8;
    table.remove(LEAF_TOPOLOGY);
    if table.max_basic() >= LEAF_TOPOLOGY {
        table.push_subleaf(LEAF_TOPOLOGY, 0, [core_shift, threads, SMT, 0]);
        table.push_subleaf(LEAF_TOPOLOGY, 1, [package_shift, logical, CORE | 1, 0]);
        table.push_subleaf(LEAF_TOPOLOGY, 2, [0, 0, 2, 0]);
    }
    table.remove(LEAF_TOPOLOGY_V2);
    let dies = topology.dies_per_package();
    if vendor == Vendor::Intel && dies > 1 {
        table.edit(0, 0, |leaf| leaf.eax = leaf.eax.max(LEAF_TOPOLOGY_V2));
    }
    if vendor == Vendor::Intel && table.max_basic() >= LEAF_TOPOLOGY_V2 {
        let per_die = topology.logical_per_die();
        table.push_subleaf(LEAF_TOPOLOGY_V2, 0, [core_shift, threads, SMT, 0]);
        table.push_subleaf(LEAF_TOPOLOGY_V2, 1, [die_shift, per_die, CORE | 1, 0]);
        table.push_subleaf(LEAF_TOPOLOGY_V2, 2, [package_shift, logical, DIE | 2, 0]);
        table.push_subleaf(LEAF_TOPOLOGY_V2, 3, [0, 0, 3, 0]);
    }
    if vendor == Vendor::Amd {
        table.edit(0x8000_0001, 0, |leaf| {
            leaf.ecx = if many { leaf.ecx | CMP_LEGACY } else { leaf.ecx & !CMP_LEGACY };
        });
        table.edit(LEAF_AMD_ADDRESS, 0, |leaf| {
            let ids = package_shift.min(0xf) << 12;
            leaf.ecx = (leaf.ecx & !0xf0ff) | (logical - 1).min(0xff) | ids;
        });
        // The host's, and describes the host; the older leaves say the same about the guest.
        table.remove(LEAF_AMD_TOPOLOGY_V2);
    }
}

/// Tells guests that do not ask KVM's clock, by the hypervisor timing leaf that VMware introduced.
///
/// The architectural leaf says nothing: its crystal would have to be what clocks the APIC timer, 1 GHz
/// under KVM, of which few TSCs are a multiple; and its readers multiply and divide in integers of 32
/// bits (Linux' `native_calibrate_tsc`, DPDK's `get_tsc_freq_arch`), so that no other ratio comes out
/// right for all of them. Without it they measure.
fn set_tsc_frequency(table: &mut Table, tsc_khz: Option<u32>) {
    table.remove(LEAF_TSC);
    if let Some(tsc_khz) = tsc_khz
        && table.get(LEAF_KVM, 0).is_some()
    {
        table.edit(LEAF_KVM, 0, |leaf| leaf.eax = leaf.eax.max(LEAF_TIMING));
        table.set(LEAF_TIMING, [tsc_khz, APIC_BUS_KHZ, 0, 0]);
    }
}
