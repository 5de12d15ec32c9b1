// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Options of a migration: the choices, their defaults and limits, and which of them exclude each other.
//!
//! Owns the only definition of each and the only check of their combinations, [`SendOptions::check`]. The
//! VMM names the choices in its option strings and API bodies, and makes that check before
//! anything starts. Must never parse text.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::steering::Steering;
pub use crate::transport::CONNECT_TIMEOUT;
use crate::transport::{Address, ClientTls, TlsError};

/// Most connections for memory, as in cloud-hypervisor.
pub const CONNECTIONS_MAX: u16 = 128;

/// Default of the downtime that precopy aims at, in milliseconds.
pub const DOWNTIME_DEFAULT_MS: u64 = 300;

/// Least bandwidth limit: with less, the peer would take the silence for a lost connection.
pub const BANDWIDTH_MIN_BYTES_PER_S: u64 = 64 << 10;

/// Default of the longest precopy.
pub const TIMEOUT_DEFAULT: Duration = Duration::from_hours(1);

/// Longest time without progress in reading or writing a message, or until its answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest wait for the destination to build the machine: large hugetlb guests take long.
pub const PREPARE_TIMEOUT: Duration = Duration::from_mins(10);

/// Longest wait, once a migration is over, for the call of a device into the kernel that reads or writes its state. The guest is
/// stopped meanwhile. A device that takes longer is left behind with its thread, and is lost to the guest: so this is longer
/// than the commands of such devices usually take.
pub const DEVICE_LEAVE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a destination that cannot say that it is still preparing may be silent, in times of
/// [`ANSWER_TIMEOUT`], beside the time in which it may populate memory ([`Limits::silent_preparation`]).
pub const SILENT_PREPARE_FACTOR: u32 = 4;

/// Memory that a destination populates in a second, at least.
const POPULATED_BYTES_PER_S: u64 = 1 << 30;

/// Default of the time for which both sides of a postcopy try to reconnect by themselves.
pub const RECOVER_TIMEOUT_DEFAULT: Duration = Duration::from_mins(10);

/// Connections for requested pages when neither the options nor the machine determine their number.
pub const URGENT_CONNECTIONS_DEFAULT: u16 = 2;

/// Most connections for requested pages. A destination of a version that does not know of more than
/// [`CONNECTIONS_MAX`] takes no more than that.
pub const URGENT_CONNECTIONS_MAX: u16 = 512;

/// Connections for requested pages of a machine with more vCPUs than can have one each: all share these, of which each
/// has a thread on either side.
pub const URGENT_CONNECTIONS_SHARED: u16 = 64;

/// Connections for requested pages for a machine with `vcpus` vCPUs: one for each, on which it can read its answers
/// itself, where that many are possible.
pub fn urgent_connections_for(vcpus: u32) -> u16 {
    match u16::try_from(vcpus) {
        Ok(each @ 0..=URGENT_CONNECTIONS_MAX) => each.max(1),
        _ => URGENT_CONNECTIONS_SHARED,
    }
}

/// How long the peer of a postcopy may be silent, or keep a thread waiting for a page, before its
/// connections count as lost. TCP takes about as long to detect a host that has failed
/// ([`crate::transport`]).
pub const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// The promise of a destination that acknowledges the handover: for this long only the source, or the
/// operator with `force`, ends the machine there. The source commits with an acknowledgement only during
/// the first half of that time ([`crate::commit`]), so a source that has not committed when it is over
/// never will. The machine is kept after it as well, but the operator's decision then needs no `force`.
pub const REJOIN_TIMEOUT: Duration = Duration::from_mins(1);

/// When memory is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryMode {
    /// All memory is sent before the guest runs at the destination.
    #[default]
    Precopy,
    /// Memory is sent after the guest has started there, on demand and in the background.
    Postcopy,
    /// Precopy until further rounds do not help or the operator ends it; the rest is sent by postcopy.
    Auto,
}

impl MemoryMode {
    /// True when pages may be sent after the guest.
    pub fn may_postcopy(self) -> bool {
        self != Self::Precopy
    }
}

/// What happens when precopy has not converged at the timeout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeoutStrategy {
    /// The migration fails and the guest keeps running at the source.
    #[default]
    Cancel,
    /// The guest is stopped and moved, however long the downtime.
    Ignore,
}

/// How precopy is made to converge when further rounds do not help.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = MigrationConvergence)]
#[serde(rename_all = "kebab-case")]
pub enum Convergence {
    /// No method is applied: precopy converges only if the guest writes less before the timeout.
    #[default]
    None,
    /// The vCPUs are throttled: for 20 % of the time, then 10 % more at each step, up to 99 %.
    Throttle,
    /// The allowed downtime is doubled at each step, up to [`SendOptions::downtime_max`].
    RaiseDowntime,
    /// The rest is sent by postcopy: the same as [`MemoryMode::Auto`].
    Postcopy,
}

/// When the dirty log is cleared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirtyClear {
    /// For each slice of memory just before it is copied.
    #[default]
    Slice,
    /// For all memory at the beginning of a round; for comparison.
    Round,
}

/// Whether memory is compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Never.
    #[default]
    None,
    /// With zstd, on each connection on which that is faster.
    Zstd,
}

/// Default of [`SendOptions::downtime_max`], in multiples of [`SendOptions::downtime`].
pub const DOWNTIME_MAX_FACTOR: u32 = 10;

/// Time limits of the kinds of waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// See [`CONNECT_TIMEOUT`].
    pub connect: Duration,
    /// See [`ANSWER_TIMEOUT`].
    pub answer: Duration,
    /// See [`PREPARE_TIMEOUT`].
    pub prepare: Duration,
    /// See [`DEVICE_LEAVE_TIMEOUT`].
    pub device_leave: Duration,
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
            device_leave: DEVICE_LEAVE_TIMEOUT,
            stall: STALL_TIMEOUT,
            rejoin: REJOIN_TIMEOUT,
        }
    }
}

impl Limits {
    /// How long the call of a device at the destination may take: less than the source waits for any byte
    /// ([`PREPARE_TIMEOUT`]), so that it is the destination that ends the migration, with the name of the device.
    #[must_use]
    pub fn device_call(&self) -> Duration {
        self.prepare / 10 * 9
    }

    /// The same for what a device does with the last of its state, while the source waits for the acknowledgement
    /// ([`ANSWER_TIMEOUT`]).
    #[must_use]
    pub fn last_device_call(&self) -> Duration {
        self.answer / 10 * 9
    }

    /// How long a destination may be silent that has so much memory to map, may populate it, and cannot say that it
    /// works on it: one of plain version 0, as cloud-hypervisor's, or an older one.
    #[must_use]
    pub fn silent_preparation(&self, memory_bytes: u64) -> Duration {
        let populating = Duration::from_secs(memory_bytes / POPULATED_BYTES_PER_S);
        let silent = self.answer.saturating_mul(SILENT_PREPARE_FACTOR);
        silent.saturating_add(populating).min(self.prepare)
    }
}

/// Options of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendOptions {
    /// Address of the destination.
    pub to: Address,
    /// Directory with certificates, if all connections use TLS.
    pub tls_dir: Option<PathBuf>,
    /// The certificates in it, read by [`load_tls`](Self::load_tls).
    pub tls: Option<ClientTls>,
    /// When memory is sent.
    pub memory_mode: MemoryMode,
    /// Memory is handed over as file descriptors on one host; nothing is copied.
    pub local: bool,
    /// Connections that carry memory, 1 to [`CONNECTIONS_MAX`].
    pub connections: u16,
    /// Connections for requested pages in postcopy, up to [`URGENT_CONNECTIONS_MAX`]; with 0 requested
    /// pages share the other connections, and `None` takes the number from `vcpus`.
    pub urgent_connections: Option<u16>,
    /// Number of the machine's vCPUs, if known.
    pub vcpus: Option<u32>,
    /// Longest precopy before [`MemoryMode::Auto`] switches to postcopy.
    pub postcopy_after: Option<Duration>,
    /// Bandwidth limit for memory that no fault waits for: all memory in precopy, background pages in
    /// postcopy; 0 for no limit.
    pub bandwidth_bytes_per_s: u64,
    /// How long a postcopy that lost its connections tries to reconnect by itself.
    pub recover_timeout: Duration,
    /// Requests to the migration while it runs.
    pub steering: Steering,
    /// Downtime that precopy aims at.
    pub downtime: Duration,
    /// Longest precopy.
    pub timeout: Duration,
    /// What happens when that time is over.
    pub timeout_strategy: TimeoutStrategy,
    /// How precopy is made to converge.
    pub convergence: Convergence,
    /// Longest downtime that `convergence` may allow; `None` for [`DOWNTIME_MAX_FACTOR`] times
    /// `downtime`.
    pub downtime_max: Option<Duration>,
    /// When dirty bits are cleared.
    pub dirty_clear: DirtyClear,
    /// Whether memory is compressed; precopy only.
    pub compression: Compression,
    /// A page server sends the last pages of a postcopy. The machine starts it
    /// ([`crate::vm::PausedVm::page_server`]).
    pub page_server: bool,
    /// Path of the page server's API socket, if given.
    pub page_server_socket: Option<PathBuf>,
    /// Limits of single waits.
    pub limits: Limits,
}

/// Why options are out of range or cannot be combined.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// local=on over a network.
    #[error("local=on hands memory over on one host: it needs a unix: address, not {0}")]
    Local(Address),
    /// TLS without a network.
    #[error("tls_dir needs a tcp: address, not {0}")]
    TlsUnix(Address),
    /// local=on with an option that it makes meaningless.
    #[error("local=on hands memory over without copying it: leave {0} out")]
    LocalAnd(&'static str),
    /// A number of connections out of range.
    #[error("{name}={value} is not between {min} and {max}")]
    Connections {
        /// Name of the option.
        name: &'static str,
        /// Its value.
        value: u16,
        /// The least allowed value.
        min: u16,
        /// The greatest allowed value.
        max: u16,
    },
    /// Compression with postcopy.
    #[error("compression=zstd works with memory_mode=precopy only; leave one of the two out")]
    CompressionPostcopy,
    /// An option of postcopy in a migration without postcopy.
    #[error(
        "{0} has no effect in precopy: it needs memory_mode=postcopy, memory_mode=auto or \
         convergence=postcopy"
    )]
    NeedsPostcopy(&'static str),
    /// postcopy_after_s without a precopy that could switch to postcopy.
    #[error("postcopy_after_s has no effect without memory_mode=auto or convergence=postcopy")]
    PostcopyAfter,
    /// A socket for a page server without page_server=on.
    #[error("page_server_socket has no effect without page_server=on")]
    PageServerSocket,
    /// A convergence method in a migration without precopy.
    #[error(
        "convergence has no effect with memory_mode=postcopy, which has no rounds; leave one of the \
         two out"
    )]
    ConvergencePostcopy,
    /// A maximum downtime without a method that raises the downtime.
    #[error("downtime_max_ms has no effect without convergence=raise-downtime")]
    DowntimeMaxUnused,
    /// A maximum downtime below the initial one.
    #[error("downtime_max_ms={max_ms} is less than downtime_ms={downtime_ms}")]
    DowntimeMax {
        /// The maximum.
        max_ms: u128,
        /// The initial downtime.
        downtime_ms: u128,
    },
    /// A bandwidth limit with which a migration would not finish.
    #[error(
        "bandwidth={0} is too low for a migration to finish: give at least 64K bytes per second, or \
         0 for no limit"
    )]
    Bandwidth(u64),
}

impl SendOptions {
    /// Default options for an address.
    pub fn new(to: Address) -> Self {
        Self {
            to,
            tls_dir: None,
            tls: None,
            memory_mode: MemoryMode::Precopy,
            local: false,
            connections: 1,
            urgent_connections: None,
            vcpus: None,
            postcopy_after: None,
            bandwidth_bytes_per_s: 0,
            recover_timeout: RECOVER_TIMEOUT_DEFAULT,
            steering: Steering::default(),
            downtime: Duration::from_millis(DOWNTIME_DEFAULT_MS),
            timeout: TIMEOUT_DEFAULT,
            timeout_strategy: TimeoutStrategy::Cancel,
            convergence: Convergence::None,
            downtime_max: None,
            dirty_clear: DirtyClear::Slice,
            compression: Compression::None,
            page_server: false,
            page_server_socket: None,
            limits: Limits::default(),
        }
    }

    /// Checks the values and their combinations. These rules exist only here.
    ///
    /// # Errors
    /// The first rule that is violated.
    pub fn check(&self) -> Result<(), OptionsError> {
        let counts = [
            ("connections", Some(self.connections), 1, CONNECTIONS_MAX),
            ("preempt", self.urgent_connections, 0, URGENT_CONNECTIONS_MAX),
        ];
        for (name, value, min, max) in counts {
            if let Some(value) = value.filter(|value| !(min..=max).contains(value)) {
                return Err(OptionsError::Connections { name, value, min, max });
            }
        }
        if (1..BANDWIDTH_MIN_BYTES_PER_S).contains(&self.bandwidth_bytes_per_s) {
            return Err(OptionsError::Bandwidth(self.bandwidth_bytes_per_s));
        }
        self.check_local()?;
        if self.uses_tls() && matches!(self.to, Address::Unix(_)) {
            return Err(OptionsError::TlsUnix(self.to.clone()));
        }
        self.check_postcopy()?;
        match self.downtime_max {
            Some(_) if self.convergence != Convergence::RaiseDowntime => {
                Err(OptionsError::DowntimeMaxUnused)
            }
            Some(max) if max < self.downtime => Err(OptionsError::DowntimeMax {
                max_ms: max.as_millis(),
                downtime_ms: self.downtime.as_millis(),
            }),
            _ => Ok(()),
        }
    }

    fn uses_tls(&self) -> bool {
        self.tls_dir.is_some() || self.tls.is_some()
    }

    /// Reads the certificates from `tls_dir`.
    ///
    /// # Errors
    /// Names the file that is missing or cannot be used.
    pub fn load_tls(&mut self) -> Result<(), TlsError> {
        self.tls = self.tls_dir.as_deref().map(ClientTls::load).transpose()?;
        Ok(())
    }

    /// Checks for options that local=on excludes.
    fn check_local(&self) -> Result<(), OptionsError> {
        if !self.local {
            return Ok(());
        }
        if !matches!(self.to, Address::Unix(_)) {
            return Err(OptionsError::Local(self.to.clone()));
        }
        let excluded = [
            (self.memory_mode == MemoryMode::Postcopy, "memory_mode=postcopy"),
            (self.memory_mode == MemoryMode::Auto, "memory_mode=auto"),
            (self.convergence == Convergence::Postcopy, "convergence=postcopy"),
            (self.compression != Compression::None, "compression"),
            (self.bandwidth_bytes_per_s > 0, "bandwidth"),
            (self.connections > 1, "connections"),
            (self.uses_tls(), "tls_dir"),
        ];
        match excluded.into_iter().find(|(is_set, _)| *is_set) {
            Some((_, name)) => Err(OptionsError::LocalAnd(name)),
            None => Ok(()),
        }
    }

    /// Checks for options that need postcopy, or a precopy before it, and for those that postcopy
    /// excludes.
    fn check_postcopy(&self) -> Result<(), OptionsError> {
        if self.mode() == MemoryMode::Precopy {
            let needs =
                [(self.page_server, "page_server"), (self.urgent_connections.is_some(), "preempt")];
            if let Some((_, name)) = needs.into_iter().find(|(is_set, _)| *is_set) {
                return Err(OptionsError::NeedsPostcopy(name));
            }
        }
        if self.postcopy_after.is_some() && self.mode() != MemoryMode::Auto {
            return Err(OptionsError::PostcopyAfter);
        }
        if self.page_server_socket.is_some() && !self.page_server {
            return Err(OptionsError::PageServerSocket);
        }
        if self.mode() != MemoryMode::Postcopy {
            return Ok(());
        }
        if self.compression != Compression::None {
            return Err(OptionsError::CompressionPostcopy);
        }
        if matches!(self.convergence, Convergence::Throttle | Convergence::RaiseDowntime) {
            return Err(OptionsError::ConvergencePostcopy);
        }
        Ok(())
    }

    /// Number of connections for requested pages in postcopy.
    pub fn urgent_connections(&self) -> u16 {
        let by_vcpus = || self.vcpus.map_or(URGENT_CONNECTIONS_DEFAULT, urgent_connections_for);
        self.urgent_connections.unwrap_or_else(by_vcpus)
    }

    /// When memory is sent, by `memory_mode` and `convergence` together.
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

/// Options of the destination.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceiveOptions {
    /// Limits of single waits.
    pub limits: Limits,
    /// Longest wait for the source to connect; `None` waits until cancelled.
    pub accept_timeout: Option<Duration>,
    /// userfaultfds over which memory is split in postcopy, each with its reader thread; `None` for one
    /// per connection for requested pages.
    pub fault_readers: Option<usize>,
    /// Threads that populate announced memory; `None` for as many as this host has to spare, which is
    /// none with fewer than four processors.
    pub prepare_threads: Option<usize>,
    /// Requests to the migration while it runs.
    pub steering: Steering,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_vcpu_has_a_connection_where_that_many_are_possible() {
        let connections = [0, 1, 64, 160, 512, 513, u32::MAX].map(urgent_connections_for);
        let shared = URGENT_CONNECTIONS_SHARED;
        assert_eq!(connections, [1, 1, 64, 160, URGENT_CONNECTIONS_MAX, shared, shared]);
    }
}
