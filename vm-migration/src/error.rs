// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of whole migrations: side, phase, step, cause, and where the guest is now.
//!
//! Owns the wording of failures. Each layer adds one sentence and never repeats its source; the chain is
//! printed once, by the caller that reports it.

use crate::fault::UffdError;
use crate::options::OptionsError;
use crate::phase::Phase;
use crate::protocol::ProtocolError;
use crate::transport::TransportError;

pub use crate::phase::{GuestLocation, Side};

/// An error of the machine; its own text names the device or resource.
pub type VmError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// The cause of a failure, without the step at which it happened.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// A cancel was requested.
    #[error("the migration was cancelled")]
    Cancelled,
    /// Invalid options.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// An error of the connection.
    #[error(transparent)]
    Transport(TransportError),
    /// An invalid message from the peer.
    #[error(transparent)]
    Protocol(ProtocolError),
    /// A refusal by the peer.
    #[error("the peer refused: {0}")]
    Refused(String),
    /// The source abandoned the migration.
    #[error("the source abandoned the migration: {0}")]
    Abandoned(String),
    /// An error of the machine.
    #[error("the virtual machine reported an error")]
    Vm(#[source] VmError),
    /// An error in handling guest memory.
    #[error("guest memory could not be accessed")]
    Memory(#[source] std::io::Error),
    /// An error of userfaultfd.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// Something that the peer or this host does not support.
    #[error("{what}; {remedy}")]
    Unsupported {
        /// What cannot be done.
        what: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// Precopy ended without reaching the allowed downtime.
    #[error(
        "the guest writes faster than the link carries: after {rounds} rounds and {elapsed_s} s \
         the expected downtime is {expected_ms} ms ({fixed_ms} ms of it independent of what the \
         guest writes), but only {downtime_ms} ms are allowed; raise downtime_ms, use convergence=throttle, \
         timeout_strategy=ignore or memory_mode=postcopy"
    )]
    NotConverging {
        /// Number of rounds.
        rounds: u32,
        /// Seconds since the first round began.
        elapsed_s: u64,
        /// The expected downtime.
        expected_ms: u64,
        /// The part of it that does not depend on memory: state, round trips, start.
        fixed_ms: u64,
        /// The allowed downtime.
        downtime_ms: u64,
    },
    /// Memory that would have to be sent again, whole, while the guest is stopped.
    #[error(
        "nothing logs what devices outside of the VMM write to guest memory ({devices}), so all of it would be sent \
         again when the guest has stopped: the expected downtime is {expected_ms} ms, but only {downtime_ms} ms are \
         allowed; raise downtime_ms, or accept any downtime with timeout_strategy=ignore"
    )]
    Unlogged {
        /// The devices.
        devices: String,
        /// The expected downtime.
        expected_ms: u64,
        /// The allowed downtime.
        downtime_ms: u64,
    },
    /// The destination was not ready by the migration's timeout.
    #[error(
        "the destination is still preparing the machine after {waited_s} s, and timeout_s has passed; raise \
         timeout_s, or use timeout_strategy=ignore"
    )]
    SlowPreparation {
        /// How long it was waited for.
        waited_s: u64,
    },
    /// The state of devices does not move on.
    #[error(
        "no byte of a device's state was read or written for {waited_s} s: a device at one of the two sides does not go on"
    )]
    DeviceStands {
        /// How long.
        waited_s: u64,
    },
    /// A device whose call into the kernel does not return. Its thread is left behind, and the device with it.
    #[error(
        "the device '{name}' hangs: {doing} has not ended within {waited_s} s; it and its thread are left behind"
    )]
    DeviceHangs {
        /// The device.
        name: Box<str>,
        /// What it does.
        doing: Box<str>,
        /// How long that takes already.
        waited_s: u64,
    },
    /// An acknowledgement that is too old to commit with: the destination may have ended by now.
    #[error(
        "the destination's acknowledgement is up to {} s old, and can be used for {} s",
        age.as_secs(), usable.as_secs_f32()
    )]
    Outdated {
        /// Time since the message was sent that it answers.
        age: std::time::Duration,
        /// The greatest age with which it can be used.
        usable: std::time::Duration,
    },
    /// Not even the fewest threads of a postcopy could be started.
    #[error(
        "this process may not start the threads that a postcopy needs: raise RLIMIT_NPROC or pids.max of its cgroup, or \
         use memory_mode=precopy"
    )]
    Threads(#[source] std::io::Error),
    /// A thread could not be started, or an eventfd not created.
    #[error("the host refused a resource for the migration")]
    Resource(#[source] std::io::Error),
}

impl Cause {
    /// True when the host has no memory for a page now, and nothing has changed.
    pub(crate) fn is_short_of_memory(&self) -> bool {
        let Self::Uffd(UffdError::Pages { source, .. }) = self else { return false };
        source.raw_os_error() == Some(libc::ENOMEM)
    }
}

impl From<TransportError> for Cause {
    fn from(error: TransportError) -> Self {
        match error {
            TransportError::Cancelled => Self::Cancelled,
            error => Self::Transport(error),
        }
    }
}

impl From<ProtocolError> for Cause {
    fn from(error: ProtocolError) -> Self {
        match error {
            ProtocolError::Transport(error) => error.into(),
            error => Self::Protocol(error),
        }
    }
}

/// A cause and the step at which it happened.
#[derive(Debug)]
pub struct Failure {
    /// The step, as a phrase after "while".
    pub step: &'static str,
    /// Why it failed.
    pub cause: Cause,
}

impl Failure {
    pub(crate) fn new(step: &'static str, cause: impl Into<Cause>) -> Self {
        Self { step, cause: cause.into() }
    }

    /// True when a message to the peer could still arrive.
    pub(crate) fn peer_listens(&self) -> bool {
        !matches!(
            self.cause,
            Cause::Transport(TransportError::Closed) | Cause::Refused(_) | Cause::Abandoned(_)
        )
    }

    /// The whole error chain in one line, for the peer.
    pub(crate) fn for_peer(&self) -> String {
        format!("while {}: {}", self.step, error_text::chain(&self.cause))
    }
}

/// Adds the step to a result.
pub(crate) trait Step<T> {
    fn step(self, step: &'static str) -> Result<T, Failure>;
}

impl<T, E: Into<Cause>> Step<T> for Result<T, E> {
    fn step(self, step: &'static str) -> Result<T, Failure> {
        self.map_err(|error| Failure::new(step, error))
    }
}

/// A migration that failed on this side.
#[derive(Debug, thiserror::Error)]
#[error("migration failed on the {side} in phase {phase}, while {step}; {guest}")]
pub struct MigrationError {
    /// The side that reports.
    pub side: Side,
    /// Its phase.
    pub phase: Phase,
    /// The step in the phase.
    pub step: &'static str,
    /// Where the guest is now.
    pub guest: GuestLocation,
    /// Why.
    #[source]
    pub cause: Cause,
}
