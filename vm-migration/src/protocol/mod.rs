// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The migration protocol: version 0 of cloud-hypervisor's framing, and what is negotiated on top of it.
//!
//! | file | owns |
//! | --- | --- |
//! | `codec` | bytes: headers, tables, variable-length numbers, bounds |
//! | `message` | meaning of single messages: which command, which payload |
//! | `capabilities` | what two peers agree on after Start |
//! | `formats` | versions of configuration and state |
//! | `runs` | compressed sets of pages |
//! | `inflate` | compressed contents of pages, bounded |
//! | `check` | what a check of a migration finds, and the bytes that measure the link |
//! | `blobs` | parts of the state that are sent as bytes: their list, their chunks, their limits |
//!
//! The order of messages (which side may send what when) is not known here: the state machines in `source`
//! and `destination` define it.
//!
//! ```text
//! source                               destination
//!   Start (offer in spare header bytes)  ->  Ok (offer taken, in spare header bytes)
//!   Capabilities (JSON)                  ->  Ok + JSON, or Error + reason      [negotiated]
//!   MemoryFd (with a descriptor) ...     ->  Ok for each                       [local]
//!   Config (JSON)                        ->  [Alive once a second until then, negotiated]
//!                                            Ok [+ layout JSON, negotiated]: memory is mapped
//!   Memory | ZeroPages [negotiated] ...  ->  Ok for each; Error as soon as the machine that is
//!                                            being built meanwhile turns out to be impossible
//!   MemoryZstd [negotiated] ...          ->  Ok for each
//!   AwaitMachine [negotiated]            ->  [Alive once a second until then] Ok: the machine is built,
//!                                            and ready to take its state
//!   Pending                              ->  Ok                                [postcopy]
//!   Blobs (JSON) [negotiated]            ->  [Alive once a second until then] Ok: what takes them is
//!                                            ready                             [precopy, the guest runs]
//!   BlobChunk [negotiated] ...           ->  Ok for each: it is here           [the guest is stopped]
//!   Alive, once a second without a chunk ->  Ok
//!                                        <-  BlobsWritten, not answered
//!   State (JSON)                         ->  Ok
//!   Complete | CompletePaused            ->  Ok: the handover is acknowledged
//!   Confirm [figures]                    ->  Ok: the guest runs                [negotiated]
//!                                        <-  PostcopyDone [figures], answered
//!                                            with Ok [figures]                 [postcopy]
//! ```
//!
//! In postcopy the destination sends Alive about once a second, answered with Ok, until PostcopyDone.
//! After a loss the source opens a first connection again, with Recover in place of Start:
//!
//! ```text
//!   Recover (the migration's token)      ->  Ok + a token for this attempt, or Error + reason
//!   further connections, with that token ->  Ok for each
//!                                        <-  Pending: what is missing, answered with Ok
//! ```
//!
//! A check of a migration is a connection of its own, which the destination answers while it waits for a source. Nothing
//! is moved, and nothing is allocated:
//!
//! ```text
//!   Check                                ->  Ok + JSON as for Capabilities
//!   Capabilities (JSON, with the size)   ->  Ok
//!   Config (JSON)                        ->  [Alive once a second until then] Ok + JSON: what was found
//!   CheckBytes ...                       ->  Ok for each: they are discarded
//! ```
//!
//! Without negotiation the guest runs when Complete is answered, as with every version 0 peer.
//! With it, the destination runs the guest only after Confirm: if it ran on Complete, a lost
//! answer would leave the guest running on both sides.

mod answer;
pub mod blobs;
pub mod capabilities;
pub mod check;
pub mod codec;
pub mod formats;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod inflate;
pub mod message;
pub mod runs;

#[cfg(test)]
mod tests;

use crate::layout::LayoutError;
use crate::transport::TransportError;

/// Invalid data from a peer, or an error of the connection to it.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// An error of the connection, not of the message.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// An unknown command number.
    #[error("the peer sent the unknown command {0:#x}; is it a migration peer at all?")]
    UnknownCommand(u16),
    /// An answer that is neither Ok nor Error.
    #[error("the peer answered with the unknown status {0:#x}; is it a migration peer at all?")]
    UnknownStatus(u16),
    /// An unknown role of an extra connection.
    #[error("an extra connection announced the unknown role {0:#x}")]
    UnknownRole(u16),
    /// A length above the message's limit.
    #[error("the peer announced {what} of {len_bytes} bytes, at most {max_bytes} are accepted")]
    TooLong {
        /// The message.
        what: &'static str,
        /// The announced length.
        len_bytes: u64,
        /// The limit.
        max_bytes: u64,
    },
    /// A length that the message cannot have.
    #[error("the peer sent {what} with a malformed payload of {len_bytes} bytes")]
    BadLength {
        /// The message.
        what: &'static str,
        /// The announced length.
        len_bytes: u64,
    },
    /// An unsupported protocol version.
    #[error("the peer speaks migration protocol version {0}, this side speaks version 0")]
    Version(u16),
    /// A message that is not allowed in this phase.
    #[error("the peer sent {got} where {expected} was due")]
    Unexpected {
        /// The message that came.
        got: &'static str,
        /// The message that was expected.
        expected: &'static str,
    },
    /// A JSON payload that does not parse.
    #[error("the peer's {what} is not valid")]
    Json {
        /// The document.
        what: &'static str,
        /// The parser's error.
        #[source]
        source: serde_json::Error,
    },
    /// A payload with invalid contents.
    #[error("the peer's {what} is not valid: {why}")]
    Malformed {
        /// The message.
        what: &'static str,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A compressed payload that does not decompress.
    #[error("the peer's compressed memory cannot be decompressed")]
    Zstd(#[source] std::io::Error),
    /// Bytes of a part of the state that do not fit to what has come before.
    #[error(transparent)]
    Blob(#[from] blobs::BlobError),
    /// A range that is not guest memory.
    #[error("the peer named memory that the guest does not have")]
    Layout(#[from] LayoutError),
    /// A guest with more pages than a set of missing pages can list.
    #[error(
        "postcopy cannot list the missing pages of a guest of {gib} GiB: with pages of 4 KiB a list covers at \
         most 8 TiB. Migrate it with memory_mode=precopy, or boot it with hugepages=on"
    )]
    TooManyPages {
        /// Size of the guest's memory in GiB.
        gib: u64,
    },
    /// An extra connection without the session's token.
    #[error("an extra connection does not belong to this migration (wrong session token)")]
    Token,
    /// An extra connection, without a token, from elsewhere.
    #[error("an extra connection comes from another host than the source's first one")]
    OtherHost,
}
