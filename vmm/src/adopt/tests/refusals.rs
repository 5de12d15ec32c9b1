// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What cannot be taken over is refused by its name.

use cloud_hypervisor_state::{BarMove, BarRegion, HotplugSlot, Queue};

use super::*;

#[test]
fn keys_of_the_configuration() {
    for (pointer, value, expected) in [
        ("/iommu", json!(true), "iommu=true"),
        ("/devices", json!([{"path": "/sys/x"}]), "devices="),
        ("/user_devices", json!([{"socket": "/s"}]), "user_devices="),
        ("/vdpa", json!([{"path": "/dev/v"}]), "vdpa="),
        ("/generic_vhost_user", json!([{"socket": "/s"}]), "generic_vhost_user="),
        ("/gdb", json!(true), "gdb=true"),
        ("/tpm", json!({"socket": "/s"}), "tpm="),
        ("/ivshmem", json!({"path": "/x"}), "ivshmem="),
        ("/pvmemcontrol", json!({}), "pvmemcontrol="),
        ("/igvm", json!("/x"), "igvm="),
        ("/platform", json!({"iommu_segments": [1]}), "platform.iommu_segments="),
        ("/platform", json!({"tdx": true}), "platform.tdx=true"),
        ("/platform", json!({"sev_snp": true}), "platform.sev_snp=true"),
        ("/disks/0/iommu", json!(true), "disks[0].iommu=true"),
        ("/disks/0/vhost_user", json!(true), "disks[0].vhost_user=true"),
        ("/disks/0/pci_segment", json!(1), "disks[0].pci_segment=1"),
        ("/disks/0/pci_device_id", json!(9), "disks[0].pci_device_id=9"),
        ("/vsock/iommu", json!(true), "vsock.iommu=true"),
        ("/cpus/profile", json!("skylake"), "profile: unknown variant `skylake`"),
        ("/payload/fw_cfg_config", json!({"kernel": true}), "unknown field `fw_cfg_config`"),
        ("/unheard_of", json!(1), "unknown field `unheard_of`"),
    ] {
        let mut recorded = all_devices();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let keys = recorded.config.pointer_mut(parent).unwrap().as_object_mut().unwrap();
        keys.insert(key.to_owned(), value);
        let error = recorded.refusal();
        assert!(error.contains(expected), "{pointer}: {error}");
    }
    let mut recorded = plain();
    recorded.config = json!([]);
    assert!(recorded.refusal().contains("vm_config=[]"));
}

#[test]
fn defaults_of_what_is_not_known_are_dropped() {
    let mut recorded = all_devices();
    let keys = recorded.config.as_object_mut().unwrap();
    for (key, value) in [("gdb", json!(false)), ("user_devices", json!([])), ("igvm", json!(null))]
    {
        keys.insert(key.to_owned(), value);
    }
    recorded.adopted();
}

#[test]
fn taps_that_were_descriptors_are_asked_for() {
    let mut recorded = all_devices();
    let net = recorded.config.pointer_mut("/net/0").unwrap().as_object_mut().unwrap();
    net.insert("fds".to_owned(), json!([-1]));
    net.remove("tap");
    assert_eq!(recorded.adopted().without_tap, ["_net2"]);
}

#[test]
fn devices_that_the_configuration_does_not_have_or_the_document() {
    let mut recorded = all_devices();
    recorded.config.as_object_mut().unwrap().remove("vsock");
    assert!(recorded.refusal().contains("device-manager/_vsock4: a socket device that the"));
    let mut recorded = all_devices();
    recorded.config["serial"]["mode"] = json!("Off");
    recorded.config["serial"].as_object_mut().unwrap().remove("file");
    assert!(recorded.refusal().contains("device-manager/__serial"));
    let mut recorded = all_devices();
    recorded.document.devices.virtio.remove("_vsock4");
    let tree = &mut recorded.document.devices.data.device_tree.0;
    assert!(tree.remove("_vsock4").is_some() && tree.remove("_virtio-pci-_vsock4").is_some());
    assert!(recorded.refusal().contains("device-manager/_vsock4: the node is missing"));
    let mut recorded = all_devices();
    let tree = &mut recorded.document.devices.data.device_tree.0;
    tree.remove("_vsock4");
    assert!(recorded.refusal().contains("device_tree._vsock4: the node is missing"));
    let mut recorded = all_devices();
    recorded.document.devices.pvpanic = None;
    assert!(recorded.refusal().contains("device_tree.__pvpanic: a device without a state"));
    let mut recorded = all_devices();
    let tree = &mut recorded.document.devices.data.device_tree.0;
    let address = tree["_virtio-pci-__rng"].pci_bdf.clone();
    tree.get_mut("_virtio-pci-_disk0").unwrap().pci_bdf = address;
    assert!(recorded.refusal().contains("two functions at 0000:00:05.0"));
    for address in ["0000:00:00\n0", "0000:00:00.0", "0000:01:05.0", "0000:00:05.1", "xxxx:00:05.0"]
    {
        let mut recorded = all_devices();
        let tree = &mut recorded.document.devices.data.device_tree.0;
        tree.get_mut("_virtio-pci-__rng").unwrap().pci_bdf = Some(address.to_owned());
        let error = recorded.refusal();
        let expected = format!("no function can be at '{}'", address.escape_debug());
        assert!(error.contains(&expected) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn statuses_in_which_a_device_does_not_work() {
    for (status, active, expected) in [
        (0x4f, true, "_virtio-pci-__rng/virtio_pci_common_config: driver_status: 0x4f"),
        (0x8f, true, "driver_status: 0x8f"),
        (0x8b, true, "driver_status: 0x8b"),
        (0x8f, false, "device_activated: false"),
        (0x4b, false, "driver_status: 0x4b"),
        (0x1f, true, "driver_status: 0x1f"),
        (0x0f, false, "_virtio-pci-__rng: device_activated: false"),
        (0x0b, true, "device_activated: true"),
    ] {
        let mut recorded = all_devices();
        let transport = recorded.transport("__rng");
        transport.common.driver_status = status;
        transport.data.device_activated = active;
        let error = recorded.refusal();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_driver_that_has_given_up_leaves_a_device_that_can_be_reset() {
    for status in [0x83, 0x8b] {
        let mut recorded = all_devices();
        let transport = recorded.transport("__rng");
        (transport.data.device_activated, transport.common.driver_status) = (false, status);
        let rng = virtio(&recorded.adopted(), "__rng");
        assert_eq!((rng.common.status, rng.common.active), (status, false));
    }
}

#[test]
fn features_that_are_not_known() {
    for (id, offered, accepted, expected) in [
        (
            "__rng",
            1_u64 << 33 | 1 << 32,
            0,
            "device-manager/__rng: avail_features: the device is behind",
        ),
        ("__rng", 1 << 32 | 1 << 28, 0, "features 0x10000000"),
        ("__rng", 1 << 32, 1 << 32 | 1 << 28, "acked_features: 0x10000000"),
        ("_vsock4", 1 << 32 | 1 << 36, 0, "features 0x1000000000"),
    ] {
        let mut recorded = all_devices();
        match &mut recorded.device(id).1 {
            Virtio::Rng(rng) => (rng.avail_features, rng.acked_features) = (offered, accepted),
            Virtio::Vsock(sock) => (sock.avail_features, sock.acked_features) = (offered, accepted),
            _ => panic!("another device"),
        }
        let error = recorded.refusal();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn queues_that_cannot_be_in_this_memory() {
    let with = |change: &dyn Fn(&mut Queue)| {
        let mut recorded = all_devices();
        let data = &mut recorded.transport("__rng").data;
        data.queues = changed(&data.queues, 0, |queue| change(queue));
        recorded.refusal()
    };
    let at = |field: &str| format!("device-manager/_virtio-pci-__rng: queues[0].{field}");
    for (error, field) in [
        (with(&|queue| queue.size = 3), "size"),
        (with(&|queue| queue.size = 512), "size"),
        (with(&|queue| queue.size = 0), "size"),
        (with(&|queue| queue.desc_table += 8), "desc_table"),
        (with(&|queue| queue.avail_ring += 1), "avail_ring"),
        (with(&|queue| queue.used_ring = (8 << 20) - 8), "used_ring"),
        (with(&|queue| queue.used_ring = u64::MAX - 3), "used_ring"),
    ] {
        assert!(error.contains(&at(field)), "{field}: {error}");
    }
}

#[test]
fn memory_that_cannot_be_read() {
    struct Unreadable;
    impl ReadGuest for Unreadable {
        fn read_u16(&self, _gpa: u64) -> Result<u16, Box<dyn Error + Send + Sync>> {
            Err("the page has not come".into())
        }
    }
    let recorded = all_devices();
    let adopted =
        adopt(&recorded.config, &recorded.document.memory, &recorded.document, &Unreadable);
    let error = error_text::chain(&adopted.unwrap_err());
    assert!(error.contains("queues[0].used_ring: cannot read guest memory at"), "{error}");
    assert!(error.contains("the page has not come"), "{error}");
    // Nothing that the driver has not started is looked at.
    let plain = plain();
    adopt(&plain.config, &plain.document.memory, &plain.document, &Unreadable).unwrap();
}

#[test]
fn positions_that_do_not_fit() {
    let mut recorded = all_devices();
    let ring = recorded.transport("__rng").data.queues[0].used_ring;
    let at = usize::try_from(ring).unwrap() + 2;
    recorded.memory[at..at + 2].copy_from_slice(&9_u16.to_le_bytes());
    let error = recorded.refusal();
    assert!(error.contains("queues[0].used_ring: its index is 9, with 3 available"), "{error}");
}

#[test]
fn registers_of_functions() {
    let with = |change: &dyn Fn(&mut Transport)| {
        let mut recorded = all_devices();
        change(recorded.transport("__rng"));
        recorded.refusal()
    };
    let moving = BarMove {
        old_base: 0,
        new_base: 0,
        len: 1 << 19,
        region_type: BarRegion::Memory64BitRegion,
    };
    for (error, expected) in [
        (
            with(&|it| {
                it.configuration.pending_bar_reprogram = List::try_from(vec![moving]).ok().unwrap();
            }),
            "pci_configuration: pending_bar_reprogram",
        ),
        (with(&|it| it.configuration.rom_bar_used = true), "pci_configuration: rom_bar_used"),
        (
            with(&|it| {
                it.configuration.bars[1].addr += 1;
                it.configuration.registers[5] += 1;
            }),
            "bars[0]: 0x80000 bytes at",
        ),
        (with(&|it| it.configuration.bars[1].used = false), "bars[1]: a half of a BAR"),
        (
            with(&|it| it.configuration.bars[0].region = Some(BarRegion::IoRegion)),
            "bars[0]: a BAR of a kind",
        ),
        (with(&|it| it.configuration.msix_cap_reg_idx = None), "no capability of MSI-X"),
        (with(&|it| it.common.msix_config = 2), "there is no vector 2"),
        (with(&|it| it.data.cap_pci_cfg_offset = 1), "cap_pci_cfg_offset"),
        (with(&|it| it.data.cap_pci_cfg_offset = 4090), "cap_pci_cfg_offset"),
        // A BAR, the common configuration's capability, the control word of MSI-X, the last byte.
        (with(&|it| it.data.cap_pci_cfg_offset = 0x10), "cap_pci_cfg_offset"),
        (with(&|it| it.data.cap_pci_cfg_offset = 0x42), "cap_pci_cfg_offset"),
        (with(&|it| it.data.cap_pci_cfg_offset = 0x8a), "cap_pci_cfg_offset"),
        (with(&|it| it.data.cap_pci_cfg_offset = u64::MAX), "cap_pci_cfg_offset"),
        (with(&|it| it.data.cap_pci_cfg[0] = 16), "cap_pci_cfg"),
        (with(&|it| it.data.cap_pci_cfg[1] = 1), "cap_pci_cfg"),
        (with(&|it| it.data.interrupt_status = 4), "interrupt_status"),
    ] {
        assert!(error.contains("_virtio-pci-__rng"), "{error}");
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

#[test]
fn bars_outside_of_windows() {
    for (id, low, high, bar) in [
        // In memory, between the windows, in the part for platform devices.
        ("_disk0", 0x10_0000, None, 0),
        ("_disk0", 0xf000_0000, None, 0),
        ("__rng", 0x4, Some(0), 0),
        ("__rng", 0xfff0_0004, Some(0x7f), 0),
    ] {
        let mut recorded = all_devices();
        let configuration = &mut recorded.transport(id).configuration;
        (configuration.bars[0].addr, configuration.registers[4]) = (low, low);
        if let Some(high) = high {
            (configuration.bars[1].addr, configuration.registers[5]) = (high, high);
        }
        let gpa = u64::from(high.unwrap_or(0)) << 32 | u64::from(low & !0xf);
        let tree = &mut recorded.document.devices.data.device_tree.0;
        let node = tree.get_mut(&format!("_virtio-pci-{id}")).unwrap();
        node.resources = changed(&node.resources, 0, |resource| {
            let cloud_hypervisor_state::Resource::PciBar { base, .. } = resource else {
                panic!("a BAR")
            };
            *base = gpa;
        });
        let error = recorded.refusal();
        assert!(error.contains(&format!("bars[{bar}]: 0x80000 bytes at {gpa:#x}")), "{error}");
    }
}

#[test]
fn registers_of_vcpus() {
    let with = |change: &dyn Fn(&mut KvmVcpu)| {
        let mut recorded = plain();
        change(recorded.vcpu(0));
        recorded.refusal()
    };
    let nested = |len: u32| {
        let mut bytes = [0; 8320];
        bytes[4..8].copy_from_slice(&len.to_le_bytes());
        Some(bytes.into())
    };
    for (error, expected) in [
        (with(&|it| it.mp_state[0] = 5), "mp_state: 5"),
        (with(&|it| it.vcpu_events[20] |= 0x20), "vcpu_events: a triple fault"),
        (with(&|it| it.xsave.region[131] |= 1 << 31), "xsave.region: it is in the compacted"),
        (with(&|it| it.xsave.region[128] |= 1 << 19), "xsave: component 19"),
        (with(&|it| it.nested_state = nested(127)), "nested_state: 127 bytes"),
        (with(&|it| it.nested_state = nested(8321)), "nested_state: 8321 bytes"),
        (with(&|it| it.msrs = List::default()), "msrs: no TSC"),
        (with(&|it| it.cpuid = List::default()), "cpuid: leaf 0x80000008"),
    ] {
        assert!(error.starts_with(&format!("cpu-manager/0: {expected}")), "{expected}: {error}");
    }
    let mut recorded = recorded!("plain-2");
    recorded.document.vcpus.remove(&1);
    assert_eq!(recorded.refusal(), "cpu-manager/1: the node is missing");
}

/// Offsets of RFLAGS, and of CR4 in the other structure.
const RFLAGS: usize = 136;
const CR4: usize = 248;

#[test]
fn a_vcpu_that_the_guest_still_uses() {
    // It was asked to eject the second one, and has not.
    let asked = |change: &dyn Fn(&mut KvmVcpu)| {
        let mut recorded = recorded!("debian-2");
        recorded.config["cpus"]["boot_vcpus"] = json!(1);
        change(recorded.vcpu(1));
        recorded
    };
    let expected = "cpu-manager/1: the guest was asked to eject it and still uses it: wait until it has, or resize the \
                    VM to 2 vCPUs";
    let without_clock = |vcpu: &mut KvmVcpu| {
        let at = vcpu.msrs.iter().position(|msr| msr.index == 0x4b56_4d01).unwrap();
        vcpu.msrs = changed(&vcpu.msrs, at, |msr| msr.data = 0);
    };
    let deaf = |vcpu: &mut KvmVcpu| vcpu.regs[RFLAGS + 1] &= !2;
    for recorded in [
        asked(&|_| {}),
        asked(&without_clock),
        asked(&|vcpu| {
            without_clock(vcpu);
            deaf(vcpu);
            vcpu.mp_state[0] = 0;
        }),
    ] {
        let error = recorded.refusal();
        assert!(error.starts_with(expected), "{error}");
    }
    // Its kernel may have left the clock on.
    for offline in [
        asked(&deaf),
        asked(&|vcpu| {
            without_clock(vcpu);
            deaf(vcpu);
        }),
    ] {
        assert_eq!(offline.adopted().state.vcpus.len(), 1);
    }
    for never_started in [1, 2] {
        let recorded = asked(&|vcpu| {
            without_clock(vcpu);
            vcpu.mp_state[0] = never_started;
        });
        assert_eq!(recorded.adopted().state.vcpus.len(), 1);
    }
    // The last of three is gone, which is not counted.
    let mut recorded = recorded!("debian-plugged");
    recorded.config["cpus"]["boot_vcpus"] = json!(1);
    assert!(recorded.refusal().starts_with(expected), "{}", recorded.refusal());
}

#[test]
fn a_vcpu_that_is_ready_for_nested_guests() {
    let with = |is_shown: bool, is_on: bool| {
        let mut recorded = plain();
        let vcpu = recorded.vcpu(0);
        assert!(vcpu.nested_state.is_none());
        let leaf = vcpu.cpuid.iter().position(|entry| entry.function == 1).unwrap();
        vcpu.cpuid = changed(&vcpu.cpuid, leaf, |entry| {
            entry.ecx = entry.ecx & !(1 << 5) | u32::from(is_shown) << 5;
        });
        vcpu.sregs[CR4 + 1] = vcpu.sregs[CR4 + 1] & !0x20 | u8::from(is_on) << 5;
        recorded
    };
    let error = with(true, true).refusal();
    assert!(error.starts_with("cpu-manager/0: nested_state: null, and a hypervisor"), "{error}");
    assert!(error.contains("unload it (in Linux kvm_intel)"), "{error}");
    for (is_shown, is_on) in [(true, false), (false, true), (false, false)] {
        with(is_shown, is_on).adopted();
    }
}

#[test]
fn interrupt_controllers() {
    let with = |change: &dyn Fn(&mut cloud_hypervisor_state::Ioapic)| {
        let mut recorded = plain();
        change(&mut recorded.document.devices.ioapic);
        recorded.refusal()
    };
    for (error, expected) in [
        (with(&|it| it.apic_address += 1), "apic_address"),
        (with(&|it| it.id_reg = 16), "id_reg"),
        (with(&|it| it.reg_sel = 0x100), "reg_sel"),
        (with(&|it| it.reg_entries[3] = 1), "reg_entries[3]"),
    ] {
        assert!(error.starts_with(&format!("device-manager/__ioapic: {expected}")), "{error}");
    }
}

#[test]
fn memory_elsewhere() {
    for (change, expected) in [
        (
            (|recorded: &mut Recorded| {
                let mappings = &mut recorded.document.memory.guest_ram_mappings;
                *mappings = changed(mappings, 0, |mapping| mapping.gpa = 4096);
            }) as fn(&mut Recorded),
            "guest_ram_mappings: no 0x800000 bytes of zone 'mem0' at 0x0",
        ),
        (
            |recorded| {
                let mappings = &mut recorded.document.memory.guest_ram_mappings;
                let mut more = mappings.to_vec();
                more.push(more[0].clone());
                more[1].gpa = 1 << 30;
                *mappings = List::try_from(more).ok().unwrap();
            },
            "guest_ram_mappings: memory at 0x40000000",
        ),
        (|recorded| recorded.document.memory.boot_ram = 4 << 20, "no 0x400000 bytes"),
        (
            |recorded| recorded.document.memory.start_of_device_area = 1 << 30,
            "start_of_device_area: 0x40000000",
        ),
        (
            |recorded| recorded.document.memory.start_of_device_area = 1 << 40,
            "start_of_device_area: 0x10000000000 is beyond",
        ),
        (
            |recorded| {
                recorded.document.memory.hotplug_slots[0] = HotplugSlot {
                    base: 4 << 30,
                    length: 128 << 20,
                    active: true,
                    ..HotplugSlot::default()
                };
            },
            "hotplugged_size needs a hotplug_size",
        ),
        (
            |recorded| {
                let slot = HotplugSlot { removing: true, ..HotplugSlot::default() };
                recorded.document.memory.hotplug_slots[3] = slot;
            },
            "hotplug_slots[3]: memory that is to go",
        ),
    ] {
        let mut recorded = plain();
        change(&mut recorded);
        let error = recorded.refusal();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let recorded = plain();
    let mut other = recorded.document.memory.clone();
    other.guest_ram_mappings = changed(&other.guest_ram_mappings, 0, |it| it.slot = 3);
    let error = adopt(&recorded.config, &other, &recorded.document, &recorded.memory).unwrap_err();
    assert!(error.to_string().contains("not the one that came with the configuration"));
}

#[test]
fn devices_values() {
    let with = |id: &str, change: &dyn Fn(&mut Virtio)| {
        let mut recorded = all_devices();
        change(&mut recorded.device(id).1);
        recorded.refusal()
    };
    let disk = with("_disk0", &|device| {
        let Virtio::Block(disk) = device else { panic!("a disk") };
        disk.config.capacity = 1;
    });
    assert!(disk.contains("device-manager/_disk0: config.capacity: 1 sectors"), "{disk}");
    let net = with("_net2", &|device| {
        let Virtio::Net(net) = device else { panic!("a network") };
        net.config.max_virtqueue_pairs = 0;
    });
    assert!(net.contains("device-manager/_net2: config.max_virtqueue_pairs"), "{net}");
    let net = with("_net2", &|device| {
        let Virtio::Net(net) = device else { panic!("a network") };
        net.queue_size = changed(&net.queue_size, 1, |size| *size = 128);
    });
    assert!(net.contains("device-manager/_net2: queue_size"), "{net}");
    let pmem = with("_pmem3", &|device| {
        let Virtio::Pmem(pmem) = device else { panic!("persistent memory") };
        pmem.config.start += 2 << 20;
    });
    assert!(pmem.contains("device-manager: device_tree._pmem3"), "{pmem}");
    let mut recorded = all_devices();
    recorded.document.devices.pvpanic.as_mut().unwrap().data.events = 7;
    assert!(recorded.refusal().contains("device-manager/__pvpanic: events: 0x7"));
}

#[test]
fn memory_devices_with_larger_blocks_here() {
    let mut recorded = recorded!("virtio-mem");
    let bytes = 64_u64 << 30;
    recorded.config["memory"]["hotplug_size"] = json!(bytes);
    let mappings = &mut recorded.document.memory.guest_ram_mappings;
    let region = mappings.iter().position(|mapping| mapping.virtio_mem).unwrap();
    *mappings = changed(mappings, region, |mapping| mapping.size = bytes);
    let error = recorded.refusal();
    assert!(error.contains("memory zone 'mem0': hotplug_size: 0x1000000000: the guest"), "{error}");
}
