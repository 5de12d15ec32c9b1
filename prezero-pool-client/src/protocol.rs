// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Messages between a VMM and the pool: their form on the wire.
//!
//! Owns encoding and decoding. A decoder says "not all here yet", "wrong", or gives a message; it
//! must never take memory for what has only been announced. Numbers are little-endian.
//!
//! ```text
//!   header   magic "GPZ1" | kind u16 | 0 u16 | length of the body u32 | 0 u32
//!   Take     size u64 | pages u8 | 0 x 3 | node u32 (all ones: any)
//!   Granted  size u64 | pages u8 | 0 x 7          with the memfd as SCM_RIGHTS
//!   Refused  reason u16 | 0 u16 | text, UTF-8
//! ```
//!
//! Memory that is mapped for a device already has messages of its own: see `pinned`.

use thiserror::Error;

use crate::pinned::{PinnedGrant, TakePinned};

const MAGIC: [u8; 4] = *b"GPZ1";
/// What every message begins with.
pub const HEADER_BYTES: usize = 16;
const BODY_BYTES_FIXED: usize = 16;
/// Longest explanation of a refusal; one or two sentences.
const TEXT_BYTES_MAX: usize = 512;
/// Longest message.
pub const MESSAGE_BYTES_MAX: usize = HEADER_BYTES + 4 + TEXT_BYTES_MAX;
pub(crate) const ANY_NODE: u32 = u32::MAX;

const KIND_TAKE: u16 = 1;
const KIND_GRANTED: u16 = 2;
const KIND_REFUSED: u16 = 3;
pub(crate) const KIND_TAKE_PINNED: u16 = 4;
pub(crate) const KIND_GRANTED_PINNED: u16 = 5;

/// The pages that a zone wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PagesWanted {
    /// 4 KiB pages, or huge ones that the kernel may split.
    Small,
    /// The same the other way round.
    Transparent,
    /// Pages of 2 MiB, nothing else.
    Huge2Mib,
    /// Pages of 1 GiB, nothing else.
    Huge1Gib,
}

/// The pages that a slot of the pool consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SlotPages {
    /// 4 KiB.
    Small,
    /// Transparent huge pages.
    Transparent,
    /// hugetlb pages of 2 MiB.
    Huge2Mib,
    /// hugetlb pages of 1 GiB.
    Huge1Gib,
}

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
    /// Memory that a device is ready to reach: three descriptors come with this message.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// For memory.
    Take(Take),
    /// For memory that a device is ready to reach, and the device.
    TakePinned(TakePinned),
}

/// Bytes that are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ProtocolError {
    /// Another protocol, or another version of this one.
    #[error("the message does not begin with GPZ1: this is no pool of this version")]
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
    allowed: &[u16],
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
    if !allowed.contains(&kind) {
        return Err(ProtocolError::Kind(kind));
    }
    let reserved = u16::from_le_bytes(field(bytes, 6));
    let reserved = u64::from(reserved) | u64::from(u32::from_le_bytes(field(bytes, 12)));
    if reserved != 0 {
        return Err(ProtocolError::Value { kind, what: "reserved field", value: reserved });
    }
    let len = usize::try_from(len_bytes).unwrap_or(usize::MAX);
    let fits = match kind {
        KIND_REFUSED => (4..=4 + TEXT_BYTES_MAX).contains(&len),
        KIND_TAKE_PINNED => len == TakePinned::BODY_BYTES,
        KIND_GRANTED_PINNED => PinnedGrant::is_body_length(len),
        _ => len == BODY_BYTES_FIXED,
    };
    if !fits {
        return Err(ProtocolError::Length { kind, len_bytes });
    }
    let whole = HEADER_BYTES + len;
    Ok(bytes.get(HEADER_BYTES..whole).map(|body| (kind, body, whole)))
}

pub(crate) fn message(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES + body.len());
    out.extend(MAGIC);
    out.extend(kind.to_le_bytes());
    out.extend([0; 2]);
    // Bodies are made here, at most MESSAGE_BYTES_MAX long.
    out.extend(u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend([0; 4]);
    out.extend(body);
    out
}

impl PagesWanted {
    pub(crate) const ALL: [Self; 4] =
        [Self::Small, Self::Transparent, Self::Huge2Mib, Self::Huge1Gib];
}

impl SlotPages {
    pub(crate) const ALL: [Self; 4] =
        [Self::Small, Self::Transparent, Self::Huge2Mib, Self::Huge1Gib];

    /// Whether a zone that wants `pages` can live on these.
    pub fn suits(self, pages: PagesWanted) -> bool {
        match pages {
            PagesWanted::Small | PagesWanted::Transparent => {
                matches!(self, Self::Small | Self::Transparent)
            }
            PagesWanted::Huge2Mib => self == Self::Huge2Mib,
            PagesWanted::Huge1Gib => self == Self::Huge1Gib,
        }
    }

    /// Whether it is what the zone likes best.
    pub fn is_preferred(self, pages: PagesWanted) -> bool {
        self as u8 == pages as u8
    }

    /// The name that configuration and statistics use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Small => "4K",
            Self::Transparent => "thp",
            Self::Huge2Mib => "2M",
            Self::Huge1Gib => "1G",
        }
    }
}

pub(crate) fn known<T: Copy>(all: &[T], kind: u16, code: u8) -> Result<T, ProtocolError> {
    let value = u64::from(code);
    let found = all.get(usize::from(code)).copied();
    found.ok_or(ProtocolError::Value { kind, what: "page kind", value })
}

pub(crate) fn check_zero(kind: u16, bytes: &[u8]) -> Result<(), ProtocolError> {
    match bytes.iter().find(|byte| **byte != 0) {
        None => Ok(()),
        Some(byte) => {
            Err(ProtocolError::Value { kind, what: "reserved field", value: u64::from(*byte) })
        }
    }
}

impl Take {
    /// As it goes over the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = self.size_bytes.to_le_bytes().to_vec();
        body.extend([self.pages as u8, 0, 0, 0]);
        body.extend(self.node.unwrap_or(ANY_NODE).to_le_bytes());
        message(KIND_TAKE, &body)
    }

    /// The request at the start of `bytes` and its length; `None` if it is not all there.
    ///
    /// # Errors
    /// What is there is no request.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, ProtocolError> {
        let Some((kind, body, whole)) = split(bytes, &[KIND_TAKE])? else { return Ok(None) };
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
        match split(bytes, &[KIND_TAKE, KIND_TAKE_PINNED])? {
            None => Ok(None),
            Some((KIND_TAKE, ..)) => {
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
                message(KIND_GRANTED, &body)
            }
            Self::GrantedPinned(grant) => grant.encode(),
            Self::Refused { reason, text } => {
                let cut = text.floor_char_boundary(TEXT_BYTES_MAX);
                let mut body = (*reason as u16).to_le_bytes().to_vec();
                body.extend([0; 2]);
                body.extend(text.as_bytes().iter().take(cut));
                message(KIND_REFUSED, &body)
            }
        }
    }

    /// The reply at the start of `bytes` and its length; `None` if it is not all there.
    ///
    /// # Errors
    /// What is there is no reply.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, ProtocolError> {
        let allowed = [KIND_GRANTED, KIND_REFUSED, KIND_GRANTED_PINNED];
        let Some((kind, body, whole)) = split(bytes, &allowed)? else { return Ok(None) };
        if kind == KIND_GRANTED_PINNED {
            return Ok(Some((Self::GrantedPinned(PinnedGrant::of_body(kind, body)?), whole)));
        }
        if kind == KIND_GRANTED {
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

/// Feeds bytes to both decoders; what they understand must be written as it was read.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_protocol(data: &[u8]) {
    let mut rest = data;
    while let Ok(Some((request, len))) = Request::decode(rest) {
        assert_eq!(rest.get(..len), Some(request.encode().as_slice()));
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
        assert_eq!(Take::decode(&reply.encode()), Err(ProtocolError::Kind(KIND_GRANTED)));
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
