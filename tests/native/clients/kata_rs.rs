// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kata's runtime in Rust: cloud-hypervisor's client crate on one connection for the life of the VM, and
//! types of its own for what it sends and reads.
//!
//! The VMM's standard output and error are pipes; the working directory is `/`.

use std::os::fd::AsFd as _;

use serde_json::{Value, json};

use super::typed::{
    May::{Be, BeNull, Miss},
    Member, Type, read,
};
use super::upstream::{Connection, Outcome};
use super::{Place, ends, kata_slot, kata_vcpus, reasons, start, wait_for_socket};
use crate::harness::taps::{Tap, taps_of};
use crate::harness::vmm::RAM_FILE;
use crate::harness::{Suite, Vmm, image};

pub fn add(suite: &mut Suite) {
    suite.add("clients::kata_rs_runs_a_sandbox", sandbox);
    suite.add("clients::kata_rs_restores_a_template", template);
}

const VM_INFO: &[Member] = &[
    ("config", Be, Type::Struct(VM_CONFIG)),
    ("state", Be, Type::OneOf(&["Created", "Running", "Shutdown", "Paused"])),
    ("memory_actual_size", BeNull, Type::Uint(64)),
];
const VM_CONFIG: &[Member] = &[
    ("cpus", Miss, Type::Struct(CPUS)),
    ("memory", Miss, Type::Struct(MEMORY)),
    ("payload", BeNull, Type::Struct(PAYLOAD)),
    ("disks", BeNull, Type::List(&Type::Struct(DISK))),
    ("net", BeNull, Type::List(&Type::Struct(NET))),
    ("rng", Miss, Type::Struct(&[("src", Be, Type::Text), ("iommu", Miss, Type::Bool)])),
    ("balloon", BeNull, Type::Struct(BALLOON)),
    ("serial", Be, Type::Struct(CONSOLE)),
    ("console", Be, Type::Struct(CONSOLE)),
    ("devices", BeNull, Type::List(&Type::Object)),
    ("iommu", Miss, Type::Bool),
    ("watchdog", Miss, Type::Bool),
    ("platform", BeNull, Type::Struct(&[("num_pci_segments", Be, Type::Uint(16))])),
];
const CPUS: &[Member] = &[
    ("boot_vcpus", Be, Type::Uint(32)),
    ("max_vcpus", Be, Type::Uint(32)),
    ("topology", BeNull, Type::Struct(TOPOLOGY)),
    ("kvm_hyperv", Miss, Type::Bool),
    ("nested", BeNull, Type::Bool),
    ("max_phys_bits", Be, Type::Uint(8)),
    ("affinity", BeNull, Type::List(&Type::Object)),
    ("features", Miss, Type::Struct(&[("amx", Miss, Type::Bool)])),
];
const TOPOLOGY: &[Member] = &[
    ("threads_per_core", Be, Type::Uint(16)),
    ("cores_per_die", Be, Type::Uint(16)),
    ("dies_per_package", Be, Type::Uint(16)),
    ("packages", Be, Type::Uint(16)),
];
const MEMORY: &[Member] = &[
    ("size", Be, Type::Uint(64)),
    ("mergeable", Miss, Type::Bool),
    ("hotplug_method", Miss, Type::OneOf(&["Acpi", "VirtioMem"])),
    ("hotplug_size", BeNull, Type::Uint(64)),
    ("hotplugged_size", BeNull, Type::Uint(64)),
    ("shared", Miss, Type::Bool),
    ("hugepages", Miss, Type::Bool),
    ("hugepage_size", BeNull, Type::Uint(64)),
    ("prefault", Miss, Type::Bool),
    ("zones", BeNull, Type::List(&Type::Struct(ZONE))),
];
const ZONE: &[Member] = &[
    ("id", Be, Type::Text),
    ("size", Be, Type::Uint(64)),
    ("file", BeNull, Type::Text),
    ("shared", Miss, Type::Bool),
    ("hugepages", Miss, Type::Bool),
    ("prefault", Miss, Type::Bool),
];
const PAYLOAD: &[Member] = &[
    ("firmware", BeNull, Type::Text),
    ("kernel", BeNull, Type::Text),
    ("cmdline", BeNull, Type::Text),
    ("initramfs", BeNull, Type::Text),
    ("host_data", BeNull, Type::Text),
];
const DISK: &[Member] = &[
    ("path", BeNull, Type::Text),
    ("readonly", Miss, Type::Bool),
    ("direct", Miss, Type::Bool),
    ("iommu", Miss, Type::Bool),
    ("num_queues", Be, Type::Uint(64)),
    ("queue_size", Be, Type::Uint(16)),
    ("vhost_user", Miss, Type::Bool),
    ("vhost_socket", BeNull, Type::Text),
    ("id", BeNull, Type::Text),
    ("disable_io_uring", Miss, Type::Bool),
    ("pci_segment", Miss, Type::Uint(16)),
    ("sparse", Miss, Type::Bool),
    ("image_type", Miss, Type::OneOf(&["FixedVhd", "Qcow2", "Raw", "Vhdx", "Unknown"])),
];
const NET: &[Member] = &[
    ("tap", BeNull, Type::Text),
    ("ip", Be, Type::Ipv4),
    ("mask", Be, Type::Ipv4),
    ("mac", Be, Type::Text),
    ("host_mac", BeNull, Type::Text),
    ("mtu", BeNull, Type::Uint(16)),
    ("iommu", Miss, Type::Bool),
    ("num_queues", Be, Type::Uint(64)),
    ("queue_size", Be, Type::Uint(16)),
    ("vhost_user", Miss, Type::Bool),
    ("vhost_mode", Miss, Type::OneOf(&["Client", "Server"])),
    ("id", BeNull, Type::Text),
    ("fds", BeNull, Type::List(&Type::Int(32))),
    ("pci_segment", Miss, Type::Uint(16)),
];
const BALLOON: &[Member] = &[
    ("size", Be, Type::Uint(64)),
    ("deflate_on_oom", Miss, Type::Bool),
    ("free_page_reporting", Miss, Type::Bool),
];
const CONSOLE: &[Member] = &[
    ("file", BeNull, Type::Text),
    ("mode", Be, Type::OneOf(&["Off", "Pty", "Tty", "File", "Null"])),
    ("iommu", Miss, Type::Bool),
];

/// The runtime's end.
struct Runtime(Connection);

impl Runtime {
    fn call(&mut self, name: &str, body: Option<&Value>) -> Outcome {
        self.0.call("PUT", name, body.map(Value::to_string).as_deref(), &[])
    }

    #[track_caller]
    fn put(&mut self, name: &str, body: Option<&Value>) -> Option<Value> {
        let body = self.call(name, body).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        body.map(|body| serde_json::from_str(&body).expect("JSON"))
    }

    /// It writes this one in several lines.
    fn create(&mut self, config: &Value) -> Outcome {
        let body = serde_json::to_string_pretty(config).expect("JSON");
        self.0.call("PUT", "vm.create", Some(&body), &[])
    }

    #[track_caller]
    fn info(&mut self, state: &str) -> Value {
        let body = self.0.call("GET", "vm.info", None, &[]).expect("an answer");
        let info = serde_json::from_str(&body.expect("a body")).expect("JSON");
        read(&info, &Type::Struct(VM_INFO)).unwrap_or_else(|error| panic!("{error}: {info}"));
        assert_eq!(info["state"], state);
        info
    }
}

fn launch(place: &Place) -> (Vmm, Runtime) {
    let vmm = start(&["--api-socket", &place.text("ch-api.sock")]);
    wait_for_socket(&place.at("ch-api.sock"));
    let mut runtime = Runtime(Connection::open(&place.at("ch-api.sock")));
    let ping = runtime.0.call("GET", "vmm.ping", None, &[]).expect("an answer").expect("a body");
    let ping: Value = serde_json::from_str(&ping).expect("JSON");
    assert!(ping["features"].as_array().expect("a list").iter().all(Value::is_string), "{ping}");
    (vmm, runtime)
}

/// The configuration of a sandbox.
fn config(place: &Place, memory: &Value) -> Value {
    json!({
        "cpus": {
            "boot_vcpus": 1, "max_vcpus": 2,
            "topology": {
                "threads_per_core": 1, "cores_per_die": 2, "dies_per_package": 1, "packages": 1,
            },
            "kvm_hyperv": false, "max_phys_bits": 46, "features": {"amx": false},
        },
        "memory": memory,
        "payload": {
            "firmware": null, "kernel": image(), "cmdline": "workload=random-write mem=32M",
            "initramfs": null, "mrconfigid": null, "host_data": null,
        },
        "disks": [disk(&place.disk("image"), true, "Unknown")],
        "rng": {"src": "/dev/urandom", "iommu": false},
        "balloon": {"size": 0, "deflate_on_oom": false, "free_page_reporting": true},
        "fs": [],
        "serial": {"file": null, "mode": "Off", "iommu": false},
        "console": {"file": null, "mode": "Off", "iommu": false},
        "devices": [],
        "vsock": {
            "cid": 3, "socket": place.text("ch.sock"), "iommu": false, "id": null,
            "pci_segment": 0,
        },
        "iommu": false, "watchdog": false,
    })
}

fn disk(path: &str, readonly: bool, image_type: &str) -> Value {
    json!({
        "path": path, "readonly": readonly, "direct": false, "iommu": false, "num_queues": 1,
        "queue_size": 128, "vhost_user": false, "vhost_socket": null,
        "rate_limiter_config": null, "id": null, "disable_io_uring": false, "pci_segment": 0,
        "sparse": true, "image_type": image_type,
    })
}

/// Memory of a sandbox that grows in the one way that there is.
fn memory() -> Value {
    json!({
        "size": 256_u64 << 20, "mergeable": false, "hotplug_method": "VirtioMem",
        "hotplug_size": 256_u64 << 20, "shared": true, "hugepages": false, "prefault": false,
    })
}

fn sandbox() {
    let place = Place::new();
    let (vmm, mut runtime) = launch(&place);
    let whole = config(&place, &memory());
    assert_eq!(runtime.create(&whole), Ok(None));
    let tap = Tap::open();
    // The numbers of its descriptors stand in the body, too.
    let net = json!({
        "ip": "192.168.249.1", "mask": "255.255.255.0", "mac": "2e:89:a8:e4:92:01",
        "iommu": false, "num_queues": 2, "queue_size": 256, "vhost_user": false,
        "vhost_mode": "Client", "fds": [17],
    });
    let added = runtime.0.call("PUT", "vm.add-net", Some(&net.to_string()), &[tap.fd.as_fd()]);
    assert_eq!(added, Ok(None));
    runtime.put("vm.boot", None);
    assert_eq!(taps_of(&vmm), [tap.close()]);
    vmm.wait_for_heartbeat();
    assert_eq!(kata_vcpus(&vmm), 1);
    let info = runtime.info("Running");
    assert_eq!(info["config"]["memory"]["size"], 256_u64 << 20);
    let body = disk(&place.disk("volume"), false, "Raw");
    let added = runtime.put("vm.add-disk", Some(&body)).expect("an answer");
    kata_slot(added["bdf"].as_str().expect("a place"));
    runtime.put("vm.remove-device", Some(&json!({"id": added["id"]})));
    let resize = |vcpus: Value, ram: Value| json!({"desired_vcpus": vcpus, "desired_ram": ram, "desired_balloon": null});
    runtime.put("vm.resize", Some(&resize(Value::Null, json!(384_u64 << 20))));
    runtime.put("vm.resize", Some(&resize(json!(2), Value::Null)));
    assert_eq!(kata_vcpus(&vmm), 2);
    let more = runtime.call("vm.resize", Some(&resize(json!(3), Value::Null)));
    assert!(matches!(more, Err((400, _))), "{more:?}");
    runtime.put("vm.pause", None);
    vmm.verify_paused();
    runtime.info("Paused");
    runtime.put("vm.resume", None);
    vmm.wait_for_heartbeat();
    runtime.put("vmm.shutdown", None);
    ends(vmm);
}

/// A VM is saved once and restored by others. They change the configuration of a snapshot, and take two of its
/// files to a place of their own, as memory is in a file of theirs with cloud-hypervisor. Here a snapshot is
/// whole and as it was written, or refused with the file that is not; the VM comes from the whole one.
fn template() {
    let place = Place::new();
    let (vmm, mut runtime) = launch(&place);
    std::fs::write(place.at(RAM_FILE), "").expect("a file");
    let zone = json!({
        "id": "mem0", "size": 192_u64 << 20, "file": place.text(RAM_FILE), "shared": true,
        "hugepages": false, "hugepage_size": null, "host_numa_node": null, "hotplug_size": null,
        "hotplugged_size": null, "prefault": false,
    });
    let memory = json!({
        "size": 0, "mergeable": false, "hotplug_method": "Acpi", "shared": true,
        "hugepages": false, "prefault": false, "zones": [zone],
    });
    let config = config(&place, &memory);
    assert_eq!(runtime.create(&config), Ok(None));
    runtime.put("vm.boot", None);
    vmm.wait_for_heartbeat();
    runtime.put("vm.pause", None);
    let url = |name: &str| json!({"source_url": format!("file://{}", place.text(name))});
    let folder = |name: &str| {
        std::fs::create_dir(place.at(name)).expect("a folder");
        place.at(name)
    };
    let whole = folder("template");
    let to = json!({"destination_url": url("template")["source_url"]});
    runtime.put("vm.snapshot", Some(&to));
    runtime.put("vmm.shutdown", None);
    ends(vmm);

    let (vmm, mut runtime) = launch(&place);
    for (name, files, missing) in [
        ("part", &["config.json", "state.json"][..], "manifest.json"),
        ("changed", &["config.json", "state.json", "manifest.json"], "config.json"),
    ] {
        let copy = folder(name);
        for file in files {
            std::fs::copy(whole.join(file), copy.join(file)).expect("a copy");
        }
        let text = std::fs::read_to_string(copy.join("config.json")).expect("the configuration");
        let mut config: Value = serde_json::from_str(&text).expect("JSON");
        config["memory"]["shared"] = json!(false);
        config["memory"]["zones"][0]["shared"] = json!(false);
        std::fs::write(copy.join("config.json"), config.to_string()).expect("written");
        let (_, body) = runtime.call("vm.restore", Some(&url(name))).expect_err("not as written");
        assert!(reasons(&body).contains(missing), "{body}");
    }
    runtime.put("vm.restore", Some(&url("template")));
    runtime.info("Paused");
    runtime.put("vm.resume", None);
    vmm.wait_for_heartbeat();
    runtime.put("vmm.shutdown", None);
    ends(vmm);
}
