// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Options of a migration, and the time limit of each wait.
//!
//! Owns resolved values only: the monitor parses option strings and API bodies. [`SendOptions::check`]
//! checks that the values are compatible.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::destination::LateReconnects;
use crate::steering::Steering;
use crate::transport::Address;

/// Most connections for memory, as upstream has it.
pub const CONNECTIONS_MAX: u16 = 128;

/// Downtime that precopy aims at when nothing is said.
pub const DOWNTIME_DEFAULT: Duration = Duration::from_millis(300);

/// Longest precopy when nothing is said.
pub const TIMEOUT_DEFAULT: Duration = Duration::from_hours(1);

/// Longest wait for a connection to be made. Name resolution is counted.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest time without any progress in reading or writing a message, or until its answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest wait for the destination to build the machine: large hugetlb guests take long.
pub const PREPARE_TIMEOUT: Duration = Duration::from_mins(10);

/// How long both sides of a postcopy try to connect again by themselves when nothing is said.
pub const RECOVER_TIMEOUT_DEFAULT: Duration = Duration::from_mins(10);

/// Connections for requested pages when neither the options nor the machine say how many.
pub const URGENT_CONNECTIONS_DEFAULT: u16 = 2;

/// Most connections for requested pages that a number of vCPUs makes.
pub const URGENT_CONNECTIONS_FOR_VCPUS_MAX: u16 = 8;

/// Connections for requested pages for a machine with so many vCPUs.
pub fn urgent_connections_for(vcpus: u32) -> u16 {
    u16::try_from(vcpus).unwrap_or(u16::MAX).clamp(1, URGENT_CONNECTIONS_FOR_VCPUS_MAX)
}

/// How long the other side of a postcopy may be silent, or keep a thread waiting for a page, before
/// its connections count as lost. TCP finds a machine that is gone in as much time
/// ([`crate::transport`]).
pub const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// What a destination promises with its acknowledgement of the handover: for so long nothing but the
/// source, or the operator with force, ends the machine there. The source uses an acknowledgement for
/// half of that time ([`crate::commit`]), so a source that has not committed when it is over never
/// will. After it the machine is kept all the same; the operator's decision counts without force.
pub const REJOIN_TIMEOUT: Duration = Duration::from_mins(1);

/// How memory travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryMode {
    /// All memory before the guest moves.
    #[default]
    Precopy,
    /// The guest moves at once, pages follow on demand and in the background.
    Postcopy,
    /// As in precopy, until that no longer helps or the operator ends it; what is then
    /// left follows as in postcopy.
    Auto,
}

impl MemoryMode {
    /// True when pages may follow the guest.
    pub fn may_postcopy(self) -> bool {
        self != Self::Precopy
    }
}

/// What happens when precopy does not reach its downtime in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimeoutStrategy {
    /// The migration fails and the guest stays.
    #[default]
    Cancel,
    /// The guest is stopped and moved regardless.
    Ignore,
}

/// What is done when rounds of precopy no longer help.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Convergence {
    /// Nothing: the guest may calm down until the timeout.
    #[default]
    None,
    /// The guest's vCPUs are slowed down, step by step.
    Throttle,
    /// A longer downtime is allowed, step by step, up to [`SendOptions::downtime_max`].
    RaiseDowntime,
    /// The rest of memory follows the guest: [`MemoryMode::Auto`] by another name.
    Postcopy,
}

/// When dirty bits are cleared and tracking is re-armed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DirtyClear {
    /// Slice by slice, each just before it is copied.
    #[default]
    Slice,
    /// For all of memory at the beginning of a round. For comparison.
    Round,
}

/// Whether bulk memory is compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compression {
    /// Never.
    #[default]
    None,
    /// With zstd, on each connection as long as more memory arrives that way.
    Zstd,
}

/// How many times [`SendOptions::downtime`] may become with [`Convergence::RaiseDowntime`] when
/// nothing else is said.
pub const DOWNTIME_MAX_FACTOR: u32 = 10;

/// How long each kind of wait may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// See [`CONNECT_TIMEOUT`].
    pub connect: Duration,
    /// See [`ANSWER_TIMEOUT`].
    pub answer: Duration,
    /// See [`PREPARE_TIMEOUT`].
    pub prepare: Duration,
    /// See [`STALL_TIMEOUT`].
    pub stall: Duration,
    /// See [`REJOIN_TIMEOUT`].
    pub rejoin: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: CONNECT_TIMEOUT,
            answer: ANSWER_TIMEOUT,
            prepare: PREPARE_TIMEOUT,
            stall: STALL_TIMEOUT,
            rejoin: REJOIN_TIMEOUT,
        }
    }
}

/// Choices of the sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendOptions {
    /// Where the destination listens.
    pub to: Address,
    /// How memory travels.
    pub memory_mode: MemoryMode,
    /// Memory as file descriptors on one host; nothing is copied.
    pub local: bool,
    /// Connections that carry memory, 1 to [`CONNECTIONS_MAX`].
    pub connections: u16,
    /// Connections for requested pages in postcopy, up to [`CONNECTIONS_MAX`]; with 0 requested
    /// pages share the connections of all others.
    pub urgent_connections: u16,
    /// With [`MemoryMode::Auto`], longest precopy.
    pub postcopy_after: Option<Duration>,
    /// Most bytes per second for memory that no fault waits for: all of it in precopy, what is not asked
    /// for in postcopy; 0 for no limit.
    pub bandwidth_bytes_per_s: u64,
    /// How long a postcopy that lost its connections tries to connect again by itself.
    pub recover_timeout: Duration,
    /// Requests to the migration while it runs.
    pub steering: Steering,
    /// Downtime that precopy aims at.
    pub downtime: Duration,
    /// Longest precopy.
    pub timeout: Duration,
    /// What happens after `timeout`.
    pub timeout_strategy: TimeoutStrategy,
    /// What is done about rounds that do not help.
    pub convergence: Convergence,
    /// Longest downtime that `convergence` may allow; `None` for [`DOWNTIME_MAX_FACTOR`] times
    /// `downtime`.
    pub downtime_max: Option<Duration>,
    /// When dirty bits are cleared.
    pub dirty_clear: DirtyClear,
    /// Whether bulk memory is compressed. Precopy only.
    pub compression: Compression,
    /// Limits of single waits.
    pub limits: Limits,
}

/// A combination of choices that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// local=on over a network.
    #[error("local=on hands memory over on one host: it needs a unix: address, not {0}")]
    Local(Address),
    /// local=on with something that it makes meaningless.
    #[error("local=on hands memory over without copying it: leave {0} out")]
    LocalAnd(&'static str),
    /// A number of connections out of range.
    #[error("{name}={value} is not between {min} and {CONNECTIONS_MAX}")]
    Connections {
        /// The option.
        name: &'static str,
        /// Its value.
        value: u16,
        /// The least that it may be.
        min: u16,
    },
    /// compression with postcopy.
    #[error("compression=zstd works with memory_mode=precopy only; leave one of the two out")]
    CompressionPostcopy,
    /// A cap below what is allowed from the start.
    #[error("downtime_max_ms={max_ms} is less than downtime_ms={downtime_ms}")]
    DowntimeMax {
        /// The cap.
        max_ms: u128,
        /// Where it starts.
        downtime_ms: u128,
    },
}

impl SendOptions {
    /// Defaults for everything but the address.
    pub fn new(to: Address) -> Self {
        Self {
            to,
            memory_mode: MemoryMode::Precopy,
            local: false,
            connections: 1,
            urgent_connections: URGENT_CONNECTIONS_DEFAULT,
            postcopy_after: None,
            bandwidth_bytes_per_s: 0,
            recover_timeout: RECOVER_TIMEOUT_DEFAULT,
            steering: Steering::default(),
            downtime: DOWNTIME_DEFAULT,
            timeout: TIMEOUT_DEFAULT,
            timeout_strategy: TimeoutStrategy::Cancel,
            convergence: Convergence::None,
            downtime_max: None,
            dirty_clear: DirtyClear::Slice,
            compression: Compression::None,
            limits: Limits::default(),
        }
    }

    /// Checks the values against each other.
    ///
    /// # Errors
    /// See [`OptionsError`].
    pub fn check(&self) -> Result<(), OptionsError> {
        if self.local {
            if !matches!(self.to, Address::Unix(_)) {
                return Err(OptionsError::Local(self.to.clone()));
            }
            if self.memory_mode == MemoryMode::Postcopy {
                return Err(OptionsError::LocalAnd("memory_mode=postcopy"));
            }
            if self.compression != Compression::None {
                return Err(OptionsError::LocalAnd("compression"));
            }
        }
        let counts =
            [("connections", self.connections, 1), ("preempt", self.urgent_connections, 0)];
        for (name, value, min) in counts {
            if value < min || value > CONNECTIONS_MAX {
                return Err(OptionsError::Connections { name, value, min });
            }
        }
        let postcopy = self.memory_mode == MemoryMode::Postcopy;
        if postcopy && self.compression != Compression::None {
            return Err(OptionsError::CompressionPostcopy);
        }
        match self.downtime_max {
            Some(max) if max < self.downtime => Err(OptionsError::DowntimeMax {
                max_ms: max.as_millis(),
                downtime_ms: self.downtime.as_millis(),
            }),
            _ => Ok(()),
        }
    }

    /// How memory travels, whichever of the options says so.
    pub fn mode(&self) -> MemoryMode {
        match (self.memory_mode, self.convergence) {
            (MemoryMode::Precopy, Convergence::Postcopy) => MemoryMode::Auto,
            (mode, _) => mode,
        }
    }

    /// Longest downtime that `convergence` may allow.
    pub fn downtime_cap(&self) -> Duration {
        self.downtime_max.unwrap_or_else(|| self.downtime.saturating_mul(DOWNTIME_MAX_FACTOR))
    }
}

/// Choices of the receiver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceiveOptions {
    /// Limits of single waits.
    pub limits: Limits,
    /// Longest wait for the source to connect; `None` waits until cancelled.
    pub accept_timeout: Option<Duration>,
    /// userfaultfds over which memory is split in postcopy, each with its reader; `None` for one
    /// for each connection for requested pages.
    pub fault_readers: Option<usize>,
    /// Threads that get pages for memory that is announced; `None` for as many as this host has to
    /// spare, none with fewer than four processors.
    pub prepare_threads: Option<usize>,
    /// Requests to the migration while it runs.
    pub steering: Steering,
    /// The migrations to this process that are over, and whose sources may not know it.
    pub late_reconnects: LateReconnects,
}
