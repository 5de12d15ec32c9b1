// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench after-migration`: how fast a guest is in the first seconds after it has moved or was restored, by its speed
//! before, on 4 KiB pages, transparent huge pages and huge pages of 2 MiB, and how much of its memory is mapped by
//! huge entries then.
//!
//! Owns the candidates, their order and the targets. A guest that stays where it is takes part, as no two seconds of
//! a machine are equal. The guest has one vCPU, so that what else the VMMs do has a processor of its own where there
//! are two. Must never begin to measure before the last page is there.

use std::error::Error;
use std::fs;
use std::time::{Duration, Instant};

use guest_reader::Guest;

use crate::hugepages::{HugePages, SharedThp};
use crate::loopback::Loopback;
use crate::pair::ours::Ours;
use crate::pair::qemu::{self, Qemu, Way};
use crate::pair::{MEMORY_MIB, PATIENCE, Pair, Programs, Workload, per_second, prepare};
use crate::pool::{Pool, UNLIMITED};
use crate::report::{Figure, Report, Target};
use crate::snapshot::Vmm;
use crate::{machine, process, raw};

/// Writes to all of its memory at random, as fast as it can.
const WORKLOAD: Workload = Workload {
    name: "random-writing",
    cmdline: "workload=random-write mem=700M vcpus=1",
    then: "reset=1",
    visits: true,
};
/// Time over which a speed is measured.
const WINDOW: Duration = Duration::from_secs(1);
/// Allowed downtime, so that the guest, which writes without a pause, can be stopped at all.
const DOWNTIME_MS: u64 = 300;

/// What the guest's memory is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pages {
    Small,
    Transparent,
    Huge,
}

/// What happens to the guest between the two measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Stays,
    Precopy,
    Postcopy,
    /// Into memory of a pool.
    PostcopyReady,
    RestoredByCopy,
    RestoredOnDemand,
    QemuPrecopy,
    QemuPostcopy,
}

const PAGES: [Pages; 3] = [Pages::Small, Pages::Transparent, Pages::Huge];
const EVENTS: [Event; 8] = [
    Event::Stays,
    Event::Precopy,
    Event::Postcopy,
    Event::PostcopyReady,
    Event::RestoredByCopy,
    Event::RestoredOnDemand,
    Event::QemuPrecopy,
    Event::QemuPostcopy,
];

impl Pages {
    fn name(self) -> &'static str {
        match self {
            Self::Small => "4 KiB pages",
            Self::Transparent => "transparent huge pages",
            Self::Huge => "2 MiB pages",
        }
    }

    fn option(self) -> &'static str {
        match self {
            Self::Small => ",thp=off",
            Self::Transparent => ",thp=on",
            Self::Huge => ",hugepages=on,hugepage_size=2M",
        }
    }
}

impl Event {
    fn name(self) -> &'static str {
        match self {
            Self::Stays => "stayed",
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::PostcopyReady => "postcopy, ready memory",
            Self::RestoredByCopy => "restored by copy",
            Self::RestoredOnDemand => "restored on demand",
            Self::QemuPrecopy => "qemu, precopy",
            Self::QemuPostcopy => "qemu, postcopy-preempt",
        }
    }

    fn is_qemu(self) -> bool {
        matches!(self, Self::QemuPrecopy | Self::QemuPostcopy)
    }
}

/// Speeds by that before, and the part of memory that huge entries map.
#[derive(Clone, Copy)]
struct After {
    first_second: f64,
    second_second: f64,
    huge: f64,
}

/// Page visits per second during the next second.
fn speed(guest: &Guest) -> Result<f64, Box<dyn Error>> {
    let (start, first) = (Instant::now(), WORKLOAD.work(&guest.status()?));
    std::thread::sleep(WINDOW);
    let last = WORKLOAD.work(&guest.status()?);
    Ok(per_second(last.saturating_sub(first), start.elapsed()))
}

/// Measures where the guest is now.
fn after(pid: u32, before: f64) -> Result<After, Box<dyn Error>> {
    let guest = Guest::attach_within(pid, PATIENCE)?;
    let (first, second) = (speed(&guest)?, speed(&guest)?);
    let status = guest.status()?;
    if !status.complete() || status.errors() > 0 || first == 0.0 {
        return Err(format!("the guest is not well: {status:?}").into());
    }
    let huge = process::huge_part(&fs::read_to_string(format!("/proc/{pid}/smaps"))?);
    Ok(After { first_second: first / before, second_second: second / before, huge })
}

fn moved(pair: &mut dyn Pair) -> Result<After, Box<dyn Error>> {
    let guest = prepare(pair.source_pid(), WORKLOAD)?.guest;
    raw::warm((2 * MEMORY_MIB) << 20)?;
    let before = speed(&guest)?;
    pair.migrate()?;
    after(pair.destination_pid(), before)
}

fn restored(programs: &Programs, mode: &str) -> Result<After, Box<dyn Error>> {
    let near = programs.vmm.parent().ok_or("the VMM has no directory")?;
    let folder = tempfile::TempDir::with_prefix_in("bench-after-", near)?;
    let memory = format!("size={MEMORY_MIB}M,shared=on{}", programs.memory);
    let kernel = programs.guest.to_str().ok_or("the guest's path is not UTF-8")?;
    let source = Vmm::start(
        programs.vmm,
        &[
            "--serial",
            "off",
            "--console",
            "off",
            "--kernel",
            kernel,
            "--cpus",
            "boot=2",
            "--memory",
            &memory,
            "--cmdline",
            WORKLOAD.cmdline,
        ],
    )?;
    let before = speed(&prepare(source.pid(), WORKLOAD)?.guest)?;
    let url = format!("file://{}", folder.path().join("s").display());
    fs::create_dir(folder.path().join("s"))?;
    source.remote(&["pause"])?;
    source.remote(&["snapshot", &url])?;
    drop(source);
    let option = format!("source_url={url},memory_restore_mode={mode},resume=on");
    let restored = Vmm::start(programs.vmm, &["--restore", &option])?;
    let last = if mode == "ondemand" { "restore-memory-completed" } else { "restored" };
    restored.between_events_ms("restoring", last)?;
    after(restored.pid(), before)
}

fn measure(programs: &Programs, event: Event) -> Result<After, Box<dyn Error>> {
    let start = |receive: &str, send: &str| Ours::start(programs, WORKLOAD.cmdline, receive, send);
    match event {
        Event::Stays => {
            let pair = start("", "")?;
            let before = speed(&prepare(pair.source_pid(), WORKLOAD)?.guest)?;
            after(pair.source_pid(), before)
        }
        Event::Precopy => moved(&mut start("", &format!(",downtime_ms={DOWNTIME_MS}"))?),
        Event::Postcopy => moved(&mut start(",memory_mode=postcopy", ",memory_mode=postcopy")?),
        Event::PostcopyReady => {
            let pool = Pool::start(programs.vmm, &[MEMORY_MIB], UNLIMITED)?;
            let receive = format!(",memory_mode=postcopy{}", pool.option());
            let mut pair = start(&receive, ",memory_mode=postcopy")?;
            let found = moved(&mut pair)?;
            if pool.slots("lent") != Some(1) {
                return Err("the destination did not take memory of the pool".into());
            }
            Ok(found)
        }
        Event::RestoredByCopy => restored(programs, "copy"),
        Event::RestoredOnDemand => restored(programs, "ondemand"),
        Event::QemuPrecopy => {
            let way = Way::Precopy { downtime_ms: DOWNTIME_MS, channels: None };
            moved(&mut Qemu::start(programs, WORKLOAD.cmdline, way)?)
        }
        Event::QemuPostcopy => {
            let way = Way::Postcopy { preempt: true, bytes_per_s: 0 };
            moved(&mut Qemu::start(programs, WORKLOAD.cmdline, way)?)
        }
    }
}

/// What can be measured on this machine; reasons for the rest go to `notes` and standard error.
fn available(notes: &mut Vec<String>, thp: bool, huge: bool) -> Vec<(Pages, Event)> {
    let mut skip = |what: &str, why: &str| {
        eprintln!("SKIPPED {what}: {why}");
        notes.push(format!("SKIPPED {what}: {why}"));
    };
    let qemu = qemu::missing();
    if let Some(why) = &qemu {
        skip("qemu", why);
    }
    let reserve = "the host does not allow it (needs root, and free memory)";
    if !thp {
        skip(Pages::Transparent.name(), reserve);
    }
    if !huge {
        skip(Pages::Huge.name(), reserve);
    }
    let is_there = |pages: Pages, event: Event| match pages {
        // QEMU's default. The pool has transparent huge pages.
        Pages::Small if event.is_qemu() => qemu.is_none(),
        Pages::Small => event != Event::PostcopyReady,
        Pages::Transparent => thp && !event.is_qemu(),
        Pages::Huge => huge && !event.is_qemu() && event != Event::PostcopyReady,
    };
    let all = PAGES.into_iter().flat_map(|pages| EVENTS.map(|event| (pages, event)));
    all.filter(|(pages, event)| is_there(*pages, *event)).collect()
}

/// Runs the benchmark.
pub fn run(programs: &Programs, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut notes = Vec::new();
    if Loopback::enter() == Loopback::Shared {
        notes.push("no network namespace of our own (needs root)".to_owned());
    }
    // For the source and the destination.
    let huge = HugePages::set_aside(2 * MEMORY_MIB / 2);
    let thp = SharedThp::advise();
    let candidates = available(&mut notes, thp.is_ok(), huge.is_ok());
    let mut taken: Vec<((Pages, Event), After)> = Vec::new();
    for run in 0..runs {
        for turn in 0..candidates.len() {
            let Some(&candidate) = candidates.get((turn + run) % candidates.len()) else {
                continue;
            };
            let (pages, event) = candidate;
            let name = format!("{}: {}", pages.name(), event.name());
            eprintln!("run {} of {runs}: {name}", run + 1);
            let programs = Programs { memory: pages.option(), ..*programs };
            let found = measure(&programs, event).map_err(|error| format!("{name}: {error}"))?;
            taken.push((candidate, found));
        }
    }
    let mut figures = Vec::new();
    let mut targets = Vec::new();
    for candidate in candidates {
        let (pages, event) = candidate;
        let mine = || taken.iter().filter(|entry| entry.0 == candidate);
        let mut put = |what: &str, unit, of: fn(&After) -> f64| {
            let name = format!("{}: {}: {what}", pages.name(), event.name());
            let figure = Figure::of(name, unit, mine().map(|entry| of(&entry.1)).collect());
            let value = figure.as_ref().map(|figure| figure.value);
            figures.extend(figure);
            value
        };
        put("speed in the first second by that before", "", |after| after.first_second);
        let second = put("speed in the second one", "", |after| after.second_second);
        put("memory in huge mappings", "%", |after| after.huge * 100.0);
        let is_judged = pages != Pages::Small && event != Event::Stays;
        if let (true, Some(second)) = (is_judged, second) {
            let name = format!("{}: {}: speed in the second one", pages.name(), event.name());
            targets.push(Target::at_least(&name, second, 0.98));
        }
    }
    Ok(Report { name: "after-migration", machine: machine::name(), figures, targets, notes })
}
