// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! File systems, networks and devices of any type that another process serves over vhost-user: whether the guest is answered, and what a VM does when that
//! process fails.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use guest_reader::abi::{self, param};
use serde_json::{Value, json};
use tempfile::TempDir;
use vhost_user_disk::peer::{self, Kind, Role};

use crate::disks::{MEMORY, write_more, written};
use crate::harness::{Suite, VmmBuilder};
use crate::vhost_user::BackEnd;

pub fn add(suite: &mut Suite) {
    suite.add("vhost_peers::a_file_system_answers", || answers(&FS));
    suite.add("vhost_peers::a_file_system_comes_and_goes", || hotplug(&FS));
    suite.add("vhost_peers::a_vm_outlives_its_file_server", || killed(&FS));
    suite.add("vhost_peers::what_a_file_system_cannot_be_is_refused_by_name", || refusals(&FS));
    suite.add("vhost_peers::a_network_answers", || answers(&NET));
    suite.add("vhost_peers::a_network_comes_and_goes", || hotplug(&NET));
    suite.add("vhost_peers::a_vm_outlives_its_network", || killed(&NET));
    suite.add("vhost_peers::what_a_network_cannot_be_is_refused_by_name", || refusals(&NET));
    suite.add("vhost_peers::a_network_whose_back_end_connects_answers", || answers(&NET_SERVER));
    suite.add("vhost_peers::a_network_with_pairs_answers", || answers(&NET_PAIRS));
    suite.add("vhost_peers::a_network_with_pairs_comes_and_goes", || hotplug(&NET_PAIRS));
    suite.add("vhost_peers::a_vm_outlives_its_network_with_pairs", || killed(&NET_PAIRS));
    suite.add("vhost_peers::a_generic_device_answers", || answers(&GENERIC));
    suite.add("vhost_peers::a_generic_device_comes_and_goes", || hotplug(&GENERIC));
    suite.add("vhost_peers::a_vm_outlives_a_generic_back_end", || killed(&GENERIC));
    suite.add("vhost_peers::what_a_generic_device_cannot_be_is_refused", || refusals(&GENERIC));
}

/// The first argument of this program as a back end.
const SERVE: &str = "serve-vhost-user-peer";
/// Queues that the back ends have.
const QUEUES: usize = 2;
/// The same of a network.
const NET_QUEUES: usize = 4;

/// A kind of device.
pub struct Subject {
    /// What the back end is started with.
    kind: &'static str,
    /// What the guest does with it; its answers are counted as the blocks of a disk are.
    workload: &'static str,
    option: &'static str,
    /// The option string for a socket.
    pub text: fn(&Path) -> String,
    /// What of an option string asks for more queues than there can be, and what is said of that.
    more_queues: (&'static str, &'static str),
    add: &'static str,
    json: fn(&Path) -> Value,
    /// The field of the configuration.
    field: &'static str,
    /// vCPUs that it needs.
    vcpus: u32,
}

const FS: Subject = Subject {
    kind: "fs",
    workload: "workload=fs-ask mem=16M",
    option: "--fs",
    text: |socket| format!("tag=there,socket={},id=peer", socket.display()),
    more_queues: (",num_queues=2", "serves 2 queues at most"),
    add: "vm.add-fs",
    json: |socket| json!({"tag": "there", "socket": socket, "num_queues": 1, "queue_size": 64, "id": "peer", "pci_device_id": 9}),
    field: "fs",
    vcpus: 1,
};

const NET: Subject = Subject {
    kind: "net",
    workload: "workload=net-echo mem=16M",
    option: "--net",
    text: |socket| format!("vhost_user=on,socket={},id=peer", socket.display()),
    more_queues: (",num_queues=6", "serves 4 queues at most"),
    add: "vm.add-net",
    json: |socket| json!({"vhost_user": true, "vhost_socket": socket, "id": "peer", "pci_device_id": 9}),
    field: "net",
    vcpus: 1,
};

/// The driver changes how many of its pairs of queues are in use, and sends frames by all of them.
const NET_PAIRS: Subject = Subject {
    vcpus: 2,
    text: |socket| format!("vhost_user=on,socket={},num_queues=4,id=peer", socket.display()),
    json: |socket| json!({"vhost_user": true, "vhost_socket": socket, "num_queues": 4, "id": "peer", "pci_device_id": 9}),
    ..NET
};

/// The back end serves several VMMs at a time, as those of a source and of a destination are.
pub const NET_MOVES: Subject = Subject { kind: "net-all", ..NET_PAIRS };

/// The VMM listens.
const NET_SERVER: Subject = Subject {
    kind: "net-connects",
    text: |socket| format!("vhost_user=on,socket={},vhost_mode=server,id=peer", socket.display()),
    ..NET
};

/// What the guest takes for a file system.
const GENERIC: Subject = Subject {
    option: "--generic-vhost-user",
    text: |socket| format!("socket={},virtio_id=26,queue_sizes=[64,64],id=peer", socket.display()),
    more_queues: (",queue_sizes=[64,64,64]", "serves 2 queues at most"),
    add: "vm.add-generic-vhost-user",
    json: |socket| json!({"socket": socket, "device_type": 26, "queue_sizes": [64, 64], "id": "peer", "pci_device_id": 9}),
    field: "generic_vhost_user",
    ..FS
};

/// This program as a back end: it serves one VMM after the other.
pub fn serve_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != SERVE {
        return None;
    }
    let (kind, role) = match arguments.next()?.to_str()? {
        "fs" => (Kind::Fs, Role::Listens),
        "net" => (Kind::Net, Role::Listens),
        "net-all" => (Kind::Net, Role::ListensToAll),
        _ => (Kind::Net, Role::Connects),
    };
    let socket = PathBuf::from(arguments.next()?);
    if role == Role::ListensToAll {
        let ended = peer::serve_all(&socket, kind, NET_QUEUES);
        eprintln!("the back end ends: {ended:?}");
        return Some(ExitCode::FAILURE);
    }
    let queues = if kind == Kind::Net { NET_QUEUES } else { QUEUES };
    loop {
        if let Err(error) = peer::serve(&socket, kind, role, queues) {
            if role == Role::Connects {
                // No VMM listens now. Like other back ends, it tries again and again.
                std::thread::yield_now();
                continue;
            }
            eprintln!("the back end ends: {error}");
            return Some(ExitCode::FAILURE);
        }
    }
}

impl Subject {
    pub fn back_end(&self) -> BackEnd {
        let folder = TempDir::with_prefix("godwit-vhost-peer-").expect("a folder");
        let socket = folder.path().join("socket");
        BackEnd::serve(folder, vec![SERVE.into(), self.kind.into(), socket.into()])
    }

    pub fn vm(&self, option: &str) -> VmmBuilder {
        VmmBuilder::guest(self.vcpus, MEMORY, self.workload).with(&[self.option, option])
    }
}

fn answers(subject: &Subject) {
    let back_end = subject.back_end();
    let option = (subject.text)(&back_end.socket());
    let vmm = subject.vm(&option).with(&["--landlock"]).start();
    write_more(&vmm, 500);
    let api = vmm.api();
    for _ in 0..3 {
        api.put("vm.pause", "").ok();
        let before = written(&vmm);
        api.put("vm.resume", "").ok();
        write_more(&vmm, 100);
        assert!(written(&vmm) >= before + 100);
    }
    let counters = api.get("vm.counters").ok().json();
    assert!(counters["peer"]["interrupts"].as_u64() > Some(0), "{counters}");
    api.put("vm.reboot", "").ok();
    write_more(&vmm, 500);
    vmm.shut_down();
}

fn hotplug(subject: &Subject) {
    let back_end = subject.back_end();
    // The second vCPU is what the guest lets go with.
    let vmm = VmmBuilder::guest(2, MEMORY, "workload=idle mem=16M vcpus=1").with(&["--landlock"]);
    let vmm = vmm.start();
    let api = vmm.api();
    let device = (subject.json)(&back_end.socket());
    let added = api.put(subject.add, &device.to_string()).ok().json();
    assert_eq!(added, json!({"id": "peer", "bdf": "0000:00:09.0"}));
    let workload = subject.workload.split(' ').next().expect("a word");
    vmm.guest().set(workload).expect("it listens");
    write_more(&vmm, 100);
    api.put("vm.remove-device", &json!({"id": "peer"}).to_string()).ok();
    vmm.wait_for_event("device-removing");
    let guest = vmm.guest();
    guest.memory().set_word(abi::PARAM_GPA + param::EJECT, 1 << 9).expect("the parameter page");
    vmm.wait_for_event("device-removed");
    assert!(written(&vmm) >= 100);
    let info = api.get("vm.info").ok().json();
    assert!(info["config"][subject.field].is_null(), "{info}");
    // The back end is free for the next.
    api.put(subject.add, &device.to_string()).ok();
    let info = api.get("vm.info").ok().json();
    assert_eq!(info["config"][subject.field][0]["id"], "peer", "{info}");
    vmm.shut_down();
}

fn killed(subject: &Subject) {
    let mut back_end = subject.back_end();
    let vmm = subject.vm(&(subject.text)(&back_end.socket())).start();
    write_more(&vmm, 1);
    back_end.kill();
    let event = vmm.wait_for_event("back-end-lost");
    assert_eq!(event["properties"]["id"], "peer", "{event}");
    let api = vmm.api();
    api.put("vm.pause", "").ok();
    api.put("vm.resume", "").ok();
    // With another back end at the same place the next guest has the device again.
    back_end.again();
    api.put("vm.reboot", "").ok();
    write_more(&vmm, 100);
    vmm.shut_down();
}

fn refusals(subject: &Subject) {
    let back_end = subject.back_end();
    let option = (subject.text)(&back_end.socket());
    let private = VmmBuilder::guest(1, "size=128M", subject.workload);
    let (code, output) = private.with(&[subject.option, &option]).bare().run();
    assert!(code != 0 && output.contains("shared=on"), "{code}: {output}");
    let (more, why) = subject.more_queues;
    let before = option.replace(",queue_sizes=[64,64]", "");
    let more = format!("{before}{more}");
    let more = VmmBuilder::guest(4, MEMORY, subject.workload).with(&[subject.option, &more]);
    let (code, output) = more.bare().run();
    assert!(code != 0 && output.contains(why), "{code}: {output}");

    // A network is movable.
    if subject.field == NET.field {
        return;
    }
    let vmm = subject.vm(&option).start();
    write_more(&vmm, 1);
    let api = vmm.api();
    for (request, url) in [
        ("vm.send-migration", "unix:/nowhere".to_owned()),
        ("vm.snapshot", format!("file://{}.snapshot", back_end.socket().display())),
    ] {
        api.put("vm.pause", "").ok();
        let answer = api.put(request, &json!({"destination_url": url}).to_string());
        assert!(answer.status >= 400 && answer.body.contains("'peer'"), "{request}: {answer:?}");
        assert!(answer.body.contains("vhost-user"), "{request}: {answer:?}");
        api.put("vm.resume", "").ok();
    }
    write_more(&vmm, 1);
    vmm.shut_down();
}
