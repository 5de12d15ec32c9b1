// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The event loop of the VMM thread.
//!
//! Owns the process from the parsed command line to its end.

use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use thiserror::Error;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::inbox::Inbox;
use super::successor::Successor;
use super::{Next, Vmm};
use crate::api::{self, ApiError, ApiListener, ApiServer, ApiSocket, SocketError, SocketFile};
use crate::config::{RestoreConfig, VmConfig};
use crate::events;
use crate::machine::{Host, HostError};
use crate::options::{ExitReason, VmmOptions};
use crate::panicking;
use crate::signals::{Signal, Signals};

/// Why the VMM ended with an error.
#[derive(Debug, Error)]
pub enum RunError {
    /// The host does not support the VMM.
    #[error("this host cannot run VMs")]
    Host(#[from] HostError),
    /// The API socket cannot be set up.
    #[error("cannot serve the API")]
    Api(#[from] SocketError),
    /// The socket of metrics cannot be set up.
    #[error("cannot serve metrics")]
    Metrics(#[source] SocketError),
    /// The event loop failed.
    #[error("cannot set up the event loop")]
    Loop(#[source] io::Error),
    /// The VM of the command line could not be started.
    #[error("cannot start the VM")]
    Start(#[source] ApiError),
    /// The snapshot of the command line could not be restored.
    #[error("cannot restore the VM")]
    Restore(#[source] ApiError),
    /// The VM could not be booted again after a reboot of the guest.
    #[error("the VM could not be rebooted")]
    Reboot(#[source] ApiError),
    /// The VM could not be shut down after a shutdown of the guest.
    #[error("the VM could not be shut down")]
    Shutdown(#[source] ApiError),
    /// A vCPU has stopped with an error.
    #[error("vCPU {index} cannot continue: {reason}")]
    VcpuStopped {
        /// Index of the vCPU.
        index: u32,
        /// The reason that KVM gave.
        reason: String,
    },
}

const API: u64 = 0;
const INBOX: u64 = 1;
const SIGNALS: u64 = 2;
const STARTER: u64 = 3;

fn watch(epoll: &Epoll, fd: i32, token: u64) -> Result<(), RunError> {
    epoll
        .ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, token))
        .map_err(RunError::Loop)
}

/// Runs the VMM until it is told to end, the guest ends, or nothing is left to do.
///
/// # Errors
/// [`RunError`]; the VM, if there was one, is gone.
pub fn run(options: VmmOptions) -> Result<ExitReason, RunError> {
    let result = run_to_end(options);
    // Restores state owned by threads that are not joined, such as the modes of terminals.
    panicking::put_back_at_end();
    result
}

fn run_to_end(options: VmmOptions) -> Result<ExitReason, RunError> {
    events::emit("vmm", "starting", &[]);
    let signals = Signals::new().map_err(RunError::Loop)?;
    let host = Host::open()?;
    let api_path = match &options.api_socket {
        Some(ApiSocket::Path(path)) => Some(path.clone()),
        _ => None,
    };
    let metrics_path = options.metrics;
    let beside = |path: PathBuf| match &options.successor {
        Some(successor) => successor.beside(&path),
        None => path,
    };
    let api_socket = options.api_socket.map(|socket| match socket {
        ApiSocket::Path(path) => ApiSocket::Path(beside(path)),
        fd @ ApiSocket::Fd(_) => fd,
    });
    let listener = api_socket.map(ApiListener::bind).transpose()?;
    let api_file = noted(listener.as_ref());
    let metrics = metrics_path.clone().map(|path| ApiListener::bind(ApiSocket::Path(beside(path))));
    let metrics = metrics.transpose().map_err(RunError::Metrics)?;
    let metrics_file = noted(metrics.as_ref());
    let (inbox_sender, inbox) = Inbox::new().map_err(RunError::Loop)?;
    let mut vmm = Vmm::new(host, inbox_sender, options.no_shutdown, options.child_logging);
    vmm.api_path.clone_from(&api_path);
    let of_api = api_file.clone().zip(api_path);
    let of_metrics = metrics_file.clone().zip(metrics_path);
    let sockets = of_api.into_iter().chain(of_metrics);
    vmm.successor = options.successor.map(|args| Successor::new(args, sockets));
    let (handle, queue) = api::channel().map_err(RunError::Loop)?;
    vmm.hub = Arc::clone(queue.hub());
    vmm.watchers = queue.watchers().clone();
    let begun = vmm.begin(options.initial_vm, options.restore);
    let server = listener.map(|listener| ApiServer::start(listener, handle.clone())).transpose()?;
    let scraped = metrics.map(|listener| ApiServer::start_metrics(listener, handle.clone()));
    let scraped = scraped.transpose().map_err(RunError::Metrics)?;
    events::emit("vmm", "started", &[]);
    let result = match begun {
        Next::Continue => serve(&mut vmm, &queue, &inbox, signals),
        Next::Exit(reason) => Ok(reason),
        Next::Fail(error) => Err(error),
    };
    vmm.answer_last_askers(&queue);
    // Unanswered requests get an error while the server still sends responses.
    drop(queue);
    vmm.end_vm();
    // Each drop may wait for a thread; the log shows which if the process does not end.
    log::debug!("releasing the VM and what belongs to it");
    drop(vmm);
    log::debug!("the VM is released");
    for (server, file) in [(server, api_file), (scraped, metrics_file)] {
        let Some(server) = server else { continue };
        log::debug!("ending an HTTP server");
        server.stop();
        log::debug!("the HTTP server has ended");
        // From now on another VMM may have the path.
        if let Some(file) = file {
            panicking::forget_socket(&file.path());
        }
    }
    events::emit("vmm", "shutdown", &[]);
    events::flush();
    result
}

/// The file of a socket, which is removed also after a panic.
fn noted(listener: Option<&ApiListener>) -> Option<Arc<SocketFile>> {
    let file = listener.and_then(ApiListener::file)?;
    panicking::note_socket(&file.path());
    Some(file)
}

impl Vmm {
    /// Starts what the command line asks for.
    fn begin(&mut self, boot: Option<VmConfig>, restore: Option<RestoreConfig>) -> Next {
        let booting = match boot.map(|config| self.create(Box::new(config))) {
            Some(Ok(())) => self.boot_for(None),
            Some(Err(error)) => Next::Fail(RunError::Start(error)),
            None => Next::Continue,
        };
        booting.and_then(|| restore.map_or(Next::Continue, |config| self.restore_for(config, None)))
    }
}

fn serve(
    vmm: &mut Vmm,
    queue: &api::ApiQueue,
    inbox: &Inbox,
    mut signals: Signals,
) -> Result<ExitReason, RunError> {
    let epoll = Epoll::new().map_err(RunError::Loop)?;
    watch(&epoll, queue.event().as_raw_fd(), API)?;
    watch(&epoll, inbox.event().as_raw_fd(), INBOX)?;
    watch(&epoll, signals.as_raw_fd(), SIGNALS)?;
    let mut starter = vmm.starter().map_err(RunError::Loop)?;
    if let Some(starter) = &starter {
        watch(&epoll, starter.as_raw_fd(), STARTER)?;
    }
    let mut ready = [EpollEvent::default(); 4];
    loop {
        match epoll.wait(timeout_ms(vmm), &mut ready) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(RunError::Loop(error)),
        }
        // All that have come, as those that come together count as one.
        let mut is_told_to_end = false;
        while let Some(signal) = signals.next() {
            match signal {
                Signal::Resized => vmm.terminal_resized(),
                Signal::End => is_told_to_end = true,
            }
        }
        if is_told_to_end {
            match vmm.end_signal() {
                Next::Continue => {}
                Next::Exit(reason) => return Ok(reason),
                Next::Fail(error) => return Err(error),
            }
        }
        inbox.clear();
        while let Some(message) = inbox.take() {
            match vmm.message(message) {
                Next::Continue => {}
                Next::Exit(reason) => return Ok(reason),
                Next::Fail(error) => return Err(error),
            }
        }
        match vmm.call_deferred() {
            Next::Continue => {}
            Next::Exit(reason) => return Ok(reason),
            Next::Fail(error) => return Err(error),
        }
        queue.clear();
        while let Some(call) = queue.take() {
            match vmm.call(call) {
                Next::Continue => {}
                Next::Exit(reason) => return Ok(reason),
                Next::Fail(error) => return Err(error),
            }
        }
        if let Some(watched) = &starter {
            match vmm.look_at_starter() {
                Next::Continue => {}
                Next::Exit(reason) => return Ok(reason),
                Next::Fail(error) => return Err(error),
            }
            // Its socket is readable for good when it has ended.
            if !vmm.awaits_starter() {
                epoll
                    .ctl(ControlOperation::Delete, watched.as_raw_fd(), EpollEvent::default())
                    .map_err(RunError::Loop)?;
                starter = None;
            }
        }
        // A reset that came too soon may be due now.
        match vmm.act_on_guest() {
            Next::Continue => {}
            Next::Exit(reason) => return Ok(reason),
            Next::Fail(error) => return Err(error),
        }
        vmm.look_for_room();
        vmm.repeat_unread_events();
        if let Some((until, reason)) = vmm.exit_due()
            && until <= Instant::now()
        {
            return Ok(reason);
        }
        match vmm.end_if_too_late() {
            Next::Continue => {}
            Next::Exit(reason) => return Ok(reason),
            Next::Fail(error) => return Err(error),
        }
    }
}

/// Timeout of the event loop's poll: until the last client has had its time, the next check for free space,
/// an event that the guest has not read, a reset that came too soon, or the end of the process at the latest; else infinite.
fn timeout_ms(vmm: &Vmm) -> i32 {
    let pending_exit = vmm.exit_due().map(|(until, _)| until);
    let ends = pending_exit.into_iter().chain(vmm.ends_at_latest(Instant::now()));
    let until = ends.chain(vmm.deferred.until()).chain(vmm.looks_for_room_at());
    let until = until.chain(vmm.repeats_events_at()).chain(vmm.resets_at()).min();
    until.map_or(-1, |until| {
        let left = until.saturating_duration_since(Instant::now());
        i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX)
    })
}
