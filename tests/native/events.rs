// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The event monitor: which events a life gives, in which order, and their form.

use crate::harness::{Suite, Vmm, wait_for};
use crate::lifecycle::config;

pub fn add(suite: &mut Suite) {
    suite.add("events::life_of_a_vm", life);
}

fn life() {
    let vmm = Vmm::empty();
    let api = vmm.api();
    api.put("vm.create", &config(128)).ok();
    for step in ["vm.boot", "vm.pause", "vm.resume", "vm.shutdown", "vm.delete"] {
        api.put(step, "").ok();
    }
    let wanted = [
        ("vmm", "starting"),
        ("vm", "booting"),
        ("vm", "booted"),
        ("vm", "pausing"),
        ("vm", "paused"),
        ("vm", "resuming"),
        ("vm", "resumed"),
        ("vm", "shutdown"),
        ("vm", "deleted"),
    ];
    let events = wait_for("the last event", || {
        let events = vmm.events();
        events.iter().any(|event| event["event"] == "deleted").then_some(events)
    });
    let mut next = 0;
    let mut last = (0, 0);
    for event in &events {
        let time = &event["timestamp"];
        let time = (time["secs"].as_u64().expect("secs"), time["nanos"].as_u64().expect("nanos"));
        assert!(time >= last, "time runs backwards: {events:?}");
        last = time;
        assert!(event.get("properties").is_some(), "{event}");
        if next < wanted.len()
            && (event["source"] == wanted[next].0)
            && event["event"] == wanted[next].1
        {
            next += 1;
        }
    }
    assert_eq!(next, wanted.len(), "{:?} is missing in {events:?}", wanted.get(next));
    vmm.shut_down();
}
