// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Snapshots of earlier versions, kept in `tests/data/snapshots`, must stay readable.
//!
//! Owns the form in which their memory is kept: only the pages with contents, each after its offset.
//! `GODWIT_RECORD=DIRECTORY` makes the test of that name record one of this version.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use tempfile::TempDir;

use crate::harness::{Suite, VmmBuilder, skip};
use crate::recorded;
use crate::snapshot::{self, save};

const PAGE: usize = 4096;
const ENTRY: usize = 8 + PAGE;
const PACKED: &str = "memory-ranges.pages";
const MEMORY: &str = "memory-ranges";
const COPIED: [&str; 4] = ["config.json", "state.json", "memory-index", "manifest.json"];
/// The configuration names it so; the VMM runs in its directory.
const DISK: &str = "recorded-disk";
/// So that no path of the recording machine is kept.
const KERNEL: &str = "recorded-guest";

pub fn add(suite: &mut Suite) {
    suite.add("snapshot_recorded::v1", || reads("v1"));
    suite.add("snapshot_recorded::v1_generic", || reads("v1-generic"));
    suite.add("snapshot_recorded::v2_generic", || reads("v2-generic"));
    suite.add("snapshot_recorded::v3_generic", || reads("v3-generic"));
    suite.add("snapshot_recorded::record", record);
}

fn in_directory(builder: VmmBuilder, directory: &Path) -> VmmBuilder {
    let directory = directory.to_str().expect("UTF-8");
    builder.wrapped(&["sh", "-c", "cd \"$0\" && exec \"$@\"", directory])
}

fn make_disk(directory: &Path) {
    let file = File::create(directory.join(DISK)).expect("a file");
    file.set_len(1 << 20).expect("a length");
}

fn pack(directory: &Path, to: &Path) {
    let file = File::open(directory.join(MEMORY)).expect("the memory");
    let len = file.metadata().expect("metadata").len();
    let mut packed = Vec::new();
    let mut page = [0; PAGE];
    for offset in (0..len).step_by(PAGE) {
        file.read_exact_at(&mut page, offset).expect("a page");
        if page != [0; PAGE] {
            packed.extend(offset.to_le_bytes());
            packed.extend(page);
        }
    }
    packed.extend(len.to_le_bytes());
    fs::write(to.join(PACKED), packed).expect("written");
}

fn unpack(from: &Path, directory: &Path) {
    let packed = fs::read(from.join(PACKED)).expect("the packed memory");
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let (pages, len) = packed.split_at(packed.len() - 8);
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).open(directory.join(MEMORY)).expect("a file");
    file.set_len(word(len)).expect("a length");
    for entry in pages.chunks_exact(ENTRY) {
        file.write_all_at(&entry[8..], word(&entry[..8])).expect("written");
    }
}

fn record() {
    let Some(target) = std::env::var_os("GODWIT_RECORD") else {
        skip("GODWIT_RECORD names no directory to record to");
    };
    let (target, folder) =
        (Path::new(&target), TempDir::with_prefix("godwit-record-").expect("a folder"));
    make_disk(folder.path());
    fs::copy(crate::harness::image(), folder.path().join(KERNEL)).expect("copied");
    let guest = VmmBuilder::new(&["--console", "null", "--serial", "null"]).with(&[
        "--kernel",
        KERNEL,
        "--cmdline",
        "workload=random-write mem=256K",
        "--cpus",
        &format!("boot=2,max_phys_bits={},nested=off", recorded::PHYS_BITS),
        "--memory",
        "size=32M,shared=on",
        "--disk",
        &format!("path={DISK}"),
    ]);
    let vmm = in_directory(guest, folder.path()).start();
    vmm.wait_for_work(1_000);
    let snapshot = folder.path().join("snapshot");
    fs::create_dir(&snapshot).expect("a folder");
    save(&vmm, &format!("file://{}", snapshot.display()));
    vmm.shut_down();
    fs::create_dir_all(target).expect("the directory");
    for name in COPIED {
        fs::copy(snapshot.join(name), target.join(name)).expect("copied");
    }
    snapshot::change(target, "state", recorded::neutral);
    pack(&snapshot, target);
}

fn reads(version: &str) {
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/snapshots").join(version);
    let folder = TempDir::with_prefix("godwit-recorded-").expect("a folder");
    for name in COPIED {
        fs::copy(recorded.join(name), folder.path().join(name)).expect("copied");
    }
    if version.ends_with("-generic") {
        snapshot::change(folder.path(), "state", recorded::adapt);
    }
    unpack(&recorded, folder.path());
    make_disk(folder.path());
    let vmm = in_directory(VmmBuilder::new::<&str>(&[]), folder.path()).start();
    for mode in ["copy", "ondemand"] {
        let url = format!("source_url=file://{}", folder.path().display());
        let wish = format!("{url},memory_restore_mode={mode},resume=on");
        let output = vmm.remote(&["restore", &wish]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        // A sample of one vendor's processor needs one like it; the generic ones are for all.
        if error.contains("lacks processor features") && !version.ends_with("-generic") {
            skip(format!("the recorded vCPUs do not fit this processor: {error}"));
        }
        assert!(output.status.success(), "{error}");
        assert_eq!(vmm.api().state(), "Running");
        if mode == "ondemand" {
            vmm.wait_for_event("restore-memory-completed");
        }
        vmm.remote_ok(&["delete"]);
    }
    vmm.shut_down();
}
