// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of an entropy device.

use std::fs::File;
use std::io;
use std::sync::Arc;

use memory::GuestMemory;

use crate::virtio::one_queue::OneQueue;
use crate::virtio::queue::{Broken, Chain, NOT_RAM, WorkQueue};
use crate::{LogLimit, log_limited, syscalls};

/// Maximum number of chains handled before other events.
const BUDGET: u32 = 64;
/// Maximum number of bytes for one chain. Drivers request some hundred at most; the device may return fewer
/// than requested (virtio 1.3, 5.4.6.1).
const CHAIN_BYTES_MAX: u64 = 64 << 10;

/// Serves the queue of an entropy device.
pub(crate) struct RngWorker {
    queue: WorkQueue,
    source: Arc<File>,
    log: Arc<LogLimit>,
}

impl RngWorker {
    /// `source` must be non-blocking.
    pub(crate) fn new(queue: WorkQueue, source: Arc<File>, log: Arc<LogLimit>) -> Self {
        Self { queue, source, log }
    }
}

impl OneQueue for RngWorker {
    fn kind(&self) -> &'static str {
        "device-rng"
    }

    fn queue(&self) -> &WorkQueue {
        &self.queue
    }

    fn serve(&mut self) -> Result<(), Broken> {
        let Self { queue, source, log } = self;
        queue.serve(BUDGET, |memory, chain| fill(memory, chain, source, log))
    }
}

/// Fills a chain; returns the number of bytes written.
fn fill(
    memory: &GuestMemory,
    chain: &mut Chain,
    source: &File,
    log: &LogLimit,
) -> Result<u64, &'static str> {
    let wanted = chain.writable.len_bytes().min(CHAIN_BYTES_MAX);
    let room = chain.writable.split_front(wanted).unwrap_or_default();
    if wanted == 0 {
        return Err("has no room for random bytes");
    }
    let ranges = room.host_ranges(memory).map_err(|_| NOT_RAM)?;
    let error = match ranges.read(source) {
        Ok(0) => io::ErrorKind::UnexpectedEof.into(),
        Ok(len_bytes) => {
            let len_bytes = u64::try_from(len_bytes).unwrap_or(0);
            room.mark_written(memory, len_bytes);
            return Ok(len_bytes);
        }
        Err(error) => error,
    };
    let mut bytes = vec![0; usize::try_from(wanted).unwrap_or(0)];
    let len_bytes = match syscalls::random(&mut bytes) {
        Ok(()) => {
            let copied = room.copy_in(memory, &bytes).map_err(|_| NOT_RAM)?;
            u64::try_from(copied).unwrap_or(0)
        }
        Err(_) => 0,
    };
    log_limited!(
        log,
        Warn,
        "source of entropy fails, the kernel's generator stands in for it: {error}"
    );
    Ok(len_bytes)
}
