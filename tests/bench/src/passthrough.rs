// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench passthrough-boot`: evaluates the lab's log about VMs with a passed-through disk.
//!
//! Owns the parsing of its lines and the targets. It measures nothing: VFIO runs in the emulated machine,
//! whose times are meaningful only as ratios within one run.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use crate::machine;
use crate::report::{Figure, Report, Target};

const MODES: [(&str, &str); 13] = [
    ("none", "no device"),
    ("populated", "pin=strict, populated before"),
    ("strict", "pin=strict"),
    ("overlap", "pin=overlap"),
    ("pool", "pin=overlap with a pool"),
    ("qemu", "QEMU"),
    ("strict-iommufd", "pin=strict by iommufd"),
    ("overlap-iommufd", "pin=overlap by iommufd"),
    ("prepinned-iommufd", "a pool that has mapped memory, by iommufd"),
    ("early-overlap", "pin=overlap, asked at once"),
    ("early-pool", "pin=overlap with a pool, asked at once"),
    ("early-overlap-iommufd", "pin=overlap by iommufd, asked at once"),
    ("early-prepinned-iommufd", "a pool that has mapped memory, by iommufd, asked at once"),
];
const MEMORY: [(&str, u64); 5] =
    [("4k", 256), ("4k", 1024), ("4k", 4096), ("thp", 4096), ("2m", 4096)];
const FIRST_INSTRUCTION: &str = "first-instruction";
const ASKED: &str = "bus-master-asked";
const WAITED: &str = "waited";
const OPENING: &str = "opening";
const PINNING: &str = "pinning";
const WHAT: [(&str, &str); 6] = [
    (FIRST_INSTRUCTION, "exec to first guest instruction"),
    (ASKED, "exec to the driver's first Bus Master Enable"),
    (WAITED, "how long that waited"),
    (OPENING, "opening and resetting the device"),
    (PINNING, "populating and mapping all memory"),
    ("attaching", "attaching the device to memory that is mapped"),
];

/// Mode, pages, MiB and measured interval.
type Key<'a> = (&'a str, &'a str, u64, &'a str);

/// Reads the log of the lab's machine.
pub fn run(log: &Path) -> Result<Report, Box<dyn Error>> {
    let bytes = std::fs::read(log).map_err(|error| format!("{}: {error}", log.display()))?;
    let text = String::from_utf8_lossy(&bytes);
    let mut samples: BTreeMap<Key<'_>, Vec<f64>> = BTreeMap::new();
    for line in text.lines() {
        let words: Vec<&str> = line.trim().split_ascii_whitespace().collect();
        let ["FIGURE", mode, pages, mib, run, what, ms] = words[..] else { continue };
        // The first run is a warm-up.
        if run != "0" {
            samples.entry((mode, pages, mib.parse()?, what)).or_default().push(ms.parse()?);
        }
    }
    if samples.is_empty() {
        return Err(format!("{} has no figures: the lab failed", log.display()).into());
    }
    Ok(report(&samples))
}

fn report(samples: &BTreeMap<Key<'_>, Vec<f64>>) -> Report {
    let mut figures = Vec::new();
    let mut medians = BTreeMap::new();
    for (what, about) in WHAT {
        for (pages, mib) in MEMORY {
            for (mode, name) in MODES {
                let values = samples.get(&(mode, pages, mib, what)).cloned().unwrap_or_default();
                let name = format!("{name}, {mib} MiB of {pages} pages: {about}");
                if let Some(figure) = Figure::of(name, "ms", values) {
                    medians.insert((mode, pages, mib, what), figure.value);
                    figures.push(figure);
                }
            }
        }
    }
    let medians = Medians(medians);
    let mut targets = Vec::new();
    for (overlap, strict, by) in
        [("overlap", "strict", ""), ("overlap-iommufd", "strict-iommufd", " by iommufd")]
    {
        targets.extend(medians.of_starting(overlap, by));
        targets.extend(medians.of_overlapping(overlap, strict, by));
    }
    targets.extend(medians.of_peers());
    let notes = vec!["Emulated times: only ratios within this run mean anything.".to_owned()];
    let machine = format!("the lab's machine on {}", machine::name());
    Report { name: "passthrough-boot", machine, figures, targets, notes }
}

/// The median of each figure.
struct Medians<'a>(BTreeMap<Key<'a>, f64>);

impl Medians<'_> {
    fn of(&self, mode: &str, (pages, mib): (&str, u64), what: &str) -> Option<f64> {
        self.0.get(&(mode, pages, mib, what)).copied()
    }

    /// Time from exec to the usable device.
    fn usable(&self, mode: &str, memory: (&str, u64)) -> Option<f64> {
        Some(self.of(mode, memory, ASKED)? + self.of(mode, memory, WAITED)?)
    }

    /// Targets for the time to the guest's first instruction.
    fn of_starting(&self, mode: &str, by: &str) -> Vec<Target> {
        let mut targets = Vec::new();
        let first = |mode, memory| self.of(mode, memory, FIRST_INSTRUCTION);
        for memory in MEMORY {
            if let Some((with, without)) = first(mode, memory).zip(first("none", memory)) {
                let name = format!(
                    "first instruction with the device{by} over without, {}",
                    about(memory)
                );
                targets.push(Target::at_most(&name, with / without, 1.2));
            }
        }
        for large in MEMORY.into_iter().filter(|memory| memory.1 == 4096) {
            if let Some((with, less)) = first(mode, large).zip(first(mode, ("4k", 256))) {
                let name =
                    format!("first instruction with the device{by}, {} over 256 MiB", about(large));
                targets.push(Target::at_most(&name, with / less, 1.2));
            }
        }
        targets
    }

    /// Targets for the time to the usable device.
    fn of_overlapping(&self, overlap: &str, strict: &str, by: &str) -> Vec<Target> {
        let mut targets = Vec::new();
        for memory in MEMORY {
            let (about, usable) = (about(memory), self.usable(overlap, memory));
            if let Some((overlap, strict)) = usable.zip(self.usable(strict, memory)) {
                let name = format!("device usable{by}, overlap over strict, {about}");
                targets.push(Target::at_most(&name, overlap / strict, 1.0));
            }
            // Time that the guest takes by itself: that with everything pinned before it starts.
            let alone = self.of(strict, memory, ASKED).zip(self.of(strict, memory, PINNING));
            if let Some((ours, (asked, pinning))) = usable.zip(alone) {
                let name = format!(
                    "device usable{by} over the guest's own time or pinning alone, {about}"
                );
                let limit = (asked - pinning).max(pinning);
                targets.push(Target::at_most(&name, ours / limit, 1.1));
            }
        }
        targets
    }

    /// Targets for the pool, QEMU, and both interfaces to the IOMMU.
    fn of_peers(&self) -> Vec<Target> {
        let mut targets = Vec::new();
        for memory in MEMORY {
            let about = about(memory);
            let ratio = |name: &str, ours: Option<f64>, theirs: Option<f64>| {
                let (ours, theirs) = ours.zip(theirs)?;
                Some(Target::at_most(&format!("{name}, {about}"), ours / theirs, 1.0))
            };
            let usable = |mode| self.usable(mode, memory);
            let pinning = |mode| self.of(mode, memory, PINNING);
            targets.extend(ratio(
                "device usable, overlap over QEMU",
                usable("overlap"),
                usable("qemu"),
            ));
            targets.extend(ratio(
                "pinning with pin=strict, iommufd over type1",
                pinning("strict-iommufd"),
                pinning("strict"),
            ));
            for (mode, early, name) in [
                ("pool", "early-pool", "memory of the pool"),
                ("prepinned-iommufd", "early-prepinned-iommufd", "mapped memory of the pool"),
            ] {
                if let Some(added) = self.added(mode, memory) {
                    let name = format!("what the device adds with {name}, ms, {about}");
                    targets.push(Target::at_most(&name, added, 100.0));
                }
                if let Some(added) = self.added_at_once(early, memory) {
                    let name =
                        format!("what it adds to a guest that asks at once, {name}, ms, {about}");
                    targets.push(Target::at_most(&name, added, 100.0));
                }
            }
        }
        targets
    }

    /// How much later the guest starts than without the device, plus how long its driver waits.
    fn added(&self, mode: &str, memory: (&str, u64)) -> Option<f64> {
        let first = |mode| self.of(mode, memory, FIRST_INSTRUCTION);
        Some(first(mode)? - first("none")? + self.of(mode, memory, WAITED)?)
    }

    /// The time from the first instruction to the usable device, without opening and resetting it, for which
    /// every guest waits that uses the device at once.
    fn added_at_once(&self, mode: &str, memory: (&str, u64)) -> Option<f64> {
        let first = self.of(mode, memory, FIRST_INSTRUCTION)?;
        Some(self.usable(mode, memory)? - first - self.of(mode, memory, OPENING)?)
    }
}

fn about((pages, mib): (&str, u64)) -> String {
    format!("{mib} MiB of {pages}")
}
