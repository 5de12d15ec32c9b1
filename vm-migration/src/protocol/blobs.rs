// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Blobs: parts of the state that are too long for its document, such as that of hardware, and are sent as bytes.
//!
//! Owns their list, the form of a chunk, every limit on both, and the names of what can be wrong with them. Each chunk
//! says which bytes of which blob it has, so that a blob travels on all connections at once. Must never know what the
//! bytes mean. The order of chunks is for `source` and `destination`.
//!
//! ```text
//! BlobChunk   0: command   2: blob   4: zero   8: length of the rest   16: offset in the blob   24: bytes
//! ```
//!
//! A chunk without bytes is the end of its blob, and its offset the length of it. `BlobsWritten` has 8 bytes for each blob,
//! little-endian.

use serde::{Deserialize, Serialize};

use super::ProtocolError;
use super::codec::{HEADER_BYTES, Header, read_payload};
use super::message::Command;
use crate::layout::to_usize;
use crate::transport::ByteSource;

/// Most blobs of a state: more than there are slots for devices on some buses.
pub const BLOBS_MAX: usize = 256;

/// Longest list of blobs.
pub const BLOB_LIST_BYTES_MAX: u64 = 1 << 20;

/// Longest blob: several times the memory of a GPU.
pub const BLOB_BYTES_MAX: u64 = 1 << 40;

/// Most bytes of a chunk. Long enough to cost little beside its bytes, short enough that all connections have some.
pub const CHUNK_BYTES_MAX: u64 = 1 << 20;

/// How far a chunk may end behind what is written of its blob. Both sides hold no more than this of a blob.
pub const WINDOW_BYTES_MAX: u64 = 32 << 20;

/// The most that either side holds of all blobs together, however many there are.
pub const WINDOWS_BYTES_MAX: u64 = 512 << 20;

// Of each blob two chunks at least may be under way.
const _: () = assert!(WINDOWS_BYTES_MAX / BLOBS_MAX as u64 >= 2 * CHUNK_BYTES_MAX);

/// The window of each blob where there are so many.
pub fn window_bytes(blobs: usize) -> u64 {
    (WINDOWS_BYTES_MAX / (blobs as u64).max(1)).min(WINDOW_BYTES_MAX)
}

/// Length of the offset before the bytes of a chunk.
const OFFSET_BYTES: usize = 8;

/// What is wrong with a blob or with its chunks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlobError {
    /// Too many blobs.
    #[error("the source announced {0} parts of the state, at most {BLOBS_MAX} are accepted")]
    TooMany(usize),
    /// A limit above that of this side.
    #[error(
        "the source announced up to {len_bytes_max} bytes of the state of '{name}', at most {BLOB_BYTES_MAX} are \
         accepted"
    )]
    Limit {
        /// Name of the blob.
        name: String,
        /// The announced limit.
        len_bytes_max: u64,
    },
    /// A chunk of no blob.
    #[error("the source sent bytes of part {blob} of the state, and announced {count}")]
    Unknown {
        /// Number of the blob.
        blob: u16,
        /// Number of announced blobs.
        count: usize,
    },
    /// Bytes that have come before.
    #[error("bytes of the state of '{name}' came twice, at {offset}")]
    Twice {
        /// Name of the blob.
        name: String,
        /// Where they belong.
        offset: u64,
    },
    /// Bytes too far ahead.
    #[error(
        "bytes of the state of '{name}' came too early: they end at {end}, and {written} are written"
    )]
    Ahead {
        /// Name of the blob.
        name: String,
        /// Their end.
        end: u64,
        /// The bytes before all that is missing.
        written: u64,
    },
    /// The window is full of small pieces.
    #[error("the state of '{name}' came in pieces that are too small: {max} wait to be written")]
    Pieces {
        /// Name of the blob.
        name: String,
        /// The most that may wait.
        max: usize,
    },
    /// More bytes than announced.
    #[error(
        "the state of '{name}' has {end} bytes or more, and {len_bytes_max} at most were announced"
    )]
    TooLong {
        /// Name of the blob.
        name: String,
        /// The end of what has come.
        end: u64,
        /// The announced limit.
        len_bytes_max: u64,
    },
    /// Bytes beyond the end.
    #[error("the state of '{name}' goes on at {at}, beyond its end")]
    BeyondEnd {
        /// Name of the blob.
        name: String,
        /// Where it goes on, or was to end.
        at: u64,
    },
    /// Bytes are missing.
    #[error("the state of '{name}' is not complete: {written} bytes of it have come in order")]
    Incomplete {
        /// Name of the blob.
        name: String,
        /// The bytes that have come in order.
        written: u64,
    },
    /// Bytes of a blob of which others were refused by the machine.
    #[error("bytes of the state of '{name}' before these were refused: {reason}")]
    Refused {
        /// Name of the blob.
        name: String,
        /// Why.
        reason: String,
    },
}

/// A part of the state that is sent as bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlobInfo {
    /// Its name, for messages and for the machine.
    pub name: String,
    /// The most that it may have: the source sends no more.
    pub len_bytes_max: u64,
    /// What the machine at the destination has to know before it takes the bytes.
    pub about: serde_json::Value,
}

/// All of them, in the order of their numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlobList {
    /// The blobs.
    pub blobs: Vec<BlobInfo>,
}

impl BlobList {
    /// Encodes the list as JSON.
    pub fn to_json(&self) -> Vec<u8> {
        // Maps have string keys and values of JSON are finite: serialising cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Parses a list of the peer.
    ///
    /// # Errors
    /// The bytes are no list, or one that exceeds a limit.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let what = "list of parts of the state";
        let list: Self =
            serde_json::from_slice(bytes).map_err(|source| ProtocolError::Json { what, source })?;
        if list.blobs.len() > BLOBS_MAX {
            return Err(BlobError::TooMany(list.blobs.len()).into());
        }
        // They are shown in messages.
        if list.blobs.iter().any(|blob| blob.name.chars().any(char::is_control)) {
            return Err(ProtocolError::Malformed { what, why: "a name has control characters" });
        }
        match list.blobs.iter().find(|blob| blob.len_bytes_max > BLOB_BYTES_MAX) {
            Some(BlobInfo { name, len_bytes_max, .. }) => {
                let (name, len_bytes_max) = (name.clone(), *len_bytes_max);
                Err(BlobError::Limit { name, len_bytes_max }.into())
            }
            None => Ok(list),
        }
    }
}

/// Bytes of a blob, or its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobChunk {
    /// Number of the blob.
    pub blob: u16,
    /// Where the bytes belong.
    pub offset: u64,
    /// The bytes; none at the end of the blob.
    pub bytes: Vec<u8>,
}

impl BlobChunk {
    /// All that precedes the bytes.
    pub fn head(&self) -> [u8; HEADER_BYTES + OFFSET_BYTES] {
        let [b0, b1] = self.blob.to_le_bytes();
        let len_bytes = OFFSET_BYTES as u64 + self.bytes.len() as u64;
        let code = Command::BlobChunk.code();
        let header = Header { code, extra: [b0, b1, 0, 0, 0, 0], len_bytes };
        let mut head = [0; HEADER_BYTES + OFFSET_BYTES];
        head[..HEADER_BYTES].copy_from_slice(&header.encode());
        head[HEADER_BYTES..].copy_from_slice(&self.offset.to_le_bytes());
        head
    }

    /// Reads what follows the header.
    pub(super) fn read(
        from: &mut impl ByteSource,
        Header { extra, len_bytes, .. }: Header,
    ) -> Result<Self, ProtocolError> {
        let what = Command::BlobChunk.name();
        let Some(count) = len_bytes.checked_sub(OFFSET_BYTES as u64) else {
            return Err(ProtocolError::BadLength { what, len_bytes });
        };
        if count > CHUNK_BYTES_MAX {
            return Err(ProtocolError::TooLong {
                what,
                len_bytes: count,
                max_bytes: CHUNK_BYTES_MAX,
            });
        }
        let [b0, b1, rest @ ..] = extra;
        if rest != [0; 4] {
            let why = "its header has more than the number of a part";
            return Err(ProtocolError::Malformed { what, why });
        }
        let mut offset = [0; OFFSET_BYTES];
        from.read_exact(&mut offset)?;
        let mut bytes = vec![0; to_usize(count)];
        from.read_exact(&mut bytes)?;
        let (blob, offset) = (u16::from_le_bytes([b0, b1]), u64::from_le_bytes(offset));
        Ok(Self { blob, offset, bytes })
    }
}

/// Encodes how much of each blob is written.
pub(super) fn encode_written(written: &[u64]) -> Vec<u8> {
    written.iter().flat_map(|bytes| bytes.to_le_bytes()).collect()
}

/// Reads what follows the header of that.
pub(crate) fn read_written(
    from: &mut impl ByteSource,
    Header { len_bytes, .. }: Header,
) -> Result<Vec<u64>, ProtocolError> {
    const EACH: usize = size_of::<u64>();
    let what = Command::BlobsWritten.name();
    let payload = read_payload(from, what, len_bytes, (BLOBS_MAX * EACH) as u64)?;
    let (numbers, rest) = payload.as_chunks::<EACH>();
    if !rest.is_empty() {
        return Err(ProtocolError::BadLength { what, len_bytes });
    }
    Ok(numbers.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
}
