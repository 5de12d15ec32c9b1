// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtqueue interface for device workers.
//!
//! Owns taking chains off the available ring, putting them on the used ring and notifying the
//! driver. Everything in the rings was written by the driver: a rule that it broke is [`Broken`],
//! after which the queue must not be used again before a reset.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use memory::{GuestMemory, GuestMemoryHandle};
use thiserror::Error;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VRING_AVAIL_F_NO_INTERRUPT};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryLoadGuard};
use vmm_sys_util::eventfd::EventFd;

use super::buffers::{RANGES_MAX, Segment, Segments};
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

/// A descriptor chain: readable buffers, then writable ones.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    /// Head descriptor, which identifies the chain to the driver.
    pub(crate) head: u16,
    /// Buffers that the driver has written for the device.
    pub(crate) readable: Segments,
    /// Buffers that the device may write.
    pub(crate) writable: Segments,
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
    /// Whether to send the next notification whatever the event index says.
    notify_anyway: bool,
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
        Self {
            index,
            queue,
            kick,
            memory: memory.clone(),
            dma,
            interrupt: Arc::clone(interrupt),
            was_used: false,
            notify_anyway: false,
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
            let available = self.queue.avail_idx(rings, Ordering::Acquire).map_err(ring)?;
            if available.0 == self.queue.next_avail() {
                return Ok(None);
            }
            let chain = self.queue.iter(rings).map_err(ring)?.next();
            parse(chain.ok_or(ring(virtio_queue::Error::InvalidAvailRingIndex))?)
        });
        let chain = chain.and_then(|chain| match &self.dma {
            None => Ok(chain),
            Some(dma) => dma.take(&chain).map_err(|why| (chain.head, why)),
        });
        chain.map(Some).map_err(|(head, why)| Broken::Chain { index, head, why })
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
        let index = self.index;
        let written = u32::try_from(written_bytes).unwrap_or(u32::MAX);
        self.was_used = true;
        self.end(head);
        with_rings!(self, memory, |rings| self.queue.add_used(rings, head, written))
            .map_err(|source| Broken::Ring { index, source })
    }

    /// A chain's buffers are not accessed any more.
    fn end(&self, head: u16) {
        if let Some(dma) = &self.dma {
            dma.end(head);
        }
    }

    /// Adds several chains to the used ring such that the driver sees all of them at once.
    pub(crate) fn add_used_together(
        &mut self,
        memory: &GuestMemory,
        used: &[(u16, u64)],
    ) -> Result<(), Broken> {
        const HEADER_BYTES: u64 = 4;
        const ELEMENT_BYTES: u64 = 8;
        let Some(((last_head, last_bytes), rest)) = used.split_last() else { return Ok(()) };
        let index = self.index;
        let size = self.queue.size().max(1);
        for (head, written_bytes) in rest {
            let slot = u64::from(self.queue.next_used() % size);
            let written = u32::try_from(*written_bytes).unwrap_or(u32::MAX);
            let mut element = [0; 8];
            element[..4].copy_from_slice(&u32::from(*head).to_le_bytes());
            element[4..].copy_from_slice(&written.to_le_bytes());
            let gpa = self.queue.used_ring().checked_add(HEADER_BYTES + slot * ELEMENT_BYTES);
            let gpa =
                gpa.ok_or(Broken::Ring { index, source: virtio_queue::Error::AddressOverflow })?;
            self.end(*head);
            with_rings!(self, memory, |rings| rings.write_slice(&element, GuestAddress(gpa)))
                .map_err(|error| Broken::Ring {
                    index,
                    source: virtio_queue::Error::GuestMemory(error),
                })?;
            self.queue.set_next_used(self.queue.next_used().wrapping_add(1));
            // The queue only counts what it adds itself, and decides on notifications by that.
            self.notify_anyway = true;
        }
        self.add_used(memory, *last_head, *last_bytes)
    }

    /// Notifies the driver of used chains, if it wants that.
    pub(crate) fn notify(&mut self, memory: &GuestMemory) -> Result<(), Broken> {
        // The queue itself finds one needed in any case without event indexes.
        if !std::mem::take(&mut self.was_used) {
            return Ok(());
        }
        let index = self.index;
        let ring = |source| Broken::Ring { index, source };
        let needed = with_rings!(self, memory, |rings| self.queue.needs_notification(rings));
        let needed = needed.map_err(ring)?;
        if !needed && !std::mem::take(&mut self.notify_anyway) {
            return Ok(());
        }
        self.notify_anyway = false;
        if !self.queue.event_idx_enabled() {
            let gpa = GuestAddress(self.queue.avail_ring());
            let flags = with_rings!(self, memory, |rings| rings.load(gpa, Ordering::Acquire));
            let flags: u16 =
                flags.map_err(|error| ring(virtio_queue::Error::GuestMemory(error)))?;
            let unwanted = u16::try_from(VRING_AVAIL_F_NO_INTERRUPT).unwrap_or(0);
            if u16::from_le(flags) & unwanted != 0 {
                return Ok(());
            }
        }
        self.interrupt.queue_used(index);
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
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;
    use crate::virtio::RING_FEATURES;
    use crate::virtio::test_driver::{DATA, Driver, readable, writable};

    fn queue(driver: &Driver, features: u64) -> WorkQueue {
        let activation = driver.fresh(features);
        let active = activation.queues.into_iter().next().unwrap();
        WorkQueue::new(active, &driver.memory, &activation.interrupt, features)
    }

    fn use_one(driver: &mut Driver, queue: &mut WorkQueue) {
        let memory = queue.memory();
        driver.queues[0].add(&[readable(DATA, 1)]);
        let chain = queue.pop(&memory).unwrap().unwrap();
        queue.add_used(&memory, chain.head, 0).unwrap();
    }

    #[test]
    fn the_driver_is_interrupted_at_the_index_that_it_names() {
        let mut driver = Driver::new(1, 16);
        let mut queue = queue(&driver, RING_FEATURES);
        driver.queues[0].want_interrupt_at(2);
        let memory = queue.memory();
        let mut interrupts = Vec::new();
        for _ in 0..5 {
            use_one(&mut driver, &mut queue);
            queue.notify(&memory).unwrap();
            interrupts.push(driver.interrupt.queue_interrupts(0));
        }
        assert_eq!(interrupts, [0, 0, 1, 1, 1]);
    }

    #[test]
    fn without_event_indexes_the_flag_of_the_driver_counts() {
        let mut driver = Driver::new(1, 16);
        let mut queue = queue(&driver, 0);
        let memory = queue.memory();
        use_one(&mut driver, &mut queue);
        queue.notify(&memory).unwrap();
        assert_eq!(driver.interrupt.queue_interrupts(0), 1);
        driver.write(driver.queues[0].available_ring(), &[1, 0]);
        use_one(&mut driver, &mut queue);
        queue.notify(&memory).unwrap();
        assert_eq!(driver.interrupt.queue_interrupts(0), 1);
    }

    #[test]
    fn a_driver_is_not_interrupted_for_nothing() {
        let mut driver = Driver::new(1, 16);
        let mut queue = queue(&driver, 0);
        for used in 0..3 {
            for _ in 0..2 {
                queue.serve(16, |_, _| Ok(0)).unwrap();
                let memory = queue.memory();
                queue.notify(&memory).unwrap();
                assert_eq!(driver.interrupt.queue_interrupts(0), used);
            }
            driver.queues[0].add(&[readable(DATA, 1)]);
        }
    }

    #[test]
    fn chains_that_break_the_rules_are_found_out() {
        let next = virtio_bindings::virtio_ring::VRING_DESC_F_NEXT;
        let indirect = virtio_bindings::virtio_ring::VRING_DESC_F_INDIRECT;
        type Build = fn(&mut Driver, u32, u32);
        let cases: [(&str, Build); 6] = [
            ("loop", |driver, next, _| {
                driver.queues[0].put_descriptor(0, readable(DATA, 1), next, 0);
                driver.queues[0].publish(0);
            }),
            ("next outside of the table", |driver, next, _| {
                driver.queues[0].put_descriptor(0, readable(DATA, 1), next, 16);
                driver.queues[0].publish(0);
            }),
            ("head outside of the table", |driver, _, _| driver.queues[0].publish(16)),
            ("readable behind writable", |driver, _, _| {
                driver.queues[0].add(&[writable(DATA, 1), readable(DATA, 1)]);
            }),
            ("indirect table of odd length", |driver, _, indirect| {
                driver.queues[0].put_descriptor(0, readable(DATA, 17), indirect, 0);
                driver.queues[0].publish(0);
            }),
            ("indirect table outside of RAM", |driver, _, indirect| {
                driver.queues[0].put_descriptor(0, readable(1 << 40, 16), indirect, 0);
                driver.queues[0].publish(0);
            }),
        ];
        for (name, build) in cases {
            let mut driver = Driver::new(1, 16);
            let mut queue = queue(&driver, RING_FEATURES);
            build(&mut driver, next, indirect);
            let memory = queue.memory();
            assert!(queue.pop(&memory).is_err(), "{name}");
        }
    }

    #[test]
    fn requests_that_take_long_leave_the_queue_for_other_events_sooner() {
        let mut driver = Driver::new(1, 16);
        let mut queue = queue(&driver, RING_FEATURES);
        for _ in 0..5 {
            driver.queues[0].add(&[readable(DATA, 1)]);
        }
        let (mut turns, mut served) = (Vec::new(), 0);
        while served < 5 {
            let before = served;
            queue
                .serve_by_cost(10, |_, _| {
                    served += 1;
                    Ok((0, 6))
                })
                .unwrap();
            turns.push(served - before);
            assert_eq!(queue.kick().read().is_ok(), served < 5 || served - before == 2);
        }
        assert_eq!(turns, [2, 2, 1]);
    }

    #[test]
    fn a_chain_as_long_as_its_queue_is_fine() {
        let mut driver = Driver::new(1, 16);
        let mut queue = queue(&driver, RING_FEATURES);
        driver.queues[0].add(&[readable(DATA, 1); 16]);
        let memory = queue.memory();
        let chain = queue.pop(&memory).unwrap().unwrap();
        assert_eq!(chain.readable.len_bytes(), 16);
        assert!(queue.pop(&memory).unwrap().is_none());
    }

    #[test]
    fn a_race_with_the_driver_is_seen_when_kicks_are_allowed_again() {
        let mut driver = Driver::new(1, 16);
        let mut queue = queue(&driver, RING_FEATURES);
        let memory = queue.memory();
        queue.suppress_kicks(&memory).unwrap();
        assert!(!queue.allow_kicks(&memory).unwrap());
        driver.queues[0].add(&[readable(DATA, 1)]);
        assert!(queue.allow_kicks(&memory).unwrap());
        assert!(!queue.allow_kicks_beyond(&memory, 1).unwrap());
        driver.queues[0].add(&[readable(DATA, 1)]);
        assert!(queue.allow_kicks_beyond(&memory, 1).unwrap());
        assert_eq!(queue.pop(&memory).unwrap().unwrap().head, 0, "the position is as it was");
    }
}
