// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! When the clock of a watchdog stands although its device works.
//!
//! Owns the moment from which the guest's time counts. A guest whose vCPUs wait for memory that is still to
//! come cannot set its watchdog back, and is not stuck. It must never know why time does not count.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Stops and starts the clock of one watchdog; clones are the same.
#[derive(Clone, Debug)]
pub struct WatchdogHandle {
    /// Since when time counts, if it does. Held for a copy.
    counts_since: Arc<Mutex<Option<Instant>>>,
}

impl WatchdogHandle {
    /// Of a clock that may run.
    pub(crate) fn new() -> Self {
        Self { counts_since: Arc::new(Mutex::new(Some(Instant::now()))) }
    }

    /// From now on the clock stands: the guest is not taken for stuck.
    pub fn stop(&self) {
        *self.counts_since.lock() = None;
    }

    /// Where the clock stands it begins anew, and the guest has the whole time.
    pub fn start(&self) {
        self.counts_since.lock().get_or_insert_with(Instant::now);
    }

    /// What is left of `timeout` for a guest that set its watchdog back at `set_back`; `None` when it is over.
    pub(super) fn left(&self, timeout: Duration, set_back: Instant) -> Option<Duration> {
        let Some(since) = *self.counts_since.lock() else { return Some(timeout) };
        let left = timeout.saturating_sub(since.max(set_back).elapsed());
        (!left.is_zero()).then_some(left)
    }
}
