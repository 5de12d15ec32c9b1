// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Messages between a VMM and the pool: their form on the wire.
//!
//! Owns encoding and decoding of each message; the header and what all of them share is in `frame`. Numbers
//! are little-endian.
//!
//! ```text
//!   header   magic "GPZ1" | kind u16 | 0 u16 | length of the body u32 | 0 u32
//!   Take     size u64 | pages u8 | 0 x 3 | node u32 (all ones: any)
//!   Granted  size u64 | pages u8 | 0 x 7          with the memfd as SCM_RIGHTS
//!   Refused  reason u16 | 0 u16 | text, UTF-8
//! ```
//!
//! Memory that is mapped for a device already has messages of its own: see `pinned`.

use pci_address::Bdf;

use crate::frame::{HEADER_BYTES, Kind, ProtocolError, check_zero, field, message, split};
use crate::pages::{ANY_NODE, PagesWanted, SlotPages, known};
use crate::pinned::{
    GRANTED_PINNED, PINNED_BYTES, PinnedGrant, RELEASE, TAKE_PINNED, TakePinned, device_to_release,
    release,
};

const BODY_BYTES_FIXED: usize = 16;
/// Longest explanation of a refusal; one or two sentences.
const TEXT_BYTES_MAX: usize = 512;
/// Longest message: a request for memory of many zones.
pub const MESSAGE_BYTES_MAX: usize = PINNED_BYTES;
// A refusal is no longer.
const _: () = assert!(HEADER_BYTES + 4 + TEXT_BYTES_MAX <= MESSAGE_BYTES_MAX);

const TAKE: Kind = Kind { number: 1, has_length: |len| len == BODY_BYTES_FIXED };
const GRANTED: Kind = Kind { number: 2, has_length: |len| len == BODY_BYTES_FIXED };
const REFUSED: Kind = Kind { number: 3, has_length: |len| (4..=4 + TEXT_BYTES_MAX).contains(&len) };

/// Asks for memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Take {
    /// At least so many bytes, in one memfd.
    pub size_bytes: u64,
    /// Of such pages.
    pub pages: PagesWanted,
    /// On this NUMA node of the host.
    pub node: Option<u32>,
}

/// Why there is no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// None of that kind is ready now.
    Empty,
    /// The pool keeps none of that kind.
    NoSuchSlot,
    /// The user has as much as the pool gives to this user.
    OverLimit,
    /// The pool could not hand over what it has.
    Failed,
    /// The slot is for other users.
    NotAllowed,
}

/// What the pool answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The memfd comes with this message.
    Granted {
        /// How long it is; at least what was asked for.
        size_bytes: u64,
        /// What it consists of.
        pages: SlotPages,
    },
    /// Memory that a device is ready to reach: its descriptors come with this message.
    GrantedPinned(PinnedGrant),
    /// There is none.
    Refused {
        /// Why, for programs.
        reason: Refusal,
        /// Why, for messages.
        text: String,
    },
}

/// What a VMM may ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// For memory.
    Take(Take),
    /// For memory that a device is ready to reach, and the device.
    TakePinned(TakePinned),
    /// For the device alone to be released; the answer is a refusal. VMMs of earlier versions ask for memory, too, of
    /// which this is all that can be fulfilled.
    Release(Bdf),
}

impl Take {
    /// As it goes over the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = self.size_bytes.to_le_bytes().to_vec();
        body.extend([self.pages as u8, 0, 0, 0]);
        body.extend(self.node.unwrap_or(ANY_NODE).to_le_bytes());
        message(&TAKE, &body)
    }

    /// The request at the start of `bytes` and its length; `None` if it is not all there.
    ///
    /// # Errors
    /// What is there is no request.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, ProtocolError> {
        let Some((kind, body, whole)) = split(bytes, &[&TAKE])? else { return Ok(None) };
        let size_bytes = u64::from_le_bytes(field(body, 0));
        let [pages, rest @ ..] = field::<4>(body, 8);
        check_zero(kind, &rest)?;
        let node = u32::from_le_bytes(field(body, 12));
        let pages = known(&PagesWanted::ALL, kind, pages)?;
        if size_bytes == 0 {
            return Err(ProtocolError::Value { kind, what: "size", value: 0 });
        }
        let node = (node != ANY_NODE).then_some(node);
        Ok(Some((Self { size_bytes, pages, node }, whole)))
    }
}

impl Request {
    /// The request at the start of `bytes` and its length; `None` if it is not all there.
    ///
    /// # Errors
    /// What is there is no request.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, ProtocolError> {
        match split(bytes, &[&TAKE, &TAKE_PINNED, &RELEASE])? {
            None => Ok(None),
            Some((kind, body, whole)) if kind == RELEASE.number => {
                Ok(Some((Self::Release(device_to_release(body)), whole)))
            }
            Some((kind, ..)) if kind == TAKE.number => {
                Ok(Take::decode(bytes)?.map(|(take, len)| (Self::Take(take), len)))
            }
            Some(_) => {
                Ok(TakePinned::decode(bytes)?.map(|(take, len)| (Self::TakePinned(take), len)))
            }
        }
    }

    /// As it goes over the wire.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Take(take) => take.encode(),
            Self::TakePinned(take) => take.encode(),
            Self::Release(device) => release(*device),
        }
    }
}

impl Refusal {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 5] =
        [Self::Empty, Self::NoSuchSlot, Self::OverLimit, Self::Failed, Self::NotAllowed];

    /// The name that statistics use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::NoSuchSlot => "no_such_slot",
            Self::OverLimit => "over_limit",
            Self::Failed => "failed",
            Self::NotAllowed => "not_allowed",
        }
    }
}

impl Reply {
    /// As it goes over the wire. A long explanation is cut.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Granted { size_bytes, pages } => {
                let mut body = size_bytes.to_le_bytes().to_vec();
                body.extend([*pages as u8, 0, 0, 0, 0, 0, 0, 0]);
                message(&GRANTED, &body)
            }
            Self::GrantedPinned(grant) => grant.encode(),
            Self::Refused { reason, text } => {
                let cut = text.floor_char_boundary(TEXT_BYTES_MAX);
                let mut body = (*reason as u16).to_le_bytes().to_vec();
                body.extend([0; 2]);
                body.extend(text.as_bytes().iter().take(cut));
                message(&REFUSED, &body)
            }
        }
    }

    /// The reply at the start of `bytes` and its length; `None` if it is not all there.
    ///
    /// # Errors
    /// What is there is no reply.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, ProtocolError> {
        let allowed = [&GRANTED, &REFUSED, &GRANTED_PINNED];
        let Some((kind, body, whole)) = split(bytes, &allowed)? else { return Ok(None) };
        if kind == GRANTED_PINNED.number {
            return Ok(Some((Self::GrantedPinned(PinnedGrant::of_body(kind, body)?), whole)));
        }
        if kind == GRANTED.number {
            let size_bytes = u64::from_le_bytes(field(body, 0));
            let [pages, rest @ ..] = field::<8>(body, 8);
            check_zero(kind, &rest)?;
            let pages = known(&SlotPages::ALL, kind, pages)?;
            return Ok(Some((Self::Granted { size_bytes, pages }, whole)));
        }
        let code = u16::from_le_bytes(field(body, 0));
        check_zero(kind, &field::<2>(body, 2))?;
        let value = u64::from(code);
        let reason = Refusal::ALL.get(usize::from(code)).copied();
        let reason = reason.ok_or(ProtocolError::Value { kind, what: "reason", value })?;
        let text = body.get(4..).unwrap_or_default();
        let text = std::str::from_utf8(text).map_err(|_| ProtocolError::Text)?.to_owned();
        Ok(Some((Self::Refused { reason, text }, whole)))
    }
}

/// Feeds bytes to both decoders; what they understand must be written as it was read, but for what earlier versions ask
/// in vain.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_protocol(data: &[u8]) {
    let mut rest = data;
    while let Ok(Some((request, len))) = Request::decode(rest) {
        let again = request.encode();
        if matches!(request, Request::Release(_)) {
            assert_eq!(Request::decode(&again), Ok(Some((request, len))));
        } else {
            assert_eq!(rest.get(..len), Some(again.as_slice()));
        }
        rest = rest.get(len..).unwrap_or_default();
    }
    while let Ok(Some((reply, len))) = Reply::decode(rest) {
        assert_eq!(rest.get(..len), Some(reply.encode().as_slice()));
        rest = rest.get(len..).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::prelude::*;

    use super::*;
    use crate::frame::MAGIC;

    const TAKE: Take = Take { size_bytes: 1 << 32, pages: PagesWanted::Huge2Mib, node: Some(3) };

    #[test]
    fn a_request_survives_the_wire_and_is_awaited_to_its_last_byte() {
        let bytes = TAKE.encode();
        for len in 0..bytes.len() {
            assert_eq!(Take::decode(&bytes[..len]), Ok(None), "{len} bytes");
        }
        assert_eq!(Take::decode(&bytes), Ok(Some((TAKE, bytes.len()))));
    }

    #[test]
    fn what_is_announced_is_bounded() {
        let mut bytes = TAKE.encode();
        bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(Take::decode(&bytes), Err(ProtocolError::Length { .. })));
        let long = Reply::Refused { reason: Refusal::Empty, text: "ä".repeat(4000) };
        assert!(long.encode().len() <= MESSAGE_BYTES_MAX);
        assert!(Reply::decode(&long.encode()).unwrap().is_some());
    }

    #[test]
    fn nonsense_is_refused() {
        assert_eq!(Take::decode(b"HTTP"), Err(ProtocolError::Magic));
        let reply = Reply::Granted { size_bytes: 1, pages: SlotPages::Small };
        assert_eq!(Take::decode(&reply.encode()), Err(ProtocolError::Kind(GRANTED.number)));
        for (at, value) in [(6, 1), (13, 1), (24, 9), (25, 1)] {
            let mut bytes = TAKE.encode();
            bytes[at] = value;
            assert!(matches!(Take::decode(&bytes), Err(ProtocolError::Value { .. })), "{at}");
        }
        let nothing = Take { size_bytes: 0, ..TAKE };
        assert!(Take::decode(&nothing.encode()).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_harmless(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            with_magic: bool,
        ) {
            let mut all = if with_magic { MAGIC.to_vec() } else { Vec::new() };
            all.extend(bytes);
            fuzz_protocol(&all);
        }

        #[test]
        fn messages_survive_the_wire(size_bytes in 1..u64::MAX, pages in 0..4_usize, node: Option<u16>) {
            let node = node.map(u32::from);
            let take = Take { size_bytes, pages: PagesWanted::ALL[pages], node };
            let bytes = take.encode();
            prop_assert_eq!(Take::decode(&bytes), Ok(Some((take, bytes.len()))));
            let reply = Reply::Granted { size_bytes, pages: SlotPages::ALL[pages] };
            let bytes = reply.encode();
            prop_assert_eq!(Reply::decode(&bytes), Ok(Some((reply, bytes.len()))));
        }
    }
}
