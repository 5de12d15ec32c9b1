// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The page server's process on the side of the VMM: starting it, and handing the migration over to it.
//!
//! Owns where it takes requests, and the process until it has taken over. Before that it ends with its VMM, whatever happens
//! there; afterwards the VMM has no hold on it.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use thiserror::Error;
use vm_migration::page_server::{
    Identity, PageServerHandle, SourceEnd, TakeoverOutcome, TakeoverRequest,
};
use vm_migration::{Cause, Limits, VmError};

use super::memory::MigratingRam;
use crate::events;
use crate::options::ChildLogging;
use crate::sandbox;

/// The running executable, even if its path has been replaced.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// Options for starting a page server.
#[derive(Clone, Debug)]
pub struct PageServerPlan {
    /// Path of its API socket.
    pub socket: PathBuf,
    /// Logging configuration that it inherits.
    pub child_logging: ChildLogging,
}

/// Default socket path of the page server of a VMM with the API socket `api`.
pub fn default_socket(api: &Path) -> PathBuf {
    let mut path = api.as_os_str().to_owned();
    path.push(".pages");
    PathBuf::from(path)
}

/// Why there is no page server.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// The process cannot be started.
    #[error("the page server's process cannot be started")]
    Start(#[source] io::Error),
    /// The memory cannot be handed over to it.
    #[error("the page server cannot work at {}", socket.display())]
    Memory {
        /// Path of its API socket.
        socket: PathBuf,
        /// The cause.
        #[source]
        source: Cause,
    },
    /// It cannot take over the migration.
    #[error("the page server has not taken over")]
    TakeOver(#[source] Cause),
}

/// A page server that waits to take over.
#[derive(Debug)]
pub struct PageServerProcess {
    /// The process; `None` once it has taken over.
    child: Option<Child>,
    source_end: SourceEnd,
    socket: PathBuf,
    /// Whether it has created its socket, rather than another process before it.
    has_socket: bool,
    pid: u32,
}

impl PageServerProcess {
    /// Starts the process and passes it the memory.
    ///
    /// # Errors
    /// The reason why it cannot be used; the process has ended again.
    pub fn start(plan: &PageServerPlan, memory: &MigratingRam) -> Result<Self, ProcessError> {
        let (ours, theirs) = UnixStream::pair().map_err(ProcessError::Start)?;
        let socket = std::path::absolute(&plan.socket).map_err(ProcessError::Start)?;
        let failed = |source| ProcessError::Memory { socket: socket.clone(), source };
        let source_end = SourceEnd::new(ours, Limits::default()).map_err(failed)?;
        let child = spawn(theirs, &socket, &plan.child_logging).map_err(ProcessError::Start)?;
        let pid = child.id();
        let (child, has_socket) = (Some(child), false);
        let mut process = Self { child, source_end, socket: socket.clone(), has_socket, pid };
        process.source_end.give_memory(memory).map_err(failed)?;
        process.has_socket = true;
        log::info!("a page server is ready at {} (process {pid})", socket.display());
        Ok(process)
    }
}

fn spawn(link: UnixStream, socket: &Path, child_logging: &ChildLogging) -> io::Result<Child> {
    let mut command = Command::new(THIS_PROGRAM);
    let uptime_us = events::uptime().as_micros().to_string();
    command.arg0("cloud-hypervisor").args(["--page-server", &uptime_us]);
    command.arg("--api-socket").arg(socket);
    command.args(["--seccomp", sandbox::mode().text()]);
    for _ in 0..child_logging.verbosity {
        command.arg("-v");
    }
    if let Some(format) = &child_logging.log_format {
        command.arg("--log-format").arg(format);
    }
    match events::lend()? {
        Some(file) => {
            command.args(["--event-monitor", "fd=1"]).stdout(file);
        }
        None => {
            command.stdout(Stdio::null());
        }
    }
    if let Some(log) = &child_logging.log {
        command.stderr(log.try_clone()?);
    }
    // Signals to the VMM's process group do not end it, and it keeps no directory in use.
    command.process_group(0).current_dir("/");
    command.stdin(OwnedFd::from(link)).spawn()
}

impl PageServerHandle for PageServerProcess {
    fn identity(&self) -> Identity {
        Identity { socket: self.socket.display().to_string(), pid: self.pid }
    }

    fn take_over(
        mut self: Box<Self>,
        takeover: &TakeoverRequest,
    ) -> Result<TakeoverOutcome, VmError> {
        let taken = self.source_end.takeover(takeover).map_err(ProcessError::TakeOver)?;
        // It continues without this process, and exits by itself.
        self.child = None;
        Ok(taken)
    }
}

impl Drop for PageServerProcess {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // The process that continues instead must be sure that this one does nothing any more.
        if let Err(error) = child.kill().and_then(|()| child.wait().map(drop)) {
            log::error!("the page server (process {}) could not be ended: {error}", self.pid);
        }
        if self.has_socket {
            let _ = fs::remove_file(&self.socket);
        }
    }
}
