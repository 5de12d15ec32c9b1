// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench passthrough-boot`: what the lab's machine printed about VMs with a passed-through disk.
//!
//! Owns the reading of its lines and the targets. It measures nothing: VFIO is in the emulated machine, whose
//! times are good for ratios within one run only.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use crate::machine;
use crate::report::{Figure, Report, Target};

const MODES: [(&str, &str); 7] = [
    ("none", "no device"),
    ("strict", "pin=strict"),
    ("overlap", "pin=overlap"),
    ("pool", "pin=overlap with a pool"),
    ("qemu", "QEMU"),
    ("strict-iommufd", "pin=strict by iommufd"),
    ("overlap-iommufd", "pin=overlap by iommufd"),
];
const MEMORY: [(&str, u64); 4] = [("4k", 256), ("4k", 512), ("4k", 1024), ("2m", 1024)];
const FIRST_INSTRUCTION: &str = "first-instruction";
const WHAT: [(&str, &str); 5] = [
    (FIRST_INSTRUCTION, "exec to first guest instruction"),
    ("bus-master-asked", "exec to the driver's first Bus Master Enable"),
    ("bus-master-granted", "exec to that being granted"),
    ("opening", "opening and resetting the device"),
    ("pinning", "populating and mapping all memory"),
];

/// Mode, pages, MiB and what.
type Key<'a> = (&'a str, &'a str, u64, &'a str);

/// Reads the log of the lab's machine.
pub fn run(log: &Path) -> Result<Report, Box<dyn Error>> {
    let bytes = std::fs::read(log).map_err(|error| format!("{}: {error}", log.display()))?;
    let text = String::from_utf8_lossy(&bytes);
    let mut samples: BTreeMap<Key<'_>, Vec<f64>> = BTreeMap::new();
    for line in text.lines() {
        let words: Vec<&str> = line.trim().split_ascii_whitespace().collect();
        let ["FIGURE", mode, pages, mib, run, what, ms] = words[..] else { continue };
        // The first run warms up.
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
    let of = |mode, (pages, mib), what| medians.get(&(mode, pages, mib, what)).copied();
    let mut targets = Vec::new();
    let largest = ("4k", 1024);
    for (overlap, strict, by) in
        [("overlap", "strict", ""), ("overlap-iommufd", "strict-iommufd", " by iommufd")]
    {
        for memory in MEMORY {
            let (pages, mib) = memory;
            let with = of(overlap, memory, FIRST_INSTRUCTION);
            if let Some((with, without)) = with.zip(of("none", memory, FIRST_INSTRUCTION)) {
                let name = format!(
                    "first instruction with the device{by} over without, {mib} MiB of {pages}"
                );
                targets.push(Target::at_most(&name, with / without, 1.2));
            }
            let granted = of(overlap, memory, "bus-master-granted");
            if let Some((overlap, strict)) = granted.zip(of(strict, memory, "bus-master-granted")) {
                let name = format!("device usable{by}, overlap over strict, {mib} MiB of {pages}");
                targets.push(Target::at_most(&name, overlap / strict, 1.0));
            }
        }
        let small = of(overlap, ("4k", 256), FIRST_INSTRUCTION);
        if let Some((large, small)) = of(overlap, largest, FIRST_INSTRUCTION).zip(small) {
            let name = format!("first instruction with the device{by}, 1024 MiB over 256 MiB");
            targets.push(Target::at_most(&name, large / small, 1.2));
        }
    }
    for memory in MEMORY {
        let (pages, mib) = memory;
        let pinning = of("strict-iommufd", memory, "pinning").zip(of("strict", memory, "pinning"));
        if let Some((iommufd, type1)) = pinning {
            let name = format!("pinning with pin=strict, iommufd over type1, {mib} MiB of {pages}");
            targets.push(Target::at_most(&name, iommufd / type1, 1.0));
        }
    }
    for memory in MEMORY {
        let (pages, mib) = memory;
        let about = format!("{mib} MiB of {pages}");
        let usable = of("overlap", memory, "bus-master-granted");
        if let Some((ours, theirs)) = usable.zip(of("qemu", memory, "bus-master-granted")) {
            let name = format!("device usable, overlap over QEMU, {about}");
            targets.push(Target::at_most(&name, ours / theirs, 1.0));
        }
        // What the guest takes by itself is what it takes when all is pinned before it starts.
        let alone = of("strict", memory, "bus-master-asked").zip(of("strict", memory, "pinning"));
        if let Some((ours, (asked, pinning))) = usable.zip(alone) {
            let name = format!("device usable over the guest's own time or pinning alone, {about}");
            targets.push(Target::at_most(&name, ours / (asked - pinning).max(pinning), 1.1));
        }
        if let Some(pinning) = of("pool", memory, "pinning") {
            let name = format!("pinning memory of the pool, ms, {about}");
            targets.push(Target::at_most(&name, pinning, 100.0));
        }
    }
    let notes = vec!["Emulated times: only ratios within this run mean anything.".to_owned()];
    let machine = format!("the lab's machine on {}", machine::name());
    Report { name: "passthrough-boot", machine, figures, targets, notes }
}
