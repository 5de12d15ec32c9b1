// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The figures that the two sides of a migration exchange at its end, so that they outlive the process that
//! measured them.
//!
//! Owns the document that travels with the last messages, and figures that are unknown until they are
//! measured. A peer's figures are only shown: no decision depends on them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::document::ProgressDocument;
use crate::error::Side;
use crate::history::RoundBegin;
use crate::latency::LatencySnapshot;

/// A figure that is unknown at first. Set by one thread at a time.
#[derive(Debug)]
pub(crate) struct Known(AtomicU64);

/// The value of an unknown figure: no real figure is so large.
const UNKNOWN: u64 = u64::MAX;

impl Default for Known {
    fn default() -> Self {
        Self(AtomicU64::new(UNKNOWN))
    }
}

impl Known {
    pub(crate) fn set(&self, value: u64) {
        self.0.store(value.min(UNKNOWN - 1), Relaxed);
    }

    pub(crate) fn get(&self) -> Option<u64> {
        Some(self.0.load(Relaxed)).filter(|value| *value != UNKNOWN)
    }

    /// Subtracts `by`, if the figure is known.
    pub(crate) fn sub(&self, by: u64) {
        let less = |value: u64| (value != UNKNOWN).then(|| value.saturating_sub(by));
        let _ = self.0.fetch_update(Relaxed, Relaxed, less);
    }
}

/// The rate in bytes per second.
pub(crate) fn rate(bytes: u64, took: Duration) -> u64 {
    let micros = took.as_micros().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000 / micros).unwrap_or(u64::MAX)
}

/// The figures that one side sends to the other. A version leaves out and ignores fields that it does not
/// know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Figures {
    /// Source: how long the guest had been stopped when this was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_us: Option<u64>,
    /// Source: the shortest round trip.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub round_trip_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rounds: Option<u32>,
    /// Source: the last rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub course: Option<Vec<RoundBegin>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes_sent: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes_received: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_pages: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_bytes_per_s: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_bytes_per_s: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_downtime_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_downtime_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults_requested: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults_merged: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults_local: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults_elsewhere: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waited_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<LatencySnapshot>,
}

impl Figures {
    /// The figures that the side of a document has measured itself.
    pub(crate) fn of(own: &ProgressDocument) -> Self {
        let faults = &own.faults;
        match own.side {
            Side::Source => Self {
                rounds: own.round,
                memory_bytes_sent: own.memory_bytes_sent,
                free_pages: own.free_pages,
                link_bytes_per_s: own.link_bytes_per_s,
                dirty_bytes_per_s: own.dirty_bytes_per_s,
                expected_downtime_us: own.expected_downtime_us,
                allowed_downtime_us: own.allowed_downtime_us,
                ..Self::default()
            },
            Side::Destination => Self {
                memory_bytes_received: own.memory_bytes_received,
                faults: faults.seen,
                faults_requested: faults.requested,
                faults_merged: faults.merged,
                faults_local: faults.local,
                faults_elsewhere: faults.elsewhere,
                waited_us: faults.waited_us,
                latency_us: faults.latency_us,
                ..Self::default()
            },
        }
    }

    /// Since when the guest has been stopped, for a message that arrived at `at`; one round trip is
    /// included for the message and its answer.
    pub(crate) fn stopped(&self, at: Instant) -> Option<Instant> {
        let before_us = self.stopped_us?.saturating_add(self.round_trip_us?);
        at.checked_sub(Duration::from_micros(before_us))
    }

    /// Encodes it as JSON.
    pub(crate) fn to_json(&self) -> Vec<u8> {
        // Numbers under fixed names: serialising cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Parses the peer's figures; invalid ones are ignored, as they only serve for display.
    pub(crate) fn read(payload: &[u8]) -> Option<Self> {
        if payload.is_empty() {
            return None;
        }
        match serde_json::from_slice(payload) {
            Ok(figures) => Some(figures),
            Err(error) => {
                log::debug!("the figures of the peer cannot be read: {error}");
                None
            }
        }
    }

    /// Takes over newer figures; a field that is missing in `new` keeps its value.
    pub(crate) fn take(&mut self, new: &Self) {
        macro_rules! newer {
            ($($field:ident),*) => { Self { $($field: new.$field.clone().or(self.$field.take()),)* } };
        }
        *self = newer!(
            stopped_us,
            round_trip_us,
            rounds,
            course,
            memory_bytes_sent,
            memory_bytes_received,
            free_pages,
            link_bytes_per_s,
            dirty_bytes_per_s,
            expected_downtime_us,
            allowed_downtime_us,
            faults,
            faults_requested,
            faults_merged,
            faults_local,
            faults_elsewhere,
            waited_us,
            latency_us
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_none_and_never_zero() {
        let figure = Known::default();
        figure.sub(5);
        assert_eq!(figure.get(), None);
        figure.set(0);
        assert_eq!(figure.get(), Some(0));
        figure.set(u64::MAX);
        assert!(figure.get().is_some(), "a figure that is too large is still one");
    }

    #[test]
    fn what_a_peer_says_is_taken_or_ignored() {
        let told = Figures { rounds: Some(3), faults: Some(0), ..Figures::default() };
        assert_eq!(Figures::read(&told.to_json()), Some(told.clone()));
        assert_eq!(
            Figures::read(br#"{"rounds":3,"of a later version":[1]}"#).and_then(|f| f.rounds),
            Some(3)
        );
        for bad in [&b""[..], b"7", b"{", br#"{"rounds":-1}"#, b"\xff"] {
            assert_eq!(Figures::read(bad), None, "{bad:?}");
        }
        let mut known = told;
        known.take(&Figures { faults: Some(7), ..Figures::default() });
        assert_eq!((known.rounds, known.faults), (Some(3), Some(7)));
    }
}
