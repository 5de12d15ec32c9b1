// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory of a snapshot and of the machine that is made, beside that of the guest.

use ::memory::{GuestRam, InitialContents, RamSources};

use super::*;
use crate::machine::{layout_for, make_arriving};

/// The memory of a machine of this configuration.
fn made(adopted: &Adopted) -> std::sync::Arc<GuestRam> {
    let (config, bits) = (&adopted.config, adopted.platform.address_bits);
    let origin = RamSources { contents: InitialContents::MustBeEmpty, ..RamSources::default() };
    make_arriving(&config.memory, layout_for(config, bits), origin).unwrap()
}

fn refusal(adopted: &Adopted, ram: &GuestRam) -> String {
    error_text::chain(&check_made(&adopted.memory, &adopted.config, ram).unwrap_err())
}

#[test]
fn machines_have_their_memory_where_the_guest_has_found_it() {
    for (name, recorded) in [
        ("plain-1", plain()),
        ("acpi-hotplug", recorded!("acpi-hotplug")),
        ("virtio-mem", recorded!("virtio-mem")),
        ("zones", recorded!("zones")),
        ("segments", recorded!("segments")),
        ("debian-plugged", recorded!("debian-plugged")),
    ] {
        let adopted = recorded.adopted();
        check_ranges(&adopted.memory, &recorded.document, &adopted.config.memory)
            .unwrap_or_else(|error| panic!("{name}: {}", error_text::chain(&error)));
        check_made(&adopted.memory, &adopted.config, &made(&adopted))
            .unwrap_or_else(|error| panic!("{name}: {}", error_text::chain(&error)));
    }
}

#[test]
fn a_machine_with_other_memory_is_refused() {
    let recorded = recorded!("virtio-mem");
    let adopted = recorded.adopted();
    let ram = made(&adopted);
    // The same machine on a platform whose later memory is at multiples of 2 GiB: the region is elsewhere.
    let mut other = recorded.adopted();
    other.config.platform = None;
    other.config.memory.size = (4 << 30) + (256 << 20);
    let elsewhere = made(&other);
    let error = refusal(&adopted, &elsewhere);
    assert!(error.contains("a machine here has no memory of zone 'mem0' at 0x0"), "{error}");
    let mut shifted = recorded.adopted();
    let part = shifted.memory.parts.last_mut().unwrap();
    part.gpa = part.gpa.start + (128 << 20)..part.gpa.end + (128 << 20);
    let error = refusal(&shifted, &ram);
    assert!(
        error.contains("a machine here has no memory of zone 'mem0' at 0x108000000"),
        "{error}"
    );
    let mut fewer = recorded.adopted();
    fewer.memory.parts.pop();
    assert!(refusal(&fewer, &ram).contains("a machine here has 2 parts of memory, not 1"));
    let mut window = recorded.adopted();
    window.memory.device_area_gpa += 4096;
    let error = refusal(&window, &ram);
    assert!(error.contains("start_of_device_area: 0x110001000, and the 64-bit window"), "{error}");
}

#[test]
fn room_for_memory_devices_holds_what_is_plugged_in() {
    let adopted = recorded!("acpi-hotplug").adopted();
    let ram = made(&adopted);
    let mut more = recorded!("acpi-hotplug").adopted();
    more.memory.parts.last_mut().unwrap().kind = PartKind::Devices { plugged_bytes: 1 << 30 };
    assert!(refusal(&more, &ram).contains("no memory of zone 'mem0' at 0x100000000"));
    check_made(&adopted.memory, &adopted.config, &ram).unwrap();
}

#[test]
fn plugged_blocks_have_to_be_in_the_snapshot() {
    let mut recorded = recorded!("debian-plugged");
    let adopted = recorded.adopted();
    let check = |recorded: &Recorded| {
        let memory = &adopted.config.memory;
        check_ranges(&adopted.memory, &recorded.document, memory).map_err(|e| error_text::chain(&e))
    };
    check(&recorded).unwrap();
    let Virtio::Mem(mem) = &mut recorded.device("mem0").1 else { panic!("memory") };
    let last = mem.blocks_state.bitmap.len() - 1;
    assert!(!mem.blocks_state.bitmap[last]);
    mem.blocks_state.bitmap = changed(&mem.blocks_state.bitmap, last, |is| *is = true);
    let error = check(&recorded).unwrap_err();
    assert!(error.contains("memory of zone 'mem0', is not in the snapshot"), "{error}");
}

#[test]
fn a_tap_that_was_a_descriptor_has_to_be_given_again() {
    let without_tap = ["_net2".to_owned()];
    let mut config = all_devices().adopted().config;
    let error = error_text::chain(&check_taps(&without_tap, &config).unwrap_err());
    assert!(error.contains("device-manager/_net2: its tap was given as a descriptor"), "{error}");
    let net = &mut config.net.as_mut().unwrap()[0];
    net.fds = Some(crate::config::ConfigFds(Vec::new()));
    assert!(check_taps(&without_tap, &config).is_err());
    config.net.as_mut().unwrap()[0].fds = Some(crate::config::ConfigFds::inherited([9]));
    check_taps(&without_tap, &config).unwrap();
    check_taps(&[], &all_devices().adopted().config).unwrap();
}

#[test]
fn the_one_memory_device_has_its_registers() {
    let mut recorded = recorded!("acpi-hotplug");
    recorded.document.memory.hotplug_slots[0].inserting = false;
    recorded.document.memory.selected_slot = 0;
    let device = json!({"gpa": 4_u64 << 30, "len_bytes": 128 << 20});
    let registers = |recorded: &Recorded| recorded.adopted().state.memory_hotplug.unwrap();
    let plain = registers(&recorded);
    assert_eq!((plain.version, &plain.data), (1, &json!({"devices": [device], "coming": []})));
    recorded.document.memory.selected_slot = 3;
    let selecting = registers(&recorded);
    assert_eq!((selecting.version, &selecting.data["selected"]), (2, &json!(3)));
    let here = devices::legacy::MemoryHotplug::new(None);
    devices::Snapshot::restore(&here, &selecting).unwrap();
    assert_eq!(devices::Snapshot::save(&here).data["selected"], json!(3));
}

#[test]
fn a_memory_device_may_be_acknowledged_after_the_configuration_was_sent() {
    let mut recorded = recorded!("acpi-hotplug");
    let early = recorded.document.memory.clone();
    recorded.document.memory.hotplug_slots[0].inserting = false;
    adopt(&recorded.config, &early, &recorded.document, &recorded.memory).unwrap();
    let mut other = early;
    other.hotplug_slots[0].base += 4096;
    let error = adopt(&recorded.config, &other, &recorded.document, &recorded.memory).unwrap_err();
    assert!(error.to_string().contains("not the one that came with"), "{error}");
}
