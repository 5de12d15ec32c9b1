// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Long transfers, which are split so that a pause need not wait for an entire one.
//!
//! Owns the progress of a transfer. It is done piece by piece while no other request of its queue is in flight.
//! So its chain is the one that was taken last, and between two pieces the queue can return it to the available
//! ring as if it had never been taken: a driver may not touch the buffers of an unanswered request,
//! so the transfer is started again when the queue continues, here or on another host. No other state has to
//! be kept for that.

use std::time::Instant;

use super::perform::Failure;
use super::request::{Operation, Request};
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
    rest: Segments,
}

/// Result of a piece.
pub(super) enum Progress {
    /// More pieces are left.
    Unfinished(LongTransfer),
    /// The request can be completed.
    Finished { request: Request, started: Instant, outcome: Result<u64, Failure> },
}

impl Operation {
    /// Length of the transfer in bytes.
    pub(super) fn transfer_bytes(&self) -> u64 {
        match self {
            Self::Read { data, .. } | Self::Write { data, .. } => data.len_bytes(),
            _ => 0,
        }
    }
}

impl LongTransfer {
    /// Starts a request that needs pieces; returns any other.
    pub(super) fn begin(request: Request) -> Result<Self, Request> {
        match &request.operation {
            Operation::Read { data, .. } | Operation::Write { data, .. }
                if data.len_bytes() > PIECE_BYTES =>
            {
                let rest = data.clone();
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
        let len_bytes = self.rest.len_bytes().min(PIECE_BYTES);
        let data = self.rest.split_front(len_bytes).unwrap_or_default();
        let at = |offset: u64| offset.saturating_add(self.done_bytes);
        let done = match &self.request.operation {
            Operation::Read { offset, .. } => {
                perform(&Operation::Read { offset: at(*offset), data })
            }
            Operation::Write { offset, .. } => {
                perform(&Operation::Write { offset: at(*offset), data })
            }
            other => perform(other),
        };
        self.done_bytes = self.done_bytes.saturating_add(len_bytes);
        if done.is_ok() && self.rest.len_bytes() > 0 {
            return Progress::Unfinished(self);
        }
        let is_read = matches!(self.request.operation, Operation::Read { .. });
        let written = if is_read { self.done_bytes } else { 0 };
        let Self { request, started, .. } = self;
        Progress::Finished { request, started, outcome: done.map(|_| written) }
    }
}
