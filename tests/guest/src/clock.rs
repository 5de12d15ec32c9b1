// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The time-stamp counter, and the gaps that a vCPU sees in it.
//!
//! Owns the gap and access statistics of a vCPU's block. Every reading of the clock goes through
//! `Clock::tick`, so whatever stops the vCPU (a fault that waits for the network, the handover of
//! a migration) is seen as a gap between two readings.

use core::arch::x86_64::{__cpuid, _mm_lfence, _rdtsc};

use crate::abi::vcpu;
use crate::mem::{self, Block};

/// Used until the frequency is known, kHz.
const ASSUMED_KHZ: u64 = 2_000_000;

/// Reads the counter when all earlier instructions, the loads and faults among them, are done.
#[inline]
pub fn now() -> u64 {
    // SAFETY: both instructions exist on every x86-64 processor, and CR4.TSD is clear.
    unsafe {
        _mm_lfence();
        let ticks = _rdtsc();
        _mm_lfence();
        ticks
    }
}

/// TSC frequency in kHz and where it is from, `given` being 0 or what the host says.
pub fn frequency_khz(given: u64) -> (u64, u64) {
    if given != 0 {
        return (given, 2);
    }
    let hypervisor = __cpuid(0x4000_0000).eax;
    if (0x4000_0010..0x4000_1000).contains(&hypervisor) {
        let khz = __cpuid(0x4000_0010).eax;
        if khz != 0 {
            return (u64::from(khz), 1);
        }
    }
    if __cpuid(0).eax >= 0x15 {
        let leaf = __cpuid(0x15);
        if leaf.eax != 0 && leaf.ebx != 0 && leaf.ecx != 0 {
            let hertz = u64::from(leaf.ecx) * u64::from(leaf.ebx) / u64::from(leaf.eax);
            return (hertz / 1000, 1);
        }
    }
    (ASSUMED_KHZ, 0)
}

/// Nanoseconds as ticks.
pub fn ticks(nanoseconds: u64, khz: u64) -> u64 {
    let product = u128::from(nanoseconds) * u128::from(khz) / 1_000_000;
    u64::try_from(product).unwrap_or(u64::MAX)
}

/// One vCPU's view of the time.
pub struct Clock {
    block: Block,
    last: u64,
    gap_max: u64,
    stall_ticks: u64,
    note_ticks: u64,
    linear_ticks: u64,
    access_max: u64,
}

impl Clock {
    /// A clock that starts now and writes to `block`.
    pub fn new(block: Block) -> Self {
        Self {
            block,
            last: now(),
            gap_max: 0,
            stall_ticks: u64::MAX,
            note_ticks: u64::MAX,
            linear_ticks: 1,
            access_max: 0,
        }
    }

    /// Takes new thresholds.
    pub fn configure(&mut self, khz: u64, stall_ns: u64, note_ns: u64) {
        self.stall_ticks = ticks(stall_ns, khz);
        self.note_ticks = ticks(note_ns, khz);
        self.linear_ticks = (khz / 1000).max(1);
        self.block.set(vcpu::LINEAR_TICKS, self.linear_ticks);
    }

    /// Forgets the longest gap and access, after the statistics were cleared.
    pub fn reset(&mut self) {
        self.gap_max = 0;
        self.access_max = 0;
        self.last = now();
        self.block.set(vcpu::START_TSC, self.last);
        self.block.set(vcpu::LINEAR_TICKS, self.linear_ticks);
    }

    /// Reads the clock, shows a sign of life, and accounts for the time since the last reading.
    #[inline]
    pub fn tick(&mut self) -> u64 {
        let at = now();
        let gap = at.wrapping_sub(self.last);
        if gap > self.gap_max || gap > self.stall_ticks {
            self.long_gap(at, gap);
        }
        self.last = at;
        self.block.add(vcpu::HEARTBEAT, 1);
        self.block.set(vcpu::LAST_TSC, at);
        at
    }

    #[cold]
    #[inline(never)]
    fn long_gap(&mut self, at: u64, gap: u64) {
        let block = self.block;
        if at < self.last {
            block.add(vcpu::TSC_BACKWARDS, 1);
            return;
        }
        if gap > self.gap_max {
            self.gap_max = gap;
            block.set(vcpu::GAP_MAX_TSC, self.last);
            block.set(vcpu::GAP_MAX_ITERATION, block.get(vcpu::ITERATIONS));
            block.set(vcpu::GAP_MAX, gap);
        }
        if gap > self.stall_ticks {
            block.add(vcpu::STALLS, 1);
            block.add(vcpu::STALL_TOTAL, gap);
            block.add(vcpu::LOG_GAP + log_bucket(gap) * 8, 1);
        }
        if gap > self.note_ticks {
            let noted = block.get(vcpu::GAPS_NOTED);
            let slot = vcpu::GAPS + noted % vcpu::MAX_GAPS * vcpu::GAP_BYTES;
            block.set(slot, self.last);
            block.set(slot + 8, gap);
            block.set(vcpu::GAPS_NOTED, noted + 1);
        }
    }

    /// Accounts for one access to `page` that began at `start` and has just ended.
    #[inline]
    pub fn access(&mut self, page: u64, start: u64) {
        let took = now().wrapping_sub(start);
        let block = self.block;
        block.add(vcpu::ACCESSES, 1);
        block.add(vcpu::ACCESS_TOTAL, took);
        block.add(vcpu::LOG_ACCESS + log_bucket(took) * 8, 1);
        let bucket = took / self.linear_ticks;
        if bucket < vcpu::LINEAR_BUCKETS {
            let gpa = block.gpa_of(vcpu::LINEAR + bucket * 4);
            mem::store32(gpa, mem::load32(gpa).wrapping_add(1));
        }
        if took > self.access_max {
            self.access_max = took;
            block.set(vcpu::ACCESS_MAX, took);
            block.set(vcpu::ACCESS_MAX_TSC, start);
            block.set(vcpu::ACCESS_MAX_PAGE, page);
        }
    }
}

#[inline]
fn log_bucket(ticks: u64) -> u64 {
    63 - u64::from((ticks | 1).leading_zeros())
}
