// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of virtio-mem devices.
//!
//! Owns the translation from options to memory devices, one for each zone that may grow, and back from
//! a requested size to the amount that a device is to give.

use std::sync::Arc;

use devices::legacy::MEMORY_DEVICES_MAX;
use devices::virtio::mem::{Mem, MemConfig, MemError, MemHandle};
use hypervisor::MemslotError;
use memory::GuestRam;
use memory::available::InsufficientMemory;
use memory::plugging::PlugError;
use thiserror::Error;

use super::Machine;
use super::numa::Nodes;
use super::ram;
use crate::config::VmConfig;
use crate::config::memory::{DEFAULT_ZONE, HotplugMethod};

/// Why a memory zone cannot be resized.
#[derive(Debug, Error)]
pub enum ResizeMemoryError {
    /// The zone has no hot-plug device.
    #[error(
        "memory zone '{0}' cannot change: start the VM with a hotplug_size, and with \
         hotplug_method=virtio-mem if it is to shrink, too, or consists of zones"
    )]
    Fixed(String),
    /// There is no zone of this id.
    #[error("the VM has no memory zone '{0}'")]
    NoZone(String),
    /// The request has to name one of several zones.
    #[error("the VM's memory consists of zones: use vm.resize-zone")]
    Zones,
    /// The size is below the boot size.
    #[error(
        "memory zone '{zone}' cannot have {wanted_bytes} bytes: {boot_bytes} have been there since the \
         guest booted and cannot be removed"
    )]
    BelowBoot {
        /// Id of the zone.
        zone: String,
        /// The requested size.
        wanted_bytes: u64,
        /// The minimum, which is the boot size.
        boot_bytes: u64,
    },
    /// The host does not have what is to be populated.
    #[error(
        "the memory would be populated at once, as the VM's is or since devices have it mapped, and {} has {} MiB \
         available, of which {} MiB are kept free, for {} MiB: add less, or free some",
        .0.limit, .0.available_bytes >> 20, .0.margin_bytes >> 20, .0.needed_bytes >> 20
    )]
    Insufficient(InsufficientMemory),
    /// Memory is mapped for a vDPA device.
    #[error(
        "memory can neither come nor go while it is mapped for the vDPA device '{0}'; remove the device first"
    )]
    MappedForVdpa(String),
    /// The size is not one that a memory device of ACPI can have.
    #[error(
        "{more_bytes} bytes cannot be added: there is room for {room_bytes}, and a memory device has a \
         multiple of {block_bytes}"
    )]
    Device {
        /// What would be added.
        more_bytes: u64,
        /// What could be.
        room_bytes: u64,
        /// What it has to be a multiple of.
        block_bytes: u64,
    },
    /// No memory device of ACPI is left.
    #[error(
        "memory has been added {MEMORY_DEVICES_MAX} times, which is as often as it can be until a reboot"
    )]
    NoDevice,
    /// Zones do not come as memory devices of ACPI.
    #[error("vm.resize-zone needs hotplug_method=virtio-mem; with acpi use vm.resize")]
    NotByZone,
    /// The host does not have the memory now.
    #[error("the memory cannot be added")]
    Plug(#[from] PlugError),
    /// KVM refuses a memory slot.
    #[error("KVM refused the memory that was to be added")]
    Slot(#[source] MemslotError),
    /// The size is not one that the device supports.
    #[error(transparent)]
    Size(#[from] MemError),
}

/// The virtio-mem device of a zone, with its handle.
pub struct Wired {
    /// Id of the device.
    pub id: String,
    pub device: Mem,
    pub handle: MemHandle,
}

/// The configured virtio-mem devices.
///
/// # Errors
/// The plugged size of a zone exceeds its maximum.
pub fn make(config: &VmConfig, ram: &Arc<GuestRam>) -> Result<Vec<Wired>, MemError> {
    if config.memory.hotplug_method != HotplugMethod::VirtioMem {
        return Ok(Vec::new());
    }
    let nodes = Nodes::of(config);
    let wire = |zone: ram::HotplugZone| {
        let id = zone.id;
        let requested_bytes = zone.plugged_bytes;
        let node = nodes.and_then(|nodes| u16::try_from(nodes.of_zone(&id)).ok());
        let config = MemConfig { id: id.clone(), zone: id.clone(), requested_bytes, node };
        let device = Mem::new(&config, ram)?;
        let handle = device.handle();
        Ok(Wired { id, device, handle })
    };
    ram::hotplug_zones(&config.memory).into_iter().map(wire).collect()
}

impl Machine {
    /// Retries discards that were refused before, of pages in the balloon and of unplugged blocks; done by
    /// the threads of these devices.
    pub fn retry_discards(&self) {
        if let Some(balloon) = self.balloon() {
            balloon.retry();
        }
        self.parts.devices.mems().iter().for_each(|(_, device)| device.retry());
    }

    /// Sets the target size of a zone, or of the only one there is; returns its id, or `None` if
    /// nothing changes. The guest plugs or unplugs blocks until it is reached.
    ///
    /// # Errors
    /// The size is not possible.
    pub fn resize_memory(
        &mut self,
        zone: Option<&str>,
        wanted_bytes: u64,
    ) -> Result<Option<String>, ResizeMemoryError> {
        if self.parts.memory_hotplug.is_some() {
            if zone.is_some() {
                return Err(ResizeMemoryError::NotByZone);
            }
            let is_added = self.add_memory_device(wanted_bytes)?;
            return Ok(is_added.then(|| DEFAULT_ZONE.to_owned()));
        }
        let memory = &mut self.config.memory;
        let has_zones = memory.zones.as_ref().is_some_and(|zones| !zones.is_empty());
        let id = match zone {
            Some(id) => id.to_owned(),
            None if has_zones => return Err(ResizeMemoryError::Zones),
            None => DEFAULT_ZONE.to_owned(),
        };
        let (boot_bytes, plugged) = if has_zones {
            let zone = memory.zones.iter_mut().flatten().find(|zone| zone.id == id);
            let zone = zone.ok_or_else(|| ResizeMemoryError::NoZone(id.clone()))?;
            (zone.size, &mut zone.hotplugged_size)
        } else if id == DEFAULT_ZONE {
            (memory.size, &mut memory.hotplugged_size)
        } else {
            return Err(ResizeMemoryError::NoZone(id));
        };
        let more_bytes = wanted_bytes.checked_sub(boot_bytes).ok_or_else(|| {
            ResizeMemoryError::BelowBoot { zone: id.clone(), wanted_bytes, boot_bytes }
        })?;
        let device = self.parts.devices.mems().iter().find(|(name, _)| *name == ram::later_id(&id));
        let Some((_, device)) = device else {
            return if more_bytes == 0 { Ok(Some(id)) } else { Err(ResizeMemoryError::Fixed(id)) };
        };
        if plugged.unwrap_or(0) != more_bytes
            && let Some(vdpa) = self.parts.devices.first_vdpa()
        {
            return Err(ResizeMemoryError::MappedForVdpa(vdpa.to_owned()));
        }
        device.resize(more_bytes)?;
        *plugged = Some(more_bytes);
        Ok(Some(id))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use arch::layout::HighHole;
    use devices::virtio::VirtioDevice as _;
    use memory::{RamConfig, ZoneSpec};
    use serde_json::json;

    use super::*;

    /// What the devices of two zones say of their node, if they do.
    fn nodes(numa: &serde_json::Value) -> Vec<Option<u64>> {
        let zone = |id: &str| json!({ "id": id, "size": 64 << 20, "hotplug_size": 64 << 20 });
        let config = json!({
            "payload": { "kernel": "/k" },
            "memory": { "size": 0, "hotplug_method": "VirtioMem", "zones": [zone("a"), zone("b")] },
            "numa": numa,
        });
        let config: VmConfig = serde_json::from_value(config).unwrap();
        let later = ram::hotplug_zones(&config.memory).into_iter().map(|zone| ZoneSpec {
            block_bytes: Some(2 << 20),
            ..ZoneSpec::new(zone.id, 64 << 20)
        });
        let zones = [ZoneSpec::new("a", 64 << 20), ZoneSpec::new("b", 64 << 20)];
        let zones = zones.into_iter().chain(later).collect();
        let layout = ram::layout_of(46, HighHole::None);
        let ram = Arc::new(GuestRam::new(&RamConfig { zones }, layout).unwrap());
        let node = |Wired { device, .. }: &Wired| {
            let mut field = [0; 8];
            device.read_config(8, &mut field);
            (device.features() & 1 != 0).then_some(u64::from_le_bytes(field))
        };
        make(&config, &ram).unwrap().iter().map(node).collect()
    }

    #[test]
    fn the_device_of_a_zone_names_the_node_of_the_zone() {
        let node = |id: u32, zone: &str| json!({ "guest_numa_id": id, "memory_zones": [zone] });
        assert_eq!(nodes(&json!([node(3, "b"), node(1, "a")])), [Some(1), Some(3)]);
        assert_eq!(nodes(&json!([node(3, "b")])), [Some(0), Some(3)]);
        assert_eq!(nodes(&json!(null)), [None, None]);
    }
}
