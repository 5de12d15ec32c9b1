// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Start options of the VMM, and the reason for its end.
//!
//! Owns plain values only; it must never do anything.

use std::fs::File;
use std::sync::Arc;

use crate::api::ApiSocket;
use crate::config::{RestoreConfig, VmConfig};

/// What happens at a system call that the process should not make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SeccompMode {
    /// The process is ended (`--seccomp true`).
    #[default]
    Enforce,
    /// It is let through (`--seccomp false`).
    Off,
    /// It is let through and logged (`--seccomp log`).
    Log,
    /// It fails with EPERM (`--seccomp errno`).
    Errno,
}

impl SeccompMode {
    /// Its text on a command line: `true`, `false`, `log` or `errno`. Another one is the strictest.
    pub fn parse(text: &str) -> Self {
        match text {
            "false" => Self::Off,
            "log" => Self::Log,
            "errno" => Self::Errno,
            _ => Self::Enforce,
        }
    }

    /// What [`Self::parse`] takes.
    pub fn text(self) -> &'static str {
        match self {
            Self::Enforce => "true",
            Self::Off => "false",
            Self::Log => "log",
            Self::Errno => "errno",
        }
    }
}

/// What a process that the VMM starts gets of it.
#[derive(Clone, Debug, Default)]
pub struct ChildLogging {
    /// `-v`, counted.
    pub verbosity: u8,
    /// `--log-format`.
    pub log_format: Option<String>,
    /// Where its log goes, if not to standard error.
    pub log: Option<Arc<File>>,
}

/// What a VMM is started with.
#[derive(Debug, Default)]
pub struct VmmOptions {
    /// Where the API listens, if it does.
    pub api_socket: Option<ApiSocket>,
    /// A (complete) VM to create and boot at once.
    pub initial_vm: Option<VmConfig>,
    /// A VM to restore at once, instead.
    pub restore: Option<RestoreConfig>,
    /// Sandbox of system calls.
    pub seccomp: SeccompMode,
    /// Stay when the guest shuts down (`--no-shutdown`).
    pub no_shutdown: bool,
    /// For processes that it starts.
    pub child_logging: ChildLogging,
}

/// Why the VMM ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitReason {
    /// The guest shut down.
    GuestShutdown,
    /// `vmm.shutdown` was asked for.
    ApiShutdown,
    /// A signal that ends it: SIGTERM, SIGINT, SIGHUP or SIGQUIT.
    Signal,
    /// The VM was sent to another VMM.
    MigratedAway,
}
