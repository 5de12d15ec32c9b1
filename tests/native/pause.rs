// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Pause and resume, over and over, while every vCPU writes: no kick is lost, no state is torn.

use std::time::Instant;

use crate::harness::{Suite, Vmm};

pub fn add(suite: &mut Suite) {
    suite.add("pause::stress_1_vcpu", || stress(1, 200));
    suite.add("pause::stress_2_vcpus", || stress(2, 200));
    suite.add("pause::stress_4_vcpus", || stress(4, 60));
}

fn stress(vcpus: u32, rounds: u32) {
    let vmm = Vmm::boot(vcpus, "size=192M,shared=on", "workload=random-write mem=64M");
    let api = vmm.api();
    let guest = vmm.guest();
    let mut longest_ms = 0;
    for round in 0..rounds {
        let start = Instant::now();
        api.put("vm.pause", "").ok();
        longest_ms = longest_ms.max(start.elapsed().as_millis());
        if round % 20 == 0 {
            vmm.verify_paused();
            let before = guest.heartbeat().expect("a heartbeat");
            assert_eq!(before, guest.heartbeat().expect("a heartbeat"));
        }
        api.put("vm.resume", "").ok();
        if round % 20 == 0 {
            vmm.wait_for_heartbeat();
        }
    }
    vmm.wait_for_heartbeat();
    vmm.verify();
    println!("     {rounds} pauses of {vcpus} vCPUs, the longest took {longest_ms} ms");
    vmm.shut_down();
}
