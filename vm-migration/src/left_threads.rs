// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that nothing waits for any more, in a call of a device that has not returned.
//!
//! Owns how many there are in this process. Nothing can end such a call: the thread waits in the kernel, and ends by itself if
//! the call ever returns. Must never be waited for.

use std::sync::atomic::{AtomicUsize, Ordering};

static LEFT: AtomicUsize = AtomicUsize::new(0);

/// How many such threads there are. There is at most one for each device, as one that hangs is asked nothing more.
pub fn left_threads() -> usize {
    LEFT.load(Ordering::Relaxed)
}

/// How far the thread of a device has come. Locked with what it is part of.
#[derive(Debug, Default)]
pub struct Stay {
    /// When its current call into the device began.
    pub called: Option<std::time::Instant>,
    /// It uses nothing of its device any more.
    pub has_ended: bool,
    /// Nothing waits for it any more.
    pub is_left: bool,
}

impl Stay {
    /// How long its current call takes, if that is so long at least.
    #[must_use]
    pub fn hangs(&self, limit: std::time::Duration) -> Option<std::time::Duration> {
        let took = self.called?.elapsed();
        (!self.has_ended && took >= limit).then_some(took)
    }

    /// Leaves it behind.
    pub fn leave(&mut self, name: &str) {
        if !self.has_ended && !self.is_left {
            self.is_left = true;
            let count = LEFT.fetch_add(1, Ordering::Relaxed) + 1;
            log::error!(
                "the device '{name}' hangs, and its thread is left behind: there are {count} such threads"
            );
        }
    }

    /// Notes its end.
    pub fn end(&mut self, name: &str) {
        self.called = None;
        self.has_ended = true;
        if self.is_left {
            let count = LEFT.fetch_sub(1, Ordering::Relaxed).saturating_sub(1);
            log::warn!(
                "the device '{name}' has ended its call after all: there are {count} other threads like this"
            );
        }
    }
}
