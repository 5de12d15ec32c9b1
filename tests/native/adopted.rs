// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Snapshots that cloud-hypervisor v53 has written, kept in `tests/data/cloud-hypervisor-53`, are restored, and their guest
//! goes on.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::harness::{Suite, Vmm, VmmBuilder, skip};
use crate::snapshot::save;

/// Where files were on the recording machine.
const THERE: &str = "/tmp/x/";
const MEMORY: &str = "memory-ranges";

pub fn add(suite: &mut Suite) {
    suite.add("adopted::a_guest_goes_on_and_is_saved_here", goes_on);
    suite.add("adopted::an_unfinished_snapshot_is_refused", unfinished);
}

/// The recorded snapshot in a folder, with the files that its configuration names.
fn recorded(name: &str) -> TempDir {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/cloud-hypervisor-53/snapshots");
    let data = data.join(name);
    let folder = TempDir::with_prefix("godwit-adopted-").expect("a folder");
    let here = format!("{}/", folder.path().display());
    let config = fs::read_to_string(data.join("config.json")).expect("the configuration");
    fs::write(folder.path().join("config.json"), config.replace(THERE, &here)).expect("written");
    fs::copy(data.join("state.json"), folder.path().join("state.json")).expect("copied");
    unpack(&data.join("memory-ranges.runs"), &folder.path().join(MEMORY));
    let disk = File::create(folder.path().join("disk")).expect("a disk");
    disk.set_len(1 << 20).expect("a length");
    folder
}

/// Runs of bytes with contents, each after its offset and length; the length of the whole at the end.
fn unpack(packed: &Path, to: &Path) {
    let packed = fs::read(packed).expect("the packed memory");
    let word = |at: usize| {
        let bytes = packed[at..at + 8].try_into().expect("eight bytes");
        usize::try_from(u64::from_le_bytes(bytes)).expect("64 bits")
    };
    let end = packed.len() - 8;
    let file = File::create(to).expect("a file");
    file.set_len(word(end) as u64).expect("a length");
    let mut at = 0;
    while at < end {
        let (offset, len) = (word(at), word(at + 8));
        file.write_all_at(&packed[at + 16..at + 16 + len], offset as u64).expect("written");
        at += 16 + len;
    }
}

/// Restores a snapshot, or says why not. Skips on a processor that is not like the recorded one.
fn restore(vmm: &Vmm, folder: &Path) -> Result<(), String> {
    let wish = format!("source_url=file://{},resume=on", folder.display());
    let output = vmm.remote(&["restore", &wish]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    if error.contains("lacks processor features") {
        skip(format!("the recorded vCPUs do not fit this processor: {error}"));
    }
    if output.status.success() { Ok(()) } else { Err(error) }
}

fn goes_on() {
    let folder = recorded("plain-1");
    let vmm = VmmBuilder::new::<&str>(&[]).start();
    restore(&vmm, folder.path()).expect("restored");
    assert_eq!(vmm.api().state(), "Running");
    vmm.wait_for_work(1_000);
    vmm.wait_for_heartbeat();
    let info: Value = vmm.api().get("vm.info").json();
    assert_eq!(info["config"]["platform"]["platform"], "cloud-hypervisor-53", "{info}");
    assert_eq!(info["config"]["disks"][0]["pci_device_id"], 2, "{info}");
    // From here on it is a guest like any other.
    let again = TempDir::with_prefix("godwit-adopted-again-").expect("a folder");
    let url = format!("file://{}", again.path().display());
    save(&vmm, &url);
    vmm.remote_ok(&["delete"]);
    vmm.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
    vmm.wait_for_heartbeat();
    vmm.wait_for_work(1_000);
    vmm.shut_down();
}

fn unfinished() {
    let folder = recorded("plain-1");
    let memory = File::options().write(true).open(folder.path().join(MEMORY)).expect("the memory");
    memory.set_len(4 << 20).expect("a length");
    let vmm = VmmBuilder::new::<&str>(&[]).start();
    let error = restore(&vmm, folder.path()).expect_err("refused");
    assert!(error.contains("the snapshot was not finished"), "{error}");
    vmm.shut_down();
}
