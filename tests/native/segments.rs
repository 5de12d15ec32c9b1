// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices on another PCI segment than the first: the test guest finds one in the configuration space of segment 1,
//! drives it, is moved, saved and rebooted with it, and releases it. Linux guests with many devices are in the lab.

use std::fs::File;
use std::path::PathBuf;

use guest_reader::abi::{self, disk::BLOCKS, param};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::disks::{holds, write_more, written};
use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, image};
use crate::hotplug::places;
use crate::snapshot::{place, save};

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = format!("segments::a_guest_moves_with_a_disk_on_another_{}", mode.name());
        suite.add(&name, move || moves(mode));
    }
    suite.add("segments::a_guest_is_restored_with_a_disk_on_another", restored);
    suite.add("segments::a_disk_comes_to_another_and_is_ejected_there", comes_and_goes);
    suite.add("segments::forty_devices_stay_where_they_are", forty);
    suite.add("segments::what_cannot_be_is_refused", refusals);
    suite.add("segments::bars_without_room_are_refused_with_advice", no_room);
}

const MEMORY: &str = "size=128M,shared=on";
/// Configuration space of segment 1.
const ECAM: &str = "ecam=0xe8100000";
/// The guest puts BARs at an address that is in the middle of the 32-bit window, which is to be segment 1's.
const WEIGHT: &str = "pci_segment=1,mmio32_aperture_weight=7";

struct Images(TempDir);

impl Images {
    fn new() -> Self {
        Self(TempDir::with_prefix("godwit-disk-").expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        let path = self.0.path().join(name);
        if !path.exists() {
            File::create(&path).and_then(|file| file.set_len(8 << 20)).expect("a file");
        }
        path
    }

    fn option(&self, name: &str, segment: u16) -> String {
        format!("path={},id={name},pci_segment={segment}", self.path(name).display())
    }

    fn json(&self, name: &str, segment: u16) -> Value {
        json!({"path": self.path(name), "id": name, "pci_segment": segment})
    }
}

fn of_two(vcpus: u32, cmdline: &str) -> VmmBuilder {
    let platform = ["--platform", "num_pci_segments=2", "--pci-segment", WEIGHT];
    VmmBuilder::guest(vcpus, MEMORY, &format!("{cmdline} mem=16M {ECAM}")).with(&platform)
}

/// A guest that writes to a disk on segment 1, and finds no other there.
fn writing(images: &Images) -> Vmm {
    let disks = ["--disk", &images.option("data", 1), &images.option("other", 0)];
    let vmm = of_two(1, "workload=disk-write").with(&disks).start();
    write_more(&vmm, 2 * BLOCKS);
    vmm
}

#[track_caller]
fn is_at(vmm: &Vmm, id: &str, bdf: &str) {
    let places = places(&vmm.api());
    assert!(places.contains(&(id.to_owned(), bdf.to_owned())), "{id} is not at {bdf}: {places:?}");
}

fn moves(mode: Mode) {
    let images = Images::new();
    let source = writing(&images);
    is_at(&source, "data", "0001:00:01.0");
    is_at(&source, "other", "0000:00:01.0");
    let before = places(&source.api());
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Unix, mode);
    assert_eq!(places(&destination.api()), before);
    write_more(&destination, 2 * BLOCKS);
    destination.api().put("vm.pause", "").ok();
    holds(&images.path("data"), written(&destination));
    let other = std::fs::read(images.path("other")).expect("the image");
    assert!(other.iter().all(|byte| *byte == 0), "it was written to the wrong disk");
    destination.api().put("vm.resume", "").ok();
    destination.api().put("vm.reboot", "").ok();
    destination.wait_for_heartbeat();
    assert_eq!(places(&destination.api()), before);
    destination.shut_down();
}

fn restored() {
    let images = Images::new();
    let mut source = writing(&images);
    let before = places(&source.api());
    let (_folder, url) = place();
    save(&source, &url);
    source.signal(libc::SIGKILL);
    source.wait_for_exit();
    let vmm = Vmm::empty();
    vmm.remote_ok(&["restore", &format!("source_url={url},resume=true")]);
    assert_eq!(places(&vmm.api()), before);
    write_more(&vmm, 2 * BLOCKS);
    vmm.shut_down();
}

fn comes_and_goes() {
    let images = Images::new();
    // The second vCPU is what the guest lets go with.
    let vmm = of_two(2, "workload=idle vcpus=1").start();
    vmm.wait_for_heartbeat();
    let api = vmm.api();
    let before = places(&api);
    let added = api.put("vm.add-disk", &images.json("data", 1).to_string()).ok().json();
    assert_eq!(added, json!({"id": "data", "bdf": "0001:00:01.0"}));
    vmm.guest().set("workload=disk-write").expect("it listens");
    write_more(&vmm, BLOCKS);
    let config = api.get("vm.info").json()["config"].clone();
    assert_eq!(config["disks"][0]["pci_segment"], 1, "{config}");
    api.put("vm.remove-device", &json!({"id": "data"}).to_string()).ok();
    vmm.wait_for_event("device-removing");
    let guest = vmm.guest();
    let released = 1 << 32 | 1 << 1;
    guest.memory().set_word(abi::PARAM_GPA + param::EJECT, released).expect("the parameter page");
    vmm.wait_for_event("device-removed");
    assert_eq!(places(&api), before);
    holds(&images.path("data"), written(&vmm));
    vmm.shut_down();
}

/// The window of segment 1 has room for the BAR of one device.
fn no_room() {
    let images = Images::new();
    let (code, output) = VmmBuilder::new(&["--kernel", image(), "--memory", MEMORY])
        .with(&["--cpus", "boot=1,max_phys_bits=33", "--platform", "num_pci_segments=2"])
        .with(&["--pci-segment", "pci_segment=0,mmio64_aperture_weight=50000"])
        .with(&["--disk", &images.option("data", 1), &images.option("more", 1)])
        .bare()
        .run();
    assert!(code != 0, "{output}");
    for said in [
        "'more'",
        "the 64-bit BARs of PCI segment 1 need",
        "pci_segment=1,mmio64_aperture_weight=2 is enough",
        "address bits are enough for them, and the VM has 33",
        "no room for BAR 0 of PCI device more",
    ] {
        assert!(output.contains(said), "{said}: {output}");
    }
}

/// More than one segment has places for, and all of them when the guest boots, after a move, and after a reboot.
fn forty() {
    let images = Images::new();
    let mut disks = vec!["--disk".to_owned()];
    disks.extend((0..40_u16).map(|number| images.option(&format!("d{number}"), number % 4)));
    let vmm = VmmBuilder::guest(1, MEMORY, "workload=random-write mem=16M")
        .with(&["--platform", "num_pci_segments=4"])
        .with(&disks)
        .start();
    vmm.wait_for_heartbeat();
    let before = places(&vmm.api());
    for segment in 0..4 {
        let start = format!("000{segment}:00:");
        assert!(
            before.iter().filter(|(_, bdf)| bdf.starts_with(&start)).count() >= 10,
            "{before:?}"
        );
    }
    let destination = Vmm::empty();
    migrate(vmm, &destination, Transport::Unix, Mode::Precopy);
    let api = destination.api();
    assert_eq!(places(&api), before);
    api.put("vm.reboot", "").ok();
    destination.wait_for_heartbeat();
    assert_eq!(places(&api), before);
    destination.shut_down();
}

fn refusals() {
    let images = Images::new();
    let vmm = of_two(1, "workload=idle").start();
    vmm.wait_for_heartbeat();
    let api = vmm.api();
    let added = api.put("vm.add-disk", &images.json("data", 2).to_string());
    assert!(added.status == 400 && added.body.contains("no PCI segment 2"), "{added:?}");
    vmm.shut_down();
    for (arguments, why) in [
        (["--platform", "num_pci_segments=97"], "num_pci_segments=97 is not 1 to 96"),
        (["--platform", "num_pci_segments=0"], "num_pci_segments=0 is not 1 to 96"),
        (["--pci-segment", "pci_segment=1"], "there is no PCI segment 1"),
        (
            ["--pci-segment", "pci_segment=0,mmio64_aperture_weight=0"],
            "mmio64_aperture_weight is 0",
        ),
        (["--platform", "num_pci_segments=2,iommu_segments=[2]"], "iommu_segments"),
    ] {
        let (code, output) =
            VmmBuilder::guest(1, MEMORY, "workload=idle").with(&arguments).bare().run();
        assert!(code == 2 && output.contains(why), "{arguments:?}: {code} {output}");
    }
}
