// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Registers of hot-plug, which have something to act upon: vCPUs, memory and disks that come and are to go while a guest
//! writes anything to them.

use std::time::{Duration, Instant};

use serde_json::json;

use super::machine::{Attackable, Disks};
use super::{BETWEEN, seconds, seed, watch, watch_while};
use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, wait_for};

pub fn add(suite: &mut Suite, limit: Duration) {
    for (name, platform) in [
        ("hostile::registers_of_hotplug_are_attacked", None),
        (
            "hostile::registers_of_hotplug_are_attacked_on_cloud_hypervisor_53",
            Some("cloud-hypervisor-53"),
        ),
    ] {
        suite.add_long(name, limit, move || attacked(platform));
    }
}

/// Rubbish in rings, functions that are put back, ports, registers.
const KINDS: u64 = 1 << 4 | 1 << 10 | 1 << 12 | 1 << 13;
/// Within which the guest ejects something of each kind by chance.
const CHANCE: Duration = Duration::from_secs(90);
/// What has to happen.
const CHANGES: [&str; 4] = ["device-added", "device-removed", "vcpus-resized", "vcpus-removed"];
/// Few, and many.
const VCPUS: [u32; 2] = [3, 6];
const RAM_BYTES: u64 = 256 << 20;
const STEP_BYTES: u64 = 128 << 20;
/// Memory devices that there are registers for.
const MEMORY_STEPS: u64 = 8;
/// Between two changes.
const PERIOD: Duration = Duration::from_millis(150);

/// Disks that there are at most besides.
const DISKS_MAX: usize = 6;

/// What comes and goes.
struct Meddler<'a> {
    disks: &'a Disks,
    round: u64,
    next: Instant,
    refused: u64,
}

impl<'a> Meddler<'a> {
    fn new(disks: &'a Disks) -> Self {
        Self { disks, round: 0, next: Instant::now(), refused: 0 }
    }

    /// The next change, if it is time for that.
    fn meddle(&mut self, vmm: &Vmm) {
        if Instant::now() < self.next {
            return;
        }
        let (request, body) = match self.round % 4 {
            0 => ("vm.resize", json!({"desired_vcpus": VCPUS[1]})),
            1 if count(vmm, "device-added") < count(vmm, "device-removed") + DISKS_MAX => {
                let name = format!("more{}", self.round);
                ("vm.add-disk", json!({"path": self.disks.add(&name), "id": name}))
            }
            2 => {
                let steps = (self.round / 8).min(MEMORY_STEPS);
                let wish = RAM_BYTES + steps * STEP_BYTES;
                ("vm.resize", json!({"desired_vcpus": VCPUS[0], "desired_ram": wish}))
            }
            // The first of those that are there.
            _ => match added(vmm).first() {
                Some(id) => ("vm.remove-device", json!({"id": id})),
                None => ("vm.power-button", json!({})),
            },
        };
        let answer = vmm.api().put(request, &body.to_string());
        if answer.status >= 300 {
            self.refused += 1;
            println!("{request} {body}: {answer:?}");
        }
        self.round += 1;
        self.next = Instant::now() + PERIOD;
    }
}

/// Ids of the disks that have been added.
fn added(vmm: &Vmm) -> Vec<String> {
    let info = vmm.api().get("vm.info").ok().json();
    let disks = info["config"]["disks"].as_array().into_iter().flatten();
    let ids = disks.filter_map(|disk| disk["id"].as_str());
    ids.filter(|id| id.starts_with("more")).map(str::to_owned).collect()
}

fn count(vmm: &Vmm, event: &str) -> usize {
    vmm.event_names().iter().filter(|name| *name == event).count()
}

fn attacked(platform: Option<&'static str>) {
    let disks = Disks::new();
    let mut machine = Attackable::bare(&disks, seed() + 5);
    machine.can_grow();
    machine.attack(KINDS, 0);
    machine.add(&["--balloon", "size=16M,free_page_reporting=on"]);
    machine.add(&["--disk", &disks.option("a", "image_type=raw")]);
    let option = platform.map(|name| format!("platform={name}"));
    if let Some(option) = &option {
        machine.add(&["--platform", option]);
    }
    let mut vmm = machine.start();
    let (mut meddler, start) = (Meddler::new(&disks), Instant::now());
    let mut time = Duration::from_secs(seconds());
    let missing = |vmm: &Vmm| CHANGES.into_iter().find(|event| count(vmm, event) == 0);
    while !time.is_zero() {
        watch_while(&mut vmm, time, |vmm| meddler.meddle(vmm));
        let end = Duration::from_secs(seconds()) + CHANCE;
        let goes_on = missing(&vmm).is_some() && start.elapsed() < end;
        time = if goes_on { BETWEEN } else { Duration::ZERO };
    }
    println!("{} changes, of which {} were refused", meddler.round, meddler.refused);
    println!("{:?}", CHANGES.map(|event| (event, count(&vmm, event))));
    assert_eq!(missing(&vmm), None, "{:?}", vmm.event_names());
    // Not while a device goes that the guest has just ejected.
    wait_for("a pause", || (vmm.api().put("vm.pause", "").status < 300).then_some(()));
    vmm.verify_paused();
    let mut there = Vmm::empty();
    migrate(vmm, &there, Transport::Unix, Mode::Precopy);
    there.api().put("vm.resume", "").ok();
    watch(&mut there, BETWEEN);
    there.verify();
    there.shut_down();
}
