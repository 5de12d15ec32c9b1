// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory that is populated in the background: the guest runs meanwhile, people can watch it, and it
//! ends with the VM.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::harness::{Suite, Vmm, VmmBuilder, process, wait_for};

pub fn add(suite: &mut Suite) {
    suite.add("prefault::in_the_background_while_the_guest_runs", while_the_guest_runs);
    suite.add("prefault::before_boot_is_told_too", before_boot);
    suite.add("prefault::before_boot_can_be_watched_and_ended", watched_and_ended);
    suite.add("prefault::ends_with_the_vm", ends_with_the_vm);
}

/// In which the API answers while all of the memory takes seconds.
const PROMPT: Duration = Duration::from_secs(1);

fn count(vmm: &Vmm, event: &str) -> usize {
    vmm.event_names().iter().filter(|name| *name == event).count()
}

fn while_the_guest_runs() {
    let memory = "size=2G,shared=on,thp=off,prefault=background,prefault_threads=1";
    let vmm = Vmm::boot(1, memory, "workload=random-write mem=32M");
    let info = vmm.api().get("vm.info").ok().json();
    assert_eq!(info["config"]["memory"]["prefault"], "background");
    assert_eq!(info["prefault"]["total_bytes"], 2_u64 << 30, "{info}");
    let completed = vmm.wait_for_event("prefault-completed");
    assert_eq!(completed["properties"]["done_bytes"], (2_u64 << 30).to_string());
    let info = vmm.api().get("vm.info").ok().json();
    assert_eq!(info["prefault"]["state"], "Completed");
    assert_eq!(info["prefault"]["done_bytes"], 2_u64 << 30);
    assert_eq!((count(&vmm, "prefault-started"), count(&vmm, "prefault-progress")), (1, 9));
    let resident_kib = process::status_kib(vmm.pid(), "RssShmem");
    assert!(resident_kib >= 2 << 20, "{resident_kib} KiB of 2 GiB are resident");
    vmm.wait_for_work(5_000);
    vmm.verify();
    vmm.shut_down();
}

fn before_boot() {
    let memory = "size=512M,shared=on,prefault=on,prefault_threads=2";
    let vmm = VmmBuilder::guest(1, memory, "workload=idle prefill=0").start();
    vmm.guest();
    vmm.wait_for_event("booted");
    let names = vmm.event_names();
    let at = |event: &str| names.iter().position(|name| name == event);
    assert!(at("prefault-completed") < at("booted") && at("prefault-completed").is_some());
    assert!(vmm.api().get("vm.info").ok().json()["prefault"].is_null());
    vmm.shut_down();
}

fn watched_and_ended() {
    let memory = "size=6G,shared=on,thp=off,prefault=on,prefault_threads=1";
    let mut vmm = VmmBuilder::guest(1, memory, "workload=idle prefill=0").start_at_once();
    vmm.wait_for_event("prefault-started");
    // Populated in seconds.
    let asked = Instant::now();
    let info = vmm.api().get("vm.info").ok().json();
    assert!(asked.elapsed() < PROMPT, "vm.info took {:?}", asked.elapsed());
    assert_eq!((&info["state"], &info["doing"]), (&json!("Created"), &json!("booted")), "{info}");
    assert_eq!(info["prefault"]["state"], "Running", "{info}");
    assert_eq!(info["prefault"]["total_bytes"], 6_u64 << 30, "{info}");
    vmm.wait_for_event("prefault-progress");
    let info = vmm.api().get("vm.info").ok().json();
    assert!(info["prefault"]["done_bytes"].as_u64() >= Some((6 << 30) / 10), "{info}");
    vmm.signal(libc::SIGTERM);
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
    let count = |event| count(&vmm, event);
    assert_eq!(
        (count("prefault-cancelled"), count("prefault-completed"), count("booted")),
        (1, 0, 0)
    );
}

fn ends_with_the_vm() {
    let memory = "size=6G,shared=on,thp=off,prefault=background,prefault_threads=1";
    let vmm = VmmBuilder::guest(1, memory, "workload=idle prefill=0").start();
    vmm.wait_for_event("prefault-started");
    vmm.wait_for_event("booted");
    let threads = process::threads(vmm.pid());
    vmm.api().put("vm.shutdown", "").ok();
    vmm.wait_for_event("prefault-cancelled");
    assert_eq!(count(&vmm, "prefault-completed"), 0);
    wait_for("the end of its threads", || (process::threads(vmm.pid()) < threads).then_some(()));
    wait_for("the end of its memory", || {
        (process::status_kib(vmm.pid(), "RssShmem") < 1 << 10).then_some(())
    });
    vmm.shut_down();
}
