// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! System calls and sleeps of two processes, as the kernel counts them.
//!
//! Owns the counters of their threads. A sleep is a voluntary context switch, and each is ended by one wake-up.
//! Sleeps take no right to be read; system calls are counted by a tracepoint, without which they are left out.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

use crate::trace;

/// Length of the kernel's structure in the version that is used here.
const ATTRIBUTE_BYTES: u64 = 128;
const TYPE_TRACEPOINT: u64 = 2;
/// Threads that a counted one starts are counted.
const INHERIT: u64 = 1 << 1;
/// PERF_FLAG_FD_CLOEXEC.
const CLOSE_ON_EXEC: libc::c_ulong = 1 << 3;

/// What both processes have done, each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub sleeps: [u64; 2],
    /// Since the counters were made; `None` where there are none.
    pub calls: Option<[u64; 2]>,
}

/// The identifier of the tracepoint of system calls.
///
/// # Errors
/// Why this machine does not let it be used.
pub fn tracepoint() -> io::Result<u64> {
    trace::event_id("raw_syscalls/sys_enter")
}

/// Counters of the threads of two processes.
pub struct Counters {
    pids: [u32; 2],
    calls: Option<[Vec<File>; 2]>,
}

impl Counters {
    /// Counts from now on, system calls if there is a tracepoint for them.
    pub fn start(pids: [u32; 2], tracepoint: Option<u64>) -> io::Result<Self> {
        let calls = match tracepoint {
            Some(id) => Some([of_threads(pids[0], id)?, of_threads(pids[1], id)?]),
            None => None,
        };
        Ok(Self { pids, calls })
    }

    pub fn read(&self) -> io::Result<Counts> {
        let sleeps = [sleeps(self.pids[0])?, sleeps(self.pids[1])?];
        let calls = match &self.calls {
            Some([one, other]) => Some([sum(one)?, sum(other)?]),
            None => None,
        };
        Ok(Counts { sleeps, calls })
    }
}

fn threads(pid: u32) -> io::Result<impl Iterator<Item = u32>> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))?;
    Ok(tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok()))
}

fn of_threads(pid: u32, tracepoint: u64) -> io::Result<Vec<File>> {
    let mut counters = Vec::new();
    for thread in threads(pid)? {
        match open(thread, tracepoint) {
            // It has ended meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            counter => counters.push(counter?),
        }
    }
    Ok(counters)
}

fn open(thread: u32, tracepoint: u64) -> io::Result<File> {
    // Type and length, the tracepoint, and the flags; all else is zero.
    let mut attribute = [0_u64; 16];
    attribute[0] = TYPE_TRACEPOINT | ATTRIBUTE_BYTES << 32;
    attribute[1] = tracepoint;
    attribute[5] = INHERIT;
    // SAFETY: the structure has the length that it says, and is only read.
    let fd = unsafe {
        libc::syscall(libc::SYS_perf_event_open, attribute.as_ptr(), thread, -1, -1, CLOSE_ON_EXEC)
    };
    match RawFd::try_from(fd) {
        // SAFETY: a new descriptor, which nothing else owns.
        Ok(fd @ 0..) => Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) })),
        _ => Err(io::Error::last_os_error()),
    }
}

fn sum(counters: &[File]) -> io::Result<u64> {
    let mut sum = 0_u64;
    for mut counter in counters {
        let mut value = [0; 8];
        counter.read_exact(&mut value)?;
        sum = sum.saturating_add(u64::from_ne_bytes(value));
    }
    Ok(sum)
}

/// Sleeps of all threads that a process has.
fn sleeps(pid: u32) -> io::Result<u64> {
    let of = |thread| {
        let status = fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).ok()?;
        parse(&status)
    };
    Ok(threads(pid)?.filter_map(of).fold(0, u64::saturating_add))
}

fn parse(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeps_are_those_that_were_voluntary() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t4\n";
        assert_eq!(parse(status), Some(17));
        assert_eq!(parse("Name:\tx\n"), None);
    }

    #[test]
    fn what_this_process_does_is_counted() {
        let pid = std::process::id();
        let tracepoint = tracepoint().ok();
        let Some(counters) = test_skip::permitted(Counters::start([pid, pid], tracepoint)) else {
            return;
        };
        let twenty_more = || {
            let before = counters.read().expect("this process");
            for _ in 0..20 {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let after = counters.read().expect("this process");
            let calls = before.calls.zip(after.calls);
            after.sleeps[0] >= before.sleeps[0] + 20
                && calls.is_none_or(|(before, after)| after[1] >= before[1] + 20)
        };
        // The sleeps of a thread of another test leave the sum when it ends.
        assert!((0..50).any(|_| twenty_more()), "what this process does is not counted");
    }
}
