// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds of what accesses the registers of the platform: hot-plug, clock, power, serial port.

use super::Seed;

const PCI: u8 = 0;
const CPUS: u8 = 1;
const CPU_SELECTOR: u8 = 2;
const MEMORY: u8 = 3;
const MEMORY_SELECTOR: u8 = 4;
const EVENTS: u8 = 5;
const CLOCK: u8 = 8;
const SERIAL: u8 = 10;
const OWNER: u8 = 14;
const MOVE: u8 = 15;
const WRITE: u8 = 1 << 4;
/// The length of an access, as an index: four bytes, and one.
const BYTE: u8 = 1 << 5;

fn step(what: u8, place: u8, value: u64) -> Vec<u8> {
    [vec![what, place, 0], value.to_le_bytes().to_vec()].concat()
}

fn owner(what: u8, place: u8, value: u64) -> Vec<u8> {
    step(what << 4 | OWNER, place, value)
}

/// A device comes and another goes, in the second segment as well.
fn pci() -> Vec<Vec<u8>> {
    let mut steps = Vec::new();
    for segment in 0..2 {
        steps.extend([
            owner(0, segment << 5, 5),
            owner(1, segment << 5, 6),
            owner(6, 0, 1),
            step(EVENTS | BYTE, 0, 0),
            step(PCI | WRITE, 12, segment.into()),
            step(PCI, 0, 0),
            step(PCI, 4, 0),
            step(PCI | WRITE, 8, 1 << 6),
            step(MOVE, 0, 0),
            owner(2, segment << 5, 6),
        ]);
    }
    steps
}

/// A vCPU comes and goes, by both kinds of registers.
fn cpus() -> Vec<Vec<u8>> {
    let mut steps =
        vec![owner(3, 0, 4), step(CPUS, 0, 0), step(CPUS, 32, 0), owner(4, 0, 4), step(CPUS, 0, 0)];
    steps.extend([step(MOVE, 0, 0), step(CPUS | WRITE, 4, 4), owner(3, 0, 5), owner(4, 0, 2)]);
    for index in [5, 2] {
        steps.extend([step(CPU_SELECTOR | WRITE, 0, index), step(CPU_SELECTOR | BYTE, 4, 0)]);
        steps.push(step(CPU_SELECTOR | BYTE | WRITE, 4, 0xe));
        steps.push(step(MOVE, 0, 0));
    }
    steps
}

/// Memory comes twice, and is found by both kinds of registers.
fn memory() -> Vec<Vec<u8>> {
    let mut steps = vec![owner(5, 27, 3), owner(5, 27, 0), step(MEMORY, 0, 0), step(MEMORY, 8, 0)];
    steps.extend((16..48).step_by(4).map(|offset| step(MEMORY, offset, 0)));
    steps.extend([step(MEMORY | WRITE, 4, 0x101), step(MEMORY_SELECTOR | WRITE, 0, 1)]);
    steps.extend((0..16).step_by(4).map(|offset| step(MEMORY_SELECTOR, offset, 0)));
    steps.extend([
        step(MEMORY_SELECTOR | BYTE, 20, 0),
        step(MEMORY_SELECTOR | BYTE | WRITE, 20, 2),
        step(MOVE, 0, 0),
    ]);
    steps
}

/// The clock is read, stopped, set and started; the serial port is set up and written to.
fn ports() -> Vec<Vec<u8>> {
    let index = |index| step(CLOCK | BYTE | WRITE, 0, index);
    let mut steps = vec![owner(8, 0, 1_800_000_000)];
    for register in [0, 2, 4, 6, 7, 8, 9, 10, 11, 12, 13, 0x32, 0x34] {
        steps.extend([index(register), step(CLOCK | BYTE, 1, 0)]);
    }
    for (register, value) in [(11, 0x82), (7, 0x31), (8, 0x12), (4, 0x11), (11, 0x06)] {
        steps.extend([index(register), step(CLOCK | BYTE | WRITE, 1, value), step(MOVE, 0, 0)]);
    }
    for (register, value) in [(3, 0x80), (0, 1), (1, 0), (3, 3), (1, 1), (4, 0x0b), (0, 0x41)] {
        steps.push(step(SERIAL | BYTE | WRITE, register, value));
    }
    steps.extend((0..8).map(|register| step(SERIAL | BYTE, register, 0)));
    steps.push(step(MOVE, 0, 0));
    steps
}

/// A saved state of each.
fn states() -> Vec<(&'static str, &'static str)> {
    vec![
        ("acpi-ged", r#"{"kind":"acpi-ged","version":1,"data":{"pending":4}}"#),
        ("acpi-pm-timer", r#"{"kind":"acpi-pm-timer","version":1,"data":{"ticks":7}}"#),
        (
            "pci-hotplug",
            r#"{"kind":"pci-hotplug","version":1,"data":{"up":2,"down":4,"leaving":4,"ejected":8}}"#,
        ),
        (
            "pci-hotplug-segments",
            r#"{"kind":"pci-hotplug","version":2,"data":{"segments":[{"up":2,"down":4,"leaving":4,"ejected":8},{"up":0,"down":0,"leaving":0,"ejected":2}],"selected":1}}"#,
        ),
        (
            "cpu-hotplug",
            r#"{"kind":"cpu-hotplug","version":2,"data":{"present":[0,1,2],"coming":[2],"going":[1],"leaving":[1],"selected":2}}"#,
        ),
        (
            "memory-hotplug",
            r#"{"kind":"memory-hotplug","version":2,"data":{"devices":[{"gpa":4294967296,"len_bytes":134217728}],"coming":[0],"selected":1}}"#,
        ),
        ("vmgenid", r#"{"kind":"vmgenid","version":1,"data":{"gpa":978944}}"#),
        (
            "serial-16550",
            r#"{"kind":"serial-16550","version":1,"data":{"baud_divisor_low":1,"baud_divisor_high":0,"interrupt_enable":1,"interrupt_identification":1,"line_control":3,"line_status":96,"modem_control":8,"modem_status":176,"scratch":0,"in_buffer":[65]}}"#,
        ),
    ]
}

/// The clock's state has each of its 128 registers.
fn clock_state() -> String {
    let bytes = vec!["0"; 128].join(",");
    let held = r#"{"second":1,"minute":2,"hour":3,"weekday":4,"day":5,"month":6,"year_of_century":7,"century":20}"#;
    format!(
        r#"{{"kind":"cmos","version":2,"data":{{"index":4,"bytes":[{bytes}],"clock":{{"ahead_s":-5,"held":{held}}}}}}}"#
    )
}

pub fn seeds() -> Vec<Seed> {
    let sets =
        [("pci", 1, pci()), ("cpus", 0, cpus()), ("memory", 0, memory()), ("ports", 0, ports())];
    let runs = sets.into_iter().map(|(name, mode, steps)| {
        Seed::new("platform_registers", name, [vec![mode], steps.concat()].concat())
    });
    let clock = clock_state();
    let states = states().into_iter().chain([("cmos", clock.as_str())]);
    let states = states.map(|(name, json)| {
        Seed::new(
            "platform_registers",
            format!("state-{name}"),
            [&[0xff], json.as_bytes()].concat(),
        )
    });
    runs.chain(states.collect::<Vec<_>>()).collect()
}
