// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Chains of a queue whose rings lie in one region of guest memory each, as nearly all do.
//!
//! Owns the short way to them: where the rings are is looked up once for all chains that are taken in a row, and not anew
//! for each field. Whatever is unusual or wrong is left to the general way, which says what is wrong with it.

use std::sync::atomic::Ordering;

use memory::GuestMemory;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, VolatileMemory as _};

use super::buffers::{Chain, GuestSlice, RANGES_MAX, Segment};

/// Where the index of the available ring is, and its first entry.
const INDEX_OFFSET: usize = 2;
const RING_OFFSET: usize = 4;
const DESCRIPTOR_BYTES: usize = size_of::<Descriptor>();

/// What a look at the available ring has given.
pub(super) enum Look {
    Chain(Chain),
    /// There is no chain.
    Nothing,
}

/// The first descriptor of a chain.
enum First {
    At {
        head: u16,
        descriptor: Descriptor,
    },
    /// There is no chain.
    Nothing,
}

/// The available ring and the descriptors of a queue; see the module.
pub(crate) struct Available<'a> {
    memory: &'a GuestMemory,
    places: Option<(GuestSlice<'a>, GuestSlice<'a>)>,
    size: u16,
    /// The driver's index when it was last looked at.
    index: u16,
}

impl<'a> Available<'a> {
    /// Looks up a queue whose addresses are those of guest memory.
    pub(super) fn of(queue: &Queue, memory: &'a GuestMemory) -> Self {
        let size = queue.size();
        let slice = |gpa, len_bytes| memory.get_slice(GuestAddress(gpa), len_bytes).ok();
        let places = || {
            let ring_bytes = RING_OFFSET + 2 * usize::from(size);
            let ring = slice(queue.avail_ring(), ring_bytes)?;
            Some((ring, slice(queue.desc_table(), DESCRIPTOR_BYTES * usize::from(size))?))
        };
        let places = if queue.ready() { places() } else { None };
        Self { memory, places, size, index: queue.next_avail() }
    }

    /// A queue whose chains are all taken the general way.
    pub(super) fn general(memory: &'a GuestMemory) -> Self {
        Self { memory, places: None, size: 0, index: 0 }
    }

    pub(crate) fn memory(&self) -> &'a GuestMemory {
        self.memory
    }

    /// The chain at a position of the available ring; `None` for one that the general way has to take.
    pub(super) fn look_at(&mut self, position: u16) -> Option<Look> {
        let First::At { head, descriptor } = self.first_at(position)? else {
            return Some(Look::Nothing);
        };
        if !descriptor.refers_to_indirect_table() {
            let (_, table) = self.places.as_ref()?;
            return chain(head, table, descriptor, self.size).map(Look::Chain);
        }
        let table_bytes = usize::try_from(descriptor.len()).ok()?;
        if descriptor.has_next() || !table_bytes.is_multiple_of(DESCRIPTOR_BYTES) {
            return None;
        }
        let count = u16::try_from(table_bytes / DESCRIPTOR_BYTES).ok()?;
        let table = self.memory.get_slice(descriptor.addr(), table_bytes).ok()?;
        chain(head, &table, descriptor_at(&table, 0)?, count).map(Look::Chain)
    }

    /// The head and the range of the chain at a position, if it is a single range that the device may write.
    pub(super) fn writable_at(&mut self, position: u16) -> Option<(u16, Segment)> {
        let First::At { head, descriptor } = self.first_at(position)? else { return None };
        if !descriptor.is_write_only()
            || descriptor.has_next()
            || descriptor.refers_to_indirect_table()
        {
            return None;
        }
        Some((head, Segment { gpa: descriptor.addr(), len_bytes: descriptor.len() }))
    }

    fn first_at(&mut self, position: u16) -> Option<First> {
        let (ring, table) = self.places.as_ref()?;
        if self.index == position {
            self.index = u16::from_le(ring.load(INDEX_OFFSET, Ordering::Acquire).ok()?);
            if self.index == position {
                return Some(First::Nothing);
            }
        }
        if self.index.wrapping_sub(position) > self.size {
            return None;
        }
        let slot = RING_OFFSET + 2 * usize::from(position.checked_rem(self.size)?);
        let head = u16::from_le(ring.load(slot, Ordering::Relaxed).ok()?);
        Some(First::At { head, descriptor: descriptor_at(table, head)? })
    }
}

fn descriptor_at(table: &GuestSlice<'_>, index: u16) -> Option<Descriptor> {
    let at = usize::from(index) * DESCRIPTOR_BYTES;
    Some(table.get_ref::<Descriptor>(at).ok()?.load())
}

/// The chain that begins with `descriptor` in a table of `count`.
fn chain(
    head: u16,
    table: &GuestSlice<'_>,
    mut descriptor: Descriptor,
    count: u16,
) -> Option<Chain> {
    let mut chain = Chain { head, ..Chain::default() };
    let mut is_writable = false;
    let mut all_bytes = 0_u32;
    // One that is longer than its table, or than what is taken, is a loop or too long.
    for _ in 0..usize::from(count).min(RANGES_MAX) {
        if descriptor.refers_to_indirect_table() {
            return None;
        }
        all_bytes = all_bytes.checked_add(descriptor.len())?;
        let segment = Segment { gpa: descriptor.addr(), len_bytes: descriptor.len() };
        if descriptor.is_write_only() {
            is_writable = true;
            chain.writable.push(segment);
        } else if is_writable {
            return None;
        } else {
            chain.readable.push(segment);
        }
        if !descriptor.has_next() {
            return Some(chain);
        }
        descriptor = descriptor_at(table, descriptor.next())?;
    }
    None
}
