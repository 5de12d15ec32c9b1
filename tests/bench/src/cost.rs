// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench migration-cost`: the processor time that a migration costs on each side, per GiB of guest memory,
//! compared with QEMU.
//!
//! Owns the candidates, their order and the targets. Counted is all that the two processes use from the request on,
//! without their vCPU threads, and with the source's end: at the source until its process is gone, at the destination
//! until the source reports the end. What a guest loses is measured by `precopy` and `postcopy-latency`. Must never
//! compare processes of which one keeps its guest's memory and the other has returned it.

use std::error::Error;
use std::time::Duration;

use crate::loopback::Loopback;
use crate::pair::ours::Ours;
use crate::pair::qemu::{self, Qemu, Way};
use crate::pair::{IDLE, MEMORY_MIB, Pair, Programs, RANDOM_WRITING, Workload, float, ms, prepare};
use crate::pool::{Pool, UNLIMITED};
use crate::processor::{Used, VcpuTime};
use crate::report::{Figure, Report, Target};
use crate::{machine, raw};

const WORKLOADS: [Workload; 2] = [IDLE, RANDOM_WRITING];
/// Downtime that each may take.
const DOWNTIME_MS: u64 = 300;

/// How the guest moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Precopy,
    Postcopy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vmm {
    Ours(u16),
    /// Into memory of a pool, which has cleared it before.
    OursReady,
    Qemu,
    /// With four multifd channels.
    QemuMultifd,
}

type Candidate = (Mode, Vmm);

const CANDIDATES: [Candidate; 8] = [
    (Mode::Precopy, Vmm::Ours(1)),
    (Mode::Precopy, Vmm::Ours(4)),
    (Mode::Precopy, Vmm::OursReady),
    (Mode::Precopy, Vmm::Qemu),
    (Mode::Precopy, Vmm::QemuMultifd),
    (Mode::Postcopy, Vmm::Ours(1)),
    (Mode::Postcopy, Vmm::OursReady),
    (Mode::Postcopy, Vmm::Qemu),
];

fn name((mode, vmm): Candidate) -> String {
    let mode = match mode {
        Mode::Precopy => "precopy",
        Mode::Postcopy => "postcopy",
    };
    match vmm {
        Vmm::Ours(1) => format!("{mode}: godwit"),
        Vmm::Ours(count) => format!("{mode}: godwit, {count} connections"),
        Vmm::OursReady => format!("{mode}: godwit, ready memory"),
        Vmm::Qemu => format!("{mode}: qemu"),
        Vmm::QemuMultifd => format!("{mode}: qemu, multifd 4"),
    }
}

/// Milliseconds of processor time per GiB of populated guest memory.
#[derive(Clone, Copy)]
struct Cost {
    source: f64,
    destination: f64,
}

fn measure(
    programs: &Programs,
    (mode, vmm): Candidate,
    workload: Workload,
) -> Result<Cost, Box<dyn Error>> {
    let ours = |connections: u16, receive: &str| {
        let (memory_mode, receive_mode) = match mode {
            Mode::Precopy => (format!("downtime_ms={DOWNTIME_MS}"), ""),
            Mode::Postcopy => ("memory_mode=postcopy".to_owned(), ",memory_mode=postcopy"),
        };
        let send = format!(",{memory_mode},connections={connections}");
        Ours::start(programs, workload.cmdline, &format!("{receive_mode}{receive}"), &send)
    };
    let qemu = |channels| {
        let way = match mode {
            Mode::Precopy => Way::Precopy { downtime_ms: DOWNTIME_MS, channels },
            Mode::Postcopy => Way::Postcopy { preempt: true, bytes_per_s: 0 },
        };
        Qemu::start(programs, workload.cmdline, way)
    };
    match vmm {
        Vmm::Ours(connections) => migration(&mut ours(connections, "")?, workload),
        Vmm::OursReady => {
            let pool = Pool::start(programs.vmm, &[MEMORY_MIB], UNLIMITED)?;
            let mut pair = ours(1, &pool.option())?;
            let cost = migration(&mut pair, workload)?;
            if pool.slots("lent") != Some(1) {
                return Err("the destination did not take memory of the pool".into());
            }
            Ok(cost)
        }
        Vmm::Qemu => migration(&mut qemu(None)?, workload),
        Vmm::QemuMultifd => migration(&mut qemu(Some(4))?, workload),
    }
}

fn migration(pair: &mut dyn Pair, workload: Workload) -> Result<Cost, Box<dyn Error>> {
    let populated_bytes = prepare(pair.source_pid(), workload)?.populated_bytes;
    raw::warm((2 * MEMORY_MIB) << 20)?;
    let pids = [pair.source_pid(), pair.destination_pid()];
    let used = |pid| Used::of(pid).map(|used| used.time).ok_or("a VMM has ended too early");
    let before = [used(pids[0])?, used(pids[1])?];
    let [vcpus_here, vcpus_there] = pids.map(VcpuTime::follow);
    if !vcpus_here.began_with_some {
        return Err("no vCPU thread of the source is known by its name".into());
    }
    pair.migrate()?;
    let (there, vcpus_there) = (used(pids[1])?, vcpus_there.used());
    let vcpus_here = vcpus_here.used();
    let here = pair.end_source()?;
    let cost = |now: Duration, before: Duration, vcpus: Duration| {
        let own = now.saturating_sub(before).saturating_sub(vcpus);
        ms(own) / (float(populated_bytes) / float(1 << 30))
    };
    Ok(Cost {
        source: cost(here, before[0], vcpus_here),
        destination: cost(there, before[1], vcpus_there),
    })
}

/// Runs the benchmark.
pub fn run(programs: &Programs, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut notes = Vec::new();
    if Loopback::enter() == Loopback::Shared {
        notes.push("no network namespace of our own (needs root)".to_owned());
    }
    let missing = qemu::missing();
    if let Some(why) = &missing {
        eprintln!("SKIPPED qemu: {why}");
        notes.push(format!("SKIPPED qemu: {why}"));
    }
    let mut taken: Vec<(Workload, Candidate, Cost)> = Vec::new();
    for run in 0..runs {
        for workload in WORKLOADS {
            for turn in 0..CANDIDATES.len() {
                let Some(&candidate) = CANDIDATES.get((turn + run) % CANDIDATES.len()) else {
                    continue;
                };
                if missing.is_some() && matches!(candidate.1, Vmm::Qemu | Vmm::QemuMultifd) {
                    continue;
                }
                let text = format!("{}: {}", workload.name, name(candidate));
                eprintln!("run {} of {runs}: {text}", run + 1);
                let is_peer = matches!(candidate.1, Vmm::Qemu | Vmm::QemuMultifd);
                let cost = match measure(programs, candidate, workload) {
                    // What ends a peer is not this program's to mend; twice in a row is no accident.
                    Err(error) if is_peer => {
                        notes.push(format!("measured again, as it failed once: {text}: {error}"));
                        measure(programs, candidate, workload)
                    }
                    first => first,
                };
                let cost = cost.map_err(|error| format!("{text}: {error}"))?;
                taken.push((workload, candidate, cost));
            }
        }
    }
    let mut figures = Vec::new();
    let mut targets = Vec::new();
    for workload in WORKLOADS {
        let mut both = |candidate: Candidate| {
            let mine = || taken.iter().filter(|entry| (entry.0, entry.1) == (workload, candidate));
            let mut put = |what: &str, of: fn(&Cost) -> f64| {
                let name = format!("{}: {}: {what}", workload.name, name(candidate));
                let figure = Figure::of(name, "ms/GiB", mine().map(|entry| of(&entry.2)).collect());
                let value = figure.as_ref().map(|figure| figure.value);
                figures.extend(figure);
                value
            };
            put("source", |cost| cost.source);
            put("destination", |cost| cost.destination);
            put("both", |cost| cost.source + cost.destination)
        };
        let all: Vec<_> = CANDIDATES.map(|candidate| (candidate, both(candidate))).into();
        for (candidate, value) in &all {
            let rival = (candidate.0, Vmm::Qemu);
            let by = all.iter().find(|(other, _)| *other == rival).and_then(|(_, value)| *value);
            if let (Vmm::Ours(_) | Vmm::OursReady, Some(value), Some(by)) = (candidate.1, value, by)
            {
                let text = format!("{}: {} by qemu", workload.name, name(*candidate));
                targets.push(Target::at_most(&text, value / by, 1.0));
            }
        }
    }
    Ok(Report { name: "migration-cost", machine: machine::name(), figures, targets, notes })
}
