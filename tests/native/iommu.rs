// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtual IOMMU: a disk whose driver uses addresses that it translates, with mappings that change with each
//! request, over reboots, moves and a restore; and what may be behind it.
//!
//! The guest begins with an access that is not mapped, which has to stop the disk and to be reported.

use std::fs;
use std::path::Path;

use guest_reader::abi::disk::BLOCKS;
use serde_json::json;
use tempfile::TempDir;

use crate::disks::{DISK_BYTES, holds, write_more, written};
use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder};

pub fn add(suite: &mut Suite) {
    suite.add("iommu::a_disk_is_written_by_translated_addresses", writes);
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = format!("iommu::mappings_move_in_{}", mode.name());
        suite.add(&name, move || moves(mode));
    }
    suite.add("iommu::mappings_are_restored", restores);
    suite.add("iommu::devices_are_added_in_its_segments", added);
}

const MEMORY: &str = "size=128M,shared=on";
const GUEST: &str = "workload=iommu-disk mem=16M";

fn started(folder: &Path, more: &[&str]) -> Vmm {
    let image = folder.join("disk");
    fs::File::create(&image).and_then(|file| file.set_len(DISK_BYTES)).expect("an image");
    let option = format!("path={},id=data,iommu=on", image.display());
    let vmm = VmmBuilder::guest(1, MEMORY, GUEST).with(&["--disk", &option]).with(more).start();
    write_more(&vmm, 2 * BLOCKS);
    vmm
}

fn folder() -> TempDir {
    TempDir::with_prefix("godwit-iommu-").expect("a folder")
}

fn writes() {
    let folder = folder();
    let vmm = started(folder.path(), &["--platform", "iommu_address_width=40"]);
    let info = vmm.api().get("vm.info").ok().json();
    assert_eq!(info["config"]["iommu"], true, "{info}");
    let refused = vmm.api().put("vm.remove-device", &json!({"id": "data"}).to_string());
    assert!(refused.body.contains("behind the IOMMU"), "{}", refused.body);
    vmm.remote_ok(&["reboot"]);
    write_more(&vmm, BLOCKS);
    vmm.remote_ok(&["pause"]);
    holds(&folder.path().join("disk"), written(&vmm));
    vmm.remote_ok(&["resume"]);
    write_more(&vmm, 1);
    vmm.shut_down();
}

fn moves(mode: Mode) {
    let folder = folder();
    let mut vmm = started(folder.path(), &[]);
    for _ in 0..2 {
        let destination = VmmBuilder::new::<&str>(&[]).start();
        migrate(vmm, &destination, Transport::Unix, mode);
        write_more(&destination, BLOCKS);
        vmm = destination;
    }
    vmm.shut_down();
}

fn restores() {
    let folder = folder();
    let vmm = started(folder.path(), &[]);
    let saved = TempDir::new().expect("a folder");
    let url = format!("file://{}", saved.path().display());
    vmm.remote_ok(&["pause"]);
    vmm.remote_ok(&["snapshot", &url]);
    vmm.shut_down();
    let restored = VmmBuilder::new::<&str>(&[]).start();
    restored.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
    write_more(&restored, BLOCKS);
    restored.shut_down();
}

fn added() {
    let folder = folder();
    let vmm = started(folder.path(), &["--platform", "num_pci_segments=2,iommu_segments=[1]"]);
    let image = folder.path().join("second");
    fs::File::create(&image).and_then(|file| file.set_len(DISK_BYTES)).expect("an image");
    let add = |segment: u16, iommu: bool| {
        let disk = json!({"path": image, "id": "second", "pci_segment": segment, "iommu": iommu});
        vmm.api().put("vm.add-disk", &disk.to_string())
    };
    let refused = add(0, true);
    assert!(refused.body.contains("iommu_segments"), "{}", refused.body);
    let refused = add(1, false);
    assert!(refused.body.contains("iommu=on"), "{}", refused.body);
    add(1, true).ok();
    write_more(&vmm, 1);
    vmm.shut_down();
}
