// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Disks with a limit: the guest writes no faster than that, loses nothing, and holds up nothing else.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;

use crate::disks::{DISK_BYTES, MEMORY, holds, write_more, write_until, written};
use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder};

pub fn add(suite: &mut Suite) {
    for (name, limit) in [
        ("ops", "ops_size=10,ops_refill_time=100"),
        ("ops_without_io_uring", "ops_size=10,ops_refill_time=100,_disable_io_uring=on"),
        ("bytes", "bw_size=40960,bw_refill_time=100"),
    ] {
        let name = format!("rate_limits::a_guest_writes_no_faster_than_its_limit_of_{name}");
        suite.add(&name, move || of_its_own(limit));
    }
    suite.add("rate_limits::without_a_limit_it_is_faster", unlimited);
    suite.add("rate_limits::a_disk_that_comes_later_has_the_limit_of_its_group", of_a_group);
    suite.add("rate_limits::what_waits_for_a_limit_holds_up_nothing_else", prompt);
    suite.add("rate_limits::a_guest_that_waits_is_moved_and_goes_on", moved);
}

const GUEST: &str = "workload=disk-write mem=16M";
/// Of the limits above: what the bucket holds, and how long it takes to refill.
const BUCKET: u64 = 10;
const REFILL: Duration = Duration::from_millis(100);
const SLOW: &str = "ops_size=1,ops_refill_time=600000,ops_one_time_burst=20";
/// Nothing else takes as long as one refill of [`SLOW`].
const PROMPT: Duration = Duration::from_secs(20);

fn image() -> (TempDir, PathBuf) {
    let folder = TempDir::with_prefix("godwit-limit-").expect("a folder");
    let path = folder.path().join("disk");
    File::create(&path).and_then(|file| file.set_len(DISK_BYTES)).expect("a file");
    (folder, path)
}

fn guest(path: &std::path::Path, limit: &str) -> Vmm {
    let option = format!("path={},id=data,{limit}", path.display());
    VmmBuilder::guest(1, MEMORY, GUEST).with(&["--disk", &option]).start()
}

/// The guest writes so many blocks, and takes at least as long as the limits above demand.
#[track_caller]
fn takes_its_time(vmm: &Vmm, since: Instant) {
    let blocks = 15 * BUCKET;
    write_until(vmm, blocks);
    assert!(written(vmm) >= blocks);
    // The first bucket is full, and the last request may go beyond.
    assert!(since.elapsed() >= REFILL * 14, "{blocks} blocks in {:?}", since.elapsed());
}

fn of_its_own(limit: &str) {
    let (_folder, path) = image();
    let started = Instant::now();
    let vmm = guest(&path, limit);
    takes_its_time(&vmm, started);
    vmm.api().put("vm.pause", "").ok();
    holds(&path, written(&vmm));
    vmm.shut_down();
}

fn unlimited() {
    let (_folder, path) = image();
    // A limit that is none.
    let vmm = guest(&path, "ops_size=0,ops_refill_time=100,bw_size=1,bw_refill_time=0");
    let started = Instant::now();
    write_more(&vmm, 2000);
    assert!(started.elapsed() < REFILL * 200, "{:?}", started.elapsed());
    vmm.shut_down();
}

fn of_a_group() {
    let (_folder, path) = image();
    let group = "id=g,ops_size=10,ops_refill_time=100";
    let idle = VmmBuilder::guest(1, MEMORY, "workload=idle mem=16M");
    let vmm = idle.with(&["--rate-limit-group", group]).start();
    let api = vmm.api();
    let disk = |group: &str| json!({"path": path, "id": "data", "rate_limit_group": group});
    let refused = api.put("vm.add-disk", &disk("h").to_string());
    assert_eq!(refused.status, 400, "{refused:?}");
    assert!(refused.body.contains("'h'") && refused.body.contains("'data'"), "{refused:?}");
    let started = Instant::now();
    api.put("vm.add-disk", &disk("g").to_string()).ok();
    let config = &api.get("vm.info").ok().json()["config"];
    assert_eq!(config["disks"][0]["rate_limit_group"], "g");
    assert_eq!(config["rate_limit_groups"][0]["id"], "g");
    vmm.guest().set("workload=disk-write").expect("it listens");
    takes_its_time(&vmm, started);
    vmm.shut_down();
}

/// A guest that waits for the rest of ten minutes.
fn waiting(path: &std::path::Path) -> Vmm {
    let vmm = guest(path, SLOW);
    // 20 of the burst, and one of the bucket.
    write_until(&vmm, 21);
    vmm
}

fn prompt() {
    let (_folder, path) = image();
    let started = Instant::now();
    let vmm = waiting(&path);
    let api = vmm.api();
    for _ in 0..2 {
        api.put("vm.pause", "").ok();
        assert_eq!(written(&vmm), 21);
        holds(&path, 21);
        api.put("vm.resume", "").ok();
    }
    assert_eq!(written(&vmm), 21);
    // A new machine begins with full buckets, also of what was there once.
    api.put("vm.reboot", "").ok();
    write_until(&vmm, 21);
    assert_eq!(written(&vmm), 21);
    vmm.shut_down();
    assert!(started.elapsed() < PROMPT, "{:?}", started.elapsed());
}

fn moved() {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let (_folder, path) = image();
        let started = Instant::now();
        let source = waiting(&path);
        let destination = Vmm::empty();
        migrate(source, &destination, Transport::Tcp, mode);
        // The request that waited is carried out, and as many as full buckets allow.
        write_until(&destination, 42);
        destination.api().put("vm.pause", "").ok();
        assert_eq!(written(&destination), 42);
        holds(&path, 42);
        destination.shut_down();
        assert!(started.elapsed() < PROMPT, "{:?}", started.elapsed());
    }
}
