// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two QEMU processes (`q35`, qboot, KVM) with the same guest, driven over QMP.
//!
//! Owns both and their QMP connections. QEMU's bandwidth limit is lifted and its events are
//! enabled; everything else has QEMU's default. Must never require QEMU: [`missing`] gives the
//! reason why it cannot be used.

use std::error::Error;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Pair, Programs, VCPUS};
use crate::child::Killed;
use crate::qemu::{CPU, PROGRAM, QBOOT};

/// Bytes per second, more than any loopback carries.
const UNLIMITED: u64 = 1 << 40;
/// Longest wait for QEMU to listen, to answer, or to end a migration.
const LIMIT: Duration = Duration::from_mins(2);

/// Why QEMU cannot be used; `None` when it can.
pub fn missing() -> Option<String> {
    if Command::new(PROGRAM).arg("--version").output().is_err() {
        return Some(format!("{PROGRAM} is not installed (Debian package qemu-system-x86)"));
    }
    (!Path::new(QBOOT).exists()).then(|| format!("{QBOOT} is not installed"))
}

/// The way in which it migrates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Precopy, on one stream or on multifd channels.
    Precopy {
        /// Allowed downtime.
        downtime_ms: u64,
        /// Number of multifd channels.
        channels: Option<u32>,
    },
    /// Postcopy from the start.
    Postcopy {
        /// With a channel for requested pages.
        preempt: bool,
        /// Limit of the background; 0 for none.
        bytes_per_s: u64,
    },
}

/// A QEMU process.
struct Machine {
    child: Killed,
    control: UnixStream,
    answers: BufReader<UnixStream>,
}

/// A source with a guest, and a listening destination.
pub struct Qemu {
    source: Machine,
    destination: Machine,
    uri: String,
    way: Way,
    memory_mib: u64,
    _folder: TempDir,
}

impl Qemu {
    /// Starts both.
    pub fn start(programs: &Programs, cmdline: &str, way: Way) -> Result<Self, Box<dyn Error>> {
        let folder = TempDir::with_prefix("godwit-bench-")?;
        let start = |name: &str, more: &[&str]| {
            Machine::start(programs, cmdline, &folder.path().join(name), more)
        };
        let mut source = start("a", &[])?;
        let mut destination = start("b", &["-incoming", "defer"])?;
        for machine in [&mut source, &mut destination] {
            machine.configure(way)?;
        }
        destination.execute("migrate-incoming", &json!({ "uri": "tcp:127.0.0.1:0" }))?;
        let answer = destination.execute("query-migrate", &json!({}))?;
        let port = answer["socket-address"][0]["port"]
            .as_str()
            .ok_or_else(|| format!("QEMU does not say where it listens: {answer}"))?;
        let uri = format!("tcp:127.0.0.1:{port}");
        let memory_mib = programs.memory_mib;
        Ok(Self { source, destination, uri, way, memory_mib, _folder: folder })
    }
}

impl Pair for Qemu {
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
        self.source.execute("migrate", &json!({ "uri": self.uri }))?;
        if matches!(self.way, Way::Postcopy { .. }) {
            self.source.execute("migrate-start-postcopy", &json!({}))?;
        }
        let start = Instant::now();
        loop {
            let event = self.source.message()?;
            match event["data"]["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled" | "postcopy-paused") => {
                    let answer = self.source.execute("query-migrate", &json!({}))?;
                    return Err(format!("QEMU's migration failed: {answer}").into());
                }
                _ if start.elapsed() > LIMIT => return Err("QEMU does not get there".into()),
                _ => {}
            }
        }
    }

    fn end_source(&mut self) -> Result<Duration, Box<dyn Error>> {
        self.source.execute("quit", &json!({}))?;
        self.source.child.used_in_all(LIMIT)
    }
}

impl Machine {
    fn start(
        programs: &Programs,
        cmdline: &str,
        socket: &Path,
        more: &[&str],
    ) -> Result<Self, Box<dyn Error>> {
        let memory_mib = programs.memory_mib;
        let mut child = Killed::spawn(
            Command::new(PROGRAM)
                .args(["-accel", "kvm", "-cpu", CPU, "-nodefaults", "-display", "none"])
                // So that threads have names.
                .args(["-name", "guest,debug-threads=on"])
                .args(["-no-reboot", "-bios", QBOOT, "-append", cmdline, "-kernel"])
                .arg(programs.guest)
                .args(["-smp", &VCPUS.to_string(), "-m", &format!("{memory_mib}M")])
                .args(["-M", "q35,memory-backend=ram", "-object"])
                .arg(format!("memory-backend-memfd,id=ram,size={memory_mib}M,share=on"))
                .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
                .args(more)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped()),
        )?;
        let start = Instant::now();
        let control = loop {
            if let Ok(control) = UnixStream::connect(socket) {
                break control;
            }
            if let Some(how) = child.ended()? {
                return Err(format!("QEMU ended with {how}").into());
            }
            if start.elapsed() > LIMIT {
                return Err("QEMU has no QMP socket".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        control.set_read_timeout(Some(LIMIT))?;
        let answers = BufReader::new(control.try_clone()?);
        let mut machine = Self { child, control, answers };
        machine.message()?;
        machine.execute("qmp_capabilities", &json!({}))?;
        Ok(machine)
    }

    fn configure(&mut self, way: Way) -> Result<(), Box<dyn Error>> {
        let mut parameters = json!({ "max-bandwidth": UNLIMITED });
        let mut on = vec!["events"];
        match way {
            Way::Precopy { downtime_ms, channels } => {
                parameters["downtime-limit"] = downtime_ms.into();
                if let Some(channels) = channels {
                    on.push("multifd");
                    parameters["multifd-channels"] = channels.into();
                }
            }
            Way::Postcopy { preempt, bytes_per_s } => {
                on.push("postcopy-ram");
                if preempt {
                    on.push("postcopy-preempt");
                }
                parameters["max-postcopy-bandwidth"] = bytes_per_s.into();
            }
        }
        let on: Vec<Value> =
            on.iter().map(|name| json!({ "capability": name, "state": true })).collect();
        self.execute("migrate-set-capabilities", &json!({ "capabilities": on }))?;
        self.execute("migrate-set-parameters", &parameters)?;
        Ok(())
    }

    fn execute(&mut self, name: &str, arguments: &Value) -> Result<Value, Box<dyn Error>> {
        writeln!(self.control, "{}", json!({ "execute": name, "arguments": arguments }))?;
        loop {
            let mut message = self.message()?;
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
            if let Some(error) = message.get("error") {
                return Err(format!("QEMU refuses {name}: {error}").into());
            }
        }
    }

    /// The next message of any kind.
    fn message(&mut self) -> Result<Value, Box<dyn Error>> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            let how = self.child.ended()?.unwrap_or_default();
            return Err(format!("QEMU is gone: {how}").into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}
