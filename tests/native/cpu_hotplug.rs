// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vCPUs that come and go under a guest that does not look at them: what the VMM has, saves, moves and starts anew.
//! Guests that take them up are the lab's.

use serde_json::json;

use crate::harness::api::Answer;
use crate::harness::migrate::migrate;
use crate::harness::process::thread_names;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, image};

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name =
            format!("cpu_hotplug::vcpus_that_the_guest_has_not_taken_up_move_by_{}", mode.name());
        suite.add(&name, move || moves(mode));
    }
    suite.add("cpu_hotplug::vcpus_are_added_saved_and_restored_in_a_pause", paused);
    suite.add("cpu_hotplug::a_reboot_ends_what_the_guest_does_not", reboots);
    suite.add("cpu_hotplug::impossible_numbers_change_nothing", impossible);
}

const MEMORY: &str = "size=128M,shared=on";
const WORK: &str = "workload=random-write mem=32M";

fn start(cpus: &str) -> Vmm {
    let arguments = ["--serial", "off", "--console", "off", "--kernel", image()];
    let vmm = VmmBuilder::new(&arguments)
        .with(&["--cpus", cpus, "--memory", MEMORY, "--cmdline", WORK])
        .start();
    vmm.wait_for_heartbeat();
    vmm
}

fn resize(vmm: &Vmm, vcpus: u32) -> Answer {
    vmm.api().put("vm.resize", &json!({"desired_vcpus": vcpus}).to_string())
}

fn in_info(vmm: &Vmm) -> u64 {
    let info = vmm.api().get("vm.info").ok().json();
    info["config"]["cpus"]["boot_vcpus"].as_u64().expect("a number")
}

fn threads(vmm: &Vmm) -> usize {
    thread_names(vmm.pid()).iter().filter(|name| name.starts_with("vcpu")).count()
}

#[track_caller]
fn has(vmm: &Vmm, vcpus: u32) {
    assert_eq!((in_info(vmm), threads(vmm)), (vcpus.into(), vcpus as usize));
}

fn moves(mode: Mode) {
    let source = start("boot=2,max=6");
    resize(&source, 5).ok();
    has(&source, 5);
    source.wait_for_event("vcpus-resized");
    source.wait_for_work(2_000);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    has(&destination, 5);
    destination.wait_for_work(2_000);
    destination.verify();
    // The guest does not eject; more can come all the same.
    resize(&destination, 3).ok();
    resize(&destination, 6).ok();
    has(&destination, 6);
    destination.verify();
    destination.shut_down();
}

fn paused() {
    let vmm = start("boot=1,max=3");
    vmm.api().put("vm.pause", "").ok();
    resize(&vmm, 3).ok();
    has(&vmm, 3);
    assert_eq!(vmm.api().state(), "Paused");
    let folder = vmm.path("snapshot");
    std::fs::create_dir(&folder).expect("a folder");
    let url = format!("file://{}", folder.display());
    vmm.api().put("vm.snapshot", &json!({"destination_url": url}).to_string()).ok();
    let restored = Vmm::empty();
    restored.remote_ok(&["restore", &format!("source_url={url},resume=true")]);
    restored.wait_for_event("restored");
    has(&restored, 3);
    restored.wait_for_heartbeat();
    restored.verify();
    restored.shut_down();
    vmm.api().put("vm.resume", "").ok();
    vmm.wait_for_heartbeat();
    vmm.verify();
    vmm.shut_down();
}

fn reboots() {
    let vmm = start("boot=1,max=4");
    resize(&vmm, 4).ok();
    resize(&vmm, 2).ok();
    // The guest was asked and does nothing.
    has(&vmm, 4);
    vmm.api().put("vm.reboot", "").ok();
    vmm.wait_for_heartbeat();
    has(&vmm, 2);
    resize(&vmm, 3).ok();
    has(&vmm, 3);
    vmm.api().put("vm.reboot", "").ok();
    vmm.wait_for_heartbeat();
    has(&vmm, 3);
    vmm.verify();
    vmm.shut_down();
}

fn impossible() {
    let vmm = start("boot=2,max=3");
    for vcpus in [0, 4, 254, u32::MAX] {
        let answer = resize(&vmm, vcpus);
        assert!(answer.status == 400 && answer.body.contains("1 to 3 vCPUs"), "{answer:?}");
        has(&vmm, 2);
    }
    resize(&vmm, 2).ok();
    has(&vmm, 2);
    vmm.verify();
    vmm.shut_down();
    let vmm = Vmm::empty();
    assert_eq!(resize(&vmm, 1).status, 404);
    vmm.shut_down();
}
