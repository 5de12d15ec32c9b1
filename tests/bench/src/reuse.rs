// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench prezero-hints`: what a guest saves because its balloon tells it which pages come back zeroed, and
//! how fast a balloon inflates and deflates, compared with QEMU's with the same guest.
//!
//! The test guest has a driver with the proposed feature bits. It returns 256 MiB, takes them again, and
//! zeroes those that are not known to be zero; outside of the measured time it checks and fills all of
//! them. Owns the VMMs, one at a time. Must never count a run in which a page was wrong.

use std::error::Error;
use std::process::{Command, Stdio};
use std::time::Duration;

use guest_reader::{BalloonStatus, Guest, Patience};

use crate::child::Killed;
use crate::hugepages::HugePages;
use crate::machine;
use crate::pair::{Programs, qemu};
use crate::qemu::{CPU, PROGRAM, QBOOT};
use crate::report::{Figure, Report, Target};

const MEMORY_MIB: u64 = 512;
/// Memory that the guest returns, and how often in a run.
const GIVEN_MIB: u64 = 256;
const ITERATIONS: u64 = 4;
const HUGE_MIB: u64 = 2;
const PATIENCE: Patience = Patience::millis(120_000);
/// Feature bits without the hint of zeroed pages.
const UNTOLD: u64 = 0x3f;
/// Address of q35's PCI configuration space once its firmware has run.
const QEMU_ECAM: u64 = 0xb000_0000;

/// A VMM with a balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Candidate {
    /// This program, with hints for the guest.
    Told,
    /// This program, without hints.
    Untold,
    /// QEMU, which gives no hints.
    Qemu,
}

impl Candidate {
    const ALL: [Self; 3] = [Self::Told, Self::Untold, Self::Qemu];

    fn name(self) -> &'static str {
        match self {
            Self::Told => "told",
            Self::Untold => "not told",
            Self::Qemu => "QEMU",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pages {
    Small,
    Huge,
}

/// A way of returning pages, on one kind of memory.
struct Case {
    workload: &'static str,
    pages: Pages,
    /// By candidate: inflating and deflating in GiB/s; deflating in ms for a GiB.
    samples: [[Vec<f64>; 3]; 3],
}

fn ours(programs: &Programs, pages: Pages, cmdline: &str) -> Command {
    let kind = match pages {
        Pages::Small => "thp=off",
        Pages::Huge => "hugepages=on,hugepage_size=2M",
    };
    let mut command = Command::new(programs.vmm);
    command
        .args(["--serial", "off", "--console", "off", "--cpus", "boot=1", "--kernel"])
        .arg(programs.guest)
        .args(["--cmdline", cmdline, "--memory"])
        .arg(format!("size={MEMORY_MIB}M,shared=on,{kind}"))
        .args(["--balloon", "size=0,free_page_reporting=on,prezero_hints=on"]);
    command
}

fn theirs(programs: &Programs, pages: Pages, cmdline: &str) -> Command {
    let kind = match pages {
        Pages::Small => "",
        Pages::Huge => ",hugetlb=on,hugetlbsize=2M",
    };
    let mut command = Command::new(PROGRAM);
    command
        .args(["-accel", "kvm", "-cpu", CPU, "-nodefaults", "-display", "none", "-no-reboot"])
        .args(["-bios", QBOOT, "-append", cmdline, "-kernel"])
        .arg(programs.guest)
        .args(["-smp", "1", "-m", &format!("{MEMORY_MIB}M"), "-M", "q35,memory-backend=ram"])
        .arg("-object")
        .arg(format!("memory-backend-memfd,id=ram,size={MEMORY_MIB}M,share=on{kind}"))
        .args(["-device", "virtio-balloon-pci,disable-legacy=on,free-page-reporting=on"]);
    command
}

/// One run: the figures that the guest reports.
fn measure(
    programs: &Programs,
    who: Candidate,
    case: &Case,
) -> Result<BalloonStatus, Box<dyn Error>> {
    let workload = case.workload;
    let words = format!("workload={workload} mem={GIVEN_MIB}M iterations={ITERATIONS}");
    let mut command = match who {
        Candidate::Told => ours(programs, case.pages, &words),
        Candidate::Untold => {
            ours(programs, case.pages, &format!("{words} balloon_features={UNTOLD:#x}"))
        }
        Candidate::Qemu => theirs(programs, case.pages, &format!("{words} ecam={QEMU_ECAM:#x}")),
    };
    let child =
        Killed::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()))?;
    let guest = Guest::attach_within(child.pid(), PATIENCE)?;
    let status = guest.wait_until("the end of the workload", PATIENCE, |status| {
        status.stage == "running" && status.all_in("done")
    })?;
    let balloon = status.known().next().ok_or("a guest without vCPUs")?.balloon;
    let what = format!("{workload}, {}", who.name());
    if let Some(failure) = balloon.failure {
        return Err(format!("{what}: {failure}").into());
    }
    if status.errors() > 0 || balloon.given_pages == 0 {
        return Err(format!("{what}: pages were wrong, or none was released: {status:?}").into());
    }
    // On huge pages the balloon can guarantee zeros for a part only.
    let told = balloon.told_pages > 0;
    if told != (who == Candidate::Told) {
        return Err(format!("{what}: the guest was told of {} pages", balloon.told_pages).into());
    }
    Ok(balloon)
}

/// Seconds per GiB.
fn s_per_gib(ns: u64, pages: u64) -> f64 {
    let pages = u32::try_from(pages).unwrap_or(u32::MAX);
    Duration::from_nanos(ns.max(1)).as_secs_f64() * 262_144.0 / f64::from(pages.max(1))
}

/// Runs the benchmark.
pub fn run(programs: &Programs, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut notes = Vec::new();
    let without_qemu = qemu::missing();
    notes.extend(without_qemu.clone());
    let mut cases: Vec<Case> = Vec::new();
    for pages in [Pages::Small, Pages::Huge] {
        for workload in ["balloon-report", "balloon-inflate"] {
            cases.push(Case { workload, pages, samples: Default::default() });
        }
    }
    let huge = HugePages::set_aside(MEMORY_MIB / HUGE_MIB);
    if let Err(error) = &huge {
        notes.push(format!("no huge pages: {error}"));
        cases.retain(|case| case.pages == Pages::Small);
    }
    for _ in 0..runs {
        for case in &mut cases {
            for (index, who) in Candidate::ALL.into_iter().enumerate() {
                if who == Candidate::Qemu && without_qemu.is_some() {
                    continue;
                }
                let done = measure(programs, who, case)?;
                let [give, back, take] = [done.give_ns, done.back_ns, done.take_ns]
                    .map(|ns| s_per_gib(ns, done.given_pages));
                let values = [give.recip(), back.recip(), take * 1e3];
                for (samples, value) in case.samples[index].iter_mut().zip(values) {
                    samples.push(value);
                }
            }
        }
    }
    Ok(report(cases, notes))
}

fn report(cases: Vec<Case>, notes: Vec<String>) -> Report {
    let (mut figures, mut targets) = (Vec::new(), Vec::new());
    for Case { workload, pages, samples } in cases {
        let kind = if pages == Pages::Small { "4 KiB" } else { "2 MiB" };
        let way = workload.trim_start_matches("balloon-");
        let mut medians = [[None; 3]; 3];
        for (index, (who, samples)) in Candidate::ALL.into_iter().zip(samples).enumerate() {
            let names = [(way, "GiB/s"), ("deflate", "GiB/s"), ("a GiB taken again, zeroed", "ms")];
            for (part, ((name, unit), values)) in names.into_iter().zip(samples).enumerate() {
                // A report ends when it is answered.
                if part == 1 && way == "report" {
                    continue;
                }
                let name = format!("{kind}, {way}, {}: {name}", who.name());
                let figure = Figure::of(name, unit, values);
                medians[index][part] = figure.as_ref().map(|figure| figure.value);
                figures.extend(figure);
            }
        }
        let [told, untold, qemu] = medians;
        let ratio = |ours: Option<f64>, theirs: Option<f64>| Some(ours? / theirs?);
        if let Some(ratio) = ratio(told[2], untold[2]) {
            let name = format!("{kind}, {way}: time of taking again, told by not told");
            targets.push(Target::at_most(&name, ratio, 1.0));
        }
        let parts: &[(usize, &str)] =
            if way == "report" { &[(0, "report")] } else { &[(0, "inflate"), (1, "deflate")] };
        for (part, what) in parts {
            if let Some(ratio) = ratio(untold[*part], qemu[*part]) {
                let name = format!("{kind}: rate of {what} by that of QEMU");
                targets.push(Target::at_least(&name, ratio, 1.0));
            }
        }
    }
    Report { name: "prezero-hints", machine: machine::name(), figures, targets, notes }
}
