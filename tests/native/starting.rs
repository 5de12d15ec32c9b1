// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A path that does not open keeps no request from being answered: a VM that boots, and one that is given a
//! disk, wait for it, and the VMM is asked for everything meanwhile.
//!
//! The disk is a file on which the test holds a lease: an open waits until the lease is released.

use std::fs::File;
use std::io::Write as _;
use std::net::Shutdown;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::api::{Api, read_answer};
use crate::harness::faults::Faults;
use crate::harness::terminal::Terminal;
use crate::harness::vmm::finish;
use crate::harness::{Suite, Vmm, VmmBuilder, image, process, wait_for};
use crate::lifecycle::config;
use crate::requests::{Held, PROMPT, prompt_put, requests_but, wave};
use crate::snapshot::{place, save};

pub fn add(suite: &mut Suite) {
    suite.add("starting::a_boot_waits_and_all_are_answered", boot);
    suite.add("starting::a_boot_is_cancelled", boot_cancelled);
    suite.add("starting::a_signal_ends_a_boot_that_waits", signal);
    suite.add("starting::requests_wait_for_the_vm_of_the_command_line", at_launch);
    suite.add("starting::a_restore_is_cancelled", restore_cancelled);
    suite.add("starting::a_signal_ends_a_restore_that_waits", restore_signal);
    suite.add("starting::who_has_said_all_is_answered", half_closed);
    suite.add("starting::a_pause_without_a_thread_is_told", no_thread);
    suite.add("starting::a_disk_is_added_and_all_are_answered", add_disk);
    suite.add("starting::a_disk_that_does_not_open_is_cancelled", cancel_disk);
    suite.add("starting::pipes_are_refused_by_name", pipes);
}

/// In which a first signal ends a VMM whose VM has not started.
const SIGNAL_END: Duration = Duration::from_secs(8);
/// `F_SETSIG`, which libc has not for this target everywhere.
const SET_SIGNAL: libc::c_int = 10;

/// A disk that does not open.
pub struct Slow {
    folder: TempDir,
    lease: Option<File>,
}

impl Slow {
    pub fn new() -> Self {
        let folder = TempDir::with_prefix("godwit-slow-").expect("a folder");
        let mut slow = Self { folder, lease: None };
        File::create(slow.path()).and_then(|file| file.set_len(8 << 20)).expect("a file");
        slow.close();
        slow
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    /// From now on it does not open.
    pub fn close(&mut self) {
        let file = File::options().write(true).open(self.path()).expect("the file");
        // SAFETY: only numbers are passed, and the descriptor is open. The signal that would tell of an
        // opener is one that does nothing.
        let leased = unsafe {
            libc::fcntl(file.as_raw_fd(), SET_SIGNAL, libc::SIGURG) == 0
                && libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) == 0
        };
        assert!(leased, "{}", std::io::Error::last_os_error());
        self.lease = Some(file);
    }

    /// Waits until it is being opened: what comes before that is over.
    #[track_caller]
    pub fn wait_until_asked(&self) {
        let lease = self.lease.as_ref().expect("it does not open");
        // SAFETY: only numbers are passed, and the descriptor is open.
        let held = || unsafe { libc::fcntl(lease.as_raw_fd(), libc::F_GETLEASE) };
        // While an open waits, it is what the lease is to become.
        wait_for("the open", || (held() != libc::F_WRLCK).then_some(()));
    }

    /// Waiting opens continue.
    pub fn open(&mut self) {
        self.lease = None;
    }

    /// A configuration of it.
    pub fn disk(&self) -> Value {
        json!({ "path": self.path(), "id": "slow", "image_type": "Raw" })
    }

    pub fn config(&self) -> String {
        let mut config: Value = serde_json::from_str(&config(128)).expect("JSON");
        config["disks"] = json!([self.disk()]);
        config.to_string()
    }
}

/// Every request is answered while an operation is in progress, and changes nothing.
#[track_caller]
fn answers(vmm: &Vmm, doing: &str) {
    let held = Held::by(vmm);
    // Those two cancel the operation in progress.
    for (name, answer) in wave(&vmm.api(), &requests_but(&["vm.shutdown", "vm.delete"])) {
        let is_read = ["vmm.ping", "vm.info", "vm.metrics"].contains(&name);
        assert_eq!(answer.status == 200, is_read, "{name}: {answer:?}");
    }
    held.assert_still(vmm, doing);
    assert_eq!(vmm.api().get("vm.info").ok().json()["doing"], doing);
}

#[track_caller]
pub fn wait_until_doing(vmm: &Vmm, doing: &str) {
    wait_for("the operation in progress", || {
        let answer = vmm.api().get("vm.info");
        (answer.status == 200 && answer.json()["doing"] == doing).then_some(())
    });
}

fn boot() {
    let mut slow = Slow::new();
    let vmm = Vmm::empty();
    let api = vmm.api();
    api.put("vm.create", &slow.config()).ok();
    std::thread::scope(|scope| {
        let booting = scope.spawn(|| api.put("vm.boot", ""));
        wait_until_doing(&vmm, "booted");
        assert_eq!(api.state(), "Created");
        slow.wait_until_asked();
        answers(&vmm, "booted");
        slow.open();
        booting.join().expect("an answer").ok();
    });
    assert_eq!(api.state(), "Running");
    assert!(api.get("vm.info").ok().json().get("doing").is_none());
    vmm.wait_for_heartbeat();
    vmm.shut_down();
}

fn boot_cancelled() {
    let mut slow = Slow::new();
    let vmm = Vmm::empty();
    let api = vmm.api();
    for (name, after) in [("vm.shutdown", "Created"), ("vm.delete", "")] {
        api.put("vm.create", &slow.config());
        let before = process::descriptors(vmm.pid()).len();
        std::thread::scope(|scope| {
            let booting = scope.spawn(|| api.put("vm.boot", ""));
            wait_until_doing(&vmm, "booted");
            let ending = scope.spawn(|| api.put(name, ""));
            wait_until_doing(&vmm, "ended");
            slow.open();
            let booted = booting.join().expect("an answer");
            assert!(booted.status == 409 && booted.body.contains("was ended"), "{booted:?}");
            ending.join().expect("an answer").ok();
        });
        assert_eq!(api.state(), after, "{name}");
        wait_for("the descriptors", || {
            (process::descriptors(vmm.pid()).len() <= before).then_some(())
        });
        slow.close();
    }
    vmm.shut_down();
}

fn signal() {
    let slow = Slow::new();
    let option = format!("path={},image_type=raw", slow.path().display());
    let terminal = Terminal::new();
    let before = terminal.modes();
    let builder = VmmBuilder::new(&["--console", "off", "--kernel", image()])
        .with(&["--memory", "size=64M", "--disk", &option, "--serial", "tty"])
        .wrapped(&["sh", "-c", "exec \"$@\" <\"$0\"", &terminal.path()]);
    for by_request in [false, true] {
        let mut vmm = builder.start_at_once();
        wait_until_doing(&vmm, "booted");
        wait_for("its console", || (terminal.modes() != before).then_some(()));
        let began = Instant::now();
        if by_request {
            vmm.api().put("vmm.shutdown", r#"{"force":true}"#).ok();
        } else {
            vmm.signal(libc::SIGTERM);
        }
        assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
        assert!(began.elapsed() < SIGNAL_END, "{:?}", began.elapsed());
        assert!(!vmm.socket().exists());
        assert_eq!(terminal.modes(), before);
        assert_failed(&vmm, "boot-failed");
    }
}

/// A VM that there was not is told to have failed, and not to have been shut down, by a VMM that has ended.
#[track_caller]
fn assert_failed(vmm: &Vmm, event: &str) {
    vmm.wait_for_event(event);
    let events = vmm.events();
    let is_of_vm = |it: &&Value, name: &str| it["source"] == "vm" && it["event"] == name;
    let count = |name: &str| events.iter().filter(|it| is_of_vm(it, name)).count();
    assert_eq!((count(event), count("shutdown")), (1, 0), "{events:?}");
}

/// A snapshot of a VM whose disk does not open.
fn slow_snapshot() -> (Slow, TempDir, String) {
    let (folder, url) = place();
    let mut slow = Slow::new();
    slow.open();
    let disk = format!("path={},image_type=raw", slow.path().display());
    let builder = VmmBuilder::guest(1, "size=64M,shared=on", "workload=idle");
    let mut source = builder.with(&["--disk", &disk]).start();
    save(&source, &url);
    source.signal(libc::SIGKILL);
    source.wait_for_exit();
    slow.close();
    (slow, folder, format!("source_url={url},resume=on"))
}

/// The bytes of a request without a body.
fn request(name: &str) -> String {
    format!("PUT /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
}

/// Sends one that is answered later; that it has come is seen by answers to later ones.
fn send(api: &Api, name: &str) -> UnixStream {
    let mut stream = api.connect().expect("a connection");
    stream.write_all(request(name).as_bytes()).expect("sent");
    for _ in 0..2 {
        api.get("vmm.ping").ok();
    }
    stream
}

fn restore_cancelled() {
    for name in ["vm.shutdown", "vm.delete"] {
        for at_launch in [true, false] {
            let (mut slow, _folder, option) = slow_snapshot();
            let arguments: &[&str] = if at_launch { &["--restore", &option] } else { &[] };
            let mut vmm = VmmBuilder::new(arguments).start_at_once();
            let api = vmm.api();
            let restoring = (!at_launch).then(|| vmm.remote_spawn(&["restore", &option]));
            vmm.wait_for_event("restoring");
            let mut ending = send(&api, name);
            slow.open();
            read_answer(&mut ending).expect("an answer").ok();
            assert_eq!(api.state(), "", "{name}");
            if let Some(restoring) = restoring {
                let refused = finish(restoring);
                let error = String::from_utf8_lossy(&refused.stderr);
                assert!(!refused.status.success() && error.contains("was ended"), "{error}");
            }
            vmm.end();
            assert_failed(&vmm, "restore-failed");
            assert!(!vmm.event_names().iter().any(|event| event == "restored"), "{name}");
        }
    }
}

fn restore_signal() {
    let (_slow, _folder, option) = slow_snapshot();
    let mut vmm = VmmBuilder::new(&["--restore", &option]).start_at_once();
    vmm.wait_for_event("restoring");
    let began = Instant::now();
    vmm.signal(libc::SIGTERM);
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
    assert!(began.elapsed() < SIGNAL_END, "{:?}", began.elapsed());
    assert!(!vmm.socket().exists());
    assert_failed(&vmm, "restore-failed");
}

/// As `nc -N` and socat do: nothing more is sent, and the answer is waited for.
fn half_closed() {
    let mut slow = Slow::new();
    let option = format!("path={},image_type=raw", slow.path().display());
    let vmm = VmmBuilder::guest(1, "size=64M", "workload=idle")
        .with(&["--disk", &option])
        .start_at_once();
    let api = vmm.api();
    wait_until_doing(&vmm, "booted");
    let mut pausing = send(&api, "vm.pause");
    pausing.shutdown(Shutdown::Write).expect("one side can be closed");
    // What the VMM makes of that comes before these answers.
    for _ in 0..2 {
        api.get("vmm.ping").ok();
    }
    slow.open();
    read_answer(&mut pausing).expect("an answer").ok();
    assert_eq!(api.state(), "Paused");
    vmm.shut_down();
}

fn no_thread() {
    let vmm = Vmm::boot(1, "size=96M,shared=on", "workload=random-write mem=16M");
    let api = vmm.api();
    let faults = Faults::inject_all(&vmm, "clone,clone3:error=EAGAIN");
    let refused = api.put("vm.pause", "");
    assert!(
        refused.status == 500 && refused.body.contains("thread cannot be started"),
        "{refused:?}"
    );
    drop(faults);
    let failed = vmm.wait_for_event("pause-failed");
    let why = failed["properties"]["error"].as_str().unwrap_or_default();
    assert!(why.contains("thread cannot be started"), "{failed}");
    assert_eq!(api.state(), "Running");
    vmm.verify();
    vmm.shut_down();
}

/// The first request of a script waits for the VM, however long that takes, and the end of the process
/// for neither.
fn at_launch() {
    let mut slow = Slow::new();
    let option = format!("path={},image_type=raw", slow.path().display());
    let vmm = VmmBuilder::guest(1, "size=64M", "workload=idle")
        .with(&["--disk", &option])
        .start_at_once();
    let api = vmm.api();
    wait_until_doing(&vmm, "booted");
    std::thread::scope(|scope| {
        let began = Instant::now();
        let pausing = scope.spawn(|| api.put("vm.pause", ""));
        // Longer than requests wait for anything else.
        wait_for("some time", || (began.elapsed() > PROMPT).then_some(()));
        assert!(!pausing.is_finished(), "{:?}", pausing.join());
        let began = Instant::now();
        api.get("vmm.ping").ok();
        assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
        assert_eq!(api.state(), "Created");
        slow.open();
        pausing.join().expect("an answer").ok();
    });
    assert_eq!(api.state(), "Paused");
    vmm.shut_down();
}

fn add_disk() {
    let mut slow = Slow::new();
    let vmm = Vmm::boot(1, "size=96M,shared=on", "workload=random-write mem=16M");
    let api = vmm.api();
    let disk = slow.disk().to_string();
    std::thread::scope(|scope| {
        let adding = scope.spawn(|| api.put("vm.add-disk", &disk));
        wait_until_doing(&vmm, "changed");
        assert_eq!(api.state(), "Running");
        slow.wait_until_asked();
        answers(&vmm, "changed");
        vmm.wait_for_heartbeat();
        slow.open();
        assert_eq!(adding.join().expect("an answer").ok().json()["id"], "slow");
    });
    vmm.wait_for_event("device-added");
    vmm.verify();
    vmm.shut_down();
}

/// The opening of a disk that hangs is cancelled by its removal, and the VM has its time back.
fn cancel_disk() {
    let mut slow = Slow::new();
    let vmm = Vmm::boot(1, "size=96M,shared=on", "workload=random-write mem=16M");
    let api = vmm.api();
    let (disk, remove) = (slow.disk().to_string(), json!({ "id": "slow" }).to_string());
    let held = Held::by(&vmm);
    std::thread::scope(|scope| {
        let adding = scope.spawn(|| api.put("vm.add-disk", &disk));
        wait_until_doing(&vmm, "changed");
        let began = Instant::now();
        api.put("vm.remove-device", &remove).ok();
        let added = adding.join().expect("an answer");
        assert!(added.status == 409 && added.body.contains("'slow' was removed"), "{added:?}");
        assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
    });
    assert_eq!(api.put("vm.remove-device", &remove).status, 404);
    // Whatever else is asked of the VM is done while the path still does not open.
    api.put("vm.pause", "").ok();
    api.put("vm.resume", "").ok();
    vmm.wait_for_heartbeat();
    slow.open();
    held.assert_still(&vmm, "a disk that was removed");
    // Nothing is left of it that would keep another one from being added.
    assert_eq!(api.put("vm.add-disk", &disk).ok().json()["id"], "slow");
    vmm.verify();
    vmm.shut_down();
}

fn with(config: &str, change: impl FnOnce(&mut Value)) -> String {
    let mut config: Value = serde_json::from_str(config).expect("JSON");
    change(&mut config);
    config.to_string()
}

/// Puts a path into a configuration.
type Change = fn(&mut Value, &Path);

/// One without another end.
fn pipes() {
    let folder = TempDir::with_prefix("godwit-pipe-").expect("a folder");
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
    assert!(made.success());
    let vmm = Vmm::empty();
    let api = vmm.api();
    let is_named = |body: &str, path: &Path| body.contains(path.to_str().expect("UTF-8"));
    let rows: [(&str, Change); 4] = [
        ("kernel", |config, pipe| config["payload"]["kernel"] = json!(pipe)),
        ("initramfs", |config, pipe| config["payload"]["initramfs"] = json!(pipe)),
        ("disk", |config, pipe| config["disks"] = json!([{ "path": pipe }])),
        ("read-only disk", |config, pipe| {
            config["disks"] = json!([{ "path": pipe, "readonly": true, "image_type": "Raw" }]);
        }),
    ];
    for (what, change) in rows {
        api.put("vm.create", &with(&config(64), |config| change(config, &pipe))).ok();
        let answer = prompt_put(&api, "vm.boot");
        assert!(answer.status >= 400 && is_named(&answer.body, &pipe), "{what}: {answer:?}");
        api.put("vm.delete", "").ok();
    }
    // Output goes there when it has a reader, and is dropped until then.
    let console = |config: &mut Value| {
        config["console"] = json!({ "mode": "File", "file": &pipe });
    };
    api.put("vm.create", &with(&config(64), console)).ok();
    prompt_put(&api, "vm.boot");
    prompt_put(&api, "vm.delete");
    vmm.shut_down();
}
