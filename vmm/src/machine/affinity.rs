// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which host CPUs the threads of vCPUs may run on.
//!
//! Owns no state; a thread binds itself when it starts.

use std::collections::BTreeMap;
use std::sync::Arc;

use arch::cpuid::CpuTopology;
use memory::CpuSet;

use crate::config::VmConfig;

/// Sets the CPU affinity of each vCPU thread as configured.
pub fn affinity_setter(
    config: &VmConfig,
    topology: &CpuTopology,
) -> Arc<dyn Fn(u32) -> std::io::Result<()> + Send + Sync> {
    let wanted: BTreeMap<u32, Vec<u32>> = config
        .cpus
        .affinity
        .iter()
        .flatten()
        .map(|entry| (topology.apic_id(entry.vcpu), entry.host_cpus.clone()))
        .collect();
    Arc::new(move |index| wanted.get(&index).map_or(Ok(()), |cpus| bind_to(cpus)))
}

fn bind_to(cpus: &[u32]) -> std::io::Result<()> {
    let number = |cpu: &u32| usize::try_from(*cpu).unwrap_or(usize::MAX);
    CpuSet::of(&cpus.iter().map(number).collect::<Vec<_>>())?.bind(0)
}
