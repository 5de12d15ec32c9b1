// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two processes of this program, driven by `ch-remote` as by a user.
//!
//! Owns both, and the event files that show their progress. Must never use anything that a user
//! could not.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::{Pair, Programs};
use crate::child::Killed;

/// Interval at which an event file is polled.
const POLL: Duration = Duration::from_micros(500);
/// Longest wait for an event.
const LIMIT: Duration = Duration::from_mins(2);

/// A VMM with its socket and event file.
struct Vmm {
    child: Killed,
    socket: PathBuf,
    events: PathBuf,
}

/// A source with a guest, and a listening destination.
pub struct Ours {
    source: Vmm,
    destination: Vmm,
    receiver: Option<Killed>,
    remote: PathBuf,
    option: String,
    memory_mib: u64,
    _folder: TempDir,
}

impl Ours {
    /// Starts both, each with further options for its side of the migration.
    pub fn start(
        programs: &Programs,
        cmdline: &str,
        receive: &str,
        send: &str,
    ) -> Result<Self, Box<dyn Error>> {
        let folder = TempDir::with_prefix("godwit-bench-")?;
        let receiver = format!("tcp:127.0.0.1:0{receive}");
        Self::start_in(folder, programs, cmdline, &receiver, send)
    }

    /// The same over a Unix socket.
    pub fn start_local(
        programs: &Programs,
        cmdline: &str,
        receive: &str,
        send: &str,
    ) -> Result<Self, Box<dyn Error>> {
        let folder = TempDir::with_prefix("godwit-bench-")?;
        let receiver = format!("unix:{}{receive}", folder.path().join("m").display());
        Self::start_in(folder, programs, cmdline, &receiver, send)
    }

    /// Why a destination refuses these options of `receive-migration` on this machine, if it does.
    pub fn refusal(programs: &Programs, receive: &str) -> Result<Option<String>, Box<dyn Error>> {
        let folder = TempDir::with_prefix("godwit-bench-")?;
        let mut command = Command::new(programs.vmm);
        let mut destination = Vmm::spawn(command.args(programs.options), folder.path(), "b")?;
        destination.wait_for_socket()?;
        let option = format!("receiver_url=unix:{}{receive}", folder.path().join("m").display());
        let mut receiver = Killed::spawn(
            remote(programs.remote, &destination.socket)
                .args(["receive-migration", &option])
                .stderr(Stdio::piped()),
        )?;
        let events = destination.events.clone();
        destination.wait("an answer to receive-migration", |_| {
            if let Ok(Some(how)) = receiver.ended() {
                return Some(Some(how));
            }
            let text = fs::read_to_string(&events).ok()?;
            text.contains("migration-receive-ready").then_some(None)
        })
    }

    fn start_in(
        folder: TempDir,
        programs: &Programs,
        cmdline: &str,
        receiver: &str,
        send: &str,
    ) -> Result<Self, Box<dyn Error>> {
        let mut source = Vmm::with_guest(folder.path(), programs, cmdline)?;
        let mut destination =
            Vmm::spawn(Command::new(programs.vmm).args(programs.options), folder.path(), "b")?;
        source.wait_for_socket()?;
        destination.wait_for_socket()?;
        let receiver = Killed::spawn(
            // It fails when nothing is sent, as for a raw copy; the sender reports why.
            remote(programs.remote, &destination.socket)
                .args(["receive-migration", &format!("receiver_url={receiver}")])
                .stderr(Stdio::null()),
        )?;
        let ready = destination.wait_for(&["migration-receive-ready"])?;
        let address = ready["properties"]["address"].as_str().unwrap_or_default();
        let option = format!("destination_url={address}{send}");
        let (remote, receiver) = (programs.remote.to_owned(), Some(receiver));
        let memory_mib = programs.memory_mib;
        Ok(Self { source, destination, receiver, remote, option, memory_mib, _folder: folder })
    }
}

/// A VMM whose place another process takes, which is ended with it.
pub struct InPlace {
    vmm: Vmm,
    remote: PathBuf,
    binary: PathBuf,
    successor: Option<u32>,
    _folder: TempDir,
}

impl InPlace {
    /// Starts the VMM with a guest.
    pub fn start(programs: &Programs, cmdline: &str) -> Result<Self, Box<dyn Error>> {
        let folder = TempDir::with_prefix("godwit-bench-")?;
        let mut vmm = Vmm::with_guest(folder.path(), programs, cmdline)?;
        vmm.wait_for_socket()?;
        let (remote, binary) = (programs.remote.to_owned(), programs.vmm.to_owned());
        Ok(Self { vmm, remote, binary, successor: None, _folder: folder })
    }

    /// Process ID of the VMM that was started.
    pub fn pid(&self) -> u32 {
        self.vmm.child.pid()
    }

    /// Has another process take its place.
    pub fn upgrade(&mut self) -> Result<(), Box<dyn Error>> {
        let mut command = remote(&self.remote, &self.vmm.socket);
        command.args(["upgrade", "--binary"]).arg(&self.binary).stdout(Stdio::piped());
        let output = command.output()?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(format!("upgrade: {}", why.trim()).into());
        }
        let report: Value = serde_json::from_slice(&output.stdout)?;
        self.successor = report["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        Ok(())
    }
}

impl Drop for InPlace {
    fn drop(&mut self) {
        if self.successor.is_some() {
            // It is no child of this process, and ends by itself when it is told to.
            let told = remote(&self.remote, &self.vmm.socket).arg("shutdown-vmm").status();
            if !told.is_ok_and(|status| status.success()) {
                eprintln!("process {:?} may still run", self.successor);
            }
        }
    }
}

impl Pair for Ours {
    fn source_pid(&self) -> u32 {
        self.source.child.pid()
    }

    fn destination_pid(&self) -> u32 {
        self.destination.child.pid()
    }

    fn memory_mib(&self) -> u64 {
        self.memory_mib
    }

    fn migrate(&mut self) -> Result<(), Box<dyn Error>> {
        let output = remote(&self.remote, &self.source.socket)
            .args(["send-migration", &self.option])
            .output()?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(format!("send-migration {}: {}", self.option, why.trim()).into());
        }
        let event = self.source.wait_for(&["migration-finished", "migration-failed"])?;
        if event["event"] != "migration-finished" {
            return Err(format!("the migration failed: {event}").into());
        }
        if let Some(mut receiver) = self.receiver.take() {
            receiver.0.wait()?;
        }
        Ok(())
    }

    fn end_source(&mut self) -> Result<Duration, Box<dyn Error>> {
        self.source.child.used_in_all(LIMIT)
    }
}

impl Vmm {
    fn with_guest(
        folder: &Path,
        programs: &Programs,
        cmdline: &str,
    ) -> Result<Self, Box<dyn Error>> {
        let memory = format!("size={}M,shared=on{}", programs.memory_mib, programs.memory);
        let mut command = Command::new(programs.vmm);
        command
            .args(["--serial", "off", "--console", "off", "--cmdline", cmdline, "--kernel"])
            .arg(programs.guest)
            .args(["--cpus", &format!("boot={}", programs.vcpus), "--memory", &memory])
            .args(programs.options);
        Self::spawn(&mut command, folder, "a")
    }

    fn spawn(command: &mut Command, folder: &Path, name: &str) -> Result<Self, Box<dyn Error>> {
        let socket = folder.join(name);
        let events = folder.join(format!("{name}.events"));
        let child = Killed::spawn(
            command
                .arg("--api-socket")
                .arg(&socket)
                .arg("--event-monitor")
                .arg(format!("path={}", events.display()))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped()),
        )?;
        Ok(Self { child, socket, events })
    }

    fn wait_for_socket(&mut self) -> Result<(), Box<dyn Error>> {
        let socket = self.socket.clone();
        self.wait("a VMM that listens", |_| {
            std::os::unix::net::UnixStream::connect(&socket).ok().map(drop)
        })
    }

    /// Waits for one of these events; returns it.
    fn wait_for(&mut self, names: &[&str]) -> Result<Value, Box<dyn Error>> {
        let path = self.events.clone();
        // A source that has migrated ends; its event has been written by then.
        self.wait(names.first().copied().unwrap_or_default(), |_| {
            let text = fs::read_to_string(&path).ok()?;
            // The last event may be incomplete.
            serde_json::Deserializer::from_str(&text)
                .into_iter::<Value>()
                .map_while(Result::ok)
                .find(|event| names.iter().any(|name| event["event"] == *name))
        })
    }

    fn wait<T>(
        &mut self,
        what: &str,
        mut attempt: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T, Box<dyn Error>> {
        let start = Instant::now();
        loop {
            let ended = self.child.ended()?;
            if let Some(value) = attempt(self) {
                return Ok(value);
            }
            if let Some(how) = ended {
                return Err(format!("waited for {what}, and the VMM ended with {how}").into());
            }
            if start.elapsed() > LIMIT {
                return Err(format!("no {what} within {} s", LIMIT.as_secs()).into());
            }
            std::thread::sleep(POLL);
        }
    }
}

fn remote(program: &Path, socket: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("--api-socket").arg(socket).stdin(Stdio::null()).stdout(Stdio::null());
    command
}
