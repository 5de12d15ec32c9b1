// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices that another process emulates over vfio-user: that they work, and what a VM does when that process fails.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use guest_reader::abi::{self, param};
use serde_json::json;
use tempfile::TempDir;
use vfio_user_device::{Act, Device, Message, Reply, Tamper, command, serve_all};

use crate::disks::{MEMORY, write_more, written};
use crate::harness::{Suite, Vmm, VmmBuilder};
use crate::vhost_user::{BackEnd, memory_of};

pub fn add(suite: &mut Suite) {
    suite.add("user_devices::a_device_copies_interrupts_and_is_mapped", works);
    suite.add("user_devices::a_device_comes_and_goes", hotplug);
    suite.add("user_devices::a_vm_outlives_its_server", killed);
    suite.add("user_devices::a_server_that_hangs_is_left_behind", hung);
    suite.add("user_devices::a_server_may_take_the_memory_of_a_bar", shortens);
    suite.add("user_devices::what_cannot_be_is_refused_by_name", refusals);
    suite.add("user_devices::a_server_that_is_silent_ends_the_start", silent);
}

const GUEST: &str = "workload=user-device mem=16M";
/// The first argument of this program as a device server.
const SERVE: &str = "serve-vfio-user-device";
/// The second argument of one that shortens the file of a BAR.
const SHORTENS: &str = "shortens";
/// Writes to registers after which it does.
const WRITES: u64 = 50;

/// This program as a device server.
pub fn serve_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != SERVE {
        return None;
    }
    let (kind, socket) = (arguments.next()?, PathBuf::from(arguments.next()?));
    let device = Arc::new(Mutex::new(Device::new().ok()?));
    let (served, mut writes) = (Arc::clone(&device), 0);
    let mut tamper: Tamper = Box::new(move |message: &Message, _: &mut Reply, _| {
        writes += u64::from(message.command == command::REGION_WRITE);
        if kind == SHORTENS && message.command == command::REGION_WRITE && writes == WRITES {
            let device = served.lock().unwrap_or_else(PoisonError::into_inner);
            device.shared.set_len(0).expect("a shorter file");
        }
        Act::Send
    });
    let ended = serve_all(&socket, &device, &mut tamper);
    eprintln!("the device server ends: {ended:?}");
    Some(ExitCode::FAILURE)
}

/// A device server of a kind.
pub fn server(kind: &str) -> BackEnd {
    let folder = TempDir::with_prefix("godwit-vfio-user-").expect("a folder");
    let socket = folder.path().join("socket");
    BackEnd::serve(folder, vec![SERVE.into(), kind.into(), socket.into()])
}

fn option_of(socket: &Path) -> String {
    format!("socket={},id=data", socket.display())
}

fn guest(socket: &Path) -> VmmBuilder {
    VmmBuilder::guest(1, MEMORY, GUEST).with(&["--user-device", &option_of(socket)])
}

fn id_of(vmm: &Vmm) -> String {
    let info = vmm.api().get("vm.info").ok().json();
    info["config"]["user_devices"][0]["id"].as_str().unwrap_or_default().to_owned()
}

fn works() {
    let server = server("usual");
    let vmm = guest(&server.socket()).start();
    write_more(&vmm, 20);
    assert_eq!(id_of(&vmm), "data");
    let api = vmm.api();
    for _ in 0..2 {
        api.put("vm.pause", "").ok();
        api.put("vm.resume", "").ok();
        write_more(&vmm, 5);
    }
    // The server sees one client after the other.
    let memory = memory_of(&vmm);
    api.put("vm.reboot", "").ok();
    write_more(&vmm, 20);
    assert_eq!(memory_of(&vmm), memory, "the server has unmapped it, and the next guest has it");
    vmm.shut_down();
}

fn hotplug() {
    let server = server("usual");
    // The second vCPU is what the guest ejects with.
    let vmm = Vmm::boot(2, MEMORY, "workload=idle mem=16M vcpus=1");
    let api = vmm.api();
    let device = json!({"socket": server.socket(), "id": "data", "pci_device_id": 9});
    let answer = api.put("vm.add-user-device", &device.to_string()).ok().json();
    assert_eq!(answer, json!({"id": "data", "bdf": "0000:00:09.0"}));
    vmm.guest().set("workload=user-device").expect("it listens");
    write_more(&vmm, 20);
    api.put("vm.remove-device", &json!({"id": "data"}).to_string()).ok();
    vmm.wait_for_event("device-removing");
    let guest = vmm.guest();
    guest.memory().set_word(abi::PARAM_GPA + param::EJECT, 1 << 9).expect("the parameter page");
    vmm.wait_for_event("device-removed");
    written(&vmm);
    let info = api.get("vm.info").ok().json();
    assert!(info["config"]["user_devices"].is_null(), "{info}");
    // The server is free for the next.
    api.put("vm.add-user-device", &device.to_string()).ok();
    vmm.shut_down();
}

fn killed() {
    let mut server = server("usual");
    let vmm = guest(&server.socket()).start();
    write_more(&vmm, 5);
    server.kill();
    let event = vmm.wait_for_event("back-end-lost");
    assert_eq!(event["properties"]["id"], "data", "{event}");
    let api = vmm.api();
    api.put("vm.pause", "").ok();
    api.put("vm.resume", "").ok();
    // With another server at the same place the next guest has a device again.
    server.again();
    api.put("vm.reboot", "").ok();
    write_more(&vmm, 20);
    vmm.shut_down();
}

fn hung() {
    let server = server("usual");
    let vmm = guest(&server.socket()).start();
    write_more(&vmm, 5);
    let memory = memory_of(&vmm);
    assert!(!memory.is_empty());
    server.signal(libc::SIGSTOP);
    // The guest's next access is not answered; the vCPU goes on when the time is over.
    let event = vmm.wait_for_event("back-end-lost");
    assert_eq!(event["properties"]["id"], "data", "{event}");
    let why = event["properties"]["error"].to_string();
    assert!(why.contains("has not answered REGION_"), "{event}");
    let api = vmm.api();
    api.put("vm.pause", "").ok();
    api.put("vm.resume", "").ok();
    // The server has the memory mapped, which no later guest may have.
    api.put("vm.remove-device", &json!({"id": "data"}).to_string()).ok();
    api.put("vm.reboot", "").ok();
    let after = memory_of(&vmm);
    assert!(!after.iter().any(|inode| memory.contains(inode)), "{after:?} of {memory:?}");
    server.signal(libc::SIGCONT);
    vmm.shut_down();
}

fn shortens() {
    let server = server(SHORTENS);
    let vmm = guest(&server.socket()).start();
    // Some of them after the memory of the BAR is gone.
    write_more(&vmm, 3 * WRITES);
    let output = vmm.output();
    assert!(output.contains("go to the server from now on"), "{output}");
    vmm.shut_down();
}

fn refusals() {
    let server = server("usual");
    let private = VmmBuilder::guest(1, "size=128M", GUEST)
        .with(&["--user-device", &option_of(&server.socket())]);
    let (code, output) = private.bare().run();
    assert!(code != 0 && output.contains("'data'"), "{code}: {output}");
    assert!(output.contains("shared=on"), "{code}: {output}");
    let vmm = guest(&server.socket()).start();
    write_more(&vmm, 1);
    let api = vmm.api();
    let folder = TempDir::with_prefix("godwit-vfio-user-").expect("a folder");
    let url = format!("file://{}", folder.path().join("snapshot").display());
    for (request, body) in [
        ("vm.send-migration", json!({"destination_url": "unix:/nowhere"})),
        ("vm.snapshot", json!({"destination_url": url})),
    ] {
        api.put("vm.pause", "").ok();
        let answer = api.put(request, &body.to_string());
        assert!(answer.status >= 400 && answer.body.contains("'data'"), "{request}: {answer:?}");
        assert!(answer.body.contains("vfio-user"), "{request}: {answer:?}");
        api.put("vm.resume", "").ok();
    }
    write_more(&vmm, 1);
    vmm.shut_down();
}

fn silent() {
    let folder = TempDir::with_prefix("godwit-vfio-user-").expect("a folder");
    let socket = folder.path().join("socket");
    // The kernel takes the connection, and nothing answers.
    let _listener = UnixListener::bind(&socket).expect("a listener");
    let (code, output) = guest(&socket).bare().run();
    assert!(code != 0 && output.contains("has not answered VERSION"), "{code}: {output}");
    assert!(output.contains("'data'"), "{output}");
}
