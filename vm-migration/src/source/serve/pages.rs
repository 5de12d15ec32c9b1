// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which pages go out, and in what order.
//!
//! Owns the claims: a chunk of the background at a time, beginning where the guest faulted last,
//! and what was asked for. It sends on a connection that it is given and waits for nobody.

use std::sync::atomic::Ordering;

use super::Server;
use crate::bitmap::Claimed;
use crate::error::Cause;
use crate::layout::{GpaRange, PAGE_BYTES, PageRun};
use crate::protocol::ProtocolError;
use crate::protocol::message::Message;
use crate::ram::{self, GuestMemoryMap};
use crate::source::round::{push, ranges};
use crate::transport::{Connection, Part};

/// Bytes that a pusher claims at once: 50 us at 10 Gbit/s, so little waits behind it.
const BULK_CHUNK_BYTES: u64 = 64 << 10;

/// Of a limited bandwidth, a chunk takes no more than this long.
const BULK_CHUNK_TIME: std::time::Duration = std::time::Duration::from_micros(500);

/// Most units that one request may name.
const REQUEST_UNITS_MAX: u64 = 4096;

/// Bits of a hint that hold the unit; the region is above them.
const HINT_UNIT_BITS: u32 = 52;

/// No hint.
pub(super) const HINT_NONE: u64 = u64::MAX;

/// Pages on their way out.
#[derive(Default)]
pub(super) struct Reply {
    data: Vec<PageRun>,
    zero: Vec<PageRun>,
    elsewhere: Vec<PageRun>,
}

impl Reply {
    pub(super) fn is_empty(&self) -> bool {
        self.data.is_empty() && self.zero.is_empty() && self.elsewhere.is_empty()
    }

    /// Bytes of contents.
    pub(super) fn data_bytes(&self) -> u64 {
        self.data.iter().map(PageRun::len_bytes).sum()
    }
}

impl<M: GuestMemoryMap> Server<M> {
    /// The next chunk of the background; `None` when nothing is pending anywhere.
    pub(super) fn next_chunk(&self, at: &mut (usize, u64)) -> Option<Reply> {
        let (region, claimed) = self.claim_chunk(at)?;
        let mut reply = Reply::default();
        for (first, count) in claimed.runs() {
            self.add(&mut reply, region, first, count);
        }
        Some(reply)
    }

    /// Claims the next chunk at `at` or where the guest faulted since, moving on through all
    /// regions.
    fn claim_chunk(&self, at: &mut (usize, u64)) -> Option<(usize, Claimed)> {
        let hint = self.hint.swap(HINT_NONE, Ordering::Relaxed);
        if hint != HINT_NONE {
            let region = usize::try_from(hint >> HINT_UNIT_BITS).unwrap_or(0);
            *at = (region, hint & ((1 << HINT_UNIT_BITS) - 1));
        }
        let paced = self.pace.bytes_in(BULK_CHUNK_TIME).unwrap_or(u64::MAX);
        let chunk_bytes = BULK_CHUNK_BYTES.min(paced);
        let regions = self.pending.len();
        // One step more than there are regions: the first one again, from its start.
        for step in 0..=regions {
            let region = (at.0 + step) % regions;
            let from = if step == 0 { at.1 } else { 0 };
            let chunk_units = chunk_bytes / (self.unit_pages[region] * PAGE_BYTES);
            let max = u32::try_from(chunk_units.clamp(1, 64)).unwrap_or(1);
            if let Some(claimed) = self.pending[region].claim_next(from, max) {
                let last = claimed.base + 63 - u64::from(claimed.mask.leading_zeros());
                *at = (region, last + 1);
                return Some((region, claimed));
            }
        }
        None
    }

    /// What was asked for and somebody waits for.
    pub(super) fn reply_to(&self, ranges: &[GpaRange]) -> Result<Reply, ProtocolError> {
        let mut reply = Reply::default();
        self.for_units(ranges, |region, index| {
            if self.pending[region].claim(index) {
                self.add(&mut reply, region, index, 1);
            } else {
                push(&mut reply.elsewhere, self.pages_of(region, index, 1));
            }
        })?;
        Ok(reply)
    }

    /// What may come along; of that, what is in flight already needs no answer.
    pub(super) fn reply_ahead(&self, ranges: &[GpaRange]) -> Result<Reply, ProtocolError> {
        let mut reply = Reply::default();
        self.for_units(ranges, |region, index| {
            if self.pending[region].claim(index) {
                self.add(&mut reply, region, index, 1);
            }
        })?;
        Ok(reply)
    }

    fn for_units(
        &self,
        ranges: &[GpaRange],
        mut each: impl FnMut(usize, u64),
    ) -> Result<(), ProtocolError> {
        let mut asked = 0;
        for range in ranges {
            let run = self.memory.layout().locate(*range)?;
            let unit = self.unit_pages[run.region];
            let units = run.first / unit..run.end().div_ceil(unit);
            asked += units.end - units.start;
            if asked > REQUEST_UNITS_MAX {
                let why = "it names too many pages";
                return Err(ProtocolError::Malformed { what: "page request", why });
            }
            let packed = (run.region as u64) << HINT_UNIT_BITS | units.end;
            self.hint.store(packed, Ordering::Relaxed);
            for index in units {
                each(run.region, index);
            }
        }
        Ok(())
    }

    fn pages_of(&self, region: usize, first: u64, count: u64) -> PageRun {
        let unit = self.unit_pages[region];
        PageRun { region, first: first * unit, count: count * unit }
    }

    /// Adds claimed units, as data or as zeros.
    fn add(&self, reply: &mut Reply, region: usize, first: u64, count: u64) {
        for index in first..first + count {
            let run = self.pages_of(region, index, 1);
            let is_zero = ram::is_zero(&*self.memory, run);
            push(if is_zero { &mut reply.zero } else { &mut reply.data }, run);
        }
    }

    /// Sends a reply in one go; returns the number of pages.
    pub(super) fn send(&self, connection: &Connection, reply: &Reply) -> Result<u64, Cause> {
        let memory = &*self.memory;
        let message = |runs: &Vec<PageRun>, wrap: fn(Vec<GpaRange>) -> Message| {
            if runs.is_empty() { Vec::new() } else { wrap(ranges(memory, runs)).encode() }
        };
        let data = message(&reply.data, Message::Memory);
        let mut rest = message(&reply.zero, Message::ZeroPages);
        rest.extend(message(&reply.elsewhere, Message::Elsewhere));
        let mut parts = Vec::with_capacity(2 + reply.data.len());
        parts.push(Part::Bytes(&data));
        parts.extend(reply.data.iter().map(|run| Part::Guest(ram::slice(memory, *run))));
        parts.push(Part::Bytes(&rest));
        connection.send_parts(&parts)?;
        let pages = |runs: &[PageRun]| runs.iter().map(|run| run.count).sum::<u64>();
        let (data_pages, zero_pages) = (pages(&reply.data), pages(&reply.zero));
        let counters = &self.progress.counters;
        counters.memory_bytes_sent.fetch_add(data_pages * PAGE_BYTES, Ordering::Relaxed);
        counters.zero_pages.fetch_add(zero_pages, Ordering::Relaxed);
        self.progress.sent_down((data_pages + zero_pages) * PAGE_BYTES);
        Ok(data_pages + zero_pages)
    }
}
