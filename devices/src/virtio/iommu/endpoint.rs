// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How a device behind the IOMMU sees guest memory.
//!
//! Owns the translation of the addresses in its rings and descriptors, and the record of what is in flight. Once a
//! chain is translated, a device has addresses of guest memory and knows nothing of an IOMMU, so that its writes are
//! logged by those addresses; only [`super::super::queue`] is aware of it.
//!
//! A mapping that is removed must not be used afterwards. Each queue has a lock of its own, which its thread holds
//! while it accesses a ring, and while it translates a chain and records it as in flight; no other thread takes it but the
//! IOMMU's thread, after it has removed a mapping. What a queue translated before that is then in the record, and what
//! it translates later no longer finds the mapping. The request to remove it is answered when nothing in the record
//! is within its range. A queue keeps the translations that it used last, until a number that the
//! IOMMU counts up has changed: so threads of several queues share nothing that is written while mappings stay.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use memory::GuestMemory;
use parking_lot::{Mutex, MutexGuard, RwLock};
use vm_memory::bitmap::BS;
use vm_memory::guest_memory::{GuestMemorySliceIterator, Result as MemoryResult};
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion, Permissions,
    VolatileSlice,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::table::{Mapping, READ, Table, WRITE};
use crate::virtio::buffers::{RANGES_MAX, Segment, Segments};
use crate::virtio::queue::Chain;

/// Translations that a queue keeps.
const KEPT_MAX: usize = 16;
/// Mappings that one chain may use.
const CHAIN_MAPPINGS_MAX: u32 = 1 << 16;
/// Faults that are kept until the driver has room for them; further ones are not reported.
const FAULTS_MAX: usize = 64;

/// An access that the IOMMU has refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) endpoint: u32,
    pub(super) address: u64,
    /// `READ` or `WRITE`.
    pub(super) access: u32,
    /// Whether the endpoint is in a domain, which has no such mapping.
    pub(super) in_domain: bool,
}

/// What endpoints tell the IOMMU's thread.
#[derive(Debug)]
pub(super) struct Notices {
    faults: Mutex<VecDeque<Fault>>,
    /// Readable when there are faults, or when something has ended that a removal waits for.
    pub(super) event: EventFd,
}

impl Notices {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { faults: Mutex::default(), event: EventFd::new(EFD_NONBLOCK)? })
    }

    fn wake(&self) {
        // Fails only if the counter is saturated, and then it is readable as well.
        let _ = self.event.write(1);
    }

    fn report(&self, fault: Fault) {
        let mut faults = self.faults.lock();
        if faults.len() < FAULTS_MAX {
            faults.push_back(fault);
            self.wake();
        }
    }

    pub(super) fn first_fault(&self) -> Option<Fault> {
        self.faults.lock().front().copied()
    }

    pub(super) fn drop_first_fault(&self) {
        self.faults.lock().pop_front();
    }

    pub(super) fn forget_faults(&self) {
        self.faults.lock().clear();
    }
}

/// What an endpoint reaches.
#[derive(Clone, Debug)]
pub(super) enum Space {
    /// All of guest memory, by its own addresses.
    Bypass,
    /// Nothing.
    Nothing,
    /// What the table maps.
    Domain(Arc<RwLock<Table>>),
}

/// A device behind the IOMMU.
#[derive(Debug)]
pub struct Endpoint {
    number: AtomicU32,
    space: RwLock<Space>,
    /// Counted up whenever something is reached no longer.
    generation: AtomicU64,
    queues: Mutex<Vec<Weak<Mutex<QueueSpace>>>>,
    notices: Arc<Notices>,
}

impl Endpoint {
    pub(super) fn new(space: Space, notices: Arc<Notices>) -> Self {
        Self {
            number: AtomicU32::new(0),
            space: RwLock::new(space),
            generation: AtomicU64::new(0),
            queues: Mutex::default(),
            notices,
        }
    }

    pub(super) fn set_number(&self, number: u32) {
        self.number.store(number, Ordering::Relaxed);
    }

    /// Changes what it reaches. What is in flight is not waited for.
    pub(super) fn set_space(&self, space: Space) {
        *self.space.write() = space;
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Has its queues look up again what they have kept, after mappings were removed.
    pub(super) fn forget_kept(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Whether a chain in flight has addresses in this range. If so, the IOMMU's thread is woken when one has ended.
    pub(super) fn is_in_flight(&self, first: u64, last: u64) -> bool {
        let queues: Vec<_> = self.queues.lock().iter().filter_map(Weak::upgrade).collect();
        queues.iter().any(|queue| {
            let mut queue = queue.lock();
            let is_within = |(from, to): &(u64, u64)| *from <= last && *to >= first;
            let found = queue.in_flight.iter().any(|chain| chain.ranges.iter().any(is_within));
            queue.is_awaited |= found;
            found
        })
    }

    /// The view of one queue.
    pub fn queue(self: &Arc<Self>) -> QueueDma {
        let space = Arc::new(Mutex::new(QueueSpace::default()));
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&space));
        QueueDma { endpoint: Arc::clone(self), space }
    }

    fn find(&self, iova: u64) -> Result<(u64, Mapping), bool> {
        match &*self.space.read() {
            Space::Bypass => Ok((0, Mapping { last: u64::MAX, gpa: 0, access: READ | WRITE })),
            Space::Nothing => Err(false),
            Space::Domain(table) => table.read().find(iova).ok_or(true),
        }
    }

    fn refuse(&self, address: u64, access: u32, in_domain: bool) -> Refused {
        let endpoint = self.number.load(Ordering::Relaxed);
        self.notices.report(Fault { endpoint, address, access, in_domain });
        Refused::NotMapped
    }
}

/// Why a range is not translated.
#[derive(Debug)]
enum Refused {
    /// It is not mapped, which has been reported.
    NotMapped,
    /// It consists of more pieces than were wanted.
    TooMany,
}

#[derive(Debug)]
struct InFlight {
    head: u16,
    /// First and last addresses.
    ranges: Vec<(u64, u64)>,
}

/// What belongs to one queue.
#[derive(Debug, Default)]
struct QueueSpace {
    generation: u64,
    kept: VecDeque<(u64, Mapping)>,
    /// Taken and not yet used chains, in that order.
    in_flight: Vec<InFlight>,
    /// Whether the IOMMU's thread waits for one to end.
    is_awaited: bool,
}

impl QueueSpace {
    fn find(&mut self, endpoint: &Endpoint, iova: u64) -> Result<(u64, Mapping), bool> {
        let has = |(first, mapping): &&(u64, Mapping)| *first <= iova && iova <= mapping.last;
        if let Some(found) = self.kept.iter().find(has) {
            return Ok(*found);
        }
        let found = endpoint.find(iova)?;
        if self.kept.len() >= KEPT_MAX {
            self.kept.pop_front();
        }
        self.kept.push_back(found);
        Ok(found)
    }

    /// Calls `each` with the pieces of guest memory that a range consists of, while that wants more.
    fn translate(
        &mut self,
        endpoint: &Endpoint,
        iova: u64,
        len_bytes: u64,
        access: u32,
        mut each: impl FnMut(u64, u64) -> bool,
    ) -> Result<(), Refused> {
        let (mut at, mut left) = (iova, len_bytes);
        while left > 0 {
            let found = self.find(endpoint, at).map_err(|is| endpoint.refuse(at, access, is))?;
            let (first, mapping) = found;
            if mapping.access & access != access {
                return Err(endpoint.refuse(at, access, true));
            }
            // One less than its length, which may not be a number of 64 bits.
            let rest = mapping.last.saturating_sub(at);
            let len_bytes = left.min(rest.saturating_add(1));
            let gpa = mapping.gpa.checked_add(at.saturating_sub(first));
            if !each(gpa.ok_or_else(|| endpoint.refuse(at, access, true))?, len_bytes) {
                return Err(Refused::TooMany);
            }
            left = left.saturating_sub(len_bytes);
            match at.checked_add(len_bytes) {
                Some(next) => at = next,
                None if left == 0 => {}
                None => return Err(endpoint.refuse(u64::MAX, access, true)),
            }
        }
        Ok(())
    }
}

/// The view that one queue of a device behind the IOMMU has of guest memory.
#[derive(Debug)]
pub struct QueueDma {
    endpoint: Arc<Endpoint>,
    space: Arc<Mutex<QueueSpace>>,
}

impl QueueDma {
    fn lock(&self) -> MutexGuard<'_, QueueSpace> {
        let mut space = self.space.lock();
        let generation = self.endpoint.generation.load(Ordering::Acquire);
        if space.generation != generation {
            space.generation = generation;
            space.kept.clear();
        }
        space
    }

    /// Guest memory as the rings are seen in it.
    pub(crate) fn rings<'a>(&'a self, memory: &'a GuestMemory) -> RingMemory<'a> {
        RingMemory { memory, endpoint: &self.endpoint, space: RefCell::new(self.lock()) }
    }

    /// Translates a chain, which is in flight from now on.
    pub(crate) fn take(&self, chain: &Chain) -> Result<Chain, &'static str> {
        let mut space = self.lock();
        if space.in_flight.iter().any(|other| other.head == chain.head) {
            return Err("is available again before it was used");
        }
        let mut ranges = Vec::new();
        // The thread holds the lock meanwhile, and neither pauses nor stops.
        let mut mappings_left = CHAIN_MAPPINGS_MAX;
        let mut translate = |from: &Segments, access| {
            let mut to = Segments::default();
            let mut pieces: Vec<(u64, u64)> = Vec::new();
            for (iova, len_bytes) in from.iter() {
                let len_bytes = u64::from(len_bytes);
                let last = iova.saturating_add(len_bytes.saturating_sub(1));
                ranges.push((iova, last));
                space
                    .translate(&self.endpoint, iova, len_bytes, access, |gpa, len_bytes| {
                        push(&mut pieces, gpa, len_bytes);
                        mappings_left = mappings_left.saturating_sub(1);
                        mappings_left > 0 && pieces.len() <= RANGES_MAX
                    })
                    .map_err(|refused| match refused {
                        Refused::NotMapped => "points to what the IOMMU does not map",
                        Refused::TooMany => {
                            "has more than 1024 ranges or 65535 mappings behind the IOMMU"
                        }
                    })?;
            }
            for (gpa, len_bytes) in pieces {
                // Pieces are joined only up to this length.
                let len_bytes = u32::try_from(len_bytes).unwrap_or(u32::MAX);
                to.push(Segment { gpa: GuestAddress(gpa), len_bytes });
            }
            Ok::<_, &'static str>(to)
        };
        let readable = translate(&chain.readable, READ)?;
        let writable = translate(&chain.writable, WRITE)?;
        space.in_flight.push(InFlight { head: chain.head, ranges });
        Ok(Chain { head: chain.head, readable, writable })
    }

    fn remove(&self, choose: impl FnOnce(&mut Vec<InFlight>)) {
        let mut space = self.space.lock();
        choose(&mut space.in_flight);
        if std::mem::take(&mut space.is_awaited) {
            self.endpoint.notices.wake();
        }
    }

    /// A chain is not accessed any more.
    pub(crate) fn end(&self, head: u16) {
        self.remove(|in_flight| in_flight.retain(|chain| chain.head != head));
    }

    /// The chain that was taken last is not accessed any more.
    pub(crate) fn end_last(&self) {
        self.remove(|in_flight| drop(in_flight.pop()));
    }

    /// No chain is accessed any more.
    pub(crate) fn end_all(&self) {
        self.remove(Vec::clear);
    }
}

impl Drop for QueueDma {
    fn drop(&mut self) {
        self.end_all();
    }
}

/// Adds a piece, or makes the last one longer.
fn push(pieces: &mut Vec<(u64, u64)>, gpa: u64, len_bytes: u64) {
    if let Some((last, last_bytes)) = pieces.last_mut()
        && last.checked_add(*last_bytes) == Some(gpa)
        && let joined = last_bytes.saturating_add(len_bytes)
        && u32::try_from(joined).is_ok()
    {
        *last_bytes = joined;
    } else {
        pieces.push((gpa, len_bytes));
    }
}

/// Guest memory as a device behind the IOMMU sees its rings. While this exists, the IOMMU waits.
pub(crate) struct RingMemory<'a> {
    memory: &'a GuestMemory,
    endpoint: &'a Endpoint,
    space: RefCell<MutexGuard<'a, QueueSpace>>,
}

type GuestBitmap = <<GuestMemory as GuestMemoryBackend>::R as GuestMemoryRegion>::B;

impl RingMemory<'_> {
    fn pieces(&self, iova: u64, count: usize, access: Permissions) -> Option<Vec<(u64, usize)>> {
        let wanted = match access {
            Permissions::No => 0,
            Permissions::Read => READ,
            Permissions::Write => WRITE,
            Permissions::ReadWrite => READ | WRITE,
        };
        let mut pieces = Vec::with_capacity(1);
        let each = |gpa, len_bytes| {
            pieces.push((gpa, usize::try_from(len_bytes).unwrap_or(0)));
            true
        };
        let len_bytes = u64::try_from(count).ok()?;
        let mut space = self.space.borrow_mut();
        space.translate(self.endpoint, iova, len_bytes, wanted, each).ok()?;
        Some(pieces)
    }
}

impl vm_memory::GuestMemory for RingMemory<'_> {
    type PhysicalMemory = GuestMemory;
    type Bitmap = GuestBitmap;

    fn check_range(&self, addr: GuestAddress, count: usize, access: Permissions) -> bool {
        self.pieces(addr.0, count, access).is_some_and(|pieces| {
            let is_ram = |(gpa, len): &(u64, usize)| {
                GuestMemoryBackend::check_range(self.memory, GuestAddress(*gpa), *len)
            };
            pieces.iter().all(is_ram)
        })
    }

    fn get_slices(
        &self,
        addr: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> MemoryResult<impl GuestMemorySliceIterator<'_, BS<'_, Self::Bitmap>>> {
        let pieces = self.pieces(addr.0, count, access);
        let pieces = pieces.ok_or(GuestMemoryError::InvalidGuestAddress(addr))?;
        let slices = pieces.into_iter().flat_map(|(gpa, len)| {
            GuestMemoryBackend::get_slices(self.memory, GuestAddress(gpa), len)
        });
        Ok(Slices(slices.collect::<Vec<_>>().into_iter()))
    }
}

type Slice<'a> = MemoryResult<VolatileSlice<'a, BS<'a, GuestBitmap>>>;

/// The pieces of a range.
struct Slices<'a>(std::vec::IntoIter<Slice<'a>>);

impl<'a> Iterator for Slices<'a> {
    type Item = Slice<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next()
    }
}

impl std::iter::FusedIterator for Slices<'_> {}

impl<'a> GuestMemorySliceIterator<'a, BS<'a, GuestBitmap>> for Slices<'a> {}
