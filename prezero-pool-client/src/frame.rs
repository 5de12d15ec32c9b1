// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Framing of the pool's protocol: the header of every message, and the fields of its body.
//!
//! Owns how a message begins, and which lengths a kind of message can have. A decoder says "not all here
//! yet", "wrong", or gives a body; it must never take memory for what has only been announced. Which kinds there
//! are, and what they mean, is in [`crate::protocol`] and [`crate::pinned`].

use thiserror::Error;

pub(crate) const MAGIC: [u8; 4] = *b"GPZ1";
/// What every message begins with.
pub const HEADER_BYTES: usize = 16;

/// A kind of message.
pub(crate) struct Kind {
    /// Its number on the wire.
    pub number: u16,
    /// Whether a body of so many bytes can be one.
    pub has_length: fn(usize) -> bool,
}

/// Bytes that are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ProtocolError {
    /// Another protocol, or another version of this one.
    #[error("the message does not begin with GPZ1: the peer is not a pool of this version")]
    Magic,
    /// A kind that this side does not take.
    #[error("message of kind {0} is not expected here")]
    Kind(u16),
    /// A length that the kind cannot have.
    #[error("message of kind {kind} has a body of {len_bytes} bytes")]
    Length {
        /// The kind.
        kind: u16,
        /// The length.
        len_bytes: u32,
    },
    /// A value that means nothing.
    #[error("message of kind {kind}: {what} {value} is not known")]
    Value {
        /// The kind.
        kind: u16,
        /// Which field.
        what: &'static str,
        /// What is in it.
        value: u64,
    },
    /// An explanation that is not text.
    #[error("a refusal is not UTF-8")]
    Text,
}

/// A part of a message at a fixed place.
pub(crate) fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    if let Some(part) = bytes.get(at..at + N) {
        out.copy_from_slice(part);
    }
    out
}

/// Kind and body of a message, and how long all of it is.
pub(crate) type Parts<'a> = (u16, &'a [u8], usize);

/// The message at the start of `bytes`; `None` if there is not enough yet.
pub(crate) fn split<'a>(
    bytes: &'a [u8],
    allowed: &[&Kind],
) -> Result<Option<Parts<'a>>, ProtocolError> {
    let known = bytes.len().min(MAGIC.len());
    if bytes.get(..known) != MAGIC.get(..known) {
        return Err(ProtocolError::Magic);
    }
    if bytes.len() < HEADER_BYTES {
        return Ok(None);
    }
    let kind = u16::from_le_bytes(field(bytes, 4));
    let len_bytes = u32::from_le_bytes(field(bytes, 8));
    let Some(Kind { has_length, .. }) = allowed.iter().find(|known| known.number == kind) else {
        return Err(ProtocolError::Kind(kind));
    };
    let reserved = u16::from_le_bytes(field(bytes, 6));
    let reserved = u64::from(reserved) | u64::from(u32::from_le_bytes(field(bytes, 12)));
    if reserved != 0 {
        return Err(ProtocolError::Value { kind, what: "reserved field", value: reserved });
    }
    let len = usize::try_from(len_bytes).unwrap_or(usize::MAX);
    if !has_length(len) {
        return Err(ProtocolError::Length { kind, len_bytes });
    }
    let whole = HEADER_BYTES + len;
    Ok(bytes.get(HEADER_BYTES..whole).map(|body| (kind, body, whole)))
}

/// A whole message.
pub(crate) fn message(kind: &Kind, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES + body.len());
    out.extend(MAGIC);
    out.extend(kind.number.to_le_bytes());
    out.extend([0; 2]);
    // Bodies are made here, at most MESSAGE_BYTES_MAX long.
    out.extend(u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend([0; 4]);
    out.extend(body);
    out
}

/// Refuses a reserved field that is used.
pub(crate) fn check_zero(kind: u16, bytes: &[u8]) -> Result<(), ProtocolError> {
    match bytes.iter().find(|byte| **byte != 0) {
        None => Ok(()),
        Some(byte) => {
            Err(ProtocolError::Value { kind, what: "reserved field", value: u64::from(*byte) })
        }
    }
}
