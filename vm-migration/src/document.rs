// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The progress document: what `vm.migration-progress` and the report show of a migration.
//!
//! Owns its form, and the line that says how a migration ended. It must never measure anything.

use std::fmt::{self, Write as _};

use serde::{Deserialize, Serialize};

use crate::error::Side;
use crate::fault::FaultSourceKind;
use crate::latency::LatencySnapshot;
use crate::options::{Convergence, MemoryMode};
use crate::page_server::PageServerSnapshot;
use crate::progress::Phase;
use crate::report::FailureReport;

/// How memory travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// All of it before the guest.
    Precopy,
    /// All of it after the guest.
    Postcopy,
    /// Before the guest, and if that does not get done, after it.
    Auto,
    /// Handed over as file descriptors.
    Local,
}

impl Mode {
    /// Of what was asked for.
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

/// The progress document. Bytes are of guest memory; rates are measured, not wished. What this side
/// does not know, and has not been told by the other, is null and never 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Whose.
    pub side: Side,
    /// The phase now.
    pub phase: Phase,
    /// How memory travels.
    pub mode: Option<Mode>,
    /// The guest went before all of its memory.
    pub postcopy: bool,
    /// When the source connected, in milliseconds since 1970; none while it has not.
    pub began_unix_ms: Option<u64>,
    /// Since then, until the last phase ended.
    pub elapsed_ms: u64,
    /// Precopy round, from 1; 0 before the first.
    pub round: Option<u32>,
    /// All guest memory.
    pub total_bytes: Option<u64>,
    /// Still to go in this round (precopy) or at all (postcopy).
    pub remaining_bytes: Option<u64>,
    /// Contents sent, each time counted.
    pub memory_bytes_sent: Option<u64>,
    /// Contents received, each time counted.
    pub memory_bytes_received: Option<u64>,
    /// Pages that were zero and did not travel, or as a flag.
    pub zero_pages: u64,
    /// Pages that the guest said it does not use, and that did not travel.
    pub free_pages: Option<u64>,
    /// Rate of the last round.
    pub link_bytes_per_s: Option<u64>,
    /// Rate at which the guest dirtied memory in the last round.
    pub dirty_bytes_per_s: Option<u64>,
    /// What a stop now would cost the guest: the last pages, state, round trips, start.
    pub expected_downtime_us: Option<u64>,
    /// What it did cost: from the stop until the source has heard that the guest runs.
    pub downtime_us: Option<u64>,
    /// What it may cost; `convergence` may raise it.
    pub allowed_downtime_us: Option<u64>,
    /// What is done about rounds that do not help (precopy at the source).
    pub convergence: Option<Convergence>,
    /// Share of the time for which vCPUs are kept out of the guest now.
    pub throttle_percent: Option<u32>,
    /// Rounds in a row that did not help.
    pub stalled_rounds: Option<u32>,
    /// Compression of bulk memory.
    pub compression: CompressionSnapshot,
    /// Postcopy faults.
    pub faults: FaultSnapshot,
    /// Why it failed, when it has.
    pub error: Option<FailureReport>,
    /// Lost connections of postcopy.
    pub recovery: RecoverySnapshot,
    /// The process that sends the pages that are left, where one was asked for (source).
    pub page_server: Option<PageServerSnapshot>,
}

/// How often postcopy lost its connections, and came back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RecoverySnapshot {
    /// Times that connections were lost.
    pub losses: u32,
    /// Times that they were made again.
    pub recoveries: u32,
    /// Why they were lost last, or could not be made again.
    pub reason: Option<String>,
    /// Source: for how long they are still made again without being asked to; none while there are some.
    pub left_ms: Option<u64>,
}

/// Compression at the source, all connections together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CompressionSnapshot {
    /// Memory that went out compressed.
    pub raw_bytes: u64,
    /// What it was compressed to.
    pub frame_bytes: u64,
    /// Connections on which it was found to pay, and is on.
    pub connections_on: u32,
    /// How many times a connection has tried both ways and decided.
    pub decisions: u32,
}

/// Faults of a postcopy destination; the source is told at the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FaultSnapshot {
    /// What catches them.
    pub source: Option<FaultSourceKind>,
    /// All that were reported.
    pub seen: Option<u64>,
    /// That made a request.
    pub requested: Option<u64>,
    /// For pages that had been requested already.
    pub merged: Option<u64>,
    /// Resolved without the peer (zero pages, pages that had just arrived).
    pub local: Option<u64>,
    /// Requested pages that were in flight already.
    pub elsewhere: Option<u64>,
    /// Pages that came as answers to requests.
    pub urgent_pages: u64,
    /// Pages that came in the background.
    pub bulk_pages: u64,
    /// Pages that came along with requested ones before they were touched.
    pub prefetched_pages: u64,
    /// Rate of the background in the last second.
    pub bulk_bytes_per_s: u64,
    /// Rate of requested and prefetched pages in the last second.
    pub urgent_bytes_per_s: u64,
    /// Time until the last page at these rates; none while nothing moves.
    pub remaining_ms: Option<u64>,
    /// Sum of all waits for the peer, of all threads.
    pub waited_us: Option<u64>,
    /// Time from the report of a fault to its end, for those that waited for the peer.
    pub latency_us: Option<LatencySnapshot>,
}

impl Snapshot {
    /// Contents that went or came, as this side counted them.
    pub fn moved_bytes(&self) -> Option<u64> {
        match self.side {
            Side::Source => self.memory_bytes_sent,
            Side::Destination => self.memory_bytes_received,
        }
    }

    /// The figures of the end by name, without those that are not known: for events.
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

    /// The figures of the end in a line, for the log.
    pub fn final_line(&self) -> String {
        let mut text = match (self.mode, self.postcopy) {
            (Some(Mode::Auto), true) => "auto, at the end postcopy".to_owned(),
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
            add(format_args!("connections lost {losses} times and made again {recoveries} times"));
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
