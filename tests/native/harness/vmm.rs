// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VMM process with its socket, event file and log in a folder of its own; killed when dropped.
//!
//! Owns starting, watching and ending it. Must never look into the VMM other than a user could.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use guest_reader::{AttachOptions, Guest, Patience, Status, VerifyReport};
use parking_lot::Mutex;
use serde_json::Value;
use tempfile::TempDir;

use super::{Api, image, process, wait_for, wait_within};

/// Signals that follow each other within a second are one.
const SECOND_SIGNAL: Duration = Duration::from_millis(1_100);

pub use super::programs::{CH_REMOTE, VMM};

/// For the guest to start, or its pages to arrive.
pub const GUEST_PATIENCE: Patience = Patience::millis(60_000);

/// What a file is to be called that holds guest memory, so that the guest is found in it.
pub const RAM_FILE: &str = "godwit-ram";

/// Set to 1, it has each VM of a command line run with `--landlock`.
pub const LANDLOCK_SWITCH: &str = "GODWIT_TEST_LANDLOCK";

/// Process ids that have not been waited for; a test that overran left them behind.
static RUNNING: Mutex<Vec<u32>> = Mutex::new(Vec::new());

fn running() -> parking_lot::MutexGuard<'static, Vec<u32>> {
    RUNNING.lock()
}

/// Ends every VMM that is still there.
pub fn kill_all() {
    for pid in running().drain(..) {
        if let Ok(pid) = libc::pid_t::try_from(pid) {
            // SAFETY: a child of this process that has not been waited for, so the id is its own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    }
}

/// What a VMM is started with.
#[derive(Clone)]
pub struct VmmBuilder {
    arguments: Vec<OsString>,
    wrapper: Vec<OsString>,
    socket: bool,
    is_confinable: bool,
}

/// Has a program start with signals that may be ignored here, as in a run in the background of a script.
pub fn unignore_signals(command: &mut Command) {
    // SAFETY: between fork and exec only system calls are made, which take no memory.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        });
    }
}

impl VmmBuilder {
    /// A VMM with an API socket and these arguments.
    pub fn new<T: AsRef<OsStr>>(arguments: &[T]) -> Self {
        let arguments = arguments.iter().map(|word| word.as_ref().to_owned()).collect();
        Self { arguments, wrapper: Vec::new(), socket: true, is_confinable: true }
    }

    /// The test guest with so many vCPUs, this `--memory` and this command line.
    pub fn guest(vcpus: u32, memory: &str, cmdline: &str) -> Self {
        Self::new(&["--serial", "off", "--console", "off", "--kernel", image()]).with(&[
            "--cpus",
            &format!("boot={vcpus}"),
            "--memory",
            memory,
            "--cmdline",
            cmdline,
        ])
    }

    /// More arguments.
    #[must_use]
    pub fn with<T: AsRef<OsStr>>(mut self, arguments: &[T]) -> Self {
        self.arguments.extend(arguments.iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// Started by another program, such as `unshare`.
    #[must_use]
    pub fn wrapped<T: AsRef<OsStr>>(mut self, words: &[T]) -> Self {
        self.wrapper = words.iter().map(|word| word.as_ref().to_owned()).collect();
        self
    }

    /// Without `--api-socket`, `--event-monitor` and `--log-file`.
    #[must_use]
    pub fn bare(mut self) -> Self {
        self.socket = false;
        self
    }

    /// Not even where the whole run is to be confined: its peer knows no Landlock.
    #[must_use]
    pub fn unconfined(mut self) -> Self {
        self.is_confinable = false;
        self
    }

    /// What confines a VM of the command line, if the whole run is to be confined: to its own paths, and to where
    /// tests have their files.
    fn landlock(&self) -> Vec<OsString> {
        let has = |word: &str| self.arguments.iter().any(|argument| argument == word);
        let is_wanted = std::env::var_os(LANDLOCK_SWITCH).is_some_and(|value| value == "1");
        if !is_wanted
            || !self.is_confinable
            || !has("--kernel")
            || has("--landlock")
            || has("--landlock-rules")
        {
            return Vec::new();
        }
        let folders = [std::env::temp_dir(), "/dev/shm".into(), "/dev/net/tun".into()];
        let rule = |path: PathBuf| OsString::from(format!("path={},access=rw", path.display()));
        let rules = folders.into_iter().filter(|path| path.exists()).map(rule);
        ["--landlock".into(), "--landlock-rules".into()].into_iter().chain(rules).collect()
    }

    /// Starts it without waiting for anything.
    pub fn spawn(&self) -> Vmm {
        let folder = TempDir::with_prefix("godwit-test-").expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let mut words = self.wrapper.clone();
        words.push(VMM.into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(&self.arguments).args(self.landlock());
        if self.socket {
            let event_path = format!("path={}", at("events").display());
            command.arg("--api-socket").arg(at("api")).args(["--event-monitor", &event_path]);
            command.arg("--log-file").arg(at("log")).arg("-v");
        }
        unignore_signals(&mut command);
        // It ends with the test's thread, also when the whole run is killed, and does not get the capabilities by
        // which a run without root looks into its memory (scripts/lib/native-as-user).
        // SAFETY: between fork and exec only system calls are made, which take no memory.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
                match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(File::create(at("stdout")).expect("a file"))
            .stderr(File::create(at("stderr")).expect("a file"))
            .spawn()
            .expect("the VMM can be started");
        running().push(child.id());
        Vmm { child, folder, status: None, successor: None }
    }

    /// Starts it and waits until its API answers, and the VM of its command line runs.
    pub fn start(&self) -> Vmm {
        let mut vmm = self.start_at_once();
        vmm.wait_for_vm();
        vmm
    }

    /// Starts it and waits until its API answers.
    pub fn start_at_once(&self) -> Vmm {
        let mut vmm = self.spawn();
        vmm.wait_for_api();
        vmm
    }

    /// Runs it to its end: exit code (or minus the signal), and everything it printed.
    pub fn run(&self) -> (i32, String) {
        let mut vmm = self.spawn();
        let code = vmm.wait_for_exit();
        (code, vmm.output())
    }
}

/// A VMM process.
#[derive(Debug)]
pub struct Vmm {
    child: Child,
    folder: TempDir,
    status: Option<ExitStatus>,
    /// The process that has its place, which is no child of this one.
    successor: Option<u32>,
}

impl Vmm {
    /// One without a VM.
    pub fn empty() -> Self {
        VmmBuilder::new::<&str>(&[]).start()
    }

    /// One that runs the test guest, which has started its workload.
    pub fn boot(vcpus: u32, memory: &str, cmdline: &str) -> Self {
        let vmm = VmmBuilder::guest(vcpus, memory, cmdline).start();
        vmm.guest();
        vmm
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.successor.unwrap_or_else(|| self.child.id())
    }

    /// Another process has its place, its socket and its guest: what is asked of the guest is asked there.
    pub fn is_taken_over_by(&mut self, pid: u32) {
        self.successor = Some(pid);
    }

    /// The folder of its files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A path in its folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Path of the API socket.
    pub fn socket(&self) -> PathBuf {
        self.path("api")
    }

    /// Its API.
    pub fn api(&self) -> Api {
        Api::new(&self.socket())
    }

    fn wait_for_api(&mut self) {
        let api = self.api();
        wait_for("an answer of the API", || {
            assert!(self.exited().is_none(), "the VMM ended: {}", self.output());
            api.request("GET", "vmm.ping", None).ok().filter(|answer| answer.status == 200)
        });
    }

    fn wait_for_vm(&mut self) {
        let api = self.api();
        wait_for("the VM of the command line", || {
            assert!(self.exited().is_none(), "the VMM ended: {}", self.output());
            let info = api.request("GET", "vm.info", None).ok()?;
            let goes_on = match info.status {
                200 => info.json().get("doing").is_some(),
                _ => info.body.contains("being restored"),
            };
            (!goes_on).then_some(())
        });
    }

    /// Its guest, whose memory may be in a file that is called [`RAM_FILE`].
    #[track_caller]
    fn attach(&self) -> Guest {
        let options = AttachOptions {
            names: vec![RAM_FILE.to_owned()],
            order: self.zone_memfds(),
            ..AttachOptions::default()
        };
        GUEST_PATIENCE
            .until("the start of the guest", || Guest::attach_with(self.pid(), &options).map(Some))
            .unwrap_or_else(|error| panic!("{error}\n{}", self.output()))
    }

    /// Names of the memfds of its memory zones, in the order of the configuration, which is that of their
    /// addresses. Their descriptors need not have that order: a connection to the API that is closed between
    /// two of them leaves the second one a smaller number.
    fn zone_memfds(&self) -> Vec<String> {
        let mut files = process::descriptors(self.pid());
        files.retain(|target| target.starts_with("/memfd:ram-"));
        files.dedup();
        if files.len() < 2 {
            // Not to be asked for without need: its threads may have been stopped by the test.
            return Vec::new();
        }
        let Ok(info) = self.api().request("GET", "vm.info", None) else { return Vec::new() };
        let zones = (info.status == 200).then(|| info.json()["config"]["memory"]["zones"].clone());
        let zones = zones.as_ref().and_then(Value::as_array).into_iter().flatten();
        zones.filter_map(|zone| Some(format!("ram-{}", zone["id"].as_str()?))).collect()
    }

    /// Its guest, once it has filled its pages and the workload runs.
    #[track_caller]
    pub fn guest(&self) -> Guest {
        let guest = self.attach();
        guest
            .wait_until("the workload", GUEST_PATIENCE, |status| {
                // A vCPU is off until it has read its parameters, which the first one does not wait for.
                let filled = status.known().all(|vcpu| !["off", "prefill"].contains(&vcpu.state));
                status.stage == "running" && status.complete() && filled
            })
            .unwrap_or_else(|error| panic!("{error}\n{}", self.output()));
        guest
    }

    /// The guest's status.
    #[track_caller]
    pub fn guest_status(&self) -> Status {
        self.guest().status().expect("the guest's status")
    }

    /// Waits until every vCPU of the guest has moved on.
    #[track_caller]
    pub fn wait_for_heartbeat(&self) {
        let guest = self.guest();
        guest
            .wait_for_heartbeat(GUEST_PATIENCE)
            .unwrap_or_else(|error| panic!("{error}\n{}", self.output()));
    }

    /// Reboots the guest and waits until the one after it has begun to work.
    #[track_caller]
    pub fn reboot(&self) {
        let before = self.guest_status().first_tsc;
        self.api().put("vm.reboot", "").ok();
        wait_for("a guest that started anew", || {
            let status = Guest::attach(self.pid()).ok()?.status().ok()?;
            (status.first_tsc != before && status.stage == "running").then_some(())
        });
    }

    /// Waits until the guest has visited so many more pages.
    #[track_caller]
    pub fn wait_for_work(&self, visits: u64) {
        let guest = self.guest();
        let before = guest.status().expect("the guest's status").iterations();
        guest
            .wait_until("work", GUEST_PATIENCE, |status| status.iterations() >= before + visits)
            .unwrap_or_else(|error| panic!("{error}\n{}", self.output()));
    }

    /// Pauses the VM, compares every page with what the guest should have written, checks that the
    /// guest itself saw no error, and resumes.
    #[track_caller]
    pub fn verify(&self) -> VerifyReport {
        self.api().put("vm.pause", "").ok();
        let report = self.verify_paused();
        self.api().put("vm.resume", "").ok();
        report
    }

    /// The same for a VM that is paused.
    #[track_caller]
    pub fn verify_paused(&self) -> VerifyReport {
        let (report, tsc_backwards) = self.verify_all_but_tsc();
        assert!(tsc_backwards.iter().all(|count| *count == 0), "the TSC went backwards");
        report
    }

    /// The same of a paused VM without judging the TSC: how often it went backwards for each vCPU.
    #[track_caller]
    pub fn verify_all_but_tsc(&self) -> (VerifyReport, Vec<u64>) {
        let guest = self.attach();
        let report = guest.verify_all(2).expect("every page can be read");
        let status = guest.status().expect("the guest's status");
        assert!(report.is_clean(), "{report:?}");
        assert!(report.written > 0, "nothing was written: {report:?}");
        assert!(status.complete(), "status pages are missing");
        assert_eq!(status.errors(), 0, "the guest saw errors: {status:?}");
        (report, status.known().map(|vcpu| vcpu.tsc_backwards).collect())
    }

    /// How it ended, if it has.
    pub fn exited(&mut self) -> Option<i32> {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("the child can be waited for");
            if self.status.is_some() {
                running().retain(|pid| *pid != self.child.id());
            }
        }
        self.status.map(|status| status.code().unwrap_or_else(|| -status.signal().unwrap_or(0)))
    }

    /// Waits for its end: exit code, or minus the signal that ended it.
    #[track_caller]
    pub fn wait_for_exit(&mut self) -> i32 {
        let start = std::time::Instant::now();
        loop {
            if let Some(code) = self.exited() {
                return code;
            }
            assert!(start.elapsed() < super::PATIENCE, "the VMM does not end\n{}", self.output());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends it a signal.
    #[track_caller]
    pub fn signal(&mut self, signal: i32) {
        assert!(self.signal_if_there(signal), "it has ended");
    }

    /// The same once more: not before it counts as another one, and not as one of several with which a session ends.
    #[track_caller]
    pub fn signal_again(&mut self, signal: i32) {
        let told = Instant::now();
        wait_for("the time between two signals", || (told.elapsed() > SECOND_SIGNAL).then_some(()));
        self.signal(signal);
    }

    /// The same to one that may end at any moment. False if it has ended.
    pub fn signal_if_there(&mut self, signal: i32) -> bool {
        if self.exited().is_some() {
            return false;
        }
        let pid = libc::pid_t::try_from(self.pid()).expect("a process id");
        // SAFETY: the child has not been waited for, so the id is still its own.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
        true
    }

    /// Everything it printed, and its log.
    pub fn output(&self) -> String {
        ["stdout", "stderr", "log"]
            .iter()
            .filter_map(|name| fs::read(self.path(name)).ok())
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// All events so far.
    pub fn events(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.path("events")).unwrap_or_default();
        // The last one may be half written.
        serde_json::Deserializer::from_str(&text).into_iter().map_while(Result::ok).collect()
    }

    /// Names of all events so far, without their sources.
    pub fn event_names(&self) -> Vec<String> {
        let name = |event: &Value| event["event"].as_str().unwrap_or_default().to_owned();
        self.events().iter().map(name).collect()
    }

    /// Waits for an event; gives it.
    #[track_caller]
    pub fn wait_for_event(&self, name: &str) -> Value {
        self.wait_for_events(&[name])
    }

    /// Waits for one of several events; gives the first that there is.
    #[track_caller]
    pub fn wait_for_events(&self, names: &[&str]) -> Value {
        self.wait_for_later_events(0, names)
    }

    /// The same, behind the first `before` events.
    #[track_caller]
    pub fn wait_for_later_events(&self, before: usize, names: &[&str]) -> Value {
        self.find_event(before, names).unwrap_or_else(|| {
            panic!("no event {names:?}, only {:?}\n{}", self.event_names(), self.output())
        })
    }

    fn find_event(&self, before: usize, names: &[&str]) -> Option<Value> {
        let start = std::time::Instant::now();
        loop {
            let found = self
                .events()
                .into_iter()
                .skip(before)
                .find(|event| names.iter().any(|name| event["event"] == *name));
            if found.is_some() || start.elapsed() > Duration::from_mins(1) {
                return found;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// `ch-remote` on this VMM.
    pub fn remote(&self, arguments: &[&str]) -> Output {
        let socket = self.socket();
        let mut words = vec!["--api-socket", socket.to_str().expect("a path in UTF-8")];
        words.extend_from_slice(arguments);
        ch_remote(&words)
    }

    /// The same, which must succeed; gives its standard output.
    #[track_caller]
    pub fn remote_ok(&self, arguments: &[&str]) -> String {
        let output = self.remote(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "ch-remote {arguments:?}: {error}\n{}", self.output());
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// `ch-remote` in the background.
    pub fn remote_spawn(&self, arguments: &[&str]) -> Child {
        Command::new(CH_REMOTE)
            .arg("--api-socket")
            .arg(self.socket())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ch-remote can be started")
    }

    /// Ends it through its API, and expects exit code 0. All of its events are written then, so that one that
    /// is not there was not told.
    #[track_caller]
    pub fn end(&mut self) {
        self.api().put("vmm.shutdown", "").ok();
        let code = self.wait_for_exit();
        assert_eq!(code, 0, "{}", self.output());
    }

    /// The same of one at which nothing is looked any more.
    #[track_caller]
    pub fn shut_down(mut self) {
        self.end();
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        if self.exited().is_none() {
            let _ = self.child.kill();
            self.status = self.child.wait().ok();
            running().retain(|pid| *pid != self.child.id());
        }
        if std::thread::panicking() {
            eprintln!("--- VMM {} ---\n{}", self.child.id(), tail(&self.output(), 60));
        }
    }
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all.get(all.len().saturating_sub(lines)..).unwrap_or_default().join("\n")
}

/// Runs `ch-remote`.
pub fn ch_remote(arguments: &[&str]) -> Output {
    Command::new(CH_REMOTE).args(arguments).stdin(Stdio::null()).output().expect("ch-remote runs")
}

/// Waits for a process in the background; kills it when that takes too long.
pub fn finish(mut child: Child) -> Output {
    wait_within(Duration::from_secs(100), "the end of a process", || {
        child.try_wait().expect("it can be waited for")
    });
    child.wait_with_output().expect("its output")
}

/// A file with this content in the VMM's folder or elsewhere.
pub fn write_file(path: &Path, content: &[u8]) -> String {
    fs::write(path, content).expect("a file can be written");
    path.to_str().expect("a path in UTF-8").to_owned()
}
