// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of reading, restoring and changing the state of a function's hardware.
//!
//! Owns the messages only.

use std::io;
use std::sync::Arc;

use thiserror::Error;

use super::port::DeviceState;
use crate::VfioError;
use crate::gate::GateClosed;
use pci::ConfigStateError;
use pci::MsixError;

/// Why a function cannot be migrated at all.
#[derive(Clone, Debug, Error)]
pub enum NotMigratable {
    /// The host driver has no migration support.
    #[error(
        "its driver on the host cannot save the state of the hardware (no VFIO migration v2, as with \
         plain vfio-pci)"
    )]
    Unsupported,
    /// The kernel did not report its migration support.
    #[error("the kernel did not say whether the state of its hardware can be saved")]
    Unknown(#[source] Arc<io::Error>),
    /// The driver lacks stop-and-copy.
    #[error("its driver on the host cannot stop it and save its state (no STOP_COPY)")]
    NoStopCopy,
    /// The function is lost to the guest.
    #[error("it is gone for the guest; remove it first")]
    Lost,
}

fn behind(written_bytes: u64) -> String {
    match written_bytes {
        0 => String::new(),
        _ => format!(" after {written_bytes} others"),
    }
}

/// Why a step of a migration failed.
#[derive(Debug, Error)]
pub enum MigrationError {
    /// The function does not support migration.
    #[error(transparent)]
    NotMigratable(#[from] NotMigratable),
    /// The function was left to a call into the kernel that did not return.
    #[error("the device has hung in the kernel, and was left behind")]
    Left,
    /// The step does not follow from the current state.
    #[error("the device is in state {now}, and has to be in {needed} for this")]
    Order {
        /// Current state.
        now: DeviceState,
        /// Required state.
        needed: DeviceState,
    },
    /// The kernel refused a state transition.
    #[error("the kernel refused to bring the device from state {from} to {to}; it is in {now}")]
    Refused {
        /// State before it.
        from: DeviceState,
        /// Requested state.
        to: DeviceState,
        /// State after it.
        now: DeviceState,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The function failed during a state transition.
    #[error(
        "the device failed on its way from state {from} to {to}, and cannot be used until it has been \
         reset"
    )]
    Failed {
        /// State before it.
        from: DeviceState,
        /// Requested state.
        to: DeviceState,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Reading the state failed.
    #[error("the device's state cannot be read beyond its first {read_bytes} bytes")]
    Read {
        /// Bytes read before.
        read_bytes: u64,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The state is too long.
    #[error("the device's state is longer than {limit_bytes} bytes, the most that can be migrated")]
    TooLong {
        /// The limit in bytes.
        limit_bytes: u64,
    },
    /// Writing the state failed.
    #[error(
        "the device refused its state of {len_bytes} bytes{}; is it of the same kind as at the \
         source, with the same firmware?", behind(*written_bytes)
    )]
    Write {
        /// Length of what it refused in bytes.
        len_bytes: u64,
        /// Bytes that it has taken before.
        written_bytes: u64,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Another number of bytes was written than the state has.
    #[error("{written_bytes} bytes of the device's state have come in place of {len_bytes}")]
    Incomplete {
        /// Bytes that were written.
        written_bytes: u64,
        /// Length of the state.
        len_bytes: u64,
    },
    /// The state is of different hardware.
    #[error("the state is that of another device: {what} is {found} there and {expected} here")]
    OtherHardware {
        /// What differs.
        what: &'static str,
        /// The value in the state.
        found: String,
        /// The value here.
        expected: String,
    },
    /// The saved registers do not fit.
    #[error("its configuration space does not fit")]
    Config(#[from] ConfigStateError),
    /// The saved MSI-X table does not fit.
    #[error("its interrupts do not fit")]
    Msix(#[from] MsixError),
    /// The interrupts cannot be connected at the host.
    #[error("the device's interrupts cannot be connected")]
    Interrupts(#[source] Box<VfioError>),
    /// Memory cannot be mapped for DMA.
    #[error("the device cannot continue here")]
    Gate(#[from] GateClosed),
}
