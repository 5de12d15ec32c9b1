// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests on another platform than Godwit's own: the test guest finds its devices by that platform's rules, drives a
//! disk, and is saved, restored, moved and rebooted with the machine that it has seen. What every register of it is, the
//! unit tests of the platform say.

use guest_reader::abi::disk::BLOCKS;
use serde_json::{Value, json};

use crate::disks::{Disk, holds, write_more, written};
use crate::harness::migrate::migrate;
use crate::harness::taps::Tap;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, image, wait_for};
use crate::hotplug::places;
use crate::snapshot::{place, save};

const NAME: &str = "cloud-hypervisor-53";

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = format!("platforms::a_guest_moves_with_all_its_pages_{}", mode.name());
        suite.add(&name, move || moves(mode));
        let name = format!("platforms::a_disk_moves_{}", mode.name());
        suite.add(&name, move || disk_moves(mode));
    }
    suite.add("platforms::a_guest_is_restored", restored);
    suite.add("platforms::what_comes_later_moves", later_moves);
    suite.add("platforms::devices_have_the_numbers_of_the_platform", numbers);
    suite.add("platforms::a_disk_comes_and_stays_where_it_is", comes);
    suite.add("platforms::what_it_does_not_have_is_refused", refusals);
}

/// A guest with a device of every kind that needs nothing of the host but a tap.
fn with_devices(disk: &Disk, vcpus: u32, cmdline: &str) -> VmmBuilder {
    drop(Tap::open());
    VmmBuilder::new(&["--serial", "off", "--console", "null", "--kernel", image()]).with(&[
        "--cpus",
        &format!("boot={vcpus}"),
        "--memory",
        "size=128M,shared=on",
        "--cmdline",
        cmdline,
        "--platform",
        &format!("platform={NAME}"),
        "--disk",
        &format!("path={},id=data", disk.file.display()),
        "--net",
        "mac=02:00:00:00:00:01,id=lan",
        "--balloon",
        "size=0",
        "--watchdog",
        "--pvpanic",
    ])
}

#[track_caller]
fn is_on_platform(vmm: &Vmm) {
    let info = vmm.api().get("vm.info").json();
    assert_eq!(info["config"]["platform"]["platform"], NAME, "{info}");
}

fn moves(mode: Mode) {
    let disk = Disk::new();
    let source = with_devices(&disk, 2, "workload=random-write mem=64M").start();
    source.wait_for_work(5_000);
    let before = places(&source.api());
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Unix, mode);
    is_on_platform(&destination);
    assert_eq!(places(&destination.api()), before);
    destination.wait_for_work(5_000);
    destination.verify();
    let back = Vmm::empty();
    migrate(destination, &back, Transport::Tcp, mode);
    assert_eq!(places(&back.api()), before);
    back.wait_for_work(5_000);
    back.verify();
    back.shut_down();
}

fn disk_moves(mode: Mode) {
    let disk = Disk::new();
    let source = with_devices(&disk, 1, "workload=disk-write mem=16M").start();
    write_more(&source, 2 * BLOCKS);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Unix, mode);
    write_more(&destination, 2 * BLOCKS);
    destination.api().put("vm.pause", "").ok();
    holds(&disk.file, written(&destination));
    destination.api().put("vm.resume", "").ok();
    destination.api().put("vm.reboot", "").ok();
    destination.wait_for_heartbeat();
    is_on_platform(&destination);
    write_more(&destination, BLOCKS);
    destination.shut_down();
}

fn restored() {
    let disk = Disk::new();
    let mut source = with_devices(&disk, 2, "workload=random-write mem=64M").start();
    source.wait_for_work(5_000);
    let before = places(&source.api());
    let (_folder, url) = place();
    save(&source, &url);
    let report = source.verify_paused();
    source.signal(libc::SIGKILL);
    source.wait_for_exit();
    for mode in ["copy", "ondemand"] {
        let vmm = Vmm::empty();
        let option = format!("source_url={url},resume=true,memory_restore_mode={mode}");
        vmm.remote_ok(&["restore", &option]);
        is_on_platform(&vmm);
        assert_eq!(places(&vmm.api()), before);
        if mode == "ondemand" {
            vmm.wait_for_event("restore-memory-completed");
        }
        vmm.wait_for_work(5_000);
        let after = vmm.verify();
        assert!(after.written >= report.written, "{report:?} {after:?}");
        vmm.shut_down();
    }
}

/// vCPUs and memory that the guest, which has no interpreter for the platform's methods, has yet to notice.
fn later_moves() {
    let source = VmmBuilder::new(&["--serial", "off", "--console", "off", "--kernel", image()])
        .with(&["--cpus", "boot=1,max=4", "--memory", "size=128M,shared=on,hotplug_size=512M"])
        .with(&["--cmdline", "workload=random-write mem=32M"])
        .with(&["--platform", &format!("platform={NAME}")])
        .start();
    source.wait_for_work(2_000);
    let wish = json!({"desired_vcpus": 3, "desired_ram": 256 << 20}).to_string();
    source.api().put("vm.resize", &wish).ok();
    let numbers = |vmm: &Vmm| {
        let config = vmm.api().get("vm.info").ok().json()["config"].clone();
        (config["cpus"]["boot_vcpus"].clone(), config["memory"]["hotplugged_size"].clone())
    };
    wait_for("the memory", || (numbers(&source) == (json!(3), json!(128 << 20))).then_some(()));
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Unix, Mode::Precopy);
    is_on_platform(&destination);
    assert_eq!(numbers(&destination), (json!(3), json!(128 << 20)));
    destination.wait_for_work(2_000);
    destination.verify();
    destination.shut_down();
}

fn numbers() {
    let disk = Disk::new();
    let vmm = with_devices(&disk, 1, "workload=idle").start();
    let wanted = [
        ("__console", "0000:00:01.0"),
        ("data", "0000:00:02.0"),
        ("lan", "0000:00:03.0"),
        ("__rng", "0000:00:04.0"),
        ("__balloon", "0000:00:05.0"),
        ("__watchdog", "0000:00:06.0"),
        ("__pvpanic", "0000:00:07.0"),
    ];
    let mut found = places(&vmm.api());
    let mut wanted = wanted.map(|(id, bdf)| (id.to_owned(), bdf.to_owned())).to_vec();
    found.sort();
    wanted.sort();
    assert_eq!(found, wanted);
    vmm.shut_down();
}

fn comes() {
    let (first, second) = (Disk::new(), Disk::new());
    let vmm = with_devices(&first, 1, "workload=idle").start();
    vmm.wait_for_heartbeat();
    let body = json!({"path": second.file, "id": "more"}).to_string();
    let added = vmm.api().put("vm.add-disk", &body).ok().json();
    assert_eq!(added, json!({"id": "more", "bdf": "0000:00:08.0"}));
    let before = places(&vmm.api());
    let destination = Vmm::empty();
    migrate(vmm, &destination, Transport::Unix, Mode::Precopy);
    assert_eq!(places(&destination.api()), before);
    destination.shut_down();
}

fn refusals() {
    let config = |more: Value| {
        let mut config = json!({
            "payload": {"kernel": image()},
            "memory": {"size": 128 << 20, "shared": true},
            "platform": {"platform": NAME},
        });
        config.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
        config.to_string()
    };
    let vmm = Vmm::empty();
    for (more, named) in [
        (json!({"iommu": true}), "iommu"),
        (json!({"platform": {"platform": "cloud-hypervisor-99"}}), "cloud-hypervisor-99"),
    ] {
        let refused = vmm.api().put("vm.create", &config(more));
        assert!(refused.status >= 400 && refused.body.contains(named), "{refused:?}");
    }
    vmm.shut_down();
}
