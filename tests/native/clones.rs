// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VMs whose memory is a mapping of one snapshot: what they share, what each of them has by itself, and what can be done with them.

use std::fs::{self, OpenOptions};

use tempfile::TempDir;

use crate::harness::migrate::migrate;
use crate::harness::process::status_kib;
use crate::harness::{Mode, Suite, Transport, Vmm, wait_for};
use crate::snapshot::{place, save, source};

const GUEST_KIB: u64 = 96 << 10;

pub fn add(suite: &mut Suite) {
    suite.add("clones::share_what_they_do_not_write", sharing);
    suite.add("clones::are_vms_like_others", as_others);
    suite.add("clones::of_other_memory_are_refused", refusals);
}

/// A snapshot of a guest with private memory that has filled 96 MiB, and whose VMM is gone.
fn template() -> (TempDir, String) {
    let (folder, url) = place();
    let vmm = source("size=160M", "mem=96M");
    save(&vmm, &url);
    vmm.shut_down();
    (folder, url)
}

fn clone_of(url: &str) -> Vmm {
    let vmm = Vmm::empty();
    vmm.remote_ok(&["restore", &format!("source_url={url},memory_restore_mode=mapped")]);
    assert_eq!(vmm.api().state(), "Paused");
    vmm
}

fn sharing() {
    let (folder, url) = template();
    let memory = folder.path().join("memory-ranges");
    let before = fs::read(&memory).expect("the memory");
    let clones = [clone_of(&url), clone_of(&url), clone_of(&url)];
    for vmm in &clones {
        vmm.verify_paused();
        // Every page of the guest was read; all but what the VMM itself needs is the file's.
        let (own_kib, of_files_kib) =
            (status_kib(vmm.pid(), "RssAnon"), status_kib(vmm.pid(), "RssFile"));
        assert!(own_kib < GUEST_KIB / 4, "{own_kib} KiB of its own");
        assert!(of_files_kib > GUEST_KIB, "{of_files_kib} KiB of files");
    }
    for vmm in &clones {
        vmm.remote_ok(&["resume"]);
    }
    // All write at random to all of their memory, and each finds its own writes.
    for vmm in &clones {
        vmm.wait_for_work(50_000);
        vmm.verify();
        let pid = vmm.pid();
        let has_own = || (status_kib(pid, "RssAnon") > GUEST_KIB / 2).then_some(());
        wait_for("pages of its own", has_own);
    }
    let [one, two, three] = clones;
    one.shut_down();
    two.verify();
    // The directory can go.
    let after = fs::read(&memory).expect("the memory");
    assert!(before == after, "a clone wrote to the snapshot");
    drop(folder);
    for vmm in [two, three] {
        vmm.wait_for_work(5_000);
        vmm.verify();
        vmm.shut_down();
    }
}

/// A clone is saved, moves in each way, and reboots.
fn as_others() {
    let (_folder, url) = template();
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let vmm = clone_of(&url);
        vmm.remote_ok(&["resume"]);
        vmm.wait_for_work(5_000);
        let there = Vmm::empty();
        migrate(vmm, &there, Transport::Unix, mode);
        there.wait_for_work(5_000);
        there.verify();
        there.shut_down();
    }
    let vmm = clone_of(&url);
    vmm.remote_ok(&["resume"]);
    vmm.wait_for_work(5_000);
    let (_second, second_url) = place();
    save(&vmm, &second_url);
    vmm.verify_paused();
    vmm.remote_ok(&["resume"]);
    // A clone of what a clone has saved.
    let second = clone_of(&second_url);
    second.verify_paused();
    second.remote_ok(&["resume"]);
    second.wait_for_work(5_000);
    second.verify();
    second.shut_down();
    vmm.reboot();
    vmm.wait_for_work(5_000);
    vmm.verify();
    vmm.shut_down();
}

fn refusals() {
    let (folder, url) = place();
    let vmm = source("size=128M,shared=on", "mem=48M");
    save(&vmm, &url);
    vmm.shut_down();
    let refused = |url: &str| {
        let vmm = Vmm::empty();
        let option = format!("source_url={url},memory_restore_mode=mapped");
        let output = vmm.remote(&["restore", &option]);
        assert!(!output.status.success());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // The VMM can be used at once.
        vmm.remote_ok(&["restore", &format!("source_url={url}").replace("/short", "")]);
        vmm.shut_down();
        said
    };
    let said = refused(&url);
    assert!(said.contains("'mem0'") && said.contains("shared memory"), "{said}");
    drop(folder);
    let (folder, url) = template();
    let short = folder.path().join("short");
    fs::create_dir(&short).expect("a folder");
    for name in ["config.json", "state.json", "memory-ranges", "memory-index", "manifest.json"] {
        fs::copy(folder.path().join(name), short.join(name)).expect("a copy");
    }
    let memory = OpenOptions::new().write(true).open(short.join("memory-ranges")).expect("opened");
    memory.set_len(80 << 20).expect("shorter");
    let said = refused(&format!("{url}/short"));
    assert!(said.contains("memory-ranges") && said.contains("manifest says"), "{said}");
}
