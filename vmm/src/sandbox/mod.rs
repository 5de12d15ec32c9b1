// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The sandbox of the process: what each thread may ask of the kernel, and what the process as a whole gives up.
//!
//! Owns the order: `main` gets the filter of all that the process may ever call while it is the only thread, so every
//! thread inherits it; each thread adds that of its own kind before its body, by the start hook of `stoppable-thread`.
//! Filters add up, and the strictest answer counts. Capabilities are dropped at the same two places, just before. Paths are those of a VM: the threads that build it and `main` are
//! confined to them by `landlock`, if its configuration says so. It must never know what a thread does beyond its entry
//! in the table.
//!
//! | module | owns |
//! | --- | --- |
//! | `requests` | requests of ioctl(2) by name |
//! | `calls` | system calls in groups, with what is checked of them and why they are there |
//! | `table` | the kinds of threads, their groups, and which start which |
//! | `seccomp` | the table as filters |
//! | `capabilities` | what is kept of what root may do, and by which threads |
//! | `report` | the end of a process that makes another call |
//! | `names` | names of system calls |
//! | `landlock` | paths: a set of them for a thread, and which sets are in force |
//! | `paths` | which paths a VM needs, by its configuration |

mod calls;
mod capabilities;
pub mod landlock;
mod names;
mod paths;
#[cfg(test)]
mod reference;
mod report;
mod requests;
mod seccomp;
mod table;

#[cfg(test)]
mod capabilities_tests;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::OnceLock;

use stoppable_thread::Kinds;
use thiserror::Error;

pub use paths::PathRule;
pub use report::STOPPED;
pub use seccomp::FilterError;

use crate::options::SeccompMode;
use table::Kind;

/// Which `main` a process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Process {
    /// A VMM.
    Vmm,
    /// A page server.
    PageServer,
    /// The daemon that keeps memory ready.
    PrezeroPool,
}

impl Process {
    /// The kind of its first thread.
    fn kind(self) -> &'static str {
        match self {
            Self::Vmm => "main",
            Self::PageServer => "page-server",
            Self::PrezeroPool => "prezero-pool",
        }
    }
}

/// Why a process has no sandbox.
#[derive(Debug, Error)]
pub enum SandboxError {
    /// The handler of SIGSYS, no_new_privs, limits.
    #[error("the process cannot drop what it does not need")]
    Process(#[source] io::Error),
    /// A set of capabilities that is smaller.
    #[error("capabilities cannot be dropped (--seccomp false runs without a sandbox)")]
    Capabilities(#[source] io::Error),
    /// The filter.
    #[error("system calls cannot be sandboxed (--seccomp false runs without a sandbox)")]
    Filter(#[source] FilterError),
}

/// How the process was started; not set outside of programs.
static MODE: OnceLock<SeccompMode> = OnceLock::new();

/// How the sandbox of this process treats a call that is not in its table.
pub fn mode() -> SeccompMode {
    MODE.get().copied().unwrap_or(SeccompMode::Off)
}

fn check(result: libc::c_int) -> Result<(), SandboxError> {
    if result == 0 { Ok(()) } else { Err(SandboxError::Process(io::Error::last_os_error())) }
}

/// Neither this process nor one that it starts gains rights by what it executes.
fn no_new_privileges() -> Result<(), SandboxError> {
    // SAFETY: takes numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })
}

/// Guest memory and secrets are in no dump, and another process of the same user cannot look at them. Neither this
/// process nor one that it starts can raise the limit again, unless it has `CAP_SYS_RESOURCE`.
fn no_dumps() -> Result<(), SandboxError> {
    let limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: takes numbers, and a structure that lives during the call.
    unsafe {
        check(libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0))?;
        check(libc::setrlimit(libc::RLIMIT_CORE, &raw const limit))
    }
}

/// Begins the sandbox of a process, on its only thread.
///
/// # Errors
/// [`SandboxError`]; the process must not go on.
pub fn begin(process: Process, mode: SeccompMode) -> Result<(), SandboxError> {
    no_new_privileges()?;
    if mode == SeccompMode::Off || MODE.set(mode).is_err() {
        return Ok(());
    }
    no_dumps()?;
    if let Some((index, _)) = Kind::of_thread(process.kind()) {
        let bounding = process != Process::PageServer;
        capabilities::limit_process(index, bounding).map_err(SandboxError::Capabilities)?;
    }
    report::end_with_line().map_err(SandboxError::Process)?;
    // Set by this function alone, once.
    let _ = stoppable_thread::set_start_hook(confine);
    confine_as(process.kind(), None)
}

fn confine_as(name: &str, starter: Option<&str>) -> Result<(), SandboxError> {
    let Some((index, kind)) = Kind::of_thread(name) else {
        return Err(SandboxError::Filter(FilterError::UnknownKind(name.to_owned())));
    };
    report::set_kind(kind.name);
    // A thread has the filters and capabilities of the one that started it.
    let inherited = starter.and_then(Kind::of_thread).is_some_and(|(other, _)| other == index);
    if inherited {
        return Ok(());
    }
    // The kind's own filter may not allow it any more. The process has done it for its first thread.
    if !kind.is_first() {
        capabilities::limit_thread(index).map_err(SandboxError::Capabilities)?;
    }
    if kind.adds_no_filter() {
        return Ok(());
    }
    seccomp::install(index, mode()).map_err(SandboxError::Filter)
}

/// The start hook.
fn confine(kinds: Kinds<'_>) {
    let name = kinds.own;
    if let Err(error) = confine_as(name, kinds.starter) {
        log::error!(
            "thread {name} is without its sandbox, and the process ends: {}",
            error_text::chain(&error)
        );
        log::logger().flush();
        // SAFETY: ends the process without running anything else of it.
        unsafe { libc::_exit(STOPPED.into()) }
    }
}
