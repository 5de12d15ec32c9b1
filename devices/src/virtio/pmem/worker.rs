// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a persistent memory device.

use std::sync::Arc;

use memory::GuestMemory;

use super::requests::{REQUEST_BYTES, RESPONSE_BYTES, is_flush, response};
use crate::virtio::block::DiskLock;
use crate::virtio::one_queue::OneQueue;
use crate::virtio::queue::{Broken, Chain, NOT_RAM, WorkQueue};
use crate::{LogLimit, log_limited};

/// Maximum number of requests before other events: a flush may take long, and a pause waits for one at most.
const BUDGET: u32 = 1;

/// Serves the queue of a persistent memory device.
pub(crate) struct PmemWorker {
    queue: WorkQueue,
    file: DiskLock,
    log: Arc<LogLimit>,
}

impl PmemWorker {
    pub(crate) fn new(queue: WorkQueue, file: DiskLock, log: Arc<LogLimit>) -> Self {
        Self { queue, file, log }
    }
}

impl OneQueue for PmemWorker {
    fn kind(&self) -> &'static str {
        "device-pmem"
    }

    fn queue(&self) -> &WorkQueue {
        &self.queue
    }

    fn serve(&mut self) -> Result<(), Broken> {
        let Self { queue, file, log } = self;
        queue.serve(BUDGET, |memory, chain| respond(memory, chain, file, log))
    }
}

fn respond(
    memory: &GuestMemory,
    chain: &Chain,
    file: &DiskLock,
    log: &LogLimit,
) -> Result<u64, &'static str> {
    if chain.writable.len_bytes() < RESPONSE_BYTES as u64 {
        return Err("has no room for an answer");
    }
    let mut bytes = [0; REQUEST_BYTES];
    let read = chain.readable.copy_out(memory, &mut bytes).map_err(|_| NOT_RAM)?;
    if read < REQUEST_BYTES {
        return Err("is shorter than a request");
    }
    let is_done = is_flush(bytes) && flush(file, log);
    chain.writable.copy_in(memory, &response(is_done)).map_err(|_| NOT_RAM)?;
    Ok(RESPONSE_BYTES as u64)
}

fn flush(file: &DiskLock, log: &LogLimit) -> bool {
    let flushed = file.write_back();
    if let Err(error) = &flushed {
        log_limited!(
            log,
            Error,
            "a flush of persistent memory failed: {}",
            error_text::chain(error)
        );
    }
    flushed.is_ok()
}
