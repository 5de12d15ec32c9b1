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

use super::{MEMORY_MIB, Pair, Programs, VCPUS};
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
        send: &str,
    ) -> Result<Self, Box<dyn Error>> {
        let folder = TempDir::with_prefix("godwit-bench-")?;
        let receiver = format!("unix:{}", folder.path().join("m").display());
        Self::start_in(folder, programs, cmdline, &receiver, send)
    }

    fn start_in(
        folder: TempDir,
        programs: &Programs,
        cmdline: &str,
        receiver: &str,
        send: &str,
    ) -> Result<Self, Box<dyn Error>> {
        let memory = format!("size={MEMORY_MIB}M,shared=on{}", programs.memory);
        let mut command = Command::new(programs.vmm);
        command
            .args(["--serial", "off", "--console", "off", "--cmdline", cmdline, "--kernel"])
            .arg(programs.guest)
            .args(["--cpus", &format!("boot={VCPUS}"), "--memory", &memory])
            .args(programs.options);
        let mut source = Vmm::spawn(&mut command, folder.path(), "a")?;
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
        Ok(Self { source, destination, receiver, remote, option, _folder: folder })
    }
}

impl Pair for Ours {
    fn source_pid(&self) -> u32 {
        self.source.child.pid()
    }

    fn destination_pid(&self) -> u32 {
        self.destination.child.pid()
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
