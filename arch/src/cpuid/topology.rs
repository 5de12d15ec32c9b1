// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Packages, dies, cores and threads, and the APIC id that follows from them.
//!
//! Owns the numbering of vCPUs: APIC ids have a bit field for each level, as the CPUID topology
//! leaves describe it, so they are contiguous only where counts are powers of two.

/// How the vCPUs of a VM are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTopology {
    threads_per_core: u32,
    cores_per_die: u32,
    dies_per_package: u32,
    packages: u32,
}

/// A topology that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// One of the counts is zero.
    #[error("each of threads, cores, dies and packages must be at least 1")]
    Zero,
    /// APIC ids have 32 bits.
    #[error("the CPU topology needs more than 31 bits of APIC id")]
    TooLarge,
}

impl CpuTopology {
    /// `threads_per_core`, `cores_per_die`, `dies_per_package`, `packages`: the order of
    /// cloud-hypervisor's `topology=` option.
    pub fn new(
        threads_per_core: u16,
        cores_per_die: u16,
        dies_per_package: u16,
        packages: u16,
    ) -> Result<Self, TopologyError> {
        let topology = Self {
            threads_per_core: u32::from(threads_per_core),
            cores_per_die: u32::from(cores_per_die),
            dies_per_package: u32::from(dies_per_package),
            packages: u32::from(packages),
        };
        let counts = [threads_per_core, cores_per_die, dies_per_package, packages];
        if counts.contains(&0) {
            return Err(TopologyError::Zero);
        }
        if topology.package_shift() + id_bits(topology.packages) > 31 {
            return Err(TopologyError::TooLarge);
        }
        Ok(topology)
    }

    /// What a VM has that asks for nothing: one package in which every vCPU is a core.
    pub fn flat(vcpus: u16) -> Result<Self, TopologyError> {
        Self::new(1, vcpus, 1, 1)
    }

    /// All vCPUs.
    pub fn vcpus(&self) -> u32 {
        // Below 2^31, because the bit fields are.
        self.logical_per_package() * self.packages
    }

    /// Threads of a core.
    pub fn threads_per_core(&self) -> u32 {
        self.threads_per_core
    }

    /// Dies of a package.
    pub fn dies_per_package(&self) -> u32 {
        self.dies_per_package
    }

    /// vCPUs on a die.
    pub fn logical_per_die(&self) -> u32 {
        self.threads_per_core * self.cores_per_die
    }

    /// vCPUs in a package.
    pub fn logical_per_package(&self) -> u32 {
        self.logical_per_die() * self.dies_per_package
    }

    /// Bits of an APIC id below the core number.
    pub fn core_shift(&self) -> u32 {
        id_bits(self.threads_per_core)
    }

    /// Bits of an APIC id below the die number.
    pub fn die_shift(&self) -> u32 {
        self.core_shift() + id_bits(self.cores_per_die)
    }

    /// Bits of an APIC id below the package number.
    pub fn package_shift(&self) -> u32 {
        self.die_shift() + id_bits(self.dies_per_package)
    }

    /// APIC id of the vCPU with this index. Indexes fill a core's threads first, then a die's
    /// cores, then a package's dies. One beyond [`Self::vcpus`] is taken modulo it.
    pub fn apic_id(&self, vcpu_index: u32) -> u32 {
        let ids = self.topology_ids(vcpu_index);
        (ids.package << self.package_shift())
            | (ids.die << self.die_shift())
            | (ids.core << self.core_shift())
            | ids.thread
    }

    /// The core, die and package of the vCPU with this index.
    pub fn topology_ids(&self, vcpu_index: u32) -> CpuTopologyIds {
        let core = vcpu_index / self.threads_per_core;
        let die = core / self.cores_per_die;
        CpuTopologyIds {
            thread: vcpu_index % self.threads_per_core,
            core: core % self.cores_per_die,
            die: die % self.dies_per_package,
            package: (die / self.dies_per_package) % self.packages,
        }
    }
}

/// A vCPU's number at each level, counted within the level above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct CpuTopologyIds {
    pub thread: u32,
    pub core: u32,
    pub die: u32,
    pub package: u32,
}

/// Bits that number `count` things.
fn id_bits(count: u32) -> u32 {
    count.checked_next_power_of_two().map_or(32, u32::ilog2)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn flat_topology_numbers_in_order() {
        let topology = CpuTopology::flat(300).unwrap();
        assert!((0..300).all(|index| topology.apic_id(index) == index));
        assert_eq!(topology.package_shift(), 9);
    }

    #[test]
    fn odd_counts_leave_gaps() {
        let topology = CpuTopology::new(2, 3, 1, 2).unwrap();
        let ids: Vec<_> = (0..12).map(|index| topology.apic_id(index)).collect();
        assert_eq!(ids, [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]);
    }

    #[test]
    fn impossible_topologies_are_refused() {
        assert_eq!(CpuTopology::new(0, 1, 1, 1), Err(TopologyError::Zero));
        assert_eq!(CpuTopology::new(65535, 65535, 1, 1), Err(TopologyError::TooLarge));
    }

    proptest! {
        #[test]
        fn ids_are_distinct_and_name_their_package(t in 1_u16..4, c in 1_u16..9, d in 1_u16..4, p in 1_u16..4) {
            let topology = CpuTopology::new(t, c, d, p).unwrap();
            let ids: HashSet<_> = (0..topology.vcpus()).map(|i| topology.apic_id(i)).collect();
            prop_assert_eq!(ids.len(), topology.vcpus() as usize);
            for index in 0..topology.vcpus() {
                let id = topology.apic_id(index);
                prop_assert_eq!(id >> topology.package_shift(), topology.topology_ids(index).package);
            }
        }
    }
}
