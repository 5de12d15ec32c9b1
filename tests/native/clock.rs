// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest time continues with real time: over a pause, and from one VMM to another.
//!
//! What the test guest can see is its TSC; the wall clock of a Linux guest follows the same
//! reading of the host. Where KVM gives a guest the host's own counter and no offset, this finds an
//! offset that should not be there, and the tests of the `hypervisor` crate and the lab find one
//! that is missing.

use std::time::{Duration, Instant};

use vm_migration::protocol::message::Command;

use crate::cuts::{Stopped, stop_at_after};
use crate::harness::relay::{self, Point, Row};
use crate::harness::{Mode, Suite, Vmm};

/// How far guest time may be from real time.
const ERROR_MAX: Duration = Duration::from_millis(50);
/// How long a guest stands still at least, so that a clock that stops with it is found.
const PAUSE: Duration = Duration::from_millis(400);

pub fn add(suite: &mut Suite) {
    suite.add("clock::continues_over_a_pause", paused);
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = mode.name();
        suite.add(&format!("clock::goes_on_over_a_{name}_migration"), move || moved(mode));
    }
}

/// A guest's TSC, and the host's clock at about the same moment: the guest runs, and notes its TSC
/// with each step.
struct Reading {
    tsc: u64,
    at: Instant,
    uncertain: Duration,
}

fn reading(vmm: &Vmm) -> Reading {
    let guest = vmm.guest();
    // The tightest of several: this thread may be interrupted between two steps.
    (0..20)
        .map(|_| {
            let start = Instant::now();
            let status = guest.wait_for_heartbeat(crate::harness::vmm::GUEST_PATIENCE);
            let tsc = status.expect("a status").known().map(|vcpu| vcpu.last_tsc).max();
            let uncertain = start.elapsed();
            Reading { tsc: tsc.unwrap_or(0), at: start + uncertain / 2, uncertain }
        })
        .min_by_key(|reading| reading.uncertain)
        .expect("twenty readings")
}

#[track_caller]
fn assert_in_step(before: &Reading, after: &Reading, khz: u64) {
    let real = after.at.duration_since(before.at);
    let ticks = u128::from(after.tsc.wrapping_sub(before.tsc));
    let guest =
        Duration::from_nanos(u64::try_from(ticks * 1_000_000 / u128::from(khz)).expect("a time"));
    let error = guest.abs_diff(real);
    let allowed = ERROR_MAX + before.uncertain + after.uncertain;
    println!("     {error:?} off in {real:?}, readings are good to {:?}", after.uncertain);
    assert!(error < allowed, "guest time {guest:?}, real time {real:?}");
}

fn paused() {
    let vmm = Vmm::boot(1, "size=96M,shared=on", "workload=random-write mem=32M");
    let khz = vmm.guest().tsc_khz();
    let before = reading(&vmm);
    vmm.api().put("vm.pause", "").ok();
    std::thread::sleep(PAUSE);
    vmm.api().put("vm.resume", "").ok();
    assert_in_step(&before, &reading(&vmm), khz);
    vmm.shut_down();
}

/// The guest's state is on its way for long enough that a clock that stands still then is found.
fn moved(mode: Mode) {
    let on_its_way = |row: &Row| (row.command, row.point) == (Command::State, Point::Message);
    let row = relay::rows(mode).into_iter().find(on_its_way).expect("a row");
    let mut before = None;
    let Stopped { mut source, destination, relay, reception } = stop_at_after(row, |source| {
        before = Some((reading(source), source.guest().tsc_khz()));
    });
    std::thread::sleep(PAUSE);
    relay.release();
    assert!(reception.finish().status.success(), "{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    let (before, khz) = before.expect("a reading");
    assert_in_step(&before, &reading(&destination), khz);
    destination.verify();
    destination.shut_down();
}
