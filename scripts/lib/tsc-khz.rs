// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Prints the frequency of this processor's time stamp counter in kHz, measured against the
//! monotonic clock for a fifth of a second.

use std::arch::x86_64::_rdtsc;
use std::time::{Duration, Instant};

/// A reading of both clocks that nothing came between: the closest of many.
fn both() -> (u64, Instant) {
    // SAFETY: every x86_64 processor has the instruction.
    let tsc = || unsafe { _rdtsc() };
    let reading = |_| {
        let (before, now, after) = (tsc(), Instant::now(), tsc());
        (after.saturating_sub(before), before + after.saturating_sub(before) / 2, now)
    };
    let closest = (0..1000).map(reading).min_by_key(|(apart, ..)| *apart);
    closest.map(|(_, tsc, now)| (tsc, now)).unwrap_or_else(|| (tsc(), Instant::now()))
}

fn main() {
    let (begin_tsc, begin) = both();
    std::thread::sleep(Duration::from_millis(200));
    let (end_tsc, end) = both();
    let ticks = end_tsc.saturating_sub(begin_tsc) as f64;
    println!("{:.0}", ticks / (end - begin).as_secs_f64() / 1000.0);
}
