// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which host CPUs the threads of vCPUs may run on.
//!
//! Owns no state; a thread binds itself when it starts.

use std::collections::BTreeMap;
use std::sync::Arc;

use arch::cpuid::CpuTopology;

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
    // SAFETY: the set is a plain array of bits, and all zeroes is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in cpus {
        let cpu = usize::try_from(*cpu).unwrap_or(usize::MAX);
        if cpu >= 8 * size_of::<libc::cpu_set_t>() {
            return Err(std::io::Error::other(format!("host CPU {cpu} does not exist")));
        }
        // SAFETY: `cpu` is a bit inside the set, checked above.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: the kernel reads the set, which lives across the call.
    if unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) } == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}
