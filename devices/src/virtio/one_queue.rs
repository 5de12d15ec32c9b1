// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that serve one queue, and optionally an event from other threads.
//!
//! Owns what they have in common: when the queue is served, and what is saved of it. What a
//! request means is up to each device.

use std::os::fd::AsRawFd;

use virtio_queue::QueueState;
use vmm_sys_util::eventfd::EventFd;

use super::device::{ActivateError, Activation};
use super::queue::{Broken, WorkQueue};
use super::worker::{Watch, Work};

const KICK_TOKEN: u64 = 0;
const EVENT_TOKEN: u64 = 1;

/// Serves one queue, with nothing in flight when `serve` returns.
pub(crate) trait OneQueue: Send + 'static {
    /// As [`Work::kind`].
    fn kind(&self) -> &'static str;
    /// The queue.
    fn queue(&self) -> &WorkQueue;
    /// Serves available requests. After a limited number it may kick the queue itself and return.
    fn serve(&mut self) -> Result<(), Broken>;
    /// Readable when there is work other than the queue's.
    fn event(&self) -> Option<&EventFd> {
        None
    }
    /// Does that work. Also called at the start, and after a violation by the driver; may signal the event
    /// itself and return. Must not access the queue.
    fn other_work(&mut self) {}
    /// Clears the event and does its work.
    fn take_other_work(&mut self) {
        if let Some(event) = self.event() {
            // Another wake-up may have cleared it, which does not matter.
            let _ = event.read();
        }
        self.other_work();
    }
}

impl<W: OneQueue> Work for W {
    fn kind(&self) -> &'static str {
        OneQueue::kind(self)
    }

    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        watch.on(KICK_TOKEN, self.queue().kick().as_raw_fd())?;
        if let Some(event) = self.event() {
            watch.on(EVENT_TOKEN, event.as_raw_fd())?;
        }
        self.other_work();
        self.serve()
    }

    fn ready(&mut self, token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        if token == EVENT_TOKEN {
            self.take_other_work();
            return Ok(());
        }
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

    fn start_broken(&mut self, watch: &mut Watch) {
        if let Some(event) = self.event() {
            watch.on_if_possible(EVENT_TOKEN, event.as_raw_fd());
        }
        self.other_work();
    }

    fn ready_broken(&mut self, token: u64, _watch: &mut Watch) {
        // A token of the queue may have been taken from epoll before the queue broke.
        if token == EVENT_TOKEN {
            self.take_other_work();
        }
    }
}

/// The queue of a device with a single one.
pub(crate) fn only_queue(activation: Activation) -> Result<WorkQueue, ActivateError> {
    let Activation { memory, interrupt, queues, features } = activation;
    let queue = queues.into_iter().find(|queue| queue.index == 0);
    let queue = queue.ok_or(ActivateError::MissingQueue { index: 0 })?;
    Ok(WorkQueue::new(queue, &memory, &interrupt, features))
}
