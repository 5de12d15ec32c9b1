// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The progress document: what `vm.migration-progress` and the report show of a migration.
//!
//! Owns its only definition, for writers, readers and the schema of the API, and the line that says how a
//! migration ended. Within version 1 fields are only added, and a reader ignores fields that it does not
//! know. Must never measure anything.

use std::fmt::{self, Write as _};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::fault::FaultSourceKind;
use crate::options::{Convergence, MemoryMode};

pub use crate::latency::LatencySnapshot;
pub use crate::phase::{GuestLocation, Phase, Side};

/// Version of the progress document and of the report. It is raised only when fields are removed or change
/// their meaning.
pub const DOCUMENT_VERSION: u32 = 1;

/// When memory is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationProgressMode)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// All memory is sent before the guest runs at the destination.
    Precopy,
    /// All memory is sent after the guest has started at the destination.
    Postcopy,
    /// Precopy first; if it does not converge, the rest is sent by postcopy.
    Auto,
    /// Memory is handed over as file descriptors on the same host.
    Local,
}

impl Mode {
    /// The mode that follows from the options.
    pub(crate) fn of(mode: MemoryMode, local: bool) -> Self {
        match mode {
            _ if local => Self::Local,
            MemoryMode::Precopy => Self::Precopy,
            MemoryMode::Postcopy => Self::Postcopy,
            MemoryMode::Auto => Self::Auto,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::Auto => "auto",
            Self::Local => "local",
        })
    }
}

/// The version of documents without a version field.
const fn first_version() -> u32 {
    DOCUMENT_VERSION
}

/// Progress of a migration as known to one side. Byte counts refer to guest memory. A value that this side
/// has not measured and the peer has not reported is null, never 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationProgress)]
pub struct ProgressDocument {
    /// Version of this document; within a version fields are only added.
    #[serde(default = "first_version")]
    pub version: u32,
    /// Side that reports.
    pub side: Side,
    /// Current phase.
    pub phase: Phase,
    /// When memory is sent; null until negotiated.
    pub mode: Option<Mode>,
    /// True once the guest runs at the destination before all of its memory is there.
    pub postcopy: bool,
    /// Time at which the source connected, in milliseconds since 1970; null before.
    pub began_unix_ms: Option<u64>,
    /// Milliseconds since then, up to the end of the migration.
    pub elapsed_ms: u64,
    /// Precopy round, from 1; 0 before the first.
    pub round: Option<u32>,
    /// Size of guest memory.
    pub total_bytes: Option<u64>,
    /// Remaining bytes: of this round in precopy, of all memory in postcopy.
    pub remaining_bytes: Option<u64>,
    /// Bytes of page contents sent, resent ones included.
    pub memory_bytes_sent: Option<u64>,
    /// Bytes of page contents received, resent ones included.
    pub memory_bytes_received: Option<u64>,
    /// Zero pages, whose contents were not sent.
    pub zero_pages: u64,
    /// Pages that the guest reported free, and that were not sent.
    pub free_pages: Option<u64>,
    /// Rate at which memory was sent in the last round.
    pub link_bytes_per_s: Option<u64>,
    /// Rate at which the guest dirtied memory in the last round.
    pub dirty_bytes_per_s: Option<u64>,
    /// Downtime in microseconds if the guest were stopped now: last pages, state, round trips, start.
    pub expected_downtime_us: Option<u64>,
    /// Measured downtime: from the stop until the source was told that the guest runs.
    pub downtime_us: Option<u64>,
    /// Allowed downtime; convergence=raise-downtime raises it.
    pub allowed_downtime_us: Option<u64>,
    /// How precopy is made to converge; known at the source.
    pub convergence: Option<Convergence>,
    /// Percentage of the time for which the vCPUs are throttled.
    pub throttle_percent: Option<u32>,
    /// Consecutive rounds that did not reduce the expected downtime.
    pub stalled_rounds: Option<u32>,
    /// Compression of memory.
    pub compression: CompressionSnapshot,
    /// Postcopy faults.
    pub faults: FaultSnapshot,
    /// Why the migration failed; null if it has not.
    pub error: Option<FailureReport>,
    /// Lost connections and recovery in postcopy.
    pub recovery: RecoverySnapshot,
    /// The page server, if one was requested; at the source only.
    pub page_server: Option<PageServerSnapshot>,
}

/// Lost connections and recovery in postcopy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationRecovery)]
pub struct RecoverySnapshot {
    /// How many times the connections were lost.
    pub losses: u32,
    /// How many times the connections were re-established.
    pub recoveries: u32,
    /// Reason for the last loss, or for the last failed attempt to reconnect.
    pub reason: Option<String>,
    /// Milliseconds for which the source will keep trying to reconnect by itself; null while connected.
    pub left_ms: Option<u64>,
}

/// Compression at the source, all connections together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationCompressed)]
pub struct CompressionSnapshot {
    /// Bytes of memory that were sent compressed.
    pub raw_bytes: u64,
    /// Size of that memory after compression.
    pub frame_bytes: u64,
    /// Connections that compress now, because that was measured to be faster.
    pub connections_on: u32,
    /// How many times a connection compared sending with and without compression, and chose one.
    pub decisions: u32,
}

/// Faults at a postcopy destination; reported to the source at the end of the migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationFaults)]
pub struct FaultSnapshot {
    /// Mechanism that catches the faults.
    pub source: Option<FaultSourceKind>,
    /// All reported faults.
    pub seen: Option<u64>,
    /// Faults that requested a page.
    pub requested: Option<u64>,
    /// Faults on pages that were requested already.
    pub merged: Option<u64>,
    /// Faults resolved without the peer: zero pages, and pages that had just arrived.
    pub local: Option<u64>,
    /// Requested pages that were in flight already.
    pub elsewhere: Option<u64>,
    /// Pages sent on request.
    pub urgent_pages: u64,
    /// Pages sent in the background.
    pub bulk_pages: u64,
    /// Pages sent along with requested ones, before the guest touched them.
    pub prefetched_pages: u64,
    /// Rate of background pages in the last second.
    pub bulk_bytes_per_s: u64,
    /// Rate of requested and prefetched pages in the last second.
    pub urgent_bytes_per_s: u64,
    /// Estimated milliseconds until the last page is transferred at these rates; null while no page is.
    pub remaining_ms: Option<u64>,
    /// Microseconds that all threads together waited for the peer.
    pub waited_us: Option<u64>,
    /// Latency of faults that waited for the peer, from their report to their end.
    pub latency_us: Option<LatencySnapshot>,
}

/// Why a migration failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationFailure)]
pub struct FailureReport {
    /// Side that reports.
    pub side: Side,
    /// Phase in which it failed.
    pub phase: Phase,
    /// Step in the phase, as a phrase after "while".
    pub step: String,
    /// Where the guest is now, as far as this side knows.
    pub guest: GuestLocation,
    /// True if the migration was cancelled on this side.
    pub cancelled: bool,
    /// Reasons, one sentence a layer, outermost first.
    pub chain: Vec<String>,
}

/// State of a page server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PageServerState {
    /// Waiting for the guest to be handed over.
    Ready,
    /// Sending the remaining pages.
    Serving,
    /// Did not take over; the VMM sends the remaining pages.
    Failed,
}

/// The separate process that sends the last pages of a postcopy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationPageServer)]
pub struct PageServerSnapshot {
    /// State of the page server.
    pub state: PageServerState,
    /// Path of the page server's API socket.
    pub socket: String,
    /// Process ID of the page server.
    pub pid: u32,
    /// Microseconds that taking over took.
    pub took_over_us: Option<u64>,
    /// Why the page server did not take over.
    pub reason: Option<String>,
}

impl ProgressDocument {
    /// Bytes of contents that were sent or received, as this side counted them.
    pub fn moved_bytes(&self) -> Option<u64> {
        match self.side {
            Side::Source => self.memory_bytes_sent,
            Side::Destination => self.memory_bytes_received,
        }
    }

    /// The final figures as name and value, without unknown ones, for events.
    pub fn final_figures(&self) -> Vec<(&'static str, String)> {
        let text = |value: Option<u64>| value.map(|value| value.to_string());
        let faults = text(self.faults.seen).filter(|_| self.postcopy);
        let all = [
            ("side", Some(self.side.to_string())),
            ("mode", self.mode.map(|mode| mode.to_string())),
            ("postcopy", Some(self.postcopy.to_string())),
            ("total_ms", text(self.began_unix_ms.map(|_| self.elapsed_ms))),
            ("downtime_us", text(self.downtime_us)),
            ("rounds", self.round.map(|round| round.to_string())),
            ("bytes", text(self.moved_bytes())),
            ("memory_bytes", text(self.total_bytes)),
            ("faults", faults),
            ("losses", Some(self.recovery.losses.to_string())),
            ("recoveries", Some(self.recovery.recoveries.to_string())),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }

    /// The final figures in one line, for the log.
    pub fn final_line(&self) -> String {
        let mut text = match (self.mode, self.postcopy) {
            (Some(Mode::Auto), true) => "auto, switched to postcopy".to_owned(),
            (Some(mode), _) => mode.to_string(),
            (None, _) => "in an unknown mode".to_owned(),
        };
        // Writing to a string cannot fail.
        let mut add = |part: fmt::Arguments<'_>| {
            let _ = write!(text, ", {part}");
        };
        add(format_args!("{} in all", Ms(self.elapsed_ms.saturating_mul(1000))));
        match self.downtime_us {
            Some(us) => add(format_args!("downtime {}", Ms(us))),
            None => add(format_args!("downtime unknown")),
        }
        if let Some(rounds) = self.round {
            add(format_args!("{rounds} {}", if rounds == 1 { "round" } else { "rounds" }));
        }
        if let (Some(moved), Some(all)) = (self.moved_bytes(), self.total_bytes) {
            add(format_args!("{} of memory moved for {}", Mib(moved), Mib(all)));
        }
        if let Some(faults) = self.faults.seen.filter(|_| self.postcopy) {
            add(format_args!("{faults} faults"));
        }
        if self.recovery.losses > 0 {
            let RecoverySnapshot { losses, recoveries, .. } = &self.recovery;
            add(format_args!(
                "connections lost {losses} times and re-established {recoveries} times"
            ));
        }
        text
    }
}

struct Ms(u64);

impl fmt::Display for Ms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} ms", self.0 / 1000, self.0 % 1000 / 100)
    }
}

struct Mib(u64);

impl fmt::Display for Mib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} MiB", self.0 >> 20, ((self.0 & 0xf_ffff) * 10) >> 20)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::Value;

    use super::*;
    use crate::history::{PhaseEntry, RoundBegin, Sample};
    use crate::latency::{LatencyBucket, ThreadLatency};
    use crate::page_server_status::Identity;
    use crate::{History, Progress};

    /// All fields of version 1. None of them may be removed or renamed.
    const FIELDS: &str = "\
        latency/0/below_us latency/0/count latency/0/from_us \
        phases/0/at_ms phases/0/phase \
        progress/allowed_downtime_us progress/began_unix_ms \
        progress/compression/connections_on progress/compression/decisions \
        progress/compression/frame_bytes progress/compression/raw_bytes \
        progress/convergence progress/dirty_bytes_per_s progress/downtime_us progress/elapsed_ms \
        progress/error/cancelled progress/error/chain/0 progress/error/guest progress/error/phase \
        progress/error/side progress/error/step progress/expected_downtime_us \
        progress/faults/bulk_bytes_per_s progress/faults/bulk_pages progress/faults/elsewhere \
        progress/faults/latency_us/count progress/faults/latency_us/max \
        progress/faults/latency_us/min progress/faults/latency_us/p50 \
        progress/faults/latency_us/p90 progress/faults/latency_us/p99 \
        progress/faults/latency_us/p999 progress/faults/local progress/faults/merged \
        progress/faults/prefetched_pages progress/faults/remaining_ms progress/faults/requested \
        progress/faults/seen progress/faults/source progress/faults/urgent_bytes_per_s \
        progress/faults/urgent_pages progress/faults/waited_us progress/free_pages \
        progress/link_bytes_per_s progress/memory_bytes_received progress/memory_bytes_sent \
        progress/mode progress/page_server/pid progress/page_server/reason \
        progress/page_server/socket progress/page_server/state progress/page_server/took_over_us \
        progress/phase progress/postcopy progress/recovery/left_ms progress/recovery/losses \
        progress/recovery/reason progress/recovery/recoveries progress/remaining_bytes \
        progress/round progress/side progress/stalled_rounds progress/throttle_percent \
        progress/total_bytes progress/version progress/zero_pages \
        rounds/0/at_ms rounds/0/dirty_bytes_per_s rounds/0/link_bytes_per_s \
        rounds/0/remaining_bytes rounds/0/round \
        threads/0/latency_us/count threads/0/latency_us/max threads/0/latency_us/min \
        threads/0/latency_us/p50 threads/0/latency_us/p90 threads/0/latency_us/p99 \
        threads/0/latency_us/p999 threads/0/name \
        timeline/0/at_ms timeline/0/faults timeline/0/moved_bytes timeline/0/remaining_bytes \
        timeline/0/urgent_pages";

    /// A report with at least one entry in each list.
    fn report() -> History {
        let progress = Progress::new(Side::Destination);
        progress.has_page_server(Identity { socket: "/s".to_owned(), pid: 7 });
        progress.fault_took(None, None, std::time::Duration::from_millis(1));
        let failure = FailureReport {
            side: Side::Destination,
            phase: Phase::Fault,
            step: "receiving pages".to_owned(),
            guest: GuestLocation::PostcopyPaused,
            cancelled: false,
            chain: vec!["no route".to_owned()],
        };
        progress.fail(Phase::Failed, failure);
        let progress = progress.snapshot();
        let latency_us = progress.faults.latency_us.unwrap();
        let (link_bytes_per_s, dirty_bytes_per_s) = (Some(1), Some(2));
        let round = RoundBegin {
            at_ms: 1,
            round: 1,
            remaining_bytes: 3,
            link_bytes_per_s,
            dirty_bytes_per_s,
        };
        History {
            progress,
            phases: vec![PhaseEntry { at_ms: 0, phase: Phase::Listen }],
            timeline: vec![Sample::default()],
            rounds: vec![round],
            latency: vec![LatencyBucket { from_us: 1, below_us: 2, count: 1 }],
            threads: vec![ThreadLatency { name: "vcpu0".to_owned(), latency_us }],
        }
    }

    fn fields(value: &Value, path: &str, out: &mut Vec<String>) {
        let join =
            |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}/{key}") };
        match value {
            Value::Object(map) => {
                map.iter().for_each(|(key, value)| fields(value, &join(key), out));
            }
            Value::Array(list) => {
                list.iter()
                    .enumerate()
                    .for_each(|(i, value)| fields(value, &join(&i.to_string()), out));
            }
            _ => out.push(path.to_owned()),
        }
    }

    #[test]
    fn the_fields_of_version_1_stay_and_are_read_back() {
        let report = report();
        let mut json = serde_json::to_value(&report).unwrap();
        let mut have = Vec::new();
        fields(&json, "", &mut have);
        for field in FIELDS.split_whitespace() {
            assert!(have.iter().any(|name| name == field), "{field} is gone from version 1");
        }
        assert_eq!(json["progress"]["version"], 1);
        // A later program with the same document version may add fields.
        json["progress"]["of_a_later_program"] = 1.into();
        assert_eq!(serde_json::from_value::<History>(json).unwrap(), report);
    }

    #[test]
    fn names_of_phases_are_the_same_as_text_and_in_json() {
        for phase in Phase::ALL {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.to_string());
        }
    }
}
