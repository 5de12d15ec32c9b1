// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Compression of bulk memory on one connection, where it increases the rate.
//!
//! Owns the decision, and the buffers. Both encodings are tried on a few megabytes each and timed from the
//! first byte to the last answer: what counts is how much memory arrives per second, whatever limits it
//! (the link, this processor, the peer's). The better encoding is kept, and now and then both are tried
//! again. Guest memory is copied before it is compressed: the guest may write meanwhile, and the
//! compressor must not see that.

use std::io;
use std::time::Duration;

use zstd::bulk::Compressor;

use crate::figures::rate;
use crate::layout::{PageRun, to_usize};
use crate::ram::{self, GuestMemoryMap};

/// Most bytes of memory in one frame.
pub(crate) const FRAME_RAW_BYTES: u64 = 1 << 20;

/// Compression level: the fastest of zstd's regular ones.
const LEVEL: i32 = 1;

/// Bytes of memory with which one encoding is tried.
const TRIAL_BYTES: u64 = 4 << 20;

/// Bytes of memory after which both encodings are tried again, initially.
const AGAIN_BYTES_MIN: u64 = 128 << 20;

/// The upper limit of that: it doubles each time that the outcome is the same.
const AGAIN_BYTES_MAX: u64 = 4 << 30;

/// Factor in percent by which compression must be faster, as it costs processor time of the host.
const PAYS_PERCENT: u64 = 110;

/// A frame longer than this percentage of its contents is sent uncompressed.
const FRAME_PERCENT_MAX: usize = 90;

/// Encoding of a message of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    Plain,
    Zstd,
}

/// Chooses the faster encoding by trying both.
#[derive(Debug)]
pub(crate) struct EncodingChoice {
    state: State,
    /// Bytes of memory for which the last decision holds.
    again_bytes: u64,
    chosen: Option<Encoding>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// An encoding is being tried; with the memory sent in the trial so far.
    Trial { encoding: Encoding, sent_bytes: u64, plain_rate: u64 },
    /// The chosen encoding is used for this many more bytes.
    Settled { left_bytes: u64 },
}

const FIRST_TRIAL: State = State::Trial { encoding: Encoding::Plain, sent_bytes: 0, plain_rate: 0 };

impl EncodingChoice {
    pub(crate) fn new() -> Self {
        Self { state: FIRST_TRIAL, again_bytes: AGAIN_BYTES_MIN, chosen: None }
    }

    /// The encoding for the next message.
    pub(crate) fn encoding(&self) -> Encoding {
        match self.state {
            State::Trial { encoding, .. } => encoding,
            State::Settled { .. } => self.chosen.unwrap_or(Encoding::Plain),
        }
    }

    /// True when a trial is about to begin: no message may be in flight then.
    pub(crate) fn begins_trial(&self) -> bool {
        matches!(self.state, State::Trial { sent_bytes: 0, .. })
    }

    /// Counts memory that was sent; true when that ends a trial: the caller then waits for all answers and
    /// calls [`trial_took`](Self::trial_took).
    pub(crate) fn sent(&mut self, bytes: u64) -> bool {
        match &mut self.state {
            State::Trial { sent_bytes, .. } => {
                *sent_bytes += bytes;
                *sent_bytes >= TRIAL_BYTES
            }
            State::Settled { left_bytes } => {
                *left_bytes = left_bytes.saturating_sub(bytes);
                if *left_bytes == 0 {
                    self.state = FIRST_TRIAL;
                }
                false
            }
        }
    }

    /// Ends a trial. Returns the chosen encoding if this trial decides.
    pub(crate) fn trial_took(&mut self, took: Duration) -> Option<Encoding> {
        let State::Trial { encoding, sent_bytes, plain_rate } = self.state else { return None };
        let now = rate(sent_bytes, took);
        if encoding == Encoding::Plain {
            self.state = State::Trial { encoding: Encoding::Zstd, sent_bytes: 0, plain_rate: now };
            return None;
        }
        let pays = u128::from(now) * 100 >= u128::from(plain_rate) * u128::from(PAYS_PERCENT);
        let encoding = if pays { Encoding::Zstd } else { Encoding::Plain };
        self.again_bytes = if self.chosen == Some(encoding) {
            (self.again_bytes * 2).min(AGAIN_BYTES_MAX)
        } else {
            AGAIN_BYTES_MIN
        };
        self.chosen = Some(encoding);
        self.state = State::Settled { left_bytes: self.again_bytes };
        Some(encoding)
    }

    /// Restarts a trial that the end of a round has interrupted.
    pub(crate) fn interrupted(&mut self) {
        if let State::Trial { sent_bytes, .. } = &mut self.state {
            *sent_bytes = 0;
        }
    }
}

/// The compressor of one connection.
pub(crate) struct PageCompressor {
    pub choice: EncodingChoice,
    compressor: Compressor<'static>,
    raw: Vec<u8>,
    frame: Vec<u8>,
}

impl std::fmt::Debug for PageCompressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageCompressor").field("choice", &self.choice).finish_non_exhaustive()
    }
}

impl PageCompressor {
    pub(crate) fn new() -> io::Result<Self> {
        let compressor = Compressor::new(LEVEL)?;
        Ok(Self { choice: EncodingChoice::new(), compressor, raw: Vec::new(), frame: Vec::new() })
    }

    /// Compresses the contents of `runs`, at most [`FRAME_RAW_BYTES`]; `None` when that is not worth it.
    pub(crate) fn frame<M: GuestMemoryMap>(
        &mut self,
        memory: &M,
        runs: &[PageRun],
    ) -> io::Result<Option<&[u8]>> {
        self.raw.clear();
        for run in runs {
            ram::slice(memory, *run).append_to(&mut self.raw);
        }
        self.frame.clear();
        self.frame.reserve(zstd::zstd_safe::compress_bound(self.raw.len()));
        let frame_len = self.compressor.compress_to_buffer(&self.raw, &mut self.frame)?;
        let worth_it = frame_len * 100 <= self.raw.len() * FRAME_PERCENT_MAX;
        Ok(worth_it.then_some(&self.frame[..]))
    }
}

/// Cuts runs into pieces of at most [`FRAME_RAW_BYTES`].
pub(crate) fn pieces(runs: &[PageRun]) -> Vec<Vec<PageRun>> {
    let pages_max = FRAME_RAW_BYTES / crate::layout::PAGE_BYTES;
    let mut all = Vec::with_capacity(to_usize(
        runs.iter().map(|run| run.count).sum::<u64>().div_ceil(pages_max),
    ));
    let (mut piece, mut pages) = (Vec::new(), 0);
    for run in runs {
        let mut first = run.first;
        while first < run.end() {
            let count = (run.end() - first).min(pages_max - pages);
            piece.push(PageRun { region: run.region, first, count });
            (first, pages) = (first + count, pages + count);
            if pages == pages_max {
                all.push(std::mem::take(&mut piece));
                pages = 0;
            }
        }
    }
    if !piece.is_empty() {
        all.push(piece);
    }
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Sends until the next decision, with these durations for the two trials; returns the decision and
    /// the bytes sent outside of trials before it.
    fn decide(choice: &mut EncodingChoice, plain: Duration, zstd: Duration) -> (Encoding, u64) {
        let mut settled = 0;
        loop {
            let trial = matches!(choice.state, State::Trial { .. });
            let encoding = choice.encoding();
            if !choice.sent(1 << 20) {
                settled += if trial { 0 } else { 1 << 20 };
                continue;
            }
            let took = if encoding == Encoding::Plain { plain } else { zstd };
            if let Some(encoding) = choice.trial_took(took) {
                return (encoding, settled);
            }
        }
    }

    #[test]
    fn the_way_that_carries_more_is_chosen_and_tried_again() {
        let mut choice = EncodingChoice::new();
        assert_eq!((choice.encoding(), choice.begins_trial()), (Encoding::Plain, true));
        assert_eq!(decide(&mut choice, 100 * MS, 40 * MS), (Encoding::Zstd, 0));
        assert_eq!(choice.encoding(), Encoding::Zstd);
        // The link has become faster meanwhile: compression is switched off.
        assert_eq!(decide(&mut choice, 10 * MS, 40 * MS), (Encoding::Plain, AGAIN_BYTES_MIN));
        assert_eq!(choice.encoding(), Encoding::Plain);
        // A small improvement does not count.
        assert_eq!(decide(&mut choice, 44 * MS, 41 * MS), (Encoding::Plain, AGAIN_BYTES_MIN));
        // The same outcome holds longer each time.
        assert_eq!(decide(&mut choice, 10 * MS, 40 * MS), (Encoding::Plain, 2 * AGAIN_BYTES_MIN));
        assert_eq!(decide(&mut choice, 90 * MS, 40 * MS), (Encoding::Zstd, 4 * AGAIN_BYTES_MIN));
        assert_eq!(decide(&mut choice, 90 * MS, 40 * MS), (Encoding::Zstd, AGAIN_BYTES_MIN));
    }

    #[test]
    fn a_trial_that_is_interrupted_begins_anew() {
        let mut choice = EncodingChoice::new();
        assert!(!choice.sent(TRIAL_BYTES - 1));
        assert!(!choice.begins_trial());
        choice.interrupted();
        assert!(choice.begins_trial());
    }

    proptest! {
        #[test]
        fn pieces_hold_everything_in_order(
            counts in prop::collection::vec((0usize..3, 1u64..700), 0..12),
        ) {
            let mut first = 0;
            let runs: Vec<PageRun> = counts.iter().map(|(region, count)| {
                first += count + 1;
                PageRun { region: *region, first, count: *count }
            }).collect();
            let pages = |runs: &[PageRun]| -> Vec<(usize, u64)> {
                runs.iter().flat_map(|r| (r.first..r.end()).map(|page| (r.region, page))).collect()
            };
            let pieces = pieces(&runs);
            for piece in &pieces {
                let bytes: u64 = piece.iter().map(PageRun::len_bytes).sum();
                prop_assert!((1..=FRAME_RAW_BYTES).contains(&bytes));
            }
            prop_assert_eq!(pages(&pieces.concat()), pages(&runs));
        }
    }
}
