// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Helpers to run a test in a process of its own.
//!
//! Owns how a test runs itself again. Must never change anything in the process that runs the others.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::process::Command;

/// Stack size of threads started by default: so large that a limit prevents another one.
const STACK_BYTES: u64 = 1 << 30;

/// A command that runs the test of this path alone in a new process, with the stack size that
/// [`no_more_threads`] needs.
pub fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--nocapture", "--exact", test]);
    command.env("RUST_MIN_STACK", STACK_BYTES.to_string());
    command
}

/// Makes starting a thread fail in this process, which [`again`] has started.
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
