// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench sandbox`: what the filters of system calls cost, compared with the same build without them.
//!
//! Owns the order: in each run each thing has its turn with filters and without, and which comes first
//! changes. Must never have the kernel's tracing on while anything but the boot is measured: it slows
//! system calls down.

use std::error::Error;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use guest_reader::{Guest, abi};
use tempfile::TempDir;

use crate::child::Killed;
use crate::loopback::Loopback;
use crate::pair::ours::Ours;
use crate::pair::{MEMORY_MIB, PATIENCE, Programs, RANDOM_WRITING, VCPUS, float, ms, per_second};
use crate::postcopy::guest::{self, CUT_US};
use crate::report::{Figure, Report, Target};
use crate::trace::Trace;
use crate::{boot, machine};

/// Boots of each in a run; one takes a fraction of a second.
const BOOTS: usize = 5;
/// Periods in which the guest's iterations are counted, in each run. The middle one counts, so that other work
/// on the host in some of them does not.
const PERIODS: usize = 9;
/// Long enough for thousands of iterations.
const PERIOD: Duration = Duration::from_millis(200);
/// Until the guest's speed is steady.
const SETTLE: Duration = Duration::from_millis(300);
/// Length of the disk, of which the guest reads the beginning.
const DISK_BYTES: usize = 4 << 20;
/// Memory that the host keeps files in.
const TMPFS: &str = "/dev/shm";
/// 1 Gbit/s: the background leaves the link free for what is asked for.
const POSTCOPY: &str = ",memory_mode=postcopy,bandwidth=125000000";

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Boot,
    Exit,
    Request,
    Page,
}

const ALL: [What; 4] = [What::Boot, What::Exit, What::Request, What::Page];

impl What {
    const fn name(self) -> &'static str {
        match self {
            Self::Boot => "exec to first guest instruction",
            Self::Exit => "exit to user space (configuration space)",
            Self::Request => "read of 4 KiB from a virtio disk",
            Self::Page => "access that waited in postcopy, median",
        }
    }

    const fn unit(self) -> &'static str {
        match self {
            Self::Boot => "ms",
            Self::Exit => "ns",
            Self::Request | Self::Page => "us",
        }
    }

    /// What the value with filters may be by that without.
    const fn ratio_max(self) -> f64 {
        match self {
            Self::Boot => 1.5,
            Self::Request => 1.05,
            Self::Exit | Self::Page => 1.1,
        }
    }
}

/// A value: of what, whether with filters.
type Value = (What, bool, f64);

fn name(what: What, filtered: bool) -> String {
    format!("{}, --seccomp {filtered}", what.name())
}

const fn options(filtered: bool) -> &'static [&'static str] {
    if filtered { &["--seccomp", "true"] } else { &["--seccomp", "false"] }
}

/// Measures.
pub fn run(programs: &Programs, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut notes = Vec::new();
    if Loopback::enter() == Loopback::Shared {
        notes.push("no network namespace of our own (needs root)".to_owned());
    }
    let mut values: Vec<Value> = Vec::new();
    for run in 0..runs {
        for what in ALL {
            eprintln!("run {} of {runs}: {}", run + 1, what.name());
            // Boots are short and have turns of their own.
            if what == What::Boot {
                match Trace::start(abi::MMIO_FIRST_GPA) {
                    Ok(trace) => values.extend(boots(programs, &trace, run)?),
                    Err(error) if run == 0 => {
                        notes.push(format!("the boot needs the kernel's tracing: {error}"));
                    }
                    Err(_) => {}
                }
                continue;
            }
            for filtered in turns(run) {
                let value = measure(what, programs, filtered)
                    .map_err(|error| format!("{}: {error}", name(what, filtered)))?;
                values.push((what, filtered, value));
            }
        }
    }
    let figures = figures(&values);
    let targets = targets(&figures);
    Ok(Report { name: "sandbox", machine: machine::name(), figures, targets, notes })
}

/// With and without; which comes first changes, so that a machine that gets slower meanwhile does so for both.
const fn turns(run: usize) -> [bool; 2] {
    let even = run.is_multiple_of(2);
    [even, !even]
}

fn boots(programs: &Programs, trace: &Trace, run: usize) -> Result<Vec<Value>, Box<dyn Error>> {
    let paths = (programs.vmm, programs.guest);
    let mut values = Vec::new();
    // One more than counted: the first fills the page cache.
    for boot in 0..=BOOTS {
        for filtered in turns(run + boot) {
            let options = options(filtered);
            let value = boot::first_run_ms(paths, (VCPUS, MEMORY_MIB), options, trace)?;
            if boot > 0 {
                values.push((What::Boot, filtered, value));
            }
        }
    }
    Ok(values)
}

fn measure(what: What, programs: &Programs, filtered: bool) -> Result<f64, Box<dyn Error>> {
    match what {
        What::Boot => Err("a boot is measured by its trace".into()),
        What::Exit => Ok(iteration_ns(programs, "config-read", &[], filtered)?),
        What::Request => {
            let folder = folder()?;
            let path = folder.path().join("disk");
            // Not sparse: each read copies a page.
            std::fs::write(&path, vec![1; DISK_BYTES])?;
            let disk = format!("path={},image_type=raw", path.display());
            Ok(iteration_ns(programs, "disk-read", &["--disk", &disk], filtered)? / 1e3)
        }
        What::Page => {
            let programs = Programs { options: options(filtered), ..*programs };
            let receive = ",memory_mode=postcopy";
            let mut pair = Ours::start(&programs, RANDOM_WRITING.cmdline, receive, POSTCOPY)?;
            let moved = guest::migration(&mut pair, RANDOM_WRITING)?;
            Ok(float(moved.accesses.quantile_above_ns(CUT_US, 0.5)) / 1e3)
        }
    }
}

/// A folder on tmpfs where there is one; otherwise its files are in the page cache.
fn folder() -> std::io::Result<TempDir> {
    const PREFIX: &str = "godwit-bench-";
    if Path::new(TMPFS).is_dir() {
        return TempDir::with_prefix_in(PREFIX, TMPFS);
    }
    TempDir::with_prefix(PREFIX)
}

/// Nanoseconds that an iteration of this workload takes the only vCPU of a guest.
fn iteration_ns(
    programs: &Programs,
    workload: &str,
    devices: &[&str],
    filtered: bool,
) -> Result<f64, Box<dyn Error>> {
    let cmdline = format!("workload={workload} prefill=0 vcpus=1");
    let mut command = Command::new(programs.vmm);
    command
        .args(["--serial", "off", "--console", "off", "--cmdline", &cmdline, "--kernel"])
        .arg(programs.guest)
        .args(["--cpus", "boot=1", "--memory", &format!("size={MEMORY_MIB}M,shared=on")])
        .args(devices)
        .args(options(filtered))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = Killed::spawn(&mut command)?;
    let guest = Guest::attach_within(child.pid(), PATIENCE)?;
    guest.wait_until("the guest's first iteration", PATIENCE, |status| {
        status.stage == "running" && status.iterations() > 0
    })?;
    std::thread::sleep(SETTLE);
    let mut periods = Vec::new();
    for _ in 0..PERIODS {
        let (start, before) = (Instant::now(), guest.status()?.iterations());
        std::thread::sleep(PERIOD);
        let (after, time) = (guest.status()?, start.elapsed());
        if let Some(how) = child.ended()? {
            return Err(format!("the VMM ended with {how}").into());
        }
        let done = after.iterations().saturating_sub(before);
        if done == 0 || after.errors() > 0 {
            return Err(format!("the guest does not work: {done} in {} ms", ms(time)).into());
        }
        periods.push(1e9 / per_second(done, time));
    }
    let middle = Figure::of(String::new(), "", periods);
    middle.map(|figure| figure.value).ok_or_else(|| "nothing was measured".into())
}

fn figures(values: &[Value]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for what in ALL {
        for filtered in [true, false] {
            let of_it = |value: &&Value| value.0 == what && value.1 == filtered;
            let list = values.iter().filter(of_it).map(|(.., value)| *value).collect();
            figures.extend(Figure::of(name(what, filtered), what.unit(), list));
        }
    }
    figures
}

/// With by without, of the medians.
fn targets(figures: &[Figure]) -> Vec<Target> {
    let value = |what, filtered| {
        let name = name(what, filtered);
        figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
    };
    let target = |what: What| {
        let ratio = value(what, true)? / value(what, false)?;
        let name = format!("{}: with filters over without", what.name());
        Some(Target::at_most(&name, ratio, what.ratio_max()))
    };
    ALL.into_iter().filter_map(target).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_compares_with_and_without_of_one_thing() {
        let values = [
            (What::Exit, true, 1200.0),
            (What::Exit, false, 1000.0),
            (What::Request, true, 10.4),
            (What::Request, false, 10.0),
            (What::Boot, true, 3.0),
        ];
        let targets = targets(&figures(&values));
        let met: Vec<(f64, bool)> = targets.iter().map(|one| (one.limit, one.met)).collect();
        assert_eq!(met, [(1.1, false), (1.05, true)]);
    }

    #[test]
    fn both_come_first_in_turn() {
        assert_eq!([turns(0), turns(1)], [[true, false], [false, true]]);
    }
}
