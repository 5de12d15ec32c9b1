// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's time-stamp counter, in whose ticks the guest reports.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long the frequency is measured: long enough for 0.1 %, short enough not to be noticed.
const MEASURE: Duration = Duration::from_millis(20);

/// Reads the counter.
pub fn now() -> u64 {
    // SAFETY: the instruction exists on every x86-64 processor and touches no memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// The counter's frequency, measured once per process, kHz.
pub fn khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(|| {
        let (start, from) = (Instant::now(), now());
        while start.elapsed() < MEASURE {
            std::hint::spin_loop();
        }
        let (ticks, nanoseconds) = (now().wrapping_sub(from), start.elapsed().as_nanos());
        let khz = u128::from(ticks) * 1_000_000 / nanoseconds.max(1);
        u64::try_from(khz).unwrap_or(u64::MAX).max(1)
    })
}

/// Ticks of a counter of `khz` as nanoseconds.
pub fn nanoseconds(ticks: u64, khz: u64) -> u64 {
    let product = u128::from(ticks) * 1_000_000 / u128::from(khz.max(1));
    u64::try_from(product).unwrap_or(u64::MAX)
}
