// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A QEMU process that runs the test guest: a VMM that this project did not write, to test the
//! guest and the reader with. Killed when dropped. One at a time unless a test needs two, since
//! the guest's vCPUs never sleep.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guest_reader::{Guest, Patience, image};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use tempfile::TempDir;

const QBOOT: &str = "/usr/share/qemu/qboot.rom";
pub const PATIENCE: Patience = Patience::millis(60_000);

static TURN: Mutex<()> = Mutex::new(());

/// Waits until no other test runs a machine.
pub fn turn() -> MutexGuard<'static, ()> {
    TURN.lock()
}

/// Whether QEMU, and KVM if wanted, are there; says that the test is skipped if not.
pub fn available(kvm: bool) -> bool {
    let reason = if Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        "qemu-system-x86_64 is not installed"
    } else if !Path::new(QBOOT).exists() {
        "QEMU's qboot.rom is not installed"
    } else {
        return !kvm || test_skip::kvm();
    };
    test_skip::skip!("{reason}");
    false
}

/// What to run.
#[derive(Clone, Copy)]
pub struct Config {
    pub machine: &'static str,
    pub kvm: bool,
    pub vcpus: u32,
    pub memory: &'static str,
    /// A memfd, or private anonymous memory.
    pub shared: bool,
    pub cmdline: &'static str,
}

impl Config {
    pub const fn new(vcpus: u32, memory: &'static str, cmdline: &'static str) -> Self {
        Self { machine: "q35", kvm: true, vcpus, memory, shared: true, cmdline }
    }
}

/// A running QEMU.
pub struct Machine {
    child: Child,
    control: UnixStream,
    answers: BufReader<UnixStream>,
    _folder: TempDir,
}

impl Machine {
    pub fn start(config: &Config) -> Self {
        Self::start_with(config, &[])
    }

    pub fn start_with(config: &Config, more: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let socket = folder.path().join("qmp");
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-nodefaults", "-display", "none", "-no-reboot", "-bios", QBOOT, "-M"])
            .arg(config.machine)
            .args(if config.kvm {
                ["-accel", "kvm", "-cpu", "host,-arch-capabilities"]
            } else {
                ["-accel", "tcg", "-cpu", "max"]
            })
            .args(["-smp", &config.vcpus.to_string(), "-m", config.memory])
            .arg("-kernel")
            .arg(image::image().unwrap())
            .args(["-append", config.cmdline])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if config.shared {
            let object = format!("memory-backend-memfd,id=ram,size={},share=on", config.memory);
            command.args(["-object", &object, "-machine", "memory-backend=ram"]);
        }
        let child = command.spawn().unwrap();
        let control = connect(&socket);
        let answers = BufReader::new(control.try_clone().unwrap());
        let mut machine = Self { child, control, answers, _folder: folder };
        machine.answer("QMP");
        machine.command(&json!({ "execute": "qmp_capabilities" }));
        machine
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The guest, once all its vCPUs run.
    pub fn guest(&self) -> Guest {
        let guest = Guest::attach_within(self.pid(), PATIENCE).unwrap();
        let status = guest.wait_for_heartbeat(PATIENCE).unwrap();
        assert_eq!(status.vcpus_online, status.vcpus_wanted, "{status:?}");
        assert_eq!((status.failure, status.cmdline_refused), (None, 0));
        guest
    }

    /// Executes a QMP command; gives what it returns.
    pub fn command(&mut self, command: &Value) -> Value {
        writeln!(self.control, "{command}").unwrap();
        self.answer("return")
    }

    pub fn execute(&mut self, name: &str) -> Value {
        self.command(&json!({ "execute": name }))
    }

    /// The next message that has this key; events in between are dropped.
    fn answer(&mut self, key: &str) -> Value {
        loop {
            let mut line = String::new();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "QEMU is gone");
            let mut message: Value = serde_json::from_str(&line).unwrap();
            assert!(message.get("error").is_none(), "{message}");
            if let Some(value) = message.get_mut(key) {
                return value.take();
            }
        }
    }

    /// Waits until `status` of a query is `wanted`; gives the last answer.
    pub fn wait_for_status(&mut self, query: &str, wanted: &str) -> Value {
        let start = Instant::now();
        loop {
            let answer = self.execute(query);
            if answer["status"] == wanted {
                return answer;
            }
            assert_ne!(answer["status"], "failed", "{answer}");
            assert!(start.elapsed() < PATIENCE.0, "{answer}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends the guest to another machine, which must have been started to receive at `socket`.
    pub fn migrate(&mut self, socket: &Path) {
        let uri = format!("unix:{}", socket.display());
        self.command(&json!({ "execute": "migrate", "arguments": { "uri": uri } }));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(socket: &PathBuf) -> UnixStream {
    let start = Instant::now();
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return stream,
            Err(error) => assert!(start.elapsed() < PATIENCE.0, "no QMP socket: {error}"),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
