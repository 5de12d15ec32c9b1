// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where threads that were refused a page get it.
//!
//! Owns how such a thread's fault becomes a request: the thread itself sends it, on the connection
//! of its seat, and sleeps until the page is here. There is no reader between the two, and no
//! queue that it shares with others. Without a connection the wish is noted, and the next set of
//! connections begins with it.

use std::sync::{Arc, Mutex, PoisonError};

use super::engine::Engine;
use super::fault::{Askers, Requests};
use crate::bitmap::change_then_look;
use crate::error::Failure;
use crate::fault::{Fault, NotBrought, PageDesk};
use crate::ram::GuestMemoryMap;
use crate::stride::Strides;

/// The desk of one engine.
pub(super) struct Desk<M: GuestMemoryMap> {
    engine: Arc<Engine<M>>,
    askers: Arc<Askers>,
    /// Askers that belong to readers; those of seats are behind them.
    readers: usize,
    /// What each seat's thread did before. Each is its own thread's.
    strides: Vec<Mutex<Strides>>,
}

impl<M: GuestMemoryMap> Desk<M> {
    pub(super) fn new(engine: &Arc<Engine<M>>, askers: &Arc<Askers>) -> Self {
        let (readers, seats) = (engine.source().readers(), engine.source().seats());
        Self {
            engine: Arc::clone(engine),
            askers: Arc::clone(askers),
            readers,
            strides: (0..seats).map(|_| Mutex::default()).collect(),
        }
    }
}

impl<M: GuestMemoryMap> PageDesk for Desk<M> {
    fn bring(&self, seat: usize, fault: Fault) -> Result<(), NotBrought> {
        let brought = self.engine.bring(seat, fault, |waited_for| {
            let strides = self.strides.get(seat);
            let ahead = strides.map_or_else(Vec::new, |strides| {
                let mut strides = strides.lock().unwrap_or_else(PoisonError::into_inner);
                self.engine.ahead_of(&[fault], &mut strides)
            });
            if waited_for.is_empty() && ahead.is_empty() {
                return;
            }
            change_then_look();
            if let Some(asker) = self.askers.of(self.readers + seat) {
                asker.ask(&Requests { waited_for, ahead });
            }
        });
        brought.map_err(|cause| {
            self.engine.fail(Failure::new("bringing a page for a vCPU", cause));
            NotBrought
        })
    }
}
