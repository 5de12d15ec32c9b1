// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the event monitor tells of the drivers of a guest.

use serde_json::Value;

use crate::disks::Disk;
use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, wait_for};

pub fn add(suite: &mut Suite) {
    suite.add("driver_events::each_activation_is_told_wherever_the_guest_is", activations);
}

/// Waits until the driver of the disk has activated it so often.
#[track_caller]
fn wait_until_activated(vmm: &Vmm, times: usize) {
    let is_meant = |event: &&Value| {
        event["source"] == "virtio-device"
            && event["event"] == "activated"
            && event["properties"]["id"] == "data"
    };
    let are_told = || vmm.events().iter().filter(is_meant).count() == times;
    wait_for("the driver's events", || are_told().then_some(()));
}

fn activations() {
    let disk = Disk::new();
    disk.name_is(&disk.file);
    let vmm = disk.guest();
    wait_until_activated(&vmm, 1);
    vmm.api().put("vm.reboot", "").ok();
    wait_until_activated(&vmm, 2);
    let there = Vmm::empty();
    migrate(vmm, &there, Transport::Unix, Mode::Precopy);
    wait_until_activated(&there, 1);
    there.shut_down();
}
