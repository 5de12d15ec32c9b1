// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VMs with `--landlock`: all that their configuration names works, nothing else can be opened, and both go along
//! with a snapshot and a migration.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::migrate::migrate;
use crate::harness::taps::Tap;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, image as guest_image, skip};

pub fn add(suite: &mut Suite) {
    suite.add("landlock::devices_of_the_configuration_work", devices);
    suite.add("landlock::a_tap_of_the_configuration_works", tap);
    suite.add("landlock::a_disk_is_added_where_a_rule_allows_it", added);
    suite.add("landlock::a_path_of_a_rule_has_to_be_there", missing);
    suite.add("landlock::a_vm_that_is_booted_often_is_confined_once", often);
    suite.add("landlock::it_is_restored_with_the_vm", restored);
    suite.add("landlock::a_restore_finds_its_directory", restored_on_demand);
    for mode in [Mode::Precopy, Mode::Postcopy] {
        suite.add(&format!("landlock::it_goes_along_in_{}", mode.name()), move || moves(mode));
    }
    suite.add("landlock::a_vm_without_it_is_free", free);
}

const GUEST: &str = "workload=random-write mem=16M";
const MEMORY: &str = "size=128M,shared=on";

/// Skips the test where the kernel has no Landlock.
fn need_landlock() {
    let (none, no_bytes, version) = (std::ptr::null::<libc::c_void>(), 0_usize, 1_u32);
    // SAFETY: with this flag the kernel reads nothing and answers a number.
    let abi = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, no_bytes, version) };
    if abi < 1 {
        skip("the kernel has no Landlock, or it is off");
    }
}

/// A guest with `--landlock`.
pub fn confined_guest(vcpus: u32, memory: &str, cmdline: &str) -> VmmBuilder {
    need_landlock();
    VmmBuilder::guest(vcpus, memory, cmdline).with(&["--landlock"])
}

/// The same with these rules, to which options can be added.
fn confined(rules: &[&str]) -> VmmBuilder {
    let builder = confined_guest(1, MEMORY, GUEST);
    if rules.is_empty() { builder } else { builder.with(&["--landlock-rules"]).with(rules) }
}

fn rule(folder: &TempDir) -> String {
    format!("path={},access=rw", folder.path().display())
}

fn folder() -> TempDir {
    TempDir::with_prefix("godwit-landlock-").expect("a folder")
}

fn image_in(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    File::create(&path).and_then(|file| file.set_len(8 << 20)).expect("a file");
    path
}

fn disk(path: &Path) -> String {
    json!({"path": path}).to_string()
}

/// The VMM cannot open a file that nothing names, and says why.
#[track_caller]
pub fn assert_confined(vmm: &Vmm) {
    let outside = folder();
    let refused = vmm.api().put("vm.add-disk", &disk(&image_in(outside.path(), "outside")));
    let says = |text: &str| refused.body.contains(text);
    assert!(refused.status == 500 && says("Permission denied"), "{refused:?}");
    assert!(says("--landlock-rules path=") && says("outside"), "{refused:?}");
}

fn names(vmm: &Vmm) -> Vec<String> {
    let info = vmm.api().get("vm.info").ok().json();
    let disks = info["config"]["disks"].as_array().cloned().unwrap_or_default();
    disks.iter().filter_map(|disk: &Value| disk["path"].as_str().map(str::to_owned)).collect()
}

fn devices() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let image = image_in(folder.path(), "disk");
    need_landlock();
    let vmm = VmmBuilder::new(&["--landlock", "--kernel", guest_image(), "--cmdline", GUEST])
        .with(&["--memory", MEMORY, "--disk", &format!("path={}", image.display())])
        .with(&["--vsock", &format!("cid=3,socket={}", at("vsock"))])
        // The file is not there yet.
        .with(&["--serial", &format!("file={}", at("serial")), "--console", "pty"])
        .start();
    vmm.wait_for_heartbeat();
    UnixStream::connect(at("vsock")).expect("a listener");
    assert!(Path::new(&at("serial")).is_file());
    assert_confined(&vmm);
    // What a machine opens that is built anew is what the first one had.
    vmm.api().put("vm.reboot", "").ok();
    vmm.wait_for_heartbeat();
    vmm.verify();
    vmm.shut_down();
    assert!(!Path::new(&at("vsock")).exists(), "sockets are removed");
}

fn tap() {
    let name = Tap::open().close();
    let vmm = confined(&[]).with(&["--net", &format!("tap={name}")]).start();
    vmm.wait_for_heartbeat();
    assert_confined(&vmm);
    vmm.verify();
    vmm.shut_down();
}

fn added() {
    let folder = folder();
    let vmm = confined(&[&rule(&folder)]).start();
    vmm.wait_for_heartbeat();
    let inside = image_in(folder.path(), "inside");
    vmm.api().put("vm.add-disk", &disk(&inside)).ok();
    assert_eq!(names(&vmm), [inside.display().to_string()]);
    assert_confined(&vmm);
    // The directory beside it has a name that begins as that of the rule does.
    let beside = PathBuf::from(format!("{}-beside", folder.path().display()));
    fs::create_dir(&beside).expect("a folder");
    let refused = vmm.api().put("vm.add-disk", &disk(&image_in(&beside, "outside")));
    fs::remove_dir_all(&beside).expect("it was there");
    assert_eq!(refused.status, 500, "{refused:?}");
    vmm.verify();
    vmm.shut_down();
}

fn missing() {
    let (code, output) = confined(&["path=/nowhere/at/all,access=rw"]).bare().run();
    assert_eq!(code, 1, "{output}");
    assert!(output.contains("'/nowhere/at/all'") && output.contains("No such file"), "{output}");
    let (code, output) = confined(&["path=/,access=rx"]).bare().run();
    assert!(code == 2 && output.contains("'rx'"), "{code}: {output}");
}

fn often() {
    let vmm = confined(&[]).with(&["--no-shutdown"]).start();
    // More often than the kernel takes rules from a process.
    for _ in 0..20 {
        vmm.api().put("vm.shutdown", "").ok();
        vmm.api().put("vm.boot", "").ok();
    }
    vmm.wait_for_heartbeat();
    assert_confined(&vmm);
    // Another VM has no more than the first one and its own rules allow.
    let config = vmm.api().get("vm.info").ok().json()["config"].clone();
    vmm.api().put("vm.delete", "").ok();
    let (folder, mut next) = (folder(), config);
    next["landlock_rules"] = json!([{"path": folder.path(), "access": "rw"}]);
    vmm.api().put("vm.create", &next.to_string()).ok();
    vmm.api().put("vm.boot", "").ok();
    vmm.wait_for_heartbeat();
    let refused = vmm.api().put("vm.add-disk", &disk(&image_in(folder.path(), "late")));
    assert_eq!(refused.status, 500, "the process was confined before: {refused:?}");
    vmm.shut_down();
}

/// A confined guest that has been saved into a directory of a rule; its VMM is gone.
fn saved(folder: &TempDir) -> String {
    let url = format!("file://{}", folder.path().join("snapshot").display());
    fs::create_dir(folder.path().join("snapshot")).expect("a folder");
    let mut source = confined(&[&rule(folder)]).start();
    source.wait_for_work(2_000);
    source.remote_ok(&["pause"]);
    let elsewhere = self::folder();
    let refused = source.remote(&["snapshot", &format!("file://{}", elsewhere.path().display())]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && error.contains("--landlock-rules"), "{error}");
    source.remote_ok(&["snapshot", &url]);
    source.signal(libc::SIGKILL);
    source.wait_for_exit();
    url
}

fn restored() {
    let folder = folder();
    let url = saved(&folder);
    let vmm = Vmm::empty();
    vmm.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
    vmm.wait_for_work(2_000);
    assert_confined(&vmm);
    vmm.api().put("vm.add-disk", &disk(&image_in(folder.path(), "inside"))).ok();
    vmm.verify();
    vmm.shut_down();
}

fn restored_on_demand() {
    let folder = folder();
    let url = saved(&folder);
    let vmm = VmmBuilder::new(&[
        "--restore",
        &format!("source_url={url},memory_restore_mode=ondemand,resume=on"),
    ])
    .start();
    vmm.wait_for_event("restore-memory-completed");
    vmm.wait_for_work(2_000);
    assert_confined(&vmm);
    vmm.verify();
    vmm.shut_down();
}

fn moves(mode: Mode) {
    let folder = folder();
    let source = confined(&[&rule(&folder)]).start();
    source.wait_for_work(2_000);
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Unix, mode);
    assert!(!destination.path("migration").exists(), "its socket is removed");
    assert_confined(&destination);
    destination.api().put("vm.add-disk", &disk(&image_in(folder.path(), "inside"))).ok();
    destination.wait_for_work(2_000);
    destination.verify();
    destination.shut_down();
}

fn free() {
    // Rules alone confine nothing.
    let folder = folder();
    let vmm = VmmBuilder::guest(1, MEMORY, GUEST).with(&["--landlock-rules", &rule(&folder)]);
    let vmm = vmm.start();
    let other = self::folder();
    vmm.api().put("vm.add-disk", &disk(&image_in(other.path(), "anywhere"))).ok();
    vmm.shut_down();
}
