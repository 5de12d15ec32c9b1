// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The wait of a vCPU for a function that is still being opened.
//!
//! Owns only the wake-up: the slots say whether there is something to wait for. The thread that
//! changes a slot reports that here afterwards.

use parking_lot::{Condvar, Mutex};

/// Told of every slot whose function has come, or will not.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    turn: Mutex<()>,
    changed: Condvar,
}

impl Arrivals {
    /// Waits until `look` finds something. It is called again after each [`Arrivals::tell`], and must
    /// not call this.
    pub fn wait_for<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        let mut turn = self.turn.lock();
        loop {
            // A slot that changes from here on is told of when this thread waits: telling takes the
            // lock that only waiting gives up.
            if let Some(found) = look() {
                return found;
            }
            self.changed.wait(&mut turn);
        }
    }

    /// A slot has changed.
    pub fn tell(&self) {
        drop(self.turn.lock());
        self.changed.notify_all();
    }
}
