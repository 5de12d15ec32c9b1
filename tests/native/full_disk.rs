// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A host that has no room for what the guest writes: the guest gets an error, or its VM is paused until there
//! is room, and loses nothing.
//!
//! The image is sparse, on a small file system that other files fill.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use guest_reader::abi::{disk::BLOCKS, disk_failure, vcpu};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::disks::{holds, is_locked, word, write_more, written};
use crate::harness::loops::{Mounted, format};
use crate::harness::migrate::{Reception, failure_of, migrate};
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, wait_for};

pub fn add(suite: &mut Suite) {
    for (name, system, more) in [
        ("tmpfs", System::Tmpfs, ""),
        ("tmpfs_without_io_uring", System::Tmpfs, ",_disable_io_uring=on"),
        ("ext4", System::Ext4, ""),
        ("ext4_direct", System::Ext4, ",direct=on"),
    ] {
        let name = format!("full_disk::the_vm_waits_for_room_and_loses_nothing_on_{name}");
        suite.add(&name, move || goes_on(system, more));
    }
    suite.add("full_disk::without_the_option_the_guest_gets_an_error", reported);
    suite.add("full_disk::one_that_a_client_has_paused_waits_for_the_client", paused_by_client);
    suite.add("full_disk::it_is_neither_moved_nor_saved_without_room", not_moved);
    suite.add("full_disk::a_disk_that_gets_full_ends_the_migration_by_name", full_meanwhile);
    suite.add("full_disk::it_holds_up_no_reboot_and_no_end", ended);
}

const MEMORY: &str = "size=128M,shared=on";
const GUEST: &str = "workload=disk-write mem=16M";
const DISK_BYTES: u64 = 8 << 20;
/// Files that fill the rest; the guest writes 1 MiB.
const BALLAST_BYTES: usize = 384 << 10;

#[derive(Clone, Copy, PartialEq)]
enum System {
    Tmpfs,
    Ext4,
}

/// An image on a file system without room.
struct Small {
    file: PathBuf,
    /// Each makes room for a part of what the guest writes.
    ballast: Vec<PathBuf>,
    _mounted: Mounted,
    _folder: TempDir,
}

impl Small {
    fn new(system: System) -> Self {
        let folder = TempDir::with_prefix("godwit-full-").expect("a folder");
        let mount = folder.path().join("mount");
        fs::create_dir(&mount).expect("a folder");
        let mounted = match system {
            System::Tmpfs => Mounted::at(&mount, &["-t", "tmpfs", "-o", "size=2m", "none"]),
            System::Ext4 => {
                let device = folder.path().join("system");
                File::create(&device).and_then(|file| file.set_len(16 << 20)).expect("a file");
                format(&device);
                let device = device.to_str().expect("UTF-8");
                Mounted::at(&mount, &["-t", "ext4", "-o", "loop,noatime", device])
            }
        };
        let file = mount.join("disk");
        File::create(&file).and_then(|file| file.set_len(DISK_BYTES)).expect("a file");
        let mut ballast = Vec::new();
        loop {
            let path = mount.join(format!("ballast{}", ballast.len()));
            let mut file = File::create(&path).expect("a file");
            let is_whole = file.write_all(&vec![0; BALLAST_BYTES]).is_ok();
            // What has no room is found out late, too.
            let is_there = file.sync_all().is_ok();
            if !is_whole || !is_there {
                break;
            }
            ballast.push(path);
        }
        Self { file, ballast, _mounted: mounted, _folder: folder }
    }

    fn option(&self, more: &str) -> String {
        format!("path={},id=data{more}", self.file.display())
    }

    fn guest(&self, more: &str) -> Vmm {
        let option = self.option(more);
        VmmBuilder::guest(1, MEMORY, GUEST).with(&["--disk", &option]).start()
    }

    /// Makes room for a part of what the guest writes.
    fn make_some_room(&mut self) {
        fs::remove_file(self.ballast.pop().expect("ballast")).expect("it can be removed");
    }

    /// Makes room for all of it.
    fn make_room(&mut self) {
        while self.ballast.len() > 1 {
            self.make_some_room();
        }
    }

    /// Waits until the VM stands still for lack of room, behind so many events; gives what the guest counts as
    /// written by then.
    #[track_caller]
    fn wait_until_full(&self, vmm: &Vmm, before: usize) -> u64 {
        let told = vmm.wait_for_later_events(before, &["disk-full"]);
        let expected = json!({"id": "data", "path": self.file.to_str().expect("UTF-8")});
        assert_eq!(told["properties"], expected);
        vmm.wait_for_later_events(before, &["paused"]);
        self.is_full(vmm);
        let acknowledged = written(vmm);
        holds(&self.file, acknowledged);
        acknowledged
    }

    /// It is paused, and says why.
    #[track_caller]
    fn is_full(&self, vmm: &Vmm) {
        let info = vmm.api().get("vm.info").ok().json();
        assert_eq!((&info["state"], &info["doing"]), (&json!("Paused"), &Value::Null), "{info}");
        let path = self.file.to_str().expect("UTF-8");
        assert_eq!(info["full_disks"], json!([{"id": "data", "path": path, "requests": 1}]));
    }

    /// A refusal names the disk and says what to do.
    #[track_caller]
    fn is_named(&self, text: &str) {
        let path = self.file.to_str().expect("UTF-8");
        assert!(text.contains("'data'") && text.contains(path), "{text}");
        assert!(text.contains("is full") && text.contains("free room"), "{text}");
    }
}

/// The events behind the first `before` that are about this.
fn told(vmm: &Vmm, before: usize) -> Vec<String> {
    let mut names = vmm.event_names().split_off(before);
    names.retain(|name| {
        ["disk-full", "disk-has-room", "pausing", "paused", "resuming", "resumed"]
            .contains(&name.as_str())
    });
    names
}

fn goes_on(system: System, more: &str) {
    let mut small = Small::new(system);
    small.make_some_room();
    let vmm = small.guest(&format!(",on_full=pause{more}"));
    let first = small.wait_until_full(&vmm, 0);
    assert!(first < BLOCKS, "{first} blocks had room");
    assert_eq!(told(&vmm, 0), ["disk-full", "pausing", "paused"]);

    // It cannot be told to continue, and says why.
    let refused = vmm.api().put("vm.resume", "");
    assert_eq!(refused.status, 409, "{refused:?}");
    small.is_named(&refused.body);
    assert_eq!(vmm.api().state(), "Paused");
    assert_eq!(written(&vmm), first, "no block is acknowledged without room");
    // What is told of that does not come behind the next mark.
    vmm.wait_for_event("resume-failed");

    // By itself, as far as there is room.
    let before = vmm.events().len();
    small.make_some_room();
    vmm.wait_for_later_events(before, &["resumed"]);
    let second = small.wait_until_full(&vmm, before);
    assert!(second > first && second < BLOCKS, "{first} and {second} blocks had room");
    let expected = ["disk-has-room", "resuming", "resumed", "disk-full", "pausing", "paused"];
    assert_eq!(told(&vmm, before), expected);

    // When it is told to.
    let before = vmm.events().len();
    small.make_room();
    let resumed = vmm.api().put("vm.resume", "");
    // It may have found the room before.
    assert!(resumed.status == 204 || resumed.status == 405, "{resumed:?}");
    vmm.wait_for_later_events(before, &["disk-has-room"]);
    vmm.wait_for_later_events(before, &["resumed"]);
    write_more(&vmm, 2 * BLOCKS);
    let info = vmm.api().get("vm.info").ok().json();
    assert_eq!((&info["state"], &info["full_disks"]), (&json!("Running"), &Value::Null));
    vmm.api().put("vm.pause", "").ok();
    holds(&small.file, written(&vmm));
    vmm.verify_paused();
    // Whatever was told before this pause is written then.
    vmm.wait_for_later_events(before, &["paused"]);
    assert!(!told(&vmm, before).contains(&"disk-full".to_owned()));
    vmm.shut_down();
}

fn reported() {
    for more in ["", ",on_full=report"] {
        let mut small = Small::new(System::Tmpfs);
        small.make_some_room();
        let mut vmm = small.guest(more);
        let failure = wait_for("an error", || match word(&vmm, vcpu::DISK_FAILURE) {
            0 => None,
            failure => Some(failure),
        });
        assert_eq!(failure, disk_failure::REQUEST);
        holds(&small.file, word(&vmm, vcpu::DISK_WRITES));
        let info = vmm.api().get("vm.info").ok().json();
        assert_eq!((&info["state"], &info["full_disks"]), (&json!("Running"), &Value::Null));
        vmm.end();
        assert_eq!(told(&vmm, 0), [""; 0]);
    }
}

fn paused_by_client() {
    let mut small = Small::new(System::Tmpfs);
    let vmm = small.guest(",on_full=pause");
    let acknowledged = small.wait_until_full(&vmm, 0);
    let before = vmm.events().len();
    vmm.api().put("vm.pause", "").ok();
    assert_eq!(vmm.wait_for_later_events(before, &["paused"])["event"], "paused");
    small.make_room();
    // The first looks for room would be over by then.
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        assert_eq!(vmm.api().state(), "Paused");
        std::thread::sleep(Duration::from_millis(50));
    }
    small.is_full(&vmm);
    let allocated = |small: &Small| {
        use std::os::unix::fs::MetadataExt as _;
        small.file.metadata().expect("the image").blocks()
    };
    assert_eq!(allocated(&small), acknowledged * 8, "nothing is written in a pause");
    vmm.api().put("vm.resume", "").ok();
    vmm.wait_for_later_events(before, &["resumed"]);
    assert_eq!(told(&vmm, before), ["pausing", "paused", "resuming", "disk-has-room", "resumed"]);
    write_more(&vmm, 2 * BLOCKS);
    vmm.api().put("vm.pause", "").ok();
    holds(&small.file, written(&vmm));
    vmm.shut_down();
}

fn not_moved() {
    let mut small = Small::new(System::Tmpfs);
    let vmm = small.guest(",on_full=pause");
    small.wait_until_full(&vmm, 0);
    let snapshots = TempDir::with_prefix("godwit-snapshot-").expect("a folder");
    let url = format!("file://{}", snapshots.path().display());
    let snapshot = json!({"destination_url": url}).to_string();
    let send = json!({"destination_url": "tcp:127.0.0.1:1"}).to_string();
    for paused_by_client in [false, true] {
        if paused_by_client {
            vmm.api().put("vm.pause", "").ok();
        }
        for (name, body) in [("vm.snapshot", &snapshot), ("vm.send-migration", &send)] {
            let refused = vmm.api().put(name, body);
            assert_eq!(refused.status, 409, "{name}: {refused:?}");
            small.is_named(&refused.body);
        }
        small.is_full(&vmm);
    }
    assert_eq!(fs::read_dir(snapshots.path()).expect("the folder").count(), 0);

    small.make_room();
    vmm.api().put("vm.resume", "").ok();
    write_more(&vmm, BLOCKS / 2);
    vmm.api().put("vm.pause", "").ok();
    vmm.api().put("vm.snapshot", &snapshot).ok();
    vmm.api().put("vm.resume", "").ok();
    let destination = Vmm::empty();
    migrate(vmm, &destination, Transport::Tcp, Mode::Precopy);
    write_more(&destination, 2 * BLOCKS);
    destination.api().put("vm.pause", "").ok();
    holds(&small.file, written(&destination));
    destination.shut_down();
}

fn full_meanwhile() {
    let mut small = Small::new(System::Tmpfs);
    let option = small.option(",on_full=pause");
    let cmdline = "workload=random-write mem=16M";
    let vmm = VmmBuilder::guest(1, MEMORY, cmdline).with(&["--disk", &option]).start();
    vmm.wait_for_work(20_000);
    let guest = vmm.guest();
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    // It takes some seconds.
    let send = format!("destination_url={},memory_mode=precopy,bandwidth=4M", reception.url);
    vmm.remote_ok(&["send-migration", &send]);
    vmm.wait_for_event("migration-started");
    guest.set("workload=disk-write").expect("it listens");
    // Clients hear of it at once; the VM is not theirs to pause before the migration is over.
    vmm.wait_for_event("disk-full");
    small.is_named(&failure_of(&vmm));
    assert!(!reception.finish().status.success());
    vmm.wait_for_event("paused");
    let names = vmm.event_names();
    let at = |name: &str| names.iter().position(|told| told == name);
    assert!(at("disk-full") < at("migration-failed") && at("migration-failed") < at("paused"));
    assert_eq!(names.iter().filter(|name| *name == "disk-full").count(), 1, "{names:?}");
    small.is_full(&vmm);
    assert_eq!(destination.api().state(), "");
    small.make_room();
    vmm.wait_for_event("disk-has-room");
    write_more(&vmm, BLOCKS / 2);
    migrate(vmm, &destination, Transport::Tcp, Mode::Precopy);
    write_more(&destination, 2 * BLOCKS);
    destination.api().put("vm.pause", "").ok();
    holds(&small.file, written(&destination));
    destination.shut_down();
}

fn ended() {
    let mut small = Small::new(System::Tmpfs);
    small.make_some_room();
    let mut vmm = small.guest(",on_full=pause");
    let api = vmm.api();
    let acknowledged = small.wait_until_full(&vmm, 0);
    let before = vmm.events().len();
    api.put("vm.reboot", "").ok();
    // The guest begins at its first block, and gets as far.
    assert_eq!(small.wait_until_full(&vmm, before), acknowledged);
    api.put("vm.shutdown", "").ok();
    assert_eq!(api.state(), "Created");
    assert!(!is_locked(&small.file));
    holds(&small.file, acknowledged);

    let before = vmm.events().len();
    api.put("vm.boot", "").ok();
    small.wait_until_full(&vmm, before);
    // What a client changes meanwhile changes nothing of that.
    let added = small.file.with_file_name("added");
    File::create(&added).and_then(|file| file.set_len(DISK_BYTES)).expect("a file");
    api.put("vm.add-disk", &json!({"path": added, "id": "added"}).to_string()).ok();
    small.is_full(&vmm);
    assert!(is_locked(&small.file));
    vmm.signal(libc::SIGTERM);
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
    assert!(!is_locked(&small.file));
    holds(&small.file, acknowledged);
}
