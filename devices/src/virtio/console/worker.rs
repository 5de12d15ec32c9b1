// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a console: both of its queues and its endpoint.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use virtio_queue::QueueState;

use super::device::ConsoleResizer;
use crate::endpoint::ConsoleEndpoint;
use crate::virtio::queue::{Broken, NOT_RAM, WorkQueue};
use crate::virtio::worker::{Watch, Work};

const RECEIVE_TOKEN: u64 = 0;
const TRANSMIT_TOKEN: u64 = 1;
const ENDPOINT_TOKEN: u64 = 2;
/// Maximum number of chains handled before other events.
const BUDGET: u32 = 256;
/// Bytes copied at a time.
const BUFFER_BYTES: usize = 4096;
/// Maximum output bytes taken from one chain. No driver sends more, and a chain of 4 GiB would delay a
/// pause.
const CHAIN_BYTES_MAX: u64 = 1 << 20;

/// Serves the queues of a console.
pub(crate) struct ConsoleWorker {
    receive: WorkQueue,
    transmit: WorkQueue,
    endpoint: Arc<ConsoleEndpoint>,
    resizer: ConsoleResizer,
}

impl ConsoleWorker {
    pub(crate) fn new(receive: WorkQueue, transmit: WorkQueue, resizer: ConsoleResizer) -> Self {
        Self { receive, transmit, endpoint: resizer.endpoint(), resizer }
    }

    /// Writes the available output.
    fn transmit(&mut self) -> Result<(), Broken> {
        let Self { transmit, endpoint, .. } = self;
        transmit.serve(BUDGET, |memory, chain| {
            let mut left = chain.readable.len_bytes().min(CHAIN_BYTES_MAX);
            let mut buffer = [0; BUFFER_BYTES];
            while left > 0 {
                let len_bytes = left.min(BUFFER_BYTES as u64);
                left -= len_bytes;
                let Some(piece) = chain.readable.split_front(len_bytes) else { break };
                let copied = piece.copy_out(memory, &mut buffer).map_err(|_| NOT_RAM)?;
                endpoint.write(buffer.get(..copied).unwrap_or_default());
            }
            Ok(0)
        })
    }

    /// Passes input to the driver while there are both input and buffers.
    fn receive(&mut self) -> Result<(), Broken> {
        let memory = self.receive.memory();
        self.receive.suppress_kicks(&memory)?;
        // The endpoint stays readable if the budget is used up first.
        for _ in 0..BUDGET {
            let Some(chain) = self.receive.pop(&memory)? else {
                self.endpoint.want_input(false);
                if self.receive.allow_kicks(&memory)? {
                    self.receive.suppress_kicks(&memory)?;
                    continue;
                }
                return self.receive.notify(&memory);
            };
            let room = usize::try_from(chain.writable.len_bytes()).unwrap_or(usize::MAX);
            if room == 0 {
                return Err(self.receive.bad_chain(chain.head, "has no room for input"));
            }
            let mut buffer = [0; BUFFER_BYTES];
            let room = room.min(BUFFER_BYTES);
            self.endpoint.want_input(true);
            let len_bytes = self.endpoint.service(buffer.get_mut(..room).unwrap_or_default());
            if len_bytes == 0 {
                self.receive.undo_pop();
                break;
            }
            // No signal reports size changes of a pseudo terminal.
            self.resizer.follow_terminal();
            let input = buffer.get(..len_bytes).unwrap_or_default();
            let copied = chain
                .writable
                .copy_in(&memory, input)
                .map_err(|_| self.receive.bad_chain(chain.head, NOT_RAM))?;
            self.receive.add_used(&memory, chain.head, u64::try_from(copied).unwrap_or(0))?;
        }
        self.receive.notify(&memory)
    }
}

impl Work for ConsoleWorker {
    fn kind(&self) -> &'static str {
        "device-console"
    }

    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        watch.on(RECEIVE_TOKEN, self.receive.kick().as_raw_fd())?;
        watch.on(TRANSMIT_TOKEN, self.transmit.kick().as_raw_fd())?;
        watch.on(ENDPOINT_TOKEN, self.endpoint.poll_fd())?;
        self.transmit()?;
        self.receive()
    }

    fn ready(&mut self, token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        match token {
            TRANSMIT_TOKEN => {
                self.transmit.take_kick();
                self.transmit()
            }
            RECEIVE_TOKEN => {
                self.receive.take_kick();
                self.receive()
            }
            _ => {
                // Writes pending output, or accepts a peer.
                self.endpoint.service(&mut []);
                self.receive()
            }
        }
    }

    fn drain(&mut self) -> Result<(), Broken> {
        self.endpoint.want_input(false);
        Ok(())
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        vec![self.receive.state(), self.transmit.state()]
    }

    fn report_broken(&self) {
        self.endpoint.want_input(false);
        self.receive.interrupt().needs_reset();
    }

    /// Output of before is still written, and peers are let in; input waits for a driver.
    fn start_broken(&mut self, watch: &mut Watch) {
        watch.on_if_possible(ENDPOINT_TOKEN, self.endpoint.poll_fd());
    }

    fn ready_broken(&mut self, token: u64, _watch: &mut Watch) {
        // Others may have been taken from epoll before a queue broke.
        if token == ENDPOINT_TOKEN {
            self.endpoint.service(&mut []);
        }
    }
}
