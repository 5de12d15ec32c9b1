// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices that come and go, as far as a guest without drivers lets them: the answers, locks and taps,
//! what stays after a reboot, and that every device is found at its place after a move. A guest that lets
//! go of a disk is in `disks`, Linux guests that release devices are in the lab.

use std::fs::File;

use guest_reader::abi::{self, param};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::disks::write_more;
use crate::harness::migrate::migrate;
use crate::harness::{Api, Mode, Suite, Transport, Vmm, VmmBuilder};
use crate::lifecycle::config;

pub fn add(suite: &mut Suite) {
    suite.add("hotplug::before_boot_the_configuration_changes", before_boot);
    suite.add("hotplug::a_disk_is_added_locked_and_gone_after_a_reboot", disk);
    suite.add("hotplug::what_cannot_be_is_refused", refusals);
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = format!("hotplug::places_stay_after_{}", mode.name());
        suite.add(&name, move || places_stay(mode));
    }
    suite.add("hotplug::what_was_placed_around_a_device_stays_when_that_is_gone", placed_around);
}

const GUEST: &str = "workload=random-write mem=16M";
const MEMORY: &str = "size=128M,shared=on";

/// Images, and how to ask for them.
struct Images(TempDir);

impl Images {
    fn new() -> Self {
        Self(TempDir::with_prefix("godwit-disk-").expect("a folder"))
    }

    fn disk(&self, name: &str) -> Value {
        let path = self.0.path().join(name);
        File::create(&path).and_then(|file| file.set_len(8 << 20)).expect("a file");
        json!({"path": path, "id": name})
    }

    fn option(&self, name: &str) -> String {
        let disk = self.disk(name);
        format!("path={},id={name}", disk["path"].as_str().expect("UTF-8"))
    }
}

/// Ids and places of all devices, in order. A virtio device is the child of its transport, which has the
/// place.
pub fn places(api: &Api) -> Vec<(String, String)> {
    let info = api.get("vm.info").ok().json();
    let tree = info["device_tree"].as_object().expect("a device tree");
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let of = |node: &Value| {
        let id = text(&node["children"][0]).or_else(|| text(&node["id"]))?;
        Some((id, text(&node["pci_bdf"])?))
    };
    let mut places: Vec<_> = tree.values().filter_map(of).collect();
    places.sort();
    places
}

fn before_boot() {
    let images = Images::new();
    let vmm = Vmm::empty();
    let api = vmm.api();
    let added = api.put("vm.add-disk", &images.disk("early").to_string());
    assert_eq!(added.status, 404, "{added:?}");
    api.put("vm.create", &config(128)).ok();
    for name in ["first", "second"] {
        let added = api.put("vm.add-disk", &images.disk(name).to_string());
        assert_eq!((added.status, added.body.as_str()), (204, ""));
    }
    let removed = api.put("vm.remove-device", &json!({"id": "first"}).to_string());
    assert_eq!(removed.status, 204, "{removed:?}");
    let unknown = api.put("vm.remove-device", &json!({"id": "first"}).to_string());
    assert_eq!(unknown.status, 404, "{unknown:?}");
    api.put("vm.boot", "").ok();
    vmm.wait_for_heartbeat();
    let ids: Vec<_> = places(&api).into_iter().map(|(id, _)| id).collect();
    assert_eq!(ids, ["__rng", "second"]);
    vmm.shut_down();
}

fn disk() {
    let images = Images::new();
    let vmm = Vmm::boot(1, MEMORY, GUEST);
    let api = vmm.api();
    let before = places(&api);
    let added = api.put("vm.add-disk", &images.disk("data").to_string());
    assert_eq!(added.status, 200, "{added:?}");
    let added = added.json();
    assert_eq!(added["id"], "data");
    assert_eq!(places(&api).iter().find(|(id, _)| id == "data").expect("it").1, added["bdf"]);
    vmm.wait_for_events(&["device-added"]);

    let other = VmmBuilder::guest(1, MEMORY, GUEST).with(&["--disk", &images.option("data")]);
    let (code, output) = other.bare().run();
    assert_eq!(code, 1, "the image is not locked: {output}");

    // The test guest does not listen, so the disk stays until it reboots.
    api.put("vm.remove-device", &json!({"id": "data"}).to_string()).ok();
    api.put("vm.remove-device", &json!({"id": "data"}).to_string()).ok();
    vmm.wait_for_events(&["device-removing"]);
    assert_eq!(places(&api).len(), before.len() + 1);
    vmm.wait_for_heartbeat();
    api.put("vm.reboot", "").ok();
    vmm.wait_for_heartbeat();
    assert_eq!(places(&api), before);
    let info = api.get("vm.info").ok().json();
    assert!(info["config"]["disks"].is_null(), "{info}");
    let next =
        VmmBuilder::guest(1, MEMORY, GUEST).with(&["--disk", &images.option("data")]).start();
    next.shut_down();
    vmm.shut_down();
}

fn refusals() {
    let images = Images::new();
    let taken =
        VmmBuilder::guest(1, MEMORY, GUEST).with(&["--disk", &images.option("taken")]).start();
    let vmm = Vmm::boot(1, MEMORY, GUEST);
    let api = vmm.api();
    api.put("vm.add-disk", &images.disk("data").to_string()).ok();
    let before = (places(&api), api.get("vm.info").json()["config"].clone());
    let mut same_place = images.disk("third");
    same_place["pci_device_id"] = 0.into();
    let device = |path: &str| json!({"path": path, "id": "gpu"});
    let mut no_qcow2 = images.disk("fourth");
    no_qcow2["image_type"] = "Qcow2".into();
    for (request, body, status, text) in [
        ("vm.add-disk", images.disk("data"), 409, "used twice"),
        ("vm.add-disk", same_place, 400, "pci_device_id"),
        ("vm.add-disk", json!({"path": "/nowhere/image"}), 500, "/nowhere/image"),
        ("vm.add-disk", no_qcow2, 500, "qcow2"),
        ("vm.add-disk", json!({"pth": "/x"}), 400, "pth"),
        (
            "vm.add-net",
            json!({"tap": "a-name-that-is-too-long-for-linux"}),
            400,
            "name of an interface",
        ),
        ("vm.add-device", device("/sys/bus/pci/devices/none"), 500, "cannot pass"),
        ("vm.add-device", json!({}), 400, "path"),
        ("vm.remove-device", json!({"id": "absent"}), 404, "absent"),
        ("vm.remove-device", json!({"id": "__rng"}), 400, "__rng"),
        ("vm.remove-device", json!({}), 404, "no device"),
    ] {
        let answer = api.put(request, &body.to_string());
        assert_eq!(answer.status, status, "{request} {body}: {answer:?}");
        assert!(answer.body.contains(text), "{request} {body}: {answer:?}");
    }
    let in_use = api.put("vm.add-disk", &images.disk("taken").to_string());
    assert_eq!(in_use.status, 500, "{in_use:?}");
    let after = (places(&api), api.get("vm.info").json()["config"].clone());
    assert_eq!(after, before, "a refused device leaves nothing behind");
    // And its name and place are free.
    taken.shut_down();
    api.put("vm.add-disk", &images.disk("taken").to_string()).ok();
    // One that was asked to go is there until the guest lets it.
    api.put("vm.remove-device", &json!({"id": "taken"}).to_string()).ok();
    let again = api.put("vm.add-disk", &images.disk("taken").to_string());
    assert!(again.status == 409 && again.body.contains("used twice"), "{again:?}");
    vmm.wait_for_heartbeat();
    vmm.shut_down();
}

/// The disk that was there first was removed, so that without their numbers all others would be
/// elsewhere at the destination.
/// The panic device and the watchdog take the highest numbers that are free when the VM boots.
fn placed_around() {
    const NUMBER: u32 = 31;
    let images = Images::new();
    let disk = format!("{},pci_device_id={NUMBER}", images.option("data"));
    // The second vCPU is what the guest lets go with.
    let source = VmmBuilder::guest(2, MEMORY, "workload=disk-write mem=16M vcpus=1")
        .with(&["--pvpanic", "--watchdog", "--disk", &disk])
        .start();
    write_more(&source, 1);
    let api = source.api();
    api.put("vm.remove-device", &json!({"id": "data"}).to_string()).ok();
    source.wait_for_event("device-removing");
    let guest = source.guest();
    guest
        .memory()
        .set_word(abi::PARAM_GPA + param::EJECT, 1 << NUMBER)
        .expect("the parameter page");
    source.wait_for_event("device-removed");
    let before = places(&api);
    assert!(before.iter().any(|(id, _)| id == "__pvpanic"), "{before:?}");
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Unix, Mode::Precopy);
    let api = destination.api();
    assert_eq!(places(&api), before);
    api.put("vm.reboot", "").ok();
    assert_eq!(places(&api), before);
    // Its number is free for another.
    let mut late = images.disk("late");
    late["pci_device_id"] = NUMBER.into();
    api.put("vm.add-disk", &late.to_string()).ok();
    destination.shut_down();
}

fn places_stay(mode: Mode) {
    let images = Images::new();
    let source = VmmBuilder::guest(1, MEMORY, GUEST)
        .with(&["--disk", &images.option("a"), &images.option("b")])
        .start();
    source.wait_for_heartbeat();
    let api = source.api();
    api.put("vm.add-disk", &images.disk("late").to_string()).ok();
    api.put("vm.remove-device", &json!({"id": "a"}).to_string()).ok();
    let before = places(&api);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Unix, mode);
    let api = destination.api();
    assert_eq!(places(&api), before);
    destination.wait_for_heartbeat();
    // What was to go is still to go.
    api.put("vm.reboot", "").ok();
    destination.wait_for_heartbeat();
    let expected: Vec<_> = before.into_iter().filter(|(id, _)| id != "a").collect();
    assert_eq!(places(&api), expected);
    destination.shut_down();
}
