// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A path that does not open keeps no request from being answered: a VM that boots, and one that is given a
//! disk, wait for it, and the VMM is asked for everything meanwhile.
//!
//! The disk is a file on which the test holds a lease: whoever opens it waits until the lease is given up.

use std::fs::File;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::api::{Answer, Api};
use crate::harness::{Suite, Vmm, VmmBuilder, image, process, wait_for};
use crate::lifecycle::config;

pub fn add(suite: &mut Suite) {
    suite.add("starting::a_boot_waits_and_all_are_answered", boot);
    suite.add("starting::a_boot_is_given_up", given_up);
    suite.add("starting::a_signal_ends_a_boot_that_waits", signal);
    suite.add("starting::requests_wait_for_the_vm_of_the_command_line", at_launch);
    suite.add("starting::a_disk_is_added_and_all_are_answered", add_disk);
    suite.add("starting::pipes_are_refused_by_name", pipes);
    for state in ["", "Created", "Running", "Paused"] {
        let name = if state.is_empty() { "none".to_owned() } else { state.to_lowercase() };
        suite.add(&format!("starting::requests_in_pairs_{name}"), move || pairs(state));
    }
}

/// Nothing that the VMM thread does by itself takes this long.
const PROMPT: Duration = Duration::from_secs(2);
/// In which a first signal ends a VMM whose VM has not started.
const SIGNAL_END: Duration = Duration::from_secs(5);
/// `F_SETSIG`, which libc has not for this target everywhere.
const SET_SIGNAL: libc::c_int = 10;

/// A disk that does not open.
struct Slow {
    folder: TempDir,
    lease: Option<File>,
}

impl Slow {
    fn new() -> Self {
        let folder = TempDir::with_prefix("godwit-slow-").expect("a folder");
        let mut slow = Self { folder, lease: None };
        File::create(slow.path()).and_then(|file| file.set_len(8 << 20)).expect("a file");
        slow.close();
        slow
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    /// From now on it does not open.
    fn close(&mut self) {
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

    /// Whoever waits goes on.
    fn open(&mut self) {
        self.lease = None;
    }

    fn disk(&self) -> Value {
        json!({ "path": self.path(), "id": "slow", "image_type": "Raw" })
    }

    fn config(&self) -> String {
        let mut config: Value = serde_json::from_str(&config(128)).expect("JSON");
        config["disks"] = json!([self.disk()]);
        config.to_string()
    }
}

/// A terminal at which nobody sits.
struct Terminal {
    _master: OwnedFd,
    slave: OwnedFd,
}

impl Terminal {
    fn new() -> Self {
        let (mut master, mut slave) = (-1, -1);
        let name = std::ptr::null_mut();
        // SAFETY: two numbers are written, which live during the call, and nothing else is passed.
        let made = unsafe {
            libc::openpty(&raw mut master, &raw mut slave, name, std::ptr::null(), std::ptr::null())
        };
        assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: both have just been opened, and nothing else owns them.
        let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
        Self { _master: own(master), slave: own(slave) }
    }

    /// For another process, as long as this is there.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.slave.as_raw_fd())
    }

    /// Whether it collects lines, echoes and makes signals of keys.
    fn modes(&self) -> libc::tcflag_t {
        // SAFETY: termios is a plain C struct for which all zeros is a valid value.
        let mut settings: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: one termios is filled, which lives during the call; the descriptor is open.
        let done = unsafe { libc::tcgetattr(self.slave.as_raw_fd(), &raw mut settings) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        settings.c_lflag
    }
}

/// Requests of the API with bodies; those that end or leave the process are not among them.
fn requests() -> Vec<(&'static str, &'static str, String)> {
    let put = |name, body: &str| ("PUT", name, body.to_owned());
    vec![
        ("GET", "vmm.ping", String::new()),
        ("GET", "vm.info", String::new()),
        ("GET", "vm.counters", String::new()),
        ("GET", "vm.migration-progress", String::new()),
        put("vm.create", &config(64)),
        put("vm.boot", ""),
        put("vm.pause", ""),
        put("vm.resume", ""),
        put("vm.reboot", ""),
        put("vm.shutdown", ""),
        put("vm.delete", ""),
        put("vm.power-button", ""),
        put("vm.resize", r#"{"desired_balloon":1048576}"#),
        put("vm.resize-zone", r#"{"id":"mem0","desired_ram":1}"#),
        put("vm.add-disk", r#"{"path":"/nonexistent"}"#),
        put("vm.add-net", r#"{"tap":"no/tap"}"#),
        put("vm.add-device", r#"{"path":"/nonexistent"}"#),
        put("vm.remove-device", r#"{"id":"nothing"}"#),
        put("vm.snapshot", r#"{"destination_url":"file:///nonexistent"}"#),
        put("vm.restore", r#"{"source_url":"file:///nonexistent"}"#),
        put("vm.send-migration", r#"{"destination_url":"tcp:127.0.0.1:1"}"#),
        put("vm.receive-migration", r#"{"receiver_url":"nowhere"}"#),
        put("vm.migration-cancel", ""),
        put("vm.migration-start-postcopy", ""),
        put("vm.migration-recover", "{}"),
    ]
}

/// Sends one, which has to be answered in time, whatever the answer is.
#[track_caller]
fn prompt(api: &Api, (method, name, body): &(&str, &str, String)) -> Answer {
    let began = Instant::now();
    let body = (!body.is_empty()).then_some(body.as_str());
    let answer = api.request(method, name, body);
    let answer = answer.unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(began.elapsed() < PROMPT, "{name} took {:?}: {answer:?}", began.elapsed());
    answer
}

/// Everything is answered while something goes on, and changes nothing.
#[track_caller]
fn answers(vmm: &Vmm, doing: &str) {
    let api = vmm.api();
    for request in requests().into_iter().filter(|(_, name, _)| {
        // These give up what goes on.
        !["vm.shutdown", "vm.delete"].contains(name)
    }) {
        let answer = prompt(&api, &request);
        let is_read = ["vmm.ping", "vm.info"].contains(&request.1);
        assert_eq!(answer.status == 200, is_read, "{}: {answer:?}", request.1);
        let info = api.get("vm.info").ok().json();
        assert_eq!(info["doing"], doing, "after {}: {info}", request.1);
    }
}

#[track_caller]
fn wait_until_doing(vmm: &Vmm, doing: &str) {
    wait_for("what goes on", || {
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
        answers(&vmm, "booted");
        slow.open();
        booting.join().expect("an answer").ok();
    });
    assert_eq!(api.state(), "Running");
    assert!(api.get("vm.info").ok().json().get("doing").is_none());
    vmm.wait_for_heartbeat();
    vmm.shut_down();
}

fn given_up() {
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
            assert!(booted.status == 409 && booted.body.contains("was to end"), "{booted:?}");
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
    }
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
        prompt(&api, &("GET", "vmm.ping", String::new())).ok();
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
        answers(&vmm, "changed");
        vmm.wait_for_heartbeat();
        slow.open();
        assert_eq!(adding.join().expect("an answer").ok().json()["id"], "slow");
    });
    assert!(vmm.event_names().iter().any(|name| name == "device-added"));
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

/// One at whose other end nobody is.
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
        let answer = prompt(&api, &("PUT", "vm.boot", String::new()));
        assert!(answer.status >= 400 && is_named(&answer.body, &pipe), "{what}: {answer:?}");
        api.put("vm.delete", "").ok();
    }
    // Output goes there when somebody reads, and is dropped until then.
    let console = |config: &mut Value| {
        config["console"] = json!({ "mode": "File", "file": &pipe });
    };
    api.put("vm.create", &with(&config(64), console)).ok();
    prompt(&api, &("PUT", "vm.boot", String::new()));
    prompt(&api, &("PUT", "vm.delete", String::new()));
    vmm.shut_down();
}

/// Every pair of requests at once, in a VM that is there, runs or is paused: all are answered, and the VMM
/// is in one state afterwards from which it goes on.
fn pairs(state: &str) {
    let vmm = VmmBuilder::new(&["--no-shutdown"]).start();
    let api = vmm.api();
    let kernel = image();
    let body = with(&config(64), |config| {
        config["payload"]["kernel"] = json!(kernel);
        config["balloon"] = json!({ "size": 0 });
    });
    let requests = requests();
    bring(&api, &body, "Running");
    bring(&api, &body, "");
    let before = process::descriptors(vmm.pid()).len();
    for (at, first) in requests.iter().enumerate() {
        for second in &requests[at..] {
            if api.state() != state {
                bring(&api, &body, state);
            }
            std::thread::scope(|scope| {
                let other = scope.spawn(|| prompt(&api, second));
                prompt(&api, first);
                other.join().expect("an answer");
            });
            // A migration that was begun fails, as nobody is there.
            wait_for("what was begun to end", || {
                let info = api.get("vm.info");
                (info.status != 200 || info.json().get("doing").is_none()).then_some(())
            });
        }
    }
    bring(&api, &body, "");
    wait_for("the descriptors", || (process::descriptors(vmm.pid()).len() <= before).then_some(()));
    vmm.shut_down();
}

/// From any state into this one.
fn bring(api: &Api, body: &str, state: &str) {
    api.put("vm.delete", "");
    assert_eq!(api.state(), "");
    let steps: &[(&str, &str)] = match state {
        "Created" => &[("vm.create", body)],
        "Running" => &[("vm.create", body), ("vm.boot", "")],
        "Paused" => &[("vm.create", body), ("vm.boot", ""), ("vm.pause", "")],
        _ => &[],
    };
    for (name, body) in steps {
        api.put(name, body).ok();
    }
    assert_eq!(api.state(), state);
}
