// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The state of a page server as the progress of a migration shows it.
//!
//! Owns the state and its changes. Must never talk to the page server.

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::document::{PageServerSnapshot, PageServerState};
use crate::latency::micros;

/// Identity of a page server, for messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Path of the page server's API socket.
    pub socket: String,
    /// Process ID of the page server.
    pub pid: u32,
}

/// The state of the page server of a migration, if it has one.
#[derive(Debug, Default)]
pub(crate) struct PageServerStatus {
    /// Locked for one change or one copy.
    now: Mutex<Option<PageServerSnapshot>>,
}

impl PageServerStatus {
    fn lock(&self) -> MutexGuard<'_, Option<PageServerSnapshot>> {
        self.now.lock()
    }

    pub(crate) fn begin(&self, identity: Identity) {
        let Identity { socket, pid } = identity;
        let state = PageServerState::Ready;
        let new = PageServerSnapshot { state, socket, pid, took_over_us: None, reason: None };
        *self.lock() = Some(new);
    }

    pub(crate) fn serves(&self, took: Duration) {
        if let Some(now) = self.lock().as_mut() {
            now.state = PageServerState::Serving;
            now.took_over_us = Some(micros(took));
        }
    }

    pub(crate) fn failed(&self, reason: String) {
        if let Some(now) = self.lock().as_mut() {
            now.state = PageServerState::Failed;
            now.reason = Some(reason);
        }
    }

    pub(crate) fn snapshot(&self) -> Option<PageServerSnapshot> {
        self.lock().clone()
    }
}
