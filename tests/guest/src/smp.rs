// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Starts the other vCPUs with INIT and SIPI through the local APIC, from CPL 3.
//!
//! APIC ids are 0 to n-1. One vCPU at a time, since they share one mailbox.

use crate::abi;
use crate::boot;
use crate::clock;
use crate::mem::{self, Block};

const LAPIC: u64 = 0xfee0_0000;
const SPURIOUS: u64 = LAPIC + 0xf0;
const ICR_LOW: u64 = LAPIC + 0x300;
const ICR_HIGH: u64 = LAPIC + 0x310;
const SOFTWARE_ENABLE: u32 = 0x1ff;
const INIT_ASSERT: u32 = 0x4500;
const STARTUP: u32 = 0x4600 | abi::TRAMPOLINE_PAGE;

/// Tries of the startup message, and how long each waits.
const TRIES: u32 = 40;
const WAIT_NS: u64 = 50_000_000;
const AFTER_INIT_NS: u64 = 20_000;

/// Starts vCPUs 1 to `vcpus - 1` at `entry`; gives the number that run, vCPU 0 included.
pub fn start_others(vcpus: u64, khz: u64, entry: extern "C" fn(u64) -> !) -> u64 {
    if vcpus < 2 {
        return 1;
    }
    copy_trampoline();
    mem::store32(SPURIOUS, mem::load32(SPURIOUS) | SOFTWARE_ENABLE);
    let mut online = 1;
    for index in 1..vcpus {
        if start(index, khz, entry) {
            online += 1;
        }
    }
    online
}

fn start(index: u64, khz: u64, entry: extern "C" fn(u64) -> !) -> bool {
    // SAFETY: only vCPU 0 writes the mailbox, and the vCPU that was started before has left it
    // (it has reported a state other than off, or never will come up).
    unsafe {
        boot::ap_mailbox.rip = entry as usize as u64;
        boot::ap_mailbox.rsp = abi::stack_top(index);
        boot::ap_mailbox.vcpu = index;
    }
    let target = u32::try_from(index).unwrap_or(0) << 24;
    mem::store32(ICR_HIGH, target);
    mem::store32(ICR_LOW, INIT_ASSERT);
    wait(AFTER_INIT_NS, khz, || false);
    let block = Block::at(abi::vcpu_gpa(index));
    for _ in 0..TRIES {
        mem::store32(ICR_HIGH, target);
        mem::store32(ICR_LOW, STARTUP);
        if wait(WAIT_NS, khz, || block.get(abi::vcpu::HEARTBEAT) != 0) {
            return true;
        }
    }
    false
}

fn wait(nanoseconds: u64, khz: u64, done: impl Fn() -> bool) -> bool {
    let end = clock::now() + clock::ticks(nanoseconds, khz);
    while clock::now() < end {
        if done() {
            return true;
        }
        core::hint::spin_loop();
    }
    done()
}

fn copy_trampoline() {
    let first = &raw const boot::ap_trampoline as u64;
    let end = &raw const boot::ap_trampoline_end as u64;
    for (source, target) in (first..end).zip(abi::TRAMPOLINE_GPA..) {
        mem::store8(target, mem::load8(source));
    }
}
