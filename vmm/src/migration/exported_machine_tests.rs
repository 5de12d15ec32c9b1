// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests on memory that changes while a machine is sent.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use cloud_hypervisor_state::Document;

use super::*;

fn memory() -> MemoryManager {
    let document = include_bytes!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/data/cloud-hypervisor-53/snapshots/acpi-hotplug/state.json"
    ));
    Document::read(document).unwrap().memory
}

#[test]
fn registers_of_memory_devices_stay_as_they_were_sent() {
    let sent = memory();
    let check = |now: &MemoryManager| check_same_memory(&sent, now).map_err(|it| it.to_string());
    // What is only counted may change.
    check(&MemoryManager { current_ram: 0, ..memory() }).unwrap();
    let mut slots = *memory().hotplug_slots;
    slots[0].inserting ^= true;
    for changed in [
        MemoryManager { hotplug_slots: slots.into(), ..memory() },
        MemoryManager { selected_slot: sent.selected_slot + 1, ..memory() },
        MemoryManager { next_hotplug_slot: sent.next_hotplug_slot + 1, ..memory() },
    ] {
        assert!(check(&changed).unwrap_err().contains("memory devices have changed"));
    }
}

#[test]
fn borders_are_those_of_all_mappings() {
    let mut mappings = memory().guest_ram_mappings.to_vec();
    // Another device follows the one that there is.
    let mut next = mappings.last().unwrap().clone();
    (next.gpa, next.size) = (next.gpa + next.size, 2 * next.size);
    mappings.push(next);
    let guest_ram_mappings = mappings.clone().try_into().unwrap();
    let memory = MemoryManager { guest_ram_mappings, ..memory() };
    let sent = SentMachine { config_json: Vec::new(), memory };
    let devices: Vec<_> = mappings.iter().filter(|it| it.gpa >= 1 << 32).collect();
    assert!(devices.len() > 1, "{mappings:?}");
    let first = devices.iter().map(|it| it.gpa).min().unwrap();
    let len_bytes = devices.iter().map(|it| it.size).sum();
    let cut = sent.borders().cut(GpaRange { gpa: first, len_bytes }).collect::<Vec<_>>();
    let as_range =
        |it: &&cloud_hypervisor_state::RamMapping| GpaRange { gpa: it.gpa, len_bytes: it.size };
    assert_eq!(cut, devices.iter().map(as_range).collect::<Vec<_>>());
}
