// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The history of a migration: its phases, samples over its duration, and how long faults waited.
//!
//! Owns the samples, a bounded number however long the migration takes: when the table is full, every second
//! sample is dropped and the interval doubles. A thread that moves pages must never wait for it.

use serde::{Deserialize, Serialize};

use crate::latency::{LatencyBucket, ThreadLatency};
use crate::progress::{Phase, Snapshot};

/// Most samples. One is about as wide as a point on a screen.
const SAMPLES_MAX: usize = 1024;

/// Distance between two samples at the beginning.
const EVERY_MS: u64 = 50;

/// Most changes of the phase that are kept: connections may be lost any number of times.
const PHASES_MAX: usize = 256;

/// A moment of the migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sample {
    /// Since the first phase began.
    pub at_ms: u64,
    /// Still to come or to go, where that is known.
    pub remaining_bytes: Option<u64>,
    /// Contents that came or went so far, each time counted.
    pub moved_bytes: u64,
    /// Faults so far.
    pub faults: u64,
    /// Pages so far that came or went on request, or along with such.
    pub urgent_pages: u64,
}

/// A phase and when it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PhaseEntry {
    /// Since the first phase began.
    pub at_ms: u64,
    /// The phase.
    pub phase: Phase,
}

/// Most rounds that are kept, the last ones: they travel to the destination in one short message.
const ROUNDS_MAX: usize = 64;

/// The begin of a round of precopy, and what the one before it has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundBegin {
    /// Since the first phase began, at the source.
    pub at_ms: u64,
    /// Its number, from 1.
    pub round: u32,
    /// What it has to send.
    pub remaining_bytes: u64,
    /// The rate of the round before.
    pub link_bytes_per_s: Option<u64>,
    /// How fast the guest wrote meanwhile.
    pub dirty_bytes_per_s: Option<u64>,
}

/// The report of a migration. It is complete once the phase in `progress` is a last one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct History {
    /// The progress document.
    pub progress: Snapshot,
    /// Phases in order.
    pub phases: Vec<PhaseEntry>,
    /// The course in time.
    pub timeline: Vec<Sample>,
    /// The last rounds of precopy; a destination is told of them at the end.
    pub rounds: Vec<RoundBegin>,
    /// How long faults waited for the peer, all threads together.
    pub latency: Vec<LatencyBucket>,
    /// The same for each thread.
    pub threads: Vec<ThreadLatency>,
}

/// What is noted while it is in progress.
#[derive(Debug)]
pub(crate) struct Timeline {
    phases: Vec<PhaseEntry>,
    samples: Vec<Sample>,
    rounds: Vec<RoundBegin>,
    every_ms: u64,
}

impl Timeline {
    pub(crate) const fn new() -> Self {
        Self { phases: Vec::new(), samples: Vec::new(), rounds: Vec::new(), every_ms: EVERY_MS }
    }

    pub(crate) fn enter(&mut self, entry: PhaseEntry) {
        if self.phases.len() < PHASES_MAX {
            self.phases.push(entry);
        }
    }

    /// Takes a sample if it is time for one, or it is the last.
    pub(crate) fn sample(&mut self, sample: Sample, is_last: bool) {
        let due = self.samples.last().is_none_or(|last| sample.at_ms >= last.at_ms + self.every_ms);
        if !due && !is_last {
            return;
        }
        if self.samples.len() >= SAMPLES_MAX {
            let mut keep = false;
            self.samples.retain(|_| {
                keep = !keep;
                keep
            });
            self.every_ms = self.every_ms.saturating_mul(2);
        }
        self.samples.push(sample);
    }

    pub(crate) fn begin_round(&mut self, round: RoundBegin) {
        if self.rounds.len() >= ROUNDS_MAX {
            self.rounds.remove(0);
        }
        self.rounds.push(round);
    }

    pub(crate) fn rounds(&self) -> Vec<RoundBegin> {
        self.rounds.clone()
    }

    pub(crate) fn phases(&self) -> Vec<PhaseEntry> {
        self.phases.clone()
    }

    pub(crate) fn samples(&self) -> Vec<Sample> {
        self.samples.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_migration_keeps_its_beginning_its_end_and_few_samples() {
        let mut course = Timeline::new();
        for at_ms in 0..2_000_000 {
            course.sample(Sample { at_ms, ..Sample::default() }, false);
        }
        course.sample(Sample { at_ms: 2_000_000, ..Sample::default() }, true);
        let samples = course.samples();
        assert!((SAMPLES_MAX / 2..=SAMPLES_MAX).contains(&samples.len()), "{}", samples.len());
        assert_eq!(samples.first().map(|sample| sample.at_ms), Some(0));
        assert_eq!(samples.last().map(|sample| sample.at_ms), Some(2_000_000));
        assert!(samples.is_sorted_by_key(|sample| sample.at_ms));
    }

    #[test]
    fn the_last_rounds_are_kept() {
        let mut course = Timeline::new();
        for round in 1..=200 {
            let (link_bytes_per_s, dirty_bytes_per_s) = (Some(u64::MAX - 1), Some(u64::MAX - 1));
            let at_ms = u64::from(u32::MAX);
            let begin = RoundBegin {
                at_ms,
                round,
                remaining_bytes: u64::MAX,
                link_bytes_per_s,
                dirty_bytes_per_s,
            };
            course.begin_round(begin);
        }
        let rounds = course.rounds();
        assert_eq!((rounds.len(), rounds.last().map(|round| round.round)), (ROUNDS_MAX, Some(200)));
        let figures = crate::figures::Figures { course: Some(rounds), ..Default::default() };
        let bytes = figures.to_json().len() as u64;
        assert!(bytes < crate::protocol::codec::FIGURES_BYTES_MAX, "{bytes}");
    }

    #[test]
    fn samples_that_come_too_soon_are_left_out_but_the_last() {
        let mut course = Timeline::new();
        for (at_ms, is_last) in [(0, false), (10, false), (60, false), (70, true)] {
            course.sample(Sample { at_ms, ..Sample::default() }, is_last);
        }
        let times: Vec<u64> = course.samples().iter().map(|sample| sample.at_ms).collect();
        assert_eq!(times, [0, 60, 70]);
    }
}
