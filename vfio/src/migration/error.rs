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

/// Why a function cannot be moved at all.
#[derive(Clone, Debug, Error)]
pub enum NotMigratable {
    /// No driver for it.
    #[error(
        "its driver on the host cannot save the state of the hardware (no VFIO migration v2, as with \
         plain vfio-pci)"
    )]
    Unsupported,
    /// The kernel did not say.
    #[error("the kernel did not say whether the state of its hardware can be saved")]
    Unknown(#[source] Arc<io::Error>),
    /// Half of the interface.
    #[error("its driver on the host cannot stop it and save its state (no STOP_COPY)")]
    NoStopCopy,
    /// It is gone.
    #[error("it is gone for the guest; remove it first")]
    Lost,
}

/// Why a step of a migration failed.
#[derive(Debug, Error)]
pub enum MigrationError {
    /// It never could.
    #[error(transparent)]
    NotMigratable(#[from] NotMigratable),
    /// A step that does not follow on the last.
    #[error("the device is in state {now}, and has to be in {needed} for this")]
    Order {
        /// Where it is.
        now: DeviceState,
        /// Where it should be.
        needed: DeviceState,
    },
    /// The kernel refused a step.
    #[error("the kernel refused to bring the device from state {from} to {to}; it is in {now}")]
    Refused {
        /// Where it was.
        from: DeviceState,
        /// Where it should be.
        to: DeviceState,
        /// Where it is.
        now: DeviceState,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The function broke on the way.
    #[error(
        "the device failed on its way from state {from} to {to}, and is of no use until it has been \
         reset"
    )]
    Failed {
        /// Where it was.
        from: DeviceState,
        /// Where it should be.
        to: DeviceState,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Reading.
    #[error("the device's state cannot be read beyond its first {read_bytes} bytes")]
    Read {
        /// What was read.
        read_bytes: u64,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Too much of it.
    #[error(
        "the device's state is longer than {limit_bytes} bytes, which is the most that is moved"
    )]
    TooLong {
        /// The limit.
        limit_bytes: u64,
    },
    /// Writing.
    #[error(
        "the device does not take its state, {len_bytes} bytes; is it of the same kind as at the \
         source, with the same firmware?"
    )]
    Write {
        /// What was to be written.
        len_bytes: u64,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The state is of other hardware.
    #[error("the state is that of another device: {what} is {found} there and {expected} here")]
    OtherHardware {
        /// What differs.
        what: &'static str,
        /// In the state.
        found: String,
        /// Here.
        expected: String,
    },
    /// Registers that do not fit.
    #[error("its configuration space does not fit")]
    Config(#[from] ConfigStateError),
    /// The vectors.
    #[error("its interrupts do not fit")]
    Msix(#[from] MsixError),
    /// Those of the host.
    #[error("the device's interrupts cannot be connected")]
    Interrupts(#[source] Box<VfioError>),
    /// DMA would go wrong.
    #[error("the device cannot continue here")]
    Gate(#[from] GateClosed),
}
