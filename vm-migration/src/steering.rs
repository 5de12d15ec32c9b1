// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests to a running migration other than cancel.
//!
//! Owns the requests only: the state machines poll them where they can act on them, at least twice a second,
//! and take them. It must never block.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::commit::destination::Decision;
use crate::transport::Address;

/// How often waits of postcopy check for requests.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A handle for requests to a running migration; clones belong to the same migration.
#[derive(Clone, Debug, Default)]
pub struct Steering(Arc<SteeringRequests>);

#[derive(Debug, Default)]
struct SteeringRequests {
    postcopy: AtomicBool,
    abandoned: AtomicBool,
    /// Locked for one access.
    recover: Mutex<Option<(Recover, Option<u16>)>>,
    /// Locked for one access.
    decision: Mutex<Option<Decision>>,
}

/// A request to reconnect now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recover {
    /// At the previous address of the destination.
    There,
    /// At another address of the destination.
    At(Address),
}

impl Steering {
    /// A handle without requests.
    pub fn new() -> Self {
        Self::default()
    }

    /// Requests that precopy switches to postcopy.
    pub fn start_postcopy(&self) {
        self.0.postcopy.store(true, Ordering::Release);
    }

    pub(crate) fn wants_postcopy(&self) -> bool {
        self.0.postcopy.load(Ordering::Acquire)
    }

    /// Requests that a postcopy without connections connects (source) or listens (destination) again now,
    /// whatever the timeout.
    pub fn recover(&self, recover: Recover) {
        self.recover_over(recover, None);
    }

    /// Like [`recover`](Self::recover), with at most `connections_max` connections of each kind (at least
    /// one for the background), and never more than at the start of the migration. The destination accepts
    /// what the source opens.
    pub fn recover_over(&self, recover: Recover, connections_max: Option<u16>) {
        let mut wish = self.0.recover.lock();
        *wish = Some((recover, connections_max));
    }

    pub(crate) fn take_recover(&self) -> Option<Recover> {
        self.take_recovery().map(|(recover, _)| recover)
    }

    pub(crate) fn take_recovery(&self) -> Option<(Recover, Option<u16>)> {
        self.0.recover.lock().take()
    }

    /// Decides what happens to a machine in doubt, by the rules of [`InDoubt::asked`].
    ///
    /// [`InDoubt::asked`]: crate::commit::destination::InDoubt::asked
    pub fn decide(&self, decision: Decision) {
        *self.0.decision.lock() = Some(decision);
    }

    pub(crate) fn take_decision(&self) -> Option<Decision> {
        self.0.decision.lock().take()
    }

    /// Requests that a side of a postcopy abandons the migration: the guest is lost unless it has all of its
    /// pages already.
    pub fn abandon(&self) {
        self.0.abandoned.store(true, Ordering::Release);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.0.abandoned.load(Ordering::Acquire)
    }
}

impl PartialEq for Steering {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Steering {}
