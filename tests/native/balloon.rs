// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The balloon through the API: what a person sees of it, and its size, which outlives a reboot and
//! a migration; and the test guest's driver for it, which makes use of what it is told of pages that
//! come back zeroed. What guests of today do with it is for the lab.

use std::os::unix::fs::MetadataExt as _;

use guest_reader::BalloonStatus;
use serde_json::Value;

use crate::harness::pool::Pool;
use crate::harness::{HugePages, Suite, Vmm, VmmBuilder, wait_for};
use crate::lifecycle::config;
use crate::prezero::assert_zero;

/// The proposed bits: of reported pages, and of those in the balloon.
const INIT_BITS: u64 = 0xc0;

pub fn add(suite: &mut Suite) {
    suite.add("balloon::size_is_kept_through_a_reboot", size_is_kept);
    suite.add("balloon::impossible_sizes_are_refused", impossible_sizes);
    suite.add("balloon::pages_that_the_guest_is_told_of_are_zero", told_pages);
    suite.add("balloon::huge_pages_that_the_guest_is_told_of_are_zero", told_huge_pages);
    suite.add("balloon::a_guest_that_is_told_nothing_zeroes_itself", told_nothing);
    suite.add("balloon::memory_of_the_pool_stays_lent_and_comes_back_whole", of_the_pool);
}

/// Runs the test guest until it has given all its pages up twice, by `workload`, and has checked that
/// all of them are zero when it takes them again, be it by its own doing. Every page of it is right
/// afterwards, as seen by the guest and from outside.
fn reuse(memory: &str, balloon: &str, words: &str) -> (BalloonStatus, Value) {
    let cmdline = format!("mem=64M iterations=2 {words}");
    let balloon = format!("size=0,free_page_reporting=on{balloon}");
    let vmm = VmmBuilder::guest(1, memory, &cmdline).with(&["--balloon", &balloon]).start();
    let status = wait_for("the end of the workload", || {
        Some(vmm.guest_status()).filter(|status| status.all_in("done"))
    });
    vmm.verify();
    let status = status.known().next().expect("a vCPU").balloon;
    assert_eq!(status.failure, None);
    let counters: Value =
        serde_json::from_str(&vmm.api().get("vm.counters").body).expect("vm.counters is JSON");
    vmm.shut_down();
    (status, counters["__balloon"].clone())
}

/// What `reuse` gave up at least: all but what is no whole block of 2 MiB.
const GIVEN_MIN: u64 = 2 * (62 << 20) / 4096;

fn told_pages() {
    for memory in ["size=192M,shared=on", "size=192M,mergeable=on"] {
        for workload in ["balloon-report", "balloon-inflate"] {
            let words = format!("workload={workload}");
            let (status, counters) = reuse(memory, ",prezero_hints=on", &words);
            assert_eq!(status.features & INIT_BITS, INIT_BITS);
            assert!(status.given_pages >= GIVEN_MIN, "{status:?}");
            assert_eq!(status.told_pages, status.given_pages, "{memory} {workload}: {status:?}");
            let given_back: u64 = ["reported_given_back_bytes", "inflated_given_back_bytes"]
                .iter()
                .filter_map(|name| counters[*name].as_u64())
                .sum();
            assert_eq!(given_back, status.given_pages * 4096, "{counters}");
        }
    }
}

fn told_huge_pages() {
    let _pages = HugePages::borrow(96);
    let memory = "size=192M,shared=on,hugepages=on,hugepage_size=2M";
    let (status, _) = reuse(memory, ",prezero_hints=on", "workload=balloon-report");
    assert_eq!(status.told_pages, status.given_pages);
    // Two or three requests make up a huge page: the guest is told with the last, and of its pages.
    let (status, _) = reuse(memory, ",prezero_hints=on", "workload=balloon-inflate");
    let share = status.told_pages * 100 / status.given_pages;
    assert!((25..=50).contains(&share), "{share} %: {status:?}");
}

fn told_nothing() {
    let memory = "size=192M,shared=on";
    // The option is off; the driver does not know the bits; it fills free pages with a pattern.
    for (balloon, words, bits) in [
        ("", "", 0),
        (",prezero_hints=on", "balloon_features=0x3f", 0),
        (",prezero_hints=on", "balloon_poison=0xaaaaaaaa", INIT_BITS),
    ] {
        for workload in ["balloon-report", "balloon-inflate"] {
            let (status, _) = reuse(memory, balloon, &format!("workload={workload} {words}"));
            assert_eq!(status.features & INIT_BITS, bits, "{balloon} {words}");
            assert!(status.given_pages >= GIVEN_MIN, "{status:?}");
            assert_eq!(status.told_pages, 0, "{balloon} {words}: {status:?}");
        }
    }
}

/// What a VM returned of memory from the pool is still accounted to it, and in the next VM's hands it
/// is there and zero.
fn of_the_pool() {
    const LEN: u64 = 192 << 20;
    let pool = Pool::start(&["size = '192M'\npages = '4K'\ncount = 1"]);
    let memory = format!("size=192M,thp=off{}", pool.option());
    for workload in ["balloon-report", "balloon-inflate"] {
        let cmdline = format!("mem=64M iterations=2 workload={workload}");
        let vmm = VmmBuilder::guest(1, &memory, &cmdline)
            .with(&["--balloon", "size=0,free_page_reporting=on"])
            .start();
        vmm.wait_for_event("prezeroed-taken");
        wait_for("the end of the workload", || {
            Some(()).filter(|()| vmm.guest_status().all_in("done"))
        });
        vmm.verify();
        let counters: Value =
            serde_json::from_str(&vmm.api().get("vm.counters").body).expect("vm.counters is JSON");
        let given_back: u64 = ["reported_given_back_bytes", "inflated_given_back_bytes"]
            .iter()
            .filter_map(|name| counters["__balloon"][*name].as_u64())
            .sum();
        assert!(given_back >= GIVEN_MIN * 4096, "{counters}");
        assert_eq!(pool.slots("lent"), 1);
        assert!(pool.take(LEN).is_err());
        vmm.shut_down();
        pool.wait_until_ready();
        let (connection, taken) = pool.take(LEN).expect("memory");
        assert_eq!(taken.file.metadata().expect("a memfd").blocks() * 512, LEN, "not populated");
        assert_zero(&taken.file, LEN);
        drop((connection, taken));
        pool.wait_until_ready();
    }
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
    // No page has been released.
    assert_eq!(before["memory_actual_size"], 128 << 20);
    assert!(before["device_tree"]["_virtio-pci-__balloon"]["pci_bdf"].is_string(), "{before}");
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
    refused(r#"{"desired_vcpus":3}"#, 400, "1 to 2 vCPUs");
    refused(r#"{"desired_ram":1073741824}"#, 400, "hotplug_size");
    refused("{}", 400, "say which");
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
