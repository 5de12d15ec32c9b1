// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Output that nothing reads: terminals and pipes of consoles, of the log and of the events. A
//! guest may write as much as it likes and reset all the time meanwhile: opening, writing, pausing and
//! ending wait for no reader.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;

use crate::harness::terminal::Terminal;
use crate::harness::{Api, Suite, Vmm, VmmBuilder, payload, wait_for};
use crate::requests::{PROMPT, Request, prompt, prompt_put, requests_but, wave};

pub fn add(suite: &mut Suite) {
    suite.add("unread::terminal_of_a_guest_that_resets", || terminal(false));
    suite.add("unread::raw_terminal_of_a_guest_that_resets", || terminal(true));
    suite.add("unread::pipes_of_consoles", consoles);
    suite.add("unread::log_and_events", log_and_events);
    suite.add("unread::log_file_that_is_a_pipe", log_pipe);
    suite.add("unread::log_of_a_program_that_fails", failure);
}

/// In which a first signal ends a VMM whose guest has no disk that it waits for.
const SIGNAL_END: Duration = Duration::from_secs(8);
/// Newlines of a guest in each of its lives: a few of them fill any terminal.
const NEWLINES: u32 = 20_000;

fn get(name: &'static str) -> Request {
    Request { method: "GET", name, body: String::new() }
}

/// Answers all that is asked of it while its guest resets.
fn is_lively(vmm: Vmm) {
    let api = vmm.api();
    let before = vmm.events().len();
    for _ in 0..2 {
        // What ends the guest is asked for later.
        wave(&api, &requests_but(&["vm.shutdown", "vm.delete", "vm.send-migration"]));
        // It is between two lives most of the time (later it waits for them: a guest has 32 resets at once), and a
        // request waits for that no longer than others.
        wait_for("a resume", || {
            prompt_put(&api, "vm.resume");
            (api.state() == "Running").then_some(())
        });
    }
    vmm.wait_for_later_events(before, &["rebooted"]);
    ends(vmm);
}

/// Pauses and continues in time, and ends at a signal.
fn ends(mut vmm: Vmm) {
    let api = vmm.api();
    wait_for("a pause", || (prompt_put(&api, "vm.pause").status == 204).then_some(()));
    assert_eq!(api.state(), "Paused");
    prompt(&api, &get("vm.counters")).ok();
    prompt_put(&api, "vm.resume").ok();
    let before = vmm.events().len();
    vmm.wait_for_later_events(before, &["rebooted"]);
    let began = Instant::now();
    vmm.signal(libc::SIGTERM);
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
    assert!(began.elapsed() < SIGNAL_END, "{:?}", began.elapsed());
}

fn resetting(folder: &Path) -> Vec<String> {
    let kernel = payload::resetting(folder, NEWLINES);
    let kernel = kernel.to_str().expect("UTF-8").to_owned();
    ["--kernel", &kernel, "--memory", "size=64M", "--console", "off"].map(str::to_owned).to_vec()
}

fn terminal(is_raw: bool) {
    let folder = TempDir::with_prefix("godwit-unread-").expect("a folder");
    let terminal = Terminal::new();
    let before = terminal.modes();
    // A terminal at its input is in raw mode as long as the guest has it.
    let input = if is_raw { terminal.path() } else { "/dev/null".to_owned() };
    let script = "exec \"$@\" >\"$0\" <\"$INPUT\"".replace("$INPUT", &input);
    let vmm = VmmBuilder::new(&resetting(folder.path()))
        .with(&["--serial", "tty"])
        .wrapped(&["sh", "-c", &script, &terminal.path()])
        .start_at_once();
    wait_for("a full terminal", || terminal.is_full().then_some(()));
    assert_eq!(terminal.modes() != before, is_raw);
    is_lively(vmm);
    assert_eq!(terminal.modes(), before);
}

fn pipe(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    assert!(Command::new("mkfifo").arg(&path).status().expect("mkfifo runs").success());
    path
}

/// Something that has the other end of a pipe and does not read it; the pipe is as short as may be.
fn unread(path: &Path) -> File {
    let mut options = File::options();
    let pipe = options.read(true).custom_flags(libc::O_NONBLOCK).open(path).expect("a pipe");
    // SAFETY: only numbers are passed, and the descriptor is open.
    let len_bytes = unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
    assert!(len_bytes > 0, "{}", std::io::Error::last_os_error());
    pipe
}

fn consoles() {
    let folder = TempDir::with_prefix("godwit-unread-").expect("a folder");
    let fifo = pipe(folder.path(), "pipe");
    let to_pipe = format!("file={}", fifo.display());
    // With an unread reader four lives of the guest write more than the kernel and the VMM keep together.
    for (has_reader, lives) in [(false, 1), (true, 4)] {
        let reader = has_reader.then(|| unread(&fifo));
        let vmm = VmmBuilder::new(&resetting(folder.path()))
            .with(&["--serial", &to_pipe])
            .start_at_once();
        wait_for("some lives", || {
            let lived = vmm.event_names().iter().filter(|name| *name == "rebooted").count();
            (lived >= lives).then_some(())
        });
        ends(vmm);
        drop(reader);
    }
}

/// A VMM of which only the socket is in a place that is known.
struct Bare {
    vmm: Vmm,
    api: Api,
    socket: PathBuf,
}

impl Bare {
    fn start(folder: &Path, arguments: &[&str], wrapper: &[&str]) -> Self {
        let socket = folder.join("api");
        let mut vmm = VmmBuilder::new(&["--api-socket", socket.to_str().expect("UTF-8")])
            .with(arguments)
            .bare()
            .wrapped(wrapper)
            .spawn();
        let api = Api::new(&socket);
        wait_for("an answer", || {
            assert_eq!(vmm.exited(), None, "{}", vmm.output());
            api.request("GET", "vmm.ping", None).ok().filter(|answer| answer.status == 200)
        });
        Self { vmm, api, socket }
    }

    /// Has it log and tell more than the kernel keeps for any reader.
    fn fill(&self) {
        // Named in each refusal.
        let kernel = format!("/nonexistent/{}", "x".repeat(3000));
        let body = json!({ "payload": { "kernel": kernel } }).to_string();
        prompt(&self.api, &Request { method: "PUT", name: "vm.create", body }).ok();
        for _ in 0..60 {
            assert!(prompt_put(&self.api, "vm.boot").status >= 400);
        }
    }

    fn ends(mut self) {
        let began = Instant::now();
        self.vmm.signal(libc::SIGTERM);
        assert_eq!(self.vmm.wait_for_exit(), 0, "{}", self.vmm.output());
        assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
        assert!(!self.socket.exists(), "the socket is left");
    }
}

/// On a terminal that was stopped, say, and a pipe whose reader is busy.
fn log_and_events() {
    let folder = TempDir::with_prefix("godwit-unread-").expect("a folder");
    let fifo = pipe(folder.path(), "events");
    let _unread = unread(&fifo);
    let terminal = Terminal::new();
    let events = format!("path={}", fifo.display());
    let wrapper = ["sh", "-c", "exec \"$@\" >\"$0\" 2>&1", &terminal.path()];
    let bare = Bare::start(folder.path(), &["-vvv", "--event-monitor", &events], &wrapper);
    bare.fill();
    // The log is longer than what a terminal keeps, and written by a thread of its own.
    wait_for("a full terminal", || terminal.is_full().then_some(()));
    bare.ends();
}

fn log_pipe() {
    let folder = TempDir::with_prefix("godwit-unread-").expect("a folder");
    let fifo = pipe(folder.path(), "log");
    let log = fifo.to_str().expect("UTF-8");
    // Without a reader.
    let bare = Bare::start(folder.path(), &["-vvv", "--log-file", log], &[]);
    bare.fill();
    bare.ends();
}

/// Also what is said of a failure is not waited for.
fn failure() {
    let terminal = Terminal::new();
    terminal.fill();
    let wrapper = ["sh", "-c", "exec \"$@\" >\"$0\" 2>&1", &terminal.path()];
    let mut vmm = VmmBuilder::new(&["--kernel", "/nonexistent"]).bare().wrapped(&wrapper).spawn();
    assert_eq!(vmm.wait_for_exit(), 1);
    assert!(terminal.is_full());
}
