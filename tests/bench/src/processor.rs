// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Processor time of a process and of its vCPU threads, from `/proc`.
//!
//! Owns the parsing, and a thread that follows vCPU threads until they end. Must never depend on the VMM beyond the
//! names of its threads.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval at which the time of vCPU threads is read: what they use after the last reading is not known.
const POLL: Duration = Duration::from_millis(1);
/// Unit of the times in `/proc/PID/stat`, the same on all of Linux' architectures (`USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

/// What a process has used so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// User and system time of all of its threads, those that have ended included.
    pub time: Duration,
    /// The part of it that vCPUs were in the guest for, as the kernel's ticks find them.
    pub guest: Duration,
    /// True if it has ended and was not waited for.
    pub is_zombie: bool,
}

impl Used {
    /// That of a process; `None` if there is no such process.
    pub fn of(pid: u32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(stat: &str) -> Option<Self> {
        // The name in parentheses can hold anything.
        let fields: Vec<&str> =
            stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace().collect();
        let ticks = |index: usize| fields.get(index)?.parse::<u32>().ok();
        let time = TICK * ticks(11)?.checked_add(ticks(12)?)?;
        let guest = TICK * ticks(40).unwrap_or(0);
        Some(Self { time, guest, is_zombie: *fields.first()? == "Z" })
    }
}

/// Follows the vCPU threads of a process until it is asked for the time that they used meanwhile.
pub struct VcpuTime {
    /// True if there was a vCPU thread at the beginning.
    pub began_with_some: bool,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl VcpuTime {
    /// Starts to follow those that are there and those that come.
    pub fn follow(pid: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let before = vcpus(pid);
        let began_with_some = !before.is_empty();
        let thread = std::thread::spawn(move || {
            let mut latest = before.clone();
            while !stopped.load(Ordering::Acquire) {
                std::thread::sleep(POLL);
                latest.extend(vcpus(pid));
            }
            let all = |times: &BTreeMap<u32, Duration>| times.values().sum::<Duration>();
            all(&latest).saturating_sub(all(&before))
        });
        Self { began_with_some, stop, thread }
    }

    /// Processor time since the beginning.
    pub fn used(self) -> Duration {
        self.stop.store(true, Ordering::Release);
        self.thread.join().unwrap_or_default()
    }
}

/// Time of each vCPU thread by its number; none if the process has ended.
fn vcpus(pid: u32) -> BTreeMap<u32, Duration> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return BTreeMap::new() };
    let of = |task: fs::DirEntry| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        // Those of this program, and those of QEMU.
        if !name.starts_with("vcpu") && !name.starts_with("CPU ") {
            return None;
        }
        let stat = fs::read_to_string(task.path().join("schedstat")).ok()?;
        let ns = stat.split_ascii_whitespace().next()?.parse().ok()?;
        Some((task.file_name().to_str()?.parse().ok()?, Duration::from_nanos(ns)))
    };
    tasks.filter_map(Result::ok).filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_process_come_after_its_name() {
        let stat = "17 (a ) b) Z 1 2 3 4 5 6 7 8 9 10 123 45 0 0 20 0 1 0 99 \
                    20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 77 41";
        let (time, guest) = (Duration::from_millis(1680), Duration::from_millis(770));
        let used = Used { time, guest, is_zombie: true };
        assert_eq!(Used::parse(stat), Some(used));
        assert_eq!(Used::parse("17 (a) S 1"), None);
    }

    #[test]
    fn only_vcpu_threads_are_counted_until_they_end() -> std::io::Result<()> {
        let pid = std::process::id();
        let follow = VcpuTime::follow(pid);
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let (ended, has_ended) = std::sync::mpsc::channel::<()>();
        let other = named("other").spawn(move || has_ended.recv())?;
        let wanted = Duration::from_millis(30);
        let vcpu = named("vcpu7").spawn(move || {
            let mine = || vcpus(pid).into_values().collect::<Vec<_>>();
            while mine().iter().all(|time| *time < wanted) {}
            mine().len()
        })?;
        assert_eq!(vcpu.join().ok(), Some(1));
        drop(ended);
        assert!(other.join().is_ok_and(|received| received.is_err()));
        assert!(follow.used() >= wanted / 2);
        Ok(())
    }
}
