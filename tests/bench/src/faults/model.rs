// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench fault-model`: what a page that a vCPU waits for takes by each fault source, and what 160 processors would
//! give by that.
//!
//! Three kinds of figures, each named as what it is: *measured* are system calls, sleeps and processor time of the
//! real program on this machine; *read* are locks and shared cache lines, counted in the source files that the report
//! names; *computed* are pages a second of a machine that is not here, from published rates.
//!
//! Owns the rates, their sources, and the arithmetic. Must never give a computed figure without its name saying so.

use std::error::Error;

use vm_migration::destination::READERS_MAX;

use super::counts;
use super::floor::{self, Into};
use super::moved::{self, Counted, Moved};
use crate::machine;
use crate::pair::Programs;
use crate::pair::ours::Ours;
use crate::report::{Figure, Report};

const SOURCES: [&str; 3] = ["uffd", "sigbus", "exit"];
/// vCPUs of the measurement: more than there are processors, so that there is always one to run.
const VCPUS: u32 = 16;
/// Pages that the floor brings in each turn.
const FLOOR_PAGES: usize = 20_000;
/// Processors of the computed machine.
const PROCESSORS: f64 = 160.0;

/// Demand paging by KVM's selftest on a machine with 256 processors, thousand pages a second by number of vCPUs: with one
/// userfaultfd, and with vCPUs that leave the guest. From the cover letter of "KVM: Add capability MEM_FAULT_NOWAIT"
/// (<http://mail.spinics.net/lists/kvm/msg304774.html>).
const ONE_UFFD: [(f64, f64); 9] = [
    (1.0, 150.0),
    (2.0, 191.0),
    (4.0, 210.0),
    (8.0, 155.0),
    (16.0, 130.0),
    (32.0, 108.0),
    (64.0, 86.0),
    (128.0, 62.0),
    (256.0, 36.0),
];
const EXITS: [(f64, f64); 9] = [
    (1.0, 340.0),
    (2.0, 477.0),
    (4.0, 809.0),
    (8.0, 1239.0),
    (16.0, 1595.0),
    (32.0, 2299.0),
    (64.0, 3482.0),
    (128.0, 4134.0),
    (256.0, 4012.0),
];
/// The same with a userfaultfd for each of 64 vCPUs: 11,300 pages a second of each. From the cover letter of "KVM:
/// Introduce KVM Userfault" (<http://mail.spinics.net/lists/linux-doc/msg174058.html>).
const UFFD_EACH_OF_64: f64 = 64.0 * 11.3;
/// What it takes to have a cache line from another processor: an assumption, not a measurement and not published.
const LINE_US: f64 = 0.1;

/// What is counted by reading.
struct Read {
    what: &'static str,
    /// For a page: by `uffd`, and by a vCPU's own reply.
    times: [f64; 2],
    files: &'static str,
}

/// Taken or written for each page by threads of all vCPUs.
const READ: [Read; 5] = [
    Read {
        what: "locks of the program that threads share",
        times: [2.0, 0.0],
        files: "vm-migration/src/destination/fault.rs (Asker::one_at_a_time), vm-migration/src/progress.rs (latency)",
    },
    Read {
        what: "cache lines of the program that each page writes",
        times: [3.0, 1.0],
        files: "vm-migration/src/destination/engine.rs (Left), vm-migration/src/progress.rs (Counters)",
    },
    Read {
        what: "cache lines of the program that pages near each other write",
        times: [4.0, 5.0],
        files: "vm-migration/src/destination/demand.rs (missing, wanted), vmm/src/migration/memory.rs (resident pages), \
                vm-migration/src/waits.rs, with a vCPU's own reply vm-migration/src/destination/waiters.rs",
    },
    Read {
        what: "locks of a descriptor of userfaultfd",
        times: [4.0, 0.0],
        files: "fs/userfaultfd.c of Linux (fault_pending_wqh at the fault, at the read and at the wake-up, fd_wqh)",
    },
    Read {
        what: "locks of the kernel for the whole guest",
        times: [4.0, 5.0],
        files: "Linux: mmap_lock for reading (virt/kvm/kvm_main.c, mm/userfaultfd.c), mmu_lock (arch/x86/kvm/mmu/mmu.c), \
                map_changing_lock (mm/userfaultfd.c), i_pages (mm/shmem.c); a vCPU's own reply faults twice",
    },
];

/// A rate between published ones, on a straight line between logarithms.
fn published(rates: &[(f64, f64)], vcpus: f64) -> f64 {
    let mut before = rates.first().copied().unwrap_or((1.0, 0.0));
    for &(at, rate) in rates {
        if at >= vcpus {
            let steps = if at > before.0 {
                (vcpus / before.0).log2() / (at / before.0).log2()
            } else {
                1.0
            };
            return before.1 * (rate / before.1).powf(steps);
        }
        before = (at, rate);
    }
    before.1
}

/// Thousand pages a second that one userfaultfd would give to so many vCPUs.
fn one_uffd(vcpus: f64) -> f64 {
    published(&ONE_UFFD, vcpus)
}

/// The same of this program's readers: each has its share of the vCPUs, and all together have no more than 64 vCPUs with
/// a descriptor each had, which met the locks of the guest's memory.
fn readers(vcpus: f64) -> f64 {
    let used = f64::from(READERS_MAX).min(vcpus);
    (used * one_uffd(vcpus / used)).min(UFFD_EACH_OF_64)
}

/// The same of vCPUs that bring their own pages, where the destination's half of a round trip takes `half_us`: what the
/// processors have time for, no more than the published rate, at which the kernel's locks are the limit, and no more
/// than `lines` cache lines let pass that each page writes.
fn own_replies(vcpus: f64, half_us: f64, lines: f64) -> f64 {
    let alone_us = 1e3 / published(&EXITS, 1.0);
    let by_time = 1e3 * vcpus / (alone_us + half_us);
    by_time.min(published(&EXITS, vcpus)).min(1e3 / (lines * LINE_US))
}

/// Values of a name, with their unit.
struct Values {
    name: String,
    unit: &'static str,
    list: Vec<f64>,
}

/// Measures, and computes.
pub fn run(programs: &Programs, runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut notes = vec![
        "measured: on this machine; a sleep is ended by one wake-up. read: in the files that a note names. computed: \
         for another machine, from published rates; the link and the source's processors are not in it"
            .to_owned(),
    ];
    let tracepoint = match counts::tracepoint() {
        Ok(id) => Some(id),
        Err(error) => {
            notes.push(format!("SKIPPED system calls: the tracepoint cannot be used: {error}"));
            None
        }
    };
    let programs = Programs { vcpus: VCPUS, ..*programs };
    let mut all: Vec<Values> = Vec::new();
    let mut put = |name: String, unit: &'static str, value: f64| match all
        .iter_mut()
        .find(|known| known.name == name)
    {
        Some(known) => known.list.push(value),
        None => all.push(Values { name, unit, list: vec![value] }),
    };
    let mut sources = Vec::new();
    for name in SOURCES {
        let options = format!(",memory_mode=postcopy,fault_source={name}");
        match Ours::refusal(&programs, &options)? {
            None => sources.push(name),
            Some(why) => {
                eprintln!("SKIPPED {name}: {why}");
                notes.push(format!("SKIPPED {name}: {why}"));
            }
        }
    }
    for run in 0..runs {
        eprintln!("run {} of {runs}: floor", run + 1);
        let floor = floor::measure(usize::try_from(VCPUS)?, FLOOR_PAGES, Into::Populated)?;
        put("measured, floor: processor time".to_owned(), "us/page", floor.processor_us);
        let half_us = floor.processor_us / 2.0;
        for turn in 0..sources.len() {
            let Some(&name) = sources.get((turn + run) % sources.len()) else { continue };
            eprintln!("run {} of {runs}: {name}", run + 1);
            // Counting takes time: what is compared by time is measured without.
            let plain = moved::measure(&programs, name, Counted::Nothing);
            let plain = plain.map_err(|error| format!("{name}: {error}"))?;
            let counted = moved::measure(&programs, name, Counted::Calls(tracepoint));
            let counted = counted.map_err(|error| format!("{name}: {error}"))?;
            for (what, unit, value) in measured(&plain, &counted) {
                put(format!("measured, {name}: {what}"), unit, value);
            }
        }
        let lines = READ.get(1).map_or(1.0, |lines| lines.times[1]);
        let computed = [
            ("one userfaultfd", one_uffd(PROCESSORS)),
            ("uffd, with this program's readers", readers(PROCESSORS)),
            ("sigbus and exit, a vCPU's own reply", own_replies(PROCESSORS, half_us, lines)),
        ];
        for (what, value) in computed {
            put(format!("computed, {PROCESSORS} processors: {what}"), "thousand/s", value);
        }
    }
    for Read { what, times, files } in READ {
        for (way, value) in ["uffd", "own reply"].into_iter().zip(times) {
            put(format!("read, {way}: {what}"), "/page", value);
        }
        notes.push(format!("{what}: {files}"));
    }
    let figure = |values: Values| Figure::of(values.name, values.unit, values.list);
    let figures = all.into_iter().filter_map(figure).collect();
    Ok(Report {
        name: "fault-model",
        machine: machine::name(),
        figures,
        targets: Vec::new(),
        notes,
    })
}

/// What was measured of a fault source, with its unit.
fn measured(plain: &Moved, counted: &Moved) -> Vec<(&'static str, &'static str, f64)> {
    let mut all = vec![
        ("pages", "thousand/s", plain.pages_per_s / 1e3),
        ("processor time", "us/page", plain.processor_us),
        ("sleeps at the source", "/page", counted.sleeps[0]),
        ("sleeps at the destination", "/page", counted.sleeps[1]),
    ];
    if let Some([source, destination]) = counted.calls {
        all.push(("system calls at the source", "/page", source));
        all.push(("system calls at the destination", "/page", destination));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is(value: f64, wanted: f64) -> bool {
        (value / wanted - 1.0).abs() < 0.01
    }

    #[test]
    fn published_rates_are_kept_and_those_in_between_lie_in_between() {
        assert!(is(one_uffd(1.0), 150.0) && is(one_uffd(128.0), 62.0) && is(one_uffd(256.0), 36.0));
        assert!(is(published(&EXITS, 512.0), 4012.0), "no further than what was published");
        assert!(is(published(&EXITS, 2.0_f64.sqrt()), (340.0_f64 * 477.0).sqrt()));
        assert!(one_uffd(160.0) < 62.0 && one_uffd(160.0) > 36.0);
    }

    #[test]
    fn own_replies_are_limited_by_time_then_by_the_kernel_and_by_shared_lines() {
        // 2.94 us of a fault and 7.06 of a round trip.
        assert!(is(own_replies(2.0, 7.06, 1.0), 200.0));
        assert!(is(own_replies(160.0, 7.06, 1.0), published(&EXITS, 160.0)));
        assert!(is(own_replies(160.0, 7.06, 10.0), 1000.0), "ten lines of 0.1 us each");
    }

    #[test]
    fn readers_share_the_vcpus_and_the_memory() {
        assert!(is(readers(1.0), 150.0));
        assert!(is(readers(160.0), UFFD_EACH_OF_64));
    }
}
