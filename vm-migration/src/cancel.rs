// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A request to stop that interrupts every wait of a migration.
//!
//! Owns one eventfd that becomes readable once and stays so; every poll in this crate has it in
//! its set, so a cancel takes effect within microseconds whatever the migration waits for. It
//! must never be reset: a new attempt takes a new [`Cancel`].

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A handle that cancels a migration; clones share one request.
#[derive(Clone, Debug)]
pub struct Cancel(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    asked: AtomicBool,
    event: EventFd,
}

impl Cancel {
    /// Makes a handle on which no cancel has been requested yet.
    ///
    /// # Errors
    /// When the process may not open another file descriptor.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        Ok(Self(Arc::new(Inner { asked: AtomicBool::new(false), event })))
    }

    /// Requests the cancel. Requesting it twice has no further effect.
    pub fn cancel(&self) {
        if !self.0.asked.swap(true, Ordering::AcqRel) {
            // The counter cannot overflow: it is written once in the life of the eventfd.
            let _ = self.0.event.write(1);
        }
    }

    /// True once the cancel was requested.
    pub fn is_cancelled(&self) -> bool {
        self.0.asked.load(Ordering::Acquire)
    }

    /// The eventfd, for poll: readable once the cancel was requested.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.event.as_raw_fd()
    }
}
