// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The balloon through the API: what a person sees of it, and its size, which outlives a reboot and
//! a migration. The test guest has no driver for it; what guests do with it is for the lab.

use serde_json::Value;

use crate::harness::{Suite, Vmm};
use crate::lifecycle::config;

pub fn add(suite: &mut Suite) {
    suite.add("balloon::size_is_kept_through_a_reboot", size_is_kept);
    suite.add("balloon::impossible_sizes_are_refused", impossible_sizes);
}

fn with_balloon() -> String {
    let mut config: Value = serde_json::from_str(&config(128)).expect("a configuration");
    config["balloon"] = serde_json::json!({
        "size": 16 << 20,
        "free_page_reporting": true,
        "free_page_hinting": true,
        "statistics_interval_s": 1,
    });
    config.to_string()
}

fn start() -> Vmm {
    let vmm = Vmm::empty();
    let api = vmm.api();
    api.put("vm.create", &with_balloon()).ok();
    api.put("vm.boot", "").ok();
    vmm.wait_for_heartbeat();
    vmm
}

fn info(vmm: &Vmm) -> Value {
    let answer = vmm.api().get("vm.info");
    serde_json::from_str(&answer.body).expect("vm.info is JSON")
}

fn size_is_kept() {
    let vmm = start();
    let api = vmm.api();
    let before = info(&vmm);
    assert_eq!(before["balloon"]["target_bytes"], 16 << 20);
    // Nobody has given anything up.
    assert_eq!(before["memory_actual_size"], 128 << 20);
    assert!(before["device_tree"]["__balloon"]["pci_bdf"].is_string(), "{before}");
    api.put("vm.resize", r#"{"desired_balloon":33554432,"desired_vcpus":2}"#).ok();
    for _ in 0..2 {
        let now = info(&vmm);
        assert_eq!(now["balloon"]["target_bytes"], 32 << 20);
        assert_eq!(now["config"]["balloon"]["size"], 32 << 20);
        api.put("vm.reboot", "").ok();
        vmm.wait_for_heartbeat();
    }
    let counters: Value =
        serde_json::from_str(&api.get("vm.counters").body).expect("vm.counters is JSON");
    assert_eq!(counters["__balloon"]["inflated_pages"], 0);
    vmm.verify();
    vmm.shut_down();
}

fn impossible_sizes() {
    let vmm = start();
    let api = vmm.api();
    let refused = |body: &str, status: u16, why: &str| {
        let answer = api.put("vm.resize", body);
        assert!(answer.status == status && answer.body.contains(why), "{body}: {answer:?}");
    };
    refused(r#"{"desired_balloon":1073741824}"#, 400, "does not fit");
    refused(r#"{"desired_vcpus":1}"#, 501, "cannot be changed");
    refused(r#"{"desired_ram":1073741824}"#, 501, "cannot be changed");
    api.put("vm.resize", "{}").ok();
    assert_eq!(info(&vmm)["balloon"]["target_bytes"], 16 << 20);
    vmm.shut_down();
    let vmm = Vmm::empty();
    assert_eq!(vmm.api().put("vm.resize", r#"{"desired_balloon":0}"#).status, 404);
    vmm.shut_down();
    let vmm = Vmm::boot(1, "size=128M,shared=on", "workload=idle prefill=0");
    let answer = vmm.api().put("vm.resize", r#"{"desired_balloon":0}"#);
    assert!(answer.status == 400 && answer.body.contains("no balloon"), "{answer:?}");
    vmm.shut_down();
}
