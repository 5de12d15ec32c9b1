// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Helpers to run a test in a process of its own.
//!
//! Owns how a test runs itself again. Must never change anything in the process that runs the others.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::process::Command;

/// Of threads that are made with the usual stack: so much that a limit keeps the next one from being made.
const STACK_BYTES: u64 = 1 << 30;

/// This program as it runs the test of this path alone, with its threads' stacks as large as
/// [`no_more_threads`] needs them.
pub fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--nocapture", "--exact", test]);
    command.env("RUST_MIN_STACK", STACK_BYTES.to_string());
    command
}

/// From now on the host gives this process, which [`again`] has made, no thread.
pub fn no_more_threads() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size_kib = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let size_kib: u64 = size_kib.trim().trim_end_matches(" kB").parse().unwrap();
    let most_bytes = size_kib * 1024 + STACK_BYTES / 4;
    let limit = libc::rlimit { rlim_cur: most_bytes, rlim_max: most_bytes };
    // SAFETY: one rlimit is read, which lives during the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
    assert!(stoppable_thread::spawn("one-more", || {}).is_err());
}
