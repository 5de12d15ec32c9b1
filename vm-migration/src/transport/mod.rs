// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections between two hosts: addresses, sockets, and waits with a limit.
//!
//! | file | owns |
//! | --- | --- |
//! | `address` | `tcp:` and `unix:` addresses as text |
//! | `reach` | name resolution and connecting, with a time limit and a cancel |
//! | `wait` | poll with a time limit and a cancel |
//! | `reader` | the reading end of a connection |
//! | `received` | whether what was sent is with the peer's host |
//! | `rights` | descriptors that are sent along with bytes |
//! | `same_host` | whether two connections come from one host |
//! | `listener` | listening sockets |
//! | `leaving` | the end of a connection within a message, and with bytes that may not arrive any more |
//! | `socket` | connections, vectored transfer to and from guest memory |
//! | `secured` | the same transfers with TLS |
//! | `tls` | TLS: certificates, handshake, records |
//!
//! Nothing here knows what the bytes mean. No wait is unbounded, except a listener's when its
//! caller asks for that, and each ends at once when the migration is cancelled.

mod address;
mod leaving;
mod listener;
mod reach;
mod reader;
mod received;
mod rights;
mod same_host;
mod secured;
mod socket;
pub(crate) mod tls;
mod wait;

#[cfg(test)]
mod tests;

pub use address::{Address, AddressError};
pub use listener::Listener;
pub(crate) use reader::AHEAD_WITH_PAGE_BYTES;
pub use reader::{ByteSource, Reader};
pub(crate) use secured::ReceivedBytes;
pub use socket::{Connection, Part};
pub use tls::{ClientTls, ServerTls, TlsError};
#[cfg(all(any(test, feature = "testing"), not(loom)))]
#[doc(hidden)]
pub use tls::{TlsRecordsOutcome, fuzz_tls_records, tls_records_outcome};
pub(crate) use wait::{WaitEnd, poll_readable, wait_readable, wait_readable_or_left};

use std::io;
use std::time::Duration;

/// Idle time after which TCP probes whether the peer is alive.
pub const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);

/// Time between two probes.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);

/// Unanswered probes after which the connection counts as dead: within about 11 s.
pub const KEEPALIVE_PROBES: u32 = 3;

/// How long sent data may stay unacknowledged before the connection counts as dead.
pub const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// Most unsent bytes in the socket of a postcopy background connection: two chunks, so that a page that was
/// claimed for the background and is then requested waits only briefly.
pub const BULK_UNSENT_BYTES_MAX: u32 = 128 << 10;

/// Lowest average rate of a message, in addition to the time for which it may stall: 512 kbit/s. A peer that
/// sends or takes a byte now and then could otherwise block this side indefinitely.
pub const SLOWEST_BYTES_PER_S: u64 = 64 << 10;

/// Longest wait for a connection to be established, including name resolution.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// An address that does not resolve.
    #[error("{address} does not resolve to a network address")]
    Resolve {
        /// The address.
        address: Address,
        /// The resolver's error.
        #[source]
        source: io::Error,
    },
    /// The connection could not be established.
    #[error("cannot connect to {address}; is a VM waiting there in receive-migration?")]
    Connect {
        /// The address.
        address: Address,
        /// The host's error.
        #[source]
        source: io::Error,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: Address,
        /// The host's error.
        #[source]
        source: io::Error,
    },
    /// Another process listens there.
    #[error("cannot listen on {0}: another process already listens there")]
    InUse(Address),
    /// Connections to the address must use TLS, and the new listener has no certificates.
    #[error(
        "cannot listen on {0} without TLS: the source of an earlier migration, which used TLS, may still \
         reconnect there; give tls_dir, or use another port"
    )]
    NeedsTls(Address),
    /// The peer ended the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// No data moved for too long.
    #[error("the peer did not react for {} s while this side was {what}", after.as_secs_f32())]
    Timeout {
        /// The step that waited.
        what: &'static str,
        /// The time limit.
        after: Duration,
    },
    /// A message was slower than the lowest rate.
    #[error(
        "the peer took more than {} s over {bytes} bytes while this side was {what}; a message has to \
         travel at {} KiB/s or more",
        after.as_secs_f32(),
        SLOWEST_BYTES_PER_S >> 10
    )]
    TooSlow {
        /// The step.
        what: &'static str,
        /// Bytes that were transferred.
        bytes: u64,
        /// Time that they took.
        after: Duration,
    },
    /// The wait was cancelled.
    #[error("the wait was cancelled")]
    Cancelled,
    /// The host has no page for guest memory.
    #[error(
        "the host has no free page for guest memory while this side is {what}; enlarge its pool of huge \
         pages (hugetlb, nr_hugepages) to the size of the VM's memory"
    )]
    NoPage {
        /// The step.
        what: &'static str,
    },
    /// An error of TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Another error of the host.
    #[error("the connection failed while {what}")]
    Io {
        /// The step.
        what: &'static str,
        /// The host's error.
        #[source]
        source: io::Error,
    },
}

impl TransportError {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}
