// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rate at which the pool's threads work on memory: a bandwidth that follows what the host leaves idle.
//!
//! Owns the rate between two bounds and the signs that the host is busy: tasks that wait for a processor
//! or for memory (pressure stall information), and own work that takes more processor time than it did.
//! The rate is halved at each busy look and grows by half at each calm one. Must never let a host that
//! cannot be judged pass for a calm one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rate_limit::RateLimit;

/// How often the host is looked at: much shorter than a load lasts, and many pieces of work long.
const LOOK_INTERVAL_MS: u64 = 250;
/// Older figures say nothing about the present: the threads had no work meanwhile.
const LOOK_AGE_MAX: Duration = Duration::from_secs(2);
/// Share of time in which a task waited for a processor, from which on the host is busy. The threads of
/// the pool count, too, as they wait while others run.
const CPU_STALL_PERCENT: u64 = 20;
/// The same for memory, where any waiting means that pages are being reclaimed.
const MEMORY_STALL_PERCENT: u64 = 1;
/// Speed of own work in processor time, in percent of the fastest, below which others use the memory's
/// bandwidth. A sibling thread on the same core costs less than that.
const SPEED_PERCENT_MIN: u64 = 50;
/// By how much the fastest speed fades at each piece of work, as a divisor: processors change their clock.
const FADE_DIVISOR: u64 = 1024;

/// Where the kernel tells what the host waits for.
const CPU_PRESSURE: &str = "/proc/pressure/cpu";
const MEMORY_PRESSURE: &str = "/proc/pressure/memory";
const LOAD: &str = "/proc/loadavg";

/// Work whose speed is compared with that of other work of the same kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// Of memory that the kernel has just zeroed, some of which is in a cache.
    New,
    /// Of memory that was cleared past the caches.
    Cleared,
}

/// What the host has waited for since its start, in microseconds; `None` where the kernel does not tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Stalls {
    cpu_us: Option<u64>,
    memory_us: Option<u64>,
}

#[derive(Debug)]
struct Looks {
    at: Instant,
    stalls: Stalls,
    /// Bytes per second of processor time, by kind of reading.
    fastest: [u64; 2],
    is_slow: bool,
}

/// The rate.
#[derive(Debug)]
pub struct Pace {
    limit: RateLimit,
    /// The rate while the host is busy; with `most` 0 there is no limit at all.
    least: u64,
    most: u64,
    /// Milliseconds after `start` at which the next look is due.
    due_ms: AtomicU64,
    start: Instant,
    /// Locked for a look, and for a few instructions after each piece of work.
    looks: Mutex<Looks>,
}

impl Pace {
    /// A rate of `most` bytes per second, and of `least` (or `most`, if that is less) while the host is busy;
    /// none with a `most` of 0.
    pub fn new(most: u64, least: u64) -> Self {
        let least = least.min(most);
        let start = Instant::now();
        let looks = Looks { at: start, stalls: stalls(), fastest: [0; 2], is_slow: false };
        Self {
            limit: RateLimit::new(least),
            least,
            most,
            due_ms: AtomicU64::new(0),
            start,
            looks: Mutex::new(looks),
        }
    }

    /// Bytes per second now; 0 for no limit.
    pub fn bytes_per_s(&self) -> u64 {
        self.limit.bytes_per_s()
    }

    /// Waits for the turn of `bytes` more.
    pub fn wait(&self, bytes: u64) {
        if self.least < self.most {
            self.look();
        }
        self.limit.wait(bytes);
    }

    /// Notes how much processor time it took to read so much memory.
    pub fn note(&self, reading: Reading, bytes: u64, took: Duration) {
        let speed = u128::from(bytes) * 1_000_000 / took.as_micros().max(1);
        let speed = u64::try_from(speed).unwrap_or(u64::MAX);
        let mut looks = self.looks.lock();
        let index = usize::from(reading == Reading::Cleared);
        let Some(fastest) = looks.fastest.get_mut(index) else { return };
        *fastest = (*fastest - *fastest / FADE_DIVISOR).max(speed);
        let is_slow = speed < *fastest / 100 * SPEED_PERCENT_MIN;
        looks.is_slow = is_slow;
    }

    fn look(&self) {
        let now_ms = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        let due_ms = self.due_ms.load(Ordering::Relaxed);
        let next_ms = now_ms.saturating_add(LOOK_INTERVAL_MS);
        let order = Ordering::Relaxed;
        // One thread looks.
        if now_ms < due_ms || self.due_ms.compare_exchange(due_ms, next_ms, order, order).is_err() {
            return;
        }
        let (now, stalls) = (Instant::now(), stalls());
        let mut looks = self.looks.lock();
        let elapsed = now.duration_since(looks.at);
        let before = std::mem::replace(&mut looks.stalls, stalls);
        looks.at = now;
        let rate = if elapsed > LOOK_AGE_MAX {
            self.least
        } else {
            let is_busy =
                looks.is_slow || has_waited(before, stalls, elapsed).unwrap_or_else(is_loaded);
            next_rate(self.limit.bytes_per_s(), is_busy, self.least, self.most)
        };
        drop(looks);
        self.limit.set_bytes_per_s(rate);
    }
}

fn next_rate(rate: u64, is_busy: bool, least: u64, most: u64) -> u64 {
    let next = if is_busy { rate / 2 } else { rate.saturating_add(rate / 2) };
    next.clamp(least, most)
}

/// Whether the host has waited for processors or memory too much; `None` if the kernel does not tell.
fn has_waited(before: Stalls, now: Stalls, elapsed: Duration) -> Option<bool> {
    let elapsed_us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
    let more = |before: Option<u64>, now: Option<u64>, percent: u64| {
        let waited_us = now?.saturating_sub(before?);
        Some(waited_us.saturating_mul(100) > elapsed_us.saturating_mul(percent))
    };
    let cpu = more(before.cpu_us, now.cpu_us, CPU_STALL_PERCENT)?;
    let memory = more(before.memory_us, now.memory_us, MEMORY_STALL_PERCENT)?;
    Some(cpu || memory)
}

fn stalls() -> Stalls {
    let read = |path| std::fs::read_to_string(path).ok().and_then(|text| stalled_us(&text));
    Stalls { cpu_us: read(CPU_PRESSURE), memory_us: read(MEMORY_PRESSURE) }
}

/// The total of the line that counts time in which some task waited.
fn stalled_us(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    line.split(' ').find_map(|field| field.strip_prefix("total="))?.parse().ok()
}

/// Whether more tasks want to run than there are processors, for kernels without pressure figures.
fn is_loaded() -> bool {
    let processors = process_facts::usable_processors();
    let text = std::fs::read_to_string(LOAD).unwrap_or_default();
    runnable(&text).is_none_or(|runnable| runnable > processors)
}

fn runnable(text: &str) -> Option<usize> {
    text.split(' ').nth(3)?.split('/').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_rate_grows_on_a_calm_host_and_falls_on_a_busy_one_within_its_bounds() {
        let mut rate = 2 * GIB;
        let mut rates = Vec::new();
        for is_busy in [false, false, true, true, true, false, false, false, false, false, false] {
            rate = next_rate(rate, is_busy, 2 * GIB, 16 * GIB);
            rates.push(rate / (GIB / 8));
        }
        assert_eq!(rates, [24, 36, 18, 16, 16, 24, 36, 54, 81, 121, 128]);
    }

    #[test]
    fn waiting_for_processors_or_memory_makes_a_host_busy() {
        let before = Stalls { cpu_us: Some(1000), memory_us: Some(50) };
        let after = |cpu_us, memory_us| Stalls { cpu_us: Some(cpu_us), memory_us: Some(memory_us) };
        let judge = |now| has_waited(before, now, Duration::from_millis(250));
        assert_eq!(judge(after(51_000, 2550)), Some(false));
        assert_eq!(judge(after(51_001, 50)), Some(true));
        assert_eq!(judge(after(1000, 2551)), Some(true));
        assert_eq!(judge(Stalls { cpu_us: None, ..after(0, 0) }), None);
    }

    #[test]
    fn figures_of_the_kernel_are_read() {
        let text =
            "some avg10=1.53 avg60=0.87 avg300=0.73 total=1157622151\nfull avg10=0.00 total=5\n";
        assert_eq!(stalled_us(text), Some(1_157_622_151));
        assert_eq!(stalled_us("full total=3\n"), None);
        assert_eq!(runnable("0.20 0.18 0.12 3/345 11206\n"), Some(3));
        assert_eq!(runnable(""), None);
    }

    #[test]
    fn own_work_that_gets_slow_is_a_sign_too() {
        let pace = Pace::new(16 * GIB, 2 * GIB);
        let is_slow = |reading, micros| {
            pace.note(reading, 16 << 20, Duration::from_micros(micros));
            pace.looks.lock().is_slow
        };
        assert!(!is_slow(Reading::Cleared, 1000));
        assert!(!is_slow(Reading::Cleared, 1900));
        assert!(is_slow(Reading::Cleared, 2100));
        // Another kind has a speed of its own.
        assert!(!is_slow(Reading::New, 4000));
    }

    #[test]
    fn without_a_limit_or_room_nothing_changes() {
        let none = Pace::new(0, 2 * GIB);
        none.wait(u64::MAX);
        assert_eq!(none.bytes_per_s(), 0);
        let fixed = Pace::new(GIB, 2 * GIB);
        fixed.wait(1);
        assert_eq!(fixed.bytes_per_s(), GIB);
    }

    #[test]
    fn after_a_pause_the_rate_is_the_lowest_until_the_host_was_judged() {
        let pace = Pace::new(16 * GIB, 2 * GIB);
        pace.limit.set_bytes_per_s(16 * GIB);
        let long_ago = Instant::now().checked_sub(2 * LOOK_AGE_MAX).unwrap();
        pace.looks.lock().at = long_ago;
        pace.look();
        assert_eq!(pace.bytes_per_s(), 2 * GIB);
    }
}
