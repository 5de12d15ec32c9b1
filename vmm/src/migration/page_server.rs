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

/// This program, even if another one has its name by now.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// What a page server is to be started with.
#[derive(Clone, Debug)]
pub struct PageServerPlan {
    /// Where it takes requests.
    pub socket: PathBuf,
    /// What it gets of this process.
    pub child_logging: ChildLogging,
}

/// Where a VMM whose API is at `api` has its page server.
pub fn default_socket(api: &Path) -> PathBuf {
    let mut path = api.as_os_str().to_owned();
    path.push(".pages");
    PathBuf::from(path)
}

/// Why there is no page server.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// It cannot be started.
    #[error("the page server's process cannot be started")]
    Start(#[source] io::Error),
    /// It does not take the memory.
    #[error("the page server cannot work at {}", socket.display())]
    Memory {
        /// Where it was to take requests.
        socket: PathBuf,
        /// Why.
        #[source]
        source: Cause,
    },
    /// It does not take over.
    #[error("the page server has not taken over")]
    TakeOver(#[source] Cause),
}

/// A page server that waits.
#[derive(Debug)]
pub struct PageServerProcess {
    /// `None` once it has been left behind.
    child: Option<Child>,
    source_end: SourceEnd,
    socket: PathBuf,
    /// The socket is its own; another process may have been there before it.
    has_socket: bool,
    pid: u32,
}

impl PageServerProcess {
    /// Starts it and gives it the memory.
    ///
    /// # Errors
    /// Why it cannot do its work; it has ended again.
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
        log::info!("a page server waits at {} (process {pid})", socket.display());
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
    // What ends a VMM in a terminal does not end its page server, and no directory is held.
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
        // It continues without this process, and ends by itself.
        self.child = None;
        Ok(taken)
    }
}

impl Drop for PageServerProcess {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // The process that continues in its place must be sure that it does nothing any more.
        if let Err(error) = child.kill().and_then(|()| child.wait().map(drop)) {
            log::error!("the page server (process {}) could not be ended: {error}", self.pid);
        }
        if self.has_socket {
            let _ = fs::remove_file(&self.socket);
        }
    }
}
