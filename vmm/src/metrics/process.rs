// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the kernel says of this process and its threads.
//!
//! Owns the open file of `/proc`. It must never open anything for a scrape, as the threads that serve one may not.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::{SystemTime, UNIX_EPOCH};

use super::families::Family;
use super::text::{Page, Value};

/// Longest line of `/proc/self/stat`: 52 numbers and a name.
const STAT_BYTES: usize = 2048;

/// Size of a page of the host, the unit of the resident memory there.
const PAGE_BYTES: u64 = 4096;

/// This process.
#[derive(Debug)]
pub struct Process {
    /// `/proc/self/stat`; `None` where there is no `/proc`.
    stat: Option<File>,
    /// When it started, about.
    start_ms: u64,
}

/// Resident pages and number of threads, of a line of `/proc/self/stat`.
fn resident_and_threads(line: &str) -> Option<(u64, u64)> {
    // The name of the program is in parentheses, and may have any characters.
    let (_, numbers) = line.rsplit_once(')')?;
    let field = |number: usize| numbers.split_ascii_whitespace().nth(number - 3)?.parse().ok();
    Some((field(24)?, field(20)?))
}

/// CPU time by a clock, in nanoseconds; `None` if the clock is gone, as that of a thread that has ended.
fn clock_ns(clock: libc::clockid_t) -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, which lives across the call.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    let (seconds, nanos) = (u64::try_from(time.tv_sec).ok()?, u64::try_from(time.tv_nsec).ok()?);
    (result == 0).then(|| seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// CPU time of a thread of this process in nanoseconds, by the kernel's id of it; `None` if it has ended.
pub fn thread_cpu_ns(thread: i32) -> Option<u64> {
    /// In the number of a clock: of a thread, and the time for which it was on a CPU (clock_getcpuclockid(3)).
    const OF_THREAD: libc::clockid_t = 0b110;
    if thread > 0 { clock_ns((!thread << 3) | OF_THREAD) } else { None }
}

impl Process {
    /// This process, which has just started.
    pub fn new() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let start_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        Self { stat: File::open("/proc/self/stat").ok(), start_ms }
    }

    fn line(&self) -> Option<String> {
        let mut line = vec![0; STAT_BYTES];
        let len = self.stat.as_ref()?.read_at(&mut line, 0).ok()?;
        line.truncate(len);
        Some(String::from_utf8_lossy(&line).into_owned())
    }

    /// Adds its metrics.
    pub fn add_to(&self, page: &mut Page) {
        page.add(Family::ProcessStart, &[], Value::millis(self.start_ms));
        let cpu = clock_ns(libc::CLOCK_PROCESS_CPUTIME_ID);
        page.add_some(Family::ProcessCpu, &[], cpu.map(Value::nanos));
        let known = self.line().as_deref().and_then(resident_and_threads);
        if let Some((pages, threads)) = known {
            let resident_bytes = pages.saturating_mul(PAGE_BYTES);
            page.add(Family::ProcessResident, &[], Value::whole(resident_bytes));
            page.add(Family::ProcessThreads, &[], Value::whole(threads));
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn a_name_may_look_like_the_end_of_a_name() {
        let numbers: Vec<_> = (3..53).map(|number| number.to_string()).collect();
        let line = format!("7 (a) 1 2 (b)) {}", numbers.join(" "));
        assert_eq!(resident_and_threads(&line), Some((24, 20)));
        assert_eq!(resident_and_threads("7 (a) 1 2"), None);
        assert_eq!(resident_and_threads(""), None);
    }

    #[test]
    fn this_process_has_memory_and_threads() {
        let (pages, threads) = resident_and_threads(&Process::new().line().unwrap()).unwrap();
        assert!(pages > 100 && threads > 0, "{pages} {threads}");
    }

    #[test]
    fn a_thread_has_cpu_time_until_it_ends() {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = stoppable_thread::spawn("vcpu0", move || {
            let begun = clock_ns(libc::CLOCK_THREAD_CPUTIME_ID).unwrap();
            while clock_ns(libc::CLOCK_THREAD_CPUTIME_ID).unwrap() < begun + 2_000_000 {}
            // SAFETY: gettid has no preconditions.
            tell.send(unsafe { libc::gettid() }).unwrap();
            ended.recv().unwrap_err();
        });
        let id = told.recv().unwrap();
        let used = thread_cpu_ns(id).unwrap();
        assert!(used >= 2_000_000 && Some(used) <= clock_ns(libc::CLOCK_PROCESS_CPUTIME_ID));
        drop(end);
        thread.unwrap().join().unwrap();
        // Of another process, and of none.
        assert_eq!((thread_cpu_ns(1), thread_cpu_ns(0), thread_cpu_ns(-5)), (None, None, None));
    }
}
