// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptions of the VM: `vm.info` and `vm.counters`.

use std::time::Instant;

use devices::virtio::balloon::BalloonHandle;
use vfio::{PinProgress, PinState};

use super::device_tree;
use crate::api::{
    FullDiskInfo, PassthroughInfo, PinningState, PrefaultInfo, PrefaultState, VmCounters, VmInfo,
    VmState,
};
use crate::config::VmConfig;
use crate::machine::{FullDiskStatus, Machine, PrefaultEnd, PrefaultStatus};

/// Name under which `vm.counters` lists the VMM's own counters.
const OWN_COUNTERS: &str = "__vmm";

/// The `vm.info` of a VM that is configured and not booted.
pub fn of_config(config: &VmConfig) -> VmInfo {
    VmInfo {
        memory_actual_size: config.memory.total_bytes().unwrap_or(0),
        config: config.clone(),
        state: VmState::Created,
        balloon: None,
        device_tree: None,
        doing: None,
        in_doubt: None,
        postcopy_paused: None,
        full_disks: None,
        prefault: None,
        passthrough: None,
    }
}

/// The `vm.info` of a machine.
pub fn of_machine(machine: &Machine) -> VmInfo {
    let state = if machine.is_paused() { VmState::Paused } else { VmState::Running };
    let balloon = machine.balloon();
    let ballooned_bytes = balloon.map_or(0, BalloonHandle::actual_bytes);
    VmInfo {
        config: machine.config().clone(),
        state,
        memory_actual_size: machine.ram().total_bytes().saturating_sub(ballooned_bytes),
        balloon: balloon.map(|balloon| {
            let sizes = [
                ("target_bytes", balloon.target_bytes()),
                ("actual_bytes", balloon.actual_bytes()),
            ];
            let all = sizes.into_iter().chain(balloon.statistics().named());
            all.map(|(name, value)| (name.to_owned(), value)).collect()
        }),
        device_tree: Some(device_tree::of_machine(machine)),
        doing: None,
        in_doubt: None,
        postcopy_paused: None,
        full_disks: full_disks(machine),
        prefault: machine.prefault_status().map(prefault_info),
        passthrough: machine.pin_progress().map(pinning),
    }
}

fn full_disks(machine: &Machine) -> Option<Vec<FullDiskInfo>> {
    let info = |FullDiskStatus { id, path, requests }: FullDiskStatus| FullDiskInfo {
        id,
        path: path.display().to_string(),
        requests: u64::try_from(requests).unwrap_or(u64::MAX),
    };
    let full: Vec<_> = machine.full_disks().into_iter().map(info).collect();
    (!full.is_empty()).then_some(full)
}

fn pinning(progress: PinProgress) -> PassthroughInfo {
    let (state, error) = match progress.state {
        PinState::Pinning => (PinningState::Pinning, None),
        PinState::Pinned { .. } => (PinningState::Pinned, None),
        PinState::Failed(reason) => (PinningState::Failed, Some(reason.to_string())),
    };
    PassthroughInfo {
        pinned_bytes: progress.pinned_bytes,
        total_bytes: progress.total_bytes,
        state,
        error,
    }
}

fn prefault_info(status: PrefaultStatus) -> PrefaultInfo {
    let (state, error) = match status.end {
        None => (PrefaultState::Running, None),
        Some(PrefaultEnd::Completed) => (PrefaultState::Completed, None),
        Some(PrefaultEnd::Cancelled) => (PrefaultState::Cancelled, None),
        Some(PrefaultEnd::Failed(why)) => (PrefaultState::Failed, Some(why)),
    };
    let memory::PrefaultProgress { done_bytes, total_bytes } = status.progress;
    PrefaultInfo { state, done_bytes, total_bytes, error }
}

/// Progress of memory that is populated before the guest starts.
pub fn prefault_in_progress(progress: memory::PrefaultProgress) -> PrefaultInfo {
    let is_complete = progress.done_bytes >= progress.total_bytes;
    prefault_info(PrefaultStatus { progress, end: is_complete.then_some(PrefaultEnd::Completed) })
}

/// Microseconds on CLOCK_MONOTONIC, which other processes can read as well.
fn monotonic_us(at: Instant) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, which lives across the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let now_us = u64::try_from(now.tv_sec).unwrap_or(0).saturating_mul(1_000_000)
        + u64::try_from(now.tv_nsec).unwrap_or(0) / 1000;
    now_us.saturating_sub(u64::try_from(at.elapsed().as_micros()).unwrap_or(u64::MAX))
}

/// Counters of the devices, and when the guest started.
pub fn counters(machine: &Machine) -> VmCounters {
    let mut counters = machine.counters(monotonic_us);
    let marks = [
        ("first_instruction_monotonic_us", machine.first_run()),
        ("first_mmio_monotonic_us", machine.first_mmio()),
    ];
    let own = marks
        .into_iter()
        .filter_map(|(name, at)| Some((name.to_owned(), monotonic_us(at?))))
        .collect();
    counters.insert(OWN_COUNTERS.to_owned(), own);
    counters
}
