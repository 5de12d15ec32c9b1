// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What attacks cost the host: processor time of the threads that are no vCPUs, for a second of each attack and for one
//! of them. A run on request, which judges nothing.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::attacks;
use super::machine::{Attackable, Disks};
use crate::harness::Vmm;

/// Names of the kinds of attack, by number.
const KINDS: [&str; 14] = [
    "writes to configuration space",
    "BARs moved",
    "writes to the common configuration",
    "devices set up anew",
    "rubbish in rings",
    "requests with one thing wrong",
    "up to 300 notifications",
    "writes to MSI-X tables",
    "writes to devices' configurations",
    "8 resets",
    "functions put back",
    "reads anywhere",
    "up to 48 accesses to ports",
    "up to 25 accesses to registers",
];
const REQUESTS: usize = 5;
const NOTIFICATIONS: usize = 6;
const DEVICES: [(u64, &str); 9] = [
    (1, "network"),
    (2, "disk"),
    (3, "console"),
    (4, "entropy"),
    (5, "balloon"),
    (17, "clock"),
    (19, "vsock"),
    (24, "memory"),
    (27, "persistent memory"),
];
const TICK_S: f64 = 0.01;
/// For the guest to set its devices up.
const SETTLE: Duration = Duration::from_secs(1);

/// Measures each kind of attack on all devices, and requests to each of them, for so long each.
pub fn all(seconds: u64) {
    println!("| attack | a second | processors | µs each | busiest thread, its share |");
    println!("| --- | --- | --- | --- | --- |");
    let all = (0_u64..).zip(KINDS).map(|(kind, name)| (name.to_owned(), 1 << kind, 0));
    let of = |kind: usize| {
        DEVICES.map(move |(number, name)| (format!("{}: {name}", KINDS[kind]), 1 << kind, number))
    };
    for (name, kinds, device) in all.chain(of(REQUESTS)).chain(of(NOTIFICATIONS)) {
        row(&name, kinds, device, Duration::from_secs(seconds));
    }
}

fn row(name: &str, kinds: u64, device: u64, time: Duration) {
    let disks = Disks::new();
    let mut machine = Attackable::new(&disks, 1);
    machine.add(&["--pvpanic"]);
    machine.attack(kinds, device);
    let vmm = machine.start();
    std::thread::sleep(SETTLE);
    let kind = usize::try_from(kinds.trailing_zeros()).expect("small");
    let (before, attacked, start) = (Used::of(&vmm), attacks(&vmm)[kind], Instant::now());
    std::thread::sleep(time);
    let (after, attacks) = (Used::of(&vmm), attacks(&vmm)[kind] - attacked);
    let seconds = start.elapsed().as_secs_f64();
    let others = after.others_s - before.others_s;
    let of = |thread: &str| before.by_thread.get(thread).copied().unwrap_or(0.0);
    let each = after.by_thread.iter().map(|(thread, used)| (used - of(thread), thread.as_str()));
    let (used, thread) = each.max_by(|one, other| one.0.total_cmp(&other.0)).unwrap_or_default();
    let attacks = f64::from(u32::try_from(attacks).unwrap_or(u32::MAX)).max(1.0);
    let rate = attacks / seconds;
    // What has ended is counted in ticks, of which one may be missing or too many.
    if others > TICK_S {
        let (processors, each_us) = (others / seconds, others * 1e6 / attacks);
        let share = used * 100.0 / others;
        println!(
            "| {name} | {rate:.0} | {processors:.2} | {each_us:.0} | `{thread}`, {share:.0} % |"
        );
    } else {
        println!("| {name} | {rate:.0} | 0.00 | below {:.0} | |", TICK_S * 1e6 / attacks);
    }
    vmm.shut_down();
}

/// Processor time so far, in seconds.
struct Used {
    /// Of all threads but those of vCPUs, and of those that have ended.
    others_s: f64,
    /// Of those that are there, by name.
    by_thread: BTreeMap<String, f64>,
}

impl Used {
    fn of(vmm: &Vmm) -> Self {
        let process = PathBuf::from(format!("/proc/{}", vmm.pid()));
        let mut by_thread = BTreeMap::new();
        let mut there_s = 0.0;
        for entry in fs::read_dir(process.join("task")).expect("its threads").flatten() {
            // One that has just ended has no times.
            let Some((name, ticks_s)) = used(&entry.path()) else { continue };
            let Some(used_s) = used_precisely(&entry.path()) else { continue };
            there_s += ticks_s;
            if !name.starts_with("vcpu") {
                *by_thread.entry(name).or_insert(0.0) += used_s;
            }
        }
        let (_, all_s) = used(&process).expect("its times");
        Self { others_s: by_thread.values().sum::<f64>() + (all_s - there_s).max(0.0), by_thread }
    }
}

/// Name, and time in user and kernel mode, of a process with what has ended of it, or of a thread.
fn used(task: &Path) -> Option<(String, f64)> {
    // SAFETY: takes a plain number and cannot fail.
    let ticks_a_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    let stat = fs::read_to_string(task.join("stat")).ok()?;
    let (head, rest) = stat.rsplit_once(") ")?;
    let (_, name) = head.split_once('(')?;
    // The state is the third field, the times are the 14th and 15th.
    let mut times = rest.split_ascii_whitespace().skip(11).map(str::parse::<u32>);
    let ticks = f64::from(times.next()?.ok()?) + f64::from(times.next()?.ok()?);
    Some((name.to_owned(), ticks / f64::from(i32::try_from(ticks_a_second).ok()?)))
}

/// Time of a thread by what the scheduler counts: to the nanosecond, where those are ticks.
fn used_precisely(task: &Path) -> Option<f64> {
    let times = fs::read_to_string(task.join("schedstat")).ok()?;
    let nanoseconds: u64 = times.split_ascii_whitespace().next()?.parse().ok()?;
    Some(Duration::from_nanos(nanoseconds).as_secs_f64())
}
