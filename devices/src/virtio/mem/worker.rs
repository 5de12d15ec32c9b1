// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a memory device.

use std::sync::Arc;

use memory::GuestMemory;
use vmm_sys_util::eventfd::EventFd;

use super::Shared;
use super::requests::{REQUEST_BYTES, RESPONSE_BYTES, Request};
use crate::virtio::one_queue::OneQueue;
use crate::virtio::queue::{Broken, Chain, NOT_RAM, WorkQueue};

/// Maximum number of requests before other events: a request may take long, and a pause waits for one at
/// most.
const BUDGET: u32 = 1;

/// Serves the queue of a virtio-mem device.
pub(crate) struct MemWorker {
    queue: WorkQueue,
    shared: Arc<Shared>,
}

impl MemWorker {
    pub(crate) fn new(queue: WorkQueue, shared: Arc<Shared>) -> Self {
        Self { queue, shared }
    }
}

impl OneQueue for MemWorker {
    fn kind(&self) -> &'static str {
        "device-mem"
    }

    fn queue(&self) -> &WorkQueue {
        &self.queue
    }

    fn serve(&mut self) -> Result<(), Broken> {
        let Self { queue, shared } = self;
        queue.serve(BUDGET, |memory, chain| respond(memory, chain, shared))
    }

    fn event(&self) -> Option<&EventFd> {
        Some(self.shared.retry_event())
    }

    fn other_work(&mut self) {
        self.shared.retry_unplugged();
    }
}

fn respond(memory: &GuestMemory, chain: &Chain, shared: &Shared) -> Result<u64, &'static str> {
    if chain.writable.len_bytes() < RESPONSE_BYTES as u64 {
        return Err("has no room for an answer");
    }
    let mut bytes = [0; REQUEST_BYTES];
    let read = chain.readable.copy_out(memory, &mut bytes).map_err(|_| NOT_RAM)?;
    if read < REQUEST_BYTES {
        return Err("is shorter than a request");
    }
    let response = shared.serve(Request::parse(&bytes)).bytes();
    chain.writable.copy_in(memory, &response).map_err(|_| NOT_RAM)?;
    Ok(RESPONSE_BYTES as u64)
}
