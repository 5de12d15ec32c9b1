// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptions of the VM: `vm.info` and `vm.counters`.

use std::time::Instant;

use devices::virtio::balloon::BalloonHandle;
use vfio::{PinProgress, PinState};

use super::device_tree;
use crate::api::{
    FullDiskInfo, PassthroughInfo, PinningState, PrefaultInfo, PrefaultState, VmCounters, VmInfo,
    VmState, WithheldDeviceInfo, WithheldFor,
};
use crate::config::VmConfig;
use crate::machine::{
    FullDiskStatus, Machine, PrefaultEnd, PrefaultStatus, WaitsFor, WithheldStatus,
};

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
        passthrough: passthrough(
            machine.pin_progress(),
            machine.ram().total_bytes(),
            machine.withheld_devices(),
        ),
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

/// `progress`: of mapping memory, once a device is open. `None` without devices.
fn passthrough(
    progress: Option<PinProgress>,
    total_bytes: u64,
    withheld: Vec<WithheldStatus>,
) -> Option<PassthroughInfo> {
    let is_any = progress.is_some() || !withheld.is_empty();
    let (pinned_bytes, total_bytes, state) = match progress {
        Some(progress) => (progress.pinned_bytes, progress.total_bytes, progress.state),
        None => (0, total_bytes, PinState::Pinning),
    };
    let (state, error) = match state {
        PinState::Pinning => (PinningState::Pinning, None),
        PinState::Pinned { .. } => (PinningState::Pinned, None),
        PinState::Failed(reason) => (PinningState::Failed, Some(reason.to_string())),
    };
    let withheld: Vec<_> = withheld.into_iter().map(withheld_info).collect();
    is_any.then(|| PassthroughInfo {
        pinned_bytes,
        total_bytes,
        state,
        error,
        withheld: (!withheld.is_empty()).then_some(withheld),
    })
}

fn withheld_info(WithheldStatus { id, since, waits_for }: WithheldStatus) -> WithheldDeviceInfo {
    let withheld_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
    let waits_for = match waits_for {
        WaitsFor::Opening => WithheldFor::Opening,
        WaitsFor::Memory => WithheldFor::Memory,
    };
    WithheldDeviceInfo { id, waits_for, since_monotonic_us: monotonic_us(since), withheld_ms }
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

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;

    fn progress(state: PinState) -> PinProgress {
        PinProgress { pinned_bytes: 1 << 20, total_bytes: 4 << 20, state }
    }

    fn shown(state: PinState, withheld: Vec<WithheldStatus>) -> Value {
        serde_json::to_value(passthrough(Some(progress(state)), 8 << 20, withheld)).unwrap()
    }

    fn withheld(since: Instant, waits_for: WaitsFor) -> WithheldStatus {
        WithheldStatus { id: "gpu".to_owned(), since, waits_for }
    }

    #[test]
    fn devices_that_the_guest_does_not_see_are_named_with_their_time() {
        let before_us = monotonic_us(Instant::now());
        let since = Instant::now().checked_sub(Duration::from_secs(3)).unwrap();
        let info = shown(PinState::Pinning, vec![withheld(since, WaitsFor::Memory)]);
        assert_eq!(
            (&info["pinned_bytes"], &info["total_bytes"]),
            (&json!(1 << 20), &json!(4 << 20))
        );
        let listed = info["withheld"].as_array().unwrap();
        assert_eq!((listed.len(), &listed[0]["id"]), (1, &json!("gpu")));
        assert_eq!(listed[0]["waits_for"], json!("Memory"));
        assert!(listed[0]["withheld_ms"].as_u64().unwrap() >= 3000);
        let since_us = listed[0]["since_monotonic_us"].as_u64().unwrap();
        assert!((before_us - 3_100_000..before_us).contains(&since_us), "{since_us} {before_us}");
    }

    #[test]
    fn a_device_is_shown_that_is_still_being_opened_before_memory_is_mapped_for_any() {
        let opening = vec![withheld(Instant::now(), WaitsFor::Opening)];
        let info = serde_json::to_value(passthrough(None, 8 << 20, opening)).unwrap();
        assert_eq!(
            (&info["pinned_bytes"], &info["total_bytes"], &info["state"]),
            (&json!(0), &json!(8 << 20), &json!("Pinning"))
        );
        assert_eq!(info["withheld"][0]["waits_for"], json!("Opening"));
        assert!(passthrough(None, 8 << 20, Vec::new()).is_none(), "there are no devices");
    }

    #[test]
    fn without_such_devices_there_is_no_list() {
        let info = shown(PinState::Failed("no memory".into()), Vec::new());
        let expected = json!({
            "pinned_bytes": 1 << 20, "total_bytes": 4 << 20, "state": "Failed", "error": "no memory",
        });
        assert_eq!(info, expected);
    }
}
