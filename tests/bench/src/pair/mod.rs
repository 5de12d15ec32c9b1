// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two VMMs between which a guest moves, of this program or QEMU: shared by the benchmarks of
//! migration.
//!
//! Owns the size of the guest, so that all of them measure the same one, and its preparation. Must
//! never measure anything.

pub mod ours;
pub mod qemu;

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use guest_reader::{Guest, Patience, Status};

use crate::process;

/// Guest RAM.
pub const MEMORY_MIB: u64 = 1024;
/// That of a large guest: what QEMU's machine has below 4 GiB without a hole.
pub const LARGE_MIB: u64 = 2764;
/// vCPUs of the guest.
pub const VCPUS: u32 = 2;
/// Time limit for the guest to boot and fill its memory, or to appear at its destination.
pub const PATIENCE: Patience = Patience::millis(60_000);
/// Time after which the guest's rate is steady.
const SETTLE: Duration = Duration::from_millis(300);

/// The measured programs.
#[derive(Clone, Copy, Debug)]
pub struct Programs<'a> {
    /// `cloud-hypervisor`.
    pub vmm: &'a Path,
    /// `ch-remote`.
    pub remote: &'a Path,
    /// The test guest's image.
    pub guest: &'a Path,
    /// Further options of each `cloud-hypervisor`.
    pub options: &'a [&'a str],
    /// What the guest's memory is made of: further keys of `--memory`, each behind a comma.
    pub memory: &'a str,
    /// vCPUs of the guest; QEMU has always [`VCPUS`].
    pub vcpus: u32,
    /// Guest RAM.
    pub memory_mib: u64,
}

/// Two VMMs, the first one with the guest.
pub trait Pair {
    /// Process ID of the VMM with the guest.
    fn source_pid(&self) -> u32;
    /// Process ID of the destination.
    fn destination_pid(&self) -> u32;
    /// Guest RAM.
    fn memory_mib(&self) -> u64;
    /// Migrates; returns when the source reports the end.
    fn migrate(&mut self) -> Result<(), Box<dyn Error>>;
    /// Waits until the source's process has ended after a migration, and is told to where it would not by itself;
    /// returns the processor time that it used in all.
    fn end_source(&mut self) -> Result<Duration, Box<dyn Error>>;
}

/// A workload of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Name in the figures.
    pub name: &'static str,
    /// The guest's command line.
    pub cmdline: &'static str,
    /// Request that is set once its memory is filled, before the measurement.
    pub then: &'static str,
    /// True if work is counted in page visits; otherwise in readings of the clock.
    pub visits: bool,
}

impl Workload {
    /// The work that the guest has done so far.
    pub fn work(self, status: &Status) -> u64 {
        if self.visits {
            status.iterations()
        } else {
            status.known().map(|vcpu| vcpu.heartbeat).sum()
        }
    }
}

/// All memory populated, and idle afterwards.
pub const IDLE: Workload = Workload {
    name: "idle",
    cmdline: "workload=fill",
    then: "workload=idle reset=1",
    visits: false,
};

/// Random writes. 42,553 ns between two writes of each of two vCPUs are 47,000 writes per second.
pub const RANDOM_WRITING: Workload = Workload {
    name: "random-writing",
    cmdline: "workload=random-write mem=700M pace_ns=42553",
    then: "reset=1",
    visits: true,
};

/// The same for [`LARGE_MIB`].
pub const LARGE_WRITING: Workload = Workload {
    name: "large, random-writing",
    cmdline: "workload=random-write mem=2458M pace_ns=42553",
    then: "reset=1",
    visits: true,
};

/// A guest that is ready to be measured.
pub struct Prepared {
    /// The guest.
    pub guest: Guest,
    /// Memory that it has, without holes.
    pub populated_bytes: u64,
}

/// Waits until the guest of `pid` has filled its memory and runs its workload.
pub fn prepare(pid: u32, workload: Workload) -> Result<Prepared, Box<dyn Error>> {
    let guest = Guest::attach_within(pid, PATIENCE)?;
    let state = if workload.visits { "work" } else { "done" };
    guest.wait_until("the guest's memory being filled", PATIENCE, |status| {
        status.stage == "running" && status.all_in(state)
    })?;
    let generation = guest.set(workload.then)?;
    guest.wait_for_generation(generation, PATIENCE)?;
    let ram = process::guest_ram(pid).ok_or("guest RAM is not a memfd")?;
    let populated_bytes = std::os::unix::fs::MetadataExt::blocks(&ram.metadata()?) * 512;
    std::thread::sleep(SETTLE);
    Ok(Prepared { guest, populated_bytes })
}

/// A duration in milliseconds.
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// A rate per second.
pub fn per_second(count: u64, time: Duration) -> f64 {
    float(count) / time.as_secs_f64()
}

/// Converts a count, or a time in nanoseconds.
#[expect(clippy::cast_precision_loss, reason = "those of some minutes are below 2^52")]
pub fn float(count: u64) -> f64 {
    count as f64
}
