// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of an entropy device.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use log::warn;
use memory::GuestMemory;
use virtio_queue::QueueState;

use crate::syscalls;
use crate::virtio::queue::{Broken, Chain, WorkQueue};
use crate::virtio::worker::{Watch, Work};

const KICK_TOKEN: u64 = 0;
/// Chains taken before other events are looked at.
const BUDGET: u32 = 64;
/// Bytes given for one chain. Drivers ask for at most some hundred; the device may give fewer
/// than there is room for (virtio 1.3, 5.4.6.1).
const CHAIN_BYTES_MAX: u64 = 64 << 10;

/// Serves an entropy device.
pub(crate) struct RngWorker {
    queue: WorkQueue,
    source: Arc<File>,
    stand_in_reported: bool,
}

impl RngWorker {
    /// `source` must not wait.
    pub(crate) fn new(queue: WorkQueue, source: Arc<File>) -> Self {
        Self { queue, source, stand_in_reported: false }
    }

    fn serve(&mut self) -> Result<(), Broken> {
        let memory = self.queue.memory();
        let mut budget = BUDGET;
        loop {
            self.queue.suppress_kicks(&memory)?;
            while let Some(mut chain) = self.queue.pop(&memory)? {
                let written = self.fill(&memory, &mut chain)?;
                self.queue.add_used(&memory, chain.head, written)?;
                budget -= 1;
                if budget == 0 {
                    self.queue.kick_self();
                    return self.queue.notify(&memory);
                }
            }
            self.queue.notify(&memory)?;
            if !self.queue.allow_kicks(&memory)? {
                return Ok(());
            }
        }
    }

    /// Says how many bytes it wrote.
    fn fill(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<u64, Broken> {
        let wanted = chain.writable.len_bytes().min(CHAIN_BYTES_MAX);
        let room = chain.writable.split_front(wanted).unwrap_or_default();
        if wanted == 0 {
            return Err(self.queue.bad_chain(chain.head, "has no room for random bytes"));
        }
        let not_ram = || self.queue.bad_chain(chain.head, "points outside of guest RAM");
        let ranges = room.host_ranges(memory).map_err(|_| not_ram())?;
        let error = match ranges.read(&self.source) {
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
                let copied = room.copy_in(memory, &bytes).map_err(|_| not_ram())?;
                u64::try_from(copied).unwrap_or(0)
            }
            Err(_) => 0,
        };
        if !self.stand_in_reported {
            self.stand_in_reported = true;
            warn!("source of entropy fails, the kernel's generator stands in for it: {error}");
        }
        Ok(len_bytes)
    }
}

impl Work for RngWorker {
    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        watch.on(KICK_TOKEN, self.queue.kick().as_raw_fd())?;
        self.serve()
    }

    fn ready(&mut self, _token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        self.queue.take_kick();
        self.serve()
    }

    fn drain(&mut self) -> Result<(), Broken> {
        Ok(())
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        vec![self.queue.state()]
    }

    fn report_broken(&self) {
        self.queue.interrupt().needs_reset();
    }
}
