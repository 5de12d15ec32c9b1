// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The credit of one connection, in both directions (virtio 1.3, 5.10.6.3).
//!
//! Owns the counts of both sides, when the guest is told of the device's, and how long data wait before the guest is asked
//! for its own. The counts of the guest are untrusted.

use std::num::Wrapping;
use std::time::Duration;

use super::packet::{Header, op};

/// How long data wait for credit before the guest is asked for some. Linux reports its free space by itself: whenever
/// its program has read all that has come, and when there may be less than 64 KiB left. To be asked as soon as its
/// buffer is full costs it a packet, and an answer that nearly always says that the buffer is full.
const ASK_AFTER: Duration = Duration::from_millis(20);
/// The same for a guest that was asked again and again in vain: its program does not read.
const ASK_AFTER_LONGEST: Duration = Duration::from_secs(1);

/// The counts of a connection; see the module.
pub(super) struct Credit {
    /// What the guest may send before the host takes any of it.
    buffer_bytes: u32,
    /// Bytes consumed by the host, and the count last reported to the guest.
    fwd_cnt: Wrapping<u32>,
    fwd_cnt_told: Wrapping<u32>,
    /// Bytes sent to the guest, and the guest's reported buffer space.
    sent_cnt: Wrapping<u32>,
    peer_fwd_cnt: Wrapping<u32>,
    peer_buf_alloc: u32,
    /// Whether the guest was asked and has not answered yet.
    is_asked: bool,
    ask_after: Duration,
}

impl Credit {
    pub(super) fn new(buffer_bytes: u32) -> Self {
        Self {
            buffer_bytes,
            fwd_cnt: Wrapping(0),
            fwd_cnt_told: Wrapping(0),
            sent_cnt: Wrapping(0),
            peer_fwd_cnt: Wrapping(0),
            peer_buf_alloc: 0,
            is_asked: false,
            ask_after: ASK_AFTER,
        }
    }

    pub(super) fn buffer_bytes(&self) -> u32 {
        self.buffer_bytes
    }

    /// The guest's free buffer space; zero if it claims to have consumed more than was sent.
    pub(super) fn free_bytes(&self) -> u32 {
        let Wrapping(in_flight) = self.sent_cnt - self.peer_fwd_cnt;
        self.peer_buf_alloc.saturating_sub(in_flight)
    }

    /// Takes what a packet of the guest says.
    pub(super) fn take(&mut self, header: &Header) {
        let had_none = self.free_bytes() == 0;
        self.peer_buf_alloc = header.buf_alloc;
        self.peer_fwd_cnt = Wrapping(header.fwd_cnt);
        if had_none && self.free_bytes() > 0 {
            // One that had space and said so only when it was asked is asked sooner from now on, until it reports some
            // by itself.
            self.ask_after = if self.is_asked { Duration::ZERO } else { ASK_AFTER };
        }
        if header.op == op::CREDIT_UPDATE {
            self.is_asked = false;
        }
    }

    pub(super) fn sent(&mut self, len_bytes: usize) {
        self.sent_cnt += Wrapping(u32::try_from(len_bytes).unwrap_or(0));
    }

    pub(super) fn forwarded(&mut self, len_bytes: usize) {
        self.fwd_cnt += Wrapping(u32::try_from(len_bytes).unwrap_or(0));
    }

    /// What to tell the guest of the device's own space, in a packet that it is given.
    pub(super) fn tell(&mut self) -> (u32, u32) {
        self.fwd_cnt_told = self.fwd_cnt;
        (self.buffer_bytes, self.fwd_cnt.0)
    }

    /// Whether the guest is to be told in any case. A guest that has used up its credit waits, and half of it lasts while
    /// the report is on its way; with each further report it is interrupted once more.
    pub(super) fn is_report_due(&self) -> bool {
        let Wrapping(untold) = self.fwd_cnt - self.fwd_cnt_told;
        // Linux has no more on its way than its own buffer holds, and does not ask.
        let most_bytes = self.buffer_bytes.min(self.peer_buf_alloc);
        untold >= (most_bytes / 2).max(1)
    }

    /// How long data wait until the guest is asked.
    pub(super) fn ask_after(&self) -> Duration {
        self.ask_after
    }

    /// Notes that the guest is asked.
    pub(super) fn ask(&mut self) {
        self.is_asked = true;
        self.ask_after = match self.ask_after {
            Duration::ZERO => ASK_AFTER,
            before => before.saturating_mul(2).min(ASK_AFTER_LONGEST),
        };
    }
}
