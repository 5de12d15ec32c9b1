// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is written is what v53 had written, and is taken over as the same machine.

use cloud_hypervisor_state::{DeviceNode, KvmVcpu, MemoryRange, Net, RamMapping};

use super::*;

/// Both documents, with what may differ made equal. What that is says each line.
fn alike(mut theirs: Document, mut ours: Document) -> (Document, Document) {
    for document in [&mut theirs, &mut ours] {
        // The order of MSRs is that of KVM's list there, and ascending here. There is one TSC here: that of vCPU 0.
        let mut tsc = None;
        for Vcpu::Kvm(vcpu) in document.vcpus.values_mut() {
            let mut msrs = vcpu.msrs.to_vec();
            msrs.sort_by_key(|msr| msr.index);
            let of_vcpu = msrs.iter_mut().find(|msr| msr.index == 0x10).unwrap();
            of_vcpu.data = *tsc.get_or_insert(of_vcpu.data);
            vcpu.msrs = msrs.try_into().ok().unwrap();
        }
        // So is that of zones, and of ranges in the memory file; numbers of slots follow from it.
        let memory = &mut document.memory;
        let mut mappings: Vec<RamMapping> = memory.guest_ram_mappings.to_vec();
        mappings.sort_by_key(|mapping| mapping.gpa);
        for (slot, mapping) in (0_u32..).zip(&mut mappings) {
            mapping.slot = slot;
        }
        memory.guest_ram_mappings = mappings.try_into().ok().unwrap();
        let mut ranges: Vec<MemoryRange> = memory.memory_ranges.data.to_vec();
        ranges.sort_by_key(|range| range.gpa);
        memory.memory_ranges.data = ranges.try_into().ok().unwrap();
        // Slots of persistent memory are counted there.
        memory.next_memory_slot = 0;
        // The number of the next name is only known to be free.
        document.devices.data.device_id_cnt = 0;
        // An entry that was written as it was before is as one that was never written.
        let ioapic = &mut document.devices.ioapic;
        ioapic.used_entries = ioapic.reg_entries.map(|entry| entry != 0x1_0000).into();
        // At reset the register says that MSI-X is on, and their state that it is off; written is what the register says.
        for (transport, _) in document.devices.virtio.values_mut() {
            let register = transport.configuration.msix_cap_reg_idx.unwrap();
            let control = transport.configuration.registers[usize::try_from(register).unwrap()];
            let msix = &mut transport.msix;
            if control >> 30 == 0b10 && msix.masked && !msix.enabled {
                (msix.masked, msix.enabled) = (false, true);
            }
        }
        // What each vCPU is shown otherwise, and hosts are not compared by; of AMD, what may be missing.
        let common = document.vm.common_cpuid.iter().copied().map(|mut leaf| {
            match leaf.function {
                1 => leaf.ebx &= 0xffff,
                0x8000_0001 => leaf.ecx &= !(1 << 1 | 1 << 22),
                0x8000_0008 => leaf.ecx = 0,
                0x8000_001e => (leaf.eax, leaf.ebx, leaf.ecx) = (0, 0, 0),
                _ => {}
            }
            leaf
        });
        let mut common: Vec<_> = common.collect();
        common.sort_by_key(|leaf| (leaf.function, leaf.index));
        document.vm.common_cpuid = common.try_into().ok().unwrap();
    }
    // Memory that a guest was to have of a memory device when it booted is not counted there.
    let requested = |document: &Document| {
        let devices = document.devices.virtio.values();
        let of = |device: &Virtio| match device {
            Virtio::Mem(mem) => mem.config.requested_size,
            _ => 0,
        };
        devices.map(|(_, device)| of(device)).sum::<u64>()
    };
    // A vCPU that was ejected stays in the document there.
    theirs.vcpus.retain(|index, _| ours.vcpus.contains_key(index));
    if theirs.memory.current_ram == theirs.memory.boot_ram {
        theirs.memory.current_ram += requested(&theirs);
    }
    (theirs, ours)
}

fn diff(name: &str, theirs: &Document, ours: &Document) {
    assert_eq!(theirs.vm, ours.vm, "{name}");
    assert_eq!(theirs.memory, ours.memory, "{name}");
    for (index, Vcpu::Kvm(vcpu)) in &theirs.vcpus {
        let Vcpu::Kvm(ours) = &ours.vcpus[index];
        let fields = |vcpu: &KvmVcpu| serde_json::to_value(vcpu).unwrap();
        let (theirs, ours) = (fields(vcpu), fields(ours));
        for (field, value) in theirs.as_object().unwrap() {
            assert_eq!(*value, ours[field], "{name}: vCPU {index}: {field}");
        }
    }
    assert_eq!(theirs.vcpus.len(), ours.vcpus.len(), "{name}");
    let (theirs, ours) = (&theirs.devices, &ours.devices);
    assert_eq!((&theirs.ioapic, &theirs.serial), (&ours.ioapic, &ours.serial), "{name}");
    for (id, (transport, device)) in &theirs.virtio {
        let (our_transport, our_device) = &ours.virtio[id];
        assert_eq!(device, our_device, "{name}: {id}");
        assert_eq!(transport, our_transport, "{name}: {id}");
    }
    let tree = |nodes: &BTreeMap<String, DeviceNode>| nodes.clone();
    assert_eq!(tree(&theirs.data.device_tree.0), tree(&ours.data.device_tree.0), "{name}");
    assert_eq!(theirs, ours, "{name}");
}

#[test]
fn what_is_written_is_what_was_recorded() {
    for recorded in all() {
        let exported = recorded.exported();
        let (theirs, ours) = alike(recorded.document.clone(), exported.document);
        diff(recorded.name, &theirs, &ours);
    }
}

#[test]
fn what_is_written_is_taken_over_as_the_same_machine() {
    for recorded in all() {
        let name = recorded.name;
        let exported = recorded.exported();
        // As it travels.
        let document = Document::read(&exported.document.write().unwrap()).unwrap();
        let config = serde_json::to_vec(&exported.vm_config).unwrap();
        let config = ConfigMessage::read_vm_config(&config).unwrap();
        let again = adopt(&config, &document.memory, &document, &recorded.memory);
        let mut again =
            again.unwrap_or_else(|error| panic!("{name}: {}", error_text::chain(&error)));
        fetch_events(&mut again.state);
        let json = |state: &MachineState| serde_json::to_value(state).unwrap();
        let (before, after) = (json(&recorded.adopted.state), json(&again.state));
        for (field, value) in before.as_object().unwrap() {
            assert_eq!(*value, after[field], "{name}: {field}");
        }
        assert_eq!(before, after, "{name}");
        // The address bits are pinned from now on.
        let mut config = recorded.adopted.config.clone();
        config.cpus.max_phys_bits = config.pci_address_bits.unwrap();
        // So are serial numbers.
        for disk in config.disks.iter_mut().flatten() {
            disk.serial.clone_from(&disk.id);
        }
        assert_eq!(again.config, config, "{name}");
        assert_eq!(again.memory, recorded.adopted.memory, "{name}");
    }
}

#[test]
fn a_configuration_has_what_was_recorded_but_for_what_the_vmm_decided() {
    for recorded in all() {
        let name = recorded.name;
        let exported = recorded.exported();
        // As their program fills in defaults.
        let theirs = recorded.config.as_object().unwrap();
        for (key, value) in theirs {
            let ours = exported.vm_config.get(key);
            same(&format!("{name}: {key}"), value, ours);
        }
    }
}

/// Values that are there and here, or have their default there.
fn same(at: &str, theirs: &Value, ours: Option<&Value>) {
    const DEFAULTS: [&str; 8] = [
        "vhost_user",
        "vhost_mode",
        "profile",
        "iommu",
        "disable_aio",
        "disable_io_uring",
        "cpus: max_phys_bits",
        "num_pci_segments",
    ];
    match (theirs, ours) {
        _ if DEFAULTS.iter().any(|name| at.ends_with(name)) => {}
        (Value::Object(theirs), Some(Value::Object(ours))) => {
            for (key, value) in theirs {
                same(&format!("{at}: {key}"), value, ours.get(key));
            }
        }
        (Value::Array(theirs), Some(Value::Array(ours))) => {
            assert_eq!(theirs.len(), ours.len(), "{at}");
            theirs.iter().zip(ours).for_each(|(theirs, ours)| same(at, theirs, Some(ours)));
        }
        (theirs, ours) => assert_eq!(Some(theirs), ours, "{at}"),
    }
}

#[test]
fn what_comes_before_the_state_is_what_the_state_says() {
    for recorded in all() {
        let (name, adopted) = (recorded.name, &recorded.adopted);
        let devices = adopted.state.memory_hotplug.as_ref();
        let early = begin(&adopted.config, &adopted.memory, &adopted.state.shown, devices).unwrap();
        let exported = recorded.exported();
        assert_eq!(early.vm_config, exported.vm_config, "{name}");
        assert_eq!(early.common_cpuid, exported.document.vm.common_cpuid, "{name}");
        let (early, late) = (early.memory_manager_data, exported.document.memory);
        assert_eq!(early.guest_ram_mappings, late.guest_ram_mappings, "{name}");
        assert_eq!(early.hotplug_slots, late.hotplug_slots, "{name}");
        assert_eq!(early.start_of_device_area, late.start_of_device_area, "{name}");
        assert!(early.memory_ranges.data.is_empty(), "{name}");
    }
}

#[test]
fn names_that_come_later_are_free() {
    for (recorded, count) in [(all_devices(), 5), (plain(), 1), (recorded!("added"), 1)] {
        assert_eq!(recorded.exported().document.devices.data.device_id_cnt, count);
        assert_eq!(recorded.document.devices.data.device_id_cnt, count, "as it was there");
    }
}

#[test]
fn a_network_keeps_what_its_tap_gave_it() {
    let exported = all_devices().exported();
    let (_, Virtio::Net(net)) = &exported.document.devices.virtio["_net2"] else {
        panic!("no network")
    };
    let Net { config, queue_size, .. } = net;
    assert_eq!((config.mtu, config.status, queue_size.len()), (1500, 0, 3));
    assert_eq!(exported.vm_config["net"][0]["mtu"], json!(1500));
}
