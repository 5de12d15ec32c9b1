// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Watches the guest's heartbeat from outside while it moves: the downtime by the host's clock.
//!
//! A cross-check: a VMM that does not advance the guest's TSC by the time of the stop would hide
//! that time from the guest's own record. Owns one thread. Must never write to the guest, nor
//! populate a page.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use guest_reader::{Guest, Pulse};

/// Interval at which the heartbeat is polled.
const POLL: Duration = Duration::from_micros(500);
/// Interval at which the guest is searched for at the destination.
const SEARCH: Duration = Duration::from_millis(5);

/// A running watch.
pub struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl Watch {
    /// Starts to watch the guest, which is to appear in the process `destination`.
    pub fn start(source: Guest, destination: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || watch(&source, destination, &seen));
        Self { stop, thread }
    }

    /// Ends the watch; returns the longest time without a heartbeat.
    pub fn longest_silence(self) -> Duration {
        self.stop.store(true, Ordering::Release);
        self.thread.join().unwrap_or_default()
    }
}

fn watch(source: &Guest, destination_pid: u32, stop: &AtomicBool) -> Duration {
    let start = Instant::now();
    let mut pulse = Pulse::new(start);
    let mut destination: Option<Guest> = None;
    let mut searched = start;
    let mut latest = 0;
    while !stop.load(Ordering::Acquire) {
        if destination.is_none() && searched.elapsed() > SEARCH {
            destination = Guest::attach(destination_pid).ok();
            searched = Instant::now();
        }
        let there = destination.as_ref().and_then(|guest| guest.heartbeat().ok());
        let here = source.heartbeat().ok();
        // What has been copied to the destination is never newer than the source's own counter, so
        // a copy that arrives is no heartbeat.
        latest = latest.max(here.unwrap_or(0)).max(there.unwrap_or(0));
        pulse.observe(latest, Instant::now());
        std::thread::sleep(POLL);
    }
    pulse.longest()
}
