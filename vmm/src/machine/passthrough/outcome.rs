// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What follows when guest memory is mapped for DMA, or cannot be: events, discards that become possible,
//! devices that are taken from the guest.
//!
//! Runs on the threads that are notified, so of the machine it owns only weak references to its
//! devices. It must never hold the list's lock while the kernel maps or unmaps.

use std::sync::{Arc, Weak};

use devices::virtio::balloon::BalloonHandle;
use devices::virtio::mem::MemHandle;
use memory::DiscardBan;
use parking_lot::{Mutex, MutexGuard};
use pci::PciDevice;
use vfio::{DmaMap, PinState, PinningAbort, VfioPciDevice};

use crate::events;

/// The devices of a machine and the memory mapped for them, for threads that report a failure. Devices are
/// added and removed concurrently.
#[derive(Default)]
pub(super) struct DeviceList {
    pub(super) devices: Vec<Weak<VfioPciDevice>>,
    /// The mapping, in progress or done, if there is one.
    pub(super) memory: Option<PinningAbort>,
}

/// Only locked briefly.
pub(super) type SharedDeviceList = Arc<Mutex<DeviceList>>;

pub(super) fn read(list: &Mutex<DeviceList>) -> MutexGuard<'_, DeviceList> {
    list.lock()
}

pub(super) fn devices_of(list: &Mutex<DeviceList>) -> Vec<Arc<VfioPciDevice>> {
    read(list).devices.iter().filter_map(Weak::upgrade).collect()
}

/// The devices that discard and populate guest memory.
#[derive(Default)]
pub struct DiscardingDevices {
    /// The balloon.
    pub balloon: Option<BalloonHandle>,
    /// The virtio-mem devices.
    pub mems: Vec<MemHandle>,
}

/// Enables discards by these devices once all memory is mapped.
pub(super) struct EnableDiscards {
    discarding: DiscardingDevices,
    ban: Arc<DiscardBan>,
    dma_map: Arc<DmaMap>,
}

impl EnableDiscards {
    pub(super) fn new(
        discarding: DiscardingDevices,
        ban: Option<&Arc<DiscardBan>>,
        dma_map: &Arc<DmaMap>,
    ) -> Option<Self> {
        if discarding.balloon.is_none() && discarding.mems.is_empty() {
            return None;
        }
        Some(Self { discarding, ban: Arc::clone(ban?), dma_map: Arc::clone(dma_map) })
    }

    pub(super) fn apply(self) {
        let piece_bytes = self.dma_map.piece_bytes();
        self.ban.except_unpinned(self.dma_map);
        if let Some(balloon) = self.discarding.balloon {
            log::info!(
                "memory of the balloon returns to the host in pieces of {} MiB, as it is mapped for \
                 passed-through devices",
                piece_bytes >> 20
            );
            // All of it was populated and pinned.
            balloon.memory_was_populated();
        }
        self.discarding.mems.iter().for_each(MemHandle::retry);
    }
}

/// Reports the end of mapping; if it has failed, all devices are lost to the guest.
pub(super) fn tell(state: &PinState, total_bytes: u64, list: &Mutex<DeviceList>) {
    let bytes = total_bytes.to_string();
    match state {
        PinState::Pinning => {}
        PinState::Pinned { took, .. } => {
            let took_ms = took.as_millis().to_string();
            log::info!(
                "{} MiB of guest memory are mapped for DMA after {took_ms} ms",
                total_bytes >> 20
            );
            events::emit("vm", "passthrough-pinned", &[("bytes", &bytes), ("took_ms", &took_ms)]);
        }
        PinState::Failed(reason) => lose_all(reason, list),
    }
}

/// Takes all devices from the guest, and unmaps memory.
pub(super) fn lose_all(reason: &Arc<str>, list: &Mutex<DeviceList>) {
    log::error!("passed-through devices are taken from the guest: {reason}");
    events::emit("vm", "passthrough-failed", &[("error", reason)]);
    for device in devices_of(list) {
        // The device may have been working.
        device.disarm();
        let lost = [("id", device.id()), ("error", reason.as_ref())];
        events::emit("vm", "passthrough-device-lost", &lost);
    }
    unmap_if_unused(list);
}

/// Unmaps memory once each device has been disarmed, so that no device reaches pages that the guest has put
/// to other use. Takes as long as the kernel does.
pub(super) fn unmap_if_unused(list: &Mutex<DeviceList>) {
    let listed = read(list);
    let is_used = |device: Arc<VfioPciDevice>| !device.is_disarmed();
    if listed.devices.iter().filter_map(Weak::upgrade).any(is_used) {
        return;
    }
    let Some(memory) = listed.memory.clone() else { return };
    // A device added later is listed after this, and finds that mapping has failed.
    memory.begin(&"all passed-through devices have failed".into());
    drop(listed);
    memory.unmap();
}
