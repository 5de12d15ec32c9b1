// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Start options of the VMM, and the reason for its end.
//!
//! Owns plain values only; it must never do anything.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use crate::api::ApiSocket;
use crate::api::successor::SuccessorArgs;
use crate::config::{RestoreConfig, VmConfig};

/// What happens on a system call that the filter does not allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SeccompMode {
    /// The process is killed (`--seccomp true`).
    #[default]
    Enforce,
    /// The call is allowed (`--seccomp false`).
    Off,
    /// The call is allowed and logged (`--seccomp log`).
    Log,
    /// The call fails with EPERM (`--seccomp errno`).
    Errno,
}

impl SeccompMode {
    /// Parses `true`, `false`, `log` or `errno`; any other text is the strictest mode.
    pub fn parse(text: &str) -> Self {
        match text {
            "false" => Self::Off,
            "log" => Self::Log,
            "errno" => Self::Errno,
            _ => Self::Enforce,
        }
    }

    /// The text that [`Self::parse`] accepts.
    pub fn text(self) -> &'static str {
        match self {
            Self::Enforce => "true",
            Self::Off => "false",
            Self::Log => "log",
            Self::Errno => "errno",
        }
    }
}

/// Logging configuration for a process that the VMM starts.
#[derive(Clone, Debug, Default)]
pub struct ChildLogging {
    /// Number of `-v` options.
    pub verbosity: u8,
    /// Value of `--log-format`.
    pub log_format: Option<String>,
    /// The log file, if not standard error.
    pub log: Option<Arc<File>>,
}

/// Options of a VMM process.
#[derive(Debug, Default)]
pub struct VmmOptions {
    /// The API socket, if there is one.
    pub api_socket: Option<ApiSocket>,
    /// Path of the socket of metrics, if there is one.
    pub metrics: Option<PathBuf>,
    /// A complete configuration of a VM to create and boot at once.
    pub initial_vm: Option<VmConfig>,
    /// A VM to restore at once instead.
    pub restore: Option<RestoreConfig>,
    /// Mode of the system call filter.
    pub seccomp: SeccompMode,
    /// Whether the process stays when the guest shuts down (`--no-shutdown`).
    pub no_shutdown: bool,
    /// Logging configuration for child processes.
    pub child_logging: ChildLogging,
    /// Set if the process is to take the place of another one (`--successor`).
    pub successor: Option<SuccessorArgs>,
}

/// Why the process ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitReason {
    /// The guest shut down.
    GuestShutdown,
    /// A `vmm.shutdown` request.
    ApiShutdown,
    /// SIGTERM, SIGINT, SIGHUP or SIGQUIT.
    Signal,
    /// The VM was migrated to another VMM.
    MigratedAway,
    /// It was to take the place of another process, and what started it for that has ended first.
    NotNeeded,
}
