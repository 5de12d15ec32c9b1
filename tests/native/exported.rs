// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Snapshots in the form of cloud-hypervisor v53: of a guest on its platform, restored by it, and here.
//!
//! `GODWIT_UPSTREAM_BIN` names the real program; what needs it is skipped without.

use std::fs::{self, File};
use std::path::Path;

use guest_reader::abi::disk::BLOCKS;
use guest_reader::abi::{self, vcpu};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::disks::{Disk, holds, write_more, written};
use crate::harness::upstream_program::Program;
use crate::harness::{Suite, Vmm, VmmBuilder, image, wait_for};
use crate::snapshot::place;

const FORMAT: &str = "cloud-hypervisor-53";
const FILES: [&str; 3] = ["config.json", "memory-ranges", "state.json"];

pub fn add(suite: &mut Suite) {
    suite.add("exported::a_snapshot_is_restored_here", restored_here);
    suite.add("exported::what_it_does_not_have_is_refused_and_nothing_is_left", refusals);
    suite.add("exported::memory_that_is_added_is_saved", later_memory);
    suite.add("exported::the_real_program_goes_on_and_back", goes_on);
    suite.add("exported::the_real_program_goes_on_with_all_devices", all_devices);
    suite.add("exported::the_real_program_goes_on_with_a_disk", with_a_disk);
}

/// A guest on the platform.
fn guest(vcpus: u32, memory: &str, cmdline: &str, more: &[&str]) -> Vmm {
    VmmBuilder::new(&["--kernel", image(), "--cmdline", cmdline])
        .with(&["--cpus", &format!("boot={vcpus}"), "--memory", memory])
        .with(&["--platform", &format!("platform={FORMAT}")])
        .with(more)
        .start()
}

/// Pauses the VM and saves it in their form.
#[track_caller]
fn save(vmm: &Vmm, url: &str) {
    vmm.remote_ok(&["pause"]);
    vmm.remote_ok(&["snapshot", url, "--format", FORMAT]);
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<_> = entries
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"))
        .collect();
    names.sort_unstable();
    names
}

#[track_caller]
fn restore(vmm: &Vmm, url: &str) {
    vmm.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
}

const QUIET: [&str; 4] = ["--console", "null", "--serial", "null"];

fn restored_here() {
    let source = guest(2, "size=128M,shared=on", "workload=random-write mem=48M", &QUIET);
    source.wait_for_work(5_000);
    let (folder, url) = place();
    save(&source, &url);
    assert_eq!(names(folder.path()), FILES);
    let whole = fs::metadata(folder.path().join("memory-ranges")).expect("a file");
    assert_eq!(whole.len(), 128 << 20);
    // It goes on as if nothing had been.
    source.remote_ok(&["resume"]);
    source.wait_for_work(1_000);
    source.shut_down();
    let here = Vmm::empty();
    restore(&here, &url);
    here.wait_for_work(5_000);
    here.verify();
    let info: Value = here.api().get("vm.info").json();
    assert_eq!(info["config"]["platform"]["platform"], FORMAT, "{info}");
    here.shut_down();
}

fn refusals() {
    let (folder, url) = place();
    let refused = |vmm: &Vmm| {
        vmm.remote_ok(&["pause"]);
        let output = vmm.remote(&["snapshot", &url, "--format", FORMAT]);
        assert!(!output.status.success());
        assert_eq!(names(folder.path()), Vec::<String>::new());
        vmm.remote_ok(&["resume"]);
        vmm.wait_for_heartbeat();
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let own = Vmm::boot(1, "size=64M", "workload=idle mem=16M");
    let error = refused(&own);
    assert!(error.contains("platform=godwit") && error.contains(FORMAT), "{error}");
    let output = own.remote(&["snapshot", &url, "--format", "cloud-hypervisor-54"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("cloud-hypervisor-53"), "{error}");
    own.shut_down();
    // A vCPU that the guest, which has no interpreter for the platform's methods, has yet to notice.
    let on = ["--console", "null", "--serial", "null", "--cpus", "boot=1,max=2"];
    let vmm = VmmBuilder::new(&["--kernel", image(), "--cmdline", "workload=idle mem=16M"])
        .with(&["--memory", "size=64M", "--platform", &format!("platform={FORMAT}")])
        .with(&on)
        .start();
    vmm.api().put("vm.resize", &json!({"desired_vcpus": 2}).to_string()).ok();
    let error = refused(&vmm);
    assert!(error.contains("the guest has yet to"), "{error}");
    vmm.shut_down();
}

/// Memory devices of both kinds: what is plugged in is in the snapshot, and nothing else.
fn later_memory() {
    for (memory, plugged_mib) in [
        ("size=64M,shared=on,hotplug_method=virtio-mem,hotplug_size=512M", 0),
        ("size=64M,shared=on,hotplug_size=512M,hotplugged_size=128M", 128),
    ] {
        let source = guest(1, memory, "workload=random-write mem=32M", &QUIET);
        source.wait_for_work(2_000);
        let (folder, url) = place();
        save(&source, &url);
        let saved = fs::metadata(folder.path().join("memory-ranges")).expect("a file").len();
        assert_eq!(saved >> 20, 64 + plugged_mib, "{memory}");
        source.shut_down();
        let here = Vmm::empty();
        restore(&here, &url);
        here.wait_for_work(2_000);
        here.verify();
        here.shut_down();
    }
}

/// The real program with a VM of a snapshot.
fn restored_there(url: &str) -> Program {
    let program = Program::start(&[]);
    let wanted = json!({"source_url": url, "resume": true}).to_string();
    program.api().put("vm.restore", &wanted).ok();
    assert_eq!(program.api().state(), "Running");
    let log = program.log();
    assert!(!log.contains("faulty MSR"), "{log}");
    program
}

fn goes_on() {
    let source = guest(2, "size=128M,shared=on", "workload=random-write mem=48M", &QUIET);
    source.wait_for_work(5_000);
    let (_folder, url) = place();
    save(&source, &url);
    source.shut_down();
    let there = restored_there(&url);
    there.wait_for_work(5_000);
    there.verify_and_pause();
    let (_folder, url) = place();
    there.api().put("vm.snapshot", &json!({"destination_url": url}).to_string()).ok();
    drop(there);
    let back = Vmm::empty();
    restore(&back, &url);
    back.wait_for_work(5_000);
    back.verify();
    back.shut_down();
}

/// Each kind of device, started by its driver, with all features and queues.
fn all_devices() {
    let folder = TempDir::with_prefix("godwit-exported-").expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    for (name, len) in [("disk", 1 << 20), ("disk2", 1 << 20), ("pmem", 2 << 20)] {
        let file = File::create(at(name));
        file.and_then(|file| file.set_len(len)).expect("a file");
    }
    let more = [
        "--console",
        &format!("file={}", at("console")),
        "--serial",
        &format!("file={}", at("serial")),
        "--disk",
        &format!("path={}", at("disk")),
        &format!("path={},num_queues=2,readonly=on", at("disk2")),
        "--balloon",
        "size=0,free_page_reporting=on,deflate_on_oom=on",
        "--vsock",
        &format!("cid=3,socket={}", at("vsock")),
        "--watchdog",
        "--pvpanic",
        "--pmem",
        &format!("file={}", at("pmem")),
        "--rtc",
        "pci_segment=0",
    ];
    let cmdline = "workload=random-write mem=16M reserve=2M wake=1";
    let source = guest(2, "size=64M,shared=on", cmdline, &more);
    source.wait_for_work(2_000);
    let (_folder, url) = place();
    save(&source, &url);
    source.shut_down();
    let there = restored_there(&url);
    there.wait_for_work(2_000);
    there.verify_and_pause();
    let (_folder, url) = place();
    there.api().put("vm.snapshot", &json!({"destination_url": url}).to_string()).ok();
    drop(there);
    // Its socket stays behind.
    let _ = fs::remove_file(at("vsock"));
    let back = Vmm::empty();
    restore(&back, &url);
    back.wait_for_work(2_000);
    back.verify();
    back.shut_down();
}

/// A guest that writes to a disk, and reads what it has written.
fn with_a_disk() {
    let disk = Disk::new();
    let option = format!("path={},id=data,image_type=raw", disk.file.display());
    let more = [&QUIET[..], &["--disk", &option]].concat();
    let source = guest(1, "size=64M,shared=on", "workload=disk-write mem=16M", &more);
    write_more(&source, 2 * BLOCKS);
    let (_folder, url) = place();
    save(&source, &url);
    holds(&disk.file, written(&source));
    source.shut_down();
    let mut there = restored_there(&url);
    let word = |field: u64| {
        let guest = there.guest();
        guest.memory().word(abi::vcpu_gpa(0) + field).expect("the guest's memory")
    };
    let target = word(vcpu::DISK_WRITES) + 2 * BLOCKS;
    wait_for("blocks", || (word(vcpu::DISK_WRITES) >= target).then_some(()));
    there.api().put("vm.pause", "").ok();
    assert_eq!(word(vcpu::DISK_FAILURE), 0, "what the guest read is not what it wrote");
    holds(&disk.file, word(vcpu::DISK_WRITES));
    let (_folder, url) = place();
    there.api().put("vm.snapshot", &json!({"destination_url": url}).to_string()).ok();
    there.kill();
    let back = Vmm::empty();
    restore(&back, &url);
    write_more(&back, 2 * BLOCKS);
    back.shut_down();
}
