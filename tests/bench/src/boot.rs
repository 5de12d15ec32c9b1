// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench boot`: time from exec to the first guest instruction and to the guest's first MMIO, and the
//! memory that a VMM needs in addition to guest RAM. Compares this program with QEMU's `microvm` and `q35`
//! (with qboot, the smallest firmware), with the same guest and the same kind of memory, in turns.
//!
//! The first guest instruction is taken as the first `KVM_RUN`. For QEMU it belongs to the firmware, for
//! this program to the kernel. The first MMIO is the test guest's first instruction at CPL 3.

use std::collections::BTreeMap;
use std::error::Error;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use guest_reader::abi;

use crate::child::Killed;
use crate::qemu::{self, CPU, QBOOT};
use crate::report::{Figure, Report, Target};
use crate::trace::Trace;
use crate::{machine, process, slots};

/// Longest time for a guest to start; QEMU's firmware takes a tenth of it.
const LIMIT: Duration = Duration::from_secs(20);
/// Memory is measured this long after the guest has begun its work, when start-up is over.
const SETTLE: Duration = Duration::from_millis(200);
/// Interval at which guest RAM is polled.
const POLL: Duration = Duration::from_micros(200);

const OURS: &str = "godwit";
const VMMS: [&str; 3] = [OURS, "qemu microvm", "qemu q35"];
const SIZES: [(u32, u64); 4] = [(1, 256), (2, 256), (1, 8192), (2, 8192)];

const FIRST_RUN: &str = "exec to first guest instruction";
const FIRST_MMIO: &str = "exec to first MMIO";
const VISIBLE: &str = "exec to control page seen in memory";
const TOTAL: &str = "resident besides guest RAM";
const ANONYMOUS: &str = "anonymous besides guest RAM";
const SLOTS: &str = "the kernel's own time for the memory slots of a bare VM";
/// Index of the bare kernel, after the VMMs.
const BARE: usize = VMMS.len();

type Samples = BTreeMap<(usize, usize, &'static str), Vec<f64>>;

/// Runs the benchmark.
pub fn run(vmm: &Path, guest: &Path, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut notes = Vec::new();
    let trace = match Trace::start(abi::MMIO_FIRST_GPA) {
        Ok(trace) => Some(trace),
        Err(error) => {
            notes.push(format!("first instruction and MMIO need the kernel's tracing: {error}"));
            None
        }
    };
    let qemu = Command::new(qemu::PROGRAM).arg("--version").output().is_ok();
    if !qemu || !Path::new(QBOOT).exists() {
        return Err("there is nothing to compare with: install qemu-system-x86 and qboot".into());
    }
    let mut samples = Samples::new();
    // One round more than counted: the first fills the page cache.
    for round in 0..=runs {
        for (size_index, (vcpus, mib)) in SIZES.into_iter().enumerate() {
            let bare = slots::time_to_register(mib << 20)?.as_secs_f64() * 1e3;
            if round > 0 {
                samples.entry((size_index, BARE, SLOTS)).or_default().push(bare);
            }
            for (vmm_index, name) in VMMS.into_iter().enumerate() {
                let command = command(name, vmm, guest, vcpus, mib);
                let figures = measure(command, trace.as_ref())
                    .map_err(|error| format!("{name}, {vcpus} vCPUs, {mib} MiB: {error}"))?;
                if round > 0 {
                    for (what, value) in figures {
                        samples.entry((size_index, vmm_index, what)).or_default().push(value);
                    }
                }
            }
        }
    }
    Ok(report(&samples, notes))
}

/// Milliseconds from exec to the first guest instruction of our VMM with these further options.
pub fn first_run_ms(
    (vmm, guest): (&Path, &Path),
    (vcpus, mib): (u32, u64),
    options: &[&str],
    trace: &Trace,
) -> Result<f64, Box<dyn Error>> {
    let mut command = command(OURS, vmm, guest, vcpus, mib);
    command.args(options);
    let figures = measure(command, Some(trace))?;
    let found = figures.into_iter().find(|(what, _)| *what == FIRST_RUN);
    found.map(|(_, value)| value).ok_or_else(|| format!("no {FIRST_RUN}").into())
}

fn command(name: &str, vmm: &Path, guest: &Path, vcpus: u32, mib: u64) -> Command {
    let cmdline = format!("workload=idle prefill=0 vcpus={vcpus}");
    let mut command;
    if name == OURS {
        command = Command::new(vmm);
        command
            .args(["--serial", "off", "--console", "off", "--cmdline", &cmdline, "--kernel"])
            .arg(guest)
            .args(["--cpus", &format!("boot={vcpus}")])
            .args(["--memory", &format!("size={mib}M,shared=on")]);
    } else {
        let kind = name.trim_start_matches("qemu ");
        command = Command::new(qemu::PROGRAM);
        command
            .args(["-accel", "kvm", "-cpu", CPU, "-nodefaults", "-display", "none"])
            .args(["-bios", QBOOT, "-append", &cmdline, "-kernel"])
            .arg(guest)
            .args(["-smp", &vcpus.to_string(), "-m", &format!("{mib}M")])
            .args(["-M", &format!("{kind},memory-backend=ram"), "-object"])
            .arg(format!("memory-backend-memfd,id=ram,size={mib}M,share=on"));
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Microseconds on the monotonic clock.
pub fn monotonic_us() -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, which lives across the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    #[expect(clippy::cast_precision_loss, reason = "microseconds since boot are below 2^52")]
    let us = now.tv_sec as f64 * 1e6 + now.tv_nsec as f64 / 1e3;
    us
}

fn measure(
    mut command: Command,
    trace: Option<&Trace>,
) -> Result<Vec<(&'static str, f64)>, Box<dyn Error>> {
    if let Some(trace) = trace {
        trace.clear()?;
    }
    let start_us = monotonic_us();
    let mut child = Killed::spawn(&mut command)?;
    let pid = child.pid();
    let visible_us = wait_for(&mut child, abi::control::MAGIC, |word| word == abi::MAGIC, pid)?;
    wait_for(&mut child, abi::control::STAGE, |stage| stage >= abi::stage::RUNNING, pid)?;
    std::thread::sleep(SETTLE);
    let resident = process::resident(pid)?;
    let mut figures = vec![(VISIBLE, (visible_us - start_us) / 1e3)];
    if let Some(trace) = trace {
        let marks = trace.marks()?;
        let marks = [(FIRST_RUN, marks.first_run_us), (FIRST_MMIO, marks.first_mmio_us)];
        for (what, at_us) in marks {
            let at_us = at_us.ok_or_else(|| format!("{what} was not seen in the trace"))?;
            figures.push((what, (at_us - start_us) / 1e3));
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "memory in KiB is below 2^52")]
    let mib = |kib: u64| kib as f64 / 1024.0;
    figures.push((TOTAL, mib(resident.total_kib)));
    figures.push((ANONYMOUS, mib(resident.anonymous_kib)));
    Ok(figures)
}

/// Waits until a word of the control page is as wanted; returns the time.
fn wait_for(
    child: &mut Killed,
    offset: u64,
    wanted: impl Fn(u64) -> bool,
    pid: u32,
) -> Result<f64, Box<dyn Error>> {
    let start = Instant::now();
    let mut ram = None;
    loop {
        if ram.is_none() {
            ram = process::guest_ram(pid);
        }
        // Reading a file does not allocate the pages that it lacks.
        let mut word = [0; 8];
        let read = ram.as_ref().map(|ram| ram.read_exact_at(&mut word, abi::CONTROL_GPA + offset));
        if matches!(read, Some(Ok(()))) && wanted(u64::from_le_bytes(word)) {
            return Ok(monotonic_us());
        }
        if let Some(how) = child.ended()? {
            return Err(format!("the VMM ended with {how}").into());
        }
        if start.elapsed() > LIMIT {
            return Err("the guest does not come up".into());
        }
        std::thread::sleep(POLL);
    }
}

fn report(samples: &Samples, notes: Vec<String>) -> Report {
    let mut figures = Vec::new();
    for what in [FIRST_RUN, FIRST_MMIO, VISIBLE, TOTAL, ANONYMOUS] {
        for (size_index, (vcpus, mib)) in SIZES.into_iter().enumerate() {
            for (vmm_index, name) in VMMS.into_iter().enumerate() {
                let values = samples.get(&(size_index, vmm_index, what)).cloned();
                let unit = if what == TOTAL || what == ANONYMOUS { "MiB" } else { "ms" };
                let name = format!("{name}, {vcpus} vCPU, {mib} MiB: {what}");
                figures.extend(Figure::of(name, unit, values.unwrap_or_default()));
            }
        }
    }
    let bare: Vec<f64> = (0..SIZES.len())
        .filter_map(|size| {
            let (vcpus, mib) = SIZES.get(size)?;
            let values = samples.get(&(size, BARE, SLOTS)).cloned()?;
            figures.extend(Figure::of(format!("{vcpus} vCPU, {mib} MiB: {SLOTS}"), "ms", values));
            Some(figures.last()?.value)
        })
        .collect();
    // The worst of this program's four configurations counts.
    let ours = |what: &str| -> Vec<f64> {
        (0..SIZES.len())
            .filter_map(|size| {
                let (vcpus, mib) = SIZES.get(size)?;
                let name = format!("godwit, {vcpus} vCPU, {mib} MiB: {what}");
                Some(figures.iter().find(|figure| figure.name == name)?.value)
            })
            .collect()
    };
    let worst = |what: &str| ours(what).into_iter().reduce(f64::max);
    let mut targets = Vec::new();
    let limits = [
        ("first guest instruction, worst median (ms)", FIRST_RUN, 10.0),
        ("resident besides guest RAM, worst median (MiB)", TOTAL, 12.0),
        ("anonymous besides guest RAM, worst median (MiB)", ANONYMOUS, 4.0),
    ];
    for (name, what, limit) in limits {
        targets.extend(worst(what).map(|value| Target::at_most(name, value, limit)));
    }
    let first_run = ours(FIRST_RUN);
    let own: Vec<f64> = first_run.iter().zip(&bare).map(|(total, bare)| total - bare).collect();
    for (name, times) in [
        ("first guest instruction, 8 GiB over 256 MiB", &first_run),
        ("the same without the kernel's own time for memory slots", &own),
    ] {
        if let &[one_small, two_small, one_large, two_large] = times.as_slice() {
            let ratio = (one_large / one_small).max(two_large / two_small);
            targets.push(Target::at_most(name, ratio, 1.2));
        }
    }
    Report { name: "boot", machine: machine::name(), figures, targets, notes }
}
