// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `ch-remote upgrade`: the guest runs on in another process at the same socket, with every page of its memory; where
//! that fails, it runs on in the old one, and nothing is left of the new one.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::taps::{Tap, taps_of};
use crate::harness::vmm::{VMM, finish};
use crate::harness::{Suite, Vmm, VmmBuilder, is_root, skip, wait_for};
use crate::landlock;

pub fn add(suite: &mut Suite) {
    suite.add("upgrade::the_guest_runs_on_at_the_same_socket", same_socket);
    suite.add("upgrade::a_paused_guest_stays_paused", paused);
    suite.add("upgrade::a_disk_and_a_tap_go_along", devices);
    suite.add("upgrade::a_confined_vm_goes_along", confined);
    suite.add("upgrade::the_service_manager_is_told", service);
    suite.add("upgrade::the_new_process_is_in_the_control_group", control_group);
    suite.add("upgrade::a_program_that_is_none_keeps_the_guest", no_program);
    suite.add("upgrade::a_program_that_is_no_vmm_keeps_the_guest", no_vmm);
    suite.add("upgrade::a_vmm_that_ends_or_hangs_keeps_the_guest", bad_vmm);
    suite.add("upgrade::a_vmm_that_stops_while_the_vm_comes_keeps_the_guest", stopped);
    suite.add("upgrade::a_device_that_cannot_be_opened_keeps_the_guest", no_tap);
    suite.add("upgrade::private_memory_is_refused_by_name", private);
    suite.add("upgrade::without_ch_remote_the_new_process_ends", without_starter);
}

const GUEST: &str = "workload=random-write mem=64M";
const MEMORY: &str = "size=192M,shared=on";

/// A VMM; whatever has its place is ended with it.
struct Place {
    vmm: Vmm,
}

/// Processes that name a file of a folder on their command lines, but for ch-remote.
fn processes(folder: &Path) -> Vec<u32> {
    let folder = folder.to_str().expect("UTF-8");
    let names = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let text = String::from_utf8_lossy(&line).into_owned();
        text.contains(folder) && !text.split('\0').next().unwrap_or_default().ends_with("ch-remote")
    };
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(names).collect()
}

/// Processor time of the thread that serves a VMM's requests, in ticks of the kernel (10 ms).
fn main_thread_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{pid}/stat")).expect("it runs");
    let (_, fields) = stat.rsplit_once(')').expect("a name");
    let times = fields.split_ascii_whitespace().skip(11).take(2);
    times.map(|ticks| ticks.parse::<u64>().expect("a number")).sum()
}

/// A VMM that nothing asks does nothing.
#[track_caller]
fn is_idle(pid: u32) {
    const LOOK: Duration = Duration::from_millis(500);
    let (begun, before) = (Instant::now(), main_thread_ticks(pid));
    wait_for("half a second", || (begun.elapsed() >= LOOK).then_some(()));
    let ticks = main_thread_ticks(pid) - before;
    assert!(ticks < 20, "{ticks} ticks in half a second");
}

/// A script in a folder of its own that is executed in place of a VMM.
fn script(folder: &tempfile::TempDir, text: &str) -> String {
    let path = folder.path().join("script");
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("rights");
    path.to_str().expect("UTF-8").to_owned()
}

impl Place {
    fn of(builder: &VmmBuilder) -> Self {
        let vmm = builder.start();
        vmm.guest();
        Self { vmm }
    }

    fn boot() -> Self {
        Self::of(&VmmBuilder::guest(2, MEMORY, GUEST))
    }

    fn api_pid(&self) -> u32 {
        let ping = self.vmm.api().get("vmm.ping").ok().json();
        u32::try_from(ping["pid"].as_u64().expect("a number")).expect("a process")
    }

    /// Names in its folder, sorted.
    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.vmm.folder()).expect("its folder").flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    fn upgrade_to(&self, binary: &str, more: &[&str]) -> Output {
        if !is_root() {
            skip("what a VMM was started with is for root to read");
        }
        let mut words = vec!["upgrade", "--binary", binary];
        words.extend_from_slice(more);
        self.vmm.remote(&words)
    }

    /// Has the same program take its place; what ch-remote says of it.
    #[track_caller]
    fn upgrade(&mut self) -> Value {
        let before = self.vmm.pid();
        let output = self.upgrade_to(VMM, &[]);
        assert!(output.status.success(), "{output:?}\n{}", self.vmm.output());
        assert!(output.stderr.is_empty(), "{output:?}");
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let pid = u32::try_from(report["pid"].as_u64().expect("a number")).expect("a process");
        assert_eq!((report["old_pid"].as_u64(), pid != before), (Some(before.into()), true));
        assert_eq!(self.api_pid(), pid);
        assert_eq!(processes(self.vmm.folder()), [pid], "the old one has ended");
        self.vmm.is_taken_over_by(pid);
        report
    }

    /// The guest is where it was and works, and nothing is there that was not before.
    #[track_caller]
    fn goes_on(&self, files: &[String]) {
        assert_eq!(self.api_pid(), self.vmm.pid());
        assert_eq!(self.vmm.api().state(), "Running");
        self.vmm.wait_for_work(1_000);
        self.vmm.verify();
        wait_for("the end of all that was started", || {
            (processes(self.vmm.folder()) == [self.vmm.pid()]).then_some(())
        });
        assert_eq!(self.files(), files);
    }

    /// An upgrade that fails: says why and where the guest is.
    #[track_caller]
    fn fails(&self, binary: &str, more: &[&str], why: &[&str]) {
        let files = self.files();
        let output = self.upgrade_to(binary, more);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        for word in why.iter().chain(&["goes on"]) {
            assert!(text.contains(word), "no '{word}': {text}");
        }
        assert_eq!(text.trim().lines().count(), 1, "{text}");
        self.goes_on(&files);
    }

    /// Ends the process that has the guest, which is no child of this one.
    #[track_caller]
    fn shut_down(self) {
        self.vmm.api().put("vmm.shutdown", "").ok();
        wait_for("its end", || processes(self.vmm.folder()).is_empty().then_some(()));
        assert!(!self.vmm.socket().exists(), "the socket is removed by the process that has it");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for pid in processes(self.vmm.folder()) {
            if let Ok(pid) = libc::pid_t::try_from(pid) {
                // SAFETY: takes numbers only; its command line, just read, names the folder of this test.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
        }
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::TempDir::with_prefix("godwit-upgrade-").expect("a folder")
}

fn inode(path: &Path) -> u64 {
    fs::symlink_metadata(path).expect("a file").ino()
}

fn same_socket() {
    let scrapes = folder();
    let metrics = scrapes.path().join("metrics");
    let option = format!("unix:{}", metrics.display());
    let mut place =
        Place::of(&VmmBuilder::guest(2, MEMORY, GUEST).with(&["--metrics", &option, "-v"]));
    let files = place.files();
    // As an operator may let others read it.
    fs::set_permissions(&metrics, fs::Permissions::from_mode(0o664)).expect("a mode");
    for _ in 0..2 {
        place.vmm.wait_for_work(5_000);
        let before = [inode(&place.vmm.socket()), inode(&metrics)];
        let report = place.upgrade();
        assert!(report["downtime_us"].as_u64().is_some_and(|us| us > 0), "{report}");
        let after = [inode(&place.vmm.socket()), inode(&metrics)];
        assert!(before[0] != after[0] && before[1] != after[1], "those of another process");
        assert!(UnixStream::connect(&metrics).is_ok());
        let mode = |path: &Path| fs::metadata(path).expect("a socket").mode() & 0o777;
        assert_eq!((mode(&metrics), mode(&place.vmm.socket())), (0o664, 0o600));
        is_idle(place.vmm.pid());
        place.vmm.wait_for_work(5_000);
        place.vmm.verify();
        assert_eq!(place.files(), files);
        assert_eq!(fs::read_dir(scrapes.path()).expect("a folder").count(), 1);
    }
    // One log and one file of events have those of all three.
    let log = fs::read_to_string(place.vmm.path("log")).expect("the log");
    assert_eq!(log.matches("has taken the place").count(), 2, "{log}");
    let names = place.vmm.event_names();
    let count = |name: &str| names.iter().filter(|known| *known == name).count();
    assert_eq!((count("starting"), count("booted")), (3, 1), "{names:?}");
    assert_eq!(count("migration-receive-finished"), 2, "{names:?}");
    place.shut_down();
    assert!(!metrics.exists());
}

fn paused() {
    let mut place = Place::boot();
    place.vmm.api().put("vm.pause", "").ok();
    let report = place.upgrade();
    assert!(report["downtime_us"].is_null(), "it did not run: {report}");
    assert_eq!(place.vmm.api().state(), "Paused");
    place.vmm.verify_paused();
    place.vmm.api().put("vm.resume", "").ok();
    place.vmm.wait_for_work(1_000);
    place.shut_down();
}

fn devices() {
    let images = folder();
    let image = images.path().join("image");
    File::create(&image).and_then(|file| file.set_len(8 << 20)).expect("a file");
    let tap = Tap::open().close();
    let mut place = Place::of(&VmmBuilder::guest(1, MEMORY, GUEST).with(&[
        "--disk",
        &format!("path={},id=data", image.display()),
        "--net",
        &format!("tap={tap},id=lan"),
    ]));
    assert_eq!(taps_of(&place.vmm), std::slice::from_ref(&tap));
    place.upgrade();
    assert_eq!(taps_of(&place.vmm), std::slice::from_ref(&tap));
    let info = place.vmm.api().get("vm.info").ok().json();
    assert_eq!(info["config"]["disks"][0]["id"], "data", "{info}");
    let open = fs::read_dir(format!("/proc/{}/fd", place.vmm.pid())).expect("its descriptors");
    let open = open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    assert!(open.into_iter().any(|path| path == image), "the image is open");
    place.vmm.wait_for_work(1_000);
    place.vmm.verify();
    place.shut_down();
}

fn confined() {
    let scrapes = folder();
    let metrics = scrapes.path().join("metrics");
    let option = format!("unix:{}", metrics.display());
    let builder = landlock::confined_guest(1, MEMORY, GUEST).with(&["--metrics", &option]);
    let mut place = Place::of(&builder);
    for _ in 0..2 {
        place.upgrade();
        landlock::assert_confined(&place.vmm);
        assert!(UnixStream::connect(&metrics).is_ok());
        place.vmm.verify();
    }
    place.shut_down();
}

fn service() {
    if !is_root() {
        skip("the environment of a VMM is for root to read");
    }
    let manager = folder();
    let path = manager.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_mins(1))).expect("a limit");
    let variable = format!("NOTIFY_SOCKET={}", path.display());
    let builder = VmmBuilder::guest(1, MEMORY, GUEST).wrapped(&["env", &variable]);
    let mut place = Place::of(&builder);
    place.upgrade();
    let mut text = [0; 100];
    let length = socket.recv(&mut text).expect("a notification");
    let expected = format!("MAINPID={}\n", place.vmm.pid());
    assert_eq!(String::from_utf8_lossy(&text[..length]), expected);
    place.shut_down();
}

/// A control group, removed when it is empty.
struct Group(PathBuf);

impl Drop for Group {
    fn drop(&mut self) {
        // A process of it that has been killed may still be there.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn control_group() {
    let name = format!("godwit-upgrade-{}", std::process::id());
    let group = Group(Path::new("/sys/fs/cgroup").join(&name));
    let is_unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    if !is_root() || !is_unified || fs::create_dir(&group.0).is_err() {
        skip("no control group can be made here");
    }
    let mut place = Place::boot();
    fs::write(group.0.join("cgroup.procs"), place.vmm.pid().to_string()).expect("it is moved");
    let of = |pid: u32| fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("its groups");
    let before = of(place.vmm.pid());
    assert!(before.contains(&name), "{before}");
    place.upgrade();
    assert_eq!(of(place.vmm.pid()), before);
    place.shut_down();
}

fn no_program() {
    let place = Place::boot();
    let missing = place.vmm.path("missing");
    place.fails(missing.to_str().expect("UTF-8"), &[], &["missing", "cannot be started"]);
    place.fails("/etc/passwd", &[], &["/etc/passwd", "cannot be started"]);
    place.shut_down();
}

fn no_vmm() {
    let (place, scripts) = (Place::boot(), folder());
    place.fails("/bin/false", &[], &["/bin/false", "no VMM", "exit code 1"]);
    let rubbish = script(&scripts, r"printf 'rub\033bish\n'; exit 3");
    place.fails(&rubbish, &[], &["exit code 3", "rub bish"]);
    let hangs = script(&scripts, "sleep 1000; true");
    place.fails(&hangs, &["--timeout-ms", "500"], &["has not said its version"]);
    let older = "echo \"error: unexpected argument '--successor' found\" >&2; exit 2";
    place.fails(&script(&scripts, older), &[], &["--successor", "exit code 2"]);
    place.shut_down();
}

/// A script that says its version as a VMM does, and does something else when it is to be one.
fn later(what: &str) -> String {
    format!("case \"$*\" in *--version*) exec {VMM} \"$@\";; esac\n{what}")
}

fn bad_vmm() {
    let (place, scripts) = (Place::boot(), folder());
    let ends = script(&scripts, &later("exit 7"));
    place.fails(&ends, &[], &["has ended before", "exit code 7"]);
    let hangs = script(&scripts, &later("sleep 1000; true"));
    place.fails(&hangs, &["--timeout-ms", "1500"], &["has not answered"]);
    let unwritable = format!("exec {VMM} \"$@\" --no-such-option");
    let ends = script(&scripts, &later(&unwritable));
    place.fails(&ends, &[], &["exit code 2"]);
    // Its own words are passed on.
    let talks = script(&scripts, &later(&format!("exec {VMM} \"$@\" --log-format {{no}}")));
    place.fails(&talks, &[], &["has ended before", "exit code 2", "{no}"]);
    place.shut_down();
}

fn stopped() {
    let (place, scripts) = (Place::boot(), folder());
    // Stopped when it listens: the old process connects to it and is not answered.
    let api = place.vmm.socket();
    let stop = format!(
        "(while ! ls {}.*m >/dev/null 2>&1; do :; done; kill -STOP $$) &\nexec {VMM} \"$@\"",
        api.display()
    );
    let script = script(&scripts, &later(&stop));
    // The starter waits for its first answer, or the old process for one to the migration: both for that long.
    let began = Instant::now();
    place.fails(&script, &["--timeout-ms", "4000"], &[]);
    assert!(began.elapsed() >= Duration::from_secs(3), "something else has failed");
    place.shut_down();
}

fn no_tap() {
    if !is_root() {
        skip("only root can make a tap");
    }
    let tap = Tap::open().close();
    let net = format!("tap={tap},id=lan");
    let place = Place::of(&VmmBuilder::guest(1, MEMORY, GUEST).with(&["--net", &net]));
    let scripts = folder();
    let powerless = "setpriv --bounding-set=-net_admin --inh-caps=-net_admin";
    let script = script(&scripts, &later(&format!("exec {powerless} {VMM} \"$@\"")));
    place.fails(&script, &[], &["lan", &tap]);
    place.shut_down();
}

fn private() {
    let zone = ["--memory-zone", "id=mine,size=192M,mergeable=on"];
    let place = Place::of(&VmmBuilder::guest(1, "size=0", GUEST).with(&zone));
    place.fails(VMM, &[], &["'mine'", "shared=on", "as it was"]);
    place.shut_down();
    let place = Place::of(&VmmBuilder::guest(1, "size=128M", GUEST));
    place.fails(VMM, &[], &["'mem0'", "shared=on"]);
    place.shut_down();
}

fn without_starter() {
    let (place, scripts) = (Place::boot(), folder());
    let files = place.files();
    let at = |name: &str| scripts.path().join(name).display().to_string();
    let waits = format!(
        "touch {}\nwhile [ ! -e {} ]; do sleep 0.01; done\nexec {VMM} \"$@\"",
        at("started"),
        at("go")
    );
    let script = script(&scripts, &later(&waits));
    let mut remote = place.vmm.remote_spawn(&["upgrade", "--binary", &script]);
    wait_for("the start of the new process", || {
        fs::exists(at("started")).expect("a folder").then_some(())
    });
    remote.kill().expect("it runs");
    finish(remote);
    fs::write(at("go"), "").expect("a file");
    place.goes_on(&files);
    place.shut_down();
}
