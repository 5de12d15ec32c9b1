// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kata's runtime in Go: a generated client on Go's `net/http`, which keeps one connection, and a request
//! made by hand for the network devices, whose taps go with it.
//!
//! Every call has a limit, mostly of a second. Go reads headers in any spelling, takes the first word behind
//! the version for the status, and asks for gzip. Answers are read into types if their `Content-Type` is that
//! of JSON.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use super::typed::{May::BeNull, Member, Type, read};
use super::{Place, ends, kata_slot, kata_vcpus, reasons, start, without};
use crate::harness::taps::{Tap, send_with, taps_of};
use crate::harness::{Suite, Vmm, image, wait_for};

pub fn add(suite: &mut Suite) {
    suite.add("clients::kata_go_runs_a_sandbox", sandbox);
}

/// An answer as Go's library gives it.
#[derive(Debug)]
struct Response {
    status: u16,
    headers: BTreeMap<String, String>,
    body: String,
}

/// Reads an answer, by the rules of Go's `net/http`.
fn read_response(reader: &mut BufReader<UnixStream>) -> Response {
    let mut line = String::new();
    reader.read_line(&mut line).expect("a status line");
    let words = line.trim_end_matches(['\r', '\n']).split_once(' ');
    let (protocol, rest) = words.unwrap_or_else(|| panic!("malformed HTTP response '{line}'"));
    assert_eq!(protocol, "HTTP/1.1");
    let code = rest.trim_start().split(' ').next().unwrap_or_default();
    assert_eq!(code.len(), 3, "malformed HTTP status code in '{line}'");
    let status = code.parse().expect("malformed HTTP status code");
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).expect("a header");
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    // An answer without its length continues until the end of the connection, and that is the end of it.
    let length = match headers.get("content-length") {
        Some(length) => length.parse().expect("a length"),
        None if status == 204 => 0,
        None => panic!("{status} without a length"),
    };
    let mut body = vec![0; length];
    reader.read_exact(&mut body).expect("the body");
    Response { status, headers, body: String::from_utf8(body).expect("UTF-8") }
}

/// The generated client.
struct Client {
    socket: PathBuf,
    idle: Option<BufReader<UnixStream>>,
    /// Connections so far.
    dialled: usize,
}

impl Client {
    fn call(&mut self, method: &str, name: &str, body: Option<&Value>, limit_s: u64) -> Response {
        // It is made anew if the other end closed it, which must not happen.
        let mut reader = self.idle.take().unwrap_or_else(|| {
            self.dialled += 1;
            BufReader::new(UnixStream::connect(&self.socket).expect("a connection"))
        });
        let limit = Some(Duration::from_secs(limit_s));
        reader.get_ref().set_read_timeout(limit).expect("a limit");
        let answers = matches!(name, "vmm.ping" | "vm.info" | "vm.add-disk" | "vm.add-device");
        let mut head = format!(
            "{method} /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\n\
             User-Agent: OpenAPI-Generator/1.0.0/go\r\n"
        );
        // Its encoder puts a newline behind the value.
        let body = body.map(|body| format!("{body}\n")).unwrap_or_default();
        if method == "PUT" {
            head.push_str("Content-Length: ");
            head.push_str(&body.len().to_string());
            head.push_str("\r\n");
        }
        if answers {
            head.push_str("Accept: application/json\r\n");
        }
        if !body.is_empty() {
            head.push_str("Content-Type: application/json\r\n");
        }
        head.push_str("Accept-Encoding: gzip\r\n\r\n");
        head.push_str(&body);
        reader.get_mut().write_all(head.as_bytes()).expect("sent");
        let response = read_response(&mut reader);
        assert!(!response.headers.contains_key("content-encoding"), "{response:?}");
        // The program that ends keeps none.
        let is_kept = !response.headers.contains_key("connection");
        assert!(is_kept || name == "vmm.shutdown", "the connection is to be kept: {response:?}");
        self.idle = Some(reader);
        response
    }

    /// A call that must succeed; its answer, if there is one, in JSON.
    #[track_caller]
    fn ask(&mut self, method: &str, name: &str, body: Option<&Value>, limit_s: u64) -> Value {
        let response = self.call(method, name, body, limit_s);
        assert!(response.status < 300, "{name}: {response:?}");
        if response.body.is_empty() {
            return Value::Null;
        }
        assert_eq!(response.headers["content-type"], "application/json");
        serde_json::from_str(&response.body).expect("JSON")
    }

    #[track_caller]
    fn info(&mut self, state: &str) -> Value {
        let info = self.ask("GET", "vm.info", None, 1);
        read(&info, &Type::Struct(VM_INFO)).unwrap_or_else(|error| panic!("{error}: {info}"));
        assert_eq!(info["state"], state);
        info
    }
}

/// A member that may be anything but of another type, as all are in Go.
const fn is(name: &'static str, wanted: Type) -> Member {
    (name, BeNull, wanted)
}

const VM_INFO: &[Member] = &[
    is("config", Type::Struct(VM_CONFIG)),
    is("state", Type::Text),
    is("memory_actual_size", Type::Int(64)),
    is("device_tree", Type::Map(&Type::Struct(DEVICE_NODE))),
];
const DEVICE_NODE: &[Member] = &[
    is("id", Type::Text),
    is("resources", Type::List(&Type::Object)),
    is("children", Type::List(&Type::Text)),
    is("pci_bdf", Type::Text),
];
const VM_CONFIG: &[Member] = &[
    is("cpus", Type::Struct(CPUS)),
    is("memory", Type::Struct(MEMORY)),
    is("payload", Type::Struct(PAYLOAD)),
    is("disks", Type::List(&Type::Struct(DISK))),
    is("net", Type::List(&Type::Struct(NET))),
    is("rng", Type::Struct(&[is("src", Type::Text), is("iommu", Type::Bool)])),
    is("balloon", Type::Struct(BALLOON)),
    is("serial", Type::Struct(CONSOLE)),
    is("console", Type::Struct(CONSOLE)),
    is("debug_console", Type::Struct(DEBUG_CONSOLE)),
    is("devices", Type::List(&Type::Object)),
    is("iommu", Type::Bool),
    is("watchdog", Type::Bool),
    is("pvpanic", Type::Bool),
    is("platform", Type::Struct(PLATFORM)),
    is("landlock_enable", Type::Bool),
];
const CPUS: &[Member] = &[
    is("boot_vcpus", Type::Int(32)),
    is("max_vcpus", Type::Int(32)),
    is("topology", Type::Struct(TOPOLOGY)),
    is("kvm_hyperv", Type::Bool),
    is("max_phys_bits", Type::Int(32)),
    is("nested", Type::Bool),
    is("affinity", Type::List(&Type::Object)),
    is("features", Type::Struct(&[is("amx", Type::Bool)])),
];
const TOPOLOGY: &[Member] = &[
    is("threads_per_core", Type::Int(32)),
    is("cores_per_die", Type::Int(32)),
    is("dies_per_package", Type::Int(32)),
    is("packages", Type::Int(32)),
];
const MEMORY: &[Member] = &[
    is("size", Type::Int(64)),
    is("hotplug_size", Type::Int(64)),
    is("hotplugged_size", Type::Int(64)),
    is("mergeable", Type::Bool),
    is("hotplug_method", Type::Text),
    is("shared", Type::Bool),
    is("hugepages", Type::Bool),
    is("hugepage_size", Type::Int(64)),
    is("prefault", Type::Bool),
    is("thp", Type::Bool),
    is("zones", Type::List(&Type::Object)),
];
const PAYLOAD: &[Member] = &[
    is("firmware", Type::Text),
    is("kernel", Type::Text),
    is("cmdline", Type::Text),
    is("initramfs", Type::Text),
    is("igvm", Type::Text),
    is("host_data", Type::Text),
];
const DISK: &[Member] = &[
    is("path", Type::Text),
    is("readonly", Type::Bool),
    is("direct", Type::Bool),
    is("iommu", Type::Bool),
    is("num_queues", Type::Int(32)),
    is("queue_size", Type::Int(32)),
    is("vhost_user", Type::Bool),
    is("vhost_socket", Type::Text),
    is("rate_limiter_config", Type::Object),
    is("pci_segment", Type::Int(32)),
    is("id", Type::Text),
    is("serial", Type::Text),
    is("rate_limit_group", Type::Text),
    is("queue_affinity", Type::List(&Type::Object)),
    is("backing_files", Type::Bool),
    is("sparse", Type::Bool),
    is("image_type", Type::Text),
];
const NET: &[Member] = &[
    is("tap", Type::Text),
    is("ip", Type::Text),
    is("mask", Type::Text),
    is("mac", Type::Text),
    is("host_mac", Type::Text),
    is("mtu", Type::Int(32)),
    is("iommu", Type::Bool),
    is("num_queues", Type::Int(32)),
    is("queue_size", Type::Int(32)),
    is("vhost_user", Type::Bool),
    is("vhost_socket", Type::Text),
    is("vhost_mode", Type::Text),
    is("id", Type::Text),
    is("pci_segment", Type::Int(32)),
    is("rate_limiter_config", Type::Object),
    is("offload_tso", Type::Bool),
    is("offload_ufo", Type::Bool),
    is("offload_csum", Type::Bool),
];
const BALLOON: &[Member] = &[
    is("size", Type::Int(64)),
    is("deflate_on_oom", Type::Bool),
    is("free_page_reporting", Type::Bool),
];
const CONSOLE: &[Member] = &[
    is("file", Type::Text),
    is("socket", Type::Text),
    is("mode", Type::Text),
    is("iommu", Type::Bool),
];
const DEBUG_CONSOLE: &[Member] =
    &[is("file", Type::Text), is("mode", Type::Text), is("iobase", Type::Int(32))];
const PLATFORM: &[Member] = &[
    is("num_pci_segments", Type::Int(32)),
    is("iommu_segments", Type::List(&Type::Int(32))),
    is("iommu_address_width", Type::Int(32)),
    is("serial_number", Type::Text),
    is("uuid", Type::Text),
    is("oem_strings", Type::List(&Type::Text)),
    is("tdx", Type::Bool),
    is("sev_snp", Type::Bool),
];

/// The configuration of a sandbox, with all that the generated types put in.
fn config(place: &Place) -> Value {
    let disk = json!({
        "backing_files": false, "direct": false, "image_type": "Raw", "iommu": false,
        "num_queues": 1, "path": place.disk("image"), "queue_size": 128, "readonly": true,
        "sparse": true, "vhost_user": false,
    });
    json!({
        "balloon": {"deflate_on_oom": false, "free_page_reporting": true, "size": 0},
        "console": {"iommu": false, "mode": "Off"},
        "cpus": {
            "boot_vcpus": 1, "kvm_hyperv": false, "max_vcpus": 4, "nested": true,
            "topology": {
                "cores_per_die": 4, "dies_per_package": 1, "packages": 1, "threads_per_core": 1,
            },
        },
        "disks": [disk],
        "fs": [{
            "num_queues": 1, "pci_segment": 1, "queue_size": 1024,
            "socket": place.text("virtiofsd.sock"), "tag": "kataShared",
        }],
        "iommu": false, "landlock_enable": false,
        "memory": {
            "hotplug_method": "Acpi", "hotplug_size": 4_u64 << 30, "hugepages": false,
            "mergeable": false, "prefault": false, "shared": true, "size": 256_u64 << 20,
            "thp": true,
        },
        "payload": {"cmdline": "workload=random-write mem=32M", "kernel": image()},
        "platform": {"num_pci_segments": 2, "sev_snp": false, "tdx": false},
        "pvpanic": false,
        "rng": {"iommu": false, "src": "/dev/urandom"},
        "serial": {"iommu": false, "mode": "Off"},
        "vsock": {"cid": 3, "iommu": false, "socket": place.text("clh.sock")},
        "watchdog": false,
    })
}

/// What of it needs a process that is not there.
const SERVED: [&str; 1] = ["fs"];

fn launch(place: &Place) -> (Vmm, Client) {
    let socket = place.at("clh-api.sock");
    let vmm = start(&["--api-socket", &place.text("clh-api.sock")]);
    wait_for("the API socket", || UnixStream::connect(&socket).ok());
    let mut client = Client { socket, idle: None, dialled: 0 };
    let ping = client.ask("GET", "vmm.ping", None, 1);
    assert!(ping["version"].is_string(), "{ping}");
    (vmm, client)
}

/// Devices are added over connections of their own, in one message each.
fn add_net(socket: &Path, mac: &str, fds: &[BorrowedFd<'_>]) -> Response {
    let body = json!({
        "iommu": false, "ip": "192.168.249.1", "mac": mac, "mask": "255.255.255.0",
        "num_queues": 2, "offload_csum": true, "offload_tso": true, "offload_ufo": true,
        "queue_size": 256, "vhost_mode": "Client", "vhost_user": false,
    })
    .to_string();
    let request = format!(
        "PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
         Content-Length: {}\r\nContent-Type: application/json\r\n\r\n{body}",
        body.len()
    );
    let stream = UnixStream::connect(socket).expect("a connection");
    send_with(&stream, &request, fds);
    read_response(&mut BufReader::new(stream))
}

fn sandbox() {
    let place = Place::new();
    let (vmm, mut client) = launch(&place);
    let config = without(&config(&place), &SERVED);
    client.ask("PUT", "vm.create", Some(&config), 10);
    client.info("Created");
    let taps = [Tap::open(), Tap::open()];
    let mac = ["2e:89:a8:e4:92:01", "2e:89:a8:e4:92:02"];
    assert_eq!(add_net(&client.socket, mac[0], &[taps[0].fd.as_fd()]).status, 204);
    client.ask("PUT", "vm.boot", None, 10);
    let info = client.info("Running");
    assert_eq!(info["config"]["net"][0]["mac"], mac[0]);
    assert_eq!(kata_vcpus(&vmm), 1);
    vmm.wait_for_heartbeat();
    // A device that is added while it runs: the answer says where.
    let added = add_net(&client.socket, mac[1], &[taps[1].fd.as_fd()]);
    assert_eq!(added.status, 200, "{added:?}");
    let net: Value = serde_json::from_str(&added.body).expect("JSON");
    kata_slot(net["bdf"].as_str().expect("a place"));
    // The address of the host's end is for taps that the VMM makes; these are another's.
    let names = taps.map(Tap::close);
    assert_eq!(taps_of(&vmm), names);
    assert!(!addresses().contains("192.168.249.1"), "the host has another address");
    let disk = json!({
        "backing_files": false, "direct": false, "image_type": "Raw", "iommu": false,
        "num_queues": 1, "path": place.disk("volume"), "queue_size": 1024, "readonly": false,
        "sparse": true, "vhost_user": false,
    });
    let added = client.ask("PUT", "vm.add-disk", Some(&disk), 5);
    kata_slot(added["bdf"].as_str().expect("a place"));
    client.ask("PUT", "vm.remove-device", Some(&json!({"id": added["id"]})), 5);
    client.ask("PUT", "vm.resize", Some(&json!({"desired_ram": 384_u64 << 20})), 1);
    client.ask("PUT", "vm.resize", Some(&json!({"desired_vcpus": 1})), 1);
    client.ask("PUT", "vm.resize", Some(&json!({"desired_vcpus": 3})), 1);
    assert_eq!(kata_vcpus(&vmm), 3);
    let more = client.call("PUT", "vm.resize", Some(&json!({"desired_vcpus": 5})), 1);
    assert!(more.status == 400 && reasons(&more.body).contains("vCPUs"), "{more:?}");
    client.ask("PUT", "vm.pause", None, 1);
    client.info("Paused");
    client.ask("PUT", "vm.resume", None, 1);
    vmm.wait_for_heartbeat();
    vmm_verify(&vmm, &mut client);
    client.ask("PUT", "vmm.shutdown", None, 3);
    assert_eq!(client.dialled, 1, "the connection was lost");
    ends(vmm);
}

fn vmm_verify(vmm: &Vmm, client: &mut Client) {
    client.ask("PUT", "vm.pause", None, 1);
    vmm.verify_paused();
    client.ask("PUT", "vm.resume", None, 1);
}

/// IPv4 addresses of the host.
fn addresses() -> String {
    std::fs::read_to_string("/proc/net/fib_trie").expect("the host's addresses")
}
