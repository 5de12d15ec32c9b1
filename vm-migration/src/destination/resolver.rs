// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Resolves faults on the vCPU's own thread.
//!
//! Owns how a fault becomes a page request: the faulting thread sends it on the preempt channel of
//! its vCPU, and reads the answer there. No other thread is in between, and nothing that vCPUs share. Where several
//! share a preempt channel, the thread waits until a receiver has put the page in place. Without a connection the page
//! is marked as wanted, and the next set of connections begins with the request.

use std::sync::Arc;

use parking_lot::Mutex;

use page_bitmap::change_then_look;

use super::engine::Engine;
use super::fault::{Asker, Askers, Requests};
use super::waiters::Waiting;
use crate::error::Failure;
use crate::fault::{Fault, FaultError, FaultResolver};
use crate::layout::GpaRange;
use crate::ram::GuestMemoryMap;
use crate::stride::Strides;

/// Resolves the faults of the vCPUs of one engine.
pub(super) struct VcpuFaultResolver<M: GuestMemoryMap> {
    engine: Arc<Engine<M>>,
    askers: Arc<Askers>,
    /// Number of slots for readers; the slots of vCPUs follow them.
    readers: usize,
    /// By number of the vCPU.
    recent: Vec<Recent>,
}

/// The recent faults of a vCPU thread. Only that uses it.
#[derive(Default)]
#[repr(align(128))]
struct Recent(Mutex<Strides>);

impl<M: GuestMemoryMap> VcpuFaultResolver<M> {
    pub(super) fn new(engine: &Arc<Engine<M>>, askers: &Arc<Askers>) -> Self {
        let (readers, vcpus) = (engine.source().readers(), engine.source().bells().len());
        Self {
            engine: Arc::clone(engine),
            askers: Arc::clone(askers),
            readers,
            recent: (0..vcpus).map(|_| Recent::default()).collect(),
        }
    }
}

impl<M: GuestMemoryMap> FaultResolver for VcpuFaultResolver<M> {
    fn resolve(&self, vcpu: usize, fault: Fault) -> Result<(), FaultError> {
        let ask = |waited_for: Vec<GpaRange>| {
            let ahead = self.recent.get(vcpu).map_or_else(Vec::new, |recent| {
                let mut strides = recent.0.lock();
                self.engine.ahead_of(&[fault], &mut strides)
            });
            change_then_look();
            let asker = self.askers.of(self.readers + vcpu)?;
            let asks = !waited_for.is_empty() || !ahead.is_empty();
            if asks {
                asker.ask_for_self(&Requests { waited_for, ahead });
            }
            Some((asker, asks))
        };
        let wait = |asked: Option<(Arc<Asker>, bool)>,
                    waiting: &Waiting<'_>,
                    is_missing: &dyn Fn() -> bool| {
            match asked.as_ref().and_then(|(asker, asks)| Some((asker.own()?, *asks))) {
                Some((own, asks)) => {
                    own.wait_for(&self.engine, (vcpu, waiting), asks, is_missing);
                }
                None if is_missing() => waiting.bell().wait(),
                None => {}
            }
        };
        let brought = self.engine.resolve(vcpu, fault, ask, wait);
        brought.map_err(|cause| {
            self.engine.fail(Failure::new("bringing a page for a vCPU", cause));
            FaultError
        })
    }
}
