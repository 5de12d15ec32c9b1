// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A disk that does not answer keeps no other request from being answered: a request of the guest hangs, and the
//! VMM is asked for everything meanwhile.
//!
//! The disk is a file on a file system that is frozen: a write waits until it is thawed. Where the
//! process has to end meanwhile, a loop device is in between, so that none of its threads is in the
//! kernel with the write.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guest_reader::abi::{self, vcpu};
use serde_json::json;
use tempfile::TempDir;

use crate::harness::loops::{Frozen, Loop, Mounted, format};
use crate::harness::migrate::{Mode, Reception, Transport, failure_of};
use crate::harness::{Suite, Vmm, VmmBuilder, process, wait_for};

pub fn add(suite: &mut Suite) {
    suite.add("hung_disk::a_pause_is_taken_back_and_all_are_answered", pause);
    suite.add("hung_disk::a_migration_leaves_the_guest_and_names_the_disk", migration);
    suite.add("hung_disk::a_shutdown_waits_and_all_are_answered", shutdown);
    suite.add("hung_disk::a_reboot_waits_and_all_are_answered", reboot);
    suite.add("hung_disk::a_forced_shutdown_ends_at_once", forced);
    suite.add("hung_disk::a_second_signal_ends_at_once", signals);
    suite.add("hung_disk::a_snapshot_is_cancelled", snapshot);
}

const DISK_BYTES: usize = 8 << 20;
/// Nothing that the VMM thread does by itself takes this long.
const PROMPT: Duration = Duration::from_secs(2);

/// A VM whose disk can be made to hang.
pub struct Hung {
    pub vmm: Vmm,
    /// Where its disk is.
    pub rest: Storage,
}

/// The storage of a disk that can be made to hang.
pub struct Storage {
    _device: Option<Loop>,
    mounted: Mounted,
    _folder: TempDir,
}

impl Hung {
    pub fn new(on_a_loop: bool) -> Self {
        let folder = TempDir::with_prefix("godwit-hung-").expect("a folder");
        let system = folder.path().join("system");
        File::create(&system).and_then(|file| file.set_len(64 << 20)).expect("a file");
        format(&system);
        let mount = folder.path().join("mount");
        fs::create_dir(&mount).expect("a folder");
        let system = system.to_str().expect("UTF-8");
        let mounted = Mounted::at(&mount, &["-t", "ext4", "-o", "loop,noatime", system]);
        let file = mount.join("disk");
        fs::write(&file, vec![0; DISK_BYTES]).expect("a file");
        let device = on_a_loop.then(|| Loop::over(&file));
        let path: PathBuf = device.as_ref().map_or(file, |device| device.path().to_owned());
        let vmm = guest(&path, if on_a_loop { ",direct=on" } else { "" });
        Self { vmm, rest: Storage { _device: device, mounted, _folder: folder } }
    }

    /// From now on the guest waits for a write that waits.
    pub fn hang(&self) -> Frozen {
        let frozen = self.rest.mounted.freeze();
        wait_until_it_hangs(&self.vmm);
        frozen
    }

    /// Every request is answered, whatever the answer is.
    #[track_caller]
    fn answers(&self) {
        let api = self.vmm.api();
        let requests = [
            ("GET", "vmm.ping"),
            ("GET", "vm.info"),
            ("GET", "vm.counters"),
            ("PUT", "vm.pause"),
            ("PUT", "vm.shutdown"),
            ("PUT", "vm.delete"),
            ("PUT", "vm.boot"),
        ];
        for (method, name) in requests {
            let began = Instant::now();
            let answer = api.request(method, name, None).expect("an answer");
            assert!(began.elapsed() < PROMPT, "{name} took {:?}", began.elapsed());
            match name {
                "vmm.ping" | "vm.info" => assert_eq!(answer.status, 200, "{name}: {answer:?}"),
                _ => assert!(answer.status >= 400, "{name}: {answer:?}"),
            }
        }
    }
}

fn guest(disk: &Path, more: &str) -> Vmm {
    let option = format!("path={},id=data{more}", disk.display());
    let cmdline = "workload=disk-write mem=16M";
    let vmm =
        VmmBuilder::guest(1, "size=128M,shared=on", cmdline).with(&["--disk", &option]).start();
    write_more(&vmm);
    vmm
}

#[track_caller]
fn written(vmm: &Vmm) -> u64 {
    let guest = vmm.guest();
    let word = |field| guest.memory().word(abi::vcpu_gpa(0) + field).expect("the guest's memory");
    assert_eq!(word(vcpu::DISK_FAILURE), 0, "what the guest read is not what it wrote");
    word(vcpu::DISK_WRITES)
}

/// Waits until the guest waits for a write that waits.
#[track_caller]
pub fn wait_until_it_hangs(vmm: &Vmm) {
    let mut before = (u64::MAX, Instant::now());
    wait_for("a write that waits", || {
        let now = written(vmm);
        if before.0 != now {
            before = (now, Instant::now());
        }
        // It gets no further although its vCPU has a processor: its heart beats while it waits for a disk.
        vmm.wait_for_heartbeat();
        (before.1.elapsed() > Duration::from_millis(300)).then_some(())
    });
}

#[track_caller]
fn write_more(vmm: &Vmm) {
    let target = written(vmm) + 100;
    wait_for("blocks written by the guest", || (written(vmm) >= target).then_some(()));
}

fn pause() {
    let hung = Hung::new(false);
    let api = hung.vmm.api();
    for _ in 0..2 {
        let frozen = hung.hang();
        std::thread::scope(|scope| {
            let pause = scope.spawn(|| api.put("vm.pause", ""));
            hung.vmm.wait_for_event("pausing");
            wait_for("the pause", || (api.get("vm.counters").status == 409).then_some(()));
            hung.answers();
            // The vCPUs run on as long as the devices have not finished.
            hung.vmm.wait_for_heartbeat();
            let began = Instant::now();
            api.put("vm.resume", "").ok();
            assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
            let pause = pause.join().expect("an answer");
            assert!(pause.status == 409 && pause.body.contains("was cancelled"), "{pause:?}");
        });
        assert_eq!(api.state(), "Running");
        hung.vmm.wait_for_heartbeat();
        drop(frozen);
        // Its queue is served again, and nothing is lost.
        write_more(&hung.vmm);
    }
    api.put("vm.pause", "").ok();
    hung.vmm.verify_paused();
    api.put("vm.resume", "").ok();
    write_more(&hung.vmm);
    let Hung { vmm, .. } = hung;
    vmm.shut_down();
}

fn migration() {
    let hung = Hung::new(false);
    let frozen = hung.hang();
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    let option = format!(
        "destination_url={},memory_mode=precopy,downtime_ms=200,timeout_s=3",
        reception.url
    );
    hung.vmm.remote_ok(&["send-migration", &option]);
    // It waits for the disk, and answers meanwhile.
    for _ in 0..5 {
        hung.vmm.api().get("vmm.ping").ok();
        hung.vmm.wait_for_heartbeat();
    }
    let why = failure_of(&hung.vmm);
    assert!(why.contains("'data' has not finished its requests within 200 ms"), "{why}");
    assert!(!reception.finish().status.success());
    assert_eq!(hung.vmm.api().state(), "Running");
    hung.vmm.wait_for_heartbeat();
    drop(frozen);
    write_more(&hung.vmm);
    // And then it goes, with the same limits.
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    let option = format!(
        "destination_url={},memory_mode=precopy,downtime_ms=1000,timeout_s=30",
        reception.url
    );
    let Hung { mut vmm, .. } = hung;
    vmm.remote_ok(&["send-migration", &option]);
    assert!(reception.finish().status.success(), "{}", vmm.output());
    assert_eq!(vmm.wait_for_exit(), 0);
    write_more(&destination);
    destination.shut_down();
}

/// `name` waits for the disk, all other requests are answered, and it comes to its end.
fn waits(hung: &Hung, name: &str) {
    let api = hung.vmm.api();
    let frozen = hung.hang();
    std::thread::scope(|scope| {
        let request = scope.spawn(|| api.put(name, ""));
        wait_for("the end of the machine", || (api.get("vm.counters").status == 409).then_some(()));
        hung.answers();
        let refused = api.put("vm.resume", "");
        assert!(refused.status == 409 && refused.body.contains("being ended"), "{refused:?}");
        assert!(!request.is_finished(), "the disk has not answered");
        drop(frozen);
        request.join().expect("an answer").ok();
    });
}

fn shutdown() {
    let hung = Hung::new(false);
    waits(&hung, "vm.shutdown");
    assert_eq!(hung.vmm.api().state(), "Created");
    hung.vmm.api().put("vm.boot", "").ok();
    write_more(&hung.vmm);
    waits(&hung, "vm.delete");
    assert_eq!(hung.vmm.api().state(), "");
    let Hung { vmm, .. } = hung;
    vmm.shut_down();
}

fn reboot() {
    let hung = Hung::new(false);
    waits(&hung, "vm.reboot");
    write_more(&hung.vmm);
    let Hung { vmm, .. } = hung;
    vmm.shut_down();
}

fn ends_at_once(mut hung: Hung, frozen: Frozen, began: Instant) {
    assert_eq!(hung.vmm.wait_for_exit(), 0, "{}", hung.vmm.output());
    assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
    assert!(!hung.vmm.socket().exists(), "the socket is left");
    drop(frozen);
}

fn forced() {
    for during in [None, Some("vm.pause"), Some("vm.shutdown"), Some("vmm.shutdown")] {
        let hung = Hung::new(true);
        let frozen = hung.hang();
        let api = hung.vmm.api();
        std::thread::scope(|scope| {
            let other = during.map(|name| {
                let request = scope.spawn(|| api.request("PUT", name, None));
                wait_for("the other request", || {
                    (api.get("vm.counters").status == 409).then_some(())
                });
                request
            });
            let began = Instant::now();
            api.put("vmm.shutdown", &json!({"force": true}).to_string()).ok();
            ends_at_once(hung, frozen, began);
            // Told of the end, or of nothing by a socket that is gone.
            if let Some(request) = other {
                let _ = request.join().expect("it ends");
            }
        });
    }
}

fn signals() {
    let mut hung = Hung::new(true);
    let frozen = hung.hang();
    // As a session that ends does.
    for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGHUP] {
        hung.vmm.signal(signal);
    }
    wait_for("the end of the machine", || {
        (hung.vmm.api().get("vm.counters").status == 409).then_some(())
    });
    hung.answers();
    // Longer than a process is given that is to end at once.
    let told = Instant::now();
    wait_for("time to pass", || (told.elapsed() > Duration::from_secs(1)).then_some(()));
    assert_eq!(hung.vmm.exited(), None, "the disk has not answered");
    hung.vmm.signal_again(libc::SIGTERM);
    let began = Instant::now();
    ends_at_once(hung, frozen, began);
}

/// Whether a thread of that name is in a system call that no signal ends.
fn is_stuck(vmm: &Vmm, thread: &str) -> bool {
    process::thread_states(vmm.pid()).contains(&(thread.to_owned(), 'D'))
}

fn snapshot() {
    let hung = Hung::new(false);
    let (vmm, api) = (&hung.vmm, hung.vmm.api());
    let path = hung.rest.mounted.path().join("snapshot");
    fs::create_dir(&path).expect("a folder");
    let body = json!({"destination_url": format!("file://{}", path.display())}).to_string();
    let refused = api.put("vm.snapshot-cancel", "");
    assert!(refused.status == 404 && refused.body.contains("no snapshot"), "{refused:?}");
    api.put("vm.pause", "").ok();
    // Freezing writes all of it back, so the disk, which is on that file system, has nothing to wait for.
    let frozen = hung.rest.mounted.freeze();
    std::thread::scope(|scope| {
        let snapshot = scope.spawn(|| api.put("vm.snapshot", &body));
        wait_for("a thread that the storage keeps", || {
            is_stuck(vmm, "snapshot-write").then_some(())
        });
        assert!(!snapshot.is_finished(), "the storage has not answered");
        let refused = api.put("vm.resume", "");
        assert!(
            refused.status == 409 && refused.body.contains("vm.snapshot-cancel"),
            "{refused:?}"
        );
        let began = Instant::now();
        api.put("vm.snapshot-cancel", "").ok();
        assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
        let failed = snapshot.join().expect("an answer");
        assert!(failed.status == 500 && failed.body.contains("does not answer"), "{failed:?}");
    });
    vmm.wait_for_event("snapshot-failed");
    vmm.verify_paused();
    api.put("vm.resume", "").ok();
    vmm.wait_for_heartbeat();
    assert!(is_stuck(vmm, "snapshot-write"), "the storage has answered meanwhile");
    drop(frozen);
    let files = || fs::read_dir(&path).expect("the folder").count();
    wait_for("the hidden files to go", || (files() == 0).then_some(()));
    write_more(vmm);
    api.put("vm.pause", "").ok();
    wait_for("the lock", || (api.put("vm.snapshot", &body).status == 204).then_some(()));
    vmm.verify_paused();
    let Hung { vmm, .. } = hung;
    vmm.shut_down();
}
