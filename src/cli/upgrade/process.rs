// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The end of a process, waited for by its pidfd.
//!
//! Owns nothing: a pidfd stays that of its process, however soon the number is given to another one. Must never reap a child,
//! so that until its parent does its number is its own.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::process::Child;
use std::time::{Duration, Instant};

/// Opens the pidfd of a process.
///
/// # Errors
/// There is none, or no descriptor left.
pub fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0_u32) };
    match i32::try_from(fd) {
        // SAFETY: the kernel has just made the descriptor for this process; nothing else owns it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Waits for the end of a process; whether it has ended.
pub fn has_ended(pidfd: impl AsFd, limit: Duration) -> bool {
    let fd = pidfd.as_fd().as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let ms = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one pollfd is written, which lives during the call.
    unsafe { libc::poll(&raw mut poll, 1, ms) == 1 }
}

/// The same of a child, which stays to be waited for.
pub fn child_has_ended(child: &Child, until: Instant) -> bool {
    let left = until.saturating_duration_since(Instant::now());
    let pidfd = i32::try_from(child.id()).map_err(io::Error::other).and_then(open);
    pidfd.is_ok_and(|pidfd| has_ended(pidfd, left))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_end_of_a_child_is_seen_and_left_to_its_parent() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        assert!(!child_has_ended(&child, Instant::now()));
        drop(child.stdin.take());
        assert!(child_has_ended(&child, Instant::now() + Duration::from_mins(1)));
        assert!(child.wait().unwrap().success());
    }
}
