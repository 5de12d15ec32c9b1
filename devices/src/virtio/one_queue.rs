// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that serve one queue and watch nothing else.
//!
//! Owns what they have in common: when the queue is looked at, and what is saved of it. What a
//! request means is with each of them.

use std::os::fd::AsRawFd;

use virtio_queue::QueueState;

use super::device::{ActivateError, Activation};
use super::queue::{Broken, WorkQueue};
use super::worker::{Watch, Work};

const KICK_TOKEN: u64 = 0;

/// Serves one queue, with nothing in flight when `serve` returns.
pub(crate) trait OneQueue: Send + 'static {
    /// The queue.
    fn queue(&self) -> &WorkQueue;
    /// Takes what has come. After enough of it, it may kick the queue itself and return.
    fn serve(&mut self) -> Result<(), Broken>;
}

impl<W: OneQueue> Work for W {
    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        watch.on(KICK_TOKEN, self.queue().kick().as_raw_fd())?;
        self.serve()
    }

    fn ready(&mut self, _token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        self.queue().take_kick();
        self.serve()
    }

    fn drain(&mut self) -> Result<(), Broken> {
        Ok(())
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        vec![self.queue().state()]
    }

    fn report_broken(&self) {
        self.queue().interrupt().needs_reset();
    }
}

/// The queue of a device that has one.
pub(crate) fn only_queue(activation: Activation) -> Result<WorkQueue, ActivateError> {
    let Activation { memory, interrupt, queues, features } = activation;
    let queue = queues.into_iter().find(|queue| queue.index == 0);
    let queue = queue.ok_or(ActivateError::MissingQueue { index: 0 })?;
    Ok(WorkQueue::new(queue, &memory, &interrupt, features))
}
