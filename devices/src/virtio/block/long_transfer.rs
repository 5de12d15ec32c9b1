// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Long transfers, discards and writes of zeroes, which are split so that a pause need not wait for an entire one.
//!
//! Owns the progress of a transfer. It is done piece by piece while no other request of its queue is in flight.
//! So its chain is the one that was taken last, and between two pieces the queue can return it to the available
//! ring as if it had never been taken: a driver may not touch the buffers of an unanswered request,
//! so the transfer is started again when the queue continues, here or on another host. No other state has to
//! be kept for that.

use std::collections::VecDeque;
use std::time::Instant;

use super::image::SECTOR_BYTES;
use super::limits::BlockLimits;
use super::perform::Failure;
use super::request::{Operation, Range, Request};
use crate::virtio::buffers::Segments;

/// Maximum length of a transfer done at once, and length of the pieces of a longer one. Linux drivers
/// request 1.25 MiB at a time, and at most 32 MiB if configured.
pub(super) const PIECE_BYTES: u64 = 16 << 20;

/// Limit on the bytes in flight of a queue, which one more transfer may exceed: a pause waits for them.
pub(super) const UNDER_WAY_BYTES: u64 = 64 << 20;

/// A long transfer in progress.
pub(super) struct LongTransfer {
    request: Request,
    started: Instant,
    done_bytes: u64,
    rest: Rest,
}

/// What is left of a long request.
enum Rest {
    /// Memory of a read or write.
    Data(Segments),
    /// Ranges of a discard or a write of zeroes.
    Ranges(VecDeque<Range>),
}

impl Rest {
    fn is_empty(&self) -> bool {
        match self {
            Self::Data(data) => data.len_bytes() == 0,
            Self::Ranges(ranges) => ranges.is_empty(),
        }
    }
}

/// Splits the next piece off, which ends at a multiple of `piece_bytes`, so that no smaller unit of an image is in two.
fn next_range(ranges: &mut VecDeque<Range>, piece_bytes: u64) -> Option<Range> {
    let range = ranges.pop_front()?;
    let begun_bytes = range.offset.checked_rem(piece_bytes).unwrap_or(0);
    let len_bytes = range.len_bytes.min(piece_bytes.saturating_sub(begun_bytes));
    let left = range.len_bytes.saturating_sub(len_bytes);
    if left > 0 {
        let offset = range.offset.saturating_add(len_bytes);
        ranges.push_front(Range { offset, len_bytes: left, ..range });
    }
    Some(Range { len_bytes, ..range })
}

/// Result of a piece.
pub(super) enum Progress {
    /// More pieces are left.
    Unfinished(LongTransfer),
    /// The request can be completed.
    Finished { request: Request, started: Instant, outcome: Result<u64, Failure> },
}

/// The next piece of a transfer.
fn front(rest: &mut Segments) -> Segments {
    let len_bytes = rest.len_bytes().min(PIECE_BYTES);
    rest.split_front(len_bytes).unwrap_or_default()
}

impl Operation {
    /// Length of a piece of a long one.
    fn piece_bytes(&self) -> u64 {
        const OWN: BlockLimits = BlockLimits::GODWIT;
        match self {
            Self::Discard(_) => u64::from(OWN.discard_sectors_max) * SECTOR_BYTES,
            Self::WriteZeroes(_) => u64::from(OWN.zero_sectors_max) * SECTOR_BYTES,
            _ => PIECE_BYTES,
        }
    }

    /// The pieces of ranges that need some; any other operation as a whole.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Self> {
        let mut rest = VecDeque::new();
        let mut whole = None;
        match self {
            Self::Discard(ranges) | Self::WriteZeroes(ranges) if self.has_long_range() => {
                rest.extend(ranges.iter().copied());
            }
            _ => whole = Some(self.clone()),
        }
        std::iter::from_fn(move || {
            let piece = |range| match self {
                Self::Discard(_) => Self::Discard(vec![range]),
                _ => Self::WriteZeroes(vec![range]),
            };
            whole.take().or_else(|| next_range(&mut rest, self.piece_bytes()).map(piece))
        })
    }

    fn has_long_range(&self) -> bool {
        let (Self::Discard(ranges) | Self::WriteZeroes(ranges)) = self else { return false };
        ranges.iter().any(|range| range.len_bytes > self.piece_bytes())
    }

    /// Length of the transfer in bytes.
    pub(super) fn transfer_bytes(&self) -> u64 {
        match self {
            Self::Read { data, .. } | Self::Write { data, .. } => data.len_bytes(),
            _ => 0,
        }
    }
}

impl LongTransfer {
    /// Starts a request that needs pieces; returns any other. Ranges that this program's own guests may ask for are done
    /// at once.
    pub(super) fn begin(request: Request) -> Result<Self, Request> {
        match &request.operation {
            Operation::Read { data, .. } | Operation::Write { data, .. }
                if data.len_bytes() > PIECE_BYTES =>
            {
                let rest = Rest::Data(data.clone());
                Ok(Self { request, started: Instant::now(), done_bytes: 0, rest })
            }
            Operation::Discard(ranges) | Operation::WriteZeroes(ranges)
                if request.operation.has_long_range() =>
            {
                let rest = Rest::Ranges(ranges.iter().copied().collect());
                Ok(Self { request, started: Instant::now(), done_bytes: 0, rest })
            }
            _ => Err(request),
        }
    }

    /// Does the next piece with `perform`.
    pub(super) fn go_on(
        mut self,
        perform: impl FnOnce(&Operation) -> Result<u64, Failure>,
    ) -> Progress {
        let piece_bytes = self.request.operation.piece_bytes();
        let at = |offset: u64| offset.saturating_add(self.done_bytes);
        let piece = match (&self.request.operation, &mut self.rest) {
            (Operation::Read { offset, .. }, Rest::Data(rest)) => {
                Operation::Read { offset: at(*offset), data: front(rest) }
            }
            (Operation::Write { offset, .. }, Rest::Data(rest)) => {
                Operation::Write { offset: at(*offset), data: front(rest) }
            }
            (Operation::Discard(_), Rest::Ranges(rest)) => {
                Operation::Discard(next_range(rest, piece_bytes).into_iter().collect())
            }
            (_, Rest::Ranges(rest)) => {
                Operation::WriteZeroes(next_range(rest, piece_bytes).into_iter().collect())
            }
            (other, Rest::Data(_)) => other.clone(),
        };
        let done = perform(&piece);
        self.done_bytes = self.done_bytes.saturating_add(piece.transfer_bytes());
        if done.is_ok() && !self.rest.is_empty() {
            return Progress::Unfinished(self);
        }
        let is_read = matches!(self.request.operation, Operation::Read { .. });
        let written = if is_read { self.done_bytes } else { 0 };
        let Self { request, started, .. } = self;
        Progress::Finished { request, started, outcome: done.map(|_| written) }
    }
}
