// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Images in a format: what the guest counts as written is found in them whenever another host may look there,
//! and none is taken for one unless that is said.

use std::fs::{self, File};

use guest_reader::abi::disk::BLOCKS;
use serde_json::{Value, json};

use crate::disks::{DISK_BYTES, Disk, MEMORY, is_locked, moves, write_more, written};
use crate::harness::migrate::{Reception, wait_for_done};
use crate::harness::{Mode, Suite, Transport, Vmm, qcow2};

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = format!("disk_formats::a_qcow2_image_goes_with_its_guest_{}", mode.name());
        suite.add(&name, move || moves(&qcow2_disk(2 * DISK_BYTES), mode));
    }
    suite.add("disk_formats::a_qcow2_image_is_whole_after_a_pause_and_a_reboot", in_one_process);
    suite
        .add("disk_formats::a_qcow2_image_is_closed_by_a_signal_as_the_last_page_comes", signalled);
    suite.add("disk_formats::a_qcow2_image_is_taken_for_one_only_if_that_is_said", unsaid);
}

/// An empty image in a file of so many bytes, so that it has room to grow on a loop device.
fn qcow2_disk(file_bytes: u64) -> Disk {
    let mut disk = Disk::new();
    disk.option = ",image_type=qcow2";
    disk.contents = |image| qcow2::contents(&image);
    fs::write(&disk.file, qcow2::empty(DISK_BYTES)).expect("an image");
    let file = File::options().write(true).open(&disk.file).expect("the image");
    file.set_len(file_bytes).expect("room");
    disk
}

/// The file grows by itself.
fn in_one_process() {
    let empty_bytes = u64::try_from(qcow2::empty(DISK_BYTES).len()).expect("short");
    let disk = qcow2_disk(empty_bytes);
    disk.name_is(&disk.file);
    let vmm = disk.guest();
    for _ in 0..3 {
        vmm.api().put("vm.pause", "").ok();
        disk.holds(written(&vmm));
        vmm.api().put("vm.resume", "").ok();
        write_more(&vmm, BLOCKS);
    }
    vmm.api().put("vm.reboot", "").ok();
    assert!(is_locked(&disk.file));
    write_more(&vmm, 2 * BLOCKS);
    vmm.api().put("vm.pause", "").ok();
    disk.holds(written(&vmm));
    vmm.api().put("vm.shutdown", "").ok();
    assert!(!is_locked(&disk.file));
    vmm.shut_down();
}

/// The threads of the connections still end then.
fn signalled() {
    assert!((0..20).any(|_| is_signalled_early()), "each end was processed before it was seen");
}

/// Whether the signal came before the end was processed.
fn is_signalled_early() -> bool {
    let disk = qcow2_disk(2 * DISK_BYTES);
    disk.name_is(&disk.file);
    let mut source = disk.guest();
    let mut destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Postcopy);
    let option =
        format!("destination_url={},memory_mode=postcopy,connections=64,preempt=8", reception.url);
    source.remote_ok(&["send-migration", &option]);
    let is_early = wait_for_done(&destination);
    destination.signal(libc::SIGTERM);
    assert_eq!(destination.wait_for_exit(), 0, "{}", destination.output());
    assert!(reception.finish().status.success(), "{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    assert!(destination.event_names().contains(&"shutdown".to_owned()));
    // One that was not closed is refused.
    disk.guest().shut_down();
    is_early
}

fn unsaid() {
    let disk = qcow2_disk(DISK_BYTES);
    let vmm = Vmm::boot(1, MEMORY, "workload=idle mem=16M");
    let add = |disk: Value| vmm.api().put("vm.add-disk", &disk.to_string());
    let refused = add(json!({"path": disk.file, "id": "data"})).body;
    assert!(refused.contains("image_type=qcow2"), "{refused}");
    // An image that names a file is no less refused where the file is there.
    let backed = disk.file.with_extension("backed");
    let mut image = qcow2::empty(DISK_BYTES);
    image[8..20].copy_from_slice(&[0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 4]);
    image[0x100..0x104].copy_from_slice(b"file");
    fs::write(&backed, image).expect("an image");
    let refused = add(json!({"path": backed, "id": "data", "image_type": "Qcow2"})).body;
    assert!(refused.contains("backing_files=on"), "{refused}");
    add(json!({"path": disk.file, "id": "data", "image_type": "Qcow2"})).ok();
    vmm.shut_down();
}
