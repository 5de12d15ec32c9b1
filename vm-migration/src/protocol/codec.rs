// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bytes of the protocol: the 16-byte header, range tables, variable-length numbers.
//!
//! Owns every limit on what is read from a peer. It checks that bytes have the form of a message,
//! not whether the message is allowed now. Buffers grow with what has arrived, not
//! with what was announced.

use super::ProtocolError;
use crate::layout::{GpaRange, to_usize};
use crate::transport::ByteSource;

/// Length of a header.
pub const HEADER_BYTES: usize = 16;

/// Length of one entry of a range table: address and length, 64 bits each.
pub const RANGE_BYTES: usize = 16;

/// Longest configuration: that of a guest with a thousand vCPUs, CPUID included, is far shorter.
pub const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Longest device and vCPU state: about 100 KiB for a vCPU, a thousand of them, doubled.
pub const STATE_BYTES_MAX: u64 = 256 << 20;

/// Longest range table: a million ranges. This program sends some hundred at most.
pub const TABLE_BYTES_MAX: u64 = 16 << 20;

/// Longest range table of memory that a source of plain version 0 sends on its first connection: it sends each page that was
/// written and has no neighbour as a range of its own, and this is 64 GiB of such pages.
pub const PLAIN_TABLE_BYTES_MAX: u64 = 256 << 20;

/// Longest capability document.
pub const CAPABILITIES_BYTES_MAX: u64 = 1 << 20;

/// Longest payload of an Ok answer (a layout of 4,096 regions in JSON).
pub const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// Longest reason for a refusal.
pub const REASON_BYTES_MAX: u64 = 4096;

/// Longest document of figures, with room for ten times as many as there are.
pub const FIGURES_BYTES_MAX: u64 = 16 << 10;

/// Longest set of pending pages: the raw bitmap of 8 TiB.
pub const PENDING_BYTES_MAX: u64 = 256 << 20;

/// Least step in which buffers grow while a payload arrives.
const GROWTH_BYTES: usize = 64 << 10;

/// The header of messages and answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Command or status.
    pub code: u16,
    /// Six bytes that depend on the command; zero where it does not use them.
    pub extra: [u8; 6],
    /// Bytes of payload that follow. Memory contents follow their table and are not counted.
    pub len_bytes: u64,
}

impl Header {
    /// A header without extra bytes.
    pub fn new(code: u16, len_bytes: u64) -> Self {
        Self { code, extra: [0; 6], len_bytes }
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..2].copy_from_slice(&self.code.to_le_bytes());
        bytes[2..8].copy_from_slice(&self.extra);
        bytes[8..].copy_from_slice(&self.len_bytes.to_le_bytes());
        bytes
    }

    /// Decodes a header; any 16 bytes are one.
    pub fn decode(bytes: [u8; HEADER_BYTES]) -> Self {
        let [c0, c1, e0, e1, e2, e3, e4, e5, l0, l1, l2, l3, l4, l5, l6, l7] = bytes;
        Self {
            code: u16::from_le_bytes([c0, c1]),
            extra: [e0, e1, e2, e3, e4, e5],
            len_bytes: u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7]),
        }
    }

    /// Reads a header.
    ///
    /// # Errors
    /// When the source fails.
    pub fn read(from: &mut impl ByteSource) -> Result<Self, ProtocolError> {
        let mut bytes = [0; HEADER_BYTES];
        from.read_exact(&mut bytes)?;
        Ok(Self::decode(bytes))
    }
}

/// Reads a payload of at most `max_bytes`.
///
/// # Errors
/// [`ProtocolError::TooLong`] before anything is read or allocated, and the errors of `from`.
pub fn read_payload(
    from: &mut impl ByteSource,
    what: &'static str,
    len_bytes: u64,
    max_bytes: u64,
) -> Result<Vec<u8>, ProtocolError> {
    if len_bytes > max_bytes {
        return Err(ProtocolError::TooLong { what, len_bytes, max_bytes });
    }
    let len = to_usize(len_bytes);
    let mut payload = Vec::new();
    while payload.len() < len {
        let have = payload.len();
        // Doubling keeps the number of copies small; a length alone allocates one step only.
        let more = (len - have).min(have.max(GROWTH_BYTES));
        payload.resize(have + more, 0);
        from.read_exact(&mut payload[have..])?;
    }
    Ok(payload)
}

/// Appends a range table.
pub fn put_table(out: &mut Vec<u8>, ranges: &[GpaRange]) {
    out.reserve(ranges.len() * RANGE_BYTES);
    for range in ranges {
        out.extend_from_slice(&range.gpa.to_le_bytes());
        out.extend_from_slice(&range.len_bytes.to_le_bytes());
    }
}

/// Reads a range table of at most `max_bytes`; the ranges are unchecked.
///
/// # Errors
/// When it is too long or not a whole number of entries.
pub fn read_table(
    from: &mut impl ByteSource,
    what: &'static str,
    len_bytes: u64,
    max_bytes: u64,
) -> Result<Vec<GpaRange>, ProtocolError> {
    if !len_bytes.is_multiple_of(RANGE_BYTES as u64) {
        return Err(ProtocolError::BadLength { what, len_bytes });
    }
    let payload = read_payload(from, what, len_bytes, max_bytes)?;
    let word =
        |bytes: &[u8]| bytes.iter().rev().fold(0u64, |all, byte| all << 8 | u64::from(*byte));
    let (entries, _) = payload.as_chunks::<RANGE_BYTES>();
    Ok(entries
        .iter()
        .map(|entry| GpaRange { gpa: word(&entry[..8]), len_bytes: word(&entry[8..]) })
        .collect())
}

/// Appends a number as a varint: groups of seven bits, least significant first.
pub fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    loop {
        let low = u8::try_from(value & 0x7f).unwrap_or(0);
        value >>= 7;
        if value == 0 {
            out.push(low);
            return;
        }
        out.push(low | 0x80);
    }
}

/// Takes a varint from the front of a slice; `None` when it is cut off or exceeds 64 bits.
pub fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..70).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        let group = u64::from(first & 0x7f);
        if shift > 63 - 7 && group >> (64 - shift) != 0 {
            return None;
        }
        value |= group << shift;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}
