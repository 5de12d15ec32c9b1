// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The gate before a device's first DMA.
//!
//! Owns one fact: whether all guest memory is mapped, will never be, or is still being mapped. A vCPU that
//! is about to let a device reach memory waits here, after helping to populate memory if any is left to populate. The
//! gate opens once or fails once; it must never close again, and no vCPU waits forever as long as the thread that maps
//! memory ends.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use thiserror::Error;

use super::dma::PopulateHelper;

/// Guest memory will not be mapped.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("guest memory is not mapped for DMA: {reason}")]
pub struct GateClosed {
    /// The reason.
    pub reason: Arc<str>,
}

#[derive(Clone)]
enum State {
    /// With work for waiting threads, once known.
    Closed(Option<PopulateHelper>),
    Open,
    Failed(GateClosed),
}

/// Called on a thread that has waited at the gate; must not block.
pub type OnWaited = Box<dyn Fn() + Send + Sync>;

/// The gate that delays the DMA of all functions of a VM until memory is mapped.
#[derive(Default)]
pub struct DmaGate {
    state: Mutex<State>,
    changed: Condvar,
    on_waited: Option<OnWaited>,
}

impl Default for State {
    fn default() -> Self {
        Self::Closed(None)
    }
}

impl DmaGate {
    /// A closed gate; `on_waited` is called after each wait at it.
    pub fn reporting(on_waited: OnWaited) -> Self {
        Self { on_waited: Some(on_waited), ..Self::default() }
    }

    /// Opens the gate: all memory is mapped, and all waiters continue. No effect after a failure.
    pub fn open(&self) {
        self.decide(State::Open);
    }

    /// Fails all waiters: memory will not be mapped. No effect once the gate is open.
    pub fn fail(&self, reason: &str) {
        self.decide(State::Failed(GateClosed { reason: reason.into() }));
    }

    fn decide(&self, end: State) {
        let mut state = self.state.lock();
        if matches!(*state, State::Closed(_)) {
            *state = end;
            self.changed.notify_all();
        }
    }

    /// Whether the gate is open.
    pub fn is_open(&self) -> bool {
        matches!(*self.state.lock(), State::Open)
    }

    /// Sets work for waiting threads. No effect once the gate is decided.
    pub fn helped_by(&self, help: PopulateHelper) {
        let mut state = self.state.lock();
        if matches!(*state, State::Closed(_)) {
            *state = State::Closed(Some(help));
            self.changed.notify_all();
        }
    }

    /// Runs the work for waiting threads, if it is known and not finished.
    pub fn help(&self) {
        let help = match &*self.state.lock() {
            State::Closed(help) => help.clone(),
            State::Open | State::Failed(_) => None,
        };
        if let Some(help) = help {
            help();
        }
    }

    /// Waits until the gate is decided.
    ///
    /// # Errors
    /// Memory will not be mapped.
    pub fn wait(&self) -> Result<(), GateClosed> {
        let has_to_wait = matches!(*self.state.lock(), State::Closed(_));
        let result = self.wait_for_decision();
        if let Some(on_waited) = self.on_waited.as_ref().filter(|_| has_to_wait) {
            on_waited();
        }
        result
    }

    fn wait_for_decision(&self) -> Result<(), GateClosed> {
        let mut has_helped = false;
        let mut state = self.state.lock();
        loop {
            let help = match &*state {
                State::Open => return Ok(()),
                State::Failed(closed) => return Err(closed.clone()),
                State::Closed(help) => help.clone().filter(|_| !has_helped),
            };
            if let Some(help) = help {
                drop(state);
                help();
                has_helped = true;
                state = self.state.lock();
            } else {
                self.changed.wait(&mut state);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_end_counts() {
        let gate = DmaGate::default();
        assert!(!gate.is_open());
        gate.open();
        gate.fail("too late");
        assert!(gate.is_open() && gate.wait().is_ok());

        let gate = DmaGate::default();
        gate.fail("no memory");
        gate.open();
        assert!(!gate.is_open());
        assert_eq!(gate.wait(), Err(GateClosed { reason: "no memory".into() }));
    }

    #[test]
    fn who_waits_helps_first() {
        let gate = Arc::new(DmaGate::default());
        let opener = Arc::downgrade(&gate);
        gate.helped_by(Arc::new(move || {
            if let Some(gate) = opener.upgrade() {
                gate.open();
            }
        }));
        assert!(gate.wait().is_ok(), "nothing else opens it");
        gate.helped_by(Arc::new(|| panic!("there is nothing left to do")));
        assert!(gate.wait().is_ok());
    }

    #[test]
    fn a_wait_is_reported_when_it_is_over_and_an_access_without_one_is_not() {
        let waited = Arc::new(Mutex::new(0));
        let count = Arc::clone(&waited);
        let gate = Arc::new(DmaGate::reporting(Box::new(move || *count.lock() += 1)));
        let opener = Arc::downgrade(&gate);
        let seen = Arc::clone(&waited);
        gate.helped_by(Arc::new(move || {
            assert_eq!(*seen.lock(), 0, "it is not over");
            if let Some(gate) = opener.upgrade() {
                gate.open();
            }
        }));
        assert!(gate.wait().is_ok());
        assert_eq!(*waited.lock(), 1);
        assert!(gate.wait().is_ok());
        assert_eq!(*waited.lock(), 1, "the gate was open");
    }

    #[test]
    fn all_waiters_continue() {
        let gate = Arc::new(DmaGate::default());
        let waiters: Vec<_> = (0..4)
            .map(|_| {
                let gate = Arc::clone(&gate);
                std::thread::spawn(move || gate.wait().is_ok())
            })
            .collect();
        gate.open();
        assert!(waiters.into_iter().all(|waiter| waiter.join().unwrap_or(false)));
    }
}
