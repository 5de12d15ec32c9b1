// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Resolves faults on the vCPU's own thread.
//!
//! Owns how a fault becomes a page request: the faulting thread sends it on the preempt channel of
//! its vCPU and parks until the page is in place. No reader thread is in between, and no shared
//! queue. Without a connection the page is marked as wanted, and the next set of connections begins
//! with the request.

use std::sync::Arc;

use parking_lot::Mutex;

use page_bitmap::change_then_look;

use super::engine::Engine;
use super::fault::{Askers, Requests};
use crate::error::Failure;
use crate::fault::{Fault, FaultError, FaultResolver};
use crate::ram::GuestMemoryMap;
use crate::stride::Strides;

/// Resolves the faults of the vCPUs of one engine.
pub(super) struct VcpuFaultResolver<M: GuestMemoryMap> {
    engine: Arc<Engine<M>>,
    askers: Arc<Askers>,
    /// Number of slots for readers; the slots of vCPUs follow them.
    readers: usize,
    /// The recent faults of each vCPU thread. Only its own thread uses an entry.
    strides: Vec<Mutex<Strides>>,
}

impl<M: GuestMemoryMap> VcpuFaultResolver<M> {
    pub(super) fn new(engine: &Arc<Engine<M>>, askers: &Arc<Askers>) -> Self {
        let (readers, vcpus) = (engine.source().readers(), engine.source().vcpus());
        Self {
            engine: Arc::clone(engine),
            askers: Arc::clone(askers),
            readers,
            strides: (0..vcpus).map(|_| Mutex::default()).collect(),
        }
    }
}

impl<M: GuestMemoryMap> FaultResolver for VcpuFaultResolver<M> {
    fn resolve(&self, vcpu: usize, fault: Fault) -> Result<(), FaultError> {
        let brought = self.engine.resolve(vcpu, fault, |waited_for| {
            let strides = self.strides.get(vcpu);
            let ahead = strides.map_or_else(Vec::new, |strides| {
                let mut strides = strides.lock();
                self.engine.ahead_of(&[fault], &mut strides)
            });
            if waited_for.is_empty() && ahead.is_empty() {
                return;
            }
            change_then_look();
            if let Some(asker) = self.askers.of(self.readers + vcpu) {
                asker.ask(&Requests { waited_for, ahead });
            }
        });
        brought.map_err(|cause| {
            self.engine.fail(Failure::new("bringing a page for a vCPU", cause));
            FaultError
        })
    }
}
