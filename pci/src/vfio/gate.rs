// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The gate before a device's first DMA.
//!
//! Owns one fact: whether all guest memory is mapped, will never be, or is still on its way. Whoever
//! is about to let a device reach memory waits here. It opens once or fails once; it must never
//! close again, and nobody waits for ever as long as whoever maps memory ends.

use std::sync::{Arc, Condvar, Mutex};

use thiserror::Error;

use crate::locks::lock;

/// Guest memory will not be mapped.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("guest memory is not mapped for DMA: {reason}")]
pub struct GateClosed {
    /// Why.
    pub reason: Arc<str>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Closed,
    Open,
    Failed(GateClosed),
}

/// The gate of all functions that share one set of DMA mappings.
#[derive(Debug)]
pub struct DmaGate {
    state: Mutex<State>,
    settled: Condvar,
}

impl Default for DmaGate {
    fn default() -> Self {
        Self { state: Mutex::new(State::Closed), settled: Condvar::new() }
    }
}

impl DmaGate {
    /// All memory is mapped: lets everybody through, now and for ever. No effect after a failure.
    pub fn open(&self) {
        self.settle(State::Open);
    }

    /// Memory will not be mapped: turns everybody away. No effect once the gate is open.
    pub fn fail(&self, reason: &str) {
        self.settle(State::Failed(GateClosed { reason: reason.into() }));
    }

    fn settle(&self, end: State) {
        let mut state = lock(&self.state);
        if *state == State::Closed {
            *state = end;
            self.settled.notify_all();
        }
    }

    /// Whether DMA is possible now.
    pub fn is_open(&self) -> bool {
        *lock(&self.state) == State::Open
    }

    /// Waits until it is known.
    ///
    /// # Errors
    /// Memory will not be mapped.
    pub fn wait(&self) -> Result<(), GateClosed> {
        let mut state = lock(&self.state);
        loop {
            match &*state {
                State::Open => return Ok(()),
                State::Failed(closed) => return Err(closed.clone()),
                State::Closed => {
                    state =
                        self.settled.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
                }
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
    fn all_who_wait_go_on() {
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
