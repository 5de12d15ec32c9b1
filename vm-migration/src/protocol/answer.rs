// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Answers to messages: Ok, or an error with a reason.
//!
//! Owns their numbers and limits. The caller knows which message an answer belongs to, because answers
//! arrive in order.

use super::ProtocolError;
use super::codec::{ANSWER_BYTES_MAX, Header, read_payload};
use super::message::{OFFER, bounded_reason, framed, read_reason};
use crate::transport::ByteSource;

const STATUS_OK: u16 = 1;
const STATUS_ERROR: u16 = 2;

/// The answer to a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Success.
    Ok {
        /// In the answer to Start: the offer to negotiate is accepted.
        offer_taken: bool,
        /// Payload of the answer; empty for version 0.
        payload: Vec<u8>,
    },
    /// Failure, which ends the migration.
    Error {
        /// The reason; empty from a version 0 peer.
        reason: String,
    },
}

impl Answer {
    /// A positive answer without payload.
    pub fn ok() -> Self {
        Self::Ok { offer_taken: false, payload: Vec::new() }
    }

    /// Encodes the answer.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Ok { offer_taken, payload } => {
                let mut extra = [0; 6];
                if *offer_taken {
                    extra[2..].copy_from_slice(&OFFER);
                }
                framed(STATUS_OK, extra, payload)
            }
            Self::Error { reason } => {
                framed(STATUS_ERROR, [0; 6], bounded_reason(reason).as_bytes())
            }
        }
    }

    /// Reads an answer of bounded length.
    ///
    /// # Errors
    /// When the bytes are not an answer.
    pub fn read(from: &mut impl ByteSource) -> Result<Self, ProtocolError> {
        let header = Header::read(from)?;
        Self::read_behind(&header, from)
    }

    /// Reads the rest of an answer whose header has been read, of bounded length.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_behind(header: &Header, from: &mut impl ByteSource) -> Result<Self, ProtocolError> {
        match header.code {
            STATUS_OK => Ok(Self::Ok {
                offer_taken: header.extra[2..] == OFFER,
                payload: read_payload(from, "an answer", header.len_bytes, ANSWER_BYTES_MAX)?,
            }),
            STATUS_ERROR => {
                let reason = read_reason(from, "a refusal", header.len_bytes)?;
                Ok(Self::Error { reason })
            }
            status => Err(ProtocolError::UnknownStatus(status)),
        }
    }
}
