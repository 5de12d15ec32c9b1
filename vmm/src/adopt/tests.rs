// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests on documents that cloud-hypervisor v53 has written: as they are, and with one thing changed.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use cloud_hypervisor_state::{
    ConfigMessage, Document, KvmVcpu, List, MsixConfig, Transport, Vcpu, Virtio,
};
use serde_json::{Value, json};

use super::*;

/// A recorded VM: configuration, state, memory as far as it was kept.
struct Recorded {
    config: Value,
    document: Document,
    memory: Vec<u8>,
}

macro_rules! file {
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
        Recorded::of(file!($name, "config.json"), file!($name, "state.json"), &[])
    };
}

mod begun;
mod clock;
mod network;
mod parts;
mod place;
mod refusals;
mod values;
mod vhost_user;

fn all_devices() -> Recorded {
    let memory = file!("all-2", "memory-ranges.runs");
    Recorded::of(file!("all-2", "config.json"), file!("all-2", "state.json"), memory)
}

fn plain() -> Recorded {
    recorded!("plain-1")
}

/// Memory of which the runs of bytes with contents were kept.
pub(crate) fn unpacked(packed: &[u8]) -> Vec<u8> {
    let word = |at: usize| {
        let bytes = packed[at..at + 8].try_into().unwrap();
        usize::try_from(u64::from_le_bytes(bytes)).unwrap()
    };
    let Some(end) = packed.len().checked_sub(8) else { return Vec::new() };
    let mut memory = vec![0; word(end)];
    let mut at = 0;
    while at < end {
        let (offset, len) = (word(at), word(at + 8));
        memory[offset..offset + len].copy_from_slice(&packed[at + 16..at + 16 + len]);
        at += 16 + len;
    }
    memory
}

/// Memory without contents beyond what was kept.
impl ReadGuest for Vec<u8> {
    fn read_u16(&self, gpa: u64) -> Result<u16, Box<dyn Error + Send + Sync>> {
        let at = usize::try_from(gpa)?;
        let bytes = self.get(at..at.saturating_add(2)).map_or([0; 2], |bytes| [bytes[0], bytes[1]]);
        Ok(u16::from_le_bytes(bytes))
    }
}

impl Recorded {
    fn of(config: &[u8], document: &[u8], memory: &[u8]) -> Self {
        Self {
            config: ConfigMessage::read_vm_config(config).unwrap(),
            document: Document::read(document).unwrap(),
            memory: unpacked(memory),
        }
    }

    fn adopt(&self) -> Result<Adopted, AdoptError> {
        adopt(&self.config, &self.document.memory, &self.document, &self.memory)
    }

    fn adopted(&self) -> Adopted {
        self.adopt().unwrap_or_else(|error| panic!("{}", error_text::chain(&error)))
    }

    /// The error as one line.
    fn refusal(&self) -> String {
        match self.adopt() {
            Ok(_) => panic!("it is taken over"),
            Err(error) => error_text::chain(&error),
        }
    }

    fn vcpu(&mut self, index: u32) -> &mut KvmVcpu {
        let Vcpu::Kvm(vcpu) = self.document.vcpus.get_mut(&index).unwrap();
        vcpu
    }

    fn device(&mut self, id: &str) -> &mut (Transport, Virtio) {
        self.document.devices.virtio.get_mut(id).unwrap()
    }

    fn transport(&mut self, id: &str) -> &mut Transport {
        &mut self.device(id).0
    }
}

/// A list with one element changed.
fn changed<T: Clone, const MAX: usize>(
    list: &List<T, MAX>,
    index: usize,
    change: impl FnOnce(&mut T),
) -> List<T, MAX> {
    let mut elements = list.to_vec();
    change(&mut elements[index]);
    List::try_from(elements).ok().unwrap()
}

/// The state of a virtio function.
fn virtio(adopted: &Adopted, id: &str) -> pci::VirtioPciState {
    serde_json::from_value(adopted.state.pci[id].state.data.clone()).unwrap()
}

#[test]
fn recorded_machines_are_taken_over() {
    let recordings = [
        ("plain-1", plain(), 1),
        ("plain-2", recorded!("plain-2"), 2),
        ("all-2", all_devices(), 2),
        ("added", recorded!("added"), 1),
        ("acpi-hotplug", recorded!("acpi-hotplug"), 2),
        ("virtio-mem", recorded!("virtio-mem"), 1),
        ("zones", recorded!("zones"), 1),
        ("segments", recorded!("segments"), 1),
        ("topology", recorded!("topology"), 2),
    ];
    for (name, recorded, vcpus) in recordings {
        let adopted = recorded.adopt();
        let adopted =
            adopted.unwrap_or_else(|error| panic!("{name}: {}", error_text::chain(&error)));
        assert_eq!(adopted.state.vcpus.len(), vcpus, "{name}");
        for vcpu in &adopted.state.vcpus {
            vcpu.check().unwrap();
        }
        let json = adopted.state.to_json().unwrap();
        let again = MachineState::from_json(&json).unwrap();
        assert_eq!(again.to_json().unwrap(), json, "{name}");
        // No disk of them has a serial number of its own; the driver of a network may switch offloads.
        let disks = adopted.config.disks.iter().flatten().count();
        let networks = usize::from(name == "all-2");
        let of_kind = |text: &str| adopted.losses.iter().filter(|it| it.contains(text)).count();
        let found = (of_kind("has another serial number here"), of_kind("has all offloads"));
        assert_eq!(found, (disks, networks), "{name}: {:?}", adopted.losses);
        assert_eq!(adopted.losses.len(), disks + networks, "{name}: {:?}", adopted.losses);
        // Nothing is left to be completed: the configuration is as it will travel.
        let config = adopted.config.clone().complete_begun().unwrap();
        assert_eq!(config, adopted.config, "{name}");
    }
}

#[test]
fn a_configuration_and_a_document_are_fuzzed() {
    let input = [file!("plain-1", "config.json"), &b"\n"[..], file!("plain-1", "state.json")];
    assert!(fuzz_adopt(&input.concat()));
}

#[test]
fn a_machine_with_more_vcpus_than_there_can_be_is_refused() {
    assert!(recorded!("large").refusal().contains("max_vcpus"), "{}", recorded!("large").refusal());
}

#[test]
fn devices_are_where_the_guest_has_found_them() {
    let adopted = all_devices().adopted();
    let at = |id: &str| adopted.state.pci[id].bdf.clone();
    assert_eq!((at("__console"), at("_disk0")), ("0000:00:01.0".into(), "0000:00:02.0".into()));
    assert_eq!((at("__watchdog"), at("__pvpanic")), ("0000:00:09.0".into(), "0000:00:0b.0".into()));
    assert_eq!(adopted.config.disks.as_ref().unwrap()[1].pci_device_id, Some(3));
    assert_eq!(adopted.config.rng.pci_device_id, Some(5));
    assert_eq!(adopted.config.pmem.as_ref().unwrap()[0].gpa, Some(0x7f_ffc0_0000));
    // Of its tap; the driver has read it.
    assert_eq!(adopted.config.net.as_ref().unwrap()[0].mtu, Some(1500));
    assert_eq!(adopted.platform.address_bits, 39);
    assert_eq!(adopted.platform.addresses["__watchdog"].device(), 9);
    assert_eq!(adopted.platform.names_count, 5);
    assert_eq!(adopted.config.pci_address_bits, Some(39));
    let numbers = adopted.config.pci_numbers.as_ref().unwrap();
    let numbers: Vec<_> = numbers.iter().map(|it| (it.id.as_str(), it.number)).collect();
    assert_eq!(numbers, [("__watchdog", 9), ("__pvpanic", 11)]);
    let segments = recorded!("segments").adopted();
    assert_eq!(segments.state.pci["_net2"].bdf, "0001:00:02.0");
    let later = recorded!("virtio-mem").adopted();
    assert_eq!(later.state.pci["__mem_mem0"].bdf, "0000:00:03.0");
    assert_eq!(later.config.memory.hotplugged_size, Some(128 << 20));
}

#[test]
fn queues_go_on_behind_what_was_returned() {
    let adopted = all_devices().adopted();
    let position = |id: &str, queue: usize| {
        let progress = virtio(&adopted, id).queues[queue].progress.unwrap();
        assert_eq!(progress.next_avail, progress.next_used, "{id}");
        progress.next_used
    };
    assert_eq!(position("__rng", 0), 3);
    assert_eq!(position("__watchdog", 0), 1);
    assert_eq!((position("__console", 0), position("__console", 1)), (0, 1));
    let plain = plain().adopted();
    let disk = virtio(&plain, "_disk0");
    assert!(!disk.common.active && disk.queues.iter().all(|queue| queue.progress.is_none()));
    assert_eq!(disk.common.driver_features, 0);
}

#[test]
fn what_is_not_saved_there_begins_as_at_reset() {
    let adopted = all_devices().adopted();
    let names: Vec<&str> = adopted.state.legacy.keys().map(String::as_str).collect();
    assert_eq!(names, ["acpi-power", "cmos", "ged", "i8042", "pm-timer", "serial"]);
    // The timer goes on with the clock, from where that was.
    let clock_ns = u128::from(adopted.state.clock.clock_ns);
    let ticks = u64::try_from(clock_ns * 3_579_545 / 1_000_000_000 % (1 << 32)).unwrap();
    assert_eq!(adopted.state.legacy["pm-timer"].data, json!({"ticks": ticks}));
    let states = [
        (
            "cmos",
            &devices::legacy::Cmos::new(0, 0, Box::new(devices::legacy::HostClock))
                as &dyn devices::Snapshot,
        ),
        ("pm-timer", &devices::legacy::PmTimer::new()),
    ];
    for (name, device) in states {
        device.restore(&adopted.state.legacy[name]).unwrap();
    }
}
