// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests of the driver and their answers (virtio 1.3, 5.15.6), as bytes.
//!
//! Owns the two layouts. A request comes from a guest: what it names is checked where it is carried out.

/// Length of a request in bytes.
pub(super) const REQUEST_BYTES: usize = 24;
/// Length of a response in bytes.
pub(super) const RESPONSE_BYTES: usize = 10;

/// A request of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Plug blocks.
    Plug(Blocks),
    /// Unplug blocks.
    Unplug(Blocks),
    /// Unplug all blocks.
    UnplugAll,
    /// Return the state of blocks.
    State(Blocks),
    /// An unknown request type.
    Unknown(u16),
}

/// A range of consecutive blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    pub(super) gpa: u64,
    pub(super) count: u16,
}

/// Response to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Response {
    /// Done.
    Ack,
    /// Refused: it exceeds the requested size.
    Nack,
    /// Not possible now; the driver retries.
    Busy,
    /// The request is invalid.
    Error,
    /// Done, with the state of the blocks.
    State(PlugState),
}

/// State of a range of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlugState {
    Plugged,
    Unplugged,
    Mixed,
}

fn u16_at(bytes: &[u8; REQUEST_BYTES], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

impl Request {
    pub(super) fn parse(bytes: &[u8; REQUEST_BYTES]) -> Self {
        let mut gpa = [0; 8];
        gpa.copy_from_slice(&bytes[8..16]);
        let blocks = Blocks { gpa: u64::from_le_bytes(gpa), count: u16_at(bytes, 16) };
        match u16_at(bytes, 0) {
            0 => Self::Plug(blocks),
            1 => Self::Unplug(blocks),
            2 => Self::UnplugAll,
            3 => Self::State(blocks),
            other => Self::Unknown(other),
        }
    }
}

impl Response {
    pub(super) fn bytes(self) -> [u8; RESPONSE_BYTES] {
        let (kind, state): (u16, u16) = match self {
            Self::Ack | Self::State(PlugState::Plugged) => (0, 0),
            Self::Nack => (1, 0),
            Self::Busy => (2, 0),
            Self::Error => (3, 0),
            Self::State(PlugState::Unplugged) => (0, 1),
            Self::State(PlugState::Mixed) => (0, 2),
        };
        let mut bytes = [0; RESPONSE_BYTES];
        bytes[..2].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&state.to_le_bytes());
        bytes
    }
}
