// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Write-back of disks while the guest still runs, so that little is left to write back when it is
//! stopped.
//!
//! Owns a thread for as long as the guest of a migration runs at the source: it has all disks written
//! back, pass after pass. What is written after the last pass is written back when the guest has
//! stopped. This module decides nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use devices::virtio::block::DiskLock;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::machine::{WriteBack, WriteBackError};

/// Minimum time between two passes that no thread waits for. Flushing more often would cost a guest with a
/// slow disk more than it saves.
const PACE_MIN: Duration = Duration::from_secs(1);

/// Inverse of the maximum share of the time that such passes take.
const PACE_SHARE: u32 = 4;

/// A pass of at most this duration leaves too little behind for another one to help.
const SHORT: Duration = Duration::from_millis(20);

/// Maximum number of passes of [`DiskWriter::prepare_stop`].
const SETTLE_PASSES_MAX: u32 = 8;

/// Poll interval for cancellation of the migration.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Default)]
struct State {
    /// Passes completed.
    done: u64,
    /// Number of the last pass that a thread waits for.
    wanted: u64,
    /// Whether a pass is in progress.
    is_busy: bool,
    /// Duration of the last pass, and time between its start and that of the one before.
    last: Option<(Duration, Duration)>,
    failure: Option<WriteBackError>,
    is_over: bool,
}

#[derive(Default)]
struct Shared {
    /// Only locked briefly.
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Writes disks back repeatedly, on a thread, until dropped.
pub struct DiskWriter {
    shared: Arc<Shared>,
}

impl DiskWriter {
    /// Starts the thread. `None` if there is nothing to write back, or the thread cannot be started.
    pub fn start(disks: Vec<(String, DiskLock)>) -> Option<Self> {
        if disks.is_empty() {
            return None;
        }
        let shared = Arc::new(Shared::default());
        let for_thread = Arc::clone(&shared);
        let spawned = stoppable_thread::spawn("disk-writer", move || run(&disks, &for_thread));
        match spawned {
            Ok(_detached) => Some(Self { shared }),
            Err(error) => {
                log::debug!("disks are not written back early: {error}");
                None
            }
        }
    }

    /// Expected duration of the pass after the guest has stopped. A pass writes what the guest wrote during
    /// the one before, so its duration is that of the last pass times the share of the time for which the
    /// guest keeps the disks busy.
    pub fn expected(&self) -> Duration {
        self.shared.lock().last.map_or(Duration::ZERO, |(took, period)| {
            let share = took.as_secs_f64() / period.max(took).as_secs_f64().max(1e-9);
            took.mul_f64(share.min(1.0))
        })
    }

    /// Waits for passes until another one would leave no less behind; without a time limit, while the guest
    /// runs.
    ///
    /// # Errors
    /// Names the disk that cannot be written back.
    pub fn prepare_stop(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), WriteBackError> {
        let mut before = Duration::MAX;
        for _ in 0..SETTLE_PASSES_MAX {
            let took = self.pass(is_cancelled)?;
            if took <= SHORT || took >= before / 4 * 3 || is_cancelled() {
                break;
            }
            before = took;
        }
        Ok(())
    }

    /// Waits for a pass that starts now or later; returns its duration.
    fn pass(&self, is_cancelled: &dyn Fn() -> bool) -> Result<Duration, WriteBackError> {
        let mut state = self.shared.lock();
        let target = state.done + if state.is_busy { 2 } else { 1 };
        state.wanted = state.wanted.max(target);
        self.shared.changed.notify_all();
        while state.done < target && state.failure.is_none() && !is_cancelled() {
            self.shared.changed.wait_for(&mut state, CANCEL_POLL_INTERVAL);
        }
        if let Some(failure) = state.failure.take() {
            return Err(failure);
        }
        Ok(state.last.map_or(Duration::ZERO, |(took, _)| took))
    }
}

impl Drop for DiskWriter {
    fn drop(&mut self) {
        // Not joined: a pass in progress writes only what the last one has to write anyway, and ends by
        // itself.
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
    }
}

fn run(disks: &[(String, DiskLock)], shared: &Shared) {
    let mut last_began = Instant::now();
    loop {
        shared.lock().is_busy = true;
        let began = Instant::now();
        let period = began - last_began;
        last_began = began;
        let result = WriteBack::start(disks.iter().cloned()).wait();
        let took = began.elapsed();
        let mut state = shared.lock();
        state.is_busy = false;
        state.done += 1;
        // The first pass writes back what has accumulated for a long time.
        let period = if state.done > 1 { period } else { Duration::MAX };
        state.last = Some((took, period));
        // The next pass fails as well: a failed flush stays failed.
        state.failure = result.err();
        shared.changed.notify_all();
        let idle = |state: &mut State| !state.is_over && state.wanted <= state.done;
        let pace = PACE_MIN.max(took.saturating_mul(PACE_SHARE));
        shared.changed.wait_while_for(&mut state, idle, pace);
        if state.is_over {
            return;
        }
    }
}
