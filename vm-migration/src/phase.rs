// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The state of a migration in three values: the side, the phase, and where the guest is.
//!
//! Owns their names, which the progress document, events and errors share. Must never know how a phase works.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The phase of a migration on one of its sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationPhase)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Phase {
    /// Not started.
    Idle,
    /// Source: connecting.
    Connect,
    /// Destination: waiting for the source.
    Listen,
    /// Both: versions, capabilities and configuration are negotiated.
    Negotiate,
    /// Source: memory is sent while the guest runs.
    Precopy,
    /// Destination: memory arrives.
    Receive,
    /// Source: the guest is stopped; the last pages are sent.
    Stop,
    /// Source: the machine state is sent, and the destination acknowledges the handover.
    Handover,
    /// Destination: the machine state is restored.
    Prepare,
    /// Destination: the guest starts.
    Run,
    /// Source: pages are served to a destination that runs the guest.
    Serve,
    /// Destination: pages arrive on demand.
    Fault,
    /// Both: postcopy has lost its connections; no pages are transferred.
    PostcopyPaused,
    /// Both: the connections of postcopy are being re-established.
    PostcopyRecover,
    /// Both: the connection was lost at the handover. The destination does not know whether it owns the
    /// guest; the source does not know whether the destination knows.
    InDoubt,
    /// Both: succeeded.
    Done,
    /// Source: succeeded; a page server sends the remaining pages.
    HandedOn,
    /// Both: failed or cancelled.
    Failed,
}

impl Phase {
    /// All of them.
    pub const ALL: [Self; 18] = [
        Self::Idle,
        Self::Connect,
        Self::Listen,
        Self::Negotiate,
        Self::Precopy,
        Self::Receive,
        Self::Stop,
        Self::Handover,
        Self::Prepare,
        Self::Run,
        Self::Serve,
        Self::Fault,
        Self::PostcopyPaused,
        Self::PostcopyRecover,
        Self::InDoubt,
        Self::Done,
        Self::HandedOn,
        Self::Failed,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Connect => "connect",
            Self::Listen => "listen",
            Self::Negotiate => "negotiate",
            Self::Precopy => "precopy",
            Self::Receive => "receive",
            Self::Stop => "stop",
            Self::Handover => "handover",
            Self::Prepare => "prepare",
            Self::Run => "run",
            Self::Serve => "serve",
            Self::Fault => "fault",
            Self::PostcopyPaused => "postcopy-paused",
            Self::PostcopyRecover => "postcopy-recover",
            Self::InDoubt => "in-doubt",
            Self::Done => "done",
            Self::HandedOn => "handed-on",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One of the two sides of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationSide)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// The VMM that sends the VM.
    Source,
    /// The VMM that receives the VM.
    Destination,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// Where the guest is after a failure, as far as the side that reports it can know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[schema(as = GuestLocation)]
#[serde(rename_all = "kebab-case")]
pub enum GuestLocation {
    /// On the source, as before the migration.
    OnSource,
    /// On the source, but it could not be resumed.
    PausedOnSource,
    /// Not on this side: the source still has it.
    NotHere,
    /// The destination owns it.
    OnDestination,
    /// On this side, complete and not running; whether the other side runs it is not known here. At a destination it has
    /// never run.
    InDoubt,
    /// On the destination with pages missing; postcopy is paused.
    PostcopyPaused,
}

impl fmt::Display for GuestLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OnSource => "the guest continues at the source",
            Self::PausedOnSource => "the guest is paused at the source and could not be resumed",
            Self::NotHere => "the guest stays at the source",
            Self::OnDestination => "the guest belongs to the destination; check its state there",
            Self::InDoubt => {
                "the guest does not run here; start it by hand only if the other side does not run it"
            }
            Self::PostcopyPaused => {
                "postcopy is paused: the guest at the destination waits for pages from the source; \
                 end neither VMM"
            }
        })
    }
}
