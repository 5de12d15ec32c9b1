// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! cloud-hypervisor's own `ch-remote` and the client crate under it, which other programs use too.
//!
//! The request goes out in pieces, descriptors with the first. The answer is read 256 bytes at a time, each
//! of which must be whole characters; what stands between `HTTP/1.1 ` and the end of that line is a number; a
//! body is there if there is a `Content-Length`, spelled so.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Place, ends, reasons};
use crate::harness::taps::{Tap, interface_exists, send_with, taps_of};
use crate::harness::{Suite, Vmm, VmmBuilder, image};

pub fn add(suite: &mut Suite) {
    suite.add("clients::ch_remote_from_create_to_shutdown_vmm", life);
    suite.add("clients::ch_remote_saves_and_moves_a_vm", moves);
    suite.add("clients::ch_remote_understands_every_refusal", refusals);
    suite.add("clients::ch_remote_reads_characters_that_are_not_ascii", not_ascii);
}

/// What a call gave: the body, if there is one, or the status and the body of a refusal.
pub type Outcome = Result<Option<String>, (u16, String)>;

/// A connection, for one call or for many.
pub struct Connection(UnixStream);

impl Connection {
    pub fn open(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(100))).expect("a limit");
        Self(stream)
    }

    /// Sends a request and reads the answer; panics where the client gives up.
    #[track_caller]
    pub fn call(
        &mut self,
        method: &str,
        name: &str,
        body: Option<&str>,
        fds: &[BorrowedFd<'_>],
    ) -> Outcome {
        let head =
            format!("{method} /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n");
        send_with(&self.0, &head, fds);
        if let Some(body) = body {
            let length = format!("Content-Length: {}\r\n", body.len());
            self.0.write_all(length.as_bytes()).expect("sent");
        }
        self.0.write_all(b"\r\n").expect("sent");
        if let Some(body) = body {
            self.0.write_all(body.as_bytes()).expect("sent");
        }
        self.answer(name)
    }

    #[track_caller]
    fn answer(&mut self, name: &str) -> Outcome {
        let mut text = String::new();
        let body = loop {
            let mut piece = [0; 256];
            let count = self.0.read(&mut piece).expect("an answer");
            assert!(count > 0, "{name}: closed after '{text}'");
            let piece = std::str::from_utf8(&piece[..count]);
            text.push_str(piece.unwrap_or_else(|error| panic!("{name}: the client ends: {error}")));
            let Some(end) = text.find("\r\n\r\n") else { continue };
            let Some((_, rest)) = text.split_once("Content-Length: ") else { break None };
            let length: usize = until_cr(rest).trim().parse().expect("a length");
            let body = &text[end + 4..];
            if body.len() >= length {
                break Some(body.to_owned());
            }
        };
        let status = text.strip_prefix("HTTP/1.1 ").expect("the protocol");
        let status = until_cr(status).trim().parse();
        match status.unwrap_or_else(|error| panic!("{name}: {error} in '{text}'")) {
            200 | 204 => Ok(body),
            status => Err((status, body.unwrap_or_default())),
        }
    }
}

fn until_cr(text: &str) -> &str {
    text.split('\r').next().unwrap_or_default()
}

/// One command of `ch-remote`, which has a connection of its own.
#[track_caller]
fn put(vmm: &Vmm, name: &str, body: Option<&Value>) -> Option<String> {
    let body = body.map(Value::to_string);
    let outcome = Connection::open(&vmm.socket()).call("PUT", name, body.as_deref(), &[]);
    outcome.unwrap_or_else(|(status, body)| panic!("{name}: {status} {body}\n{}", vmm.output()))
}

#[track_caller]
fn get(vmm: &Vmm, name: &str) -> Value {
    let outcome = Connection::open(&vmm.socket()).call("GET", name, None, &[]);
    let body = outcome.expect("an answer").expect("a body");
    serde_json::from_str(&body).expect("JSON")
}

/// The configuration of a VM as version 53 writes it: every field, those that say nothing too.
fn config(disk: &str) -> Value {
    let common = |more: Value| {
        let mut all = json!({"pci_segment": 0});
        let members = more.as_object().expect("an object").clone();
        all.as_object_mut().expect("an object").extend(members);
        all
    };
    json!({
        "cpus": {
            "boot_vcpus": 2, "max_vcpus": 2, "kvm_hyperv": false, "max_phys_bits": 46,
            "features": {"amx": false}, "nested": true, "core_scheduling": "Vm", "profile": "Host",
        },
        "memory": {
            "size": 256_u64 << 20, "mergeable": false, "hotplug_method": "VirtioMem",
            "hotplug_size": 256_u64 << 20, "shared": true, "hugepages": false, "prefault": false,
            "reserve": false, "thp": true,
        },
        "payload": {"kernel": image(), "cmdline": "workload=random-write mem=32M"},
        "rate_limit_groups": null,
        "disks": [common(json!({
            "path": disk, "readonly": false, "direct": false, "num_queues": 1, "queue_size": 128,
            "vhost_user": false, "disable_io_uring": false, "disable_aio": false,
            "backing_files": false, "sparse": true, "image_type": "Raw",
            "lock_granularity": "ByteRange",
        }))],
        "net": null,
        "rng": common(json!({"src": "/dev/urandom"})),
        "balloon": common(json!({
            "size": 0, "deflate_on_oom": false, "free_page_reporting": false,
        })),
        "fs": null, "generic_vhost_user": null, "pmem": null,
        "serial": {"mode": "Null"},
        "console": common(json!({"mode": "Off"})),
        "debug_console": {"mode": "Off", "iobase": 233},
        "devices": null, "user_devices": null, "vdpa": null, "vsock": null,
        "iommu": false, "numa": null, "watchdog": false, "rtc": null, "pvpanic": false,
        "pci_segments": null, "platform": null, "tpm": null, "preserved_fds": null,
        "landlock_enable": false, "landlock_rules": null,
    })
}

fn life() {
    let place = Place::new();
    let vmm = Vmm::empty();
    assert_eq!(get(&vmm, "vmm.ping")["pid"], vmm.pid());
    assert_eq!(put(&vmm, "vm.create", Some(&config(&place.disk("disk")))), None);
    let created = get(&vmm, "vm.info");
    assert_eq!(created["state"], "Created");
    // What a client reads it can send back.
    put(&vmm, "vm.delete", None);
    put(&vmm, "vm.create", Some(&created["config"]));
    let tap = Tap::open();
    let net = json!({
        "pci_segment": 0, "id": "lan", "mac": "2e:89:a8:e4:92:01", "num_queues": 2,
        "queue_size": 256, "vhost_user": false, "vhost_mode": "Client", "offload_tso": true,
        "offload_ufo": true, "offload_csum": true,
    });
    let added = Connection::open(&vmm.socket()).call(
        "PUT",
        "vm.add-net",
        Some(&net.to_string()),
        &[tap.fd.as_fd()],
    );
    assert_eq!(added, Ok(None));
    put(&vmm, "vm.boot", None);
    let name = tap.close();
    assert!(interface_exists(&name) && taps_of(&vmm) == [name.as_str()]);
    vmm.wait_for_heartbeat();
    let counters = get(&vmm, "vm.counters");
    assert!(counters["lan"]["tx_frames"].is_u64(), "{counters}");
    tree(&vmm);
    let added = put(
        &vmm,
        "vm.add-disk",
        Some(&json!({
            "pci_segment": 0, "id": "more", "path": place.disk("more"), "readonly": true,
            "direct": false, "num_queues": 1, "queue_size": 128, "vhost_user": false,
            "disable_io_uring": false, "disable_aio": false, "backing_files": false,
            "sparse": true, "image_type": "Raw", "lock_granularity": "ByteRange",
        })),
    );
    let added: Value = serde_json::from_str(&added.expect("a body")).expect("JSON");
    assert_eq!(added["id"], "more");
    resize(&vmm);
    put(&vmm, "vm.remove-device", Some(&json!({"id": "more"})));
    put(&vmm, "vm.pause", None);
    assert_eq!(get(&vmm, "vm.info")["state"], "Paused");
    put(&vmm, "vm.resume", None);
    put(&vmm, "vm.power-button", None);
    put(&vmm, "vm.reboot", None);
    vmm.wait_for_heartbeat();
    vmm.verify();
    put(&vmm, "vm.shutdown", None);
    put(&vmm, "vm.delete", None);
    put(&vmm, "vmm.shutdown", None);
    ends(vmm);
}

/// Each device on the bus has a node, a virtio device is the child of its transport, and BARs lie apart.
fn tree(vmm: &Vmm) {
    let info = get(vmm, "vm.info");
    let tree = info["device_tree"].as_object().expect("a tree");
    let mut bars = Vec::new();
    for id in ["_disk0", "lan", "__rng", "__balloon", "__mem_mem0"] {
        let transport = format!("_virtio-pci-{id}");
        assert_eq!(tree[id]["parent"], transport.as_str(), "{info}");
        assert_eq!(tree[&transport]["children"], json!([id]), "{info}");
        assert!(tree[&transport]["pci_bdf"].is_string(), "{info}");
        for resource in tree[&transport]["resources"].as_array().expect("resources") {
            let bar = &resource["PciBar"];
            let number = |key: &str| bar[key].as_u64().expect("a number");
            assert!(number("size").is_power_of_two() && number("base") > 0, "{info}");
            bars.push((number("base"), number("base") + number("size")));
        }
    }
    bars.sort_unstable();
    assert!(bars.len() >= 5, "{bars:?}");
    assert!(bars.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{bars:?}");
    assert!(tree.contains_key("__serial") && tree.contains_key("__ioapic"), "{info}");
}

fn resize(vmm: &Vmm) {
    let before = vmm.events().len();
    let wanted = |ram: Value, balloon: Value| json!({"desired_vcpus": null, "desired_ram": ram, "desired_balloon": balloon});
    put(vmm, "vm.resize", Some(&wanted(json!(384_u64 << 20), Value::Null)));
    put(vmm, "vm.resize", Some(&wanted(Value::Null, json!(1 << 20))));
    put(vmm, "vm.resize-zone", Some(&json!({"id": "mem0", "desired_ram": 256_u64 << 20})));
    let too_much = wanted(json!(1_u64 << 40), Value::Null).to_string();
    let refused = Connection::open(&vmm.socket()).call("PUT", "vm.resize", Some(&too_much), &[]);
    assert_eq!(refused.expect_err("it cannot be").0, 400);
    vmm.wait_for_later_events(before, &["resize-failed"]);
    let names = vmm.event_names();
    let told: Vec<_> = names[before..].iter().filter(|name| name.starts_with("resi")).collect();
    let pairs = ["resizing", "resized", "resizing", "resized", "resizing", "resized", "resizing"];
    assert!(told.iter().copied().eq(pairs.iter().chain(&["resize-failed"])), "{told:?}");
}

fn moves() {
    let place = Place::new();
    let vmm = VmmBuilder::guest(2, "size=192M,shared=on", "workload=random-write mem=64M").start();
    vmm.wait_for_work(1_000);
    put(&vmm, "vm.pause", None);
    let url = format!("file://{}", place.0.path().display());
    put(&vmm, "vm.snapshot", Some(&json!({"destination_url": url})));
    put(&vmm, "vmm.shutdown", None);
    ends(vmm);
    let mut vmm = Vmm::empty();
    put(
        &vmm,
        "vm.restore",
        Some(&json!({
            "source_url": url, "prefault": false, "memory_restore_mode": "Copy", "net_fds": null,
            "vfio_fds": null, "iommufd_fd": null, "resume": false, "zone_updates": [],
        })),
    );
    assert_eq!(get(&vmm, "vm.info")["state"], "Paused");
    put(&vmm, "vm.resume", None);
    vmm.wait_for_heartbeat();
    for mode in ["Precopy", "Postcopy"] {
        vmm = migrate(vmm, mode);
    }
    vmm.verify();
    put(&vmm, "vmm.shutdown", None);
    ends(vmm);
}

fn migrate(mut source: Vmm, mode: &str) -> Vmm {
    let destination = Vmm::empty();
    let socket = destination.socket();
    let body = json!({
        "receiver_url": "tcp:127.0.0.1:0", "tls_dir": null, "memory_mode": mode, "vfio_fds": null,
        "iommufd_fd": null, "zone_updates": [],
    });
    let reception = std::thread::spawn(move || {
        Connection::open(&socket).call("PUT", "vm.receive-migration", Some(&body.to_string()), &[])
    });
    let ready = destination.wait_for_event("migration-receive-ready");
    put(
        &source,
        "vm.send-migration",
        Some(&json!({
            "destination_url": ready["properties"]["address"], "local": false,
            "preserve_source": false, "downtime_ms": 300, "timeout_s": 3600,
            "timeout_strategy": "Cancel", "connections": 2, "tls_dir": null, "memory_mode": mode,
        })),
    );
    assert_eq!(reception.join().expect("the thread"), Ok(None));
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.wait_for_heartbeat();
    destination
}

fn refusals() {
    let vmm = VmmBuilder::guest(1, "size=128M,shared=on", "workload=idle").start();
    vmm.wait_for_heartbeat();
    // As cloud-hypervisor describes it: without a name.
    let socket = &json!({"socket": "/nowhere/s", "pci_segment": 1});
    let (name, body) = ("vm.add-user-device", socket.to_string());
    let mut connection = Connection::open(&vmm.socket());
    let (status, body) = connection.call("PUT", name, Some(&body), &[]).expect_err("a refusal");
    assert_eq!(status, 400, "{name}: {body}");
    assert!(reasons(&body).contains("_vfio_user0"), "{name}: {body}");
    // The connection is good for more.
    connection.call("GET", "vmm.ping", None, &[]).expect("an answer");
    put(&vmm, "vmm.shutdown", None);
    ends(vmm);
}

fn not_ascii() {
    let vmm = Vmm::empty();
    let mut config = config("/nowhere");
    // Wherever the pieces are cut, they are cut within a character, were they sent as they are.
    let cmdline = "§".repeat(900);
    config["payload"]["cmdline"] = json!(cmdline);
    config["disks"] = Value::Null;
    put(&vmm, "vm.create", Some(&config));
    for indent in ["", "x"] {
        let field = format!("{indent}{}", "§".repeat(400));
        let body = json!({"payload": {"kernel": "/k"}, &field: 1}).to_string();
        let refused = Connection::open(&vmm.socket()).call("PUT", "vm.create", Some(&body), &[]);
        let (status, body) = refused.expect_err("nothing is called so");
        assert!(status == 400 && reasons(&body).contains(&field), "{body}");
    }
    let info = get(&vmm, "vm.info");
    assert_eq!(info["config"]["payload"]["cmdline"], cmdline.as_str());
    put(&vmm, "vm.delete", None);
    put(&vmm, "vmm.shutdown", None);
    ends(vmm);
}
