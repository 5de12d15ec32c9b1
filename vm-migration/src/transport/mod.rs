// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections between two hosts: addresses, sockets, and waits with a limit.
//!
//! | file | owns |
//! | --- | --- |
//! | `address` | `tcp:` and `unix:` addresses as text |
//! | `reach` | name resolution and connecting, with a time limit and a cancel |
//! | `wait` | poll with a time limit and a cancel |
//! | `reader` | the reading end of a connection |
//! | `rights` | descriptors that are sent along with bytes |
//! | `listener` | listening sockets |
//! | `socket` | connections, vectored transfer to and from guest memory |
//! | `secured` | the same transfers with TLS |
//! | `tls` | TLS: certificates, handshake, records |
//!
//! Nothing here knows what the bytes mean. No wait is unbounded, except a listener's when its
//! caller asks for that, and each ends at once when the migration is cancelled.

mod address;
mod listener;
mod reach;
mod reader;
mod rights;
mod secured;
mod socket;
pub(crate) mod tls;
mod wait;

#[cfg(test)]
mod tests;

pub use address::{Address, AddressError};
pub use listener::Listener;
pub use reader::Reader;
pub use socket::{Connection, Part};
pub use tls::{ClientTls, ServerTls, TlsError};
pub(crate) use wait::{WaitEnd, wait_readable, wait_readable_or_left};

use std::io;
use std::time::Duration;

/// Idle time after which TCP asks whether the peer is still there.
pub const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);

/// Time between two such questions.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);

/// Questions without an answer after which the connection is dead: found within about 11 s.
pub const KEEPALIVE_PROBES: u32 = 3;

/// How long sent data may stay unacknowledged before the connection is dead.
pub const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes that a bulk socket of postcopy keeps unsent: two chunks, so that a page which was claimed
/// for bulk and is then asked for waits for little.
pub const BULK_UNSENT_BYTES_MAX: u32 = 128 << 10;

/// The slowest that a message may travel over all, alongside the time that it may stand still: 512 kbit/s. A
/// peer that sends or takes a byte now and then would otherwise keep this side for as long as it likes.
pub const SLOWEST_BYTES_PER_S: u64 = 64 << 10;

/// What a connection can suffer.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// An address that does not resolve.
    #[error("{address} does not resolve to a network address")]
    Resolve {
        /// The address.
        address: Address,
        /// The resolver's words.
        #[source]
        source: io::Error,
    },
    /// No listener there.
    #[error("cannot connect to {address}; is a VM waiting there in receive-migration?")]
    Connect {
        /// The address.
        address: Address,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: Address,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another process listens there.
    #[error("cannot listen on {0}: another process already listens there")]
    InUse(Address),
    /// Connections there have to use TLS, and were not to.
    #[error(
        "cannot listen on {0} without TLS: the source of a migration that is over may still come back there, \
         and that used TLS; give tls_dir, or use another port"
    )]
    NeedsTls(Address),
    /// The peer ended the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// Nothing moved for too long.
    #[error("the peer did not react for {} s while this side was {what}", after.as_secs_f32())]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// How long.
        after: Duration,
    },
    /// It moved, but hardly.
    #[error(
        "the peer took more than {} s over {bytes} bytes while this side was {what}; a message has to \
         travel at {} KiB/s or more",
        after.as_secs_f32(),
        SLOWEST_BYTES_PER_S >> 10
    )]
    TooSlow {
        /// What was being done.
        what: &'static str,
        /// What has passed.
        bytes: u64,
        /// In how long.
        after: Duration,
    },
    /// A cancel has come.
    #[error("the wait was cancelled")]
    Cancelled,
    /// Memory that has no page, and gets none.
    #[error(
        "the host has no page for guest memory while this side is {what}; give its pool of huge pages \
         (hugetlb, nr_hugepages) as many as the VM has memory"
    )]
    NoPage {
        /// What was being done.
        what: &'static str,
    },
    /// TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The system's own error.
    #[error("the connection failed while {what}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

impl TransportError {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}
