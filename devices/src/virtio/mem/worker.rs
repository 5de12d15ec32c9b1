// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a memory device.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use memory::GuestMemory;
use virtio_queue::QueueState;

use super::Shared;
use super::requests::{ANSWER_BYTES, REQUEST_BYTES, Request};
use crate::virtio::queue::{Broken, Chain, WorkQueue};
use crate::virtio::worker::{Watch, Work};

const KICK_TOKEN: u64 = 0;

/// Serves the queue of a memory device.
pub(crate) struct MemWorker {
    queue: WorkQueue,
    shared: Arc<Shared>,
}

impl MemWorker {
    pub(crate) fn new(queue: WorkQueue, shared: Arc<Shared>) -> Self {
        Self { queue, shared }
    }

    /// Takes one request and goes back to the loop, so that a pause waits for no more than that.
    fn serve(&mut self) -> Result<(), Broken> {
        let memory = self.queue.memory();
        match self.queue.pop(&memory)? {
            Some(chain) => {
                let written = self.answer(&memory, &chain)?;
                self.queue.add_used(&memory, chain.head, written)?;
                self.queue.notify(&memory)?;
                self.queue.kick_self();
            }
            None => {
                if self.queue.allow_kicks(&memory)? {
                    self.queue.kick_self();
                }
            }
        }
        Ok(())
    }

    fn answer(&self, memory: &GuestMemory, chain: &Chain) -> Result<u64, Broken> {
        let bad = |why| self.queue.bad_chain(chain.head, why);
        if chain.writable.len_bytes() < ANSWER_BYTES as u64 {
            return Err(bad("has no room for an answer"));
        }
        let mut bytes = [0; REQUEST_BYTES];
        let read = chain.readable.copy_out(memory, &mut bytes);
        if read.map_err(|_| bad("points outside of guest RAM"))? < REQUEST_BYTES {
            return Err(bad("is shorter than a request"));
        }
        let answer = self.shared.serve(Request::parse(&bytes)).bytes();
        let written = chain.writable.copy_in(memory, &answer);
        written.map_err(|_| bad("points outside of guest RAM"))?;
        Ok(ANSWER_BYTES as u64)
    }
}

impl Work for MemWorker {
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
