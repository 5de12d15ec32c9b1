// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The first message of a connection that nothing is known of, within a time that it cannot stretch.
//!
//! Owns the limits: so many bytes, so much time in all. A thread that waits for one particular peer
//! reads with it what any other may send, and must not be held by a byte now and then.

use std::time::{Duration, Instant};

use crate::channel::Channel;
use crate::error::Cause;
use crate::protocol::ProtocolError;
use crate::protocol::codec::{HEADER_BYTES, Header};
use crate::protocol::message::Message;
use crate::transport::{Connection, TransportError};

/// Longest payload of a message that can come first: those that are due have less.
const PAYLOAD_BYTES_MAX: u64 = 64;

/// Reads a connection's first message within `limit`.
///
/// # Errors
/// It did not come in time, is no message, or longer than any that could be due.
pub(super) fn hear(connection: Connection, limit: Duration) -> Result<(Channel, Message), Cause> {
    let deadline = Instant::now() + limit;
    let mut bytes = vec![0; HEADER_BYTES];
    fill(&connection, &mut bytes, deadline, limit)?;
    let header = Header::read(&mut &bytes[..])?;
    if header.len_bytes > PAYLOAD_BYTES_MAX {
        let len_bytes = header.len_bytes;
        return Err(ProtocolError::BadLength { what: "a first message", len_bytes }.into());
    }
    let mut payload = vec![0; usize::try_from(header.len_bytes).unwrap_or(0)];
    fill(&connection, &mut payload, deadline, limit)?;
    bytes.extend(payload);
    let message = Message::read(&mut &bytes[..])?;
    Ok((Channel::new(connection), message))
}

fn fill(
    connection: &Connection,
    mut rest: &mut [u8],
    deadline: Instant,
    limit: Duration,
) -> Result<(), TransportError> {
    while !rest.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(TransportError::Timeout {
                what: "waiting for a first message",
                after: limit,
            });
        }
        connection.set_stall_timeout(left);
        let count = connection.receive_some(rest)?.min(rest.len());
        rest = &mut rest[count..];
    }
    Ok(())
}
