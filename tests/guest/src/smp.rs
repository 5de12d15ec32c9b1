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
const TRIES_ELSEWHERE: u32 = 20;
const WAIT_NS: u64 = 50_000_000;
const AFTER_INIT_NS: u64 = 20_000;

/// Starts vCPUs 1 to `vcpus - 1` at `entry`; gives the number that run, vCPU 0 included.
pub fn start_others(vcpus: u64, khz: u64, entry: extern "C" fn(u64) -> !) -> u64 {
    if vcpus < 2 {
        return 1;
    }
    copy_trampoline(&raw const boot::ap_trampoline, &raw const boot::ap_trampoline_end);
    let mut online = 1;
    for index in 1..vcpus {
        // SAFETY: only vCPU 0 writes the mailbox, and the vCPU that was started before has left it
        // (it has reported a state other than off, or never will come up).
        unsafe {
            boot::ap_mailbox.rip = entry as usize as u64;
            boot::ap_mailbox.rsp = abi::stack_top(index);
            boot::ap_mailbox.vcpu = index;
        }
        let block = Block::at(abi::vcpu_gpa(index));
        if start(index, khz, || block.get(abi::vcpu::HEARTBEAT) != 0) {
            online += 1;
        }
    }
    online
}

/// Has a vCPU that was never started write to an I/O port, which CPL 3 cannot everywhere. It halts then.
pub fn write_port(vcpu: u64, khz: u64, port: u16, value: u32) -> bool {
    let first = &raw const boot::port_writer;
    copy_trampoline(first, &raw const boot::port_writer_end);
    let copy = |field: *const u8| abi::TRAMPOLINE_GPA + (field as u64 - first as u64);
    mem::store32(copy(&raw const boot::port_writer_value), value);
    mem::store16(copy(&raw const boot::port_writer_port), port);
    start(vcpu, khz, || mem::load8(copy(&raw const boot::port_writer_done)) != 0)
}

/// Has a vCPU that no test page belongs to do what is between two addresses of the image, in real mode, from the page of
/// the trampoline on; says whether it has shown that it is done. Not longer than for a few tries.
pub fn run_elsewhere(
    vcpu: u64,
    khz: u64,
    code: (*const u8, *const u8),
    is_done: impl Fn() -> bool,
) -> bool {
    copy_trampoline(code.0, code.1);
    start_within(vcpu, khz, TRIES_ELSEWHERE, is_done)
}

/// Starts a vCPU at the trampoline, until it shows that it has started.
fn start(index: u64, khz: u64, has_started: impl Fn() -> bool) -> bool {
    start_within(index, khz, TRIES, has_started)
}

fn start_within(index: u64, khz: u64, tries: u32, has_started: impl Fn() -> bool) -> bool {
    mem::store32(SPURIOUS, mem::load32(SPURIOUS) | SOFTWARE_ENABLE);
    let target = u32::try_from(index).unwrap_or(0) << 24;
    mem::store32(ICR_HIGH, target);
    mem::store32(ICR_LOW, INIT_ASSERT);
    wait(AFTER_INIT_NS, khz, || false);
    for _ in 0..tries {
        mem::store32(ICR_HIGH, target);
        mem::store32(ICR_LOW, STARTUP);
        if wait(WAIT_NS, khz, &has_started) {
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

fn copy_trampoline(first: *const u8, end: *const u8) {
    for (source, target) in (first as u64..end as u64).zip(abi::TRAMPOLINE_GPA..) {
        mem::store8(target, mem::load8(source));
    }
}
