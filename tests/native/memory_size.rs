// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory that may grow, through the API: sizes that are refused, and one that is kept through a reboot
//! and a move. The test guest has no driver for it; what guests with one do is for the lab.

use serde_json::Value;

use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder};

pub fn add(suite: &mut Suite) {
    suite.add("memory_size::impossible_sizes_are_refused", impossible_sizes);
    suite.add("memory_size::zones_have_sizes_of_their_own", zones);
    suite.add("memory_size::sizes_from_before_boot_are_those_that_boot_has", before_boot);
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = format!("memory_size::size_is_kept_through_a_reboot_and_{}", mode.name());
        suite.add(&name, move || size_is_kept(mode));
        let name = format!("memory_size::balloon_larger_than_boot_memory_by_{}", mode.name());
        suite.add(&name, move || large_balloon(mode));
        let name = format!("memory_size::memory_devices_move_by_{}", mode.name());
        suite.add(&name, move || memory_devices_move(mode));
    }
    suite.add("memory_size::memory_devices_are_added_and_kept", memory_devices);
}

/// A balloon that fits into the memory that the guest may have, and not into what it boots with, takes
/// nothing from a guest that has not plugged in more, and is in the way of nothing.
fn large_balloon(mode: Mode) {
    let memory = format!("{MEMORY},hotplugged_size=1G");
    let source = VmmBuilder::guest(1, &memory, "workload=random-write mem=64M")
        .with(&["--balloon", "size=512M"])
        .start();
    source.wait_for_heartbeat();
    let disk = source.path("disk");
    std::fs::File::create(&disk).and_then(|file| file.set_len(1 << 20)).expect("a file");
    let kept = |vmm: &Vmm| {
        let info = info(vmm);
        assert_eq!(info["config"]["balloon"]["size"], 512 << 20);
        assert_eq!(info["balloon"]["target_bytes"], 0, "1 GiB is still to come");
        assert_eq!(info["memory_actual_size"], 192 << 20);
    };
    kept(&source);
    let body = serde_json::json!({ "path": disk, "id": "late" }).to_string();
    source.api().put("vm.add-disk", &body).ok();
    source.api().put("vm.reboot", "").ok();
    source.wait_for_heartbeat();
    kept(&source);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    kept(&destination);
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

const MEMORY: &str = "size=192M,shared=on,hotplug_method=virtio-mem,hotplug_size=4G";

fn info(vmm: &Vmm) -> Value {
    vmm.api().get("vm.info").json()
}

fn refused(vmm: &Vmm, request: &str, body: &str, why: &str) {
    let answer = vmm.api().put(request, body);
    assert!(answer.status == 400 && answer.body.contains(why), "{body}: {answer:?}");
}

fn impossible_sizes() {
    let vmm = Vmm::boot(1, MEMORY, "workload=idle prefill=0");
    let ram = |bytes: u64| format!(r#"{{"desired_ram":{bytes}}}"#);
    refused(&vmm, "vm.resize", &ram(128 << 20), "since the guest booted");
    refused(&vmm, "vm.resize", &ram(5 << 30), "room for 4294967296");
    refused(&vmm, "vm.resize", &ram((193 << 20) + 4096), "blocks of 2097152");
    let zone = |id: &str| format!(r#"{{"id":"{id}","desired_ram":1073741824}}"#);
    refused(&vmm, "vm.resize-zone", &zone("other"), "no memory zone 'other'");
    assert_eq!(info(&vmm)["config"]["memory"]["hotplugged_size"], Value::Null);
    vmm.shut_down();
    let fixed = Vmm::boot(1, "size=192M,shared=on", "workload=idle prefill=0");
    refused(&fixed, "vm.resize", &ram(1 << 30), "hotplug_size");
    fixed.api().put("vm.resize", &ram(192 << 20)).ok();
    fixed.shut_down();
}

fn zones() {
    let vmm = VmmBuilder::guest(1, "size=0,hotplug_method=virtio-mem", "workload=idle prefill=0")
        .with(&["--memory-zone", "id=a,size=128M", "id=b,size=64M,hotplug_size=1G"])
        .start();
    let zone = |id: &str, mib: u64| format!(r#"{{"id":"{id}","desired_ram":{}}}"#, mib << 20);
    refused(&vmm, "vm.resize", r#"{"desired_ram":1073741824}"#, "vm.resize-zone");
    refused(&vmm, "vm.resize-zone", &zone("a", 256), "zone 'a' cannot change");
    vmm.api().put("vm.resize-zone", &zone("b", 576)).ok();
    let zones = info(&vmm)["config"]["memory"]["zones"].clone();
    assert_eq!(zones[1]["hotplugged_size"], 512 << 20);
    assert_eq!(info(&vmm)["memory_actual_size"], 192 << 20, "the guest has no driver");
    vmm.shut_down();
}

fn size_is_kept(mode: Mode) {
    let source = Vmm::boot(1, MEMORY, "workload=random-write mem=64M");
    source.wait_for_heartbeat();
    source.remote_ok(&["resize", "--memory", "1216M"]);
    let kept = |vmm: &Vmm| {
        let info = info(vmm);
        assert_eq!(info["config"]["memory"]["hotplugged_size"], 1 << 30);
        // At another place it would be another device for the guest.
        assert_eq!(info["device_tree"]["_virtio-pci-__mem_mem0"]["pci_bdf"], "0000:00:1f.0");
    };
    kept(&source);
    source.api().put("vm.reboot", "").ok();
    source.wait_for_heartbeat();
    kept(&source);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    kept(&destination);
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

const DEVICES: &str = "size=192M,shared=on,hotplug_size=2G";

fn memory_devices() {
    let vmm = Vmm::boot(1, DEVICES, "workload=random-write mem=64M");
    vmm.wait_for_heartbeat();
    let ram = |mib: u64| format!(r#"{{"desired_ram":{}}}"#, mib << 20);
    let has = |mib: u64, hotplugged: &Value| {
        let info = info(&vmm);
        assert_eq!(info["memory_actual_size"], mib << 20);
        assert_eq!(&info["config"]["memory"]["hotplugged_size"], hotplugged);
    };
    vmm.api().put("vm.resize", &ram(128)).ok();
    has(192, &Value::Null);
    refused(&vmm, "vm.resize", &ram(192 + 64), "multiple of 134217728");
    refused(&vmm, "vm.resize", &ram(192 + 2176), "room for 2147483648");
    let zone = r#"{"id":"mem0","desired_ram":335544320}"#;
    refused(&vmm, "vm.resize-zone", zone, "hotplug_method=virtio-mem");
    has(192, &Value::Null);
    vmm.api().put("vm.resize", &ram(192)).ok();
    has(192, &Value::Null);
    for device in 1..=8 {
        vmm.api().put("vm.resize", &ram(192 + 128 * device)).ok();
        has(192 + 128 * device, &Value::from((128 * device) << 20));
    }
    refused(&vmm, "vm.resize", &ram(192 + 128 * 9), "8 times");
    vmm.api().put("vm.resize", &ram(192)).ok();
    has(192 + 1024, &Value::from(1 << 30));
    vmm.wait_for_event("memory-resized");
    // After a reboot all is one device.
    vmm.api().put("vm.reboot", "").ok();
    vmm.wait_for_heartbeat();
    has(192 + 1024, &Value::from(1 << 30));
    vmm.remote_ok(&["resize", "--memory", "2240M"]);
    has(192 + 2048, &Value::from(2_u64 << 30));
    vmm.verify();
    vmm.shut_down();
}

fn memory_devices_move(mode: Mode) {
    let source = Vmm::boot(1, DEVICES, "workload=random-write mem=64M");
    source.wait_for_heartbeat();
    for mib in [448, 1216] {
        source.remote_ok(&["resize", "--memory", &format!("{mib}M")]);
    }
    let kept = |vmm: &Vmm, mib: u64| assert_eq!(info(vmm)["memory_actual_size"], mib << 20);
    kept(&source, 1216);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    kept(&destination, 1216);
    destination.wait_for_work(5_000);
    destination.remote_ok(&["resize", "--memory", "1344M"]);
    kept(&destination, 1344);
    // Back, from several memory slots that lie behind each other.
    let home = Vmm::empty();
    migrate(destination, &home, Transport::Tcp, mode);
    kept(&home, 1344);
    home.wait_for_work(5_000);
    home.verify();
    let folder = home.path("snapshot");
    std::fs::create_dir(&folder).expect("a folder");
    let url = format!("file://{}", folder.display());
    home.api().put("vm.pause", "").ok();
    let body = serde_json::json!({ "destination_url": url }).to_string();
    home.api().put("vm.snapshot", &body).ok();
    let restored = Vmm::empty();
    restored.remote_ok(&["restore", &format!("source_url={url},resume=true")]);
    restored.wait_for_event("restored");
    kept(&restored, 1344);
    restored.wait_for_heartbeat();
    restored.verify();
    restored.shut_down();
    home.shut_down();
}

/// What `vm.resize` and `vm.resize-zone` say before the guest runs is what it boots with.
fn before_boot() {
    let vmm = Vmm::empty();
    let mut config: Value =
        serde_json::from_str(&crate::lifecycle::config(128)).expect("a configuration");
    config["cpus"]["max_vcpus"] = Value::from(4);
    config["balloon"] = serde_json::json!({ "size": 0 });
    vmm.api().put("vm.create", &config.to_string()).ok();
    let sizes = serde_json::json!({
        "desired_vcpus": 3, "desired_ram": 192 << 20, "desired_balloon": 1 << 20,
    });
    vmm.api().put("vm.resize", &sizes.to_string()).ok();
    refused(&vmm, "vm.resize", r#"{"desired_vcpus":5}"#, "maximum number");
    refused(&vmm, "vm.resize", "{}", "say which");
    let zone = r#"{"id":"b","desired_ram":1073741824}"#;
    refused(&vmm, "vm.resize-zone", zone, "'b'");
    for is_booted in [false, true] {
        if is_booted {
            vmm.api().put("vm.boot", "").ok();
            vmm.wait_for_heartbeat();
        }
        let info = info(&vmm);
        let config = &info["config"];
        assert_eq!(
            (&config["cpus"]["boot_vcpus"], &config["memory"]["size"]),
            (&Value::from(3), &Value::from(192 << 20))
        );
        assert_eq!(config["balloon"]["size"], 1 << 20);
        assert!(!is_booted || info["balloon"]["target_bytes"] == 1 << 20, "{info}");
    }
    let names = crate::harness::process::thread_names(vmm.pid());
    assert_eq!(names.iter().filter(|name| name.starts_with("vcpu")).count(), 3, "{names:?}");
    vmm.api().put("vm.delete", "").ok();
    config["memory"] = serde_json::json!({ "size": 0, "zones": [
        { "id": "a", "size": 128 << 20, "shared": true },
        { "id": "b", "size": 64 << 20, "shared": true },
    ] });
    vmm.api().put("vm.create", &config.to_string()).ok();
    vmm.api().put("vm.resize-zone", r#"{"id":"b","desired_ram":134217728}"#).ok();
    refused(&vmm, "vm.resize", r#"{"desired_ram":1073741824}"#, "vm.resize-zone");
    vmm.api().put("vm.boot", "").ok();
    vmm.wait_for_heartbeat();
    assert_eq!(info(&vmm)["config"]["memory"]["zones"][1]["size"], 128 << 20);
    vmm.shut_down();
}
