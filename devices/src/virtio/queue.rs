// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtqueue interface for device workers.
//!
//! Owns taking chains off the available ring, putting them on the used ring and notifying the
//! driver. Everything in the rings was written by the driver: a rule that it broke is [`Broken`],
//! after which the queue must not be used again before a reset.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use memory::{GuestMemory, GuestMemoryHandle};
use thiserror::Error;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VRING_AVAIL_F_NO_INTERRUPT};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend as _, GuestMemoryLoadGuard,
    VolatileMemory as _,
};
use vmm_sys_util::eventfd::EventFd;

use super::available::{Available, Look};
pub(crate) use super::buffers::Chain;
use super::buffers::{RANGES_MAX, Segment, write};
use super::device::{ActiveQueue, VirtioInterrupt};
use super::iommu::QueueDma;

/// Error text for a chain whose buffers are not RAM.
pub(crate) const NOT_RAM: &str = "points outside of guest RAM";

/// The driver has violated the queue's rules; the device needs a reset.
#[derive(Debug, Error)]
pub(crate) enum Broken {
    #[error("queue {index}: {source}")]
    Ring {
        index: u16,
        #[source]
        source: virtio_queue::Error,
    },
    #[error("queue {index}: descriptor chain {head} {why}")]
    Chain { index: u16, head: u16, why: &'static str },
    #[error("{0}")]
    Device(&'static str),
}

/// Evaluates an expression with guest memory as the driver of a queue has its rings in it.
macro_rules! with_rings {
    ($queue:ident, $memory:ident, |$rings:ident| $expression:expr) => {
        match &$queue.dma {
            None => {
                let $rings = $memory;
                $expression
            }
            Some(dma) => {
                let $rings = &dma.rings($memory);
                $expression
            }
        }
    };
}

/// An enabled queue, with what is needed to serve it.
pub(crate) struct WorkQueue {
    index: u16,
    queue: Queue,
    kick: EventFd,
    memory: GuestMemoryHandle,
    /// How the driver's addresses are to be understood; without, they are those of guest memory.
    dma: Option<QueueDma>,
    interrupt: Arc<dyn VirtioInterrupt>,
    /// Whether a chain was used since the driver was last considered for a notification.
    was_used: bool,
    /// Position of the used ring when that was last done.
    considered_at: u16,
}

impl WorkQueue {
    pub(crate) fn new(
        active: ActiveQueue,
        memory: &GuestMemoryHandle,
        interrupt: &Arc<dyn VirtioInterrupt>,
        features: u64,
    ) -> Self {
        let ActiveQueue { index, mut queue, kick, dma, .. } = active;
        queue.set_event_idx(features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0);
        let considered_at = queue.next_used();
        Self {
            index,
            queue,
            kick,
            memory: memory.clone(),
            dma,
            interrupt: Arc::clone(interrupt),
            was_used: false,
            considered_at,
        }
    }

    /// Index of the queue in the device.
    pub(crate) fn index(&self) -> u16 {
        self.index
    }

    pub(crate) fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Its position, when no chain is in flight any more.
    pub(crate) fn state(&self) -> (u16, QueueState) {
        if let Some(dma) = &self.dma {
            dma.end_all();
        }
        (self.index, self.queue.state())
    }

    pub(crate) fn kick(&self) -> &EventFd {
        &self.kick
    }

    pub(crate) fn interrupt(&self) -> &Arc<dyn VirtioInterrupt> {
        &self.interrupt
    }

    /// Whether the driver's addresses are translated.
    pub(crate) fn is_translated(&self) -> bool {
        self.dma.is_some()
    }

    /// A snapshot of guest memory.
    pub(crate) fn memory(&self) -> GuestMemoryLoadGuard<GuestMemory> {
        self.memory.memory()
    }

    /// Handle to guest memory, for later snapshots.
    pub(crate) fn memory_handle(&self) -> &GuestMemoryHandle {
        &self.memory
    }

    /// Clears a notification.
    pub(crate) fn take_kick(&self) {
        // An error means that there was none, which does not matter.
        let _ = self.kick.read();
    }

    /// Kicks the queue itself, to continue after other events.
    pub(crate) fn kick_self(&self) {
        // Fails only if the counter is saturated, and then it is readable as well.
        let _ = self.kick.write(1);
    }

    /// Takes the next available chain, if there is one.
    pub(crate) fn pop(&mut self, memory: &GuestMemory) -> Result<Option<Chain>, Broken> {
        let index = self.index;
        let ring = |source| Broken::Ring { index, source };
        let chain = with_rings!(self, memory, |rings| {
            let mut chain = self.queue.iter(rings).map_err(ring)?.next();
            if chain.is_none() {
                let available = self.queue.avail_idx(rings, Ordering::Acquire).map_err(ring)?;
                if available.0 == self.queue.next_avail() {
                    return Ok(None);
                }
                // It came meanwhile, or its place in the ring cannot be read.
                chain = self.queue.iter(rings).map_err(ring)?.next();
            }
            parse(chain.ok_or(ring(virtio_queue::Error::InvalidAvailRingIndex))?)
        });
        let chain = chain.and_then(|chain| match &self.dma {
            None => Ok(chain),
            Some(dma) => dma.take(&chain).map_err(|why| (chain.head, why)),
        });
        chain.map(Some).map_err(|(head, why)| Broken::Chain { index, head, why })
    }

    /// The available ring as it is looked at while chains are taken in a row.
    pub(crate) fn available<'a>(&self, memory: &'a GuestMemory) -> Available<'a> {
        match self.dma {
            None => Available::of(&self.queue, memory),
            Some(_) => Available::general(memory),
        }
    }

    /// Takes the next available chain, if there is one: the same, sooner. Chains are taken in no other way while
    /// `available` is used.
    pub(crate) fn pop_from(
        &mut self,
        available: &mut Available<'_>,
    ) -> Result<Option<Chain>, Broken> {
        let position = self.queue.next_avail();
        match available.look_at(position) {
            Some(Look::Chain(chain)) => {
                self.queue.set_next_avail(position.wrapping_add(1));
                Ok(Some(chain))
            }
            Some(Look::Nothing) => Ok(None),
            None => self.pop(available.memory()),
        }
    }

    /// Takes the next available chain if it is a single range that the device may write, as receive buffers mostly are;
    /// returns its head and its range. `None` for any other, and if there is none: [`Self::pop_from`] says which.
    pub(crate) fn pop_writable(&mut self, available: &mut Available<'_>) -> Option<(u16, Segment)> {
        let position = self.queue.next_avail();
        let found = available.writable_at(position)?;
        self.queue.set_next_avail(position.wrapping_add(1));
        Some(found)
    }

    /// The same for a single chain.
    pub(crate) fn pop_buffer(&mut self, memory: &GuestMemory) -> Result<Option<Chain>, Broken> {
        let mut available = self.available(memory);
        self.pop_from(&mut available)
    }

    /// Whether the driver keeps to the available ring's rules, for a queue of which nothing is taken now.
    pub(crate) fn check_available(&self, memory: &GuestMemory) -> Result<(), Broken> {
        let index = self.index;
        let ring = |source| Broken::Ring { index, source };
        let available =
            with_rings!(self, memory, |rings| self.queue.avail_idx(rings, Ordering::Acquire));
        let available = available.map_err(ring)?.0;
        if available.wrapping_sub(self.queue.next_avail()) > self.queue.size() {
            return Err(ring(virtio_queue::Error::InvalidAvailRingIndex));
        }
        Ok(())
    }

    /// Returns the last chain taken to the available ring.
    pub(crate) fn undo_pop(&mut self) {
        if let Some(dma) = &self.dma {
            dma.end_last();
        }
        self.queue.go_to_previous_position();
    }

    /// Serves available requests, up to `budget`, after which the queue is kicked. `request` returns the
    /// bytes written, or the error of a chain.
    pub(crate) fn serve(
        &mut self,
        budget: u32,
        mut request: impl FnMut(&GuestMemory, &mut Chain) -> Result<u64, &'static str>,
    ) -> Result<(), Broken> {
        self.serve_by_cost(budget, |memory, chain| request(memory, chain).map(|done| (done, 1)))
    }

    /// The same for requests of different cost, which each returns as its share of `budget`.
    pub(crate) fn serve_by_cost(
        &mut self,
        budget: u32,
        mut request: impl FnMut(&GuestMemory, &mut Chain) -> Result<(u64, u32), &'static str>,
    ) -> Result<(), Broken> {
        self.serve_while(budget, |memory, chain| request(memory, chain).map(Some))
    }

    /// The same until `request` returns `None`: its chain stays available, and the caller serves again later
    /// without a notification.
    pub(crate) fn serve_while(
        &mut self,
        mut budget: u32,
        mut request: impl FnMut(&GuestMemory, &mut Chain) -> Result<Option<(u64, u32)>, &'static str>,
    ) -> Result<(), Broken> {
        let memory = self.memory();
        loop {
            self.suppress_kicks(&memory)?;
            while let Some(mut chain) = self.pop(&memory)? {
                let head = chain.head;
                let done = request(&memory, &mut chain).map_err(|why| self.bad_chain(head, why))?;
                let Some((written, cost)) = done else {
                    self.undo_pop();
                    return self.notify(&memory);
                };
                self.add_used(&memory, head, written)?;
                budget = budget.saturating_sub(cost);
                if budget == 0 {
                    self.kick_self();
                    return self.notify(&memory);
                }
            }
            self.notify(&memory)?;
            if !self.allow_kicks(&memory)? {
                return Ok(());
            }
        }
    }

    /// The error for a chain that is not valid for this device.
    pub(crate) fn bad_chain(&self, head: u16, why: &'static str) -> Broken {
        Broken::Chain { index: self.index, head, why }
    }

    /// Adds a chain to the used ring, with `written_bytes` written to its writable part.
    pub(crate) fn add_used(
        &mut self,
        memory: &GuestMemory,
        head: u16,
        written_bytes: u64,
    ) -> Result<(), Broken> {
        self.add_used_together(memory, &[(head, written_bytes)])
    }

    /// Adds several chains to the used ring such that the driver sees all of them at once.
    pub(crate) fn add_used_together(
        &mut self,
        memory: &GuestMemory,
        used: &[(u16, u64)],
    ) -> Result<(), Broken> {
        const INDEX_OFFSET: usize = 2;
        const HEADER_BYTES: usize = 4;
        const ELEMENT_BYTES: usize = 8;
        if used.is_empty() {
            return Ok(());
        }
        let index = self.index;
        let ring = |source| Broken::Ring { index, source };
        let (start, size) = (self.queue.used_ring(), self.queue.size().max(1));
        let place = |offset: usize| {
            let gpa = start.checked_add(offset as u64).ok_or(virtio_queue::Error::AddressOverflow);
            gpa.map(GuestAddress).map_err(ring)
        };
        // Nearly always within one region.
        let ring_bytes = HEADER_BYTES + usize::from(size) * ELEMENT_BYTES;
        let used_ring = match &self.dma {
            None => memory.get_slice(place(0)?, ring_bytes).ok(),
            Some(_) => None,
        };
        let mut position = self.queue.next_used();
        for (head, written_bytes) in used {
            if *head >= size {
                return Err(ring(virtio_queue::Error::InvalidDescriptorIndex));
            }
            let written = u32::try_from(*written_bytes).unwrap_or(u32::MAX);
            let element = (u64::from(written) << 32 | u64::from(*head)).to_le();
            let offset = HEADER_BYTES + usize::from(position % size) * ELEMENT_BYTES;
            position = position.wrapping_add(1);
            if let Some(place) = used_ring.as_ref().and_then(|ring| ring.get_ref(offset).ok()) {
                place.store(element);
                continue;
            }
            let (gpa, element) = (place(offset)?, element.to_ne_bytes());
            let put = match &self.dma {
                None => write(memory, gpa, &element),
                Some(dma) => {
                    dma.end(*head);
                    dma.rings(memory).write_slice(&element, gpa)
                }
            };
            put.map_err(|error| ring(virtio_queue::Error::GuestMemory(error)))?;
        }
        self.was_used = true;
        self.queue.set_next_used(position);
        let position = position.to_le();
        if let Some(ring) = used_ring
            && ring.store(position, INDEX_OFFSET, Ordering::Release).is_ok()
        {
            return Ok(());
        }
        let gpa = place(INDEX_OFFSET)?;
        with_rings!(self, memory, |rings| rings.store(position, gpa, Ordering::Release))
            .map_err(|error| ring(virtio_queue::Error::GuestMemory(error)))
    }

    /// Number of used chains for which the driver was not considered for a notification.
    pub(crate) fn untold(&self) -> u16 {
        self.queue.next_used().wrapping_sub(self.considered_at)
    }

    /// Notifies the driver of used chains, if it wants that.
    pub(crate) fn notify(&mut self, memory: &GuestMemory) -> Result<(), Broken> {
        if !std::mem::take(&mut self.was_used) {
            return Ok(());
        }
        let index = self.index;
        let ring = |source| Broken::Ring { index, source };
        let has_events = self.queue.event_idx_enabled();
        // The event index is behind the ring, the flag in its first two bytes.
        let offset = if has_events { 4 + 2 * u64::from(self.queue.size()) } else { 0 };
        let gpa = self.queue.avail_ring().checked_add(offset);
        let gpa = GuestAddress(gpa.ok_or(ring(virtio_queue::Error::AddressOverflow))?);
        // A driver that looks at the ring after it has written this has to see what was used.
        fence(Ordering::SeqCst);
        let wish = with_rings!(self, memory, |rings| rings.load(gpa, Ordering::Acquire));
        let wish: u16 = wish.map_err(|error| ring(virtio_queue::Error::GuestMemory(error)))?;
        let wish = u16::from_le(wish);
        let now = self.queue.next_used();
        let before = std::mem::replace(&mut self.considered_at, now);
        let is_wanted = if has_events {
            // Whether the index lies among those used since (virtio 1.3, 2.7.10).
            now.wrapping_sub(wish).wrapping_sub(1) < now.wrapping_sub(before)
        } else {
            u32::from(wish) & VRING_AVAIL_F_NO_INTERRUPT == 0
        };
        if is_wanted {
            self.interrupt.queue_used(index);
        }
        Ok(())
    }

    /// Suppresses driver notifications while chains are being taken anyway.
    pub(crate) fn suppress_kicks(&mut self, memory: &GuestMemory) -> Result<(), Broken> {
        let index = self.index;
        with_rings!(self, memory, |rings| self.queue.disable_notification(rings))
            .map_err(|source| Broken::Ring { index, source })
    }

    /// Enables driver notifications again; `true` if a chain has arrived in the meantime without one.
    pub(crate) fn allow_kicks(&mut self, memory: &GuestMemory) -> Result<bool, Broken> {
        let index = self.index;
        with_rings!(self, memory, |rings| self.queue.enable_notification(rings))
            .map_err(|source| Broken::Ring { index, source })
    }

    /// Like [`Self::allow_kicks`], for a queue with `seen` available chains that are too few: requests a
    /// notification for further ones. `true` if there are more already.
    pub(crate) fn allow_kicks_beyond(
        &mut self,
        memory: &GuestMemory,
        seen: u16,
    ) -> Result<bool, Broken> {
        // The event index is relative to the current position of the queue.
        let position = self.queue.next_avail();
        self.queue.set_next_avail(position.wrapping_add(seen));
        let more = self.allow_kicks(memory);
        self.queue.set_next_avail(position);
        more
    }
}

/// Parses the descriptors of a chain.
///
/// The iterator ends alike at the end of a chain and at an invalid descriptor. A chain is complete if its
/// last descriptor has no next flag.
fn parse<M: vm_memory::GuestMemory>(
    chain: DescriptorChain<&M>,
) -> Result<Chain, (u16, &'static str)> {
    let head = chain.head_index();
    let mut parsed = Chain { head, ..Chain::default() };
    let mut ended = false;
    let mut writable_seen = false;
    for (count, descriptor) in chain.enumerate() {
        if count >= RANGES_MAX {
            return Err((head, "has more than 1024 descriptors"));
        }
        ended = !descriptor.has_next();
        let segment = Segment { gpa: descriptor.addr(), len_bytes: descriptor.len() };
        if descriptor.is_write_only() {
            writable_seen = true;
            parsed.writable.push(segment);
        } else if writable_seen {
            return Err((head, "has a readable buffer behind a writable one"));
        } else {
            parsed.readable.push(segment);
        }
    }
    if ended { Ok(parsed) } else { Err((head, "is cut off, loops or points outside of its table")) }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
