// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a person may choose about a migration, and the limits in time that hold for each wait.
//!
//! Owns resolved values only: parsing of option strings and API bodies is the monitor's. Checking
//! that the values fit together is [`SendOptions::check`].

use std::time::Duration;

use serde::{Deserialize, Serialize};

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

/// How memory travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryMode {
    /// All memory before the guest moves.
    #[default]
    Precopy,
    /// The guest moves at once, pages follow on demand and in the background.
    Postcopy,
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

/// How long each kind of wait may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// See [`CONNECT_TIMEOUT`].
    pub connect: Duration,
    /// See [`ANSWER_TIMEOUT`].
    pub answer: Duration,
    /// See [`PREPARE_TIMEOUT`].
    pub prepare: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connect: CONNECT_TIMEOUT, answer: ANSWER_TIMEOUT, prepare: PREPARE_TIMEOUT }
    }
}

/// Choices of the sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendOptions {
    /// Where the destination listens.
    pub to: Address,
    /// How memory travels.
    pub memory_mode: MemoryMode,
    /// Memory as file descriptors on one host; not there yet, and refused by name.
    pub local: bool,
    /// Connections that carry memory, 1 to [`CONNECTIONS_MAX`].
    pub connections: u16,
    /// Connections for requested pages in postcopy, 1 to [`CONNECTIONS_MAX`].
    pub urgent_connections: u16,
    /// Downtime that precopy aims at.
    pub downtime: Duration,
    /// Longest precopy.
    pub timeout: Duration,
    /// What happens after `timeout`.
    pub timeout_strategy: TimeoutStrategy,
    /// Limits of single waits.
    pub limits: Limits,
}

/// A combination of choices that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// local=on.
    #[error("local=on is not supported yet; leave it out to migrate over {0}")]
    Local(Address),
    /// A number of connections out of range.
    #[error("{name}={value} is not between 1 and {CONNECTIONS_MAX}")]
    Connections {
        /// The option.
        name: &'static str,
        /// Its value.
        value: u16,
    },
    /// Several connections over a Unix socket.
    #[error("connections={0} needs a tcp: address; a Unix socket carries one memory connection")]
    UnixConnections(u16),
}

impl SendOptions {
    /// Defaults for everything but the address.
    pub fn new(to: Address) -> Self {
        Self {
            to,
            memory_mode: MemoryMode::Precopy,
            local: false,
            connections: 1,
            urgent_connections: 1,
            downtime: DOWNTIME_DEFAULT,
            timeout: TIMEOUT_DEFAULT,
            timeout_strategy: TimeoutStrategy::Cancel,
            limits: Limits::default(),
        }
    }

    /// Checks the values against each other.
    ///
    /// # Errors
    /// See [`OptionsError`].
    pub fn check(&self) -> Result<(), OptionsError> {
        if self.local {
            return Err(OptionsError::Local(self.to.clone()));
        }
        let counts =
            [("connections", self.connections), ("urgent_connections", self.urgent_connections)];
        for (name, value) in counts {
            if value == 0 || value > CONNECTIONS_MAX {
                return Err(OptionsError::Connections { name, value });
            }
        }
        match self.to {
            Address::Unix(_) if self.connections > 1 => {
                Err(OptionsError::UnixConnections(self.connections))
            }
            _ => Ok(()),
        }
    }
}

/// Choices of the receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiveOptions {
    /// Limits of single waits.
    pub limits: Limits,
    /// Longest wait for the source to connect; `None` waits until cancelled.
    pub accept_timeout: Option<Duration>,
    /// userfaultfds over which memory is split in postcopy, each with its reader.
    pub fault_readers: usize,
}

impl Default for ReceiveOptions {
    fn default() -> Self {
        Self { limits: Limits::default(), accept_timeout: None, fault_readers: 2 }
    }
}
