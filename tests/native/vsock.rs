// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The vsock device as far as a guest without a driver lets it: whose its path is. Connections are in the
//! device's own tests, and with a Linux guest in the lab.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;

use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder};
use crate::hotplug::places;

pub fn add(suite: &mut Suite) {
    suite.add("vsock::its_path_is_one_vms_and_goes_with_it", path);
    suite.add("vsock::a_device_comes_and_goes", hotplug);
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = format!("vsock::the_path_goes_along_in_{}", mode.name());
        suite.add(&name, move || moves(mode));
    }
}

const GUEST: &str = "workload=random-write mem=16M";
const MEMORY: &str = "size=128M,shared=on";

/// A client is let in, although no driver answers it.
fn listens(path: &std::path::Path) {
    let mut client = UnixStream::connect(path).expect("a listener");
    client.write_all(b"CONNECT 5\n").expect("room for a line");
    client.set_read_timeout(Some(Duration::from_millis(100))).expect("a limit");
    client.read(&mut [0]).expect_err("no answer");
}

fn path() {
    let folder = TempDir::with_prefix("godwit-vsock-").expect("a folder");
    let path = folder.path().join("sock");
    let option = format!("cid=3,socket={}", path.display());
    let builder = || VmmBuilder::guest(1, MEMORY, GUEST).with(&["--vsock", &option]);
    // As a process leaves it that was killed.
    drop(UnixListener::bind(&path).expect("a socket"));
    let vmm = builder().start();
    vmm.wait_for_heartbeat();
    listens(&path);
    let (code, output) = builder().bare().run();
    assert_eq!(code, 1, "{output}");
    assert!(output.contains("_vsock0") && output.contains("sock"), "{output}");
    listens(&path);
    let api = vmm.api();
    let counters = api.get("vm.counters").ok().json();
    assert_eq!(counters["_vsock0"]["connections"], 0, "{counters}");
    for (request, action) in [("vm.pause", false), ("vm.resume", true), ("vm.reboot", true)] {
        api.put(request, "").ok();
        assert!(path.exists(), "{request}");
        if action {
            vmm.wait_for_heartbeat();
            listens(&path);
        }
    }
    vmm.shut_down();
    assert!(!path.exists(), "it is removed in the end");
}

fn hotplug() {
    let folder = TempDir::with_prefix("godwit-vsock-").expect("a folder");
    let path = folder.path().join("sock");
    let vmm = Vmm::boot(1, MEMORY, GUEST);
    let api = vmm.api();
    let before = places(&api);
    let device = json!({"cid": 7, "socket": path, "id": "sock"}).to_string();
    let taken = UnixListener::bind(&path).expect("a socket");
    let refused = api.put("vm.add-vsock", &device);
    assert!(refused.status == 500 && refused.body.contains("sock"), "{refused:?}");
    assert_eq!(places(&api), before);
    drop(taken);
    let added = api.put("vm.add-vsock", &device).ok().json();
    assert!(places(&api).iter().any(|(id, bdf)| id == "sock" && added["bdf"] == bdf.as_str()));
    listens(&path);
    let second = json!({"cid": 8, "socket": "/tmp/none"}).to_string();
    let second = api.put("vm.add-vsock", &second);
    assert!(second.status == 409 && second.body.contains("sock"), "{second:?}");
    let wrong = api.put("vm.add-vsock", &json!({"cid": 2, "socket": path}).to_string());
    assert_eq!(wrong.status, 400, "{wrong:?}");
    // The test guest does not listen, so the device stays until it reboots.
    vmm.remote_ok(&["remove-device", "sock"]);
    assert!(path.exists());
    api.put("vm.reboot", "").ok();
    vmm.wait_for_heartbeat();
    assert_eq!(places(&api), before);
    assert!(!path.exists(), "the path is free");
    let option = format!("cid=7,socket={}", path.display());
    vmm.remote_ok(&["add-vsock", &option]);
    listens(&path);
    vmm.shut_down();
    assert!(!path.exists());
}

fn moves(mode: Mode) {
    let folder = TempDir::with_prefix("godwit-vsock-").expect("a folder");
    let path = folder.path().join("sock");
    let option = format!("cid=3,socket={},id=sock", path.display());
    let source = VmmBuilder::guest(1, MEMORY, GUEST).with(&["--vsock", &option]).start();
    source.wait_for_heartbeat();
    listens(&path);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Unix, mode);
    destination.wait_for_heartbeat();
    listens(&path);
    destination.shut_down();
    assert!(!path.exists());
}
