// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The history of a migration: its phases, samples over its duration, and how long faults waited.
//!
//! Owns the samples, a bounded number however long the migration takes: when the table is full, every second
//! sample is dropped and the interval doubles. A thread that moves pages must never wait for it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::document::ProgressDocument;
use crate::latency::{LatencyBucket, ThreadLatency};
use crate::phase::Phase;

/// Most samples. One is about as wide as a pixel of the chart.
const SAMPLES_MAX: usize = 1024;

/// Initial distance between two samples.
const EVERY_MS: u64 = 50;

/// Most phase changes that are kept: connections may be lost any number of times.
const PHASES_MAX: usize = 256;

/// A sample of a migration in progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationSample)]
pub struct Sample {
    /// Milliseconds since the first phase began.
    pub at_ms: u64,
    /// Remaining bytes; null if not known.
    pub remaining_bytes: Option<u64>,
    /// Bytes of page contents sent or received so far.
    pub moved_bytes: u64,
    /// Faults so far.
    pub faults: u64,
    /// Pages sent so far on request, or along with requested ones.
    pub urgent_pages: u64,
}

/// A phase and when it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationPhaseEntry)]
pub struct PhaseEntry {
    /// Milliseconds since the first phase began.
    pub at_ms: u64,
    /// The phase.
    pub phase: Phase,
}

/// Most rounds that are kept, the last ones: they are sent to the destination in one short message.
const ROUNDS_MAX: usize = 64;

/// The beginning of a round of precopy, with the rates of the previous round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationRound)]
pub struct RoundBegin {
    /// Milliseconds since the first phase began, at the source.
    pub at_ms: u64,
    /// Number of the round, from 1.
    pub round: u32,
    /// Bytes to send in the round.
    pub remaining_bytes: u64,
    /// Rate at which memory was sent in the previous round.
    pub link_bytes_per_s: Option<u64>,
    /// Rate at which the guest dirtied memory in the previous round.
    pub dirty_bytes_per_s: Option<u64>,
}

/// The report of a migration. It is complete when the phase in `progress` is a final one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationReport)]
pub struct History {
    /// The progress document.
    pub progress: ProgressDocument,
    /// Phases in order.
    pub phases: Vec<PhaseEntry>,
    /// Samples over the duration of the migration.
    pub timeline: Vec<Sample>,
    /// The last rounds of precopy; reported to the destination at the end of the migration.
    pub rounds: Vec<RoundBegin>,
    /// Distribution of fault latencies, of all threads.
    pub latency: Vec<LatencyBucket>,
    /// Fault latencies of each thread.
    pub threads: Vec<ThreadLatency>,
}

/// Phases, samples and rounds that are recorded during the migration.
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

    /// Records a sample if one is due, or if it is the last.
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
