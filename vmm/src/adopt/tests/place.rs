// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory of a snapshot and of the machine that is made, beside that of the guest.

use ::memory::{GuestRam, InitialContents, RamSources};

use super::*;
use crate::machine::{layout_for, make_arriving};

/// The memory of a machine of this configuration.
fn made(adopted: &Adopted) -> std::sync::Arc<GuestRam> {
    let (config, bits) = (&adopted.config, adopted.platform.address_bits);
    let origin = RamSources {
        provided: Vec::new(),
        locked: Vec::new(),
        contents: InitialContents::MustBeEmpty,
    };
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
