// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One snapshot restored several times: what tells the copies apart.
//!
//! Guest memory is read in snapshots of the copies, which have it in plain bytes.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm};
use crate::snapshot::{place, save, source};

/// Where the generation ID is, and its bit in the register of the event device.
const ID_GPA: u64 = 0xe_f000;
const ID_CHANGED: u64 = 1 << 4;

pub fn add(suite: &mut Suite) {
    for mode in ["copy", "ondemand"] {
        suite.add(&format!("copies::{mode}_have_other_generation_ids"), move || generations(mode));
    }
    suite.add("copies::have_other_names_and_files", names_and_files);
}

/// The ID, and whether the guest has still to be told of it.
fn generation(folder: &TempDir) -> ([u8; 16], bool) {
    let mut id = [0; 16];
    let memory = File::open(folder.path().join("memory-ranges")).expect("the memory");
    memory.read_exact_at(&mut id, ID_GPA).expect("the ID");
    let state = fs::read(folder.path().join("state.json")).expect("the state");
    let state: Value = serde_json::from_slice(&state).expect("JSON");
    assert_eq!(state["legacy"]["vmgenid"]["data"]["gpa"], ID_GPA);
    let pending = state["legacy"]["ged"]["data"]["pending"].as_u64().expect("bits");
    (id, pending & ID_CHANGED != 0)
}

/// A VMM with a copy of what is at `url`, and what a snapshot of the copy has.
fn copy(url: &str, mode: &str) -> (Vmm, ([u8; 16], bool)) {
    let vmm = Vmm::empty();
    vmm.remote_ok(&["restore", &format!("source_url={url},memory_restore_mode={mode}")]);
    if mode == "ondemand" {
        vmm.wait_for_event("restore-memory-completed");
    }
    let (folder, url) = place();
    vmm.remote_ok(&["snapshot", &url]);
    let generation = generation(&folder);
    (vmm, generation)
}

fn generations(mode: &str) {
    let (folder, url) = place();
    let vmm = source("size=128M,shared=on", "mem=48M");
    save(&vmm, &url);
    vmm.shut_down();
    let (booted, told) = generation(&folder);
    assert!(booted != [0; 16] && !told, "{booted:x?} {told}");
    let (one, (first, told_first)) = copy(&url, mode);
    let (two, (second, told_second)) = copy(&url, mode);
    assert!(first != booted && second != booted && first != second, "{first:x?} {second:x?}");
    assert!(told_first && told_second, "the guests are not told");
    two.shut_down();
    // It goes along when the copy moves.
    let there = Vmm::empty();
    migrate(one, &there, Transport::Unix, Mode::Precopy);
    let (folder, url) = place();
    there.remote_ok(&["snapshot", &url]);
    assert_eq!(generation(&folder).0, first);
    there.remote_ok(&["resume"]);
    there.wait_for_work(1_000);
    there.verify();
    there.shut_down();
}

fn names_and_files() {
    let disks = tempfile::tempdir().expect("a folder");
    let disk = |name: &str| {
        let path = disks.path().join(name);
        let made = File::create(&path).and_then(|file| file.set_len(1 << 20));
        made.expect("a disk");
        path.to_str().expect("UTF-8").to_owned()
    };
    let (first, second) = (disk("first"), disk("second"));
    let vmm =
        crate::harness::VmmBuilder::guest(1, "size=64M,shared=on", "workload=random-write mem=8M")
            .with(&["--disk", &format!("path={first},id=data")])
            .start();
    vmm.wait_for_work(100);
    let (_folder, url) = place();
    save(&vmm, &url);
    // The first VM continues with its disk; the copy would not get it.
    let copy = Vmm::empty();
    let restore = |updates: Value| {
        copy.api()
            .put("vm.restore", &json!({"source_url": url, "disk_updates": updates}).to_string())
    };
    assert!(restore(json!([])).status >= 400);
    let unknown = restore(json!([{"id": "other", "path": second}]));
    assert!(unknown.status >= 400 && unknown.body.contains("other"), "{unknown:?}");
    restore(json!([{"id": "data", "path": second, "new_id": "copy"}])).ok();
    let config = copy.api().get("vm.info").ok().json()["config"]["disks"][0].clone();
    assert_eq!((&config["id"], &config["path"]), (&json!("copy"), &json!(second)));
    assert!(Path::new(&second).exists());
    for vmm in [&vmm, &copy] {
        vmm.remote_ok(&["resume"]);
        vmm.wait_for_work(1_000);
        vmm.verify();
    }
    copy.shut_down();
    vmm.shut_down();
}
