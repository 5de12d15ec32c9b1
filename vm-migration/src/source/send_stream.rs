// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A connection as a stream of memory: its measured rate, and how much it may claim.
//!
//! Owns the rate of each connection, from round to round, and the messages whose answers are outstanding. A
//! connection is never given more than it carries in about [`HOLD`], so that a slow one (another path, a
//! lossy link) delays a round by no more than that.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::compression::{self, Encoding, PageCompressor};
use super::content::ranges;
use super::unit_space::{UNIT_BYTES, UNITS_MAX};
use crate::borders::Borders;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::layout::{PageRun, to_usize};
use crate::options::Compression;
use crate::progress::Progress;
use crate::protocol::message::Message;
use crate::ram::{self, GuestMemoryMap};
use crate::transport::Part;

/// Size up to which pages of several slices are collected into one message: scattered dirty pages do not
/// cost a message each.
const MESSAGE_BYTES: u64 = 1 << 20;

/// How long the data in flight on one connection may occupy it, in addition to the round trip.
const HOLD: Duration = Duration::from_millis(20);

/// Most unanswered messages on one connection: enough to keep the link busy, few enough that a refusal is
/// noticed soon.
const UNANSWERED_MAX: usize = 4;

/// Shorter messages measure the round trip rather than the rate.
const SAMPLE_BYTES_MIN: u64 = 64 << 10;

/// Measured rate of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PeerRate {
    /// 0 before the first measurement.
    bytes_per_s: u64,
}

impl PeerRate {
    /// Bytes that may be in flight.
    fn budget_bytes(self, round_trip: Duration) -> u64 {
        let hold_us = (HOLD + 4 * round_trip).as_micros();
        let bytes = u128::from(self.bytes_per_s) * hold_us / 1_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    fn sample(&mut self, bytes: u64, took: Duration) {
        if bytes < SAMPLE_BYTES_MIN && self.bytes_per_s != 0 {
            return;
        }
        let now = crate::figures::rate(bytes, took);
        self.bytes_per_s = if self.bytes_per_s == 0 { now } else { self.bytes_per_s / 2 + now / 2 };
    }
}

/// Measurements of a connection, kept from round to round.
#[derive(Debug)]
pub(crate) struct Record {
    pace: PeerRate,
    /// Set if compression is enabled.
    page_compressor: Option<PageCompressor>,
    /// Compression is in use.
    on: bool,
    /// The shortest time in which a message was answered.
    pub(crate) fastest_answer: Duration,
}

impl Record {
    /// A record without measurements.
    pub(crate) fn new(compression: Compression) -> Result<Self, Failure> {
        let page_compressor = match compression {
            Compression::None => None,
            Compression::Zstd => {
                let page_compressor = PageCompressor::new().map_err(Cause::Resource);
                Some(page_compressor.step("preparing to compress memory")?)
            }
        };
        Ok(Self {
            pace: PeerRate::default(),
            page_compressor,
            on: false,
            fastest_answer: Duration::MAX,
        })
    }
}

/// A connection in one round.
pub(crate) struct SendStream<'a> {
    channel: &'a mut Channel,
    record: &'a mut Record,
    round_trip: Duration,
    /// Number of connections in this round.
    streams: u64,
    /// Addresses that no range may have inside.
    borders: Option<&'a Borders>,
    /// Size and time of sending of unanswered messages.
    waiting: VecDeque<(u64, Instant)>,
    answered: Option<Instant>,
    /// When the trial of an encoding began.
    trial: Option<Instant>,
    progress: &'a Progress,
}

impl<'a> SendStream<'a> {
    pub(crate) fn new(
        channel: &'a mut Channel,
        record: &'a mut Record,
        round_trip: Duration,
        streams: u64,
        borders: Option<&'a Borders>,
        progress: &'a Progress,
    ) -> Self {
        if let Some(page_compressor) = &mut record.page_compressor {
            page_compressor.choice.interrupted();
        }
        let (waiting, answered) = (VecDeque::with_capacity(UNANSWERED_MAX), None);
        let trial = None;
        Self { channel, record, round_trip, streams, borders, waiting, answered, trial, progress }
    }

    /// How many units to claim when `left` are left for all streams: ever fewer towards the end.
    pub(crate) fn claim_units(&self, left: u64) -> u64 {
        if self.streams == 1 {
            return UNITS_MAX;
        }
        let by_pace = self.record.pace.budget_bytes(self.round_trip) / 2 / UNIT_BYTES;
        by_pace.min(left / (2 * self.streams)).clamp(1, UNITS_MAX)
    }

    /// How many bytes of several slices may be collected into one message.
    pub(crate) fn message_bytes(&self) -> u64 {
        if self.streams == 1 {
            return MESSAGE_BYTES;
        }
        (self.record.pace.budget_bytes(self.round_trip) / 2).clamp(UNIT_BYTES, MESSAGE_BYTES)
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
        self.streams > 1 && under_way > self.record.pace.budget_bytes(self.round_trip)
    }

    /// Waits for all answers.
    pub(crate) fn wait_for_answers(&mut self) -> Result<(), Failure> {
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
            self.record.pace.sample(bytes, now.duration_since(since));
            let answer = now.duration_since(sent);
            self.record.fastest_answer = self.record.fastest_answer.min(answer);
        }
        self.answered = Some(now);
        Ok(())
    }

    /// Sends a message without contents.
    pub(crate) fn send(&mut self, message: &Message) -> Result<(), Failure> {
        self.send_parts(&[Part::Bytes(&message.encode())], 0)
    }

    /// Sends memory contents, compressed or not.
    pub(crate) fn send_memory<M: GuestMemoryMap>(
        &mut self,
        memory: &M,
        data: &[PageRun],
    ) -> Result<(), Failure> {
        let Some(choice) =
            self.record.page_compressor.as_ref().map(|page_compressor| &page_compressor.choice)
        else {
            return self.send_plain(memory, data);
        };
        if choice.begins_trial() {
            self.wait_for_answers()?;
            self.trial = Some(Instant::now());
        }
        let encoding = self
            .record
            .page_compressor
            .as_ref()
            .map(|page_compressor| page_compressor.choice.encoding());
        if encoding == Some(Encoding::Zstd) {
            for piece in compression::pieces(data) {
                self.send_squeezed(memory, &piece)?;
            }
        } else {
            self.send_plain(memory, data)?;
        }
        let bytes = data.iter().map(PageRun::len_bytes).sum();
        let ends = self
            .record
            .page_compressor
            .as_mut()
            .is_some_and(|page_compressor| page_compressor.choice.sent(bytes));
        if ends {
            self.wait_for_answers()?;
            let took = self.trial.take().map(|began| began.elapsed()).unwrap_or_default();
            let page_compressor = self.record.page_compressor.as_mut();
            if let Some(now) =
                page_compressor.and_then(|page_compressor| page_compressor.choice.trial_took(took))
            {
                let on = now == Encoding::Zstd;
                self.progress.compression_is(std::mem::replace(&mut self.record.on, on), on);
            }
        }
        Ok(())
    }

    fn send_plain<M: GuestMemoryMap>(
        &mut self,
        memory: &M,
        data: &[PageRun],
    ) -> Result<(), Failure> {
        let head = Message::Memory(ranges(memory, data, self.borders)).encode();
        let mut parts = Vec::with_capacity(1 + data.len());
        parts.push(Part::Bytes(&head));
        parts.extend(data.iter().map(|run| Part::Guest(ram::slice(memory, *run))));
        self.send_parts(&parts, data.iter().map(PageRun::len_bytes).sum())
    }

    /// Sends zeros as the contents of pages, without reading them.
    pub(crate) fn send_blank<M: GuestMemoryMap>(
        &mut self,
        memory: &M,
        blank: &[PageRun],
    ) -> Result<(), Failure> {
        const ZEROS: &[u8] = &[0; 64 << 10];
        let head = Message::Memory(ranges(memory, blank, self.borders)).encode();
        let mut parts = vec![Part::Bytes(&head)];
        for run in blank {
            let mut left = to_usize(run.len_bytes());
            while left > 0 {
                let part = left.min(ZEROS.len());
                parts.push(Part::Bytes(&ZEROS[..part]));
                left -= part;
            }
        }
        self.send_parts(&parts, blank.iter().map(PageRun::len_bytes).sum())
    }

    fn send_squeezed<M: GuestMemoryMap>(
        &mut self,
        memory: &M,
        data: &[PageRun],
    ) -> Result<(), Failure> {
        const STEP: &str = "compressing memory";
        // Moved out while in use, because sending borrows the whole stream.
        let Some(mut page_compressor) = self.record.page_compressor.take() else {
            return self.send_plain(memory, data);
        };
        let frame = page_compressor.frame(memory, data).map_err(Cause::Resource).step(STEP);
        let sent = match frame {
            Err(failure) => Err(failure),
            Ok(None) => self.send_plain(memory, data),
            Ok(Some(frame)) => {
                let raw_bytes = data.iter().map(PageRun::len_bytes).sum();
                self.progress.compressed(raw_bytes, frame.len() as u64);
                // Fits, because a frame is shorter than its contents.
                let frame_bytes = u32::try_from(frame.len()).unwrap_or(u32::MAX);
                let ranges = ranges(memory, data, self.borders);
                let head = Message::MemoryZstd { ranges, frame_bytes }.encode();
                self.send_parts(&[Part::Bytes(&head), Part::Bytes(frame)], raw_bytes)
            }
        };
        self.record.page_compressor = Some(page_compressor);
        sent
    }

    fn send_parts(&mut self, parts: &[Part<'_>], memory_bytes: u64) -> Result<(), Failure> {
        self.make_room()?;
        self.waiting.push_back((memory_bytes, Instant::now()));
        let sent = self.channel.connection.send_parts(parts);
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
            let mut pace = PeerRate::default();
            pace.sample(bytes_per_s, 1000 * MS);
            let budget = pace.budget_bytes(Duration::ZERO);
            assert_eq!(budget, bytes_per_s / 50, "20 ms worth");
        }
    }

    #[test]
    fn a_long_way_does_not_look_like_a_slow_one_for_ever() {
        // A link of 1 GB/s with a round trip of 50 ms: each message takes 50 ms and the time for its bytes.
        let mut pace = PeerRate::default();
        let mut claimed = UNIT_BYTES;
        for _ in 0..8 {
            pace.sample(claimed, 50 * MS + Duration::from_micros(claimed / 1000));
            claimed = (pace.budget_bytes(50 * MS) / 2).clamp(UNIT_BYTES, UNITS_MAX * UNIT_BYTES);
        }
        assert_eq!(claimed, UNITS_MAX * UNIT_BYTES);
    }

    #[test]
    fn short_messages_do_not_spoil_the_measure() {
        let mut pace = PeerRate::default();
        pace.sample(1 << 20, MS);
        let before = pace.bytes_per_s;
        pace.sample(4096, 50 * MS);
        assert_eq!(pace.bytes_per_s, before);
    }
}
