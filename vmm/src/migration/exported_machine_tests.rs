// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests on what is said of a machine before its memory is sent.

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
