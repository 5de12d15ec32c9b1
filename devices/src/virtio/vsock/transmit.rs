// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Packets of the guest that are taken from its queue and not used yet.
//!
//! Owns where their data are. A stream takes them from guest memory, those of several packets of its connection in one
//! system call; what it does not take is copied. The guest gets its buffers back afterwards.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream;

use memory::GuestMemory;
use smallvec::SmallVec;

use super::connection::Data;
use super::packet::{DATA_BYTES_MAX, HEADER_BYTES, Header, op};
use super::receive::failure_of;
use crate::virtio::available::Available;
use crate::virtio::buffers::HostRanges;
use crate::virtio::queue::{Broken, Chain, NOT_RAM, WorkQueue};

/// Packets that are given to a stream together, and ranges of guest memory of which no further packet is added.
const PACKETS_TOGETHER: usize = 16;
const RANGES_TOGETHER: usize = 128;

/// A packet of the guest, as it is in the ring.
pub(super) struct Packet {
    pub(super) header: Header,
    chain: Chain,
    /// Length of its data; `None` if it does not have as many as it says, or says too many.
    len_bytes: Option<usize>,
}

impl Packet {
    /// Takes the next packet of the guest, if there is one.
    pub(super) fn take(
        queue: &mut WorkQueue,
        available: &mut Available<'_>,
    ) -> Result<Option<Self>, Broken> {
        let Some(chain) = queue.pop_from(available)? else { return Ok(None) };
        let all_bytes = chain.readable.len_bytes();
        let Some(data_bytes) = all_bytes.checked_sub(HEADER_BYTES as u64) else {
            return Err(queue.bad_chain(chain.head, "is too short for a header"));
        };
        let mut bytes = [0; HEADER_BYTES];
        let copied = chain.readable.copy_out(available.memory(), &mut bytes);
        copied.map_err(|_| queue.bad_chain(chain.head, NOT_RAM))?;
        let header = Header::parse(&bytes);
        let len_bytes = usize::try_from(header.len_bytes).ok();
        let len_bytes = len_bytes
            .filter(|len_bytes| *len_bytes <= DATA_BYTES_MAX && *len_bytes as u64 <= data_bytes);
        Ok(Some(Self { header, chain, len_bytes }))
    }
}

/// Packets of one connection with data, or any single one; see the module.
pub(super) struct Outbox<'a> {
    memory: &'a GuestMemory,
    packets: SmallVec<[Packet; 1]>,
    /// How much data of further packets there may be.
    room_bytes: usize,
    /// The data that no stream has taken, and the length of those that one has.
    left: HostRanges<&'a GuestMemory>,
    left_bytes: usize,
    written_bytes: usize,
    /// Why the last write has failed.
    pub(super) failure: Option<io::Error>,
}

impl<'a> Outbox<'a> {
    pub(super) fn new(memory: &'a GuestMemory) -> Self {
        Self {
            memory,
            packets: SmallVec::new(),
            room_bytes: 0,
            left: HostRanges::with_capacity(memory, 0),
            left_bytes: 0,
            written_bytes: 0,
            failure: None,
        }
    }

    /// Whether a packet is added to those that are there.
    pub(super) fn takes(&self, packet: &Packet) -> bool {
        let Some(last) = self.packets.last() else { return false };
        // They only differ in their credit, of which the last counts.
        let Header { len_bytes, buf_alloc, fwd_cnt, .. } = packet.header;
        packet.header == Header { len_bytes, buf_alloc, fwd_cnt, ..last.header }
            && packet.len_bytes.is_some_and(|len_bytes| len_bytes <= self.room_bytes)
            && self.packets.len() < PACKETS_TOGETHER
            && self.left.count() < RANGES_TOGETHER
    }

    /// Adds a packet; returns whether more may be added: `direct_bytes` is how much its connection takes in several.
    pub(super) fn add(
        &mut self,
        packet: Packet,
        queue: &WorkQueue,
        direct_bytes: impl FnOnce(&Header) -> Option<usize>,
    ) -> Result<bool, Broken> {
        let len_bytes = packet.len_bytes.unwrap_or(0);
        let pushed = self.left.push(&packet.chain.readable, HEADER_BYTES as u64, len_bytes);
        pushed.map_err(|_| queue.bad_chain(packet.chain.head, NOT_RAM))?;
        self.left_bytes = self.left_bytes.saturating_add(len_bytes);
        if self.packets.is_empty() {
            self.room_bytes = match packet.header.op {
                op::RW if packet.len_bytes.is_some() => direct_bytes(&packet.header).unwrap_or(0),
                _ => 0,
            };
        }
        self.room_bytes = self.room_bytes.saturating_sub(len_bytes);
        self.packets.push(packet);
        Ok(self.room_bytes > 0)
    }

    /// The header of the last packet, the number of all, and their data, unless these are not complete.
    pub(super) fn contents(&mut self) -> Option<(Header, usize, Option<&mut dyn Data>)> {
        let last = self.packets.last()?;
        let (header, is_complete) = (last.header, last.len_bytes.is_some());
        let count = self.packets.len();
        Some((header, count, is_complete.then_some(self as &mut dyn Data)))
    }

    /// Empties it, and returns the packets' places in `used`.
    pub(super) fn clear(&mut self, used: &mut Vec<(u16, u64)>) {
        used.clear();
        used.extend(self.packets.drain(..).map(|packet| (packet.chain.head, 0)));
        self.left.advance(usize::MAX);
        (self.left_bytes, self.written_bytes, self.room_bytes) = (0, 0, 0);
        self.failure = None;
    }
}

impl Data for Outbox<'_> {
    fn len_bytes(&self) -> usize {
        self.left_bytes
    }

    fn write(&mut self, stream: &UnixStream) -> io::Result<usize> {
        let sent = self.left.send(stream);
        self.failure = sent.as_ref().err().and_then(failure_of);
        let sent_bytes = sent?.min(self.left_bytes);
        self.left.advance(sent_bytes);
        self.left_bytes -= sent_bytes;
        self.written_bytes = self.written_bytes.saturating_add(sent_bytes);
        Ok(sent_bytes)
    }

    fn keep(&mut self, kept: &mut VecDeque<u8>) -> io::Result<()> {
        let mut written_bytes = self.written_bytes;
        for packet in &self.packets {
            let len_bytes = packet.len_bytes.unwrap_or(0);
            let skipped = written_bytes.min(len_bytes);
            written_bytes -= skipped;
            let mut bytes = vec![0; len_bytes - skipped];
            let offset = (HEADER_BYTES + skipped) as u64;
            let copied = packet.chain.readable.copy_out_at(self.memory, offset, &mut bytes);
            copied.map_err(io::Error::other)?;
            kept.extend(bytes);
        }
        Ok(())
    }
}
