// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Disks that get another size while the guest writes to them: it loses nothing, and neither does its next host.

use std::fs::{self, File};

use guest_reader::abi::PAGE_BYTES;
use guest_reader::abi::disk::BLOCKS;
use serde_json::json;

use crate::disks::{DISK_BYTES, Disk, MEMORY, is_locked, write_more, written};
use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm};

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = format!("disk_sizes::a_disk_grows_shrinks_and_moves_by_{}", mode.name());
        suite.add(&name, move || grows_and_moves(mode));
    }
    suite.add("disk_sizes::a_size_that_is_impossible_changes_nothing", impossible);
}

fn resize(vmm: &Vmm, id: &str, size_bytes: u64) -> crate::harness::api::Answer {
    vmm.api().put("vm.resize-disk", &json!({"id": id, "desired_size": size_bytes}).to_string())
}

fn len_bytes(disk: &Disk) -> u64 {
    fs::metadata(&disk.file).expect("the file").len()
}

fn grows_and_moves(mode: Mode) {
    let disk = Disk::new();
    disk.name_is(&disk.file);
    let source = disk.guest();
    resize(&source, "data", 8 * DISK_BYTES).ok();
    assert_eq!(len_bytes(&disk), 8 * DISK_BYTES);
    write_more(&source, BLOCKS);
    // What the guest uses and no more: its requests are between others while that happens.
    let used_bytes = BLOCKS * PAGE_BYTES;
    for size_bytes in [used_bytes, 2 * DISK_BYTES, used_bytes, DISK_BYTES / 2] {
        resize(&source, "data", size_bytes).ok();
        assert_eq!(len_bytes(&disk), size_bytes);
        write_more(&source, BLOCKS / 2);
    }
    source.wait_for_event("disk-resized");
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    write_more(&destination, 2 * BLOCKS);
    resize(&destination, "data", DISK_BYTES).ok();
    destination.api().put("vm.pause", "").ok();
    disk.holds(written(&destination));
    // Also while the VM is paused.
    resize(&destination, "data", 2 * DISK_BYTES).ok();
    assert_eq!(destination.api().state(), "Paused");
    destination.api().put("vm.resume", "").ok();
    write_more(&destination, BLOCKS);
    destination.api().put("vm.reboot", "").ok();
    write_more(&destination, BLOCKS);
    destination.api().put("vm.shutdown", "").ok();
    assert_eq!(len_bytes(&disk), 2 * DISK_BYTES);
    assert!(!is_locked(&disk.file), "all of it is free");
    destination.shut_down();
}

fn impossible() {
    let disk = Disk::new();
    disk.name_is(&disk.file);
    let vmm = disk.guest();
    for (id, size_bytes, status, why) in [
        ("other", DISK_BYTES, 404, "no disk 'other'"),
        ("data", DISK_BYTES + 1, 500, "multiple of its block size, 512 bytes"),
        ("data", 0, 500, "not zero"),
        ("data", 1 << 62, 500, "the host cannot change it"),
    ] {
        let answer = resize(&vmm, id, size_bytes);
        assert!(answer.status == status && answer.body.contains(why), "{answer:?}");
        assert_eq!(len_bytes(&disk), DISK_BYTES);
    }
    let nothing = vmm.api().put("vm.resize-disk", r#"{"id":"data"}"#);
    assert!(nothing.status == 400 && nothing.body.contains("desired_size"), "{nothing:?}");
    write_more(&vmm, BLOCKS);
    vmm.shut_down();

    let file = File::create(disk.file.with_extension("second")).expect("a file");
    file.set_len(DISK_BYTES).expect("its length");
    let vmm = Vmm::boot(1, MEMORY, "workload=idle mem=16M");
    let path = disk.file.with_extension("second");
    let readonly = json!({"path": path, "id": "second", "readonly": true}).to_string();
    vmm.api().put("vm.add-disk", &readonly).ok();
    let answer = resize(&vmm, "second", 2 * DISK_BYTES);
    assert!(answer.status == 500 && answer.body.contains("read-only"), "{answer:?}");
    vmm.shut_down();
}
