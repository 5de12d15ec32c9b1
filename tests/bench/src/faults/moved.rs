// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest of which every vCPU touches its pages at random while they are still at the source.
//!
//! Owns the guest's size and pace, and the window in which pages and processor time are counted: its vCPUs do hardly
//! anything but wait for pages then, and the kernel counts their system calls and sleeps if that is asked for. Pages are counted in the file of the guest's memory, waits by the guest's own
//! clock. Must never rely on the figures of the VMM for what is compared.

use std::error::Error;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_reader::{Guest, Histogram, Patience};

use super::PAGE_BYTES;
use super::counts::{Counters, Counts};
use crate::pair::ours::Ours;
use crate::pair::{PATIENCE, Pair as _, Programs, Workload, float, prepare};
use crate::postcopy::guest::CUT_US;
use crate::process;
use crate::processor::Used;

/// What the vCPUs touch, in pages: those of `mem=` below.
const PAGES: u64 = 128 << 20 >> 12;
/// They go as fast as they can.
const WORKLOAD: Workload = Workload {
    name: "random-writing",
    cmdline: "workload=random-write mem=128M",
    then: "reset=1",
    visits: true,
};
/// The background, bytes per second. So little that vCPUs wait for nearly all pages, and enough that the end comes
/// soon when they have all of theirs.
const BACKGROUND_BYTES_PER_S: u64 = 2 << 20;
/// The window, in hundredths of the pages: from when all vCPUs run until as many accesses still meet a missing page.
const WINDOW_PERCENT: [u64; 2] = [5, 35];
/// So many vCPUs keep each other from starting.
const CROWD: u32 = 64;
/// With this vCPU 0, which starts the others one after the other, has half a processor among them.
const FIRST: libc::c_int = -19;
/// Time limit for so many vCPUs to start, one after the other, and to fill their pages.
const START_PATIENCE: Patience = Patience::millis(180_000);
/// Longest wait for its thread.
const FIRST_WITHIN: Duration = Duration::from_secs(10);
/// Distance between two looks at the file.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// What was measured.
#[derive(Clone, Copy, Debug)]
pub struct Moved {
    pub pages_per_s: f64,
    /// Of both processes without their time in the guest, for a page.
    pub processor_us: f64,
    pub median_us: f64,
    pub p99_us: f64,
    /// For a page, at the source and at the destination.
    pub sleeps: [f64; 2],
    /// The same, where they were counted.
    pub calls: Option<[f64; 2]>,
}

/// What the kernel is to count besides.
#[derive(Clone, Copy, Debug)]
pub enum Counted {
    /// Nothing: counting costs time.
    Nothing,
    /// Sleeps, and system calls by this tracepoint if there is one.
    Calls(Option<u64>),
}

/// Moves a guest with the vCPUs that `programs` says.
pub fn measure(
    programs: &Programs,
    fault_source: &str,
    counted: Counted,
) -> Result<Moved, Box<dyn Error>> {
    let receive = format!(",memory_mode=postcopy,fault_source={fault_source}");
    let send = format!(",memory_mode=postcopy,bandwidth={BACKGROUND_BYTES_PER_S}");
    let mut pair = Ours::start_local(programs, WORKLOAD.cmdline, &receive, &send)?;
    let is_crowd = programs.vcpus >= CROWD;
    let first = if is_crowd { first_vcpu(pair.source_pid()) } else { None };
    set_nice(first, FIRST);
    Guest::attach_within(pair.source_pid(), PATIENCE)?.wait_until(
        "all vCPUs at work",
        START_PATIENCE,
        |status| status.stage == "running" && status.all_in("work"),
    )?;
    let source = prepare(pair.source_pid(), WORKLOAD)?.guest;
    set_nice(first, 0);
    let accesses = source.histogram()?;
    let pids = [pair.source_pid(), pair.destination_pid()];
    let over = AtomicBool::new(false);
    let window = thread::scope(|scope| {
        let watching = scope.spawn(|| window(pids, counted, &over));
        let migrated = pair.migrate().map_err(|error| error.to_string());
        over.store(true, Ordering::Relaxed);
        let window = watching.join().map_err(|_| "the watching thread panicked".to_owned())?;
        migrated.and(window)
    })?;
    let destination = Guest::attach_within(pair.destination_pid(), PATIENCE)?;
    let after = destination.status()?;
    if !after.complete() || after.errors() > 0 {
        return Err(format!("the guest arrived with errors: {after:?}").into());
    }
    let waits = destination.histogram()?.since(&accesses);
    let each = |counts: [u64; 2]| counts.map(|count| float(count) / float(window.pages));
    Ok(Moved {
        sleeps: each(window.counts.sleeps),
        calls: window.counts.calls.map(each),
        pages_per_s: float(window.pages) / window.time.as_secs_f64(),
        processor_us: window.used.as_secs_f64() * 1e6 / float(window.pages),
        median_us: quantile_us(&waits, 0.5),
        p99_us: quantile_us(&waits, 0.99),
    })
}

/// The thread of vCPU 0, once it is there.
fn first_vcpu(pid: u32) -> Option<u32> {
    let begun = Instant::now();
    loop {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let is_first = |task: &fs::DirEntry| {
            let name = fs::read_to_string(task.path().join("comm"));
            name.is_ok_and(|name| name.trim_end() == "vcpu0")
        };
        match tasks.filter_map(Result::ok).find(is_first) {
            Some(task) => return task.file_name().to_str()?.parse().ok(),
            None if begun.elapsed() > FIRST_WITHIN => return None,
            None => thread::sleep(LOOK_EVERY),
        }
    }
}

/// As far as this process may: without, a guest of many vCPUs takes longer to start.
fn set_nice(thread: Option<u32>, nice: libc::c_int) {
    if let Some(thread) = thread {
        // SAFETY: changes how a thread is scheduled, and touches no memory.
        let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, nice) };
    }
}

fn quantile_us(waits: &Histogram, share: f64) -> f64 {
    float(waits.quantile_above_ns(CUT_US, share)) / 1e3
}

/// What has come between two looks.
#[derive(Clone, Copy, Debug)]
struct Window {
    pages: u64,
    time: Duration,
    /// Processor time outside of the guest.
    used: Duration,
    counts: Counts,
}

#[derive(Clone, Copy)]
struct Look {
    pages: u64,
    at: Instant,
    used: Duration,
    counts: Counts,
}

impl Look {
    fn at(ram: &File, pids: [u32; 2], counters: Option<&Counters>) -> Result<Self, String> {
        let counts = counters.map(Counters::read).transpose().map_err(|error| error.to_string())?;
        let pages = ram.metadata().map_err(|error| error.to_string())?.blocks() * 512;
        let mut used = Duration::ZERO;
        for pid in pids {
            let of = Used::of(pid).ok_or("a VMM ended while vCPUs waited for pages")?;
            used += of.time.saturating_sub(of.guest);
        }
        let (pages, at) = (pages / PAGE_BYTES as u64, Instant::now());
        Ok(Self { pages, at, used, counts: counts.unwrap_or_default() })
    }
}

/// Watches the memory of the destination until the window is over.
fn window(pids: [u32; 2], counted: Counted, over: &AtomicBool) -> Result<Window, String> {
    let [first, last] = WINDOW_PERCENT.map(|percent| PAGES * percent / 100);
    let (mut ram, mut counters) = (None, None);
    let mut begin: Option<Look> = None;
    while !over.load(Ordering::Relaxed) {
        thread::sleep(LOOK_EVERY);
        if ram.is_none() {
            ram = process::guest_ram(pids[1]);
        }
        let Some(ram) = &ram else { continue };
        let pages = ram.metadata().map_err(|error| error.to_string())?.blocks() * 512;
        let pages = pages / PAGE_BYTES as u64;
        match begin {
            None if pages >= first => {
                if let Counted::Calls(tracepoint) = counted {
                    let started = Counters::start(pids, tracepoint);
                    counters = Some(started.map_err(|error| error.to_string())?);
                }
                begin = Some(Look::at(ram, pids, counters.as_ref())?);
            }
            Some(begin) if pages >= last => {
                return between(begin, Look::at(ram, pids, counters.as_ref())?);
            }
            _ => {}
        }
    }
    Err("the pages came too fast to be watched".to_owned())
}

fn between(begin: Look, end: Look) -> Result<Window, String> {
    let pages = end.pages.saturating_sub(begin.pages);
    // A quarter of the window at least, or what comes at one moment would be taken for a rate.
    if pages < PAGES / 8 {
        return Err(format!("only {pages} pages came between two looks"));
    }
    let used = end.used.saturating_sub(begin.used);
    let counts = Counts {
        sleeps: less(end.counts.sleeps, begin.counts.sleeps),
        calls: end.counts.calls.zip(begin.counts.calls).map(|(end, begin)| less(end, begin)),
    };
    Ok(Window { pages, time: end.at.duration_since(begin.at), used, counts })
}

/// How much more each has at the end.
fn less(end: [u64; 2], begin: [u64; 2]) -> [u64; 2] {
    [end[0].saturating_sub(begin[0]), end[1].saturating_sub(begin[1])]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(pages: u64, at: Instant, used_ms: u64) -> Look {
        let counts = Counts { sleeps: [pages, 2 * pages], calls: Some([3 * pages, 0]) };
        Look { pages, at, used: Duration::from_millis(used_ms), counts }
    }

    #[test]
    fn a_window_is_what_came_between_its_looks() {
        let begin = Instant::now();
        let end = begin + Duration::from_secs(2);
        let window = between(look(100, begin, 50), look(100 + PAGES / 2, end, 450));
        let window = window.expect("a window");
        assert_eq!((window.pages, window.time), (PAGES / 2, Duration::from_secs(2)));
        assert_eq!(window.used, Duration::from_millis(400));
        assert_eq!(window.counts.sleeps, [PAGES / 2, PAGES]);
        assert_eq!(window.counts.calls, Some([PAGES / 2 * 3, 0]));
        assert!(between(look(100, begin, 0), look(150, end, 0)).is_err(), "too few pages");
    }
}
