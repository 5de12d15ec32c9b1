// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What can go wrong with a vDPA device.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a vDPA device cannot be used, or does not start.
#[derive(Debug, Error)]
pub enum VdpaError {
    /// The device cannot be opened.
    #[error("cannot open {}", path.display())]
    Open {
        /// The path of the configuration.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A call of the kernel failed.
    #[error("the device has not carried out {call}")]
    Call {
        /// Name of the request in `linux/vhost.h`.
        call: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The device lacks a feature that is needed.
    #[error("the device does not offer {0}, which is needed")]
    Lacks(&'static str),
    /// The device has fewer queues than configured.
    #[error("the device has {offered} queues, and num_queues={needed} asks for more")]
    Queues {
        /// Queues of the device.
        offered: u32,
        /// Queues of the configuration.
        needed: u16,
    },
    /// The number of queues is none that such a device can work with.
    #[error("a network device has at least 2 queues, and num_queues={0}")]
    TooFew(u16),
    /// The size of its queues is none.
    #[error("the device has queues of {0} descriptors")]
    QueueSize(u16),
    /// Its type is none.
    #[error("the device says that its virtio type is {0}, which is none")]
    Type(u32),
    /// Guest memory is where the device cannot be given it.
    #[error(
        "guest memory at {start:#x} to {end:#x} is outside of {first:#x} to {last:#x}, which the device can reach"
    )]
    Iova {
        /// First address of the memory.
        start: u64,
        /// Its last address.
        end: u64,
        /// First address for the device.
        first: u64,
        /// Last address for it.
        last: u64,
    },
    /// The device does not accept the features that the driver has chosen of those that it offers.
    #[error("the device does not accept the features {0:#x}, which it offers")]
    FeaturesRefused(u64),
    /// The device did not start.
    #[error("the device does not start: its status is {0:#x}")]
    NotStarted(u8),
    /// Guest memory cannot be mapped.
    #[error(
        "cannot map {len_bytes} bytes of guest memory at {gpa:#x} for the device (a limit of locked memory may be \
         the cause, see RLIMIT_MEMLOCK)"
    )]
    Map {
        /// Guest physical address.
        gpa: u64,
        /// Length.
        len_bytes: u64,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A host resource is not available.
    #[error("cannot {what}")]
    Resource {
        /// What was attempted, as an infinitive clause.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The driver reset the device while memory was being mapped.
    #[error("the device was reset before it had started")]
    Cancelled,
}
