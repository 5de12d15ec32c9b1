// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What can be read of a machine although another thread owns it: counters, threads of vCPUs, memory zones.
//!
//! Owns handles to these, and keeps nothing of the machine alive but its counters. Must never wait, nor look at each page.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Arc, Weak};

use devices::virtio::Counters;
use memory::{RamRegion, ZoneKind};

use super::Machine;
use crate::metrics::{ZoneReading, thread_cpu_ns};

/// Unit of a file's `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// Handles to a machine's counters.
#[derive(Clone)]
pub struct MachineMeters {
    counters: Vec<(String, Arc<dyn Counters>)>,
    /// Index of the vCPU, and the kernel's id of its thread.
    vcpus: Vec<(u32, i32)>,
    zones: Vec<ZoneMeter>,
}

#[derive(Clone)]
struct ZoneMeter {
    id: String,
    size_bytes: u64,
    /// The file of shared memory. It belongs to the machine alone, as its last descriptor keeps all the memory.
    file: Option<Weak<File>>,
}

impl ZoneMeter {
    fn of(region: &RamRegion) -> Self {
        let is_shared = region.kind() == ZoneKind::Shared;
        let file = region.file().filter(|_| is_shared).map(Arc::downgrade);
        Self { id: region.zone_id().to_owned(), size_bytes: region.usable_bytes(), file }
    }

    fn reading(&self) -> ZoneReading {
        let file = self.file.as_ref().and_then(Weak::upgrade);
        let blocks = file.and_then(|file| file.metadata().ok()).map(|file| file.blocks());
        let allocated_bytes = blocks.map(|blocks| blocks.saturating_mul(BLOCK_BYTES));
        ZoneReading { id: self.id.clone(), size_bytes: self.size_bytes, allocated_bytes }
    }
}

impl MachineMeters {
    /// Counters of virtio devices by device and name.
    pub fn counters(&self) -> BTreeMap<String, BTreeMap<String, u64>> {
        let named = |counters: &Arc<dyn Counters>| {
            counters.counters().into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
        };
        self.counters.iter().map(|(id, counters)| (id.clone(), named(counters))).collect()
    }

    /// How many vCPUs there are.
    pub fn vcpus(&self) -> u64 {
        u64::try_from(self.vcpus.len()).unwrap_or(u64::MAX)
    }

    /// CPU time of each vCPU's thread in nanoseconds, by index.
    pub fn vcpu_cpu_ns(&self) -> Vec<(u32, u64)> {
        let time = |(index, id): &(u32, i32)| Some((*index, thread_cpu_ns(*id)?));
        self.vcpus.iter().filter_map(time).collect()
    }

    /// The memory zones.
    pub fn zones(&self) -> Vec<ZoneReading> {
        self.zones.iter().map(ZoneMeter::reading).collect()
    }
}

impl Machine {
    /// Handles to its counters, as of now: devices and vCPUs come and go.
    pub fn meters(&self) -> MachineMeters {
        // A zone that is divided by a hole has several regions of one file.
        let mut zones: Vec<ZoneMeter> = Vec::new();
        for region in self.parts.ram.regions() {
            let next = ZoneMeter::of(region);
            match zones.iter_mut().find(|zone| zone.id == next.id) {
                Some(zone) => zone.size_bytes = zone.size_bytes.saturating_add(next.size_bytes),
                None => zones.push(next),
            }
        }
        MachineMeters {
            counters: self.parts.devices.counter_handles(),
            vcpus: self.vcpus.thread_ids(),
            zones,
        }
    }
}
