// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! When the clock of a watchdog stands although its device works.
//!
//! Owns the moment from which the guest's time counts. A guest whose vCPUs wait for memory that is still to
//! come cannot set its watchdog back, and is not stuck. It must never know why time does not count.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Stops and starts the clock of a watchdog; clones refer to the same one.
#[derive(Clone, Debug)]
pub struct WatchdogHandle {
    /// When the clock was started, if it runs. Only locked briefly.
    counts_since: Arc<Mutex<Option<Instant>>>,
}

impl WatchdogHandle {
    /// The handle of a running clock.
    pub(crate) fn new() -> Self {
        Self { counts_since: Arc::new(Mutex::new(Some(Instant::now()))) }
    }

    /// Stops the clock: the guest does not count as stuck.
    pub fn stop(&self) {
        *self.counts_since.lock() = None;
    }

    /// Starts the clock if it is stopped, with the full time for the guest.
    pub fn start(&self) {
        self.counts_since.lock().get_or_insert_with(Instant::now);
    }

    /// What is left of `timeout` for a guest that reset its watchdog at `set_back`; `None` when it has
    /// passed.
    pub(super) fn left(&self, timeout: Duration, set_back: Instant) -> Option<Duration> {
        let Some(since) = *self.counts_since.lock() else { return Some(timeout) };
        let left = timeout.saturating_sub(since.max(set_back).elapsed());
        (!left.is_zero()).then_some(left)
    }
}
