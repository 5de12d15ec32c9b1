// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One guest that migrates again and again while all its vCPUs write at full speed: after each
//! move every page is compared, and what one move spoils the next ones would carry on.
//!
//! `GODWIT_MIGRATIONS=20` makes the full number of moves and adds guests of 4 GiB; otherwise 3.
//! Guests that write 90 % of 2 GiB move in postcopy and in auto, which has to become postcopy: they
//! write faster than the allowed downtime is long.

use std::time::Duration;

use guest_reader::VerifyReport;

use crate::harness::migrate::{migrate, migrate_by};
use crate::harness::{Mode, Suite, Transport, Vmm, skip};

/// For start and fill of one GiB, and as much again for each move and check of it.
const LIMIT_EACH: Duration = Duration::from_mins(1);
/// Moves from which on it is worth while to fill 4 GiB.
const MANY: u32 = 10;
/// Guest RAM alongside the test pages, MiB: the guest's counters, and pages that stay untouched.
const MORE_MIB: u64 = 256;
/// Guest RAM of which 90 % are written, MiB, and how much that is.
const NEARLY_ALL_MIB: (u64, u64) = (2048, 1844);
/// What ends precopy before its rounds do: a downtime that hardly any reaches, and a clock.
const NEVER: &str = "downtime_ms=1,postcopy_after_s=1";
/// Pages visited between two moves, so that each move carries new contents.
const VISITS: u64 = 20_000;

pub fn add(suite: &mut Suite) {
    let count = std::env::var("GODWIT_MIGRATIONS").ok().and_then(|text| text.parse().ok());
    let count: u32 = count.unwrap_or(3).max(1);
    for mode in [Mode::Precopy, Mode::Postcopy] {
        for (transport, name) in [(Transport::Tcp, "tcp"), (Transport::Unix, "unix")] {
            for gib in [1_u16, 4] {
                if gib > 1 && count < MANY {
                    continue;
                }
                let name = format!("migration::{}_{name}_{gib}_gib_{count}_moves", mode.name());
                let limit = LIMIT_EACH * u32::from(gib) * (count + 1);
                let size = Size::of_gib(u64::from(gib));
                suite.add_long(&name, limit, move || rounds(mode, transport, size, count));
            }
        }
    }
    for mode in [Mode::Postcopy, Mode::Auto] {
        let name = format!("migration::{}_of_90_percent_of_2_gib_{count}_moves", mode.name());
        let (all, written) = NEARLY_ALL_MIB;
        let size = Size { ram_mib: all, written_mib: written };
        let limit = LIMIT_EACH * 2 * (count + 1);
        suite.add_long(&name, limit, move || rounds(mode, Transport::Tcp, size, count));
    }
}

/// A guest's memory, and how much of it the guest writes.
#[derive(Clone, Copy, Debug)]
struct Size {
    ram_mib: u64,
    written_mib: u64,
}

impl Size {
    const fn of_gib(gib: u64) -> Self {
        Self { ram_mib: gib * 1024 + MORE_MIB, written_mib: gib * 1024 }
    }
}

fn rounds(mode: Mode, transport: Transport, size: Size, count: u32) {
    let Size { ram_mib, written_mib } = size;
    // Source and destination are there at the same time.
    let (needed, free) = (2 * ram_mib + 1024, available_mib());
    if free < needed {
        skip(format!("needs {needed} MiB of memory, {free} MiB are available"));
    }
    let cmdline = format!("workload=random-write mem={written_mib}M");
    let mut here = Vmm::boot(2, &format!("size={ram_mib}M,shared=on"), &cmdline);
    let mut before = check(&here, size);
    for number in 1..=count {
        here.wait_for_work(VISITS);
        let there = Vmm::empty();
        go(here, &there, transport, mode);
        there.wait_for_work(VISITS);
        let visits = check(&there, size);
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

/// Moves the guest. One that moves in `auto` must have run before its last page came.
fn go(here: Vmm, there: &Vmm, transport: Transport, mode: Mode) {
    if mode != Mode::Auto {
        migrate(here, there, transport, mode);
        return;
    }
    let option = |url: &str| format!("destination_url={url},memory_mode={},{NEVER}", mode.name());
    migrate_by(here, there, transport, mode, option);
    let progress = there.api().get("vm.migration-progress").ok().json();
    assert!(progress["faults"]["source"].is_string(), "it was not postcopy: {progress}");
}

/// Compares every page; gives the visits that the guest has made so far.
fn check(vmm: &Vmm, size: Size) -> u64 {
    let VerifyReport { written, resident, .. } = vmm.verify();
    assert_eq!(written, (size.written_mib << 20) / 4096, "every page was filled before");
    assert!(resident >= written, "pages are missing: {resident} of {written}");
    vmm.guest_status().iterations()
}

fn available_mib() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}
