// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of an IOMMU: its requests and its fault reports.
//!
//! Owns when a request is answered. One that removes what is in use is carried out at once and answered when
//! the use has ended; until then it stays in the ring, and no other is taken.

use std::os::fd::AsRawFd as _;

use memory::GuestMemory;
use virtio_queue::QueueState;

use super::domains::{IommuHandle, Pending};
use super::request::{
    FAULT_LEN_BYTES, PROBE_LEN_BYTES, REQUEST_LEN_BYTES_MAX, Request, Status, TAIL_LEN_BYTES,
    fault_report, is_probe, properties,
};
use crate::virtio::queue::{Broken, Chain, NOT_RAM, WorkQueue};
use crate::virtio::worker::{Watch, Work};

const REQUEST_TOKEN: u64 = 0;
const FAULT_TOKEN: u64 = 1;
const NOTICE_TOKEN: u64 = 2;
/// Maximum number of requests before other events.
const BUDGET: u32 = 256;

/// Serves the queues of an IOMMU.
pub(crate) struct IommuWorker {
    requests: WorkQueue,
    faults: WorkQueue,
    handle: IommuHandle,
}

impl IommuWorker {
    pub(crate) fn new(requests: WorkQueue, faults: WorkQueue, handle: IommuHandle) -> Self {
        Self { requests, faults, handle }
    }

    fn serve(&mut self) -> Result<(), Broken> {
        let handle = &self.handle;
        self.requests.serve_while(BUDGET, |memory, chain| {
            answer(handle, memory, chain).map(|written| written.map(|written| (written, 1)))
        })
    }

    /// Reports faults for which the driver has room.
    fn report(&mut self) -> Result<(), Broken> {
        let memory = self.faults.memory();
        while let Some(fault) = self.handle.notices.first_fault() {
            let Some(chain) = self.faults.pop(&memory)? else {
                if self.faults.allow_kicks(&memory)? {
                    continue;
                }
                break;
            };
            if chain.writable.len_bytes() < FAULT_LEN_BYTES as u64 {
                return Err(self.faults.bad_chain(chain.head, "has no room for a fault"));
            }
            let copied = chain.writable.copy_in(&memory, &fault_report(fault));
            copied.map_err(|_| self.faults.bad_chain(chain.head, NOT_RAM))?;
            self.faults.add_used(&memory, chain.head, FAULT_LEN_BYTES as u64)?;
            self.handle.notices.drop_first_fault();
        }
        self.faults.notify(&memory)
    }
}

/// Carries out a request; returns the number of bytes written, or none if it is too early for the answer.
fn answer(
    handle: &IommuHandle,
    memory: &GuestMemory,
    chain: &mut Chain,
) -> Result<Option<u64>, &'static str> {
    const NO_ROOM: &str = "has no room for a status";
    let len_bytes = chain.readable.len_bytes().min(REQUEST_LEN_BYTES_MAX as u64);
    let part = chain.readable.split_front(len_bytes).unwrap_or_default();
    let mut request = [0; REQUEST_LEN_BYTES_MAX];
    let request = request.get_mut(..usize::try_from(len_bytes).unwrap_or(0)).unwrap_or_default();
    part.copy_out(memory, request).map_err(|_| NOT_RAM)?;

    let room_bytes = if is_probe(request) { PROBE_LEN_BYTES as u64 } else { 0 };
    if chain.writable.len_bytes() < TAIL_LEN_BYTES as u64 {
        return Err(NO_ROOM);
    }
    let (status, room) = match chain.writable.split_front(room_bytes) {
        Some(room) if chain.writable.len_bytes() >= TAIL_LEN_BYTES as u64 => {
            let Some(status) = perform(handle, chain.head, request) else { return Ok(None) };
            (status, room)
        }
        // The status comes where it would be if the room were less.
        Some(mut room) => {
            let short = (TAIL_LEN_BYTES as u64).saturating_sub(chain.writable.len_bytes());
            let mut tail = room.split_back(short).unwrap_or_default();
            tail.append(std::mem::take(&mut chain.writable));
            chain.writable = tail;
            (Status::Invalid, room)
        }
        None => {
            let tail = chain.writable.split_back(TAIL_LEN_BYTES as u64).ok_or(NO_ROOM)?;
            let room = std::mem::replace(&mut chain.writable, tail);
            (Status::Invalid, room)
        }
    };
    let properties = if status == Status::Ok { properties() } else { [0; PROBE_LEN_BYTES] };
    let len = usize::try_from(room.len_bytes()).unwrap_or(0).min(PROBE_LEN_BYTES);
    let copied = room.copy_in(memory, properties.get(..len).unwrap_or_default());
    copied.map_err(|_| NOT_RAM)?;
    chain.writable.copy_in(memory, &status.tail()).map_err(|_| NOT_RAM)?;
    Ok(Some(room.len_bytes().saturating_add(TAIL_LEN_BYTES as u64)))
}

/// How a request ends; none if it is too early to say so.
fn perform(handle: &IommuHandle, head: u16, request: &[u8]) -> Option<Status> {
    let mut domains = handle.domains.lock();
    // One that the driver has taken back, against the rules, is forgotten.
    if let Some(pending) = domains.pending.take().filter(|pending| pending.head == head) {
        if pending.wait.is_due() {
            domains.pending = Some(pending);
            return None;
        }
        // Only what was done waits.
        return Some(Status::Ok);
    }
    let request = match Request::parse(request) {
        Ok(request) => request,
        Err(status) => return Some(status),
    };
    let (status, wait) = domains.perform(request);
    if wait.is_due() {
        domains.pending = Some(Pending { head, wait });
        return None;
    }
    Some(status)
}

impl Work for IommuWorker {
    fn kind(&self) -> &'static str {
        "device-iommu"
    }

    fn start(&mut self, watch: &mut Watch) -> Result<(), Broken> {
        watch.on(REQUEST_TOKEN, self.requests.kick().as_raw_fd())?;
        watch.on(FAULT_TOKEN, self.faults.kick().as_raw_fd())?;
        watch.on(NOTICE_TOKEN, self.handle.notices.event.as_raw_fd())?;
        self.report()?;
        self.serve()
    }

    fn ready(&mut self, token: u64, _watch: &mut Watch) -> Result<(), Broken> {
        match token {
            REQUEST_TOKEN => {
                self.requests.take_kick();
                self.serve()
            }
            FAULT_TOKEN => {
                self.faults.take_kick();
                self.report()
            }
            _ => {
                // Another wake-up may have cleared it, which does not matter.
                let _ = self.handle.notices.event.read();
                self.report()?;
                self.serve()
            }
        }
    }

    fn drain(&mut self) -> Result<(), Broken> {
        Ok(())
    }

    fn queue_states(&self) -> Vec<(u16, QueueState)> {
        vec![self.requests.state(), self.faults.state()]
    }

    fn report_broken(&self) {
        self.requests.interrupt().needs_reset();
    }
}
