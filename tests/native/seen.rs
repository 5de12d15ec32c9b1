// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest is shown of its terminal and of the time that it did not run, and where on the host
//! its devices work: as far as it can be seen from outside, in snapshots and in /proc.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::{Suite, Vmm, VmmBuilder, image, is_root, skip, wait_for};
use crate::snapshot;
use crate::starting::{Slow, wait_until_doing};

pub fn add(suite: &mut Suite) {
    suite.add("seen::a_signal_tells_the_size_of_the_terminal", terminal);
    suite.add("seen::the_size_of_the_terminal_changes_meanwhile", terminal_meanwhile);
    suite.add("seen::time_that_passed_in_a_snapshot_and_time_that_did_not", clock);
    suite.add("seen::a_guest_is_announced_when_it_first_runs_where_it_has_arrived", announced);
    suite.add("seen::threads_of_devices_run_where_they_were_told", affinity);
}

const MEMORY: &str = "size=96M,shared=on";
const LOAD: &str = "workload=random-write mem=32M";

/// The test guest with this console.
fn builder(console: &str, cmdline: &str) -> VmmBuilder {
    VmmBuilder::new(&["--serial", "off", "--kernel", image()]).with(&[
        "--console",
        console,
        "--memory",
        MEMORY,
        "--cmdline",
        cmdline,
    ])
}

/// The state in a snapshot of a paused VM.
#[track_caller]
fn state(vmm: &Vmm) -> Value {
    let (folder, url) = snapshot::place();
    vmm.remote_ok(&["snapshot", &url]);
    let state = fs::read(folder.path().join("state.json")).expect("the state");
    serde_json::from_slice(&state).expect("JSON")
}

/// A VM whose console is a terminal, with the terminal and the name of the console.
fn with_terminal() -> (Vmm, File, String) {
    let vmm = builder("pty", LOAD).start();
    vmm.wait_for_heartbeat();
    let info: Value = vmm.api().get("vm.info").ok().json();
    let console = &info["config"]["console"];
    let path = console["file"].as_str().expect("a path").to_owned();
    let terminal = File::options().read(true).write(true).open(path).expect("the terminal");
    let id = console["id"].as_str().expect("an id").to_owned();
    (vmm, terminal, id)
}

fn resize_terminal(vmm: &mut Vmm, terminal: &File) {
    let size = libc::winsize { ws_row: 43, ws_col: 132, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCSWINSZ reads one winsize, which is what it gets; the descriptor is open.
    let result = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    assert_eq!(result, 0);
    vmm.signal(libc::SIGWINCH);
    // The signal is taken before a request that comes after the answer to another one.
    vmm.remote_ok(&["ping"]);
}

#[track_caller]
fn assert_size_is_seen(vmm: &Vmm, console: &str) {
    vmm.remote_ok(&["pause"]);
    let state = state(vmm);
    let data = &state["pci"][console]["state"]["data"]["device"]["data"];
    assert_eq!((&data["columns"], &data["rows"]), (&132.into(), &43.into()), "{data}");
}

fn terminal() {
    let (mut vmm, terminal, console) = with_terminal();
    resize_terminal(&mut vmm, &terminal);
    assert_size_is_seen(&vmm, &console);
    vmm.shut_down();
}

/// The machine is with another thread as the signal comes.
fn terminal_meanwhile() {
    let (mut vmm, terminal, console) = with_terminal();
    let mut slow = Slow::new();
    let (api, disk) = (vmm.api(), slow.disk().to_string());
    std::thread::scope(|scope| {
        let adding = scope.spawn(move || api.put("vm.add-disk", &disk));
        wait_until_doing(&vmm, "changed");
        resize_terminal(&mut vmm, &terminal);
        vmm.remote_ok(&["ping"]);
        slow.open();
        adding.join().expect("an answer").ok();
    });
    assert_size_is_seen(&vmm, &console);
    vmm.shut_down();
}

fn clock() {
    /// Long enough that guest time which moves is told from guest time which stands.
    const IN_THE_DRAWER: Duration = Duration::from_secs(2);
    let (_folder, url) = snapshot::place();
    let source = Vmm::boot(1, MEMORY, LOAD);
    source.wait_for_heartbeat();
    snapshot::save(&source, &url);
    let saved = state_of(&url);
    drop(source);
    std::thread::sleep(IN_THE_DRAWER);
    for (wish, stands) in [("", false), (",clock=catch-up", false), (",clock=continue", true)] {
        let vmm = Vmm::empty();
        let start = Instant::now();
        vmm.remote_ok(&["restore", &format!("source_url={url}{wish}")]);
        let passed = guest_time(&state(&vmm)).saturating_sub(guest_time(&saved));
        let since = start.elapsed();
        println!("     {wish}: {passed:?} of guest time, {since:?} since it began");
        if stands {
            assert!(passed <= since, "{wish}: {passed:?} in {since:?}");
        } else {
            assert!(passed >= IN_THE_DRAWER, "{wish}: {passed:?}");
        }
        vmm.shut_down();
    }
}

fn state_of(url: &str) -> Value {
    let folder = Path::new(url.trim_start_matches("file://"));
    serde_json::from_slice(&fs::read(folder.join("state.json")).expect("the state")).expect("JSON")
}

fn guest_time(state: &Value) -> Duration {
    Duration::from_nanos(state["clock"]["clock_ns"].as_u64().expect("a time"))
}

/// Frames that have come out of a tap, if it is there. The test guest sends none.
fn frames(tap: &str) -> Option<u64> {
    let path = format!("/sys/class/net/{tap}/statistics/rx_packets");
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// No frame comes: the first of those that announce a guest comes as soon as it runs.
#[track_caller]
fn assert_no_more_frames(tap: &str, than: u64) {
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        assert_eq!(frames(tap), Some(than));
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn announced() {
    const TIMES: u64 = 5;
    if !is_root() {
        skip("needs root, for a tap");
    }
    let tap = format!("gws{}", std::process::id());
    let (_folder, url) = snapshot::place();
    let net = ["--net", &format!("tap={tap}")];
    let source = builder("off", LOAD).with(&net).start();
    source.wait_for_heartbeat();
    // It has come from nowhere.
    assert_no_more_frames(&tap, 0);
    snapshot::save(&source, &url);
    source.shut_down();
    let vmm = Vmm::empty();
    vmm.remote_ok(&["restore", &format!("source_url={url}")]);
    // Its frames belong where it ran.
    assert_no_more_frames(&tap, 0);
    vmm.remote_ok(&["resume"]);
    wait_for("its announcements", || (frames(&tap) >= Some(TIMES)).then_some(()));
    // It is here.
    vmm.remote_ok(&["pause"]);
    vmm.remote_ok(&["resume"]);
    assert_no_more_frames(&tap, TIMES);
    vmm.shut_down();
}

/// CPUs on which a thread of a process may run, by the thread's name.
fn cpus_of(pid: u32, name: &str) -> Option<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let statuses = tasks.flatten().map(|task| fs::read_to_string(task.path().join("status")));
    let field = |status: &str, name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim().to_owned())
    };
    statuses
        .flatten()
        .find(|status| field(status, "Name:").as_deref() == Some(name))
        .and_then(|status| field(&status, "Cpus_allowed_list:"))
}

fn affinity() {
    let all = cpus_of(std::process::id(), &own_name()).expect("its own CPUs");
    if all.parse::<u32>().is_ok() {
        skip("one CPU");
    }
    let last = all.rsplit([',', '-']).next().expect("a CPU").to_owned();
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("disk");
    File::create(&image).and_then(|file| file.set_len(8 << 20)).expect("a file");
    for told in [false, true] {
        let queue = if told { format!(",queue_affinity=[0@[{last}]]") } else { String::new() };
        let disk = format!("path={},id=root{queue}", image.display());
        let cpus = format!("boot=1,affinity=[0@[{last}]]");
        let vmm = builder("off", "workload=disk-write mem=16M")
            .with(&["--disk", &disk, "--cpus", &cpus])
            .start();
        let first = wait_for("the thread of the disk", || cpus_of(vmm.pid(), "root_q0"));
        // The vCPU that has made it is bound.
        assert_eq!(cpus_of(vmm.pid(), "vcpu0").as_ref(), Some(&last));
        wait_for("its binding", || {
            let here = cpus_of(vmm.pid(), "root_q0")?;
            (here == if told { last.clone() } else { all.clone() }).then_some(())
        });
        println!("     {first} at first");
        vmm.shut_down();
    }
}

fn own_name() -> String {
    let own = fs::read_to_string("/proc/self/comm").expect("its own name");
    own.trim().to_owned()
}
