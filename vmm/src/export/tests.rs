// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests on documents that cloud-hypervisor v53 has written: taken over, written, and compared with what they were.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use cloud_hypervisor_state::{BlockConfig, NetConfig, Vcpu};
use serde_json::{Value, json};

use super::*;
use crate::adopt::tests::unpacked;
use crate::adopt::{Adopted, adopt};

macro_rules! bytes_of {
    ($name:literal, $file:literal) => {
        include_bytes!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/data/cloud-hypervisor-53/snapshots/",
            $name,
            "/",
            $file
        ))
    };
}

macro_rules! recorded {
    ($name:literal) => {
        Recorded::of($name, bytes_of!($name, "config.json"), bytes_of!($name, "state.json"), &[])
    };
    ($name:literal, memory) => {
        Recorded::of(
            $name,
            bytes_of!($name, "config.json"),
            bytes_of!($name, "state.json"),
            bytes_of!($name, "memory-ranges.runs"),
        )
    };
}

mod documents;
mod parts;
mod refusals;

/// A recorded VM, and what it is here.
struct Recorded {
    name: &'static str,
    config: Value,
    document: Document,
    memory: Vec<u8>,
    adopted: Adopted,
    devices: BTreeMap<String, SeenDevice>,
}

fn block_bytes(config: &BlockConfig) -> Vec<u8> {
    let BlockConfig { geometry, .. } = config;
    let mut bytes = Vec::new();
    bytes.extend(config.capacity.to_le_bytes());
    bytes.extend(config.size_max.to_le_bytes());
    bytes.extend(config.seg_max.to_le_bytes());
    bytes.extend(geometry.cylinders.to_le_bytes());
    bytes.extend([geometry.heads, geometry.sectors]);
    bytes.extend(config.blk_size.to_le_bytes());
    bytes.extend([config.physical_block_exp, config.alignment_offset]);
    bytes.extend(config.min_io_size.to_le_bytes());
    bytes.extend(config.opt_io_size.to_le_bytes());
    bytes.extend([config.writeback, config.unused]);
    bytes.extend(config.num_queues.to_le_bytes());
    for number in [
        config.max_discard_sectors,
        config.max_discard_seg,
        config.discard_sector_alignment,
        config.max_write_zeroes_sectors,
        config.max_write_zeroes_seg,
    ] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.push(config.write_zeroes_may_unmap);
    bytes
}

fn net_bytes(config: &NetConfig) -> Vec<u8> {
    let mut bytes = config.mac.to_vec();
    bytes.extend(
        [config.status, config.max_virtqueue_pairs, config.mtu]
            .map(u16::to_le_bytes)
            .as_flattened(),
    );
    bytes.extend(config.speed.to_le_bytes());
    bytes.push(config.duplex);
    bytes
}

/// The device configuration that a guest reads, as far as it is not in the state that is saved here.
fn config_bytes(device: &Virtio) -> Vec<u8> {
    match device {
        Virtio::Block(block) => block_bytes(&block.config),
        Virtio::Net(net) => net_bytes(&net.config),
        Virtio::Mem(mem) => {
            let mut bytes = vec![0; 56];
            bytes[8..10].copy_from_slice(&mem.config.node_id.to_le_bytes());
            bytes[32..40].copy_from_slice(&mem.config.usable_region_size.to_le_bytes());
            bytes
        }
        _ => Vec::new(),
    }
}

/// Has the guest fetch the events that it is told of: they are not saved there.
fn fetch_events(state: &mut MachineState) {
    state.legacy.get_mut("ged").unwrap().data = json!({"pending": 0});
}

impl Recorded {
    fn of(name: &'static str, config: &[u8], document: &[u8], memory: &[u8]) -> Self {
        let config = ConfigMessage::read_vm_config(config).unwrap();
        let document = Document::read(document).unwrap();
        let memory = unpacked(memory);
        let adopted = adopt(&config, &document.memory, &document, &memory);
        let mut adopted =
            adopted.unwrap_or_else(|error| panic!("{name}: {}", error_text::chain(&error)));
        fetch_events(&mut adopted.state);
        let devices = document.devices.virtio.iter().map(|(id, (transport, device))| {
            let here = if matches!(device, Virtio::Mem(_)) {
                crate::machine::later_memory_id(id)
            } else {
                id.clone()
            };
            let sizes = transport.data.queues.iter().map(|queue| queue.max_size);
            let seen = SeenDevice {
                features: device.features().0,
                config: config_bytes(device),
                queue_sizes: sizes.collect(),
            };
            (here, seen)
        });
        let devices = devices.collect();
        Self { name, config, document, memory, adopted, devices }
    }

    fn seen(&self) -> Seen<'_> {
        Seen {
            config: &self.adopted.config,
            layout: &self.adopted.memory,
            devices: &self.devices,
            guest: &self.memory,
        }
    }

    fn export(&self) -> Result<Exported, ExportError> {
        export(&self.seen(), &self.adopted.state)
    }

    fn exported(&self) -> Exported {
        let exported = self.export();
        exported.unwrap_or_else(|error| panic!("{}: {}", self.name, error_text::chain(&error)))
    }

    /// The error as one line.
    fn refusal(&self) -> String {
        match self.export() {
            Ok(_) => panic!("it is written"),
            Err(error) => error_text::chain(&error),
        }
    }

    /// Changes the state of a virtio function.
    fn change(&mut self, id: &str, change: impl FnOnce(&mut VirtioPciState)) {
        let data = &mut self.adopted.state.pci.get_mut(id).unwrap().state.data;
        let mut state: VirtioPciState = serde_json::from_value(data.clone()).unwrap();
        change(&mut state);
        *data = serde_json::to_value(&state).unwrap();
    }
}

fn all_devices() -> Recorded {
    recorded!("all-2", memory)
}

fn plain() -> Recorded {
    recorded!("plain-1", memory)
}

fn all() -> Vec<Recorded> {
    vec![
        plain(),
        recorded!("plain-2"),
        all_devices(),
        recorded!("disk-1", memory),
        recorded!("added"),
        recorded!("acpi-hotplug"),
        recorded!("virtio-mem"),
        recorded!("zones"),
        recorded!("segments"),
        recorded!("topology"),
        recorded!("legacy-2"),
        recorded!("debian-2"),
        recorded!("debian-plugged"),
    ]
}
