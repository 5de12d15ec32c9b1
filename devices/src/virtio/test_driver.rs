// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A driver for tests: rings in a small guest memory, and an interrupt that can be waited for.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering, fence};
use std::time::Duration;

use memory::{GuestMemory, GuestMemoryHandle};
use parking_lot::{Condvar, Mutex};
use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
    VRING_USED_F_NO_NOTIFY,
};
use virtio_queue::{Queue, QueueState, QueueT};
use vm_memory::bitmap::Bitmap;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::device::{Activation, ActiveQueue, Kicks, VirtioDevice, VirtioInterrupt};
use super::iommu::Endpoint;

/// Border between two regions.
pub(crate) const BORDER: u64 = 2 << 20;
/// Start of buffers, above all rings.
pub(crate) const DATA: u64 = 1 << 20;
const QUEUE_STRIDE: u64 = 0x8000;
/// Time limit of a wait.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Seen {
    queues: HashMap<u16, u64>,
    config: u64,
    broken: bool,
}

/// Records the interrupts of a device.
#[derive(Default)]
pub(crate) struct TestInterrupt {
    seen: Mutex<Seen>,
    changed: Condvar,
}

impl TestInterrupt {
    fn wait(&self, what: &str, mut done: impl FnMut(&Seen) -> bool) {
        let mut seen = self.seen.lock();
        let timeout = self.changed.wait_while_for(&mut seen, |seen| !done(seen), PATIENCE);
        assert!(!timeout.timed_out(), "no {what} came");
    }

    pub(crate) fn wait_broken(&self) {
        self.wait("request for a reset", |seen| seen.broken);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.seen.lock().broken
    }

    /// Waits for an interrupt of a queue.
    pub(crate) fn wait_queue(&self, index: u16) {
        self.wait("interrupt", |seen| seen.queues.get(&index).is_some_and(|count| *count > 0));
    }

    /// Waits for more changes of the configuration than `before`.
    pub(crate) fn wait_config_change(&self, before: u64) {
        self.wait("change of the configuration", |seen| seen.config > before);
    }

    pub(crate) fn config_changes(&self) -> u64 {
        self.seen.lock().config
    }

    pub(crate) fn queue_interrupts(&self, index: u16) -> u64 {
        self.seen.lock().queues.get(&index).copied().unwrap_or(0)
    }

    fn note(&self, note: impl FnOnce(&mut Seen)) {
        note(&mut self.seen.lock());
        self.changed.notify_all();
    }
}

impl VirtioInterrupt for TestInterrupt {
    fn queue_used(&self, queue_index: u16) {
        self.note(|seen| *seen.queues.entry(queue_index).or_default() += 1);
    }
    fn config_changed(&self) {
        self.note(|seen| seen.config += 1);
    }
    fn needs_reset(&self) {
        self.note(|seen| seen.broken = true);
    }
}

/// An interrupt that looks at what it is given when the configuration changes.
pub(crate) struct ProbingInterrupt<F> {
    look: F,
    pub(crate) was_right: AtomicBool,
}

impl<F: Fn() -> bool + Send + Sync> ProbingInterrupt<F> {
    pub(crate) fn new(look: F) -> Arc<Self> {
        Arc::new(Self { look, was_right: AtomicBool::new(false) })
    }
}

impl<F: Fn() -> bool + Send + Sync> VirtioInterrupt for ProbingInterrupt<F> {
    fn queue_used(&self, _queue_index: u16) {}
    fn config_changed(&self) {
        self.was_right.store((self.look)(), Ordering::Release);
    }
    fn needs_reset(&self) {}
}

/// A buffer: address, length, whether the device may write.
pub(crate) type Buffer = (u64, u32, bool);

pub(crate) fn readable(gpa: u64, len_bytes: u32) -> Buffer {
    (gpa, len_bytes, false)
}

pub(crate) fn writable(gpa: u64, len_bytes: u32) -> Buffer {
    (gpa, len_bytes, true)
}

/// Replaces the eventfd that a queue's driver signals.
struct TestKicks(Arc<Mutex<EventFd>>);

impl Kicks for TestKicks {
    fn renew(&self, _queue_index: u16) -> std::io::Result<EventFd> {
        let new = EventFd::new(EFD_NONBLOCK)?;
        new.write(1)?;
        let copy = new.try_clone()?;
        *self.0.lock() = new;
        Ok(copy)
    }
}

/// The driver's side of a queue.
pub(crate) struct DriverQueue {
    pub(crate) index: u16,
    memory: GuestMemoryHandle,
    size: u16,
    next_descriptor: u16,
    available: u16,
    used: u16,
    kick: Arc<Mutex<EventFd>>,
    /// Whether the device tells which index it wants to be notified of.
    has_event_idx: AtomicBool,
    /// The available index at the last notification.
    kicked: AtomicU16,
    /// For a device behind the IOMMU. The driver's own addresses in the rings are those of guest memory.
    pub(crate) endpoint: Option<Arc<Endpoint>>,
}

impl DriverQueue {
    fn new(memory: &GuestMemoryHandle, index: u16, size: u16) -> Self {
        let queue = Self {
            index,
            memory: memory.clone(),
            size,
            next_descriptor: 0,
            available: 0,
            used: 0,
            kick: Arc::new(Mutex::new(EventFd::new(EFD_NONBLOCK).unwrap())),
            has_event_idx: AtomicBool::new(false),
            kicked: AtomicU16::new(0),
            endpoint: None,
        };
        let zeros = vec![0; usize::try_from(QUEUE_STRIDE).unwrap()];
        memory.memory().write_slice(&zeros, GuestAddress(queue.base())).unwrap();
        queue
    }

    fn base(&self) -> u64 {
        QUEUE_STRIDE * u64::from(self.index)
    }

    pub(crate) fn available_ring(&self) -> u64 {
        self.base() + 16 * u64::from(self.size)
    }

    pub(crate) fn used_ring(&self) -> u64 {
        (self.available_ring() + 6 + 2 * u64::from(self.size)).next_multiple_of(4)
    }

    /// The queue as set up by the driver.
    fn active(&self) -> ActiveQueue {
        let mut queue = Queue::new(self.size).unwrap();
        queue.try_set_desc_table_address(GuestAddress(self.base())).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(self.available_ring())).unwrap();
        queue.try_set_used_ring_address(GuestAddress(self.used_ring())).unwrap();
        queue.set_ready(true);
        self.with(queue)
    }

    fn with(&self, queue: Queue) -> ActiveQueue {
        let kick = self.kick.lock().try_clone().unwrap();
        let kicks = Arc::new(TestKicks(Arc::clone(&self.kick)));
        let dma = self.endpoint.as_ref().map(Endpoint::queue);
        ActiveQueue { index: self.index, queue, kick, kicks, dma }
    }

    fn write<T: vm_memory::ByteValued>(&self, value: T, gpa: u64) {
        self.memory.memory().write_obj(value, GuestAddress(gpa)).unwrap();
    }

    pub(crate) fn put_descriptor(&self, slot: u16, buffer: Buffer, flags: u32, next: u16) {
        let gpa = self.base() + 16 * u64::from(slot);
        self.put_descriptor_at(gpa, buffer, flags, next);
    }

    fn put_descriptor_at(&self, gpa: u64, (to, len_bytes, write): Buffer, flags: u32, next: u16) {
        let flags = flags | if write { VRING_DESC_F_WRITE } else { 0 };
        self.write(to, gpa);
        self.write(len_bytes, gpa + 8);
        self.write(u16::try_from(flags).unwrap(), gpa + 12);
        self.write(next, gpa + 14);
    }

    /// Makes a chain available; returns its head.
    pub(crate) fn add(&mut self, buffers: &[Buffer]) -> u16 {
        let head = self.next_descriptor;
        for (index, buffer) in buffers.iter().enumerate() {
            let slot = self.next_descriptor;
            self.next_descriptor = (slot + 1) % self.size;
            let is_last = index + 1 == buffers.len();
            let flags = if is_last { 0 } else { VRING_DESC_F_NEXT };
            self.put_descriptor(slot, *buffer, flags, self.next_descriptor);
        }
        self.publish(head);
        head
    }

    /// Makes a chain available whose descriptors are in a table at `table`.
    pub(crate) fn add_indirect(&mut self, table: u64, buffers: &[Buffer]) -> u16 {
        for (index, buffer) in buffers.iter().enumerate() {
            let is_last = index + 1 == buffers.len();
            let flags = if is_last { 0 } else { VRING_DESC_F_NEXT };
            let next = u16::try_from(index + 1).unwrap();
            self.put_descriptor_at(table + 16 * u64::from(next - 1), *buffer, flags, next);
        }
        let head = self.next_descriptor;
        self.next_descriptor = (head + 1) % self.size;
        let len_bytes = u32::try_from(16 * buffers.len()).unwrap();
        self.put_descriptor(head, readable(table, len_bytes), VRING_DESC_F_INDIRECT, 0);
        self.publish(head);
        head
    }

    /// The head of the next chain.
    pub(crate) fn next_head(&self) -> u16 {
        self.next_descriptor
    }

    /// Whether there is a used chain that was not taken.
    pub(crate) fn has_used(&self) -> bool {
        self.used != self.used_index()
    }

    /// Adds a head to the available ring.
    pub(crate) fn publish(&mut self, head: u16) {
        let slot = u64::from(self.available % self.size);
        self.write(head, self.available_ring() + 4 + 2 * slot);
        self.available = self.available.wrapping_add(1);
        let index = GuestAddress(self.available_ring() + 2);
        self.memory.memory().store(self.available, index, Ordering::Release).unwrap();
    }

    /// Sets the index of the available ring to any value.
    pub(crate) fn set_available(&mut self, index: u16) {
        self.available = index;
        self.write(index, self.available_ring() + 2);
    }

    /// The eventfd that a device gets when it is activated. If it shares others with another process, this one is for
    /// notifications that are trapped.
    pub(crate) fn own_eventfd(&self) -> EventFd {
        self.kick.lock().try_clone().unwrap()
    }

    /// Notifies the device, as Linux does: unless it wants no notification of what was added since the last
    /// (virtio 1.3, 2.7.10).
    pub(crate) fn kick(&self) {
        let available = self.available;
        let kicked = self.kicked.swap(available, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let read = |gpa: u64| self.memory.memory().read_obj::<u16>(GuestAddress(gpa)).unwrap();
        let is_wanted = if self.has_event_idx.load(Ordering::Relaxed) {
            let event = read(self.used_ring() + 4 + 8 * u64::from(self.size));
            available.wrapping_sub(event).wrapping_sub(1) < available.wrapping_sub(kicked)
        } else {
            u32::from(read(self.used_ring())) & VRING_USED_F_NO_NOTIFY == 0
        };
        if is_wanted {
            self.kick_anyway();
        }
    }

    /// Notifies the device, whatever it wants.
    pub(crate) fn kick_anyway(&self) {
        self.kick.lock().write(1).unwrap();
    }

    /// Wants an interrupt when the used index passes `index` (virtio 1.3, 2.7.7).
    pub(crate) fn want_interrupt_at(&self, index: u16) {
        self.write(index, self.available_ring() + 4 + 2 * u64::from(self.size));
    }

    pub(crate) fn used_index(&self) -> u16 {
        let index = GuestAddress(self.used_ring() + 2);
        self.memory.memory().load(index, Ordering::Acquire).unwrap()
    }

    /// Takes the next used chain: its head, and the length written.
    pub(crate) fn take_used(&mut self) -> Option<(u16, u32)> {
        if self.used == self.used_index() {
            return None;
        }
        let gpa = self.used_ring() + 4 + 8 * u64::from(self.used % self.size);
        self.used = self.used.wrapping_add(1);
        self.want_interrupt_at(self.used);
        let memory = self.memory.memory();
        let head: u32 = memory.read_obj(GuestAddress(gpa)).unwrap();
        let written = memory.read_obj(GuestAddress(gpa + 4)).unwrap();
        Some((u16::try_from(head).unwrap(), written))
    }
}

/// A driver of one device, with its own guest memory.
pub(crate) struct Driver {
    pub(crate) memory: GuestMemoryHandle,
    pub(crate) interrupt: Arc<TestInterrupt>,
    pub(crate) queues: Vec<DriverQueue>,
}

impl Driver {
    /// A driver that uses the first `count` queues.
    pub(crate) fn new(count: u16, size: u16) -> Self {
        let half = usize::try_from(BORDER).unwrap();
        let ranges = [(GuestAddress(0), half), (GuestAddress(BORDER), half)];
        let memory = GuestMemory::from_ranges(&ranges).unwrap();
        Self::over(GuestMemoryHandle::new(memory), count, size)
    }

    /// The same, in memory that has at least these regions.
    pub(crate) fn over(memory: GuestMemoryHandle, count: u16, size: u16) -> Self {
        let queues = (0..count).map(|index| DriverQueue::new(&memory, index, size)).collect();
        Self { memory, interrupt: Arc::default(), queues }
    }

    fn activation(&self, queues: Vec<ActiveQueue>, features: u64) -> Activation {
        let interrupt: Arc<dyn VirtioInterrupt> = self.interrupt.clone();
        for queue in &self.queues {
            let has_event_idx = features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
            queue.has_event_idx.store(has_event_idx, Ordering::Relaxed);
        }
        Activation { memory: self.memory.clone(), interrupt, queues, features }
    }

    /// The activation of a ready driver.
    pub(crate) fn fresh(&self, features: u64) -> Activation {
        self.activation(self.queues.iter().map(DriverQueue::active).collect(), features)
    }

    /// Acknowledges `features` and activates the device.
    pub(crate) fn activate(&self, device: &mut dyn VirtioDevice, features: u64) {
        device.acknowledge_features(features);
        device.activate(self.fresh(features)).unwrap();
    }

    /// Acknowledges all offered features and activates the device.
    pub(crate) fn activate_all(&self, device: &mut dyn VirtioDevice) {
        let features = device.features();
        self.activate(device, features);
    }

    /// Activates the device with saved queues.
    pub(crate) fn activate_restored(
        &self,
        device: &mut dyn VirtioDevice,
        features: u64,
        states: &[(u16, QueueState)],
    ) {
        let restored = states.iter().map(|(index, state)| {
            let queue = Queue::try_from(*state).unwrap();
            self.queues[usize::from(*index)].with(queue)
        });
        device.acknowledge_features(features);
        device.activate(self.activation(restored.collect(), features)).unwrap();
    }

    /// Waits for the next used chain of a queue.
    pub(crate) fn wait_used(&mut self, queue: usize) -> (u16, u32) {
        let mut used = None;
        let (interrupt, queue) = (Arc::clone(&self.interrupt), &mut self.queues[queue]);
        interrupt.wait("used chain", |_| {
            used = used.take().or_else(|| queue.take_used());
            used.is_some()
        });
        used.unwrap()
    }

    pub(crate) fn write(&self, gpa: u64, bytes: &[u8]) {
        self.memory.memory().write_slice(bytes, GuestAddress(gpa)).unwrap();
    }

    pub(crate) fn read(&self, gpa: u64, len_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes];
        self.memory.memory().read_slice(&mut bytes, GuestAddress(gpa)).unwrap();
        bytes
    }

    /// Starts to log device writes.
    pub(crate) fn track_writes(&self) {
        for region in self.memory.memory().iter() {
            let mapping: &vm_memory::MmapRegion<_> = region;
            mapping.bitmap().set_tracking(true);
        }
    }

    /// Whether the page at `gpa` was written since [`Self::track_writes`].
    pub(crate) fn was_written(&self, gpa: u64) -> bool {
        let memory = self.memory.memory();
        let (region, offset) = memory.to_region_addr(GuestAddress(gpa)).unwrap();
        region.bitmap().dirty_at(usize::try_from(offset.0).unwrap())
    }
}
