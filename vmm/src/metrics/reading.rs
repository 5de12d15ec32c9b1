// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the VMM thread says of the VM for a scrape, and the metrics of that.
//!
//! Owns the form: plain values, so that this module knows neither machines nor documents of the API. Must never wait
//! for anything.

use std::collections::BTreeMap;

use super::devices;
use super::families::Family;
use super::text::{Page, Value};

/// States of `godwit_vm_state`.
pub mod states {
    /// There is no VM.
    pub const NONE: &str = "none";
    /// Configured, not booted.
    pub const CREATED: &str = "created";
    /// Being booted, or booted anew.
    pub const STARTING: &str = "starting";
    /// Being restored from a snapshot.
    pub const RESTORING: &str = "restoring";
    /// A migration is awaited, or arrives.
    pub const RECEIVING: &str = "receiving";
    /// The vCPUs run.
    pub const RUNNING: &str = "running";
    /// The vCPUs are stopped.
    pub const PAUSED: &str = "paused";
    /// The VM belongs to another VMM.
    pub const MIGRATED: &str = "migrated";

    pub(super) const ALL: [&str; 8] =
        [NONE, CREATED, STARTING, RESTORING, RECEIVING, RUNNING, PAUSED, MIGRATED];
}

/// vCPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VcpuReading {
    /// How many there are.
    pub present: u64,
    /// How many there can be.
    pub max: u64,
    /// By index: CPU time of the thread in nanoseconds.
    pub cpu_ns: Vec<(u32, u64)>,
}

/// A memory zone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ZoneReading {
    /// Its name.
    pub id: String,
    /// What the guest may use of it.
    pub size_bytes: u64,
    /// What the host has given for it, if that can be known without looking at each page.
    pub allocated_bytes: Option<u64>,
}

/// Memory that is populated ahead of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PopulatingReading {
    /// Name of the state: running, completed, failed, cancelled.
    pub state: String,
    /// So far.
    pub done_bytes: u64,
    /// In all.
    pub total_bytes: u64,
}

/// Memory that is mapped for passed-through devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PinReading {
    /// Name of the state: pinning, pinned, failed.
    pub state: String,
    /// So far.
    pub pinned_bytes: u64,
    /// In all.
    pub total_bytes: u64,
    /// Devices that the guest does not see yet.
    pub withheld: u64,
}

/// What the VMM thread knows of the VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmReading {
    /// One of [`states`].
    pub state: &'static str,
    /// What is being done to it.
    pub activity: Option<String>,
    /// UUID of the configuration.
    pub uuid: Option<String>,
    /// Path of the API socket.
    pub api_socket: Option<String>,
    /// vCPUs, if there is a machine.
    pub vcpus: Option<VcpuReading>,
    /// Memory zones.
    pub zones: Vec<ZoneReading>,
    /// Memory without the balloon.
    pub actual_bytes: Option<u64>,
    /// Counters by device and name.
    pub devices: BTreeMap<String, BTreeMap<String, u64>>,
    /// Disks without space, and how many requests wait for it.
    pub full_disks: Vec<(String, u64)>,
    /// Populating memory.
    pub populating: Option<PopulatingReading>,
    /// Mapping memory for devices.
    pub pinning: Option<PinReading>,
}

/// States of populating memory.
const POPULATING_STATES: [&str; 4] = ["running", "completed", "failed", "cancelled"];
/// States of mapping memory.
const PIN_STATES: [&str; 3] = ["pinning", "pinned", "failed"];

impl VmReading {
    /// Adds its metrics.
    pub fn add_to(&self, page: &mut Page) {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        page.info(Family::Vm, &[&text(&self.uuid), &text(&self.api_socket)]);
        page.state(Family::VmState, &states::ALL, self.state);
        if let Some(activity) = &self.activity {
            page.add(Family::VmActivity, &[activity], Value::whole(1));
        }
        if let Some(vcpus) = &self.vcpus {
            page.add(Family::Vcpus, &[], Value::whole(vcpus.present));
            page.add(Family::VcpusMax, &[], Value::whole(vcpus.max));
            for (index, cpu_ns) in &vcpus.cpu_ns {
                page.add(Family::VcpuCpu, &[&index.to_string()], Value::nanos(*cpu_ns));
            }
        }
        for zone in &self.zones {
            page.add(Family::MemorySize, &[&zone.id], Value::whole(zone.size_bytes));
            let allocated = zone.allocated_bytes.map(Value::whole);
            page.add_some(Family::MemoryAllocated, &[&zone.id], allocated);
        }
        page.add_some(Family::MemoryActual, &[], self.actual_bytes.map(Value::whole));
        if let Some(populating) = &self.populating {
            page.state(Family::PrefaultState, &POPULATING_STATES, &populating.state);
            page.add(Family::PrefaultPopulated, &[], Value::whole(populating.done_bytes));
            page.add(Family::PrefaultSize, &[], Value::whole(populating.total_bytes));
        }
        if let Some(pinning) = &self.pinning {
            page.state(Family::PassthroughState, &PIN_STATES, &pinning.state);
            page.add(Family::PassthroughPinned, &[], Value::whole(pinning.pinned_bytes));
            page.add(Family::PassthroughSize, &[], Value::whole(pinning.total_bytes));
            page.add(Family::PassthroughWithheld, &[], Value::whole(pinning.withheld));
        }
        for (id, waiting) in &self.full_disks {
            page.add(Family::DiskWaiting, &[id], Value::whole(*waiting));
        }
        for (id, counters) in &self.devices {
            devices::add(page, id, counters);
        }
    }
}
