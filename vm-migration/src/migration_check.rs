// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The document that a check of a migration answers with.
//!
//! Owns its only definition, for writers, readers and the schema of the API. As in the progress document, fields are only
//! added within a version, and a reader ignores fields that it does not know. Must never measure anything.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::phase::Side;

/// Version of the document.
pub(crate) const CHECK_VERSION: u32 = 1;

/// What a migration of the VM would fail with, and what it would cost now. Nothing was moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationCheck {
    /// Version of this document.
    pub version: u32,
    /// No problem was found.
    pub possible: bool,
    /// Name and version of the destination's program; null if it was not reached.
    pub destination: Option<String>,
    /// What the migration would fail with.
    pub problems: Vec<CheckFinding>,
    /// What it would work without, at some cost.
    pub warnings: Vec<CheckFinding>,
    /// Rate of a transfer over one connection to the destination, which discarded it; null if it was not measured.
    pub link_bytes_per_second: Option<u64>,
    /// Shortest round trip; null if the destination was not reached.
    pub round_trip_us: Option<u64>,
    /// How much of its memory the guest writes in a second, each page counted once; null if it was not measured.
    pub dirty_bytes_per_second: Option<u64>,
    /// Memory that would be moved: what the host holds of it. Pages of zeros are among it, of which only a note is sent.
    pub memory_bytes: u64,
    /// What precopy is expected to take; null if that is not known.
    pub precopy: Option<MigrationForecast>,
    /// The same of postcopy; null also if the VM cannot be moved so.
    pub postcopy: Option<MigrationForecast>,
}

/// A problem or a warning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationCheckFinding)]
pub struct CheckFinding {
    /// The side that has found it.
    pub side: Side,
    /// What it is.
    pub text: String,
}

/// What a migration is expected to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationForecast {
    /// Until the last page has arrived, in milliseconds.
    pub duration_ms: u64,
    /// How long the guest would be stopped, in milliseconds. If precopy does not converge: if it were stopped nevertheless.
    pub downtime_ms: u64,
    /// Whether the allowed downtime would be reached, or all of memory that the guest writes would be sent before the stop.
    pub converges: bool,
}

impl CheckFinding {
    /// A finding of this side.
    pub fn new(side: Side, text: impl Into<String>) -> Self {
        Self { side, text: text.into() }
    }
}
