// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `ch-remote`: a VM's life driven by it, what it prints, its help, its exit codes.

use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::harness::vmm::{CH_REMOTE, VMM, finish, unignore_signals, write_file};
use crate::harness::{Suite, Vmm, ch_remote};
use crate::lifecycle::config;

/// Subcommands that do something, and those that are known and refused by name.
const WORKING: [&str; 18] = [
    "boot",
    "counters",
    "create",
    "delete",
    "info",
    "metrics",
    "pause",
    "ping",
    "power-button",
    "reboot",
    "receive-migration",
    "resume",
    "send-migration",
    "shutdown",
    "shutdown-vmm",
    "migration-progress",
    "migration-report",
    "upgrade",
];

pub fn add(suite: &mut Suite) {
    suite.add("remote::life_cycle", life_cycle);
    suite.add("remote::help_of_each_subcommand", help);
    suite.add("remote::errors_are_told_once", errors);
    suite.add("remote::the_answer_need_not_be_read", the_answer_need_not_be_read);
    suite.add("remote::an_answer_may_take_so_long_and_no_longer", timeout);
    suite.add("remote::an_answer_that_goes_nowhere_is_a_failure", full);
    suite.add("remote::what_cannot_be_read_is_a_failure", unreadable);
    suite.add("remote::the_reason_need_not_be_read", the_reason_need_not_be_read);
    suite.add("remote::interrupted_it_says_that_the_migration_continues", interrupted);
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn life_cycle() {
    let mut vmm = Vmm::empty();
    let ping = json(&vmm.remote_ok(&["ping"]));
    assert_eq!(ping["pid"], vmm.pid());
    assert!(ping["version"].is_string(), "{ping}");
    let file = write_file(&vmm.path("config.json"), config(128).as_bytes());
    assert_eq!(vmm.remote_ok(&["create", &file]), "");
    assert_eq!(json(&vmm.remote_ok(&["info"]))["state"], "Created");
    assert_eq!(vmm.remote_ok(&["boot"]), "");
    vmm.wait_for_heartbeat();
    assert_eq!(json(&vmm.remote_ok(&["info"]))["state"], "Running");
    assert!(json(&vmm.remote_ok(&["counters"])).is_object());
    let metrics = vmm.remote_ok(&["metrics"]);
    assert!(metrics.contains("\ngodwit_vm_state{state=\"running\"} 1\n"), "{metrics}");
    assert!(metrics.ends_with("\n# EOF\n"), "{metrics}");
    vmm.remote_ok(&["pause"]);
    assert_eq!(json(&vmm.remote_ok(&["info"]))["state"], "Paused");
    vmm.remote_ok(&["resume"]);
    vmm.remote_ok(&["reboot"]);
    vmm.wait_for_heartbeat();
    vmm.remote_ok(&["power-button"]);
    vmm.remote_ok(&["shutdown"]);
    vmm.remote_ok(&["delete"]);
    vmm.remote_ok(&["shutdown-vmm"]);
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
}

fn help() {
    let all = ch_remote(&["--help"]);
    assert!(all.status.success());
    let text = String::from_utf8_lossy(&all.stdout).into_owned();
    for name in WORKING {
        assert!(text.contains(name), "{name} is not in --help:\n{text}");
        let output = ch_remote(&[name, "--help"]);
        let own = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{name} --help");
        assert!(own.lines().next().is_some_and(|line| line.len() > 10), "{name}: {own}");
        assert!(own.contains("Usage"), "{name}: {own}");
    }
    let recover = ch_remote(&["migration-recover", "--help"]);
    let text = String::from_utf8_lossy(&recover.stdout).into_owned();
    assert!(text.contains("url=") && text.contains("connections="), "{text}");
    let send = ch_remote(&["send-migration", "--help"]);
    let text = String::from_utf8_lossy(&send.stdout).into_owned();
    for key in ["destination_url", "memory_mode", "downtime_ms", "timeout_s", "connections"] {
        assert!(text.contains(key), "{key} is not in {text}");
    }
}

fn errors() {
    let vmm = Vmm::empty();
    let cases: [(&[&str], &str); 5] = [
        (&["info"], "there is no VM"),
        (&["boot"], "there is no VM"),
        (&["create", "/nonexistent.json"], "/nonexistent.json"),
        (&["send-migration", "destination_url=nowhere"], "nowhere"),
        (&["no-such-command"], "no-such-command"),
    ];
    for (words, text) in cases {
        let output = vmm.remote(words);
        assert!(!output.status.success(), "{words:?} succeeded");
        assert!(output.status.code().is_some(), "{words:?} ended by a signal");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(error.matches(text).count(), 1, "{words:?}: {error}");
        assert!(!error.contains("panicked"), "{words:?}: {error}");
    }
    let nowhere = ch_remote(&["--api-socket", "/nonexistent/api", "ping"]);
    let error = String::from_utf8_lossy(&nowhere.stderr).into_owned();
    assert!(!nowhere.status.success() && error.contains("/nonexistent/api"), "{error}");
    vmm.shut_down();
}

/// The exit code tells as well.
fn the_reason_need_not_be_read() {
    for (program, words) in [
        (CH_REMOTE, ["--api-socket", "/nonexistent/api", "ping"]),
        (VMM, ["--kernel", "/nonexistent", "-v"]),
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = Command::new(program).args(words).stderr(writer).output().expect("it runs");
        assert_eq!(output.status.code(), Some(1), "{program}: {output:?}");
    }
}

fn the_answer_need_not_be_read() {
    let vmm = Vmm::empty();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = Command::new(CH_REMOTE)
        .arg("--api-socket")
        .arg(vmm.socket())
        .arg("ping")
        .stdout(writer)
        .output()
        .expect("ch-remote runs");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    vmm.shut_down();
}

/// A VMM that answers every request with the same body, or none with anything, until it is dropped.
struct Fake {
    folder: tempfile::TempDir,
}

impl Fake {
    fn new(body: Option<&str>) -> Self {
        let body = body.map(str::to_owned);
        let folder = tempfile::TempDir::with_prefix("godwit-fake-").expect("a folder");
        let listener = UnixListener::bind(folder.path().join("api")).expect("a socket");
        std::thread::spawn(move || {
            let mut silent = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.expect("a connection");
                let Some(body) = &body else {
                    silent.push(stream);
                    continue;
                };
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).expect("a request");
                    request.extend(byte);
                }
                let length = body.len();
                let _ = write!(stream, "HTTP/1.1 200 \r\nContent-Length: {length}\r\n\r\n{body}");
            }
        });
        Self { folder }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(CH_REMOTE);
        command.arg("--api-socket").arg(self.folder.path().join("api")).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Exit code, or minus the signal, and what was said.
    fn run(&self, arguments: &[&str]) -> (i32, String) {
        told(&self.command(arguments).output().expect("ch-remote runs"))
    }
}

fn told(output: &Output) -> (i32, String) {
    let code = output.status.code().unwrap_or_else(|| -output.status.signal().unwrap_or(0));
    (code, String::from_utf8_lossy(&output.stderr).into_owned())
}

fn timeout() {
    let deaf = Fake::new(None);
    for command in [&["ping"][..], &["migration-progress", "--watch"]] {
        let (code, error) = deaf.run(&[&["--timeout", "1"], command].concat());
        assert!(code == 5 && error.contains("no answer within 1 s"), "{code}: {error}");
    }
    // Where so many wait that there is no place for another, the wait is as long.
    let folder = tempfile::TempDir::with_prefix("godwit-fake-").expect("a folder");
    let path = folder.path().join("api");
    let listener = UnixListener::bind(&path).expect("a socket");
    // SAFETY: takes a descriptor that is open; listening again only changes how many may wait.
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
    let _first = UnixStream::connect(&path).expect("a connection");
    let output = ch_remote(&[
        "--api-socket",
        path.to_str().expect("a path in UTF-8"),
        "--timeout",
        "1",
        "ping",
    ]);
    let (code, error) = told(&output);
    assert!(code == 5 && error.contains("no answer within 1 s"), "{code}: {error}");
    let (code, error) = deaf.run(&["--timeout", "0", "ping"]);
    assert!(code == 2 && error.contains("--timeout"), "{code}: {error}");
}

fn full() {
    let fake = Fake::new(Some(r#"{"state":"Running"}"#));
    let full = std::fs::File::options().write(true).open("/dev/full").expect("/dev/full");
    let output = fake.command(&["info"]).stdout(full).output().expect("ch-remote runs");
    let (code, error) = told(&output);
    assert!(
        code == 1 && error.contains("info succeeded, but its answer cannot be written"),
        "{code}: {error}"
    );
    assert!(error.contains("No space left"), "{error}");
}

fn unreadable() {
    let fake = Fake::new(Some("no JSON"));
    let (code, error) = fake.run(&["info"]);
    assert!(code == 1 && error.contains("answer to info cannot be read"), "{code}: {error}");
    let (code, error) = fake.run(&["migration-progress", "--watch"]);
    assert!(code == 4 && error.contains("progress document"), "{code}: {error}");
}

fn interrupted() {
    let progress = vm_migration::Progress::new(vm_migration::Side::Source);
    // Nothing is printed before the first phase.
    let mut document = progress.snapshot();
    document.phase = vm_migration::Phase::Precopy;
    let document = serde_json::to_string(&document).expect("JSON");
    let fake = Fake::new(Some(&document));
    let mut command = fake.command(&["migration-progress", "--watch"]);
    unignore_signals(&mut command);
    let mut child = command.spawn().expect("it starts");
    // Its first line shows that it waits.
    let mut byte = [0];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut byte).expect("a line");
    let pid = libc::pid_t::try_from(child.id()).expect("a process id");
    // SAFETY: the child has not been waited for, so the id is still its own.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGINT) }, 0);
    let (code, error) = told(&finish(child));
    assert_eq!(code, -libc::SIGINT, "{error}");
    assert!(error.contains("The migration continues"), "{error}");
    let cancel = format!("{} migration-cancel", fake.folder.path().join("api").display());
    assert!(error.contains(&cancel), "{error}");
}
