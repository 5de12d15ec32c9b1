// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's receive buffers while data of a host's client are read into them.
//!
//! Owns which buffers are taken from the ring, and how many. What is not used goes back to the ring.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream;

use memory::GuestMemory;
use vm_memory::bitmap::Bitmap as _;
use vm_memory::{GuestMemoryBackend as _, GuestMemoryError};

use super::connection::{Filled, Room};
use super::packet::{DATA_BYTES_MAX, HEADER_BYTES};
use crate::virtio::available::Available;
use crate::virtio::buffers::{GuestSlice, HostRanges};
use crate::virtio::queue::{Broken, Chain, NOT_RAM, WorkQueue};

/// Ranges of buffers that are taken for one read.
const TAKEN_RANGES_MAX: usize = 128;
/// Ranges that a read into several buffers mostly has: those of Linux have almost 4 KiB each.
const RANGES_EXPECTED: usize = 36;

/// A buffer that the guest provides for a packet.
pub(super) struct Buffer<'m> {
    pub(super) head: u16,
    place: Place<'m>,
}

enum Place<'m> {
    /// A range in one region of memory, as nearly all are.
    Range(GuestSlice<'m>),
    Ranges(Box<Chain>),
}

impl<'m> Buffer<'m> {
    fn take(queue: &mut WorkQueue, available: &mut Available<'m>) -> Result<Option<Self>, Broken> {
        let Some((head, range)) = queue.pop_writable(available) else {
            let chain = queue.pop_from(available)?;
            return Ok(chain.map(Self::of_chain));
        };
        let len_bytes = usize::try_from(range.len_bytes).unwrap_or(usize::MAX);
        if let Ok(range) = available.memory().get_slice(range.gpa, len_bytes) {
            return Ok(Some(Self { head, place: Place::Range(range) }));
        }
        // It crosses the border of two regions, or is no memory.
        let mut chain = Chain { head, ..Chain::default() };
        chain.writable.push(range);
        Ok(Some(Self::of_chain(chain)))
    }

    fn of_chain(chain: Chain) -> Self {
        Self { head: chain.head, place: Place::Ranges(Box::new(chain)) }
    }

    /// Data of a packet that it has room for, behind the header.
    pub(super) fn room_bytes(&self) -> usize {
        let len_bytes = match &self.place {
            Place::Range(range) => range.len(),
            Place::Ranges(chain) => {
                usize::try_from(chain.writable.len_bytes()).unwrap_or(usize::MAX)
            }
        };
        len_bytes.saturating_sub(HEADER_BYTES).min(DATA_BYTES_MAX)
    }

    fn ranges_count(&self) -> usize {
        match &self.place {
            Place::Range(_) => 1,
            Place::Ranges(chain) => {
                chain.writable.iter().count().saturating_add(chain.readable.iter().count())
            }
        }
    }

    /// Appends where data go; returns the length.
    fn add_to(
        &self,
        ranges: &mut HostRanges<&'m GuestMemory>,
        limit_bytes: usize,
    ) -> Result<usize, GuestMemoryError> {
        match &self.place {
            Place::Range(range) => Ok(ranges.push_slice(range, HEADER_BYTES, limit_bytes)),
            Place::Ranges(chain) => ranges.push(&chain.writable, HEADER_BYTES as u64, limit_bytes),
        }
    }

    /// Puts a header before data that the kernel has written, which are logged if writes of devices are
    /// ([`is_logged`](crate::virtio::buffers::is_logged)).
    pub(super) fn finish(
        &self,
        memory: &GuestMemory,
        header: &[u8; HEADER_BYTES],
        data_bytes: usize,
        is_logged: bool,
    ) -> Result<(), GuestMemoryError> {
        let len_bytes = HEADER_BYTES.saturating_add(data_bytes);
        match &self.place {
            Place::Range(range) => {
                range.copy_from(header);
                if is_logged {
                    range.bitmap().mark_dirty(0, len_bytes.min(range.len()));
                }
            }
            Place::Ranges(chain) => {
                chain.writable.copy_in(memory, header)?;
                if is_logged {
                    chain.writable.mark_written(memory, len_bytes as u64);
                }
            }
        }
        Ok(())
    }
}

/// The receive queue while data are read into its buffers.
pub(super) struct ReceiveRoom<'a, 'm> {
    queue: &'a mut WorkQueue,
    available: &'a mut Available<'m>,
    /// Buffers taken, in the order of the ring.
    taken: &'a mut VecDeque<Buffer<'m>>,
    /// A rule that the driver has broken with a buffer.
    pub(super) broken: Option<Broken>,
    /// Why the last read has failed.
    pub(super) failure: Option<io::Error>,
}

impl<'a, 'm> ReceiveRoom<'a, 'm> {
    pub(super) fn new(
        queue: &'a mut WorkQueue,
        available: &'a mut Available<'m>,
        taken: &'a mut VecDeque<Buffer<'m>>,
    ) -> Self {
        Self { queue, available, taken, broken: None, failure: None }
    }

    /// Has a buffer, which may be taken for it; returns whether there is one.
    pub(super) fn has_buffer(&mut self) -> Result<bool, Broken> {
        Ok(!self.taken.is_empty() || self.take_buffer()?)
    }

    /// Takes another buffer from the ring; returns whether there is one.
    fn take_buffer(&mut self) -> Result<bool, Broken> {
        let Some(buffer) = Buffer::take(self.queue, self.available)? else { return Ok(false) };
        if buffer.room_bytes() == 0 {
            return Err(self.queue.bad_chain(buffer.head, "is too short for a packet"));
        }
        self.taken.push_back(buffer);
        Ok(true)
    }

    /// Where data go: into the first buffer, and into further ones, which are taken as needed, until there is room for
    /// `wanted_bytes`.
    fn ranges(
        &mut self,
        wanted_bytes: usize,
        limit_bytes: usize,
    ) -> Result<HostRanges<&'m GuestMemory>, Broken> {
        let count = if wanted_bytes > 1 { RANGES_EXPECTED } else { 1 };
        let mut ranges = HostRanges::with_capacity(self.available.memory(), count);
        self.taken.reserve(count.saturating_sub(self.taken.len()));
        let (mut room_bytes, mut ranges_count) = (0_usize, 0_usize);
        // A driver may add buffers as fast as they are taken.
        for index in 0..usize::from(self.queue.size()) {
            if index >= self.taken.len() && !self.take_buffer()? {
                break;
            }
            let Some(buffer) = self.taken.get(index) else { break };
            ranges_count = ranges_count.saturating_add(buffer.ranges_count());
            if index > 0 && ranges_count > TAKEN_RANGES_MAX {
                break;
            }
            let limit = buffer.room_bytes().min(limit_bytes.saturating_sub(room_bytes));
            let added = buffer.add_to(&mut ranges, limit);
            let added = added.map_err(|_| self.queue.bad_chain(buffer.head, NOT_RAM))?;
            room_bytes = room_bytes.saturating_add(added);
            if room_bytes >= wanted_bytes.min(limit_bytes) {
                break;
            }
        }
        Ok(ranges)
    }
}

impl Room for ReceiveRoom<'_, '_> {
    fn read(
        &mut self,
        stream: &UnixStream,
        wanted_bytes: usize,
        limit_bytes: usize,
    ) -> io::Result<Filled> {
        let ranges = match self.ranges(wanted_bytes, limit_bytes) {
            Ok(ranges) => ranges,
            Err(broken) => {
                self.broken = Some(broken);
                return Err(io::ErrorKind::Other.into());
            }
        };
        let room_bytes = ranges.len_bytes();
        let read = ranges.read(stream);
        self.failure = read.as_ref().err().and_then(failure_of);
        let len_bytes = read?;
        Ok(Filled { len_bytes, is_full: len_bytes == room_bytes })
    }
}

/// An error that is neither the client's end nor a reason to try again later.
pub(super) fn failure_of(error: &io::Error) -> Option<io::Error> {
    match error.kind() {
        io::ErrorKind::WouldBlock
        | io::ErrorKind::Interrupted
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe => None,
        _ => error.raw_os_error().map(io::Error::from_raw_os_error),
    }
}
