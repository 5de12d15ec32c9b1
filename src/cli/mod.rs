// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The command lines of the binaries.
//!
//! - [`launch`]: `cloud-hypervisor`, from arguments to what the VMM is started with.
//! - [`remote`]: `ch-remote`, from arguments to one request and its output.
//! - [`chart`]: the report of a migration as a picture.
//! - [`exit`]: exit codes, and how an error is printed.
//! - [`interrupt`]: what is said when SIGINT comes.
//! - [`logger`]: where log messages go.
//! - [`log_format`]: how a log line is put together.
//! - [`manual`]: the keys of an option as `--help` shows them.
//! - [`pool`]: `prezero-pool`, from arguments to the daemon.

pub mod chart;
pub mod exit;
pub mod interrupt;
pub mod launch;
pub mod log_format;
pub mod logger;
pub mod manual;
pub mod pool;
pub mod remote;
pub mod watch;

/// Prints lines on stdout. Its reader may have closed it; the exit code still tells.
pub fn print_line(line: &str) {
    use std::io::Write;
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}
