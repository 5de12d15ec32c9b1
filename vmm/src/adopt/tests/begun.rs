// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is known before the state comes, beside what the state says.

use ::memory::{GuestRam, InitialContents, RamSources};

use super::*;
use crate::machine::{layout_for, make_arriving};

/// What such a VM's source sends first.
fn message(recorded: &Recorded) -> ConfigMessage {
    ConfigMessage {
        vm_config: recorded.config.clone(),
        common_cpuid: recorded.document.vm.common_cpuid.clone(),
        memory_manager_data: recorded.document.memory.clone(),
    }
}

fn begun(recorded: &Recorded) -> Begun {
    begin(&message(recorded)).unwrap_or_else(|error| panic!("{}", error_text::chain(&error)))
}

/// The memory of a machine of this configuration.
fn made(config: &VmConfig) -> std::sync::Arc<GuestRam> {
    let origin = RamSources { contents: InitialContents::MustBeEmpty, ..RamSources::default() };
    let bits = config.pci_address_bits.unwrap();
    make_arriving(&config.memory, layout_for(config, bits), origin).unwrap()
}

#[test]
fn memory_can_be_made_and_checked_before_the_state_comes() {
    for (name, recorded) in [
        ("plain-1", plain()),
        ("all-2", all_devices()),
        ("acpi-hotplug", recorded!("acpi-hotplug")),
        ("virtio-mem", recorded!("virtio-mem")),
        ("zones", recorded!("zones")),
        ("segments", recorded!("segments")),
        ("debian-plugged", recorded!("debian-plugged")),
    ] {
        let (begun, adopted) = (begun(&recorded), recorded.adopted());
        assert_eq!(begun.memory, adopted.memory, "{name}");
        assert_eq!(begun.config.memory, adopted.config.memory, "{name}");
        assert_eq!(begun.config.pci_address_bits, adopted.config.pci_address_bits, "{name}");
        let ram = made(&begun.config);
        for (layout, config) in [(&begun.memory, &begun.config), (&adopted.memory, &adopted.config)]
        {
            check_made(layout, config, &ram)
                .unwrap_or_else(|error| panic!("{name}: {}", error_text::chain(&error)));
        }
        let mut elsewhere = begun;
        elsewhere.memory.device_area_gpa += 4096;
        assert!(check_made(&elsewhere.memory, &elsewhere.config, &ram).is_err(), "{name}");
    }
}

#[test]
fn without_address_bits_nothing_has_a_place() {
    let mut message = message(&plain());
    let entries = message.common_cpuid.iter().filter(|entry| entry.function != 0x8000_0008);
    message.common_cpuid = List::try_from(entries.copied().collect::<Vec<_>>()).ok().unwrap();
    let error = error_text::chain(&begin(&message).unwrap_err());
    assert!(error.contains("common_cpuid: leaf 0x80000008 says 0 address bits"), "{error}");
}

#[test]
fn the_file_of_a_private_zone_is_not_used_for_memory_that_arrives() {
    let zone = |shared: bool| {
        let mut recorded = plain();
        recorded.config["memory"] = json!({
            "size": 0,
            "zones": [{"id": "mem0", "size": 8 << 20, "file": "/tmp/x/ram", "shared": shared}]
        });
        begun(&recorded).config.memory.zones.unwrap().remove(0)
    };
    assert!(zone(false).file.is_none());
    assert!(zone(true).file.is_some());
}

#[test]
fn what_is_shown_before_the_state_comes_has_no_virtualisation_that_is_off() {
    const VMX: u32 = 1 << 5;
    let mut recorded = plain();
    let common = &recorded.document.vm.common_cpuid;
    let at = common.iter().position(|entry| entry.function == 1).unwrap();
    recorded.document.vm.common_cpuid = changed(common, at, |entry| entry.ecx |= VMX);
    let mut ecx = |nested: bool| {
        recorded.config["cpus"]["nested"] = json!(nested);
        let shown = begun(&recorded).shown;
        assert_eq!(shown.len(), recorded.document.vm.common_cpuid.len());
        let leaf = shown.into_iter().find(|entry| entry.function == 1).unwrap();
        leaf.answer[2] & VMX
    };
    assert_eq!((ecx(true), ecx(false)), (VMX, 0));
}

#[test]
fn taps_that_were_descriptors_are_known() {
    let mut recorded = all_devices();
    assert!(begun(&recorded).without_tap.is_empty());
    let net = recorded.config["net"][0].as_object_mut().unwrap();
    net.insert("fds".to_owned(), json!([3]));
    for of_a_tap in ["tap", "host_mac", "ip", "mask"] {
        net.remove(of_a_tap);
    }
    let begun = begun(&recorded);
    assert_eq!(begun.without_tap, ["_net2"]);
    assert!(check_taps(&begun.without_tap, &begun.config).is_err());
}

#[test]
fn an_image_that_its_source_has_not_completed_is_refused_before_memory_comes() {
    let with = |image: &str, readonly: bool| {
        let mut recorded = plain();
        recorded.config["disks"][0]["image_type"] = json!(image);
        recorded.config["disks"][0]["readonly"] = json!(readonly);
        begin(&message(&recorded)).map(drop)
    };
    for image in ["Qcow2", "Vhdx"] {
        let error = error_text::chain(&with(image, false).unwrap_err());
        assert!(error.contains("'_disk0'") && error.contains("tables"), "{error}");
    }
    for (image, readonly) in [("Qcow2", true), ("Vhdx", true), ("Raw", false), ("FixedVhd", false)]
    {
        with(image, readonly).unwrap();
    }
}
