// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A connection as a carrier of memory: how fast it has been, and so how much it may take on.
//!
//! Owns the pace of each connection, from round to round, and the messages that wait for their
//! answers. A connection is never given more than it carries in about [`HOLD`], so that one that
//! is slow (another path, a lossy link) holds a round up by that and no more.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::channel::Channel;
use crate::error::{Failure, Step};
use crate::layout::{PAGE_BYTES, PageRun};
use crate::protocol::message::Message;
use crate::ram::{self, GuestMemoryMap};
use crate::transport::Part;

/// Least that is claimed at once: 64 pages, the grain of the kernel's dirty logs.
pub(crate) const UNIT_PAGES: u64 = 64;

/// Most units that are claimed at once. Their dirty bits are cleared by one call and their
/// contents are one message: at a gigabyte a second a page waits 4 ms between the two.
pub(crate) const UNITS_MAX: u64 = 16;

/// Bytes of a unit.
const UNIT_BYTES: u64 = UNIT_PAGES * PAGE_BYTES;

/// Pages of several slices go in one message until they are this many bytes: a guest that dirties
/// a page here and there costs no message for each.
const MESSAGE_BYTES: u64 = 1 << 20;

/// How long what one connection has taken on may occupy it, beside the round trip.
const HOLD: Duration = Duration::from_millis(20);

/// Messages on one connection that may wait for their answers: enough to never let the link idle,
/// few enough that a refusal is noticed soon.
const UNANSWERED_MAX: usize = 4;

/// Messages shorter than this say more about the round trip than about the rate.
const SAMPLE_BYTES_MIN: u64 = 64 << 10;

/// How fast a connection has been.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// 0 before anything was measured.
    bytes_per_s: u64,
}

impl Pace {
    /// Bytes that may be under way.
    fn budget_bytes(self, round_trip: Duration) -> u64 {
        let hold_us = (HOLD + 4 * round_trip).as_micros();
        let bytes = u128::from(self.bytes_per_s) * hold_us / 1_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    fn sample(&mut self, bytes: u64, took: Duration) {
        if bytes < SAMPLE_BYTES_MIN && self.bytes_per_s != 0 {
            return;
        }
        let now = super::convergence::rate(bytes, took);
        self.bytes_per_s = if self.bytes_per_s == 0 { now } else { self.bytes_per_s / 2 + now / 2 };
    }
}

/// One connection in one round.
pub(crate) struct Lane<'a> {
    pub channel: &'a mut Channel,
    pace: &'a mut Pace,
    round_trip: Duration,
    /// Connections of this round.
    lanes: u64,
    /// Bytes and time of messages without an answer.
    waiting: VecDeque<(u64, Instant)>,
    answered: Option<Instant>,
}

impl<'a> Lane<'a> {
    pub(crate) fn new(
        channel: &'a mut Channel,
        pace: &'a mut Pace,
        round_trip: Duration,
        lanes: u64,
    ) -> Self {
        let waiting = VecDeque::with_capacity(UNANSWERED_MAX);
        Self { channel, pace, round_trip, lanes, waiting, answered: None }
    }

    /// How many units to claim when `left` are left for all: ever fewer towards the end.
    pub(crate) fn claim_units(&self, left: u64) -> u64 {
        if self.lanes == 1 {
            return UNITS_MAX;
        }
        let by_pace = self.pace.budget_bytes(self.round_trip) / 2 / UNIT_BYTES;
        by_pace.min(left / (2 * self.lanes)).clamp(1, UNITS_MAX)
    }

    /// How many bytes of several slices may come together in one message.
    pub(crate) fn message_bytes(&self) -> u64 {
        if self.lanes == 1 {
            return MESSAGE_BYTES;
        }
        (self.pace.budget_bytes(self.round_trip) / 2).clamp(UNIT_BYTES, MESSAGE_BYTES)
    }

    /// Waits until another message may be sent.
    pub(crate) fn make_room(&mut self) -> Result<(), Failure> {
        while self.is_full() {
            self.take_answer()?;
        }
        Ok(())
    }

    fn is_full(&self) -> bool {
        if self.waiting.len() >= UNANSWERED_MAX {
            return true;
        }
        let under_way: u64 = self.waiting.iter().map(|(bytes, _)| bytes).sum();
        self.lanes > 1 && under_way > self.pace.budget_bytes(self.round_trip)
    }

    /// Waits for all answers.
    pub(crate) fn settle(&mut self) -> Result<(), Failure> {
        while !self.waiting.is_empty() {
            self.take_answer()?;
        }
        Ok(())
    }

    fn take_answer(&mut self) -> Result<(), Failure> {
        let limit = self.channel.connection.stall_timeout();
        self.channel.answer(limit).step("waiting for memory to be acknowledged")?;
        let now = Instant::now();
        if let Some((bytes, sent)) = self.waiting.pop_front() {
            let since = self.answered.map_or(sent, |answered| answered.max(sent));
            self.pace.sample(bytes, now.duration_since(since));
        }
        self.answered = Some(now);
        Ok(())
    }

    /// Sends a message and the contents of `data` behind it.
    pub(crate) fn send<M: GuestMemoryMap>(
        &mut self,
        memory: &M,
        message: &Message,
        data: &[PageRun],
    ) -> Result<(), Failure> {
        self.make_room()?;
        let head = message.encode();
        let mut parts = Vec::with_capacity(1 + data.len());
        parts.push(Part::Bytes(&head));
        parts.extend(data.iter().map(|run| Part::Guest(ram::slice(memory, *run))));
        let bytes = data.iter().map(PageRun::len_bytes).sum();
        self.waiting.push_back((bytes, Instant::now()));
        let sent = self.channel.connection.send_parts(&parts);
        sent.map_err(|error| self.channel.explain(error)).step("sending memory")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn what_is_under_way_takes_about_as_long_on_any_connection() {
        for bytes_per_s in [1_u64 << 20, 10 << 20, 100 << 20, 1 << 30] {
            let mut pace = Pace::default();
            pace.sample(bytes_per_s, 1000 * MS);
            let budget = pace.budget_bytes(Duration::ZERO);
            assert_eq!(budget, bytes_per_s / 50, "20 ms worth");
        }
    }

    #[test]
    fn a_long_way_does_not_look_like_a_slow_one_for_ever() {
        // A link of 1 GB/s with a round trip of 50 ms: each message takes 50 ms and its bytes.
        let mut pace = Pace::default();
        let mut claimed = UNIT_BYTES;
        for _ in 0..8 {
            pace.sample(claimed, 50 * MS + Duration::from_micros(claimed / 1000));
            claimed = (pace.budget_bytes(50 * MS) / 2).clamp(UNIT_BYTES, UNITS_MAX * UNIT_BYTES);
        }
        assert_eq!(claimed, UNITS_MAX * UNIT_BYTES);
    }

    #[test]
    fn short_messages_do_not_spoil_the_measure() {
        let mut pace = Pace::default();
        pace.sample(1 << 20, MS);
        let before = pace.bytes_per_s;
        pace.sample(4096, 50 * MS);
        assert_eq!(pace.bytes_per_s, before);
    }
}
