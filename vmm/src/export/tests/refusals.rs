// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What cannot be written is refused by its name.

use devices::virtio::DeviceSnapshot;
use hypervisor::Blob;

use super::*;
use crate::config::{ConfigFds, ConsoleMode, OnFull};

fn snapshot(kind: &str, version: u32, data: Value) -> DeviceSnapshot {
    DeviceSnapshot { kind: kind.to_owned(), version, data }
}

#[track_caller]
fn refused(recorded: &Recorded, expected: &[&str]) {
    let error = recorded.refusal();
    assert!(expected.iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn a_machine_of_another_platform() {
    let mut recorded = plain();
    recorded.adopted.config.platform = None;
    refused(&recorded, &["platform=godwit", "cloud-hypervisor-53"]);
    let early = begin(&recorded.adopted.config, &recorded.adopted.memory, &[], None);
    assert!(error_text::chain(&early.unwrap_err()).contains("platform=godwit"));
}

#[test]
fn options_that_are_not_written() {
    let mut recorded = all_devices();
    for (path, config) in [
        ("tpm", json!({"tpm": {"socket": "/x"}})),
        ("fs", json!({"fs": [{"id": "a", "tag": "t", "socket": "/x"}]})),
        ("devices", json!({"devices": [{"id": "a", "path": "/x"}]})),
        ("vdpa", json!({"vdpa": [{"id": "a", "path": "/x", "num_queues": 1}]})),
        ("user_devices", json!({"user_devices": [{"id": "a", "socket": "/x"}]})),
        ("iommu", json!({"iommu": true})),
        ("disks.vhost_user", json!({"disks": [{"id": "a", "vhost_user": true}]})),
        ("net.vhost_user", json!({"net": [{"id": "a", "vhost_user": true}]})),
    ] {
        let mut whole = serde_json::to_value(&recorded.adopted.config).unwrap();
        whole.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        let config = serde_json::from_value(whole).unwrap();
        let before = std::mem::replace(&mut recorded.adopted.config, config);
        refused(&recorded, &[&format!("{path}: "), "of cloud-hypervisor 53 is not written"]);
        recorded.adopted.config = before;
    }
}

/// Their file would be opened there with what it has by then.
#[test]
fn zones_in_files() {
    for shared in [true, false] {
        let mut recorded = recorded!("zones");
        let zone = &mut recorded.adopted.config.memory.zones.as_mut().unwrap()[0];
        (zone.file, zone.shared) = (Some("/x".into()), shared);
        refused(&recorded, &["memory.zones.file: pages that are zero"]);
        // One that is sent is refused before anything of it is.
        let Adopted { config, memory, .. } = &recorded.adopted;
        let early = begin(config, memory, &[], None);
        assert!(early.unwrap_err().to_string().contains("memory.zones.file"));
    }
}

#[test]
fn a_console_at_a_socket() {
    let mut recorded = plain();
    let console = &mut recorded.adopted.config.console;
    (console.mode, console.socket) = (ConsoleMode::Socket, Some("/x".into()));
    refused(&recorded, &["console.mode=socket", "no console at a socket"]);
    let Adopted { config, memory, .. } = &recorded.adopted;
    let early = begin(config, memory, &[], None);
    assert!(early.unwrap_err().to_string().contains("console.mode=socket"));
}

/// They would be served there even if the VM stays here.
#[test]
fn requests_that_wait_in_a_queue() {
    let mut recorded = all_devices();
    check_queued(&recorded.adopted.state, &recorded.memory).unwrap();
    let queues = |id: &str| -> Vec<_> {
        let data = recorded.adopted.state.pci[id].state.data.clone();
        serde_json::from_value::<VirtioPciState>(data).unwrap().queues
    };
    let (disk, net) = (queues("_disk0"), queues("_net2"));
    let mut add = |queue: &pci::QueueRegisterState| {
        let at = usize::try_from(queue.driver_gpa + 2).unwrap();
        let index = &mut recorded.memory[at];
        *index = index.wrapping_add(1);
        let checked = check_queued(&recorded.adopted.state, &recorded.memory);
        recorded.memory[at] = recorded.memory[at].wrapping_sub(1);
        checked.map_err(|error| error.to_string())
    };
    // Free buffers of the guest are none.
    add(&net[0]).unwrap();
    for (queue, expected) in
        [(&disk[0], "device '_disk0', queue 0: 1 "), (&net[1], "'_net2', queue 1: 1 ")]
    {
        let error = add(queue).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn options_within_options() {
    let bucket = json!({"size": 1, "one_time_burst": 2, "refill_time": 3});
    let limits = json!({"bandwidth": bucket, "ops": bucket});
    let mut vm = json!({
        "cpus": {
            "topology": {"threads_per_core": 1, "cores_per_die": 1, "dies_per_package": 1, "packages": 1},
            "features": {"amx": true},
            "affinity": [{"vcpu": 0, "host_cpus": [1]}],
        },
        "disks": [{
            "rate_limiter_config": limits, "queue_affinity": [{"queue_index": 0, "host_cpus": [1]}],
        }],
        "net": [{"rate_limiter_config": limits}],
        "rate_limit_groups": [{"id": "a", "rate_limiter_config": limits}],
        "numa": [{"distances": [{"destination": 1, "distance": 20}]}],
    });
    let check = |vm: &Value| configuration::check(vm, "", &mut Vec::new());
    check(&vm).unwrap();
    for (pointer, path) in [
        ("/cpus/topology", "cpus.topology.later"),
        ("/cpus/features", "cpus.features.later"),
        ("/cpus/affinity/0", "cpus.affinity.later"),
        ("/disks/0/rate_limiter_config", "disks.rate_limiter_config.later"),
        ("/net/0/rate_limiter_config/ops", "net.rate_limiter_config.ops.later"),
        ("/disks/0/queue_affinity/0", "disks.queue_affinity.later"),
        ("/numa/0/distances/0", "numa.distances.later"),
    ] {
        let options = vm.pointer_mut(pointer).unwrap().as_object_mut().unwrap();
        options.insert("later".to_owned(), json!(1));
        let error = check(&vm).unwrap_err().to_string();
        assert_eq!(error, format!("{path}: cloud-hypervisor 53 has no such option"));
        vm.pointer_mut(pointer).unwrap().as_object_mut().unwrap().remove("later");
    }
    let error = check(&json!({"pvpanic": {"later": 1}})).unwrap_err().to_string();
    assert!(error.starts_with("pvpanic: "), "{error}");
}

#[test]
fn two_devices_of_one_name() {
    let mut tree = Tree::default();
    let bar = functions::Bar { gpa: 0xc000_0000, len_bytes: 2, is_wide: false };
    let place = Place { bdf: "0000:00:01.0".to_owned(), bar };
    tree.add_panic_device(place.clone()).unwrap();
    let error = tree.add_panic_device(place).unwrap_err().to_string();
    assert!(error.contains("'__pvpanic': two devices"), "{error}");
}

#[test]
fn bars_outside_of_their_segments_window() {
    let mut recorded = all_devices();
    // Free addresses, of the other window.
    recorded.change("_net2", |state| {
        (state.config.registers[4], state.config.registers[5]) = (0xd000_0004, 0);
    });
    refused(&recorded, &["device '_net2'", "no device of its segment"]);
    let mut recorded = recorded!("segments");
    recorded.exported();
    recorded.adopted.state.pci.get_mut("_net2").unwrap().bdf = "0000:00:1e.0".to_owned();
    refused(&recorded, &["device '_net2'", "no device of its segment"]);
    let mut recorded = all_devices();
    recorded.change("_pmem3", |state| state.device.data["gpa"] = json!(0xd000_0000_u64));
    refused(&recorded, &["device '_pmem3'", "outside of its segment's window"]);
}

/// An option that comes to this program later must not be dropped in silence: each is known there, lost, or refused.
#[test]
fn an_option_is_dropped_if_it_means_nothing_there() {
    let mut recorded = all_devices();
    let config = &mut recorded.adopted.config;
    config.disks.as_mut().unwrap()[0].on_full = OnFull::Pause;
    config.net.as_mut().unwrap()[0].fds = Some(ConfigFds::inherited([7]));
    let exported = recorded.exported();
    assert!(exported.losses.iter().any(|loss| loss.contains("disks.on_full")));
    let vm = &exported.vm_config;
    assert_eq!(vm["disks"][0].get("on_full"), None);
    assert_eq!(vm["net"][0]["fds"], json!([-1]));
    for key in ["pci_address_bits", "pci_numbers", "platform", "fs", "iommu"] {
        assert_eq!(vm.get(key), None, "{key}");
    }
    assert_eq!((vm["rng"].get("id"), vm["pmem"][0].get("gpa")), (None, None));
}

#[test]
fn registers_that_it_does_not_save() {
    type Change = fn(&mut hypervisor::VcpuState);
    let changes: [(&str, Change); 6] = [
        ("an XSAVE area of 4294967295 bytes", |vcpu| {
            let leaf = vcpu.cpuid.iter_mut().find(|leaf| (leaf.function, leaf.index) == (0xd, 0));
            leaf.unwrap().answer[2] = u32::MAX;
        }),
        ("breakpoints are in use", |vcpu| vcpu.debugregs.dr7 = 0x401),
        ("its shadow stack is in use", |vcpu| vcpu.ssp = Some(0x1000)),
        ("a triple fault waits", |vcpu| {
            vcpu.events.flags |= 0x20;
            vcpu.events.triple_fault.pending = 1;
        }),
        ("its APIC id 0x100 is too large", |vcpu| {
            vcpu.sregs.apic_base |= 1 << 10;
            let mut lapic = [0; 1024];
            lapic[0x21] = 1;
            vcpu.lapic = Blob::new(&lapic);
        }),
        ("other page directory pointers", |vcpu| {
            vcpu.sregs.cr0 |= 1 << 31;
            vcpu.sregs.cr4 |= 1 << 5;
            vcpu.sregs.efer = 0;
            vcpu.pdptrs = Some([0x1234_5001, 0, 0, 0]);
        }),
    ];
    for (expected, change) in changes {
        let mut recorded = recorded!("plain-2");
        change(&mut recorded.adopted.state.vcpus[1]);
        refused(&recorded, &["vCPU 1: ", expected]);
    }
    let mut recorded = recorded!("plain-2");
    recorded.adopted.state.vcpus.pop();
    refused(&recorded, &["vCPUs: there are 1, and 2"]);
}

#[test]
fn a_page_directory_that_is_in_memory_is_read_from_there() {
    let mut recorded = plain();
    let vcpu = &mut recorded.adopted.state.vcpus[0];
    vcpu.sregs.cr0 |= 1 << 31;
    vcpu.sregs.cr4 |= 1 << 5;
    vcpu.sregs.efer = 0;
    vcpu.sregs.cr3 = 0x10_0020;
    vcpu.pdptrs = Some([0x1234_5001, 0, 7, 0]);
    recorded.memory.resize(8 << 20, 0);
    recorded.memory[0x10_0020..0x10_0040].fill(0);
    recorded.memory[0x10_0020..0x10_0024].copy_from_slice(&0x1234_5001_u32.to_le_bytes());
    recorded.memory[0x10_0030] = 7;
    recorded.exported();
    recorded.memory[0x10_0031] = 1;
    refused(&recorded, &["vCPU 0: ", "page directory"]);
}

#[test]
fn hot_plug_that_is_under_way() {
    let slots = |up: u32| json!({"up": up, "down": 0, "leaving": 0, "ejected": 0});
    let cpus = |coming: Value| json!({"present": [0, 1], "coming": coming, "going": [], "leaving": [], "selected": 1});
    let mut recorded = recorded!("plain-2");
    let state = &mut recorded.adopted.state;
    state.pci_hotplug = Some(snapshot("pci-hotplug", 1, slots(0)));
    state.cpu_hotplug = Some(snapshot("cpu-hotplug", 2, cpus(json!([]))));
    recorded.exported();
    let state = &mut recorded.adopted.state;
    state.pci_hotplug = Some(snapshot("pci-hotplug", 1, slots(8)));
    refused(&recorded, &["PCI hot-plug: ", "0x8"]);
    let several = json!({"segments": [slots(0), slots(4)], "selected": 1});
    recorded.adopted.state.pci_hotplug = Some(snapshot("pci-hotplug", 2, several));
    refused(&recorded, &["PCI hot-plug: ", "segment 1"]);
    recorded.adopted.state.pci_hotplug = None;
    recorded.adopted.state.cpu_hotplug = Some(snapshot("cpu-hotplug", 2, cpus(json!([1]))));
    refused(&recorded, &["vCPU hot-plug: "]);
    recorded.adopted.state.cpu_hotplug = None;
    recorded.adopted.state.legacy.get_mut("ged").unwrap().data = json!({"pending": 8});
    refused(&recorded, &["the event device: ", "0x8"]);
}

#[test]
fn devices_in_a_state_that_it_does_not_have() {
    type Change = fn(&mut VirtioPciState);
    let changes: [(&str, &str, Change); 12] = [
        ("_disk0", "needs a reset", |state| state.common.status |= 0x40),
        ("_disk0", "whether it runs: false", |state| state.common.active = false),
        ("_disk0", "above bit 63", |state| state.common.driver_features_beyond = true),
        ("_disk0", "not aligned", |state| state.queues[0].desc_gpa = 0x1008),
        ("_disk0", "not in memory", |state| state.queues[0].device_gpa = 1 << 40),
        ("_disk0", "not finished", |state| {
            state.queues[0].progress.as_mut().unwrap().next_avail += 1;
        }),
        ("__rng", "not finished", |state| {
            let progress = state.queues[0].progress.as_mut().unwrap();
            (progress.next_avail, progress.next_used) = (9, 9);
        }),
        ("_net2", "queues, and 3 of a size", |state| {
            state.queues.pop();
        }),
        ("_net2", "has changed its offloads", |state| state.device.data["offloads"] = json!(0)),
        ("_net2", "its state is version 9", |state| state.device.version = 9),
        ("__balloon", "a pattern", |state| state.device.data["poison"] = json!(1)),
        ("_disk0", "the guest is moving it", |state| state.config.registers[4] = 0xfff8_0000),
    ];
    for (id, expected, change) in changes {
        let mut recorded = all_devices();
        recorded.change(id, change);
        refused(&recorded, &[&format!("device '{id}'"), expected]);
    }
    let mut recorded = all_devices();
    recorded.devices.remove("__rng");
    refused(&recorded, &["device '__rng'", "does not have it"]);
    let mut recorded = all_devices();
    recorded.adopted.state.legacy.insert("vmgenid".to_owned(), snapshot("vmgenid", 1, json!({})));
    refused(&recorded, &["vmgenid: "]);
}

#[test]
fn a_network_whose_driver_uses_fewer_pairs_than_there_are() {
    let mut recorded = all_devices();
    recorded.devices.get_mut("_net2").unwrap().config[8] = 2;
    refused(&recorded, &["device '_net2'", "1 of 2 queue pairs"]);
}
