// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why a vhost-user back end cannot be used, or not any more.

use std::io::ErrorKind;
use std::path::PathBuf;

use thiserror::Error;

/// Why a back end cannot be used.
#[derive(Debug, Error)]
pub enum VhostUserError {
    /// No connection to the socket.
    #[error("cannot connect to {path} within {limit_ms} ms")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// How long it was tried.
        limit_ms: u128,
        /// The last attempt's error.
        #[source]
        source: std::io::Error,
    },
    /// No back end has connected to the socket.
    #[error("no back end has connected to {path} within {limit_ms} ms")]
    Accept {
        /// The socket.
        path: PathBuf,
        /// How long it was waited for.
        limit_ms: u128,
        /// The last attempt's error.
        #[source]
        source: std::io::Error,
    },
    /// A host resource is not available.
    #[error("cannot {what}")]
    Resource {
        /// What was attempted, as an infinitive clause.
        what: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A request failed: the back end refused it, sent something else, or closed the connection.
    #[error("the back end has not carried out {request}")]
    Request {
        /// Name of the request in the vhost-user protocol.
        request: &'static str,
        /// The cause.
        #[source]
        source: vhost::Error,
    },
    /// A request was not answered in time.
    #[error("the back end has not answered {request} within {limit_ms} ms")]
    Stalled {
        /// Name of the request in the vhost-user protocol.
        request: &'static str,
        /// The time limit.
        limit_ms: u128,
    },
    /// The connection has failed before.
    #[error("the connection to the back end was lost before")]
    Lost,
    /// The back end lacks a feature that the device needs.
    #[error("the back end does not offer {0}, which this device needs")]
    Lacks(&'static str),
    /// The back end serves fewer queues than configured.
    #[error("the back end serves {offered} queues at most, and the device has {needed}")]
    Queues {
        /// Queues of the back end.
        offered: u64,
        /// Queues of the device.
        needed: usize,
    },
    /// The back end does not take the MTU.
    #[error("the back end refuses an MTU of {mtu} bytes")]
    Mtu {
        /// The MTU.
        mtu: u16,
    },
    /// The back end does not give its state, or does not take one.
    #[error("the back end has not {what} its state")]
    State {
        /// What it was to do, as a participle.
        what: &'static str,
        /// The cause, if it has not just refused.
        #[source]
        source: Option<std::io::Error>,
    },
    /// The back end takes fewer regions of memory than the guest has.
    #[error("the back end takes {offered} regions of guest memory, and the VM has {needed}")]
    Regions {
        /// Regions of the back end.
        offered: u64,
        /// Regions of the guest.
        needed: usize,
    },
    /// Guest memory cannot be shared.
    #[error("guest memory at {gpa:#x} is private: vhost-user needs shared=on")]
    PrivateMemory {
        /// Start of the region.
        gpa: u64,
    },
    /// A ring of the driver is outside of guest memory.
    #[error("queue {index} is outside of guest memory")]
    Ring {
        /// Index of the queue.
        index: u16,
    },
}

impl VhostUserError {
    /// Whether the back end has closed the connection instead of an answer.
    pub(super) fn is_hang_up(&self) -> bool {
        use vhost::vhost_user::Error as Protocol;
        let Self::Request { source: vhost::Error::VhostUserProtocol(source), .. } = self else {
            return false;
        };
        match source {
            Protocol::Disconnected | Protocol::PartialMessage => true,
            Protocol::SocketBroken(error) | Protocol::SocketError(error) => {
                matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
            }
            _ => false,
        }
    }
}
