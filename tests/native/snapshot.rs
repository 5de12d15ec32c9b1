// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Snapshots: a guest that writes is saved, its VMM killed, and the guest restored by another one;
//! every page is compared, and the guest itself must have seen nothing wrong.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::process::memfds_kib;
use crate::harness::{HugePages, Suite, Vmm, VmmBuilder, wait_for};
use crate::recorded;

pub fn add(suite: &mut Suite) {
    for mode in ["copy", "ondemand"] {
        let memories = [
            ("shared", "size=192M,shared=on", "mem=96M"),
            ("private", "size=192M", "mem=96M"),
            ("mergeable", "size=192M,mergeable=on", "mem=96M"),
            ("hugepages", "size=192M,shared=on,hugepages=on", "mem=64M"),
            ("beyond_4_gib", "size=6G,shared=on", "mem=5G..64M"),
        ];
        for (name, memory, workload) in memories {
            let name = format!("snapshot::{mode}_{name}");
            suite.add(&name, move || round_trip(mode, memory, workload));
        }
        suite.add(&format!("snapshot::{mode}_zones"), move || zones(mode));
        suite.add(&format!("snapshot::{mode}_from_the_command_line"), move || command_line(mode));
        suite.add(&format!("snapshot::{mode}_twice_over"), move || twice_over(mode));
        suite.add(&format!("snapshot::{mode}_prefault"), move || prefault(mode));
    }
    suite.add("snapshot::ondemand_can_be_shut_down_at_once", shut_down_at_once);
    suite.add("snapshot::stays_paused_and_resumes", stays_paused);
    suite.add("snapshot::events", events);
    suite.add("snapshot::zeros_are_holes", holes);
    suite.add("snapshot::disk_lock_stays_with_the_source", disk_lock);
}

const LOAD: &str = "workload=random-write";

/// A guest that has been writing.
pub fn source(memory: &str, workload: &str) -> Vmm {
    let source = Vmm::boot(2, memory, &format!("{LOAD} {workload}"));
    source.wait_for_work(5_000);
    source
}

/// A directory for a snapshot, and its URL.
pub fn place() -> (TempDir, String) {
    let folder = TempDir::with_prefix("godwit-snapshot-").expect("a folder");
    let url = format!("file://{}", folder.path().display());
    (folder, url)
}

/// Changes a document of a snapshot, `state` or `config`, and what the manifest says of it.
pub fn change(directory: &Path, document: &str, change: impl FnOnce(&mut Value)) {
    let path = |name: &str| directory.join(format!("{name}.json"));
    let read = |name: &str| -> Value {
        let text = fs::read(path(name)).expect("it can be read");
        serde_json::from_slice(&text).expect("JSON")
    };
    let (mut changed, mut manifest) = (read(document), read("manifest"));
    change(&mut changed);
    let text = changed.to_string();
    manifest["snapshot"][document] =
        json!({"len_bytes": text.len(), "crc32c": recorded::crc32c(text.as_bytes())});
    let body = manifest["snapshot"].to_string();
    let crc = recorded::crc32c(body.as_bytes());
    fs::write(path(document), text).expect("written");
    fs::write(path("manifest"), format!(r#"{{"crc32c":{crc},"snapshot":{body}}}"#))
        .expect("written");
}

/// Pauses the VM and saves it.
#[track_caller]
pub fn save(source: &Vmm, url: &str) {
    source.remote_ok(&["pause"]);
    source.remote_ok(&["snapshot", url]);
}

/// A snapshot of a small guest whose VMM has been killed.
pub fn saved() -> (TempDir, String) {
    let (folder, url) = place();
    let mut source = source("size=128M,shared=on", "mem=48M");
    save(&source, &url);
    source.signal(libc::SIGKILL);
    source.wait_for_exit();
    (folder, url)
}

fn option(url: &str, mode: &str) -> String {
    format!("source_url={url},memory_restore_mode={mode}")
}

/// Waits until all memory is there, where it comes on demand.
#[track_caller]
fn wait_for_memory(vmm: &Vmm, mode: &str) {
    if mode == "ondemand" {
        vmm.wait_for_event("restore-memory-completed");
    }
}

/// Restores, checks, runs on, checks.
#[track_caller]
fn assert_restores(url: &str, mode: &str) -> Vmm {
    let vmm = Vmm::empty();
    vmm.remote_ok(&["restore", &option(url, mode)]);
    assert_eq!(vmm.api().state(), "Paused", "without resume=on it stays paused");
    wait_for_memory(&vmm, mode);
    vmm.verify_paused();
    vmm.remote_ok(&["resume"]);
    vmm.wait_for_work(5_000);
    vmm.verify();
    vmm
}

fn round_trip(mode: &str, memory: &str, workload: &str) {
    let (_folder, url) = place();
    // For the guest that is saved, and for what is restored while that one's memory goes.
    let _pool = memory.contains("hugepages").then(|| HugePages::borrow(2 * 96));
    let mut source = source(memory, workload);
    save(&source, &url);
    let before = source.verify_paused();
    source.signal(libc::SIGKILL);
    source.wait_for_exit();
    let vmm = Vmm::empty();
    let wish = format!("{},resume=on", option(&url, mode));
    vmm.remote_ok(&["restore", &wish]);
    assert_eq!(vmm.api().state(), "Running");
    wait_for_memory(&vmm, mode);
    vmm.wait_for_work(5_000);
    let after = vmm.verify();
    assert!(after.written >= before.written, "{before:?} {after:?}");
    vmm.shut_down();
    assert_restores(&url, mode).shut_down();
}

fn zones(mode: &str) {
    let (_folder, url) = place();
    let mut source = VmmBuilder::guest(2, "size=0", &format!("{LOAD} mem=96M"))
        .with(&["--memory-zone", "id=zone0,size=128M,shared=on", "id=zone1,size=64M,shared=on"])
        .start();
    source.wait_for_work(5_000);
    save(&source, &url);
    source.signal(libc::SIGKILL);
    source.wait_for_exit();
    assert_restores(&url, mode).shut_down();
    let vmm = Vmm::empty();
    let update = json!([{"id": "nozone", "host_numa_node": 0}]);
    let body = json!({"source_url": url, "zone_updates": update}).to_string();
    let refused = vmm.api().put("vm.restore", &body);
    assert!(refused.status == 500 && refused.body.contains("nozone"), "{refused:?}");
    let update = json!([{"id": "zone1", "host_numa_node": 0}]);
    let body = json!({"source_url": url, "zone_updates": update}).to_string();
    vmm.api().put("vm.restore", &body).ok();
    let info = vmm.api().get("vm.info").json();
    assert_eq!(info["config"]["memory"]["zones"][1]["host_numa_node"], 0, "{info}");
    vmm.shut_down();
}

fn command_line(mode: &str) {
    let (_folder, url) = saved();
    let wish = format!("{},resume=on", option(&url, mode));
    let vmm = VmmBuilder::new(&["--restore", &wish]).start();
    assert_eq!(vmm.api().state(), "Running");
    wait_for_memory(&vmm, mode);
    vmm.wait_for_work(5_000);
    vmm.verify();
    vmm.shut_down();
}

/// Saved, restored, saved by that VMM, restored again.
fn twice_over(mode: &str) {
    let (_first, first_url) = saved();
    let middle = assert_restores(&first_url, mode);
    let (_second, second_url) = place();
    save(&middle, &second_url);
    middle.shut_down();
    assert_restores(&second_url, mode).shut_down();
}

/// Also what is not mapped for a moment, while it is made huge, or since.
fn populated_kib(vmm: &Vmm) -> u64 {
    memfds_kib(vmm.pid())
}

fn prefault(mode: &str) {
    let (_folder, url) = saved();
    let restored = |extra: &str| {
        let vmm = Vmm::empty();
        vmm.remote_ok(&["restore", &format!("{}{extra}", option(&url, mode))]);
        wait_for_memory(&vmm, mode);
        vmm
    };
    let vmm = restored("");
    let without = populated_kib(&vmm);
    assert!(without < 100 << 10, "holes were populated: {without} KiB");
    vmm.shut_down();
    let vmm = restored(",prefault=on");
    wait_for("all to be populated", || (populated_kib(&vmm) >= 128 << 10).then_some(()));
    vmm.shut_down();
}

fn shut_down_at_once() {
    let (_folder, url) = saved();
    for _ in 0..5 {
        let mut vmm = Vmm::empty();
        vmm.remote_ok(&["restore", &format!("{},resume=on", option(&url, "ondemand"))]);
        vmm.remote_ok(&["shutdown"]);
        vmm.remote_ok(&["delete"]);
        vmm.remote_ok(&["restore", &option(&url, "ondemand")]);
        vmm.signal(libc::SIGTERM);
        assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
    }
}

fn stays_paused() {
    let source = source("size=128M,shared=on", "mem=48M");
    let refused = source.remote(&["snapshot", "file:///tmp"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("pause"), "{text}");
    let (_first, first_url) = place();
    save(&source, &first_url);
    assert_eq!(source.api().state(), "Paused", "the snapshot leaves it paused");
    source.remote_ok(&["resume"]);
    source.wait_for_work(5_000);
    let (_second, second_url) = place();
    save(&source, &second_url);
    source.remote_ok(&["resume"]);
    source.wait_for_work(5_000);
    source.verify();
    source.shut_down();
    assert_restores(&first_url, "copy").shut_down();
    assert_restores(&second_url, "copy").shut_down();
}

fn events() {
    let (_folder, url) = place();
    let source = source("size=128M,shared=on", "mem=48M");
    save(&source, &url);
    source.wait_for_event("snapshotted");
    let names = source.event_names();
    let at = |name: &str| names.iter().position(|known| known == name);
    assert!(at("paused") < at("snapshotting") && at("snapshotting") < at("snapshotted"));
    source.shut_down();
    let vmm = Vmm::empty();
    vmm.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
    vmm.wait_for_event("resumed");
    let names = vmm.event_names();
    let at = |name: &str| names.iter().position(|known| known == name);
    assert!(at("restoring") < at("restored") && at("restored") < at("resumed"), "{names:?}");
    assert!(at("restoring").is_some(), "{names:?}");
    vmm.shut_down();
}

fn holes() {
    let (folder, url) = place();
    let source = source("size=6G,shared=on", "mem=32M");
    save(&source, &url);
    source.shut_down();
    let used = |name: &str| {
        use std::os::unix::fs::MetadataExt as _;
        let metadata = folder.path().join(name).metadata().expect(name);
        (metadata.len(), metadata.blocks() * 512)
    };
    let (len, blocks) = used("memory-ranges");
    assert_eq!(len, 6 << 30);
    assert!(blocks < 64 << 20, "{blocks} bytes on the disk for a guest that wrote 32 MiB");
}

fn disk_lock() {
    let (folder, url) = place();
    let image = image(folder.path().parent().expect("a folder"));
    let disk = format!("path={}", image.display());
    let source = VmmBuilder::guest(1, "size=128M,shared=on", &format!("{LOAD} mem=16M"))
        .with(&["--disk", &disk])
        .start();
    source.wait_for_work(5_000);
    save(&source, &url);
    let other = Vmm::empty();
    for mode in ["copy", "ondemand"] {
        let refused = other.remote(&["restore", &option(&url, mode)]);
        let text = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success(), "two VMs have one disk");
        assert!(text.contains(&*image.to_string_lossy()), "{text}");
    }
    source.remote_ok(&["resume"]);
    source.wait_for_work(5_000);
    source.shut_down();
    other.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
    other.wait_for_work(5_000);
    other.shut_down();
    std::fs::remove_file(image).expect("the image can be removed");
}

fn image(folder: &Path) -> PathBuf {
    let path = folder.join(format!("godwit-snapshot-disk-{}", std::process::id()));
    std::fs::File::create(&path).and_then(|file| file.set_len(8 << 20)).expect("an image");
    path
}
