// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A TPM that swtpm implements: it starts, moves, is saved and restored with its VM, and its loss or absence is said
//! clearly. What a guest makes of it is looked at with a Linux guest.

use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, skip, wait_for};

pub fn add(suite: &mut Suite) {
    suite.add("tpm::moves_and_is_restored", moves);
    suite.add("tpm::absent_or_lost", absent);
}

/// An emulator whose socket is `socket` in a directory of its own.
pub struct Swtpm {
    folder: TempDir,
    process: Child,
}

impl Swtpm {
    pub fn start() -> Option<Self> {
        let folder = TempDir::with_prefix("godwit-tpm-").expect("a folder");
        let process = Command::new("swtpm")
            .current_dir(folder.path())
            .args(["socket", "--tpm2", "--tpmstate", "dir=."])
            .args(["--ctrl", "type=unixio,path=socket"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let swtpm = Self { folder, process };
        wait_for("its socket", || swtpm.folder.path().join("socket").exists().then_some(()));
        Some(swtpm)
    }

    /// A VMM that runs where the socket is: what a VM is called elsewhere does not change.
    pub fn vmm(&self, builder: VmmBuilder) -> Vmm {
        let folder = self.folder.path().to_str().expect("UTF-8");
        builder.wrapped(&["sh", "-c", "cd \"$0\" && exec \"$@\"", folder]).start()
    }

    fn end(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Swtpm {
    fn drop(&mut self) {
        self.end();
    }
}

fn guest() -> VmmBuilder {
    let load = "workload=random-write mem=48M";
    VmmBuilder::guest(1, "size=128M,shared=on", load).with(&["--tpm", "socket=socket"])
}

/// The state of the TPM in a snapshot.
fn state(folder: &TempDir) -> Value {
    let text = std::fs::read(folder.path().join("state.json")).expect("a state");
    let state: Value = serde_json::from_slice(&text).expect("JSON");
    state["legacy"]["tpm"].clone()
}

fn moves() {
    let Some(swtpms) = (0..3).map(|_| Swtpm::start()).collect::<Option<Vec<_>>>() else {
        skip("there is no swtpm");
    };
    let source = swtpms[0].vmm(guest());
    source.wait_for_work(5_000);
    let destination = swtpms[1].vmm(VmmBuilder::new::<&str>(&[]));
    migrate(source, &destination, Transport::Unix, Mode::Precopy);
    destination.wait_for_heartbeat();
    let saved = TempDir::new().expect("a folder");
    let url = format!("file://{}", saved.path().display());
    destination.remote_ok(&["pause"]);
    destination.remote_ok(&["snapshot", &url]);
    destination.shut_down();
    let before = state(&saved);
    assert!(before["data"]["permanent"]["bytes"].as_array().is_some_and(|bytes| bytes.len() > 500));
    let restored = swtpms[2].vmm(VmmBuilder::new::<&str>(&[]));
    restored.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
    restored.wait_for_heartbeat();
    // The same TPM: what it keeps has come along, and it is started.
    let again = TempDir::new().expect("a folder");
    let url = format!("file://{}", again.path().display());
    restored.remote_ok(&["pause"]);
    restored.remote_ok(&["snapshot", &url]);
    assert_eq!(state(&again)["data"]["permanent"], before["data"]["permanent"]);
    restored.remote_ok(&["resume"]);
    restored.remote_ok(&["reboot"]);
    restored.wait_for_event("rebooted");
    restored.wait_for_heartbeat();
    restored.shut_down();
}

fn absent() {
    let Some(mut swtpm) = Swtpm::start() else { skip("there is no swtpm") };
    let vmm = swtpm.vmm(guest());
    vmm.wait_for_heartbeat();
    swtpm.end();
    vmm.wait_for_event("tpm-lost");
    vmm.wait_for_heartbeat();
    vmm.remote_ok(&["pause"]);
    let folder = TempDir::new().expect("a folder");
    let output = vmm.remote(&["snapshot", &format!("file://{}", folder.path().display())]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("TPM"), "{text}");
    vmm.remote_ok(&["resume"]);
    vmm.wait_for_heartbeat();
    let output = vmm.remote(&["reboot"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("start swtpm"), "{text}");
}
