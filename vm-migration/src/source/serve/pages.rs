// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which pages are sent in postcopy, and in which order.
//!
//! Owns the claims: a chunk of the background at a time, beginning where the guest faulted last, and pieces
//! of requested units. It sends on a connection that it is given and never blocks on another thread.

use std::ops::Range;
use std::sync::atomic::Ordering;

use page_bitmap::Claimed;

use super::{Grain, Server};
use crate::error::Cause;
use crate::layout::{GpaRange, PAGE_BYTES, PageRun, to_usize};
use crate::protocol::ProtocolError;
use crate::protocol::message::Message;
use crate::ram::{self, GuestMemoryMap};
use crate::source::content::{push, ranges};
use crate::transport::{Connection, Part};

/// Bytes that a background thread, or an answer, claims at once: 50 us at 10 Gbit/s, so that little waits
/// behind it.
pub(super) const CHUNK_BYTES: u64 = 64 << 10;

/// The longest time that a chunk may take under a bandwidth limit.
const BULK_CHUNK_TIME: std::time::Duration = std::time::Duration::from_micros(500);

/// Most units that one request may name.
pub(super) const REQUEST_UNITS_MAX: u64 = 4096;

/// Bits of a hint that hold the piece; the bits above hold the region.
const HINT_PIECE_BITS: u32 = 52;

/// The value of no hint.
pub(super) const HINT_NONE: u64 = u64::MAX;

/// Pieces of one unit that are still to be examined for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct UnitRange {
    region: usize,
    next: u64,
    end: u64,
}

impl UnitRange {
    pub(super) fn is_done(&self) -> bool {
        self.next == self.end
    }
}

/// Pages that are about to be sent.
#[derive(Debug, Default)]
pub(super) struct Reply {
    pub(super) data: Vec<PageRun>,
    pub(super) zero: Vec<PageRun>,
    pub(super) elsewhere: Vec<PageRun>,
}

impl Reply {
    pub(super) fn is_empty(&self) -> bool {
        self.data.is_empty() && self.zero.is_empty() && self.elsewhere.is_empty()
    }

    /// True when the reply is full: more would delay other requests too long.
    pub(super) fn is_large(&self) -> bool {
        self.room_bytes() == 0
    }

    /// How many more bytes may be added without delaying other requests too long.
    fn room_bytes(&self) -> u64 {
        let pages: u64 = self.data.iter().chain(&self.zero).map(|run| run.count).sum();
        CHUNK_BYTES.saturating_sub(pages * PAGE_BYTES)
    }

    /// Bytes of contents.
    pub(super) fn data_bytes(&self) -> u64 {
        self.data.iter().map(PageRun::len_bytes).sum()
    }
}

impl<M: GuestMemoryMap> Server<M> {
    /// The next chunk of the background; `None` when nothing is pending.
    pub(super) fn next_chunk(&self, at: &mut (usize, u64)) -> Option<Reply> {
        let (region, claimed) = self.claim_chunk(at)?;
        let mut reply = Reply::default();
        for run in claimed.runs() {
            self.add(&mut reply, region, run);
        }
        Some(reply)
    }

    /// Claims the next chunk at `at`, or where the guest has faulted since, continuing through all regions.
    /// A unit that has been begun is finished first: the destination makes only whole units visible.
    fn claim_chunk(&self, at: &mut (usize, u64)) -> Option<(usize, Claimed)> {
        if !self.is_within_unit(*at) {
            let hint = self.hint.swap(HINT_NONE, Ordering::Relaxed);
            if hint != HINT_NONE {
                let region = usize::try_from(hint >> HINT_PIECE_BITS).unwrap_or(0);
                *at = (region, hint & ((1 << HINT_PIECE_BITS) - 1));
            }
        }
        let paced = self.bandwidth_limit.bytes_in(BULK_CHUNK_TIME).unwrap_or(u64::MAX);
        let chunk_bytes = CHUNK_BYTES.min(paced);
        let regions = self.pending.len();
        // One step more than there are regions: the first region again, from its start.
        for step in 0..=regions {
            let region = (at.0 + step) % regions;
            let from = if step == 0 { at.1 } else { 0 };
            let chunk_pieces = chunk_bytes / (self.grains[region].piece_pages * PAGE_BYTES);
            let max = u32::try_from(chunk_pieces.clamp(1, 64)).unwrap_or(1);
            if let Some(claimed) = self.pending[region].claim_next(from, max) {
                *at = (region, claimed.end());
                return Some((region, claimed));
            }
        }
        None
    }

    /// True when pieces of the unit before `at` are still pending.
    fn is_within_unit(&self, (region, piece): (usize, u64)) -> bool {
        let unit_pieces = self.grains[region].unit_pieces;
        let done = piece % unit_pieces;
        done != 0 && self.pending[region].count_range(piece..piece - done + unit_pieces) > 0
    }

    /// The units of a request, a range for each; the background continues after the last one.
    pub(super) fn stretches(&self, ranges: &[GpaRange]) -> Result<Vec<UnitRange>, ProtocolError> {
        let mut stretches = Vec::new();
        for range in ranges {
            let run = self.memory.layout().locate(*range)?;
            let Grain { piece_pages, unit_pieces } = self.grains[run.region];
            let unit_pages = piece_pages * unit_pieces;
            let units = run.first / unit_pages..run.end().div_ceil(unit_pages);
            if units.end - units.start > REQUEST_UNITS_MAX.saturating_sub(stretches.len() as u64) {
                let why = "it names too many pages";
                return Err(ProtocolError::Malformed { what: "page request", why });
            }
            let packed = (run.region as u64) << HINT_PIECE_BITS | (units.end * unit_pieces);
            self.hint.store(packed, Ordering::Relaxed);
            stretches.extend(units.map(|unit| UnitRange {
                region: run.region,
                next: unit * unit_pieces,
                end: (unit + 1) * unit_pieces,
            }));
        }
        Ok(stretches)
    }

    /// Number of pieces of a range that are not claimed.
    pub(super) fn pending_of(&self, stretch: UnitRange) -> u64 {
        let UnitRange { region, next, end } = stretch;
        self.pending[region].count_range(next..end)
    }

    /// Claims from the start of a range until the reply is full; returns the number of claimed pieces.
    pub(super) fn claim_from(&self, stretch: &mut UnitRange, reply: &mut Reply) -> u64 {
        let UnitRange { region, end, .. } = *stretch;
        let piece_bytes = self.grains[region].piece_pages * PAGE_BYTES;
        let room = reply.room_bytes().div_ceil(piece_bytes);
        let mut runs: Vec<Range<u64>> = Vec::new();
        let mut claimed = 0;
        while stretch.next < end && claimed < room {
            let piece = stretch.next;
            stretch.next += 1;
            if self.pending[region].claim(piece) {
                claimed += 1;
                match runs.last_mut() {
                    Some(run) if run.end == piece => run.end += 1,
                    _ => runs.push(piece..piece + 1),
                }
            }
        }
        for run in runs {
            self.add(reply, region, run);
        }
        claimed
    }

    /// Adds that a unit is sent on another connection.
    pub(super) fn add_elsewhere(&self, reply: &mut Reply, stretch: UnitRange) {
        let UnitRange { region, end, .. } = stretch;
        let unit = self.grains[region].unit_pieces;
        push(&mut reply.elsewhere, self.pages_of(region, end - unit, unit));
    }

    fn pages_of(&self, region: usize, first: u64, count: u64) -> PageRun {
        let piece = self.grains[region].piece_pages;
        PageRun { region, first: first * piece, count: count * piece }
    }

    /// Adds claimed pieces, as data or as zeros. Pages that the guest has returned since they were found
    /// populated stay holes at the source.
    fn add(&self, reply: &mut Reply, region: usize, run: Range<u64>) {
        let count = run.end - run.start;
        let zero = ram::zero_pages(&*self.memory, self.pages_of(region, run.start, count));
        let pieces = zero.chunks(to_usize(self.grains[region].piece_pages));
        for (index, zero) in run.zip(pieces) {
            let is_zero = zero.iter().all(|is_zero| *is_zero);
            let run = self.pages_of(region, index, 1);
            push(if is_zero { &mut reply.zero } else { &mut reply.data }, run);
        }
    }

    /// Sends a reply in one call; returns the number of pages.
    pub(super) fn send(&self, connection: &Connection, reply: &Reply) -> Result<u64, Cause> {
        let memory = &*self.memory;
        let message = |runs: &Vec<PageRun>, wrap: fn(Vec<GpaRange>) -> Message| {
            if runs.is_empty() { Vec::new() } else { wrap(ranges(memory, runs, None)).encode() }
        };
        let data = message(&reply.data, Message::Memory);
        let mut rest = message(&reply.zero, Message::ZeroPages);
        rest.extend(message(&reply.elsewhere, Message::Elsewhere));
        let mut parts = Vec::with_capacity(2 + reply.data.len());
        parts.push(Part::Bytes(&data));
        parts.extend(reply.data.iter().map(|run| Part::Guest(ram::slice(memory, *run))));
        parts.push(Part::Bytes(&rest));
        let pages = |runs: &[PageRun]| runs.iter().map(|run| run.count).sum::<u64>();
        let (data_pages, zero_pages) = (pages(&reply.data), pages(&reply.zero));
        let counters = &self.progress.counters;
        counters.memory_bytes_sent.fetch_add(data_pages * PAGE_BYTES, Ordering::Relaxed);
        counters.zero_pages.fetch_add(zero_pages, Ordering::Relaxed);
        self.progress.sent_down((data_pages + zero_pages) * PAGE_BYTES);
        // Counted before they are sent: with the last of them the destination is complete, and is told the
        // count.
        connection.send_parts(&parts)?;
        Ok(data_pages + zero_pages)
    }
}
