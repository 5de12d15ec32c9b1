// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One guest that migrates again and again while all its vCPUs write at full speed: after each
//! move every page is compared, and what one move spoils the next ones would carry on.
//!
//! `GODWIT_MIGRATIONS=20` makes the full number of moves and adds guests of 4 GiB; otherwise 3.

use std::time::Duration;

use guest_reader::VerifyReport;

use crate::harness::migrate::migrate;
use crate::harness::{Mode, Suite, Transport, Vmm, skip};

/// For start and fill of one GiB, and as much again for each move and check of it.
const LIMIT_EACH: Duration = Duration::from_mins(1);
/// Moves from which on it is worth while to fill 4 GiB.
const MANY: u32 = 10;
/// Guest RAM beside the test pages, MiB: the guest's counters, and pages that stay untouched.
const MORE_MIB: u64 = 256;
/// Pages visited between two moves, so that each move carries new contents.
const VISITS: u64 = 20_000;

pub fn add(suite: &mut Suite) {
    let count = std::env::var("GODWIT_MIGRATIONS").ok().and_then(|text| text.parse().ok());
    let count: u32 = count.unwrap_or(3).max(1);
    for mode in [Mode::Precopy, Mode::Postcopy] {
        for (transport, name) in [(Transport::Tcp, "tcp"), (Transport::Unix, "unix")] {
            for gib in [1, 4] {
                if gib > 1 && count < MANY {
                    continue;
                }
                let name = format!("migration::{}_{name}_{gib}_gib_{count}_moves", mode.name());
                let limit = LIMIT_EACH * u32::from(gib) * (count + 1);
                suite.add_long(&name, limit, move || rounds(mode, transport, gib, count));
            }
        }
    }
}

fn rounds(mode: Mode, transport: Transport, gib: u16, count: u32) {
    let gib = u64::from(gib);
    let size_mib = gib * 1024 + MORE_MIB;
    // Source and destination are there at the same time.
    let (needed, free) = (2 * size_mib + 1024, available_mib());
    if free < needed {
        skip(format!("needs {needed} MiB of memory, {free} MiB are available"));
    }
    let cmdline = format!("workload=random-write mem={gib}G");
    let mut here = Vmm::boot(2, &format!("size={size_mib}M,shared=on"), &cmdline);
    let mut before = check(&here, gib);
    for number in 1..=count {
        here.wait_for_work(VISITS);
        let there = Vmm::empty();
        migrate(here, &there, transport, mode);
        there.wait_for_work(VISITS);
        let visits = check(&there, gib);
        assert!(
            visits >= before + 2 * VISITS,
            "move {number}: work was undone: {visits}, {before}"
        );
        (here, before) = (there, visits);
    }
    let gap_ms = here.guest_status().gap_max_ns() / 1_000_000;
    println!("     longest gap of a vCPU in {count} moves {gap_ms} ms");
    here.shut_down();
}

/// Compares every page; gives the visits that the guest has made so far.
fn check(vmm: &Vmm, gib: u64) -> u64 {
    let VerifyReport { written, resident, .. } = vmm.verify();
    assert_eq!(written, (gib << 30) / 4096, "every page was filled before");
    assert!(resident >= written, "pages are missing: {resident} of {written}");
    vmm.guest_status().iterations()
}

fn available_mib() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}
