// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests of the driver and their answers (virtio 1.3, 5.15.6), as bytes.
//!
//! Owns the two layouts. A request comes from a guest: what it names is checked where it is carried out.

/// Bytes of a request.
pub(super) const REQUEST_BYTES: usize = 24;
/// Bytes of a response.
pub(super) const RESPONSE_BYTES: usize = 10;

/// What a driver asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// To have blocks.
    Plug(Blocks),
    /// To have them no more.
    Unplug(Blocks),
    /// To have none.
    UnplugAll,
    /// Which of them it has.
    State(Blocks),
    /// Something that no standard knows.
    Unknown(u16),
}

/// Blocks that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    pub(super) gpa: u64,
    pub(super) count: u16,
}

/// What the device says to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Response {
    /// Done.
    Ack,
    /// More than the guest is to have now.
    Nack,
    /// Not now; the driver tries again.
    Busy,
    /// Not a request that could be carried out.
    Error,
    /// Done, and the guest has all of these blocks, some, or none.
    State(PlugState),
}

/// How many of some blocks a guest has.
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
