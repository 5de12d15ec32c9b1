// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The wait of a vCPU for a function that is still being opened.
//!
//! Owns only the wake-up: the slots say whether there is something to wait for. The thread that
//! changes a slot reports that here afterwards.

use parking_lot::{Condvar, Mutex};

/// Notifies waiters of slots whose function was added or will not be.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    turn: Mutex<()>,
    changed: Condvar,
}

impl Arrivals {
    /// Waits until `look` returns a value. It is called again after each [`Arrivals::tell`], and must not
    /// call this.
    pub fn wait_for<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        let mut turn = self.turn.lock();
        loop {
            // A later change notifies this thread while it waits: `tell` takes the lock that only waiting
            // releases.
            if let Some(found) = look() {
                return found;
            }
            self.changed.wait(&mut turn);
        }
    }

    /// Notifies waiters of a changed slot.
    pub fn tell(&self) {
        drop(self.turn.lock());
        self.changed.notify_all();
    }
}
