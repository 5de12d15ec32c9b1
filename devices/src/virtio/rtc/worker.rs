// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a real-time clock.

use std::time::{SystemTime, UNIX_EPOCH};

use memory::GuestMemory;

use super::request::{REQUEST_LEN_BYTES_MAX, answer_to};
use crate::virtio::one_queue::OneQueue;
use crate::virtio::queue::{Broken, Chain, NOT_RAM, WorkQueue};

/// Maximum number of chains handled before other events.
const BUDGET: u32 = 64;

/// Serves the queue of a real-time clock.
pub(crate) struct RtcWorker {
    queue: WorkQueue,
}

impl RtcWorker {
    pub(crate) fn new(queue: WorkQueue) -> Self {
        Self { queue }
    }
}

impl OneQueue for RtcWorker {
    fn kind(&self) -> &'static str {
        "device-rtc"
    }

    fn queue(&self) -> &WorkQueue {
        &self.queue
    }

    fn serve(&mut self) -> Result<(), Broken> {
        self.queue.serve(BUDGET, reply)
    }
}

/// The host's UTC in nanoseconds since 1970, if that is a time that can be told.
fn now_ns() -> Option<u64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    u64::try_from(since.as_nanos()).ok()
}

/// Answers a request; returns the number of bytes written.
fn reply(memory: &GuestMemory, chain: &mut Chain) -> Result<u64, &'static str> {
    if chain.writable.len_bytes() == 0 {
        return Err("has no room for an answer");
    }
    let len_bytes = chain.readable.len_bytes().min(REQUEST_LEN_BYTES_MAX as u64);
    let part = chain.readable.split_front(len_bytes).unwrap_or_default();
    let mut request = [0; REQUEST_LEN_BYTES_MAX];
    let request = request.get_mut(..usize::try_from(len_bytes).unwrap_or(0)).unwrap_or_default();
    part.copy_out(memory, request).map_err(|_| NOT_RAM)?;
    let answer = answer_to(request, now_ns);
    let room = chain.writable.split_front(chain.writable.len_bytes().min(answer.len() as u64));
    let room = room.unwrap_or_default();
    let fits = usize::try_from(room.len_bytes()).unwrap_or(0).min(answer.len());
    let copied = room.copy_in(memory, answer.get(..fits).unwrap_or_default());
    copied.map(|len| len as u64).map_err(|_| NOT_RAM)
}
